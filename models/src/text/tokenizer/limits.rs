//! Limits of tokenizer files: several times the largest published vocabularies. An adversarial file costs only seconds
//! and megabytes.

/// Maximal file size in bytes.
pub(in crate::text) const MAX_FILE_BYTES: u64 = 64 << 20;
/// Maximal number of tokens in a vocabulary.
pub(super) const MAX_TOKENS: usize = 1 << 20;
/// Maximal length of a token in bytes. The time to derive merges grows with its square.
pub(super) const MAX_TOKEN_BYTES: usize = 512;
/// Most added tokens of a vocabulary.
pub(super) const MAX_ADDED_TOKENS: usize = 1 << 16;
/// Maximal size of a normalizer, pre-tokenizer or decoder, in bytes of JSON.
pub(super) const MAX_PART_BYTES: usize = 16 << 10;
/// Largest nesting depth of sequences of such parts.
pub(super) const MAX_PART_DEPTH: usize = 3;

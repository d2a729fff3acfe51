//! Limits of tokenizer files: several times the largest published vocabularies. An adversarial file costs only seconds
//! and megabytes.

/// Largest file that is read, in bytes.
pub(in crate::text) const MAX_FILE_BYTES: u64 = 64 << 20;
/// Largest number of tokens in a vocabulary.
pub(super) const MAX_TOKENS: usize = 1 << 20;
/// Largest length of a token, in bytes; the work of deriving merges grows with its square.
pub(super) const MAX_TOKEN_BYTES: usize = 512;
/// Largest number of added tokens of a vocabulary.
pub(super) const MAX_ADDED_TOKENS: usize = 1 << 16;
/// Largest description of a normalizer, pre-tokenizer or decoder, in bytes of JSON.
pub(super) const MAX_PART_BYTES: usize = 16 << 10;
/// Largest nesting depth of sequences of such parts.
pub(super) const MAX_PART_DEPTH: usize = 3;

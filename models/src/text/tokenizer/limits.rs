//! What a tokenizer file may hold: several times the largest published vocabularies, and little enough that
//! a file made to do harm costs seconds and megabytes only.

/// Largest file that is read, in bytes.
pub(in crate::text) const MAX_FILE_BYTES: u64 = 64 << 20;
/// Most tokens of a vocabulary.
pub(super) const MAX_TOKENS: usize = 1 << 20;
/// Longest token, in bytes; the work of deriving merges grows with the square.
pub(super) const MAX_TOKEN_BYTES: usize = 512;
/// Most tokens that are added to a vocabulary.
pub(super) const MAX_ADDED_TOKENS: usize = 1 << 16;
/// Longest description of a normalizer, pre-tokenizer or decoder, in bytes of JSON.
pub(super) const MAX_PART_BYTES: usize = 16 << 10;
/// How deep sequences of such parts may stand in each other.
pub(super) const MAX_PART_DEPTH: usize = 3;

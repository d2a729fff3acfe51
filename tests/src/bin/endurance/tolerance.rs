//! Bounds on the growth of a run that counts as flat.

/// Growth of a rank's resident memory between two parts of a run, as a share. Allocators return pages late, so single
/// samples vary by a few percent on a loaded machine. A leak of one gradient bucket (a fifth of this model's memory) in
/// every ten steps exceeds this share within the shortest soak.
pub(crate) const RSS_SHARE: f64 = 0.10;
/// Absolute growth allowed for memory that does not depend on the model: code pages and file buffers first used late.
pub(crate) const RSS_SLACK_BYTES: u64 = 8 << 20;
/// Growth of all checkpoints together per logged step. `trainer_state.json` has a row of about 170 bytes per step, and
/// up to three checkpoints exist at once. One file too many would be megabytes.
pub(crate) const SAVED_BYTES_PER_STEP: u64 = 3 * 512;

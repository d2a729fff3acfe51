//! How much a run may grow and count as flat.

/// Resident memory of a rank, late against early: share. Allocators return pages late, so that single samples move by a
/// few percent on a loaded machine; a leak of one gradient bucket (a fifth of this model's memory) in every ten steps
/// passes it within the shortest soak.
pub(crate) const RSS_SHARE: f64 = 0.10;
/// The same, absolute, for what does not depend on the model: pages of code and buffers of files that are touched late.
pub(crate) const RSS_SLACK_BYTES: u64 = 8 << 20;
/// What all checkpoints together may grow by with each logged step: `trainer_state.json` has a row of about 170 bytes for
/// each, and three checkpoints lie there at once for a moment. A file too many would be megabytes.
pub(crate) const SAVED_BYTES_PER_STEP: u64 = 3 * 512;

//! How far a right answer may lie from the stored one, in f32.
//!
//! Two independent right implementations of MiniCPM-V (different summation orders, exponentials and
//! fused products) were measured against each other: features 2e-6, hidden states and logits 4e-6,
//! losses 5e-7, gradients 1.5e-5 of their norm. The bounds below leave a factor of about eight for
//! other processors and blockings; the smallest slip in the mathematics (a GELU of the wrong kind)
//! moves logits by 4e-4.

/// Features, embeddings, hidden states and logits: absolute.
pub const ACTIVATION: f64 = 3e-5;
/// Features of GLM's pictures: absolute. Two right implementations differ by 3e-6; the smallest slip tried (another epsilon
/// in the tower) moves them by 6e-5.
pub const GLM_FEATURES: f64 = 1e-5;
/// Rows of EVA's tower, which no norm bounds: share of the largest entry. The packs' reach 10; four times what summing in
/// another order moved them by.
pub const TOWER_OF_LARGEST: f64 = 1e-5;
/// Normalised pixels: equal, since the operations and their order are.
pub const PIXEL: f64 = 0.0;
/// A mean loss: absolute.
pub const LOSS: f64 = 5e-6;
/// A gradient tensor: share of its own largest entry.
pub const GRADIENT_OF_OWN: f64 = 1e-4;
/// A gradient tensor: share of the largest gradient entry of the whole model, which lets pass what
/// is zero up to rounding (key biases, whose effect the softmax cancels).
pub const GRADIENT_OF_MODEL: f64 = 1e-6;
/// Losses along a trajectory of optimizer steps: absolute. Adam divides by the root of squares and
/// so passes relative errors of small gradients on in full.
pub const TRAJECTORY: f64 = 5e-5;
/// As [`TRAJECTORY`] for packs stored in bf16 with wider layers (`model_type` minicpmo).
pub const TRAJECTORY_OMNI: f64 = 2e-4;
/// Losses along the 200-step trajectory on another processor than the committed one: share of the first loss. Chosen, not
/// measured, for lack of such a processor: rounding differences of 1e-7 grow along a trajectory, and a slip in the
/// mathematics moves losses by more than this within the first steps.
pub const DRIFT_RELATIVE: f64 = 1e-2;
/// Gradient norms along a trajectory: share of the largest. The norm sums squares of all entries, so single entries' errors
/// average out; what remains is the growth of loss differences along the steps.
pub const GRAD_NORM: f64 = 1e-4;
/// An adapter tensor after training: relative L2 distance.
pub const ADAPTER_L2: f64 = 1e-3;

/// How far a plan may lie from the kernel's figures: this share of them, and below [`MEMORY_SMALL_BYTES`] also
/// [`MEMORY_SLACK_BYTES`], since code pages, stacks and the allocator's heaps do not grow with the model.
pub const MEMORY_SHARE: f64 = 0.05;
/// Runs above this are judged by the share alone.
pub const MEMORY_SMALL_BYTES: u64 = 1 << 30;
/// What small runs may be off beside the share.
pub const MEMORY_SLACK_BYTES: u64 = 64 << 20;

/// Whether a plan of `planned` bytes is true of `measured` bytes.
#[must_use]
pub fn memory(planned: u64, measured: u64) -> bool {
    let slack = if measured > MEMORY_SMALL_BYTES {
        0
    } else {
        MEMORY_SLACK_BYTES
    };
    let allowed = (measured as f64 * MEMORY_SHARE) as u64 + slack;
    planned.abs_diff(measured) <= allowed
}

/// The bound for losses along a trajectory of GLM, whose packs store by how much rounding alone moved theirs.
#[must_use]
pub fn glm_trajectory(rounding: f64) -> f64 {
    (5.0 * rounding).max(2e-5)
}

/// The bound for entries of a gradient whose largest entry is `own`, in a model whose largest
/// gradient entry is `model`.
#[must_use]
pub fn gradient(own: f64, model: f64) -> f64 {
    GRADIENT_OF_OWN * own + GRADIENT_OF_MODEL * model
}

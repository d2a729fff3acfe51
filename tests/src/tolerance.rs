//! How far a right answer may lie from the stored one: in f32 by the constants below, in 16 bits as derived behind them.
//!
//! Two independent right implementations of MiniCPM-V (different summation orders, exponentials and
//! fused products) were measured against each other: features 2e-6, hidden states and logits 4e-6,
//! losses 5e-7, gradients 1.5e-5 of their norm. The bounds below leave a factor of about eight for
//! other processors and blockings; the smallest slip in the mathematics (a GELU of the wrong kind)
//! moves logits by 4e-4.

use kernels::DType;
use optim::Precision;
use optim::rng::RandomStream;

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

// In 16 bits a quantity may lie as far from the stored one as its roundings move it. How far that is depends on the model
// (a softmax over large scores passes on much more than its scores' error), so it is measured, and not by the code that
// is judged: the same quantity in f32 on the CPU, with each weight moved at random by what a rounding moves it by.
//
// A pass rounds pixels, every weight and the result of every operation. These errors are independent, so that their squares
// add up: n roundings that lie behind each other, of which w are of weights, act as the w of weights alone with errors
// larger by the root of n / w.

/// Times that weights are moved.
pub const DRAWS: u64 = 8;
/// Root mean square distances that a right result may be off by. A single number, as a loss is, has an error that is normal,
/// and [`DRAWS`] know its deviation within a factor of two in 98 of 100 cases: twice two deviations.
pub const COVER: f64 = 4.0;

/// Half an ulp of 1.
#[must_use]
pub fn unit_roundoff(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 1.0 / 256.0,
        DType::F16 => 1.0 / 2048.0,
        _ => 1.0 / f64::from(1 << 24),
    }
}

/// What a forward pass rounds where it is in 16 bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Roundings {
    /// Results of operations, pixels among them.
    pub results: usize,
    /// Weights, each once.
    pub weights: usize,
}

impl Roundings {
    /// The share of itself that moving each weight by acts as all roundings of a forward and backward pass do: backward rounds
    /// as many results, and what it reads of the forward pass has its errors. In `pure-bf16` each of `updates` rounds the
    /// weights again, stochastically: its variance is at most three times that of rounding to the nearest (a quarter of the
    /// spacing's square instead of a twelfth).
    #[must_use]
    pub fn shake(self, precision: Precision, updates: usize) -> f64 {
        let roundings = self.of_weights(precision, updates) + self.of_results();
        let root = (roundings / self.weights.max(1) as f64).sqrt();
        unit_roundoff(precision.weight_dtype()) * root
    }

    /// Times by which two devices may be farther apart than one of them is from what it would be without rounding: both
    /// round the stored weights alike, and each rounds everything else for itself, since a sum in another order, by however
    /// little it differs, is rounded to another number now and then, and behind a few layers of such nearly all are.
    #[must_use]
    pub fn between_devices(self, precision: Precision, updates: usize) -> f64 {
        let all = self.of_weights(precision, updates) + self.of_results();
        (2.0 * (1.0 - self.weights as f64 / all)).sqrt()
    }

    fn of_weights(self, precision: Precision, updates: usize) -> f64 {
        let updates = match precision {
            Precision::PureBf16 => 3.0 * updates as f64,
            _ => 0.0,
        };
        self.weights as f64 * (1.0 + updates)
    }

    fn of_results(self) -> f64 {
        2.0 * self.results as f64
    }
}

/// A move of all weights, each by a share of itself drawn evenly from below `most` to either side, as a rounding does.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Shake {
    /// The largest share.
    pub most: f64,
    /// Which draw.
    pub draw: u64,
}

impl Shake {
    /// The draws by shares up to `most`.
    pub fn all(most: f64) -> impl Iterator<Item = Self> {
        (0..DRAWS).map(move |draw| Self { most, draw })
    }

    /// Moves the elements of the parameter `param` from `first` on.
    pub fn apply(self, param: &str, first: usize, values: &mut [f32]) {
        let stream = RandomStream::new(self.draw, param);
        for (at, value) in values.iter_mut().enumerate() {
            let share = 2.0 * stream.uniform((first + at) as u64) - 1.0;
            *value *= (1.0 + self.most * f64::from(share)) as f32;
        }
    }
}

/// What rounding to `dtype` leaves of a gradient that the mathematics cancel (a key's bias: the softmax does not see it) and
/// that moved weights therefore do not show: per entry, in a model whose largest gradient entry is `model`. One rounding of
/// what is cancelled, which is as large beside the model's gradients as it is in f32.
#[must_use]
pub fn cancelled_gradient(dtype: DType, model: f64) -> f64 {
    let rounding = unit_roundoff(dtype) / 3f64.sqrt();
    COVER * rounding * GRADIENT_OF_MODEL / GRADIENT_OF_OWN * model
}

/// Length of a key's bias behind so many `updates` by `lr`, beside what moved weights show: Adam makes whole steps of what
/// [`cancelled_gradient`] leaves, of random signs; the length takes the part of that walk which lies along the bias.
#[must_use]
pub fn cancelled_walk(lr: f64, updates: usize) -> f64 {
    lr * (updates as f64).sqrt()
}

/// Tolerance of a quantity that moved weights brought off by `distances`.
#[must_use]
pub fn covering(distances: impl ExactSizeIterator<Item = f64>) -> f64 {
    let draws = distances.len() as f64;
    COVER * (distances.map(|d| d.powi(2)).sum::<f64>() / draws).sqrt()
}

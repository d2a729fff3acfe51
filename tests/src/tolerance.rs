//! Tolerances of this package: constants for f32, derived values for 16 bits.
//!
//! Two independent correct implementations of MiniCPM-V (different summation orders, exponentials and fused products)
//! were compared. Features differed by 2e-6, hidden states and logits by 4e-6, losses by 5e-7, gradients by 1.5e-5 of
//! their norm. The constants leave a factor of about eight for other processors and tilings. The smallest mathematical
//! error tried (a GELU of the wrong kind) moves logits by 4e-4.

use kernels::DType;
use optim::Precision;
use optim::rng::RandomStream;

/// Features, embeddings, hidden states and logits: absolute, if their entries are at most 3.
pub const ACTIVATION: f64 = 3e-5;
/// As [`ACTIVATION`] for larger entries: share of the largest entry, since rounding errors grow with the summed terms.
/// It is four times the change of EVA's tower, whose entries reach 10, with another summation order. Hidden states that
/// reach 9 differ by 3e-5 between correct implementations; another epsilon in the tower moves them by 2e-4.
pub const ACTIVATION_OF_LARGEST: f64 = 1e-5;
/// Features of GLM's images: absolute. Two correct implementations differ by 3e-6. The smallest error tried (another
/// epsilon in the tower) moves them by 6e-5.
pub const GLM_FEATURES: f64 = 1e-5;
/// Normalized pixels: equal, since operations and their order are the same.
pub const PIXEL: f64 = 0.0;
/// Normalized pixels of a video: the reference subtracts the mean from the byte before it divides, with another rounding.
pub const VIDEO_PIXEL: f64 = 5e-7;
/// A mean loss: absolute.
pub const LOSS: f64 = 5e-6;
/// A gradient tensor: share of its own largest entry.
pub const GRADIENT_OF_OWN: f64 = 1e-4;
/// A gradient tensor: share of the largest gradient entry of the whole model. It covers gradients that are zero up to
/// rounding, such as those of key biases, whose effect the softmax cancels.
pub const GRADIENT_OF_MODEL: f64 = 1e-6;
/// Losses along a trajectory of optimizer steps: absolute. Adam divides by the root of the second moment, so relative
/// errors of small gradients pass in full.
pub const TRAJECTORY: f64 = 5e-5;
/// As [`TRAJECTORY`] for packs stored in bf16 with wider layers (`model_type` minicpmo).
pub const TRAJECTORY_OMNI: f64 = 2e-4;
/// Losses along the 200-step trajectory on another processor than the committed one: share of the first loss. The value
/// is chosen, not measured, for lack of such a processor. Rounding differences of 1e-7 grow along a trajectory. A
/// mathematical error moves losses by more than this within the first steps.
pub const DRIFT_RELATIVE: f64 = 1e-2;
/// Gradient norms along a trajectory: share of the largest. The norm sums squares of all entries, so errors of single
/// entries average out. The growth of loss differences along the steps remains.
/// A pack that states a larger effect of rounding on its losses widens this bound in proportion.
pub const GRAD_NORM: f64 = 1e-4;
/// An adapter tensor after training: relative L2 distance.
pub const ADAPTER_L2: f64 = 1e-3;

/// Weights after steps with 8-bit moments: absolute. The reference in f32 and the same rule in f64 differ by 1e-7
/// without a change of code; another order of operations stays within ten times as much.
pub const EIGHT_BIT_WEIGHT: f64 = 1e-6;
/// As [`EIGHT_BIT_WEIGHT`] after 50 steps: absolute, or this share of the element's own move. Steps become long where
/// the second moment was flushed to 0, and multiply a difference of one code.
pub const EIGHT_BIT_WEIGHT_LATE: (f64, f64) = (1e-5, 1e-3);
/// Share of codes that may be off by one after one step and after many: values within rounding of a threshold.
pub const EIGHT_BIT_CODES: (f64, f64) = (1e-3, 5e-3);
/// Largest magnitudes of blocks: relative. Two roundings more or less make 2e-7.
pub const EIGHT_BIT_ABSMAX: f64 = 1e-6;
/// As [`EIGHT_BIT_ABSMAX`] after many steps, where one code's difference moves a moment by up to its spacing, 1/64 of
/// the largest, times the share that decay leaves of it.
pub const EIGHT_BIT_ABSMAX_LATE: f64 = 1e-2;

/// Largest difference between planned and measured memory, as a share of the measured bytes. Below
/// [`MEMORY_SMALL_BYTES`], [`MEMORY_SLACK_BYTES`] are added: code pages, stacks and heaps do not grow with the model.
pub const MEMORY_SHARE: f64 = 0.05;
/// Runs above this size are judged by the share alone.
pub const MEMORY_SMALL_BYTES: u64 = 1 << 30;
/// Absolute slack of small runs beside the share.
pub const MEMORY_SLACK_BYTES: u64 = 64 << 20;

/// Measured bytes of each part of memory in a report, in percent of the planned ones. A plan is made for the longest
/// samples, which a short run may not meet. Two moments of a step may need nearly the same bytes in total, of other
/// kinds: in the suites' tiny model one bucket of gradients, 18 % of its part, is in the planned peak alone.
pub const MEMORY_PARTS_PERCENT: std::ops::RangeInclusive<u32> = 75..=105;

/// Whether a plan of `planned` bytes is close enough to `measured` bytes.
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

/// Tolerance of activations whose expected values are `want`.
#[must_use]
pub fn activation(want: &[f32]) -> f64 {
    let largest = want.iter().fold(0f32, |m, v| m.max(v.abs()));
    ACTIVATION.max(ACTIVATION_OF_LARGEST * f64::from(largest))
}

/// Tolerance of losses along a trajectory of GLM, whose packs store the effect of rounding on theirs.
#[must_use]
pub fn glm_trajectory(rounding: f64) -> f64 {
    (5.0 * rounding).max(2e-5)
}

/// Tolerance of a gradient's entries. `own` is its largest entry, `model` the largest gradient entry of the model.
#[must_use]
pub fn gradient(own: f64, model: f64) -> f64 {
    GRADIENT_OF_OWN * own + GRADIENT_OF_MODEL * model
}

// Derivation of the tolerances in 16 bits. A quantity may differ from the stored one by as much as its roundings move
// it. That depends on the model: a softmax over large scores amplifies their errors. So it is measured, with other code
// than the judged one: the same quantity in f32 on the CPU, with each weight moved at random by the size of a rounding.
//
// A pass rounds pixels, every weight and the result of every operation. These errors are independent, so their squares
// add up. Of n successive roundings, w round weights. Their sum acts like roundings of the w weights alone with errors
// larger by sqrt(n / w).

/// Number of random perturbations.
pub const DRAWS: u64 = 8;
/// Factor on the root mean square of the measured distances. The error of a single number, such as a loss, is normally
/// distributed. [`DRAWS`] estimate its deviation within a factor of two in 98 of 100 cases, so the bound is twice two
/// deviations.
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

/// Number of roundings in a forward pass in 16 bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Roundings {
    /// Results of operations, pixels included.
    pub results: usize,
    /// Weights, each counted once.
    pub weights: usize,
}

impl Roundings {
    /// Relative perturbation of each weight with the effect of all roundings of a forward and a backward pass. Backward
    /// rounds as many results as forward and inherits its errors. In `pure-bf16` each of `updates` rounds the weights
    /// again, stochastically. That variance is at most three times the one of rounding to the nearest (a quarter of the
    /// squared spacing instead of a twelfth).
    #[must_use]
    pub fn shake(self, precision: Precision, updates: usize) -> f64 {
        let roundings = self.of_weights(precision, updates) + self.of_results();
        let root = (roundings / self.weights.max(1) as f64).sqrt();
        unit_roundoff(precision.weight_dtype()) * root
    }

    /// Ratio of the distance between two devices to the distance of one device from exact results. Both round the
    /// stored weights alike and everything else independently. Sums in another order sometimes round to another number,
    /// and after a few layers nearly all results differ.
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

/// Perturbation of all weights, each by a relative amount drawn uniformly from `-most..most`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Shake {
    /// Largest relative amount.
    pub most: f64,
    /// Number of the draw.
    pub draw: u64,
}

impl Shake {
    /// All draws with relative amounts up to `most`.
    pub fn all(most: f64) -> impl Iterator<Item = Self> {
        (0..DRAWS).map(move |draw| Self { most, draw })
    }

    /// Perturbs elements of the parameter `param`, beginning with element `first`.
    pub fn apply(self, param: &str, first: usize, values: &mut [f32]) {
        let stream = RandomStream::new(self.draw, param);
        for (at, value) in values.iter_mut().enumerate() {
            let share = 2.0 * stream.uniform((first + at) as u64) - 1.0;
            *value *= (1.0 + self.most * f64::from(share)) as f32;
        }
    }
}

/// Rounding error of a gradient that is mathematically zero, per entry. An example is the bias of keys, which the
/// softmax cancels, so perturbed weights do not show it. It is one rounding of the terms that cancel. These have the
/// size of the model's largest gradient entry, `model`.
#[must_use]
pub fn cancelled_gradient(dtype: DType, model: f64) -> f64 {
    let rounding = unit_roundoff(dtype) / 3f64.sqrt();
    COVER * rounding * GRADIENT_OF_MODEL / GRADIENT_OF_OWN * model
}

/// Length of a key bias after `updates` by `lr`, in addition to the effect of perturbed weights. Adam makes full steps
/// of random sign from the error of [`cancelled_gradient`]. The length changes by the component of that walk along the
/// bias.
#[must_use]
pub fn cancelled_walk(lr: f64, updates: usize) -> f64 {
    lr * (updates as f64).sqrt()
}

/// Tolerance of a quantity that perturbed weights moved by `distances`.
#[must_use]
pub fn covering(distances: impl ExactSizeIterator<Item = f64>) -> f64 {
    let draws = distances.len() as f64;
    COVER * (distances.map(|d| d.powi(2)).sum::<f64>() / draws).sqrt()
}

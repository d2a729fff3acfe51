//! One `AdamW` step over a window of elements, bit-equal to the update rule of the CPU.

use bytemuck::{Pod, Zeroable};

use crate::DType;
use crate::cuda::launch::{Address, Arg, Launch};
use crate::cuda::module::{Family, Module, element_type};

const THREADS: u32 = 256;
/// Elements a thread handles at a time.
const WIDTH: u64 = 8;
/// Blocks of the grid at most: enough for several waves of any GPU.
const MAX_BLOCKS: u64 = 132 * 12;
/// What a vector access is aligned to.
const VECTOR_BYTES: u64 = 16;

/// The constants of one step and parameter group, in device memory, so that a captured launch can be replayed with
/// others. `optim::AdamW::scalars` makes them with the code of the CPU's update.
///
/// The factor on every gradient is `grad_scale * clip.factor` (one f32 product): with a `grad_scale` of 1 it is the
/// factor that the norm kernel wrote, without a [`Clip`](super::grad_norm::Clip) it is `grad_scale`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Debug, Pod, Zeroable)]
pub struct Scalars {
    /// Factor on every gradient, beside the clip block's.
    pub grad_scale: f32,
    /// `1 - beta1`.
    pub one_minus_beta1: f32,
    /// `beta2`.
    pub beta2: f32,
    /// `1 - beta2`.
    pub one_minus_beta2: f32,
    /// Added to the root of the second moment: `eps * sqrt(1 - beta2^step)`.
    pub eps: f32,
    /// `lr * sqrt(1 - beta2^step) / (1 - beta1^step)`.
    pub step_size: f32,
    /// `1 - lr * weight_decay`.
    pub decay: f32,
    /// Key of the rounding stream.
    pub key: [u32; 2],
    /// Number of the update, counted from 1, low word first.
    pub step: [u32; 2],
}

/// How weights and moments are stored.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Form {
    /// `f32` weights and moments.
    F32,
    /// `f32` master weights and moments; the `bf16` copy is written.
    MasterBf16,
    /// `f32` master weights and moments; the `f16` copy is written.
    MasterF16,
    /// `bf16` weights with stochastic rounding, `f32` moments.
    Bf16,
    /// `bf16` weights and moments with stochastic rounding.
    PureBf16,
}

impl Form {
    /// Every form, by the number of its define.
    pub const ALL: [Self; 5] = [
        Self::F32,
        Self::MasterBf16,
        Self::MasterF16,
        Self::Bf16,
        Self::PureBf16,
    ];

    /// Dtype of the weights that are updated.
    #[must_use]
    pub const fn weight(self) -> DType {
        match self {
            Self::F32 | Self::MasterBf16 | Self::MasterF16 => DType::F32,
            Self::Bf16 | Self::PureBf16 => DType::BF16,
        }
    }

    /// Dtype of the copy beside master weights.
    #[must_use]
    pub const fn copy(self) -> Option<DType> {
        match self {
            Self::MasterBf16 => Some(DType::BF16),
            Self::MasterF16 => Some(DType::F16),
            _ => None,
        }
    }

    /// Dtype of the moments.
    #[must_use]
    pub const fn moment(self) -> DType {
        match self {
            Self::PureBf16 => DType::BF16,
            _ => DType::F32,
        }
    }

    /// Bytes read and written per element, the gradient included.
    #[must_use]
    pub fn bytes(self, grad: DType) -> usize {
        let written = self.copy().map_or(0, DType::size_bytes);
        grad.size_bytes()
            + 2 * self.weight().size_bytes()
            + 4 * self.moment().size_bytes()
            + written
    }
}

/// What a step reads and writes: windows of `n` elements, each aligned to its elements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Window {
    /// How the rest is stored.
    pub form: Form,
    /// Dtype of the gradient.
    pub grad_dtype: DType,
    /// The unscaled gradient.
    pub grad: Address,
    /// Weights or master weights, updated.
    pub weight: Address,
    /// The 16-bit copy, written; null where the form has none.
    pub copy: Address,
    /// First moment, updated.
    pub exp_avg: Address,
    /// Second moment, updated.
    pub exp_avg_sq: Address,
    /// Elements.
    pub n: u64,
    /// Global index of the window's first element: its position in the rounding stream.
    pub first_element: u64,
}

impl Window {
    /// Elements in front of the first one at which all windows are aligned to vectors; all of them when there is none.
    fn head(&self) -> u64 {
        let mut windows = vec![
            (self.grad, self.grad_dtype),
            (self.weight, self.form.weight()),
            (self.exp_avg, self.form.moment()),
            (self.exp_avg_sq, self.form.moment()),
        ];
        windows.extend(self.form.copy().map(|dtype| (self.copy, dtype)));
        let aligned = |head: u64| {
            windows.iter().all(|(Address(address), dtype)| {
                (address + head * dtype.size_bytes() as u64).is_multiple_of(VECTOR_BYTES)
            })
        };
        (0..WIDTH)
            .find(|head| aligned(*head))
            .map_or(self.n, |head| head.min(self.n))
    }
}

fn module(form: Form, grad: DType) -> Option<Module> {
    let defines = [("FORM", form as u32), ("GRAD", element_type(grad)?)];
    Some(Module::new(Family::AdamW, defines, &["adamw"]))
}

/// Every form with every dtype of the gradient.
#[must_use]
pub fn modules() -> Vec<Module> {
    let grads = [DType::F32, DType::BF16, DType::F16];
    let pairs = Form::ALL
        .into_iter()
        .flat_map(|form| grads.map(|grad| (form, grad)));
    pairs
        .filter_map(|(form, grad)| module(form, grad))
        .collect()
}

/// One step: reads [`Scalars`] and, unless null, a [`Clip`](super::grad_norm::Clip) from the device; nothing is
/// written when the clip block says so. Moves [`Form::bytes`] per element. `None` when the gradient is no float.
#[must_use]
pub fn launch(window: &Window, scalars: Address, clip: Address) -> Option<Launch> {
    let head = window.head();
    Some(Launch {
        module: module(window.form, window.grad_dtype)?,
        kernel: "adamw",
        grid: [blocks(window.n), 1, 1],
        threads: THREADS,
        shared_bytes: 0,
        args: vec![
            Arg::Address(window.grad),
            Arg::Address(window.weight),
            Arg::Address(window.copy),
            Arg::Address(window.exp_avg),
            Arg::Address(window.exp_avg_sq),
            Arg::Address(scalars),
            Arg::Address(clip),
            Arg::U64(window.n),
            Arg::U64(window.first_element),
            Arg::U64(head),
        ],
    })
}

fn blocks(n: u64) -> u32 {
    let rounds = n.div_ceil(WIDTH * u64::from(THREADS));
    rounds.clamp(1, MAX_BLOCKS) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window(offsets: [u64; 4]) -> Window {
        let [grad, weight, copy, moments] = offsets.map(|offset| Address(4096 + offset));
        Window {
            form: Form::MasterBf16,
            grad_dtype: DType::BF16,
            grad,
            weight,
            copy,
            exp_avg: moments,
            exp_avg_sq: moments,
            n: 100,
            first_element: 0,
        }
    }

    #[test]
    fn the_head_ends_where_all_windows_are_aligned() {
        assert_eq!(window([0, 0, 0, 0]).head(), 0);
        // Three elements behind a boundary: five to go. f32 is aligned every four elements.
        assert_eq!(window([6, 12, 6, 12]).head(), 5);
        assert_eq!(window([6, 28, 6, 12]).head(), 5);
        // The copy starts elsewhere.
        assert_eq!(window([6, 12, 0, 12]).head(), 100);
    }

    #[test]
    fn bytes_per_parameter_are_the_known_ones() {
        let bytes = Form::ALL.map(|form| form.bytes(DType::BF16));
        assert_eq!(bytes, [26, 28, 28, 22, 14]);
    }
}

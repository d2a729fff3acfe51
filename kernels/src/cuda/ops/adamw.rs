//! `AdamW` step over a chunk of elements, with the bits of the CPU's update.

use super::flat::{THREADS, blocks, head};
use crate::DType;
use crate::cuda::launch::{Address, Arg, Launch};
use crate::cuda::module::{Family, Module, element_type};

pub use crate::resident::{Form, Scalars};

/// Maximum blocks of the grid: enough for several waves on any GPU.
const MAX_BLOCKS: u64 = 132 * 12;
/// Maps of both 8-bit moments in shared memory: 256 f32 each.
const MAP_BYTES: u32 = 2 * 256 * 4;

/// Operands of one `AdamW` step on a chunk of `n` elements: device addresses of arrays, each aligned to its
/// element size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AdamWChunk {
    /// Dtypes of weights and moments, and whether `weight` is a master weight.
    pub form: Form,
    /// Dtype of the gradient.
    pub grad_dtype: DType,
    /// Gradient of the chunk's weights, before scaling and clipping.
    pub grad: Address,
    /// Weights, or f32 master weights if the form has them. Updated in place.
    pub weight: Address,
    /// 16-bit copy of the master weights, which the step writes. Null if the form has none.
    pub copy: Address,
    /// First moment of `AdamW` (running mean of gradients), updated in place.
    pub exp_avg: Address,
    /// Second moment of `AdamW` (running mean of squared gradients), updated in place.
    pub exp_avg_sq: Address,
    /// Absmax of both moments, one per block, updated in place. Null unless the form has moments of 8 bits.
    pub absmax: [Address; 2],
    /// Number of elements of each array.
    pub n: u64,
    /// Global index of the chunk's first element in the model. It selects the random numbers of stochastic
    /// rounding.
    pub first_element: u64,
}

impl AdamWChunk {
    /// Number of elements before the first index at which all arrays are aligned to vectors. All elements if no such
    /// index exists.
    fn head(&self) -> u64 {
        let mut operands = vec![
            (self.grad, self.grad_dtype),
            (self.weight, self.form.weight()),
            (self.exp_avg, self.form.moment_dtype()),
            (self.exp_avg_sq, self.form.moment_dtype()),
        ];
        operands.extend(self.form.copy().map(|dtype| (self.copy, dtype)));
        head(&operands, self.n)
    }
}

fn module(form: Form, grad: DType) -> Option<Module> {
    let defines = [("FORM", form as u32), ("GRAD", element_type(grad)?)];
    let kernels: &[&str] = match form.moment_dtype() {
        DType::U8 => &["adamw_blocks"],
        _ => &["adamw"],
    };
    Some(Module::new(Family::AdamW, defines, kernels))
}

/// Kernel modules of the `AdamW` step: one for every form with every dtype of the gradient.
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

/// Launch of one `AdamW` step on `chunk`. It reads [`Scalars`] at `scalars` and, unless null, a
/// [`Clip`](super::grad_norm::Clip) at `clip`, both in device memory. It writes nothing if the clip block
/// says to skip. Moves [`Form::bytes`] bytes per element. `None` when the gradient is not a float.
#[must_use]
pub fn launch(chunk: &AdamWChunk, scalars: Address, clip: Address) -> Option<Launch> {
    let module = module(chunk.form, chunk.grad_dtype)?;
    let before = [
        chunk.grad,
        chunk.weight,
        chunk.copy,
        chunk.exp_avg,
        chunk.exp_avg_sq,
    ];
    let (absmax, own, grid, shared_bytes) = match chunk.form.moment_dtype() {
        DType::U8 => {
            let warps = chunk.n.div_ceil(Form::BLOCK_ELEMS as u64);
            let grid = warps.div_ceil(u64::from(THREADS / 32));
            (
                &chunk.absmax[..],
                None,
                grid.clamp(1, MAX_BLOCKS) as u32,
                MAP_BYTES,
            )
        }
        _ => (&[][..], Some(chunk.head()), blocks(chunk.n, MAX_BLOCKS), 0),
    };
    let addresses = before.iter().chain(absmax).chain([&scalars, &clip]);
    let numbers = [Some(chunk.n), Some(chunk.first_element), own];
    Some(Launch {
        kernel: module.kernels()[0],
        module,
        grid: [grid, 1, 1],
        threads: THREADS,
        shared_bytes,
        args: addresses
            .map(|address| Arg::Address(*address))
            .chain(numbers.into_iter().flatten().map(Arg::U64))
            .collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(offsets: [u64; 4]) -> AdamWChunk {
        let [grad, weight, copy, moments] = offsets.map(|offset| Address(4096 + offset));
        AdamWChunk {
            form: Form::MasterBf16,
            grad_dtype: DType::BF16,
            grad,
            weight,
            copy,
            exp_avg: moments,
            exp_avg_sq: moments,
            absmax: [Address::NULL; 2],
            n: 100,
            first_element: 0,
        }
    }

    #[test]
    fn the_scalar_head_ends_where_all_buffers_are_aligned() {
        assert_eq!(chunk([0, 0, 0, 0]).head(), 0);
        // Three elements after a boundary: five more until the next. f32 is aligned every four elements.
        assert_eq!(chunk([6, 12, 6, 12]).head(), 5);
        assert_eq!(chunk([6, 28, 6, 12]).head(), 5);
        // The copy has another alignment.
        assert_eq!(chunk([6, 12, 0, 12]).head(), 100);
    }

    #[test]
    fn bytes_per_parameter_of_every_form_are_exact() {
        let bytes = Form::ALL.map(|form| form.bytes(DType::BF16));
        assert_eq!(bytes, [26, 28, 28, 22, 14, 14, 16, 16, 10]);
    }
}

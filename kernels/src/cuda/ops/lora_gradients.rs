//! One pass over `dy` for both `ds = scale * dy B` and `dB = dy^T s`.
//!
//! A block sums over a slice of 512 columns and a range of rows. Two small launches add the slices of `ds` and the
//! ranges of `dB`. For 8192 tokens, 4096 features and rank 16 this moves 67 MB of `dy` and 17 MB of partial sums
//! (written and read), instead of 134 MB. With rank 64 it moves 67 MB of each, and large caches hold the partial
//! sums. With larger ranks the partial sums would be larger than `dy`, so these use two products.
//!
//! Rows of one expert are read and written in place, without gathering ([`LoraGradients::rows`]).

use super::product::{Product, int};
use super::workspace::Workspace;
use crate::DType;
use crate::cuda::launch::{Address, Arg, Launch};
use crate::cuda::module::{Family, Module, element_type};

/// Sizes that must equal those in the CUDA source.
const SLICE: usize = 512;
const ROWS: usize = 16;
const WARPS: usize = 8;
/// Number of blocks that keeps every multiprocessor of an H100 busy. It decides the order of a sum, so it is equal on
/// all GPUs; others lose 5 to 10 % of this pass.
const BLOCKS: usize = 128;

/// Ranks (padded) that a kernel module exists for.
const RANKS: [usize; 3] = [16, 32, 64];

/// Operands and results of the pass over `dy` that computes `ds = scale * dy B` and `dB = dy^T s` of a LoRA
/// adapter. Addresses of `dy` and `s` are aligned to 16 bytes.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LoraGradients {
    /// Dtype of `dy`, `s`, `ds` and `lora_b`: bf16 or f16.
    pub dtype: DType,
    /// Number of tokens (rows) to process: all of them, or the entries in `rows`.
    pub t: usize,
    /// Number of output features, a multiple of 8.
    pub n: usize,
    /// Rank of the adapter, at most 64.
    pub r: usize,
    /// Number of columns of `s` and `ds`: the rank padded with zeros to a multiple of 16.
    pub padded_rank: usize,
    /// Leading dimension of `s` and `ds`: elements from the start of one row to the next, a multiple of 8.
    pub line: usize,
    /// Numbers of the rows of `dy`, `s` and `ds` to use, i32 `[t]`. [`Address::NULL`] for the first `t` rows.
    pub rows: Address,
    /// Gradient of the layer's output, `[t, n]`.
    pub dy: Address,
    /// Outputs of the adapter's matrix A from the forward, `[t, padded_rank]` with leading dimension `line`.
    pub s: Address,
    /// Matrix B of the adapter, `[n, r]`.
    pub lora_b: Address,
    /// Factor on the product `dy B` that gives `ds`: the adapter's scale.
    pub scale: f32,
    /// Result `ds = scale * dy B`, the gradient of the output of matrix A, `[t, padded_rank]` with leading
    /// dimension `line`.
    pub ds: Address,
    /// Result `dB = dy^T s`, the gradient of matrix B, f32 `[n, r]`.
    pub d_lora_b: Address,
}

fn module(dtype: DType, rank: usize, grouped: bool) -> Option<Module> {
    let element = element_type(dtype).filter(|_| dtype != DType::F32)?;
    let mut defines = vec![("TYPE", element), ("RANK", rank as u32)];
    let kernels: &[&str] = match grouped {
        false => &["lora_gradients"],
        true => &["lora_gradients_routed"],
    };
    if grouped {
        defines.push(("ROUTED", 1));
    }
    Some(Module::new(Family::LoraGradients, defines, kernels))
}

/// Kernel modules for every 16-bit dtype and padded rank, for all rows and for selected rows.
#[must_use]
pub fn modules() -> Vec<Module> {
    let mut all = Vec::new();
    for dtype in [DType::BF16, DType::F16] {
        for grouped in [false, true] {
            all.extend(RANKS.map(|rank| module(dtype, rank, grouped)));
        }
    }
    all.into_iter().flatten().collect()
}

impl LoraGradients {
    /// Whether one pass over `dy` can compute both gradients: 16-bit dtype, rank at most 64, `n` a multiple
    /// of 8. It is then faster than two products.
    #[must_use]
    pub fn fits(&self) -> bool {
        let narrow = matches!(self.dtype, DType::BF16 | DType::F16);
        narrow && self.n.is_multiple_of(8) && self.module_rank().is_some() && self.t > 0
    }

    /// Smallest module rank that is large enough.
    fn module_rank(&self) -> Option<usize> {
        RANKS.into_iter().find(|rank| *rank >= self.padded_rank)
    }

    /// Number of column slices, number of row ranges, and rows per range. They depend on the shape only.
    const fn cut(&self) -> [usize; 3] {
        let slices = self.n.div_ceil(SLICE);
        let wanted = BLOCKS.div_ceil(slices);
        let rows = self.t.div_ceil(wanted).next_multiple_of(ROWS);
        // Shorter ranges would have more partial sums than rows.
        let rows = if rows < 256 { 256 } else { rows };
        [slices, self.t.div_ceil(rows), rows]
    }

    /// Launches of the pass, in order. `None` unless [`LoraGradients::fits`], and when an extent exceeds a grid's size.
    #[must_use]
    pub fn launches(&self, workspace: &mut Workspace) -> Option<Vec<Launch>> {
        if !self.fits() {
            return None;
        }
        let Self {
            t,
            n,
            r,
            padded_rank: rank,
            ..
        } = *self;
        let [slices, ranges, range_rows] = self.cut();
        let mark = workspace.mark();
        let ds_partial = workspace.take((slices * t * rank * 4) as u64);
        let db_partial = workspace.take((ranges * n * r * 4) as u64);
        let made_for = self.module_rank()?;
        let stages = if made_for < 64 { 4 } else { 3 };
        let shared = stages * ROWS * (SLICE + made_for) * 2 + WARPS * ROWS * (made_for + 8) * 4;
        let grouped = self.rows != Address::NULL;
        let module = module(self.dtype, made_for, grouped)?;
        let mut pass = Launch {
            kernel: module.kernels()[0],
            module,
            grid: [u32::try_from(slices).ok()?, u32::try_from(ranges).ok()?, 1],
            threads: 32 * WARPS as u32,
            shared_bytes: shared as u32,
            args: vec![
                Arg::Address(self.dy),
                Arg::Address(self.s),
                Arg::U64(self.line as u64),
                Arg::Address(self.lora_b),
                int(t)?,
                int(n)?,
                int(r)?,
                int(rank)?,
                Arg::Address(ds_partial),
                Arg::Address(db_partial),
                int(range_rows)?,
            ],
        };
        if grouped {
            pass.args.push(Arg::Address(self.rows));
        }
        let sum = |[m, n, y_line]: [usize; 3], out: DType, scale: f32, y: Address| Product {
            dtype: self.dtype,
            out,
            transpose_a: false,
            transpose_b: false,
            m,
            n,
            b_rows: n,
            terms: [None; 2],
            bias: Address::NULL,
            scale,
            y,
            y_line,
        };
        let ds = sum([t, rank, self.line], self.dtype, self.scale, self.ds);
        let db = sum([n, r, r], DType::F32, 1.0, self.d_lora_b);
        let launches = vec![
            pass,
            ds.sum_to_rows(ds_partial, slices as u32, self.rows)?,
            db.sum(db_partial, ranges as u32)?,
        ];
        workspace.release(mark);
        Some(launches)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(t: usize, n: usize, r: usize) -> LoraGradients {
        LoraGradients {
            dtype: DType::BF16,
            t,
            n,
            r,
            padded_rank: usize::next_multiple_of(r, 16),
            line: usize::next_multiple_of(r, 16),
            rows: Address::NULL,
            dy: Address::NULL,
            s: Address::NULL,
            lora_b: Address::NULL,
            scale: 1.0,
            ds: Address::NULL,
            d_lora_b: Address::NULL,
        }
    }

    #[test]
    fn a_shape_that_the_kernel_cannot_compute_has_no_launches() {
        let launches = |shape: &LoraGradients| shape.launches(&mut Workspace::new(Address::NULL));
        assert!(launches(&shape(64, 64, 16)).is_some());
        for bad in [shape(64, 60, 16), shape(0, 64, 16), shape(64, 64, 65)] {
            assert!(!bad.fits() && launches(&bad).is_none(), "{bad:?}");
        }
        let wide = LoraGradients {
            dtype: DType::F32,
            ..shape(64, 64, 16)
        };
        assert!(launches(&wide).is_none());
    }

    #[test]
    fn every_row_and_column_is_in_one_block_and_partial_sums_are_bounded() {
        for (t, n, r) in [
            (1, 8, 1),
            (8192, 4096, 16),
            (300, 11008, 32),
            (5000, 1152, 4),
            (8192, 4096, 64),
            (8192, 13696, 50),
        ] {
            let shape = shape(t, n, r);
            let [slices, ranges, rows] = shape.cut();
            assert!(shape.fits() && rows.is_multiple_of(ROWS));
            assert!(slices * SLICE >= n && (slices - 1) * SLICE < n);
            assert!(ranges * rows >= t && (ranges - 1) * rows < t);
            // Partial sums are written and read in f32; the alternative is one more pass over dy.
            let partial = 8 * (slices * t * shape.padded_rank + ranges * n * r);
            assert!(t < 2048 || partial <= 2 * t * n, "{shape:?}");
        }
    }
}

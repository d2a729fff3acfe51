//! Matrix products over the single-threaded kernels of the `gemm` crate.
//!
//! The output is cut into blocks whose sizes depend on its shape only; a block is one task. Every
//! element is the sum over `k` in one order, whatever block it lies in and however many rows
//! there are, so results depend neither on the number of threads nor on the other rows.
#![allow(unsafe_code, reason = "the gemm crate takes raw pointers")]

use super::matrix::{Dense, Matrix, narrow};
use super::parallel::{self, MIN_PARALLEL_FLOPS, Shared};
use super::simd::multiversion;
use crate::{DType, Float};
use gemm::Parallelism;
use half::{bf16, f16};
use std::cell::RefCell;

/// Longest run of `k` of one kernel call; longer ones would be cut by the crate at places that
/// depend on the other extents.
const MAX_DEPTH: usize = 512;
/// Up to this many outputs the crate sums over `k` in lanes instead of in order.
const SMALL_OUTPUTS: usize = 256;
/// Up to this many rows the crate may take a matrix-vector path.
const MIN_ROWS: usize = 4;
/// From this many rows on a transposed right operand is laid out again before the crate packs it:
/// the crate's own packing runs along the large stride, which power-of-two strides make slow.
const TRANSPOSE_ROWS: usize = 32;
/// From this stride on a transposed left operand is laid out, too: the crate reads six elements
/// from each line.
const FAR: usize = 192;
/// Elements of a 16-bit operand that are widened at once (16 MiB of f32).
const PANEL_ELEMS: usize = 4 << 20;

/// One summand `factor * a @ b` of an output.
#[derive(Clone, Copy)]
pub(crate) struct Product<'a> {
    pub(crate) a: Matrix<'a>,
    pub(crate) b: Matrix<'a>,
    pub(crate) factor: f32,
}

/// Shape of a summand: its depth and the dtypes of its operands.
#[derive(Clone, Copy)]
pub(crate) struct Term {
    pub(crate) k: usize,
    pub(crate) a: DType,
    pub(crate) b: DType,
}

/// Contiguous rows of an output.
pub(crate) enum Out<'a> {
    F32 {
        data: &'a mut [f32],
        /// Adds to what is there.
        accumulate: bool,
    },
    BF16(&'a mut [bf16]),
    F16(&'a mut [f16]),
}

/// How a product is cut up.
#[derive(Clone, Copy)]
struct Cuts {
    panel_rows: usize,
    panel_cols: usize,
    block_rows: usize,
    block_cols: usize,
    /// Elements of one task's f32 accumulators; 0 when the output itself is f32.
    accumulators: usize,
    /// Elements of one task's scratch: the accumulators and a transposed part of an operand.
    scratch: usize,
    /// Elements of the widened panels.
    widened: usize,
    parallel: bool,
}

fn panel(extent: usize, depth: usize) -> usize {
    if depth == 0 {
        return extent.max(1);
    }
    let fits = (PANEL_ELEMS / depth / 64 * 64).max(64);
    extent.min(fits).max(1)
}

/// Splits `extent` into equal parts of at most `most`, in multiples of `step`.
fn even(extent: usize, most: usize, step: usize) -> usize {
    extent
        .div_ceil(extent.div_ceil(most).max(1))
        .next_multiple_of(step)
        .min(extent.max(1))
}

impl Cuts {
    fn new(m: usize, n: usize, terms: &[Term], out: DType) -> Self {
        let depth_of = |wide: fn(&Term) -> DType| -> usize {
            terms
                .iter()
                .filter(|t| wide(t) != DType::F32)
                .map(|t| t.k)
                .sum()
        };
        let (a_depth, b_depth) = (depth_of(|t| t.a), depth_of(|t| t.b));
        let panel_rows = panel(m, a_depth);
        let panel_cols = panel(n, b_depth);
        let depth: usize = terms.iter().map(|t| t.k).sum();
        let flops = 2 * panel_rows * panel_cols * depth;
        // Tall blocks, since each lays out its part of b again, but enough of them for the threads
        // of a small machine; their columns fill the 64-wide tiles of the crate.
        let wanted = (flops / (24 << 20)).clamp(1, 16);
        let most_cols = if wanted < 8 {
            384
        } else {
            (panel_cols / 4).clamp(192, 384)
        };
        let block_cols = most_cols.next_multiple_of(64).min(panel_cols);
        let row_blocks = wanted.div_ceil(panel_cols.div_ceil(block_cols));
        let block_rows = even(
            panel_rows,
            panel_rows.div_ceil(row_blocks).clamp(256, 1024),
            8,
        );
        let accumulators = if out == DType::F32 {
            0
        } else {
            block_rows * block_cols
        };
        let depth = terms.iter().map(|t| t.k.min(MAX_DEPTH)).max().unwrap_or(0);
        Self {
            panel_rows,
            panel_cols,
            block_rows,
            block_cols,
            accumulators,
            scratch: accumulators + depth * block_rows.max(block_cols),
            widened: panel_rows * a_depth + panel_cols * b_depth,
            parallel: flops >= MIN_PARALLEL_FLOPS,
        }
    }

    fn tasks(&self, rows: usize, cols: usize) -> (usize, usize) {
        (
            rows.div_ceil(self.block_rows),
            cols.div_ceil(self.block_cols),
        )
    }
}

/// Elements of workspace that [`multiply`] needs.
pub(crate) fn workspace(m: usize, n: usize, terms: &[Term], out: DType) -> usize {
    let cuts = Cuts::new(m, n, terms, out);
    let (down, across) = cuts.tasks(cuts.panel_rows, cuts.panel_cols);
    cuts.widened + parallel::slots(down * across) * cuts.scratch
}

/// `out = (out +) bias + sum of products`, rounded once.
pub(crate) fn multiply(
    products: &[Product<'_>],
    bias: Option<&[f32]>,
    out: Out<'_>,
    space: &mut [f32],
) {
    match out {
        Out::F32 { data, accumulate } => run(products, bias, data, accumulate, space),
        Out::BF16(data) => run(products, bias, data, false, space),
        Out::F16(data) => run(products, bias, data, false, space),
    }
}

fn run<T: Float>(
    products: &[Product<'_>],
    bias: Option<&[f32]>,
    out: &mut [T],
    accumulate: bool,
    space: &mut [f32],
) {
    let (m, n) = (products[0].a.rows, products[0].b.cols);
    if m == 0 || n == 0 {
        return;
    }
    let terms: Vec<Term> = products.iter().map(Product::term).collect();
    let cuts = Cuts::new(m, n, &terms, T::DTYPE);
    let (widened, scratch) = space.split_at_mut(cuts.widened);
    let out = Shared::new(out);
    for row in (0..m).step_by(cuts.panel_rows) {
        let rows = cuts.panel_rows.min(m - row);
        let (left, rest) = widen_all(products, Side::A, row, rows, widened);
        for col in (0..n).step_by(cuts.panel_cols) {
            let cols = cuts.panel_cols.min(n - col);
            let (right, _) = widen_all(products, Side::B, col, cols, rest);
            let panel = Panel {
                products,
                left: &left,
                right: &right,
                bias: bias.map(|b| &b[col..col + cols]),
                accumulate,
                row,
                col,
                n,
            };
            let (down, across) = cuts.tasks(rows, cols);
            // Neighbouring tasks share the columns of b.
            parallel::run_tasks(
                down * across,
                scratch,
                cuts.scratch,
                cuts.parallel,
                |i, s| {
                    let (r, c) = (i % down * cuts.block_rows, i / down * cuts.block_cols);
                    let size = (cuts.block_rows.min(rows - r), cuts.block_cols.min(cols - c));
                    let (accumulators, transposed) = s.split_at_mut(cuts.accumulators);
                    panel.block((r, c), size, &out, accumulators, transposed);
                },
            );
        }
    }
}

enum Side {
    A,
    B,
}

fn widen_all<'s>(
    products: &[Product<'s>],
    side: Side,
    start: usize,
    len: usize,
    mut space: &'s mut [f32],
) -> (Vec<Dense<'s>>, &'s mut [f32]) {
    let mut all = Vec::with_capacity(products.len());
    for p in products {
        let (dense, rest) = match side {
            Side::A => p.a.widened(start, 0, len, p.a.cols, space),
            Side::B => p.b.widened(0, start, p.b.rows, len, space),
        };
        all.push(dense);
        space = rest;
    }
    (all, space)
}

impl Product<'_> {
    fn term(&self) -> Term {
        Term {
            k: self.a.cols,
            a: self.a.dtype(),
            b: self.b.dtype(),
        }
    }
}

/// Operands of the blocks of one panel.
struct Panel<'a> {
    products: &'a [Product<'a>],
    left: &'a [Dense<'a>],
    right: &'a [Dense<'a>],
    bias: Option<&'a [f32]>,
    accumulate: bool,
    row: usize,
    col: usize,
    n: usize,
}

impl Panel<'_> {
    fn block<T: Float>(
        &self,
        (row, col): (usize, usize),
        (rows, cols): (usize, usize),
        out: &Shared<'_, T>,
        scratch: &mut [f32],
        transposed: &mut [f32],
    ) {
        let first = (self.row + row) * self.n + self.col + col;
        let in_place = T::DTYPE == DType::F32;
        let (dst, stride) = if in_place {
            assert!(first + (rows - 1) * self.n + cols <= out.len());
            (out.at(first).cast::<f32>(), self.n)
        } else {
            assert!(rows * cols <= scratch.len());
            (scratch.as_mut_ptr(), cols)
        };
        let bias = self.bias.map(|b| &b[col..col + cols]);
        // SAFETY: rows of `cols` elements with the stride lie inside the output (it was asserted)
        // or the scratch, and blocks of different tasks are disjoint.
        unsafe { self.accumulate((row, col), (rows, cols), bias, dst, stride, transposed) };
        if !in_place {
            for (i, line) in scratch[..rows * cols].chunks_exact(cols).enumerate() {
                // SAFETY: blocks of different tasks are disjoint.
                narrow(line, unsafe { out.part(first + i * self.n, cols) });
            }
        }
    }

    /// # Safety
    /// `dst` points to `rows` rows of `cols` elements, `stride` apart, that nobody else touches.
    unsafe fn accumulate(
        &self,
        (row, col): (usize, usize),
        (rows, cols): (usize, usize),
        bias: Option<&[f32]>,
        dst: *mut f32,
        stride: usize,
        space: &mut [f32],
    ) {
        let mut accumulate = self.accumulate;
        if let Some(bias) = bias {
            for i in 0..rows {
                // SAFETY: row `i` of the block.
                let line = unsafe { std::slice::from_raw_parts_mut(dst.add(i * stride), cols) };
                if accumulate {
                    line.iter_mut().zip(bias).for_each(|(o, b)| *o += b);
                } else {
                    line.copy_from_slice(bias);
                }
            }
            accumulate = true;
        }
        for ((p, a), b) in self.products.iter().zip(self.left).zip(self.right) {
            let shape = (rows, cols, p.a.cols);
            let (a, b) = (a.at(row, 0), b.at(0, col));
            // SAFETY: the caller's promise about `dst`.
            unsafe { block_product(shape, a, b, p.factor, accumulate, dst, stride, space) };
            accumulate = true;
        }
    }
}

/// `dst = (dst +) factor * a @ b` for contiguous rows, on this thread. `space` of
/// [`here_space`] elements holds a part of an operand that is transposed.
pub(crate) fn multiply_here(
    (m, n, k): (usize, usize, usize),
    a: Dense<'_>,
    b: Dense<'_>,
    factor: f32,
    accumulate: bool,
    dst: &mut [f32],
    space: &mut [f32],
) {
    assert!(dst.len() >= m * n, "{} elements for [{m}, {n}]", dst.len());
    let dst = dst.as_mut_ptr();
    // SAFETY: the slice holds the rows.
    unsafe { block_product((m, n, k), a, b, factor, accumulate, dst, n, space) };
}

/// Elements of the space of [`multiply_here`].
pub(crate) fn here_space(m: usize, n: usize, k: usize) -> usize {
    m.max(n) * k.min(MAX_DEPTH)
}

thread_local! {
    /// Rows filled up to [`MIN_ROWS`] or [`SMALL_OUTPUTS`], and their results.
    static PADDED: RefCell<(Vec<f32>, Vec<f32>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

/// # Safety
/// `dst` points to `m` rows of `n` elements, `stride` apart, that nobody else touches.
unsafe fn block_product(
    (m, n, k): (usize, usize, usize),
    a: Dense<'_>,
    b: Dense<'_>,
    factor: f32,
    accumulate: bool,
    dst: *mut f32,
    stride: usize,
    space: &mut [f32],
) {
    if m == 0 || n == 0 || (k == 0 && accumulate) {
        return;
    }
    let few = m < MIN_ROWS || m * n <= SMALL_OUTPUTS;
    if !few || a.col_stride != 1 || k == 0 {
        // SAFETY: the caller's promise.
        return unsafe { kernel((m, n, k), a, b, factor, accumulate, dst, stride, space) };
    }
    let padded = MIN_ROWS.max(SMALL_OUTPUTS / n + 1);
    PADDED.with_borrow_mut(|(rows, outs)| {
        rows.clear();
        rows.resize(padded * k, 0.0);
        outs.clear();
        outs.resize(padded * n, 0.0);
        for i in 0..m {
            rows[i * k..][..k].copy_from_slice(&a.data[i * a.row_stride..][..k]);
            // SAFETY: row `i` of `dst`.
            let line = unsafe { std::slice::from_raw_parts_mut(dst.add(i * stride), n) };
            if accumulate {
                outs[i * n..][..n].copy_from_slice(line);
            }
        }
        let a = Dense::row_major(rows, k);
        // SAFETY: `outs` was sized for the padded rows.
        unsafe {
            kernel(
                (padded, n, k),
                a,
                b,
                factor,
                accumulate,
                outs.as_mut_ptr(),
                n,
                space,
            );
        };
        for i in 0..m {
            // SAFETY: row `i` of `dst`.
            let line = unsafe { std::slice::from_raw_parts_mut(dst.add(i * stride), n) };
            line.copy_from_slice(&outs[i * n..][..n]);
        }
    });
}

/// # Safety
/// As [`block_product`].
unsafe fn kernel(
    (m, n, k): (usize, usize, usize),
    a: Dense<'_>,
    b: Dense<'_>,
    factor: f32,
    accumulate: bool,
    dst: *mut f32,
    stride: usize,
    space: &mut [f32],
) {
    assert!(
        a.holds(m, k) && b.holds(k, n),
        "operands of [{m}, {k}] @ [{k}, {n}]"
    );
    let step = k.div_ceil(k.div_ceil(MAX_DEPTH).max(1)).max(1);
    let lay_out_b = b.row_stride == 1 && b.col_stride > 1 && m >= TRANSPOSE_ROWS;
    let lay_out_a = a.row_stride == 1 && a.col_stride >= FAR && !lay_out_b;
    let mut start = 0;
    loop {
        let depth = step.min(k - start);
        let (mut a, mut b) = (a.at(0, start), b.at(start, 0));
        if lay_out_b {
            transpose_into(b, depth, n, space);
            b = Dense::row_major(space, n);
        } else if lay_out_a {
            transpose_into(a, m, depth, space);
            a = Dense::row_major(space, depth);
        }
        // SAFETY: the operands hold the extents by the assertion, `dst` by the contract.
        unsafe {
            gemm::gemm(
                m,
                n,
                depth,
                dst,
                1,
                stride as isize,
                accumulate || start > 0,
                a.data.as_ptr(),
                a.col_stride as isize,
                a.row_stride as isize,
                b.data.as_ptr(),
                b.col_stride as isize,
                b.row_stride as isize,
                1.0f32,
                factor,
                false,
                false,
                false,
                Parallelism::None,
            );
        }
        start += depth;
        if start >= k {
            break;
        }
    }
}

/// Side of the tiles of a transposition: one cache line of f32.
const SIDE: usize = 16;

/// `out [k, n] = b` for a `b` whose columns are contiguous.
fn transpose_into(b: Dense<'_>, k: usize, n: usize, out: &mut [f32]) {
    assert!(b.holds(k, n) && out.len() >= k * n);
    transpose(b.data, b.col_stride, k, n, out);
}

/// Exchanges the off-diagonal blocks of side `S` of every diagonal block of side `2 S`.
#[inline(always)]
fn exchange<const S: usize>(tile: &mut [[f32; SIDE]; SIDE]) {
    for i in 0..SIDE {
        if i & S == 0 {
            let (upper, lower) = (tile[i], tile[i + S]);
            for j in 0..SIDE {
                let left = j & S == 0;
                tile[i][j] = if left { upper[j] } else { lower[j - S] };
                tile[i + S][j] = if left { upper[j + S] } else { lower[j] };
            }
        }
    }
}

multiversion! {
    /// `out[i, j] = x[j * stride + i]` for `i < k`, `j < n`.
    fn transpose(x: &[f32], stride: usize, k: usize, n: usize, out: &mut [f32]) {
        let (whole_k, whole_n) = (k / SIDE * SIDE, n / SIDE * SIDE);
        for col in (0..whole_n).step_by(SIDE) {
            for row in (0..whole_k).step_by(SIDE) {
                let mut tile = [[0.0f32; SIDE]; SIDE];
                for (j, line) in tile.iter_mut().enumerate() {
                    line.copy_from_slice(&x[(col + j) * stride + row..][..SIDE]);
                }
                exchange::<8>(&mut tile);
                exchange::<4>(&mut tile);
                exchange::<2>(&mut tile);
                exchange::<1>(&mut tile);
                for (i, line) in tile.iter().enumerate() {
                    out[(row + i) * n + col..][..SIDE].copy_from_slice(line);
                }
            }
            for j in col..col + SIDE {
                for i in whole_k..k {
                    out[i * n + j] = x[j * stride + i];
                }
            }
        }
        for j in whole_n..n {
            for i in 0..k {
                out[i * n + j] = x[j * stride + i];
            }
        }
    }
}

//! Matrix products, blocked for the caches, with a kernel for each instruction set.
//!
//! An element is `from + factor * chain + factor * chain + …`. A chain is a sequence of fused multiply-adds over one
//! stretch of `k`, in order. Stretches follow in order, and one more fused multiply-add adds each to the element.
//! Stretches depend on `k` only. A sum may continue that of earlier parts of `k`, if these end with a stretch of the
//! whole. So the bits of an element do not depend on the output's size, its position in the
//! output, the number of threads, or the instruction set.
//!
//! With [`CpuMath::Amx`] the chains of products with a bf16 matrix are the sums that the tiles of AMX compute, on every
//! processor: those without AMX compute them in f32 arithmetic.
//!
//! Operands are first copied into *panels* and converted to f32; [`pack`] describes the layout. If both are bf16 and the
//! processor has fast dot products of bf16, they stay bf16. Products of many rows
//! ([`shared`]) pack parts of both operands for all threads. Products of few rows ([`streamed`]) pack a few columns
//! of `b` at a time, on the thread that uses them.
#![allow(unsafe_code, reason = "tasks write disjoint blocks of one output")]

mod kernel;
mod pack;
mod portable;
mod shared;
mod streamed;
#[cfg(test)]
mod tests;
mod tiles;
#[cfg(target_arch = "x86_64")]
mod x86;

use super::CpuMath;
use super::matrix::Matrix;
use super::simd::{Level, level};
use crate::{DType, Float};
use half::{bf16, f16};
use kernel::Start;
use tiles::Tiles;

/// Longest stretch of `k` in one chain. A panel of this depth fits in the L1 cache.
const STRETCH: usize = 256;
/// Stretches begin at multiples of this.
const STRETCH_STEP: usize = 16;
/// Up to this many rows, `b` is packed by the thread that uses it.
const FEW_ROWS: usize = 24;

/// How products are computed. Only `math` decides about bits.
#[derive(Clone, Copy, Debug)]
struct Method {
    level: Level,
    math: CpuMath,
    #[cfg_attr(
        not(target_arch = "x86_64"),
        allow(dead_code, reason = "other processors have no tiles")
    )]
    tiles: Tiles,
}

impl Method {
    /// The fastest one on this processor.
    fn of(math: CpuMath) -> Self {
        Self {
            level: level(),
            math,
            tiles: match math {
                CpuMath::Portable => Tiles::None,
                CpuMath::Amx => tiles::fastest(),
            },
        }
    }
}

/// Whether this processor multiplies tiles of bf16 with AMX, as [`CpuMath::Amx`] defines it.
pub(crate) fn has_amx() -> bool {
    tiles::fastest() == Tiles::Amx
}

/// One term `factor * a @ b` of a sum of matrix products.
#[derive(Clone, Copy)]
pub(crate) struct Product<'a> {
    pub(crate) a: Matrix<'a>,
    pub(crate) b: Matrix<'a>,
    pub(crate) factor: f32,
    /// Length of `k` from which the stretches follow: that of `a`, or of the whole sum if this is a part of one.
    pub(crate) whole: usize,
}

impl<'a> Product<'a> {
    pub(crate) fn new(a: Matrix<'a>, b: Matrix<'a>, factor: f32) -> Self {
        let whole = a.cols;
        Self {
            a,
            b,
            factor,
            whole,
        }
    }

    /// The product as a part of a sum over `whole`.
    pub(crate) fn part_of(self, whole: usize) -> Self {
        Self { whole, ..self }
    }

    fn depth(&self) -> Depth {
        Depth {
            k: self.a.cols,
            whole: self.whole,
        }
    }
}

/// Length `k` of a product, and the length of the whole sum of which it is a part.
#[derive(Clone, Copy)]
pub(crate) struct Depth {
    pub(crate) k: usize,
    pub(crate) whole: usize,
}

impl Depth {
    /// Length of the stretches.
    fn stretch(self) -> usize {
        stretch(self.whole)
    }
}

impl From<usize> for Depth {
    fn from(k: usize) -> Self {
        Self { k, whole: k }
    }
}

/// Number of rows of which every part of a sum over `total` rows but the last has a multiple. The parts are whole
/// stretches, so their sum has the bits of one product.
pub(crate) fn part_step(total: usize) -> usize {
    stretch(total).max(1)
}

/// Output matrix of [`multiply`] in its dtype, with contiguous rows.
pub(crate) enum Out<'a> {
    F32 {
        data: &'a mut [f32],
        /// Whether the products are added to the current values.
        accumulate: bool,
    },
    BF16(&'a mut [bf16]),
    F16(&'a mut [f16]),
}

/// Elements of workspace that [`multiply`] needs for products with these values of `k`.
pub(crate) fn workspace(
    m: usize,
    n: usize,
    depths: &[impl Into<Depth> + Copy],
    out: DType,
) -> usize {
    let depths: Vec<Depth> = depths.iter().map(|depth| (*depth).into()).collect();
    let depths = &*depths;
    if m <= FEW_ROWS {
        streamed::space(m, n, depths, out)
    } else {
        shared::Cuts::new(m, n, depths, out).space()
    }
}

/// `out = (out +) bias + sum of products`, rounded once at the end.
pub(crate) fn multiply(
    math: CpuMath,
    products: &[Product<'_>],
    bias: Option<&[f32]>,
    out: Out<'_>,
    space: &mut [f32],
) {
    multiply_by(Method::of(math), products, bias, out, space);
}

fn multiply_by(
    method: Method,
    products: &[Product<'_>],
    bias: Option<&[f32]>,
    out: Out<'_>,
    space: &mut [f32],
) {
    match out {
        Out::F32 { data, accumulate } => {
            if let (true, Some(bias)) = (accumulate, bias) {
                add_bias(data, bias);
            }
            run(method, products, bias, data, accumulate, space);
        }
        Out::BF16(data) => run(method, products, bias, data, false, space),
        Out::F16(data) => run(method, products, bias, data, false, space),
    }
}

fn add_bias(out: &mut [f32], bias: &[f32]) {
    for line in out.chunks_exact_mut(bias.len().max(1)) {
        line.iter_mut().zip(bias).for_each(|(o, b)| *o += b);
    }
}

fn run<T: Float>(
    method: Method,
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
    for p in products {
        assert!(
            p.a.rows == m && p.b.cols == n && p.a.cols == p.b.rows,
            "[{}, {}] @ [{}, {}] for [{m}, {n}]",
            p.a.rows,
            p.a.cols,
            p.b.rows,
            p.b.cols
        );
    }
    assert!(out.len() >= m * n, "{} elements for [{m}, {n}]", out.len());
    let start = match bias {
        _ if accumulate => Start::Out,
        Some(bias) => Start::Row(&bias[..n]),
        None => Start::Zero,
    };
    if m <= FEW_ROWS {
        streamed::run(method, products, start, out, space);
    } else {
        shared::run(method, products, start, out, space);
    }
}

/// `dst = (dst +) factor * a @ b` for contiguous rows, on the calling thread. `space` has [`here_space`] elements.
pub(crate) fn multiply_here(
    math: CpuMath,
    a: Matrix<'_>,
    b: Matrix<'_>,
    factor: f32,
    accumulate: bool,
    dst: &mut [f32],
    space: &mut [f32],
) {
    let (m, n) = (a.rows, b.cols);
    assert!(
        a.cols == b.rows && dst.len() >= m * n,
        "{} elements for [{m}, {n}]",
        dst.len()
    );
    if m == 0 || n == 0 {
        return;
    }
    let product = Product::new(a, b, factor);
    let start = if accumulate { Start::Out } else { Start::Zero };
    streamed::here(Method::of(math), &product, start, dst, space);
}

/// Number of f32 elements of workspace that [`multiply_here`] needs for `m` rows and depth `k`.
pub(crate) fn here_space(m: usize, k: usize) -> usize {
    streamed::here_space(m, k)
}

/// Length of the stretches into which the sum over `k` is divided.
fn stretch(k: usize) -> usize {
    k.div_ceil(k.div_ceil(STRETCH).max(1))
        .next_multiple_of(STRETCH_STEP)
}

/// First element and length of each stretch of a sum over `k`, `step` long. One empty stretch if `k` is 0.
fn stretches(k: usize, step: usize) -> impl Iterator<Item = (usize, usize)> + Clone {
    let step = step.max(1);
    (0..k.max(1))
        .step_by(step)
        .map(move |first| (first, step.min(k - first)))
}

/// Rounds a number of f32 elements up to whole cache lines.
fn whole_lines(elems: usize) -> usize {
    elems.next_multiple_of(16)
}

/// Size of the parts when `extent` is split evenly into parts of at most `most`, in multiples of `step`.
fn even(extent: usize, most: usize, step: usize) -> usize {
    let most = (most / step * step).max(step);
    extent
        .div_ceil(extent.div_ceil(most).max(1))
        .next_multiple_of(step)
        .max(step)
}

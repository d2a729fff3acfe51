//! Products of few rows: `a` is packed as a whole, `b` one panel and stretch at a time.
//!
//! One row reads the columns of a weight [`in_place`]: packing them would take longer than the products.

use super::kernel::{
    COL_STEP, Form, Kernel, Least, NO_LEAST, Panels, ROW_STEP, Side, Start, TileIo,
};
use super::pack::pack;
use super::{Depth, Method, Product, STRETCH, stretches, whole_lines};
use crate::cpu::matrix::narrow;
use crate::cpu::parallel::{self, MIN_PARALLEL_FLOPS, Shared};
use crate::{DType, Float};

/// Number of floating-point operations that one task should have at least.
const TASK_FLOPS: usize = 1 << 20;

/// Number of output columns per task, and number of tasks.
fn tasks(m: usize, n: usize, depth: usize) -> (usize, usize) {
    let panels = n.div_ceil(COL_STEP);
    let each = (TASK_FLOPS / (2 * m * COL_STEP * depth).max(1)).clamp(1, panels.max(1));
    (each * COL_STEP, panels.div_ceil(each))
}

/// Elements of a packed panel of `b` over one stretch.
fn panel(depth: usize) -> usize {
    COL_STEP * depth.min(STRETCH)
}

/// Elements of one task's scratch: a panel of `b`, plus f32 sums if the output is not f32.
fn scratch(m: usize, deepest: usize, out: DType) -> usize {
    let sums = if out == DType::F32 { 0 } else { m * COL_STEP };
    panel(deepest) + sums
}

pub(super) fn space(m: usize, n: usize, depths: &[Depth], out: DType) -> usize {
    let depth: usize = depths.iter().map(|depth| depth.k).sum();
    let deepest = depths.iter().map(|depth| depth.k).max().unwrap_or(0);
    let (_, tasks) = tasks(m.max(1), n, depth);
    left_space(m, depth) + parallel::slots(tasks) * scratch(m, deepest, out)
}

pub(super) fn here_space(m: usize, k: usize) -> usize {
    left_space(m, k) + panel(k)
}

/// Elements of packed `a` over all of `depth`.
fn left_space(m: usize, depth: usize) -> usize {
    whole_lines(m.next_multiple_of(ROW_STEP) * depth)
}

/// Bytes of columns read in place from which on other threads help: reading takes longer than the products.
const MIN_PARALLEL_BYTES: usize = 2 << 20;

/// Whether one row is multiplied with columns that stay where they are.
fn in_place(kernel: &Kernel, p: &Product<'_>) -> bool {
    let one_row = p.a.rows == 1 && p.a.strides().1 == 1;
    #[cfg(target_arch = "x86_64")]
    let reads = super::x86::row::reads(kernel.level, p.b.data().dtype(), grouped(kernel, p));
    #[cfg(not(target_arch = "x86_64"))]
    let reads = {
        let _ = kernel;
        false
    };
    reads && one_row && p.b.strides().0 == 1
}

/// Whether the product is summed in the order of AMX.
#[cfg(target_arch = "x86_64")]
fn grouped(kernel: &Kernel, p: &Product<'_>) -> bool {
    matches!(kernel.form(p), Form::Grouped | Form::Tiles)
}

/// Operands `a` of all products, packed one after the other.
struct Left<'s> {
    packed: &'s [f32],
    /// Bound of each operand of pairs or tiles, in order.
    least: Vec<Least>,
}

/// Packs each `a` as a whole. `space` has [`left_space`] elements.
fn pack_left<'s>(kernel: &Kernel, products: &[Product<'_>], space: &'s mut [f32]) -> Left<'s> {
    let (mut out, mut least) = (&mut *space, Vec::new());
    for p in products {
        let height = p.a.rows.next_multiple_of(ROW_STEP);
        if in_place(kernel, p) {
            p.a.data().widen(0, &mut out[..p.a.cols]);
            #[cfg(target_arch = "x86_64")]
            if grouped(kernel, p) {
                super::tiles::round(&mut out[..p.a.cols]);
            }
            out = &mut out[height * p.a.cols..];
            continue;
        }
        let (form, stretch) = (kernel.form(p), p.depth().stretch());
        let (lanes, width) = (form.lanes(p.a.rows), kernel.width(form, Side::Left));
        let mut bound = NO_LEAST;
        for (first, depth) in stretches(p.a.cols, stretch) {
            let part = p.a.part(0, first, p.a.rows, depth);
            let out = &mut out[form.before(first, stretch) * lanes..];
            let packed = pack(kernel.level, form, Side::Left, width, part, out);
            bound = bound.min(packed);
        }
        if matches!(form, Form::Pair | Form::Tiles) {
            least.push(bound);
        }
        out = &mut out[height * p.a.cols..];
    }
    let packed = space;
    Left { packed, least }
}

/// Adds the products to the `cols` columns from `col` on, at most one panel wide.
///
/// # Safety
/// `to` points to the first of these columns. Rows are `stride` elements apart, as many as the products have, and no
/// other thread accesses them.
unsafe fn column(
    kernel: &Kernel,
    products: &[Product<'_>],
    start: Start<'_>,
    left: &Left<'_>,
    (col, cols): (usize, usize),
    to: *mut f32,
    stride: usize,
    space: &mut [f32],
) {
    let (mut packed, mut bounds, mut first) = (left.packed, left.least.iter(), true);
    for p in products {
        let (m, k) = (p.a.rows, p.a.cols);
        let height = m.next_multiple_of(ROW_STEP);
        #[cfg(target_arch = "x86_64")]
        if in_place(kernel, p) {
            let columns = p.b.part(0, col, k, cols).transposed();
            let place = TileIo::new(to, stride, start, first, col);
            let (a, stretch) = (&packed[..k], p.depth().stretch());
            // SAFETY: the processor has the instructions; the caller's promise.
            unsafe {
                let grouped = grouped(kernel, p);
                super::x86::row::row(kernel.level, grouped, columns, a, stretch, p.factor, place);
            }
            (first, packed) = (false, &packed[height * k..]);
            continue;
        }
        let form = kernel.form(p);
        let bound = match form {
            Form::Single | Form::Grouped => NO_LEAST,
            Form::Pair | Form::Tiles => bounds.next().copied().unwrap_or(0),
        };
        let (stretch, lanes) = (p.depth().stretch(), form.lanes(m));
        for (at, depth) in stretches(k, stretch) {
            let part = p.b.part(at, col, depth, cols).transposed();
            let place = TileIo::new(to, stride, start, first, col);
            first = false;
            let width = kernel.width(form, Side::Right);
            let least = pack(kernel.level, form, Side::Right, width, part, space);
            let panels = Panels {
                form,
                depth,
                a: packed[form.before(at, stretch) * lanes..].as_ptr(),
                b: space.as_ptr(),
                least: [bound, least],
                factor: p.factor,
            };
            // SAFETY: both operands are packed for this depth; the caller's promise.
            unsafe { kernel.column((m, cols), panels, place) };
        }
        packed = &packed[height * k..];
    }
}

pub(super) fn run<T: Float>(
    method: Method,
    products: &[Product<'_>],
    start: Start<'_>,
    out: &mut [T],
    space: &mut [f32],
) {
    let kernel = Kernel::of(method);
    let (m, n) = (products[0].a.rows, products[0].b.cols);
    let depth: usize = products.iter().map(|p| p.a.cols).sum();
    let deepest = products.iter().map(|p| p.a.cols).max().unwrap_or(0);
    let (left, scratch) = space.split_at_mut(left_space(m, depth));
    let left = &pack_left(&kernel, products, left);
    let (wide, tasks) = tasks(m, n, depth);
    let read = products.iter().filter(|p| in_place(&kernel, p));
    let read: usize = read
        .map(|p| n * p.a.cols * p.b.data().dtype().size_bytes())
        .sum();
    let parallel = 2 * m * n * depth >= MIN_PARALLEL_FLOPS || read >= MIN_PARALLEL_BYTES;
    let each = self::scratch(m, deepest, T::DTYPE);
    let out = Shared::new(out);
    parallel::run_tasks(tasks, scratch, each, parallel, |i, scratch| {
        let (space, sums) = scratch.split_at_mut(panel(deepest));
        let end = ((i + 1) * wide).min(n);
        for col in (i * wide..end).step_by(kernel.cols) {
            let cols = kernel.cols.min(end - col);
            if T::DTYPE == DType::F32 {
                let to = out.at(col).cast::<f32>();
                // SAFETY: the output was checked to have `m` rows of `n` elements; tasks are disjoint.
                unsafe { column(&kernel, products, start, left, (col, cols), to, n, space) };
                continue;
            }
            let to = sums.as_mut_ptr();
            // SAFETY: the scratch has room for `m` rows of a panel.
            unsafe { column(&kernel, products, start, left, (col, cols), to, cols, space) };
            for (i, sums) in sums[..m * cols].chunks_exact(cols).enumerate() {
                // SAFETY: tasks are disjoint.
                narrow(sums, unsafe { out.part(i * n + col, cols) });
            }
        }
    });
}

/// Computes one product into an f32 output on the calling thread, without other threads. The sums begin with `start`.
pub(super) fn here(
    method: Method,
    product: &Product<'_>,
    start: Start<'_>,
    out: &mut [f32],
    space: &mut [f32],
) {
    let kernel = Kernel::of(method);
    let (m, n, k) = (product.a.rows, product.b.cols, product.a.cols);
    let products = std::slice::from_ref(product);
    let (left, space) = space.split_at_mut(left_space(m, k));
    let left = &pack_left(&kernel, products, left);
    for col in (0..n).step_by(kernel.cols) {
        let cols = kernel.cols.min(n - col);
        let to = out[col..].as_mut_ptr();
        // SAFETY: the output has `m` rows of `n` elements.
        unsafe { column(&kernel, products, start, left, (col, cols), to, n, space) };
    }
}

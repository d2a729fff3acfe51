//! Products of many rows: all threads share packed parts of both operands.
//!
//! The output is cut into parts and `k` into runs of stretches, so a packed part of each operand has bounded size.
//! Each run has two phases: packing, and multiplication of blocks of the output whose operands fit in the L2 cache.

use super::kernel::{
    COL_STEP, Form, Kernel, Least, NO_LEAST, Panels, ROW_STEP, Side, Start, TileIo,
};
use super::pack::pack;
use super::{Depth, Method, Product, even, whole_lines};
use crate::cpu::matrix::narrow;
use crate::cpu::parallel::{self, MIN_PARALLEL_FLOPS, Shared};
use crate::{DType, Float};
use std::sync::atomic::{AtomicU16, Ordering};

/// Maximum elements of a packed part of `a` (2 MiB).
const LEFT: usize = 512 << 10;
/// Maximum elements of a packed part of `b` (4 MiB).
const RIGHT: usize = 1 << 20;
/// Maximum length of a run, a part of `k` that is packed at one time.
const RUN: usize = 2048;
/// Maximum rows and columns of a part of a 16-bit output. Its sums need an f32 buffer.
const ROUNDED: usize = 1024;
/// Maximum rows and columns of a block, the part of the output that one task computes.
const BLOCK: (usize, usize) = (144, 384);
/// Blocks are halved until each thread has enough of them, but not below this much work.
const BLOCK_FLOPS: usize = 4 << 20;
const BLOCKS_PER_THREAD: usize = 4;
/// Number of elements that one packing task copies.
const PACK: usize = 32 << 10;

/// Partition of a product into parts and runs.
#[derive(Clone, Copy)]
pub(super) struct Cuts {
    rows: usize,
    cols: usize,
    /// Elements of the packed parts of `a` and `b`.
    left: usize,
    right: usize,
    /// Elements of the f32 sums of a part. Zero if the output itself is f32.
    sums: usize,
    parallel: bool,
}

/// Length of the runs that `k` is divided into, a multiple of the stretch length `step`.
fn run_length(step: usize) -> usize {
    let step = step.max(1);
    (RUN / step).max(1) * step
}

impl Cuts {
    pub(super) fn new(m: usize, n: usize, depths: &[Depth], out: DType) -> Self {
        let runs = depths.iter();
        let runs = runs.map(|depth| run_length(depth.stretch()).min(depth.k));
        let deepest = runs.max().unwrap_or(0);
        let most = if out == DType::F32 {
            usize::MAX
        } else {
            ROUNDED
        };
        let rows = even(m, (LEFT / deepest.max(1)).min(most), ROW_STEP);
        let cols = even(n, (RIGHT / deepest.max(1)).min(most), COL_STEP);
        let (rows, cols) = (rows.min(m), cols.min(n));
        let depth: usize = depths.iter().map(|depth| depth.k).sum();
        Self {
            rows,
            cols,
            left: whole_lines(rows.next_multiple_of(ROW_STEP) * deepest),
            right: cols.next_multiple_of(COL_STEP) * deepest,
            sums: if out == DType::F32 { 0 } else { rows * cols },
            parallel: 2 * m * n * depth >= MIN_PARALLEL_FLOPS,
        }
    }

    pub(super) fn space(&self) -> usize {
        self.left + self.right + self.sums
    }
}

/// Range of rows, of columns, or of `k`: first index and length.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Range {
    first: usize,
    len: usize,
}

fn ranges(len: usize, step: usize) -> impl Iterator<Item = Range> + Clone {
    (0..len.max(1))
        .step_by(step.max(1))
        .map(move |first| Range {
            first,
            len: step.min(len - first),
        })
}

/// One run of one product, for one part of the output.
#[derive(Clone, Copy)]
struct Run {
    summand: usize,
    k: Range,
    rows: Range,
    cols: Range,
    /// Numbers of the runs that pack its parts of `a` and `b`: this one or an earlier one.
    packed_by: [usize; 2],
    /// Whether it is the first run of its part.
    first: bool,
    /// Whether it is the last run of its part.
    last: bool,
    block: (usize, usize),
}

/// Rows and columns of the blocks of a part.
fn block(form: Form, rows: usize, cols: usize, depth: usize) -> (usize, usize) {
    let step = form.row_step();
    let (mut height, mut width) = (even(rows, BLOCK.0, step), even(cols, BLOCK.1, COL_STEP));
    let enough = BLOCKS_PER_THREAD * parallel::workers();
    while rows.div_ceil(height) * cols.div_ceil(width) < enough
        && 2 * height * width * depth > 2 * BLOCK_FLOPS
    {
        let before = (height, width);
        if height > width {
            height = even(height, height.div_ceil(2), step);
        } else {
            width = even(width, width.div_ceil(2), COL_STEP);
        }
        if (height, width) == before {
            break;
        }
    }
    (height, width)
}

/// All runs, in an order that rarely packs `b` again.
fn runs(cuts: &Cuts, kernel: &Kernel, products: &[Product<'_>], out: DType) -> Vec<Run> {
    let (m, n) = (products[0].a.rows, products[0].b.cols);
    let sums = products.len() - 1;
    let depths = || {
        products.iter().enumerate().flat_map(|(summand, p)| {
            let k = p.a.cols;
            ranges(k, run_length(p.depth().stretch()))
                .map(move |r| (summand, r, r.first + r.len == k))
        })
    };
    let mut all: Vec<Run> = Vec::new();
    let mut add = |rows: Range, cols: Range, (summand, k, ends): (usize, Range, bool)| {
        let (before, number) = (all.last(), all.len());
        let same = |r: &&Run| r.summand == summand && r.k == k;
        let rows_before = before.filter(|r| same(r) && r.rows == rows);
        let cols_before = before.filter(|r| same(r) && r.cols == cols);
        let packed_by = [
            rows_before.map_or(number, |r| r.packed_by[0]),
            cols_before.map_or(number, |r| r.packed_by[1]),
        ];
        all.push(Run {
            summand,
            k,
            rows,
            cols,
            packed_by,
            first: summand == 0 && k.first == 0,
            last: summand == sums && ends,
            block: block(kernel.form(&products[summand]), rows.len, cols.len, k.len),
        });
    };
    for cols in ranges(n, cuts.cols) {
        if out == DType::F32 {
            for depth in depths() {
                ranges(m, cuts.rows).for_each(|rows| add(rows, cols, depth));
            }
        } else {
            // The sums of a part are complete before those of the next part begin.
            for rows in ranges(m, cuts.rows) {
                depths().for_each(|depth| add(rows, cols, depth));
            }
        }
    }
    all
}

/// Data that the tasks of all phases share.
struct GemmJob<'a, T> {
    kernel: Kernel,
    products: &'a [Product<'a>],
    start: Start<'a>,
    n: usize,
    out: Shared<'a, T>,
    left: Shared<'a, f32>,
    right: Shared<'a, f32>,
    sums: Shared<'a, f32>,
    /// Bounds of the parts of both operands that each run packs.
    least: Vec<[AtomicU16; 2]>,
}

pub(super) fn run<T: Float>(
    method: Method,
    products: &[Product<'_>],
    start: Start<'_>,
    out: &mut [T],
    space: &mut [f32],
) {
    let (m, n) = (products[0].a.rows, products[0].b.cols);
    let depths: Vec<Depth> = products.iter().map(Product::depth).collect();
    let cuts = Cuts::new(m, n, &depths, T::DTYPE);
    let (left, rest) = space.split_at_mut(cuts.left);
    let (right, rest) = rest.split_at_mut(cuts.right);
    let kernel = Kernel::of(method);
    let runs = runs(&cuts, &kernel, products, T::DTYPE);
    let bounds = || [NO_LEAST, NO_LEAST].map(AtomicU16::new);
    let job = GemmJob {
        kernel,
        products,
        start,
        n,
        out: Shared::new(out),
        left: Shared::new(left),
        right: Shared::new(right),
        sums: Shared::new(&mut rest[..cuts.sums]),
        least: runs.iter().map(|_| bounds()).collect(),
    };
    // Even phases pack, odd phases multiply.
    let tasks = |phase: usize| {
        let run = &runs[phase / 2];
        if phase.is_multiple_of(2) {
            job.packs(phase / 2, run).count()
        } else {
            let (height, width) = run.block;
            run.rows.len.div_ceil(height) * run.cols.len.div_ceil(width)
        }
    };
    parallel::run_phases(2 * runs.len(), tasks, cuts.parallel, |phase, i| {
        let run = &runs[phase / 2];
        if phase.is_multiple_of(2) {
            job.pack(phase / 2, run, i);
        } else {
            job.block(run, i);
        }
    });
}

/// Packing task: one stretch of some lanes of an operand.
struct Packing {
    side: Side,
    /// Range of `k`, relative to the run.
    stretch: Range,
    /// Range of lanes, relative to the part.
    lanes: Range,
}

impl<T: Float> GemmJob<'_, T> {
    fn stretches(&self, run: &Run) -> impl Iterator<Item = Range> + Clone + use<T> {
        let (step, len) = (self.products[run.summand].depth().stretch(), run.k.len);
        ranges(len, step)
    }

    /// Packing tasks of run `number`.
    fn packs(&self, number: usize, run: &Run) -> impl Iterator<Item = Packing> {
        let form = self.kernel.form(&self.products[run.summand]);
        let all = |side: Side, wanted: bool, lanes: usize, step: usize| {
            let stretches = self.stretches(run).filter(move |_| wanted);
            stretches.flat_map(move |stretch| {
                let most = (PACK / stretch.len.max(1) / step * step).max(step);
                ranges(lanes, most).map(move |lanes| Packing {
                    side,
                    stretch,
                    lanes,
                })
            })
        };
        let [left, right] = run.packed_by.map(|by| by == number);
        all(Side::Left, left, run.rows.len, form.row_step()).chain(all(
            Side::Right,
            right,
            run.cols.len,
            COL_STEP,
        ))
    }

    fn pack(&self, number: usize, run: &Run, task: usize) {
        let Some(Packing {
            side,
            stretch,
            lanes,
        }) = self.packs(number, run).nth(task)
        else {
            return;
        };
        let p = &self.products[run.summand];
        let k = run.k.first + stretch.first;
        let form = self.kernel.form(p);
        let (x, all, packed) = match side {
            Side::Left => {
                let a =
                    p.a.part(run.rows.first + lanes.first, k, lanes.len, stretch.len);
                (a, form.lanes(run.rows.len), &self.left)
            }
            Side::Right => {
                let b =
                    p.b.part(k, run.cols.first + lanes.first, stretch.len, lanes.len);
                let all = run.cols.len.next_multiple_of(COL_STEP);
                (b.transposed(), all, &self.right)
            }
        };
        let width = self.kernel.width(form, side);
        let before = form.before(stretch.first, p.depth().stretch());
        let steps = form.steps(stretch.len);
        let at = before * all + lanes.first * steps;
        let len = lanes.len.next_multiple_of(width) * steps;
        // SAFETY: tasks pack disjoint parts, and nothing reads them before the phase ends.
        let out = unsafe { packed.part(at, len) };
        let least = pack(self.kernel.level, form, side, width, x, out);
        self.least[number][usize::from(side == Side::Right)].fetch_min(least, Ordering::Relaxed);
    }

    /// Bounds of both packed parts of a run.
    fn least(&self, run: &Run) -> [Least; 2] {
        // Packing ended, and its phase with it, before a block reads them.
        [0, 1].map(|side| self.least[run.packed_by[side]][side].load(Ordering::Relaxed))
    }

    fn block(&self, run: &Run, task: usize) {
        let (height, width) = run.block;
        let down = run.rows.len.div_ceil(height);
        let (row, col) = (task % down * height, task / down * width);
        let (rows, cols) = (
            height.min(run.rows.len - row),
            width.min(run.cols.len - col),
        );
        let (at_row, at_col) = (run.rows.first + row, run.cols.first + col);
        let in_place = T::DTYPE == DType::F32;
        let (to, stride) = if in_place {
            let to = self.out.at(at_row * self.n + at_col).cast::<f32>();
            (to, self.n)
        } else {
            (self.sums.at(row * run.cols.len + col), run.cols.len)
        };
        let p = &self.products[run.summand];
        let (form, least) = (self.kernel.form(p), self.least(run));
        let (all_rows, all_cols) = (
            form.lanes(run.rows.len),
            run.cols.len.next_multiple_of(COL_STEP),
        );
        for (i, stretch) in self.stretches(run).enumerate() {
            let before = form.before(stretch.first, p.depth().stretch());
            let steps = form.steps(stretch.len);
            let a = self.left.at(before * all_rows + row * steps);
            let b = self.right.at(before * all_cols + col * steps);
            for j in (0..cols).step_by(self.kernel.cols) {
                let wide = self.kernel.cols.min(cols - j);
                // SAFETY: column `j` of the block, which is inside the output or the sums.
                let to = unsafe { to.add(j) };
                let place = TileIo::new(to, stride, self.start, run.first && i == 0, at_col + j);
                // SAFETY: packing ended before this phase began, each column of a panel of `b` has `steps` elements, and
                // blocks of different tasks are disjoint.
                unsafe {
                    let panels = Panels {
                        form,
                        depth: stretch.len,
                        a,
                        b: b.add(j * steps),
                        least,
                        factor: p.factor,
                    };
                    self.kernel.column((rows, wide), panels, place);
                }
            }
        }
        if run.last && !in_place {
            for i in 0..rows {
                // SAFETY: blocks of different tasks are disjoint.
                unsafe {
                    let sums = self.sums.part((row + i) * run.cols.len + col, cols);
                    narrow(sums, self.out.part((at_row + i) * self.n + at_col, cols));
                }
            }
        }
    }
}

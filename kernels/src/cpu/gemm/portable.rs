//! Kernel in plain Rust, for processors without AVX2 and FMA.

use super::kernel::TileIo;

pub(super) const ROWS: usize = 4;
pub(super) const COLS: usize = 16;

/// # Safety
/// As [`super::kernel::Kernel::column`] for at most one panel of rows.
pub(super) unsafe fn tile(
    rows: usize,
    cols: usize,
    depth: usize,
    a: *const f32,
    b: *const f32,
    factor: f32,
    place: TileIo,
) {
    // SAFETY: by the contract the panels have depth `depth`.
    let (a, b) = unsafe {
        (
            std::slice::from_raw_parts(a, ROWS * depth),
            std::slice::from_raw_parts(b, COLS * depth),
        )
    };
    let mut sums = [[0.0f32; COLS]; ROWS];
    for (a, b) in a.chunks_exact(ROWS).zip(b.chunks_exact(COLS)) {
        for (sums, a) in sums.iter_mut().zip(a) {
            for (sum, b) in sums.iter_mut().zip(b) {
                *sum = a.mul_add(*b, *sum);
            }
        }
    }
    for (i, sums) in sums.iter().enumerate().take(rows) {
        for (j, sum) in sums.iter().enumerate().take(cols) {
            // SAFETY: by the contract the rows have `cols` elements.
            unsafe {
                let from = *place.from.add(i * place.from_stride + j);
                *place.to.add(i * place.to_stride + j) = factor.mul_add(*sum, from);
            }
        }
    }
}

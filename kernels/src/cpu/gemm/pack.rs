//! Copies of operands in the order in which the kernels read them.
//!
//! An operand is `lanes × depth`: rows of `a` or columns of `b`, by `k`. Its lanes are cut into panels as wide as a
//! tile. A panel stores its lanes side by side for each `k`. Missing lanes are zeros. 16-bit elements are converted
//! to f32, or stay bf16 in pairs or tiles ([`Form`]).

use super::kernel::{Form, Least, NO_LEAST, Side};
use crate::Float;
use crate::cpu::matrix::{Floats, Matrix};
use crate::cpu::simd::{Level, multiversion, prefetch};

/// Side of the squares transposed at once: one cache line of f32.
const SIDE: usize = 16;

/// Prefetch distance along a lane, in elements.
const AHEAD: usize = 64;
/// Prefetch distance in `k`, if lanes are side by side in memory.
const AHEAD_ROWS: usize = 8;
/// Bytes of a cache line.
const LINE: usize = 64;

/// Packs `x [lanes, depth]` into panels of `width` lanes, at the front of `out`. Returns the bound of a packed operand
/// of pairs or tiles.
pub(super) fn pack(
    level: Level,
    form: Form,
    side: Side,
    width: usize,
    x: Matrix<'_>,
    out: &mut [f32],
) -> Least {
    if x.rows == 0 || x.cols == 0 {
        return NO_LEAST;
    }
    let out = &mut out[..x.rows.next_multiple_of(width) * form.steps(x.cols)];
    match (form, x.data()) {
        #[cfg(target_arch = "x86_64")]
        (Form::Pair, Floats::BF16(data)) => {
            return super::x86::pairs::pack(width, data, x, bytemuck::cast_slice_mut(out));
        }
        #[cfg(target_arch = "x86_64")]
        (Form::Tiles, Floats::BF16(data)) => return super::x86::amx::pack(side, data, x, out),
        #[cfg(target_arch = "x86_64")]
        (Form::Tiles, Floats::F32(data)) => return super::x86::amx::pack(side, data, x, out),
        (Form::Pair | Form::Tiles, _) => unreachable!("only bf16 is packed in pairs, {side:?}"),
        (Form::Single, Floats::F32(data)) => pack_of(level, width, data, x, out),
        (Form::Grouped, Floats::F32(data)) => {
            pack_of(level, width, data, x, out);
            super::tiles::round(out);
        }
        (Form::Single | Form::Grouped, Floats::BF16(data)) => pack_of(level, width, data, x, out),
        (Form::Single | Form::Grouped, Floats::F16(data)) => pack_of(level, width, data, x, out),
    }
    NO_LEAST
}

fn pack_of<T: Float>(level: Level, width: usize, data: &[T], x: Matrix<'_>, out: &mut [f32]) {
    let (lane_stride, depth_stride) = x.strides();
    if lane_stride == 1 {
        beside(data, depth_stride, (x.rows, x.cols), width, out);
        return;
    }
    assert!(depth_stride == 1, "strides {lane_stride}, {depth_stride}");
    assert!((x.rows - 1) * lane_stride + x.cols <= data.len());
    match level {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the processor has the instructions, and the assertion checks that the lanes are inside the slice.
        Level::V4 | Level::V4Bf16 => unsafe {
            across_v4(data, lane_stride, (x.rows, x.cols), width, out);
        },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Level::V3 => unsafe {
            super::x86::avx2::pack_across(data, lane_stride, (x.rows, x.cols), width, out);
        },
        Level::Portable => across(data, lane_stride, (x.rows, x.cols), width, out),
    }
}

multiversion! {
    /// Packs an operand whose lanes are side by side in memory for each `k`.
    fn beside<T: Float>(
        x: &[T],
        stride: usize,
        extents: (usize, usize),
        width: usize,
        out: &mut [f32],
    ) {
        match width {
            4 => beside_of::<T, 4>(x, stride, extents, out),
            6 => beside_of::<T, 6>(x, stride, extents, out),
            8 => beside_of::<T, 8>(x, stride, extents, out),
            16 => beside_of::<T, 16>(x, stride, extents, out),
            _ => beside_of::<T, 48>(x, stride, extents, out),
        }
    }
}

#[inline(always)]
fn beside_of<T: Float, const W: usize>(
    x: &[T],
    stride: usize,
    (lanes, depth): (usize, usize),
    out: &mut [f32],
) {
    for k in 0..depth {
        let ahead = x.as_ptr().wrapping_add((k + AHEAD_ROWS) * stride);
        for line in (0..lanes * size_of::<T>()).step_by(LINE) {
            prefetch(ahead.wrapping_byte_add(line));
        }
        let (whole, rest) = x[k * stride..][..lanes].as_chunks::<W>();
        let mut at = k * W;
        for x in whole {
            let out = &mut out[at..][..W];
            for i in 0..W {
                out[i] = x[i].to_f32();
            }
            at += W * depth;
        }
        if !rest.is_empty() {
            let out = &mut out[at..][..W];
            out.fill(0.0);
            for (o, x) in out.iter_mut().zip(rest) {
                *o = x.to_f32();
            }
        }
    }
}

/// Packs an operand whose elements of one lane are side by side in memory.
fn across<T: Float>(
    x: &[T],
    stride: usize,
    (lanes, depth): (usize, usize),
    width: usize,
    out: &mut [f32],
) {
    for (p, out) in out.chunks_exact_mut(width * depth).enumerate() {
        let filled = width.min(lanes - p * width);
        for first in (0..depth).step_by(SIDE) {
            for i in 0..filled {
                let x = &x[(p * width + i) * stride + first..][..SIDE.min(depth - first)];
                for (k, x) in x.iter().enumerate() {
                    out[(first + k) * width + i] = x.to_f32();
                }
            }
            for i in filled..width {
                for k in first..depth.min(first + SIDE) {
                    out[k * width + i] = 0.0;
                }
            }
        }
    }
}

/// [`across`] with squares in registers. `width` is half of a square or a multiple of a square.
///
/// # Safety
/// The processor has AVX-512, and `x` contains all lanes.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,f16c")]
unsafe fn across_v4<T: Float>(
    x: &[T],
    stride: usize,
    (lanes, depth): (usize, usize),
    width: usize,
    out: &mut [f32],
) {
    use super::x86::square::{load, store_all, transpose, zeros};
    let all = lanes.next_multiple_of(width);
    // Lanes of a square that are side by side in a panel.
    let piece = width.min(SIDE);
    for lane in (0..all).step_by(SIDE) {
        let filled = SIDE.min(lanes.saturating_sub(lane));
        for first in (0..depth).step_by(SIDE) {
            let long = (depth - first).min(SIDE);
            let ahead = if first + AHEAD < depth {
                lane * stride + first + AHEAD
            } else {
                (lane + SIDE) * stride + (first + AHEAD) % depth
            };
            let from = x.as_ptr().wrapping_add(lane * stride + first);
            let ahead = x.as_ptr().wrapping_add(ahead);
            let mut square = zeros();
            for i in 0..filled {
                prefetch(ahead.wrapping_add(i * stride));
                // SAFETY: `long` elements of a lane.
                square[i] = unsafe { load(from.wrapping_add(i * stride), long) };
            }
            let square = transpose(square);
            for at in (lane..all.min(lane + SIDE)).step_by(piece) {
                let panel = &mut out[at / width * width * depth..][..width * depth];
                let to = &mut panel[first * width + at % width..];
                store_all(to, width, &square[..long], at - lane, piece);
            }
        }
    }
}

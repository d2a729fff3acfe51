//! Tiles of bf16 by AMX: packing, and products of two panels of rows and three of columns.
//!
//! Of the eight tile registers six hold sums, one a tile of the left operand and one a tile of the right. Rust has no stable
//! intrinsics for AMX, so the instructions are written as assembly.

use std::arch::asm;
#[allow(
    clippy::wildcard_imports,
    reason = "intrinsics have unmistakable names"
)]
use std::arch::x86_64::*;
use std::cell::Cell;
use std::sync::OnceLock;

use super::grouped::tile_of_pairs;
use super::pairs::Bound;
use super::square::{transpose, zeros};
use crate::cpu::gemm::kernel::{Least, Side, TileIo};
use crate::cpu::gemm::tiles::{self, GROUP, SIDE, WORDS};
use crate::cpu::matrix::Matrix;
use crate::cpu::simd::{Level, prefetch, supported};
use crate::{DType, Float};
use half::bf16;

/// Prefetch distance in elements along a lane, and in `k` if lanes are side by side in memory.
const AHEAD: usize = 4 * GROUP;
const AHEAD_ROWS: usize = 16;
/// Bytes of a row of a tile.
const ROW_BYTES: usize = 64;

/// Packs `x [lanes, depth]` of bf16 or f32 into panels of tiles at the front of `out`. Returns their smallest magnitude.
///
/// The processor has AVX-512 F and BW.
pub(in crate::cpu::gemm) fn pack<T: Float>(
    side: Side,
    data: &[T],
    x: Matrix<'_>,
    out: &mut [f32],
) -> Least {
    let (lane_stride, depth_stride) = x.strides();
    let (lanes, depth) = (x.rows, x.cols);
    assert!(
        lane_stride == 1 || depth_stride == 1,
        "strides {lane_stride}, {depth_stride}"
    );
    assert!(out.len() == lanes.next_multiple_of(SIDE) * depth.next_multiple_of(GROUP) / 2);
    assert!((lanes - 1) * lane_stride + (depth - 1) * depth_stride < data.len());
    // SAFETY: all lanes are inside the slice, as asserted. Only processors with AVX-512 pack tiles.
    unsafe { squares(side, data, (lane_stride, depth_stride), (lanes, depth), out) }
}

/// # Safety
/// The processor has AVX-512 F and BW, and `x` contains all lanes. One of the strides is 1.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn squares<T: Float>(
    side: Side,
    x: &[T],
    (lane_stride, depth_stride): (usize, usize),
    (lanes, depth): (usize, usize),
    out: &mut [f32],
) -> Least {
    let mut bound = Bound::new();
    let across = depth_stride == 1;
    let groups = depth.div_ceil(GROUP);
    for (at, tile) in out.chunks_exact_mut(WORDS).enumerate() {
        let (lane, k) = (at / groups * SIDE, at % groups * GROUP);
        let (there, long) = ((lanes - lane).min(SIDE), (depth - k).min(GROUP));
        let from = x
            .as_ptr()
            .wrapping_add(lane * lane_stride + k * depth_stride);
        // SAFETY: `there` lanes and `long` elements of each are inside the slice; nothing else is read.
        let square = unsafe {
            match across {
                true => rows_of_lanes(from, lane_stride, (there, long)),
                false => rows_of_pairs(from, depth_stride, (there, long)),
            }
        };
        for row in square {
            bound = bound.with(_mm512_castps_si512(row));
        }
        let square = match (across, side) {
            (true, Side::Left) | (false, Side::Right) => square,
            _ => transpose(square),
        };
        for (row, out) in square.into_iter().zip(tile.chunks_exact_mut(SIDE)) {
            // SAFETY: a slice of 16 elements.
            unsafe { _mm512_storeu_ps(out.as_mut_ptr(), row) };
        }
    }
    bound.least()
}

/// A square whose rows are lanes.
///
/// # Safety
/// The processor has AVX-512 F and BW. `lanes` lanes have `long` elements each, side by side in memory.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn rows_of_lanes<T: Float>(
    from: *const T,
    stride: usize,
    (lanes, long): (usize, usize),
) -> [__m512; 16] {
    let mask = u32::MAX >> (GROUP - long);
    let mut square = zeros();
    for (i, row) in square.iter_mut().enumerate().take(lanes) {
        let lane = from.wrapping_add(i * stride);
        prefetch(lane.wrapping_add(AHEAD));
        // SAFETY: the caller's promise; other elements are not read.
        let words = unsafe {
            if T::DTYPE == DType::F32 {
                let (low, high) = (mask as __mmask16, (mask >> 16) as __mmask16);
                let low = rounded(_mm512_maskz_loadu_epi32(low, lane.cast()));
                let high = rounded(_mm512_maskz_loadu_epi32(high, lane.wrapping_add(16).cast()));
                _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
            } else {
                _mm512_maskz_loadu_epi16(mask, lane.cast())
            }
        };
        *row = _mm512_castsi512_ps(words);
    }
    square
}

/// A square whose rows are pairs of `k`.
///
/// # Safety
/// The processor has AVX-512 F and BW. For each of `long` k, `lanes` elements are side by side in memory.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn rows_of_pairs<T: Float>(
    from: *const T,
    stride: usize,
    (lanes, long): (usize, usize),
) -> [__m512; 16] {
    let mask = ((1u32 << lanes) - 1) as __mmask16;
    let mut square = zeros();
    for (i, row) in square.iter_mut().enumerate().take(long.div_ceil(2)) {
        let first = from.wrapping_add(2 * i * stride);
        let second = first.wrapping_add(stride);
        prefetch(first.wrapping_add(AHEAD_ROWS * stride));
        prefetch(second.wrapping_add(AHEAD_ROWS * stride));
        let both = if 2 * i + 1 < long { mask } else { 0 };
        // SAFETY: the caller's promise; other elements are not read.
        let (even, odd) = unsafe {
            if T::DTYPE == DType::F32 {
                (
                    rounded(_mm512_maskz_loadu_epi32(mask, first.cast())),
                    rounded(_mm512_maskz_loadu_epi32(both, second.cast())),
                )
            } else {
                (
                    _mm256_maskz_loadu_epi16(mask, first.cast()),
                    _mm256_maskz_loadu_epi16(both, second.cast()),
                )
            }
        };
        let odd = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(odd));
        let pairs = _mm512_or_si512(_mm512_cvtepu16_epi32(even), odd);
        *row = _mm512_castsi512_ps(pairs);
    }
    square
}

/// f32 rounded to the nearest bf16, ties to even; NaN stays NaN, as `bf16::from_f32` has it.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn rounded(x: __m512i) -> __m256i {
    let upper = _mm512_srli_epi32::<16>(x);
    let odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
    let up = _mm512_add_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(0x7fff)), odd);
    let magnitude = _mm512_and_si512(x, _mm512_set1_epi32(0x7fff_ffff));
    let nan = _mm512_cmpgt_epi32_mask(magnitude, _mm512_set1_epi32(0x7f80_0000));
    let quiet = _mm512_or_si512(upper, _mm512_set1_epi32(0x40));
    let bits = _mm512_mask_mov_epi32(_mm512_srli_epi32::<16>(up), nan, quiet);
    _mm512_cvtepi32_epi16(bits)
}

/// Configuration of the tile registers: all eight have 16 rows of 64 bytes.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

static CONFIG: Config = Config {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

thread_local! {
    /// Whether this thread configured its tile registers.
    static CONFIGURED: Cell<bool> = const { Cell::new(false) };
}

/// As [`tile_of_pairs`], with AMX.
///
/// # Safety
/// As [`tile_of_pairs`], and [`is_usable`] is true.
pub(in crate::cpu::gemm) unsafe fn tile(
    rows: usize,
    cols: usize,
    steps: usize,
    a: *const f32,
    b: *const f32,
    factor: f32,
    place: TileIo,
) {
    if !CONFIGURED.replace(true) {
        // SAFETY: the configuration is valid, and the system lets this process use the registers.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const CONFIG, options(nostack, readonly));
        }
    }
    let mut sums = Accumulators([[0.0; WORDS]; 6]);
    let groups = steps / tiles::PAIRS;
    let (height, width) = (rows.div_ceil(SIDE), cols.div_ceil(SIDE));
    // SAFETY: the panels that are multiplied exist.
    unsafe {
        match (height, width) {
            (2, 3) => two_by_three(groups, a, b, &mut sums),
            _ => {
                for i in 0..height {
                    for j in 0..width {
                        let (a, b) = (a.add(i * SIDE * steps), b.add(j * SIDE * steps));
                        one(groups, a, b, &mut sums.0[3 * i + j]);
                    }
                }
            }
        }
    }
    for i in 0..rows {
        for j in 0..width {
            let sums = &sums.0[i / SIDE * 3 + j][i % SIDE * SIDE..][..SIDE];
            let place = place.at(i, j * SIDE);
            for (j, sum) in sums.iter().enumerate().take((cols - j * SIDE).min(SIDE)) {
                // SAFETY: by the contract the rows have `cols` elements.
                unsafe { *place.to.add(j) = factor.mul_add(*sum, *place.from.add(j)) };
            }
        }
    }
}

/// Accumulators of up to two panels of rows and three of columns.
#[repr(align(64))]
struct Accumulators([[f32; WORDS]; 6]);

/// The sums of one panel of each operand.
///
/// # Safety
/// Both panels have `groups` tiles, and the registers are configured.
unsafe fn one(groups: usize, a: *const f32, b: *const f32, sums: &mut [f32; WORDS]) {
    // SAFETY: the caller's promise. Only the registers named are changed.
    unsafe {
        asm!(
            "tilezero tmm0",
            "test {groups}, {groups}",
            "jz 3f",
            "2:",
            "tileloadd tmm6, [{a} + {row}*1]",
            "tileloadd tmm7, [{b} + {row}*1]",
            "tdpbf16ps tmm0, tmm6, tmm7",
            "add {a}, 1024",
            "add {b}, 1024",
            "dec {groups}",
            "jnz 2b",
            "3:",
            "tilestored [{sums} + {row}*1], tmm0",
            groups = inout(reg) groups => _,
            a = inout(reg) a => _,
            b = inout(reg) b => _,
            row = in(reg) ROW_BYTES,
            sums = in(reg) sums.as_mut_ptr(),
            out("tmm0") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// The sums of two panels of rows and three of columns.
///
/// # Safety
/// All panels have `groups` tiles, and the registers are configured.
unsafe fn two_by_three(groups: usize, a: *const f32, b: *const f32, sums: &mut Accumulators) {
    let panel = groups * WORDS * size_of::<f32>();
    // SAFETY: the caller's promise. Only the registers named are changed.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "tilezero tmm4",
            "tilezero tmm5",
            "test {groups}, {groups}",
            "jz 3f",
            "2:",
            "tileloadd tmm7, [{b0} + {row}*1]",
            "tileloadd tmm6, [{a0} + {row}*1]",
            "tdpbf16ps tmm0, tmm6, tmm7",
            "tileloadd tmm6, [{a1} + {row}*1]",
            "tdpbf16ps tmm3, tmm6, tmm7",
            "tileloadd tmm7, [{b1} + {row}*1]",
            "tdpbf16ps tmm4, tmm6, tmm7",
            "tileloadd tmm6, [{a0} + {row}*1]",
            "tdpbf16ps tmm1, tmm6, tmm7",
            "tileloadd tmm7, [{b2} + {row}*1]",
            "tdpbf16ps tmm2, tmm6, tmm7",
            "tileloadd tmm6, [{a1} + {row}*1]",
            "tdpbf16ps tmm5, tmm6, tmm7",
            "add {a0}, 1024",
            "add {a1}, 1024",
            "add {b0}, 1024",
            "add {b1}, 1024",
            "add {b2}, 1024",
            "dec {groups}",
            "jnz 2b",
            "3:",
            "tilestored [{sums} + {row}*1], tmm0",
            "tilestored [{sums} + {row}*1 + 1024], tmm1",
            "tilestored [{sums} + {row}*1 + 2048], tmm2",
            "tilestored [{sums} + {row}*1 + 3072], tmm3",
            "tilestored [{sums} + {row}*1 + 4096], tmm4",
            "tilestored [{sums} + {row}*1 + 5120], tmm5",
            groups = inout(reg) groups => _,
            a0 = inout(reg) a => _,
            a1 = inout(reg) a.wrapping_byte_add(panel) => _,
            b0 = inout(reg) b => _,
            b1 = inout(reg) b.wrapping_byte_add(panel) => _,
            b2 = inout(reg) b.wrapping_byte_add(2 * panel) => _,
            row = in(reg) ROW_BYTES,
            sums = in(reg) sums.0.as_mut_ptr(),
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// Whether AMX is there, the system lets this process use it, and its products of a few tiles have the bits of the
/// definition. Found out once per process.
pub(in crate::cpu::gemm) fn is_usable() -> bool {
    static USABLE: OnceLock<bool> = OnceLock::new();
    *USABLE.get_or_init(|| supported() >= Level::V4 && present() && permitted() && agrees(tile))
}

/// Whether the processor has tiles of bf16.
fn present() -> bool {
    #[allow(unused_unsafe, reason = "unsafe in older compilers")]
    // SAFETY: every x86-64 has the instruction; leaf 7 is read only where it exists.
    unsafe {
        if __cpuid(0).eax < 7 {
            return false;
        }
        let features = __cpuid_count(7, 0).edx;
        features >> 22 & 1 == 1 && features >> 24 & 1 == 1
    }
}

/// Asks Linux for the tile registers, for all threads of this process.
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: i64 = 0x1023;
    const XFEATURE_XTILEDATA: i64 = 18;
    // SAFETY: the call changes nothing but what later instructions may do.
    unsafe {
        libc::syscall(
            libc::SYS_arch_prctl,
            ARCH_REQ_XCOMP_PERM,
            XFEATURE_XTILEDATA,
        ) == 0
    }
}

#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

/// Whether a function for tiles has the bits of the definition, on values whose sums are rounded.
fn agrees(tile: crate::cpu::gemm::kernel::Tile) -> bool {
    let mut seed = 1u64;
    let mut draw = |words: usize| -> Vec<f32> {
        let mut half = || {
            seed = seed
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let value = (seed >> 40) as f32 / (1 << 23) as f32 - 1.0;
            u32::from(bf16::from_f32(value).to_bits())
        };
        (0..words)
            .map(|_| f32::from_bits(half() | half() << 16))
            .collect()
    };
    [(32, 48, 5), (16, 48, 1), (32, 16, 2), (7, 33, 8)]
        .into_iter()
        .all(|(rows, cols, groups)| {
            let (a, b) = (draw(2 * groups * WORDS), draw(3 * groups * WORDS));
            let from = draw(rows * cols);
            let out = |tile: crate::cpu::gemm::kernel::Tile| {
                let mut to = from.clone();
                let place = TileIo {
                    from: from.as_ptr(),
                    from_stride: cols,
                    to: to.as_mut_ptr(),
                    to_stride: cols,
                };
                let steps = groups * tiles::PAIRS;
                // SAFETY: the operands have two panels of rows and three of columns, and the place all rows.
                unsafe { tile(rows, cols, steps, a.as_ptr(), b.as_ptr(), 0.5, place) };
                to.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
            };
            out(tile) == out(tile_of_pairs)
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::gemm::kernel::Tile;

    /// A wrong order, which rounds otherwise than the definition: one chain over all `k`.
    ///
    /// # Safety
    /// As [`tile_of_pairs`].
    unsafe fn one_chain(
        rows: usize,
        cols: usize,
        steps: usize,
        a: *const f32,
        b: *const f32,
        factor: f32,
        place: TileIo,
    ) {
        for i in 0..rows {
            for j in 0..cols {
                let mut sum = 0.0f32;
                for pair in 0..steps {
                    // SAFETY: the panels have `steps` words a lane.
                    let [x, y] = unsafe {
                        let (group, at) = (pair / tiles::PAIRS, pair % tiles::PAIRS);
                        let left = i / SIDE * SIDE * steps + group * WORDS + i % SIDE * SIDE + at;
                        let right = j / SIDE * SIDE * steps + pair * SIDE + j % SIDE;
                        [*a.add(left), *b.add(right)].map(f32::to_bits)
                    };
                    let halves = |x: u32| [x << 16, x & 0xffff_0000].map(f32::from_bits);
                    for (x, y) in halves(x).into_iter().zip(halves(y)) {
                        sum = x.mul_add(y, sum);
                    }
                }
                let place = place.at(i, j);
                // SAFETY: the rows have `cols` elements.
                unsafe { *place.to = factor.mul_add(sum, *place.from) };
            }
        }
    }

    #[test]
    fn operands_of_f32_are_rounded_as_elsewhere() {
        if supported() < Level::V4 {
            return;
        }
        let special = [
            0.0,
            -0.0,
            f32::NAN,
            f32::INFINITY,
            f32::MAX,
            f32::MIN_POSITIVE,
        ];
        let bits = [
            0x7f80_0001,
            0xffbf_ffff,
            1,
            0x3f80_8000,
            0x3f81_8000,
            0x7f7f_8000,
        ];
        let values = special.into_iter().chain(bits.map(f32::from_bits));
        let mut values: Vec<f32> = values.collect();
        values.resize(16, 1.0);
        // SAFETY: the processor has the instructions, and both arrays 16 elements.
        let got: [u16; 16] = unsafe {
            let rounded = rounded(_mm512_loadu_si512(values.as_ptr().cast()));
            std::mem::transmute(rounded)
        };
        let want: Vec<u16> = values
            .iter()
            .map(|x| bf16::from_f32(*x).to_bits())
            .collect();
        assert_eq!(got[..], want[..]);
    }

    #[test]
    fn instructions_with_other_bits_are_not_used() {
        if supported() >= Level::V4 {
            assert!(agrees(tile_of_pairs as Tile));
            assert!(!agrees(one_chain as Tile));
        }
    }
}

//! Tests of every kernel's bits against the definition of a product, element by element.

use super::tiles::{GROUP, Tiles};
use super::{
    CpuMath, Depth, Matrix, Method, Out, Product, STRETCH, STRETCH_STEP, multiply_by, part_step,
    stretch, stretches, workspace,
};
use crate::cpu::matrix::{Floats, narrow};
use crate::cpu::simd::{Level, supported};
use crate::{DType, Float};
use half::{bf16, f16};
use proptest::prelude::*;
use std::ops::Range;

/// Values of one operand, in each element type.
struct Values {
    wide: Vec<f32>,
    brain: Vec<bf16>,
    half: Vec<f16>,
}

impl Values {
    fn new(n: usize, seed: &mut u64) -> Self {
        let mut draw = || {
            *seed = seed
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (*seed >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        let wide: Vec<f32> = (0..n).map(|_| draw()).collect();
        let brain = wide.iter().map(|x| bf16::from_f32(*x)).collect();
        let half = wide.iter().map(|x| f16::from_f32(*x)).collect();
        Self { wide, brain, half }
    }

    /// Values of bf16 with exponent fields in this range. Zero is that of zeros and subnormal numbers.
    fn with_exponents(range: Range<u16>, n: usize, seed: &mut u64) -> Self {
        let mut draw = || {
            *seed = seed
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let (sign, bits) = ((*seed >> 63) as u16, (*seed >> 40) as u16);
            let exponent = range.start + (bits >> 7) % range.len() as u16;
            bf16::from_bits(sign << 15 | exponent << 7 | bits & 0x7f)
        };
        let brain: Vec<bf16> = (0..n).map(|_| draw()).collect();
        let wide: Vec<f32> = brain.iter().map(|x| x.to_f32()).collect();
        let half = wide.iter().map(|x| f16::from_f32(*x)).collect();
        Self { wide, brain, half }
    }

    fn matrix(&self, dtype: DType, rows: usize, cols: usize, transposed: bool) -> Matrix<'_> {
        let data = match dtype {
            DType::BF16 => Floats::BF16(&self.brain),
            DType::F16 => Floats::F16(&self.half),
            _ => Floats::F32(&self.wide),
        };
        if transposed {
            Matrix::new(data, cols, rows).transposed()
        } else {
            Matrix::new(data, rows, cols)
        }
    }
}

fn at(x: &Matrix<'_>, row: usize, col: usize) -> f32 {
    let (row_stride, col_stride) = x.strides();
    let mut out = [0.0];
    x.data()
        .widen(row * row_stride + col * col_stride, &mut out);
    out[0]
}

/// One element of an f32 output, by definition.
fn element(math: CpuMath, products: &[Product<'_>], from: f32, row: usize, col: usize) -> f32 {
    let mut sum = from;
    for p in products {
        let dtypes = [p.a.data().dtype(), p.b.data().dtype()];
        let grouped =
            math == CpuMath::Amx && dtypes.contains(&DType::BF16) && !dtypes.contains(&DType::F16);
        let value = |x: f32| match grouped {
            true => bf16::from_f32(x).to_f32(),
            false => x,
        };
        let chain = |first: usize, len: usize, step: usize| {
            let all = (first..first + len).step_by(step);
            all.fold(0.0f32, |chain, k| {
                value(at(&p.a, row, k)).mul_add(value(at(&p.b, k, col)), chain)
            })
        };
        for (first, len) in stretches(p.a.cols, stretch(p.whole)) {
            let mut stretch = 0.0f32;
            if grouped {
                for (at, len) in stretches(len, GROUP).filter(|group| group.1 > 0) {
                    let odd = chain(first + at + 1, len - 1, 2);
                    stretch += chain(first + at, len, 2) + odd;
                }
            } else {
                stretch = chain(first, len, 1);
            }
            sum = p.factor.mul_add(stretch, sum);
        }
    }
    sum
}

/// All methods that this processor has, with these sums.
fn methods(math: CpuMath) -> Vec<Method> {
    let mut all = vec![(Level::Portable, Tiles::None)];
    #[cfg(target_arch = "x86_64")]
    all.extend([Level::V3, Level::V4, Level::V4Bf16].map(|level| (level, Tiles::None)));
    #[cfg(target_arch = "x86_64")]
    if math == CpuMath::Amx {
        all.push((Level::V4, Tiles::Software));
        all.extend(super::has_amx().then_some((Level::V4, Tiles::Amx)));
    }
    all.retain(|(level, _)| *level <= supported());
    let method = |(level, tiles)| Method { level, math, tiles };
    all.into_iter().map(method).collect()
}

const MATHS: [CpuMath; 2] = [CpuMath::Portable, CpuMath::Amx];

/// Bits of a product computed by one method on a number of threads, in exactly the workspace it asks for.
fn bits<T: Float>(
    (method, threads): (Method, usize),
    products: &[Product<'_>],
    bias: Option<&[f32]>,
    before: &[f32],
    accumulate: bool,
) -> Vec<f32> {
    let depths: Vec<Depth> = products.iter().map(Product::depth).collect();
    let (m, n) = (products[0].a.rows, products[0].b.cols);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    pool.expect("threads").install(|| {
        let mut space = vec![f32::NAN; workspace(m, n, &depths, T::DTYPE)];
        let mut out: Vec<T> = before.iter().map(|x| T::from_f32(*x)).collect();
        match T::DTYPE {
            DType::BF16 => {
                let out = Out::BF16(bytemuck::cast_slice_mut(&mut out));
                multiply_by(method, products, bias, out, &mut space);
            }
            DType::F16 => {
                let out = Out::F16(bytemuck::cast_slice_mut(&mut out));
                multiply_by(method, products, bias, out, &mut space);
            }
            _ => {
                let data = bytemuck::cast_slice_mut(&mut out);
                let out = Out::F32 { data, accumulate };
                multiply_by(method, products, bias, out, &mut space);
            }
        }
        out.iter().map(|x| x.to_f32()).collect()
    })
}

/// Checks that all methods, on one and three threads, give the bits of the definition.
fn check(products: &[Product<'_>], bias: Option<&[f32]>, out: DType, accumulate: bool) {
    for math in MATHS {
        check_sums(math, products, bias, out, accumulate);
    }
}

fn check_sums(
    math: CpuMath,
    products: &[Product<'_>],
    bias: Option<&[f32]>,
    out: DType,
    accumulate: bool,
) {
    let (m, n) = (products[0].a.rows, products[0].b.cols);
    let accumulate = accumulate && out == DType::F32;
    let before: Vec<f32> = (0..m * n).map(|i| (i % 13) as f32 - 6.0).collect();
    let from = |row: usize, col: usize| {
        let bias = bias.map_or(0.0, |b| b[col]);
        let before = if accumulate {
            before[row * n + col]
        } else {
            0.0
        };
        before + bias
    };
    let wide: Vec<f32> = (0..m * n)
        .map(|i| element(math, products, from(i / n, i % n), i / n, i % n))
        .collect();
    let want: Vec<f32> = match out {
        DType::BF16 => rounded::<bf16>(&wide),
        DType::F16 => rounded::<f16>(&wide),
        _ => wide,
    };
    for method in methods(math) {
        for threads in [1, 3] {
            let on = (method, threads);
            let got = match out {
                DType::BF16 => bits::<bf16>(on, products, bias, &before, false),
                DType::F16 => bits::<f16>(on, products, bias, &before, false),
                _ => bits::<f32>(on, products, bias, &before, accumulate),
            };
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                let (row, col) = (i / n, i % n);
                assert!(
                    got == want,
                    "{method:?}, {threads} threads: [{row}, {col}] of [{m}, {n}] is {got}, not {want}"
                );
            }
        }
    }
}

fn rounded<T: Float>(x: &[f32]) -> Vec<f32> {
    let mut out = vec![T::from_f32(0.0); x.len()];
    narrow(x, &mut out);
    out.iter().map(|x| x.to_f32()).collect()
}

fn dtypes() -> impl Strategy<Value = DType> {
    prop_oneof![Just(DType::F32), Just(DType::BF16), Just(DType::F16)]
}

fn extents() -> impl Strategy<Value = usize> {
    prop_oneof![1..8usize, 8..40usize, 40..90usize]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_kernel_has_the_bits_of_the_definition(
        (m, n) in (extents(), extents()),
        depths in prop::collection::vec(prop_oneof![0..40usize, 60..140usize, 240..300usize, 500..560usize], 1..3),
        (a, b, out) in (dtypes(), dtypes(), dtypes()),
        (a_transposed, b_transposed) in any::<(bool, bool)>(),
        (with_bias, accumulate) in any::<(bool, bool)>(),
        factor in prop_oneof![Just(1.0f32), -2.0..2.0f32],
        seed: u64,
    ) {
        let mut seed = seed;
        let operands: Vec<(Values, Values)> = depths
            .iter()
            .map(|k| (Values::new(m * k, &mut seed), Values::new(k * n, &mut seed)))
            .collect();
        let products: Vec<Product<'_>> = operands
            .iter()
            .zip(&depths)
            .map(|((left, right), k)| {
                let left = left.matrix(a, m, *k, a_transposed);
                Product::new(left, right.matrix(b, *k, n, b_transposed), factor)
            })
            .collect();
        let bias = Values::new(n, &mut seed).wide;
        check(&products, with_bias.then_some(&bias[..]), out, accumulate);
    }
}

/// A dot product of bf16 takes subnormal numbers as zeros and makes zeros of them. The kernels must not, whether they
/// are operands or sums.
#[test]
fn products_near_the_least_normal_number_have_the_bits_of_the_definition() {
    let mut seed = 13;
    // The sum of two fields less 254 is the exponent of a product.
    for (left, right) in [
        (0..1, 240..250),
        (240..250, 0..1),
        (60..64, 60..70),
        (67..69, 67..70),
        (71..72, 71..72),
        (100..110, 110..120),
    ] {
        for (m, n, k) in [(5, 50, 33), (40, 60, 300), (1, 9, 31)] {
            let left = Values::with_exponents(left.clone(), m * k, &mut seed);
            let right = Values::with_exponents(right.clone(), k * n, &mut seed);
            for transposed in [false, true] {
                let a = left.matrix(DType::BF16, m, k, transposed);
                let b = right.matrix(DType::BF16, k, n, !transposed);
                check(&[Product::new(a, b, 1.0)], None, DType::F32, false);
            }
        }
    }
}

/// One subnormal number among zeros, in any place of either operand, is found where the operand is packed.
#[test]
fn a_single_subnormal_operand_has_the_bits_of_the_definition() {
    let (lanes, k) = (70, 300);
    let of = |brain: Vec<bf16>| Values {
        wide: brain.iter().map(|x| x.to_f32()).collect(),
        half: vec![f16::ZERO; brain.len()],
        brain,
    };
    let large = of(vec![bf16::from_f32(1e30); lanes * k]);
    for (lane, at) in [(0, 0), (20, 1), (33, 32), (47, 63), (69, 298), (69, 299)] {
        for transposed in [false, true] {
            let mut brain = vec![bf16::ZERO; lanes * k];
            brain[if transposed {
                at * lanes + lane
            } else {
                lane * k + at
            }] = bf16::from_bits(1);
            let small = of(brain);
            let rows = small.matrix(DType::BF16, lanes, k, transposed);
            let columns = large.matrix(DType::BF16, k, lanes, true);
            check(&[Product::new(rows, columns, 1.0)], None, DType::F32, false);
            let rows = large.matrix(DType::BF16, lanes, k, false);
            let columns = small.matrix(DType::BF16, lanes, k, transposed).transposed();
            check(&[Product::new(rows, columns, 1.0)], None, DType::F32, false);
        }
    }
}

/// Two products of fifteen significant bits cancel except for the last bit, the least that a sum can be.
#[test]
fn the_least_sum_of_two_products_has_the_bits_of_the_definition() {
    let power = |exponent: i32| f32::from_bits(((exponent + 127) as u32) << 23);
    for least in -130..=-122 {
        let (left, right) = (power(-50), power(least + 14 + 50));
        // Two equal rows: one row would not be packed.
        let all = |x: [f32; 2]| Values {
            wide: x.repeat(2),
            brain: x.map(bf16::from_f32).repeat(2),
            half: vec![f16::ZERO; 4],
        };
        let a = all([left * (1.0 + power(-7)), -left * (1.0 + power(-6))]);
        let b = all([right * (1.0 + power(-7)), right]);
        let product = Product::new(
            a.matrix(DType::BF16, 2, 2, false),
            b.matrix(DType::BF16, 2, 1, false),
            1.0,
        );
        let want = f32::from_bits(if least < -126 {
            1 << (least + 149)
        } else {
            ((least + 127) as u32) << 23
        });
        assert_eq!(element(CpuMath::Portable, &[product], 0.0, 0, 0), want);
        check(&[product], None, DType::F32, false);
    }
}

/// The product has more rows, columns and depth than one packed part of each operand.
#[test]
fn products_larger_than_one_packed_part_have_the_bits_of_the_definition() {
    let (m, n, k) = (270, 530, 2500);
    let mut seed = 7;
    let (left, right) = (Values::new(m * k, &mut seed), Values::new(k * n, &mut seed));
    for dtype in [DType::F32, DType::BF16] {
        let (left, right) = (
            left.matrix(dtype, m, k, false),
            right.matrix(dtype, k, n, true),
        );
        let product = Product::new(left, right, 0.5);
        let before = vec![0.0; m * n];
        let all = MATHS.into_iter().flat_map(methods);
        for method in all.filter(|method| method.level > Level::Portable) {
            let got = bits::<f32>((method, 2), &[product], None, &before, false);
            let rounded = bits::<bf16>((method, 2), &[product], None, &before, false);
            for i in (0..m * n).step_by(97).chain([m * n - 1]) {
                let want = element(method.math, &[product], 0.0, i / n, i % n);
                assert_eq!(got[i], want, "{method:?} [{}, {}]", i / n, i % n);
                let want = bf16::from_f32(want).to_f32();
                assert_eq!(rounded[i], want, "{method:?} {i}");
            }
        }
    }
}

/// One row reads columns in place: extents around the sizes of a vector, a square, a cache line and a stretch.
#[test]
fn products_of_one_row_have_the_bits_of_the_definition() {
    let mut seed = 11;
    for n in [1, 7, 8, 9, 16, 50, 100] {
        for k in [1, 3, 4, 15, 16, 17, 32, 40, 300, 512, 1040, 1800, 2048] {
            let (left, right) = (Values::new(k, &mut seed), Values::new(k * n, &mut seed));
            let bias = Values::new(n, &mut seed).wide;
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                let product = |factor| {
                    let a = left.matrix(dtype, 1, k, false);
                    Product::new(a, right.matrix(dtype, k, n, true), factor)
                };
                check(&[product(1.0), product(-0.5)], Some(&bias), dtype, false);
            }
        }
    }
}

/// Operands end where a page ends, and the page behind cannot be read.
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
#[test]
fn products_read_nothing_behind_their_operands() {
    const PAGE: usize = 4096;
    let guarded = |values: &[u8]| {
        let room = values.len().next_multiple_of(PAGE);
        let mut map = memmap2::MmapMut::map_anon(room + PAGE).expect("memory");
        map[room - values.len()..room].copy_from_slice(values);
        let behind = map[room..].as_mut_ptr();
        // SAFETY: the page belongs to this map, and no reference to it is left.
        let changed = unsafe { libc::mprotect(behind.cast(), PAGE, libc::PROT_NONE) };
        assert_eq!(changed, 0);
        (map, room - values.len()..room)
    };
    let mut seed = 12;
    for (m, n, k) in [
        (1, 1, 1),
        (1, 7, 3),
        (1, 17, 300),
        (1, 34, 2047),
        (3, 9, 43),
        (40, 35, 21),
    ] {
        let all = [m * k, k * n].map(|len| Values::new(len, &mut seed));
        let wide = all
            .each_ref()
            .map(|x| guarded(bytemuck::cast_slice(&x.wide)));
        let brain = all
            .each_ref()
            .map(|x| guarded(bytemuck::cast_slice(&x.brain)));
        let half = all
            .each_ref()
            .map(|x| guarded(bytemuck::cast_slice(&x.half)));
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let [a, b] = [0, 1].map(|i| {
                let bytes = match dtype {
                    DType::BF16 => &brain[i],
                    DType::F16 => &half[i],
                    _ => &wide[i],
                };
                let bytes = &bytes.0[bytes.1.clone()];
                match dtype {
                    DType::BF16 => Floats::BF16(bytemuck::cast_slice(bytes)),
                    DType::F16 => Floats::F16(bytemuck::cast_slice(bytes)),
                    _ => Floats::F32(bytemuck::cast_slice(bytes)),
                }
            });
            for [a_turned, b_turned] in [[false, true], [true, false]] {
                let a = match a_turned {
                    true => Matrix::new(a, k, m).transposed(),
                    false => Matrix::new(a, m, k),
                };
                let b = match b_turned {
                    true => Matrix::new(b, n, k).transposed(),
                    false => Matrix::new(b, k, n),
                };
                check(&[Product::new(a, b, 1.0)], None, dtype, false);
            }
        }
    }
}

#[test]
fn stretches_cover_every_index_of_k_once() {
    for k in [0, 1, 16, 255, 256, 257, 511, 768, 1000, 4097] {
        let all: Vec<_> = stretches(k, stretch(k)).collect();
        assert_eq!(all.iter().map(|s| s.1).sum::<usize>(), k);
        assert!(
            all.iter()
                .all(|(first, len)| first % STRETCH_STEP == 0 && *len <= STRETCH)
        );
        assert!(all.windows(2).all(|w| w[0].0 + w[0].1 == w[1].0));
    }
}

/// Sums over parts of `k` continue each other, with few rows and with many.
#[test]
fn parts_of_a_sum_have_the_bits_of_the_whole() {
    let mut seed = 11;
    for (m, n, k) in [(5, 70, 600), (50, 70, 600), (30, 20, 2500)] {
        let (left, right) = (Values::new(m * k, &mut seed), Values::new(k * n, &mut seed));
        let before = vec![0.0; m * n];
        let all = MATHS.into_iter().flat_map(methods);
        let all = all.flat_map(|method| [DType::F32, DType::BF16].map(|dtype| (method, dtype)));
        for (method, dtype) in all {
            let (a, b) = (
                left.matrix(DType::BF16, m, k, true),
                right.matrix(dtype, k, n, false),
            );
            let on = (method, 2);
            let want = bits::<f32>(on, &[Product::new(a, b, 0.3)], None, &before, false);
            for tile in [1, 2, 3].map(|steps| steps * part_step(k)) {
                let mut sum = before.clone();
                for first in (0..k).step_by(tile) {
                    let len = tile.min(k - first);
                    let (a, b) = (a.part(0, first, m, len), b.part(first, 0, len, n));
                    let part = Product::new(a, b, 0.3).part_of(k);
                    sum = bits::<f32>(on, &[part], None, &sum, first > 0);
                }
                assert!(
                    sum == want,
                    "{method:?}: [{m}, {k}, {n}] in tiles of {tile}"
                );
            }
        }
    }
}

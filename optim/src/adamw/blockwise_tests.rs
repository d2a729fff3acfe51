use super::codec::{Codec, search};
use super::tests::{LR, numbers};
use super::*;
use crate::lanes::{Lanes, Loop, Simd};
use half::bf16;
use kernels::dynamic_map::{SIGNED, UNSIGNED};

/// Steps of a float on each side of a threshold that are tried.
const NEAR: u32 = 100;

/// Magnitudes around every threshold of a map, around every bucket of the table, at the ends, and others.
fn probes(map: &[f32; 256]) -> Vec<f32> {
    let mut all = vec![0.0, f32::from_bits(1), f32::MIN_POSITIVE, 1.0];
    let middles = map.windows(2).map(|pair| (pair[0] + pair[1]) * 0.5);
    for at in middles.chain(map.iter().copied()) {
        let bits = at.abs().to_bits();
        let near = bits.saturating_sub(NEAR)..=bits + NEAR;
        all.extend(near.map(f32::from_bits));
    }
    let starts =
        (0x3000..=0x3f7f).flat_map(|start: u32| [0, 1, 0xffff].map(|low| start << 16 | low));
    all.extend(starts.map(f32::from_bits));
    all.extend(
        numbers("probes", 1 << 16, 1)
            .iter()
            .map(|x| x.fract().abs()),
    );
    all.retain(|x| *x <= 1.0);
    all
}

struct Encode<'a, const SIGNED: bool> {
    codec: &'a Codec<SIGNED>,
    values: &'a [f32; BLOCK_ELEMS],
    codes: &'a mut [u8; BLOCK_ELEMS],
}

impl<const SIGNED: bool> Loop for Encode<'_, SIGNED> {
    const BYTES: bool = true;

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let divisor = self.codec.begin(l, self.values, 1.0, self.codes);
        let divisor = divisor.expect("a usual absmax");
        for i in (0..BLOCK_ELEMS).step_by(4 * L::N) {
            self.codec.encode(l, self.values, i, &divisor, self.codes);
        }
    }
}

fn table_agrees_with_search<const SIGNED: bool>(map: &'static [f32; 256]) {
    let codec = Codec::<SIGNED>::new(map);
    let signs: &[f32] = if SIGNED { &[1.0, -1.0] } else { &[1.0] };
    let probes = probes(map);
    let signed = probes
        .iter()
        .flat_map(|x| signs.iter().map(|sign| x.copysign(*sign)));
    let numbers: Vec<f32> = signed.collect();
    for numbers in numbers.chunks(BLOCK_ELEMS) {
        let mut values = [0.0; BLOCK_ELEMS];
        values[..numbers.len()].copy_from_slice(numbers);
        for simd in Simd::available() {
            let mut codes = [0; BLOCK_ELEMS];
            simd.run(Encode {
                codec: &codec,
                values: &values,
                codes: &mut codes,
            });
            for (x, code) in numbers.iter().zip(codes) {
                assert_eq!(code, search(map, *x), "{x:e} {simd:?}");
            }
        }
    }
}

#[test]
fn every_instruction_set_finds_the_code_of_the_kernels_search() {
    table_agrees_with_search::<true>(&SIGNED);
    table_agrees_with_search::<false>(&UNSIGNED);
}

struct Estimate<'a, const SIGNED: bool> {
    codec: &'a Codec<SIGNED>,
    values: &'a [f32; BLOCK_ELEMS],
    codes: &'a mut [u8; BLOCK_ELEMS],
    certain: &'a mut bool,
}

impl<const SIGNED: bool> Loop for Estimate<'_, SIGNED> {
    const BYTES: bool = true;

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let one = l.f(1.0);
        let groups = (0..BLOCK_ELEMS).step_by(4 * L::N);
        *self.certain = true;
        for i in groups {
            *self.certain &= self.codec.estimate(l, self.values, i, one, self.codes);
        }
    }
}

/// Distance from a threshold from which on estimates must be certain: 6 * 2^-15 of the first class's step of 5.5e-7, in units
/// in the last place of 2.75e-7, is 3 550.
const MOST_NEAR: u32 = 4096;

/// Compares estimates with the search at equal distances from neighboring thresholds, in blocks of their own. Returns
/// the distance in units in the last place from which on all are certain.
fn estimates_agree_with_search<const SIGNED: bool>(map: &'static [f32; 256]) -> u32 {
    let codec = Codec::<SIGNED>::new(map);
    let middles = map.windows(2).map(|pair| (pair[0] + pair[1]) * 0.5);
    let middles: Vec<f32> = middles.collect();
    let mut doubtful = 0;
    let distances = (0..160).chain((160..MOST_NEAR).step_by(97));
    let places = distances.flat_map(|d| middles.chunks(16).map(move |some| (d, some)));
    for (distance, some) in places {
        for below in [true, false] {
            let values = std::array::from_fn(|i| {
                let middle = some[i % some.len()];
                let bits = middle.abs().to_bits();
                let bits = if below {
                    bits - distance
                } else {
                    bits + distance
                };
                f32::from_bits(bits).copysign(middle)
            });
            for simd in Simd::available() {
                let (mut codes, mut certain) = ([0; BLOCK_ELEMS], false);
                simd.run(Estimate {
                    codec: &codec,
                    values: &values,
                    codes: &mut codes,
                    certain: &mut certain,
                });
                if !certain {
                    doubtful = doubtful.max(distance + 1);
                    continue;
                }
                for (x, code) in values.iter().zip(codes) {
                    assert_eq!(code, search(map, *x), "{x:e} {simd:?}");
                }
            }
        }
    }
    doubtful
}

#[test]
fn estimates_are_right_or_in_doubt() {
    let farthest = [
        estimates_agree_with_search::<true>(&SIGNED),
        estimates_agree_with_search::<false>(&UNSIGNED),
    ];
    assert!(
        farthest.iter().all(|ulps| *ulps < MOST_NEAR),
        "{farthest:?}"
    );
}

#[test]
fn codes_follow_the_rules_of_ties_signs_and_sentinels() {
    assert!(SIGNED.is_sorted() && UNSIGNED.is_sorted());
    assert_eq!((SIGNED[127], SIGNED[255], UNSIGNED[0]), (0.0, 1.0, 0.0));
    // A tie stays at the even code, where the search ends.
    let middle = |at: usize| (SIGNED[at] + SIGNED[at + 1]) * 0.5;
    assert_eq!(search(&SIGNED, middle(200)), 200);
    assert_eq!(search(&SIGNED, middle(201)), 202);
    // A negative moment never becomes 0; a positive one may.
    assert_eq!(
        (search(&SIGNED, -1e-12), search(&SIGNED, 1e-12)),
        (126, 127)
    );
    assert_eq!((search(&SIGNED, -1.0), search(&SIGNED, 1.0)), (0, 255));
    assert_eq!((search(&UNSIGNED, 1e-9), search(&UNSIGNED, 1.0)), (0, 255));
}

/// Weights and moments of `n` elements after one update in pieces that end at `cuts`.
fn stepped(
    simd: Simd,
    rounding: Bf16Storage,
    wide: bool,
    n: usize,
    cuts: &[usize],
) -> (Vec<u32>, [Vec<u8>; 2], [Vec<u32>; 2]) {
    let mut rule = AdamW {
        eight_bit: true,
        ..AdamW::default()
    };
    rule.pure_bf16.weights = rounding;
    let mut wide_weight = numbers("weights", n, 0);
    let mut weight: Vec<bf16> = wide_weight.iter().map(|x| bf16::from_f32(*x)).collect();
    let mut error = vec![bf16::ZERO; n];
    let mut codes = [vec![0u8; n], vec![0u8; n]];
    let mut absmax = [(); 2].map(|()| vec![0f32; n.div_ceil(BLOCK_ELEMS)]);
    for step in 1..=3 {
        let mut grad = numbers("grad", n, step);
        grad[300..700].fill(0.0);
        grad[5] = f32::INFINITY;
        let edges: Vec<usize> = [&[0], cuts, &[n]].concat();
        for edge in edges.windows(2) {
            let (own, blocks) = (
                edge[0]..edge[1],
                edge[0] / BLOCK_ELEMS..edge[1].div_ceil(BLOCK_ELEMS),
            );
            let mut state: Vec<_> = codes
                .iter_mut()
                .zip(&mut absmax)
                .map(|(codes, absmax)| StateChunk::Blockwise {
                    codes: &mut codes[own.clone()],
                    absmax: &mut absmax[blocks.clone()],
                })
                .collect();
            let weight = match wide {
                true => WeightChunk::F32(&mut wide_weight[own.clone()]),
                false => WeightChunk::PureBf16(&mut weight[own.clone()]),
            };
            if rounding == Bf16Storage::Kahan && !wide {
                state.push(StateChunk::Bf16(&mut error[own.clone()]));
            }
            let args = StepArgs {
                step,
                lr: LR,
                weight_decay: 0.1,
                grad_scale: 0.5,
                seed: 3,
                // The page of rounding keys ends inside, and the first element is odd.
                first_element: (1 << 33) - 501 + own.start as u64,
                grad: GradChunk::F32(&grad[own]),
                weight,
                state,
            };
            rule.step_on(simd, args).unwrap();
        }
    }
    let weight = match wide {
        true => wide_weight.iter().map(|x| x.to_bits()).collect(),
        false => weight.iter().map(|x| u32::from(x.to_bits())).collect(),
    };
    let bits = absmax.map(|values| values.iter().map(|x| x.to_bits()).collect());
    (weight, codes, bits)
}

#[test]
fn every_instruction_set_and_division_gives_the_same_bits() {
    let n = (1 << 16) + 256 * 3 + 40;
    let forms = Bf16Storage::ALL.map(|rounding| (rounding, false));
    for (rounding, wide) in forms.into_iter().chain([(Bf16Storage::Nearest, true)]) {
        let whole = stepped(Simd::Portable, rounding, wide, n, &[]);
        for simd in Simd::available() {
            assert!(stepped(simd, rounding, wide, n, &[]) == whole, "{simd:?}");
            let cut = stepped(simd, rounding, wide, n, &[256, 1 << 15, n - 40]);
            assert!(cut == whole, "{simd:?} {rounding:?}");
        }
        // An element without a finite gradient keeps its weight and loses its moments.
        assert_eq!(whole.1[1][5], 0);
        let before = f32::to_bits(numbers("weights", 6, 0)[5]);
        assert!(!wide || whole.0[5] == before);
    }
}

/// Blocks of gradients with any bits, of one kind each: all numbers with NaN and infinities, subnormal numbers, numbers
/// whose squares overflow, those whose squares vanish, and numbers of all usual sizes.
#[test]
fn gradients_of_any_bits_give_the_same_bits_on_every_instruction_set() {
    const BLOCKS: usize = 40;
    let n = BLOCKS * BLOCK_ELEMS;
    let gradients = |step: u64| -> Vec<f32> {
        let mut state = step;
        let mut draw = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 32) as u32
        };
        (0..n)
            .map(|i| {
                let (bits, sign_and_fraction) = (draw(), draw() & 0x807f_ffff);
                let exponent = match i / BLOCK_ELEMS % 5 {
                    0 => return f32::from_bits(bits),
                    1 => 0,
                    2 => 180 + bits % 70,
                    3 => 1 + bits % 60,
                    _ => 90 + bits % 40,
                };
                f32::from_bits(sign_and_fraction | exponent << 23)
            })
            .collect()
    };
    let steps = |simd: Simd| {
        let rule = AdamW {
            eight_bit: true,
            ..AdamW::default()
        };
        let mut weight = numbers("weights", n, 0);
        let (mut codes, mut absmax) = ([vec![0u8; n], vec![0u8; n]], [[0f32; BLOCKS]; 2]);
        for step in 1..=4 {
            let grad = gradients(step);
            let state = codes.iter_mut().zip(&mut absmax);
            let state = state
                .map(|(codes, absmax)| StateChunk::Blockwise { codes, absmax })
                .collect();
            let args = StepArgs {
                step,
                lr: LR,
                weight_decay: 0.1,
                grad_scale: 1.0,
                seed: 3,
                first_element: 0,
                grad: GradChunk::F32(&grad),
                weight: WeightChunk::F32(&mut weight),
                state,
            };
            rule.step_on(simd, args).unwrap();
        }
        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        (bits(&weight), codes, absmax.map(|values| bits(&values)))
    };
    let expected = steps(Simd::Portable);
    // Squares that overflow leave an absmax that is not finite, and those that vanish leave 0.
    let absmax = expected.2[1].iter().map(|bits| f32::from_bits(*bits));
    assert!(absmax.clone().any(|x| !x.is_finite()) && absmax.clone().any(|x| x == 0.0));
    for simd in Simd::available() {
        assert!(steps(simd) == expected, "{simd:?}");
    }
}

#[test]
fn small_tensors_embeddings_and_heads_have_no_blocks() {
    let layer = "model.layers.0.mlp.down_proj.weight";
    assert!(has_blocks(layer, LEAST_ELEMS));
    assert!(!has_blocks(layer, LEAST_ELEMS - 1));
    for table in ["model.embed_tokens.weight", "lm_head.weight"] {
        assert!(!has_blocks(table, 1 << 20), "{table}");
    }
}

#[test]
fn a_missing_absmax_is_refused() {
    let rule = AdamW {
        eight_bit: true,
        ..AdamW::default()
    };
    let (mut weight, grad) = (vec![0f32; 300], vec![0f32; 300]);
    let (mut codes, mut absmax, mut short) = ([0u8; 600], [0f32; 2], [0f32]);
    let (m, v) = codes.split_at_mut(300);
    let args = StepArgs {
        step: 1,
        lr: LR,
        weight_decay: 0.0,
        grad_scale: 1.0,
        seed: 0,
        first_element: 0,
        grad: GradChunk::F32(&grad),
        weight: WeightChunk::F32(&mut weight),
        state: vec![
            StateChunk::Blockwise {
                codes: m,
                absmax: &mut absmax,
            },
            StateChunk::Blockwise {
                codes: v,
                absmax: &mut short,
            },
        ],
    };
    let error = rule.step(args).unwrap_err().to_string();
    assert!(error.contains("absmax"), "{error}");
}

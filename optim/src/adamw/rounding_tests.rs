use half::bf16;
use kernels::Float;

use super::tests::{DECAY, FORMS, GRAD_SCALE, Grad, LR, Model, numbers};
use super::*;
use crate::rng::stochastic_round_bf16;
use crate::rounding::PageKey;

#[test]
fn pure_bf16_follows_f32_in_expectation_where_plain_rounding_stalls() {
    // Updates of 1e-4 on a weight of 1: a fortieth of the spacing of bf16 numbers near 1.
    let n = 20_000;
    let mut weight = vec![bf16::ONE; n];
    let (mut m, mut v) = (vec![bf16::ZERO; n], vec![bf16::ZERO; n]);
    let (mut w32, mut m32, mut v32) = ([1.0f32], [0.0f32], [0.0f32]);
    let adamw = AdamW::default();
    for step in 1..=100 {
        let grad = 1.0 + 0.3 * (step as f32).sin();
        let args = |grad, weight, state| StepArgs {
            step,
            lr: 1e-4,
            weight_decay: 0.1,
            grad_scale: 1.0,
            seed: 3,
            first_element: 0,
            grad: GradChunk::F32(grad),
            weight,
            state,
        };
        let state = [StateChunk::Bf16(&mut m), StateChunk::Bf16(&mut v)];
        let grads = vec![grad; n];
        adamw
            .step(args(
                &grads,
                WeightChunk::PureBf16(&mut weight),
                state.into(),
            ))
            .unwrap();
        let state = [StateChunk::F32(&mut m32), StateChunk::F32(&mut v32)];
        adamw
            .step(args(&[grad], WeightChunk::F32(&mut w32), state.into()))
            .unwrap();
    }
    let mean = |values: &[bf16]| values.iter().map(|x| f64::from(x.to_f32())).sum::<f64>();
    let moved = 1.0 - mean(&weight) / n as f64;
    let expected = f64::from(1.0 - w32[0]);
    // Standard error: sqrt(100 steps) * 2^-9 / sqrt(n) = 1.4e-4 of a path of 1e-2.
    assert!(
        (moved - expected).abs() < 4.0 * 1.4e-4,
        "{moved} against {expected}"
    );
    assert!((mean(&m) / n as f64 / f64::from(m32[0]) - 1.0).abs() < 1e-3);
    assert!((mean(&v) / n as f64 / f64::from(v32[0]) - 1.0).abs() < 1e-3);
}

#[test]
fn rounding_depends_on_seed_step_and_element() {
    let run = |seed, step, first_element| {
        let mut weight = vec![<bf16 as Float>::from_f32(1.0); 256];
        let (mut m, mut v) = (vec![bf16::ZERO; 256], vec![bf16::ZERO; 256]);
        let state = [StateChunk::Bf16(&mut m), StateChunk::Bf16(&mut v)];
        let args = StepArgs {
            step,
            lr: 1e-3,
            weight_decay: 0.0,
            grad_scale: 1.0,
            seed,
            first_element,
            grad: GradChunk::F32(&[1.0; 256]),
            weight: WeightChunk::PureBf16(&mut weight),
            state: state.into(),
        };
        AdamW::default().step(args).unwrap();
        weight
    };
    let base = run(1, 1, 0);
    assert_eq!(base, run(1, 1, 0));
    assert_ne!(base, run(2, 1, 0));
    assert_ne!(base, run(1, 2, 0));
    assert_ne!(base, run(1, 1, 256));
    assert_eq!(base[37..], run(1, 1, 37)[..219]);
}

#[test]
fn rounding_uses_the_documented_half_words() {
    const STEP: u64 = 3;
    const FIRST: u64 = 1001;
    fn step(grad: &[f32], weight: WeightChunk<'_>, state: [StateChunk<'_>; 2]) {
        let args = StepArgs {
            step: STEP,
            lr: LR,
            weight_decay: DECAY,
            grad_scale: GRAD_SCALE,
            seed: 5,
            first_element: FIRST,
            grad: GradChunk::F32(grad),
            weight,
            state: state.into(),
        };
        AdamW::default().step(args).unwrap();
    }
    let rounded = |values: &[f32], word: usize| -> Vec<bf16> {
        let key = PageKey::new(AdamW::rounding_stream(5), STEP, FIRST);
        let elements = values.iter().zip(FIRST..);
        elements
            .map(|(x, e)| stochastic_round_bf16(*x, key.halves(e)[word]))
            .collect()
    };
    let n = 203;
    let grad = numbers("gradients", n, STEP);
    let old = numbers("weights", n, 0)
        .iter()
        .map(|&w| <bf16 as Float>::from_f32(w))
        .collect::<Vec<_>>();
    let mut wide: Vec<f32> = old.iter().map(|w| w.to_f32()).collect();
    let (mut m, mut v) = (vec![0f32; n], vec![0f32; n]);
    let state = [StateChunk::F32(&mut m), StateChunk::F32(&mut v)];
    step(&grad, WeightChunk::F32(&mut wide), state);

    let mut weight = old.clone();
    let (mut m32, mut v32) = (vec![0f32; n], vec![0f32; n]);
    let state = [StateChunk::F32(&mut m32), StateChunk::F32(&mut v32)];
    step(&grad, WeightChunk::PureBf16(&mut weight), state);
    assert_eq!(weight, rounded(&wide, 0));
    assert_eq!([&m32, &v32], [&m, &v]);

    let mut weight = old;
    let (mut m16, mut v16) = (vec![bf16::ZERO; n], vec![bf16::ZERO; n]);
    let state = [StateChunk::Bf16(&mut m16), StateChunk::Bf16(&mut v16)];
    step(&grad, WeightChunk::PureBf16(&mut weight), state);
    let expected = [rounded(&wide, 0), rounded(&m, 1), rounded(&v, 2)];
    assert_eq!([weight, m16, v16], expected);
}

/// How far weights fall from 1 in 100 updates of a fortieth of the `bf16` spacing: in pure `bf16`, and in `f32`.
fn walk(pure_bf16: PureBf16) -> (f64, f64) {
    let n = 64;
    let rule = AdamW {
        pure_bf16,
        ..AdamW::default()
    };
    let mut weight = vec![bf16::ONE; n];
    let mut wide = vec![vec![0f32; n]; 2];
    let mut narrow = vec![vec![bf16::ZERO; n]; 3];
    let (mut w32, mut m32, mut v32) = ([1.0f32], [0.0f32], [0.0f32]);
    for step in 1..=100 {
        let grad = 1.0 + 0.3 * (step as f32).sin();
        let args = |grad, weight, state| StepArgs {
            step,
            lr: 1e-4,
            weight_decay: 0.1,
            grad_scale: 1.0,
            seed: 3,
            first_element: 0,
            grad: GradChunk::F32(grad),
            weight,
            state,
        };
        let slots = rule.slots(Precision::PureBf16).iter();
        let (mut wide, mut narrow) = (wide.iter_mut(), narrow.iter_mut());
        let state = slots
            .map(|slot| match slot.dtype {
                kernels::DType::F32 => StateChunk::F32(wide.next().unwrap()),
                _ => StateChunk::Bf16(narrow.next().unwrap()),
            })
            .collect();
        let weight = WeightChunk::PureBf16(&mut weight);
        let grads = vec![grad; n];
        rule.step(args(&grads, weight, state)).unwrap();
        let state = vec![StateChunk::F32(&mut m32), StateChunk::F32(&mut v32)];
        rule.step(args(&[grad], WeightChunk::F32(&mut w32), state))
            .unwrap();
    }
    let mean = weight.iter().map(|x| f64::from(x.to_f32())).sum::<f64>() / n as f64;
    (1.0 - mean, f64::from(1.0 - w32[0]))
}

#[test]
fn kahan_follows_f32_and_plain_rounding_stalls() {
    for moments in MomentDtype::ALL {
        let with = |weights| walk(PureBf16 { weights, moments });
        let (kahan, expected) = with(Bf16Storage::Kahan);
        // Half the spacing below 1, plus the share of it that rounding of the moments may cost.
        assert!(
            (kahan - expected).abs() < 2f64.powi(-9),
            "{kahan}, {expected}"
        );
        let (nearest, _) = with(Bf16Storage::Nearest);
        assert_eq!(nearest, 0.0);
    }
}

/// Values include those that a carry must not turn into infinity, and NaN.
#[test]
fn special_numbers_are_stored_alike_everywhere() {
    let n = 200;
    for (form, narrow) in FORMS
        .into_iter()
        .flat_map(|form| [(form, false), (form, true)])
    {
        let run = |simd, cuts: &[usize]| {
            let mut model = Model::new(n);
            let special = [f32::MAX, f32::MIN, f32::INFINITY, f32::NAN, -0.0, 1e-40];
            for (i, x) in special.into_iter().enumerate() {
                model.master[7 * i + 3] = x;
                model.weight[7 * i + 3] = <bf16 as Float>::from_f32(x);
                model.moments_bf16[0][5 * i + 90] = <bf16 as Float>::from_f32(x);
            }
            let mut grad = numbers("gradients", n, 1);
            // NaN whose low bits would carry into the sign if rounded.
            let nan = [0x7fff_ffff, 0xffff_fff0].map(f32::from_bits);
            for (i, x) in special.into_iter().chain(nan).enumerate() {
                grad[9 * i + 120] = x;
            }
            model.step(simd, form, 1, Grad::of(grad, narrow), cuts);
            let quiet = |bits: u32| {
                if f32::from_bits(bits).is_nan() {
                    0x7fc0_0000
                } else {
                    bits
                }
            };
            model.bits().into_iter().map(quiet).collect::<Vec<_>>()
        };
        // Chunks of one element each.
        let cuts: Vec<usize> = (1..n).collect();
        let expected = run(Simd::Portable, &cuts);
        for simd in Simd::available() {
            assert!(run(simd, &[]) == expected, "{form:?} {simd:?} {narrow}");
        }
    }
}

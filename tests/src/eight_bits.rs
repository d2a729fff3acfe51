//! AdamW with 8-bit moments against stored results of bitsandbytes' GPU rule: `rule.step<N>.<parameter>`.

use crate::golden::{Data, Expected};
use crate::tolerance::{
    EIGHT_BIT_ABSMAX, EIGHT_BIT_ABSMAX_LATE, EIGHT_BIT_CODES, EIGHT_BIT_WEIGHT,
    EIGHT_BIT_WEIGHT_LATE,
};
use half::bf16;
use optim::adamw::{BLOCK_ELEMS, has_blocks};
use optim::{
    AdamW, Bf16Storage, GradChunk, MomentDtype, Optimizer, PureBf16, StateChunk, StepArgs,
    WeightChunk,
};
use std::path::Path;

const STEPS: [u64; 4] = [1, 2, 8, 50];
const SCALES: [f32; 7] = [1.0, 0.5, 2.0, 0.25, 1.0, 0.5, 1.0];

struct State {
    weight: Vec<f32>,
    codes: [Vec<u8>; 2],
    absmax: [Vec<f32>; 2],
    wide: [Vec<f32>; 2],
}

fn floats<'e>(pack: &'e Expected, name: &str) -> &'e [f32] {
    pack.get(name).unwrap().floats().unwrap()
}

fn codes(pack: &Expected, name: &str) -> Vec<u8> {
    match &pack.get(name).unwrap().data {
        Data::Ints(values) => values.iter().map(|x| *x as u8).collect(),
        Data::Floats(_) => panic!("{name} has floats"),
    }
}

/// State stored after `step`; zeros and the first weights for step 0.
fn stored(pack: &Expected, name: &str, step: u64) -> State {
    let weight = match step {
        0 => floats(pack, &format!("init.{name}")).to_vec(),
        _ => floats(pack, &format!("rule.step{step}.{name}.weight")).to_vec(),
    };
    let n = weight.len();
    let mut state = State {
        weight,
        codes: [vec![0; n], vec![0; n]],
        absmax: [(); 2].map(|()| vec![0.0; n.div_ceil(BLOCK_ELEMS)]),
        wide: [vec![0.0; n], vec![0.0; n]],
    };
    if step == 0 {
        return state;
    }
    for (i, moment) in ["m", "v"].into_iter().enumerate() {
        let at = format!("rule.step{step}.{name}.{moment}");
        if has_blocks(name, n) {
            state.codes[i] = codes(pack, &format!("{at}_codes"));
            state.absmax[i] = floats(pack, &format!("{at}_absmax")).to_vec();
        } else {
            state.wide[i] = floats(pack, &at).to_vec();
        }
    }
    state
}

fn apply(pack: &Expected, name: &str, state: &mut State, step: u64) {
    let rule = AdamW {
        beta2: 0.95,
        eight_bit: true,
        // The stored 16-bit parameter is rounded to nearest.
        pure_bf16: PureBf16 {
            weights: Bf16Storage::Nearest,
            moments: MomentDtype::F32,
        },
        ..AdamW::default()
    };
    let n = state.weight.len();
    let base = floats(pack, &format!("grad_base.{name}"));
    let base = &base[((step - 1) % 4) as usize * n..][..n];
    let scale = SCALES[((step - 1) % 7) as usize];
    let grad: Vec<f32> = base.iter().map(|x| x * scale).collect();
    let State {
        weight,
        codes,
        absmax,
        wide,
    } = state;
    let moments = match has_blocks(name, n) {
        true => codes
            .iter_mut()
            .zip(absmax)
            .map(|(codes, absmax)| StateChunk::Blockwise { codes, absmax })
            .collect(),
        false => wide
            .iter_mut()
            .map(|values| StateChunk::F32(values))
            .collect(),
    };
    let mut narrow: Vec<bf16> = weight.iter().map(|x| bf16::from_f32(*x)).collect();
    let is_narrow = name == "half";
    let args = StepArgs {
        step,
        lr: 1e-3,
        weight_decay: 0.1,
        grad_scale: 1.0,
        seed: 0,
        first_element: 0,
        grad: GradChunk::F32(&grad),
        weight: match is_narrow {
            true => WeightChunk::PureBf16(&mut narrow),
            false => WeightChunk::F32(weight),
        },
        state: moments,
    };
    rule.step(args).unwrap();
    if is_narrow {
        *weight = narrow.iter().map(|x| x.to_f32()).collect();
    }
}

fn compare(name: &str, got: &State, expected: &State, init: &[f32], late: bool) {
    let close = |a: f32, b: f32, bound: f64| (f64::from(a) - f64::from(b)).abs() <= bound;
    for (i, (a, b)) in got.weight.iter().zip(&expected.weight).enumerate() {
        let bound = match late {
            true => {
                let moved = f64::from((b - init[i]).abs());
                EIGHT_BIT_WEIGHT_LATE.0.max(EIGHT_BIT_WEIGHT_LATE.1 * moved)
            }
            false => EIGHT_BIT_WEIGHT,
        };
        assert!(close(*a, *b, bound), "{name} weight {i}: {a} and {b}");
    }
    for moment in 0..2 {
        let absmax = got.absmax[moment].iter().zip(&expected.absmax[moment]);
        let bound = match late {
            true => EIGHT_BIT_ABSMAX_LATE,
            false => EIGHT_BIT_ABSMAX,
        };
        for (i, (a, b)) in absmax.enumerate() {
            let bound = bound * f64::from(*b);
            assert!(close(*a, *b, bound), "{name} absmax {i}: {a} and {b}");
        }
        let pairs = got.codes[moment].iter().zip(&expected.codes[moment]);
        let in_zero_block = |i: usize| expected.absmax[moment][i / BLOCK_ELEMS] == 0.0;
        let differ: Vec<_> = pairs
            .enumerate()
            .filter(|(i, (a, b))| a != b && !in_zero_block(*i))
            .collect();
        for (i, (a, b)) in &differ {
            assert!(a.abs_diff(**b) == 1, "{name} code {i}: {a} and {b}");
        }
        let most = if late {
            EIGHT_BIT_CODES.1
        } else {
            EIGHT_BIT_CODES.0
        };
        let share = differ.len() as f64 / got.weight.len() as f64;
        assert!(share <= most, "{name}: {share} of the codes differ");
        let wide = got.wide[moment].iter().zip(&expected.wide[moment]);
        let most = expected.wide[moment]
            .iter()
            .fold(0f32, |most, x| most.max(x.abs()));
        for (a, b) in wide {
            let bound = EIGHT_BIT_ABSMAX * f64::from(most);
            assert!(close(*a, *b, bound), "{name} moment: {a} and {b}");
        }
    }
}

#[test]
fn moments_of_8_bits_follow_the_stored_results_of_bitsandbytes_rule() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures");
    let pack = Expected::read(&fixtures.join("adamw8bit.safetensors")).unwrap();
    let names = [
        "exact_minimum",
        "tail_block",
        "below_minimum",
        "bias",
        "half",
    ];
    for name in names {
        let init = stored(&pack, name, 0);
        let mut state = stored(&pack, name, 1);
        apply(&pack, name, &mut state, 2);
        compare(name, &state, &stored(&pack, name, 2), &init.weight, false);
        let mut state = stored(&pack, name, 0);
        for step in 1..=50 {
            apply(&pack, name, &mut state, step);
            if STEPS.contains(&step) {
                let expected = stored(&pack, name, step);
                compare(name, &state, &expected, &init.weight, step > 2);
            }
        }
    }
}

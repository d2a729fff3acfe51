//! Tests of every operation's gradient against central differences, through a tape.

use super::{LinearLayer, LinearParams, LoraParams, RowGroups, Sequences};
use crate::SampleInput;
use crate::autograd::gradcheck::{
    backend, gradcheck, gradcheck_dropped, gradcheck_loss, index, resident, spec, tensor, values,
};
use crate::autograd::{Dropout, Rows, Scope, Tape, Var};
use crate::error::Result;
use crate::nn::FusedLinear;
use engine::{ParamId, UnitId};
use kernels::{DType, Gelu, IGNORED_LABEL, RopeLayout};

const P0: ParamId = ParamId(0);
const P1: ParamId = ParamId(1);
const P2: ParamId = ParamId(2);
const P3: ParamId = ParamId(3);
const P4: ParamId = ParamId(4);
const P5: ParamId = ParamId(5);
const P6: ParamId = ParamId(6);

#[test]
fn linear_passes_gradcheck_with_and_without_bias() {
    let (plain, biased) = (LinearParams::new(P0, None), LinearParams::new(P0, Some(P1)));
    gradcheck([&[3, 4]], &[&[5, 4]], |s, [x]| s.linear(x, &plain));
    gradcheck([&[3, 4]], &[&[5, 4], &[5]], |s, [x]| s.linear(x, &biased));
}

#[test]
fn linear_passes_gradcheck_on_folded_axes_and_convolution_kernels() {
    let params = LinearParams::new(P0, Some(P1));
    gradcheck([&[2, 3, 12]], &[&[5, 3, 2, 2], &[5]], |s, [x]| {
        s.linear(x, &params)
    });
}

#[test]
fn row_ranges_of_one_weight_pass_gradcheck() {
    let third = |i: usize| LinearParams::new(P0, Some(P1)).with_rows(2 * i..2 * i + 2);
    gradcheck([&[3, 4]], &[&[6, 4], &[6]], |s, [x]| {
        let (q, k, v) = (
            s.linear(x, &third(0))?,
            s.linear(x, &third(1))?,
            s.linear(x, &third(2))?,
        );
        s.swiglu(&s.add(&q, &k)?, &v)
    });
}

#[test]
fn partial_and_overlapping_row_ranges_pass_gradcheck() {
    let range = |r: std::ops::Range<usize>| LinearParams::new(P0, None).with_rows(r);
    gradcheck([&[3, 4]], &[&[6, 4]], |s, [x]| {
        s.add(&s.linear(x, &range(1..4))?, &s.linear(x, &range(3..6))?)
    });
    gradcheck([&[3, 4]], &[&[6, 4]], |s, [x]| s.linear(x, &range(2..4)));
}

#[test]
fn matmul_without_transpose_passes_gradcheck() {
    gradcheck([&[3, 4]], &[&[4, 5]], |s, [x]| s.matmul(x, P0));
}

#[test]
fn dropout_passes_gradcheck() {
    let rows: Vec<i32> = (0..12).collect();
    let rows = index(&*backend(), &rows).reshape([6, 2]).unwrap();
    gradcheck([&[6, 5]], &[&[4, 5]], |s, [x]| {
        let kept = s.dropout(x, &rows, [7, 8], 0.4)?;
        s.linear(&kept, &LinearParams::new(P0, None))
    });
}

/// Dropout state of a batch with one sample of `t` tokens.
fn dropout_of(t: usize) -> Dropout {
    let (ids, labels) = (vec![0; t], vec![IGNORED_LABEL; t]);
    let sample = SampleInput {
        input_ids: &ids,
        labels: &labels,
        image_bounds: &[],
        slices: &[],
    };
    Dropout::new(5, &[3], &[sample], &*backend()).unwrap()
}

/// Adapter with dropout of its input. The mask is fixed, so central differences see the same one.
fn dropping(adapter: LoraParams) -> LoraParams {
    LoraParams {
        dropout: 0.4,
        ..adapter
    }
}

#[test]
fn adapted_layers_with_dropout_pass_gradcheck() {
    let shapes: [&[usize]; 7] = [&[5, 8], &[5], &[5, 8], &[2, 8], &[5, 2], &[3, 8], &[5, 3]];
    let base = [LinearParams::new(P0, Some(P1)), LinearParams::new(P2, None)];
    let state = dropout_of(6);
    gradcheck_dropped(&state, [&[6, 8]], &shapes[..5], |s, [x]| {
        let y = alone(s, x, &layer(&base[0], dropping(adapter(P3, P4))))?;
        s.add(&y, &s.linear(x, &base[1])?)
    });
    // Dropout in both adapters, in the first, and in the second.
    let (first, second) = (adapter(P3, P4), adapter(P5, P6));
    for adapters in [
        [dropping(first), dropping(second)],
        [dropping(first), second],
        [first, dropping(second)],
    ] {
        let layers = [
            vec![layer(&base[0], adapters[0])],
            vec![layer(&base[1], adapters[1])],
        ];
        gradcheck_dropped(&state, [&[6, 8]], &shapes, |s, [x]| {
            let both = s.adapted_linear(x, None, &layers)?;
            s.swiglu(&both[0], &both[1])
        });
    }
}

#[test]
fn adapted_layers_over_row_groups_with_dropout_pass_gradcheck() {
    let shapes: [&[usize]; 7] = [&[5, 8], &[5], &[5, 8], &[2, 8], &[5, 2], &[3, 8], &[5, 3]];
    let base = [LinearParams::new(P0, Some(P1)), LinearParams::new(P2, None)];
    let index_of = |rows: &[i32]| index(&*backend(), rows);
    let rows = RowGroups([index_of(&[4, 0, 3]), index_of(&[1, 2])]);
    let (first, second) = (adapter(P3, P4), adapter(P5, P6));
    let state = dropout_of(5);
    for (adapters, used) in [
        ([Some(dropping(first)), Some(dropping(second))], 7),
        ([Some(first), Some(dropping(second))], 7),
        ([Some(dropping(first)), None], 5),
    ] {
        gradcheck_dropped(&state, [&[5, 8]], &shapes[..used], |s, [x]| {
            let layers = [layer(&base[0], adapters[0]), layer(&base[1], adapters[1])];
            grouped(s, x, &rows, &layers)
        });
    }
}

/// The fused operation equals separate operations with the mask of the dropout operation. Evaluation drops nothing.
#[test]
fn adapter_dropout_uses_the_mask_of_the_dropout_operation() {
    let shapes: [&[usize]; 4] = [&[5, 24], &[5], &[3, 24], &[5, 3]];
    let (base, adapter) = (LinearParams::new(P0, Some(P1)), dropping(adapter(P2, P3)));
    let results = |state: Option<&Dropout>, which: usize| {
        let access = resident(&spec(&shapes.map(|shape| (0, shape, true))));
        let mut tape = Tape::training(&access);
        if let Some(state) = state {
            tape = tape.with_dropout(state.clone());
        }
        let x = tape.leaf(tensor(&*backend(), &[7, 24], &values(3, 7 * 24)));
        let [y] = tape
            .segment(UnitId(0), [&x], |s, [x]| {
                let rows = RowGroups([
                    index(s.backend(), &[6, 1, 3]),
                    index(s.backend(), &[0, 2, 4, 5]),
                ]);
                let y = match (which, s.dropout_state()) {
                    (0, Some(state)) => {
                        let names = state.rows(Rows::Tokens);
                        let seen = s.dropout(x, names, state.key(2), adapter.dropout)?;
                        let low = s.linear(&seen, &LinearParams::new(P2, None))?;
                        let delta = s.linear(&low, &LinearParams::new(P3, None))?;
                        s.add(&s.linear(x, &base)?, &s.scale(&delta, adapter.scale)?)?
                    }
                    (1, _) => {
                        let layer = layer(&base, adapter);
                        grouped(s, x, &rows, &[layer.clone(), layer])?
                    }
                    _ => alone(s, x, &layer(&base, adapter))?,
                };
                Ok([y])
            })
            .unwrap();
        let seed = tensor(&*backend(), &[7, 5], &values(9, 7 * 5));
        let grads = tape.backward_from(&[(&y, seed)]).unwrap();
        let params = (0..4).map(|i| access.grad(ParamId(i)).unwrap().to_f32_vec().unwrap());
        let own = [y.value(), grads.get(&x).unwrap()].map(|x| x.to_f32_vec().unwrap());
        params.chain(own).collect::<Vec<_>>()
    };
    let close = |a: &[Vec<f32>], b: &[Vec<f32>]| {
        a.iter().zip(b).all(|(a, b)| {
            let largest = b.iter().fold(0f32, |m, x| m.max(x.abs()));
            a.iter()
                .zip(b)
                .all(|(a, b)| (a - b).abs() <= 1e-5 * largest)
        })
    };
    let state = dropout_of(7);
    let apart = results(Some(&state), 0);
    assert!(close(&results(Some(&state), 1), &apart));
    assert!(close(&results(Some(&state), 2), &apart));
    let whole = results(None, 2);
    assert!(!close(&whole, &apart));
    assert!(close(&results(None, 1), &whole));
}

const fn adapter(lora_a: ParamId, lora_b: ParamId) -> LoraParams {
    LoraParams {
        lora_a,
        lora_b,
        dropout: 0.0,
        rows: Rows::Tokens,
        scale: 0.7,
        part: None,
    }
}

fn layer(base: &LinearParams, adapter: impl Into<Option<LoraParams>>) -> LinearLayer {
    LinearLayer {
        base: base.clone(),
        adapter: adapter.into(),
    }
}

/// One layer for all rows.
fn alone(s: &Scope<'_>, x: &Var, layer: &LinearLayer) -> Result<Var> {
    Ok(s.adapted_linear(x, None, &[vec![layer.clone()]])?.remove(0))
}

/// One layer per row group.
fn grouped(s: &Scope<'_>, x: &Var, rows: &RowGroups, layers: &[LinearLayer]) -> Result<Var> {
    let all = s.adapted_linear(x, Some(rows), &[layers.to_vec()]);
    Ok(all?.remove(0))
}

#[test]
fn an_adapted_layer_with_a_trained_base() {
    let base = LinearParams::new(P0, Some(P1));
    let adapter = adapter(P2, P3);
    let shapes: [&[usize]; 4] = [&[5, 4], &[5], &[2, 4], &[5, 2]];
    gradcheck([&[3, 4]], &shapes, |s, [x]| {
        alone(s, x, &layer(&base, adapter))
    });
}

#[test]
fn adapted_layers_of_one_input_pass_gradcheck() {
    let [q, k] = [(P0, [P1, P2]), (P3, [P4, P5])]
        .map(|(weight, [a, b])| layer(&LinearParams::new(weight, None), adapter(a, b)));
    let shapes: [&[usize]; 6] = [&[5, 4], &[2, 4], &[5, 2], &[5, 4], &[3, 4], &[5, 3]];
    let layers = [vec![q], vec![k]];
    gradcheck([&[3, 4]], &shapes, |s, [x]| {
        let both = s.adapted_linear(x, None, &layers)?;
        s.swiglu(&both[0], &both[1])
    });
    // Parameters of two layers, and a result that is not used.
    let layers = [layers[0].clone(), layers[1].clone(), layers[0].clone()];
    for used in [[0, 1, 1], [1, 2, 2], [0, 1, 2]] {
        gradcheck([&[3, 4]], &shapes, |s, [x]| {
            let all = s.adapted_linear(x, None, &layers)?;
            let [a, b, c] = used.map(|i| &all[i]);
            s.swiglu(&s.add(a, b)?, c)
        });
    }
}

/// On the CPU, layers that share their input have the same gradient bits as layers computed one after the other, also
/// with dropout.
#[test]
fn adapted_layers_of_one_input_have_the_bits_of_separate_layers() {
    let layers = [(P0, [P1, P2]), (P3, [P4, P5]), (P0, [P4, P2])]
        .map(|(weight, [a, b])| layer(&LinearParams::new(weight, None), adapter(a, b)));
    let shapes: [&[usize]; 6] = [&[5, 24], &[2, 24], &[5, 2], &[5, 24], &[2, 24], &[5, 2]];
    let gradients = |shared: bool, p: f32| {
        let layers = layers.clone().map(|LinearLayer { base, adapter }| {
            let dropout = |adapter| LoraParams {
                dropout: p,
                ..adapter
            };
            layer(&base, adapter.map(dropout))
        });
        let access = resident(&spec(&shapes.map(|shape| (0, shape, true))));
        let tape = Tape::training(&access).with_dropout(dropout_of(7));
        let x = tape.leaf(tensor(&*backend(), &[7, 24], &values(3, 7 * 24)));
        let [y] = tape
            .segment(UnitId(0), [&x], |s, [x]| {
                let all = match shared {
                    true => {
                        let layers = layers.clone().map(|layer| vec![layer]);
                        s.adapted_linear(x, None, &layers)?
                    }
                    false => {
                        let each = layers.iter();
                        each.map(|layer| alone(s, x, layer))
                            .collect::<Result<_>>()?
                    }
                };
                Ok([s.add(&s.swiglu(&all[0], &all[1])?, &all[2])?])
            })
            .unwrap();
        let seed = tensor(&*backend(), &[7, 5], &values(9, 7 * 5));
        let grads = tape.backward_from(&[(&y, seed)]).unwrap();
        let params = (0..6).map(|i| access.grad(ParamId(i)).unwrap().to_f32_vec().unwrap());
        let dx = grads.get(&x).unwrap().to_f32_vec().unwrap();
        let all = params.chain([dx]).flatten().map(f32::to_bits);
        all.collect::<Vec<_>>()
    };
    for p in [0.0, 0.4] {
        assert_eq!(gradients(true, p), gradients(false, p));
    }
    assert_ne!(gradients(true, 0.4), gradients(true, 0.0));
}

/// Each row passes through the layer of its group on every device: also with a trainable base, with different ranks,
/// and with an adapter in one layer only.
#[test]
fn adapted_layers_over_row_groups_pass_gradcheck() {
    let base = [LinearParams::new(P0, Some(P1)), LinearParams::new(P2, None)];
    let shapes: [&[usize]; 7] = [&[5, 4], &[5], &[5, 4], &[2, 4], &[5, 2], &[3, 4], &[5, 3]];
    let index_of = |rows: &[i32]| index(&*backend(), rows);
    let rows = RowGroups([index_of(&[4, 0, 3]), index_of(&[1, 2])]);
    let (first, second) = (adapter(P3, P4), adapter(P5, P6));
    for (adapters, used) in [([Some(first), Some(second)], 7), ([Some(first), None], 5)] {
        gradcheck([&[5, 4]], &shapes[..used], |s, [x]| {
            let layers = [layer(&base[0], adapters[0]), layer(&base[1], adapters[1])];
            grouped(s, x, &rows, &layers)
        });
    }
}

/// Two projections of one input and partition: with different ranks, with one of four adapters missing, with dropout,
/// and with an unused result.
#[test]
fn adapted_layers_of_one_input_over_row_groups_pass_gradcheck() {
    let base = [LinearParams::new(P0, Some(P1)), LinearParams::new(P2, None)];
    let shapes: [&[usize]; 7] = [&[5, 8], &[5], &[5, 8], &[2, 8], &[5, 2], &[3, 8], &[5, 3]];
    let index_of = |rows: &[i32]| index(&*backend(), rows);
    let rows = RowGroups([index_of(&[4, 0, 3]), index_of(&[1, 2])]);
    let (first, second) = (adapter(P3, P4), adapter(P5, P6));
    let state = dropout_of(5);
    for adapters in [
        [[Some(first), Some(second)], [Some(second), Some(first)]],
        [[Some(first), None], [Some(second), Some(first)]],
        [[Some(first), Some(second)]; 2],
    ] {
        for p in [0.0, 0.4] {
            let pairs = adapters.map(|pair| {
                let dropout = |adapter| LoraParams {
                    dropout: p,
                    ..adapter
                };
                let [one, other] = pair.map(|adapter| adapter.map(dropout));
                vec![layer(&base[0], one), layer(&base[1], other)]
            });
            gradcheck_dropped(&state, [&[5, 8]], &shapes, |s, [x]| {
                let both = s.adapted_linear(x, Some(&rows), &pairs)?;
                s.swiglu(&both[0], &both[1])
            });
        }
    }
    let pairs = [
        vec![layer(&base[0], first), layer(&base[1], None)],
        vec![layer(&base[1], first), layer(&base[0], second)],
    ];
    gradcheck([&[5, 8]], &shapes, |s, [x]| {
        let mut both = s.adapted_linear(x, Some(&rows), &pairs)?;
        Ok(both.swap_remove(1))
    });
}

/// On the CPU, projections that share input and partition have the same gradient bits as projections computed one
/// after the other, also with dropout.
#[test]
fn adapted_layers_over_row_groups_have_the_bits_of_separate_pairs() {
    let base = [P0, P3].map(|weight| LinearParams::new(weight, None));
    let halves = [(P1, P2), (P4, P5)].map(|(a, b)| adapter(a, b));
    let shapes: [&[usize]; 6] = [&[5, 24], &[2, 24], &[5, 2], &[5, 24], &[2, 24], &[5, 2]];
    let gradients = |shared: bool, dropout: f32| {
        let [a, b] = halves.map(|adapter| LoraParams { dropout, ..adapter });
        let pairs = [
            vec![layer(&base[0], a), layer(&base[1], b)],
            vec![layer(&base[1], b), layer(&base[1], a)],
            vec![layer(&base[0], None), layer(&base[1], a)],
        ];
        let access = resident(&spec(&shapes.map(|shape| (0, shape, true))));
        let tape = Tape::training(&access).with_dropout(dropout_of(7));
        let x = tape.leaf(tensor(&*backend(), &[7, 24], &values(3, 7 * 24)));
        let [y] = tape
            .segment(UnitId(0), [&x], |s, [x]| {
                let rows = RowGroups([
                    index(s.backend(), &[6, 1, 3]),
                    index(s.backend(), &[0, 2, 4, 5]),
                ]);
                let all = match shared {
                    true => s.adapted_linear(x, Some(&rows), &pairs)?,
                    false => {
                        let each = pairs.iter();
                        each.map(|pair| grouped(s, x, &rows, pair))
                            .collect::<Result<_>>()?
                    }
                };
                Ok([s.add(&s.swiglu(&all[0], &all[1])?, &all[2])?])
            })
            .unwrap();
        let seed = tensor(&*backend(), &[7, 5], &values(9, 7 * 5));
        let grads = tape.backward_from(&[(&y, seed)]).unwrap();
        let params = (0..6).map(|i| access.grad(ParamId(i)).unwrap().to_f32_vec().unwrap());
        let dx = grads.get(&x).unwrap().to_f32_vec().unwrap();
        let all = params.chain([dx]).flatten().map(f32::to_bits);
        all.collect::<Vec<_>>()
    };
    for p in [0.0, 0.4] {
        assert_eq!(gradients(true, p), gradients(false, p));
    }
    assert_ne!(gradients(true, 0.4), gradients(true, 0.0));
}

#[test]
fn norms_pass_gradcheck() {
    gradcheck([&[3, 6]], &[&[6], &[6]], |s, [x]| {
        s.layer_norm(x, P0, P1, 1e-6)
    });
    gradcheck([&[3, 6]], &[&[6]], |s, [x]| s.rms_norm(x, P0, 1e-6));
}

#[test]
fn activations_pass_gradcheck() {
    gradcheck([&[3, 5]], &[], |s, [x]| s.gelu(x, Gelu::Tanh));
    gradcheck([&[3, 5]], &[], |s, [x]| s.gelu(x, Gelu::Erf));
    gradcheck([&[3, 5], &[3, 5]], &[], |s, [g, u]| s.swiglu(g, u));
}

#[test]
fn sums_scales_and_reshapes_pass_gradcheck() {
    gradcheck([&[2, 6], &[4, 3]], &[], |s, [a, b]| {
        let b = s.scale(&s.reshape(b, [2, 6])?, -1.5)?;
        // A value used twice receives two gradients.
        s.add(&s.add(a, &b)?, a)
    });
}

#[test]
fn casts_pass_gradcheck() {
    gradcheck([&[2, 3]], &[], |s, [x]| {
        let same = s.cast(x, DType::F32)?;
        s.scale(&same, 2.0)
    });
}

#[test]
fn a_parameter_used_as_a_value_passes_gradcheck() {
    gradcheck([&[2, 3]], &[&[2, 3]], |s, [x]| {
        let p = s.parameter(P0)?;
        s.swiglu(&p, x)
    });
}

#[test]
fn rope_passes_gradcheck_in_both_layouts() {
    let device = backend();
    let angles = values(5, 3 * 2);
    let table = |f: fn(f32) -> f32| {
        let row: Vec<f32> = angles.iter().map(|a| f(*a)).collect();
        tensor(&*device, &[3, 2], &row)
    };
    let (cos, sin) = (table(f32::cos), table(f32::sin));
    for layout in [RopeLayout::HalfSplit, RopeLayout::Interleaved] {
        gradcheck([&[3, 2, 4]], &[], |s, [x]| s.rope(x, &cos, &sin, layout));
        // Elements after the rotated ones pass through unchanged.
        gradcheck([&[3, 2, 6]], &[], |s, [x]| s.rope(x, &cos, &sin, layout));
    }
}

#[test]
fn attention_over_packed_sequences_passes_gradcheck() {
    let own = Sequences::own([0, 3, 5].into(), true);
    gradcheck([&[5, 4, 3], &[5, 2, 3], &[5, 2, 3]], &[], |s, [q, k, v]| {
        s.attention(q, k, v, &own, 0.6)
    });
    let cross = Sequences {
        q_starts: [0, 2, 4].into(),
        k_starts: [0, 3, 4].into(),
        causal: false,
    };
    gradcheck([&[4, 2, 3], &[4, 2, 3], &[4, 2, 3]], &[], |s, [q, k, v]| {
        s.attention(q, k, v, &cross, 0.6)
    });
}

#[test]
fn embedding_and_row_operations_pass_gradcheck() {
    let device = backend();
    let ids = index(&*device, &[2, 0, 2]);
    gradcheck([], &[&[4, 3]], |s, []| s.embedding(P0, &ids));
    gradcheck([&[4, 3]], &[], |s, [x]| s.gather_rows(x, &ids));
    let at = index(&*device, &[3, 1]);
    gradcheck([&[4, 3], &[2, 3]], &[], |s, [base, rows]| {
        s.replace_rows(base, &at, rows)
    });
}

#[test]
fn the_loss_of_a_linear_head_passes_gradcheck() {
    let device = backend();
    let labels = index(&*device, &[1, IGNORED_LABEL, 4, 0]);
    gradcheck_loss(&[4, 3], &[5, 3], 0.25, |s, x, head| {
        s.linear_cross_entropy(x, head, &labels)
    });
}

#[test]
fn fused_projections_share_an_adapter_or_each_have_one() {
    let adapter = adapter(P2, P3);
    for (own_adapters, a_rows) in [(false, 2), (true, 6)] {
        let fused = FusedLinear {
            base: LinearParams::new(P0, Some(P1)),
            adapter: Some(adapter),
            parts: vec![0..3, 3..6, 6..9],
            own_adapters,
        };
        let shapes: [&[usize]; 4] = [&[9, 4], &[9], &[a_rows, 4], &[9, 2]];
        gradcheck([&[3, 4]], &shapes, |s, [x]| {
            let [q, k, v] = fused.forward(s, x)?;
            s.swiglu(&s.add(&q, &k)?, &v)
        });
    }
}

#[test]
fn merged_rows_and_transposed_matrices_pass_gradcheck() {
    let backend = backend();
    let (even, odd) = (index(&*backend, &[0, 2, 4]), index(&*backend, &[3, 1]));
    gradcheck([&[3, 4], &[2, 4]], &[], |s, [x, y]| {
        let y = s.scale(y, 3.0)?;
        s.merge_rows(&[(x, &even), (&y, &odd)], 5)
    });
    gradcheck([&[6, 4]], &[&[2, 12]], |s, [x]| {
        let x = s.transpose_each(&s.reshape(x, [2, 3, 4])?)?;
        s.linear(&s.reshape(&x, [2, 12])?, &LinearParams::new(P0, None))
    });
}

//! Every operation of a backend, in every dtype and in mixtures, on small operands.

use super::{Check, Compare, Input, numbers};
use crate::cuda::ops::unpack::QUANTIZATIONS;
use crate::{
    AdaptedLayer, AdaptedLinearArgs, AdaptedLinearGradArgs, AdapterArgs, AdapterDropout,
    AttentionArgs, Backend, DType, Direction, DropoutArgs, Gelu, GroupedMatmulArgs, IGNORED_LABEL,
    LossNeeds, MatmulArgs, MatmulGroup, RopeLayout, Shape, Tag, Tensor, Transpose,
};
use std::ops::Range;

const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// Every operation of the trait, in every dtype and in mixtures.
#[must_use]
pub fn all() -> Vec<Check> {
    let mut checks = Vec::new();
    for dtype in DTYPES {
        checks.extend(elements(dtype));
        checks.extend(norms(dtype));
        checks.extend(attention(dtype));
        checks.extend(losses(dtype, dtype));
        checks.extend(tables(dtype));
        for out in [dtype, DType::F32] {
            checks.extend(products([dtype; 2], dtype, out));
        }
        checks.extend(adapters([dtype; 2]));
        checks.extend(shared_adapters([dtype; 2]));
        for first in [0, 8, 21] {
            checks.extend(grouped([dtype; 2], first));
        }
    }
    checks.extend(products(
        [DType::BF16, DType::F32],
        DType::BF16,
        DType::BF16,
    ));
    checks.extend(products([DType::BF16; 2], DType::F32, DType::F16));
    checks.extend(adapters([DType::BF16, DType::F32]));
    checks.extend(shared_adapters([DType::BF16, DType::F32]));
    checks.extend(grouped([DType::BF16, DType::F32], 4));
    checks.extend(losses(DType::BF16, DType::F32));
    checks.extend(partitions());
    for dtype in DTYPES {
        checks.extend(grouped_adapters([dtype; 2]));
    }
    checks.extend(grouped_adapters([DType::BF16, DType::F32]));
    for dtype in DTYPES {
        checks.extend(shared_grouped_adapters([dtype; 2]));
    }
    checks.extend(shared_grouped_adapters([DType::BF16, DType::F32]));
    checks
}

/// Operations at the head dims and on the tiles of real models, beside [`all`].
#[must_use]
pub(super) fn of_models() -> Vec<Check> {
    let mut checks = Vec::new();
    for dtype in DTYPES {
        for d in [32, 64, 72, 80, 96, 112, 128] {
            let starts = [vec![0, 5, 5, 12], vec![0, 9, 11, 20]];
            checks.push(one_attention(dtype, true, d, starts));
        }
        // One size for each tile: of square, of narrow and of wide products.
        for sizes in [
            [2112, 4096, 72],
            [1056, 2048, 72],
            [700, 1100, 72],
            [300, 500, 72],
            [130, 70, 72],
            [2100, 12, 136],
            [2100, 28, 136],
            [2100, 60, 136],
            [70, 28, 136],
            [70, 60, 136],
            [12, 70, 1030],
        ] {
            for out in [dtype, DType::F32] {
                checks.extend(products_of([dtype; 2], dtype, out, sizes));
            }
        }
    }
    checks
}

fn float(dtype: DType, dims: &[usize]) -> Input {
    Input::Float(dtype, dims.to_vec())
}

fn elements(dtype: DType) -> Vec<Check> {
    let x = || float(dtype, &[5, 21]);
    let mut checks = vec![
        Check::new(format!("add {dtype}"), [x(), x()], Compare::Bits, |b, x| {
            Ok(vec![b.add(&x[0], &x[1])?])
        }),
        Check::new(format!("scale {dtype}"), [x()], Compare::Bits, |b, x| {
            Ok(vec![b.scale(&x[0], 0.7)?])
        }),
        Check::new(
            format!("swiglu {dtype}"),
            [x(), x(), x()],
            Compare::Bits,
            |b, x| {
                let (d_gate, d_up) = b.swiglu_backward(&x[0], &x[1], &x[2])?;
                Ok(vec![b.swiglu(&x[0], &x[1])?, d_gate, d_up])
            },
        ),
        Check::new(
            format!("dropout {dtype}"),
            [x(), Input::Index(vec![5, 2], (10..20).collect())],
            Compare::Bits,
            |b, x| {
                Ok(vec![b.dropout(DropoutArgs {
                    x: &x[0],
                    rows: &x[1],
                    key: [3, 4],
                    p: 0.3,
                })?])
            },
        ),
    ];
    for kind in [Gelu::Tanh, Gelu::Erf] {
        checks.push(Check::new(
            format!("gelu {kind:?} {dtype}"),
            [x(), x()],
            Compare::Bits,
            move |b, x| {
                Ok(vec![
                    b.gelu(&x[0], kind)?,
                    b.gelu_backward(&x[0], &x[1], kind)?,
                ])
            },
        ));
    }
    for to in DTYPES {
        checks.push(Check::new(
            format!("cast {dtype} to {to}"),
            [x()],
            Compare::Bits,
            move |b, x| Ok(vec![b.cast(&x[0], to)?]),
        ));
    }
    for quantization in QUANTIZATIONS {
        checks.push(Check::new(
            format!("dequantize {quantization} to {dtype}"),
            [],
            Compare::Bits,
            move |b, _| {
                let shape = Shape::new(&[9, 70]);
                let values = numbers::normal(0, shape.elems());
                let mut quantized = vec![0; quantization.bytes(shape)];
                quantization.quantize(&values, shape, &mut quantized);
                let bytes = Shape::new(&[quantized.len()]);
                let quantized = b.upload(&quantized, bytes, DType::U8, Tag::Gathered)?;
                Ok(vec![b.dequantize(
                    &quantized,
                    quantization,
                    shape,
                    dtype,
                )?])
            },
        ));
    }
    for layout in [RopeLayout::HalfSplit, RopeLayout::Interleaved] {
        let angles = || float(DType::F32, &[7, 4]);
        checks.push(Check::new(
            format!("rope {layout:?} {dtype}"),
            [float(dtype, &[7, 2, 12]), angles(), angles()],
            Compare::Bits,
            move |b, x| {
                let turn = |direction| b.rope(&x[0], &x[1], &x[2], layout, direction);
                Ok(vec![turn(Direction::Forward)?, turn(Direction::Inverse)?])
            },
        ));
    }
    checks
}

fn norms(dtype: DType) -> Vec<Check> {
    let inputs = |params: DType| {
        vec![
            float(dtype, &[9, 24]),
            float(params, &[24]),
            float(params, &[24]),
            float(dtype, &[9, 24]),
        ]
    };
    let kinds = [dtype, DType::F32, DType::BF16].into_iter();
    let heads = [RopeLayout::HalfSplit, RopeLayout::Interleaved].map(|layout| {
        let angles = || float(DType::F32, &[7, 4]);
        let name = format!("norms of heads of {dtype}, rotated {layout:?}");
        let x = float(dtype, &[7, 2, 24]);
        let inputs = [x, float(dtype, &[24]), angles(), angles()];
        Check::new(name, inputs, Compare::Close(dtype), move |b, x| {
            Ok(vec![b.rms_norm_rope(
                &x[0],
                &x[1],
                1e-6,
                [&x[2], &x[3]],
                layout,
            )?])
        })
    });
    kinds
        .map(|params| {
            Check::new(
                format!("norms of {dtype} with parameters of {params}"),
                inputs(params),
                Compare::Close(dtype),
                |b, x| {
                    let [x, w, bias, dy] = [&x[0], &x[1], &x[2], &x[3]];
                    let layer = b.layer_norm_backward(x, w, dy, 1e-5)?;
                    let rms = b.rms_norm_backward(x, w, dy, 1e-6)?;
                    let mut all = vec![b.layer_norm(x, w, bias, 1e-5)?, b.rms_norm(x, w, 1e-6)?];
                    all.extend([layer.dx, layer.d_weight, rms.dx, rms.d_weight]);
                    all.extend(layer.d_bias);
                    Ok(all)
                },
            )
        })
        .chain(heads)
        .collect()
}

fn products(operands: [DType; 2], bias: DType, out: DType) -> Vec<Check> {
    products_of(operands, bias, out, [19, 13, 40])
}

fn products_of(operands: [DType; 2], bias: DType, out: DType, sizes: [usize; 3]) -> Vec<Check> {
    let mut checks = Vec::new();
    let [m, n, k] = sizes;
    for transpose_a in [Transpose::No, Transpose::Yes] {
        for transpose_b in [Transpose::No, Transpose::Yes] {
            let a = match transpose_a {
                Transpose::No => [m, k],
                Transpose::Yes => [k, m],
            };
            let b = match transpose_b {
                Transpose::No => [k, n],
                Transpose::Yes => [n, k],
            };
            let coarse = if operands[0] == operands[1] {
                operands[0]
            } else {
                out
            };
            checks.push(Check::new(
                format!(
                    "matmul {sizes:?} of {operands:?}, bias {bias}, to {out}, {transpose_a:?} {transpose_b:?}"
                ),
                [
                    float(operands[0], &a),
                    float(operands[1], &b),
                    float(bias, &[n]),
                ],
                Compare::Close(if out == DType::F32 { coarse } else { out }),
                move |backend, x| {
                    let args = MatmulArgs {
                        a: &x[0],
                        transpose_a,
                        b: &x[1],
                        transpose_b,
                        bias: Some(&x[2]),
                        out,
                    };
                    Ok(vec![
                        backend.matmul(args)?,
                        backend.matmul(MatmulArgs { bias: None, ..args })?,
                    ])
                },
            ));
        }
    }
    checks
}

/// Forward, input gradient and weight gradients of two layers; the first of the groups has `first` rows.
fn grouped([dtype, weight]: [DType; 2], first: usize) -> Vec<Check> {
    let (t, n, k) = (21, 24, 40);
    let rows: Vec<i32> = (0..t).map(|i| i * 8 % t).collect();
    let (language, vision) = rows.split_at(first);
    let index = |rows: &[i32]| Input::Index(vec![rows.len()], rows.to_vec());
    vec![Check::new(
        format!("two layers of {dtype} with weights of {weight}, {first} rows of the first"),
        [
            float(dtype, &[t as usize, k]),
            float(dtype, &[t as usize, n]),
            float(weight, &[n, k]),
            float(weight, &[n, k]),
            float(weight, &[n]),
            index(language),
            index(vision),
        ],
        Compare::Close(dtype),
        |b, inputs| {
            let [x, dy, first, second, bias] = [0, 1, 2, 3, 4].map(|i: usize| &inputs[i]);
            let rows = [&inputs[5], &inputs[6]];
            let group = |i: usize, bias| MatmulGroup {
                rows: rows[i],
                b: [first, second][i],
                bias,
            };
            Ok(vec![
                b.grouped_matmul(GroupedMatmulArgs {
                    a: x,
                    groups: [group(0, None), group(1, Some(bias))],
                    transpose_b: Transpose::Yes,
                })?,
                b.grouped_matmul(GroupedMatmulArgs {
                    a: dy,
                    groups: [group(0, None), group(1, None)],
                    transpose_b: Transpose::No,
                })?,
                b.matmul_of_rows(dy, x, rows[0])?,
                b.matmul_of_rows(dy, x, rows[1])?,
            ])
        },
    )]
}

/// Two layers over a partition of rows: all of one group too, unlike ranks and factors, one that is padded, no bias in one,
/// no adapter in one.
fn grouped_adapters([dtype, adapter]: [DType; 2]) -> Vec<Check> {
    let (t, n, k) = (21, 24, 36);
    let check = |(first, ranks, drops): (usize, [Option<usize>; 2], [f32; 2])| {
        let rows: Vec<i32> = (0..t).map(|i| i * 8 % t).collect();
        let (language, vision) = rows.split_at(first);
        let index = |rows: &[i32]| Input::Index(vec![rows.len()], rows.to_vec());
        let mut inputs = vec![
            float(dtype, &[t as usize, k]),
            float(dtype, &[t as usize, n]),
        ];
        for r in ranks {
            let r = r.unwrap_or(1);
            inputs.extend([
                float(dtype, &[n, k]),
                float(dtype, &[n]),
                float(adapter, &[r, k]),
                float(adapter, &[n, r]),
            ]);
        }
        inputs.extend([index(language), index(vision), names(t as usize)]);
        let name = format!(
            "layers of {dtype}, adapters of {adapter}, ranks {ranks:?}, {first} rows of the first, dropout {drops:?}"
        );
        Check::new(name, inputs, Compare::Close(dtype), move |b, x| {
            let layer = |i: usize| AdaptedLayer {
                weight: &x[2 + 4 * i],
                bias: (i == 1).then(|| &x[3 + 4 * i]),
                adapter: ranks[i].map(|_| AdapterArgs {
                    lora_a: &x[4 + 4 * i],
                    lora_b: &x[5 + 4 * i],
                    scale: [0.5, 0.25][i],
                    dropout: dropped(&x[12], [3, i as u32], drops[i]),
                }),
            };
            let args = AdaptedLinearArgs {
                x: &x[0],
                row_groups: Some([&x[10], &x[11]]),
                projections: &[vec![layer(0), layer(1)]],
            };
            let forward = b.adapted_linear(args)?;
            let mut results = forward.y;
            for (inner, need_dx) in [(&*forward.inner, true), (&[], false)] {
                let grads = b.adapted_linear_backward(AdaptedLinearGradArgs {
                    forward: args,
                    dy: &[&x[1]],
                    inner,
                    need_dx,
                })?;
                results.extend(grads.dx);
                results.extend(grads.adapters.into_iter().flatten().flatten().flatten());
            }
            Ok(results)
        })
    };
    let both = |first, second| [Some(first), Some(second)];
    [
        (8, both(4, 4), [0.0; 2]),
        (0, both(16, 3), [0.0; 2]),
        (21, both(20, 20), [0.0; 2]),
        (13, both(8, 72), [0.0; 2]),
        (9, [Some(5), None], [0.0; 2]),
        (9, [None, Some(16)], [0.0; 2]),
        (13, [None; 2], [0.0; 2]),
        // Both adapters drop inputs, one does, or one group has no adapter or no rows.
        (8, both(4, 20), [0.3; 2]),
        (13, both(16, 3), [0.0, 0.5]),
        (9, [Some(5), None], [0.3; 2]),
        (0, both(16, 3), [0.3; 2]),
    ]
    .map(check)
    .into()
}

/// Partitions of rows. The results go through a gather, since the device reads the lists and not the host's copies.
fn partitions() -> Vec<Check> {
    let check = |(n, every): (usize, usize)| {
        Check::new(
            format!("{n} rows by group, every {every}. of the second"),
            [float(DType::BF16, &[n, 4])],
            Compare::Bits,
            move |b, x| {
                let second: Vec<bool> = (1..=n).map(|i| i % every == 0).collect();
                let rows = b.partition_rows(&second)?;
                let parts = rows.iter().map(|rows| b.gather_rows(&x[0], rows));
                parts.collect()
            },
        )
    };
    [(21, 2), (5000, 7), (40, 1), (40, 41)].map(check).into()
}

/// Pairs of integers that identify rows for dropout.
fn names(t: usize) -> Input {
    let names = (0..2 * t as i32).map(|i| i / 2 * 5 - i % 2).collect();
    Input::Index(vec![t, 2], names)
}

/// Dropout of an adapter's input, if `p` is not zero.
fn dropped(rows: &Tensor, key: [u32; 2], p: f32) -> Option<AdapterDropout<'_>> {
    (p > 0.0).then_some(AdapterDropout { rows, key, p })
}

/// One adapted layer. Rows are not whole words, or they are and a library may compute the wide products.
fn adapters([dtype, adapter]: [DType; 2]) -> Vec<Check> {
    let t = 11;
    let check = |([n, k, r], p): ([usize; 3], f32)| {
        let inputs = [
            float(dtype, &[t, k]),
            float(dtype, &[n, k]),
            float(dtype, &[n]),
            float(adapter, &[r, k]),
            float(adapter, &[n, r]),
            float(dtype, &[t, n]),
            names(t),
        ];
        let name = format!(
            "adapted layer of {dtype}, {k} features, adapters of {adapter}, rank {r}, dropout {p}"
        );
        Check::new(name, inputs, Compare::Close(dtype), move |b, x| {
            let layer = AdaptedLayer {
                weight: &x[1],
                bias: Some(&x[2]),
                adapter: Some(AdapterArgs {
                    lora_a: &x[3],
                    lora_b: &x[4],
                    scale: 0.5,
                    dropout: dropped(&x[6], [1, 2], p),
                }),
            };
            let args = AdaptedLinearArgs {
                x: &x[0],
                row_groups: None,
                projections: &[vec![layer]],
            };
            let backward = |need_dx| {
                b.adapted_linear_backward(AdaptedLinearGradArgs {
                    forward: args,
                    dy: &[&x[5]],
                    inner: &[],
                    need_dx,
                })
            };
            let mut all = b.adapted_linear(args)?.y;
            for grads in [backward(true)?, backward(false)?] {
                all.extend(grads.adapters.into_iter().flatten().flatten().flatten());
                all.extend(grads.dx);
            }
            Ok(all)
        })
    };
    let (odd, whole) = ([20, 36, 4], [24, 40, 8]);
    [(odd, 0.0), (odd, 0.4), (whole, 0.0), (whole, 0.4)]
        .map(check)
        .into()
}

/// Three adapted layers of one input. The ranks cover every gradient kernel, outputs have different widths, and rows
/// are not whole words. Adapters with different scales are not stacked.
fn shared_adapters([dtype, adapter]: [DType; 2]) -> Vec<Check> {
    const RANKS: [usize; 3] = [4, 16, 40];
    const WIDTHS: [usize; 3] = [24, 20, 8];
    const ALL: [(u32, f32); 3] = [(0, 0.0); 3];
    let (t, k) = (11, 36);
    let mut inputs = vec![float(dtype, &[t, k])];
    for (r, n) in RANKS.into_iter().zip(WIDTHS) {
        inputs.extend([
            float(dtype, &[n, k]),
            float(dtype, &[n]),
            float(adapter, &[r, k]),
            float(adapter, &[n, r]),
            float(dtype, &[t, n]),
        ]);
    }
    inputs.push(names(t));
    let check = |(layers, scales, drops): (Range<usize>, [f32; 3], [(u32, f32); 3])| {
        let name = format!(
            "adapted layers {layers:?} of {dtype}, adapters of {adapter}, {scales:?}, dropout {drops:?}"
        );
        Check::new(name, inputs.clone(), Compare::Close(dtype), move |b, x| {
            let own = |i: usize| &x[1 + 5 * i..6 + 5 * i];
            let layer = |i: usize| AdaptedLayer {
                weight: &own(i)[0],
                bias: (i != 1).then(|| &own(i)[1]),
                adapter: Some(AdapterArgs {
                    lora_a: &own(i)[2],
                    lora_b: &own(i)[3],
                    scale: scales[i],
                    dropout: dropped(&x[16], [drops[i].0, 9], drops[i].1),
                }),
            };
            let all: Vec<Vec<AdaptedLayer<'_>>> = layers.clone().map(|i| vec![layer(i)]).collect();
            let args = AdaptedLinearArgs {
                x: &x[0],
                row_groups: None,
                projections: &all,
            };
            let dy: Vec<&Tensor> = layers.clone().map(|i| &own(i)[4]).collect();
            adapted_passes(b, args, &dy)
        })
    };
    [
        (0..3, [0.5; 3], ALL),
        (0..2, [0.5; 3], ALL),
        (0..3, [0.5, 0.5, 0.25], ALL),
        // A single layer, with a padded rank and without.
        (0..1, [0.5; 3], ALL),
        (1..2, [0.5; 3], ALL),
        // One mask for all layers, one mask each, and a layer without dropout.
        (0..3, [0.5; 3], [(4, 0.3); 3]),
        (0..3, [0.5; 3], [(4, 0.3), (5, 0.3), (6, 0.5)]),
        (0..3, [0.5; 3], [(4, 0.3), (5, 0.0), (6, 0.3)]),
        (0..1, [0.5; 3], [(4, 0.3); 3]),
        (1..2, [0.5; 3], [(4, 0.3); 3]),
    ]
    .map(check)
    .into()
}

/// Gradients and outputs of layers with adapters: with the products that forward kept, and computed again, with and
/// without `dx`.
fn adapted_passes(
    b: &dyn Backend,
    args: AdaptedLinearArgs<'_>,
    dy: &[&Tensor],
) -> crate::Result<Vec<Tensor>> {
    let forward = b.adapted_linear(args)?;
    let mut results = Vec::new();
    for (inner, need_dx) in [(&*forward.inner, true), (&[], false), (&[], true)] {
        let grads = b.adapted_linear_backward(AdaptedLinearGradArgs {
            forward: args,
            dy,
            inner,
            need_dx,
        })?;
        results.extend(grads.dx);
        results.extend(grads.adapters.into_iter().flatten().flatten().flatten());
    }
    results.extend(forward.y);
    Ok(results)
}

/// An adapter of several pairs of layers: rank, scale, key and share of the dropout.
type Adapted = Option<(usize, f32, (u32, f32))>;

/// Three pairs of layers of one input over one partition: a rank of each way to the gradients, outputs of unlike widths, one
/// group without adapters or rows. Unlike factors, masks, and adapters of some layers alone are not stacked.
fn shared_grouped_adapters([dtype, adapter]: [DType; 2]) -> Vec<Check> {
    const WIDTHS: [usize; 3] = [24, 20, 8];
    let (t, k) = (21, 36);
    let check = |(layers, first, adapters): (usize, usize, [[Adapted; 2]; 3])| {
        let rows: Vec<i32> = (0..t).map(|i| i * 8 % t).collect();
        let (language, vision) = rows.split_at(first);
        let index = |rows: &[i32]| Input::Index(vec![rows.len()], rows.to_vec());
        let mut inputs = vec![
            float(dtype, &[t as usize, k]),
            index(language),
            index(vision),
            names(t as usize),
        ];
        for (n, pair) in WIDTHS.into_iter().zip(adapters) {
            inputs.push(float(dtype, &[t as usize, n]));
            for own in pair {
                let r = own.map_or(1, |(r, ..)| r);
                inputs.extend([
                    float(dtype, &[n, k]),
                    float(dtype, &[n]),
                    float(adapter, &[r, k]),
                    float(adapter, &[n, r]),
                ]);
            }
        }
        let name = format!(
            "{layers} layers over a partition, {first} rows of the first, of {dtype}, adapters of {adapter}, {adapters:?}"
        );
        Check::new(name, inputs, Compare::Close(dtype), move |b, x| {
            let layer = |layer: usize, i: usize| {
                let own = &x[5 + 9 * layer + 4 * i..][..4];
                AdaptedLayer {
                    weight: &own[0],
                    bias: (layer != i).then_some(&own[1]),
                    adapter: adapters[layer][i].map(|(_, scale, (key, p))| AdapterArgs {
                        lora_a: &own[2],
                        lora_b: &own[3],
                        scale,
                        dropout: dropped(&x[3], [key, 9], p),
                    }),
                }
            };
            let pair = |i: usize| vec![layer(i, 0), layer(i, 1)];
            let all: Vec<Vec<AdaptedLayer<'_>>> = (0..layers).map(pair).collect();
            let args = AdaptedLinearArgs {
                x: &x[0],
                row_groups: Some([&x[1], &x[2]]),
                projections: &all,
            };
            let dy: Vec<&Tensor> = (0..layers).map(|i| &x[4 + 9 * i]).collect();
            adapted_passes(b, args, &dy)
        })
    };
    const ALL: (u32, f32) = (0, 0.0);
    const MASK: (u32, f32) = (4, 0.3);
    let with = |r, mask| Some((r, 0.5, mask));
    let both = |r, mask| [with(r, mask); 2];
    let ranks = |mask| [both(4, mask), both(16, mask), both(40, mask)];
    [
        (3, 8, ranks(ALL)),
        (2, 0, ranks(ALL)),
        (3, 21, ranks(ALL)),
        (1, 8, ranks(ALL)),
        // Different ranks in a layer, also above one pass, and one scale per group.
        (
            3,
            13,
            [[4, 20], [72, 5], [16, 16]].map(|[a, b]| [with(a, ALL), Some((b, 0.25, ALL))]),
        ),
        // A group without adapters, and a layer without one.
        (3, 8, [4, 16, 20].map(|r| [None, with(r, ALL)])),
        (2, 8, [[None, with(5, ALL)], both(16, ALL), both(4, ALL)]),
        // Scales that differ between layers.
        (
            2,
            8,
            [both(4, ALL), [Some((4, 0.25, ALL)); 2], both(4, ALL)],
        ),
        // One mask for all, for one group, and for each layer.
        (3, 8, ranks(MASK)),
        (3, 8, [4, 16, 40].map(|r| [with(r, MASK), with(r, ALL)])),
        (2, 0, ranks(MASK)),
        (2, 8, [both(4, MASK), both(16, (5, 0.3)), both(4, ALL)]),
    ]
    .map(check)
    .into()
}

fn attention(dtype: DType) -> Vec<Check> {
    vec![
        one_attention(dtype, true, 16, [vec![0, 5, 5, 12], vec![0, 9, 11, 20]]),
        one_attention(dtype, false, 20, [vec![0, 7, 12], vec![0, 13, 20]]),
        // Several tiles of keys.
        one_attention(dtype, true, 16, [vec![0, 40], vec![0, 300]]),
        // No query, or no key.
        one_attention(dtype, false, 16, [vec![0, 0], vec![0, 20]]),
    ]
}

fn one_attention(dtype: DType, causal: bool, d: usize, starts: [Vec<usize>; 2]) -> Check {
    let [q_starts, k_starts] = starts;
    let [t, s] = [&q_starts, &k_starts].map(|starts| starts[starts.len() - 1]);
    let (h, g) = (4, 2);
    Check::new(
        format!("attention {dtype}, head dim {d}, causal {causal}, {q_starts:?}"),
        [
            float(dtype, &[t, h, d]),
            float(dtype, &[s, g, d]),
            float(dtype, &[s, g, d]),
            float(dtype, &[t, h, d]),
        ],
        Compare::Close(dtype),
        move |b, x| {
            let args = AttentionArgs {
                q: &x[0],
                k: &x[1],
                v: &x[2],
                q_starts: &q_starts,
                k_starts: &k_starts,
                causal,
                scale: 0.3,
            };
            let saved = b.attention(args)?;
            let grads = b.attention_backward(args, &saved, &x[3])?;
            Ok(vec![saved.out, grads.dq, grads.dk, grads.dv])
        },
    )
}

fn losses(hidden: DType, weight: DType) -> Vec<Check> {
    let mut checks = Vec::new();
    for (v, labels) in [
        (40, vec![3, IGNORED_LABEL, 39, 0, IGNORED_LABEL, 17]),
        (37, vec![IGNORED_LABEL, 36, 1, 1, 20, 5]),
        (37, vec![IGNORED_LABEL; 6]),
    ] {
        checks.push(Check::new(
            format!("loss of {hidden} with {weight}, vocabulary {v}"),
            [
                float(hidden, &[6, 24]),
                float(weight, &[v, 24]),
                Input::Index(vec![6], labels),
            ],
            Compare::Close(hidden),
            |b, x| {
                let losses = b.linear_cross_entropy(&x[0], &x[1], &x[2])?;
                let mut all = vec![losses];
                for need in [(true, true), (true, false), (false, true)] {
                    let need = LossNeeds {
                        hidden: need.0,
                        weight: need.1,
                    };
                    let grads = b.linear_cross_entropy_backward(&x[0], &x[1], &x[2], 0.25, need)?;
                    all.push(grads.losses);
                    all.extend(grads.d_hidden.into_iter().chain(grads.d_weight));
                }
                Ok(all)
            },
        ));
    }
    checks
}

fn tables(dtype: DType) -> Vec<Check> {
    let table = || float(dtype, &[8, 6]);
    let rows = || float(dtype, &[5, 6]);
    let index = || Input::Index(vec![5], vec![7, 2, 0, 2, 5]);
    let mut checks = vec![
        Check::new(
            format!("rows of {dtype}"),
            [table(), rows(), index()],
            Compare::Bits,
            |b, x| {
                let [table, rows, index] = [&x[0], &x[1], &x[2]];
                // Only this call uses the copy. The caller uses the operand too.
                let own = b.add(table, table)?;
                Ok(vec![
                    b.gather_rows(table, index)?,
                    b.replace_rows(table, index, Some(rows))?,
                    b.replace_rows(table, index, None)?,
                    b.write_rows(own, index, rows)?,
                    b.write_rows(table.clone(), index, rows)?,
                    table.clone(),
                ])
            },
        ),
        Check::new(
            format!("transposed matrices of {dtype}"),
            [float(dtype, &[3, 5, 7])],
            Compare::Bits,
            |b, x| Ok(vec![b.transpose_each(&x[0])?]),
        ),
        Check::new(
            format!("column sums of {dtype}"),
            [float(dtype, &[40, 33])],
            // Results are f32.
            Compare::Close(DType::F32),
            |b, x| Ok(vec![b.column_sum(&x[0])?]),
        ),
        Check::new(
            format!("column sums of named rows of {dtype}"),
            [
                float(dtype, &[40, 33]),
                Input::Index(vec![3], vec![7, 39, 0]),
            ],
            Compare::Close(DType::F32),
            |b, x| Ok(vec![b.column_sum_of_rows(&x[0], &x[1])?]),
        ),
    ];
    for out in DTYPES {
        checks.push(Check::new(
            format!("added rows of {dtype} in {out}"),
            [rows(), index()],
            Compare::Bits,
            move |b, x| Ok(vec![b.scatter_add_rows(&x[0], &x[1], 9, out)?]),
        ));
    }
    checks
}

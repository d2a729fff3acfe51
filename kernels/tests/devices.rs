//! Tests of properties that do not depend on values: shapes, dtypes and bytes on the meta device, and equal bits for
//! any number of threads.
#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]

mod common;

use common::{Case, config, dtypes};
use kernels::{
    AdaptedLayer, AdaptedLinearArgs, AdaptedLinearGradArgs, AdapterArgs, AdapterDropout,
    AttentionArgs, AttentionOut, Backend, CpuBackend, DType, Direction, Gelu, GroupedMatmulArgs,
    KernelError, LossNeeds, MatmulArgs, MatmulGroup, MetaBackend, Pool, Result, RopeLayout, Shape,
    Tag, Tensor, Transpose,
};
use proptest::prelude::*;

/// Sizes of one set of calls.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    t: usize,
    c: usize,
    n: usize,
    r: usize,
    h: usize,
    g: usize,
    d: usize,
    v: usize,
    dtype: DType,
}

/// Operands of every operation.
struct Operands {
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    table: Tensor,
    bias: Tensor,
    wide_bias: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    dy: Tensor,
    heads: Tensor,
    keys: Tensor,
    angles: Tensor,
    index: Tensor,
    labels: Tensor,
}

impl Operands {
    fn new(s: Sizes, seed: u64) -> Self {
        let Sizes {
            t,
            c,
            n,
            r,
            h,
            g,
            d,
            v,
            dtype,
        } = s;
        let mut case = Case::new(seed);
        let mut of = |shape: &[usize]| case.operand(shape, dtype, 1.0).tensor;
        let [x, y] = [of(&[t, c]), of(&[t, c])];
        let (weight, table, bias) = (of(&[n, c]), of(&[v, c]), of(&[c]));
        let (wide_bias, lora_a, lora_b) = (of(&[n]), of(&[r, c]), of(&[n, r]));
        let (dy, heads, keys) = (of(&[t, n]), of(&[t, h, d]), of(&[t, g, d]));
        let angles = case.operand(&[t, d / 2], DType::F32, 3.0).tensor;
        let (index, _) = case.index(t, v);
        let labels: Vec<i32> = (0..t).map(|_| case.random.below(v) as i32).collect();
        let labels = common::ints_tensor(&case.cpu, &labels);
        Self {
            x,
            y,
            weight,
            table,
            bias,
            wide_bias,
            lora_a,
            lora_b,
            dy,
            heads,
            keys,
            angles,
            index,
            labels,
        }
    }
}

/// One operation: its name, and a call that returns every tensor it creates.
type Call = (
    &'static str,
    Box<dyn Fn(&dyn Backend, &Operands) -> Result<Vec<Tensor>> + Sync>,
);

fn call(
    name: &'static str,
    f: impl Fn(&dyn Backend, &Operands) -> Result<Vec<Tensor>> + Sync + 'static,
) -> Call {
    (name, Box::new(f))
}

fn adapter(o: &Operands) -> AdapterArgs<'_> {
    AdapterArgs {
        lora_a: &o.lora_a,
        lora_b: &o.lora_b,
        scale: 0.5,
        dropout: None,
    }
}

/// Outputs and gradients of a layer with `adapter`, the same for each row group.
fn adapted(
    b: &dyn Backend,
    o: &Operands,
    adapter: AdapterArgs<'_>,
    row_groups: Option<[&Tensor; 2]>,
) -> Result<(Vec<Tensor>, Vec<Tensor>)> {
    let layer = AdaptedLayer {
        weight: &o.weight,
        bias: Some(&o.wide_bias),
        adapter: Some(adapter),
    };
    let forward = AdaptedLinearArgs {
        x: &o.x,
        row_groups,
        projections: &[vec![layer; row_groups.map_or(1, |rows| rows.len())]],
    };
    let y = b.adapted_linear(forward)?.y;
    let grads = b.adapted_linear_backward(AdaptedLinearGradArgs {
        forward,
        dy: &[&o.dy],
        inner: &[],
        need_dx: true,
    })?;
    let adapters = grads.adapters.into_iter().flatten().flatten().flatten();
    Ok((y, grads.dx.into_iter().chain(adapters).collect()))
}

fn saved_attention(b: &dyn Backend, o: &Operands) -> Result<AttentionOut> {
    // The saved values are inputs. They belong to the device only if it computes.
    let lse = b.zeros(
        Shape::from([o.heads.dim(0), o.heads.dim(1)]),
        DType::F32,
        Tag::Activations,
    )?;
    Ok(AttentionOut {
        out: o.heads.clone(),
        lse,
    })
}

fn numbers(b: &dyn Backend, all: impl Iterator<Item = i32>) -> Result<Tensor> {
    let all: Vec<i32> = all.collect();
    let bytes = bytemuck::cast_slice(&all);
    b.upload(bytes, Shape::new(&[all.len()]), DType::I32, Tag::Workspace)
}

fn calls(s: Sizes) -> Vec<Call> {
    use Transpose::{No, Yes};
    let starts = vec![0, s.t / 3, s.t];
    let also = starts.clone();
    let attention = move |o: &Operands, causal| {
        // The tensors are cheap clones that live as long as the call.
        (o.heads.clone(), o.keys.clone(), starts.clone(), causal)
    };
    let attention_too = move |o: &Operands| (o.heads.clone(), o.keys.clone(), also.clone());
    let both = LossNeeds {
        hidden: true,
        weight: true,
    };
    vec![
        call("cast", |b, o| {
            Ok(vec![b.cast(&o.x, DType::BF16)?, b.cast(&o.x, DType::F32)?])
        }),
        call("add", |b, o| Ok(vec![b.add(&o.x, &o.y)?])),
        call("scale", |b, o| Ok(vec![b.scale(&o.x, 0.5)?])),
        call("matmul", move |b, o| {
            let args = MatmulArgs {
                a: &o.x,
                transpose_a: No,
                b: &o.weight,
                transpose_b: Yes,
                bias: Some(&o.wide_bias),
                out: s.dtype,
            };
            let dw = MatmulArgs {
                a: &o.dy,
                transpose_a: Yes,
                b: &o.x,
                transpose_b: No,
                bias: None,
                out: DType::F32,
            };
            Ok(vec![b.matmul(args)?, b.matmul(dw)?])
        }),
        call("column_sum", |b, o| Ok(vec![b.column_sum(&o.x)?])),
        call("column_sum_of_rows", move |b, o| {
            let rows = numbers(b, (0..s.t as i32).step_by(2))?;
            Ok(vec![b.column_sum_of_rows(&o.x, &rows)?])
        }),
        call("grouped_matmul", move |b, o| {
            let rows = [
                numbers(b, (0..s.t as i32).step_by(2))?,
                numbers(b, (1..s.t as i32).step_by(2))?,
            ];
            let group = |rows| MatmulGroup {
                rows,
                b: &o.weight,
                bias: Some(&o.wide_bias),
            };
            let y = b.grouped_matmul(GroupedMatmulArgs {
                a: &o.x,
                groups: [group(&rows[0]), group(&rows[1])],
                transpose_b: Yes,
            })?;
            Ok(vec![y, b.matmul_of_rows(&o.dy, &o.x, &rows[0])?])
        }),
        call("adapted_linear", |b, o| {
            Ok(adapted(b, o, adapter(o), None)?.0)
        }),
        call("adapted_linear_backward", |b, o| {
            Ok(adapted(b, o, adapter(o), None)?.1)
        }),
        call("adapted_linear with dropout", move |b, o| {
            let rows = numbers(b, 0..2 * s.t as i32)?.reshape([s.t, 2])?;
            let dropout = Some(AdapterDropout {
                rows: &rows,
                key: [1, 2],
                p: 0.3,
            });
            let own = AdapterArgs {
                dropout,
                ..adapter(o)
            };
            let (y, grads) = adapted(b, o, own, None)?;
            Ok(y.into_iter().chain(grads).collect())
        }),
        call("adapted_linear over row groups", move |b, o| {
            let rows = [
                numbers(b, (0..s.t as i32).step_by(2))?,
                numbers(b, (1..s.t as i32).step_by(2))?,
            ];
            let (y, grads) = adapted(b, o, adapter(o), Some(rows.each_ref()))?;
            Ok(y.into_iter().chain(grads).collect())
        }),
        call("layer_norm", |b, o| {
            Ok(vec![b.layer_norm(&o.x, &o.bias, &o.bias, 1e-6)?])
        }),
        call("layer_norm_backward", |b, o| {
            let g = b.layer_norm_backward(&o.x, &o.bias, &o.y, 1e-6)?;
            Ok([g.dx, g.d_weight].into_iter().chain(g.d_bias).collect())
        }),
        call("rms_norm", |b, o| {
            Ok(vec![b.rms_norm(&o.x, &o.bias, 1e-6)?])
        }),
        call("rms_norm_backward", |b, o| {
            let g = b.rms_norm_backward(&o.x, &o.bias, &o.y, 1e-6)?;
            Ok([g.dx, g.d_weight].into_iter().chain(g.d_bias).collect())
        }),
        call("gelu", |b, o| {
            Ok(vec![b.gelu(&o.x, Gelu::Tanh)?, b.gelu(&o.x, Gelu::Erf)?])
        }),
        call("gelu_backward", |b, o| {
            Ok(vec![b.gelu_backward(&o.x, &o.y, Gelu::Erf)?])
        }),
        call("swiglu", |b, o| Ok(vec![b.swiglu(&o.x, &o.y)?])),
        call("swiglu_backward", |b, o| {
            let (gate, up) = b.swiglu_backward(&o.x, &o.y, &o.x)?;
            Ok(vec![gate, up])
        }),
        call("rope", |b, o| {
            let layout = RopeLayout::HalfSplit;
            Ok(vec![b.rope(
                &o.heads,
                &o.angles,
                &o.angles,
                layout,
                Direction::Forward,
            )?])
        }),
        call("attention", move |b, o| {
            let mut all = Vec::new();
            for causal in [true, false] {
                let (q, k, starts, causal) = attention(o, causal);
                let args = AttentionArgs {
                    q: &q,
                    k: &k,
                    v: &k,
                    q_starts: &starts,
                    k_starts: &starts,
                    causal,
                    scale: 0.3,
                };
                let out = b.attention(args)?;
                all.extend([out.out, out.lse]);
            }
            Ok(all)
        }),
        call("attention_backward", move |b, o| {
            let (q, k, starts) = attention_too(o);
            let args = AttentionArgs {
                q: &q,
                k: &k,
                v: &k,
                q_starts: &starts,
                k_starts: &starts,
                causal: true,
                scale: 0.3,
            };
            let g = b.attention_backward(args, &saved_attention(b, o)?, &o.heads)?;
            Ok(vec![g.dq, g.dk, g.dv])
        }),
        call("gather_rows", |b, o| {
            Ok(vec![b.gather_rows(&o.table, &o.index)?])
        }),
        call("scatter_add_rows", move |b, o| {
            Ok(vec![b.scatter_add_rows(&o.x, &o.index, s.v, DType::F32)?])
        }),
        call("replace_rows", |b, o| {
            Ok(vec![b.replace_rows(&o.table, &o.index, None)?])
        }),
        call("linear_cross_entropy", |b, o| {
            Ok(vec![b.linear_cross_entropy(&o.x, &o.table, &o.labels)?])
        }),
        call("linear_cross_entropy_backward", move |b, o| {
            let g = b.linear_cross_entropy_backward(&o.x, &o.table, &o.labels, 0.1, both)?;
            let grads = g.d_hidden.into_iter().chain(g.d_weight);
            Ok(std::iter::once(g.losses).chain(grads).collect())
        }),
    ]
}

fn sizes() -> impl Strategy<Value = Sizes> {
    let extents = (1..90usize, 1..70usize, 1..70usize, 1..9usize, 1..300usize);
    let heads = (1..4usize, 1..4usize, 1..33usize);
    (extents, heads, dtypes()).prop_map(|((t, c, n, r, v), (g, group, d), dtype)| Sizes {
        t,
        c,
        n,
        r,
        v,
        h: g * group,
        g,
        d,
        dtype,
    })
}

proptest! {
    #![proptest_config(config(24))]

    /// Shapes, dtypes and peaks under every tag are the same.
    #[test]
    fn the_meta_device_counts_the_memory_of_the_cpu(s in sizes(), seed: u64) {
        let o = Operands::new(s, seed);
        for (name, run) in calls(s) {
            let (cpu, null) = (CpuBackend::unlimited(), MetaBackend::unlimited());
            let real = run(&cpu, &o).unwrap();
            let counted = run(&null, &o).unwrap();
            let kinds = |all: &[Tensor]| -> Vec<(Shape, DType)> {
                all.iter().map(|t| (t.shape(), t.dtype())).collect()
            };
            prop_assert_eq!(kinds(&real), kinds(&counted), "{}", name);
            // A cast to the same dtype returns the operand itself.
            prop_assert!(name == "cast" || counted.iter().all(Tensor::is_meta), "{}", name);
            let peaks = |b: &dyn Backend| b.pool().stats().by_tag.map(|t| t.peak);
            prop_assert_eq!(peaks(&cpu), peaks(&null), "{}", name);
        }
    }
}

fn bits(all: &[Tensor]) -> Vec<Vec<u8>> {
    all.iter().map(|t| t.as_bytes().to_vec()).collect()
}

#[test]
fn results_have_the_same_bits_for_any_number_of_threads() {
    // Large enough that every operation takes its parallel path.
    for dtype in [DType::F32, DType::BF16] {
        let s = Sizes {
            t: 700,
            c: 200,
            n: 260,
            r: 8,
            h: 6,
            g: 3,
            d: 40,
            v: 1500,
            dtype,
        };
        let o = Operands::new(s, 7);
        for (name, run) in calls(s) {
            let with = |threads| {
                let pool = rayon::ThreadPoolBuilder::new()
                    .num_threads(threads)
                    .build()
                    .unwrap();
                pool.install(|| bits(&run(&CpuBackend::unlimited(), &o).unwrap()))
            };
            let one = with(1);
            assert_eq!(one, with(2), "{name} {dtype}: 1 and 2 threads");
            assert_eq!(one, with(3), "{name} {dtype}: 1 and 3 threads");
        }
    }
}

#[test]
fn the_meta_device_counts_a_full_size_layer_without_computing() {
    let null = MetaBackend::unlimited();
    let (t, c, wide, v) = (16_384, 3584, 18_944, 151_666);
    let bf16 = |shape: &[usize]| {
        null.zeros(shape.into(), DType::BF16, Tag::Parameters)
            .unwrap()
    };
    let linear = |x: &Tensor, weight: &Tensor| {
        let args = MatmulArgs {
            a: x,
            transpose_a: Transpose::No,
            b: weight,
            transpose_b: Transpose::Yes,
            bias: None,
            out: DType::BF16,
        };
        null.matmul(args).unwrap()
    };
    let x = bf16(&[t, c]);
    let (gate, up) = (linear(&x, &bf16(&[wide, c])), linear(&x, &bf16(&[wide, c])));
    let down = linear(&null.swiglu(&gate, &up).unwrap(), &bf16(&[c, wide]));
    assert_eq!(down.shape(), Shape::from([t, c]));
    let q = down.reshape([t, 28, 128]).unwrap();
    let k = bf16(&[t, 4, 128]);
    let args = AttentionArgs {
        q: &q,
        k: &k,
        v: &k,
        q_starts: &[0, t],
        k_starts: &[0, t],
        causal: true,
        scale: 1.0,
    };
    assert_eq!(null.attention(args).unwrap().out.shape(), q.shape());
    let labels = null
        .zeros([t].into(), DType::I32, Tag::Activations)
        .unwrap();
    null.linear_cross_entropy(&x, &bf16(&[v, c]), &labels)
        .unwrap();
    // Panels, tiles and chunks only: far below the 9.9 GB of all logits.
    let workspace = null.pool().stats().tag(Tag::Workspace).peak;
    assert!(workspace > 0 && workspace < 128 << 20, "{workspace}");
}

#[test]
fn tensors_of_the_meta_device_are_errors_on_the_cpu() {
    let null = MetaBackend::unlimited();
    let x = null
        .zeros([2, 2].into(), DType::F32, Tag::Activations)
        .unwrap();
    let error = CpuBackend::unlimited().add(&x, &x).unwrap_err();
    assert!(
        matches!(error, KernelError::NoValues { op: "add", .. }),
        "{error}"
    );
}

#[test]
fn wrong_shapes_and_dtypes_are_errors_on_every_device() {
    let cpu = CpuBackend::unlimited();
    let of = |shape: &[usize], dtype| cpu.zeros(shape.into(), dtype, Tag::Activations).unwrap();
    let (a, b) = (of(&[2, 3], DType::F32), of(&[3, 2], DType::F32));
    let (half, ints) = (of(&[2, 3], DType::BF16), of(&[2], DType::I32));
    let null = MetaBackend::unlimited();
    for backend in [&cpu as &dyn Backend, &null] {
        let matmul = |a, b| {
            let (transpose_a, transpose_b) = (Transpose::No, Transpose::No);
            let out = DType::F32;
            backend.matmul(MatmulArgs {
                a,
                transpose_a,
                b,
                transpose_b,
                bias: None,
                out,
            })
        };
        assert!(matches!(
            backend.add(&a, &b),
            Err(KernelError::Shape { op: "add", .. })
        ));
        assert!(matches!(
            backend.add(&a, &half),
            Err(KernelError::DType { op: "add", .. })
        ));
        assert!(matches!(matmul(&a, &a), Err(KernelError::Shape { .. })));
        assert!(matmul(&a, &b).is_ok());
        assert!(matches!(matmul(&a, &ints), Err(KernelError::DType { .. })));
        assert!(matches!(
            backend.rms_norm(&a, &b, 1e-6),
            Err(KernelError::Shape { .. })
        ));
        assert!(matches!(
            backend.gather_rows(&a, &half),
            Err(KernelError::DType { .. })
        ));
        assert!(matches!(
            backend.cast(&a, DType::I32),
            Err(KernelError::DType { .. })
        ));
        let heads = of(&[2, 2, 4], DType::F32);
        let attention = |q_starts| {
            let (q, k, v) = (&heads, &heads, &heads);
            let k_starts = &[0, 2];
            backend.attention(AttentionArgs {
                q,
                k,
                v,
                q_starts,
                k_starts,
                causal: false,
                scale: 1.0,
            })
        };
        assert!(attention(&[0, 2]).is_ok());
        assert!(matches!(attention(&[0, 1]), Err(KernelError::Shape { .. })));
        assert!(matches!(
            attention(&[0, 1, 2]),
            Err(KernelError::Shape { .. })
        ));
        assert!(matches!(
            backend.upload(&[0; 7], [2].into(), DType::F32, Tag::Activations),
            Err(KernelError::Shape { op: "upload", .. })
        ));
    }
}

#[test]
fn a_full_pool_is_an_error_and_leaks_nothing() {
    let mut case = Case::new(0);
    let x = case.operand(&[64, 64], DType::BF16, 1.0).tensor;
    let args = MatmulArgs {
        a: &x,
        transpose_a: Transpose::No,
        b: &x,
        transpose_b: Transpose::No,
        bias: None,
        out: DType::BF16,
    };
    // The pool fits the output, but not the workspace.
    let cpu = CpuBackend::new(Pool::new("device", Some(16 << 10)));
    assert!(matches!(
        cpu.matmul(args),
        Err(KernelError::OutOfMemory { .. })
    ));
    assert_eq!(cpu.pool().stats().in_use, 0);
}

#[test]
fn row_groups_that_are_no_partition_are_refused() {
    let cpu = CpuBackend::unlimited();
    let zeros = |shape: [usize; 2]| cpu.zeros(Shape::new(&shape), DType::F32, Tag::Activations);
    let (x, w) = (zeros([3, 4]).unwrap(), zeros([2, 4]).unwrap());
    let run = |first: &[i32], second: &[i32]| {
        let rows = [first, second].map(|rows| numbers(&cpu, rows.iter().copied()).unwrap());
        let group = |rows| MatmulGroup {
            rows,
            b: &w,
            bias: None,
        };
        cpu.grouped_matmul(GroupedMatmulArgs {
            a: &x,
            groups: [group(&rows[0]), group(&rows[1])],
            transpose_b: Transpose::Yes,
        })
    };
    assert!(run(&[2, 0], &[1]).is_ok());
    assert!(run(&[], &[1, 2, 0]).is_ok());
    for (first, second) in [
        (&[0, 1][..], &[1][..]),
        (&[0], &[1]),
        (&[0, 3], &[1]),
        (&[0, -1], &[2]),
    ] {
        assert!(run(first, second).is_err(), "{first:?}, {second:?}");
    }
}

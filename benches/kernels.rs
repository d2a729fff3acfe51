//! Benchmark of the CPU backend's operations: `cargo bench -p benches --bench kernels`.
//!
//! Shapes in names are rows x outputs x inputs, tokens x heads x head dim, or rows x channels.
#![allow(missing_docs, reason = "criterion's macros define public functions")]
#![allow(clippy::unwrap_used, reason = "a benchmark may panic")]

use benches::adam::{Buffers, Variant};
use benches::{Work, config, measure};
use criterion::{Criterion, criterion_group, criterion_main};
use kernels::{
    AdaptedLayer, AdaptedLinearArgs, AdapterArgs, AttentionArgs, Backend, CpuBackend, CpuMath,
    DType, LossNeeds, MatmulArgs, Tag, Tensor, Transpose,
};
use memmap2::MmapMut;
use std::sync::Arc;

const TYPES: [DType; 2] = [DType::F32, DType::BF16];

/// Values uniform in -1..1, from a simple multiplicative generator: only their spread matters.
fn random(cpu: &CpuBackend, shape: &[usize], dtype: DType) -> Tensor {
    let mut state = 1u64;
    let values: Vec<f32> = (0..shape.iter().product())
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect();
    let wide = Tensor::from_slice(cpu.pool(), Tag::Activations, shape, &values).unwrap();
    cpu.cast(&wide, dtype).unwrap()
}

fn product<'a>(
    a: (&'a Tensor, Transpose),
    b: (&'a Tensor, Transpose),
    out: DType,
) -> MatmulArgs<'a> {
    MatmulArgs {
        a: a.0,
        transpose_a: a.1,
        b: b.0,
        transpose_b: b.1,
        bias: None,
        out,
    }
}

fn gemm(c: &mut Criterion) {
    use Transpose::{No, Yes};
    let cpu = CpuBackend::unlimited().with_math(CpuMath::native());
    let mut group = c.benchmark_group("gemm");
    // Layers of the demo, and of models with a width of 1024.
    for (m, n, k) in [
        (1500, 128, 128),
        (1500, 512, 128),
        (512, 1024, 1024),
        (2048, 1024, 1024),
    ] {
        for dtype in TYPES {
            let [x, w, dy] = [[m, k], [n, k], [m, n]].map(|s| random(&cpu, &s, dtype));
            let work = Work::flops(2.0 * (m * n * k) as f64);
            let mut run = |name: &str, args: MatmulArgs<'_>| {
                let name = format!("{name} {dtype} {m}x{n}x{k}");
                measure(&mut group, &name, work, || drop(cpu.matmul(args).unwrap()));
            };
            run("forward", product((&x, No), (&w, Yes), dtype));
            run("dx", product((&dy, No), (&w, No), dtype));
            run("dw", product((&dy, Yes), (&x, No), DType::F32));
        }
    }
    let (t, n, k, r) = (1024, 1024, 1024, 16);
    let [x, weight, lora_a, lora_b] =
        [[t, k], [n, k], [r, k], [n, r]].map(|s| random(&cpu, &s, DType::BF16));
    let layer = AdaptedLayer {
        weight: &weight,
        bias: None,
        adapter: Some(AdapterArgs {
            lora_a: &lora_a,
            lora_b: &lora_b,
            scale: 2.0,
            dropout: None,
        }),
    };
    let args = AdaptedLinearArgs {
        x: &x,
        row_groups: None,
        projections: &[vec![layer]],
    };
    let work = Work::flops(2.0 * (t * (n * k + r * k + n * r)) as f64);
    let name = format!("lora bf16 {t}x{n}x{k} r{r}");
    measure(&mut group, &name, work, || {
        drop(cpu.adapted_linear(args).unwrap());
    });
    group.finish();
}

/// The tensor in huge pages, if the system grants them: the tiers of a run have their weights there.
fn in_huge_pages(tensor: &Tensor) -> Tensor {
    let bytes = tensor.as_bytes();
    let mut map = MmapMut::map_anon(bytes.len()).unwrap();
    #[cfg(target_os = "linux")]
    // Only a hint. The ceilings say when the system grants none.
    map.advise(memmap2::Advice::HugePage).ok();
    map.copy_from_slice(bytes);
    Tensor::from_foreign(Arc::new(map), None, 0, tensor.shape(), tensor.dtype()).unwrap()
}

/// One row times weights that no cache holds, as for each new token of a generation, on one thread and on all.
fn decode(c: &mut Criterion) {
    use Transpose::{No, Yes};
    let cpu = CpuBackend::unlimited().with_math(CpuMath::native());
    let mut group = c.benchmark_group("decode");
    let one = rayon::ThreadPoolBuilder::new().num_threads(1).build();
    let one = one.unwrap();
    for (n, k) in [(8192, 8192), (28_672, 3584)] {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let [x, w] = [[1, k], [n, k]].map(|s| random(&cpu, &s, dtype));
            let w = in_huge_pages(&w);
            let bytes = (n * k * dtype.size_bytes()) as f64;
            let step = || drop(cpu.matmul(product((&x, No), (&w, Yes), dtype)).unwrap());
            let name = format!("{dtype} 1x{n}x{k}");
            measure(&mut group, &name, Work::read(bytes), step);
            let name = format!("{name}, one thread");
            let work = Work::read_by_one(bytes);
            measure(&mut group, &name, work, || one.install(step));
        }
    }
    group.finish();
}

/// One optimizer step in every form, over more memory than caches hold.
fn adamw(c: &mut Criterion) {
    let mut group = c.benchmark_group("adamw");
    let elems = 16 << 20;
    let mut buffers = Buffers::new(elems);
    for variant in Variant::ALL {
        let work = Work::update((elems * variant.bytes) as f64);
        buffers.run(variant);
        measure(&mut group, variant.name, work, || buffers.run(variant));
    }
    group.finish();
}

/// Tokens, heads, key/value heads, head dim, sequences, mask.
type AttentionShape = (usize, usize, usize, usize, usize, bool);

fn attention(c: &mut Criterion) {
    let cpu = CpuBackend::unlimited().with_math(CpuMath::native());
    let mut group = c.benchmark_group("attention");
    // The demo's decoder, a vision tower, and a decoder with grouped-query attention.
    let shapes: [AttentionShape; 3] = [
        (1024, 4, 2, 32, 8, true),
        (1024, 16, 16, 72, 1, false),
        (1024, 14, 2, 128, 1, true),
    ];
    for (t, h, g, d, sequences, causal) in shapes {
        for dtype in TYPES {
            let [q, k, v] = [[t, h, d], [t, g, d], [t, g, d]].map(|s| random(&cpu, &s, dtype));
            let starts: Vec<usize> = (0..=sequences).map(|i| i * t / sequences).collect();
            let args = AttentionArgs {
                q: &q,
                k: &k,
                v: &v,
                q_starts: &starts,
                k_starts: &starts,
                causal,
                scale: 1.0 / (d as f32).sqrt(),
            };
            let pairs = (t * t / sequences) as f64 * if causal { 0.5 } else { 1.0 };
            // Two products forward, five backward including the recomputed scores.
            let forward = 4.0 * pairs * (h * d) as f64;
            let name = format!("{dtype} {t}x{h}x{d} in {sequences}");
            let work = Work::flops(forward);
            measure(&mut group, &format!("forward {name}"), work, || {
                drop(cpu.attention(args).unwrap());
            });
            let saved = cpu.attention(args).unwrap();
            let work = Work::flops(2.5 * forward);
            measure(&mut group, &format!("backward {name}"), work, || {
                drop(cpu.attention_backward(args, &saved, &q).unwrap());
            });
        }
    }
    group.finish();
}

fn norm(c: &mut Criterion) {
    let cpu = CpuBackend::unlimited().with_math(CpuMath::native());
    let mut group = c.benchmark_group("norm");
    // The last shape exceeds the caches.
    for (rows, width) in [(1500, 128), (2048, 1024), (16_384, 1024)] {
        for dtype in TYPES {
            let x = random(&cpu, &[rows, width], dtype);
            let w = random(&cpu, &[width], dtype);
            let bytes = x.size_bytes() as f64;
            let mut run = |name: &str, tensors: f64, f: &dyn Fn()| {
                let name = format!("{name} {dtype} {rows}x{width}");
                measure(&mut group, &name, Work::bytes(tensors * bytes), f);
            };
            run("layer forward", 2.0, &|| {
                drop(cpu.layer_norm(&x, &w, &w, 1e-6).unwrap());
            });
            run("layer backward", 3.0, &|| {
                drop(cpu.layer_norm_backward(&x, &w, &x, 1e-6).unwrap());
            });
            run("rms forward", 2.0, &|| {
                drop(cpu.rms_norm(&x, &w, 1e-6).unwrap());
            });
            run("rms backward", 3.0, &|| {
                drop(cpu.rms_norm_backward(&x, &w, &x, 1e-6).unwrap());
            });
        }
    }
    group.finish();
}

fn linear_cross_entropy(c: &mut Criterion) {
    let cpu = CpuBackend::unlimited().with_math(CpuMath::native());
    let mut group = c.benchmark_group("linear_cross_entropy");
    let need = LossNeeds {
        hidden: true,
        weight: true,
    };
    // The demo's head, a vocabulary of one tile, and a streamed vocabulary.
    for (t, width, v) in [(500, 128, 1000), (256, 512, 32_000), (256, 512, 40_000)] {
        for dtype in TYPES {
            let (hidden, weight) = (
                random(&cpu, &[t, width], dtype),
                random(&cpu, &[v, width], dtype),
            );
            let labels: Vec<i32> = (0..t).map(|i| (i * 7 % v) as i32).collect();
            let labels = Tensor::from_slice(cpu.pool(), Tag::Activations, [t], &labels).unwrap();
            let product = 2.0 * (t * width * v) as f64;
            let name = format!("{dtype} {t}x{width}x{v}");
            measure(
                &mut group,
                &format!("forward {name}"),
                Work::flops(product),
                || {
                    drop(cpu.linear_cross_entropy(&hidden, &weight, &labels).unwrap());
                },
            );
            // One product for the logits, and one for each operand's gradient.
            let work = Work::flops(3.0 * product);
            measure(&mut group, &format!("backward {name}"), work, || {
                let grads = cpu.linear_cross_entropy_backward(&hidden, &weight, &labels, 1.0, need);
                drop(grads.unwrap());
            });
        }
    }
    group.finish();
}

criterion_group! {
    name = kernels_of_the_processor;
    config = config();
    targets = gemm, decode, adamw, attention, norm, linear_cross_entropy
}
criterion_main!(kernels_of_the_processor);

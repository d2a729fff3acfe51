//! Benchmark of the matrix products of the step that `train_step` takes: `step_products THREADS DTYPE ROUNDS`. It prints
//! the median seconds of each product. `scripts/step_peers.py --products` compares them with torch.
#![allow(
    clippy::print_stdout,
    reason = "a program that answers on standard output"
)]

use benches::Result;
use benches::train::{LAYERS, TOKENS};
use kernels::{Backend, CpuBackend, CpuMath, DType, MatmulArgs, Tag, Tensor, Transpose};
use std::time::Instant;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [threads, dtype, rounds] = args.as_slice() else {
        return Err("usage: step_products THREADS f32|bf16 ROUNDS".into());
    };
    let dtype = match dtype.as_str() {
        "f32" => DType::F32,
        "bf16" => DType::BF16,
        other => return Err(format!("unknown type {other}").into()),
    };
    let rounds = rounds.parse()?;
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads.parse()?);
    pool.build()?.install(|| products(dtype, rounds))
}

fn products(dtype: DType, rounds: usize) -> Result<()> {
    use Transpose::{No, Yes};
    let cpu = CpuBackend::unlimited().with_math(CpuMath::native());
    for (n, k) in LAYERS {
        let [x, w, dy] = [[TOKENS, k], [n, k], [TOKENS, n]].map(|shape| {
            let values: Vec<f32> = (0..shape[0] * shape[1])
                .map(|i| (i * 7919 % 1009) as f32 / 1009.0 - 0.5)
                .collect();
            let wide = Tensor::from_slice(cpu.pool(), Tag::Activations, shape, &values)?;
            cpu.cast(&wide, dtype)
        });
        let (x, w, dy) = (x?, w?, dy?);
        for (name, a, b, out) in [
            ("forward", (&x, No), (&w, Yes), dtype),
            ("dx", (&dy, No), (&w, No), dtype),
            ("dw", (&dy, Yes), (&x, No), DType::F32),
        ] {
            let args = MatmulArgs {
                a: a.0,
                transpose_a: a.1,
                b: b.0,
                transpose_b: b.1,
                bias: None,
                out,
            };
            let mut seconds = Vec::new();
            for _ in 0..rounds + 2 {
                let start = Instant::now();
                drop(cpu.matmul(args)?);
                seconds.push(start.elapsed().as_secs_f64());
            }
            let seconds = &mut seconds[2..];
            seconds.sort_by(f64::total_cmp);
            println!("{name} {TOKENS}x{n}x{k} {:.6}", seconds[seconds.len() / 2]);
        }
    }
    Ok(())
}

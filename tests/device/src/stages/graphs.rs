//! Stage `graphs`: small operations queued one by one and as graphs. Bytes must be equal. It also measures the time per
//! operation where the device waits for launches.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Result, ensure};
use kernels::cuda::CudaBackend;
use kernels::cuda::backend::graphs::{Mode, Replaying};
use kernels::cuda::gpu::Gpu;
use kernels::{Backend, DType, MatmulArgs, Shape, Tag, Tensor, Transpose};

use super::{Report, Setting};
use crate::numbers::bytes;
use crate::random::Operands;

const ARENA_BYTES: u64 = 256 << 20;
const WIDTH: usize = 128;
const ROWS: usize = 32;
/// Layers per round. Each queues five commands or more.
const LAYERS: usize = 24;
const ROUNDS: usize = 200;

/// Runs rounds through a small model, with and without graphs.
#[must_use]
pub fn run(setting: &Setting) -> Report {
    let mut report = setting.report("graphs");
    report.part("graphs", |report| {
        let rounds = setting.size(ROUNDS, 20);
        let alone = CudaBackend::new(Arc::new(setting.gpu()?), ARENA_BYTES)?;
        let inner = Arc::new(setting.gpu()?);
        let replaying = Arc::new(Replaying::<Gpu>::new(inner.clone(), Mode::On));
        let device = CudaBackend::new(replaying.clone(), ARENA_BYTES)?;
        let weight = Operands::new(3).normal("weight", WIDTH * WIDTH, 0.1);
        let mut seconds = [0.0; 2];
        let free = || Ok::<_, anyhow::Error>(inner.memory_info()?.0 as f64);
        let mut before = 0.0;
        let mut results = [Vec::new(), Vec::new()];
        for (place, device) in [&alone, &device].into_iter().enumerate() {
            let shape = Shape::new(&[WIDTH, WIDTH]);
            let weight = bytes(DType::BF16, &weight);
            let weight = device.upload(&weight, shape, DType::BF16, Tag::Activations)?;
            // Compiles kernels and makes graphs before the measurement.
            for number in 0..4 {
                results[place].push(round(device, &weight, number)?);
                if number == 0 {
                    // Kernels are loaded, and nothing was repeated yet.
                    before = free()?;
                }
            }
            let begun = Instant::now();
            for number in 0..rounds {
                let last = round(device, &weight, number)?;
                if number % 50 == 0 {
                    results[place].push(last);
                }
            }
            seconds[place] = begun.elapsed().as_secs_f64();
        }
        let counts = replaying.counts();
        ensure!(results[0] == results[1], "graphs have other bits");
        ensure!(counts.replays >= rounds as u64, "{counts:?}");
        let per_work = |seconds: f64| {
            let commands = counts.commands as f64 / (rounds + 4) as f64;
            seconds * 1e6 / rounds as f64 / commands
        };
        let [alone, graphs] = seconds.map(per_work);
        report.row("a small work, queued alone", format!("{alone:.2} us"), "");
        report.row(
            "a small work in a graph",
            format!("{graphs:.2} us"),
            format!("{:.2}x as fast", alone / graphs),
        );
        report.row(
            "graphs and replays",
            format!("{}, {}", counts.graphs, counts.replays),
            "",
        );
        // The plan counts it within the part of CUDA itself.
        let nodes = counts.graphs as f64 * counts.replayed as f64 / counts.replays as f64;
        report.row(
            "memory of a node of a graph",
            format!("{:.0} bytes", (before - free()?).max(0.0) / nodes),
            format!("{nodes:.0} nodes in {} graphs", counts.graphs),
        );
        Ok(())
    });
    report
}

/// Computes layers from the numbers of the round and returns the resulting bytes.
fn round(device: &CudaBackend, weight: &Tensor, number: usize) -> Result<Vec<u8>> {
    let x = Operands::new(number as u64).normal("x", ROWS * WIDTH, 1.0);
    let shape = Shape::new(&[ROWS, WIDTH]);
    let mut x = device.upload(
        &bytes(DType::BF16, &x),
        shape,
        DType::BF16,
        Tag::Activations,
    )?;
    for _ in 0..LAYERS {
        let y = device.matmul(MatmulArgs {
            a: &x,
            transpose_a: Transpose::No,
            b: weight,
            transpose_b: Transpose::Yes,
            bias: None,
            out: DType::BF16,
        })?;
        let y = device.swiglu(&y, &device.scale(&y, 0.5)?)?;
        x = device.scale(&device.add(&x, &y)?, 0.7)?;
    }
    Ok(x.to_bytes()?)
}

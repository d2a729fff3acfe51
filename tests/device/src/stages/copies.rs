//! Stage `copies`: weights in and gradients out during compute, as in a training run. Their rates are compared with
//! those of the bus.

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use anyhow::Result;
use kernels::cuda::CudaBackend;
use kernels::{Backend, DType, Fetch, Shape, Tag, Tensor};

use super::{Report, Setting, Target, median_milliseconds, queue};

/// Bytes of a unit. A layer of an 8 B model in bf16 has six times as many.
const UNIT_BYTES: usize = 64 << 20;
const UNITS: usize = 24;
/// Units of memory for two units' weights, their gradients and the compute on them.
const ARENA_UNITS: u64 = 16;
const BUDGET: Duration = Duration::from_secs(2);
/// Share of the bus rate that copies must reach.
const GOAL: Target = Target::AtLeast(0.85);
/// Largest time of all three activities together, as a multiple of the longest one.
const TOGETHER: Target = Target::AtMost(1.2);

/// Measures the rates of copies alone and during compute.
#[must_use]
pub fn run(setting: &Setting) -> Report {
    let mut report = setting.report("copies");
    report.part("copies", |report| measure(setting, report));
    report
}

/// A unit's weights on the host: f32 values of a few bits, so doubling is exact.
fn weights(unit: usize, bytes: usize) -> Vec<f32> {
    let value = |i: usize| ((i * 31 + unit * 17) % 1021) as f32;
    (0..bytes / 4).map(value).collect()
}

fn measure(setting: &Setting, report: &mut Report) -> Result<()> {
    let gpu = setting.gpu()?;
    let unit_bytes = setting.size(UNIT_BYTES, 64);
    let device = gpu.allocate(unit_bytes)?;
    let mut pinned = gpu.pinned(unit_bytes)?;
    let rate = |milliseconds: f64| unit_bytes as f64 / milliseconds * 1e3;
    let bus_up = rate(median_milliseconds(&gpu, BUDGET, |_| {
        queue::upload(&gpu, &pinned, &device)
    })?);
    let bus_down = rate(median_milliseconds(&gpu, BUDGET, |_| {
        queue::download(&gpu, &device, &mut pinned)
    })?);
    drop((device, pinned));
    let backend = CudaBackend::new(Arc::new(gpu), ARENA_UNITS * unit_bytes as u64)?;
    let units: Vec<Vec<f32>> = (0..2).map(|unit| weights(unit, unit_bytes)).collect();
    let mut out = vec![0.0f32; unit_bytes / 4];
    // One pass first, for modules, rings and pages.
    pass(&backend, &units, &mut out, 1, true)?;

    let up = alone(|| {
        let mut held = None;
        for unit in 0..UNITS {
            held = Some(upload(&backend, &units[unit % 2])?);
        }
        record_write(&backend)?;
        drop(held);
        Ok(())
    })?;
    let resident = upload(&backend, &units[0])?;
    let down = alone(|| {
        for _ in 0..UNITS {
            resident.fetch()?.f32_into(&mut out)?;
        }
        Ok(())
    })?;
    let bytes = (UNITS * unit_bytes) as f64;
    for (name, seconds, bus) in [("up", up, bus_up), ("down", down, bus_down)] {
        let rate = bytes / seconds;
        report.row(
            format!("{name}, through pinned chunks"),
            format!("{:.1} GB/s", rate / 1e9),
            format!("{:.0} % of the bus, pinned", 100.0 * rate / bus),
        );
        report.target(&format!("{name} beside the bus"), rate / bus, GOAL);
    }
    // As much compute as a copy takes.
    let once = work_seconds(&backend, &resident, 1)?;
    let rounds = ((up.max(down) / UNITS as f64 / once).ceil() as usize).max(1);
    let work = UNITS as f64 * work_seconds(&backend, &resident, rounds)?;
    drop(resident);
    let together = alone(|| pass(&backend, &units, &mut out, rounds, false))?;
    let longest = up.max(down).max(work);
    report.row(
        "weights in, work, gradients out",
        format!("{:.0} ms", together * 1e3),
        format!(
            "{:.2} of the longest (in {:.0}, work {:.0}, out {:.0} ms)",
            together / longest,
            up * 1e3,
            work * 1e3,
            down * 1e3
        ),
    );
    report.target(
        "copies and work together beside the longest",
        together / longest,
        TOGETHER,
    );
    Ok(())
}

fn alone(work: impl FnOnce() -> Result<()>) -> Result<f64> {
    let begun = Instant::now();
    work()?;
    Ok(begun.elapsed().as_secs_f64())
}

fn upload(backend: &CudaBackend, values: &[f32]) -> Result<Tensor> {
    let bytes = bytemuck::cast_slice(values);
    let shape = Shape::new(&[values.len() / 1024, 1024]);
    Ok(backend.upload(bytes, shape, DType::F32, Tag::Gathered)?)
}

/// Waits for all queued commands.
fn record_write(backend: &CudaBackend) -> Result<()> {
    backend
        .zeros([1].into(), DType::F32, Tag::Workspace)?
        .to_bytes()?;
    Ok(())
}

/// Doubles and halves the weights `rounds` times.
fn work(backend: &CudaBackend, weights: &Tensor, rounds: usize) -> Result<Tensor> {
    let mut result = backend.scale(weights, 2.0)?;
    for _ in 1..rounds {
        result = backend.scale(&backend.scale(&result, 0.5)?, 2.0)?;
    }
    Ok(result)
}

fn work_seconds(backend: &CudaBackend, weights: &Tensor, rounds: usize) -> Result<f64> {
    record_write(backend)?;
    let begun = Instant::now();
    drop(work(backend, weights, rounds)?);
    record_write(backend)?;
    Ok(begun.elapsed().as_secs_f64())
}

/// Works as a backward pass does. The next weights come in while the device computes with the current ones. A thread
/// fetches the previous unit's gradients, which are freed while further commands are queued.
fn pass(
    backend: &CudaBackend,
    units: &[Vec<f32>],
    out: &mut [f32],
    rounds: usize,
    check: bool,
) -> Result<()> {
    let (fetches, queue) = mpsc::channel::<(usize, Fetch)>();
    let (back, fetched) = mpsc::channel();
    let mut fetch = |unit: usize, fetch: &Fetch| -> Result<()> {
        fetch.f32_into(out)?;
        let mut pairs = out.iter().zip(&units[unit % 2]);
        if check && let Some(place) = pairs.position(|(o, w)| *o != 2.0 * w) {
            anyhow::bail!("unit {unit}: {} at {place}", out[place]);
        }
        Ok(())
    };
    std::thread::scope(move |scope| {
        scope.spawn(move || {
            for (unit, gradients) in queue {
                let outcome = fetch(unit, &gradients);
                // The tensor returns with the outcome, so the thread that allocates memory also frees it.
                if back.send((gradients, outcome)).is_err() {
                    return;
                }
            }
        });
        let mut weights: Option<Tensor> = None;
        let mut before: Option<(usize, Fetch)> = None;
        for unit in 0..UNITS {
            let next = upload(backend, &units[unit % 2])?;
            if unit >= 2 {
                fetched.recv()?.1?;
            }
            let result = work(backend, &next, rounds)?;
            weights.replace(next);
            if let Some(before) = before.replace((unit, result.fetch()?)) {
                fetches.send(before)?;
            }
        }
        fetched.recv()?.1?;
        if let Some(last) = before {
            fetches.send(last)?;
            fetched.recv()?.1?;
        }
        Ok(())
    })
}

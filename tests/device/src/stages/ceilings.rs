//! Stage `ceilings`: peak rates of this machine, measured with NVIDIA's own code.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use kernels::DType;
use kernels::cuda::gpu::{Gpu, Memory};
use kernels::cuda::launch::Address;
use kernels::cuda::matmul::{CublasLt, WORKSPACE_BYTES};
use kernels::cuda::ops::cast;
use optim::rng::RandomStream;

use super::{Report, Setting, median_milliseconds, queue};

const BUDGET: Duration = Duration::from_secs(2);
/// Far above the size of any second-level cache.
const COPY_BYTES: usize = 2 << 30;
const BUS_BYTES: usize = 256 << 20;
/// Rows, columns and depth of the matrix product.
const SIDE: usize = 8192;

/// Measures copies, matrix products and the bus.
#[must_use]
pub fn run(setting: &Setting) -> Report {
    let mut report = setting.report("ceilings");
    let gpu = match setting.gpu() {
        Ok(gpu) => gpu,
        Err(error) => {
            report.failure(format!("{error:#}"));
            return report;
        }
    };
    report.part("copy on the device", |report| copy(setting, &gpu, report));
    report.part("matrix product", |report| product(setting, &gpu, report));
    report.part("bus", |report| bus(setting, &gpu, report));
    report
}

fn copy(setting: &Setting, gpu: &Gpu, report: &mut Report) -> Result<()> {
    let (free, _) = gpu.memory_info()?;
    let bytes = setting.size(COPY_BYTES, 512).min(free / 4) & !0xff;
    let [from, to] = [gpu.allocate(bytes)?, gpu.allocate(bytes)?];
    fill_random(gpu, &from)?;
    gpu.fill(&to, 0xff)?;
    let milliseconds = median_milliseconds(gpu, BUDGET, |_| queue::copy(gpu, &from, &to, bytes))?;
    let rate = 2.0 * bytes as f64 / milliseconds * 1e3;
    report.row(
        "device copy, read + written",
        format!("{:.2} TB/s", rate / 1e12),
        "",
    );
    report.ceilings.push(("copy".into(), rate));
    Ok(())
}

fn product(setting: &Setting, gpu: &Gpu, report: &mut Report) -> Result<()> {
    let cublas = CublasLt::open(gpu, &setting.search)?;
    let side = setting.size(SIDE, 64);
    let bytes = side * side * DType::BF16.size_bytes();
    let operands = [
        gpu.allocate(bytes)?,
        gpu.allocate(bytes)?,
        gpu.allocate(bytes)?,
        gpu.allocate(WORKSPACE_BYTES as usize)?,
    ];
    normal_bf16(gpu, &operands[0])?;
    normal_bf16(gpu, &operands[1])?;
    let milliseconds = median_milliseconds(gpu, BUDGET, |_| {
        queue::product(gpu, &cublas, DType::BF16, [side; 3], &operands)
    })?;
    let rate = 2.0 * (side as f64).powi(3) / milliseconds * 1e3;
    report.row(
        format!("cuBLASLt bf16 {side}^3, normal data"),
        format!("{:.0} TFLOP/s", rate / 1e12),
        "",
    );
    report.ceilings.push(("matmul".into(), rate));
    Ok(())
}

fn bus(setting: &Setting, gpu: &Gpu, report: &mut Report) -> Result<()> {
    let size = setting.size(BUS_BYTES, 64);
    let device = gpu.allocate(size)?;
    let mut pinned = gpu.pinned(size)?;
    let rate = |milliseconds: f64| size as f64 / milliseconds * 1e3;
    let up = rate(median_milliseconds(gpu, BUDGET, |_| {
        queue::upload(gpu, &pinned, &device)
    })?);
    let down = rate(median_milliseconds(gpu, BUDGET, |_| {
        queue::download(gpu, &device, &mut pinned)
    })?);
    for (name, rate) in [("bus up", up), ("bus down", down)] {
        report.row(
            format!("{name}, pinned"),
            format!("{:.1} GB/s", rate / 1e9),
            "",
        );
        report.ceilings.push((name.into(), rate));
    }
    let mut pageable = vec![1u8; size];
    let timed = |work: &mut dyn FnMut() -> Result<()>| -> Result<f64> {
        work()?;
        let begun = Instant::now();
        work()?;
        Ok(size as f64 / begun.elapsed().as_secs_f64())
    };
    let up = timed(&mut || Ok(gpu.write(&device, 0, &pageable)?))?;
    report.row("bus up, pageable", format!("{:.1} GB/s", up / 1e9), "");
    let down = timed(&mut || Ok(gpu.read(&device, 0, &mut pageable)?))?;
    report.row("bus down, pageable", format!("{:.1} GB/s", down / 1e9), "");
    Ok(())
}

/// Fills the memory with random bytes: a pattern of 16 MiB, repeated.
fn fill_random(gpu: &Gpu, memory: &Memory) -> Result<()> {
    let stream = RandomStream::new(1, "bytes");
    let words: Vec<u64> = (0..2 << 20).map(|i| stream.bits(0, i)).collect();
    let bytes: &[u8] = bytemuck::cast_slice(&words);
    for start in (0..memory.bytes()).step_by(bytes.len()) {
        let n = bytes.len().min(memory.bytes() - start);
        gpu.write(memory, start, &bytes[..n])?;
    }
    Ok(())
}

/// Fills the memory with standard normal bf16 values: 4 Mi of them, repeated, narrowed on the device.
fn normal_bf16(gpu: &Gpu, memory: &Memory) -> Result<()> {
    const N: usize = 4 << 20;
    let stream = RandomStream::new(2, "normal");
    let values: Vec<f32> = (0..N as u64).map(|i| stream.normal(i)).collect();
    let wide = gpu.allocate(N * 4)?;
    gpu.write(&wide, 0, bytemuck::cast_slice(&values))?;
    for start in (0..memory.bytes()).step_by(N * 2) {
        let n = N.min((memory.bytes() - start) / 2) as u64;
        let to = Address(memory.address().0 + start as u64);
        let launch = cast::launch(DType::F32, wide.address(), DType::BF16, to, n);
        queue::launch(gpu, &launch.context("a cast between float types")?)?;
    }
    gpu.synchronize()?;
    Ok(())
}

//! Stage `probe`: the driver, the libraries, the GPUs, and what a process takes that uses one.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use kernels::cuda::probe::probe;
use kernels::cuda::{CudaBackend, nvml};
use kernels::{Backend, DType, MatmulArgs, Tag, Transpose, footprint};

use super::{Report, Setting, Target};

const MIB: f64 = (1u64 << 20) as f64;
/// Memory that the measured process asks for itself.
const ARENA_BYTES: u64 = 256 << 20;
/// Most that a process may take beside its own, as a multiple of what a plan counts.
const FOOTPRINT: Target = Target::AtMost(1.0);

/// Describes the machine; fails when there is no usable GPU.
#[must_use]
pub fn run(setting: &Setting) -> Report {
    let mut report = Report::new("probe");
    // Before anything of the driver is opened.
    let before = used(setting);
    let answer = probe(&setting.search);
    if let Some((major, minor)) = answer.driver_version {
        report.row("driver", format!("CUDA {major}.{minor}"), "");
    }
    for found in &answer.libraries {
        let path = found.path.as_ref().map(|path| path.display().to_string());
        let version = found.version.clone().unwrap_or_else(|| "-".into());
        report.row(
            found.library.name(),
            version,
            path.unwrap_or_else(|| format!("tried {}", found.tried())),
        );
    }
    for device in &answer.devices {
        let (major, minor) = device.compute_capability;
        let memory = format!(
            "{:.1} GiB",
            device.memory_bytes as f64 / (1u64 << 30) as f64
        );
        let peers = match &*device.peers {
            [] => "no peers".to_owned(),
            peers => format!("peers {peers:?}"),
        };
        let facts = format!(
            "sm_{major}{minor}, {} multiprocessors, {peers}",
            device.multiprocessors
        );
        report.row(
            format!("GPU {} {}", device.ordinal, device.name),
            memory,
            facts,
        );
    }
    if let Some(problem) = answer.problem {
        report.failure(problem);
    }
    report.part("opening", |report| {
        let gpu = setting.gpu()?;
        let (free, total) = gpu.memory_info()?;
        let used = (total - free) as f64 / (1u64 << 20) as f64;
        report.row(
            "memory taken before the first allocation",
            format!("{used:.0} MiB"),
            "context and other processes",
        );
        let compiler = gpu.images().compiler().map(|compiler| compiler.identity());
        let arch = gpu.images().arch();
        report.row("machine code", arch, compiler.unwrap_or_else(str::to_owned));
        ensure!(
            gpu.shared_limit() >= 99 << 10,
            "a block may have only {} bytes of shared memory",
            gpu.shared_limit()
        );
        Ok(())
    });
    report.part("footprint", |report| take(setting, before?, report));
    report
}

/// Bytes in use on the first GPU, by the management library, and the most that this process had of host memory so far.
fn used(setting: &Setting) -> Result<(u64, u64)> {
    let gpus = nvml::read(&setting.search.directories).gpus?;
    let gpu = gpus.first().context("no GPU")?;
    let device = gpu.memory.clone()?.used_bytes;
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().next());
    Ok((device, kib.context("no VmHWM")?.parse::<u64>()? << 10))
}

/// What a process that computes on the GPU takes beside its own: a context, rings of pinned memory, compiled kernels and the
/// library's products, as a rank has them. `before` is what was in use when nothing was open.
fn take(setting: &Setting, before: (u64, u64), report: &mut Report) -> Result<()> {
    let backend = CudaBackend::new(Arc::new(setting.gpu()?), ARENA_BYTES)?;
    let values = vec![0u8; 16 << 20];
    let matrix = backend.upload(&values, [2048, 4096].into(), DType::BF16, Tag::Gathered)?;
    let product = backend.matmul(MatmulArgs {
        a: &matrix,
        transpose_a: Transpose::No,
        b: &matrix,
        transpose_b: Transpose::Yes,
        bias: None,
        out: DType::BF16,
    })?;
    product
        .fetch()?
        .bytes_into(&mut vec![0; product.size_bytes()])?;
    let now = used(setting)?;
    // The matrix lies in both memories.
    let device = now.0.saturating_sub(before.0 + ARENA_BYTES);
    let host = now.1.saturating_sub(before.1 + values.len() as u64);
    let taken = [
        ("of the GPU's memory", device, footprint::DEVICE_BYTES),
        ("of host memory", host, footprint::HOST_BYTES),
    ];
    for (what, taken, planned) in taken {
        report.row(
            format!("a process takes {what}, beside its own"),
            format!("{:.0} MiB", taken as f64 / MIB),
            format!("{:.0} MiB in a plan", planned as f64 / MIB),
        );
        let ratio = taken as f64 / planned as f64;
        report.target(
            &format!("a process takes {what}, beside the plan"),
            ratio,
            FOOTPRINT,
        );
    }
    Ok(())
}

//! Stage `probe`: the driver, the libraries, the GPUs, and the footprint of a process that uses one.

use anyhow::ensure;
use kernels::cuda::probe::probe;

use super::{Report, Setting, footprint};

/// Describes the machine; fails without a usable GPU.
#[must_use]
pub fn run(setting: &Setting) -> Report {
    let mut report = setting.report("probe");
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
        footprint::measure(setting, &gpu, report)
    });
    report
}

//! Memory that a process takes by using the GPU, in addition to what it allocates. It is host memory and GPU memory,
//! which the launcher plans with estimates. Two separate processes are measured step by step, the first without cached
//! kernels.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use kernels::cuda::backend::graphs::{Mode, Replaying};
use kernels::cuda::gpu::Gpu;
use kernels::cuda::image::Cache;
use kernels::cuda::{CudaBackend, CudaError};
use kernels::footprint::{HOST_BYTES, device_bytes};
use kernels::verify::CheckError;
use kernels::{Backend, CpuBackend, DType, MatmulArgs, Tag, Transpose};
use serde::{Deserialize, Serialize};

use super::{Report, Setting};

/// Largest error of a plan's estimate, as a share of the measured bytes.
const SHARE: f64 = 0.25;
/// Memory for the small tensors of the checks.
const ARENA_BYTES: u64 = 256 << 20;
/// File that a process writes into its directory.
const RESULT: &str = "footprint.json";

/// Memory of a process and free memory of the GPU, after one step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Reading {
    step: String,
    resident: u64,
    peak: u64,
    /// Allocated bytes, which are no footprint.
    arena: u64,
    /// Free bytes of the GPU; unknown before it is opened.
    free: Option<u64>,
}

impl Reading {
    fn now(step: &str, gpu: Option<&Gpu>, arena: u64) -> Result<Self> {
        let status = std::fs::read_to_string("/proc/self/status")?;
        let field = |name: &str| -> Result<u64> {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let word = line.and_then(|line| line.split_whitespace().next());
            let kib: u64 = word.with_context(|| format!("no {name}"))?.parse()?;
            Ok(kib << 10)
        };
        let free = gpu.map(Gpu::memory_info).transpose()?;
        Ok(Self {
            step: step.to_owned(),
            resident: field("VmRSS:")?,
            peak: field("VmHWM:")?,
            arena,
            free: free.map(|(free, _)| free as u64),
        })
    }

    /// Bytes taken of the GPU outside the arena. `free` bytes were free before.
    fn of_gpu(&self, free: u64) -> u64 {
        let left = self.free.unwrap_or(free);
        free.saturating_sub(left).saturating_sub(self.arena)
    }
}

/// Largest host and GPU memory of a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Footprint {
    host: u64,
    device: u64,
}

impl Footprint {
    /// The footprint from the steps of a process. The first step is before its first use of the GPU, of which `free`
    /// bytes were free then.
    fn of(readings: &[Reading], free: u64) -> Self {
        let before = readings.first().map_or(0, |first| first.resident);
        let host = readings.iter().skip(1).map(|reading| reading.peak);
        let device = readings.iter().map(|reading| reading.of_gpu(free));
        Self {
            host: host.max().unwrap_or(before).saturating_sub(before),
            device: device.max().unwrap_or(0),
        }
    }
}

fn mib(bytes: u64) -> String {
    format!("{:.0} MiB", bytes as f64 / f64::from(1 << 20))
}

/// Measures two processes and judges the plan's estimates by the larger one.
///
/// # Errors
/// When a process fails.
pub(super) fn measure(setting: &Setting, gpu: &Gpu, report: &mut Report) -> Result<()> {
    let directory = tempfile::tempdir()?;
    let mut most = Footprint::default();
    for which in ["kernels compiled or translated", "kernels at hand"] {
        let (free, _) = gpu.memory_info()?;
        let readings = process(setting, directory.path())?;
        rows(report, which, &readings, free as u64);
        let took = Footprint::of(&readings, free as u64);
        most.host = most.host.max(took.host);
        most.device = most.device.max(took.device);
    }
    // An emulated device takes other memory.
    if !setting.small {
        judge(report, most, gpu.facts().multiprocessors);
    }
    Ok(())
}

/// Runs this program again as [`in_process`].
fn process(setting: &Setting, directory: &Path) -> Result<Vec<Reading>> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("footprint-process").arg(directory);
    if setting.small {
        command.arg("--small");
    }
    for (option, directories) in [
        ("--libraries", &setting.search.directories),
        ("--python-packages", &setting.search.python_packages),
    ] {
        for directory in directories {
            command.arg(option).arg(directory);
        }
    }
    let left = setting.deadline.saturating_duration_since(Instant::now());
    command.arg("--seconds").arg(left.as_secs().to_string());
    let status = command.status().context("starting a process")?;
    ensure!(status.success(), "the process ended with {status}");
    let text = std::fs::read(directory.join(RESULT))?;
    Ok(serde_json::from_slice(&text)?)
}

/// Adds one row for each step of a process.
fn rows(report: &mut Report, which: &str, readings: &[Reading], free: u64) {
    for pair in readings.windows(2) {
        let [before, now] = [&pair[0], &pair[1]];
        let device = now.of_gpu(free).saturating_sub(before.of_gpu(free));
        report.row(
            format!("{}, {which}", now.step),
            format!("{} of the GPU", mib(device)),
            format!(
                "{} of the host more, resident {}, at most {}",
                mib(now.resident.saturating_sub(before.resident)),
                mib(now.resident),
                mib(now.peak)
            ),
        );
    }
}

/// Adds rows with both figures and the plan's, and a failure for each estimate that is far off.
fn judge(report: &mut Report, took: Footprint, multiprocessors: u32) {
    for (what, name, measured, planned) in [
        (
            "host memory of a process that uses CUDA",
            "driver bytes",
            took.host,
            HOST_BYTES,
        ),
        (
            "memory of the GPU beside the arena",
            "context bytes",
            took.device,
            device_bytes(multiprocessors),
        ),
    ] {
        let off = planned as f64 / (measured as f64).max(1.0) - 1.0;
        let verdict = if off.abs() <= SHARE {
            "near enough"
        } else {
            "TOO FAR OFF"
        };
        report.row(
            what,
            mib(measured),
            format!("the plan has {}: {verdict}", mib(planned)),
        );
        report.ceilings.push((name.into(), measured as f64));
        if off.abs() > SHARE {
            report.failure(format!(
                "{what}: {} were measured, the plan has {} (kernels/src/footprint.rs)",
                mib(measured),
                mib(planned)
            ));
        }
    }
}

/// Opens the GPU as a rank does, runs every backend operation twice, and writes the memory after each step. Compiled
/// kernels are cached in `directory`.
///
/// # Errors
/// When there is no GPU, or an operation fails.
pub fn in_process(setting: &Setting, directory: &Path) -> Result<()> {
    let checks = kernels::verify::all();
    let values = vec![1u8; 16 << 20];
    let mut product = vec![1u8; 8 << 20];
    // Memory of the checks themselves is allocated before.
    let host = CpuBackend::unlimited();
    checks.iter().try_for_each(|check| check.run(&host))?;
    let mut readings = vec![Reading::now("before", None, 0)?];
    let cache = Cache::new(directory.join("kernels"));
    let gpu = Gpu::open(0, &setting.search, Some(cache)).context("opening the first GPU")?;
    let gpu = gpu.with_code(setting.code);
    readings.push(Reading::now("driver and context", Some(&gpu), 0)?);
    let gpu = match gpu.with_cublaslt(&setting.search) {
        Ok(gpu) => gpu,
        Err(CudaError::LibraryMissing { .. }) => setting.gpu()?,
        Err(error) => return Err(error.into()),
    };
    readings.push(Reading::now("cuBLASLt", Some(&gpu), 0)?);
    let gpu = Arc::new(gpu);
    let replaying = Replaying::new(Arc::clone(&gpu), Mode::Auto);
    let device = CudaBackend::new(Arc::new(replaying), ARENA_BYTES)?;
    readings.push(Reading::now("arena", Some(&gpu), ARENA_BYTES)?);
    // Of a size for which the library uses the kernels that models use.
    let matrix = device.upload(&values, [2048, 4096].into(), DType::BF16, Tag::Gathered)?;
    let square = device.matmul(MatmulArgs {
        a: &matrix,
        transpose_a: Transpose::No,
        b: &matrix,
        transpose_b: Transpose::Yes,
        bias: None,
        out: DType::BF16,
    })?;
    square.fetch()?.bytes_into(&mut product)?;
    drop((matrix, square));
    readings.push(Reading::now("a large product", Some(&gpu), ARENA_BYTES)?);
    for step in ["operations and pinned chunks", "graphs"] {
        let mut ran = checks.iter().map(|check| check.run(&device));
        ran.try_for_each(|ended| match ended {
            Err(CheckError::NoKernel { .. }) if setting.small => Ok(()),
            ended => ended,
        })?;
        readings.push(Reading::now(step, Some(&gpu), ARENA_BYTES)?);
    }
    let text = serde_json::to_vec(&readings)?;
    Ok(std::fs::write(directory.join(RESULT), text)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn reading(step: &str, [resident, peak, arena]: [u64; 3], free: Option<u64>) -> Reading {
        Reading {
            step: step.into(),
            resident: resident * MIB,
            peak: peak * MIB,
            arena: arena * MIB,
            free: free.map(|free| free * MIB),
        }
    }

    fn readings(driver: u64, context: u64) -> Vec<Reading> {
        let opened = [40 + driver / 2, 40 + driver / 2, 0];
        vec![
            reading("before", [40, 90, 0], None),
            reading("driver", opened, Some(10_000 - context / 2)),
            reading("work", [60, 40 + driver, 256], Some(9_744 - context)),
        ]
    }

    fn judged(readings: &[Reading]) -> Report {
        let mut report = Report::new("probe");
        rows(&mut report, "kernels at hand", readings, 10_000 * MIB);
        judge(&mut report, Footprint::of(readings, 10_000 * MIB), 132);
        report
    }

    #[test]
    fn guesses_near_the_measurement_pass_and_are_stored_for_other_stages() {
        let report = judged(&readings(500, 700));
        assert_eq!(report.failures, Vec::<String>::new());
        let bytes = |mib: u64| (mib * MIB) as f64;
        let want = [("driver bytes", 500), ("context bytes", 700)];
        let want = want.map(|(name, mib)| (name.to_owned(), bytes(mib)));
        assert_eq!(report.ceilings, want);
        let first = &report.rows[0];
        assert_eq!(first.what, "driver, kernels at hand");
        assert_eq!(first.figure, "350 MiB of the GPU");
        assert_eq!(report.rows[1].figure, "350 MiB of the GPU");
        assert_eq!(report.rows[2].compared, "the plan has 512 MiB: near enough");
    }

    #[test]
    fn guesses_far_from_the_measurement_are_failures() {
        for (driver, context, what) in [
            (350, 700, "host memory of a process"),
            (800, 700, "host memory of a process"),
            (500, 300, "memory of the GPU"),
            (500, 1100, "memory of the GPU"),
        ] {
            let report = judged(&readings(driver, context));
            assert_eq!(report.failures.len(), 1, "{report:?}");
            assert!(report.failures[0].starts_with(what), "{report:?}");
        }
    }

    #[test]
    fn memory_of_this_process_is_read() {
        let now = Reading::now("now", None, 0).unwrap();
        assert!(now.peak >= now.resident && now.resident > MIB, "{now:?}");
    }
}

//! Stage `table`: the time of every kernel at sizes of models, as a share of the ceiling that the stage `ceilings`
//! measured in the same run, and beside the time of PyTorch for the same work.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use kernels::cuda::gpu::{Gpu, Memory};
use kernels::cuda::launch::{Address, Launch};

use super::{Report, Setting, measured_ceiling, median_milliseconds, queue, show};

pub mod products;
mod works;

const BUDGET: Duration = Duration::from_millis(400);

/// What a piece of work must do at least.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Amount {
    /// Bytes read and written.
    Bytes(f64),
    /// Floating-point operations.
    Flops(f64),
}

/// One row: launches on operands of its own, several sets in turn where a set would fit the cache.
struct Work {
    name: String,
    amount: Amount,
    sets: Vec<Vec<Launch>>,
    memory: Vec<Memory>,
}

/// Device memory for one piece of work.
struct Operands<'g> {
    gpu: &'g Gpu,
    memory: Vec<Memory>,
}

impl Operands<'_> {
    /// `n` standard normal values times `scale` in a float dtype; a pattern of a million values repeats.
    fn normal(&mut self, dtype: kernels::DType, n: u64, scale: f32) -> Result<Address> {
        let memory = self
            .gpu
            .allocate(usize::try_from(n)? * dtype.size_bytes())?;
        works::fill_normal(self.gpu, dtype, &memory, scale)?;
        let address = memory.address();
        self.memory.push(memory);
        Ok(address)
    }

    /// Memory for a result.
    fn output(&mut self, bytes: u64) -> Result<Address> {
        let memory = self.gpu.allocate(usize::try_from(bytes)?)?;
        self.gpu.fill(&memory, 0xff)?;
        let address = memory.address();
        self.memory.push(memory);
        Ok(address)
    }

    /// Memory of zeros.
    fn zeros(&mut self, bytes: u64) -> Result<Address> {
        let memory = self.gpu.allocate(usize::try_from(bytes)?)?;
        self.gpu.fill(&memory, 0)?;
        let address = memory.address();
        self.memory.push(memory);
        Ok(address)
    }

    /// These bytes.
    fn bytes(&mut self, bytes: &[u8]) -> Result<Address> {
        let memory = self.gpu.allocate(bytes.len())?;
        self.gpu.write(&memory, 0, bytes)?;
        let address = memory.address();
        self.memory.push(memory);
        Ok(address)
    }
}

/// Measures; PyTorch's times are added when `peers` runs.
#[must_use]
pub fn run(setting: &Setting) -> Report {
    let mut report = Report::new("table");
    let gpu = match setting.gpu() {
        Ok(gpu) => gpu,
        Err(error) => {
            report.failure(format!("{error:#}"));
            return report;
        }
    };
    let params = works::params(&gpu);
    let peers = peers(setting, "table", params);
    for (name, prepare) in works::all(params) {
        if setting.expired() {
            report.failure(format!("the time was used up before {name}"));
            break;
        }
        report.part(&name, |report| {
            let mut operands = Operands {
                gpu: &gpu,
                memory: Vec::new(),
            };
            let (amount, sets) = prepare(&mut operands)?;
            let work = Work {
                name: name.clone(),
                amount,
                sets,
                memory: operands.memory,
            };
            measure(&gpu, setting, &peers, &work, report)
        });
    }
    report
}

fn measure(
    gpu: &Gpu,
    setting: &Setting,
    peers: &BTreeMap<String, f64>,
    work: &Work,
    report: &mut Report,
) -> Result<()> {
    let milliseconds = median_milliseconds(gpu, BUDGET, |round| {
        let set = &work.sets[round % work.sets.len()];
        set.iter().try_for_each(|launch| queue::launch(gpu, launch))
    })?;
    let held: usize = work.memory.iter().map(Memory::bytes).sum();
    let (rate, unit, ceiling) = match work.amount {
        Amount::Bytes(bytes) => (bytes / milliseconds * 1e3, "TB/s", "copy"),
        Amount::Flops(flops) => (flops / milliseconds * 1e3, "TFLOP/s", "matmul"),
    };
    let mut compared = format!("{:.2} {unit}", rate / 1e12);
    if let Some(most) = measured_ceiling(&setting.out, ceiling) {
        compared += &format!(", {:.0} % of {ceiling}", rate / most * 100.0);
    }
    if let Some(peer) = peers.get(&work.name) {
        compared += &format!(", torch {peer:.3} ms: {:.2}x", peer / milliseconds);
    }
    if held < 1 << 20 {
        compared += ", operands fit the cache";
    }
    report.row(&work.name, format!("{milliseconds:.3} ms"), compared);
    Ok(())
}

/// PyTorch's times by row, or none with the reason shown.
fn peers(setting: &Setting, stage: &str, params: u64) -> BTreeMap<String, f64> {
    let answer = ask_peers(setting, stage, params);
    answer.unwrap_or_else(|problem| {
        show(&format!("no times of PyTorch: {problem:#}"));
        BTreeMap::new()
    })
}

fn ask_peers(setting: &Setting, stage: &str, params: u64) -> Result<BTreeMap<String, f64>> {
    let script = setting.peers.as_ref().context("--peers names no script")?;
    let mut command = Command::new("python3");
    command
        .arg(script)
        .args(["--stage", stage, "--budget", "60"])
        .args(["--params", &params.to_string()]);
    let output = command.output().context("starting python3")?;
    let remarks = String::from_utf8_lossy(&output.stderr).into_owned();
    remarks
        .lines()
        .rev()
        .take(12)
        .for_each(|line| show(&format!("  torch: {line}")));
    let text = String::from_utf8(output.stdout)?;
    let last = text.lines().last().context("it printed nothing")?;
    Ok(serde_json::from_str(last)?)
}

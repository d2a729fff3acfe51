//! Stage `table`: the time of every kernel at model sizes, as a share of the ceiling that the stage `ceilings` measured
//! in the same run, and beside PyTorch's time for the same operation. Every row is written. A missed target, or a
//! missing comparison, is a failure of the stage.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::{Report, Setting, measured_ceiling, show};

mod bench;
mod layers;
mod operations;
pub mod products;
#[cfg(test)]
mod tests;

use bench::{Bench, OnGpu, Operands, Scale};
use operations::{Amount, Row, Targets};

/// Time for the repetitions of a row. A hundred rows take about 20 s, their operands 10 s, and modules that no earlier
/// stage compiled 10 s. PyTorch's rows with its start take 35 s. Together that is 75 s, estimated. The stage should
/// stay below 100 s, and `gpu-check.sh` stops it after 180 s.
const BUDGET: Duration = Duration::from_millis(200);
/// Divisor of the model sizes on an emulated device.
const SMALL: usize = 64;
/// Parameters in the rows of the optimizer on an emulated device.
const SMALL_PARAMS: u64 = 1 << 16;
/// Seconds for all rows of PyTorch.
const PEERS_SECONDS: u32 = 60;
/// Additional time for PyTorch's start and for a row that it has begun.
const PEERS_PATIENCE: Duration = Duration::from_secs(30);
/// Bytes above which operands exceed the second-level cache of every GPU: an H200 has 50 MB, an RTX 4090 72 MB.
const CACHE_BYTES: u64 = 80 << 20;

/// Measures the rows. PyTorch's times are added when `peers` runs.
#[must_use]
pub fn run(setting: &Setting) -> Report {
    let mut report = setting.report("table");
    let gpu = match setting.gpu() {
        Ok(gpu) => gpu,
        Err(error) => {
            report.failure(format!("{error:#}"));
            return report;
        }
    };
    let scale = Scale {
        divisor: SMALL.pow(u32::from(setting.small)),
        params: match setting.small {
            true => SMALL_PARAMS,
            false => operations::params(&gpu),
        },
    };
    let peers = peers(setting, "table", scale.params);
    if peers.is_empty() && setting.peers.is_some() {
        report.failure("no row is judged by PyTorch: it gave no times");
    }
    let yardsticks = Yardsticks {
        copy: measured_ceiling(&setting.out, "copy"),
        product: measured_ceiling(&setting.out, "matmul"),
        // One failure for all rows is enough.
        peers_asked: !peers.is_empty(),
        peers,
    };
    let mut bench = OnGpu::new(&gpu, Err("no row needs it".into()), setting);
    for row in operations::all() {
        if setting.expired() {
            report.failure(format!("the time was used up before {}", row.name));
            break;
        }
        report.part(&row.name, |report| {
            measure(&mut bench, scale, &row, &yardsticks, report)
        });
    }
    report
}

/// The figures that rows are compared with.
struct Yardsticks {
    /// Bytes per second of the copy.
    copy: Option<f64>,
    /// Floating-point operations per second of the library's product.
    product: Option<f64>,
    /// Milliseconds of PyTorch's rows.
    peers: BTreeMap<String, f64>,
    /// Whether a row without PyTorch's time is a failure.
    peers_asked: bool,
}

fn measure(
    bench: &mut dyn Bench,
    scale: Scale,
    row: &Row,
    yardsticks: &Yardsticks,
    report: &mut Report,
) -> Result<()> {
    let mut on = Operands::new(bench, scale);
    let measured = (row.prepare)(&mut on).and_then(|(amount, sets)| {
        let milliseconds = on.bench.time(&sets)?;
        Ok((amount, on.held, milliseconds))
    });
    // Also after a failed row, since the next one needs the memory.
    let cleared = bench.clear();
    let (amount, held, milliseconds) = measured?;
    judge(row, amount, held, milliseconds, yardsticks, report);
    cleared
}

/// Writes a row and judges it.
fn judge(
    row: &Row,
    amount: Amount,
    held: u64,
    milliseconds: f64,
    yardsticks: &Yardsticks,
    report: &mut Report,
) {
    let Targets { copy, torch } = row.targets;
    let (work, unit, name, ceiling) = match amount {
        Amount::Bytes(bytes) => (bytes, "TB/s", "copy", yardsticks.copy),
        Amount::Flops(flops) => (flops, "TFLOP/s", "matmul", yardsticks.product),
        Amount::PlainFlops(flops) => (flops, "TFLOP/s", "", None),
    };
    let rate = work / milliseconds * 1e3;
    let share = ceiling.map(|most| rate / most);
    let peer = yardsticks.peers.get(&row.name);
    let mut compared = format!("{:.2} {unit}", rate / 1e12);
    if let Some(share) = share {
        compared += &format!(", {:.0} % of {name}", share * 100.0);
    }
    if let Some(target) = copy {
        compared += &format!(" (target {target})");
    }
    if let Some(peer) = peer {
        compared += &format!(", torch {peer:.3} ms: {:.2}x", peer / milliseconds);
    }
    if let Some(target) = torch {
        compared += &format!(" (target {target})");
    }
    if held < CACHE_BYTES {
        compared += ", operands fit the cache";
    }
    report.row(&row.name, format!("{milliseconds:.3} ms"), compared);
    match (copy, share) {
        (Some(target), Some(share)) => {
            report.target(&format!("{} beside the copy", row.name), share, target);
        }
        (Some(_), None) if !report.unjudged => {
            report.failure(format!("{}: not judged, no measured copy", row.name));
        }
        (Some(_) | None, _) => {}
    }
    match (torch, peer) {
        (Some(target), Some(peer)) => {
            let what = format!("{} beside PyTorch", row.name);
            report.target(&what, peer / milliseconds, target);
        }
        (Some(_), None) if yardsticks.peers_asked => {
            report.failure(format!("{}: not judged, no time of PyTorch", row.name));
        }
        _ => {}
    }
}

/// PyTorch's times by row; none if it fails, with the reason printed.
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
        .args(["--stage", stage, "--budget", &PEERS_SECONDS.to_string()])
        .args(["--params", &params.to_string()]);
    let most = Duration::from_secs(u64::from(PEERS_SECONDS)) + PEERS_PATIENCE;
    let until = setting.deadline.min(Instant::now() + most);
    let (rows, remarks) = rows_until(command, until)?;
    let last = remarks.lines().rev().take(12);
    last.for_each(|line| show(&format!("  torch: {line}")));
    anyhow::ensure!(!rows.is_empty(), "it printed no row");
    Ok(rows)
}

/// The rows that a program prints, one JSON object per line, and its remarks. At the deadline it is killed, and its
/// rows so far count.
fn rows_until(mut command: Command, until: Instant) -> Result<(BTreeMap<String, f64>, String)> {
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().context("starting python3")?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let (lines, printed) = mpsc::channel();
    let (say, said) = mpsc::channel();
    std::thread::spawn(move || {
        let lines_of = stdout
            .into_iter()
            .flat_map(|out| BufReader::new(out).lines());
        // After the deadline nobody receives the lines.
        let _unused_outcome = lines_of.flatten().try_for_each(|line| lines.send(line));
    });
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _unused_outcome = stderr.map(|mut err| err.read_to_end(&mut bytes));
        let _unused_outcome = say.send(String::from_utf8_lossy(&bytes).into_owned());
    });
    let mut rows = BTreeMap::new();
    let ended = loop {
        match printed.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(line) => rows
                .extend(serde_json::from_str::<BTreeMap<String, f64>>(&line).unwrap_or_default()),
            Err(RecvTimeoutError::Disconnected) => break true,
            Err(RecvTimeoutError::Timeout) => break false,
        }
    };
    if !ended {
        child.kill().context("ending python3")?;
    }
    child.wait()?;
    // Its child processes may still hold the pipe.
    let mut remarks: String = said
        .recv_timeout(Duration::from_secs(1))
        .unwrap_or_default();
    if !ended {
        remarks += "\nit was ended, its time was used up";
    }
    Ok((rows, remarks))
}

//! A long run whose memory, descriptors, threads and disk usage must not grow.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::process::{Launcher, descriptors, disk_bytes, status};
use crate::tolerance::{RSS_SHARE, RSS_SLACK_BYTES, SAVED_BYTES_PER_STEP};

/// Time between two samples.
const LOOK: Duration = Duration::from_millis(20);
const SAVE_STEPS: u64 = 10;
const RANKS: usize = 2;

/// One sample of the resources of a run, the maximum over its ranks.
#[derive(Clone, Copy, Debug, Default)]
struct Look {
    step: u64,
    rss_bytes: u64,
    descriptors: u64,
    threads: u64,
    /// Bytes of the spill files.
    spill_bytes: u64,
    /// Bytes of the checkpoints.
    saved_bytes: u64,
}

impl Look {
    /// Combines two samples. A save briefly needs more descriptors, threads and disk, so these take the minimum. The
    /// others take the maximum.
    fn join(self, other: Self) -> Self {
        let most = self.max(other);
        Self {
            descriptors: self.descriptors.min(other.descriptors),
            threads: self.threads.min(other.threads),
            saved_bytes: self.saved_bytes.min(other.saved_bytes),
            ..most
        }
    }

    fn max(self, other: Self) -> Self {
        Self {
            step: self.step.max(other.step),
            rss_bytes: self.rss_bytes.max(other.rss_bytes),
            descriptors: self.descriptors.max(other.descriptors),
            threads: self.threads.max(other.threads),
            spill_bytes: self.spill_bytes.max(other.spill_bytes),
            saved_bytes: self.saved_bytes.max(other.saved_bytes),
        }
    }
}

/// Trains `steps` steps with optimizer states on disk and compares the last third of the run with the second.
pub(crate) fn run(steps: u64) -> Result<()> {
    ensure!(steps >= 6 * SAVE_STEPS, "at least {} steps", 6 * SAVE_STEPS);
    let directory = tempfile::tempdir()?;
    let samples = crate::samples(directory.path())?;
    let (output, disk) = (directory.path().join("out"), directory.path().join("disk"));
    fs::create_dir(&disk)?;
    let mut flags = vec![
        format!("--model={}", crate::model().display()),
        format!("--data={}", samples.display()),
        format!("--output={}", output.display()),
        format!("--offload=nvme:{}", disk.display()),
        format!("--max-steps={steps}"),
        format!("--save-steps={SAVE_STEPS}"),
    ];
    flags.push(format!("--nproc={RANKS}"));
    let others =
        "--zero=3 --precision=bf16 --save-total-limit=2 --learning-rate=1e-4 --logging-steps=1";
    flags.extend(others.split_whitespace().map(str::to_owned));
    let mut launcher = Launcher::start(directory.path(), &flags)?;
    let mut looks = Vec::new();
    while launcher.child.try_wait()?.is_none() {
        looks.extend(look(&launcher, &output, &disk));
        std::thread::sleep(LOOK);
    }
    launcher.finish()?;
    ensure!(
        disk_bytes(&disk) == 0,
        "spill files are left in {}",
        disk.display()
    );
    let third = |from: u64, to: u64| {
        let within = looks.iter().filter(|look| (from..to).contains(&look.step));
        within.copied().reduce(Look::join)
    };
    let early = third(steps / 3, steps * 2 / 3).context("no look at the second third")?;
    let late = third(steps * 2 / 3, steps).context("no look at the last third")?;
    println!("soak: {steps} steps, {} looks", looks.len());
    println!("  early {early:?}\n  late  {late:?}");
    let allowed = (early.rss_bytes as f64 * (1.0 + RSS_SHARE)) as u64 + RSS_SLACK_BYTES;
    ensure!(
        early.rss_bytes > 0 && early.spill_bytes > 0,
        "nothing was seen"
    );
    ensure!(late.rss_bytes <= allowed, "memory grows");
    ensure!(late.descriptors <= early.descriptors, "descriptors grow");
    ensure!(late.threads <= early.threads, "threads grow");
    ensure!(late.spill_bytes <= early.spill_bytes, "spill files grow");
    let rows = (late.step - early.step) * SAVED_BYTES_PER_STEP;
    ensure!(
        late.saved_bytes <= early.saved_bytes + rows,
        "checkpoints grow"
    );
    Ok(())
}

/// A sample, or `None` while not every rank runs.
fn look(launcher: &Launcher, output: &Path, disk: &Path) -> Option<Look> {
    let log = fs::read(output.join("trainer_log.jsonl")).unwrap_or_default();
    let step = log.iter().filter(|byte| **byte == b'\n').count() as u64;
    let entries = fs::read_dir(output).into_iter().flatten().flatten();
    let is_checkpoint = |name: &str| name.starts_with("checkpoint-");
    let checkpoints = entries.filter(|e| is_checkpoint(&e.file_name().to_string_lossy()));
    let rest = Look {
        step,
        spill_bytes: disk_bytes(disk),
        saved_bytes: checkpoints.map(|e| disk_bytes(&e.path())).sum(),
        ..Look::default()
    };
    let of_rank = |pid: &u32| {
        Some(Look {
            rss_bytes: status(*pid, "VmRSS")? * 1024,
            descriptors: descriptors(*pid)?,
            threads: status(*pid, "Threads")?,
            ..rest
        })
    };
    let ranks = launcher.ranks();
    let looks: Option<Vec<Look>> = ranks.iter().map(of_rank).collect();
    let looks = looks.filter(|looks| looks.len() == RANKS)?;
    looks.into_iter().reduce(Look::max)
}

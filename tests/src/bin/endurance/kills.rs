//! Kills at random instants of a save, followed by a resume.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use engine::checkpoint::{audit, list};

use crate::process::{LIMIT, Launcher, TICK, kill, wait_for_end};

/// Longest delay after the first sign of a save. Saves of this model take between a few and some tens of milliseconds.
const SPREAD: Duration = Duration::from_millis(40);
/// Number of saves of one attempt. The kill hits a random one of them.
const SAVES: u64 = 3;

/// Random numbers that depend only on their seed (splitmix64).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit
    }
}

/// Kills a run `count` times, then compares its last checkpoint with that of an undisturbed run.
pub(crate) fn run(count: u64, seed: u64) -> Result<()> {
    println!("kills: {count} with seed {seed}");
    let directory = tempfile::tempdir()?;
    let samples = crate::samples(directory.path())?;
    let flags = |output: &Path, steps: u64, resume: bool| -> Vec<String> {
        let mut flags = vec![
            format!("--model={}", crate::model().display()),
            format!("--data={}", samples.display()),
            format!("--output={}", output.display()),
            format!("--max-steps={steps}"),
        ];
        flags.extend(
            "--nproc=2 --zero=3 --offload=cpu --precision=bf16 --save-steps=1 --save-total-limit=2 \
             --learning-rate=1e-3 --lr-scheduler-type=constant"
                .split_whitespace()
                .map(str::to_owned),
        );
        if resume {
            flags.push("--resume=auto".to_owned());
        }
        flags
    };
    let mut numbers = Numbers(seed);
    let output = directory.path().join("killed");
    let (mut newest, mut unfinished, mut supervisors) = (0, 0, 0);
    for trial in 0..count {
        let endless = flags(&output, 1_000_000, trial > 0);
        let mut launcher = Launcher::start(directory.path(), &endless)?;
        let until = newest + 1 + numbers.below(SAVES);
        wait_for_save(&output, until, &mut launcher)?;
        let delay = numbers.below(SPREAD.as_micros() as u64);
        std::thread::sleep(Duration::from_micros(delay));
        let ranks = launcher.ranks();
        let victim = numbers.below(ranks.len() as u64 + 1) as usize;
        match ranks.get(victim) {
            Some(rank) => kill(*rank)?,
            None => {
                supervisors += 1;
                launcher.child.kill()?;
            }
        }
        launcher.child.wait()?;
        wait_for_end(&ranks)?;
        let context = format!("trial {trial}, {delay} us into the save after step {until}");
        let left = fs::read_dir(&output)?.flatten();
        let tmp = left.filter(|e| e.file_name().to_string_lossy().ends_with(".tmp"));
        unfinished += u64::from(tmp.count() > 0);
        let found = list(&output)?;
        for (step, checkpoint) in &found {
            let audit = audit(checkpoint)?;
            ensure!(
                audit.is_whole(),
                "{context}: step {step}: {:?}",
                audit.problems
            );
        }
        let last = found.last().map_or(0, |(step, _)| *step);
        ensure!(
            last >= newest && last + 1 >= until,
            "{context}: checkpoint {last} is the newest, {newest} was"
        );
        newest = last;
    }
    // The run resumes without any cleanup and ends with the bits of an undisturbed run.
    let (end, plain) = (newest + 2, directory.path().join("plain"));
    Launcher::start(directory.path(), &flags(&output, end, true))?.finish()?;
    Launcher::start(directory.path(), &flags(&plain, end, false))?.finish()?;
    for file in [
        "model.safetensors",
        "state/rank-0000.safetensors",
        "state/rank-0001.safetensors",
    ] {
        let read = |run: &Path| fs::read(run.join(format!("checkpoint-{end}/{file}")));
        ensure!(read(&output)? == read(&plain)?, "{file} differs");
    }
    println!(
        "kills: {count} ({supervisors} of the supervisor, {unfinished} left an unfinished save), {end} steps, every \
         checkpoint whole, the same bits as an unbroken run"
    );
    Ok(())
}

/// Waits until the save after step `step` has begun or is over.
fn wait_for_save(output: &Path, step: u64, launcher: &mut Launcher) -> Result<()> {
    let began = Instant::now();
    let names = [".tmp", ""].map(|end| output.join(format!("checkpoint-{step}{end}")));
    while !names.iter().any(|name| name.exists()) {
        let ended = launcher.child.try_wait()?;
        ensure!(
            ended.is_none() && began.elapsed() < LIMIT,
            "no save after step {step}, {ended:?}:\n{}",
            launcher.screen()
        );
        std::thread::sleep(TICK);
    }
    Ok(())
}

//! Benchmark of a training step in tokens per second:
//! `train_step [--ranks N] [--threads N] [--stage N] [--precision WORD] [--steps N]`.
#![allow(
    clippy::print_stdout,
    reason = "a program that answers on standard output"
)]

use benches::Result;
use benches::train::{Setting, TOKENS, run};
use engine::Stage;
use std::sync::Mutex;
use std::time::Duration;

/// Warm-up steps, which allocate buffers.
const WARM_UP: usize = 2;

fn main() -> Result<()> {
    let usage =
        "usage: train_step [--ranks N] [--threads N] [--stage N] [--precision WORD] [--steps N]";
    let (mut ranks, mut threads, mut stage, mut steps) = (1, 1, 0u8, 5);
    let mut precision = optim::Precision::F32;
    let mut args = std::env::args().skip(1);
    while let Some(flag) = args.next() {
        let value = args.next().ok_or(usage)?;
        match flag.as_str() {
            "--ranks" => ranks = value.parse()?,
            "--threads" => threads = value.parse()?,
            "--stage" => stage = value.parse()?,
            "--steps" => steps = value.parse()?,
            "--precision" => precision = value.parse()?,
            _ => return Err(usage.into()),
        }
    }
    let setting = Setting {
        ranks,
        threads,
        stage: Stage::try_from(stage)?,
        precision,
    };
    let times = Mutex::new(Vec::new());
    run(setting, WARM_UP + steps.max(1), |time| {
        times.lock().expect("no panic while it is held").push(time);
    })?;
    let times = times.into_inner()?.split_off(WARM_UP);
    let median = |part: fn(&benches::train::StepTime) -> Duration| {
        let mut seconds: Vec<f64> = times.iter().map(|t| part(t).as_secs_f64()).collect();
        seconds.sort_by(f64::total_cmp);
        seconds[seconds.len() / 2]
    };
    let step = median(|t| t.total());
    let tokens = (ranks * TOKENS) as f64;
    println!(
        "{ranks} ranks of {threads} threads, stage {stage}, {}: {:.0} tokens/s, {step:.3} s a step (forward {:.3}, \
         backward {:.3}, optimizer {:.3}), {:.2} GiB a rank",
        precision.name(),
        tokens / step,
        median(|t| t.forward),
        median(|t| t.backward),
        median(|t| t.optimizer),
        peak_gib() / ranks as f64,
    );
    Ok(())
}

/// Peak resident memory of the process in GiB; 0 if the system does not report it.
fn peak_gib() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<f64>().ok());
    kib.unwrap_or(0.0) / f64::from(1 << 20)
}

//! `pure_bf16 OUT.svg`: trains the demo and a golden pack for 300 steps in f32 and in pure bf16 with every rounding of
//! weights, and draws the losses. It fails unless the safe roundings stay within the band and plain rounding stalls.
#![allow(clippy::print_stdout, reason = "this is a command")]

use anyhow::{Context, Result, ensure};
use launcher::report::{Panel, Series, comparison};
use tests::pure_bf16::{BAND, Keeping, STALLED, STEPS, Subject, progress, tail};

/// Steps averaged for the chart, since losses of single batches vary.
const SMOOTHED: usize = 15;

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let out = args.next().context("usage: pure_bf16 OUT.svg [RATE]")?;
    let rate: Option<f64> = args.next().map(|rate| rate.parse()).transpose()?;
    let directory = tempfile::tempdir()?;
    let mut panels = Vec::new();
    let mut kept = true;
    for mut subject in [
        Subject::demo(&directory.path().join("demo"))?,
        Subject::pack()?,
    ] {
        subject.lr = rate.unwrap_or(subject.lr);
        let mut in_f32 = Vec::new();
        let mut series = Vec::new();
        for keeping in Keeping::ALL {
            let losses = subject.train(keeping, STEPS)?;
            if keeping == Keeping::F32 {
                in_f32.clone_from(&losses);
            }
            let share = progress(&losses, &in_f32);
            let good = match keeping {
                Keeping::Pure(optim::Bf16Storage::Nearest) => share < STALLED,
                _ => (share - 1.0).abs() <= BAND,
            };
            kept &= good;
            println!(
                "{:<26} {:<16} loss {:.3} -> {:.3}  {:>6.1} % of f32's progress  {}",
                subject.name,
                keeping.name(),
                losses[0],
                tail(&losses),
                100.0 * share,
                if good { "ok" } else { "FAIL" }
            );
            series.push(Series {
                name: keeping.name().to_owned(),
                points: smooth(&losses),
            });
        }
        panels.push(Panel {
            title: format!(
                "{}: mean loss of {SMOOTHED} steps, rate {:e}",
                subject.name, subject.lr
            ),
            unit: "loss".to_owned(),
            series,
        });
    }
    std::fs::write(&out, comparison(&panels)).with_context(|| format!("writing {out}"))?;
    ensure!(kept, "a way of keeping weights did not behave as stated");
    Ok(())
}

fn smooth(losses: &[f64]) -> Vec<(f64, f64)> {
    let means = losses.windows(SMOOTHED).zip(SMOOTHED..);
    means
        .map(|(window, step)| (step as f64, window.iter().sum::<f64>() / SMOOTHED as f64))
        .collect()
}

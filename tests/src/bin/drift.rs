//! `drift`: rewrites the committed 200-step trajectory. Run it only after a change that is meant to alter results.
#![allow(clippy::print_stdout, reason = "this is a command")]

use anyhow::Result;
use tests::drift;

fn main() -> Result<()> {
    let trajectory = drift::run(drift::LAYOUT)?;
    let text = serde_json::to_string_pretty(&trajectory)? + "\n";
    std::fs::write(drift::path(), text)?;
    let at = |step: usize| drift::value(&trajectory.losses[step]);
    println!(
        "{}: loss {:.4} -> {:.4}",
        drift::path().display(),
        at(0)?,
        at(trajectory.losses.len() - 1)?
    );
    Ok(())
}

//! `drift`: writes the 200-step trajectory anew. Only for a change that has a reason to alter results.
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

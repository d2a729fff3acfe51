//! `endurance`: long tests of the real launcher.
//!
//! `endurance kills N [SEED]` kills processes of one run by SIGKILL at random instants of a save, N times, and resumes
//! after each kill. Every directory with a checkpoint's name must be complete, and the run must end with the bits of an
//! undisturbed one.
//!
//! `endurance soak STEPS` trains and saves every ten steps. Memory, descriptors, threads and disk usage must not grow.
#![allow(clippy::print_stdout, reason = "this is a command")]

mod kills;
mod process;
mod soak;
mod tolerance;

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let number = |text: &String| -> Result<u64> {
        text.parse()
            .with_context(|| format!("`{text}` is no number"))
    };
    match words.as_slice() {
        [what, count] if what == "kills" => {
            let now = SystemTime::now().duration_since(UNIX_EPOCH)?;
            kills::run(number(count)?, u64::from(now.subsec_nanos()))
        }
        [what, count, seed] if what == "kills" => kills::run(number(count)?, number(seed)?),
        [what, steps] if what == "soak" => soak::run(number(steps)?),
        _ => bail!("endurance kills N [SEED] | endurance soak STEPS"),
    }
}

/// The model directory: a tiny golden pack.
fn model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/minicpm-v-2_6")
}

/// Writes eight samples without images and returns the file.
fn samples(directory: &Path) -> Result<PathBuf> {
    let sample = |n: u32| {
        serde_json::json!({"id": n.to_string(), "conversations": [
            {"role": "user", "content": format!("What is {n} and {n}?")},
            {"role": "assistant", "content": format!("It is {}.", 2 * n)}]})
    };
    let path = directory.join("samples.json");
    let samples: Vec<_> = (0..8).map(sample).collect();
    std::fs::write(&path, serde_json::to_vec(&samples)?)?;
    Ok(path)
}

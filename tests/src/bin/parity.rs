//! `parity [--device cpu|cuda] [--precision f32|bf16|fp16|pure-bf16] [--drift] PACK_DIR...`: compares golden packs with
//! the results of this project.
//!
//! `--drift` also compares the 200 steps of the committed trajectory. In 16 bits a GPU is also compared with the CPU,
//! in the quantities whose names begin with `cpu`.
//!
//! It prints one line per stored quantity: name, largest difference, tolerance, ok or FAIL. It exits with 1 when
//! anything differs, and with 2 when a pack cannot be read or the device cannot be used.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "this is a command"
)]

use anyhow::Result;
use engine::Precision;
use launcher::device::first_gpu;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use tests::golden::{Comparison, Section};
use tests::parity::{check_pack, count, margins};
use tests::{drift, sixteen_bits, tolerance, world};

/// Memory of the GPU for all runs. Packs are tiny, and the two ranks of the trajectory share it.
const ARENA_BYTES: u64 = 2 << 30;

/// The parsed command line.
struct Asked {
    dirs: Vec<PathBuf>,
    on_gpu: bool,
    drift: bool,
    precision: Precision,
}

fn asked() -> Option<Asked> {
    let mut asked = Asked {
        dirs: Vec::new(),
        on_gpu: false,
        drift: false,
        precision: Precision::F32,
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        match &*word {
            "--device" => match words.next().as_deref() {
                Some("cpu") => asked.on_gpu = false,
                Some("cuda") => asked.on_gpu = true,
                _ => return None,
            },
            "--precision" => asked.precision = words.next()?.parse().ok()?,
            "--drift" => asked.drift = true,
            _ if word.starts_with('-') => return None,
            _ => asked.dirs.push(word.into()),
        }
    }
    (!asked.dirs.is_empty() || asked.drift).then_some(asked)
}

fn check(dir: &Path, precision: Precision) -> Result<Vec<Section>> {
    match precision {
        Precision::F32 => check_pack(dir),
        _ => sixteen_bits::check_pack(dir, precision),
    }
}

/// Compares the trajectory of 200 steps.
fn check_drift(precision: Precision) -> Result<Vec<Comparison>> {
    match precision {
        Precision::F32 => {
            let run = drift::run(drift::LAYOUT)?;
            Ok(vec![drift::compare(&run, tolerance::DRIFT_RELATIVE)?])
        }
        _ => sixteen_bits::check_drift(precision),
    }
}

fn main() -> ExitCode {
    let Some(Asked {
        dirs,
        on_gpu,
        drift,
        precision,
    }) = asked()
    else {
        eprintln!(
            "usage: parity [--device cpu|cuda] [--precision f32|bf16|fp16|pure-bf16] [--drift] PACK_DIR..."
        );
        return ExitCode::from(2);
    };
    if on_gpu {
        match first_gpu(ARENA_BYTES) {
            Ok((name, gpu)) => {
                println!("parity: on {name}");
                world::compute_on(gpu);
            }
            Err(failure) => {
                eprintln!("{failure}");
                return ExitCode::from(2);
            }
        }
    }
    let (mut compared, mut failed, mut unreadable) = (0, 0, 0);
    if drift {
        match check_drift(precision) {
            Ok(comparisons) => {
                for comparison in &comparisons {
                    println!("trajectory of 200 steps: {comparison}");
                    compared += 1;
                    failed += usize::from(!comparison.ok());
                }
            }
            Err(error) => {
                eprintln!("the trajectory of 200 steps cannot be taken: {error:#}");
                unreadable += 1;
            }
        }
    }
    for dir in &dirs {
        match check(dir, precision) {
            Ok(sections) => {
                for (title, comparisons) in &sections {
                    for comparison in comparisons {
                        println!("{}: {title}: {comparison}", dir.display());
                    }
                }
                let (all, bad) = count(&sections);
                for (kind, share) in margins(&sections) {
                    println!(
                        "{}: margin: {kind} used {:.0} % of its tolerance",
                        dir.display(),
                        share * 100.0
                    );
                }
                println!("{}: {} of {all} quantities agree", dir.display(), all - bad);
                compared += all;
                failed += bad;
            }
            Err(error) => {
                eprintln!("{}: cannot be read: {error:#}", dir.display());
                unreadable += 1;
            }
        }
    }
    println!(
        "parity: {} passed, {failed} failed, {unreadable} packs unreadable",
        compared - failed
    );
    match (failed, unreadable) {
        (_, 1..) => ExitCode::from(2),
        (1.., 0) => ExitCode::from(1),
        _ => ExitCode::SUCCESS,
    }
}

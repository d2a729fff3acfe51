//! `launcher synth`: a model folder with random weights, whole in every respect but what it has learnt.
//!
//! Sizes come from a `config.json`; names, shapes and the scale of start values from the family's own model; the
//! tokenizer knows bytes and the family's special tokens. With it real sizes can be tried before gigabytes are fetched:
//! loading, plan, memory, a step, export.
//!
//! Every weight is a function of seed, tensor name and element ([`models::seeded`]), so a folder can be made again
//! anywhere, and need not hold its weights: `--weights seeded` leaves a file that names the seed in their place.

mod config;
mod files;
mod samples;
mod tokenizer;
mod weights;

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use kernels::DType;
use models::{ModelOptions, open_model};

use crate::cli::{SynthArgs, SynthWeights};
use crate::commands::new_directory::NewFolder;
use crate::error::{ErrorCode, Failure, chain};
use crate::memory::disk_free_bytes;
use crate::units::{bytes, grouped, seconds};
use weights::Layout;

/// Files of weights when nothing is said.
const SHARDS: usize = 4;
/// Length of samples in tokens when nothing is said.
const SAMPLE_TOKENS: usize = 512;

/// Runs the verb.
///
/// # Errors
/// The configuration cannot be used, the output is taken, or the disk is too small.
pub(crate) fn run(args: &SynthArgs) -> Result<ExitCode, Failure> {
    let started = Instant::now();
    let output = args.output.clone().ok_or_else(|| {
        Failure::usage("--output is missing", "the model needs a directory")
            .next("add --output DIR")
    })?;
    let seeded = args.weights.unwrap_or_default() == SynthWeights::Seeded;
    if let (true, Some(_)) = (seeded, args.shards) {
        return Err(Failure::usage(
            "--shards and --weights seeded contradict each other",
            "seeded weights have no files",
        )
        .next("omit one of them"));
    }
    let shards = args.shards.unwrap_or(SHARDS);
    if shards == 0 {
        return Err(Failure::usage(
            "--shards 0 is out of range",
            "weights need at least one file",
        )
        .next("omit --shards for 4 files"));
    }
    let config = config::find(args.model_config.as_deref())?;
    let folder = NewFolder::begin(&output, "synth")?;
    files::write(&config, folder.path())?;
    let model = open_model(folder.path(), ModelOptions::new(DType::BF16))
        .map_err(|error| config.unusable(&chain(&error)))?;
    let layout = Layout::new(&*model, shards)?;
    let sampled = match args.samples.unwrap_or(0) {
        0 => None,
        count => {
            let tokens = args.sample_tokens.unwrap_or(SAMPLE_TOKENS);
            let size = samples::Size {
                tokens,
                picture_side: args.picture_side,
            };
            Some(samples::write(folder.path(), count, size)?)
        }
    };
    let stored_bytes = if seeded { 0 } else { layout.total_bytes() };
    check_space(&output, stored_bytes)?;
    say(&format!(
        " synth   {} parameters in {} tensors, {}, into {}\n",
        grouped(layout.parameters()),
        grouped(layout.tensors() as u64),
        bytes(layout.total_bytes()),
        output.display(),
    ));
    let seed = args.seed.unwrap_or(0);
    if seeded {
        files::declare(seed, folder.path())?;
        folder.publish()?;
        say(&format!(
            " done    {} contains seed {seed} instead of weights\n",
            models::seeded::FILE
        ));
    } else {
        let written = layout.write(seed, folder.path())?;
        folder.publish()?;
        let took = started.elapsed().as_secs_f64();
        say(&format!(
            " done    {written} files of weights · {} · {}/s\n",
            seconds(took),
            bytes((stored_bytes as f64 / took) as u64)
        ));
    }
    if let Some(sampled) = sampled {
        say(&format!(
            " samples {} of {} tokens, {} of them for the image: launcher --model {out} --data {out}/{}\n",
            grouped(sampled.count as u64),
            grouped(sampled.tokens as u64),
            grouped(sampled.picture_tokens as u64),
            samples::FILE,
            out = output.display(),
        ));
    }
    Ok(ExitCode::SUCCESS)
}

/// A reader that has seen enough is no error.
fn say(text: &str) {
    drop(std::io::stdout().write_all(text.as_bytes()));
}

fn check_space(output: &Path, needed: u64) -> Result<(), Failure> {
    // Headers, the index and the small files beside the weights.
    let needed = needed + (16 << 20);
    // A file system that cannot be asked will say it by itself.
    let Ok(free) = disk_free_bytes(output) else {
        return Ok(());
    };
    if free >= needed {
        return Ok(());
    }
    Err(Failure::new(
        ErrorCode::Disk,
        format!("the disk is too small for {}", output.display()),
        format!(
            "the directory needs {}, {} are free",
            bytes(needed),
            bytes(free)
        ),
    )
    .next("free space on that disk, or choose another directory with --output"))
}

#[cfg(test)]
mod tests;

//! `launcher synth`: makes a complete model directory with random weights.
//!
//! Sizes come from a `config.json`; names, shapes and the scale of initial values come from the family's model. The
//! tokenizer knows bytes and the family's special tokens. Such a directory allows tests of real sizes before
//! gigabytes are downloaded: loading, plan, memory, a step, export.
//!
//! Every weight is a function of seed, tensor name and element ([`models::seeded`]). So a directory can be made again
//! anywhere and does not need to contain its weights: `--weights seeded` writes a file with the seed instead.

mod config;
pub(crate) mod files;
pub(crate) mod png;
mod samples;
pub(crate) mod tokenizer;
mod weights;
pub(crate) mod writer;

use crate::lang::{both, text};
pub(super) use config::published;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use kernels::DType;
use models::{ModelOptions, open_model};
use serde_json::json;

use crate::cli::{SynthArgs, SynthWeights};
use crate::commands::new_directory::NewDirectory;
use crate::error::output::say;
use crate::error::{ErrorCode, Failure, chain};
use crate::memory::disk_free_bytes;
use crate::units::{bytes, grouped, seconds};
use weights::Layout;
use writer::FileWriter;

/// Default number of weight files.
const SHARDS: usize = 4;
/// Default length of samples in tokens.
const SAMPLE_TOKENS: usize = 512;

/// Runs the subcommand.
///
/// # Errors
/// When the configuration cannot be used, the output exists, or the disk is too small.
pub(crate) fn run(args: &SynthArgs) -> Result<ExitCode, Failure> {
    let started = Instant::now();
    let output = args.output.clone().ok_or_else(|| {
        Failure::usage(
            both("--output is missing", "缺少 --output"),
            both("the model needs a directory", "模型需要一个目录"),
        )
        .next(both("add --output DIR", "请加上 --output DIR"))
    })?;
    let seeded = args.weights.unwrap_or_default() == SynthWeights::Seeded;
    if let (true, Some(_)) = (seeded, args.shards) {
        return Err(Failure::usage(
            both(
                "--shards and --weights seeded contradict each other",
                "--shards 与 --weights seeded 互相矛盾",
            ),
            both("seeded weights have no files", "种子权重没有文件"),
        )
        .next(both("omit one of them", "请去掉其中一个")));
    }
    let shards = args.shards.unwrap_or(SHARDS);
    if shards == 0 {
        return Err(Failure::usage(
            both("--shards 0 is out of range", "--shards 0 超出范围"),
            both("weights need at least one file", "权重至少需要一个文件"),
        )
        .next(both(
            "omit --shards for 4 files",
            "去掉 --shards 时为 4 个文件",
        )));
    }
    let config = config::find(args.model_config.as_deref())?;
    let directory = NewDirectory::begin(&output, both("synth", "生成模型"))?;
    files::write(&config, directory.path())?;
    let model = open_model(directory.path(), ModelOptions::new(DType::BF16))
        .map_err(|error| config.unusable(chain(&error)))?;
    let layout = Layout::new(&*model, shards)?;
    let sampled = match args.samples.unwrap_or(0) {
        0 => None,
        count => {
            let tokens = args.sample_tokens.unwrap_or(SAMPLE_TOKENS);
            let size = samples::Size {
                tokens,
                image_side: args.image_side,
            };
            Some(samples::write(directory.path(), count, size)?)
        }
    };
    let stored_bytes = if seeded { 0 } else { layout.total_bytes() };
    check_space(&output, stored_bytes)?;
    say(&text!(
        " synth   {} parameters in {} tensors, {}, into {}\n",
        " 生成    {} 个参数，{} 个张量，{}，写入 {}\n",
        grouped(layout.parameters()),
        grouped(layout.tensors() as u64),
        bytes(layout.total_bytes()),
        output.display(),
    ))?;
    let seed = args.seed.unwrap_or(0);
    if seeded {
        let marker = json!(models::seeded::Marker::new(seed));
        FileWriter::new(directory.path(), "\n").put_json(models::seeded::FILE, &marker)?;
        directory.publish()?;
        say(&text!(
            " done    {} contains seed {seed} instead of weights\n",
            " 完成    {} 中是种子 {seed}，没有权重\n",
            models::seeded::FILE
        ))?;
    } else {
        let written = layout.write(seed, directory.path())?;
        directory.publish()?;
        let took = started.elapsed().as_secs_f64();
        say(&text!(
            " done    {written} files of weights · {} · {}/s\n",
            " 完成    {written} 个权重文件 · {} · {}/s\n",
            seconds(took),
            bytes((stored_bytes as f64 / took) as u64)
        ))?;
    }
    if let Some(sampled) = sampled {
        say(&text!(
            " samples {} of {} tokens, {} of them for the image: launcher --model {out} --data {out}/{}\n",
            " 样本    {} 个，每个 {} 个 token，其中图片 {} 个：launcher --model {out} --data {out}/{}\n",
            grouped(sampled.count as u64),
            grouped(sampled.tokens as u64),
            grouped(sampled.image_tokens as u64),
            samples::FILE,
            out = output.display(),
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn check_space(output: &Path, needed: u64) -> Result<(), Failure> {
    // Adds headers, the index and the small files to the bytes of the weights.
    let needed = needed + (16 << 20);
    // If the free space is unknown, a full disk shows up when files are written.
    let Ok(free) = disk_free_bytes(output) else {
        return Ok(());
    };
    if free >= needed {
        return Ok(());
    }
    Err(Failure::new(
        ErrorCode::Disk,
        text!(
            "the disk is too small for {}",
            "磁盘太小，放不下 {}",
            output.display()
        ),
        text!(
            "the directory needs {}, {} are free",
            "该目录需要 {}，空闲 {}",
            bytes(needed),
            bytes(free)
        ),
    )
    .next(both(
        "free space on that disk, or choose another directory with --output",
        "请清理该磁盘的空间，或用 --output 指定其他目录",
    )))
}

#[cfg(test)]
mod tests;

//! `launcher ckpt reshard`: the same training state for another number of ranks.

use crate::lang::{Text, both, text};
use std::process::ExitCode;
use std::time::Instant;

use engine::checkpoint;
use serde_json::Value;

use super::{open, required};
use crate::cli::CkptReshardArgs;
use crate::commands::new_directory::NewDirectory;
use crate::error::output::say;
use crate::error::{ErrorCode, Failure, failures};
use crate::report::checkpoints::UNITS;
use crate::units::seconds;

/// Runs `launcher ckpt reshard`: writes a copy of a checkpoint whose training state is divided among `--nproc` ranks.
pub(super) fn run(args: &CkptReshardArgs) -> Result<ExitCode, Failure> {
    let started = Instant::now();
    let output = required(args.output.as_ref())?;
    let Some(world_size) = args.nproc else {
        return Err(Failure::usage(
            both("--nproc is missing", "缺少 --nproc"),
            both(
                "it sets the number of ranks of the new checkpoint",
                "它设定新检查点的 rank 数",
            ),
        )
        .next(both("add --nproc N", "请加上 --nproc N")));
    };
    let directory =
        NewDirectory::begin(output, both("a resharded checkpoint", "重新分片的检查点"))?;
    let source = open(&args.checkpoint, both("reshard", "重新分片"))?;
    let doing = text!("reshard {}", "重新分片 {}", args.checkpoint.display());
    let mut meta = source.meta().clone();
    if let Some(world) = meta.get_mut("world_size") {
        *world = world_size.into();
    }
    let units = units(&meta).map_err(|error| {
        Failure::new(
            ErrorCode::Resume,
            text!("cannot {doing}", "无法{doing}"),
            Text::literal(&error),
        )
        .evidence(text!(
            "{UNITS} of its manifest cannot be read",
            "其清单中的 {UNITS} 无法读取"
        ))
        .next(both(
            "give a checkpoint-N directory that this program saved",
            "请指定由本程序保存的 checkpoint-N 目录",
        ))
    })?;
    let written = checkpoint::reshard(&source, &units, world_size, directory.path(), meta)
        .map_err(|e| failures::checkpoint(&doing, &e))?;
    directory.publish_inner(&written)?;
    say(&text!(
        " reshard  {} ranks → {world_size} · {} · {}\n",
        " 重新分片  {} 个 rank → {world_size} · {} · {}\n",
        source.world_size(),
        seconds(started.elapsed().as_secs_f64()),
        output.display()
    ))?;
    Ok(ExitCode::SUCCESS)
}

/// Names of the parameters in each buffer that the run sharded as a whole. Empty if the checkpoint does not list
/// them.
fn units(meta: &Value) -> Result<Vec<Vec<String>>, serde_json::Error> {
    meta.get(UNITS).map_or_else(
        || Ok(Vec::new()),
        |units| serde_json::from_value(units.clone()),
    )
}

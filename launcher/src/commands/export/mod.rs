//! `launcher export`: the weights of a checkpoint as a directory for transformers or peft. It works tensor by tensor
//! on the CPU. The directory gets its final name when it is complete.

mod adapter;
pub(crate) mod import;
mod model;

use crate::cli::{ExportArgs, ExportDtype, ExportFormat};
use crate::commands::new_directory::NewDirectory;
use crate::error::output::say;
use crate::error::{ErrorCode, Failure, chain, failures};
use crate::lang::{Both, Text, both, text};
use crate::model::files::{self, SmallFile};
use crate::model::stored::MAX_SHARD_BYTES;
use crate::report::checkpoints::best_of;
use crate::units::{bytes, grouped, seconds};
use engine::checkpoint::Checkpoint;
use kernels::DType;
use models::adapter::{Adapter, AdapterError};
use models::{WeightError, WeightSource, places, sat};
use serde_json::Value;
use std::collections::BTreeSet;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

/// Elements that are read, merged and written at once.
const BLOCK_ELEMS: usize = 1 << 24;
/// Maximal number of tensors listed that do not fit the base model.
const LISTED: usize = 3;

/// Runs the subcommand.
///
/// # Errors
/// The checkpoint or its base is missing or damaged, a trained tensor would be lost, or the output cannot be written.
pub(crate) fn export(args: &ExportArgs) -> Result<ExitCode, Failure> {
    let started = Instant::now();
    let is_sat = args.format.unwrap_or_default() == ExportFormat::Sat;
    check_layout(args, is_sat)?;
    let args = &ExportArgs {
        checkpoint: best_of(&args.checkpoint),
        merge: if is_sat { Some(true) } else { args.merge },
        ..args.clone()
    };
    let checkpoint = &args.checkpoint;
    let output = args.output.clone().ok_or_else(|| {
        Failure::usage(
            both("--output is missing", "缺少 --output"),
            both("the export needs a directory", "导出需要一个目录"),
        )
        .next(both("add --output DIR", "请加上 --output DIR"))
    })?;
    if !places::main(checkpoint).is_dir() {
        return Err(missing(checkpoint));
    }
    let directory = NewDirectory::begin(&output, both("an export", "导出"))?;
    failures::check_directory(
        text!("export {}", "导出 {}", checkpoint.display()),
        checkpoint,
    )?;
    let manifest = manifest(checkpoint)?;
    let sources = Sources::open(args, manifest.as_ref())?;
    sources.check(manifest.as_ref())?;
    let summary = sources.write(args, directory.path())?;
    directory.publish()?;
    let text = text!(
        " export  {} · {} tensors · {} · {} · {}\n",
        " 导出    {} · {} 个张量 · {} · {} · {}\n",
        summary.what,
        grouped(summary.tensors as u64),
        bytes(summary.bytes),
        seconds(started.elapsed().as_secs_f64()),
        output.display()
    );
    say(&text)
}

/// Fails for flags of a layout that is not written.
fn check_layout(args: &ExportArgs, is_sat: bool) -> Result<(), Failure> {
    const MAX_RANKS: usize = 8;
    let wrong = |title: Both, cause: Both, next: Both| Err(Failure::usage(title, cause).next(next));
    match args.mp_size {
        Some(_) if !is_sat => wrong(
            both(
                "--mp-size needs --format sat",
                "--mp-size 需要 --format sat",
            ),
            both(
                "only SAT checkpoints are divided among model-parallel ranks",
                "只有 SAT 检查点会分给模型并行的 rank",
            ),
            both(
                "add --format sat, or omit --mp-size",
                "请加上 --format sat，或去掉 --mp-size",
            ),
        ),
        Some(0) | Some(MAX_RANKS..) if args.mp_size != Some(MAX_RANKS) => wrong(
            both("--mp-size is out of range", "--mp-size 超出范围"),
            both(
                "a SAT checkpoint has 1 to 8 ranks",
                "SAT 检查点有 1 到 8 个 rank",
            ),
            both("give --mp-size 1 to 8", "请把 --mp-size 设为 1 到 8"),
        ),
        _ if is_sat && args.merge == Some(false) => wrong(
            both("--format sat merges adapters", "--format sat 会合并适配器"),
            both("SAT has no files for adapters", "SAT 没有存放适配器的文件"),
            both("omit --merge false", "请去掉 --merge false"),
        ),
        _ => Ok(()),
    }
}

struct Summary {
    what: Both,
    tensors: usize,
    bytes: u64,
}

fn missing(checkpoint: &Path) -> Failure {
    Failure::new(
        ErrorCode::ModelFiles,
        text!("cannot export {}", "无法导出 {}", checkpoint.display()),
        both("the directory does not exist", "该目录不存在"),
    )
    .next(both(
        "give a run directory, or a checkpoint-N directory of a run",
        "请指定运行目录，或某次运行的 checkpoint-N 目录",
    ))
}

/// The manifest, if the directory is a checkpoint of a run; weights are compared with their hashes.
fn manifest(directory: &Path) -> Result<Option<Checkpoint>, Failure> {
    if !directory.join("MANIFEST.json").is_file() {
        return Ok(None);
    }
    let doing = text!("export {}", "导出 {}", directory.display());
    let checkpoint = Checkpoint::open(directory).map_err(|e| failures::checkpoint(&doing, &e))?;
    checkpoint
        .verify_files(|path| !path.starts_with("state"))
        .map_err(|e| failures::checkpoint(&doing, &e))?;
    Ok(Some(checkpoint))
}

/// Sources of the exported tensors.
struct Sources {
    directory: PathBuf,
    /// The whole model: the checkpoint's own weights, or the base that changes are merged into.
    model: Option<WeightSource>,
    adapter: Option<Adapter>,
}

impl Sources {
    fn open(args: &ExportArgs, manifest: Option<&Checkpoint>) -> Result<Self, Failure> {
        let directory = args.checkpoint.clone();
        match WeightSource::open(&directory) {
            Ok(model) => {
                return Ok(Self {
                    directory: places::with_tokenizer(&directory, args.tokenizer.as_deref()),
                    model: Some(model),
                    adapter: None,
                });
            }
            Err(WeightError::NoWeights { .. }) => {}
            Err(error) => return Err(failures::weights(&error)),
        }
        let adapter = Adapter::open(&directory).map_err(|e| adapter_failure(&directory, &e))?;
        if args.merge != Some(true) {
            if adapter.config().is_none() {
                return Err(Failure::usage(
                    text!(
                        "{} contains only parts of a model",
                        "{} 中只有模型的一部分",
                        directory.display()
                    ),
                    both(
                        "other programs cannot load trained.safetensors by itself",
                        "其他程序无法单独加载 trained.safetensors",
                    ),
                )
                .next(both(
                    "--merge writes the whole model including these parts",
                    "--merge 会写出包含这些部分的完整模型",
                )));
            }
            return Ok(Self {
                directory,
                model: None,
                adapter: Some(adapter),
            });
        }
        let saved = manifest.and_then(|m| m.meta().get("base_model")?.as_str().map(PathBuf::from));
        let config = adapter.config();
        let named = config.and_then(|c| c.base_model_name_or_path.clone().map(PathBuf::from));
        let Some(base) = args.model.clone().or(saved).or(named) else {
            return Err(Failure::usage(
                both("the base model is not known", "基座模型未知"),
                both(
                    "neither the manifest nor the adapter names it",
                    "清单和适配器都没有给出它的名称",
                ),
            )
            .next(both("add --model DIR", "请加上 --model DIR")));
        };
        let base = places::with_tokenizer(&base, args.tokenizer.as_deref());
        let model = WeightSource::open(&base).map_err(|e| {
            failures::weights(&e).next(both(
                "give --model DIR if the base model has moved",
                "如果基座模型已移动，请指定 --model DIR",
            ))
        })?;
        Ok(Self {
            directory: base,
            model: Some(model),
            adapter: Some(adapter),
        })
    }

    /// Refuses an export that would lose trained tensors.
    fn check(&self, manifest: Option<&Checkpoint>) -> Result<(), Failure> {
        let mut lost: Vec<String> = Vec::new();
        if let (Some(model), Some(adapter)) = (&self.model, &self.adapter) {
            lost = adapter.strangers(model).map(str::to_owned).collect();
            let misfits = adapter.misfits(model);
            if !misfits.is_empty() {
                return Err(misfit(&self.directory, misfits));
            }
        }
        let kept: BTreeSet<&str> = self
            .model
            .iter()
            .flat_map(WeightSource::names)
            .chain(self.adapter.iter().flat_map(Adapter::names))
            .collect();
        let trained = manifest.into_iter().flat_map(Checkpoint::tensors);
        let trained: BTreeSet<&str> = trained.map(|tensor| tensor.name.as_str()).collect();
        let absent = trained.iter().filter(|name| !kept.contains(*name));
        let lost: Vec<String> = lost
            .into_iter()
            .chain(absent.map(|name| (*name).to_owned()))
            .collect();
        let Some(first) = lost.first() else {
            return Ok(());
        };
        Err(Failure::new(
            ErrorCode::ModelFiles,
            text!(
                "{} trained tensors would be lost",
                "会丢失 {} 个训练过的张量",
                lost.len()
            ),
            both("the output cannot contain them", "输出中无法包含它们"),
        )
        .evidence(text!("first: {first}", "第一个：{first}"))
        .next(both(
            "give --model the model that the run started from",
            "请把运行开始时所用的模型交给 --model",
        )))
    }

    fn write(&self, args: &ExportArgs, directory: &Path) -> Result<Summary, Failure> {
        let dtype = args.dtype.map(dtype_of);
        match (&self.model, &self.adapter) {
            (Some(model), adapter) => {
                let is_sat = args.format.unwrap_or_default() == ExportFormat::Sat;
                let (tensors, bytes) = match is_sat {
                    true => {
                        let hub = sat::config::of_model(&self.directory);
                        let hub = hub.map_err(|e| failures::weights(&e))?;
                        let layout = (&hub, args.mp_size.unwrap_or(1));
                        model::write_sat(model, adapter.as_ref(), dtype, layout, directory)?
                    }
                    false => {
                        for (name, file) in files::small(&self.directory)? {
                            copy(&file, &directory.join(name), dtype)?;
                        }
                        let limit = args.max_shard_size.unwrap_or(MAX_SHARD_BYTES);
                        model::write(model, adapter.as_ref(), dtype, limit, directory)?
                    }
                };
                Ok(Summary {
                    what: match (is_sat, adapter) {
                        (true, _) => both("SAT checkpoint", "SAT 检查点"),
                        (_, Some(_)) => both("merged model", "合并后的模型"),
                        _ => both("model", "模型"),
                    },
                    tensors,
                    bytes,
                })
            }
            (None, Some(adapter)) => adapter::write(adapter, dtype, directory),
            (None, None) => Err(missing(&self.directory)),
        }
    }
}

fn dtype_of(dtype: ExportDtype) -> DType {
    match dtype {
        ExportDtype::F32 => DType::F32,
        ExportDtype::Bf16 => DType::BF16,
        ExportDtype::F16 => DType::F16,
    }
}

fn misfit(base: &Path, misfits: Vec<String>) -> Failure {
    Failure::new(
        ErrorCode::ModelFiles,
        text!(
            "the trained tensors do not belong to {}",
            "训练过的张量不属于 {}",
            base.display()
        ),
        text!(
            "{} of them do not fit the base model",
            "其中有 {} 个与基座模型不匹配",
            misfits.len()
        ),
    )
    .evidence_lines(misfits.iter().take(LISTED).map(Text::literal))
    .next(both(
        "give --model the model that the run started from",
        "请把运行开始时所用的模型交给 --model",
    ))
}

fn adapter_failure(directory: &Path, error: &AdapterError) -> Failure {
    Failure::new(
        ErrorCode::ModelFiles,
        text!("cannot export {}", "无法导出 {}", directory.display()),
        chain(error),
    )
    .next(failures::adapter_remedy(
        directory,
        both(
            "give a checkpoint-N directory of a run, or a directory with adapter_model.safetensors",
            "请指定某次运行的 checkpoint-N 目录，或含有 adapter_model.safetensors 的目录",
        ),
    ))
}

/// Copies a small file. In `config.json`, the dtype is set to that of the weights.
pub(crate) fn copy(file: &SmallFile, to: &Path, dtype: Option<DType>) -> Result<(), Failure> {
    let from = &file.path;
    let read = file
        .read()
        .map_err(|error| Failure::io(ErrorCode::ModelFiles, both("read", "读取"), from, &error))?;
    let config = dtype.filter(|_| from.file_name().is_some_and(|name| name == "config.json"));
    let text = config.and_then(|dtype| {
        let mut config: Value = serde_json::from_slice(&read).ok()?;
        let name = match dtype {
            DType::BF16 => "bfloat16",
            DType::F16 => "float16",
            _ => "float32",
        };
        // transformers 5 repeats the dtype in each part.
        for part in ["", "/text_config", "/vision_config"] {
            for key in ["torch_dtype", "dtype"] {
                if let Some(value) = config.pointer_mut(&format!("{part}/{key}")) {
                    *value = name.into();
                }
            }
        }
        serde_json::to_vec_pretty(&config).ok()
    });
    std::fs::write(to, text.unwrap_or(read))
        .map_err(|error| Failure::io(ErrorCode::Disk, both("write", "写入"), to, &error))
}

fn read(
    range: Range<usize>,
    dtype: DType,
    read: impl Fn(Range<usize>, DType, &mut [u8]) -> Result<(), WeightError>,
) -> Result<Vec<u8>, Failure> {
    let mut bytes = vec![0; range.len() * dtype.size_bytes()];
    read(range, dtype, &mut bytes).map_err(|e| failures::weights(&e))?;
    Ok(bytes)
}

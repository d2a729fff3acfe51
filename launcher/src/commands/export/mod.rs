//! `launcher export`: the weights of a checkpoint as a directory for transformers or peft. It works tensor by tensor
//! on the CPU. The directory gets its final name when it is complete.

mod adapter;
pub(crate) mod import;
mod model;
mod quantized;

use crate::cli::{ExportArgs, ExportDtype, ExportFormat};
use crate::commands::new_directory::NewDirectory;
use crate::config::{MergeBase, Quantize, QuantizeFormat};
use crate::error::output::say;
use crate::error::{ErrorCode, Failure, failures, file_name};
use crate::lang::{Both, Text, both, text};
use crate::model::files::{self, SmallFile};
use crate::model::quantize;
use crate::model::stored::MAX_SHARD_BYTES;
use crate::report::checkpoints::best_of;
use crate::units::{bytes, grouped, seconds};
use engine::checkpoint::Checkpoint;
use kernels::{DType, Quantization};
use models::adapter::{Adapter, AdapterError};
use models::{WeightError, WeightSource, places, sat};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
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
    check_alone(args)?;
    let named = &args.checkpoint;
    let args = &ExportArgs {
        checkpoint: best_of(named),
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
    let what = match named == checkpoint {
        true => summary.what.into(),
        false => text!(
            "{} of {}",
            "{}，来自 {}",
            summary.what,
            file_name(checkpoint)
        ),
    };
    let text = text!(
        " export  {} · {} tensors · {} · {} · {}\n",
        " 导出    {} · {} 个张量 · {} · {} · {}\n",
        what,
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
        _ if is_sat && quantize_of(args).is_some() => wrong(
            both(
                "--format sat has plain weights",
                "--format sat 的权重不压缩",
            ),
            both(
                "SAT has no files for quantized weights",
                "SAT 没有存放压缩权重的文件",
            ),
            both("omit --quantize", "请去掉 --quantize"),
        ),
        _ if is_sat && args.merge == Some(false) => wrong(
            both("--format sat merges adapters", "--format sat 会合并适配器"),
            both("SAT has no files for adapters", "SAT 没有存放适配器的文件"),
            both("omit --merge false", "请去掉 --merge false"),
        ),
        _ => Ok(()),
    }
}

/// Fails for flags that mean nothing without another one, and for a tokenizer that does not exist.
fn check_alone(args: &ExportArgs) -> Result<(), Failure> {
    let quantizes = quantize_of(args).is_some();
    let alone = [
        ("--quantize-double", args.quantize_double == Some(true)),
        ("--quantize-modules", args.quantize_modules.is_some()),
    ];
    if let Some((flag, _)) = alone.into_iter().find(|(_, given)| *given && !quantizes) {
        return Err(Failure::usage(
            text!("{flag} without --quantize", "{flag} 缺少 --quantize"),
            both(
                "it describes weights that the export quantizes",
                "它描述的是导出时压缩的权重",
            ),
        )
        .next(text!(
            "add --quantize nf4, or omit {flag}",
            "请加上 --quantize nf4，或去掉 {flag}"
        )));
    }
    match &args.tokenizer {
        Some(tokenizer) => failures::check_directory(
            text!("export {}", "导出 {}", args.checkpoint.display()),
            &places::with_tokenizer(&args.checkpoint, Some(tokenizer)),
        ),
        None => Ok(()),
    }
}

/// Fails for flags that mean nothing for these weights: an adapter that is written alone, or a whole model.
fn check_unused(args: &ExportArgs, writes_adapter: bool) -> Result<(), Failure> {
    let quantizes = args.quantize.is_some() || args.dequantize == Some(true);
    let given = match writes_adapter {
        true => vec![
            ("--model", args.model.is_some()),
            ("--tokenizer", args.tokenizer.is_some()),
            ("--quantize", args.quantize.is_some()),
            ("--dequantize", quantizes && args.quantize.is_none()),
            ("--merge-base", args.merge_base.is_some()),
            ("--max-shard-size", args.max_shard_size.is_some()),
        ],
        false => vec![
            ("--model", args.model.is_some()),
            ("--merge-base", args.merge_base.is_some()),
        ],
    };
    let Some((flag, _)) = given.into_iter().find(|(_, given)| *given) else {
        return Ok(());
    };
    let failure = |cause: Both, next: Text| {
        Failure::usage(
            text!("{flag} would have no effect", "{flag} 不会起作用"),
            cause,
        )
        .next(next)
    };
    Err(match writes_adapter {
        true => failure(
            both(
                "without --merge the export writes the adapter alone",
                "未给出 --merge 时只导出适配器",
            ),
            text!(
                "add --merge, or omit {flag}",
                "请加上 --merge，或去掉 {flag}"
            ),
        ),
        false => failure(
            both(
                "the checkpoint has the whole model, so nothing is merged",
                "检查点中是完整的模型，没有需要合并的内容",
            ),
            text!("omit {flag}", "请去掉 {flag}"),
        ),
    })
}

/// Weights that an export quantizes, and their settings for transformers.
struct QuantizedExport {
    quantizations: BTreeMap<String, Quantization>,
    settings: Value,
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
                check_unused(args, false)?;
                check_quantized(args, &model, false)?;
                quantized::check_shapes(&model, &directory)?;
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
            check_unused(args, true)?;
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
        if !places::main(&base).is_dir() {
            return Err(failures::moved_base(&directory, &base).next(both(
                "give --model DIR, the base model's directory now",
                "请用 --model DIR 给出基座模型现在的目录",
            )));
        }
        let base = places::with_tokenizer(&base, args.tokenizer.as_deref());
        let mut model = WeightSource::open(&base).map_err(|e| failures::weights(&e))?;
        check_quantized(args, &model, true)?;
        quantized::check_shapes(&model, &base)?;
        if args.merge_base != Some(MergeBase::Original) {
            let meta = manifest.map(Checkpoint::meta);
            model.quantize_on_read(meta.map(quantize::recorded).unwrap_or_default());
        }
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
        .next(match lost.iter().all(|name| name.ends_with(".self_attn.prefix")) {
            true => both(
                "published models have no place for prefixes (--ptuning-tokens): `launcher generate --model RUN` reads them",
                "官方模型没有存放前缀（--ptuning-tokens）的位置：`launcher generate --model RUN` 可以读取它们",
            ),
            false => both(
                "give --model the model that the run started from",
                "请把运行开始时所用的模型交给 --model",
            ),
        }))
    }

    fn write(&self, args: &ExportArgs, directory: &Path) -> Result<Summary, Failure> {
        let dtype = args.dtype.map(dtype_of);
        match (&self.model, &self.adapter) {
            (Some(model), adapter) => {
                let is_sat = args.format.unwrap_or_default() == ExportFormat::Sat;
                let chosen = quantize_of(args);
                let quantized =
                    chosen.map(|chosen| quantized::choose(&chosen, model, &self.directory));
                let quantized = quantized.transpose()?;
                let values = model::Values {
                    model,
                    adapter: adapter.as_ref(),
                    quantizes: quantized.as_ref(),
                    dtype,
                };
                let (tensors, bytes) = match is_sat {
                    true => {
                        let hub = sat::config::of_model(&self.directory);
                        let hub = hub.map_err(|e| failures::weights(&e))?;
                        model::write_sat(&values, (&hub, args.mp_size.unwrap_or(1)), directory)?
                    }
                    false => {
                        let settings = quantized.as_ref().map(|quantized| &quantized.settings);
                        for (name, file) in files::small(&self.directory)? {
                            copy(&file, &directory.join(name), dtype, settings)?;
                        }
                        let limit = args.max_shard_size.unwrap_or(MAX_SHARD_BYTES);
                        model::write(&values, limit, directory)?
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

/// The quantization that the flags ask for.
fn quantize_of(args: &ExportArgs) -> Option<Quantize> {
    let format = args
        .quantize
        .filter(|format| *format != QuantizeFormat::None)?;
    Some(Quantize {
        format,
        double: args.quantize_double.unwrap_or(false),
        modules: args.quantize_modules.clone(),
    })
}

/// Refuses flags that do not fit quantized or plain weights.
fn check_quantized(args: &ExportArgs, model: &WeightSource, merges: bool) -> Result<(), Failure> {
    let (is_quantized, quantizes) = (
        !model.quantizations().is_empty(),
        quantize_of(args).is_some(),
    );
    let dequantizes = args.dequantize == Some(true) || args.quantize == Some(QuantizeFormat::None);
    let refused = |title, cause, next| Err(Failure::usage(title, cause).next(next));
    if quantizes && dequantizes {
        return refused(
            both("--quantize and --dequantize", "--quantize 与 --dequantize"),
            both(
                "an export quantizes weights or dequantizes them",
                "导出要么压缩权重，要么解压权重",
            ),
            both("leave one of the flags out", "请去掉其中一个参数"),
        );
    }
    if is_quantized && merges && args.merge_base == Some(MergeBase::Original) {
        return refused(
            both(
                "the base model has only quantized weights",
                "基座模型只有压缩存储的权重",
            ),
            both(
                "--merge-base original needs the weights before they were quantized",
                "--merge-base original 需要压缩之前的权重",
            ),
            both(
                "give --model the directory that was quantized",
                "请把压缩之前的目录交给 --model",
            ),
        );
    }
    if is_quantized && !merges && !quantizes && !dequantizes {
        return refused(
            both(
                "the weights of this directory are quantized",
                "该目录的权重是压缩存储的",
            ),
            both(
                "an export could leave them so or dequantize them",
                "导出时可以保持原样，也可以解压",
            ),
            both(
                "add --dequantize, or --quantize with their format",
                "请加上 --dequantize，或 --quantize 及其格式",
            ),
        );
    }
    Ok(())
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
    failures::adapter(
        text!("cannot export {}", "无法导出 {}", directory.display()),
        error,
        both(
            "give a checkpoint-N directory of a run, or a directory with adapter_model.safetensors",
            "请指定某次运行的 checkpoint-N 目录，或含有 adapter_model.safetensors 的目录",
        ),
    )
}

/// Copies a small file. In `config.json`, the dtype is set to that of the weights, and the settings of quantized weights are
/// set or removed.
pub(crate) fn copy(
    file: &SmallFile,
    to: &Path,
    dtype: Option<DType>,
    quantized: Option<&Value>,
) -> Result<(), Failure> {
    let from = &file.path;
    let read = file
        .read()
        .map_err(|error| Failure::io(ErrorCode::ModelFiles, both("read", "读取"), from, &error))?;
    let is_config = from.file_name().is_some_and(|name| name == "config.json");
    let config = is_config
        .then(|| serde_json::from_slice(&read).ok())
        .flatten();
    let text = config.and_then(|mut config: Value| {
        let before = config.clone();
        if let Some(dtype) = dtype {
            set_dtype(&mut config, dtype);
        }
        files::set_quantization(&mut config, quantized);
        (config != before)
            .then(|| serde_json::to_vec_pretty(&config).ok())
            .flatten()
    });
    std::fs::write(to, text.unwrap_or(read))
        .map_err(|error| Failure::io(ErrorCode::Disk, both("write", "写入"), to, &error))
}

fn set_dtype(config: &mut Value, dtype: DType) {
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

//! A model directory, with an optional adapter, opened for generation.

use crate::config::{PrecisionChoice, exceeds_f16};
use crate::error::failures::unusable;
use crate::error::{Failure, chain, failures, quoted};
use crate::lang::{Text, both, text};
use crate::model::adapter::{check_shapes, open_adapter, stranger};
use crate::model::quantize;
use crate::model::setup::Setup;
use crate::report::checkpoints::{best_of, newest_intact};
use crate::units::seconds as format_seconds;
use engine::checkpoint::Checkpoint;
use kernels::DType;
use models::adapter::Adapter;
use models::generation_config::{self, GenerationConfig};
use models::places;
use models::{
    Family, ModelError, ModelOptions, OpenError, Processor, VisionLanguageModel, WeightError,
    WeightSource, open_model, open_processor,
};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// A model whose files are opened and checked, but whose weights are not read yet.
pub(super) struct OpenModel {
    /// Directory of the model: the base, if an adapter is applied.
    pub(super) dir: PathBuf,
    pub(super) setup: Setup,
    generation: GenerationConfig,
    /// Whether the files are f16, whose range activations of this family exceed.
    widened: bool,
}

impl OpenModel {
    /// Opens the model directory `dir` and the adapter. Without a precision, the number format
    /// is that of the files.
    pub(super) fn open(
        dir: &Path,
        adapter: Option<&Path>,
        precision: Option<PrecisionChoice>,
    ) -> Result<Self, Failure> {
        let named = best_of(dir);
        let (base, own) = match adapter {
            None => with_base(&named)?,
            Some(adapter) => (named, Some(best_of(adapter))),
        };
        let (dir, adapter) = (&*base, own.as_deref());
        for dir in adapter.into_iter().chain([dir]) {
            failures::check_directory(text!("use {}", "使用 {}", dir.display()), dir)?;
        }
        let processor = open_processor(dir).map_err(|e| unusable(dir, &e))?;
        let generation = GenerationConfig::load(dir).map_err(|e| unusable(dir, &e))?;
        let mut weights = WeightSource::open(dir).map_err(|e| no_weights(dir, &e))?;
        if let Some(trained) = adapter.and_then(|dir| Checkpoint::open(dir).ok()) {
            // Adapters belong to the weights that they were trained beside.
            weights.quantize_on_read(quantize::recorded(trained.meta()));
        }
        let adapter = adapter.map(|dir| open_adapter(dir, &weights)).transpose()?;
        let stored = stored_dtype(&weights);
        let family = Family::of(dir).map_err(|e| unusable(dir, &e))?;
        let widened = precision.is_none() && stored == DType::F16 && exceeds_f16(family);
        let dtype = match precision {
            Some(PrecisionChoice::F32) => DType::F32,
            Some(PrecisionChoice::Bf16 | PrecisionChoice::PureBf16) => DType::BF16,
            Some(PrecisionChoice::Fp16) => DType::F16,
            None if widened => DType::BF16,
            None => stored,
        };
        let mut options = ModelOptions::new(dtype);
        options.lora = adapter.as_ref().and_then(Adapter::lora);
        options.ptuning_tokens = adapter.as_ref().map_or(0, Adapter::prefix_tokens);
        let model = open_model(dir, options).map_err(|e| match (&e, &adapter) {
            (OpenError::Model(e @ ModelError::AdapterTarget { .. }), Some(adapter)) => {
                stranger(adapter, &[chain(e)])
            }
            (OpenError::Model(e), _) => failures::model(both("set up the model", "设置模型"), e),
            _ => unusable(dir, &e),
        })?;
        weights
            .check(model.spec())
            .map_err(|e| failures::weights(&e))?;
        if let Some(adapter) = &adapter {
            check_shapes(adapter, &model.spec().params)?;
        }
        let setup = Setup {
            model,
            processor,
            weights: Some(weights),
            adapter,
        };
        Ok(Self {
            dir: base,
            setup,
            generation,
            widened,
        })
    }

    /// Directory of the adapter, if one is applied.
    pub(super) fn adapter_dir(&self) -> Option<&Path> {
        self.setup.adapter.as_ref().map(Adapter::dir)
    }

    pub(super) fn model(&self) -> &dyn VisionLanguageModel {
        &*self.setup.model
    }

    pub(super) fn processor(&self) -> &dyn Processor {
        &*self.setup.processor
    }

    /// Line about settings of the model's answers that are not used, if any.
    pub(super) fn unused_settings(&self) -> Option<Text> {
        let settings = self.generation.unused.iter();
        let settings: Vec<String> = settings
            .map(|(key, value)| format!("{key} {value}"))
            .collect();
        let named = settings.join(", ");
        (!named.is_empty()).then(|| {
            text!(
                "note    {}: {named} not used; flags say how answers are drawn, and without them the most likely token is taken",
                "提示    未使用 {} 的 {named}；采样方式由参数决定，未给出时取最可能的 token",
                generation_config::FILE
            )
        })
    }

    /// Line about the weights, which were read in `seconds`.
    pub(super) fn summary(&self, seconds: f64) -> Text {
        let model = self.model();
        let mut summary = text!(
            "load    {} parameters in {} · {}",
            "加载    {} 个参数，{} · {}",
            crate::units::count(model.spec().elems().0 as u64),
            model.dtype(),
            format_seconds(seconds)
        );
        if self.widened {
            summary += both(
                ", not in the files' f16, whose range its activations exceed",
                "，而不是文件的 f16，其激活会超出 f16 的范围",
            );
        }
        if let Some(adapter) = &self.setup.adapter {
            let adapters = adapter.modules().count();
            let tensors = adapter.names().count() - 2 * adapters;
            let dir = adapter.dir().display();
            summary += text!(
                " · {adapters} adapters and {tensors} trained tensors of {dir}",
                " · {adapters} 个适配器和 {tensors} 个训练过的张量，来自 {dir}"
            );
        }
        summary
    }
}

/// A checkpoint of adapters or parts, after the model that its manifest says it was trained on; any other directory
/// alone.
///
/// # Errors
/// The checkpoint is damaged, or its base model is not there.
fn with_base(dir: &Path) -> Result<(PathBuf, Option<PathBuf>), Failure> {
    let alone = (dir.to_owned(), None);
    if WeightSource::open(dir).is_ok() || !dir.join("MANIFEST.json").is_file() {
        return Ok(alone);
    }
    let saved = Checkpoint::open(dir).map_err(|error| {
        let doing = text!("use {}", "使用 {}", dir.display());
        advise_other(failures::checkpoint(&doing, &error), dir)
    })?;
    let base = saved.meta().get("base_model").and_then(Value::as_str);
    let Some(base) = base.map(PathBuf::from) else {
        return Ok(alone);
    };
    if places::main(&base).is_dir() {
        return Ok((base, Some(dir.to_owned())));
    }
    Err(failures::moved_base(dir, &base).next(text!(
        "--model BASE --adapter {}, where BASE is the base model's directory now",
        "--model BASE --adapter {}，其中 BASE 是基座模型现在的目录",
        quoted(&dir.display().to_string())
    )))
}

/// The next step where a checkpoint is damaged: the newest of its run that is not.
fn advise_other(failure: Failure, dir: &Path) -> Failure {
    let run = dir.parent().unwrap_or(Path::new("."));
    match newest_intact(run, Some(dir)) {
        Some(other) => failure.next(text!(
            "give {}, the newest intact checkpoint of this run",
            "请改用 {}，它是本次运行最近的完好检查点",
            other.display()
        )),
        None => failure,
    }
}

/// Dtype of the stored weights: f32 if all are f32, f16 if none is bf16, else bf16.
fn stored_dtype(weights: &WeightSource) -> DType {
    let stored: Vec<DType> = weights
        .names()
        // A quantized weight has the precision of no float.
        .filter(|name| weights.quantization(name).is_none())
        .filter_map(|name| weights.dtype(name))
        .collect();
    let has = |dtype| stored.contains(&dtype);
    match (has(DType::BF16), has(DType::F16)) {
        (false, true) => DType::F16,
        (false, false) if stored.iter().all(|dtype| *dtype == DType::F32) => DType::F32,
        _ => DType::BF16,
    }
}

fn no_weights(dir: &Path, error: &WeightError) -> Failure {
    let failure = failures::weights(error);
    let partial = [
        "adapter_model.safetensors",
        "adapter_model.bin",
        "trained.safetensors",
    ]
    .into_iter()
    .find(|name| dir.join(name).is_file());
    match partial {
        Some(name) => Failure {
            evidence: vec![text!(
                "it contains {name}, which is only a part of a model",
                "其中有 {name}，它只是模型的一部分"
            )],
            next: vec![text!(
                "use --model BASE --adapter {}, where BASE is the model that the adapter was trained on",
                "请使用 --model BASE --adapter {}，其中 BASE 是训练该适配器所用的模型",
                dir.display()
            )],
            ..failure
        },
        None => failure,
    }
}

/// Returns the value of a required flag. Fails with a usage error if the flag is missing.
pub(super) fn required<T>(value: Option<T>, subcommand: &str, flag: &str) -> Result<T, Failure> {
    value.ok_or_else(|| {
        Failure::usage(
            text!(
                "`launcher {subcommand}` needs {flag}",
                "`launcher {subcommand}` 需要 {flag}"
            ),
            both("it has no default", "它没有默认值"),
        )
        .next(text!(
            "`launcher {subcommand} --help` lists every flag",
            "`launcher {subcommand} --help` 会列出每个参数"
        ))
    })
}

/// Returns `value`. Fails with a usage error that names `flag` if it is zero.
pub(super) fn positive(value: usize, flag: &str) -> Result<usize, Failure> {
    if value > 0 {
        return Ok(value);
    }
    Err(Failure::usage(
        text!("{flag} 0 is out of range", "{flag} 0 超出范围"),
        both("at least 1 is needed", "至少需要 1"),
    )
    .next(both(
        "omit the flag to use its default",
        "请去掉该参数以使用默认值",
    )))
}

/// An absolute path, which means the same wherever the result is read.
pub(super) fn path_text(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

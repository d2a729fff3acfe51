//! A model directory, with an optional adapter, loaded for generation in one process. Every weight is stored once, in
//! the CPU's pool.

use crate::config::PrecisionChoice;
use crate::error::failures::unusable;
use crate::error::{ErrorCode, Failure, chain, failures};
use crate::lang::{Text, both, text};
use crate::memory;
use crate::model::adapter::{check_shapes, open_adapter, stranger};
use crate::report::checkpoints::best_of;
use crate::units::{bytes as format_bytes, seconds as format_seconds};
use engine::checkpoint::Checkpoint;
use engine::{EngineError, Lease, LeaseOwner, ParamAccess, ParamId, ParamSpec, Phase, UnitId};
use kernels::{Backend, CpuBackend, DType, KernelError, Pool, Tag, Tensor, TensorMut};
use models::adapter::Adapter;
use models::places;
use models::{
    ModelError, ModelOptions, OpenError, Processor, VisionLanguageModel, WeightError, WeightSource,
    open_model, open_processor,
};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// A model whose files are opened and checked, but whose weights are not read yet.
#[derive(Debug)]
pub(super) struct OpenModel {
    /// Directory of the model: the base, if an adapter is applied.
    pub(super) dir: PathBuf,
    pub(super) model: Arc<dyn VisionLanguageModel>,
    pub(super) processor: Arc<dyn Processor>,
    weights: WeightSource,
    adapter: Option<Adapter>,
}

impl OpenModel {
    /// Opens the model directory `dir` and the adapter. Without a precision, f32 files are computed in f32 and all
    /// others in bf16.
    pub(super) fn open(
        dir: &Path,
        adapter: Option<&Path>,
        precision: Option<PrecisionChoice>,
    ) -> Result<Self, Failure> {
        let named = best_of(dir);
        let (base, own) = match adapter {
            None => with_base(&named),
            Some(adapter) => (named, Some(best_of(adapter))),
        };
        let (dir, adapter) = (&*base, own.as_deref());
        for dir in adapter.into_iter().chain([dir]) {
            failures::check_directory(text!("use {}", "使用 {}", dir.display()), dir)?;
        }
        let processor = open_processor(dir).map_err(|e| unusable(dir, &e))?;
        let weights = WeightSource::open(dir).map_err(|e| no_weights(dir, &e))?;
        let adapter = adapter.map(|dir| open_adapter(dir, &weights)).transpose()?;
        let dtype = match precision {
            Some(PrecisionChoice::F32) => DType::F32,
            Some(PrecisionChoice::Bf16 | PrecisionChoice::PureBf16) => DType::BF16,
            Some(PrecisionChoice::Fp16) => DType::F16,
            None => stored_dtype(&weights),
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
        Ok(Self {
            dir: base,
            model,
            processor,
            weights,
            adapter,
        })
    }

    /// Directory of the adapter, if one is applied.
    pub(super) fn adapter_dir(&self) -> Option<&Path> {
        self.adapter.as_ref().map(Adapter::dir)
    }

    /// Bytes that all weights take in host memory, in the dtype of the computation.
    pub(super) fn weight_bytes(&self) -> u64 {
        let elems = self.model.spec().elems().0;
        (elems * self.model.dtype().size_bytes()) as u64
    }

    /// Reads the weights. Refuses before reading if they do not fit into memory together with `cache_bytes`.
    pub(super) fn load(self, cache_bytes: u64) -> Result<LoadedModel, Failure> {
        let need = self.weight_bytes() + cache_bytes;
        let free = memory::host().free_bytes;
        if need > free {
            let failure = Failure::new(
                ErrorCode::Plan,
                both(
                    "this model does not fit into memory; no weight was read",
                    "该模型在内存中放不下；没有读取任何权重",
                ),
                text!(
                    "{} of host memory are needed, {} are available",
                    "需要主机内存 {}，可用 {}",
                    format_bytes(need),
                    format_bytes(free)
                ),
            )
            .evidence(text!(
                "weights {} in {}, cache {}",
                "权重 {}（{}），缓存 {}",
                format_bytes(self.weight_bytes()),
                self.model.dtype(),
                format_bytes(cache_bytes)
            ));
            return Err(failure.next(both(
                "use --precision bf16, fewer tokens or samples at once, or more memory",
                "请使用 --precision bf16、减少同时处理的 token 或样本，或使用更大的内存",
            )));
        }
        let started = Instant::now();
        let pool = Pool::new("device", None);
        let backend: Arc<dyn Backend> = Arc::new(CpuBackend::new(pool.clone()));
        let spec = self.model.spec();
        let mut units = vec![Vec::new(); spec.units.len()];
        for (i, param) in spec.params.iter().enumerate() {
            let tensor = self.read(param, &pool)?;
            units[param.unit.index()].push((ParamId(i as u32), tensor));
        }
        let access = LoadedWeights { backend, units };
        let mut summary = text!(
            "load    {} parameters in {} · {}",
            "加载    {} 个参数，{} · {}",
            crate::units::count(spec.elems().0 as u64),
            self.model.dtype(),
            format_seconds(started.elapsed().as_secs_f64())
        );
        if let Some(adapter) = &self.adapter {
            let adapters = adapter.modules().count();
            let tensors = adapter.names().count() - 2 * adapters;
            let dir = adapter.dir().display();
            summary += text!(
                " · {adapters} adapters and {tensors} trained tensors of {dir}",
                " · {adapters} 个适配器和 {tensors} 个训练过的张量，来自 {dir}"
            );
        }
        Ok(LoadedModel {
            model: self.model,
            processor: self.processor,
            access,
            summary,
        })
    }

    fn read(&self, param: &ParamSpec, pool: &Pool) -> Result<Tensor, Failure> {
        let dtype = self.model.dtype();
        let mut out = TensorMut::new(pool, Tag::Parameters, param.shape, dtype)
            .map_err(|e| failures::kernel(both("load weights", "加载权重"), &e))?;
        let (name, elements) = (&param.name, 0..param.shape.elems());
        let bytes = out.as_bytes_mut();
        match &self.adapter {
            Some(adapter) if adapter.has(name) => adapter.read_range(name, elements, dtype, bytes),
            _ => self.weights.read_finite(name, elements, dtype, bytes),
        }
        .map_err(|e| failures::weights(&e))?;
        Ok(out.freeze())
    }
}

/// A checkpoint of adapters or parts, after the model that its manifest says it was trained on; any other directory
/// alone.
fn with_base(dir: &Path) -> (PathBuf, Option<PathBuf>) {
    let has_model = || WeightSource::open(dir).is_ok();
    let base = Checkpoint::open(dir)
        .ok()
        .and_then(|saved| Some(PathBuf::from(saved.meta().get("base_model")?.as_str()?)));
    match base.filter(|base| places::main(base).is_dir() && !has_model()) {
        Some(base) => (base, Some(dir.to_owned())),
        None => (dir.to_owned(), None),
    }
}

/// Dtype to compute with if the user chose none: f32 if all stored weights are f32, otherwise bf16.
fn stored_dtype(weights: &WeightSource) -> DType {
    let wide = weights
        .names()
        .filter_map(|name| weights.dtype(name))
        .all(|dtype| dtype == DType::F32);
    if wide { DType::F32 } else { DType::BF16 }
}

fn no_weights(dir: &Path, error: &WeightError) -> Failure {
    let failure = failures::weights(error);
    let partial = ["adapter_model.safetensors", "trained.safetensors"]
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

/// A model with all weights in memory, ready to generate text, and its processor.
#[derive(Debug)]
pub(super) struct LoadedModel {
    pub(super) model: Arc<dyn VisionLanguageModel>,
    pub(super) processor: Arc<dyn Processor>,
    pub(super) access: LoadedWeights,
    /// Description of what was loaded, in one line.
    pub(super) summary: Text,
}

/// All weights of a model, unsharded in one memory pool. None of them is trainable.
pub(super) struct LoadedWeights {
    backend: Arc<dyn Backend>,
    /// Weights of each unit, ascending by parameter.
    units: Vec<Vec<(ParamId, Tensor)>>,
}

impl std::fmt::Debug for LoadedWeights {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LoadedWeights")
            .field("units", &self.units.len())
            .finish_non_exhaustive()
    }
}

impl ParamAccess for LoadedWeights {
    fn backend(&self) -> &Arc<dyn Backend> {
        &self.backend
    }

    fn lease(&self, unit: UnitId, phase: Phase) -> Result<Lease<'_>, EngineError> {
        Ok(Lease::new(
            self,
            unit,
            phase,
            self.units[unit.index()].clone(),
        ))
    }

    fn deposit(&self, id: ParamId, _: &Tensor) -> Result<(), EngineError> {
        let detail = format!("a gradient of parameter {}, which is frozen", id.0);
        Err(KernelError::Shape {
            op: "deposit",
            detail,
        }
        .into())
    }

    fn is_trainable(&self, _: ParamId) -> bool {
        false
    }

    fn needs_backward(&self, _: UnitId) -> bool {
        false
    }
}

impl LeaseOwner for LoadedWeights {
    fn end_lease(&self, _: UnitId, _: Phase, _: bool) -> Result<(), EngineError> {
        Ok(())
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

//! Reader of a run's trained parameters: adapters in peft's files, and parts trained in full.
//!
//! A checkpoint directory of such a run holds `adapter_model.safetensors` with `adapter_config.json` (tensors
//! called `base_model.model.<module>.lora_A.weight`, `…lora_B.weight`, and `base_model.model.<parameter>` for
//! modules trained in full), or `trained.safetensors` (parameters under their own names), or both.

use crate::lora::{LoraConfig, LoraTargets, scale};
use crate::params::{ADAPTER_PREFIX, is_added};
use crate::weights::{WeightError, WeightSource};
use regex::Regex;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Name of the file with the adapter's settings, as peft writes it.
pub const ADAPTER_CONFIG: &str = "adapter_config.json";
/// File name, without its extension, of the LoRA weights, as peft writes it.
pub const ADAPTER_STEM: &str = "adapter_model";
/// File name, without its extension, of the parameters that were trained in full, not as adapters.
pub const TRAINED_STEM: &str = "trained";

const LORA_A: &str = ".lora_A.weight";
const LORA_B: &str = ".lora_B.weight";

/// Error of [`Adapter::open`]: why a directory of saved LoRA adapters cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AdapterError {
    /// The directory holds neither adapters nor trained tensors.
    #[error("{} contains neither adapter_model.safetensors, adapter_model.bin nor trained.safetensors", dir.display())]
    Nothing {
        /// The directory that was opened.
        dir: PathBuf,
    },
    /// The file of the adapter's settings cannot be read.
    #[error("cannot read {}", path.display())]
    Config {
        /// Path of the settings file.
        path: PathBuf,
        /// Why it cannot be read or parsed.
        source: Box<dyn Error + Send + Sync>,
    },
    /// A setting of peft that changes results and is not implemented.
    #[error("{} asks for {key} = {value}, which this program does not implement", path.display())]
    Unsupported {
        /// Path of the settings file.
        path: PathBuf,
        /// Name of the setting in the file.
        key: String,
        /// Value of the setting in the file.
        value: String,
    },
    /// An adapter lacks a half, or its halves do not fit each other and the rank.
    #[error("the adapter of {module} is incomplete: {reason}")]
    Halves {
        /// Path of the module that the adapter belongs to.
        module: String,
        /// Which half is missing, or which shapes do not fit.
        reason: String,
    },
    /// A file of weights cannot be read.
    #[error(transparent)]
    Weights(#[from] WeightError),
}

/// Settings read from peft's `adapter_config.json`.
#[derive(Clone, PartialEq, Debug, Deserialize)]
pub struct AdapterConfig {
    /// Rank of every adapter without an entry in `rank_pattern`: rows of its A, columns of its B.
    pub r: usize,
    /// LoRA alpha of every adapter without an entry in `alpha_pattern`.
    pub lora_alpha: f64,
    /// Whether outputs are scaled by alpha / √rank instead of alpha / rank; absent or null means no.
    #[serde(default)]
    pub use_rslora: Option<bool>,
    /// Ranks that replace `r` for some modules. Keys are regular expressions for the end of a module's path;
    /// of several that match, the first in sort order applies.
    #[serde(default)]
    pub rank_pattern: BTreeMap<String, usize>,
    /// Values that replace `lora_alpha` for some modules. Keys are regular expressions for the end of a
    /// module's path; of several that match, the first in sort order applies.
    #[serde(default)]
    pub alpha_pattern: BTreeMap<String, f64>,
    /// Dropout probability of the adapters' inputs during training.
    #[serde(default)]
    pub lora_dropout: f64,
    /// Name or path of the base model that the adapter was trained on.
    #[serde(default)]
    pub base_model_name_or_path: Option<String>,
    /// Names of the modules that were trained in full in addition to the adapters.
    #[serde(default)]
    pub modules_to_save: Option<Vec<String>>,
}

impl AdapterConfig {
    /// Reads `adapter_config.json` in the directory `dir`.
    ///
    /// # Errors
    /// [`AdapterError::Config`] if it cannot be read, [`AdapterError::Unsupported`] for a setting of peft that is not
    /// implemented.
    pub fn open(dir: &Path) -> Result<Self, AdapterError> {
        read_config(&dir.join(ADAPTER_CONFIG))
    }

    /// Rank and [`scale`] of the adapter of the module at the path `module`.
    #[must_use]
    pub fn of(&self, module: &str) -> (usize, f64) {
        let (rank, alpha) = self.rank_and_alpha(module);
        (rank, scale(alpha, rank, self.use_rslora()))
    }

    /// Whether the adapters are rank-stabilized (rsLoRA).
    #[must_use]
    pub fn use_rslora(&self) -> bool {
        self.use_rslora.unwrap_or(false)
    }

    fn rank_and_alpha(&self, module: &str) -> (usize, f64) {
        let rank = find(&self.rank_pattern, module).unwrap_or(self.r);
        let alpha = find(&self.alpha_pattern, module).unwrap_or(self.lora_alpha);
        (rank, alpha)
    }
}

/// The value of the pattern that the end of the path `module` matches, as peft looks it up.
fn find<T: Copy>(patterns: &BTreeMap<String, T>, module: &str) -> Option<T> {
    let matches = |pattern: &str| {
        let whole = Regex::new(&format!(r"^(?:.*\.)?(?:{pattern})$"));
        whole.is_ok_and(|whole| whole.is_match(module))
    };
    let found = patterns.iter().find(|(pattern, _)| matches(pattern));
    found.map(|(_, value)| *value)
}

/// Trained parameters that a checkpoint directory holds: low-rank adapters, tensors trained in full, or both.
#[derive(Debug)]
pub struct Adapter {
    dir: PathBuf,
    config: Option<AdapterConfig>,
    files: Vec<WeightSource>,
    /// For each parameter of the model (adapters by their full name): index of its file, and its name in it.
    tensors: BTreeMap<String, (usize, String)>,
    /// Paths of the modules that have an adapter.
    modules: BTreeSet<String>,
}

impl Adapter {
    /// Opens the adapters and trained tensors in the directory `dir`.
    ///
    /// # Errors
    /// [`AdapterError`] if the directory holds neither adapters nor trained tensors, a file is damaged, an
    /// adapter lacks its A or B, or a setting of peft is not supported.
    pub fn open(dir: &Path) -> Result<Self, AdapterError> {
        let mut adapter = Self {
            dir: dir.to_owned(),
            config: None,
            files: Vec::new(),
            tensors: BTreeMap::new(),
            modules: BTreeSet::new(),
        };
        for stem in [ADAPTER_STEM, TRAINED_STEM] {
            match WeightSource::open_stem(dir, stem) {
                Ok(source) => adapter.add(stem, source),
                Err(WeightError::NoWeights { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        if adapter.files.is_empty() {
            return Err(AdapterError::Nothing {
                dir: dir.to_owned(),
            });
        }
        check_settings(dir)?;
        if adapter.files[0]
            .names()
            .any(|n| n.starts_with(ADAPTER_PREFIX))
        {
            adapter.config = Some(read_config(&dir.join(ADAPTER_CONFIG))?);
        }
        adapter.check_halves()?;
        Ok(adapter)
    }

    fn add(&mut self, stem: &str, source: WeightSource) {
        let file = self.files.len();
        for key in source.names() {
            let module = key
                .strip_suffix(LORA_A)
                .or_else(|| key.strip_suffix(LORA_B));
            let name = match module {
                Some(_) => key,
                None if stem == ADAPTER_STEM => key.strip_prefix(ADAPTER_PREFIX).unwrap_or(key),
                None => key,
            };
            let module = module.map(|path| path.strip_prefix(ADAPTER_PREFIX).unwrap_or(path));
            self.modules.extend(module.map(str::to_owned));
            self.tensors.insert(name.to_owned(), (file, key.to_owned()));
        }
        self.files.push(source);
    }

    fn check_halves(&self) -> Result<(), AdapterError> {
        let Some(config) = &self.config else {
            return Ok(());
        };
        for module in &self.modules {
            let broken = |reason: String| {
                Err(AdapterError::Halves {
                    module: module.clone(),
                    reason,
                })
            };
            match self.halves(module).map(|name| self.shape(&name)) {
                [Some(&[rank, _]), Some(&[_, columns])] => {
                    let (r, _) = config.of(module);
                    if (rank, columns) != (r, r) {
                        return broken(format!(
                            "lora_A has {rank} rows and lora_B {columns} columns, {ADAPTER_CONFIG} says r = {r}",
                        ));
                    }
                }
                [a, b] => return broken(format!("lora_A {a:?}, lora_B {b:?}")),
            }
        }
        Ok(())
    }

    /// Tensor names of the LoRA matrices A (`[r, k]`) and B (`[n, r]`), in this order, for the module at the
    /// path `module`. The module need not have an adapter.
    #[must_use]
    pub fn halves(&self, module: &str) -> [String; 2] {
        [LORA_A, LORA_B].map(|half| format!("{ADAPTER_PREFIX}{module}{half}"))
    }

    /// The directory that this adapter was opened from.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The content of `adapter_config.json`; `None` if the directory has no low-rank adapters.
    #[must_use]
    pub fn config(&self) -> Option<&AdapterConfig> {
        self.config.as_ref()
    }

    /// Paths of the modules with an adapter, such as `llm.model.layers.0.self_attn.q_proj`.
    pub fn modules(&self) -> impl Iterator<Item = &str> {
        self.modules.iter().map(String::as_str)
    }

    /// Names of all tensors in the directory: LoRA matrices by their full name in peft's file, parameters
    /// trained in full by their name in the model.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Whether the directory holds a tensor for the parameter `name`.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Extents of the tensor called `name`; `None` if the directory has none of that name.
    #[must_use]
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        let (file, key) = self.tensors.get(name)?;
        self.files[*file].shape(key)
    }

    /// Dtype of the tensor called `name` as it is stored; `None` if it is absent or its dtype is not supported.
    #[must_use]
    pub fn dtype(&self, name: &str) -> Option<kernels::DType> {
        let (file, key) = self.tensors.get(name)?;
        self.files[*file].dtype(key)
    }

    /// Reads the range `elements` (row-major) of the tensor called `name` into `dst`, converted to the dtype
    /// `out`.
    ///
    /// # Errors
    /// As [`WeightSource::read_range`].
    pub fn read_range(
        &self,
        name: &str,
        elements: Range<usize>,
        out: kernels::DType,
        dst: &mut [u8],
    ) -> Result<(), WeightError> {
        match self.tensors.get(name) {
            Some((file, key)) => self.files[*file].read_finite(key, elements, out, dst),
            None => Err(WeightError::MissingTensor {
                name: name.to_owned(),
                dir: self.dir.clone(),
            }),
        }
    }

    /// Settings to build a model with these adapters; `None` if the directory has no low-rank adapters. The
    /// targets are exactly the modules that have an adapter in the files, and dropout is 0.
    #[must_use]
    pub fn lora(&self) -> Option<LoraConfig> {
        let config = self.config.as_ref()?;
        (!self.modules.is_empty()).then(|| LoraConfig {
            lora_rank: config.r,
            lora_alpha: config.lora_alpha as f32,
            lora_dropout: 0.0,
            others: self.others(config),
            targets: LoraTargets::Modules(self.modules.clone()),
            layers: None,
            per_projection: false,
            use_rslora: config.use_rslora(),
            modules_to_save: Vec::new(),
        })
    }

    /// Number of learned keys and values per decoder layer (p-tuning v2), read from the shape of their tensors,
    /// `[2, heads, tokens, head dim]`; 0 if there are none.
    #[must_use]
    pub fn prefix_tokens(&self) -> usize {
        let prefix = self
            .names()
            .find(|name| is_added(name) && !name.starts_with(ADAPTER_PREFIX));
        let shape = prefix.and_then(|name| self.shape(name));
        shape.and_then(|dims| dims.get(2)).copied().unwrap_or(0)
    }

    /// Rank and alpha of modules that differ from the default.
    fn others(&self, config: &AdapterConfig) -> BTreeMap<String, (usize, f32)> {
        let own = |module: &String| {
            let (rank, alpha) = config.rank_and_alpha(module);
            (module.clone(), (rank, alpha as f32))
        };
        let common = (config.r, config.lora_alpha as f32);
        let all = self.modules.iter().map(own);
        all.filter(|(_, other)| *other != common).collect()
    }

    /// Names of the tensors that have no counterpart in the base weights `base`: no parameter of that name
    /// or, for an adapter, no layer that it adapts. Learned keys and values (p-tuning) are always among them.
    pub fn strangers<'a>(&'a self, base: &'a WeightSource) -> impl Iterator<Item = &'a str> {
        self.names().filter(move |name| {
            let module = name
                .strip_prefix(ADAPTER_PREFIX)
                .and_then(|path| path.strip_suffix(LORA_A).or(path.strip_suffix(LORA_B)));
            match module {
                Some(module) => base.shape(&format!("{module}.weight")).is_none(),
                None => base.shape(name).is_none(),
            }
        })
    }

    /// Tensors of these files whose shape or dtype does not fit the weight of `base` that they replace or change, each with
    /// the reason.
    #[must_use]
    pub fn misfits(&self, base: &WeightSource) -> Vec<String> {
        let misfit = |name: &str| {
            let found = self.shape(name)?;
            if self.dtype(name).is_none() {
                return Some(format!(
                    "{name} is in a number format other than f32, bf16 and f16"
                ));
            }
            let expected = match name.strip_prefix(ADAPTER_PREFIX) {
                None => base.shape(name)?.to_vec(),
                Some(path) => {
                    let half = |suffix| Some((path.strip_suffix(suffix)?, suffix));
                    let (module, suffix) = half(LORA_A).or_else(|| half(LORA_B))?;
                    let base = base.shape(&format!("{module}.weight"))?;
                    match (base, found) {
                        (&[_, columns], &[rank, _]) if suffix == LORA_A => vec![rank, columns],
                        (&[rows, _], &[_, rank]) => vec![rows, rank],
                        _ => base.to_vec(),
                    }
                }
            };
            (found != expected)
                .then(|| format!("{name} is {found:?}, the model needs {expected:?}"))
        };
        self.names().filter_map(misfit).collect()
    }
}

/// Starts of adapters that leave the base weights as they are. Others, such as PiSSA, subtract the start from them.
const PLAIN_STARTS: [&str; 3] = ["eva", "gaussian", "orthogonal"];

/// Settings of peft that are read, select layers, steer training, or only describe the adapter: the tensors show their
/// effect. The settings of a kind of start have one only where `init_lora_weights` names the kind.
const WITHOUT_EFFECT: [&str; 28] = [
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "alpha_pattern",
    "lora_alpha",
    "lora_dropout",
    "lora_dtype",
    "lorap_emb_lr",
    "lorap_lr_ratio",
    "megatron_core",
    "modules_to_save",
    "peft_version",
    "qalora_group_size",
    "r",
    "rank_pattern",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
    "tensor_parallel_plan",
    "use_rslora",
];

/// Fails if `adapter_config.json` of the directory `dir`, if any, asks for what is not implemented: another kind of
/// adapter, one that changes the base weights (PiSSA, OLoRA, LoftQ), or another layout (DoRA, `layer_replication`).
///
/// # Errors
/// [`AdapterError::Unsupported`] names the setting; [`AdapterError::Config`] if the file cannot be read.
pub fn check_settings(dir: &Path) -> Result<(), AdapterError> {
    let path = dir.join(ADAPTER_CONFIG);
    match path.exists() {
        false => Ok(()),
        true => read_settings(&path).map(drop),
    }
}

fn read_config(path: &Path) -> Result<AdapterConfig, AdapterError> {
    let settings = Value::Object(read_settings(path)?);
    serde_json::from_value(settings).map_err(|e| config_error(path, e.into()))
}

fn config_error(path: &Path, source: Box<dyn Error + Send + Sync>) -> AdapterError {
    AdapterError::Config {
        path: path.to_owned(),
        source,
    }
}

/// The settings of an `adapter_config.json`, each of which is implemented or has no effect.
fn read_settings(path: &Path) -> Result<Map<String, Value>, AdapterError> {
    let bytes = crate::text::read_regular(path).map_err(|e| config_error(path, e.into()))?;
    let settings: Map<String, Value> =
        serde_json::from_slice(&bytes).map_err(|e| config_error(path, e.into()))?;
    match settings
        .iter()
        .find(|(key, value)| !implemented(key, value))
    {
        None => Ok(settings),
        Some((key, value)) => Err(AdapterError::Unsupported {
            path: path.to_owned(),
            key: key.clone(),
            value: value.to_string(),
        }),
    }
}

/// Whether the adapter is read right with this setting.
fn implemented(key: &str, value: &Value) -> bool {
    let text = value.as_str();
    match key {
        "peft_type" => text == Some("LORA"),
        "bias" => text == Some("none"),
        "init_lora_weights" => {
            let plain = text.is_some_and(|start| PLAIN_STARTS.contains(&start));
            plain || value.is_boolean() || value.is_null()
        }
        _ if WITHOUT_EFFECT.contains(&key) => true,
        _ => match value {
            Value::Null | Value::Bool(false) => true,
            Value::Array(items) => items.is_empty(),
            Value::Object(fields) => fields.is_empty(),
            _ => false,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::checkpoint::{ShardedTensorWriter, TensorSpec};
    use kernels::DType;

    const MODULE: &str = "llm.model.layers.0.self_attn.q_proj";

    fn write(dir: &Path, stem: &str, tensors: &[(&str, &[usize])]) {
        let specs: Vec<TensorSpec> = tensors
            .iter()
            .map(|(name, shape)| TensorSpec {
                name: (*name).to_owned(),
                dtype: DType::F32,
                shape: shape.to_vec(),
            })
            .collect();
        let mut file = ShardedTensorWriter::create(dir, stem, &specs, &[], u64::MAX).unwrap();
        for spec in &specs {
            let values: Vec<f32> = (0..spec.shape.iter().product::<usize>())
                .map(|i| i as f32)
                .collect();
            file.write(&spec.name, bytemuck::cast_slice(&values))
                .unwrap();
        }
        file.finish().unwrap();
    }

    fn adapter(config: &str, rank_of_b: usize) -> Result<Adapter, AdapterError> {
        let dir = tempfile::tempdir().unwrap();
        let name = |half: &str| format!("{ADAPTER_PREFIX}{MODULE}{half}");
        write(
            dir.path(),
            ADAPTER_STEM,
            &[
                (&name(LORA_A), &[2, 4]),
                (&name(LORA_B), &[3, rank_of_b]),
                ("base_model.model.resampler.query", &[5]),
            ],
        );
        write(dir.path(), TRAINED_STEM, &[("llm.lm_head.weight", &[6])]);
        std::fs::write(dir.path().join(ADAPTER_CONFIG), config).unwrap();
        Adapter::open(dir.path())
    }

    #[test]
    fn adapter_tensors_are_found_under_the_names_of_the_model() {
        let adapter = adapter(
            r#"{"peft_type": "LORA", "r": 2, "lora_alpha": 8, "bias": "none"}"#,
            2,
        )
        .unwrap();
        assert_eq!(adapter.modules().collect::<Vec<_>>(), [MODULE]);
        assert_eq!(adapter.shape("resampler.query"), Some(&[5][..]));
        assert_eq!(adapter.shape("llm.lm_head.weight"), Some(&[6][..]));
        let mut row = [0f32; 2];
        let bytes = bytemuck::cast_slice_mut(&mut row);
        let [_, b] = adapter.halves(MODULE);
        adapter.read_range(&b, 2..4, DType::F32, bytes).unwrap();
        assert_eq!(row, [2.0, 3.0]);
        let lora = adapter.lora().unwrap();
        assert_eq!(lora.of(MODULE), (2, 4.0));
        assert!(matches!(lora.targets, LoraTargets::Modules(modules) if modules.contains(MODULE)));
    }

    #[test]
    fn settings_as_peft_writes_them_are_read() {
        let config = r#"{
            "alora_invocation_tokens": null, "alpha_pattern": {}, "arrow_config": null, "auto_mapping": null,
            "base_model_name_or_path": "x", "bias": "none", "corda_config": null, "ensure_weight_tying": false,
            "eva_config": null, "exclude_modules": null, "fan_in_fan_out": false, "inference_mode": true,
            "init_lora_weights": true, "layer_replication": null, "layers_pattern": null,
            "layers_to_transform": null, "loftq_config": {}, "lora_alpha": 8, "lora_bias": false,
            "lora_dropout": 0.05, "megatron_config": null, "megatron_core": "megatron.core",
            "modules_to_save": ["resampler"], "peft_type": "LORA", "peft_version": "0.18.0",
            "qalora_group_size": 16, "r": 2, "rank_pattern": {}, "revision": null, "target_modules": ["q_proj"],
            "target_parameters": null, "task_type": "CAUSAL_LM", "trainable_token_indices": null,
            "use_dora": false, "use_qalora": false, "use_rslora": false}"#;
        assert!(adapter(config, 2).is_ok());
        for start in ["gaussian", "eva", "orthogonal"] {
            let start = config
                .replace("weights\": true", &format!("weights\": \"{start}\""))
                .replace("eva_config\": null", r#"eva_config": {"rho": 2.0}"#);
            assert!(adapter(&start, 2).is_ok(), "{start}");
        }
    }

    #[test]
    fn rank_stabilized_adapters_are_scaled_by_the_root_of_their_own_rank() {
        let config = r#"{"r": 9, "lora_alpha": 8, "use_rslora": true,
            "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 6}}"#;
        let adapter = adapter(config, 2).unwrap();
        let scale = 6.0 / 2f64.sqrt();
        assert_eq!(adapter.config().unwrap().of(MODULE), (2, scale));
        assert_eq!(adapter.config().unwrap().of("x"), (9, 8.0 / 3.0));
        assert_eq!(adapter.lora().unwrap().of(MODULE), (2, scale as f32));
    }

    #[test]
    fn tensors_are_compared_with_the_weights_that_they_change() {
        let adapter = adapter(r#"{"r": 2, "lora_alpha": 8}"#, 2).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let weight = format!("{MODULE}.weight");
        let base = |module: &[usize], query: &[usize]| {
            let tensors: [(&str, &[usize]); 3] = [
                (&weight, module),
                ("resampler.query", query),
                ("llm.lm_head.weight", &[6]),
            ];
            write(dir.path(), "model", &tensors);
            adapter.misfits(&WeightSource::open(dir.path()).unwrap())
        };
        assert!(base(&[3, 4], &[5]).is_empty());
        let reshaped = base(&[3, 4], &[1, 5]);
        assert!(reshaped[0].contains("resampler.query is [5], the model needs [1, 5]"));
        assert_eq!(base(&[3, 5], &[5]).len(), 1, "A has 4 columns");
        assert_eq!(base(&[2, 4], &[5]).len(), 1, "B has 3 rows");
        assert_eq!(base(&[12], &[5]).len(), 2, "no matrix");
    }

    #[test]
    fn adapter_settings_that_would_change_the_result_are_refused() {
        for (config, rank, part) in [
            (
                r#"{"r": 2, "lora_alpha": 8, "use_dora": true}"#,
                2,
                "use_dora",
            ),
            (r#"{"r": 2, "lora_alpha": 8, "bias": "all"}"#, 2, "bias"),
            (r#"{"r": 4, "lora_alpha": 8}"#, 2, "r = 4"),
            (r#"{"r": 2, "lora_alpha": 8}"#, 3, "3 columns"),
            (r#"{"lora_alpha": 8}"#, 2, "cannot read"),
            (
                r#"{"r": 2, "lora_alpha": 8, "peft_type": "LOHA"}"#,
                2,
                "LOHA",
            ),
            (
                r#"{"r": 2, "lora_alpha": 8, "peft_type": null}"#,
                2,
                "peft_type",
            ),
            (
                r#"{"r": 2, "lora_alpha": 8, "use_rslora": "yes"}"#,
                2,
                "cannot read",
            ),
            (
                r#"{"r": 2, "lora_alpha": 8, "init_lora_weights": "corda"}"#,
                2,
                "corda",
            ),
            (
                r#"{"r": 2, "lora_alpha": 8, "layer_replication": [[0, 2]]}"#,
                2,
                "layer_replication",
            ),
            (
                r#"{"r": 2, "lora_alpha": 8, "init_lora_weights": "pissa_niter_4"}"#,
                2,
                "pissa",
            ),
            (
                r#"{"r": 2, "lora_alpha": 8, "init_lora_weights": "olora"}"#,
                2,
                "olora",
            ),
            (
                r#"{"r": 2, "lora_alpha": 8, "init_lora_weights": "loftq"}"#,
                2,
                "loftq",
            ),
            (
                r#"{"r": 2, "lora_alpha": 8, "lora_bias": true}"#,
                2,
                "lora_bias",
            ),
            (
                r#"{"r": 2, "lora_alpha": 8, "a_key_of_next_year": "x"}"#,
                2,
                "a_key_of_next_year",
            ),
        ] {
            let error = adapter(config, rank).unwrap_err();
            assert!(error.to_string().contains(part), "{config}: {error}");
        }
        let empty = tempfile::tempdir().unwrap();
        assert!(matches!(
            Adapter::open(empty.path()),
            Err(AdapterError::Nothing { .. })
        ));
    }
}

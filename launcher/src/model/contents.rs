//! Contents of a checkpoint: which file has which weights, and how many bytes they take.

use super::split;
use crate::config::RunConfig;
use crate::error::Failure;
use crate::model::files;
use engine::checkpoint::TensorSpec;
use engine::{ModelSpec, Plan};
use kernels::DType;
use models::adapter::{ADAPTER_STEM, TRAINED_STEM};
use models::params::ADAPTER_PREFIX;
use models::{VisionLanguageModel, WeightSource};
use optim::Optimizer;
use std::collections::{BTreeMap, BTreeSet};

/// Stem of the weight files of whole models.
pub(crate) const MODEL_STEM: &str = "model";

/// Tensors that a checkpoint stores: the name, shape and dtype of each, without values.
#[derive(Debug)]
pub(crate) struct Contents {
    /// Tensors of each file, by the file's stem.
    pub(crate) files: BTreeMap<&'static str, Vec<TensorSpec>>,
    /// For every parameter of the model: file, name in the file, dtype. `None` for parameters that are not saved.
    pub(crate) targets: Vec<Option<(&'static str, String, DType)>>,
    /// Tensors that are copied from the base model's directory.
    pub(crate) others: Vec<TensorSpec>,
}

impl Contents {
    /// Contents for a run that trains `model` with base weights from `weights`: the whole model if all parameters are
    /// trainable, otherwise the trained parameters.
    pub(crate) fn of(model: &dyn VisionLanguageModel, weights: Option<&WeightSource>) -> Self {
        let mut files: BTreeMap<&'static str, Vec<TensorSpec>> = BTreeMap::new();
        let mut targets = Vec::with_capacity(model.spec().params.len());
        let whole = model.spec().params.iter().all(|param| param.trainable);
        for param in &model.spec().params {
            let target = destination(model, whole, &param.name, param.trainable);
            targets.push(target.map(|(file, name)| {
                // The dtype of the base model's file; f32 for parameters that the run added.
                let stored = weights.and_then(|w| w.dtype(&param.name));
                let dtype = stored.unwrap_or(DType::F32);
                files.entry(file).or_default().push(TensorSpec {
                    dtype,
                    shape: split::shape(model, &name, param.shape.dims()),
                    name: name.clone(),
                });
                (file, name, dtype)
            }));
        }
        let mut others = Vec::new();
        if let (Some(file), Some(weights)) = (files.get_mut(MODEL_STEM), weights) {
            others = other_tensors(weights, model.spec());
            file.extend(others.iter().cloned());
        }
        Self {
            files,
            targets,
            others,
        }
    }

    /// Total bytes of the tensors in `files`.
    pub(crate) fn bytes(&self) -> u64 {
        let tensors = self.files.values().flatten();
        tensors.filter_map(|tensor| tensor.bytes().ok()).sum()
    }
}

/// Size of one checkpoint in bytes, computed before it is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CheckpointBytes {
    /// Bytes of master weights and optimizer state, summed over ranks.
    pub(crate) state: u64,
    /// Weights in the usual files, with the small files of the model.
    pub(crate) weights: u64,
}

impl CheckpointBytes {
    /// Size for a run that trains `model` with base weights from `weights`.
    ///
    /// # Errors
    /// The model directory cannot be listed.
    pub(crate) fn of(
        config: &RunConfig,
        model: &dyn VisionLanguageModel,
        plan: &Plan,
        weights: Option<&WeightSource>,
    ) -> Result<Self, Failure> {
        let slots = super::optimizer::rule(config).slots(plan.config().precision);
        let dir = config.model_dir();
        let small = if models::places::main(&dir).is_dir() {
            files::small(&dir)?
        } else {
            Vec::new()
        };
        Ok(Self {
            state: plan.checkpoint_bytes(slots),
            weights: Contents::of(model, weights).bytes()
                + small.iter().map(|(_, file)| file.bytes()).sum::<u64>(),
        })
    }

    /// Bytes of the whole checkpoint: training state and weights.
    pub(crate) const fn total(self) -> u64 {
        self.state + self.weights
    }
}

/// File of a parameter, and its name there; `None` if it is not saved. `whole` says that all parameters are
/// trainable.
fn destination(
    model: &dyn VisionLanguageModel,
    whole: bool,
    name: &str,
    trainable: bool,
) -> Option<(&'static str, String)> {
    let adapters = model.options().lora.as_ref();
    match adapters {
        None if whole => Some((MODEL_STEM, name.to_owned())),
        _ if !trainable => None,
        None => Some((TRAINED_STEM, name.to_owned())),
        Some(_) if name.starts_with(ADAPTER_PREFIX) => Some((ADAPTER_STEM, name.to_owned())),
        Some(lora) if lora.saves(name) => Some((ADAPTER_STEM, format!("{ADAPTER_PREFIX}{name}"))),
        Some(_) => Some((TRAINED_STEM, name.to_owned())),
    }
}

/// Tensors of the base model's files that this model does not have, such as audio parts of MiniCPM-o.
fn other_tensors(weights: &WeightSource, spec: &ModelSpec) -> Vec<TensorSpec> {
    let known: BTreeSet<&str> = spec.params.iter().map(|p| p.name.as_str()).collect();
    let others = weights.names().filter(|name| !known.contains(name));
    others
        .filter_map(|name| {
            Some(TensorSpec {
                name: name.to_owned(),
                dtype: weights.dtype(name)?,
                shape: weights.shape(name)?.to_vec(),
            })
        })
        .collect()
}

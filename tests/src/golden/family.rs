//! What is particular to the packs of one family of models.

use super::cog::CogPacks;
use super::compare::{CaseRun, Comparison};
use super::glm::{Glm4vPacks, Glm41vPacks};
use super::minicpm::MiniCpmPacks;
use super::pack::{Case, Expected, Pack};
use anyhow::{Context, Result};
use models::data::EncodedSample;
use models::{Family, ModelOptions, Processor};
use optim::GroupOptions;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;

/// Comparisons under one title.
pub type Section = (String, Vec<Comparison>);

/// Reads a family's packs and compares with what they store.
pub trait PackFamily: Sync {
    /// The samples of a case as training takes them.
    ///
    /// # Errors
    /// When a file is missing or a sample cannot be encoded.
    fn samples(
        &self,
        pack: &Pack,
        case: &Case,
        processor: &dyn Processor,
    ) -> Result<Vec<EncodedSample>>;

    /// Compares everything that a case stores about inputs: ids, labels, positions, masks, pixels, prompts.
    ///
    /// # Errors
    /// When a file is missing or a stored tensor has the wrong kind.
    fn compare_inputs(
        &self,
        pack: &Pack,
        case: &Case,
        processor: &dyn Processor,
        samples: &[EncodedSample],
    ) -> Result<Vec<Comparison>>;

    /// Compares everything else that a case stores with a run of the model. A stored name that is not known, or that
    /// the run lacks, is a failure.
    ///
    /// # Errors
    /// When a stored tensor has the wrong kind.
    fn compare_run(
        &self,
        case: &Case,
        samples: &[EncodedSample],
        run: &CaseRun,
    ) -> Result<Vec<Comparison>>;

    /// The trajectories of a pack.
    ///
    /// # Errors
    /// When a file is missing or broken.
    fn trajectories(&self, pack: &Pack, processor: &dyn Processor) -> Result<Vec<Trajectory>>;

    /// What a pack stores beside cases and trajectories: tables, tokenizer cases.
    ///
    /// # Errors
    /// When a file is missing or broken.
    fn tables(&self, pack: &Pack, processor: &dyn Processor) -> Result<Vec<Section>>;
}

/// Reader of the packs of `family`.
#[must_use]
pub fn packs_of(family: Family) -> &'static dyn PackFamily {
    match family {
        Family::MiniCpm => &MiniCpmPacks,
        Family::CogVlm | Family::CogVlm2 | Family::CogAgent => &CogPacks,
        Family::Glm4v => &Glm4vPacks,
        Family::Glm41v => &Glm41vPacks,
    }
}

/// The optimizer of a trajectory.
#[derive(Clone, PartialEq, Debug, Deserialize)]
pub struct AdamW {
    /// Learning rate.
    pub lr: f64,
    /// Decay rates of the moments.
    pub betas: [f64; 2],
    /// Added to the root.
    pub eps: f64,
    /// Decoupled decay, on every trainable tensor where [`Trajectory::groups`] says nothing else.
    #[serde(default)]
    pub weight_decay: f64,
}

/// Losses along optimizer steps, and what is needed to take them again.
pub struct Trajectory {
    /// Name in the pack.
    pub name: String,
    /// Changes the options of a full fine-tune.
    pub options: ModelOptions,
    /// Start values that the base does not have, or has otherwise, by parameter: adapters.
    pub start: BTreeMap<String, Vec<f32>>,
    /// The optimizer.
    pub optimizer: AdamW,
    /// Global norm that gradients are clipped to.
    pub max_grad_norm: Option<f32>,
    /// Decay and learning-rate factor of parameters by name, where they differ from `optimizer`.
    pub groups: BTreeMap<String, GroupOptions>,
    /// Samples of each micro-batch of a step, on every rank.
    pub micro_batches: Vec<Vec<EncodedSample>>,
    /// The loss before each step, then the loss after the last.
    pub losses: Vec<f64>,
    /// Bound of the losses' absolute differences.
    pub tolerance: f64,
    /// Gradient norm of each step before clipping, where stored.
    pub grad_norms: Vec<f64>,
    /// Trainable elements, where stored.
    pub trainable: Option<usize>,
    /// Trained values after the last step, by parameter, where stored.
    pub after: BTreeMap<String, Vec<f32>>,
    /// Lengths (L2) of trained parameters after the last step, where only these are stored.
    pub norms_after: BTreeMap<String, f32>,
}

impl std::fmt::Debug for Trajectory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Trajectory")
            .field("name", &self.name)
            .field("losses", &self.losses)
            .finish_non_exhaustive()
    }
}

impl Trajectory {
    /// A trajectory of a full fine-tune with nothing else stored.
    #[must_use]
    pub fn new(
        name: &str,
        optimizer: AdamW,
        micro_batches: Vec<Vec<EncodedSample>>,
        losses: Vec<f64>,
        tolerance: f64,
    ) -> Self {
        Self {
            name: name.to_owned(),
            options: ModelOptions::new(kernels::DType::F32),
            start: BTreeMap::new(),
            optimizer,
            max_grad_norm: None,
            groups: BTreeMap::new(),
            micro_batches,
            losses,
            tolerance,
            grad_norms: Vec::new(),
            trainable: None,
            after: BTreeMap::new(),
            norms_after: BTreeMap::new(),
        }
    }
}

/// The float tensors of the safetensors file `path`, by name.
///
/// # Errors
/// When the file is missing, broken or holds integers.
pub fn floats(path: &Path) -> Result<BTreeMap<String, Vec<f32>>> {
    let tensors = Expected::read(path)?.0.into_iter();
    tensors
        .map(|(name, stored)| {
            let values = stored.floats().with_context(|| name.clone())?.to_vec();
            Ok((name, values))
        })
        .collect()
}

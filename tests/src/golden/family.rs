//! The part of a pack that depends on the model family.

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

/// Reader of a family's packs.
pub trait PackFamily: Sync {
    /// The samples of a case, encoded as for training.
    ///
    /// # Errors
    /// When a file is missing or a sample cannot be encoded.
    fn samples(
        &self,
        pack: &Pack,
        case: &Case,
        processor: &dyn Processor,
    ) -> Result<Vec<EncodedSample>>;

    /// Compares all stored inputs of a case: ids, labels, positions, masks, pixels, prompts.
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

    /// Compares all other stored values of a case with a run of the model. An unknown stored name, or a value that the
    /// run lacks, is a failure.
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

    /// Compares the stored tables of a pack: lookup tables and tokenizer cases.
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
    /// Decay rates of the moments (Adam's betas).
    pub betas: [f64; 2],
    /// Added to the square root in the denominator.
    pub eps: f64,
    /// Decoupled weight decay of every trainable tensor that [`Trajectory::groups`] does not name.
    #[serde(default)]
    pub weight_decay: f64,
}

/// Losses along optimizer steps, with everything needed to repeat them.
pub struct Trajectory {
    /// Name in the pack.
    pub name: String,
    /// Edits the options of a full fine-tune for this run.
    pub options: ModelOptions,
    /// Start values by parameter, where they differ from the base weights or the base has none: adapters.
    pub start: BTreeMap<String, Vec<f32>>,
    /// The optimizer.
    pub optimizer: AdamW,
    /// Global norm that gradients are clipped to.
    pub max_grad_norm: Option<f32>,
    /// Weight decay and learning-rate factor by parameter, where they differ from `optimizer`.
    pub groups: BTreeMap<String, GroupOptions>,
    /// Samples of each micro-batch of a step, the same on every rank.
    pub micro_batches: Vec<Vec<EncodedSample>>,
    /// The loss before each step, then the loss after the last one.
    pub losses: Vec<f64>,
    /// Largest allowed absolute difference of a loss.
    pub tolerance: f64,
    /// Factor on the tolerance of gradient norms: how much more than usual rounding moves this run's losses.
    pub growth: f64,
    /// Gradient norm of each step before clipping, if stored.
    pub grad_norms: Vec<f64>,
    /// Number of trainable elements, if stored.
    pub trainable: Option<usize>,
    /// Trained values after the last step by parameter, if stored.
    pub after: BTreeMap<String, Vec<f32>>,
    /// L2 norms of trained parameters after the last step, if only norms are stored.
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
    /// A trajectory of a full fine-tune without further stored values.
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
            growth: 1.0,
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

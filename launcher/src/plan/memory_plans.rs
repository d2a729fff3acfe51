//! Places for the tensors of a micro-batch, found before it runs: its passes on the meta device tell which
//! blocks come and how long they live, and with both known they are packed.
//!
//! The plan does so for the largest micro-batch, and every rank for each micro-batch of another shape. So what a
//! micro-batch needs follows from its shape alone, whatever ran before it.

use super::dry_run::micro_batch;
use crate::config::RunConfig;
use crate::model::optimizer::rule;
use engine::{DryRun, EngineError, Plan};
use kernels::{Backend, MemoryPlan};
use models::data::EncodedSample;
use models::{ModelError, VisionLanguageModel};
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

/// Scripts that are kept; each has some hundred kilobytes.
const KEPT: usize = 32;
/// One part in so many of a script is planned beside it: micro-batches that are no larger than the planned one may pack
/// less well. Of 360 random ones at published sizes the worst needed 2.6 % more.
const MARGIN_SHARE: u64 = 32;

/// What is planned beside a script for micro-batches that pack less well.
pub(crate) fn margin(memory_plan: &MemoryPlan) -> u64 {
    memory_plan.bytes() / MARGIN_SHARE
}

/// Finds places of micro-batches.
pub(crate) struct MemoryPlans {
    dry_run: DryRun,
    known: HashMap<u64, Arc<MemoryPlan>>,
}

impl std::fmt::Debug for MemoryPlans {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Places")
            .field("known", &self.known.len())
            .finish_non_exhaustive()
    }
}

impl MemoryPlans {
    /// For a rank of `plan` on the GPU that `counting` stands for, which nobody else uses.
    ///
    /// # Errors
    /// Never today; counting has no limit.
    pub(crate) fn new(
        config: &RunConfig,
        plan: &Arc<Plan>,
        counting: Arc<dyn Backend>,
    ) -> Result<Self, EngineError> {
        Ok(Self {
            dry_run: DryRun::on_discrete_device(plan.clone(), Arc::new(rule(config)), counting)?,
            known: HashMap::new(),
        })
    }

    /// Where the blocks of a micro-batch lie, from its beginning to its end.
    ///
    /// # Errors
    /// A sample does not fit the model.
    pub(crate) fn of(
        &mut self,
        config: &RunConfig,
        model: &dyn VisionLanguageModel,
        samples: &[EncodedSample],
    ) -> Result<Arc<MemoryPlan>, ModelError> {
        let shape = shape(samples);
        if let Some(memory_plan) = self.known.get(&shape) {
            return Ok(memory_plan.clone());
        }
        let pool = self.dry_run.device_pool();
        micro_batch(
            config,
            model,
            &self.dry_run,
            samples,
            &mut || pool.record(),
            &mut || (),
        )?;
        let memory_plan = Arc::new(pool.recorded());
        if self.known.len() == KEPT {
            self.known.clear();
        }
        self.known.insert(shape, memory_plan.clone());
        Ok(memory_plan)
    }
}

/// Everything of samples that sizes follow from.
fn shape(samples: &[EncodedSample]) -> u64 {
    let mut hasher = DefaultHasher::new();
    samples.len().hash(&mut hasher);
    for sample in samples {
        sample.input_ids.len().hash(&mut hasher);
        sample.image_bounds.hash(&mut hasher);
        // Positions that enter the loss are rows of their own.
        for label in &sample.labels {
            (*label < 0).hash(&mut hasher);
        }
        for slice in &sample.slices {
            (slice.rows, slice.cols).hash(&mut hasher);
        }
    }
    hasher.finish()
}

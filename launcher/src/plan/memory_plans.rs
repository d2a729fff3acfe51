//! Static memory plans for micro-batches.
//!
//! A dry run of the micro-batch on the meta device records the size and lifetime of each block. Then the blocks are
//! packed into fixed offsets. Planning does so for the largest micro-batch, and every rank for each new shape. So the
//! memory of a micro-batch depends on its shape only, not on earlier micro-batches.

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

/// Maximum number of cached memory plans; each takes some hundred kilobytes.
const KEPT: usize = 32;
/// Divisor of a plan's bytes for the margin. Micro-batches no larger than the planned one may pack less densely. Of
/// 360 random ones at published sizes the worst needed 2.6 % more.
pub(super) const MARGIN_SHARE: u64 = 32;

/// Bytes reserved in addition to a memory plan, for micro-batches that pack less densely.
pub(crate) fn margin(memory_plan: &MemoryPlan) -> u64 {
    memory_plan.bytes() / MARGIN_SHARE
}

/// Cache of memory plans by the shape of the micro-batch.
pub(crate) struct MemoryPlans {
    dry_run: DryRun,
    /// Meta device of the dry run.
    counting: Arc<dyn Backend>,
    /// Device that will run the micro-batches, if any.
    device: Option<Arc<dyn Backend>>,
    known: HashMap<u64, Arc<MemoryPlan>>,
}

impl std::fmt::Debug for MemoryPlans {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemoryPlans")
            .field("known", &self.known.len())
            .finish_non_exhaustive()
    }
}

impl MemoryPlans {
    /// Cache for a rank of `plan`. `counting` is a meta device for the rank's GPU, used by this cache alone.
    ///
    /// # Errors
    /// None in practice: the dry run has no memory limit.
    pub(crate) fn new(
        config: &RunConfig,
        plan: &Arc<Plan>,
        counting: Arc<dyn Backend>,
    ) -> Result<Self, EngineError> {
        let rule = Arc::new(rule(config));
        Ok(Self {
            dry_run: DryRun::on_discrete_device(plan.clone(), rule, counting.clone())?,
            counting,
            device: None,
            known: HashMap::new(),
        })
    }

    /// As before, and `device` compiles the kernels of each planned micro-batch together, before the first launch.
    pub(crate) fn for_device(mut self, device: Arc<dyn Backend>) -> Self {
        self.device = Some(device);
        self
    }

    /// Memory plan of the micro-batch `samples`, from its first to its last tensor.
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
        if let Some(device) = &self.device {
            device.compile_ahead(&self.counting.launched());
        }
        if self.known.len() == KEPT {
            self.known.clear();
        }
        self.known.insert(shape, memory_plan.clone());
        Ok(memory_plan)
    }
}

/// Hash of every property of the samples that tensor sizes depend on.
fn shape(samples: &[EncodedSample]) -> u64 {
    let mut hasher = DefaultHasher::new();
    samples.len().hash(&mut hasher);
    for sample in samples {
        sample.input_ids.len().hash(&mut hasher);
        sample.image_bounds.hash(&mut hasher);
        // Supervised positions are gathered into rows of their own, so their number matters.
        for label in &sample.labels {
            (*label < 0).hash(&mut hasher);
        }
        for slice in &sample.slices {
            (slice.rows, slice.cols).hash(&mut hasher);
        }
    }
    hasher.finish()
}

//! Static memory plans for micro-batches, and for all micro-batches of an update on a pipeline stage.
//!
//! A dry run of the micro-batch on the meta device records the size and lifetime of each block. Then the blocks are
//! packed into fixed offsets. Planning does so for the largest micro-batch, and every rank for each new shape. So the
//! memory of a micro-batch depends on its shape only, not on earlier micro-batches.

use super::dry_run::micro_batch;
use super::stages::{self, StageRun};
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
const MARGIN_SHARE: u64 = 32;

/// Bytes reserved in addition to a memory plan, for micro-batches that pack less densely.
pub(crate) fn margin(memory_plan: &MemoryPlan) -> u64 {
    memory_plan.bytes() / MARGIN_SHARE
}

/// Cache of memory plans by the shape of the micro-batch.
pub(crate) struct MemoryPlans {
    dry_run: DryRun,
    /// Dry runs of the earlier pipeline stages, which find the values that this one receives.
    earlier: Vec<DryRun>,
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
        let dry_run = |plan| DryRun::on_discrete_device(plan, rule.clone(), counting.clone());
        let own = plan.config().slice.as_ref().map_or(0, |slice| slice.stage);
        let earlier = (0..own).map(|stage| dry_run(Arc::new(plan.at_stage(stage)?)));
        Ok(Self {
            dry_run: dry_run(plan.clone())?,
            earlier: earlier.collect::<Result<_, _>>()?,
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
        self.cached(shape(&[samples]), |memory_plans| {
            let pool = memory_plans.dry_run.device_pool();
            micro_batch(
                config,
                model,
                &memory_plans.dry_run,
                samples,
                &mut || pool.record(),
                &mut || (),
            )
        })
    }

    /// Memory plan of all micro-batches of an update on a pipeline stage, in 1F1B order.
    ///
    /// # Errors
    /// A sample does not fit the model.
    pub(crate) fn of_stage(
        &mut self,
        config: &RunConfig,
        model: &dyn VisionLanguageModel,
        micro_batches: &[&[EncodedSample]],
    ) -> Result<Arc<MemoryPlan>, ModelError> {
        self.cached(shape(micro_batches), |memory_plans| {
            let mut transfers = Vec::new();
            for (stage, dry_run) in memory_plans.earlier.iter().enumerate() {
                let run = StageRun::new(stage, dry_run.plan(), transfers);
                transfers = stages::forwards(config, model, (dry_run, run), micro_batches)?;
            }
            let dry_run = &memory_plans.dry_run;
            let run = StageRun::new(memory_plans.earlier.len(), dry_run.plan(), transfers);
            dry_run.device_pool().record();
            stages::step(config, model, (dry_run, &run), micro_batches, &mut |_| ())?;
            run.wait();
            Ok(())
        })
    }

    /// The known memory plan of this `shape`, or what `record` records.
    fn cached(
        &mut self,
        shape: u64,
        record: impl FnOnce(&Self) -> Result<(), ModelError>,
    ) -> Result<Arc<MemoryPlan>, ModelError> {
        if let Some(memory_plan) = self.known.get(&shape) {
            return Ok(memory_plan.clone());
        }
        record(self)?;
        let memory_plan = Arc::new(self.dry_run.device_pool().recorded());
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

/// Hash of every property of the micro-batches that tensor sizes depend on.
fn shape(micro_batches: &[&[EncodedSample]]) -> u64 {
    let mut hasher = DefaultHasher::new();
    for samples in micro_batches {
        samples.len().hash(&mut hasher);
    }
    for sample in micro_batches.iter().copied().flatten() {
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

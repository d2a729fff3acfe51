//! Whether the run fits, decided before a weight is read.

use super::failures;
use super::setup::keeps;
use super::trainer::dropout;
use crate::config::RunConfig;
use crate::exit::{ErrorCode, Failure};
use crate::memory;
use crate::ui::{PlanEvent, PlanPart};
use crate::units::bytes as format_bytes;
use engine::{
    EngineError, Lease, LeaseOwner, ModelSpec, ParamAccess, ParamId, Phase, Plan, UnitId,
};
use kernels::{Backend, DType, NullBackend, Pool, PoolStats, Tag, Tensor};
use models::autograd::Tape;
use models::minicpm::sample::EncodedSample;
use models::{ModelError, SampleInput, VisionLanguageModel};
use std::sync::Arc;

/// What a rank process occupies before any tensor: code, allocator, thread stacks, tokenizer.
const PROCESS_BYTES: u64 = 48 << 20;

/// Serves weights without values and drops gradients: one pass over it measures activations.
struct NullParams<'a> {
    backend: Arc<dyn Backend>,
    spec: &'a ModelSpec,
    dtype: DType,
}

impl ParamAccess for NullParams<'_> {
    fn backend(&self) -> &Arc<dyn Backend> {
        &self.backend
    }
    fn lease(&self, unit: UnitId, phase: Phase) -> Result<Lease<'_>, EngineError> {
        let members = self
            .spec
            .params
            .iter()
            .enumerate()
            .filter(|(_, p)| p.unit == unit);
        let params = members
            .map(|(i, p)| {
                let pool = self.backend.pool();
                Ok((
                    ParamId(i as u32),
                    Tensor::null(pool, Tag::Gathered, p.shape, self.dtype)?,
                ))
            })
            .collect::<Result<_, EngineError>>()?;
        Ok(Lease::new(self, unit, phase, params))
    }
    fn deposit(&self, _: ParamId, _: &Tensor) -> Result<(), EngineError> {
        Ok(())
    }
    fn is_trainable(&self, id: ParamId) -> bool {
        self.spec.params[id.index()].trainable
    }
    fn needs_backward(&self, unit: UnitId) -> bool {
        self.spec
            .params
            .iter()
            .any(|p| p.trainable && p.unit <= unit)
    }
}

impl LeaseOwner for NullParams<'_> {
    fn end_lease(&self, _: UnitId, _: Phase, _: bool) -> Result<(), EngineError> {
        Ok(())
    }
}

/// Peak bytes of activations and workspace in one training pass over `samples`.
pub(super) fn activation_bytes(
    config: &RunConfig,
    model: &dyn VisionLanguageModel,
    samples: &[EncodedSample],
) -> Result<u64, Failure> {
    let samples: Vec<SampleInput<'_>> = samples.iter().map(SampleInput::from).collect();
    let measure = || -> Result<PoolStats, ModelError> {
        let pool = Pool::new("null", None);
        let backend: Arc<dyn Backend> = Arc::new(NullBackend::new(pool.clone()));
        let access = NullParams {
            backend,
            spec: model.spec(),
            dtype: model.dtype(),
        };
        let batch = model.collate(&samples, &*access.backend)?;
        let keep = |unit| keeps(config, model, unit);
        let mut tape = Tape::training(&access).with_stored(&keep);
        if let Some(state) = dropout(config, &vec![0; samples.len()], &samples, &*access.backend)? {
            tape = tape.with_dropout(state);
        }
        let loss = model.forward(&tape, &batch)?;
        tape.backward(&loss, 1.0)?;
        Ok(pool.stats())
    };
    let stats = measure().map_err(|e| failures::model("measure activations", &e))?;
    Ok(stats.tag(Tag::Activations).peak + stats.tag(Tag::Workspace).peak)
}

/// Bytes of a communicator's window for collectives outside a pass: updated weights of stages 1 and
/// 2 and reductions of stages 0 and 1 take one buffer of the largest unit at a time.
pub(super) fn full_gather_bytes(plan: &Plan) -> u64 {
    let units = plan
        .units()
        .iter()
        .map(|u| u.trainable.padded_elems.max(u.frozen.padded_elems));
    units.max().unwrap_or(0) as u64 * 4
}

/// Bytes the run needs on this machine, for the plan line and the decision.
pub(super) struct Fit {
    pub(super) event: PlanEvent,
    pub(super) need: u64,
    free: u64,
    device_need: u64,
}

pub(super) fn fit(config: &RunConfig, plan: &Plan, activation_bytes: u64) -> Fit {
    let report = plan.memory();
    let (params, trainable) = plan.spec().elems();
    let part = |name: &str, device_bytes: u64, host_bytes: u64| PlanPart {
        name: name.to_owned(),
        device_bytes,
        host_bytes,
    };
    let device_need = report.device_bytes() + activation_bytes;
    // On a CPU the "device" is host memory too.
    let rank_need = device_need + report.host_bytes() + PROCESS_BYTES;
    let host = memory::host();
    let free = config
        .host_memory_limit
        .map_or(host.free_bytes, |limit| limit.min(host.free_bytes));
    let need = rank_need * config.nproc as u64;
    let event = PlanEvent {
        model: config.name(),
        params: params as u64,
        trainable: trainable as u64,
        ranks: config.nproc,
        device: "cpu".into(),
        stage: config.zero,
        precision: plan.config().precision.name().into(),
        offload: config.offload.to_string(),
        per_rank: vec![
            part("params", report.parameters.device, report.parameters.host),
            part("grads", report.gradients.device, report.gradients.host),
            part("optimizer", report.optimizer.device, report.optimizer.host),
            part("gathered", report.gathered + report.communication, 0),
            part("activations", activation_bytes, 0),
        ],
        host_total_bytes: host.total_bytes,
        host_free_bytes: free,
        host_need_bytes: need,
    };
    Fit {
        event,
        need,
        free,
        device_need,
    }
}

impl Fit {
    pub(super) fn fits(&self, config: &RunConfig) -> bool {
        self.need <= self.free
            && config
                .device_memory_limit
                .is_none_or(|l| self.device_need <= l)
    }

    /// Refuses a run that does not fit, before anything big is allocated.
    pub(super) fn check(&self, config: &RunConfig) -> Result<(), Failure> {
        if let Some(limit) = config.device_memory_limit
            && self.device_need > limit
        {
            return Err(self.refusal(
                format!(
                    "each rank needs {} of device memory, the limit is {}",
                    format_bytes(self.device_need),
                    format_bytes(limit)
                ),
                config,
            ));
        }
        if self.need > self.free {
            return Err(self.refusal(
                format!(
                    "the ranks need {} of host memory together, {} are available",
                    format_bytes(self.need),
                    format_bytes(self.free)
                ),
                config,
            ));
        }
        Ok(())
    }

    fn refusal(&self, cause: String, config: &RunConfig) -> Failure {
        let parts: Vec<String> = self
            .event
            .per_rank
            .iter()
            .map(|p| format!("{} {}", p.name, format_bytes(p.device_bytes + p.host_bytes)))
            .collect();
        let mut failure = Failure::new(
            ErrorCode::Plan,
            "this run does not fit; no weight was read",
            cause,
        )
        .evidence(format!(
            "per rank: {}; {} ranks",
            parts.join(" + "),
            config.nproc
        ));
        if config.zero < 3 {
            failure = failure.next("--zero 3");
        }
        if config.offload.is_none() {
            failure = failure.next("--offload cpu");
        }
        if config.batch.micro_batch > 1 {
            failure = failure.next("a smaller --per-device-train-batch-size");
        }
        failure.next("--precision pure-bf16, --tune-llm false, --use-lora true, or more memory")
    }
}

//! Whether the run fits, decided before a weight is read.

use super::check::encode_options;
use super::failures;
use super::setup::keeps;
use super::trainer::dropout;
use crate::config::RunConfig;
use crate::data::{self, SampleSet};
use crate::exit::{ErrorCode, Failure};
use crate::generate::answers::Question;
use crate::memory;
use crate::ui::{Event, PlanEvent, PlanPart};
use crate::units::bytes as format_bytes;
use engine::{
    EngineError, Lease, LeaseOwner, ModelSpec, ParamAccess, ParamId, Phase, Plan, UnitId,
};
use kernels::{Backend, DType, NullBackend, Pool, Tag, Tensor};
use models::Processor;
use models::autograd::Tape;
use models::data::EncodedSample;
use models::generate::{Prompt, cache_bytes};
use models::{ModelError, SampleInput, VisionLanguageModel};
use std::sync::Arc;

/// What a rank process occupies before any tensor: code, allocator, thread stacks, tokenizer.
const PROCESS_BYTES: u64 = 64 << 20;

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
    measure(model, |access| {
        let batch = model.collate(&samples, &**access.backend())?;
        let keep = |unit| keeps(config, model, unit);
        let mut tape = Tape::training(access).with_stored(&keep);
        let keys = vec![0; samples.len()];
        if let Some(state) = dropout(config, &keys, &samples, &**access.backend())? {
            tape = tape.with_dropout(state);
        }
        let loss = model.forward(&tape, &batch)?;
        tape.backward(&loss, 1.0)
    })
}

/// The same of an evaluation: of the loss of the longest held-out sample, and of answers to as many of the longest
/// questions as a batch holds, their cache included.
pub(super) fn evaluation_bytes(
    config: &RunConfig,
    model: &dyn VisionLanguageModel,
    processor: &dyn Processor,
    held_out: &SampleSet,
) -> Result<u64, Failure> {
    let options = encode_options(config);
    let order = held_out.by_size();
    let longest = data::encode_in_order(
        &held_out.samples,
        &held_out.images,
        processor,
        &options,
        &order,
        1,
    )?;
    let samples: Vec<SampleInput<'_>> = longest.iter().map(SampleInput::from).collect();
    let loss = measure(model, |access| {
        let batch = model.collate(&samples, &**access.backend())?;
        model.forward(&Tape::inference(access), &batch).map(drop)
    })?;
    let questions = order.iter().take(config.batch.eval_batch).map(|i| {
        let sample = &held_out.samples[*i];
        Question::new(processor, sample, &held_out.images, *i, &options)
    });
    let questions: Vec<Question> = questions.collect::<Result<_, _>>()?;
    let prompts: Vec<Prompt<'_>> = questions.iter().map(Question::prompt).collect();
    let inputs: Vec<SampleInput<'_>> = prompts.iter().map(|prompt| prompt.input).collect();
    let first_pass = measure(model, |access| {
        let batch = model.collate(&inputs, &**access.backend())?;
        let logits = model.next_token_logits(&Tape::inference(access), &batch);
        logits.map(drop)
    })?;
    Ok(loss.max(first_pass + cache_bytes(model.cache_shape(), &prompts)))
}

/// Halves the batch of the evaluation until it needs no more than `training` bytes; returns what it needs then.
pub(super) fn fit_evaluation(
    config: &mut RunConfig,
    model: &dyn VisionLanguageModel,
    processor: &dyn Processor,
    held_out: &SampleSet,
    training: u64,
    show: &mut dyn FnMut(Event),
) -> Result<u64, Failure> {
    let asked = config.batch.eval_batch;
    loop {
        let need = evaluation_bytes(config, model, processor, held_out)?;
        if need > training && config.batch.eval_batch > 1 {
            config.batch.eval_batch /= 2;
            continue;
        }
        if config.batch.eval_batch < asked {
            show(Event::Info {
                label: "eval".into(),
                text: format!(
                    "answers in batches of {}, not {asked}: more would need more memory than training",
                    config.batch.eval_batch
                ),
            });
        }
        return Ok(need);
    }
}

/// Peak bytes of activations and workspace of `pass` on a device that computes nothing.
fn measure(
    model: &dyn VisionLanguageModel,
    pass: impl FnOnce(&dyn ParamAccess) -> Result<(), ModelError>,
) -> Result<u64, Failure> {
    let pool = Pool::new("null", None);
    let access = NullParams {
        backend: Arc::new(NullBackend::new(pool.clone())),
        spec: model.spec(),
        dtype: model.dtype(),
    };
    pass(&access).map_err(|e| failures::model("measure activations", &e))?;
    let stats = pool.stats();
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

    /// Bytes of host memory that all ranks need together.
    pub(super) const fn host_need(&self) -> u64 {
        self.need
    }

    /// Bytes of device memory that each rank needs.
    pub(super) const fn device_need(&self) -> u64 {
        self.device_need
    }

    /// Whether it is the device memory that does not suffice.
    pub(super) fn exceeds_device(&self, config: &RunConfig) -> bool {
        let limit = config.device_memory_limit;
        limit.is_some_and(|limit| self.device_need > limit)
    }

    /// The needs in words, beside what there is.
    pub(super) fn needs(&self, config: &RunConfig) -> String {
        let device = config
            .device_memory_limit
            .map_or_else(String::new, |limit| {
                format!(
                    "device {} of {} per rank, ",
                    format_bytes(self.device_need),
                    format_bytes(limit)
                )
            });
        format!(
            "{device}host {} of {}",
            format_bytes(self.need),
            format_bytes(self.free)
        )
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
        if config.batch.model_max_length > 512 {
            failure = failure.next("a smaller --model-max-length, where samples are long");
        }
        failure.next("fewer trained parts (--train, --tune-llm false), or more memory")
    }
}

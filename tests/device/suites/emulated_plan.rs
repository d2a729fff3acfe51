//! What a plan foresees of a GPU's memory, and what a run takes of it: the counting device beside the emulated one.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use device_tests::emulator::Order;
use device_tests::executor::{MULTIPROCESSORS, emulated_backend};
use engine::comm::threads;
use engine::{
    Offload, OptimizerConfig, ParamAccess, PassKind, Plan, Precision, Rehearsal, Stage, Tier,
    Tiers, Zero, ZeroConfig,
};
use kernels::cuda::CudaBackend;
use kernels::{Backend, DType, Pool, PoolStats};
use models::autograd::Tape;
use models::data::EncodedSample;
use models::generate::{GenerateOptions, Prompt, Sampling, generate, rehearse};
use models::{
    ModelError, ModelOptions, SampleInput, VisionLanguageModel, WeightSource, open_model,
};
use optim::{GroupOptions, Optimizer};

const ARENA_BYTES: u64 = 256 << 20;
const TOKENS: usize = 16;
/// A prefill, and two passes of one token.
const ANSWER_TOKENS: usize = 3;

/// What both have: the run, and its rehearsal.
trait Passes: ParamAccess {
    fn begin(&self, kind: PassKind);
    fn end(&self) -> Result<(), engine::EngineError>;
}

impl Passes for Zero {
    fn begin(&self, kind: PassKind) {
        self.begin_pass(kind);
    }
    fn end(&self) -> Result<(), engine::EngineError> {
        self.end_pass()
    }
}

impl Passes for Rehearsal {
    fn begin(&self, kind: PassKind) {
        self.begin_pass(kind);
    }
    fn end(&self) -> Result<(), engine::EngineError> {
        self.end_pass()
    }
}

/// A pass forward and backward over a sample, and one that only gives its loss.
fn passes(
    engine: &dyn Passes,
    model: &dyn VisionLanguageModel,
    sample: &EncodedSample,
) -> Result<()> {
    let backend = engine.backend().clone();
    let inputs = [SampleInput::from(sample)];
    // Twice: the second finds what the first left.
    for _ in 0..2 {
        engine.begin(PassKind::Train);
        let batch = model.collate(&inputs, &*backend)?;
        let tape = Tape::training(as_access(engine));
        let loss = model.forward(&tape, &batch)?;
        tape.backward(&loss, 1.0)?;
        drop((loss, batch));
        engine.end()?;
    }
    engine.begin(PassKind::Infer);
    let batch = model.collate(&inputs, &*backend)?;
    drop(model.forward(&Tape::inference(as_access(engine)), &batch)?);
    drop(batch);
    Ok(engine.end()?)
}

fn as_access(engine: &dyn Passes) -> &dyn ParamAccess {
    engine
}

fn agree(family: &str, precision: Precision, activation: Tier) -> Result<()> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../golden")
        .join(family);
    let model = open_model(&dir, ModelOptions::new(precision.weight_dtype()))?;
    let config = ZeroConfig {
        stage: Stage::try_from(3).map_err(anyhow::Error::msg)?,
        precision,
        offload: Offload {
            activation,
            ..Offload::states(Tier::Host)
        },
        ..ZeroConfig::default()
    };
    let plan = Arc::new(Plan::new(model.spec().clone(), config, 1)?);
    let rule = optim::AdamW::default();
    let sample = sample(&dir)?;
    let prompt = Prompt {
        input: SampleInput::from(&sample),
        index: 0,
        max_new_tokens: ANSWER_TOKENS,
    };

    let counting = CudaBackend::counting(MULTIPROCESSORS);
    let rehearsal = Rehearsal::apart(
        plan.clone(),
        rule.slots(precision),
        Arc::new(counting.clone()),
    )?;
    passes(&rehearsal, &*model, &sample)?;
    let trained = counting.pool().stats();
    let begin = || rehearsal.begin_pass(PassKind::Infer);
    let end = || Ok(rehearsal.end_pass()?);
    rehearse(&*model, &rehearsal, &[prompt], &begin, &end)?;
    let planned = [trained, counting.pool().stats()];

    let device = emulated_backend(ARENA_BYTES, Order::Ascending)?;
    let zero = loaded(&dir, &*model, plan, &device)?;
    passes(&zero, &*model, &sample)?;
    let trained = device.pool().stats();
    let options = GenerateOptions {
        sampling: Sampling::GREEDY,
        stop_ids: Vec::new(),
    };
    let mut is_open = false;
    let mut next = |left: bool| -> Result<bool, ModelError> {
        if std::mem::replace(&mut is_open, left) {
            zero.end_pass()?;
        }
        if left {
            zero.begin_pass(PassKind::Infer);
        }
        Ok(left)
    };
    let answers = generate(&*model, &zero, &[prompt], &options, &mut next)?;
    assert_eq!(answers[0].len(), ANSWER_TOKENS);
    let measured = [trained, device.pool().stats()];

    for (planned, measured) in planned.iter().zip(&measured) {
        same(planned, measured);
    }
    // Weights, activations, gradients and scratch memory have all been there.
    let used = planned[1].by_tag.iter().filter(|tag| tag.peak > 0);
    assert!(used.count() >= 4, "{:?}", planned[1]);
    Ok(())
}

/// Every counter, the places included: a tensor that one of the two takes and the other does not moves what comes behind.
fn same(planned: &PoolStats, measured: &PoolStats) {
    assert_eq!(
        planned.touched, measured.touched,
        "{planned:?} {measured:?}"
    );
    assert_eq!(planned, measured);
}

fn loaded(
    dir: &Path,
    model: &dyn VisionLanguageModel,
    plan: Arc<Plan>,
    device: &CudaBackend,
) -> Result<Zero> {
    let comm = threads::world(1, 1 << 26)?.remove(0);
    let host = Pool::new("host", None);
    let same = GroupOptions {
        weight_decay: 0.01,
        lr_scale: 1.0,
    };
    let optimizer = OptimizerConfig {
        rule: Arc::new(optim::AdamW::default()),
        groups: vec![same; model.spec().params.len()],
    };
    let backend: Arc<dyn Backend> = Arc::new(device.clone());
    let tiers = Tiers::new(host.clone(), host);
    let mut zero = Zero::new(plan, comm, backend, tiers, optimizer)?;
    let weights = WeightSource::open(dir)?;
    zero.load(|id, elements, out| {
        let name = &model.spec().params[id.index()].name;
        weights.read_range(name, elements, DType::F32, bytemuck::cast_slice_mut(out))
    })?;
    Ok(zero)
}

/// As long as the family's picture needs, and little more.
fn sample(dir: &Path) -> Result<EncodedSample> {
    let of = |tokens| models::largest_sample(dir, tokens, 1).context("a sample");
    let end = of(4096)?.image_bounds.iter().map(|(_, end)| *end).max();
    of((end.unwrap_or(0) + TOKENS).min(100))
}

#[test]
fn minicpm_in_f32() -> Result<()> {
    agree("minicpm-v-2_6", Precision::F32, Tier::Device)
}

#[test]
fn minicpm_in_bf16_with_activations_on_the_host() -> Result<()> {
    agree("minicpm-v-2_6", Precision::Bf16, Tier::Host)
}

#[test]
fn glm_4v_in_f32_with_activations_on_the_host() -> Result<()> {
    agree("glm-4v-9b", Precision::F32, Tier::Host)
}

#[test]
fn glm_4v_in_bf16() -> Result<()> {
    agree("glm-4v-9b", Precision::Bf16, Tier::Device)
}

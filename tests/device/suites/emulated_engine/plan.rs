//! Planned GPU memory compared with that of a run: the meta device beside the emulated one.

use std::num::NonZeroUsize;
use std::sync::Arc;

use anyhow::Result;
use device_tests::emulator::Order;
use device_tests::executor::{EmulatedGpu, Library, emulated_backend_with};
use engine::{DryRun, ParamAccess, PassKind, Precision, Tier, Zero};
use kernels::STRETCH_ROWS;
use kernels::cuda::CudaBackend;
use kernels::cuda::backend::Executor as _;
use kernels::cuda::device_kind::AttentionBackward;
use kernels::{Backend, PoolStats};
use models::autograd::Tape;
use models::data::EncodedSample;
use models::generate::{GenerateOptions, Prompt, Sampling, dry_run_answers, generate};
use models::{ModelError, SampleInput, VisionLanguageModel, open_model};
use optim::AdamW;

use crate::setup::{self, ARENA_BYTES, Weights, pack};

const TOKENS: usize = 16;
const MOST_TOKENS: usize = 100;
/// A prefill and two passes of one token.
const ANSWER_TOKENS: usize = 3;

/// Passes over a sample: forward and backward twice, then one that only computes its loss.
fn passes(
    engine: &Zero,
    model: &dyn VisionLanguageModel,
    sample: &EncodedSample,
    tile: Option<NonZeroUsize>,
) -> Result<()> {
    let backend = engine.backend().clone();
    let inputs = [SampleInput::from(sample)];
    // Twice: the second pass sees the memory of the first.
    for _ in 0..2 {
        engine.begin_pass(PassKind::Train);
        let batch = model.collate(&inputs, &*backend)?;
        let tape = Tape::training(engine).with_mlp_tiles(tile);
        let loss = model.forward(&tape, &batch)?;
        tape.backward(&loss, 1.0)?;
        drop((loss, batch));
        engine.end_pass()?;
    }
    engine.begin_pass(PassKind::Infer);
    let batch = model.collate(&inputs, &*backend)?;
    drop(model.forward(&Tape::inference(engine).with_mlp_tiles(tile), &batch)?);
    drop(batch);
    Ok(engine.end_pass()?)
}

/// Settings other than precision and tiers.
#[derive(Clone, Copy)]
struct Also {
    library: Library,
    /// Kernels of attention's backward.
    backward: AttentionBackward,
    tokens: usize,
    adapters: bool,
    /// Whether the weights beside adapters are quantized.
    quantized: bool,
    /// Whether layer inputs are recomputed.
    again: bool,
    /// Rows of a stretch and of a tile of the feed-forward layers.
    stretch: usize,
    tile: Option<NonZeroUsize>,
}

const PLAIN: Also = Also {
    library: Library::Absent,
    backward: AttentionBackward::Split,
    tokens: TOKENS,
    adapters: false,
    quantized: false,
    again: false,
    stretch: STRETCH_ROWS,
    tile: None,
};

fn agree(family: &str, precision: Precision, activation: Tier, weights: Weights) -> Result<()> {
    agree_with(family, precision, activation, weights, PLAIN)
}

fn agree_with(
    family: &str,
    precision: Precision,
    activation: Tier,
    weights: Weights,
    also: Also,
) -> Result<()> {
    let Also {
        library,
        backward,
        tokens,
        adapters,
        quantized,
        again,
        stretch,
        tile,
    } = also;
    let dir = pack(family);
    let options = match quantized {
        true => setup::quantized_options(precision),
        false => setup::options(precision, adapters),
    };
    let model = open_model(&dir, options)?;
    let plan = setup::plan(&*model, precision, activation, weights, again)?;
    let sample = setup::sample(&dir, tokens, MOST_TOKENS.max(tokens))?;
    let text = setup::text_sample(&dir, tokens)?;
    let prompt = Prompt {
        input: SampleInput::from(&sample),
        index: 0,
        max_new_tokens: ANSWER_TOKENS,
    };

    let gpu = EmulatedGpu::new(Order::Ascending).with_library(library);
    let gpu = gpu.with_attention_backward(backward);
    let counting = CudaBackend::counting(gpu.kind()).with_stretch(stretch);
    let dry_run = DryRun::on_discrete_device(
        plan.clone(),
        Arc::new(AdamW::default()),
        Arc::new(counting.clone()),
    )?;
    passes(&dry_run, &*model, &sample, tile)?;
    passes(&dry_run, &*model, &text, tile)?;
    let trained = counting.pool().stats();
    let begin = || dry_run.begin_pass(PassKind::Infer);
    let end = || Ok(dry_run.end_pass()?);
    dry_run_answers(&*model, &*dry_run, &[prompt], tile, &begin, &end)?;
    let planned = [trained, counting.pool().stats()];

    let device = CudaBackend::new(Arc::new(gpu), ARENA_BYTES)?.with_stretch(stretch);
    let zero = setup::loaded(&dir, &*model, plan, Arc::new(device.clone()))?;
    passes(&zero, &*model, &sample, tile)?;
    passes(&zero, &*model, &text, tile)?;
    let trained = device.pool().stats();
    let options = GenerateOptions {
        sampling: Sampling::GREEDY,
        stop_ids: Vec::new(),
        mlp_tiles: tile,
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
    // Weights, activations, gradients and scratch memory were all in use.
    let used = planned[1].by_tag.iter().filter(|tag| tag.peak > 0);
    assert!(used.count() >= 4, "{:?}", planned[1]);
    Ok(())
}

/// A training pass that calls `begun` before its first tensor.
fn train(
    engine: &Zero,
    model: &dyn VisionLanguageModel,
    sample: &EncodedSample,
    begun: &dyn Fn(),
) -> Result<()> {
    let inputs = [SampleInput::from(sample)];
    engine.begin_pass(PassKind::Train);
    begun();
    let batch = model.collate(&inputs, &**engine.backend())?;
    let tape = Tape::training(engine);
    let loss = model.forward(&tape, &batch)?;
    tape.backward(&loss, 1.0)?;
    drop((loss, batch));
    Ok(engine.end_pass()?)
}

/// The tensors of a run have the offsets of the memory plan for the same batch, whatever ran before. No tensor is
/// outside the plan, and every counter equals the planned one.
fn quantized(family: &str, activation: Tier, weights: Weights, library: Library) -> Result<()> {
    let dir = pack(family);
    let precision = Precision::Bf16;
    let model = open_model(&dir, setup::options(precision, true))?;
    let plan = setup::plan(&*model, precision, activation, weights, false)?;
    let samples = [
        setup::sample(&dir, TOKENS, MOST_TOKENS)?,
        setup::text_sample(&dir, TOKENS)?,
    ];
    let counting = || {
        let device = CudaBackend::counting(library.kind());
        DryRun::on_discrete_device(plan.clone(), Arc::new(AdamW::default()), Arc::new(device))
    };
    let (seen, dry_run) = (counting()?, counting()?);
    let device = emulated_backend_with(ARENA_BYTES, Order::Ascending, library)?;
    let zero = setup::loaded(&dir, &*model, plan.clone(), Arc::new(device.clone()))?;
    let mut longest = 0;
    for sample in [&samples[0], &samples[1], &samples[0]] {
        let pool = seen.device_pool();
        train(&seen, &*model, sample, &|| pool.record())?;
        let script = Arc::new(pool.recorded());
        longest = longest.max(script.bytes());
        for engine in [&*dry_run, &zero] {
            let pool = engine.backend().pool();
            train(engine, &*model, sample, &|| {
                pool.follow(Some(script.clone()));
            })?;
            pool.follow(None);
        }
    }
    let planned = dry_run.device_pool().stats();
    same(&planned, &device.pool().stats());
    assert_eq!(planned.strays, 0);
    // Resident bytes plus the largest memory plan, with no hole between them.
    assert_eq!(planned.touched, planned.in_use + longest);
    Ok(())
}

#[test]
fn tensors_have_the_offsets_of_the_memory_plan() -> Result<()> {
    let (device, host) = (Tier::Device, Tier::Host);
    quantized(
        "minicpm-v-2_6",
        device,
        Weights::Prefetched,
        Library::Absent,
    )?;
    quantized("glm-4v-9b", host, Weights::Kept, Library::Multiplies)?;
    quantized("cogvlm-chat-hf", device, Weights::Leased, Library::Absent)
}

/// Compares every counter and offset. A tensor allocated in only one of the two would shift the later ones.
fn same(planned: &PoolStats, measured: &PoolStats) {
    assert_eq!(
        planned.touched, measured.touched,
        "{planned:?} {measured:?}"
    );
    assert_eq!(planned, measured);
}

/// Quantized weights rest so, and one unit at a time is dequantized.
#[test]
fn packed_weights_take_the_planned_memory() -> Result<()> {
    let also = Also {
        quantized: true,
        ..PLAIN
    };
    for weights in [Weights::Prefetched, Weights::Kept] {
        let (precision, tier) = (Precision::Bf16, Tier::Device);
        agree_with("glm-4.1v-9b-thinking", precision, tier, weights, also)?;
    }
    Ok(())
}

#[test]
fn minicpm_in_f32_takes_the_planned_memory() -> Result<()> {
    agree(
        "minicpm-v-2_6",
        Precision::F32,
        Tier::Device,
        Weights::Leased,
    )
}

#[test]
fn minicpm_in_bf16_with_activations_on_the_host_takes_the_planned_memory() -> Result<()> {
    agree("minicpm-v-2_6", Precision::Bf16, Tier::Host, Weights::Kept)
}

#[test]
fn glm_4v_in_f32_with_activations_on_the_host_takes_the_planned_memory() -> Result<()> {
    agree("glm-4v-9b", Precision::F32, Tier::Host, Weights::Kept)
}

/// Scratch memory of library products is planned, whether the library computes them or refuses.
#[test]
fn glm_4v_with_library_products_takes_the_planned_memory() -> Result<()> {
    for library in [Library::Multiplies, Library::Refuses] {
        agree_with(
            "glm-4v-9b",
            Precision::Bf16,
            Tier::Device,
            Weights::Leased,
            Also { library, ..PLAIN },
        )?;
    }
    Ok(())
}

/// The sums of stretches, of which each but the first is added to those before, with tiles and without.
#[test]
fn feed_forward_layers_in_stretches_take_the_planned_memory() -> Result<()> {
    for (family, adapters, library) in [
        ("minicpm-v-2_6", false, Library::Absent),
        ("glm-4v-9b", false, Library::Multiplies),
        ("glm-4v-9b", true, Library::Adapts),
        ("cogvlm-chat-hf", true, Library::Absent),
    ] {
        for tile in [None, NonZeroUsize::new(1)] {
            let also = Also {
                adapters,
                library,
                stretch: 16,
                tile,
                ..PLAIN
            };
            agree_with(family, Precision::Bf16, Tier::Device, Weights::Leased, also)?;
        }
    }
    Ok(())
}

/// Adapters that share an input store their low-rank activations until backward, and so do those of experts.
#[test]
fn adapters_of_shared_inputs_take_the_planned_memory() -> Result<()> {
    for (family, library) in [
        ("minicpm-v-2_6", Library::Absent),
        ("glm-4v-9b", Library::Adapts),
        ("glm-4v-9b", Library::Refuses),
        ("cogvlm-chat-hf", Library::Absent),
    ] {
        let also = Also {
            adapters: true,
            library,
            ..PLAIN
        };
        agree_with(family, Precision::Bf16, Tier::Device, Weights::Leased, also)?;
    }
    Ok(())
}

/// The fused backward of attention sums `dq` of two tiles of keys in scratch memory.
#[test]
fn minicpm_with_the_fused_backward_of_attention_takes_the_planned_memory() -> Result<()> {
    let also = Also {
        backward: AttentionBackward::Fused,
        tokens: 160,
        ..PLAIN
    };
    let (precision, tier) = (Precision::Bf16, Tier::Device);
    agree_with("minicpm-v-2_6", precision, tier, Weights::Leased, also)
}

/// Recomputed layer inputs, including those loaded back from the host first.
#[test]
fn recomputed_layer_inputs_take_the_planned_memory() -> Result<()> {
    let also = Also {
        again: true,
        ..PLAIN
    };
    let (device, host) = (Tier::Device, Tier::Host);
    agree_with(
        "minicpm-v-2_6",
        Precision::Bf16,
        device,
        Weights::Leased,
        also,
    )?;
    agree_with(
        "glm-4v-9b",
        Precision::Bf16,
        host,
        Weights::Prefetched,
        also,
    )?;
    agree_with(
        "cogagent-chat-hf",
        Precision::F32,
        host,
        Weights::Kept,
        also,
    )
}

#[test]
fn glm_4v_in_bf16_takes_the_planned_memory() -> Result<()> {
    agree("glm-4v-9b", Precision::Bf16, Tier::Device, Weights::Leased)
}

#[test]
fn minicpm_with_prefetch_takes_the_planned_memory() -> Result<()> {
    agree(
        "minicpm-v-2_6",
        Precision::Bf16,
        Tier::Device,
        Weights::Prefetched,
    )
}

#[test]
fn cogvlm_with_prefetch_takes_the_planned_memory() -> Result<()> {
    agree(
        "cogvlm-chat-hf",
        Precision::F32,
        Tier::Host,
        Weights::Prefetched,
    )
}

#[test]
fn glm_4v_with_prefetch_and_activations_on_the_host_takes_the_planned_memory() -> Result<()> {
    agree("glm-4v-9b", Precision::F32, Tier::Host, Weights::Prefetched)
}

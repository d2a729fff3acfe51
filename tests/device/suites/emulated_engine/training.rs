//! Training on the emulated GPU. Losses, gradients and weights after a step are those of the CPU, up to the order of
//! sums.

use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use device_tests::emulator::Order;
use device_tests::executor::{Beside, Crossing, EmulatedGpu, Library, with_graphs};
use device_tests::tolerance;
use engine::trace::{Lane, Span};
use engine::{ParamId, PassKind, Precision, Tier};
use kernels::STRETCH_ROWS;
use kernels::cuda::CudaBackend;
use kernels::cuda::backend::graphs::Mode;
use kernels::cuda::device_kind::AttentionBackward;
use kernels::{Backend, CpuBackend, DType};
use models::autograd::{Dropout, Tape};
use models::{ModelOptions, SampleInput, VisionLanguageModel, open_model};

use crate::setup::{self, ARENA_BYTES, Updates, Weights, pack};

const TOKENS: usize = 24;
/// Tokens of the pack with the longest image. Images of any size are no longer.
const MOST_TOKENS: usize = 46;
const LEARNING_RATE: f64 = 1e-3;

/// Results of the steps.
pub struct Left {
    losses: Vec<f64>,
    /// Per step, whether an update was applied.
    pub applied: Vec<bool>,
    /// Gradient norms before each update.
    pub norms: Vec<f64>,
    gradients: Vec<(ParamId, Vec<f32>)>,
    weights: Vec<(ParamId, Vec<f32>)>,
}

impl Left {
    /// Whether every loss, gradient and weight has the same bits. Gradients count only where both have them.
    pub fn same_bits(&self, other: &Self) -> bool {
        let losses =
            |left: &Self| -> Vec<u64> { left.losses.iter().map(|l| l.to_bits()).collect() };
        let same = |ours: &[(ParamId, Vec<f32>)], theirs: &[(ParamId, Vec<f32>)]| {
            ours.len() == theirs.len()
                && ours.iter().zip(theirs).all(|((id, a), (other, b))| {
                    id == other
                        && a.iter()
                            .map(|x| x.to_bits())
                            .eq(b.iter().map(|x| x.to_bits()))
                })
        };
        losses(self) == losses(other)
            && self.applied == other.applied
            && (self.gradients.is_empty()
                || other.gradients.is_empty()
                || same(&self.gradients, &other.gradients))
            && same(&self.weights, &other.weights)
    }
}

/// Settings of a training run.
#[derive(Clone, Copy)]
pub struct How {
    pub precision: Precision,
    pub activation: Tier,
    pub weights: Weights,
    /// Whether layer inputs are recomputed.
    pub again: bool,
    /// The pass whose sample has no image.
    pub text_pass: Option<usize>,
    /// Whether only adapters are trainable.
    pub adapters: bool,
    /// Probability of the adapters' dropout.
    pub dropout: f32,
    /// Whether adapters train beside quantized weights.
    pub quantized: bool,
    pub library: Library,
    /// Kernels of attention's backward.
    pub backward: AttentionBackward,
    /// Tokens of a sample, beside those of its image where they are few.
    pub tokens: usize,
    /// Whether each segment's recompute is compared with its first run, for which the host waits.
    pub check: bool,
    /// Whether runs of commands are replayed as graphs.
    pub graphs: Option<Mode>,
    pub passes: usize,
    pub updates: Updates,
    /// The pass whose gradients are not finite, so no update follows.
    pub skipped: Option<usize>,
    /// Gradient norm for clipping.
    pub max_grad_norm: Option<f32>,
    /// Rows of a tile of the feed-forward layers. On the CPU, tiles are longer than the samples.
    pub tile: Option<NonZeroUsize>,
    /// Rows of a stretch of the feed-forward layers on the GPU.
    pub stretch: usize,
}

impl How {
    pub fn new(precision: Precision) -> Self {
        Self {
            precision,
            activation: Tier::Device,
            weights: Weights::Leased,
            again: false,
            text_pass: None,
            adapters: false,
            dropout: 0.0,
            quantized: false,
            library: Library::Absent,
            backward: AttentionBackward::Split,
            tokens: TOKENS,
            check: true,
            graphs: None,
            passes: 2,
            updates: Updates::Behind,
            skipped: None,
            max_grad_norm: None,
            tile: None,
            stretch: STRETCH_ROWS,
        }
    }
}

/// Passes over a sample with or without an image, with a step between each two. Without the check the host waits only
/// where it must.
pub fn train(
    dir: &Path,
    how: How,
    backend: Arc<dyn Backend>,
) -> Result<(Left, Arc<dyn VisionLanguageModel>)> {
    let mut options = match how.quantized {
        true => setup::quantized_options(how.precision),
        false => setup::options(how.precision, how.adapters),
    };
    if let Some(lora) = &mut options.lora {
        lora.lora_dropout = how.dropout;
    }
    let model = open_model(dir, options)?;
    let plan = setup::plan_updating(
        &*model,
        how.precision,
        how.activation,
        how.weights,
        how.again,
        (how.updates, how.max_grad_norm),
    )?;
    assert_eq!(
        plan.any_updates_in_backward(),
        how.updates.are_in_backward()
    );
    assert_eq!(plan.updates_in_forward(), how.updates == Updates::Late);
    let mut zero = setup::loaded(dir, &*model, plan, backend.clone())?;
    let most = how.tokens + MOST_TOKENS - TOKENS;
    let with_image = setup::sample(dir, how.tokens, most)?;
    let without = setup::text_sample(dir, how.tokens)?;
    let mut left = Left {
        losses: Vec::new(),
        applied: Vec::new(),
        norms: Vec::new(),
        gradients: Vec::new(),
        weights: Vec::new(),
    };
    for pass in 0..how.passes {
        let sample = match how.text_pass {
            Some(text) if text == pass => &without,
            _ => &with_image,
        };
        if how.updates.are_in_backward() {
            zero.announce_update(LEARNING_RATE, 1.0, sample.supervised_tokens() as u64)?;
        }
        zero.begin_pass(PassKind::Train);
        let inputs = [SampleInput::from(sample)];
        let batch = model.collate(&inputs, &*backend)?;
        let tape = Tape::training(&zero).with_recompute_check(how.check);
        let tape = tape.with_mlp_tiles(how.tile);
        let tape = match how.dropout > 0.0 {
            true => tape.with_dropout(Dropout::new(5, &[3], &inputs, &*backend)?),
            false => tape,
        };
        let loss = model.forward(&tape, &batch)?;
        let fetch = loss.fetch()?;
        let skipped = how.skipped == Some(pass);
        tape.backward(&loss, if skipped { f32::INFINITY } else { 1.0 })?;
        let (sum, supervised) = (fetch.sum()?, loss.supervised);
        drop((fetch, loss, batch));
        zero.end_micro_batch(sum, supervised as u64)?;
        left.losses.push(sum / supervised as f64);
        if pass == 0 && how.updates != Updates::Consumed {
            left.gradients = zero.gradients()?;
        }
        if pass + 1 < how.passes {
            let step = zero.step(LEARNING_RATE)?;
            left.applied.push(step.applied);
            left.norms.push(step.grad_norm);
        }
    }
    zero.visit_weights(|id, tensor| {
        left.weights.push((id, tensor.to_f32_vec()?));
        Ok::<_, engine::EngineError>(())
    })?;
    Ok((left, model))
}

fn agree(family: &str, precision: Precision, activation: Tier) -> Result<()> {
    let mut how = How::new(precision);
    how.activation = activation;
    let gpu = agree_how(family, how)?;
    assert_eq!(gpu.multiplied(), 0);
    let uploads = gpu.uploads();
    // The model has a few layers of each kind. With two equal layers, the second one is copied during the first one's
    // compute. Large images are half as many bytes again and come before all compute.
    assert!(uploads.overlapping * 13 > uploads.bytes, "{uploads:?}");
    Ok(())
}

/// The same with library products.
fn agree_through_a_library(family: &str, precision: Precision) -> Result<()> {
    let mut how = How::new(precision);
    how.library = Library::Multiplies;
    let gpu = agree_how(family, how)?;
    assert!(gpu.multiplied() > 100, "{} products", gpu.multiplied());
    Ok(())
}

/// The same with adapters, where those of one input share it.
fn agree_with_adapters(family: &str, precision: Precision) -> Result<()> {
    let mut how = How::new(precision);
    how.adapters = true;
    agree_how(family, how)?;
    Ok(())
}

#[test]
fn packed_weights_agree_with_the_cpu() -> Result<()> {
    for (precision, weights) in [
        (Precision::F32, Weights::Leased),
        (Precision::Bf16, Weights::Prefetched),
        (Precision::Bf16, Weights::Kept),
    ] {
        let mut how = How::new(precision);
        (how.quantized, how.weights) = (true, weights);
        agree_how("glm-4.1v-9b-thinking", how)?;
    }
    Ok(())
}

/// Feed-forward layers in tiles of a few rows agree with the CPU: the gradients of weights and biases, and of adapters.
#[test]
fn tiles_of_feed_forward_layers_agree_with_the_cpu() -> Result<()> {
    for (family, precision, adapters, tile) in [
        ("glm-4.1v-9b-thinking", Precision::F32, false, 7),
        ("cogvlm2-llama3-chat-19B", Precision::Bf16, true, 5),
    ] {
        let mut how = How::new(precision);
        (how.adapters, how.tile, how.stretch) = (adapters, NonZeroUsize::new(tile), 16);
        agree_how(family, how)?;
    }
    Ok(())
}

/// Tiles of one stretch and of two leave the bits of a run without tiles: losses, gradients and weights. Without stretches
/// the bits are others. Adapters have dropout where our kernels compute all products. A library gets the same products with tiles as without.
fn tiles_leave_the_same_bits(cases: &[(&str, Precision, bool, bool, Library)]) -> Result<()> {
    for &(family, precision, adapters, quantized, library) in cases {
        let mut how = How::new(precision);
        (how.adapters, how.quantized, how.library) = (adapters, quantized, library);
        how.dropout = if library == Library::Absent {
            0.25
        } else {
            0.0
        };
        (how.check, how.tokens) = (false, 60);
        let mut run = |stretch: usize, tile: usize| -> Result<(Left, Vec<String>)> {
            let gpu = Arc::new(EmulatedGpu::new(Order::Ascending).with_library(library));
            let device = CudaBackend::new(gpu.clone(), ARENA_BYTES)?.with_stretch(stretch);
            how.tile = NonZeroUsize::new(tile);
            let (left, _) = train(&pack(family), how, Arc::new(device))?;
            Ok((left, gpu.products().into_keys().collect()))
        };
        let (whole, products) = run(32, 0)?;
        for tile in [1, 33] {
            let tiled = run(32, tile)?;
            assert!(tiled.0.same_bits(&whole), "{family}, tiles of {tile}");
            assert_eq!(tiled.1, products, "{family}, tiles of {tile}");
        }
        assert!(!run(STRETCH_ROWS, 0)?.0.same_bits(&whole), "{family}");
    }
    Ok(())
}

#[test]
fn tiles_of_feed_forward_layers_leave_the_same_bits() -> Result<()> {
    let (f32, bf16) = (Precision::F32, Precision::Bf16);
    tiles_leave_the_same_bits(&[
        ("glm-4.1v-9b-thinking", f32, false, false, Library::Absent),
        ("minicpm-v-2_6", bf16, false, false, Library::Absent),
        ("glm-4v-9b", bf16, false, false, Library::Multiplies),
        ("cogvlm-chat-hf", f32, false, false, Library::Multiplies),
    ])
}

#[test]
fn tiles_of_feed_forward_layers_with_adapters_leave_the_same_bits() -> Result<()> {
    let (f32, bf16) = (Precision::F32, Precision::Bf16);
    tiles_leave_the_same_bits(&[
        ("glm-4v-9b", bf16, true, false, Library::Adapts),
        ("glm-4.1v-9b-thinking", bf16, true, true, Library::Absent),
        (
            "cogvlm2-llama3-chat-19B",
            bf16,
            true,
            false,
            Library::Absent,
        ),
        ("cogagent-chat-hf", f32, true, false, Library::Absent),
    ])
}

fn agree_how(family: &str, how: How) -> Result<Arc<EmulatedGpu>> {
    let dir = pack(family);
    let gpu = Arc::new(
        EmulatedGpu::new(Order::Ascending)
            .with_library(how.library)
            .with_attention_backward(how.backward),
    );
    let device = CudaBackend::new(gpu.clone(), ARENA_BYTES)?.with_stretch(how.stretch);
    let cpu: Arc<dyn Backend> = Arc::new(CpuBackend::unlimited());
    let (want, model) = train(&dir, how, cpu)?;
    let (got, _) = train(&dir, how, Arc::new(device.clone()))?;
    let dtype = how.precision.weight_dtype();
    for (got, want) in got.losses.iter().zip(&want.losses) {
        let allowed = tolerance::trained(dtype, *want);
        assert!(
            (got - want).abs() <= allowed,
            "loss {got} instead of {want}"
        );
    }
    assert!(want.losses[1] < want.losses[0], "{:?}", want.losses);
    let name = |id: &ParamId| &model.spec().params[id.index()].name;
    let norm = |x: &[f32]| x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    let norms = want.gradients.iter().map(|(_, gradient)| norm(gradient));
    let largest = norms.fold(0.0, f64::max);
    for ((id, got), (other, want)) in got.gradients.iter().zip(&want.gradients) {
        assert_eq!(id, other);
        let difference: Vec<f32> = got.iter().zip(want).map(|(g, w)| g - w).collect();
        let (off, size) = (norm(&difference), norm(want));
        let allowed = tolerance::trained(dtype, size) + tolerance::trained_noise(dtype, largest);
        assert!(off <= allowed, "{}: off by {off:e} of {size:e}", name(id));
    }
    for ((id, got), (_, want)) in got.weights.iter().zip(&want.weights) {
        let far = got.iter().zip(want).find(|(g, w)| {
            // The sign of a gradient near zero decides a full first step of Adam, and both weights are rounded.
            let rounded = [**g, **w].map(|x| tolerance::store(dtype, f64::from(x)));
            f64::from((*g - *w).abs()) > 2.001 * LEARNING_RATE + rounded[0] + rounded[1]
        });
        assert!(far.is_none(), "{}: {far:?}", name(id));
    }
    // Only the table of the last attention remains on the device.
    assert!(device.pool().stats().in_use < 4096, "{:?}", device.pool());
    Ok(gpu)
}

/// Passes usually run without checks of memory accesses. With these checks nothing is reported, and every bit is the
/// same.
#[test]
fn checked_and_unchecked_passes_leave_the_same_bits() -> Result<()> {
    let of = |family: &str, how: How, order: Order| -> Result<()> {
        let gpus = [EmulatedGpu::new(order), EmulatedGpu::watched(order)];
        let [unwatched, watched] = gpus.map(|gpu| {
            let gpu = Arc::new(
                gpu.with_library(how.library)
                    .with_attention_backward(how.backward),
            );
            train(
                &pack(family),
                how,
                Arc::new(CudaBackend::new(gpu, ARENA_BYTES)?),
            )
        });
        assert!(unwatched?.0.same_bits(&watched?.0), "{family}");
        Ok(())
    };
    let mut how = How::new(Precision::Bf16);
    of("minicpm-v-2_6", how, Order::Descending)?;
    how.adapters = true;
    how.text_pass = Some(1);
    of("cogvlm2-llama3-chat-19B", how, Order::Ascending)
}

/// Bits of all results of training on an emulated GPU, and the number of queued graphs.
fn trained_bits(family: &str, how: How) -> Result<(Vec<u64>, u64)> {
    let gpu = Arc::new(
        EmulatedGpu::new(Order::Ascending)
            .with_library(how.library)
            .with_attention_backward(how.backward),
    );
    let (device, replaying): (Arc<dyn Backend>, _) = match how.graphs {
        None => (Arc::new(CudaBackend::new(gpu, ARENA_BYTES)?), None),
        Some(mode) => {
            let (device, replaying) = with_graphs(gpu, ARENA_BYTES, mode)?;
            (Arc::new(device), Some(replaying))
        }
    };
    let (left, _) = train(&pack(family), how, device)?;
    let tensors = left.gradients.iter().chain(&left.weights);
    let floats = tensors
        .flat_map(|(_, values)| values)
        .map(|x| u64::from(x.to_bits()));
    let losses = left.losses.iter().map(|loss| loss.to_bits());
    let replays = replaying.map_or(0, |replaying| replaying.counts().replays);
    Ok((losses.chain(floats).collect(), replays))
}

/// Losses, gradients and weights have the same bits with and without graphs.
fn agree_with_graphs(family: &str, how: How) -> Result<()> {
    let mut how = how;
    how.passes = 4;
    let (want, none) = trained_bits(family, how)?;
    assert_eq!(none, 0);
    for mode in [Mode::Auto, Mode::On] {
        how.graphs = Some(mode);
        let (got, replays) = trained_bits(family, how)?;
        assert!(replays > 0, "{mode:?} queued no graph");
        assert!(got == want, "{mode:?} has other bits");
    }
    Ok(())
}

/// Recomputed layer inputs give the bits of stored ones, on every tier of activations and weights, and also in graphs.
fn agree_again(family: &str, how: How) -> Result<()> {
    let mut how = How {
        text_pass: Some(1),
        passes: 4,
        ..how
    };
    let (want, _) = trained_bits(family, how)?;
    how.again = true;
    let (got, _) = trained_bits(family, how)?;
    assert!(got == want, "other bits");
    how.graphs = Some(Mode::On);
    let (got, replays) = trained_bits(family, how)?;
    assert!(replays > 0, "no graph was queued");
    assert!(got == want, "other bits in graphs");
    Ok(())
}

#[test]
fn minicpm_with_recomputed_layer_inputs_has_the_same_bits() -> Result<()> {
    agree_again("minicpm-v-2_6", How::new(Precision::Bf16))
}

/// The features for cross attention, which layers share, are offloaded too.
#[test]
fn cogagent_with_recomputed_layer_inputs_has_the_same_bits() -> Result<()> {
    let mut how = How::new(Precision::F32);
    (how.activation, how.weights) = (Tier::Host, Weights::Prefetched);
    agree_again("cogagent-chat-hf", how)
}

#[test]
fn graphs_leave_the_same_bits_with_adapters_in_bf16() -> Result<()> {
    let mut how = How::new(Precision::Bf16);
    how.adapters = true;
    agree_with_graphs("minicpm-v-2_6", how)
}

#[test]
fn graphs_leave_the_same_bits_with_resident_weights_and_library_products() -> Result<()> {
    let mut how = How::new(Precision::F32);
    (how.weights, how.library) = (Weights::Kept, Library::Multiplies);
    agree_with_graphs("glm-4v-9b", how)
}

/// With the fused backward of attention a step agrees with the CPU, and graphs leave the same bits. The language model's
/// attention has two tiles of keys, so blocks take turns.
#[test]
fn minicpm_trains_with_the_fused_backward_of_attention() -> Result<()> {
    let (family, mut how) = ("minicpm-v-2_6", How::new(Precision::Bf16));
    (how.backward, how.tokens) = (AttentionBackward::Fused, 160);
    agree_how(family, how)?;
    let (want, _) = trained_bits(family, how)?;
    how.graphs = Some(Mode::On);
    let (got, replays) = trained_bits(family, how)?;
    assert!(replays > 0 && got == want, "{replays} replays");
    how.backward = AttentionBackward::Split;
    let (split, _) = trained_bits(family, how)?;
    assert!(split != want, "the other kernels leave other bits");
    Ok(())
}

/// All weights are uploaded once, and once more with the gaps between them after the step changed them all.
#[test]
fn resident_weights_are_uploaded_once_per_change() -> Result<()> {
    let family = "glm-4v-9b";
    let mut how = How::new(Precision::F32);
    how.weights = Weights::Kept;
    let gpu = agree_how(family, how)?;
    let uploads = gpu.uploads();
    let model = open_model(&pack(family), ModelOptions::new(DType::F32))?;
    let (elems, trained) = model.spec().elems();
    assert_eq!(elems, trained);
    let plan = setup::plan(&*model, how.precision, Tier::Device, Weights::Kept, false)?;
    let padded = plan.units().iter().map(|unit| unit.trainable.padded_elems);
    assert_eq!(uploads.bytes, 4 * (elems + padded.sum::<usize>()) as u64);
    Ok(())
}

/// Prefetched weights wait for commands before the previous unit, not for those of that unit. Exceptions are the first
/// unit of a pass and a unit after a skipped one.
#[test]
fn prefetched_weights_are_copied_during_the_whole_previous_unit() -> Result<()> {
    let uploads = |weights| -> Result<Beside> {
        let gpu = Arc::new(EmulatedGpu::new(Order::Ascending));
        let device = CudaBackend::new(gpu.clone(), ARENA_BYTES)?;
        let how = How {
            weights,
            check: false,
            ..How::new(Precision::Bf16)
        };
        train(&pack("glm-4v-9b"), how, Arc::new(device))?;
        Ok(gpu.uploads())
    };
    let [leased, ahead] = [uploads(Weights::Leased)?, uploads(Weights::Prefetched)?];
    assert_eq!(leased.bytes, ahead.bytes);
    // The weights of a unit come in one call.
    for Beside { calls, copies, .. } in [leased, ahead] {
        assert!(calls * 4 < copies, "{copies} copies in {calls} calls");
    }
    assert!(leased.early * 2 < leased.bytes, "{leased:?}");
    assert!(ahead.early * 10 > ahead.bytes * 9, "{ahead:?}");
    Ok(())
}

/// Prefetched weights change no bit, also when a batch skips the unit they were copied for.
fn agree_ahead(family: &str, how: How) -> Result<()> {
    let mut how = How {
        text_pass: Some(1),
        passes: 4,
        ..how
    };
    let (want, _) = trained_bits(family, how)?;
    how.weights = Weights::Prefetched;
    let (got, _) = trained_bits(family, how)?;
    assert!(got == want, "other bits");
    how.graphs = Some(Mode::On);
    let (got, replays) = trained_bits(family, how)?;
    assert!(got == want, "other bits with graphs");
    assert!(replays > 0, "queued no graph");
    Ok(())
}

#[test]
fn minicpm_has_the_same_bits_with_prefetch() -> Result<()> {
    agree_ahead("minicpm-v-2_6", How::new(Precision::Bf16))
}

#[test]
fn cogvlm_has_the_same_bits_with_prefetch() -> Result<()> {
    agree_ahead("cogvlm-chat-hf", How::new(Precision::F32))
}

#[test]
fn glm_4v_has_the_same_bits_with_adapters_and_prefetch() -> Result<()> {
    let mut how = How::new(Precision::F32);
    (how.activation, how.adapters) = (Tier::Host, true);
    agree_ahead("glm-4v-9b", how)
}

/// Saved activations leave during the following segments and return during the previous ones of backward. The first one
/// of a pass is an exception: its memory is allocated when it is needed.
#[test]
fn offloaded_activations_are_copied_during_compute() -> Result<()> {
    let copies = |activation| -> Result<[Beside; 2]> {
        let gpu = Arc::new(EmulatedGpu::new(Order::Ascending));
        let device = CudaBackend::new(gpu.clone(), ARENA_BYTES)?;
        let dir = pack("glm-4v-9b");
        let how = How {
            activation,
            weights: Weights::Kept,
            check: false,
            ..How::new(Precision::Bf16)
        };
        train(&dir, how, Arc::new(device))?;
        Ok([gpu.fetches(), gpu.uploads()])
    };
    let [stayed, moved] = [copies(Tier::Device)?, copies(Tier::Host)?];
    for (stayed, moved) in stayed.iter().zip(&moved) {
        let bytes = moved.bytes - stayed.bytes;
        let overlapping = moved.overlapping - stayed.overlapping;
        assert!(
            bytes > 0 && overlapping * 4 >= bytes * 3,
            "{overlapping} of {bytes}"
        );
    }
    Ok(())
}

/// The next weights come in while gradients leave, so both directions of the bus are busy at once.
#[test]
fn weights_and_gradients_are_copied_in_both_directions_at_once() -> Result<()> {
    for weights in [Weights::Leased, Weights::Prefetched] {
        let crossing = Arc::new(Crossing::default());
        let gpu = EmulatedGpu::new(Order::Ascending).with_crossing(crossing.clone());
        let device = CudaBackend::new(Arc::new(gpu), ARENA_BYTES)?;
        let how = How {
            weights,
            check: false,
            passes: 1,
            ..How::new(Precision::Bf16)
        };
        train(&pack("glm-4v-9b"), how, Arc::new(device))?;
        assert!(crossing.was_seen(), "{weights:?}");
    }
    Ok(())
}

/// Weights resident on the device are updated in host memory during backward or the next pass. Updates and compute only
/// wait for each other where they share data, and the bits are the same.
#[test]
fn resident_weights_are_updated_during_backward_or_the_next_forward() -> Result<()> {
    for (family, precision) in [
        ("minicpm-o-2_6", Precision::PureBf16),
        ("glm-4v-9b", Precision::Bf16),
    ] {
        let with = |updates, graphs| -> Result<Left> {
            let gpu = Arc::new(EmulatedGpu::new(Order::Ascending));
            let how = How {
                weights: Weights::Kept,
                check: false,
                passes: 3,
                updates,
                ..How::new(precision)
            };
            let device = match graphs {
                Some(mode) => with_graphs(gpu, ARENA_BYTES, mode)?.0,
                None => CudaBackend::new(gpu, ARENA_BYTES)?,
            };
            Ok(train(&pack(family), how, Arc::new(device))?.0)
        };
        let want = with(Updates::Behind, None)?;
        for (updates, graphs) in [
            (Updates::Late, None),
            (Updates::Late, Some(Mode::On)),
            (Updates::Early, None),
            (Updates::Consumed, Some(Mode::On)),
        ] {
            let got = with(updates, graphs)?;
            assert!(got.same_bits(&want), "{family}: {updates:?}, {graphs:?}");
        }
    }
    Ok(())
}

/// Trace and times of a step are those of the device's clock, not of the host that queues the commands. Copies overlap
/// with compute of other units.
#[test]
fn times_and_trace_of_a_step_are_those_of_the_device_clock() -> Result<()> {
    let dir = pack("glm-4v-9b");
    let model = open_model(&dir, ModelOptions::new(DType::F32))?;
    let plan = setup::plan(&*model, Precision::F32, Tier::Host, Weights::Leased, false)?;
    let backend: Arc<dyn Backend> = Arc::new(CudaBackend::new(
        Arc::new(EmulatedGpu::new(Order::Ascending)),
        ARENA_BYTES,
    )?);
    let mut zero = setup::loaded(&dir, &*model, plan, backend.clone())?;
    let sample = setup::sample(&dir, TOKENS, MOST_TOKENS)?;
    zero.trace().start();
    zero.begin_pass(PassKind::Train);
    let batch = model.collate(&[SampleInput::from(&sample)], &*backend)?;
    let tape = Tape::training(&zero);
    let loss = model.forward(&tape, &batch)?;
    let fetch = loss.fetch()?;
    tape.backward(&loss, 1.0)?;
    let (sum, supervised) = (fetch.sum()?, loss.supervised);
    drop((fetch, loss, batch));
    zero.end_micro_batch(sum, supervised as u64)?;
    zero.step(LEARNING_RATE)?;
    let spans = zero.trace().stop();
    let of = |lane| -> Vec<&Span> { spans.iter().filter(|span| span.lane == lane).collect() };
    let [work, waits, inward, outward] =
        [Lane::Device, Lane::DeviceWait, Lane::Inward, Lane::Outward].map(of);
    // Every unit forward and backward, but the loss once, since its backward starts from its forward's results.
    let units = model.spec().units.len();
    for phase in ["forward", "backward"] {
        let named = work.iter().filter(|span| span.name.starts_with(phase));
        assert_eq!(named.count(), units, "{phase}");
    }
    let times = zero.device_times();
    let total = |spans: &[&Span]| spans.iter().map(|span| span.length).sum::<Duration>();
    assert_eq!(times.inward, total(&inward));
    assert_eq!(times.outward, total(&outward));
    assert_eq!(times.waits, total(&waits));
    assert!(times.compute <= total(&work) && times.compute + times.waits >= total(&work));
    let beside = |copies: &[&Span]| {
        let overlaps = |copy: &Span| {
            work.iter().any(|work| {
                copy.start < work.start + work.length && work.start < copy.start + copy.length
            })
        };
        copies.iter().filter(|copy| overlaps(copy)).count()
    };
    // Models of this size copy little, so most copies end before the next compute begins.
    for copies in [&inward, &outward] {
        assert!(beside(copies) > 0, "none of {}", copies.len());
    }
    // Passes without training are not measured.
    zero.visit_weights(|_, _| Ok::<_, engine::EngineError>(()))?;
    assert_eq!(zero.device_times(), times);
    Ok(())
}

#[test]
fn minicpm_trains_as_on_the_cpu() -> Result<()> {
    agree("minicpm-v-2_6", Precision::F32, Tier::Device)
}

#[test]
fn minicpm_trains_in_bf16_with_activations_on_the_host() -> Result<()> {
    agree("minicpm-v-2_6", Precision::Bf16, Tier::Host)
}

#[test]
fn cogvlm_trains_as_on_the_cpu() -> Result<()> {
    agree("cogvlm-chat-hf", Precision::F32, Tier::Host)
}

#[test]
fn cogagent_trains_as_on_the_cpu() -> Result<()> {
    agree("cogagent-chat-hf", Precision::F32, Tier::Device)
}

#[test]
fn cogvlm2_trains_as_on_the_cpu() -> Result<()> {
    agree("cogvlm2-llama3-chat-19B", Precision::F32, Tier::Device)
}

#[test]
fn glm_4v_trains_as_on_the_cpu() -> Result<()> {
    agree("glm-4v-9b", Precision::F32, Tier::Device)
}

#[test]
fn glm_41v_trains_as_on_the_cpu() -> Result<()> {
    agree("glm-4.1v-9b-thinking", Precision::F32, Tier::Device)
}

/// Query and key heads of this tower have norms of their own.
#[test]
fn glm_ocr_trains_as_on_the_cpu() -> Result<()> {
    agree("glm-ocr", Precision::F32, Tier::Device)
}

/// As the heads of this decoder.
#[test]
fn minicpm_4_5_trains_in_bf16_as_on_the_cpu() -> Result<()> {
    agree("minicpm-v-4_5", Precision::Bf16, Tier::Device)
}

#[test]
fn minicpm_trains_through_a_library() -> Result<()> {
    agree_through_a_library("minicpm-v-2_6", Precision::F32)?;
    agree_through_a_library("minicpm-v-2_6", Precision::Bf16)
}

#[test]
fn cogvlm_trains_through_a_library() -> Result<()> {
    agree_through_a_library("cogvlm-chat-hf", Precision::F32)
}

#[test]
fn cogagent_trains_through_a_library() -> Result<()> {
    agree_through_a_library("cogagent-chat-hf", Precision::F32)
}

#[test]
fn cogvlm2_trains_through_a_library() -> Result<()> {
    agree_through_a_library("cogvlm2-llama3-chat-19B", Precision::F32)
}

#[test]
fn glm_4v_trains_through_a_library() -> Result<()> {
    agree_through_a_library("glm-4v-9b", Precision::F32)
}

#[test]
fn glm_41v_trains_through_a_library() -> Result<()> {
    agree_through_a_library("glm-4.1v-9b-thinking", Precision::F32)
}

/// On compute capability 9 and 10 the library computes the wide products of adapted layers too.
#[test]
fn glm_4v_trains_adapters_through_a_library() -> Result<()> {
    let products = |library| -> Result<u64> {
        let mut how = How::new(Precision::Bf16);
        (how.adapters, how.library) = (true, library);
        Ok(agree_how("glm-4v-9b", how)?.multiplied())
    };
    let [plain, adapted] = [products(Library::Multiplies)?, products(Library::Adapts)?];
    assert!(
        adapted > plain + 20,
        "{adapted} products, {plain} without adapted layers"
    );
    Ok(())
}

#[test]
fn minicpm_trains_adapters() -> Result<()> {
    agree_with_adapters("minicpm-v-2_6", Precision::F32)?;
    agree_with_adapters("minicpm-v-2_6", Precision::Bf16)
}

#[test]
fn cogvlm_trains_adapters() -> Result<()> {
    agree_with_adapters("cogvlm-chat-hf", Precision::F32)?;
    agree_with_adapters("cogvlm-chat-hf", Precision::Bf16)
}

#[test]
fn glm_4v_trains_adapters() -> Result<()> {
    agree_with_adapters("glm-4v-9b", Precision::F32)?;
    agree_with_adapters("glm-4v-9b", Precision::Bf16)
}

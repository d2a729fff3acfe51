//! Engine setup for a family's golden pack, on any device.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use device_tests::random::Operands;
use engine::comm::{Communicator, threads};
use engine::{
    ModelSpec, Offload, OptimizerConfig, OptimizerInBackward, Plan, Precision, Stage, Tier, Tiers,
    UnitSpec, Zero, ZeroConfig,
};
use kernels::{Backend, Codebook, DType, Pool, Quantization};
use models::data::EncodedSample;
use models::lora::{LoraConfig, LoraTargets};
use models::{ModelOptions, QuantizedWeights, VisionLanguageModel, WeightSource};
use optim::GroupOptions;

pub const ARENA_BYTES: u64 = 256 << 20;

/// Whether `TESSERA_EVERY_PACK=1` asks for all packs, timings and the 200 steps, as the nightly run does.
pub fn every() -> bool {
    std::env::var("TESSERA_EVERY_PACK").is_ok_and(|asked| asked == "1")
}

/// Timings of which at least one must reveal a missing event or wait.
pub const LOST_SEEDS: u64 = 8;

/// Whether a timing reveals what is missing. The timing `known` does today; after a change of the pass another one may.
pub fn revealed(known: u64, shows: impl Fn(u64) -> bool) -> bool {
    let others = (0..LOST_SEEDS).filter(|seed| *seed != known);
    std::iter::once(known).chain(others).any(shows)
}

pub fn pack(name: &str) -> PathBuf {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../golden");
    golden.join(name)
}

/// Time at which a unit's weights are copied to the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Weights {
    /// At its lease.
    Leased,
    /// One unit before its lease.
    Prefetched,
    /// Once; they stay resident.
    Kept,
}

/// Time at which units are updated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Updates {
    /// After the pass.
    Behind,
    /// In backward, all units.
    Early,
    /// In backward, from gradients that are stored nowhere.
    Consumed,
    /// In the next forward.
    Late,
}

impl Updates {
    pub fn are_in_backward(self) -> bool {
        matches!(self, Self::Early | Self::Consumed)
    }
}

/// Model options: all parameters trainable, or adapters on every linear layer of the language model.
pub fn options(precision: Precision, adapters: bool) -> ModelOptions {
    let mut options = ModelOptions::new(precision.weight_dtype());
    options.lora = adapters.then(|| LoraConfig {
        lora_rank: 4,
        lora_alpha: 8.0,
        lora_dropout: 0.0,
        others: Default::default(),
        targets: LoraTargets::parse("all"),
        layers: None,
        per_projection: false,
        use_rslora: false,
        modules_to_save: Vec::new(),
    });
    options
}

/// The same with adapters, beside a language model quantized in 4 bits.
pub fn quantized_options(precision: Precision) -> ModelOptions {
    let mut options = options(precision, true);
    (options.tune_vision, options.tune_llm) = (false, false);
    options.quantized = QuantizedWeights::Chosen {
        quantization: Quantization::four_bit(Codebook::Nf4, true),
        modules: None,
    };
    options
}

/// Every stack of layers as one recompute group, which saves only the input of its first layer.
pub fn stacks(spec: &ModelSpec) -> Vec<Range<u32>> {
    let mut spec = spec.clone();
    // Units after the last stack, since only then it forms a recompute group too.
    for name in ["behind", "farther"] {
        spec.units.push(UnitSpec { name: name.into() });
    }
    spec.layer_groups(8, &|_| true)
}

/// Plan of one rank under ZeRO-3 with optimizer states in host memory. `again` recomputes layer inputs.
pub fn plan(
    model: &dyn VisionLanguageModel,
    precision: Precision,
    activation: Tier,
    weights: Weights,
    again: bool,
) -> Result<Arc<Plan>> {
    let when = (Updates::Behind, None);
    plan_updating(model, precision, activation, weights, again, when)
}

/// As [`plan`], with the time of updates and the gradient norm for clipping.
pub fn plan_updating(
    model: &dyn VisionLanguageModel,
    precision: Precision,
    activation: Tier,
    weights: Weights,
    again: bool,
    (updates, max_grad_norm): (Updates, Option<f32>),
) -> Result<Arc<Plan>> {
    let recomputed = match again {
        true => stacks(model.spec()),
        false => Vec::new(),
    };
    let config = ZeroConfig {
        stage: Stage::try_from(3).map_err(anyhow::Error::msg)?,
        precision,
        offload: Offload {
            activation,
            param: match weights {
                Weights::Kept => Tier::Device,
                _ => Tier::Host,
            },
            optimizer: Tier::Host,
        },
        prefetch_weights: weights == Weights::Prefetched,
        recomputed,
        optimizer_in_backward: updates.are_in_backward().then_some(OptimizerInBackward {
            most_elems: u64::MAX,
            single_micro_batch: updates == Updates::Consumed,
        }),
        optimizer_in_forward: updates == Updates::Late,
        max_grad_norm,
        ..ZeroConfig::default()
    };
    Ok(Arc::new(Plan::new(model.spec().clone(), config, 1)?))
}

/// A rank with the pack's weights.
pub fn loaded(
    dir: &Path,
    model: &dyn VisionLanguageModel,
    plan: Arc<Plan>,
    backend: Arc<dyn Backend>,
) -> Result<Zero> {
    let comm = threads::world(1, 1 << 26)?.remove(0);
    loaded_on(dir, model, plan, backend, comm)
}

/// As [`loaded`], with another optimizer.
pub fn loaded_with(
    dir: &Path,
    model: &dyn VisionLanguageModel,
    plan: Arc<Plan>,
    backend: Arc<dyn Backend>,
    optimizer: OptimizerConfig,
) -> Result<Zero> {
    let comm = threads::world(1, 1 << 26)?.remove(0);
    load(dir, model, plan, (backend, comm), optimizer)
}

/// As [`loaded`], among other ranks.
pub fn loaded_on(
    dir: &Path,
    model: &dyn VisionLanguageModel,
    plan: Arc<Plan>,
    backend: Arc<dyn Backend>,
    comm: Arc<dyn Communicator>,
) -> Result<Zero> {
    load(dir, model, plan, (backend, comm), optimizer(model))
}

/// The optimizer of the suite, with the same options for all parameters.
pub fn optimizer(model: &dyn VisionLanguageModel) -> OptimizerConfig {
    let same = GroupOptions {
        weight_decay: 0.01,
        lr_scale: 1.0,
    };
    OptimizerConfig {
        rule: Arc::new(optim::AdamW::default()),
        groups: vec![same; model.spec().params.len()],
    }
}

fn load(
    dir: &Path,
    model: &dyn VisionLanguageModel,
    plan: Arc<Plan>,
    (backend, comm): (Arc<dyn Backend>, Arc<dyn Communicator>),
    optimizer: OptimizerConfig,
) -> Result<Zero> {
    let [device, host] = ["device", "host"].map(|name| Pool::new(name, None));
    let mut zero = Zero::new(plan, comm, backend, Tiers::new(device, host), optimizer)?;
    let weights = WeightSource::open(dir)?;
    zero.load(|id, elements, out| {
        let name = &model.spec().params[id.index()].name;
        if name.contains("lora_") {
            let drawn = Operands::new(7).normal(name, elements.end, 0.05);
            bytemuck::cast_slice_mut(out).copy_from_slice(&drawn[elements]);
            return Ok(());
        }
        weights.read_range(name, elements, DType::F32, bytemuck::cast_slice_mut(out))
    })?;
    Ok(zero)
}

/// A sample as long as the family's image needs plus `tokens`, at most `most`. If images have any size, the image is
/// small.
pub fn sample(dir: &Path, tokens: usize, most: usize) -> Result<EncodedSample> {
    let of = |tokens| models::largest_sample(dir, tokens, 1, None).context("a sample");
    let end = of(4096)?.image_bounds.iter().map(|(_, end)| *end).max();
    of((end.unwrap_or(0) + tokens).min(most))
}

/// A sample of tokens without an image.
pub fn text_sample(dir: &Path, tokens: usize) -> Result<EncodedSample> {
    let mut sample = models::largest_sample(dir, tokens, 1, None).context("a sample")?;
    sample.image_bounds.clear();
    sample.slices.clear();
    Ok(sample)
}

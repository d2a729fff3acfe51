//! What packs with quantized weights store besides: dequantized weights, and a run with adapters on them.

use super::family::{AdamW, Trajectory, floats, packs_of};
use super::pack::{Pack, read_json};
use super::{Section, compare_floats, compare_ints};
use crate::tolerance;
use anyhow::{Context, Result};
use kernels::DType;
use models::lora::{LoraConfig, LoraTargets};
use models::{Processor, WeightSource};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;

/// Begin of the names of stored dequantized weights.
const DEQUANTIZED: &str = "dequant.";

/// Whether a stored quantity belongs to the quantized weights, and is compared here or describes another model.
pub(super) fn is_own(name: &str) -> bool {
    name.starts_with(DEQUANTIZED) || name == "loss_unquantized"
}

/// Whether the weights of a pack are quantized.
#[must_use]
pub fn is_quantized(pack: &Pack) -> bool {
    pack.dir.join("dequantized.json").is_file()
}

#[derive(Deserialize)]
struct Stored {
    tensors: Vec<Tensor>,
}

#[derive(Deserialize)]
struct Tensor {
    name: String,
    shape: Vec<usize>,
    sha256_f32: String,
}

/// Compares the values of all quantized weights: by hash, and those that the cases store element by element.
///
/// # Errors
/// When a file is missing or broken.
pub fn tables(pack: &Pack) -> Result<Section> {
    let source = WeightSource::open(&pack.dir)?;
    let stored: Stored = read_json(&pack.dir.join("dequantized.json"))?;
    let mut all = Vec::new();
    let names: Vec<&String> = stored.tensors.iter().map(|tensor| &tensor.name).collect();
    let quantizations = source.quantizations();
    let ours = quantizations
        .keys()
        .filter(|name| names.contains(name))
        .count();
    let wanted = [names.len() as i64; 2];
    all.push(compare_ints(
        "quantized weights",
        &[ours as i64, quantizations.len() as i64],
        &wanted,
    ));
    for tensor in &stored.tensors {
        let values = values(&source, &tensor.name)?;
        let mut hash = Sha256::new();
        // The hashes are over values with one zero.
        values
            .iter()
            .for_each(|value| hash.update((value + 0.0).to_le_bytes()));
        let equal = format!("{:x}", hash.finalize()) == tensor.sha256_f32
            && source.shape(&tensor.name) == Some(&tensor.shape[..]);
        all.push(compare_ints(&tensor.name, &[i64::from(equal)], &[1]));
    }
    for case in &pack.cases {
        for (name, stored) in &case.expected.0 {
            if let Some(weight) = name.strip_prefix(DEQUANTIZED) {
                all.push(compare_floats(
                    name,
                    &values(&source, weight)?,
                    stored.floats()?,
                    0.0,
                ));
            }
        }
    }
    Ok(("quantized weights".into(), all))
}

fn values(source: &WeightSource, name: &str) -> Result<Vec<f32>> {
    Ok(bytemuck::pod_collect_to_vec(
        &source.read(name, DType::F32)?,
    ))
}

#[derive(Deserialize)]
struct Runs {
    case: String,
    qlora: Run,
}

#[derive(Deserialize)]
struct Run {
    optimizer: AdamW,
    rank: usize,
    alpha: f32,
    targets: Vec<String>,
    losses: Vec<f64>,
    grad_norms: Vec<f64>,
    loss_after: f64,
    trainable: usize,
}

/// The run of a pack with adapters on quantized weights.
///
/// # Errors
/// When a file is missing or broken.
pub fn trajectories(pack: &Pack, processor: &dyn Processor) -> Result<Vec<Trajectory>> {
    let Runs { case, qlora } = read_json(&pack.dir.join("trajectory.json"))?;
    let samples = packs_of(pack.family).samples(pack, pack.case(&case)?, processor)?;
    let mut losses = qlora.losses;
    losses.push(qlora.loss_after);
    let bound = tolerance::TRAJECTORY;
    let mut run = Trajectory::new("qlora", qlora.optimizer, vec![samples], losses, bound);
    run.grad_norms = qlora.grad_norms;
    run.trainable = Some(qlora.trainable);
    (run.options.tune_vision, run.options.tune_llm) = (false, false);
    run.options.lora = Some(LoraConfig {
        lora_rank: qlora.rank,
        lora_alpha: qlora.alpha,
        lora_dropout: 0.0,
        others: BTreeMap::new(),
        targets: LoraTargets::parse(&qlora.targets.join(",")),
        layers: None,
        per_projection: false,
        use_rslora: false,
        modules_to_save: Vec::new(),
    });
    let adapter = |name: &str| {
        let path = pack.dir.join(name).join("adapter_model.safetensors");
        floats(&path).with_context(|| format!("the adapter {name}"))
    };
    (run.start, run.after) = (adapter("adapter_init")?, adapter("adapter_after8")?);
    Ok(vec![run])
}

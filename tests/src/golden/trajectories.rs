//! `trajectory.json` of GLM-4V and GLM-4.1V, and of any family as `scripts/compare_reference.py` writes it.

use super::{AdamW, Case, Expected, Pack, Trajectory, floats, read_json};
use crate::tolerance;
use anyhow::{Context, Result, ensure};
use models::data::EncodedSample;
use models::lora::{LoraConfig, LoraTargets};
use models::selection::Selection;
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

#[derive(Deserialize)]
struct Stored {
    micro_batches: Vec<String>,
    losses: Vec<f64>,
    grad_norms: Vec<f64>,
    loss_after: f64,
    max_abs_loss_rounding: Option<f64>,
    token_counts: Option<Vec<usize>>,
    rank: Option<usize>,
    alpha: Option<f32>,
    targets: Option<Targets>,
    adapters: Option<[String; 2]>,
}

/// Adapted modules as peft reads them.
#[derive(Deserialize)]
#[serde(untagged)]
enum Targets {
    /// A pattern of whole module paths.
    Pattern(String),
    /// Ends of module paths.
    Ends(Vec<String>),
}

impl Targets {
    fn into_lora(self) -> LoraTargets {
        LoraTargets::Pattern(match self {
            Self::Pattern(pattern) => pattern,
            Self::Ends(names) => {
                let names: Vec<String> = names.iter().map(|t| t.replace('.', r"\.")).collect();
                format!(r".*\.({})", names.join("|"))
            }
        })
    }
}

/// Encodes the samples of a case.
type Encode<'e> = &'e dyn Fn(&Case) -> Result<Vec<EncodedSample>>;

/// The trajectories of a pack that compares with its users' own model, which states names of adapters; `None` if it does
/// not.
pub(super) fn of_users(pack: &Pack, encode: Encode<'_>) -> Result<Option<Vec<Trajectory>>> {
    let all: BTreeMap<String, Value> = read_json(&pack.dir.join("trajectory.json"))?;
    let named = all
        .get("lora")
        .is_some_and(|run| run.get("adapters").is_some());
    named.then(|| trajectories(pack, encode)).transpose()
}

/// The trajectories of a pack. Runs that show a wrong way of averaging (`_WRONG`) are left out.
pub(super) fn trajectories(pack: &Pack, encode: Encode<'_>) -> Result<Vec<Trajectory>> {
    let all: BTreeMap<String, Value> = read_json(&pack.dir.join("trajectory.json"))?;
    let optimizer: AdamW = serde_json::from_value(
        all.get("optimizer")
            .cloned()
            .context("no optimizer in trajectory.json")?,
    )?;
    let runs = all
        .iter()
        .filter(|(name, value)| value.get("losses").is_some() && !name.ends_with("_WRONG"));
    runs.map(|(name, value)| {
        let stored = serde_json::from_value(value.clone());
        let stored = stored.with_context(|| format!("{name} in trajectory.json"))?;
        trajectory(pack, encode, name, stored, optimizer.clone())
    })
    .collect()
}

fn trajectory(
    pack: &Pack,
    encode: Encode<'_>,
    name: &str,
    stored: Stored,
    optimizer: AdamW,
) -> Result<Trajectory> {
    let batch = |name: &String| encode(pack.case(name)?);
    let batches: Vec<Vec<EncodedSample>> = stored
        .micro_batches
        .iter()
        .map(batch)
        .collect::<Result<_>>()?;
    if let Some(counts) = &stored.token_counts {
        let ours = batches
            .iter()
            .map(|b| b.iter().map(EncodedSample::supervised_tokens).sum());
        let ours: Vec<usize> = ours.collect();
        ensure!(ours == *counts, "{name}: {ours:?} targets, not {counts:?}");
    }
    let mut losses = stored.losses;
    losses.push(stored.loss_after);
    let rounding = stored.max_abs_loss_rounding.unwrap_or(0.0);
    let bound = tolerance::glm_trajectory(rounding);
    let mut run = Trajectory::new(name, optimizer, batches, losses, bound);
    run.growth = bound / tolerance::glm_trajectory(0.0);
    run.grad_norms = stored.grad_norms;
    if name == "freeze_vision" {
        run.options.freeze = Some(Selection::parse("vision")?);
    }
    if let (Some(lora_rank), Some(lora_alpha), Some(targets)) =
        (stored.rank, stored.alpha, stored.targets)
    {
        (run.options.tune_vision, run.options.tune_llm) = (false, false);
        run.options.lora = Some(LoraConfig {
            lora_rank,
            lora_alpha,
            lora_dropout: 0.0,
            others: BTreeMap::new(),
            targets: targets.into_lora(),
            layers: None,
            per_projection: false,
            use_rslora: false,
            modules_to_save: Vec::new(),
        });
        let names = stored.adapters;
        let [init, after] = names.unwrap_or(["adapter_init", "adapter_after8"].map(str::to_owned));
        let adapter = |name: &str| floats(&pack.dir.join(name).join("adapter_model.safetensors"));
        (run.start, run.after) = (adapter(&init)?, adapter(&after)?);
    } else {
        run.after = weights_after(&pack.dir, name)?;
        if let Some(frozen) = &run.options.freeze {
            run.after.retain(|name, _| !frozen.contains(name));
        }
    }
    Ok(run)
}

/// Weights after the run `name` from `trajectory.safetensors`, if the pack has that file.
fn weights_after(dir: &Path, name: &str) -> Result<BTreeMap<String, Vec<f32>>> {
    let path = dir.join("trajectory.safetensors");
    if !path.is_file() {
        return Ok(BTreeMap::new());
    }
    let prefix = match name {
        "grad_accumulation_token_weighted" => "accum",
        name => name,
    };
    let mut after = BTreeMap::new();
    for (name, tensor) in Expected::read(&path)?.0 {
        if let Some(name) = name.strip_prefix(&format!("{prefix}.")) {
            after.insert(name.to_owned(), tensor.floats()?.to_vec());
        }
    }
    Ok(after)
}

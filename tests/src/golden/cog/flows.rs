//! Trajectories, the flow of the training scripts, learned prefixes, and tables of rotary angles.

use super::super::compare::{Comparison, compare_floats};
use super::super::family::{AdamW, Section, Trajectory, floats};
use super::super::pack::{Expected, Pack, read_json};
use super::encode;
use crate::tolerance;
use anyhow::{Context, Result, ensure};
use engine::ParamSpec;
use kernels::{Backend, CpuBackend, DType, Tag, Tensor};
use models::autograd::{ResidentParams, Tape};
use models::cogvlm::{CogConfig, rotary};
use models::data::EncodedSample;
use models::lora::{LoraConfig, LoraTargets};
use models::params::ADAPTER_PREFIX;
use models::selection::Selection;
use models::{ModelOptions, Processor, SampleInput, WeightSource, open_model};
use optim::GroupOptions;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Contents of `trajectory.json`.
#[derive(Deserialize)]
struct Runs {
    case: String,
    optimizer: AdamW,
    full: Vec<f64>,
    lora: Vec<f64>,
    lora_trainable_params: usize,
}

/// Fields of `adapter_config.json` that the tests read.
#[derive(Deserialize)]
struct AdapterConfig {
    r: usize,
    lora_alpha: f32,
    target_modules: Vec<String>,
}

/// Contents of `sat_flow/flow.json`.
#[derive(Deserialize)]
struct Flow {
    lora_rank: usize,
    lora_alpha: f32,
    optimizer: FlowOptimizer,
    losses: Vec<f64>,
    grad_norm_before_clip: Vec<f64>,
    trainable: Vec<Trained>,
}

#[derive(Deserialize)]
struct FlowOptimizer {
    lr: f64,
    betas: [f64; 2],
    eps: f64,
    clip_global_norm: f32,
}

#[derive(Deserialize)]
struct Trained {
    name: String,
    lr_scale: f32,
    weight_decay: f32,
    numel: usize,
}

/// Trajectories of full fine-tuning, of peft's adapters, and of the training scripts.
pub(super) fn trajectories(pack: &Pack, processor: &dyn Processor) -> Result<Vec<Trajectory>> {
    let runs: Runs = read_json(&pack.dir.join("trajectory.json"))?;
    let samples = vec![encode(pack.case(&runs.case)?, processor)?];
    let new = |name: &str, losses: &Vec<f64>| {
        let optimizer = runs.optimizer.clone();
        let (samples, losses) = (samples.clone(), losses.clone());
        Trajectory::new(name, optimizer, samples, losses, tolerance::TRAJECTORY)
    };
    let full = new("full", &runs.full);
    let mut lora = new("lora", &runs.lora);
    let config: AdapterConfig = read_json(&pack.dir.join("adapter_init/adapter_config.json"))?;
    lora.options = adapters(LoraConfig {
        lora_rank: config.r,
        lora_alpha: config.lora_alpha,
        lora_dropout: 0.0,
        others: BTreeMap::new(),
        targets: LoraTargets::parse(&config.target_modules.join(",")),
        layers: None,
        per_projection: false,
        use_rslora: false,
        modules_to_save: Vec::new(),
    });
    lora.trainable = Some(runs.lora_trainable_params);
    lora.start = floats(&pack.dir.join("adapter_init/adapter_model.safetensors"))?;
    lora.after = floats(&pack.dir.join("adapter_after8/adapter_model.safetensors"))?;
    let mut all = vec![full, lora];
    if pack.dir.join("sat_flow/flow.json").is_file() {
        all.push(scripts(pack, samples)?);
    }
    Ok(all)
}

/// Options of a run that trains only adapters.
fn adapters(config: LoraConfig) -> ModelOptions {
    let mut options = ModelOptions::new(DType::F32);
    (options.tune_vision, options.tune_llm) = (false, false);
    options.lora = Some(config);
    options
}

/// The trajectory of the training scripts: one adapter per projection, beside tensors trained in full.
fn scripts(pack: &Pack, samples: Vec<Vec<EncodedSample>>) -> Result<Trajectory> {
    let dir = pack.dir.join("sat_flow");
    let flow: Flow = read_json(&dir.join("flow.json"))?;
    let settings = flow.optimizer;
    let optimizer = AdamW {
        lr: settings.lr,
        betas: settings.betas,
        eps: settings.eps,
        weight_decay: 0.0,
    };
    let bound = tolerance::TRAJECTORY;
    let mut run = Trajectory::new("sat_flow", optimizer, samples, flow.losses, bound);
    run.max_grad_norm = Some(settings.clip_global_norm);
    run.grad_norms = flow.grad_norm_before_clip;
    run.trainable = Some(flow.trainable.iter().map(|t| t.numel).sum());
    let (mut modules, mut whole) = (BTreeSet::new(), Vec::new());
    for trained in &flow.trainable {
        let name = match half(&trained.name) {
            Some((module, half, _)) => {
                modules.insert(module.to_owned());
                adapter_name(module, half)
            }
            None => {
                let name = trained.name.replace(".original.", ".");
                whole.push(name.clone());
                name
            }
        };
        let options = GroupOptions {
            weight_decay: trained.weight_decay,
            lr_scale: trained.lr_scale,
        };
        run.groups.insert(name, options);
    }
    run.options = adapters(LoraConfig {
        lora_rank: flow.lora_rank,
        lora_alpha: flow.lora_alpha,
        lora_dropout: 0.0,
        others: BTreeMap::new(),
        targets: LoraTargets::Modules(modules),
        layers: None,
        per_projection: true,
        use_rslora: false,
        modules_to_save: Vec::new(),
    });
    run.options.train = Some(Selection::parse(&whole.join(","))?);
    run.start = stacked(floats(&dir.join("lora_init.safetensors"))?);
    let after = floats(&dir.join("after8.safetensors"))?;
    for (name, values) in &after {
        if let Some(param) = name.strip_prefix("norm.") {
            let param = param.replace(".original.", ".");
            ensure!(values.len() == 1, "{name} holds one number");
            run.norms_after.insert(param, values[0]);
        }
    }
    run.after = stacked(after);
    Ok(run)
}

/// Module, half (A or B) and projection number in the name of an adapter matrix.
fn half(name: &str) -> Option<(&str, &'static str, usize)> {
    [(".matrix_A.", "lora_A"), (".matrix_B.", "lora_B")]
        .into_iter()
        .find_map(|(mark, half)| {
            let (module, number) = name.split_once(mark)?;
            Some((module, half, number.parse().ok()?))
        })
}

fn adapter_name(module: &str, half: &str) -> String {
    format!("{ADAPTER_PREFIX}{module}.{half}.weight")
}

/// Stacks the matrices of a layer's projections along their rows.
fn stacked(matrices: BTreeMap<String, Vec<f32>>) -> BTreeMap<String, Vec<f32>> {
    let mut parts: BTreeMap<String, BTreeMap<usize, Vec<f32>>> = BTreeMap::new();
    for (name, values) in matrices {
        if let Some((module, half, part)) = half(&name) {
            let whole = parts.entry(adapter_name(module, half)).or_default();
            whole.insert(part, values);
        }
    }
    let concat = |parts: BTreeMap<usize, Vec<f32>>| parts.into_values().flatten().collect();
    parts
        .into_iter()
        .map(|(name, p)| (name, concat(p)))
        .collect()
}

/// Compares rotary angles in bf16 and learned prefixes.
pub(super) fn tables(pack: &Pack, processor: &dyn Processor) -> Result<Vec<Section>> {
    let mut all = Vec::new();
    if pack.dir.join("rope_bf16.safetensors").is_file() {
        all.push(("rope_bf16".to_owned(), angles(pack)?));
    }
    if pack.dir.join("sat_flow/ptuning.safetensors").is_file() {
        all.push(("ptuning".to_owned(), ptuning(pack, processor)?));
    }
    Ok(all)
}

/// Compares cosines and sines with those of the published code in bf16, bit for bit, at the published head dim.
fn angles(pack: &Pack) -> Result<Vec<Comparison>> {
    let stored = Expected::read(&pack.dir.join("rope_bf16.safetensors"))?;
    let config = CogConfig::load(&pack.dir)?;
    let (cos, sin) = (stored.get("cos")?, stored.get("sin")?);
    let positions: Vec<i32> = (0..cos.shape[0] as i32).collect();
    let (d, theta) = (2 * cos.shape[1], config.language.rope_theta as f32);
    let got = rotary(&positions, d, theta, DType::BF16, &CpuBackend::unlimited())?;
    let compare = |name: &str, got: &Tensor, want: &[f32]| -> Result<Comparison> {
        Ok(compare_floats(name, &got.to_f32_vec()?, want, 0.0))
    };
    Ok(vec![
        compare("cos", &got.cos, cos.floats()?)?,
        compare("sin", &got.sin, sin.floats()?)?,
    ])
}

fn ptuning(pack: &Pack, processor: &dyn Processor) -> Result<Vec<Comparison>> {
    let stored = Expected::read(&pack.dir.join("sat_flow/ptuning.safetensors"))?;
    let first = stored.get("prefix.0")?;
    let mut options = ModelOptions::new(DType::F32);
    (options.tune_vision, options.tune_llm) = (false, false);
    options.ptuning_tokens = first.shape[2];
    let model = open_model(&pack.dir, options)?;
    let weights = WeightSource::open(&pack.dir)?;
    let backend: Arc<dyn Backend> = Arc::new(CpuBackend::unlimited());
    let load = |param: &ParamSpec| -> Result<Tensor> {
        let bytes = match prefix_of(&param.name) {
            Some(layer) => {
                let values = stored.get(&format!("prefix.{layer}"))?.floats()?;
                bytemuck::cast_slice(values).to_vec()
            }
            None => weights.read(&param.name, DType::F32)?,
        };
        Ok(backend.upload(&bytes, param.shape, DType::F32, Tag::Parameters)?)
    };
    let spec = model.spec();
    let loaded = spec.params.iter().map(load).collect::<Result<_>>()?;
    let access = ResidentParams::new(backend.clone(), spec.clone(), loaded)?;
    let runs: Runs = read_json(&pack.dir.join("trajectory.json"))?;
    let samples = encode(pack.case(&runs.case)?, processor)?;
    let inputs: Vec<SampleInput<'_>> = samples.iter().map(SampleInput::from).collect();
    let batch = model.collate(&inputs, &*backend)?;
    let logits = model.full_logits(&Tape::inference(&access), &batch)?;
    let tape = Tape::training(&access);
    let loss = model.forward(&tape, &batch)?;
    let mean = (loss.sum()? / loss.supervised as f64) as f32;
    let factor = 1.0 / loss.supervised as f32;
    tape.backward(&loss, factor)?;
    let want = stored.get("logits")?.floats()?;
    let mut all = vec![
        compare_floats(
            "loss",
            &[mean],
            stored.get("loss")?.floats()?,
            tolerance::LOSS,
        ),
        compare_floats(
            "logits",
            &logits.to_f32_vec()?,
            want,
            tolerance::activation(want),
        ),
    ];
    for id in (0..spec.params.len() as u32).map(engine::ParamId) {
        let Some(layer) = prefix_of(&spec.params[id.index()].name) else {
            continue;
        };
        let name = format!("grad.prefix.{layer}");
        let grad = access
            .grad(id)
            .context("a prefix has a gradient")?
            .to_f32_vec()?;
        let largest = grad.iter().fold(0f32, |m, g| m.max(g.abs()));
        let bound = tolerance::gradient(f64::from(largest), f64::from(largest));
        let want = stored.get(&name)?.floats()?;
        all.push(compare_floats(&name, &grad, want, bound));
    }
    Ok(all)
}

/// The layer whose learned prefix a parameter is.
fn prefix_of(name: &str) -> Option<&str> {
    let layer = name.strip_suffix(".self_attn.prefix")?;
    layer.strip_prefix("model.layers.")
}

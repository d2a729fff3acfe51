//! Model, processor and plan of a run, built equally by supervisor and ranks.

use super::adapter::{check_shapes, check_trained, open_adapter};
use super::optimizer::rule;
use super::{quantize, stages};
use crate::config::{
    Collectives, GradDtype, InitChoice, PrecisionChoice, RopeChoice, RunConfig, RunPlan, Task,
    Tier, check_family,
};
use crate::error::failures::unusable;
use crate::error::{ErrorCode, Failure, chain, failures};
use crate::lang::{Text, both, text};
use crate::ui::Event;
use engine::{
    DeviceTransport, Offload, OptimizerInBackward, Plan, Precision, Slice, Stage, UnitId,
    ZeroConfig,
};
use kernels::Backend;
use models::ModelError;
use models::SampleInput;
use models::adapter::Adapter;
use models::autograd::Dropout;
use models::lora::{LoraConfig, LoraTargets};
use models::options::RopePrecision;
use models::selection::Selection;
use models::{
    Family, ModelOptions, OpenError, Processor, Tower, VisionLanguageModel, WeightSource,
    open_model, open_processor, open_shapes,
};
use optim::{AdamW, Optimizer};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// Model, processor and weight files, opened and checked against each other.
pub(crate) struct Setup {
    pub(crate) model: Arc<dyn VisionLanguageModel>,
    pub(crate) processor: Arc<dyn Processor>,
    pub(crate) weights: Option<WeightSource>,
    /// Adapters that training starts from.
    pub(crate) adapter: Option<Adapter>,
}

impl Setup {
    pub(crate) fn open(config: &RunConfig) -> Result<Self, Failure> {
        let dir = config.model_dir();
        failures::check_directory(text!("use {}", "使用 {}", dir.display()), &dir)?;
        let processor = open_processor(&dir).map_err(|e| unusable(&dir, &e))?;
        let model = model(config)?;
        let weights = match config.init {
            InitChoice::Checkpoint => {
                Some(WeightSource::open(&dir).map_err(|e| failures::weights(&e))?)
            }
            InitChoice::Random => None,
        };
        let adapter = match (start(config), &weights) {
            (Some(dir), Some(weights)) => {
                let adapter = open_adapter(dir, weights)?;
                check_shapes(&adapter, &model.spec().params)?;
                check_trained(&adapter, &model.spec().params)?;
                Some(adapter)
            }
            (Some(dir), None) => {
                return Err(Failure::usage(
                    text!(
                        "--adapter {} and --init random contradict each other",
                        "--adapter {} 与 --init random 互相矛盾",
                        dir.display()
                    ),
                    both(
                        "adapters belong to the weights that they were trained on",
                        "适配器属于训练它们时所用的权重",
                    ),
                )
                .next(both("keep one of them", "请只保留其中一个")));
            }
            (None, _) => None,
        };
        Ok(Self {
            model,
            processor,
            weights,
            adapter,
        })
    }

    /// Checks that the weight files have every tensor in the right shape. Shows which other tensors are skipped.
    pub(crate) fn check_weights(&self, show: &mut dyn FnMut(Event)) -> Result<(), Failure> {
        let Some(weights) = &self.weights else {
            return Ok(());
        };
        let unused = weights
            .check(self.model.spec())
            .map_err(|e| failures::weights(&e))?;
        let (unused, unknown): (Vec<String>, Vec<String>) = unused
            .into_iter()
            .partition(|name| is_other_part(name) || self.is_later_layer(name));
        if let Some(first) = unknown.first() {
            let more = unknown.len() - 1;
            show(Event::Warning {
                text: text!(
                    "{first} and {more} more tensors of the weight files are unknown to this model and have no effect; if they are layers, config.json belongs to another model",
                    "权重文件中的 {first} 等 {more} 个其他张量对该模型是未知的，不起作用；如果它们是层，则 config.json 属于另一个模型"
                ),
            });
        }
        for text in notes(weights) {
            let label = both("weights", "权重").into();
            show(Event::Info { label, text });
        }
        if !unused.is_empty() {
            let mut parts: BTreeMap<String, usize> = BTreeMap::new();
            for name in &unused {
                *parts.entry(other_part(name)).or_default() += 1;
            }
            let parts: Vec<String> = parts
                .iter()
                .map(|(part, n)| format!("{part} {n}"))
                .collect();
            show(Event::Info {
                label: both("weights", "权重").into(),
                text: text!(
                    "{} tensors of parts that this program does not train are skipped here and copied on export: {}",
                    "有 {} 个张量属于本程序不训练的部分，在此跳过，导出时原样复制：{}",
                    unused.len(),
                    parts.join(", ")
                ),
            });
        }
        Ok(())
    }

    /// Whether `name` is of a layer after the decoder's last one. GLM-OCR has such layers, which predict further tokens.
    fn is_later_layer(&self, name: &str) -> bool {
        let layers = self.model.cache_shape().layers;
        let index = |path: &str| path.split('.').next()?.parse::<usize>().ok();
        let rest = name.strip_prefix("model.language_model.layers.");
        rest.and_then(index).is_some_and(|layer| layer >= layers)
    }

    /// Plan of the run; with pipeline stages, that of the first one.
    pub(crate) fn plan(&self, config: &RunPlan) -> Result<Plan, Failure> {
        plan_of(config, &*self.model)
    }
}

/// What a user may not expect of the weight files.
fn notes(weights: &WeightSource) -> Vec<Text> {
    let passed_over = weights.passed_over().and_then(Path::file_name).map(|name| {
        text!(
            "the safetensors files are read, not {}",
            "读取的是 safetensors 文件，而不是 {}",
            name.display()
        )
    });
    let merged = Some(weights.merged_layers()).filter(|layers| *layers > 0).map(|layers| {
        text!(
            "LoRA matrices of {layers} layers are added to the weights; `launcher import` keeps them apart",
            "{layers} 层的 LoRA 矩阵被加到权重上；`launcher import` 会把它们分开保存"
        )
    });
    let ignored = weights.ignored();
    let ignored = ignored.first().map(|first| {
        text!(
            "{} tensors of the SAT checkpoint belong to no published model and are not read, first: {first}",
            "SAT 检查点中有 {} 个张量不属于任何已发布的模型，不会被读取，第一个：{first}",
            ignored.len()
        )
    });
    [passed_over, merged, ignored]
        .into_iter()
        .flatten()
        .collect()
}

/// Name of the part that the skipped tensor `name` belongs to: its first module, or a layer of its own.
fn other_part(name: &str) -> String {
    let modules: Vec<&str> = name.split('.').collect();
    let layer = modules
        .iter()
        .position(|module| module.parse::<usize>().is_ok());
    match layer {
        Some(layer) if modules[0] == "model" => modules[..=layer].join("."),
        _ => modules[0].to_owned(),
    }
}

/// Whether a published checkpoint has the tensor `name` for a part that this program does not train, or as a buffer.
fn is_other_part(name: &str) -> bool {
    let parts = ["apm.", "audio_projection_layer.", "tts."];
    let buffers = [".inv_freq", ".position_ids"];
    parts.iter().any(|part| name.starts_with(part)) || buffers.iter().any(|end| name.ends_with(end))
}

/// Model and plan of `config`, from `config.json` alone. No other file of the model is needed.
pub(crate) fn shapes(config: &RunPlan) -> Result<(Arc<dyn VisionLanguageModel>, Plan), Failure> {
    let dir = config.model_dir();
    failures::check_directory(text!("use {}", "使用 {}", dir.display()), &dir)?;
    let family = Family::of(&dir).map_err(|e| unusable(&dir, &e))?;
    check_family(config, family)?;
    let opened = open_shapes(&dir, model_options(config, family)?);
    let model = opened.map_err(|error| match &error {
        OpenError::Model(e) => failures::model(both("set up the model", "设置模型"), e),
        _ => unusable(&dir, &error),
    })?;
    let plan = plan_of(config, &*model)?;
    Ok((model, plan))
}

/// Directory of the adapters that training starts from.
fn start(config: &RunConfig) -> Option<&Path> {
    config.trainable.lora.as_ref()?.adapter.as_deref()
}

fn model(config: &RunConfig) -> Result<Arc<dyn VisionLanguageModel>, Failure> {
    let dir = config.model_dir();
    let family = Family::of(&dir).map_err(|e| unusable(&dir, &e))?;
    check_family(config, family)?;
    open_model(&dir, model_options(config, family)?).map_err(|error| match &error {
        OpenError::Model(e) => failures::model(both("set up the model", "设置模型"), e),
        _ => unusable(&dir, &error),
    })
}

/// Model and plan of `config` for another attempt to fit. Reads only the configuration in the model directory.
pub(crate) fn replan(config: &RunPlan) -> Result<(Arc<dyn VisionLanguageModel>, Plan), Failure> {
    let model = model(config)?;
    let plan = plan_of(config, &*model)?;
    Ok((model, plan))
}

fn plan_of(config: &RunPlan, model: &dyn VisionLanguageModel) -> Result<Plan, Failure> {
    let mut zero = zero_config(config, model)?;
    if config.mp_size > 1 {
        let counts = stages::counts(config, model, &zero)?;
        zero.slice = Some(Slice { counts, stage: 0 });
    }
    let mut spec = model.spec().clone();
    if config.task == Task::Answer {
        spec.params
            .iter_mut()
            .for_each(|param| param.trainable = false);
    }
    Plan::new(spec, zero, config.data_ranks())
        .map_err(|e| failures::engine(both("plan the run", "计划运行"), &e.into()))
}

/// Costs of the model's units in one step, by which pipeline stages are balanced.
pub(crate) fn unit_costs(
    config: &RunPlan,
    model: &dyn VisionLanguageModel,
) -> Result<Vec<stages::Cost>, Failure> {
    stages::costs(config, model, &zero_config(config, model)?)
}

pub(crate) fn precision(config: &RunConfig) -> Precision {
    match config.precision {
        PrecisionChoice::Bf16 => Precision::Bf16,
        PrecisionChoice::Fp16 => Precision::Fp16,
        PrecisionChoice::F32 => Precision::F32,
        PrecisionChoice::PureBf16 => Precision::PureBf16,
    }
}

fn model_options(config: &RunConfig, family: Family) -> Result<ModelOptions, Failure> {
    let mut options = ModelOptions::new(precision(config).weight_dtype());
    options.tune_vision = config.trainable.tune_vision;
    options.tune_llm = config.trainable.tune_llm;
    options.ptuning_tokens = config.trainable.ptuning_tokens;
    options.rope_precision = match config.rope_precision {
        RopeChoice::Model => RopePrecision::Model,
        RopeChoice::F32 => RopePrecision::F32,
    };
    let started = start(config).map(|dir| {
        Adapter::open(dir).map_err(|error| {
            let title = text!(
                "cannot use the adapter {}",
                "无法使用适配器 {}",
                dir.display()
            );
            Failure::new(ErrorCode::ModelFiles, title, chain(&error))
        })
    });
    // The modules of saved adapters, with the rank and alpha of each.
    let started = started.transpose()?.and_then(|adapter| adapter.lora());
    options.lora = config.trainable.lora.as_ref().map(|lora| LoraConfig {
        lora_rank: lora.lora_rank,
        lora_alpha: lora.lora_alpha as f32,
        lora_dropout: lora.lora_dropout as f32,
        others: started
            .as_ref()
            .map_or_else(BTreeMap::new, |own| own.others.clone()),
        targets: match &started {
            Some(own) => own.targets.clone(),
            None => LoraTargets::parse(lora.target_modules(family)),
        },
        layers: lora.layers.clone(),
        per_projection: lora.per_projection,
        use_rslora: lora.use_rslora,
        modules_to_save: lora.modules_to_save(family, config.trainable.tune_vision),
    });
    options.quantized = quantize::quantized(config)?;
    let selection = |flag: &str, text: &Option<String>| {
        let parsed = text.as_deref().map(Selection::parse).transpose();
        parsed.map_err(|error| failures::selection(flag, &error))
    };
    options.train = selection("--train", &config.trainable.train)?;
    options.freeze = selection("--freeze", &config.trainable.freeze)?;
    Ok(options)
}

fn zero_config(config: &RunPlan, model: &dyn VisionLanguageModel) -> Result<ZeroConfig, Failure> {
    let tier = |tier: &Tier| match tier {
        Tier::None => engine::Tier::Device,
        Tier::Cpu => engine::Tier::Host,
        Tier::Nvme(_) => engine::Tier::Nvme,
    };
    Ok(ZeroConfig {
        stage: Stage::try_from(config.zero).map_err(|_| {
            Failure::usage(
                both("--zero is out of range", "--zero 超出范围"),
                both("stages are 0, 1, 2 and 3", "阶段为 0、1、2 和 3"),
            )
        })?,
        precision: precision(config),
        grad_dtype: config.numbers.grad_dtype.map(|dtype| match dtype {
            GradDtype::F32 => engine::GradDtype::F32,
            GradDtype::Bf16 => engine::GradDtype::Bf16,
        }),
        shard_group: config.shard_groups(),
        shares_host_memory: config.world_size > 1 && config.ranks_here.is_none(),
        offload: Offload {
            param: tier(&config.offload.param),
            optimizer: tier(&config.offload.optimizer),
            activation: tier(&config.offload.activation),
        },
        prefetch_weights: config.prefetch_weights(),
        recomputed: model
            .spec()
            .layer_groups(config.checkpoint_num_layers, &|unit| {
                !keeps(config, model, unit)
            }),
        device_transport: match config.resolved_collectives() {
            Collectives::Ipc => DeviceTransport::Peers,
            Collectives::Nccl => DeviceTransport::Nccl,
            Collectives::Auto | Collectives::Shm => DeviceTransport::Host,
        },
        max_grad_norm: config.optimizer.max_grad_norm.map(|norm| norm as f32),
        optimizer_in_backward: config.optimizer_in_backward_bytes().map(|bytes| {
            OptimizerInBackward {
                most_elems: bytes / second_bytes_per_elem(config),
                single_micro_batch: config.batch.accumulation_steps == 1,
            }
        }),
        optimizer_in_forward: config.updates_in_forward(),
        states_in_blocks: config.numbers.eight_bit,
        seed: config.seed,
        ..ZeroConfig::default()
    })
}

/// Bytes per element of the second copy of states in a unit updated in backward: weight, master weight and moments. For
/// 8-bit moments at most that, since some parameters keep f32.
pub(crate) fn second_bytes_per_elem(config: &RunConfig) -> u64 {
    let precision = precision(config);
    let rule = AdamW {
        eight_bit: false,
        ..rule(config)
    };
    let states = rule.state_bytes_per_elem(precision);
    (precision.weight_dtype().size_bytes() + states) as u64
}

/// Whether a unit's activations are stored instead of being recomputed in backward.
pub(crate) fn keeps(config: &RunConfig, model: &dyn VisionLanguageModel, unit: UnitId) -> bool {
    let again = config.checkpoint_activations;
    !match model.tower(unit) {
        Tower::Vision => again.vit,
        Tower::Resampler => again.resampler,
        Tower::Language => again.llm,
    }
}

/// Random state of dropout for a micro-batch. `None` if adapters have no dropout. `keys` are the samples' positions
/// in the data stream.
pub(crate) fn dropout(
    config: &RunConfig,
    keys: &[u64],
    samples: &[SampleInput<'_>],
    backend: &dyn Backend,
) -> Result<Option<Dropout>, ModelError> {
    let lora = config.trainable.lora.as_ref();
    let drops = lora.is_some_and(|lora| lora.lora_dropout > 0.0);
    drops
        .then(|| Dropout::new(config.seed, keys, samples, backend))
        .transpose()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{self, Command, resolve};
    use crate::rank_env::Env;
    use serde_json::{Value, json};

    /// The layers of every family are found by the names of their units, in the language model and in every vision tower.
    #[test]
    fn layers_of_every_family_form_recompute_groups() {
        let configs = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/commands/synth/configs");
        for entry in std::fs::read_dir(configs).expect("the configurations") {
            let directory = tempfile::tempdir().expect("temp dir");
            let published = entry.expect("an entry").path();
            std::fs::copy(&published, directory.path().join("config.json")).expect("copied");
            let dir = directory.path().display();
            let line = format!(
                "--model {dir} --data d --output o --zero 3 --precision bf16 --checkpoint-num-layers 4"
            );
            let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
            let Command::Train { args, .. } = cli::parse(&words).expect("parses") else {
                panic!("a training line");
            };
            let env = Env::from_lookup(&|_| None).expect("an environment");
            let config = resolve(&args, &env).expect("resolves").config;
            let (model, plan) = shapes(&config.draft()).expect("a plan");
            let grouped = |tower: Tower| {
                let groups = plan.config().recomputed.iter().filter(|group| {
                    let mut units = (*group).clone().map(UnitId);
                    units.all(|unit| model.tower(unit) == tower)
                });
                groups.map(|group| group.len()).sum::<usize>()
            };
            let (llm, vision) = (grouped(Tower::Language), grouped(Tower::Vision));
            let units = plan.units().iter();
            let of_vision = units.filter(|unit| model.tower(unit.id) == Tower::Vision);
            // All but the first and last units, and what a group of four leaves.
            let name = published.display();
            let layers = model.cache_shape().layers;
            assert!(llm + 8 >= layers, "{name}: {llm} of {layers} layers");
            assert!(vision + 6 >= of_vision.count(), "{name}: {vision} layers");
        }
    }

    /// `config.json` of the published checkpoint.
    fn published(family: Family) -> Value {
        let vision = |image_size: usize, positions: usize| {
            json!({
                "dropout_prob": 0.0, "hidden_act": "gelu", "in_channels": 3, "num_hidden_layers": 63,
                "hidden_size": 1792, "patch_size": 14, "num_heads": 16, "intermediate_size": 15360,
                "layer_norm_eps": 1e-6, "image_size": image_size, "num_positions": positions,
            })
        };
        let cog = |architecture: &str, more: Value| {
            let mut config = json!({
                "architectures": [architecture], "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
                "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008, "vocab_size": 32000,
                "max_position_embeddings": 2048, "num_attention_heads": 32, "num_hidden_layers": 32,
                "rms_norm_eps": 1e-5, "template_version": "chat", "tie_word_embeddings": false,
            });
            let fields = config.as_object_mut().expect("an object");
            fields.extend(more.as_object().cloned().unwrap_or_default());
            config
        };
        match family {
            Family::CogAgent => cog(
                "CogAgentForCausalLM",
                json!({
                    "vision_config": vision(224, 257), "cross_image_size": 1120,
                    "cross_hidden_size": 1024, "cross_compute_hidden_size": 1024,
                }),
            ),
            Family::CogVlm2 => cog(
                "CogVLMForCausalLM",
                json!({
                    "vision_config": vision(1344, 9217), "intermediate_size": 14336, "vocab_size": 128_256,
                    "bos_token_id": 128_000, "eos_token_id": 128_001, "pad_token_id": 128_002,
                    "num_multi_query_heads": 8, "max_position_embeddings": 8192,
                }),
            ),
            _ => cog(
                "CogVLMForCausalLM",
                json!({"vision_config": vision(490, 1226)}),
            ),
        }
    }

    /// Trainable parameters of a preset on a model of the published sizes.
    fn trainable(preset: &str, text: &str) -> usize {
        let directory = tempfile::tempdir().expect("temp dir");
        std::fs::write(directory.path().join("config.json"), text).expect("written");
        let dir = directory.path().display();
        let line = format!("--preset {preset} --model {dir} --data {dir} --output {dir}");
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        let Command::Train { args, .. } = cli::parse(&words).expect("parses") else {
            panic!("a training line");
        };
        let env = Env::from_lookup(&|_| None).expect("an environment");
        let config = resolve(&args, &env).expect("resolves").config;
        let (model, _) = shapes(&config.draft()).expect("shapes");
        model.spec().elems().1
    }

    #[test]
    fn presets_train_the_parameters_of_their_scripts() {
        for (preset, family, count) in [
            ("cogvlm-captcha", Family::CogVlm, 515_123_968),
            ("cogagent-captcha", Family::CogAgent, 11_672_683_712),
            ("cogvlm2-peft", Family::CogVlm2, 2_621_440),
        ] {
            let text = published(family).to_string();
            assert_eq!(trainable(preset, &text), count, "{preset}");
        }
        let flash = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/src/commands/synth/configs/glm-4.6v-flash.json"
        );
        let text = std::fs::read_to_string(flash).expect("is there");
        assert_eq!(trainable("glm-4.6v-flash-lora", &text), 8_028_160);
    }
}

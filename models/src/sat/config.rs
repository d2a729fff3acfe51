//! `model_config.json` of SAT and `config.json` of the Hub, each from the other.
//!
//! SAT's file has no epsilon of RMSNorm, no template and no sizes of CogAgent's second tower: the first two are
//! constants of the published models, the last come from the shapes of the checkpoint, as all sizes do without the file.

use super::{Tensors, ranks};
use crate::places;
use crate::torch_file::TorchDtype;
use crate::weights::{Result, WeightError};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// Name of SAT's file.
pub const FILE: &str = "model_config.json";
/// Epsilon of RMSNorm in all published models.
const RMS_EPS: f64 = 1e-5;
/// Epsilon of the EVA tower's norms in all published models.
const EVA_EPS: f64 = 1e-6;
/// Width and heads of the published EVA tower. Its heads leave no trace in any shape.
const EVA: (u64, u64) = (1792, 16);
/// Width of CogAgent's published second tower, and of its heads.
const CROSS: (u64, u64) = (1024, 64);
/// Ids of the tokens that begin, end and pad a sequence: of Vicuna and of Llama 3.
const TOKENS: [u64; 3] = [1, 2, 0];
const TOKENS_2: [u64; 3] = [128_000, 128_001, 128_002];
/// Ratio of the inner width in CogAgent's second tower.
const RATIO: f64 = 2.6667;

/// Content of `config.json` for the SAT checkpoint at `model`: from its `model_config.json`, or a `config.json` of its
/// kind beside the tokenizer, or from the shapes of its tensors.
///
/// # Errors
/// Neither `model_config.json` nor the shapes tell the sizes.
pub fn hub(model: &Path) -> Result<Map<String, Value>> {
    let dirs = &super::rank_directories(model)[..];
    // An iteration of a checkpoint has it one level up.
    let above = dirs[0].parent().map(|above| above.join(FILE));
    let own = dirs[0].join(FILE);
    let path = above
        .filter(|path| !super::rank_files(&dirs[0]).is_empty() && path.is_file())
        .unwrap_or(own);
    let own = match crate::text::read_regular(&path) {
        Ok(bytes) => {
            let parsed = serde_json::from_slice(&bytes);
            parsed.map_err(|source| WeightError::Header { path, source })?
        }
        Err(_) => match borrowed(model) {
            Some(config) => return Ok(config),
            None => Map::new(),
        },
    };
    let sizes = match own.is_empty() {
        true => Some(Sizes::of(&dirs[0], dirs)?),
        // Opening the weights says what is wrong with them.
        false => Sizes::of(&dirs[0], dirs).ok(),
    };
    let made = match (&sizes, own.is_empty()) {
        (Some(sizes), true) => sizes.model_config(&dirs[0])?,
        _ => own,
    };
    let beside = || {
        let config = borrowed(model)?;
        config.get("cross_vision_config")?["head_width"].as_u64()
    };
    from_sat(&made, sizes.as_ref(), &dirs[0], &beside)
}

/// Content of the `config.json` of the model at `model`, which is made if a SAT checkpoint has none.
///
/// # Errors
/// The file cannot be read, or as [`hub`].
pub fn of_model(model: &Path) -> Result<Map<String, Value>> {
    let path = places::main(model).join("config.json");
    if !path.exists() && super::is_checkpoint(&places::main(model)) {
        return hub(model);
    }
    let bytes = crate::text::read_regular(&path).map_err(|source| {
        let path = path.clone();
        WeightError::Read { path, source }
    })?;
    serde_json::from_slice(&bytes).map_err(|source| WeightError::Header { path, source })
}

/// A `config.json` of CogVLM, CogVLM2 or CogAgent in another directory of the location `model`.
fn borrowed(model: &Path) -> Option<Map<String, Value>> {
    let others = places::directories(model).into_iter().skip(1);
    let mut configs = others.filter_map(|dir| {
        let bytes = crate::text::read_regular(&dir.join("config.json")).ok()?;
        serde_json::from_slice::<Map<String, Value>>(&bytes).ok()
    });
    configs.find(|config| {
        let architecture = config.get("architectures").and_then(|all| all[0].as_str());
        architecture.is_some_and(|class| class.starts_with("Cog"))
    })
}

fn unknown(dir: &Path, field: &str) -> WeightError {
    WeightError::Sat {
        dir: dir.to_owned(),
        reason: format!("does not say {field}: put the {FILE} of its model there"),
    }
}

fn from_sat(
    own: &Map<String, Value>,
    sizes: Option<&Sizes>,
    dir: &Path,
    head_width_beside: &dyn Fn() -> Option<u64>,
) -> Result<Map<String, Value>> {
    let need = |field: &str| {
        let value = own.get(field).and_then(Value::as_u64);
        value.ok_or_else(|| unknown(dir, field))
    };
    let vision = own.get("eva_args").and_then(Value::as_object);
    let eva = |field: &str| {
        let value = vision
            .and_then(|eva| eva.get(field))
            .and_then(Value::as_u64);
        value.ok_or_else(|| unknown(dir, &format!("eva_args.{field}")))
    };
    let class = own
        .get("model_class")
        .and_then(Value::as_str)
        .unwrap_or_default();
    let is_agent = class.contains("CogAgent");
    if !is_agent && !class.contains("CogVLM") {
        return Err(WeightError::Sat {
            dir: dir.to_owned(),
            reason: format!(
                "has the model class {class:?}, which is none of CogVLM, CogVLM2 and CogAgent"
            ),
        });
    }
    let heads = need("num_attention_heads")?;
    let grouped = own
        .get("num_multi_query_heads")
        .and_then(Value::as_u64)
        .filter(|heads| *heads > 0);
    let side = vision
        .and_then(|eva| eva.get("image_size"))
        .and_then(|size| match size {
            Value::Array(sides) => sides.first()?.as_u64(),
            other => other.as_u64(),
        });
    let side = side.ok_or_else(|| unknown(dir, "eva_args.image_size"))?;
    let patch = eva("patch_size")?.max(1);
    let [bos, eos, pad] = if grouped.is_some() { TOKENS_2 } else { TOKENS };
    let token = |field: &str, usual: u64| own.get(field).cloned().unwrap_or_else(|| usual.into());
    let mut hub = json!({
        "architectures": [if is_agent { "CogAgentForCausalLM" } else { "CogVLMForCausalLM" }],
        "bos_token_id": token("bos_token_id", bos),
        "eos_token_id": token("eos_token_id", eos),
        "hidden_act": "silu",
        "hidden_size": need("hidden_size")?,
        "initializer_range": 0.02,
        "intermediate_size": need("inner_hidden_size")?,
        "max_position_embeddings": own.get("max_sequence_length").cloned().unwrap_or(2048.into()),
        "num_attention_heads": heads,
        "num_hidden_layers": need("num_layers")?,
        "pad_token_id": token("pad_token_id", pad),
        "rms_norm_eps": RMS_EPS,
        "template_version": "chat",
        "tie_word_embeddings": false,
        "use_cache": true,
        "vision_config": {
            "dropout_prob": 0.0,
            "hidden_act": "gelu",
            "hidden_size": eva("hidden_size")?,
            "image_size": side,
            "in_channels": eva("in_channels").unwrap_or(3),
            "intermediate_size": eva("inner_hidden_size")?,
            "layer_norm_eps": vision.and_then(|eva| eva.get("layernorm_epsilon")).cloned().unwrap_or(EVA_EPS.into()),
            "num_heads": eva("num_attention_heads")?,
            "num_hidden_layers": eva("num_layers")?,
            "num_positions": (side / patch) * (side / patch) + 1,
            "patch_size": patch,
        },
        "vocab_size": need("vocab_size")?,
    });
    let mut fields = hub.as_object_mut().map(std::mem::take).unwrap_or_default();
    if let Some(dtype) = sizes.and_then(Sizes::dtype) {
        fields.insert("torch_dtype".into(), dtype.into());
    }
    if let Some(grouped) = grouped {
        fields.insert("num_multi_query_heads".into(), grouped.into());
    }
    if is_agent {
        let head = need("cross_hidden_size_per_attention_head")?;
        fields.insert(
            "cross_hidden_size".into(),
            need("cross_attn_hidden_size")?.into(),
        );
        fields.insert("cross_compute_hidden_size".into(), (head * heads).into());
        fields.insert("cross_image_size".into(), need("cross_image_pix")?.into());
        if let Some(sizes) = sizes {
            let tower = sizes.second_tower(head_width_beside);
            let tower = tower.ok_or_else(|| WeightError::Sat {
                dir: dir.to_owned(),
                reason: "does not say the width of the heads of its second tower: put the config.json of its model \
                         beside the tokenizer"
                    .to_owned(),
            })?;
            fields.insert("cross_vision_config".into(), tower);
        }
    }
    Ok(fields)
}

/// Content of `model_config.json` for the model that `hub` describes, written by `ranks` ranks.
#[must_use]
pub fn sat(hub: &Map<String, Value>, ranks: usize) -> Value {
    let field = |name: &str| hub.get(name).cloned().unwrap_or(Value::Null);
    let vision = |name: &str| {
        hub.get("vision_config")
            .map_or(Value::Null, |vision| vision[name].clone())
    };
    let is_agent = field("architectures")[0] == "CogAgentForCausalLM";
    let grouped = hub.get("num_multi_query_heads");
    let positions = vision("num_positions").as_u64().unwrap_or(1);
    let (class, tokenizer, pooled) = match (is_agent, grouped) {
        (true, _) => ("CogAgentModel", "vicuna-7b-v1.5", 1),
        (false, Some(_)) => ("CogVLM2Model", "Meta-Llama-3-8B-Instruct", 4),
        (false, None) => ("CogVLMModel", "vicuna-7b-v1.5", 1),
    };
    let side = vision("image_size");
    let mut made = json!({
        "model_class": class,
        "tokenizer_type": tokenizer,
        "num_layers": field("num_hidden_layers"),
        "hidden_size": field("hidden_size"),
        "num_attention_heads": field("num_attention_heads"),
        "vocab_size": field("vocab_size"),
        "layernorm_order": "pre",
        "model_parallel_size": ranks,
        "max_sequence_length": field("max_position_embeddings"),
        "use_bias": false,
        "inner_hidden_size": field("intermediate_size"),
        "image_length": (positions - 1) / pooled,
        "image_size": side,
        "eva_args": {
            "model_class": "EVA2CLIPModel",
            "num_layers": vision("num_hidden_layers"),
            "hidden_size": vision("hidden_size"),
            "num_attention_heads": vision("num_heads"),
            "vocab_size": 1,
            "layernorm_order": "post",
            "model_parallel_size": ranks,
            "max_sequence_length": positions,
            "inner_hidden_size": vision("intermediate_size"),
            "use_final_layernorm": false,
            "layernorm_epsilon": vision("layer_norm_eps"),
            "row_parallel_linear_final_bias": false,
            "image_size": [side, side],
            "pre_len": 1,
            "post_len": 0,
            "in_channels": vision("in_channels"),
            "num_classes": 0,
            "patch_size": vision("patch_size"),
        },
        "bos_token_id": field("bos_token_id"),
        "eos_token_id": field("eos_token_id"),
        "pad_token_id": field("pad_token_id"),
    });
    if let Some(grouped) = grouped {
        made["num_multi_query_heads"] = grouped.clone();
    }
    if is_agent {
        let number = |name: &str, usual: u64| field(name).as_u64().unwrap_or(usual);
        let heads = number("num_attention_heads", 32).max(1);
        made["is_decoder"] = true.into();
        made["cross_attn_hidden_size"] = number("cross_hidden_size", 1024).into();
        made["cross_image_pix"] = number("cross_image_size", 1120).into();
        made["cross_hidden_size_per_attention_head"] =
            (number("cross_compute_hidden_size", 1024) / heads).into();
    }
    made
}

/// Sizes that the shapes of a checkpoint tell.
struct Sizes {
    /// Tensors of rank 0, by their names in SAT.
    tensors: Tensors,
    ranks: u64,
}

impl Sizes {
    fn of(dir: &Path, dirs: &[PathBuf]) -> Result<Self> {
        let (_, mut all) = ranks(dirs)?;
        if all.is_empty() {
            return Err(unknown(dir, "its sizes"));
        }
        let ranks = all.len() as u64;
        let tensors = all.swap_remove(0);
        Ok(Self { tensors, ranks })
    }

    /// The extent `axis` of the tensor `name`.
    fn extent(&self, name: &str, axis: usize) -> Option<u64> {
        let original = || {
            self.tensors
                .get(&name.replace(".weight", ".original.weight"))
        };
        let tensor = self.tensors.get(name).or_else(original)?;
        Some(*tensor.shape.get(axis)? as u64)
    }

    /// Number format of the output head, as transformers names it.
    fn dtype(&self) -> Option<&'static str> {
        match self.tensors.get("mixins.lm.lm_head.weight")?.dtype {
            TorchDtype::BF16 => Some("bfloat16"),
            TorchDtype::F16 => Some("float16"),
            TorchDtype::F32 => Some("float32"),
            _ => None,
        }
    }

    /// Number of the blocks whose names begin with `prefix`.
    fn blocks(&self, prefix: &str) -> u64 {
        let numbers = self.tensors.keys().filter_map(|name| {
            let number = name.strip_prefix(prefix)?.split('.').next()?;
            number.parse::<u64>().ok()
        });
        numbers.max().map_or(0, |last| last + 1)
    }

    /// A `model_config.json` for a directory without one.
    fn model_config(&self, dir: &Path) -> Result<Map<String, Value>> {
        const EVA_MODEL: &str = "mixins.eva.vit_model";
        let found = |name: &str, axis: usize| {
            self.extent(name, axis)
                .ok_or_else(|| unknown(dir, &format!("the shape of {name}")))
        };
        let hidden = found("transformer.final_layernorm.weight", 0)?;
        let head_dim = 2 * found(super::names::FREQUENCIES, 0)?.max(1);
        let rows = self.ranks * found("transformer.layers.0.attention.query_key_value.weight", 0)?;
        let grouped = match rows.saturating_sub(hidden) / 2 / head_dim {
            kv if kv * head_dim == hidden => 0,
            kv => kv,
        };
        let width = found(
            "mixins.eva.vit_model.transformer.position_embeddings.weight",
            1,
        )?;
        let positions = found(
            "mixins.eva.vit_model.transformer.position_embeddings.weight",
            0,
        )?;
        let patch = found("mixins.eva.vit_model.mixins.patch_embedding.proj.weight", 2)?;
        let side = (positions.saturating_sub(1)).isqrt() * patch;
        if width != EVA.0 {
            return Err(unknown(dir, "the number of heads of its vision tower"));
        }
        let cross = "transformer.layers.0.cross_attention.query.weight";
        let is_agent = self.extent(cross, 0).is_some();
        let class = match (is_agent, grouped) {
            (true, _) => "CogAgentModel",
            (false, 0) => "CogVLMModel",
            _ => "CogVLM2Model",
        };
        let mut made = json!({
            "model_class": class,
            "num_layers": self.blocks("transformer.layers."),
            "hidden_size": hidden,
            "num_attention_heads": hidden / head_dim,
            "num_multi_query_heads": grouped,
            "vocab_size": self.ranks * found("mixins.lm.lm_head.weight", 0)?,
            "inner_hidden_size": self.ranks * found("mixins.mlp.gate_proj.0.weight", 0)?,
            "eva_args": {
                "num_layers": self.blocks(&format!("{EVA_MODEL}.transformer.layers.")),
                "hidden_size": width,
                "num_attention_heads": EVA.1,
                "inner_hidden_size": self.ranks * found("mixins.eva.vit_model.transformer.layers.0.mlp.dense_h_to_4h.weight", 0)?,
                "image_size": [side, side],
                "patch_size": patch,
            },
        });
        if is_agent {
            let tower = self.extent("mixins.encoder.pos_embed", 0).unwrap_or(0);
            let patch = self
                .extent("mixins.encoder.vit.model.patch_embed.proj.weight", 2)
                .unwrap_or(14);
            made["cross_attn_hidden_size"] = found("mixins.encoder.pos_embed", 1)?.into();
            made["cross_image_pix"] = (tower.isqrt() * patch).into();
            made["cross_hidden_size_per_attention_head"] =
                (self.ranks * found(cross, 0)? / (hidden / head_dim).max(1)).into();
        }
        Ok(made.as_object_mut().map(std::mem::take).unwrap_or_default())
    }

    /// `cross_vision_config` of CogAgent. The width of a head is that of the rotary table, which is a buffer: where a
    /// checkpoint lacks it, that of a `config.json` beside the tokenizer, or of the published tower.
    fn second_tower(&self, head_width_beside: &dyn Fn() -> Option<u64>) -> Option<Value> {
        let extent =
            |name: &str, axis| self.extent(&format!("mixins.encoder.vit.model.{name}"), axis);
        let width = extent("patch_embed.proj.weight", 0)?;
        let inner = extent("blocks.0.mlp.w1.weight", 0)?;
        let head_width = extent("rope.freqs_cos", 1)
            .or_else(head_width_beside)
            .or((width == CROSS.0).then_some(CROSS.1))?;
        let ratio = match (width as f64 * RATIO) as u64 == inner {
            true => RATIO,
            false => (inner as f64 + 0.5) / width as f64,
        };
        Some(json!({
            "embed_dim": extent("head.weight", 0)?,
            "layers": self.blocks("mixins.encoder.vit.model.blocks."),
            "width": width,
            "head_width": head_width,
            "mlp_ratio": ratio,
            "patch_size": extent("patch_embed.proj.weight", 2)?,
            "pt_hw_seq_len": 16,
            "intp_freq": true,
            "naiveswiglu": true,
            "subln": true,
        }))
    }
}

//! Reader of GLM-4V's `config.json`. It checks everything once, so the model code need not.

use std::path::Path;

use serde::Deserialize;

use crate::config::{
    self, ConfigError, EosIds, at_most, divisible, no_dropout, positive, size, unsupported,
};
use crate::eva::{EvaConfig, RawEva};

/// Configuration of the whole model.
#[derive(Clone, Debug, PartialEq)]
pub struct Glm4vConfig {
    /// Sizes of the decoder.
    pub language: LanguageConfig,
    /// Sizes of the vision tower.
    pub vision: EvaConfig,
    /// Divisor of every row of an image that enters the language model.
    pub scaling_factor: f64,
    /// Tokens that end an answer.
    pub eos_ids: Vec<i32>,
}

/// Sizes of the decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct LanguageConfig {
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the gated MLPs, in the decoder and in the projector.
    pub intermediate_size: usize,
    /// Decoder blocks.
    pub num_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Elements per head. All heads together may be wider or narrower than the residual stream.
    pub head_dim: usize,
    /// Rows of the embedding and of the output head.
    pub vocab_size: usize,
    /// Epsilon of every norm.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Whether queries, keys and values have a bias.
    pub qkv_bias: bool,
}

impl LanguageConfig {
    /// Number of elements at the front of a head that rotate.
    #[must_use]
    pub fn rotary_dim(&self) -> usize {
        self.head_dim / 2
    }
}

impl Glm4vConfig {
    /// Reads `config.json` of the model directory `dir`.
    ///
    /// # Errors
    /// [`ConfigError`] if the file is missing or invalid, or describes a model that is not supported.
    pub fn load(dir: &Path) -> Result<Self, ConfigError> {
        let (bytes, path) = config::read(dir)?;
        Self::parse(&bytes, &path)
    }

    /// Parses the content of a `config.json`; `path` appears in errors.
    ///
    /// # Errors
    /// As [`Glm4vConfig::load`].
    pub fn parse(bytes: &[u8], path: &Path) -> Result<Self, ConfigError> {
        let invalid = |source| ConfigError::Json {
            path: path.to_owned(),
            source,
        };
        let raw: Raw = serde_json::from_slice(bytes).map_err(invalid)?;
        if raw.model_type != "chatglm" {
            return Err(ConfigError::UnsupportedModel {
                found: raw.model_type,
            });
        }
        let vision = raw.vision_config.clone();
        let scaling: Scaling = serde_json::from_value(vision.clone()).map_err(invalid)?;
        let vision: RawEva = serde_json::from_value(vision).map_err(invalid)?;
        let eos_ids = raw.eos_token_id.clone();
        let config = Self {
            language: raw.resolve()?,
            vision: vision.resolve()?,
            scaling_factor: positive("vision_config.scaling_factor", scaling.scaling_factor)?,
            eos_ids: eos_ids.map_or_else(Vec::new, EosIds::into_vec),
        };
        // 2 x 2 patches become one feature.
        let grid = config.vision.grid();
        divisible("vision_config.image_size / patch_size", grid, 2)?;
        Ok(config)
    }

    /// Number of features of an image, without the two learned rows around them.
    #[must_use]
    pub fn features(&self) -> usize {
        self.vision.patches() / 4
    }
}

#[derive(Deserialize)]
struct Scaling {
    #[serde(default = "one")]
    scaling_factor: f64,
}

#[derive(Deserialize)]
struct Raw {
    #[serde(default)]
    model_type: String,
    hidden_size: usize,
    ffn_hidden_size: usize,
    num_layers: usize,
    num_attention_heads: usize,
    multi_query_group_num: usize,
    kv_channels: usize,
    padded_vocab_size: usize,
    layernorm_epsilon: f64,
    #[serde(default = "one")]
    rope_ratio: f64,
    #[serde(default)]
    attention_dropout: f64,
    #[serde(default)]
    hidden_dropout: f64,
    #[serde(default)]
    add_qkv_bias: bool,
    eos_token_id: Option<EosIds>,
    vision_config: serde_json::Value,
    #[serde(flatten)]
    shape: Shape,
}

/// Switches for which only one value is supported.
#[derive(Deserialize)]
struct Shape {
    add_bias_linear: Option<bool>,
    rmsnorm: Option<bool>,
    post_layer_norm: Option<bool>,
    original_rope: Option<bool>,
    multi_query_attention: Option<bool>,
    apply_residual_connection_post_layernorm: Option<bool>,
    tie_word_embeddings: Option<bool>,
}

fn one() -> f64 {
    1.0
}

impl Shape {
    fn check(&self) -> Result<(), ConfigError> {
        let after = self.apply_residual_connection_post_layernorm;
        for (field, found, expected) in [
            ("add_bias_linear", self.add_bias_linear, "false"),
            ("rmsnorm", self.rmsnorm, "true"),
            ("post_layer_norm", self.post_layer_norm, "true"),
            ("original_rope", self.original_rope, "true"),
            ("multi_query_attention", self.multi_query_attention, "true"),
            ("apply_residual_connection_post_layernorm", after, "false"),
            ("tie_word_embeddings", self.tie_word_embeddings, "false"),
        ] {
            match found.map(|found| found.to_string()) {
                Some(found) if found != expected => {
                    return Err(unsupported(field, found, expected));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

impl Raw {
    fn resolve(self) -> Result<LanguageConfig, ConfigError> {
        const HEADS: &str = "num_attention_heads";
        self.shape.check()?;
        no_dropout("attention_dropout", self.attention_dropout)?;
        no_dropout("hidden_dropout", self.hidden_dropout)?;
        divisible(HEADS, self.num_attention_heads, self.multi_query_group_num)?;
        // Adjacent pairs in the first half of a head rotate.
        divisible("kv_channels", self.kv_channels, 4)?;
        Ok(LanguageConfig {
            hidden_size: size("hidden_size", self.hidden_size)?,
            intermediate_size: size("ffn_hidden_size", self.ffn_hidden_size)?,
            num_layers: size("num_layers", self.num_layers)?,
            num_heads: size(HEADS, self.num_attention_heads)?,
            num_kv_heads: size("multi_query_group_num", self.multi_query_group_num)?,
            head_dim: at_most("kv_channels", size("kv_channels", self.kv_channels)?, 128)?,
            vocab_size: size("padded_vocab_size", self.padded_vocab_size)?,
            rms_norm_eps: positive("layernorm_epsilon", self.layernorm_epsilon)?,
            rope_theta: 1e4 * positive("rope_ratio", self.rope_ratio)?,
            qkv_bias: self.add_qkv_bias,
        })
    }
}

//! Reader of GLM-4.1V's `config.json`, in its nested and its flat layout. It checks everything once, so the model
//! code need not.

use std::path::Path;

use serde::Deserialize;

use crate::config::{
    self, ConfigError, EosIds, at_most, divisible, expect, no_dropout, positive, size, unsupported,
};

/// Configuration of the whole model.
#[derive(Clone, Debug, PartialEq)]
pub struct Glm41vConfig {
    /// Sizes of the decoder.
    pub language: LanguageConfig,
    /// Sizes of the vision tower.
    pub vision: VisionConfig,
    /// Tokens that end an answer.
    pub eos_ids: Vec<i32>,
}

/// Sizes of the decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct LanguageConfig {
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the gated MLP.
    pub intermediate_size: usize,
    /// Decoder blocks.
    pub num_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Number of elements at the front of a head that rotate.
    pub rotary_dim: usize,
    /// Number of frequencies that follow the time, row and column position, in this order.
    pub mrope_section: Vec<usize>,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Whether queries, keys and values have a bias.
    pub attention_bias: bool,
    /// Rows of the embedding and of the output head.
    pub vocab_size: usize,
    /// Epsilon of every norm.
    pub rms_norm_eps: f64,
    /// Standard deviation of random initial values.
    pub initializer_range: f64,
}

/// Sizes of the vision tower and the merger.
#[derive(Clone, Debug, PartialEq)]
pub struct VisionConfig {
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the blocks' MLPs and of the features; `out_hidden_size` in the file.
    pub out_hidden_size: usize,
    /// Width of the merger's MLP; `intermediate_size` in the file.
    pub merger_inner: usize,
    /// Blocks.
    pub num_layers: usize,
    /// Attention heads.
    pub num_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Side of a patch in pixels.
    pub patch_size: usize,
    /// Frames per patch embedding. An image is repeated this many times.
    pub frames: usize,
    /// Learned positions per side.
    pub grid_side: usize,
    /// Epsilon of the blocks' norms.
    pub rms_norm_eps: f64,
}

/// Side of the block of patches that becomes one feature.
pub const MERGE: usize = 2;

impl Glm41vConfig {
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
    /// As [`Glm41vConfig::load`].
    pub fn parse(bytes: &[u8], path: &Path) -> Result<Self, ConfigError> {
        let invalid = |source| ConfigError::Json {
            path: path.to_owned(),
            source,
        };
        let head: Head = serde_json::from_slice(bytes).map_err(invalid)?;
        if head.model_type != "glm4v" {
            return Err(ConfigError::UnsupportedModel {
                found: head.model_type,
            });
        }
        let tied = head.tie_word_embeddings.unwrap_or(false);
        // In the flat layout, fields of the language model are next to `vision_config`.
        let text: RawText = match head.text_config {
            Some(text) => serde_json::from_value(text).map_err(invalid)?,
            None => serde_json::from_slice(bytes).map_err(invalid)?,
        };
        if tied || text.tie_word_embeddings {
            return Err(unsupported(
                "tie_word_embeddings",
                "true".to_owned(),
                "false",
            ));
        }
        let eos_ids = head.eos_token_id.or(text.eos_token_id.clone());
        let config = Self {
            language: text.resolve()?,
            vision: head.vision_config.resolve()?,
            eos_ids: eos_ids.map_or_else(Vec::new, EosIds::into_vec),
        };
        config.check()?;
        Ok(config)
    }

    fn check(&self) -> Result<(), ConfigError> {
        let (language, vision) = (&self.language, &self.vision);
        divisible(
            "num_attention_heads",
            language.num_heads,
            language.num_kv_heads,
        )?;
        at_most("hidden_size / num_attention_heads", language.head_dim, 128)?;
        divisible("partial_rotary_factor * head size", language.rotary_dim, 2)?;
        at_most(
            "partial_rotary_factor * head size",
            language.rotary_dim,
            language.head_dim,
        )?;
        same(
            "the sum of mrope_section",
            language.mrope_section.iter().sum(),
            language.rotary_dim / 2,
        )?;
        same(
            "vision_config.out_hidden_size",
            vision.out_hidden_size,
            language.hidden_size,
        )?;
        // Rows and columns share the rotated pairs of a head.
        divisible("vision_config.hidden_size / num_heads", vision.head_dim, 4)?;
        at_most(
            "vision_config.hidden_size / num_heads",
            vision.head_dim,
            128,
        )?;
        Ok(())
    }
}

fn same(field: &'static str, found: usize, expected: usize) -> Result<(), ConfigError> {
    if found == expected {
        return Ok(());
    }
    Err(ConfigError::Inconsistent {
        field,
        found,
        reason: format!("it must be {expected}"),
    })
}

#[derive(Deserialize)]
struct Head {
    #[serde(default)]
    model_type: String,
    text_config: Option<serde_json::Value>,
    vision_config: RawVision,
    tie_word_embeddings: Option<bool>,
    eos_token_id: Option<EosIds>,
}

#[derive(Deserialize)]
struct RawText {
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    vocab_size: usize,
    rms_norm_eps: f64,
    initializer_range: Option<f64>,
    rope_theta: Option<f64>,
    partial_rotary_factor: Option<f64>,
    rope_scaling: Option<Rope>,
    rope_parameters: Option<Rope>,
    hidden_act: Option<String>,
    #[serde(default = "yes")]
    attention_bias: bool,
    #[serde(default)]
    attention_dropout: f64,
    #[serde(default)]
    tie_word_embeddings: bool,
    eos_token_id: Option<EosIds>,
}

/// Rotary settings: `rope_scaling` with two separate fields, or all in `rope_parameters`.
#[derive(Deserialize)]
struct Rope {
    rope_type: Option<String>,
    r#type: Option<String>,
    rope_theta: Option<f64>,
    partial_rotary_factor: Option<f64>,
    mrope_section: Option<Vec<usize>>,
}

#[derive(Deserialize)]
struct RawVision {
    hidden_size: usize,
    num_heads: usize,
    depth: usize,
    image_size: usize,
    intermediate_size: usize,
    out_hidden_size: usize,
    patch_size: usize,
    #[serde(default = "two")]
    spatial_merge_size: usize,
    #[serde(default = "two")]
    temporal_patch_size: usize,
    #[serde(default = "three")]
    in_channels: usize,
    #[serde(default = "eps")]
    rms_norm_eps: f64,
    hidden_act: Option<String>,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    attention_dropout: f64,
    #[serde(default)]
    hidden_dropout_prob: f64,
}

fn yes() -> bool {
    true
}

fn two() -> usize {
    2
}

fn three() -> usize {
    3
}

fn eps() -> f64 {
    1e-5
}

impl RawText {
    fn resolve(self) -> Result<LanguageConfig, ConfigError> {
        expect("hidden_act", self.hidden_act.as_deref(), "silu")?;
        no_dropout("attention_dropout", self.attention_dropout)?;
        let rope = self.rope_parameters.or(self.rope_scaling);
        let kind = rope
            .as_ref()
            .and_then(|r| r.rope_type.as_deref().or(r.r#type.as_deref()));
        expect("rope_parameters.rope_type", kind, "default")?;
        let of_rope = |field: fn(&Rope) -> Option<f64>| rope.as_ref().and_then(field);
        // Defaults of the reference class, for fields that a file omits.
        let theta = of_rope(|r| r.rope_theta).or(self.rope_theta).unwrap_or(1e4);
        let factor = of_rope(|r| r.partial_rotary_factor)
            .or(self.partial_rotary_factor)
            .unwrap_or(0.5);
        let factor = positive("partial_rotary_factor", factor)?;
        let head_dim = divisible("hidden_size", self.hidden_size, self.num_attention_heads)?;
        let sections = rope.as_ref().and_then(|r| r.mrope_section.clone());
        let sections = sections.unwrap_or_else(|| vec![8, 12, 12]);
        for section in &sections {
            size("mrope_section", *section)?;
        }
        let init = self.initializer_range.unwrap_or(0.02);
        Ok(LanguageConfig {
            hidden_size: size("hidden_size", self.hidden_size)?,
            intermediate_size: size("intermediate_size", self.intermediate_size)?,
            num_layers: size("num_hidden_layers", self.num_hidden_layers)?,
            num_heads: size("num_attention_heads", self.num_attention_heads)?,
            num_kv_heads: size("num_key_value_heads", self.num_key_value_heads)?,
            head_dim,
            rotary_dim: (head_dim as f64 * factor) as usize,
            mrope_section: sections,
            rope_theta: positive("rope_theta", theta)?,
            attention_bias: self.attention_bias,
            vocab_size: size("vocab_size", self.vocab_size)?,
            rms_norm_eps: positive("rms_norm_eps", self.rms_norm_eps)?,
            initializer_range: positive("initializer_range", init)?,
        })
    }
}

impl RawVision {
    fn resolve(self) -> Result<VisionConfig, ConfigError> {
        const WIDTH: &str = "vision_config.hidden_size";
        let number = |field, found: usize, expected: &'static str| {
            expect(field, Some(&found.to_string()), expected)
        };
        expect(
            "vision_config.hidden_act",
            self.hidden_act.as_deref(),
            "silu",
        )?;
        number("vision_config.in_channels", self.in_channels, "3")?;
        number(
            "vision_config.spatial_merge_size",
            self.spatial_merge_size,
            "2",
        )?;
        no_dropout("vision_config.attention_dropout", self.attention_dropout)?;
        no_dropout(
            "vision_config.hidden_dropout_prob",
            self.hidden_dropout_prob,
        )?;
        if self.attention_bias {
            let found = "true".to_owned();
            return Err(unsupported("vision_config.attention_bias", found, "false"));
        }
        let patch_size = size("vision_config.patch_size", self.patch_size)?;
        Ok(VisionConfig {
            hidden_size: size(WIDTH, self.hidden_size)?,
            out_hidden_size: size("vision_config.out_hidden_size", self.out_hidden_size)?,
            merger_inner: size("vision_config.intermediate_size", self.intermediate_size)?,
            num_layers: size("vision_config.depth", self.depth)?,
            num_heads: size("vision_config.num_heads", self.num_heads)?,
            head_dim: divisible(WIDTH, self.hidden_size, self.num_heads)?,
            patch_size,
            frames: at_most(
                "vision_config.temporal_patch_size",
                size(
                    "vision_config.temporal_patch_size",
                    self.temporal_patch_size,
                )?,
                16,
            )?,
            grid_side: divisible("vision_config.image_size", self.image_size, patch_size)
                .and_then(|side| size("vision_config.image_size", side))?,
            rms_norm_eps: positive("vision_config.rms_norm_eps", self.rms_norm_eps)?,
        })
    }
}

//! `config.json` of GLM-4V, checked once, so that model code does not have to.

use crate::config::{
    ConfigError, Fields, HeadDim, LanguageConfig, LanguageKeys, Rope, divisible, reads_config_json,
    unsupported,
};
use crate::eva::EvaConfig;
use kernels::RopeLayout;

/// Configuration of a GLM-4V model.
#[derive(Clone, Debug, PartialEq)]
pub struct Glm4vConfig {
    /// Sizes of the language decoder.
    pub language: LanguageConfig,
    /// Which two elements of a head rotate as a pair: adjacent ones in GLM-4V, those half of the rotating
    /// elements apart in CogAgent-9B (`original_rope` is false).
    pub rope_layout: RopeLayout,
    /// Whether queries, keys and values have a bias.
    pub qkv_bias: bool,
    /// Sizes of the EVA vision tower.
    pub vision: EvaConfig,
    /// Divisor of an image's features, and of the learned vectors before and after them, before they enter
    /// the language model.
    pub scaling_factor: f64,
    /// Ids of the tokens that end an answer.
    pub eos_ids: Vec<i32>,
}

/// Names of the fields of the language model.
const KEYS: LanguageKeys = LanguageKeys {
    intermediate_size: "ffn_hidden_size",
    num_layers: "num_layers",
    num_kv_heads: |fields, _| fields.size("multi_query_group_num"),
    vocab_size: "padded_vocab_size",
    rms_norm_eps: "layernorm_epsilon",
    head_dim: HeadDim::Own("kv_channels", Some(128)),
    // Pairs in the first half of a head rotate.
    head_multiple: 4,
    ..LanguageKeys::TRANSFORMERS
};

reads_config_json!(Glm4vConfig);

impl Glm4vConfig {
    fn read(fields: Fields<'_>) -> Result<Self, ConfigError> {
        let model_type: String = fields.nullable("model_type")?.unwrap_or_default();
        if model_type != "chatglm" {
            return Err(ConfigError::UnsupportedModel { found: model_type });
        }
        let text = fields.language()?;
        fields.untied(text)?;
        for (field, expected) in [
            ("add_bias_linear", false),
            ("rmsnorm", true),
            ("post_layer_norm", true),
            ("multi_query_attention", true),
            ("apply_residual_connection_post_layernorm", false),
        ] {
            text.expect_flag(field, expected)?;
        }
        text.no_dropout("hidden_dropout")?;
        // Learned prefixes, and weights that the published class quantizes itself.
        for field in ["pre_seq_len", "quantization_bit"] {
            match text.nullable::<usize>(field)? {
                None | Some(0) => {}
                Some(found) => return Err(unsupported(field, found.to_string(), "0")),
            }
        }
        let rope_theta = 1e4 * text.positive_or("rope_ratio", 1.0)?;
        let rope = Rope::read(text)?;
        rope.constant("rope_theta", rope_theta)?;
        rope.constant("partial_rotary_factor", 0.5)?;
        let original = text.flag("original_rope", true)?;
        let rope_layout = match fields.flag("original_rope", original)? {
            true => RopeLayout::Interleaved,
            false => RopeLayout::HalfSplit,
        };
        let config = Self {
            language: LanguageConfig::read(text, &KEYS, rope_theta)?,
            rope_layout,
            qkv_bias: text.flag("add_qkv_bias", false)?,
            vision: EvaConfig::read(fields)?,
            // The published class has no default.
            scaling_factor: fields.positive("vision_config.scaling_factor")?,
            eos_ids: fields.eos_ids_of_both(text)?,
        };
        // Two by two patches become one feature.
        let grid = config.vision.grid();
        divisible("vision_config.image_size / patch_size", grid, 2)?;
        Ok(config)
    }

    /// Number of elements at the front of a head that the rotary embedding rotates.
    #[must_use]
    pub fn rotary_dim(&self) -> usize {
        self.language.head_dim / 2
    }

    /// Whether the file is CogAgent-9B's: its rotary pairs tell it from GLM-4V.
    #[must_use]
    pub fn is_agent(&self) -> bool {
        self.rope_layout == RopeLayout::HalfSplit
    }

    /// Number of features of an image, without the learned rows around them.
    #[must_use]
    pub fn features(&self) -> usize {
        self.vision.patches() / 4
    }
}

//! `config.json` of GLM-4V, checked once, so that model code does not have to.

use crate::config::{ConfigError, Fields, Rope, at_most, divisible, reads_config_json};
use crate::eva::EvaConfig;
use kernels::RopeLayout;

/// Configuration of a GLM-4V model.
#[derive(Clone, Debug, PartialEq)]
pub struct Glm4vConfig {
    /// Sizes of the language decoder.
    pub language: LanguageConfig,
    /// Sizes of the EVA vision tower.
    pub vision: EvaConfig,
    /// Divisor of an image's features, and of the learned vectors before and after them, before they enter
    /// the language model.
    pub scaling_factor: f64,
    /// Ids of the tokens that end an answer.
    pub eos_ids: Vec<i32>,
}

/// Sizes of the language decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct LanguageConfig {
    /// Width of the decoder's residual stream: elements of one token's hidden state.
    pub hidden_size: usize,
    /// Inner width of the gated MLPs: those of the decoder blocks, and the projector's.
    pub intermediate_size: usize,
    /// Number of decoder blocks.
    pub num_layers: usize,
    /// Number of query heads per block.
    pub num_heads: usize,
    /// Number of key and value heads per block; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Elements of one attention head; `num_heads * head_dim` may differ from `hidden_size`.
    pub head_dim: usize,
    /// Number of token ids: rows of the embedding and of the output head.
    pub vocab_size: usize,
    /// Epsilon that every norm of the decoder adds to the mean square.
    pub rms_norm_eps: f64,
    /// Base (theta) of the rotary position embedding's frequencies.
    pub rope_theta: f64,
    /// Which two elements of a head rotate as a pair: adjacent ones in GLM-4V, those half of the rotating
    /// elements apart in CogAgent-9B (`original_rope` is false).
    pub rope_layout: RopeLayout,
    /// Whether queries, keys and values have a bias.
    pub qkv_bias: bool,
}

impl LanguageConfig {
    /// Number of elements at the front of a head that the rotary embedding rotates.
    #[must_use]
    pub fn rotary_dim(&self) -> usize {
        self.head_dim / 2
    }

    fn read(fields: Fields<'_>, rope_layout: RopeLayout) -> Result<Self, ConfigError> {
        const HEADS: &str = "num_attention_heads";
        for (field, expected) in [
            ("add_bias_linear", false),
            ("rmsnorm", true),
            ("post_layer_norm", true),
            ("multi_query_attention", true),
            ("apply_residual_connection_post_layernorm", false),
            ("tie_word_embeddings", false),
        ] {
            fields.expect_flag(field, expected)?;
        }
        fields.no_dropout("attention_dropout")?;
        fields.no_dropout("hidden_dropout")?;
        let (num_heads, num_kv_heads) =
            (fields.size(HEADS)?, fields.size("multi_query_group_num")?);
        divisible(HEADS, num_heads, num_kv_heads)?;
        let head_dim = at_most("kv_channels", fields.size("kv_channels")?, 128)?;
        // Pairs in the first half of a head rotate.
        divisible("kv_channels", head_dim, 4)?;
        let rope_theta = 1e4 * fields.positive_or("rope_ratio", 1.0)?;
        let rope = Rope::read(fields)?;
        rope.constant("rope_theta", rope_theta)?;
        rope.constant("partial_rotary_factor", 0.5)?;
        Ok(Self {
            hidden_size: fields.size("hidden_size")?,
            intermediate_size: fields.size("ffn_hidden_size")?,
            num_layers: fields.size("num_layers")?,
            num_heads,
            num_kv_heads,
            head_dim,
            vocab_size: fields.size("padded_vocab_size")?,
            rms_norm_eps: fields.positive("layernorm_epsilon")?,
            rope_theta,
            rope_layout,
            qkv_bias: fields.flag("add_qkv_bias", false)?,
        })
    }
}

reads_config_json!(Glm4vConfig);

impl Glm4vConfig {
    fn read(fields: Fields<'_>) -> Result<Self, ConfigError> {
        let model_type: String = fields.nullable("model_type")?.unwrap_or_default();
        if model_type != "chatglm" {
            return Err(ConfigError::UnsupportedModel { found: model_type });
        }
        fields.expect_flag("tie_word_embeddings", false)?;
        let text = fields.language()?;
        let original = text.flag("original_rope", true)?;
        let rope_layout = match fields.flag("original_rope", original)? {
            true => RopeLayout::Interleaved,
            false => RopeLayout::HalfSplit,
        };
        let config = Self {
            language: LanguageConfig::read(text, rope_layout)?,
            vision: EvaConfig::read(fields)?,
            scaling_factor: fields.positive_or("vision_config.scaling_factor", 1.0)?,
            eos_ids: match fields.eos_ids()? {
                None => text.eos_ids()?,
                own => own,
            }
            .unwrap_or_default(),
        };
        // Two by two patches become one feature.
        let grid = config.vision.grid();
        divisible("vision_config.image_size / patch_size", grid, 2)?;
        Ok(config)
    }

    /// Whether the file is CogAgent-9B's: its rotary pairs tell it from GLM-4V.
    #[must_use]
    pub fn is_agent(&self) -> bool {
        self.language.rope_layout == RopeLayout::HalfSplit
    }

    /// Number of features of an image, without the learned rows around them.
    #[must_use]
    pub fn features(&self) -> usize {
        self.vision.patches() / 4
    }
}

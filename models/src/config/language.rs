//! Sizes that the language decoders of all families have, and the names of their fields.

use super::{ConfigError, Fields, at_most, divisible, size};
use crate::nn::{BlockNames, DecoderBlockConfig};

/// Largest number of elements of a head.
const MAX_HEAD_DIM: usize = 128;

/// Sizes of the language decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct LanguageConfig {
    /// Width of the decoder's residual stream: elements of one token's hidden state.
    pub hidden_size: usize,
    /// Inner width of each gated MLP.
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
    /// Epsilon that every RMSNorm of the decoder adds to the mean square.
    pub rms_norm_eps: f64,
    /// Base (theta) of the rotary position embedding's frequencies.
    pub rope_theta: f64,
    /// Standard deviation of the normal distribution of random initial weights.
    pub initializer_range: f64,
}

/// Readers and names of those fields that differ between families.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LanguageKeys {
    pub(crate) intermediate_size: &'static str,
    pub(crate) num_layers: &'static str,
    /// Key and value heads of a model with so many query heads.
    pub(crate) num_kv_heads: fn(Fields<'_>, usize) -> Result<usize, ConfigError>,
    pub(crate) vocab_size: &'static str,
    pub(crate) rms_norm_eps: &'static str,
    /// What stands for an absent epsilon.
    pub(crate) default_eps: Option<f64>,
    pub(crate) head_dim: HeadDim,
    /// Divisor of the elements of a head, which rotate in pairs.
    pub(crate) head_multiple: usize,
}

/// Where the elements of a head come from.
#[derive(Clone, Copy, Debug)]
pub(crate) enum HeadDim {
    /// `hidden_size` by heads. A field `head_dim` must say the same.
    Implied,
    /// The field of this name. Where it is absent, this number or, without one, `hidden_size` by heads.
    Own(&'static str, Option<usize>),
}

impl LanguageKeys {
    /// The names of transformers, for heads whose elements all rotate.
    pub(crate) const TRANSFORMERS: Self = Self {
        intermediate_size: "intermediate_size",
        num_layers: "num_hidden_layers",
        num_kv_heads: |fields, heads| fields.size_or_null("num_key_value_heads", heads),
        vocab_size: "vocab_size",
        rms_norm_eps: "rms_norm_eps",
        default_eps: None,
        head_dim: HeadDim::Implied,
        head_multiple: 2,
    };
}

impl LanguageConfig {
    /// Reads the fields of a language model. `rope_theta` is what the family makes of its rotary settings.
    ///
    /// # Errors
    /// As [`Fields::size`]; [`ConfigError::Unsupported`] for a computation that no family has; [`ConfigError::Inconsistent`] for
    /// heads that cannot be.
    pub(crate) fn read(
        fields: Fields<'_>,
        keys: &LanguageKeys,
        rope_theta: f64,
    ) -> Result<Self, ConfigError> {
        const HEADS: &str = "num_attention_heads";
        fields.expect::<String>("hidden_act", "silu")?;
        fields.no_dropout("attention_dropout")?;
        fields.full_attention()?;
        let hidden_size = fields.size("hidden_size")?;
        let num_heads = fields.size(HEADS)?;
        let num_kv_heads = (keys.num_kv_heads)(fields, num_heads)?;
        divisible(HEADS, num_heads, num_kv_heads)?;
        let (name, head_dim) = keys.head_dim.read(fields, hidden_size, num_heads)?;
        divisible(name, head_dim, keys.head_multiple)?;
        Ok(Self {
            hidden_size,
            intermediate_size: fields.size(keys.intermediate_size)?,
            num_layers: fields.size(keys.num_layers)?,
            num_heads,
            num_kv_heads,
            head_dim: at_most(name, head_dim, MAX_HEAD_DIM)?,
            vocab_size: fields.size(keys.vocab_size)?,
            rms_norm_eps: match keys.default_eps {
                Some(default) => fields.positive_or(keys.rms_norm_eps, default)?,
                None => fields.positive(keys.rms_norm_eps)?,
            },
            rope_theta,
            // The class default of every family.
            initializer_range: fields.positive_or("initializer_range", 0.02)?,
        })
    }

    /// Sizes of a block. `names` are those of its modules.
    pub(crate) fn block(&self, qkv_bias: bool, names: BlockNames) -> DecoderBlockConfig {
        DecoderBlockConfig {
            width: self.hidden_size,
            heads: self.num_heads,
            kv_heads: self.num_kv_heads,
            head_dim: self.head_dim,
            inner: self.intermediate_size,
            eps: self.rms_norm_eps as f32,
            qkv_bias,
            head_norms: false,
            names,
        }
    }
}

impl HeadDim {
    /// The elements of a head, with the name for errors about them.
    fn read(
        self,
        fields: Fields<'_>,
        hidden_size: usize,
        heads: usize,
    ) -> Result<(&'static str, usize), ConfigError> {
        let implied = || {
            let implied = divisible("hidden_size", hidden_size, heads)?;
            Ok(("hidden_size / num_attention_heads", implied))
        };
        match self {
            Self::Implied => {
                let (name, implied) = implied()?;
                fields.implied("head_dim", implied)?;
                Ok((name, implied))
            }
            Self::Own(name, default) => match fields.optional(name)?.or(default) {
                Some(own) => Ok((name, size(name, own)?)),
                None => implied(),
            },
        }
    }
}

//! A block of a Llama-like decoder.

use super::{DecoderLayer, GatedMlp, RmsNorm, SelfAttention, SelfAttentionConfig};
use crate::autograd::{Scope, Var};
use crate::batch::Batch;
use crate::error::Result;
use crate::generate::CachedLayer;
use crate::params::ParamScope;

/// Sizes of a [`DecoderBlock`].
#[derive(Clone, PartialEq, Debug)]
pub struct DecoderConfig {
    /// Width of the residual stream.
    pub width: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Width of the gated MLP.
    pub inner: usize,
    /// Epsilon of the norms.
    pub eps: f32,
    /// Whether q, k and v have a bias (Qwen2 does, Llama does not).
    pub qkv_bias: bool,
}

/// `x += attention(norm(x)); x += mlp(norm(x))` with rotary positions.
#[derive(Clone, PartialEq, Debug)]
pub struct DecoderBlock {
    norm1: RmsNorm,
    attention: SelfAttention,
    norm2: RmsNorm,
    mlp: GatedMlp,
}

impl DecoderBlock {
    /// Declares the block's parameters.
    pub fn new(params: &mut ParamScope<'_, '_>, config: &DecoderConfig) -> Self {
        let (c, eps) = (config.width, config.eps);
        let attention = SelfAttentionConfig {
            width: c,
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            qkv_bias: config.qkv_bias,
            out_bias: false,
            out_name: "o_proj",
        };
        Self {
            norm1: RmsNorm::new(params, "input_layernorm", c, eps),
            attention: SelfAttention::new(params, "self_attn", attention),
            norm2: RmsNorm::new(params, "post_attention_layernorm", c, eps),
            mlp: GatedMlp::new(params, "mlp", c, config.inner),
        }
    }
}

impl DecoderLayer for DecoderBlock {
    fn forward(
        &self,
        scope: &Scope<'_>,
        x: &Var,
        batch: &Batch,
        cache: Option<CachedLayer<'_>>,
    ) -> Result<Var> {
        let normed = self.norm1.forward(scope, x)?;
        let rotary = Some(&batch.rotary);
        let mixed = self
            .attention
            .forward(scope, &normed, &batch.sequences, rotary, cache)?;
        let x = scope.add(x, &mixed)?;
        let normed = self.norm2.forward(scope, &x)?;
        scope.add(&x, &self.mlp.forward(scope, &normed)?)
    }
}

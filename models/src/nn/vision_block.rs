//! A block of a vision transformer.

use super::{GeluMlp, LayerNorm, SelfAttention, SelfAttentionConfig};
use crate::autograd::{Scope, Var};
use crate::error::Result;
use crate::ops::Sequences;
use crate::params::ParamScope;
use kernels::Gelu;

/// Sizes of a [`VisionBlock`], and its activation function.
#[derive(Clone, PartialEq, Debug)]
pub struct VisionBlockConfig {
    /// Width of the residual stream: elements per patch.
    pub width: usize,
    /// Number of attention heads.
    pub heads: usize,
    /// Elements of one attention head.
    pub head_dim: usize,
    /// Inner width of the MLP.
    pub inner: usize,
    /// Epsilon that the block's norms add to the variance.
    pub eps: f32,
    /// Form of GELU between the two layers of the MLP.
    pub gelu: Gelu,
}

/// Transformer block of a vision tower: `x += attention(norm(x)); x += mlp(norm(x))`. Attention is
/// bidirectional, and all layers have biases.
#[derive(Clone, PartialEq, Debug)]
pub struct VisionBlock {
    norm1: LayerNorm,
    attention: SelfAttention,
    norm2: LayerNorm,
    mlp: GeluMlp,
}

impl VisionBlock {
    /// Declares the parameters of the block's norms, attention and MLP.
    pub fn new(params: &mut ParamScope<'_, '_>, config: &VisionBlockConfig) -> Self {
        let (c, eps) = (config.width, config.eps);
        let attention = SelfAttentionConfig {
            width: c,
            heads: config.heads,
            kv_heads: config.heads,
            head_dim: config.head_dim,
            fused: None,
            qkv_bias: true,
            out_bias: true,
            out_name: "out_proj",
            head_norms: None,
        };
        Self {
            norm1: LayerNorm::new(params, "layer_norm1", c, eps),
            attention: SelfAttention::new(params, "self_attn", attention),
            norm2: LayerNorm::new(params, "layer_norm2", c, eps),
            mlp: GeluMlp::new(params, "mlp", c, config.inner, config.gelu),
        }
    }

    /// Applies the block to the patches `x`: `[p, c]` to `[p, c]`.
    ///
    /// # Errors
    /// When shapes do not fit or memory runs out.
    pub fn forward(&self, scope: &Scope<'_>, x: &Var, sequences: &Sequences) -> Result<Var> {
        let normed = self.norm1.forward(scope, x)?;
        let mixed = self
            .attention
            .forward(scope, &normed, sequences, None, None)?;
        let x = scope.add(x, &mixed)?;
        let normed = self.norm2.forward(scope, &x)?;
        scope.add(&x, &self.mlp.forward(scope, &normed)?)
    }
}

//! A block of a vision transformer.

use super::{GatedMlp, GeluMlp, LayerNorm, RmsNorm, Rotary, SelfAttention, SelfAttentionConfig};
use crate::autograd::{Scope, Var};
use crate::error::Result;
use crate::ops::Sequences;
use crate::params::ParamScope;
use kernels::Gelu;

/// Sizes of a [`VisionBlock`], and the names of its modules in the checkpoint.
#[derive(Clone, PartialEq, Debug)]
pub struct VisionBlockConfig {
    /// Sizes of the attention, whose width is that of the residual stream.
    pub attention: SelfAttentionConfig,
    /// Names of the first norm, the attention and the second norm.
    pub names: [&'static str; 3],
    /// Inner width of the MLP.
    pub inner: usize,
    /// Epsilon of the block's norms.
    pub eps: f32,
    /// Kind of norms and MLP.
    pub kind: VisionBlockKind,
}

/// Norms and MLP of a [`VisionBlock`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum VisionBlockKind {
    /// Layer norms, and an MLP of two layers with biases around this form of GELU, as in SigLIP.
    Gelu(Gelu),
    /// RMSNorms and a gated MLP, as in GLM-4.1V.
    Gated {
        /// Whether the layers of the MLP have biases.
        bias: bool,
    },
}

/// Transformer block of a vision tower: `x += attention(norm(x)); x += mlp(norm(x))`. Attention is
/// bidirectional.
#[derive(Clone, PartialEq, Debug)]
pub struct VisionBlock {
    norm1: Norm,
    attention: SelfAttention,
    norm2: Norm,
    mlp: Mlp,
}

#[derive(Clone, PartialEq, Debug)]
enum Norm {
    Layer(LayerNorm),
    Rms(RmsNorm),
}

#[derive(Clone, PartialEq, Debug)]
enum Mlp {
    Gelu(GeluMlp),
    Gated(GatedMlp),
}

impl VisionBlock {
    /// Declares the parameters of the block's norms, attention and MLP.
    pub fn new(params: &mut ParamScope<'_, '_>, config: &VisionBlockConfig) -> Self {
        let (c, inner, eps) = (config.attention.width, config.inner, config.eps);
        let norm = |params: &mut ParamScope<'_, '_>, name: &str| match config.kind {
            VisionBlockKind::Gelu(_) => Norm::Layer(LayerNorm::new(params, name, c, eps)),
            VisionBlockKind::Gated { .. } => Norm::Rms(RmsNorm::new(params, name, c, eps)),
        };
        let [first, attention, second] = config.names;
        Self {
            norm1: norm(params, first),
            attention: SelfAttention::new(params, attention, config.attention.clone()),
            norm2: norm(params, second),
            mlp: match config.kind {
                VisionBlockKind::Gelu(gelu) => {
                    Mlp::Gelu(GeluMlp::new(params, "mlp", c, inner, gelu))
                }
                VisionBlockKind::Gated { bias } => {
                    Mlp::Gated(GatedMlp::new(params, "mlp", c, inner, bias))
                }
            },
        }
    }

    /// Applies the block to the patches `x`: `[p, c]` to `[p, c]`. With `rotary`, queries and keys are rotated.
    ///
    /// # Errors
    /// When shapes do not fit or memory runs out.
    pub fn forward(
        &self,
        scope: &Scope<'_>,
        x: &Var,
        sequences: &Sequences,
        rotary: Option<&Rotary>,
    ) -> Result<Var> {
        let norm = |norm: &Norm, x: &Var| match norm {
            Norm::Layer(norm) => norm.forward(scope, x),
            Norm::Rms(norm) => norm.forward(scope, x),
        };
        let normed = norm(&self.norm1, x)?;
        let mixed = self
            .attention
            .forward(scope, &normed, sequences, rotary, None)?;
        let x = scope.add(x, &mixed)?;
        let normed = norm(&self.norm2, &x)?;
        let inner = match &self.mlp {
            Mlp::Gelu(mlp) => mlp.forward(scope, &normed)?,
            Mlp::Gated(mlp) => mlp.forward(scope, &normed)?,
        };
        scope.add(&x, &inner)
    }
}

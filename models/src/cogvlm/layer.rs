//! A decoder layer.

use super::attention::ExpertAttention;
use super::config::CogConfig;
use super::cross_attention::{CrossAttention, Features};
use super::experts::PerExpert;
use crate::autograd::{Scope, Var};
use crate::batch::Batch;
use crate::error::Result;
use crate::generate::CachedLayer;
use crate::nn::{GatedMlp, RmsNorm};
use crate::params::ParamScope;

/// `x += attention(norm(x))`, CogAgent's cross-attention, `x += mlp(norm(x))`.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct CogLayer {
    attention_norm: RmsNorm,
    attention: ExpertAttention,
    cross: Option<CrossAttention>,
    mlp_norm: RmsNorm,
    mlp: PerExpert<GatedMlp>,
}

impl CogLayer {
    /// Declares the parameters of the layer, with `prefix` learned keys and values in its attention.
    pub(super) fn new(params: &mut ParamScope<'_, '_>, config: &CogConfig, prefix: usize) -> Self {
        let language = &config.language;
        let (c, inner) = (language.hidden_size, language.intermediate_size);
        let eps = language.rms_norm_eps as f32;
        let attention_norm = RmsNorm::new(params, "input_layernorm", c, eps);
        let attention = ExpertAttention::new(params, config.edition, language, prefix);
        let cross = config.cross.as_ref();
        let cross =
            cross.map(|cross| CrossAttention::new(params, cross, (c, language.num_heads, eps)));
        let mlp_norm = RmsNorm::new(params, "post_attention_layernorm", c, eps);
        let mut mlp = params.at("mlp");
        let mlp = PerExpert {
            language: GatedMlp::new(&mut mlp, "language_mlp", c, inner, false),
            vision: GatedMlp::new(&mut mlp, "vision_mlp", c, inner, false),
        };
        Self {
            attention_norm,
            attention,
            cross,
            mlp_norm,
            mlp,
        }
    }

    /// Applies the layer to the hidden states `x`: `[t, c]` to `[t, c]`.
    ///
    /// # Errors
    /// When shapes do not fit or memory runs out.
    pub(super) fn forward(
        &self,
        scope: &Scope<'_>,
        x: &Var,
        features: Option<Features<'_>>,
        batch: &Batch,
        cache: Option<CachedLayer<'_>>,
    ) -> Result<Var> {
        let normed = self.attention_norm.forward(scope, x)?;
        let mixed = self.attention.forward(scope, &normed, batch, cache)?;
        let x = scope.add(x, &mixed)?;
        let x = match (&self.cross, &batch.cross) {
            (Some(cross), Some(rows)) => cross.forward(scope, &x, features, rows, cache)?,
            _ => x,
        };
        let normed = self.mlp_norm.forward(scope, &x)?;
        let inner = self.mlp.mlp(scope, &normed, batch.experts.as_ref())?;
        scope.add(&x, &inner)
    }
}

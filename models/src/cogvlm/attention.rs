//! Self-attention with per-expert projections; text and image tokens attend to each other in one softmax.

use super::config::Edition;
use super::experts::PerExpert;
use crate::autograd::{Scope, Var};
use crate::batch::Batch;
use crate::config::LanguageConfig;
use crate::error::Result;
use crate::generate::CachedLayer;
use crate::nn::{FusedLinear, Linear, Prefix};
use crate::params::ParamScope;

/// Per-expert projections around causal attention with rotary positions.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct ExpertAttention {
    qkv: PerExpert<FusedLinear>,
    out: PerExpert<Linear>,
    prefix: Option<Prefix>,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

impl ExpertAttention {
    /// Declares the parameters of `self_attn`, with `prefix` learned keys and values.
    pub(super) fn new(
        params: &mut ParamScope<'_, '_>,
        edition: Edition,
        config: &LanguageConfig,
        prefix: usize,
    ) -> Self {
        let (c, d) = (config.hidden_size, config.head_dim);
        let (heads, kv_heads) = (config.num_heads, config.num_kv_heads);
        let mut scope = params.at("self_attn");
        // Only one family, and only one of its experts, has biases.
        let mut qkv = |expert: &str, bias: bool| {
            let name = format!("{expert}_expert_query_key_value");
            scope.fused_linear(&name, &[heads * d, kv_heads * d, kv_heads * d], c, bias)
        };
        let qkv = PerExpert {
            language: qkv("language", false),
            vision: qkv("vision", edition == Edition::CogVlm2),
        };
        let mut out = |expert: &str| {
            let name = format!("{expert}_expert_dense");
            scope.linear(&name, [c, heads * d], false)
        };
        let out = PerExpert {
            language: out("language"),
            vision: out("vision"),
        };
        let prefix = (prefix > 0).then(|| Prefix::new(&mut scope, prefix, kv_heads, d));
        Self {
            qkv,
            out,
            prefix,
            heads,
            kv_heads,
            head_dim: d,
        }
    }

    /// Applies the attention: `[t, c]` to `[t, c]`. With `cache`, keys and values are stored in it and read from it.
    ///
    /// # Errors
    /// When shapes do not fit or memory runs out.
    pub(super) fn forward(
        &self,
        scope: &Scope<'_>,
        x: &Var,
        batch: &Batch,
        cache: Option<CachedLayer<'_>>,
    ) -> Result<Var> {
        let (t, d, experts) = (x.shape().rows(), self.head_dim, batch.experts.as_ref());
        let [q, k, v] = self.qkv.projections(scope, x, experts)?;
        let rotary = &batch.rotary;
        let rotate = |x: &Var, heads: usize| {
            let x = scope.reshape(x, [t, heads, d])?;
            scope.rope(&x, &rotary.cos, &rotary.sin, rotary.layout)
        };
        let (q, k) = (rotate(&q, self.heads)?, rotate(&k, self.kv_heads)?);
        let v = scope.reshape(&v, [t, self.kv_heads, d])?;
        let scale = (d as f32).powf(-0.5);
        let mixed = match (&self.prefix, &batch.prefix) {
            (Some(prefix), Some(tables)) => {
                let [k, v] = prefix.prepend(scope, [&k, &v], tables)?;
                scope.cached_attention([&q, &k, &v], &tables.sequences, cache, scale)?
            }
            _ => scope.cached_attention([&q, &k, &v], &batch.sequences, cache, scale)?,
        };
        let mixed = scope.reshape(&mixed, [t, self.heads * d])?;
        self.out.linear(scope, &mixed, experts)
    }
}

//! Self-attention layers over packed sequences.
//!
//! Shapes: `t` tokens, `h` query heads, `g` key/value heads, `d` head dim, `c` channels.

use super::{Linear, Rotary};
use crate::autograd::{Scope, Var};
use crate::error::Result;
use crate::generate::CachedLayer;
use crate::ops::Sequences;
use crate::params::ParamScope;
use engine::TensorParallel;

const COLUMN: TensorParallel = TensorParallel::Column { groups: 1 };

/// Sizes of a self-attention layer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SelfAttentionConfig {
    /// `c`.
    pub width: usize,
    /// `h`.
    pub heads: usize,
    /// `g`.
    pub kv_heads: usize,
    /// `d`.
    pub head_dim: usize,
    /// Whether q, k and v have a bias.
    pub qkv_bias: bool,
    /// Whether the output projection has one.
    pub out_bias: bool,
    /// Name of the output projection.
    pub out_name: &'static str,
}

/// q, k, v and output projections around softmax attention, scores scaled by `d^-0.5`.
#[derive(Clone, PartialEq, Debug)]
pub struct SelfAttention {
    q: Linear,
    k: Linear,
    v: Linear,
    out: Linear,
    config: SelfAttentionConfig,
}

impl SelfAttention {
    /// Declares `q_proj`, `k_proj`, `v_proj` and the output projection below `name`.
    pub fn new(params: &mut ParamScope<'_, '_>, name: &str, config: SelfAttentionConfig) -> Self {
        let mut scope = params.at(name);
        let (c, d) = (config.width, config.head_dim);
        let (q_rows, kv_rows) = (config.heads * d, config.kv_heads * d);
        Self {
            q: scope.linear("q_proj", [q_rows, c], config.qkv_bias, COLUMN),
            k: scope.linear("k_proj", [kv_rows, c], config.qkv_bias, COLUMN),
            v: scope.linear("v_proj", [kv_rows, c], config.qkv_bias, COLUMN),
            out: scope.linear(
                config.out_name,
                [c, q_rows],
                config.out_bias,
                TensorParallel::Row,
            ),
            config,
        }
    }

    /// `[t, c]` to `[t, c]`; queries and keys are rotated when `rotary` is given, keys and values
    /// go through `cache` when it is.
    ///
    /// # Errors
    /// When shapes do not fit or memory runs out.
    pub fn forward(
        &self,
        scope: &Scope<'_>,
        x: &Var,
        sequences: &Sequences,
        rotary: Option<&Rotary>,
        cache: Option<CachedLayer<'_>>,
    ) -> Result<Var> {
        let t = x.shape().rows();
        let SelfAttentionConfig {
            heads,
            kv_heads,
            head_dim,
            ..
        } = self.config;
        let head = |layer: &Linear, count: usize| -> Result<Var> {
            scope.reshape(&layer.forward(scope, x)?, [t, count, head_dim])
        };
        let rotate = |x: Var| match rotary {
            Some(r) => scope.rope(&x, &r.cos, &r.sin, r.layout),
            None => Ok(x),
        };
        let q = rotate(head(&self.q, heads)?)?;
        let k = rotate(head(&self.k, kv_heads)?)?;
        let v = head(&self.v, kv_heads)?;
        let scale = (head_dim as f32).powf(-0.5);
        let mixed = scope.cached_attention([&q, &k, &v], sequences, cache, scale)?;
        let mixed = scope.reshape(&mixed, [t, heads * head_dim])?;
        self.out.forward(scope, &mixed)
    }
}

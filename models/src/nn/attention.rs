//! Self-attention layers over packed sequences.
//!
//! Shapes: `t` tokens, `h` query heads, `g` key/value heads, `d` head dim, `c` channels.

use super::{FusedLinear, Linear, RmsNorm, Rotary};
use crate::autograd::{Scope, Var};
use crate::error::Result;
use crate::generate::CachedLayer;
use crate::ops::Sequences;
use crate::params::ParamScope;

/// Sizes of a self-attention layer, and the names of its projections in the checkpoint.
#[derive(Clone, PartialEq, Debug)]
pub struct SelfAttentionConfig {
    /// Width `c` of the residual stream: elements per token or patch.
    pub width: usize,
    /// Number of query heads, `h`.
    pub heads: usize,
    /// Number of key/value heads, `g`.
    pub kv_heads: usize,
    /// Elements per head, `d`.
    pub head_dim: usize,
    /// Name of the one weight that stacks q, k and v in this order; `None` if the checkpoint has separate
    /// weights `q_proj`, `k_proj` and `v_proj`.
    pub fused: Option<&'static str>,
    /// Whether q, k and v have a bias.
    pub qkv_bias: bool,
    /// Whether the output projection has a bias.
    pub out_bias: bool,
    /// Module name of the output projection in the checkpoint.
    pub out_name: &'static str,
    /// Epsilon of the RMSNorms `q_norm` and `k_norm` over the elements of each query and key head, before the
    /// rotation; `None` if the layer has none.
    pub head_norms: Option<f32>,
}

/// Self-attention layer: q, k, v and output projections around softmax attention, with scores scaled by
/// `d^-0.5`.
#[derive(Clone, PartialEq, Debug)]
pub struct SelfAttention {
    inputs: Projections,
    /// Norms of query and key heads, `[d]` each: all heads share a weight.
    head_norms: Option<[RmsNorm; 2]>,
    out: Linear,
    config: SelfAttentionConfig,
}

/// Weights of the query, key and value projections.
#[derive(Clone, PartialEq, Debug)]
enum Projections {
    /// One weight per projection.
    Apart(Box<[Linear; 3]>),
    /// One weight for all three, in that order.
    Fused(FusedLinear),
}

impl SelfAttention {
    /// Declares the parameters of the layer's projections, below the module `name`.
    pub fn new(params: &mut ParamScope<'_, '_>, name: &str, config: SelfAttentionConfig) -> Self {
        let mut scope = params.at(name);
        let (c, d) = (config.width, config.head_dim);
        let rows = [config.heads * d, config.kv_heads * d, config.kv_heads * d];
        let inputs = match config.fused {
            Some(fused) => Projections::Fused(scope.fused_linear(fused, &rows, c, config.qkv_bias)),
            None => {
                let [q, k, v] = rows;
                let layers = [("q_proj", q), ("k_proj", k), ("v_proj", v)];
                let layers =
                    layers.map(|(name, rows)| scope.linear(name, [rows, c], config.qkv_bias));
                Projections::Apart(Box::new(layers))
            }
        };
        let head_norms = config
            .head_norms
            .map(|eps| ["q_norm", "k_norm"].map(|name| RmsNorm::new(&mut scope, name, d, eps)));
        let shape = [c, config.heads * d];
        let out = scope.linear(config.out_name, shape, config.out_bias);
        Self {
            inputs,
            head_norms,
            out,
            config,
        }
    }

    /// Applies the layer to `x`: `[t, c]` to `[t, c]`. With `rotary`, queries and keys are rotated, after their norms; with `cache`,
    /// keys and values are stored in it and read from it.
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
        let [q, k, v] = match &self.inputs {
            Projections::Apart(layers) => {
                let [q, k, v] = &**layers;
                Linear::forward_all([q, k, v], scope, x)?
            }
            Projections::Fused(layer) => layer.forward(scope, x)?,
        };
        let split = |x: &Var, count: usize| scope.reshape(x, [t, count, head_dim]);
        let place = |x: Var, of_keys: usize| {
            let norm = self.head_norms.map(|norms| norms[of_keys]);
            match (norm, rotary) {
                (Some(n), Some(r)) => {
                    scope.rms_norm_rope(&x, n.weight, n.eps, [&r.cos, &r.sin], r.layout)
                }
                (Some(n), None) => n.forward(scope, &x),
                (None, Some(r)) => scope.rope(&x, &r.cos, &r.sin, r.layout),
                (None, None) => Ok(x),
            }
        };
        let q = place(split(&q, heads)?, 0)?;
        let k = place(split(&k, kv_heads)?, 1)?;
        let v = split(&v, kv_heads)?;
        let scale = (head_dim as f32).powf(-0.5);
        let mixed = scope.cached_attention([&q, &k, &v], sequences, cache, scale)?;
        let mixed = scope.reshape(&mixed, [t, heads * head_dim])?;
        self.out.forward(scope, &mixed)
    }
}

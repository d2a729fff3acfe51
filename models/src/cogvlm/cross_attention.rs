//! CogAgent's cross-attention: every token of a sample with an image attends to all features of the second tower.

use super::config::CrossConfig;
use crate::autograd::{Rows, Scope, Var};
use crate::batch::CrossRows;
use crate::error::Result;
use crate::generate::CachedLayer;
use crate::nn::{FusedLinear, Linear, RmsNorm};
use crate::params::ParamScope;
use kernels::Tensor;

/// `x += dense(attention(query(norm(x)), features))`, without positions, mask or experts.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct CrossAttention {
    norm: RmsNorm,
    query: Linear,
    key_value: FusedLinear,
    out: Linear,
    heads: usize,
    head_dim: usize,
}

/// Features of the second tower with the patch numbers of their rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Features<'a> {
    /// Features of all images, `[N * p, c]`.
    pub(super) value: &'a Var,
    /// i32 `[N * p]`: for each feature, the number of its patch in the batch, for dropout.
    pub(super) names: &'a Tensor,
}

impl CrossAttention {
    /// Declares `cross_attn` and the norm before it; `width` is the decoder's.
    pub(super) fn new(
        params: &mut ParamScope<'_, '_>,
        config: &CrossConfig,
        (width, heads, eps): (usize, usize, f32),
    ) -> Self {
        let inner = config.width;
        let norm = RmsNorm::new(params, "post_cross_attention_layernorm", width, eps);
        let mut scope = params.at("cross_attn");
        Self {
            norm,
            query: scope.linear("query", [inner, width], false),
            key_value: scope.fused_linear("key_value", &[inner; 2], config.width, false),
            out: scope.linear("dense", [width, inner], false),
            heads,
            head_dim: inner / heads,
        }
    }

    /// `[t, c]` to `[t, c]`; rows of samples without features are unchanged. A generation reads the features in
    /// its first pass; later passes take their keys and values from the cache.
    ///
    /// # Errors
    /// When shapes do not fit or memory runs out.
    pub(super) fn forward(
        &self,
        scope: &Scope<'_>,
        x: &Var,
        features: Option<Features<'_>>,
        rows: &CrossRows,
        cache: Option<CachedLayer<'_>>,
    ) -> Result<Var> {
        let Some(index) = &rows.rows else {
            return self.attend(scope, x, features, rows, cache);
        };
        let own = scope.gather_rows(x, index)?;
        let own = scope.with_rows(Rows::Tokens, index, || {
            self.attend(scope, &own, features, rows, cache)
        })?;
        scope.replace_rows(x, index, &own)
    }

    fn attend(
        &self,
        scope: &Scope<'_>,
        x: &Var,
        features: Option<Features<'_>>,
        rows: &CrossRows,
        cache: Option<CachedLayer<'_>>,
    ) -> Result<Var> {
        let split = |x: &Var| scope.reshape(x, [x.shape().rows(), self.heads, self.head_dim]);
        let query = self.query.forward(scope, &self.norm.forward(scope, x)?)?;
        let keys = || {
            let Features { value, names } =
                features.expect("the first pass over a picture has its features");
            let [k, v] = scope.with_rows(Rows::Patches, names, || {
                self.key_value.forward(scope, value)
            })?;
            Ok([split(&k)?, split(&v)?])
        };
        let [k, v] = match cache {
            Some(cache) => cache.cross(scope, keys)?,
            None => keys()?,
        };
        let scale = (self.head_dim as f32).powf(-0.5);
        let mixed = scope.attention(&split(&query)?, &k, &v, &rows.sequences, scale)?;
        let mixed = scope.reshape(&mixed, [x.shape().rows(), self.heads * self.head_dim])?;
        scope.add(x, &self.out.forward(scope, &mixed)?)
    }
}

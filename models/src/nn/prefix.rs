//! P-tuning v2: every layer has learned keys and values that all queries see.
//!
//! They precede the keys of each sample. Attention does not depend on the order of keys, and the causal mask
//! is aligned to the last key, so every query sees all of them.

use crate::autograd::{Scope, Var};
use crate::batch::{starts_of, upload};
use crate::error::Result;
use crate::ops::Sequences;
use crate::params::ParamScope;
use engine::ParamId;
use kernels::{Backend, Tensor};

/// Index tables, all i32, that place learned keys and values (p-tuning v2) before those of each sample. The
/// batch has `S` samples and `T` tokens; each sample gets `P` learned tokens of `g` heads.
#[derive(Clone, Debug)]
pub struct PrefixTables {
    /// `[S * P * g]`: rows of the learned keys in the parameter, seen as `[2 * g * P, d]`.
    keys: Tensor,
    /// `[S * P * g]`: rows of the learned values in the parameter, seen in the same way.
    values: Tensor,
    /// `[S * P]`: rows of the learned tokens among all keys of the batch.
    prefix_rows: Tensor,
    /// `[T]`: rows of the batch's own tokens among all keys.
    token_rows: Tensor,
    /// Row ranges of the samples: queries attend to the learned tokens and the earlier tokens of their own sample.
    pub(crate) sequences: Sequences,
}

impl PrefixTables {
    /// Builds the tables for samples whose token rows begin at `starts` (and end where the next sample begins).
    ///
    /// # Errors
    /// When memory runs out.
    pub(crate) fn new(
        starts: &[usize],
        prefix: usize,
        heads: usize,
        backend: &dyn Backend,
    ) -> Result<Self> {
        let samples = starts.len() - 1;
        let table = |values: Vec<usize>| -> Result<Tensor> {
            let values: Vec<i32> = values.into_iter().map(|v| v as i32).collect();
            upload(backend, &values, &[values.len()])
        };
        let half = |half: usize| {
            let one =
                (0..prefix).flat_map(|p| (0..heads).map(move |g| (half * heads + g) * prefix + p));
            table((0..samples).flat_map(|_| one.clone()).collect())
        };
        let rows = |s: usize| starts[s] + s * prefix;
        let prefix_rows = (0..samples).flat_map(|s| rows(s)..rows(s) + prefix);
        let token_rows = (0..samples).flat_map(|s| rows(s) + prefix..rows(s + 1));
        Ok(Self {
            keys: half(0)?,
            values: half(1)?,
            prefix_rows: table(prefix_rows.collect())?,
            token_rows: table(token_rows.collect())?,
            sequences: Sequences {
                q_starts: starts.into(),
                k_starts: starts_of(starts.windows(2).map(|w| w[1] - w[0] + prefix)),
                causal: true,
            },
        })
    }
}

/// A layer's learned keys and values, `[2, g, P, d]`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Prefix {
    param: ParamId,
}

impl Prefix {
    /// Declares the parameter `prefix` of one layer, `[2, heads, tokens, head_dim]`: keys first, then values.
    pub(crate) fn new(
        params: &mut ParamScope<'_, '_>,
        tokens: usize,
        heads: usize,
        head_dim: usize,
    ) -> Self {
        Self {
            param: params.param("prefix", [2, heads, tokens, head_dim]),
        }
    }

    /// `k`, `v` `[T, g, d]` with the learned ones before those of each sample: `[S * P + T, g, d]`.
    ///
    /// # Errors
    /// When shapes do not fit or memory runs out.
    pub(crate) fn prepend(
        &self,
        scope: &Scope<'_>,
        [k, v]: [&Var; 2],
        tables: &PrefixTables,
    ) -> Result<[Var; 2]> {
        let learned = scope.parameter(self.param)?;
        let d = learned.shape().last();
        let learned = scope.reshape(&learned, [learned.value().elems() / d, d])?;
        let join = |x: &Var, index: &Tensor| -> Result<Var> {
            let (t, g) = (x.value().dim(0), x.value().dim(1));
            let p = tables.prefix_rows.elems();
            let first = scope.gather_rows(&learned, index)?;
            let first = scope.reshape(&first, [p, g * d])?;
            let own = scope.reshape(x, [t, g * d])?;
            let parts = [(&first, &tables.prefix_rows), (&own, &tables.token_rows)];
            scope.reshape(&scope.merge_rows(&parts, p + t)?, [p + t, g, d])
        };
        Ok([join(k, &tables.keys)?, join(v, &tables.values)?])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernels::CpuBackend;

    #[test]
    fn learned_prefix_rows_come_before_each_sample() {
        let tables = PrefixTables::new(&[0, 3, 5], 2, 2, &CpuBackend::unlimited()).unwrap();
        let of = |t: &Tensor| t.as_slice::<i32>().to_vec();
        assert_eq!(of(&tables.prefix_rows), [0, 1, 5, 6]);
        assert_eq!(of(&tables.token_rows), [2, 3, 4, 7, 8]);
        // Heads of a token lie two learned tokens apart.
        assert_eq!(of(&tables.keys), [0, 2, 1, 3, 0, 2, 1, 3]);
        assert_eq!(of(&tables.values), [4, 6, 5, 7, 4, 6, 5, 7]);
        assert_eq!(*tables.sequences.k_starts, [0, 5, 9]);
        assert_eq!(*tables.sequences.q_starts, [0, 3, 5]);
    }
}

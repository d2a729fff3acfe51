//! Two sets of weights in one layer: each row goes through the products of its own set, where it lies. Adapters take
//! the rows apart and put the results together again. No row is computed twice.

use crate::autograd::{Rows, Scope, Var};
use crate::error::Result;
use crate::nn::{FusedLinear, GatedMlp, Linear};
use crate::ops::LinearParams;
use kernels::Tensor;

/// Token rows (i32) by the expert that computes them; neither is empty.
#[derive(Clone, Debug)]
pub struct Experts {
    /// Text, and the rows of a picture that count as text.
    pub language: Tensor,
    /// Pictures.
    pub vision: Tensor,
}

/// A layer for text beside one for pictures.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Routed<L> {
    pub(super) language: L,
    pub(super) vision: L,
}

impl<L> Routed<L> {
    /// `run` of the one layer on its rows of `x [t, c]` and of the other on the rest: `N` values `[t, ..]`. Without
    /// `experts` all rows are text.
    ///
    /// # Errors
    /// When shapes do not fit or memory runs out.
    fn apart<const N: usize>(
        &self,
        scope: &Scope<'_>,
        x: &Var,
        experts: Option<&Experts>,
        run: impl Fn(&L, &Var) -> Result<[Var; N]>,
    ) -> Result<[Var; N]> {
        let Some(experts) = experts else {
            return run(&self.language, x);
        };
        let part = |layer: &L, rows: &Tensor| {
            let own = scope.gather_rows(x, rows)?;
            scope.with_rows(Rows::Tokens, rows, || run(layer, &own))
        };
        let language = part(&self.language, &experts.language)?;
        let vision = part(&self.vision, &experts.vision)?;
        let t = x.shape().rows();
        let merged = language
            .iter()
            .zip(&vision)
            .map(|(l, v)| scope.merge_rows(&[(l, &experts.language), (v, &experts.vision)], t));
        let merged: Vec<Var> = merged.collect::<Result<_>>()?;
        Ok(merged.try_into().expect("N values of each expert"))
    }
}

impl Experts {
    /// `x [t, k]` through the layer of each row.
    fn linear(&self, scope: &Scope<'_>, x: &Var, layers: [&LinearParams; 2]) -> Result<Var> {
        scope.routed_linear(x, layers, [&self.language, &self.vision])
    }
}

impl Routed<Linear> {
    /// `[t, k]` to `[t, n]`.
    ///
    /// # Errors
    /// When shapes do not fit or memory runs out.
    pub(super) fn linear(
        &self,
        scope: &Scope<'_>,
        x: &Var,
        experts: Option<&Experts>,
    ) -> Result<Var> {
        let plain = (experts, self.language.plain(), self.vision.plain());
        if let (Some(experts), Some(language), Some(vision)) = plain {
            return experts.linear(scope, x, [language, vision]);
        }
        let run = |layer: &Linear, x: &Var| Ok([layer.forward(scope, x)?]);
        let [y] = self.apart(scope, x, experts, run)?;
        Ok(y)
    }
}

impl Routed<FusedLinear> {
    /// The three projections of `x [t, k]`.
    ///
    /// # Errors
    /// When shapes do not fit or memory runs out.
    pub(super) fn projections(
        &self,
        scope: &Scope<'_>,
        x: &Var,
        experts: Option<&Experts>,
    ) -> Result<[Var; 3]> {
        let plain = (experts, self.language.plain(), self.vision.plain());
        let (Some(experts), Some(language), Some(vision)) = plain else {
            let run = |layer: &FusedLinear, x: &Var| layer.forward(scope, x);
            return self.apart(scope, x, experts, run);
        };
        let parts = language.iter().zip(&vision);
        let values: Vec<Var> = parts
            .map(|(l, v)| experts.linear(scope, x, [l, v]))
            .collect::<Result<_>>()?;
        Ok(values.try_into().expect("queries, keys and values"))
    }
}

impl Routed<GatedMlp> {
    /// `[t, c]` to `[t, c]`.
    ///
    /// # Errors
    /// When shapes do not fit or memory runs out.
    pub(super) fn mlp(&self, scope: &Scope<'_>, x: &Var, experts: Option<&Experts>) -> Result<Var> {
        let plain = (experts, self.language.plain(), self.vision.plain());
        if let (Some(experts), Some(language), Some(vision)) = plain {
            let both = |i: usize| [&language[i], &vision[i]];
            let gate = experts.linear(scope, x, both(0))?;
            let up = experts.linear(scope, x, both(1))?;
            let inner = scope.swiglu(&gate, &up)?;
            return experts.linear(scope, &inner, both(2));
        }
        let run = |mlp: &GatedMlp, x: &Var| Ok([mlp.forward(scope, x)?]);
        let [y] = self.apart(scope, x, experts, run)?;
        Ok(y)
    }
}

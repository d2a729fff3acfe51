//! Layers with two experts, one for text rows and one for image rows. Each row is computed once, by its expert: as a
//! grouped GEMM, or gathered per expert and merged again if the device has no grouped operation for adapters.

use crate::autograd::{Rows, Scope, Var};
use crate::error::Result;
use crate::nn::{FusedLinear, GatedMlp, Layer, Linear};
use crate::ops::RowGroups;
use kernels::Tensor;

/// The two experts of a layer.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Routed<L> {
    pub(super) language: L,
    pub(super) vision: L,
}

impl<L> Routed<L> {
    /// Gathers the rows of each expert, applies `run`, and merges the results: `N` values `[t, ..]` of `x [t, c]`.
    /// Without `experts` all rows are text.
    ///
    /// # Errors
    /// When shapes do not fit or memory runs out.
    fn apart<const N: usize>(
        &self,
        scope: &Scope<'_>,
        x: &Var,
        experts: Option<&RowGroups>,
        run: impl Fn(&L, &Var) -> Result<[Var; N]>,
    ) -> Result<[Var; N]> {
        let Some(experts) = experts else {
            return run(&self.language, x);
        };
        let part = |layer: &L, rows: &Tensor| {
            let own = scope.gather_rows(x, rows)?;
            scope.with_rows(Rows::Tokens, rows, || run(layer, &own))
        };
        let RowGroups([text, image]) = experts;
        let language = part(&self.language, text)?;
        let vision = part(&self.vision, image)?;
        let t = x.shape().rows();
        let merged = language
            .iter()
            .zip(&vision)
            .map(|(l, v)| scope.merge_rows(&[(l, text), (v, image)], t));
        let merged: Vec<Var> = merged.collect::<Result<_>>()?;
        Ok(merged.try_into().expect("N values of each expert"))
    }
}

/// Whether each of these layers (language, vision) can run as a grouped GEMM.
fn route<'l>(scope: &Scope<'_>, layers: impl IntoIterator<Item = [&'l Layer; 2]>) -> bool {
    layers.into_iter().all(|layers| {
        let adapters = layers.map(|(_, adapter)| adapter.as_ref());
        adapters == [None; 2] || scope.routes_adapters()
    })
}

/// Grouped GEMM: `x [t, k]` through the layer of each row.
fn linear(scope: &Scope<'_>, x: &Var, layers: [&Layer; 2], rows: &RowGroups) -> Result<Var> {
    let rows = [&rows.0[0], &rows.0[1]];
    let [(language, own), (vision, other)] = layers;
    match (own, other) {
        (None, None) => scope.routed_linear(x, [language, vision], rows),
        _ => scope.routed_lora_linear(x, [(language, *own), (vision, *other)], rows),
    }
}

/// As [`linear`], for several layers of one `x [t, k]`. If every layer has an adapter, the adapters are computed
/// together.
fn linears<const N: usize>(
    scope: &Scope<'_>,
    x: &Var,
    layers: [[&Layer; 2]; N],
    rows: &RowGroups,
) -> Result<[Var; N]> {
    let plain = |layers: &[&Layer; 2]| layers.iter().all(|(_, adapter)| adapter.is_none());
    let values = if layers.iter().any(plain) {
        let each = layers.iter().map(|both| linear(scope, x, *both, rows));
        each.collect::<Result<Vec<Var>>>()?
    } else {
        let rows = [&rows.0[0], &rows.0[1]];
        let pairs = layers.map(|both| both.map(|(base, adapter)| (base, *adapter)));
        scope.shared_routed_lora(x, &pairs, rows)?
    };
    Ok(values.try_into().expect("one value per layer"))
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
        experts: Option<&RowGroups>,
    ) -> Result<Var> {
        if let Some(experts) = experts {
            let both = [&self.language.layer(), &self.vision.layer()];
            if route(scope, [both]) {
                return linear(scope, x, both, experts);
            }
        }
        let run = |layer: &Linear, x: &Var| Ok([layer.forward(scope, x)?]);
        let [y] = self.apart(scope, x, experts, run)?;
        Ok(y)
    }
}

impl Routed<FusedLinear> {
    /// The three projections of `x [t, k]`: queries, keys, values.
    ///
    /// # Errors
    /// When shapes do not fit or memory runs out.
    pub(super) fn projections(
        &self,
        scope: &Scope<'_>,
        x: &Var,
        experts: Option<&RowGroups>,
    ) -> Result<[Var; 3]> {
        if let Some(experts) = experts {
            let (language, vision) = (self.language.layers(), self.vision.layers());
            let both = [0, 1, 2].map(|i: usize| [&language[i], &vision[i]]);
            if route(scope, both) {
                return linears(scope, x, both, experts);
            }
        }
        let run = |layer: &FusedLinear, x: &Var| layer.forward(scope, x);
        self.apart(scope, x, experts, run)
    }
}

impl Routed<GatedMlp> {
    /// `[t, c]` to `[t, c]`.
    ///
    /// # Errors
    /// When shapes do not fit or memory runs out.
    pub(super) fn mlp(
        &self,
        scope: &Scope<'_>,
        x: &Var,
        experts: Option<&RowGroups>,
    ) -> Result<Var> {
        if let Some(experts) = experts {
            let (language, vision) = (self.language.layers(), self.vision.layers());
            let both = |i: usize| [&language[i], &vision[i]];
            if route(scope, [both(0), both(1), both(2)]) {
                let [gate, up] = linears(scope, x, [both(0), both(1)], experts)?;
                let inner = scope.swiglu(&gate, &up)?;
                return linear(scope, &inner, both(2), experts);
            }
        }
        let run = |mlp: &GatedMlp, x: &Var| Ok([mlp.forward(scope, x)?]);
        let [y] = self.apart(scope, x, experts, run)?;
        Ok(y)
    }
}

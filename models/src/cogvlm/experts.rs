//! Layers with one set of weights for text rows and one for image rows.
//!
//! Each row goes through the products of its own set in place. If a device has no operation for adapters over row groups,
//! the rows of each set are gathered and the results merged. No row is computed twice.

use crate::autograd::{Rows, Scope, Var};
use crate::error::Result;
use crate::nn::{FusedLinear, GatedMlp, Linear};
use crate::ops::RowGroups;
use kernels::Tensor;

/// A layer with one set of weights for text rows and another for image rows.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct PerExpert<L> {
    pub(super) language: L,
    pub(super) vision: L,
}

/// The layers of both experts of one projection.
type Pair = [Linear; 2];

impl<L> PerExpert<L> {
    /// `run` of each layer on its gathered rows of `x [t, c]`: `N` merged values `[t, ..]`. Without `experts` all rows are
    /// text.
    ///
    /// # Errors
    /// When shapes do not fit or memory runs out.
    fn gathered<const N: usize>(
        &self,
        scope: &Scope<'_>,
        x: &Var,
        experts: Option<&RowGroups>,
        run: impl Fn(&L, &Var) -> Result<[Var; N]>,
    ) -> Result<[Var; N]> {
        let Some(RowGroups([text, image])) = experts else {
            return run(&self.language, x);
        };
        let part = |layer: &L, rows: &Tensor| {
            let own = scope.gather_rows(x, rows)?;
            scope.with_rows(Rows::Tokens, rows, || run(layer, &own))
        };
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

    /// Projections of both experts, if the device computes all of them in place.
    fn in_place<const N: usize>(
        &self,
        scope: &Scope<'_>,
        layers: impl Fn(&L) -> [Linear; N],
    ) -> Option<[Pair; N]> {
        let (language, vision) = (layers(&self.language), layers(&self.vision));
        let pairs = std::array::from_fn(|i| [language[i].clone(), vision[i].clone()]);
        let computed = scope.backend().groups_adapters() || pairs.iter().all(is_plain);
        computed.then_some(pairs)
    }
}

/// Whether neither layer has an adapter.
fn is_plain(pair: &Pair) -> bool {
    pair.iter().all(|layer| layer.adapter.is_none())
}

/// Projections of one `x [t, k]`, each row through its expert's layer. If every projection has an adapter, they are one
/// operation.
fn projections<const N: usize>(
    scope: &Scope<'_>,
    x: &Var,
    pairs: [Pair; N],
    rows: &RowGroups,
) -> Result<[Var; N]> {
    let values = if pairs.iter().any(is_plain) {
        let mut values = Vec::with_capacity(N);
        for pair in pairs {
            if is_plain(&pair) {
                let bases = pair.each_ref().map(|layer| &layer.base);
                values.push(scope.grouped_linear(x, bases, rows)?);
            } else {
                values.extend(scope.adapted_linear(x, Some(rows), &[pair.into()])?);
            }
        }
        values
    } else {
        scope.adapted_linear(x, Some(rows), &pairs.map(Vec::from))?
    };
    Ok(values.try_into().expect("one value per projection"))
}

impl PerExpert<Linear> {
    /// Applies to each row of `x` its expert's layer: `[t, k]` to `[t, n]`.
    ///
    /// # Errors
    /// When shapes do not fit or memory runs out.
    pub(super) fn linear(
        &self,
        scope: &Scope<'_>,
        x: &Var,
        experts: Option<&RowGroups>,
    ) -> Result<Var> {
        let pairs = self.in_place(scope, |layer| [layer.clone()]);
        let [y] = match (pairs, experts) {
            (Some(pairs), Some(rows)) => projections(scope, x, pairs, rows)?,
            _ => self.gathered(scope, x, experts, |layer, x| Ok([layer.forward(scope, x)?]))?,
        };
        Ok(y)
    }
}

impl PerExpert<FusedLinear> {
    /// Applies to each row of `x` `[t, k]` its expert's three projections (queries, keys and values).
    ///
    /// # Errors
    /// When shapes do not fit or memory runs out.
    pub(super) fn projections(
        &self,
        scope: &Scope<'_>,
        x: &Var,
        experts: Option<&RowGroups>,
    ) -> Result<[Var; 3]> {
        let pairs = self.in_place(scope, FusedLinear::layers);
        match (pairs, experts) {
            (Some(pairs), Some(rows)) => projections(scope, x, pairs, rows),
            _ => self.gathered(scope, x, experts, |layer, x| layer.forward(scope, x)),
        }
    }
}

impl PerExpert<GatedMlp> {
    /// Applies to each row of `x` its expert's MLP: `[t, c]` to `[t, c]`.
    ///
    /// # Errors
    /// When shapes do not fit or memory runs out.
    pub(super) fn mlp(
        &self,
        scope: &Scope<'_>,
        x: &Var,
        experts: Option<&RowGroups>,
    ) -> Result<Var> {
        // Tiles and stretches are rows of one expert, whose sums over rows they continue.
        let in_parts = scope.is_in_parts(x.shape().rows());
        let pairs = self.in_place(scope, GatedMlp::layers).filter(|_| !in_parts);
        let [y] = match (pairs, experts) {
            (Some([gate, up, down]), Some(rows)) => {
                let [gate, up] = projections(scope, x, [gate, up], rows)?;
                let inner = scope.swiglu(&gate, &up)?;
                projections(scope, &inner, [down], rows)?
            }
            _ => self.gathered(scope, x, experts, |mlp, x| Ok([mlp.forward(scope, x)?]))?,
        };
        Ok(y)
    }
}

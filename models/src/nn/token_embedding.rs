//! Token embedding, the first unit of a decoder.
//!
//! Shapes: `T` tokens of all samples, `D` width, `v` vocabulary.

use crate::autograd::{Scope, Tape, Var};
use crate::batch::Batch;
use crate::error::Result;
use crate::params::ParamBuilder;
use engine::{ParamId, UnitId};

/// Token embedding of a decoder. Image features replace the rows of their placeholder tokens.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct TokenEmbedding {
    unit: UnitId,
    table: ParamId,
}

impl TokenEmbedding {
    /// Declares the embedding table `module.weight`, `[v, D]`, as the only parameter of the unit (parameters
    /// gathered together) called `unit`. `shape` is `[v, D]`.
    ///
    /// # Errors
    /// When the module is a LoRA target; it cannot take an adapter.
    pub fn new(
        params: &mut ParamBuilder<'_>,
        unit: &str,
        module: &str,
        shape: [usize; 2],
    ) -> Result<Self> {
        let mut scope = params.unit(unit);
        scope.refuse_adapter(module)?;
        Ok(Self {
            unit: scope.id(),
            table: scope.at(module).param("weight", shape),
        })
    }

    /// Looks up the embeddings of the batch's tokens and replaces the rows of images by `features`; returns
    /// `[T, D]`.
    ///
    /// # Errors
    /// When the engine or the device fails.
    pub fn forward<'m>(
        &'m self,
        tape: &Tape<'_, 'm>,
        batch: &'m Batch,
        features: Option<&Var>,
    ) -> Result<Var> {
        let x = match (features, &batch.vision) {
            (Some(features), Some(vision)) => {
                let [x] = tape.segment(self.unit, [features], move |scope, [features]| {
                    let x = self.tokens(scope, batch)?;
                    let rows = scope.gather_rows(features, &vision.splice.sources)?;
                    Ok([scope.replace_rows(&x, &vision.splice.rows, &rows)?])
                })?;
                x
            }
            _ => {
                let [x] = tape.segment(self.unit, [], move |scope, []| {
                    Ok([self.tokens(scope, batch)?])
                })?;
                x
            }
        };
        tape.observe("inputs_embeds", &x);
        Ok(x)
    }

    /// Embeddings of all tokens; those of padding in the text get no gradient.
    fn tokens(&self, scope: &Scope<'_>, batch: &Batch) -> Result<Var> {
        let x = scope.embedding(self.table, &batch.input_ids)?;
        let Some(padding) = &batch.padding_rows else {
            return Ok(x);
        };
        let fixed = scope.constant(scope.backend().gather_rows(x.value(), padding)?);
        scope.replace_rows(&x, padding, &fixed)
    }
}

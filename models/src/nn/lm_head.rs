//! The end of a decoder: its last norm and the product with the vocabulary.

use super::RmsNorm;
use crate::autograd::{Loss, Tape, Var};
use crate::batch::Batch;
use crate::error::Result;
use crate::ops::LinearParams;
use crate::params::ParamBuilder;
use engine::{ParamId, UnitId};
use kernels::{DType, Tensor};

/// Names and sizes of an [`LmHead`], the last norm of a decoder with its output head.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LmHeadConfig<'a> {
    /// Name of the unit (parameters gathered together) that holds norm and head.
    pub unit: &'a str,
    /// Path of the norm's module in the checkpoint.
    pub norm: &'a str,
    /// Path of the output head's module in the checkpoint.
    pub head: &'a str,
    /// Number of tokens of the vocabulary, `v`.
    pub vocabulary: usize,
    /// Elements of one token's hidden state, `D`.
    pub width: usize,
    /// Epsilon that the norm adds to the mean square.
    pub eps: f32,
}

/// The last norm of a decoder and its output head, which are one unit: their parameters are gathered
/// together.
#[derive(Debug)]
pub struct LmHead {
    /// Id of the unit that holds norm and head.
    pub unit: UnitId,
    /// The norm that is applied before the head.
    pub norm: RmsNorm,
    /// Id of the output head's weight, `[v, D]`: one row per token of the vocabulary.
    pub weight: ParamId,
}

impl LmHead {
    /// Declares the parameters of the norm and of the head, whose weight is `[v, D]`.
    ///
    /// # Errors
    /// When the head is a LoRA target; it cannot take an adapter.
    pub fn new(params: &mut ParamBuilder<'_>, config: LmHeadConfig<'_>) -> Result<Self> {
        let mut scope = params.unit(config.unit);
        scope.refuse_adapter(config.head)?;
        let shape = [config.vocabulary, config.width];
        Ok(Self {
            unit: scope.id(),
            norm: RmsNorm::new(&mut scope, config.norm, config.width, config.eps),
            weight: scope.at(config.head).param("weight", shape),
        })
    }

    /// Cross entropy of each row of `hidden`, the decoder's hidden states `[t, D]` before its last norm,
    /// against the labels of `batch`.
    ///
    /// # Errors
    /// When the engine or the device fails.
    pub fn loss<'m>(&'m self, tape: &Tape<'_, 'm>, batch: &'m Batch, hidden: &Var) -> Result<Loss> {
        let [rows] = tape.last_segment(self.unit, [hidden], move |scope, [x]| {
            let x = self.norm.forward(scope, x)?;
            Ok([scope.linear_cross_entropy(&x, self.weight, &batch.labels)?])
        })?;
        Ok(Loss {
            rows,
            supervised: batch.supervised,
        })
    }

    /// Logits, f32 `[rows, v]`, of the rows `index` (i32) of `hidden`, or of all rows without an `index`.
    ///
    /// # Errors
    /// When the engine or the device fails.
    pub fn logits<'m>(
        &'m self,
        tape: &Tape<'_, 'm>,
        hidden: &Var,
        index: Option<&'m Tensor>,
    ) -> Result<Tensor> {
        let [logits] = tape.segment(self.unit, [hidden], move |scope, [x]| {
            let x = match index {
                Some(index) => scope.gather_rows(x, index)?,
                None => x.clone(),
            };
            let x = self.norm.forward(scope, &x)?;
            scope.observe("final_hidden", &x);
            let logits = scope.linear(&x, &LinearParams::new(self.weight, None))?;
            Ok([scope.cast(&logits, DType::F32)?])
        })?;
        Ok(logits.into_value())
    }
}

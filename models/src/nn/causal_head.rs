//! The last unit of a decoder.
//!
//! Shapes: `T` tokens of all samples, `D` width, `v` vocabulary.

use super::RmsNorm;
use crate::autograd::{Loss, Scope, Tape, Var};
use crate::batch::Batch;
use crate::error::Result;
use crate::ops::LinearParams;
use crate::params::ParamBuilder;
use engine::{ParamId, TensorParallel, UnitId};
use kernels::{DType, Tensor};

/// Names and sizes of a [`CausalHead`].
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct CausalHeadConfig<'a> {
    /// The unit.
    pub unit: &'a str,
    /// Path of the norm.
    pub norm: &'a str,
    /// Path of the head.
    pub head: &'a str,
    /// `v`.
    pub vocabulary: usize,
    /// `D`.
    pub width: usize,
    /// Epsilon of the norm.
    pub eps: f32,
}

/// The final norm and the output layer, with the loss.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct CausalHead {
    unit: UnitId,
    norm: RmsNorm,
    weight: ParamId,
}

impl CausalHead {
    /// Declares the norm and the head's weight `[v, D]`.
    ///
    /// # Errors
    /// When the head is an adapter target.
    pub fn new(params: &mut ParamBuilder<'_>, config: CausalHeadConfig<'_>) -> Result<Self> {
        let mut scope = params.unit(config.unit);
        scope.refuse_adapter(config.head)?;
        let column = TensorParallel::Column { groups: 1 };
        let shape = [config.vocabulary, config.width];
        Ok(Self {
            unit: scope.id(),
            norm: RmsNorm::new(&mut scope, config.norm, config.width, config.eps),
            weight: scope.at(config.head).param("weight", shape, column),
        })
    }

    /// Losses of all rows from the hidden states `[T, D]`.
    ///
    /// # Errors
    /// When the engine or the device fails.
    pub fn loss<'m>(
        &'m self,
        tape: &Tape<'_, 'm>,
        batch: &'m Batch,
        hidden: &Var,
    ) -> Result<Loss> {
        let [rows] = tape.segment(self.unit, [hidden], move |scope, [x]| {
            let x = self.norm.forward(scope, x)?;
            Ok([scope.linear_cross_entropy(&x, self.weight, &batch.labels)?])
        })?;
        Ok(Loss {
            rows,
            supervised: batch.supervised,
        })
    }

    /// f32 logits of the rows `index`, or of all rows.
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
            Ok([self.project(scope, &x)?])
        })?;
        Ok(logits.into_value())
    }

    fn project(&self, scope: &Scope<'_>, x: &Var) -> Result<Var> {
        let x = self.norm.forward(scope, x)?;
        scope.observe("final_hidden", &x);
        let logits = scope.linear(&x, &LinearParams::new(self.weight, None))?;
        scope.cast(&logits, DType::F32)
    }
}

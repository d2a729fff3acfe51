//! Values that cross the boundaries of a pipeline stage.
//!
//! Every stage runs the whole forward code of a model. Segments of other stages do not run their bodies: those before the
//! stage return the values that it received, those after it note which values they read. Outputs of segments are counted
//! on all stages alike, so that an index names the same value everywhere.

use super::tape::Tape;
use super::var::Var;
use crate::error::{ModelError, Result};
use engine::UnitId;
use kernels::{DType, Shape, Tag, Tensor};
use std::collections::BTreeMap;
use std::ops::Range;

/// Values that cross the boundaries of the pipeline stage with the units `own`, in one pass.
#[derive(Debug)]
pub(super) struct Boundary {
    own: Range<u32>,
    /// Values from the previous stage, by index.
    pub(super) received: BTreeMap<u32, Var>,
    /// Values that later stages read, by index.
    needed: BTreeMap<u32, Var>,
    /// Stands for values that this stage does not have.
    nothing: Option<Tensor>,
}

impl Boundary {
    pub(super) fn new(own: Range<u32>) -> std::cell::RefCell<Self> {
        std::cell::RefCell::new(Self {
            own,
            received: BTreeMap::new(),
            needed: BTreeMap::new(),
            nothing: None,
        })
    }

    pub(super) fn has(&self, unit: UnitId) -> bool {
        self.own.contains(&unit.0)
    }

    /// Values that later stages read.
    pub(super) fn sent(&self) -> Vec<Var> {
        self.needed.values().cloned().collect()
    }

    /// An error if a segment of this stage reads a value that no stage sent.
    pub(super) fn check(&self, unit: UnitId, inputs: &[&Var]) -> Result<()> {
        let missing = inputs.iter().find(|input| is_nothing(input));
        match missing.and_then(|input| input.output()) {
            Some(output) => Err(ModelError::NotReceived { unit, output }),
            None => Ok(()),
        }
    }

    /// The outputs of a segment of another stage.
    pub(super) fn skip<const O: usize>(
        &mut self,
        unit: UnitId,
        inputs: &[&Var],
        first_output: u32,
        tape: &Tape<'_, '_>,
    ) -> Result<[Var; O]> {
        if unit.0 >= self.own.end {
            for input in inputs.iter().filter(|input| !is_nothing(input)) {
                if let Some(index) = input.output() {
                    self.needed.insert(index, (*input).clone());
                }
            }
        }
        let nothing = match &self.nothing {
            Some(nothing) => nothing.clone(),
            None => {
                let backend = tape.backend();
                let shape = Shape::new(&[0]);
                backend.upload(&[], shape, DType::F32, Tag::Activations)?
            }
        };
        self.nothing = Some(nothing.clone());
        Ok(std::array::from_fn(|i| {
            let index = first_output + i as u32;
            match self.received.get(&index) {
                Some(var) => var.clone(),
                None => tape.input(nothing.clone()).with_output(index),
            }
        }))
    }
}

/// Whether a value is of another stage and was not received.
fn is_nothing(var: &Var) -> bool {
    var.output().is_some() && var.shape().dims() == [0]
}

//! Description of a model for the engine: units of parameters in the order of the forward pass.

use kernels::Shape;
use serde::{Deserialize, Serialize};

/// Index of a parameter in [`ModelSpec::params`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct ParamId(pub u32);

impl ParamId {
    /// The id as an index into [`ModelSpec::params`].
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Index of a unit in [`ModelSpec::units`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct UnitId(pub u32);

impl UnitId {
    /// The id as an index into [`ModelSpec::units`].
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// One parameter of a model.
#[derive(Clone, PartialEq, Debug)]
pub struct ParamSpec {
    /// Name of the parameter in checkpoints.
    pub name: String,
    /// Shape of the parameter; every rank declares the whole shape, not its shard.
    pub shape: Shape,
    /// The unit with which the parameter is gathered.
    pub unit: UnitId,
    /// Whether the optimizer updates the parameter. A frozen parameter has no gradient, optimizer state or master
    /// weight.
    pub trainable: bool,
}

/// Parameters that are gathered and released together (FSDP's unit).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UnitSpec {
    /// Dotted name of the unit, such as `llm.layers.3`.
    pub name: String,
}

/// A model as the engine sees it: units in forward order, parameters in declaration order.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct ModelSpec {
    /// Units in the order of the forward pass.
    pub units: Vec<UnitSpec>,
    /// Parameters, grouped by unit; units ascend.
    pub params: Vec<ParamSpec>,
}

impl ModelSpec {
    /// Id of the parameter called `name`; `None` if there is none.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<ParamId> {
        self.params
            .iter()
            .position(|p| p.name == name)
            .map(|i| ParamId(i as u32))
    }

    /// Number of elements: of all parameters, and of the trainable ones.
    #[must_use]
    pub fn elems(&self) -> (usize, usize) {
        let sum = |f: &dyn Fn(&ParamSpec) -> bool| {
            self.params
                .iter()
                .filter(|p| f(p))
                .map(|p| p.shape.elems())
                .sum()
        };
        (sum(&|_| true), sum(&|p| p.trainable))
    }
}

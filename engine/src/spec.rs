//! What the engine is told about a model: units of parameters in the order of the forward pass.

use kernels::Shape;
use serde::{Deserialize, Serialize};

/// Index of a parameter in [`ModelSpec::params`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct ParamId(pub u32);

impl ParamId {
    /// As an index.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Index of a unit in [`ModelSpec::units`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct UnitId(pub u32);

impl UnitId {
    /// As an index.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// One parameter.
#[derive(Clone, PartialEq, Debug)]
pub struct ParamSpec {
    /// Name in the checkpoint.
    pub name: String,
    /// Extents.
    pub shape: Shape,
    /// The unit it is gathered with.
    pub unit: UnitId,
    /// Whether it is updated. A frozen parameter never owns gradient, moment or master bytes.
    pub trainable: bool,
}

/// Parameters gathered and released together.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UnitSpec {
    /// Dotted name, such as `llm.layers.3`.
    pub name: String,
}

/// A model as the engine sees it: units in forward order, parameters in declaration order.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct ModelSpec {
    /// In the order in which a forward pass uses them.
    pub units: Vec<UnitSpec>,
    /// Grouped by unit, ascending.
    pub params: Vec<ParamSpec>,
}

impl ModelSpec {
    /// The parameter called `name`.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<ParamId> {
        self.params
            .iter()
            .position(|p| p.name == name)
            .map(|i| ParamId(i as u32))
    }

    /// Elements of all parameters, and of the trainable ones.
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

//! Description of a model for the engine: units of parameters in the order of the forward pass.

use kernels::{DType, Quantization, Shape};
use serde::{Deserialize, Serialize};

/// Id of a parameter: its index in [`ModelSpec::params`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct ParamId(pub u32);

impl ParamId {
    /// The parameter's index in [`ModelSpec::params`].
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Id of a unit (parameters that are gathered together, usually one layer): its index in
/// [`ModelSpec::units`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct UnitId(pub u32);

impl UnitId {
    /// The unit's index in [`ModelSpec::units`].
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Declaration of one parameter of a model.
#[derive(Clone, PartialEq, Debug)]
pub struct ParamSpec {
    /// Name of the parameter in checkpoints.
    pub name: String,
    /// Shape of the whole parameter, not of a rank's shard.
    pub shape: Shape,
    /// Id of the parameter's unit: the parameters that are gathered and released together, usually one layer.
    pub unit: UnitId,
    /// Whether the optimizer updates the parameter. A frozen parameter has no gradient, optimizer state or master
    /// weight.
    pub trainable: bool,
    /// How a frozen parameter is stored in fewer bits; `None` stores it in the dtype of the weights. A lease dequantizes it.
    pub quantization: Option<Quantization>,
}

impl ParamSpec {
    /// Quantization of the parameter as it is stored; `None` if it trains, since only frozen parameters are quantized.
    #[must_use]
    pub fn stored_quantization(&self) -> Option<Quantization> {
        self.quantization.filter(|_| !self.trainable)
    }

    /// Shape of the parameter as it is stored: of its bytes if it is quantized.
    #[must_use]
    pub fn stored_shape(&self) -> Shape {
        match self.stored_quantization() {
            Some(quantization) => Shape::new(&[quantization.bytes(self.shape)]),
            None => self.shape,
        }
    }

    /// Bytes of the parameter as it is stored, in the dtype `weights` unless it is quantized.
    #[must_use]
    pub fn stored_bytes(&self, weights: DType) -> u64 {
        let size = self
            .stored_quantization()
            .map_or(weights.size_bytes(), |_| 1);
        (self.stored_shape().elems() * size) as u64
    }
}

/// Declaration of a unit: parameters that are gathered and released together, as in FSDP; usually one layer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UnitSpec {
    /// Dotted name of the unit, such as `llm.layers.3`.
    pub name: String,
}

/// Declaration of a model for the engine: its units in forward order, and its parameters grouped by unit.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct ModelSpec {
    /// All units of the model, in the order of the forward pass.
    pub units: Vec<UnitSpec>,
    /// All parameters of the model, grouped by unit, in the order of the units.
    pub params: Vec<ParamSpec>,
}

impl ModelSpec {
    /// Id of the parameter called `name`; `None` if the model has no such parameter.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<ParamId> {
        self.params
            .iter()
            .position(|p| p.name == name)
            .map(|i| ParamId(i as u32))
    }

    /// Number of elements of all parameters, and number of elements of the trainable ones.
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

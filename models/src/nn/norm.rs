//! Normalization layers.

use crate::autograd::{Scope, Var};
use crate::error::Result;
use crate::params::ParamScope;
use engine::ParamId;

/// Layer norm with weight and bias.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LayerNorm {
    /// Id of the parameter that scales each element, `[c]`.
    pub weight: ParamId,
    /// Id of the parameter that is added to each element, `[c]`.
    pub bias: ParamId,
    /// Epsilon, added to the variance before its square root is taken.
    pub eps: f32,
}

impl LayerNorm {
    /// Declares the parameters `weight` and `bias`, `[c]` each, below the module `name`.
    pub fn new(params: &mut ParamScope<'_, '_>, name: &str, c: usize, eps: f32) -> Self {
        let mut inner = params.at(name);
        Self {
            weight: inner.param("weight", [c]),
            bias: inner.param("bias", [c]),
            eps,
        }
    }

    /// Normalizes `x` over its last axis: `[.., c]` to `[.., c]`.
    ///
    /// # Errors
    /// When shapes do not fit or memory runs out.
    pub fn forward(&self, scope: &Scope<'_>, x: &Var) -> Result<Var> {
        scope.layer_norm(x, self.weight, self.bias, self.eps)
    }
}

/// Root-mean-square norm (RMSNorm) with a weight and no bias.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct RmsNorm {
    /// Id of the parameter that scales each element, `[c]`.
    pub weight: ParamId,
    /// Epsilon, added to the mean square before its square root is taken.
    pub eps: f32,
}

impl RmsNorm {
    /// Declares the parameter `weight`, `[c]`, below the module `name`.
    pub fn new(params: &mut ParamScope<'_, '_>, name: &str, c: usize, eps: f32) -> Self {
        let weight = params.at(name).param("weight", [c]);
        Self { weight, eps }
    }

    /// Normalizes `x` over its last axis: `[.., c]` to `[.., c]`.
    ///
    /// # Errors
    /// When shapes do not fit or memory runs out.
    pub fn forward(&self, scope: &Scope<'_>, x: &Var) -> Result<Var> {
        scope.rms_norm(x, self.weight, self.eps)
    }
}

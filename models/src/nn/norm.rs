//! Normalization layers.

use crate::autograd::{Scope, Var};
use crate::error::Result;
use crate::params::ParamScope;
use engine::ParamId;

/// Layer norm with weight and bias.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LayerNorm {
    /// Scale, `[c]`.
    pub weight: ParamId,
    /// Shift, `[c]`.
    pub bias: ParamId,
    /// Added to the variance.
    pub eps: f32,
}

impl LayerNorm {
    /// Declares `name.weight` and `name.bias`.
    pub fn new(params: &mut ParamScope<'_, '_>, name: &str, c: usize, eps: f32) -> Self {
        let mut inner = params.at(name);
        Self {
            weight: inner.param("weight", [c]),
            bias: inner.param("bias", [c]),
            eps,
        }
    }

    /// `[.., c]` to `[.., c]`.
    ///
    /// # Errors
    /// When shapes do not fit or memory runs out.
    pub fn forward(&self, scope: &Scope<'_>, x: &Var) -> Result<Var> {
        scope.layer_norm(x, self.weight, self.bias, self.eps)
    }
}

/// Root-mean-square norm.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct RmsNorm {
    /// Scale, `[c]`.
    pub weight: ParamId,
    /// Added to the mean square.
    pub eps: f32,
}

impl RmsNorm {
    /// Declares `name.weight`.
    pub fn new(params: &mut ParamScope<'_, '_>, name: &str, c: usize, eps: f32) -> Self {
        let weight = params.at(name).param("weight", [c]);
        Self { weight, eps }
    }

    /// `[.., c]` to `[.., c]`.
    ///
    /// # Errors
    /// When shapes do not fit or memory runs out.
    pub fn forward(&self, scope: &Scope<'_>, x: &Var) -> Result<Var> {
        scope.rms_norm(x, self.weight, self.eps)
    }
}

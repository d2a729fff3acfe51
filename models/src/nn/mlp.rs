//! Feed-forward layers.

use super::Linear;
use crate::autograd::{Scope, Var};
use crate::error::Result;
use crate::params::ParamScope;
use engine::TensorParallel;
use kernels::Gelu;

const COLUMN: TensorParallel = TensorParallel::Column { groups: 1 };

/// `fc2(gelu(fc1(x)))` with biases: vision towers.
#[derive(Clone, PartialEq, Debug)]
pub struct GeluMlp {
    fc1: Linear,
    fc2: Linear,
    gelu: Gelu,
}

impl GeluMlp {
    /// Declares `fc1` and `fc2` below `name`; `width` to `inner` and back.
    pub fn new(
        params: &mut ParamScope<'_, '_>,
        name: &str,
        width: usize,
        inner: usize,
        gelu: Gelu,
    ) -> Self {
        let mut scope = params.at(name);
        Self {
            fc1: scope.linear("fc1", [inner, width], true, COLUMN),
            fc2: scope.linear("fc2", [width, inner], true, TensorParallel::Row),
            gelu,
        }
    }

    /// `[t, c]` to `[t, c]`.
    ///
    /// # Errors
    /// When shapes do not fit or memory runs out.
    pub fn forward(&self, scope: &Scope<'_>, x: &Var) -> Result<Var> {
        let inner = self.fc1.forward(scope, x)?;
        let inner = scope.gelu(&inner, self.gelu)?;
        self.fc2.forward(scope, &inner)
    }
}

/// `down(silu(gate(x)) * up(x))` without biases: Llama and Qwen2.
#[derive(Clone, PartialEq, Debug)]
pub struct GatedMlp {
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl GatedMlp {
    /// Declares `gate_proj`, `up_proj` and `down_proj` below `name`.
    pub fn new(params: &mut ParamScope<'_, '_>, name: &str, width: usize, inner: usize) -> Self {
        let mut scope = params.at(name);
        Self {
            gate: scope.linear("gate_proj", [inner, width], false, COLUMN),
            up: scope.linear("up_proj", [inner, width], false, COLUMN),
            down: scope.linear("down_proj", [width, inner], false, TensorParallel::Row),
        }
    }

    /// `[t, c]` to `[t, c]`.
    ///
    /// # Errors
    /// When shapes do not fit or memory runs out.
    pub fn forward(&self, scope: &Scope<'_>, x: &Var) -> Result<Var> {
        let gate = self.gate.forward(scope, x)?;
        let up = self.up.forward(scope, x)?;
        let inner = scope.swiglu(&gate, &up)?;
        self.down.forward(scope, &inner)
    }
}

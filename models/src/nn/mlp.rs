//! Feed-forward layers.

use super::{FusedLinear, Linear};
use crate::autograd::{Scope, Var};
use crate::error::Result;
use crate::params::ParamScope;
use engine::ParamId;
use kernels::Gelu;

/// MLP of the vision towers: `fc2(gelu(fc1(x)))`, both layers with biases.
#[derive(Clone, PartialEq, Debug)]
pub struct GeluMlp {
    fc1: Linear,
    fc2: Linear,
    gelu: Gelu,
}

impl GeluMlp {
    /// Declares the layers `fc1` (`width` to `inner`) and `fc2` (`inner` to `width`) below the module `name`.
    pub fn new(
        params: &mut ParamScope<'_, '_>,
        name: &str,
        width: usize,
        inner: usize,
        gelu: Gelu,
    ) -> Self {
        let mut scope = params.at(name);
        Self {
            fc1: scope.linear("fc1", [inner, width], true),
            fc2: scope.linear("fc2", [width, inner], true),
            gelu,
        }
    }

    /// Applies the MLP to `x`: `[t, c]` to `[t, c]`.
    ///
    /// # Errors
    /// When shapes do not fit or memory runs out.
    pub fn forward(&self, scope: &Scope<'_>, x: &Var) -> Result<Var> {
        let ids: Vec<ParamId> = self.fc1.ids().chain(self.fc2.ids()).collect();
        let Self { fc1, fc2, gelu } = self.clone();
        scope.in_tiles(x, &ids, move |scope, x| {
            let inner = fc1.forward(scope, x)?;
            fc2.forward(scope, &scope.gelu(&inner, gelu)?)
        })
    }
}

/// Gated MLP: `down(silu(gate(x)) * up(x))`.
#[derive(Clone, PartialEq, Debug)]
pub struct GatedMlp {
    inputs: GateUp,
    down: Linear,
}

/// Weights of the gate and up projections.
#[derive(Clone, PartialEq, Debug)]
enum GateUp {
    /// One weight per projection.
    Apart(Box<[Linear; 2]>),
    /// One weight for both, the gate's rows first.
    Fused(FusedLinear),
}

impl GatedMlp {
    /// Declares the layers `gate_proj`, `up_proj` (`width` to `inner`) and `down_proj` (back) below the
    /// module `name`; `bias` gives each a bias.
    pub fn new(
        params: &mut ParamScope<'_, '_>,
        name: &str,
        width: usize,
        inner: usize,
        bias: bool,
    ) -> Self {
        let mut scope = params.at(name);
        let inputs = ["gate_proj", "up_proj"].map(|name| scope.linear(name, [inner, width], bias));
        Self {
            inputs: GateUp::Apart(Box::new(inputs)),
            down: scope.linear("down_proj", [width, inner], bias),
        }
    }

    /// Declares an MLP without biases whose checkpoint stacks gate and up as one weight. `[gate_up, down]` are the names of
    /// the two layers below the module `name`.
    pub fn fused(
        params: &mut ParamScope<'_, '_>,
        name: &str,
        [gate_up, down]: [&str; 2],
        width: usize,
        inner: usize,
    ) -> Self {
        let mut scope = params.at(name);
        Self {
            inputs: GateUp::Fused(scope.fused_linear(gate_up, &[inner; 2], width, false)),
            down: scope.linear(down, [width, inner], false),
        }
    }

    /// Returns the gate, up and down projections in this order, for operations over several layers.
    #[must_use]
    pub fn layers(&self) -> [Linear; 3] {
        let [gate, up] = match &self.inputs {
            GateUp::Apart(layers) => (**layers).clone(),
            GateUp::Fused(layer) => layer.layers(),
        };
        [gate, up, self.down.clone()]
    }

    /// Applies the MLP to `x`: `[t, c]` to `[t, c]`.
    ///
    /// # Errors
    /// When shapes do not fit or memory runs out.
    pub fn forward(&self, scope: &Scope<'_>, x: &Var) -> Result<Var> {
        let [gate, up, down] = self.layers();
        let layers = [&gate, &up, &down].into_iter();
        let ids: Vec<ParamId> = layers.flat_map(Linear::ids).collect();
        scope.in_tiles(x, &ids, move |scope, x| {
            let [gate, up] = Linear::forward_all([&gate, &up], scope, x)?;
            down.forward(scope, &scope.swiglu(&gate, &up)?)
        })
    }
}

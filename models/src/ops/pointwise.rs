//! Elementwise operations: activations, sums, dtype and shape changes.

use crate::autograd::{Scope, Var};
use crate::error::Result;
use engine::ParamId;
use kernels::{DType, Direction, DropoutArgs, Gelu, RopeLayout, Shape, Tensor};

impl Scope<'_> {
    /// The parameter `id` as a value of the segment, to which gradients flow if it trains.
    ///
    /// # Errors
    /// When it is not in the unit whose weights are gathered.
    pub fn parameter(&self, id: ParamId) -> Result<Var> {
        let value = self.weight_value(id)?;
        self.record("parameter", value, &[], &[id], move |sweep, dy| {
            let wide = match dy.dtype() {
                DType::F32 => dy,
                _ => sweep.backend().cast(&dy, DType::F32)?,
            };
            sweep.param(id, wide)
        })
    }

    /// Sum `a + b` of values with equal shape and dtype.
    ///
    /// # Errors
    /// When shapes or dtypes differ, or memory runs out.
    pub fn add(&self, a: &Var, b: &Var) -> Result<Var> {
        let value = self.backend().add(a.value(), b.value())?;
        let (slot_a, slot_b) = (a.slot(), b.slot());
        self.record("add", value, &[a, b], &[], move |sweep, dy| {
            sweep.add(slot_a, dy.clone())?;
            sweep.add(slot_b, dy)
        })
    }

    /// Product `factor * x` with a constant.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn scale(&self, x: &Var, factor: f32) -> Result<Var> {
        let value = self.backend().scale(x.value(), factor)?;
        let slot = x.slot();
        self.record("scale", value, &[x], &[], move |sweep, dy| {
            let dx = sweep.backend().scale(&dy, factor)?;
            sweep.add(slot, dx)
        })
    }

    /// Inverted dropout of `x [t, k]`: elements become zero with probability `p`, and the others are divided
    /// by `1 - p`. The mask is a function of `key` and of `rows` (i32 `[t, 2]`: for each row, the key of its
    /// sample and its index in the sample), so it is not stored.
    ///
    /// # Errors
    /// When `rows` and `x` have different numbers of rows, `p` is out of range, or memory runs out.
    pub fn dropout(&self, x: &Var, rows: &Tensor, key: [u32; 2], p: f32) -> Result<Var> {
        let value = self.backend().dropout(DropoutArgs {
            x: x.value(),
            rows,
            key,
            p,
        })?;
        let (slot, rows) = (x.slot(), rows.clone());
        self.record("dropout", value, &[x], &[], move |sweep, dy| {
            let dx = sweep.backend().dropout(DropoutArgs {
                x: &dy,
                rows: &rows,
                key,
                p,
            })?;
            sweep.add(slot, dx)
        })
    }

    /// Conversion of `x` to another float dtype. Returns `x` itself if it already has that dtype.
    ///
    /// # Errors
    /// When a dtype is not a float or memory runs out.
    pub fn cast(&self, x: &Var, dtype: DType) -> Result<Var> {
        if x.dtype() == dtype {
            return Ok(x.clone());
        }
        let value = self.backend().cast(x.value(), dtype)?;
        let (slot, from) = (x.slot(), x.dtype());
        self.record("cast", value, &[x], &[], move |sweep, dy| {
            let dx = sweep.backend().cast(&dy, from)?;
            sweep.add(slot, dx)
        })
    }

    /// Returns `x` with another shape of as many elements; both share their memory.
    ///
    /// # Errors
    /// When the element counts differ.
    pub fn reshape(&self, x: &Var, shape: impl Into<Shape>) -> Result<Var> {
        let value = x.value().reshape(shape)?;
        let (slot, from) = (x.slot(), x.shape());
        self.record("reshape", value, &[x], &[], move |sweep, dy| {
            sweep.add(slot, dy.reshape(from)?)
        })
    }

    /// Elementwise GELU, exact or with the tanh approximation.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn gelu(&self, x: &Var, kind: Gelu) -> Result<Var> {
        let value = self.backend().gelu(x.value(), kind)?;
        let (slot, input) = (x.slot(), x.value().clone());
        self.record("gelu", value, &[x], &[], move |sweep, dy| {
            let dx = sweep.backend().gelu_backward(&input, &dy, kind)?;
            sweep.add(slot, dx)
        })
    }

    /// SwiGLU activation, elementwise: `silu(gate) * up`.
    ///
    /// # Errors
    /// When shapes differ or memory runs out.
    pub fn swiglu(&self, gate: &Var, up: &Var) -> Result<Var> {
        let value = self.backend().swiglu(gate.value(), up.value())?;
        let slots = (gate.slot(), up.slot());
        let inputs = (gate.value().clone(), up.value().clone());
        self.record("swiglu", value, &[gate, up], &[], move |sweep, dy| {
            let (d_gate, d_up) = sweep.backend().swiglu_backward(&inputs.0, &inputs.1, &dy)?;
            sweep.add(slots.0, d_gate)?;
            sweep.add(slots.1, d_up)
        })
    }

    /// Rotary position embedding: rotates the heads of `x [t, h, d]` by the angles of `cos` and `sin` (f32 `[t, w]`).
    /// The first `2 * w` elements of each head rotate; the others stay as they are.
    ///
    /// # Errors
    /// When shapes do not fit or memory runs out.
    pub fn rope(&self, x: &Var, cos: &Tensor, sin: &Tensor, layout: RopeLayout) -> Result<Var> {
        let value = self
            .backend()
            .rope(x.value(), cos, sin, layout, Direction::Forward)?;
        let (slot, cos, sin) = (x.slot(), cos.clone(), sin.clone());
        self.record("rope", value, &[x], &[], move |sweep, dy| {
            let dx = sweep
                .backend()
                .rope(&dy, &cos, &sin, layout, Direction::Inverse)?;
            sweep.add(slot, dx)
        })
    }
}

//! One micro-batch of a model that hands over gradients itself, and may read its weights group by group.

use super::optimizer::ShardedOptimizer;
use crate::access::{Lease, ParamAccess};
use crate::error::EngineError;
use crate::plan::Phase;
use crate::spec::{ParamId, UnitId};
use kernels::{DType, Tag, Tensor};

type Result<T, E = EngineError> = std::result::Result<T, E>;

/// Micro-batch between [`ShardedOptimizer::micro_batch`] and [`MicroBatch::end`]. Dropped before its end, it counts
/// for nothing.
#[derive(Debug)]
pub struct MicroBatch<'o> {
    optimizer: &'o mut ShardedOptimizer,
    samples: u64,
}

impl<'o> MicroBatch<'o> {
    pub(super) fn new(optimizer: &'o mut ShardedOptimizer, samples: u64) -> Self {
        Self { optimizer, samples }
    }

    /// Whole weights of the tensors of `group`, readable until the lease ends: [`Lease::param`] with the number of a
    /// tensor returns them in the dtype of the precision, on the optimizer's device. In stage 3 the ranks gather them
    /// now and free them after. Forward leases groups in order, backward in reverse order.
    ///
    /// # Errors
    /// When the groups come in another order, or communication or memory fails.
    pub fn weights(&self, group: usize, phase: Phase) -> Result<Lease<'_>> {
        let zero = self.optimizer.zero();
        match zero.plan().units().get(group) {
            Some(unit) => zero.lease(unit.id, phase),
            None => Err(EngineError::LeaseOrder {
                unit: format!("number {group}, which the model does not have"),
                phase,
                position: 0,
            }),
        }
    }

    /// Leases a group for backward without a copy of its weights on the device.
    pub(super) fn backward(&self, unit: UnitId) -> Result<Lease<'_>> {
        self.optimizer.zero().lease_on_host(unit, Phase::Backward)
    }

    /// Hands over the gradient of the mean loss for one tensor, while its group is leased for backward. It is f32,
    /// bf16 or f16, in host memory or on the optimizer's device, and has the tensor's number of elements. A tensor
    /// without a gradient needs no call.
    ///
    /// # Errors
    /// When the gradient does not fit the tensor, was handed over before, or is on another device.
    pub fn deposit(&self, tensor: usize, gradient: &Tensor) -> Result<()> {
        if !gradient.is_on_device() {
            return self.deposit_values(tensor, gradient.to_f32_vec()?);
        }
        let backend = self.optimizer.zero().backend();
        let mut gradient = backend.cast(gradient, DType::F32)?;
        // The engine divides by all samples in the step.
        if self.samples != 1 {
            gradient = backend.scale(&gradient, self.samples as f32)?;
        }
        self.hand_over(tensor, &gradient)
    }

    /// As [`MicroBatch::deposit`], with values in host memory.
    pub(super) fn deposit_values(&self, tensor: usize, mut gradient: Vec<f32>) -> Result<()> {
        for value in &mut gradient {
            *value *= self.samples as f32;
        }
        let zero = self.optimizer.zero();
        let (backend, shape) = (zero.backend(), [gradient.len()]);
        let gradient = if backend.device().is_host_addressable() {
            Tensor::from_slice(zero.device_pool(), Tag::Workspace, shape, &gradient)?
        } else {
            let bytes = bytemuck::cast_slice(&gradient);
            backend.upload(bytes, shape.into(), DType::F32, Tag::Workspace)?
        };
        self.hand_over(tensor, &gradient)
    }

    fn hand_over(&self, tensor: usize, gradient: &Tensor) -> Result<()> {
        let zero = self.optimizer.zero();
        match u32::try_from(tensor) {
            Ok(number) if tensor < zero.plan().spec().params.len() => {
                zero.deposit(ParamId(number), gradient)
            }
            _ => Err(EngineError::UnexpectedGradient {
                param: format!("tensor {tensor}"),
                reason: "the model has no tensor of this number",
            }),
        }
    }

    /// Ends the micro-batch and counts it for the next step. `mean_loss` is the mean loss over its samples.
    ///
    /// # Errors
    /// When communication fails.
    pub fn end(self, mean_loss: f64) -> Result<()> {
        self.optimizer.end_micro_batch(mean_loss, self.samples)
    }
}

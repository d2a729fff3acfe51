//! Update of one unit: gradients, optimizer state, the update rule, and the threads that update in backward and in
//! forward.

pub(crate) mod device_step;
pub(crate) mod gradients;
pub(crate) mod optimizer_in_backward;
pub(crate) mod optimizer_in_forward;
pub(crate) mod state;
pub(crate) mod update;

use optim::{GroupOptions, Optimizer};
use std::sync::Arc;

/// Optimizer of a run: the update rule, and every parameter's weight decay and learning-rate factor.
#[derive(Clone, Debug)]
pub struct OptimizerConfig {
    /// Update rule of the optimizer, e.g. [`optim::AdamW`].
    pub rule: Arc<dyn Optimizer>,
    /// Weight decay and learning-rate factor of every parameter, indexed by [`ParamId`](crate::ParamId).
    pub groups: Vec<GroupOptions>,
}

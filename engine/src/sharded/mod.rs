//! ZeRO for another library's model. The model keeps its tensors, its autograd and its training loop, and passes
//! gradients to a [`ShardedOptimizer`] through a [`TensorBridge`].
//!
//! | step | who | bytes |
//! |---|---|---|
//! | forward, backward | the other library | its own |
//! | [`ShardedOptimizer::accumulate`] | reads gradients, sums them over ranks and calls | reduce-scatter from stage 2 on |
//! | [`ShardedOptimizer::step`] | clips, updates this rank's part, writes weights back | state: 1 / ranks |
//!
//! Optimizer state, and from stage 2 on the summed gradients, is divided by the number of ranks and may be located on
//! another tier. The engine also stores its own weights, in the dtype of the precision, on the tier `offload.param`.
//! Stage 3 divides them too, which needs a gather in every pass.
//!
//! A model whose own weights must not be whole anywhere reads them group by group from a [`MicroBatch`], and updates
//! them with [`ShardedOptimizer::step_sharded`]: see the example `zero3_leases`.
//! [`ShardedOptimizer::save`] and [`ShardedOptimizer::load`] continue a run exactly, at any stage.

mod bridge;
mod checkpoints;
mod micro_batch;
mod optimizer;

#[cfg(test)]
mod tests;

pub use bridge::{BridgeError, TensorBridge, TensorGroup, TensorInfo};
pub use micro_batch::MicroBatch;
pub use optimizer::ShardedOptimizer;

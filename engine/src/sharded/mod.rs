//! ZeRO for tensors that are not ours: a model of another library keeps its tensors, its autograd and its training loop,
//! and hands gradients to a [`ShardedOptimizer`] through a [`TensorBridge`].
//!
//! | step | who | bytes |
//! |---|---|---|
//! | forward, backward | the other library | its own |
//! | [`ShardedOptimizer::accumulate`] | reads gradients, sums them over ranks and calls | reduce-scatter from stage 2 on |
//! | [`ShardedOptimizer::step`] | clips, updates this rank's part, writes weights back | state: 1 / ranks |
//!
//! Optimizer state (and from stage 2 on the summed gradients) is divided by the number of ranks and may rest on another
//! tier. The engine also keeps weights of its own, in the dtype of the precision, on the tier `offload.param`; stage 3
//! divides them too, at the price of gathering them in every pass. A model whose own weights must not be whole anywhere
//! reads them through leases instead: see the example `zero3_leases`.

mod bridge;
mod optimizer;

#[cfg(test)]
mod tests;

pub use bridge::{BridgeError, TensorBridge, TensorGroup, TensorInfo};
pub use optimizer::ShardedOptimizer;

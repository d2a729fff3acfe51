//! ZeRO for foreign tensors. A model of another library keeps its tensors, its autograd and its training loop, and
//! passes gradients to a [`ShardedOptimizer`] through a [`TensorBridge`].
//!
//! | step | what happens | communication and memory |
//! |---|---|---|
//! | forward, backward | in the other library | its own |
//! | [`ShardedOptimizer::accumulate`] | reads gradients, sums them over ranks and calls | reduce-scatter from stage 2 on |
//! | [`ShardedOptimizer::step`] | clips, updates this rank's part, writes weights back | states: 1 / ranks |
//!
//! Optimizer state, and from stage 2 on the summed gradients, are divided by the number of ranks and may be on
//! another tier. The engine also keeps its own weights, in the dtype of the precision, on the tier `offload.param`.
//! Stage 3 shards them too, and gathers them in every pass. A model whose weights must never be whole on a rank reads
//! them through leases instead; see the example `zero3_leases`.

mod bridge;
mod optimizer;

#[cfg(test)]
mod tests;

pub use bridge::{BridgeError, TensorBridge, TensorGroup, TensorInfo};
pub use optimizer::ShardedOptimizer;

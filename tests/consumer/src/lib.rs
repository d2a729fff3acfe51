//! A crate that depends on `engine`, `optim` and candle's CUDA backend. It compiles only when one dependency graph can
//! contain all three.

/// A function that names the tensors of candle and a type of `optim`.
pub fn both(candle: &candle_core::Tensor, precision: optim::Precision) -> (usize, &'static str) {
    (candle.elem_count(), precision.name())
}

/// Saves a sharded optimizer and loads it again.
///
/// # Errors
/// When the disk or another rank fails.
pub fn saved_and_loaded(
    optimizer: &mut engine::sharded::ShardedOptimizer,
    model: &mut dyn engine::sharded::TensorBridge,
    directory: &std::path::Path,
) -> Result<(), engine::EngineError> {
    let checkpoint = optimizer.save(directory, Default::default(), 1)?;
    optimizer.load(&checkpoint, model).map(drop)
}

/// The engine's type is reachable too.
pub use engine::Zero;

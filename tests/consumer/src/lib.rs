//! A crate that depends on `engine`, `optim` and candle's CUDA backend. It compiles only when one dependency graph can
//! contain all three.

/// A function that names the tensors of candle and a type of `optim`.
pub fn both(candle: &candle_core::Tensor, precision: optim::Precision) -> (usize, &'static str) {
    (candle.elem_count(), precision.name())
}

/// The engine's type is reachable too.
pub use engine::Zero;

//! Differentiable operations, as methods of [`Scope`](crate::autograd::Scope). Each has a forward and a backward on
//! the device.
//!
//! Symbols in shapes: `t` tokens (rows), `h` query heads, `g` key/value heads, `d` head dim, `c` channels, `n k`
//! outputs and inputs of a linear layer, `r` adapter rank, `v` vocabulary.
//!
//! Backward computes required gradients only. A frozen weight gets no gradient product. An input without gradient
//! gets no product with the weight.

mod adapted;
mod attention;
mod grouped;
mod linear;
mod loss;
mod norm;
mod pointwise;
mod rows;

pub use adapted::{LinearLayer, LoraParams};
pub use attention::Sequences;
pub use grouped::RowGroups;
pub use linear::LinearParams;

#[cfg(test)]
mod tests;

//! Differentiable operations: methods of [`Scope`](crate::autograd::Scope), each a forward call of
//! the device with its backward call.
//!
//! Shapes: `t` tokens (rows), `h` query heads, `g` key/value heads, `d` head dim, `c` channels,
//! `n k` outputs and inputs of a linear layer, `r` adapter rank, `v` vocabulary.
//!
//! Only wanted gradients are computed: a frozen weight costs no gradient product, and an input without gradient no
//! product with the weight.

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

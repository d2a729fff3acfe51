//! Differentiable operations: methods of [`Scope`](crate::autograd::Scope), each a forward call of
//! the device beside its backward call.
//!
//! Shapes: `t` tokens (rows), `h` query heads, `g` key/value heads, `d` head dim, `c` channels,
//! `n k` outputs and inputs of a linear layer, `r` adapter rank, `v` vocabulary.
//!
//! A gradient is computed only where it is wanted: a frozen weight costs no gradient product, an
//! input without gradient no product with the weight.

mod attention;
mod linear;
mod lora;
mod loss;
mod norm;
mod pointwise;
mod routed;
mod routed_lora;
mod rows;

pub use attention::Sequences;
pub use linear::LinearParams;
pub use lora::LoraParams;
pub use routed::RowGroups;
pub use routed_lora::RoutedLayers;

#[cfg(test)]
mod tests;

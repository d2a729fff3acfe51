//! Building blocks: handles of parameters and the forward pass over them. Blocks hold no weights.

mod attention;
mod decoder_block;
mod linear;
mod mlp;
mod norm;
mod vision_block;

pub use attention::{Rotary, SelfAttention, SelfAttentionConfig};
pub use decoder_block::{DecoderBlock, DecoderConfig};
pub use linear::Linear;
pub use mlp::{GatedMlp, GeluMlp};
pub use norm::{LayerNorm, RmsNorm};
pub use vision_block::{VisionBlock, VisionBlockConfig};

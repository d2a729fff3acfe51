//! Building blocks: ids of parameters, and the forward pass with them. Blocks hold no weights.

mod attention;
mod decoder;
mod decoder_block;
mod fused_linear;
mod linear;
mod lm_head;
mod mlp;
mod norm;
mod prefix;
mod rotary;
mod token_embedding;
mod vision_block;

pub use attention::{SelfAttention, SelfAttentionConfig};
pub use decoder::{Decoder, DecoderConfig, DecoderLayer, DecoderLayers};
pub use decoder_block::{BlockNames, DecoderBlock, DecoderBlockConfig};
pub use fused_linear::FusedLinear;
pub use linear::Linear;
pub use lm_head::{LmHead, LmHeadConfig};
pub use mlp::{GatedMlp, GeluMlp};
pub use norm::{LayerNorm, RmsNorm};
pub(crate) use prefix::Prefix;
pub use prefix::PrefixTables;
pub use rotary::{Rotary, RotaryTable, rope_frequencies, rotary_of, round};
pub use token_embedding::TokenEmbedding;
pub use vision_block::{VisionBlock, VisionBlockConfig, VisionBlockKind};

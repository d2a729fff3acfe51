//! The decoder and its head: Qwen2 in release 2.6, MiniCPM4 (of Llama) in 4.0, Qwen3 in 4.5.

use super::config::LanguageConfig;
use crate::nn::{BlockNames, DecoderBlockConfig, DecoderConfig};

/// Sizes and names of the decoder.
pub(super) fn decoder(config: &LanguageConfig) -> DecoderConfig {
    DecoderConfig {
        embed: ["llm.embed_tokens", "llm.model.embed_tokens"],
        layers: ["llm.layers", "llm.model.layers"],
        num_layers: config.num_layers,
        norm: "llm.model.norm",
        head: ["llm.head", "llm.lm_head"],
        vocabulary: config.vocab_size,
        block: DecoderBlockConfig {
            width: config.hidden_size,
            heads: config.num_heads,
            kv_heads: config.num_kv_heads,
            head_dim: config.head_dim,
            inner: config.intermediate_size,
            eps: config.rms_norm_eps as f32,
            qkv_bias: config.qkv_bias,
            head_norms: config.head_norms,
            names: BlockNames::LLAMA,
        },
    }
}

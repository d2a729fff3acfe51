//! The decoder and its head: Qwen2 in release 2.6, MiniCPM4 (of Llama) in 4.0, Qwen3 in 4.5.

use super::config::MiniCpmConfig;
use crate::nn::{BlockNames, DecoderBlockConfig, DecoderConfig};

/// Sizes and names of the decoder.
pub(super) fn decoder(config: &MiniCpmConfig) -> DecoderConfig {
    let language = &config.language;
    DecoderConfig {
        embed: ["llm.embed_tokens", "llm.model.embed_tokens"],
        layers: ["llm.layers", "llm.model.layers"],
        num_layers: language.num_layers,
        norm: "llm.model.norm",
        head: ["llm.head", "llm.lm_head"],
        vocabulary: language.vocab_size,
        block: DecoderBlockConfig {
            head_norms: config.release.has_head_norms(),
            ..language.block(config.release.has_qkv_bias(), BlockNames::LLAMA)
        },
    }
}

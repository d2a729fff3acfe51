//! The GLM-4 decoder and its head: q, k and v in one weight, gate and up in another.

use super::config::Glm4vConfig;
use crate::nn::{BlockNames, DecoderConfig};

const EMBED: &str = "transformer.embedding.word_embeddings";
const LAYERS: &str = "transformer.encoder.layers";
const HEAD: &str = "transformer.output_layer";

/// Sizes and names of the decoder.
pub(super) fn decoder(config: &Glm4vConfig) -> DecoderConfig {
    let language = &config.language;
    DecoderConfig {
        embed: [EMBED; 2],
        layers: [LAYERS; 2],
        num_layers: language.num_layers,
        norm: "transformer.encoder.final_layernorm",
        head: [HEAD; 2],
        vocabulary: language.vocab_size,
        block: language.block(
            config.qkv_bias,
            BlockNames {
                attention: "self_attention",
                fused_qkv: Some("query_key_value"),
                out: "dense",
                fused_gate_up: Some("dense_h_to_4h"),
                down: "dense_4h_to_h",
                output_norms: None,
            },
        ),
    }
}

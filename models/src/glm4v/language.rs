//! The GLM-4 decoder and its head: q, k and v in one weight, gate and up in another.

use super::config::LanguageConfig;
use crate::nn::{BlockNames, DecoderBlockConfig, DecoderConfig};

const EMBED: &str = "transformer.embedding.word_embeddings";
const LAYERS: &str = "transformer.encoder.layers";
const HEAD: &str = "transformer.output_layer";

/// Sizes and names of the decoder.
pub(super) fn decoder(config: &LanguageConfig) -> DecoderConfig {
    DecoderConfig {
        embed: [EMBED; 2],
        layers: [LAYERS; 2],
        num_layers: config.num_layers,
        norm: "transformer.encoder.final_layernorm",
        head: [HEAD; 2],
        vocabulary: config.vocab_size,
        block: DecoderBlockConfig {
            width: config.hidden_size,
            heads: config.num_heads,
            kv_heads: config.num_kv_heads,
            head_dim: config.head_dim,
            inner: config.intermediate_size,
            eps: config.rms_norm_eps as f32,
            qkv_bias: config.qkv_bias,
            head_norms: false,
            names: BlockNames {
                attention: "self_attention",
                fused_qkv: Some("query_key_value"),
                out: "dense",
                fused_gate_up: Some("dense_h_to_4h"),
                down: "dense_4h_to_h",
                output_norms: None,
            },
        },
    }
}

//! The GLM-4.1V decoder and its head: gate and up in one weight, norms before and after attention and MLP.

use super::config::LanguageConfig;
use crate::nn::{BlockNames, DecoderBlockConfig, DecoderConfig};

const EMBED: &str = "model.language_model.embed_tokens";
const LAYERS: &str = "model.language_model.layers";

/// Sizes and names of the decoder.
pub(super) fn decoder(config: &LanguageConfig) -> DecoderConfig {
    DecoderConfig {
        embed: [EMBED; 2],
        layers: [LAYERS; 2],
        num_layers: config.num_layers,
        norm: "model.language_model.norm",
        head: ["lm_head"; 2],
        vocabulary: config.vocab_size,
        block: DecoderBlockConfig {
            width: config.hidden_size,
            heads: config.num_heads,
            kv_heads: config.num_kv_heads,
            head_dim: config.head_dim,
            inner: config.intermediate_size,
            eps: config.rms_norm_eps as f32,
            qkv_bias: config.attention_bias,
            head_norms: false,
            names: BlockNames {
                fused_gate_up: Some("gate_up_proj"),
                output_norms: Some(["post_self_attn_layernorm", "post_mlp_layernorm"]),
                ..BlockNames::LLAMA
            },
        },
    }
}

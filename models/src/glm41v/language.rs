//! The GLM-4.1V decoder and its head: gate and up in one weight, norms before and after attention and MLP.

use super::config::{Glm41vConfig, Network};
use crate::nn::{BlockNames, DecoderConfig};

const EMBED: &str = "model.language_model.embed_tokens";
const LAYERS: &str = "model.language_model.layers";

/// Sizes and names of the decoder.
pub(super) fn decoder(config: &Glm41vConfig) -> DecoderConfig {
    let language = &config.language;
    DecoderConfig {
        embed: [EMBED; 2],
        layers: [LAYERS; 2],
        num_layers: language.num_layers,
        norm: "model.language_model.norm",
        head: ["lm_head"; 2],
        vocabulary: language.vocab_size,
        block: language.block(
            // The published classes have biases or not, whatever the file says.
            config.network == Network::Glm41v,
            BlockNames {
                fused_gate_up: Some("gate_up_proj"),
                output_norms: Some(["post_self_attn_layernorm", "post_mlp_layernorm"]),
                ..BlockNames::LLAMA
            },
        ),
    }
}

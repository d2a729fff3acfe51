//! The Qwen2 decoder and its head.

use super::config::LanguageConfig;
use crate::error::Result;
use crate::nn::{
    Decoder, DecoderBlock, DecoderConfig, DecoderLayers, LmHead, LmHeadConfig, TokenEmbedding,
};
use crate::params::ParamBuilder;

/// Declares the decoder.
pub(super) fn decoder(
    params: &mut ParamBuilder<'_>,
    config: &LanguageConfig,
) -> Result<Decoder<DecoderBlock>> {
    let (d, v) = (config.hidden_size, config.vocab_size);
    let eps = config.rms_norm_eps as f32;
    let embed = TokenEmbedding::new(params, "llm.embed_tokens", "llm.model.embed_tokens", [v, d])?;
    let block = DecoderConfig {
        width: d,
        heads: config.num_heads,
        kv_heads: config.num_kv_heads,
        head_dim: config.head_dim,
        inner: config.intermediate_size,
        eps,
        qkv_bias: true,
    };
    let layers = DecoderLayers::new(
        params,
        config.num_layers,
        ["llm.layers", "llm.model.layers"],
        |scope| DecoderBlock::new(scope, &block),
    );
    let head = LmHeadConfig {
        unit: "llm.head",
        norm: "llm.model.norm",
        head: "llm.lm_head",
        vocabulary: v,
        width: d,
        eps,
    };
    let head = LmHead::new(params, head)?;
    Ok(Decoder {
        embed,
        layers,
        head,
    })
}

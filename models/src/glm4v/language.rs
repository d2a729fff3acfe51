//! The decoder.

use super::config::LanguageConfig;
use crate::autograd::{Scope, Var};
use crate::batch::Batch;
use crate::error::Result;
use crate::generate::CachedLayer;
use crate::nn::{
    Decoder, DecoderLayer, DecoderLayers, GatedMlp, LmHead, LmHeadConfig, RmsNorm, SelfAttention,
    SelfAttentionConfig, TokenEmbedding,
};
use crate::params::{ParamBuilder, ParamScope};

/// Declares the decoder.
pub(super) fn decoder(
    params: &mut ParamBuilder<'_>,
    config: &LanguageConfig,
) -> Result<Decoder<Block>> {
    const EMBED: &str = "transformer.embedding.word_embeddings";
    const HEAD: &str = "transformer.output_layer";
    const LAYERS: &str = "transformer.encoder.layers";
    let shape = [config.vocab_size, config.hidden_size];
    let embed = TokenEmbedding::new(params, EMBED, EMBED, shape)?;
    let layers = DecoderLayers::new(params, config.num_layers, [LAYERS; 2], |scope| {
        Block::new(scope, config)
    });
    let head = LmHeadConfig {
        unit: HEAD,
        norm: "transformer.encoder.final_layernorm",
        head: HEAD,
        vocabulary: config.vocab_size,
        width: config.hidden_size,
        eps: config.rms_norm_eps as f32,
    };
    let head = LmHead::new(params, head)?;
    Ok(Decoder {
        embed,
        layers,
        head,
    })
}

/// `x += attention(norm(x)); x += mlp(norm(x))`, with queries, keys and values in one weight, gate and up in another.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Block {
    norm1: RmsNorm,
    attention: SelfAttention,
    norm2: RmsNorm,
    mlp: GatedMlp,
}

impl Block {
    fn new(params: &mut ParamScope<'_, '_>, config: &LanguageConfig) -> Self {
        let (d, eps) = (config.hidden_size, config.rms_norm_eps as f32);
        let attention = SelfAttentionConfig {
            width: d,
            heads: config.num_heads,
            kv_heads: config.num_kv_heads,
            head_dim: config.head_dim,
            qkv_bias: config.qkv_bias,
            out_bias: false,
            out_name: "dense",
        };
        let mlp = ["dense_h_to_4h", "dense_4h_to_h"];
        Self {
            norm1: RmsNorm::new(params, "input_layernorm", d, eps),
            attention: SelfAttention::fused(params, "self_attention", "query_key_value", attention),
            norm2: RmsNorm::new(params, "post_attention_layernorm", d, eps),
            mlp: GatedMlp::fused(params, "mlp", mlp, d, config.intermediate_size),
        }
    }
}

impl DecoderLayer for Block {
    fn forward(
        &self,
        scope: &Scope<'_>,
        x: &Var,
        batch: &Batch,
        cache: Option<CachedLayer<'_>>,
    ) -> Result<Var> {
        let normed = self.norm1.forward(scope, x)?;
        let rotary = Some(&batch.rotary);
        let mixed = self
            .attention
            .forward(scope, &normed, &batch.sequences, rotary, cache)?;
        let x = scope.add(x, &mixed)?;
        let normed = self.norm2.forward(scope, &x)?;
        scope.add(&x, &self.mlp.forward(scope, &normed)?)
    }
}

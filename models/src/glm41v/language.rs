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
    const EMBED: &str = "model.language_model.embed_tokens";
    const LAYERS: &str = "model.language_model.layers";
    let shape = [config.vocab_size, config.hidden_size];
    let embed = TokenEmbedding::new(params, EMBED, EMBED, shape)?;
    let layers = DecoderLayers::new(params, config.num_layers, [LAYERS; 2], |scope| {
        Block::new(scope, config)
    });
    let head = LmHeadConfig {
        unit: "lm_head",
        norm: "model.language_model.norm",
        head: "lm_head",
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

/// `x += norm(attention(norm(x))); x += norm(mlp(norm(x)))`: each branch is normed before and behind.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Block {
    before_attention: RmsNorm,
    attention: SelfAttention,
    behind_attention: RmsNorm,
    before_mlp: RmsNorm,
    mlp: GatedMlp,
    behind_mlp: RmsNorm,
}

impl Block {
    fn new(params: &mut ParamScope<'_, '_>, config: &LanguageConfig) -> Self {
        let (d, eps) = (config.hidden_size, config.rms_norm_eps as f32);
        let attention = SelfAttentionConfig {
            width: d,
            heads: config.num_heads,
            kv_heads: config.num_kv_heads,
            head_dim: config.head_dim,
            qkv_bias: config.attention_bias,
            out_bias: false,
            out_name: "o_proj",
        };
        let names = ["gate_up_proj", "down_proj"];
        let mut norm = |name| RmsNorm::new(params, name, d, eps);
        Self {
            before_attention: norm("input_layernorm"),
            behind_attention: norm("post_self_attn_layernorm"),
            before_mlp: norm("post_attention_layernorm"),
            behind_mlp: norm("post_mlp_layernorm"),
            attention: SelfAttention::new(params, "self_attn", attention),
            mlp: GatedMlp::fused(params, "mlp", names, d, config.intermediate_size),
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
        let normed = self.before_attention.forward(scope, x)?;
        let rotary = Some(&batch.rotary);
        let mixed = self
            .attention
            .forward(scope, &normed, &batch.sequences, rotary, cache)?;
        let x = scope.add(x, &self.behind_attention.forward(scope, &mixed)?)?;
        let normed = self.before_mlp.forward(scope, &x)?;
        let inner = self.mlp.forward(scope, &normed)?;
        scope.add(&x, &self.behind_mlp.forward(scope, &inner)?)
    }
}

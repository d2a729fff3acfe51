//! The decoder over packed samples.
//!
//! Shapes: `T` tokens of all samples, `D` width.

use super::config::LanguageConfig;
use crate::autograd::{Loss, Scope, Tape, Var};
use crate::batch::Batch;
use crate::error::Result;
use crate::generate::CachedLayer;
use crate::nn::{
    GatedMlp, LmHead, LmHeadConfig, RmsNorm, SelfAttention, SelfAttentionConfig, TokenEmbedding,
};
use crate::params::{ParamBuilder, ParamScope};
use engine::UnitId;
use kernels::Tensor;

/// Token embedding with the splice, decoder blocks, and the head with the loss.
#[derive(Debug)]
pub(super) struct Language {
    embed: TokenEmbedding,
    blocks: Vec<(UnitId, Block)>,
    head: LmHead,
}

impl Language {
    pub(super) fn new(params: &mut ParamBuilder<'_>, config: &LanguageConfig) -> Result<Self> {
        const EMBED: &str = "transformer.embedding.word_embeddings";
        const HEAD: &str = "transformer.output_layer";
        let shape = [config.vocab_size, config.hidden_size];
        let embed = TokenEmbedding::new(params, EMBED, EMBED, shape)?;
        let blocks = (0..config.num_layers)
            .map(|i| {
                let path = format!("transformer.encoder.layers.{i}");
                let mut unit = params.unit(&path);
                let mut scope = unit.at(&path);
                (scope.id(), Block::new(&mut scope, config))
            })
            .collect();
        let head = LmHeadConfig {
            unit: HEAD,
            norm: "transformer.encoder.final_layernorm",
            head: HEAD,
            vocabulary: config.vocab_size,
            width: config.hidden_size,
            eps: config.rms_norm_eps as f32,
        };
        let head = LmHead::new(params, head)?;
        Ok(Self {
            embed,
            blocks,
            head,
        })
    }

    /// Embeds the tokens, splices `features` in and runs the blocks: `[T, D]`, before the norm.
    pub(super) fn hidden<'m>(
        &'m self,
        tape: &Tape<'_, 'm>,
        batch: &'m Batch,
        features: Option<&Var>,
    ) -> Result<Var> {
        let mut x = self.embed.forward(tape, batch, features)?;
        for (i, (unit, block)) in self.blocks.iter().enumerate() {
            [x] = tape.segment(*unit, [&x], move |scope, [x]| {
                let cache = batch.cache.as_ref().map(|pass| pass.layer(i));
                Ok([block.forward(scope, x, batch, cache)?])
            })?;
            tape.observe(format_args!("hidden.{i}"), &x);
        }
        Ok(x)
    }

    /// Losses of all rows from the hidden states.
    pub(super) fn loss<'m>(
        &'m self,
        tape: &Tape<'_, 'm>,
        batch: &'m Batch,
        hidden: &Var,
    ) -> Result<Loss> {
        self.head.loss(tape, batch, hidden)
    }

    /// f32 logits of the rows `index`, or of all rows.
    pub(super) fn logits<'m>(
        &'m self,
        tape: &Tape<'_, 'm>,
        hidden: &Var,
        index: Option<&'m Tensor>,
    ) -> Result<Tensor> {
        self.head.logits(tape, hidden, index)
    }
}

/// `x += attention(norm(x)); x += mlp(norm(x))`, with queries, keys and values in one weight, gate and up in another.
#[derive(Clone, PartialEq, Debug)]
struct Block {
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

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
        const EMBED: &str = "model.language_model.embed_tokens";
        let shape = [config.vocab_size, config.hidden_size];
        let embed = TokenEmbedding::new(params, EMBED, EMBED, shape)?;
        let blocks = (0..config.num_layers)
            .map(|i| {
                let path = format!("model.language_model.layers.{i}");
                let mut unit = params.unit(&path);
                let mut scope = unit.at(&path);
                (scope.id(), Block::new(&mut scope, config))
            })
            .collect();
        let head = LmHeadConfig {
            unit: "lm_head",
            norm: "model.language_model.norm",
            head: "lm_head",
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

/// `x += norm(attention(norm(x))); x += norm(mlp(norm(x)))`: each branch is normed before and behind.
#[derive(Clone, PartialEq, Debug)]
struct Block {
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

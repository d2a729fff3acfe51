//! The Qwen2 decoder over packed samples, and its head.
//!
//! Shapes: `T` tokens of all samples, `D` width, `v` vocabulary.

use super::config::LanguageConfig;
use crate::autograd::{Loss, Tape, Var};
use crate::batch::Batch;
use crate::error::Result;
use crate::nn::{DecoderBlock, DecoderConfig, LmHead, LmHeadConfig, TokenEmbedding};
use crate::params::ParamBuilder;
use engine::UnitId;
use kernels::Tensor;

/// Token embedding with the splice, decoder blocks, and the head with the loss.
#[derive(Debug)]
pub(super) struct Language {
    embed: TokenEmbedding,
    blocks: Vec<(UnitId, DecoderBlock)>,
    head: LmHead,
}

impl Language {
    pub(super) fn new(params: &mut ParamBuilder<'_>, config: &LanguageConfig) -> Result<Self> {
        let (d, v) = (config.hidden_size, config.vocab_size);
        let eps = config.rms_norm_eps as f32;
        let embed =
            TokenEmbedding::new(params, "llm.embed_tokens", "llm.model.embed_tokens", [v, d])?;
        let block = DecoderConfig {
            width: d,
            heads: config.num_heads,
            kv_heads: config.num_kv_heads,
            head_dim: config.head_dim,
            inner: config.intermediate_size,
            eps,
            qkv_bias: true,
        };
        let blocks = (0..config.num_layers)
            .map(|i| {
                let mut unit = params.unit(&format!("llm.layers.{i}"));
                let mut scope = unit.at(&format!("llm.model.layers.{i}"));
                (scope.id(), DecoderBlock::new(&mut scope, &block))
            })
            .collect();
        let head = LmHeadConfig {
            unit: "llm.head",
            norm: "llm.model.norm",
            head: "llm.lm_head",
            vocabulary: v,
            width: d,
            eps,
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
                Ok([block.forward(scope, x, &batch.sequences, &batch.rotary, cache)?])
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

//! The Qwen2 decoder over packed samples, and its head.
//!
//! Shapes: `T` tokens of all samples, `D` width, `v` vocabulary.

use super::config::LanguageConfig;
use crate::autograd::{Loss, Scope, Tape, Var};
use crate::batch::Batch;
use crate::error::Result;
use crate::nn::{DecoderBlock, DecoderConfig, RmsNorm};
use crate::ops::LinearParams;
use crate::params::ParamBuilder;
use engine::{ParamId, TensorParallel, UnitId};
use kernels::{DType, Tensor};

const COLUMN: TensorParallel = TensorParallel::Column { groups: 1 };

/// Token embedding with the splice, decoder blocks, and the head with the loss.
#[derive(Debug)]
pub(super) struct Language {
    embed_unit: UnitId,
    embed: ParamId,
    blocks: Vec<(UnitId, DecoderBlock)>,
    head_unit: UnitId,
    norm: RmsNorm,
    head: ParamId,
}

impl Language {
    pub(super) fn new(params: &mut ParamBuilder<'_>, config: &LanguageConfig) -> Result<Self> {
        let (d, v) = (config.hidden_size, config.vocab_size);
        let eps = config.rms_norm_eps as f32;
        let mut unit = params.unit("llm.embed_tokens");
        let embed_unit = unit.id();
        unit.refuse_adapter("llm.model.embed_tokens")?;
        let embed = unit
            .at("llm.model.embed_tokens")
            .param("weight", [v, d], COLUMN);
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
        let mut unit = params.unit("llm.head");
        unit.refuse_adapter("llm.lm_head")?;
        let head_unit = unit.id();
        let norm = RmsNorm::new(&mut unit.at("llm.model"), "norm", d, eps);
        let head = unit.at("llm.lm_head").param("weight", [v, d], COLUMN);
        Ok(Self {
            embed_unit,
            embed,
            blocks,
            head_unit,
            norm,
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
        let mut x = self.inputs(tape, batch, features)?;
        tape.observe("inputs_embeds", &x);
        for (i, (unit, block)) in self.blocks.iter().enumerate() {
            [x] = tape.segment(*unit, [&x], move |scope, [x]| {
                let cache = batch.cache.as_ref().map(|pass| pass.layer(i));
                Ok([block.forward(scope, x, &batch.sequences, &batch.rotary, cache)?])
            })?;
            tape.observe(format_args!("hidden.{i}"), &x);
        }
        Ok(x)
    }

    fn inputs<'m>(
        &'m self,
        tape: &Tape<'_, 'm>,
        batch: &'m Batch,
        features: Option<&Var>,
    ) -> Result<Var> {
        let (Some(features), Some(vision)) = (features, &batch.vision) else {
            let [x] = tape.segment(self.embed_unit, [], move |scope, []| {
                Ok([scope.embedding(self.embed, &batch.input_ids)?])
            })?;
            return Ok(x);
        };
        let [x] = tape.segment(self.embed_unit, [features], move |scope, [features]| {
            let x = scope.embedding(self.embed, &batch.input_ids)?;
            let rows = scope.gather_rows(features, &vision.splice.sources)?;
            Ok([scope.replace_rows(&x, &vision.splice.rows, &rows)?])
        })?;
        Ok(x)
    }

    /// Losses of all rows from the hidden states.
    pub(super) fn loss<'m>(
        &'m self,
        tape: &Tape<'_, 'm>,
        batch: &'m Batch,
        hidden: &Var,
    ) -> Result<Loss> {
        let [rows] = tape.segment(self.head_unit, [hidden], move |scope, [x]| {
            let x = self.norm.forward(scope, x)?;
            Ok([scope.linear_cross_entropy(&x, self.head, &batch.labels)?])
        })?;
        Ok(Loss {
            rows,
            supervised: batch.supervised,
        })
    }

    /// f32 logits of the rows `index`, or of all rows.
    pub(super) fn logits<'m>(
        &'m self,
        tape: &Tape<'_, 'm>,
        hidden: &Var,
        index: Option<&'m Tensor>,
    ) -> Result<Tensor> {
        let [logits] = tape.segment(self.head_unit, [hidden], move |scope, [x]| {
            let x = match index {
                Some(index) => scope.gather_rows(x, index)?,
                None => x.clone(),
            };
            Ok([self.project(scope, &x)?])
        })?;
        Ok(logits.into_value())
    }

    fn project(&self, scope: &Scope<'_>, x: &Var) -> Result<Var> {
        let x = self.norm.forward(scope, x)?;
        let logits = scope.linear(&x, &LinearParams::new(self.head, None))?;
        scope.cast(&logits, DType::F32)
    }
}

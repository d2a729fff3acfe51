//! The decoder over packed samples.
//!
//! Shapes: `T` tokens of all samples, `c` width, `v` vocabulary.

use super::config::CogConfig;
use super::cross_attention::Features;
use super::layer::CogLayer;
use crate::autograd::{Scope, Tape, Var};
use crate::batch::Batch;
use crate::error::Result;
use crate::nn::{LmHead, RmsNorm};
use crate::params::ParamBuilder;
use engine::{ParamId, TensorParallel, UnitId};

const COLUMN: TensorParallel = TensorParallel::Column { groups: 1 };

/// Token embedding with the splice, decoder layers, and the head.
#[derive(Debug)]
pub(super) struct Language {
    embed_unit: UnitId,
    embed: ParamId,
    layers: Vec<(UnitId, CogLayer)>,
    pub(super) head: LmHead,
}

impl Language {
    /// Declares the decoder with `prefix` learned tokens per layer.
    ///
    /// # Errors
    /// When an adapter target is a layer that cannot take one.
    pub(super) fn new(
        params: &mut ParamBuilder<'_>,
        config: &CogConfig,
        prefix: usize,
    ) -> Result<Self> {
        let language = &config.language;
        let (c, v) = (language.hidden_size, language.vocab_size);
        let mut unit = params.unit("model.embed_tokens");
        let embed_unit = unit.id();
        unit.refuse_adapter("model.embed_tokens")?;
        let embed = unit
            .at("model.embed_tokens")
            .param("weight", [v, c], COLUMN);
        let layers = (0..language.num_layers)
            .map(|i| {
                let name = format!("model.layers.{i}");
                let mut unit = params.unit(&name);
                let mut scope = unit.at(&name);
                (scope.id(), CogLayer::new(&mut scope, config, prefix))
            })
            .collect();
        let mut unit = params.unit("lm_head");
        unit.refuse_adapter("lm_head")?;
        let eps = language.rms_norm_eps as f32;
        let head = LmHead {
            unit: unit.id(),
            norm: RmsNorm::new(&mut unit.at("model"), "norm", c, eps),
            weight: unit.at("lm_head").param("weight", [v, c], COLUMN),
        };
        Ok(Self {
            embed_unit,
            embed,
            layers,
            head,
        })
    }

    /// Embeds the tokens, splices `features` in and runs the layers: `[T, c]`, before the norm. `cross` are the
    /// features of the second tower.
    ///
    /// # Errors
    /// When the engine or the device fails.
    pub(super) fn hidden<'m>(
        &'m self,
        tape: &Tape<'_, 'm>,
        batch: &'m Batch,
        features: Option<&Var>,
        cross: Option<&Var>,
    ) -> Result<Var> {
        let mut x = self.inputs(tape, batch, features)?;
        tape.observe("inputs_embeds", &x);
        let tables = batch.vision.as_ref().map(|vision| &vision.tables);
        let names = tables.and_then(|tables| tables.cogagent().ok());
        let names = names.map(|tables| &tables.cross.tables.feature_names);
        for (i, (unit, layer)) in self.layers.iter().enumerate() {
            let cached = move || batch.cache.as_ref().map(|pass| pass.layer(i));
            [x] = match (cross, names) {
                (Some(cross), Some(names)) => {
                    tape.segment(*unit, [&x, cross], move |scope, [x, value]| {
                        let features = Some(Features { value, names });
                        Ok([layer.forward(scope, x, features, batch, cached())?])
                    })?
                }
                _ => tape.segment(*unit, [&x], move |scope, [x]| {
                    Ok([layer.forward(scope, x, None, batch, cached())?])
                })?,
            };
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
                Ok([self.tokens(scope, batch)?])
            })?;
            return Ok(x);
        };
        let [x] = tape.segment(self.embed_unit, [features], move |scope, [features]| {
            let x = self.tokens(scope, batch)?;
            let rows = scope.gather_rows(features, &vision.splice.sources)?;
            Ok([scope.replace_rows(&x, &vision.splice.rows, &rows)?])
        })?;
        Ok(x)
    }

    /// Embeddings of all tokens; those of padding in the text get no gradient.
    fn tokens(&self, scope: &Scope<'_>, batch: &Batch) -> Result<Var> {
        let x = scope.embedding(self.embed, &batch.input_ids)?;
        let Some(padding) = &batch.padding_rows else {
            return Ok(x);
        };
        let fixed = scope.constant(scope.backend().gather_rows(x.value(), padding)?);
        scope.replace_rows(&x, padding, &fixed)
    }
}

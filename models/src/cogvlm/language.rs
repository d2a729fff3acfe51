//! The decoder over packed samples.
//!
//! Shapes: `T` tokens of all samples, `c` width, `v` vocabulary.

use super::config::CogConfig;
use super::cross_attention::Features;
use super::layer::CogLayer;
use super::tables::CogAgentTables;
use crate::autograd::{Tape, Var};
use crate::batch::Batch;
use crate::error::Result;
use crate::nn::{LmHead, LmHeadConfig, TokenEmbedding};
use crate::params::ParamBuilder;
use engine::UnitId;

/// The language decoder: token embedding, layers and output head.
#[derive(Debug)]
pub(super) struct Language {
    embed: TokenEmbedding,
    layers: Vec<(UnitId, CogLayer)>,
    pub(super) head: LmHead,
}

impl Language {
    /// Declares the decoder with `prefix` learned tokens per layer.
    ///
    /// # Errors
    /// When embedding or head is an adapter target.
    pub(super) fn new(
        params: &mut ParamBuilder<'_>,
        config: &CogConfig,
        prefix: usize,
    ) -> Result<Self> {
        let language = &config.language;
        let (c, v) = (language.hidden_size, language.vocab_size);
        let module = "model.embed_tokens";
        let embed = TokenEmbedding::new(params, module, module, [v, c])?;
        let layers = (0..language.num_layers)
            .map(|i| {
                let name = format!("model.layers.{i}");
                let mut unit = params.unit(&name);
                let mut scope = unit.at(&name);
                (scope.id(), CogLayer::new(&mut scope, config, prefix))
            })
            .collect();
        let head = LmHeadConfig {
            unit: "lm_head",
            norm: "model.norm",
            head: "lm_head",
            vocabulary: v,
            width: c,
            eps: language.rms_norm_eps as f32,
        };
        Ok(Self {
            embed,
            layers,
            head: LmHead::new(params, head)?,
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
        let mut x = self.embed.forward(tape, batch, features)?;
        let vision = batch.vision.as_ref();
        let tables = vision.and_then(|vision| vision.tables::<CogAgentTables>().ok());
        let names = tables.map(|tables| &tables.cross.tables.feature_names);
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
}

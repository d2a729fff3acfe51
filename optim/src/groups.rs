//! Parameter groups: which parameters get weight decay, and whose learning rate is scaled.
//!
//! The choice is that of Hugging Face's `Trainer`: biases and the weights of normalization layers do not decay.

use std::sync::LazyLock;

use regex::Regex;

use crate::OptimError;

/// Parameter names without weight decay. The pattern is matched against the lower-case name.
static NO_DECAY: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
        .expect("a constant pattern")
});

/// Usual names of normalization layers, for callers that have nothing but names.
static NORM_NAME: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r"(?:^|[._])(?:layer_?norm|rms_?norm|norm|ln)\d*(?:[._]|$)|(?:layer|rms)norm")
        .expect("a constant pattern")
});

/// Whether a parameter's name is that of a normalization layer: `ln_q.weight`, `layer_norm1.weight`,
/// `post_attention_layernorm.weight`. A model that knows its layers should not rely on this guess.
#[must_use]
pub fn is_norm_name(name: &str) -> bool {
    NORM_NAME.is_match(&name.to_lowercase())
}

/// Usual names of embedding tables and output heads.
static TABLE_NAME: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(
        r"(?:^|\.)(?:embed_tokens|word_embeddings|position_embeddings?|wte|embed|lm_head|output_layer)\.weight$",
    )
    .expect("a constant pattern")
});

/// Whether a parameter's name is that of an embedding table or an output head: `embed_tokens.weight`,
/// `transformer.output_layer.weight`. Adapters on them have other names.
#[must_use]
pub fn is_table_name(name: &str) -> bool {
    TABLE_NAME.is_match(name)
}

/// Optimizer options of one parameter, such as PyTorch keeps per parameter group.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct GroupOptions {
    /// Decoupled weight decay; zero for biases and normalization layers.
    pub weight_decay: f32,
    /// Factor by which the scheduled learning rate is multiplied.
    pub lr_scale: f32,
}

/// Rules that choose a parameter's weight decay and learning-rate factor by its name.
#[derive(Clone, Debug)]
pub struct ParameterGroups {
    weight_decay: f32,
    lr_scales: Vec<(Regex, f32)>,
}

impl ParameterGroups {
    /// Builds the rules from the weight decay and from `(pattern, scale)` pairs of learning-rate factors. The
    /// first pattern (a regular expression) that matches anywhere in a parameter's name decides; other names
    /// have factor 1.
    ///
    /// # Errors
    /// [`OptimError::BadPattern`] for an invalid regular expression. [`OptimError::OutOfRange`] for a negative or
    /// non-finite number.
    pub fn new(weight_decay: f32, lr_scales: &[(String, f32)]) -> Result<Self, OptimError> {
        check_non_negative("the weight decay", weight_decay)?;
        let lr_scales = lr_scales.iter().map(|(pattern, scale)| {
            check_non_negative("a learning-rate scale", *scale)?;
            let regex = Regex::new(pattern).map_err(|source| OptimError::BadPattern {
                pattern: pattern.clone(),
                source,
            })?;
            Ok((regex, *scale))
        });
        Ok(Self {
            weight_decay,
            lr_scales: lr_scales.collect::<Result<_, _>>()?,
        })
    }

    /// Optimizer options of the parameter called `name`. `of_norm_layer` says that it belongs to a
    /// normalization layer, whatever its name is (see [`is_norm_name`]).
    #[must_use]
    pub fn options(&self, name: &str, of_norm_layer: bool) -> GroupOptions {
        let decays = !of_norm_layer && !NO_DECAY.is_match(&name.to_lowercase());
        let lr_scale = self
            .lr_scales
            .iter()
            .find(|(pattern, _)| pattern.is_match(name));
        GroupOptions {
            weight_decay: if decays { self.weight_decay } else { 0.0 },
            lr_scale: lr_scale.map_or(1.0, |(_, scale)| *scale),
        }
    }
}

fn check_non_negative(what: &'static str, value: f32) -> Result<(), OptimError> {
    if value.is_finite() && value >= 0.0 {
        return Ok(());
    }
    Err(OptimError::OutOfRange {
        what,
        expected: "finite and not negative",
        got: value.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn biases_and_norms_do_not_decay() {
        let groups = ParameterGroups::new(0.1, &[]).unwrap();
        let decays = |name: &str| groups.options(name, is_norm_name(name)).weight_decay > 0.0;
        for name in [
            "llm.model.layers.0.self_attn.q_proj.weight",
            "llm.model.embed_tokens.weight",
            "resampler.query",
            "resampler.attn.in_proj_weight",
            "vpm.embeddings.position_embedding.weight",
            "model.normalizer.weight",
        ] {
            assert!(decays(name), "{name}");
        }
        for name in [
            "llm.model.layers.0.self_attn.q_proj.bias",
            "resampler.attn.in_proj_bias",
            "llm.model.layers.3.input_layernorm.weight",
            "llm.model.norm.weight",
            "layers.0.self_attn.q_norm.weight",
            "vpm.encoder.layers.0.layer_norm1.weight",
            "resampler.ln_kv.weight",
            "blocks.0.LayerNorm.weight",
            "norm",
        ] {
            assert!(!decays(name), "{name}");
        }
    }

    #[test]
    fn the_layer_kind_decides_weight_decay_where_the_name_does_not() {
        let groups = ParameterGroups::new(0.1, &[]).unwrap();
        assert!(groups.options("resampler.ln_q.weight", false).weight_decay > 0.0);
        assert!(groups.options("resampler.ln_q.weight", true).weight_decay <= 0.0);
    }

    #[test]
    fn the_first_matching_pattern_scales_the_rate() {
        let rules = [("^resampler".to_owned(), 0.5), ("weight$".to_owned(), 2.0)];
        let groups = ParameterGroups::new(0.0, &rules).unwrap();
        let scale = |name: &str| groups.options(name, false).lr_scale;
        assert_eq!(
            [scale("resampler.a.weight"), scale("llm.weight"), scale("x")],
            [0.5, 2.0, 1.0]
        );
    }

    #[test]
    fn invalid_rate_rules_are_refused() {
        assert!(matches!(
            ParameterGroups::new(0.0, &[("(".into(), 1.0)]),
            Err(OptimError::BadPattern { .. })
        ));
        assert!(ParameterGroups::new(-0.1, &[]).is_err());
        assert!(ParameterGroups::new(0.0, &[("a".into(), f32::NAN)]).is_err());
    }
}

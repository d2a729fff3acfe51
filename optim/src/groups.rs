//! Parameter groups: which parameters decay, and whose learning rate is scaled.
//!
//! Decay follows Hugging Face's `Trainer`: neither biases nor the weights of normalisation layers decay.

use std::sync::LazyLock;

use regex::Regex;

use crate::OptimError;

/// Names that never decay, matched against the lower-case parameter name.
static NO_DECAY: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
        .expect("a constant pattern")
});

/// Names that normalisation layers usually carry, for callers that know names only.
static NORM_NAME: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r"(?:^|[._])(?:layer_?norm|rms_?norm|norm|ln)\d*(?:[._]|$)|(?:layer|rms)norm")
        .expect("a constant pattern")
});

/// Whether a parameter belongs to a normalisation layer, judged by its name: `ln_q.weight`, `layer_norm1.weight`,
/// `post_attention_layernorm.weight`. Models that know their layers should say so instead.
#[must_use]
pub fn is_norm_name(name: &str) -> bool {
    NORM_NAME.is_match(&name.to_lowercase())
}

/// What the optimizer does differently for one parameter.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct GroupOptions {
    /// Decoupled weight decay; zero for parameters that do not decay.
    pub weight_decay: f32,
    /// Factor on the scheduled learning rate.
    pub lr_scale: f32,
}

/// The rules that put parameters into groups.
#[derive(Clone, Debug)]
pub struct ParameterGroups {
    weight_decay: f32,
    lr_scales: Vec<(Regex, f32)>,
}

impl ParameterGroups {
    /// Rules with one decay for all parameters that decay, and `(pattern, scale)` pairs for learning rates: the
    /// first pattern found anywhere in a name decides, other names have the scale 1.
    ///
    /// # Errors
    /// [`OptimError::BadPattern`], or [`OptimError::OutOfRange`] for a negative or non-finite number.
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

    /// The options of one parameter. `of_norm_layer`: the parameter belongs to a normalisation layer, whatever
    /// its name (see [`is_norm_name`]).
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

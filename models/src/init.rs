//! Random start values.
//!
//! Every value is a function of seed, tensor name and element, so that no rank count, shard size
//! or order of calls changes a model.

use crate::params::ADAPTER_PREFIX;
use engine::ParamSpec;
use optim::rng::RandomStream;
use std::ops::Range;

/// Distribution from which a parameter's random initial values are drawn.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Init {
    /// The same value for all elements.
    Constant(f32),
    /// Normal distribution around 0, by its standard deviation.
    Normal(f32),
    /// Uniform distribution around 0, by its half width: from `-half` to `half`.
    Uniform(f32),
}

impl Init {
    /// Xavier's (Glorot's) uniform distribution: half width `sqrt(6 / (fan_in + fan_out))`.
    #[must_use]
    pub fn xavier(fan_in: usize, fan_out: usize) -> Self {
        Self::Uniform((6.0 / (fan_in + fan_out) as f32).sqrt())
    }
}

/// Fan-in and fan-out of a parameter seen as a matrix: the first extent is the fan-out, all others together the
/// fan-in.
pub(crate) fn fans(param: &ParamSpec) -> (usize, usize) {
    let fan_out = param.shape.dims().first().copied().unwrap_or(1);
    (param.shape.elems() / fan_out.max(1), fan_out)
}

/// Writes the start values of `elements` of a parameter (row-major) into `out`. Adapters, biases and
/// vectors have the same distributions in all families; `matrix` is the family's distribution of the rest.
pub(crate) fn fill(
    param: &ParamSpec,
    matrix: Init,
    seed: u64,
    elements: Range<usize>,
    out: &mut [f32],
) {
    let stream = RandomStream::new(seed, &param.name);
    let init = rule(param, matrix);
    for (value, element) in out.iter_mut().zip(elements) {
        let element = element as u64;
        *value = match init {
            Init::Constant(c) => c,
            Init::Normal(std) => std * stream.normal(element),
            Init::Uniform(half) => half * (2.0 * stream.uniform(element) - 1.0),
        };
    }
}

/// Distribution of a parameter's initial values: Kaiming-uniform for LoRA A, 0 for LoRA B and biases, 1 for
/// other vectors, and `matrix`, the model family's distribution, for everything else.
#[must_use]
pub fn rule(param: &ParamSpec, matrix: Init) -> Init {
    let name = param.name.as_str();
    if name.starts_with(ADAPTER_PREFIX) {
        // Kaiming's uniform distribution with a = sqrt(5) for A; B begins at zero.
        return match name.contains(".lora_A.") {
            true => Init::Uniform((1.0 / fans(param).0 as f32).sqrt()),
            false => Init::Constant(0.0),
        };
    }
    if name.ends_with("bias") {
        return Init::Constant(0.0);
    }
    match param.shape.dims().len() {
        1 => Init::Constant(1.0),
        _ => matrix,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::UnitId;
    use kernels::Shape;

    fn param(name: &str, shape: &[usize]) -> ParamSpec {
        ParamSpec {
            name: name.into(),
            shape: Shape::new(shape),
            unit: UnitId(0),
            trainable: true,
            quantization: None,
        }
    }

    #[test]
    fn initial_values_do_not_depend_on_the_split() {
        let p = param("llm.model.layers.0.mlp.up_proj.weight", &[7, 9]);
        let mut whole = [0.0; 63];
        fill(&p, Init::Normal(0.02), 3, 0..63, &mut whole);
        let mut part = [0.0; 20];
        fill(&p, Init::Normal(0.02), 3, 31..51, &mut part);
        assert_eq!(whole[31..51], part);
        fill(&p, Init::Normal(0.02), 4, 31..51, &mut part);
        assert_ne!(whole[31..51], part);
    }

    #[test]
    fn initialization_follows_the_kind_of_tensor() {
        let of = |name: &str, shape: &[usize]| rule(&param(name, shape), Init::Normal(0.02));
        assert_eq!(of("llm.model.norm.weight", &[8]), Init::Constant(1.0));
        assert_eq!(of("resampler.attn.in_proj_bias", &[8]), Init::Constant(0.0));
        assert_eq!(of("llm.lm_head.weight", &[8, 4]), Init::Normal(0.02));
        let a = "base_model.model.llm.q_proj.lora_A.weight";
        assert_eq!(of(a, &[2, 16]), Init::Uniform(0.25));
        let b = "base_model.model.llm.q_proj.lora_B.weight";
        assert_eq!(of(b, &[16, 2]), Init::Constant(0.0));
    }
}

//! Declaration of a model's parameters: units in forward order, names as in the checkpoint.

use crate::batch::starts_of;
use crate::error::{ModelError, Result};
use crate::lora::{LanguageModules, LoraConfig, TargetMatcher};
use crate::nn::{FusedLinear, Linear};
use crate::ops::{LinearParams, LoraParams};
use engine::{ModelSpec, ParamId, ParamSpec, UnitId, UnitSpec};
use kernels::{Quantization, Shape};
use std::collections::BTreeMap;

/// Prefix that peft puts before a module's path in the tensor names of an adapter file.
pub const ADAPTER_PREFIX: &str = "base_model.model.";

/// Whether the parameter called `name` is not in the base model's files, since a run adds it: a LoRA matrix,
/// or learned keys and values (p-tuning).
#[must_use]
pub fn is_added(name: &str) -> bool {
    name.starts_with(ADAPTER_PREFIX) || name.ends_with(".self_attn.prefix")
}

/// Builder of a [`ModelSpec`], on which a model declares its units (parameters gathered together, usually one
/// layer) and their parameters.
pub struct ParamBuilder<'a> {
    spec: ModelSpec,
    trainable: &'a dyn Fn(&str) -> bool,
    lora: Option<(&'a LoraConfig, TargetMatcher)>,
    adapters: usize,
    split: SplitAdapters,
    quantization: Option<&'a dyn Fn(&str) -> Option<Quantization>>,
}

/// Fused layers whose projections have one adapter each: path of the layer, and number of rows of each
/// projection.
pub type SplitAdapters = BTreeMap<String, Vec<usize>>;

impl std::fmt::Debug for ParamBuilder<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ParamBuilder")
            .field("units", &self.spec.units.len())
            .field("params", &self.spec.params.len())
            .finish_non_exhaustive()
    }
}

impl<'a> ParamBuilder<'a> {
    /// Builder without parameters. `trainable` decides by checkpoint name whether a parameter trains; adapter
    /// parameters always do. `lora` has the settings of adapters, `None` for none. `language` names the
    /// decoder's modules.
    ///
    /// # Errors
    /// When the adapter's targets are not a valid pattern or its rank is zero.
    pub fn new(
        trainable: &'a dyn Fn(&str) -> bool,
        lora: Option<&'a LoraConfig>,
        language: &LanguageModules,
    ) -> Result<Self> {
        let lora = match lora {
            Some(config) if config.lora_rank == 0 => {
                return Err(ModelError::Config {
                    field: "lora_rank",
                    value: "0".into(),
                    reason: "an adapter has at least one row",
                });
            }
            Some(config) => {
                let matcher = TargetMatcher::new(&config.targets, config.layers.clone(), language)?;
                Some((config, matcher))
            }
            None => None,
        };
        Ok(Self {
            spec: ModelSpec::default(),
            trainable,
            lora,
            adapters: 0,
            split: SplitAdapters::new(),
            quantization: None,
        })
    }

    /// Quantizes weights of linear layers that do not train: `quantization` decides by checkpoint name.
    #[must_use]
    pub fn quantization(mut self, quantization: &'a dyn Fn(&str) -> Option<Quantization>) -> Self {
        self.quantization = Some(quantization);
        self
    }

    /// Starts the next unit in forward order, called `name`; its parameters are declared on the returned
    /// scope. The engine gathers and releases the parameters of a unit together.
    pub fn unit(&mut self, name: &str) -> ParamScope<'_, 'a> {
        let unit = UnitId(self.spec.units.len() as u32);
        self.spec.units.push(UnitSpec { name: name.into() });
        ParamScope {
            builder: self,
            unit,
            path: String::new(),
        }
    }

    /// Ends the declaration and returns the model's units and parameters.
    ///
    /// # Errors
    /// When adapters are configured, and no layer matches, or a name in their settings is of no module or layer.
    pub fn finish(self) -> Result<ModelSpec> {
        Ok(self.finish_with_split()?.0)
    }

    /// As [`ParamBuilder::finish`], but also returns the fused layers whose projections have one adapter
    /// each.
    ///
    /// # Errors
    /// As [`ParamBuilder::finish`].
    pub fn finish_with_split(self) -> Result<(ModelSpec, SplitAdapters)> {
        if let Some((config, matcher)) = &self.lora {
            let names = self.spec.params.iter().map(|param| param.name.as_str());
            matcher.check(
                names
                    .clone()
                    .filter_map(|name| name.strip_suffix(".weight")),
            )?;
            if self.adapters == 0 {
                return Err(ModelError::AdapterTarget {
                    target: matcher.text(),
                    reason: "it matches no linear layer of the model".into(),
                });
            }
            config.check_saved(names)?;
        }
        Ok((self.spec, self.split))
    }
}

/// Scope in which the parameters of one unit are declared; their names begin with the scope's dotted path.
#[derive(Debug)]
pub struct ParamScope<'b, 'a> {
    builder: &'b mut ParamBuilder<'a>,
    unit: UnitId,
    path: String,
}

impl<'a> ParamScope<'_, 'a> {
    /// Id of the unit that parameters declared in this scope belong to.
    #[must_use]
    pub fn id(&self) -> UnitId {
        self.unit
    }

    /// A scope in the same unit, with `module` appended to the path.
    pub fn at(&mut self, module: &str) -> ParamScope<'_, 'a> {
        let path = self.join(module);
        ParamScope {
            builder: self.builder,
            unit: self.unit,
            path,
        }
    }

    fn join(&self, name: &str) -> String {
        if self.path.is_empty() {
            name.to_owned()
        } else {
            format!("{}.{name}", self.path)
        }
    }

    /// Declares the parameter `name` of the given shape below this scope's path, and returns its id.
    pub fn param(&mut self, name: &str, shape: impl Into<Shape>) -> ParamId {
        let name = self.join(name);
        let trainable = (self.builder.trainable)(&name);
        self.declare(name, shape.into(), trainable)
    }

    fn declare(&mut self, name: String, shape: Shape, trainable: bool) -> ParamId {
        let id = ParamId(self.builder.spec.params.len() as u32);
        self.builder.spec.params.push(ParamSpec {
            name,
            shape,
            unit: self.unit,
            trainable,
            quantization: None,
        });
        id
    }

    /// Declares the weight of a linear layer, which may be quantized.
    fn linear_weight(&mut self, shape: [usize; 2]) -> ParamId {
        let id = self.param("weight", shape);
        let quantization = self.builder.quantization;
        let param = &mut self.builder.spec.params[id.index()];
        let frozen = quantization.filter(|_| !param.trainable);
        param.quantization = frozen.and_then(|quantization| quantization(&param.name));
        id
    }

    /// Declares the linear layer `module` with weight `[n, k]`, a bias `[n]` if `bias` is true, and an
    /// adapter if the layer is a LoRA target.
    pub fn linear(&mut self, module: &str, [n, k]: [usize; 2], bias: bool) -> Linear {
        let mut inner = self.at(module);
        let weight = inner.linear_weight([n, k]);
        let bias = bias.then(|| inner.param("bias", [n]));
        let adapter = inner.adapters([n, k], 1);
        Linear {
            base: LinearParams::new(weight, bias),
            adapter,
        }
    }

    /// Declares the fused linear layer `module`, whose weight `[n, k]` stacks several projections, with
    /// `parts` rows each.
    ///
    /// A LoRA target has one adapter, or one per projection: A is `[r, k]` or `[parts.len() * r, k]`, B is
    /// `[n, r]`.
    pub fn fused_linear(
        &mut self,
        module: &str,
        parts: &[usize],
        k: usize,
        bias: bool,
    ) -> FusedLinear {
        let n = parts.iter().sum();
        let mut inner = self.at(module);
        let weight = inner.linear_weight([n, k]);
        let bias = bias.then(|| inner.param("bias", [n]));
        let lora = inner.builder.lora.as_ref();
        let own_adapters = lora.is_some_and(|(config, _)| config.per_projection);
        let count = if own_adapters { parts.len() } else { 1 };
        let adapter = inner.adapters([n, k], count);
        if own_adapters && adapter.is_some() {
            let path = inner.path.clone();
            inner.builder.split.insert(path, parts.to_vec());
        }
        let starts = starts_of(parts.iter().copied());
        FusedLinear {
            base: LinearParams::new(weight, bias),
            adapter,
            parts: starts.windows(2).map(|w| w[0]..w[1]).collect(),
            own_adapters,
        }
    }

    /// Declares `count` adapters, their A one above the other.
    fn adapters(&mut self, [n, k]: [usize; 2], count: usize) -> Option<LoraParams> {
        let (config, matcher) = self.builder.lora.as_ref()?;
        if !matcher.matches(&self.path) {
            return None;
        }
        let ((rank, scale), dropout) = (config.of(&self.path), config.lora_dropout);
        let rows = matcher.rows(&self.path);
        self.builder.adapters += 1;
        let name = |part: &str| format!("{ADAPTER_PREFIX}{}.{part}.weight", self.path);
        let (name_a, name_b) = (name("lora_A"), name("lora_B"));
        Some(LoraParams {
            lora_a: self.declare(name_a, Shape::new(&[count * rank, k]), true),
            lora_b: self.declare(name_b, Shape::new(&[n, rank]), true),
            scale,
            dropout,
            rows,
            part: None,
        })
    }

    /// Checks that the layer `module`, which cannot take an adapter, is not a LoRA target.
    ///
    /// # Errors
    /// [`ModelError::AdapterTarget`] if it is one.
    pub fn refuse_adapter(&self, module: &str) -> Result<()> {
        let path = self.join(module);
        match &self.builder.lora {
            Some((_, matcher)) if matcher.matches(&path) => Err(ModelError::AdapterTarget {
                target: matcher.text(),
                reason: format!("{path} cannot take an adapter"),
            }),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lora::LoraTargets;

    const LANGUAGE: LanguageModules = LanguageModules {
        prefix: "llm.",
        attention: &["q_proj"],
        mlp: &[],
    };

    fn lora(targets: &str) -> LoraConfig {
        LoraConfig {
            lora_rank: 2,
            lora_alpha: 4.0,
            lora_dropout: 0.0,
            others: BTreeMap::new(),
            targets: LoraTargets::parse(targets),
            layers: None,
            per_projection: false,
            use_rslora: false,
            modules_to_save: vec!["norm".into()],
        }
    }

    fn build(config: Option<&LoraConfig>) -> Result<ModelSpec> {
        let trains =
            |name: &str| !name.starts_with("llm.") || config.is_some_and(|lora| lora.saves(name));
        let mut builder = ParamBuilder::new(&trains, config, &LANGUAGE)?;
        let mut unit = builder.unit("llm.layers.0");
        let mut layer = unit.at("llm.layers.0");
        layer.param("norm.weight", [3]);
        layer.linear("q_proj", [4, 3], true);
        let mut head = builder.unit("head");
        head.param("head.weight", [5, 3]);
        head.refuse_adapter("head")?;
        builder.finish()
    }

    #[test]
    fn parameters_have_their_names_units_and_trainability() {
        let spec = build(None).unwrap();
        let names: Vec<&str> = spec.params.iter().map(|p| p.name.as_str()).collect();
        assert_eq!(
            names,
            [
                "llm.layers.0.norm.weight",
                "llm.layers.0.q_proj.weight",
                "llm.layers.0.q_proj.bias",
                "head.weight",
            ]
        );
        let trained: Vec<bool> = spec.params.iter().map(|p| p.trainable).collect();
        assert_eq!(trained, [false, false, false, true]);
        assert_eq!(spec.params[3].unit, UnitId(1));
    }

    #[test]
    fn adapters_are_trainable_and_in_the_unit_of_their_layer() {
        let spec = build(Some(&lora("q_proj"))).unwrap();
        let a = spec
            .find("base_model.model.llm.layers.0.q_proj.lora_A.weight")
            .unwrap();
        let b = &spec.params[a.index() + 1];
        assert_eq!(spec.params[a.index()].shape, Shape::new(&[2, 3]));
        assert_eq!((b.shape, b.unit), (Shape::new(&[4, 2]), UnitId(0)));
        assert!(b.trainable && spec.params[a.index()].trainable);
        assert!(spec.params[0].trainable, "a saved module trains in full");
        assert!(!spec.params[1].trainable);
    }

    #[test]
    fn a_target_that_matches_no_layer_is_an_error() {
        let none = build(Some(&lora("x_proj"))).unwrap_err();
        assert!(matches!(none, ModelError::AdapterTarget { .. }));
        let head = build(Some(&lora("head|.*q_proj"))).unwrap_err();
        assert!(head.to_string().contains("head cannot take"));
    }

    #[test]
    fn every_name_in_the_settings_of_adapters_must_exist() {
        let misspelt = build(Some(&lora("q_proj,v_porj"))).unwrap_err();
        assert!(misspelt.to_string().contains("v_porj"), "{misspelt}");
        let with = |saved: &str, layers| LoraConfig {
            modules_to_save: vec!["norm".into(), saved.into()],
            layers,
            ..lora("attn")
        };
        assert!(build(Some(&with("head", Some(0..1)))).is_ok());
        let saved = build(Some(&with("nrom", None))).unwrap_err();
        assert!(matches!(saved, ModelError::SavedModule { .. }), "{saved}");
        let layers = build(Some(&with("head", Some(0..2)))).unwrap_err();
        assert!(layers.to_string().contains("has 1 layers"), "{layers}");
    }
}

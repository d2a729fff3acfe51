//! Settings of an adapter run: target layers, and modules trained in full.

use crate::autograd::Rows;
use crate::error::{ModelError, Result};
use regex::Regex;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Names of the linear layers in a family's decoder, by which LoRA targets are found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LanguageModules {
    /// Prefix of the path of every module in the language decoder's layers, such as `model.layers.`.
    pub prefix: &'static str,
    /// Ends of the module paths of attention's linear layers, such as `q_proj`.
    pub attention: &'static [&'static str],
    /// Ends of the module paths of the MLP's linear layers, such as `down_proj`.
    pub mlp: &'static [&'static str],
}

/// Word of peft and ms-swift for every linear layer of the language model.
const ALL_LINEAR: &str = "all-linear";

/// Which linear layers of the model get a low-rank adapter.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LoraTargets {
    /// A regular expression that must match the whole module path, such as
    /// `llm.model.layers.0.self_attn.q_proj`.
    Pattern(String),
    /// Ends of module paths (`q_proj`, `self_attention.dense`) of the language model, in every layer; `attn`, `mlp`
    /// and `all` stand for the linear layers of a decoder layer.
    Projections(Vec<String>),
    /// Exactly these modules by their whole paths, such as those of a saved adapter.
    Modules(BTreeSet<String>),
}

impl LoraTargets {
    /// Parses LoRA targets as the user writes them. Plain names separated by commas become
    /// [`LoraTargets::Projections`]; any other text becomes [`LoraTargets::Pattern`].
    #[must_use]
    pub fn parse(text: &str) -> Self {
        let text = if text == ALL_LINEAR { "all" } else { text };
        let plain = |c: char| c.is_ascii_alphanumeric() || "_,. ".contains(c);
        if text.chars().all(plain) {
            let words = text.split(',').map(str::trim).filter(|n| !n.is_empty());
            Self::Projections(words.map(str::to_owned).collect())
        } else {
            Self::Pattern(text.to_owned())
        }
    }
}

/// Settings of a run that trains low-rank adapters (LoRA).
#[derive(Clone, PartialEq, Debug)]
pub struct LoraConfig {
    /// Rank of every adapter that `others` does not list: rows of A, columns of B.
    pub lora_rank: usize,
    /// LoRA alpha of every adapter that `others` does not list. With the rank it gives the [`scale`] of the output.
    pub lora_alpha: f32,
    /// Dropout probability `p` of the adapters' inputs, 0 to 1. Elements that remain are divided by `1 - p`.
    pub lora_dropout: f32,
    /// Rank and alpha of the adapters that differ from `lora_rank` and `lora_alpha`, by module path.
    pub others: BTreeMap<String, (usize, f32)>,
    /// Which linear layers get an adapter.
    pub targets: LoraTargets,
    /// Range of indices, from 0, of the language decoder's layers that get adapters; `None` means all layers.
    pub layers: Option<Range<usize>>,
    /// Whether each projection of a fused layer (queries, keys and values in one weight) gets an adapter of
    /// its own, as in SwissArmyTransformer, instead of one for the whole layer, as in peft.
    pub per_projection: bool,
    /// Whether outputs are scaled by alpha / √rank (rsLoRA, Kalajdzievski 2023) instead of alpha / rank.
    pub use_rslora: bool,
    /// Modules trained in full in addition to adapters, by the last parts of their path, such as
    /// `embed_tokens` or `resampler`.
    pub modules_to_save: Vec<String>,
}

impl LoraConfig {
    /// Rank and [`scale`] of the adapter of the module at `path`.
    #[must_use]
    pub fn of(&self, path: &str) -> (usize, f32) {
        let others = self.others.get(path).copied();
        let (rank, alpha) = others.unwrap_or((self.lora_rank, self.lora_alpha));
        (rank, scale(alpha.into(), rank, self.use_rslora) as f32)
    }

    /// Whether the parameter called `name` belongs to one of `modules_to_save`, which train in full.
    #[must_use]
    pub fn saves(&self, name: &str) -> bool {
        self.modules_to_save
            .iter()
            .any(|module| in_module(name, module))
    }

    /// Checks that each of `modules_to_save` has parameters. `names` are those of all parameters.
    ///
    /// # Errors
    /// [`ModelError::SavedModule`] for the first without.
    pub(crate) fn check_saved<'s>(
        &self,
        names: impl Iterator<Item = &'s str> + Clone,
    ) -> Result<()> {
        let has_none = |module: &&String| !names.clone().any(|name| in_module(name, module));
        match self.modules_to_save.iter().find(has_none) {
            Some(module) => Err(ModelError::SavedModule {
                module: module.clone(),
            }),
            None => Ok(()),
        }
    }
}

/// Factor of an adapter's output: `alpha / rank`, or `alpha / √rank` with `use_rslora`.
#[must_use]
pub fn scale(alpha: f64, rank: usize, use_rslora: bool) -> f64 {
    let rank = rank as f64;
    alpha / if use_rslora { rank.sqrt() } else { rank }
}

/// Whether a path of dotted parts lies inside a module whose path ends with `module`.
fn in_module(name: &str, module: &str) -> bool {
    let dotted = format!(".{name}.");
    dotted.contains(&format!(".{module}."))
}

/// Decides by its path whether a module gets an adapter: [`LoraTargets`] with the expression compiled.
#[derive(Debug)]
pub(crate) struct TargetMatcher {
    targets: LoraTargets,
    pattern: Option<Regex>,
    layers: Option<Range<usize>>,
    /// Ends of paths, with a leading `.`, of [`LoraTargets::Projections`].
    ends: Vec<String>,
    language: LanguageModules,
}

impl TargetMatcher {
    pub(crate) fn new(
        targets: &LoraTargets,
        layers: Option<Range<usize>>,
        language: &LanguageModules,
    ) -> Result<Self> {
        let pattern = match targets {
            LoraTargets::Projections(_) | LoraTargets::Modules(_) => None,
            LoraTargets::Pattern(text) => {
                let whole = Regex::new(&format!("^(?:{text})$"));
                Some(whole.map_err(|e| ModelError::AdapterTarget {
                    target: text.clone(),
                    reason: e.to_string(),
                })?)
            }
        };
        Ok(Self {
            ends: ends(targets, language),
            targets: targets.clone(),
            pattern,
            layers,
            language: *language,
        })
    }

    /// Whether the module at `path` gets an adapter.
    pub(crate) fn matches(&self, path: &str) -> bool {
        self.in_layers(path) && self.is_target(path)
    }

    /// Whether the module at `path` is in a selected decoder layer; always true without a selection.
    fn in_layers(&self, path: &str) -> bool {
        let Some(layers) = &self.layers else {
            return true;
        };
        path.starts_with(self.language.prefix)
            && layer_of(path).is_some_and(|n| layers.contains(&n))
    }

    fn is_target(&self, path: &str) -> bool {
        match (&self.targets, &self.pattern) {
            (LoraTargets::Projections(_), _) => {
                path.starts_with(self.language.prefix)
                    && self.ends.iter().any(|end| path.ends_with(end.as_str()))
            }
            (LoraTargets::Modules(paths), _) => paths.contains(path),
            (LoraTargets::Pattern(_), Some(pattern)) => pattern.is_match(path),
            (LoraTargets::Pattern(_), None) => false,
        }
    }

    /// Checks that each listed projection is a module of the language model and each selected layer exists. `paths` are
    /// those of all modules.
    ///
    /// # Errors
    /// [`ModelError::AdapterTarget`] for the first that is missing.
    pub(crate) fn check<'s>(&self, paths: impl Iterator<Item = &'s str> + Clone) -> Result<()> {
        let missing =
            |target: String, reason: String| Err(ModelError::AdapterTarget { target, reason });
        let paths = paths.filter(|path| path.starts_with(self.language.prefix));
        let is_there = |end: &&String| paths.clone().any(|path| path.ends_with(end.as_str()));
        if let Some(end) = self.ends.iter().find(|end| !is_there(end)) {
            let reason = "it matches no linear layer of the language model";
            return missing(end[1..].to_owned(), reason.to_owned());
        }
        let layers = paths.filter_map(layer_of).max().map_or(0, |last| last + 1);
        match &self.layers {
            Some(range) if range.end > layers => missing(
                format!("{}..{}", range.start, range.end),
                format!("the language model has {layers} layers"),
            ),
            _ => Ok(()),
        }
    }

    /// Whether the input rows of the module at `path` are tokens or patches.
    pub(crate) fn rows(&self, path: &str) -> Rows {
        if path.starts_with(self.language.prefix) {
            Rows::Tokens
        } else {
            Rows::Patches
        }
    }

    /// The targets as the user wrote them.
    pub(crate) fn text(&self) -> String {
        match &self.targets {
            LoraTargets::Pattern(text) => text.clone(),
            LoraTargets::Projections(names) => names.join(","),
            LoraTargets::Modules(paths) => paths.iter().cloned().collect::<Vec<_>>().join(","),
        }
    }
}

/// Index of the layer that the module at `path` is in.
fn layer_of(path: &str) -> Option<usize> {
    path.split_once(".layers.")?
        .1
        .split('.')
        .next()?
        .parse()
        .ok()
}

/// The ends of paths of a list of projections.
fn ends(targets: &LoraTargets, language: &LanguageModules) -> Vec<String> {
    let LoraTargets::Projections(words) = targets else {
        return Vec::new();
    };
    let (attention, mlp) = (language.attention.iter(), language.mlp.iter());
    words
        .iter()
        .flat_map(|word| match word.as_str() {
            "attn" => attention.clone().copied().collect(),
            "mlp" => mlp.clone().copied().collect(),
            "all" => attention.clone().chain(mlp.clone()).copied().collect(),
            name => vec![name],
        })
        .map(|name| format!(".{name}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LANGUAGE: LanguageModules = LanguageModules {
        prefix: "llm.",
        attention: &["q_proj", "o_proj"],
        mlp: &["up_proj"],
    };

    fn matcher(text: &str) -> TargetMatcher {
        TargetMatcher::new(&LoraTargets::parse(text), None, &LANGUAGE).unwrap()
    }

    #[test]
    fn a_pattern_must_match_the_whole_path() {
        let m = matcher(r"llm\..*layers\.\d+\.self_attn\.(q_proj|k_proj)");
        assert!(m.matches("llm.model.layers.11.self_attn.q_proj"));
        assert!(!m.matches("llm.model.layers.11.self_attn.q_proj.x"));
        assert!(!m.matches("vpm.encoder.layers.1.self_attn.q_proj"));
        assert!(TargetMatcher::new(&LoraTargets::parse("(["), None, &LANGUAGE).is_err());
    }

    #[test]
    fn bare_target_names_mean_projections_of_the_language_model() {
        let m = matcher("q_proj, down_proj");
        assert!(m.matches("llm.model.layers.0.mlp.down_proj"));
        assert!(!m.matches("llm.model.layers.0.mlp.up_proj"));
        assert!(!m.matches("vpm.encoder.layers.1.self_attn.q_proj"));
    }

    #[test]
    fn projection_groups_and_layers_narrow_the_targets() {
        let all = LoraTargets::parse("attn,mlp");
        assert!(matcher("all").matches("llm.model.layers.2.mlp.up_proj"));
        assert_eq!(LoraTargets::parse("all-linear"), LoraTargets::parse("all"));
        assert!(matcher("self_attn.o_proj").matches("llm.model.layers.2.self_attn.o_proj"));
        assert!(!matcher("attn.o_proj").matches("llm.model.layers.2.self_attn.o_proj"));
        let m = TargetMatcher::new(&all, Some(1..3), &LANGUAGE).unwrap();
        assert!(m.matches("llm.model.layers.2.mlp.up_proj"));
        assert!(!m.matches("llm.model.layers.3.mlp.up_proj"));
        assert!(!m.matches("llm.model.layers.12.mlp.up_proj"));
        let pattern = LoraTargets::parse(r".*\.q_proj");
        let m = TargetMatcher::new(&pattern, Some(1..3), &LANGUAGE).unwrap();
        assert!(m.matches("llm.model.layers.1.self_attn.q_proj"));
        assert!(!m.matches("vpm.encoder.layers.1.self_attn.q_proj"));
    }

    #[test]
    fn saved_modules_are_whole_parts_of_a_path() {
        let config = LoraConfig {
            lora_rank: 4,
            lora_alpha: 8.0,
            lora_dropout: 0.0,
            others: BTreeMap::new(),
            targets: LoraTargets::parse("q_proj"),
            layers: None,
            per_projection: false,
            use_rslora: false,
            modules_to_save: vec!["resampler".into(), "embed_tokens".into()],
        };
        assert!(config.saves("resampler.attn.in_proj_weight"));
        assert!(config.saves("llm.model.embed_tokens.weight"));
        assert!(!config.saves("my_resampler.weight"));
        assert_eq!(config.of("llm.model.layers.0.self_attn.q_proj"), (4, 2.0));
        let config = LoraConfig {
            use_rslora: true,
            others: BTreeMap::from([("other".to_owned(), (9, 6.0))]),
            ..config
        };
        assert_eq!((config.of("x"), config.of("other")), ((4, 4.0), (9, 2.0)));
    }
}

//! Selections of parameters by a list of patterns: `lm_head`, `llm,resampler`, `norm,bias`,
//! `llm\.model\.layers\.[0-3]\..*`.

use regex::Regex;

use crate::error::{ModelError, Result};

/// A set of parameters, given by patterns for their names.
#[derive(Clone, Debug)]
pub struct Selection {
    patterns: Vec<Pattern>,
}

impl PartialEq for Selection {
    fn eq(&self, other: &Self) -> bool {
        self.words().eq(other.words())
    }
}

#[derive(Clone, Debug)]
struct Pattern {
    word: String,
    meaning: Meaning,
}

#[derive(Clone, Debug)]
enum Meaning {
    /// A module: these consecutive parts anywhere in the path.
    Module(String),
    /// The part of the model that sees images, whatever the family calls it.
    Vision,
    /// The modules between vision tower and language model, whatever the family calls them.
    Projector,
    /// Weights and biases of normalization layers.
    Norm,
    /// Biases of all layers.
    Bias,
    /// The whole name, or the whole path of a module above it.
    Expression(Regex),
}

impl Selection {
    /// Parses a list of patterns separated by commas. A comma inside brackets or braces does not separate.
    ///
    /// - A word of letters, digits, `_` and `.` selects modules by consecutive parts of their path:
    ///   `lm_head`, `self_attn.q_proj`.
    /// - The word `norm` selects the parameters of normalization layers, `bias` all biases, `vision` the part of
    ///   the model that sees images, and `projector` what lies between the tower and the language model,
    ///   whatever the family calls them.
    /// - Anything else is a regular expression for the whole path of a parameter or of a module above it.
    ///
    /// # Errors
    /// [`ModelError::Selection`] if the list is empty or an expression does not parse.
    pub fn parse(text: &str) -> Result<Self> {
        let words = split(text);
        let patterns = words.into_iter().map(|word| {
            let meaning = meaning(&word)?;
            Ok(Pattern { word, meaning })
        });
        let patterns: Vec<Pattern> = patterns.collect::<Result<_>>()?;
        if patterns.is_empty() {
            return Err(ModelError::Selection {
                word: text.to_owned(),
                reason: "it names no part".into(),
            });
        }
        Ok(Self { patterns })
    }

    /// Whether the parameter called `name` is selected.
    #[must_use]
    pub fn contains(&self, name: &str) -> bool {
        self.patterns.iter().any(|pattern| pattern.matches(name))
    }

    /// Checks that every pattern selects at least one of the parameters called `names`.
    ///
    /// # Errors
    /// [`ModelError::Selection`] with the first pattern that selects none.
    pub fn check<'n>(&self, names: impl Iterator<Item = &'n str> + Clone) -> Result<()> {
        let idle = |pattern: &&Pattern| !names.clone().any(|name| pattern.matches(name));
        match self.patterns.iter().find(idle) {
            Some(pattern) => Err(ModelError::Selection {
                word: pattern.word.clone(),
                reason: "it matches no parameter of the model".into(),
            }),
            None => Ok(()),
        }
    }

    /// The patterns that the selection was parsed from, as the user wrote them.
    pub fn words(&self) -> impl Iterator<Item = &str> {
        self.patterns.iter().map(|pattern| &*pattern.word)
    }
}

impl Pattern {
    fn matches(&self, name: &str) -> bool {
        match &self.meaning {
            Meaning::Module(module) => in_module(name, module),
            Meaning::Vision => VISION.iter().any(|module| in_module(name, module)),
            Meaning::Projector => PROJECTOR.iter().any(|module| in_module(name, module)),
            Meaning::Norm => optim::groups::is_norm_name(name),
            Meaning::Bias => name
                .rsplit('.')
                .next()
                .is_some_and(|last| last.ends_with("bias")),
            Meaning::Expression(expression) => {
                let ends = name
                    .match_indices('.')
                    .map(|(at, _)| at)
                    .chain([name.len()]);
                ends.into_iter()
                    .any(|end| expression.is_match(&name[..end]))
            }
        }
    }
}

/// Names of modules that see images, by which `vision` selects parameters.
pub const VISION: [&str; 3] = ["vpm", "vision", "visual"];
/// Names of modules by which `projector` selects parameters.
const PROJECTOR: [&str; 7] = [
    "resampler",
    "linear_proj",
    "merger",
    "downsample",
    "vision.conv",
    "vision.boi",
    "vision.eoi",
];

/// Whether a path contains a module, given as consecutive parts.
fn in_module(name: &str, module: &str) -> bool {
    format!(".{name}.").contains(&format!(".{module}."))
}

fn meaning(word: &str) -> Result<Meaning> {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '.';
    Ok(match word {
        "norm" => Meaning::Norm,
        "bias" => Meaning::Bias,
        "vision" => Meaning::Vision,
        "projector" => Meaning::Projector,
        _ if word.chars().all(plain) => Meaning::Module(word.to_owned()),
        _ => {
            let expression = Regex::new(&format!("^(?:{word})$"));
            Meaning::Expression(expression.map_err(|error| ModelError::Selection {
                word: word.to_owned(),
                reason: error.to_string(),
            })?)
        }
    })
}

/// Splits at commas outside of brackets.
fn split(text: &str) -> Vec<String> {
    let (mut words, mut word, mut depth) = (Vec::new(), String::new(), 0usize);
    for c in text.chars() {
        match c {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if c == ',' && depth == 0 {
            words.push(std::mem::take(&mut word));
        } else {
            word.push(c);
        }
    }
    words.push(word);
    let trimmed = words.iter().map(|word| word.trim().to_owned());
    trimmed.filter(|word| !word.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: [&str; 6] = [
        "llm.lm_head.weight",
        "llm.model.layers.0.self_attn.q_proj.bias",
        "llm.model.layers.11.input_layernorm.weight",
        "resampler.attn.in_proj_bias",
        "vpm.encoder.layers.1.layer_norm1.weight",
        "vpm.embeddings.patch_embedding.weight",
    ];

    fn chosen(text: &str) -> Vec<usize> {
        let selection = Selection::parse(text).unwrap();
        let all = 0..NAMES.len();
        all.filter(|i| selection.contains(NAMES[*i])).collect()
    }

    #[test]
    fn a_selection_takes_modules_kinds_and_expressions() {
        assert_eq!(chosen("lm_head"), [0]);
        assert_eq!(chosen("llm,resampler"), [0, 1, 2, 3]);
        assert_eq!(chosen("norm, bias"), [1, 2, 3, 4]);
        assert_eq!(chosen("vision"), [4, 5]);
        assert_eq!(chosen("self_attn.q_proj"), [1]);
        // An expression means a whole path, of a parameter or of a module.
        assert_eq!(chosen(r"llm\.model\.layers\.\d"), [1]);
        assert_eq!(chosen(r"llm\.model\.layers\.(0|11)"), [1, 2]);
        assert_eq!(chosen(r"llm\.model\.layers\.\d{1,2}\..*"), [1, 2]);
        assert_eq!(chosen("head"), [0usize; 0], "part of a word is no module");
    }

    #[test]
    fn the_word_vision_selects_the_same_parts_in_all_families() {
        let vision = Selection::parse("vision").unwrap();
        for name in [
            "transformer.vision.boi",
            "model.visual.merger.proj.weight",
            "vpm.embeddings.patch_embedding.weight",
        ] {
            assert!(vision.contains(name), "{name}");
        }
        assert!(!vision.contains("model.layers.0.mlp.vision_mlp.up_proj.weight"));
    }

    #[test]
    fn the_word_projector_selects_what_is_between_tower_and_language_model() {
        let projector = Selection::parse("projector").unwrap();
        for name in [
            "resampler.attn.in_proj_bias",
            "transformer.vision.linear_proj.gate_proj.weight",
            "transformer.vision.conv.weight",
            "model.visual.merger.proj.weight",
        ] {
            assert!(projector.contains(name), "{name}");
        }
        assert!(!projector.contains("vpm.encoder.layers.1.layer_norm1.weight"));
    }

    #[test]
    fn selections_without_match_and_broken_expressions_are_errors() {
        let selection = Selection::parse("llm,nothing").unwrap();
        let error = selection.check(NAMES.into_iter()).unwrap_err();
        assert!(error.to_string().contains("nothing"), "{error}");
        assert!(
            Selection::parse("llm")
                .unwrap()
                .check(NAMES.into_iter())
                .is_ok()
        );
        for bad in ["(", "", " , "] {
            assert!(Selection::parse(bad).is_err(), "{bad:?}");
        }
    }
}

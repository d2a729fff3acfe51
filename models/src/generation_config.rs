//! `generation_config.json` of a model directory: the tokens that end an answer, and what is not used of it.

use crate::config::{ConfigError, ConfigFile};
use crate::places;
use serde_json::{Value, json};
use std::path::Path;

/// Name of the file.
pub const FILE: &str = "generation_config.json";
/// Keys that change no answer here, or that are used.
const SILENT: [&str; 8] = [
    "_from_model_config",
    "bos_token_id",
    "cache_implementation",
    "eos_token_id",
    "pad_token_id",
    "return_dict_in_generate",
    "transformers_version",
    "use_cache",
];
/// Keys that transformers uses only with `do_sample`.
const SAMPLING: [&str; 7] = [
    "epsilon_cutoff",
    "eta_cutoff",
    "min_p",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
];

/// Settings of a model's answers. Without the file it is empty.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct GenerationConfig {
    /// Ids of tokens that end an answer (`eos_token_id`, a number or a list).
    pub eos_ids: Vec<i32>,
    /// Keys that change answers in transformers and are not used here, with their values, sorted.
    pub unused: Vec<(String, Value)>,
}

impl GenerationConfig {
    /// Reads the file in the model directory `dir`. A missing file has no setting.
    ///
    /// # Errors
    /// [`ConfigError`] if the file cannot be read, is not a JSON object, or has an `eos_token_id` of another type.
    pub fn load(dir: &Path) -> Result<Self, ConfigError> {
        let path = places::main(dir).join(FILE);
        if !path.exists() {
            return Ok(Self::default());
        }
        match crate::text::read_regular(&path) {
            Ok(bytes) => Self::parse(&bytes, &path),
            Err(source) => Err(ConfigError::Read { path, source }),
        }
    }

    pub(crate) fn parse(bytes: &[u8], path: &Path) -> Result<Self, ConfigError> {
        let file = ConfigFile::parse(bytes, path)?;
        let fields = file.fields();
        let samples = fields.flag("do_sample", false)?;
        let is_unused = |key: &str, value: &Value| {
            let is_neutral = match key {
                "do_sample" | "output_scores" | "renormalize_logits" => *value == json!(false),
                "num_beams" | "num_return_sequences" | "num_beam_groups" => *value == json!(1),
                "repetition_penalty" | "length_penalty" | "diversity_penalty" => {
                    [0.0, 1.0].map(Some).contains(&value.as_f64())
                }
                key if SAMPLING.contains(&key) => !samples,
                key => SILENT.contains(&key),
            };
            !is_neutral && !value.is_null()
        };
        let mut unused: Vec<(String, Value)> = fields
            .entries()
            .filter(|(key, value)| is_unused(key, value))
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect();
        unused.sort_by(|(a, _), (b, _)| a.cmp(b));
        Ok(Self {
            eos_ids: fields.eos_ids()?.unwrap_or_default(),
            unused,
        })
    }
}

/// Ids of the tokens that end an answer: a family's `own`, then those of the file in `dir`, each once.
pub(crate) fn stop_ids(
    dir: &Path,
    own: impl IntoIterator<Item = i32>,
) -> Result<Vec<i32>, ConfigError> {
    let file = GenerationConfig::load(dir)?;
    let mut ids = Vec::new();
    for id in own.into_iter().chain(file.eos_ids) {
        if !ids.contains(&id) {
            ids.push(id);
        }
    }
    Ok(ids)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(value: &Value) -> Result<GenerationConfig, ConfigError> {
        GenerationConfig::parse(value.to_string().as_bytes(), Path::new(FILE))
    }

    #[test]
    fn end_tokens_are_a_number_or_a_list() {
        for (ids, want) in [
            (json!(7), vec![7]),
            (json!([7, 9]), vec![7, 9]),
            (json!(null), vec![]),
        ] {
            let config = parse(&json!({"eos_token_id": ids})).unwrap();
            assert_eq!((config.eos_ids, config.unused), (want, vec![]));
        }
        assert!(parse(&json!({"eos_token_id": "</s>"})).is_err());
        assert!(parse(&json!([7])).is_err());
    }

    #[test]
    fn what_changes_answers_in_transformers_is_named() {
        let named = |value: Value| {
            let unused = parse(&value).unwrap().unused.into_iter();
            unused.map(|(key, _)| key).collect::<Vec<_>>().join(" ")
        };
        let neutral = json!({"bos_token_id": 1, "pad_token_id": 2, "transformers_version": "4.1", "do_sample": false,
            "temperature": 0.8, "top_p": 0.8, "repetition_penalty": 1.0, "num_beams": 1, "min_length": null});
        assert_eq!(named(neutral), "");
        let all = json!({"do_sample": true, "temperature": 0.8, "top_p": 0.8, "top_k": 2, "repetition_penalty": 1.05,
            "max_length": 8192, "num_beams": 4});
        assert_eq!(
            named(all),
            "do_sample max_length num_beams repetition_penalty temperature top_k top_p"
        );
    }

    #[test]
    fn ends_of_the_family_and_of_the_file_are_joined() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(stop_ids(dir.path(), [3, 3, 1]).unwrap(), [3, 1]);
        std::fs::write(dir.path().join(FILE), r#"{"eos_token_id": [1, 8]}"#).unwrap();
        assert_eq!(stop_ids(dir.path(), [3, 1]).unwrap(), [3, 1, 8]);
        std::fs::write(dir.path().join(FILE), "{").unwrap();
        let error = stop_ids(dir.path(), [3]).unwrap_err();
        assert!(error.to_string().contains(FILE), "{error}");
    }
}

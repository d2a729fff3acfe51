//! The small files of a model directory: configuration, tokenizer, processor, code.

use crate::lang::both;
use models::{places, sat};
use serde_json::Value;
use std::io;
use std::path::{Path, PathBuf};

use crate::error::{ErrorCode, Failure, failures};
use std::collections::BTreeMap;

/// Extensions of files that are copied next to weights.
const ENDINGS: [&str; 5] = [".json", ".py", ".jinja", ".model", ".txt"];
/// Files of checkpoints, adapters and synthetic models that do not belong to a model.
const FOREIGN: [&str; 6] = [
    "trainer_state.json",
    "adapter_config.json",
    "MANIFEST.json",
    "samples.json",
    sat::config::FILE,
    models::seeded::FILE,
];

/// Files of a tokenizer, which may be in a directory of its own.
const TOKENIZER: [&str; 10] = [
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
];

/// A small file: on disk, or the `config.json` that a SAT checkpoint does not have.
#[derive(Debug, Clone)]
pub(crate) struct SmallFile {
    /// Its path, or where it would be.
    pub(crate) path: PathBuf,
    made: Option<Vec<u8>>,
}

impl From<PathBuf> for SmallFile {
    fn from(path: PathBuf) -> Self {
        Self { path, made: None }
    }
}

impl SmallFile {
    /// Its content.
    pub(crate) fn read(&self) -> io::Result<Vec<u8>> {
        match &self.made {
            Some(bytes) => Ok(bytes.clone()),
            None => std::fs::read(&self.path),
        }
    }

    /// Its bytes; 0 if the system does not tell.
    pub(crate) fn bytes(&self) -> u64 {
        match &self.made {
            Some(bytes) => bytes.len() as u64,
            None => self.path.metadata().map_or(0, |meta| meta.len()),
        }
    }
}

/// Names of the small files of the model at `model`, sorted. A location of several directories has the configuration
/// of the first and one tokenizer.
///
/// # Errors
/// A directory cannot be listed, or the configuration cannot be made (exit 10).
pub(crate) fn small(model: &Path) -> Result<Vec<(String, SmallFile)>, Failure> {
    let main = places::main(model);
    let mut found: BTreeMap<String, SmallFile> = listed(&main)?.into_iter().collect();
    if !found.contains_key("config.json") && sat::is_checkpoint(&main) {
        // The other files belong to that trainer.
        found.retain(|name, _| TOKENIZER.contains(&&**name));
        let config = sat::config::of_model(model).map_err(|e| failures::weights(&e))?;
        let made = format!("{:#}\n", Value::Object(config)).into_bytes();
        let path = main.join("config.json");
        let made = Some(made);
        found.insert("config.json".to_owned(), SmallFile { path, made });
    }
    let tokenizer = places::tokenizer(model);
    if tokenizer != main {
        found.retain(|name, _| !TOKENIZER.contains(&&**name));
        let own = listed(&tokenizer)?.into_iter();
        found.extend(own.filter(|(name, _)| TOKENIZER.contains(&&**name)));
    }
    Ok(found.into_iter().collect())
}

/// Names and paths of the small files in `directory`.
///
/// # Errors
/// The directory cannot be listed (exit 10).
fn listed(directory: &Path) -> Result<Vec<(String, SmallFile)>, Failure> {
    let listing = std::fs::read_dir(directory).map_err(|error| {
        Failure::io(
            ErrorCode::ModelFiles,
            both("list", "列出"),
            directory,
            &error,
        )
    })?;
    let found = listing.filter_map(|entry| {
        let path = entry.ok()?.path();
        let name = path.file_name()?.to_str()?.to_owned();
        let kept = ENDINGS.iter().any(|ending| name.ends_with(ending))
            && !name.ends_with(".index.json")
            && !FOREIGN.contains(&name.as_str());
        (kept && path.is_file()).then(|| (name, path.into()))
    });
    Ok(found.collect())
}

/// The text of a `config.json` for plain weights: unchanged, unless it says that weights are quantized.
pub(crate) fn plain_config(text: Vec<u8>) -> Vec<u8> {
    let config = serde_json::from_slice(&text).ok();
    let changed = config.and_then(|before: Value| {
        let mut config = before.clone();
        set_quantization(&mut config, None);
        (config != before).then(|| serde_json::to_vec_pretty(&config).ok())?
    });
    changed.unwrap_or(text)
}

/// Sets the settings of quantized weights in a `config.json`, or removes them.
pub(crate) fn set_quantization(config: &mut Value, settings: Option<&Value>) {
    const FIELD: &str = "quantization_config";
    if let Some(text) = config.get_mut("text_config").and_then(Value::as_object_mut) {
        text.remove(FIELD);
    }
    if let Some(fields) = config.as_object_mut() {
        match settings {
            Some(settings) => fields.insert(FIELD.to_owned(), settings.clone()),
            None => fields.remove(FIELD),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_small_files_of_the_model_are_listed() {
        let directory = tempfile::tempdir().expect("temp dir");
        for name in [
            "config.json",
            "modeling_minicpmv.py",
            "tokenizer.model",
            "model.safetensors",
            "model.safetensors.index.json",
            "MANIFEST.json",
            "trainer_state.json",
            "samples.json",
            "model.seeded.json",
            "notes.md",
        ] {
            std::fs::write(directory.path().join(name), "x").expect("written");
        }
        std::fs::create_dir(directory.path().join("folder.json")).expect("made");
        let names: Vec<String> = small(directory.path())
            .expect("listed")
            .into_iter()
            .map(|(name, _)| name)
            .collect();
        assert_eq!(
            names,
            ["config.json", "modeling_minicpmv.py", "tokenizer.model"]
        );
        assert!(small(&directory.path().join("absent")).is_err());
    }
}

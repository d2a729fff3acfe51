//! The small files of a model directory: configuration, tokenizer, processor, code.

use crate::lang::both;
use serde_json::Value;
use std::path::{Path, PathBuf};

use crate::error::{ErrorCode, Failure};

/// Extensions of files that are copied next to weights.
const ENDINGS: [&str; 5] = [".json", ".py", ".jinja", ".model", ".txt"];
/// Files of checkpoints, adapters and synthetic models that do not belong to a model.
const FOREIGN: [&str; 5] = [
    "trainer_state.json",
    "adapter_config.json",
    "MANIFEST.json",
    "samples.json",
    models::seeded::FILE,
];

/// Names and paths of the small files in `directory`, sorted.
///
/// # Errors
/// The directory cannot be listed (exit 10).
pub(crate) fn small(directory: &Path) -> Result<Vec<(String, PathBuf)>, Failure> {
    let listing = std::fs::read_dir(directory).map_err(|error| {
        Failure::io(
            ErrorCode::ModelFiles,
            both("list", "列出"),
            directory,
            &error,
        )
    })?;
    let mut found: Vec<(String, PathBuf)> = listing
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let name = path.file_name()?.to_str()?.to_owned();
            let kept = ENDINGS.iter().any(|ending| name.ends_with(ending))
                && !name.ends_with(".safetensors.index.json")
                && !FOREIGN.contains(&name.as_str());
            (kept && path.is_file()).then_some((name, path))
        })
        .collect();
    found.sort();
    Ok(found)
}

/// The text of a `config.json` for plain weights: unchanged, unless it says that weights are packed.
pub(crate) fn plain_config(text: Vec<u8>) -> Vec<u8> {
    let config = serde_json::from_slice(&text).ok();
    let changed = config.and_then(|before: Value| {
        let mut config = before.clone();
        set_quantization(&mut config, None);
        (config != before).then(|| serde_json::to_vec_pretty(&config).ok())?
    });
    changed.unwrap_or(text)
}

/// Sets the settings of packed weights in a `config.json`, or removes them.
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

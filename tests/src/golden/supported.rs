//! Packs that are refused by name: known checkpoints that the program does not support, and fixtures without a model.

use super::pack::read_json;
use anyhow::{Result, bail};
use serde_json::Value;
use std::path::Path;

/// Fixtures that have no model, by a file in their directory.
const FIXTURES: [(&str, &str); 2] = [
    ("adamw8bit.json", "tables of the 8-bit AdamW"),
    ("tensors_4bit.json", "tables of quantized weights"),
];

/// Checks that `dir` is the pack of a supported model.
///
/// # Errors
/// When it is not, with the name of what it is.
pub(super) fn check(dir: &Path) -> Result<()> {
    let has = |name: &str| dir.join(name).exists();
    if let Some((file, what)) = FIXTURES.iter().find(|(file, _)| has(file)) {
        bail!("{what} ({file}) are no pack of a model");
    }
    if !has("config.json") || !has("cases") {
        let found = entries(dir)?.join(", ");
        bail!("no pack of a model: it needs config.json and cases/, and has {found}");
    }
    let config: Value = read_json(&dir.join("config.json"))?;
    match unsupported(&config) {
        Some(name) => bail!("{name} is not supported"),
        None => Ok(()),
    }
}

/// Name of the checkpoint with these files, if it is known and not supported.
fn unsupported(config: &Value) -> Option<String> {
    let settings = config.get("quantization_config");
    if let Some(settings) = settings.filter(|s| s["quant_method"] != "bitsandbytes") {
        let method = settings["quant_method"].as_str().unwrap_or("unknown");
        return Some(format!("a quantized checkpoint ({method})"));
    }
    let model_type = config["model_type"].as_str().unwrap_or_default();
    let version = match &config["version"] {
        Value::String(version) => version.clone(),
        version => version.to_string(),
    };
    let known = ["2.6", "4.5"].contains(&version.as_str());
    let name = match model_type {
        "minicpmv" if !known && version != "4.0" => format!("MiniCPM-V {version}"),
        "minicpmo" if !known => format!("MiniCPM-o {version}"),
        _ => return None,
    };
    Some(format!("{name} (model_type {model_type:?})"))
}

/// Sorted names in the directory `dir`.
fn entries(dir: &Path) -> Result<Vec<String>> {
    let names = std::fs::read_dir(dir)?.map(|entry| {
        let name = entry?.file_name();
        Ok(name.to_string_lossy().into_owned())
    });
    let mut names = names.collect::<Result<Vec<_>>>()?;
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn refused(config: &Value) -> String {
        unsupported(config).unwrap_or_default()
    }

    #[test]
    fn unsupported_checkpoints_are_refused_by_name() {
        for (name, config) in [
            (
                "MiniCPM-V 4.6",
                json!({"model_type": "minicpmv", "version": 4.6}),
            ),
            (
                "MiniCPM-o 4.0",
                json!({"model_type": "minicpmo", "version": 4.0}),
            ),
            (
                "MiniCPM-o 5",
                json!({"model_type": "minicpmo", "version": "5"}),
            ),
            (
                "gptq",
                json!({"model_type": "glm4v", "quantization_config": {"quant_method": "gptq"}}),
            ),
        ] {
            assert!(refused(&config).contains(name), "{config}");
        }
        for config in [
            json!({"model_type": "minicpmo", "version": "2.6"}),
            json!({"model_type": "minicpmv", "version": 4.5}),
            json!({"model_type": "minicpmv", "version": 4.0}),
            json!({"model_type": "chatglm", "original_rope": false}),
            json!({"model_type": "glm46v"}),
        ] {
            assert_eq!(refused(&config), "");
        }
    }

    #[test]
    fn a_directory_without_a_model_is_named_with_its_files() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("weights.pt"), "").unwrap();
        let error = check(dir.path()).unwrap_err().to_string();
        assert!(error.contains("has weights.pt"), "{error}");
        std::fs::write(dir.path().join("adamw8bit.json"), "{}").unwrap();
        let error = check(dir.path()).unwrap_err().to_string();
        assert!(error.contains("8-bit AdamW"), "{error}");
    }
}

//! Reading `config.json`: what the families share.

use std::path::{Path, PathBuf};

use thiserror::Error;

/// Larger sizes are taken for damage: the product of two still fits 64 bits.
pub(crate) const MAX_SIZE: usize = 1 << 28;

/// Bytes of the file `config.json` in the model folder `dir`, and its path.
///
/// # Errors
/// [`ConfigError::Read`].
pub fn read(dir: &Path) -> Result<(Vec<u8>, PathBuf), ConfigError> {
    let path = dir.join("config.json");
    match std::fs::read(&path) {
        Ok(bytes) => Ok((bytes, path)),
        Err(source) => Err(ConfigError::Read { path, source }),
    }
}

/// Why a `config.json` cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// The file is not JSON, lacks a field or holds one of the wrong type.
    #[error("{} is not a valid model configuration", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Line, column and cause.
        source: serde_json::Error,
    },
    /// Another model family.
    #[error("model type \"{found}\" is not supported, expected one of {}", crate::families::MODEL_TYPES.join(", "))]
    UnsupportedModel {
        /// The `model_type` of the file, empty if it has none.
        found: String,
    },
    /// Another release of this family.
    #[error("{model_type} version {found} is not supported, only version {expected}")]
    UnsupportedVersion {
        /// The `model_type` of the file.
        model_type: String,
        /// The version found, or what its absence implies.
        found: String,
        /// What is supported.
        expected: &'static str,
    },
    /// A field holds a value that this implementation does not compute.
    #[error("{field} = {found} is not supported, expected {expected}")]
    Unsupported {
        /// The field.
        field: &'static str,
        /// Its value.
        found: String,
        /// What is supported.
        expected: &'static str,
    },
    /// Two sizes contradict each other, or one is out of range.
    #[error("{field} = {found} is impossible: {reason}")]
    Inconsistent {
        /// The field.
        field: &'static str,
        /// Its value.
        found: usize,
        /// The rule it breaks.
        reason: String,
    },
}

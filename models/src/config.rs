//! Errors and checks that the readers of `config.json` of all families share.

use std::path::{Path, PathBuf};

use thiserror::Error;

/// Largest size that a field may have. The product of two still fits 64 bits; a larger value counts as damage.
pub(crate) const MAX_SIZE: usize = 1 << 28;

/// Bytes of `config.json` and its path. `dir` is the model directory, or the file itself.
///
/// # Errors
/// [`ConfigError::Read`].
pub fn read(dir: &Path) -> Result<(Vec<u8>, PathBuf), ConfigError> {
    let path = if dir.is_file() {
        dir.to_owned()
    } else {
        dir.join("config.json")
    };
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
    /// The `model_type` is of no supported family.
    #[error("model type \"{found}\" is not supported, expected one of {}", crate::families::MODEL_TYPES.join(", "))]
    UnsupportedModel {
        /// The `model_type` of the file, empty if it has none.
        found: String,
    },
    /// The release of this family is not supported.
    #[error("{model_type} version {found} is not supported, only version {expected}")]
    UnsupportedVersion {
        /// The `model_type` of the file.
        model_type: String,
        /// The version found, or what its absence implies.
        found: String,
        /// What is supported.
        expected: &'static str,
    },
    /// A field has a value that this implementation does not support.
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
    #[error("{field} = {found} is invalid: {reason}")]
    Inconsistent {
        /// The field.
        field: &'static str,
        /// Its value.
        found: usize,
        /// The rule it breaks.
        reason: String,
    },
}

/// [`ConfigError::Unsupported`] of a field.
pub(crate) fn unsupported(
    field: &'static str,
    found: String,
    expected: &'static str,
) -> ConfigError {
    ConfigError::Unsupported {
        field,
        found,
        expected,
    }
}

/// Checks that `found` is absent or equals `expected`.
pub(crate) fn expect(
    field: &'static str,
    found: Option<&str>,
    expected: &'static str,
) -> Result<(), ConfigError> {
    match found {
        Some(found) if found != expected => Err(unsupported(field, found.to_owned(), expected)),
        _ => Ok(()),
    }
}

/// Checks that a dropout probability is zero.
pub(crate) fn no_dropout(field: &'static str, found: f64) -> Result<(), ConfigError> {
    if found == 0.0 {
        Ok(())
    } else {
        Err(unsupported(field, found.to_string(), "0"))
    }
}

/// Returns `found` if it is a positive number.
pub(crate) fn positive(field: &'static str, found: f64) -> Result<f64, ConfigError> {
    if found > 0.0 && found.is_finite() {
        return Ok(found);
    }
    Err(unsupported(field, found.to_string(), "a positive number"))
}

/// Returns `found` if it is between 1 and [`MAX_SIZE`].
pub(crate) fn size(field: &'static str, found: usize) -> Result<usize, ConfigError> {
    if found == 0 {
        let reason = "it must be at least 1".to_owned();
        return Err(ConfigError::Inconsistent {
            field,
            found,
            reason,
        });
    }
    at_most(field, found, MAX_SIZE)
}

/// Returns `found` if it is at most `limit`.
pub(crate) fn at_most(
    field: &'static str,
    found: usize,
    limit: usize,
) -> Result<usize, ConfigError> {
    if found <= limit {
        return Ok(found);
    }
    let reason = format!("it must be at most {limit}");
    Err(ConfigError::Inconsistent {
        field,
        found,
        reason,
    })
}

/// Returns `found / divisor` if the remainder is zero.
pub(crate) fn divisible(
    field: &'static str,
    found: usize,
    divisor: usize,
) -> Result<usize, ConfigError> {
    if divisor > 0 && found.is_multiple_of(divisor) {
        return Ok(found / divisor);
    }
    let reason = format!("it must be a multiple of {divisor}");
    Err(ConfigError::Inconsistent {
        field,
        found,
        reason,
    })
}

/// Value of `eos_token_id`: one id or a list.
#[derive(Clone, Debug, serde::Deserialize)]
#[serde(untagged, expecting = "expected a token id or a list of them")]
pub(crate) enum EosIds {
    /// One id.
    One(i32),
    /// Several ids.
    Several(Vec<i32>),
}

impl EosIds {
    /// The ids as a list.
    pub(crate) fn into_vec(self) -> Vec<i32> {
        match self {
            Self::One(id) => vec![id],
            Self::Several(ids) => ids,
        }
    }
}

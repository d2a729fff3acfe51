//! Tokenizer and chat template.

pub mod template;
pub mod tokenizer;

pub use template::{ChatTemplate, Message, TemplateError};
pub use tokenizer::{Tokenizer, TokenizerError};

use std::path::Path;

/// Reads a file of the model folder; `None` if there is no such file.
fn read_optional(path: &Path) -> std::io::Result<Option<Vec<u8>>> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

//! Tokenizer, chat template, and text that spells control tokens.

pub mod literal;
pub mod template;
pub mod tokenizer;

pub use template::{ChatTemplate, Message, TemplateError};
pub use tokenizer::{Tokenizer, TokenizerError};

use std::fs::File;
use std::io::{Error, ErrorKind, Read, Result};
use std::path::Path;

use tokenizer::limits::MAX_FILE_BYTES;

/// Reads a file of the model directory; `None` if there is no such file. A file of more than
/// [`MAX_FILE_BYTES`] is an error of kind [`ErrorKind::FileTooLarge`].
fn read_optional(path: &Path) -> Result<Option<Vec<u8>>> {
    // asked before opening: opening a pipe would block
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_file() => {}
        Ok(_) => return Err(Error::new(ErrorKind::InvalidInput, "not a regular file")),
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    }
    let mut bytes = Vec::new();
    File::open(path)?
        .take(MAX_FILE_BYTES + 1)
        .read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        let reason = format!("the file has more than {MAX_FILE_BYTES} bytes");
        return Err(Error::new(ErrorKind::FileTooLarge, reason));
    }
    Ok(Some(bytes))
}

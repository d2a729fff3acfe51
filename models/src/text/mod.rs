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

/// Reads a file of the model directory; `None` if there is no such file.
///
/// # Errors
/// As [`read_regular`].
pub(crate) fn read_optional(path: &Path) -> Result<Option<Vec<u8>>> {
    match read_regular(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        read => read.map(Some),
    }
}

/// Reads a file of the model directory.
///
/// # Errors
/// [`ErrorKind::InvalidInput`] if it is a pipe or a device, [`ErrorKind::FileTooLarge`] above [`MAX_FILE_BYTES`], or what
/// the operating system said.
pub(crate) fn read_regular(path: &Path) -> Result<Vec<u8>> {
    // asked before opening: opening a pipe would block
    if !std::fs::metadata(path)?.is_file() {
        return Err(Error::new(ErrorKind::InvalidInput, "not a regular file"));
    }
    let mut bytes = Vec::new();
    File::open(path)?
        .take(MAX_FILE_BYTES + 1)
        .read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        let reason = format!("the file has more than {MAX_FILE_BYTES} bytes");
        return Err(Error::new(ErrorKind::FileTooLarge, reason));
    }
    Ok(bytes)
}

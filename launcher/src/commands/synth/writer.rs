//! Writer of the files of a model directory and of its samples.

use crate::lang::both;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::error::{ErrorCode, Failure};

/// Writer of files into one directory. It records the BLAKE3 hash of each.
#[derive(Debug)]
pub(crate) struct FileWriter<'a> {
    directory: &'a Path,
    /// Text appended to each JSON file.
    json_end: &'static str,
    /// Hash of every written file by its path in the directory.
    pub(crate) hashes: BTreeMap<String, String>,
}

/// Path of a file or directory that could not be written, and the error.
#[derive(Debug)]
pub(crate) struct WriteError {
    path: PathBuf,
    pub(crate) error: io::Error,
}

impl From<WriteError> for Failure {
    fn from(failed: WriteError) -> Self {
        Self::io(
            ErrorCode::Disk,
            both("write", "写入"),
            &failed.path,
            &failed.error,
        )
    }
}

impl<'a> FileWriter<'a> {
    /// Writer into `directory`. JSON files end with `json_end`.
    pub(crate) fn new(directory: &'a Path, json_end: &'static str) -> Self {
        Self {
            directory,
            json_end,
            hashes: BTreeMap::new(),
        }
    }

    /// Creates the directory `name` inside the writer's directory. It is no error if it exists.
    pub(crate) fn create_directory(&self, name: &str) -> Result<(), WriteError> {
        let path = self.directory.join(name);
        fs::create_dir_all(&path).map_err(|error| WriteError { path, error })
    }

    /// Writes `bytes` as the file `name` in the writer's directory, and records their hash. An existing file is
    /// replaced.
    pub(crate) fn put(&mut self, name: &str, bytes: &[u8]) -> Result<(), WriteError> {
        let path = self.directory.join(name);
        fs::write(&path, bytes).map_err(|error| WriteError { path, error })?;
        let hash = blake3::hash(bytes).to_string();
        self.hashes.insert(name.to_owned(), hash);
        Ok(())
    }

    /// Writes `value` as indented JSON, followed by `json_end`, into the file `name`, and records its hash.
    pub(crate) fn put_json(&mut self, name: &str, value: &Value) -> Result<(), WriteError> {
        let text = format!("{value:#}{}", self.json_end);
        self.put(name, text.as_bytes())
    }

    /// Writes the images of samples into the new directory `directory`, in the order of the samples.
    pub(crate) fn put_images<I: AsRef<[u8]>>(
        &mut self,
        directory: &str,
        images: impl IntoIterator<Item = I>,
    ) -> Result<(), WriteError> {
        self.create_directory(directory)?;
        for (index, image) in images.into_iter().enumerate() {
            self.put(&image_path(directory, index), image.as_ref())?;
        }
        Ok(())
    }
}

/// Path of the image of sample `index`.
fn image_path(directory: &str, index: usize) -> String {
    format!("{directory}/{index:04}.png")
}

/// A sample in MiniCPM's format: the image that [`FileWriter::put_images`] wrote for it, a question and its answer.
pub(crate) fn sample(images: &str, index: usize, question: &str, answer: &str) -> Value {
    json!({
        "id": index.to_string(),
        "image": image_path(images, index),
        "conversations": [
            { "role": "user", "content": format!("<image>\n{question}") },
            { "role": "assistant", "content": answer },
        ],
    })
}

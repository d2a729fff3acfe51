//! JSON Lines files that grow with a run.

use crate::lang::both;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::error::{ErrorCode, Failure};

/// JSON Lines file (one JSON value per line), open for appending.
#[derive(Debug)]
pub(super) struct JsonLines {
    path: PathBuf,
    file: File,
}

impl JsonLines {
    /// Opens a file. Drops the rows that `keep` refuses and rows cut off by a crash. Returns the remaining rows.
    ///
    /// # Errors
    /// When the file cannot be read or written.
    pub(super) fn open(
        path: PathBuf,
        keep: impl Fn(&Value) -> bool,
    ) -> Result<(Self, Vec<Value>), Failure> {
        let fail = |error: std::io::Error| {
            Failure::io(ErrorCode::Disk, both("write", "写入"), &path, &error)
        };
        let old = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
            Err(error) => return Err(fail(error)),
        };
        let mut kept = String::new();
        let mut rows = Vec::new();
        for line in old.lines() {
            if let Some(row) = serde_json::from_str(line).ok().filter(&keep) {
                kept += line;
                kept.push('\n');
                rows.push(row);
            }
        }
        if kept.len() != old.len() {
            super::write_whole(&path, kept.as_bytes())?;
        }
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .map_err(fail)?;
        Ok((Self { path, file }, rows))
    }

    /// Appends a row in one write, so readers see whole rows.
    ///
    /// # Errors
    /// When the file cannot be written (exit 16).
    pub(super) fn append(&mut self, row: &Value) -> Result<(), Failure> {
        let line = format!("{row}\n");
        self.file.write_all(line.as_bytes()).map_err(|error| {
            Failure::io(ErrorCode::Disk, both("write", "写入"), &self.path, &error)
        })
    }
}

/// Complete rows of a JSON Lines file. Empty if it cannot be read.
pub(super) fn read(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines()
        .filter_map(|line| serde_json::from_str(line).ok())
        .collect()
}

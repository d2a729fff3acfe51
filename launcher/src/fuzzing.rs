//! Parsers of untrusted files as functions of their bytes, for fuzzers and tests. Not part of the interface.

use crate::error::Failure;
use crate::launch::hostfile::{self, Host};
use std::path::Path;

/// Parses and checks the bytes of a configuration file: a file of flags, a trainer's YAML, or DeepSpeed's
/// JSON. `ending` is the file extension, which selects the language (TOML, YAML or JSON).
///
/// # Errors
/// The file is malformed, or one of its settings is unknown or cannot be used (exit 2).
pub fn config(bytes: &[u8], ending: &str) -> Result<(), Failure> {
    crate::cli::file::go_through_bytes(bytes, ending)
}

/// Parses the bytes of a hostfile into its machines, in file order.
///
/// # Errors
/// A line is malformed, no machine is named, or the file is too long or not UTF-8 (exit 2).
pub fn hostfile(bytes: &[u8]) -> Result<Vec<Host>, Failure> {
    hostfile::parse_bytes(bytes, Path::new("hostfile"))
}

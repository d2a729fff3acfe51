//! Readers of what others wrote, as functions of its bytes: for fuzzers and tests, no part of the interface.

use crate::error::Failure;
use crate::launch::hostfile::{self, Host};
use std::path::Path;

/// Goes through a configuration file in the language that `ending` names, flags or DeepSpeed's.
///
/// # Errors
/// It has mistakes.
pub fn config(bytes: &[u8], ending: &str) -> Result<(), Failure> {
    crate::cli::file::go_through_bytes(bytes, ending)
}

/// Reads a hostfile.
///
/// # Errors
/// It has mistakes.
pub fn hostfile(bytes: &[u8]) -> Result<Vec<Host>, Failure> {
    hostfile::parse_bytes(bytes, Path::new("hostfile"))
}

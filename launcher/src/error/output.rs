//! Printing of results on standard output.

use super::{ErrorCode, Failure};
use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;

/// Prints the result `text` on standard output. A closed pipe is not a failure: the reader has seen enough.
///
/// # Errors
/// The text is lost, e.g. because the disk of a file is full (exit 16).
pub(crate) fn print(text: &str) -> Result<ExitCode, Failure> {
    let mut stdout = io::stdout().lock();
    match stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
    {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(Failure::new(
            ErrorCode::Disk,
            "cannot write to standard output",
            error.to_string(),
        )
        .next("check the target of standard output: its disk may be full")),
        _ => Ok(ExitCode::SUCCESS),
    }
}

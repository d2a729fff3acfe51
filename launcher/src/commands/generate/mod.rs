//! Answers of a model: for held-out samples during training, and for the subcommands `generate` and `eval`.

pub(crate) mod ask;
pub(crate) mod evaluate;
mod model;

use crate::error::{ErrorCode, Failure};
use std::io::{self, Write};
use std::process::ExitCode;

/// Prints the result on standard output. A closed pipe is not a failure: the reader has seen enough.
fn print(text: &str) -> Result<ExitCode, Failure> {
    let mut stdout = io::stdout().lock();
    match stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
    {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(Failure::new(
            ErrorCode::Disk,
            "cannot write to standard output",
            error.to_string(),
        )
        .next("check the target of standard output: its disk may be full")),
        _ => Ok(ExitCode::SUCCESS),
    }
}

/// Prints a note on standard error.
fn note(line: &str) {
    // If standard error is closed, nobody reads it.
    drop(writeln!(io::stderr(), " {line}"));
}

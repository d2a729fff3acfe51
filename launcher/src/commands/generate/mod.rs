//! Answers of a model: those of held-out samples, and the verbs `generate` and `eval`.

pub(crate) mod ask;
pub(crate) mod evaluate;
mod model;

use crate::error::{ErrorCode, Failure};
use std::io::{self, Write};
use std::process::ExitCode;

/// The result on standard output. A reader that has seen enough is no error.
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

/// A line for people, beside the result.
fn note(line: &str) {
    // Nobody reads it where standard error is closed.
    drop(writeln!(io::stderr(), " {line}"));
}

//! Printing of results on standard output.

use super::{ErrorCode, Failure};
use crate::lang::{Lang, Text, both};
use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;

/// Prints the result `text` in the language of the process on standard output.
///
/// # Errors
/// As [`print`].
pub(crate) fn say(text: &Text) -> Result<ExitCode, Failure> {
    print(text.get(Lang::chosen()))
}

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
            both("cannot write to standard output", "无法写入标准输出"),
            Text::literal(&error),
        )
        .next(both(
            "check the target of standard output: its disk may be full",
            "请检查标准输出的目标：所在磁盘可能已满",
        ))),
        _ => Ok(ExitCode::SUCCESS),
    }
}

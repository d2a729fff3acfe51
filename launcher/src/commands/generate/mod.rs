//! Answers of a model: for held-out samples during training, and for the subcommands `generate` and `eval`.

pub(crate) mod ask;
pub(crate) mod evaluate;
mod model;
pub(crate) mod ranks;

use crate::lang::Lang;
use std::fmt::Display;
use std::io::{self, Write};

/// Prints a note on standard error, in the language of the process.
fn note(line: impl Display) {
    // If standard error is closed, nobody reads it.
    Lang::chosen().speak(|| drop(writeln!(io::stderr(), " {line}")));
}

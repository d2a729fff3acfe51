//! Answers of a model: for held-out samples during training, and for the subcommands `generate` and `eval`.

pub(crate) mod ask;
pub(crate) mod evaluate;
mod model;

use std::io::{self, Write};

/// Prints a note on standard error.
fn note(line: &str) {
    // If standard error is closed, nobody reads it.
    drop(writeln!(io::stderr(), " {line}"));
}

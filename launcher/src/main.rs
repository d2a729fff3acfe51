//! The `launcher` binary.

use std::process::ExitCode;

use launcher::exit::Failure;

fn main() -> ExitCode {
    launcher::run_with(|_, _, _| {
        Err(Failure::usage(
            "this build has no trainer",
            "the training loop joins in the next change",
        ))
    })
}

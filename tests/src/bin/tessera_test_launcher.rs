//! The launcher as an executable that the suites of this package start.

use std::process::ExitCode;

fn main() -> ExitCode {
    launcher::run()
}

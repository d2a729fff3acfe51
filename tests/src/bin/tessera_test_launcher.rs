//! The launcher, as an executable that the test suites of this package can start.

use std::process::ExitCode;

fn main() -> ExitCode {
    launcher::run()
}

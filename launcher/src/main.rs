//! The `launcher` binary.

fn main() -> std::process::ExitCode {
    launcher::run()
}

//! Prints the table of flags: `cargo run -p launcher --example flags > docs/flags.md`.

use std::io::Write;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    std::io::stdout().write_all(launcher::args::flag_table()?.as_bytes())?;
    Ok(())
}

//! The generated pages of docs/: `cargo run -p launcher --example docs` prints them, `-- write` writes them.

use std::error::Error;
use std::io::Write;
use std::path::Path;

use launcher::cli::flag_table;
use launcher::commands::explain::errors_page;

fn main() -> Result<(), Box<dyn Error>> {
    let pages = [("flags.md", flag_table()?), ("errors.md", errors_page())];
    let write = std::env::args().nth(1).as_deref() == Some("write");
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
    for (name, text) in pages {
        if write {
            std::fs::write(docs.join(name), text)?;
        } else {
            std::io::stdout().write_all(text.as_bytes())?;
        }
    }
    Ok(())
}

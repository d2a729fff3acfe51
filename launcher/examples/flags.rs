//! The tables of flags: `cargo run -p launcher --example flags` prints them, `-- write` puts them into `docs/flags.md` and
//! the READMEs.

use std::error::Error;
use std::io::Write;
use std::path::Path;

use launcher::args::{flag_table, with_flags};

fn main() -> Result<(), Box<dyn Error>> {
    let table = flag_table()?;
    if std::env::args().nth(1).as_deref() != Some("write") {
        std::io::stdout().write_all(table.as_bytes())?;
        return Ok(());
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    std::fs::write(root.join("docs/flags.md"), &table)?;
    for name in ["README.md", "README.zh.md"] {
        let path = root.join(name);
        let text = std::fs::read_to_string(&path)?;
        let text = with_flags(&text, &table).ok_or(format!("{name} has no marks for the flags"))?;
        std::fs::write(path, text)?;
    }
    Ok(())
}

//! Draws the held-out images of the demo into `launcher/demo/heldout/`.

use std::path::Path;

fn main() -> std::io::Result<()> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("demo/heldout");
    launcher::commands::demo::draw_held_out(&directory)
}

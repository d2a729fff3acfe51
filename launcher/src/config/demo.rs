//! Where the built-in demo has its files.

use std::path::{Path, PathBuf};

/// Folder of the model inside the demo's folder.
pub const MODEL_DIR: &str = "model";
/// Training samples inside the demo's folder.
pub const TRAIN_FILE: &str = "train.json";
/// Held-out samples inside the demo's folder.
pub const HELD_OUT_FILE: &str = "heldout.json";

/// Changes whenever a file of the demo changes.
const VERSION: u32 = 1;

/// The demo's folder in a cache folder.
pub fn folder_in(cache_dir: &Path) -> PathBuf {
    cache_dir.join(format!("demo-{VERSION}"))
}

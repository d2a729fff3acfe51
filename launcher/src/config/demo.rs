//! Paths of the built-in demo's files.

use std::path::{Path, PathBuf};

/// Directory of the model inside the demo's directory.
pub const MODEL_DIR: &str = "model";
/// Training samples inside the demo's directory.
pub const TRAIN_FILE: &str = "train.json";
/// Held-out samples inside the demo's directory.
pub const HELD_OUT_FILE: &str = "heldout.json";

/// Version of the demo's files. Increase it whenever one of them changes.
const VERSION: u32 = 1;

/// The demo's directory inside the cache directory `cache_dir`.
pub fn directory_in(cache_dir: &Path) -> PathBuf {
    cache_dir.join(format!("demo-{VERSION}"))
}

//! Paths of the built-in demo's files.

use std::path::{Path, PathBuf};

/// Name of the model's directory inside the directory of the built-in demo.
pub const MODEL_DIR: &str = "model";
/// Name of the file of training samples inside the directory of the built-in demo.
pub const TRAIN_FILE: &str = "train.json";
/// Name of the file of held-out samples inside the directory of the built-in demo.
pub const HELD_OUT_FILE: &str = "heldout.json";

/// Version of the demo's files. Increase it whenever one of them changes.
const VERSION: u32 = 1;

/// Path of the directory for the built-in demo's generated files, inside the cache directory `cache_dir`.
pub fn directory_in(cache_dir: &Path) -> PathBuf {
    cache_dir.join(format!("demo-{VERSION}"))
}

//! The built-in demo: a tiny model with the architecture of MiniCPM-V, images of colored shapes, one question.
//!
//! The answer, one of eight colors, can only be read from the image. Everything is generated from a fixed seed.
//! Training images are generated into a cache directory at first use. The held-out images are in the repository and
//! embedded in the executable.

mod cache;
mod dataset;
mod held_out;
pub(crate) mod model_files;
mod picture;
pub(crate) mod png;
mod rng;
pub(crate) mod tokenizer;

use std::path::{Path, PathBuf};

use crate::config::{RunConfig, Source};
use crate::exit::Failure;
use crate::rank_env::Env;
use crate::ui::Event;

pub use dataset::{HELD_OUT_SAMPLES, TRAIN_SAMPLES};

/// Model directory inside the demo's directory.
pub const MODEL_DIR: &str = "model";
/// File of training samples inside the demo's directory.
pub const TRAIN_FILE: &str = "train.json";
/// File of held-out samples inside the demo's directory.
pub const HELD_OUT_FILE: &str = "heldout.json";

/// Version of the demo. It changes whenever a file of the demo changes.
const VERSION: u32 = 1;

/// The demo's directory inside a cache directory.
pub fn folder_in(cache_dir: &Path) -> PathBuf {
    cache_dir.join(format!("demo-{VERSION}"))
}

/// Generates the demo's files unless they are complete. Does nothing for other data sources. If the cache directory
/// cannot be written, the directory for temporary files is used instead.
///
/// # Errors
/// When neither directory can be written (exit 16 if the disk is full).
pub fn prepare(
    config: &mut RunConfig,
    env: &Env,
    show: &mut dyn FnMut(Event),
) -> Result<(), Failure> {
    let Source::Demo { folder } = &mut config.source else {
        return Ok(());
    };
    match cache::ensure(folder, show) {
        Ok(()) => Ok(()),
        Err(first) => {
            // Differs from the cache directory, and contains the user id in its name.
            let user = rustix::process::getuid().as_raw();
            *folder = folder_in(&env.temp_dir.join(format!("tessera-cache-{user}")));
            cache::ensure(folder, show).map_err(|_| first)
        }
    }
}

/// Generates the demo's files in `folder`, unless they are complete.
///
/// # Errors
/// When the directory cannot be written (exit 16).
pub fn make(folder: &Path) -> Result<(), Failure> {
    cache::ensure(folder, &mut |_| ())
}

/// Generates the held-out images in `folder`: the files that the repository contains.
///
/// # Errors
/// When a file cannot be written.
pub fn draw_held_out(folder: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(folder)?;
    for sample in dataset::held_out() {
        std::fs::write(folder.join(sample.file_name()), sample.png())?;
    }
    Ok(())
}

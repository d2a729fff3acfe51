//! The built-in demo: a tiny MiniCPM-V-shaped model, pictures of coloured shapes, one question.
//!
//! The answer, one of eight colours, can only be read from the picture. Everything is drawn from
//! a fixed seed: training pictures into a cache folder at first use; the held-out pictures lie in
//! the repository and are part of the executable.

mod cache;
mod dataset;
mod held_out;
pub(crate) mod model_files;
mod picture;
pub(crate) mod png;
mod rng;
pub(crate) mod tokenizer;

use crate::config::demo::folder_in;
use std::path::Path;

use crate::config::{RunConfig, Source};
use crate::error::Failure;
use crate::rank_env::Env;
use crate::ui::Event;

pub use dataset::{HELD_OUT_SAMPLES, TRAIN_SAMPLES};

/// Makes the demo's files unless they are there and whole; does nothing for other sources. Where the cache directory cannot
/// be written, the directory for temporary files takes its place in the configuration that comes back.
///
/// # Errors
/// Neither directory can be written (exit 16 where the disk is full).
pub fn prepare(
    config: RunConfig,
    env: &Env,
    show: &mut dyn FnMut(Event),
) -> Result<RunConfig, Failure> {
    let Source::Demo { folder } = &config.source else {
        return Ok(config);
    };
    let Err(first) = cache::ensure(folder, show) else {
        return Ok(config);
    };
    // Distinct from the cache folder's own place, and private to the user by its name.
    let user = rustix::process::getuid().as_raw();
    let folder = folder_in(&env.temp_dir.join(format!("tessera-cache-{user}")));
    cache::ensure(&folder, show).map_err(|_| first)?;
    Ok(RunConfig {
        source: Source::Demo { folder },
        ..config
    })
}

/// Makes the demo's files in `folder`, unless they are there and whole.
///
/// # Errors
/// The folder cannot be written (exit 16).
pub fn make(folder: &Path) -> Result<(), Failure> {
    cache::ensure(folder, &mut |_| ())
}

/// Draws the held-out pictures into `folder`: the files that the repository holds.
///
/// # Errors
/// A file cannot be written.
pub fn draw_held_out(folder: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(folder)?;
    for sample in dataset::held_out() {
        std::fs::write(folder.join(sample.file_name()), sample.png())?;
    }
    Ok(())
}

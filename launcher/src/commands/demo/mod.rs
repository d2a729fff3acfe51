//! The built-in demo: a tiny model with the architecture of MiniCPM-V, images of colored shapes, one question.
//!
//! The answer, one of eight colors, can only be read from the image. Everything is generated from a fixed seed.
//! Training images are generated into a cache directory at first use. The held-out images are in the repository and
//! embedded in the executable.

mod cache;
mod dataset;
mod held_out;
mod image;
mod model_files;
mod rng;
mod tokenizer;

use std::path::Path;

use crate::commands::synth::writer::FileWriter;
use crate::config::demo::directory_in;
use crate::config::{RunConfig, Source};
use crate::error::Failure;
use crate::rank_env::Env;
use crate::ui::Event;

pub use dataset::{HELD_OUT_SAMPLES, TRAIN_SAMPLES};

/// Generates the demo's model and data files if they are missing or damaged, and returns `config`. A `config`
/// that is not for the demo is returned unchanged, and nothing is generated. If the cache directory cannot be
/// written, the files go to the directory for temporary files, and the returned configuration names that
/// directory. Messages for the user go to `show`.
///
/// # Errors
/// When neither directory can be written (exit 16 if the disk is full).
pub fn prepare(
    config: RunConfig,
    env: &Env,
    show: &mut dyn FnMut(Event),
) -> Result<RunConfig, Failure> {
    let Source::Demo { directory } = &config.source else {
        return Ok(config);
    };
    let Err(first) = cache::ensure(directory, show) else {
        return Ok(config);
    };
    // Differs from the cache directory, and contains the user id in its name.
    let user = rustix::process::getuid().as_raw();
    let directory = directory_in(&env.temp_dir.join(format!("tessera-cache-{user}")));
    cache::ensure(&directory, show).map_err(|_| first)?;
    Ok(RunConfig {
        source: Source::Demo { directory },
        ..config
    })
}

/// Generates the demo's files in `directory`, unless they are complete.
///
/// # Errors
/// When the directory cannot be written (exit 16).
pub fn make(directory: &Path) -> Result<(), Failure> {
    cache::ensure(directory, &mut |_| ())
}

/// Writes the held-out images of the demo into `directory`, as PNG files. The repository contains the same
/// files.
///
/// # Errors
/// When a file cannot be written.
pub fn draw_held_out(directory: &Path) -> std::io::Result<()> {
    let images = dataset::held_out().map(|sample| sample.png());
    let written = FileWriter::new(directory, "").put_images(".", images);
    written.map_err(|failed| failed.error)
}

//! The command line of `launcher synth`.

use std::path::PathBuf;

use clap::Parser;

/// What the user typed after `launcher synth`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Parser)]
#[command(
    name = "launcher synth",
    version,
    about = "Writes a model directory with random weights, at the sizes of a config.json",
    max_term_width = 100
)]
pub struct SynthArgs {
    /// A config.json, its directory, or a published model's name, such as minicpm-v-2_6
    #[arg(long, value_name = "CONFIG|DIR|NAME")]
    pub model_config: Option<PathBuf>,
    /// Directory to write; it must not exist or must be empty
    #[arg(long, value_name = "DIR")]
    pub output: Option<PathBuf>,
    /// Seed of the weights; 0 by default
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Write weight files, or generate the same weights when they are read (seeded)
    ///
    /// seeded stores the seed in model.seeded.json.
    #[arg(long, value_enum, value_name = "files|seeded")]
    pub weights: Option<SynthWeights>,
    /// Number of weight files; 4 by default
    ///
    /// Fewer where one tensor is larger than its share.
    #[arg(long, value_name = "N")]
    pub shards: Option<usize>,
    /// Also write samples.json with this many samples, one image each
    #[arg(long, value_name = "N")]
    pub samples: Option<usize>,
    /// Length of these samples in tokens, image tokens included; 512 by default
    #[arg(long, value_name = "N")]
    pub sample_tokens: Option<usize>,
    /// Side of their square images in pixels; by default one slice or the tower's size
    #[arg(long = "image-size", value_name = "N")]
    pub image_side: Option<usize>,
}

/// Where `launcher synth` puts the random weights of the model that it writes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum SynthWeights {
    /// In safetensors files.
    #[default]
    Files,
    /// Nowhere: made when they are read.
    Seeded,
}

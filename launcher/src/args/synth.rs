//! The command line of `launcher synth`.

use std::path::PathBuf;

use clap::Parser;

/// What the user typed after `launcher synth`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Parser)]
#[command(
    name = "launcher synth",
    version,
    about = "Writes a model folder with random weights at the sizes of a config.json",
    max_term_width = 100
)]
pub struct SynthArgs {
    /// A config.json, a folder that has one, or the name of a published model, such as minicpm-v-2_6
    #[arg(long, value_name = "CONFIG|DIR|NAME")]
    pub model_config: Option<PathBuf>,
    /// Folder to write; it must not exist or be empty
    #[arg(long, value_name = "DIR")]
    pub output: Option<PathBuf>,
    /// Seed of the weights; 0 by default
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Where the weights are: in files, or made whenever they are read, from the seed in model.seeded.json; the same values
    #[arg(long, value_enum, value_name = "files|seeded")]
    pub weights: Option<SynthWeights>,
    /// Files of about equal size to spread the weights over; 4 by default, fewer where one tensor is larger than its share
    #[arg(long, value_name = "N")]
    pub shards: Option<usize>,
    /// Also write samples.json: this many samples with a picture each
    #[arg(long, value_name = "N")]
    pub samples: Option<usize>,
    /// Length of these samples in tokens, the picture's included; 512 by default
    #[arg(long, value_name = "N")]
    pub sample_tokens: Option<usize>,
    /// Side of their square pictures in pixels; by default that of one slice, or the tower's own
    #[arg(long, value_name = "N")]
    pub picture_side: Option<usize>,
}

/// Where the weights of a synthetic model are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum SynthWeights {
    /// In safetensors files.
    #[default]
    Files,
    /// Nowhere: made when they are read.
    Seeded,
}

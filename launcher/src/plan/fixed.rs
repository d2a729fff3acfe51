//! What a rank occupies beside its pools: the process itself, its samples, and buffers of a moment.

use super::dry_run::Work;
use crate::config::{Device, RunConfig, Workers};
use crate::data::LoaderOptions;
use crate::memory::Phase;
use models::data::EncodedSample;
use std::path::Path;

/// Room of a rank's region of the window for small messages and for alignment.
pub(crate) const WINDOW_SLACK_BYTES: u64 = 16 << 20;
/// The program's pages, its allocator, stacks of its threads and its logs, as measured.
const PROCESS_BYTES: u64 = 26 << 20;
/// Memory of a tokenizer for a byte of its files, as measured with a vocabulary of 150,000 tokens.
const TOKENIZER_FACTOR: u64 = 10;
/// Bytes of a tokenizer's files per token of the vocabulary, where there are no files.
const TOKENIZER_BYTES_PER_TOKEN: u64 = 48;
/// Memory of raw samples for a byte of their file, as measured with short conversations.
const SAMPLES_FACTOR: u64 = 3;
/// Elements of a weight that are read or written at once, in f32 and in the dtype of the file.
const CHUNK_BYTES: u64 = (1 << 20) * (4 + 2);
/// An image while it is cut: as it was decoded, as it was scaled, and the patches.
const IMAGE_COPIES: u64 = 3;

/// Bytes of a rank's process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Fixed {
    /// The program and its tokenizer.
    process: u64,
    /// Samples of the data files as read.
    samples: u64,
}

impl Fixed {
    /// For the model directory `dir` and the data files `data`.
    pub(crate) fn of(dir: &Path, vocabulary: u64, data: &[&Path]) -> Self {
        let size = |path: &Path| std::fs::metadata(path).map_or(0, |m| m.len());
        let files = ["tokenizer.json", "tokenizer.model"].map(|name| size(&dir.join(name)));
        let files = match files.iter().sum() {
            0 => vocabulary * TOKENIZER_BYTES_PER_TOKEN,
            found => found,
        };
        Self {
            process: PROCESS_BYTES + files * TOKENIZER_FACTOR,
            samples: data.iter().map(|path| size(path)).sum::<u64>() * SAMPLES_FACTOR,
        }
    }

    /// By kind, in one phase.
    pub(super) fn in_phase(
        &self,
        phase: Phase,
        config: &RunConfig,
        work: &Work<'_>,
    ) -> Vec<(&'static str, u64)> {
        let mut parts = vec![("process", self.process), ("samples", self.samples)];
        if config.device == Device::Cuda {
            parts.push(("driver", kernels::footprint::HOST_BYTES));
        }
        match phase {
            Phase::Load | Phase::Save => parts.push(("workspace", CHUNK_BYTES)),
            Phase::Data | Phase::Forward | Phase::Backward | Phase::Step => {}
            Phase::Eval => {
                let held_out = work.held_out.as_ref();
                let longest = held_out.map_or(0, |h| sample_bytes(h.longest));
                parts.push(("loader", longest * (1 + IMAGE_COPIES)));
            }
        }
        if phase != Phase::Load {
            parts.push(("loader", loader_bytes(config, work.train)));
        }
        parts
    }
}

/// Encoded samples of the batches that loader threads prepare ahead, and images in their hands.
fn loader_bytes(config: &RunConfig, micro_batch: &[EncodedSample]) -> u64 {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let options = match config.batch.data_workers {
        Workers::Auto => LoaderOptions::for_node(cores, config.ranks_here()),
        Workers::Count(threads) => LoaderOptions {
            threads,
            ahead: 2 * threads,
        },
    };
    // One batch is being trained on, each thread has one that found no room.
    let batches = (options.ahead + options.threads + 1) as u64;
    let largest = micro_batch
        .iter()
        .map(|s| sample_bytes(std::slice::from_ref(s)));
    let in_hand = largest.max().unwrap_or(0) * IMAGE_COPIES * options.threads.max(1) as u64;
    batches * sample_bytes(micro_batch) + in_hand
}

fn sample_bytes(samples: &[EncodedSample]) -> u64 {
    let of = |sample: &EncodedSample| {
        let image_count: usize = sample.slices.iter().map(|slice| slice.patches.len()).sum();
        (image_count + 8 * sample.input_ids.len()) as u64
    };
    samples.iter().map(of).sum()
}

//! Memory of a rank outside the pools: the process, its samples and short-lived buffers.

use super::dry_run::Work;
use crate::config::{Device, RunConfig, Workers};
use crate::data::LoaderOptions;
use crate::data::images::decode_share;
use crate::memory::{Part, Phase};
use engine::comm::cores_at_start;
use models::data::EncodedSample;
use std::path::Path;

/// Bytes added to a rank's region of the window, for small messages and alignment.
pub(crate) const WINDOW_SLACK_BYTES: u64 = 16 << 20;
/// Measured size of the program's pages, allocator, thread stacks and logs.
const PROCESS_BYTES: u64 = 26 << 20;
/// Measured memory per byte of tokenizer files, with a vocabulary of 150,000 tokens.
const TOKENIZER_FACTOR: u64 = 10;
/// Assumed bytes of tokenizer files per token of the vocabulary if the files are missing.
const TOKENIZER_BYTES_PER_TOKEN: u64 = 48;
/// Measured memory per byte of a sample file, with short conversations.
const SAMPLES_FACTOR: u64 = 3;
/// Buffer for weights that are read or written: 2^20 elements in f32 and in the 16-bit dtype of the file.
const CHUNK_BYTES: u64 = (1 << 20) * (4 + 2);
/// Copies of an image while it is sliced: scaled, and in patches.
const IMAGE_COPIES: u64 = 2;
/// Bytes for decoding an image if the images are not known: a photo of 24 megapixels in 8-bit RGB, and a tenth for its
/// file and the decoder's tables.
const PHOTO_BYTES: u64 = 24_000_000 * 3 * 11 / 10;
/// Kind of the memory that images take while they are decoded.
const IMAGE_DECODING: &str = "image decoding";
/// The memory that images take while they are decoded. Reports do not measure it.
pub(crate) const DECODING: Part = Part::of(IMAGE_DECODING, &[IMAGE_DECODING]);

/// Memory of a rank's process outside the memory pools that does not depend on the phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Fixed {
    /// Bytes of the program and its tokenizer.
    process: u64,
    /// Bytes of the samples read from the data files.
    samples: u64,
    /// Most bytes that the decoding of one image takes.
    image: u64,
}

impl Fixed {
    /// Memory of a run with the model directory `dir` and the data files `data`. `image_bytes` is the most that the
    /// decoding of one image takes, if the images are known.
    pub(crate) fn of(
        dir: &Path,
        vocabulary: u64,
        data: &[&Path],
        image_bytes: Option<u64>,
    ) -> Self {
        let size = |path: &Path| std::fs::metadata(path).map_or(0, |m| m.len());
        let files = ["tokenizer.json", "tokenizer.model"]
            .map(|name| size(&models::places::tokenizer(dir).join(name)));
        let files = match files.iter().sum() {
            0 => vocabulary * TOKENIZER_BYTES_PER_TOKEN,
            found => found,
        };
        Self {
            process: PROCESS_BYTES + files * TOKENIZER_FACTOR,
            samples: data.iter().map(|path| size(path)).sum::<u64>() * SAMPLES_FACTOR,
            image: image_bytes.unwrap_or(PHOTO_BYTES),
        }
    }

    /// Host bytes outside the memory pools in `phase`, as (kind, bytes).
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
        let threads = loader_options(config).threads.max(1) as u64;
        if phase != Phase::Load {
            parts.push(("loader", loader_bytes(config, work.train)));
            // An evaluation decodes in the training thread.
            let readers = threads + u64::from(work.held_out.is_some());
            parts.push((IMAGE_DECODING, self.decoding(config, readers)));
        } else if config.batch.skip_bad_samples {
            // Each rank checks all images, on all its cores.
            let cores = (cores_at_start() / config.ranks_here().max(1)).max(1);
            parts.push((IMAGE_DECODING, self.decoding(config, cores as u64)));
        }
        parts
    }

    /// Most bytes that `readers` of images hold together: they share a budget, which one larger image may exceed.
    fn decoding(&self, config: &RunConfig, readers: u64) -> u64 {
        let share = decode_share(config).max(self.image);
        self.image.saturating_mul(readers).min(share)
    }
}

/// Number of loader threads, and of the batches that they prepare ahead.
fn loader_options(config: &RunConfig) -> LoaderOptions {
    match config.batch.data_workers {
        Workers::Auto => LoaderOptions::for_node(cores_at_start(), config.ranks_here()),
        Workers::Count(threads) => LoaderOptions {
            threads,
            ahead: 2 * threads,
        },
    }
}

/// Bytes of the encoded samples that loader threads prepare ahead, and of the images they are processing.
fn loader_bytes(config: &RunConfig, micro_batch: &[EncodedSample]) -> u64 {
    let options = loader_options(config);
    // A pipeline stage holds the batches of an update, another rank the one in training.
    let in_training = match config.mp_size {
        1 => 1,
        _ => config.batch.accumulation_steps,
    };
    // Each thread also holds one while its queue is full.
    let batches = (options.ahead + options.threads + in_training) as u64;
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

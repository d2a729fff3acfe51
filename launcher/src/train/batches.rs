//! Micro-batches of one rank, encoded by threads ahead of the training loop.

use super::replica::Replica;
use crate::config::Workers;
use crate::data::check::encode_options;
use crate::data::{Loader, LoaderOptions, SampleSet, Sampler, missed};
use crate::error::threads::no_thread;
use crate::error::{ErrorCode, Failure, failures};
use crate::lang::{both, text};
use models::data::EncodedSample;
use std::ops::Range;
use std::sync::Arc;

/// Micro-batch of encoded samples, as a loader thread delivers it.
pub(crate) struct MicroBatch {
    /// Indices of the micro-batch's samples in the sample set.
    pub(crate) indices: Vec<usize>,
    pub(crate) samples: Vec<EncodedSample>,
    /// Position of each sample in the endless data stream: a unique key for each use of a sample.
    pub(crate) keys: Vec<u64>,
}

/// Starts threads that encode this rank's micro-batches of `steps` in the order of `sampler`.
pub(crate) fn start_loader(
    replica: &Replica<'_>,
    set: Arc<SampleSet>,
    sampler: Sampler,
    steps: Range<u64>,
) -> Result<Loader<MicroBatch, Failure>, Failure> {
    let (config, processor) = (replica.config, replica.processor.clone());
    let options = encode_options(config);
    let rank = replica.data().rank;
    let cores = engine::comm::cores_at_start();
    let mut ahead = LoaderOptions::for_node(cores, config.ranks_here());
    if let Workers::Count(threads) = config.batch.data_workers {
        ahead = LoaderOptions {
            threads,
            ahead: 2 * threads,
        };
    }
    let micro_steps = config.batch.accumulation_steps as u64;
    let loader = Loader::new(ahead, steps, micro_steps, move |step, micro| {
        let encode = |index: usize| {
            processor
                .encode(&set.samples[index], &set.images, &options)
                .map_err(|e| {
                    missed(Failure::new(
                        ErrorCode::DataFile,
                        text!(
                            "sample {index} cannot be read in step {}",
                            "在第 {} 步无法读取样本 {index}",
                            step + 1
                        ),
                        failures::chain(&e),
                    ))
                })
        };
        let indices = sampler.indices(step, micro, rank);
        let samples = indices.iter().copied().map(encode);
        Ok(MicroBatch {
            samples: samples.collect::<Result<_, _>>()?,
            keys: sampler.positions(step, micro, rank),
            indices,
        })
    });
    loader.map_err(|error| no_thread(both("read samples", "读取样本"), &error))
}

/// Failure for a loader that ended before the last step, which is a bug.
pub(crate) fn ended_early() -> Failure {
    Failure::new(
        ErrorCode::Panic,
        both("the data ended early", "数据提前结束"),
        both("the loader has no batch left", "加载器没有剩余的批次"),
    )
}

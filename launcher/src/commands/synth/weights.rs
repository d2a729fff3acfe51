//! Writer of a model's tensors into safetensors files with an index. It needs two small buffers of memory only.

use crate::lang::{Both, both};
use std::path::Path;

use engine::checkpoint::{CheckpointError, ShardedTensorWriter, TensorSpec};
use kernels::DType;
use models::VisionLanguageModel;
use models::init::{Init, rule};
use models::seeded::Generators;

use crate::error::{Failure, failures};

/// Elements per block: one block is generated while the previous one is written.
const BLOCK_ELEMS: usize = 1 << 22;
const DOING: Both = both("write the weights", "写入权重");

/// Names, shapes and initial distributions of the tensors to write, and the maximum size of each safetensors file.
#[derive(Debug)]
pub(super) struct Layout {
    tensors: Vec<TensorSpec>,
    inits: Vec<Init>,
    total_bytes: u64,
    shard_bytes: u64,
}

impl Layout {
    /// Lays out all parameters of `model` in bf16, in at most `shards` files whose largest is as small as whole
    /// tensors allow.
    ///
    /// # Errors
    /// When a tensor exceeds the address space.
    pub(super) fn new(model: &dyn VisionLanguageModel, shards: usize) -> Result<Self, Failure> {
        let params = &model.spec().params;
        let tensors: Vec<TensorSpec> = params
            .iter()
            .map(|param| TensorSpec {
                name: param.name.clone(),
                dtype: DType::BF16,
                shape: param.shape.dims().to_vec(),
            })
            .collect();
        let bytes: Result<Vec<u64>, CheckpointError> =
            tensors.iter().map(TensorSpec::bytes).collect();
        let bytes = bytes.map_err(|e| failures::checkpoint(DOING, &e))?;
        let start = |param| rule(param, model.start_values(param));
        Ok(Self {
            inits: params.iter().map(start).collect(),
            tensors,
            total_bytes: bytes.iter().sum(),
            shard_bytes: smallest_limit(&bytes, shards),
        })
    }

    pub(super) fn tensors(&self) -> usize {
        self.tensors.len()
    }

    pub(super) fn parameters(&self) -> u64 {
        self.total_bytes / DType::BF16.size_bytes() as u64
    }

    /// Sum of the sizes of all tensors in bytes, without file headers.
    pub(super) fn total_bytes(&self) -> u64 {
        self.total_bytes
    }

    /// Writes the files into `directory`. Returns the number of weight files.
    ///
    /// # Errors
    /// When the disk is full or fails.
    pub(super) fn write(&self, seed: u64, directory: &Path) -> Result<usize, Failure> {
        let failed = |e: CheckpointError| failures::checkpoint(DOING, &e);
        let metadata = [("format", "pt")];
        let mut file = ShardedTensorWriter::create(
            directory,
            "model",
            &self.tensors,
            &metadata,
            self.shard_bytes,
        )
        .map_err(failed)?;
        let (mut ready, mut next) = (Vec::new(), Vec::new());
        let mut owner = None;
        let mut generators = Generators::default();
        let mut flush = |owner: Option<&str>, block: &[u16]| match owner {
            Some(name) => file.write(name, bytemuck::cast_slice(block)),
            None => Ok(()),
        };
        for (tensor, init) in self.tensors.iter().zip(&self.inits) {
            let values = generators.of(seed, &tensor.name, *init);
            let elems: usize = tensor.shape.iter().product();
            for first in (0..elems).step_by(BLOCK_ELEMS) {
                next.resize(BLOCK_ELEMS.min(elems - first), 0u16);
                // One block is hashed and written while the next one is generated.
                let (written, ()) = rayon::join(
                    || flush(owner, &ready),
                    || values.fill(first as u64, &mut next),
                );
                written.map_err(failed)?;
                std::mem::swap(&mut ready, &mut next);
                owner = Some(&tensor.name);
            }
        }
        flush(owner, &ready).map_err(failed)?;
        let files = file.finish().map_err(failed)?;
        let weights = |name: &str| name.ends_with(".safetensors");
        Ok(files.iter().filter(|(name, _)| weights(name)).count())
    }
}

/// Smallest file size with which consecutive tensors fit in at most `shards` files.
fn smallest_limit(bytes: &[u64], shards: usize) -> u64 {
    let files = |limit: u64| {
        let mut count = 1;
        let mut used = 0;
        for &tensor in bytes {
            if used > 0 && used + tensor > limit {
                count += 1;
                used = 0;
            }
            used += tensor;
        }
        count
    };
    let (mut low, mut high) = (bytes.iter().copied().max().unwrap_or(0), bytes.iter().sum());
    while low < high {
        let middle = low + (high - low) / 2;
        if files(middle) <= shards {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    low
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weight_shards_are_as_equal_as_tensors_allow() {
        assert_eq!(smallest_limit(&[5, 5, 5, 5], 2), 10);
        assert_eq!(smallest_limit(&[5, 5, 5, 5], 4), 5);
        assert_eq!(smallest_limit(&[9, 1, 1, 1], 2), 9);
        assert_eq!(smallest_limit(&[1, 2, 3], 1), 6);
        assert_eq!(smallest_limit(&[1, 2, 3], 9), 3);
    }
}

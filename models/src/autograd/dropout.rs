//! Dropout masks of a training pass. A mask is a function of seed, layer, sample, row and column, not of the
//! batch. It is therefore the same for any world size and micro-batch size, and is never stored.

use crate::SampleInput;
use crate::error::Result;
use kernels::random::philox4x32;
use kernels::{Backend, DType, Shape, Tag, Tensor};

/// What the rows of an adapter's input are: tokens or patches. Dropout draws its mask per token or per patch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rows {
    /// Tokens of the batch.
    Tokens,
    /// Patches of the batch's images.
    Patches,
}

/// Dropout state of one training pass: the seed, and the sample keys and row indices from which masks are
/// drawn.
#[derive(Clone, Debug)]
pub struct Dropout {
    seed: u64,
    tokens: Tensor,
    patches: Tensor,
}

impl Dropout {
    /// Dropout state for one training pass over the batch of `samples`. `keys` has one key per sample, in the
    /// same order, which should differ between epochs.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn new(
        seed: u64,
        keys: &[u64],
        samples: &[SampleInput<'_>],
        backend: &dyn Backend,
    ) -> Result<Self> {
        let table = |count: &dyn Fn(&SampleInput<'_>) -> usize| -> Result<Tensor> {
            let words: Vec<i32> = samples
                .iter()
                .zip(keys)
                .flat_map(|(sample, key)| (0..count(sample)).map(move |row| (*key, row)))
                .flat_map(|(key, row)| [key as i32, row as i32])
                .collect();
            let bytes = bytemuck::cast_slice(&words);
            let shape = Shape::new(&[words.len() / 2, 2]);
            Ok(backend.upload(bytes, shape, DType::I32, Tag::Activations)?)
        };
        Ok(Self {
            seed,
            tokens: table(&|s| s.input_ids.len())?,
            patches: table(&|s| s.slices.iter().map(|s| s.rows * s.cols).sum())?,
        })
    }

    pub(crate) fn rows(&self, rows: Rows) -> &Tensor {
        match rows {
            Rows::Tokens => &self.tokens,
            Rows::Patches => &self.patches,
        }
    }

    /// The Philox key for the dropout mask of one adapter, from the seed and the number `layer` of the adapter's
    /// parameter.
    pub(crate) fn key(&self, layer: u32) -> [u32; 2] {
        let block = philox4x32(
            [layer, 0, 0, 0],
            [self.seed as u32, (self.seed >> 32) as u32],
        );
        [block[0], block[1]]
    }
}

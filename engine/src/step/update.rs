//! Update of one chunk of a unit's weights and optimizer state on the host.

use super::OptimizerConfig;
use super::gradients::Accumulator;
use super::state::UnitState;
use crate::comm::ReadBuffer;
use crate::error::EngineError;
use crate::offload::spill::PendingRead;
use crate::offload::tier::{Access, REGION_CHUNK_ELEMS, Region, RegionChunk, region_chunks};
use crate::plan::blocks::{BLOCK_BYTES, WINDOW_ALIGN};
use crate::plan::{GroupKind, Plan};
use crate::spec::UnitId;
use kernels::DType;
use optim::adamw::BLOCK_ELEMS;
use optim::{GradChunk, Precision, StateChunk, StepArgs, WeightChunk};
use std::ops::Range;

type Result<T, E = EngineError> = std::result::Result<T, E>;

/// Number of chunks that an update prefetches, while buffers last.
pub(crate) const CHUNKS_AHEAD: usize = 8;

/// Numbers of one update: its index from 1, the learning rate, and the factor on gradients.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Scalars {
    pub(crate) step: u64,
    pub(crate) lr: f64,
    pub(crate) grad_scale: f32,
}

/// Range of elements in one unit's trainable group that are updated together.
#[derive(Clone, Debug)]
pub(crate) struct Chunk {
    pub(crate) unit: UnitId,
    pub(crate) range: Range<usize>,
}

/// Divides `ranges` into chunks of at most `sub_group_elems` elements; of at most one segment if state is on disk. All
/// parameters of a chunk have the same states: chunks end at the element of a unit that `border` returns.
pub(crate) fn chunks(
    ranges: impl Iterator<Item = (UnitId, Range<usize>)>,
    border: impl Fn(UnitId) -> usize,
    sub_group_elems: usize,
    on_disk: bool,
) -> Vec<Chunk> {
    let most = sub_group_elems.max(1).next_multiple_of(WINDOW_ALIGN);
    let most = if on_disk {
        // States of one byte too end at blocks of the disk.
        most.next_multiple_of(BLOCK_BYTES as usize)
            .min(REGION_CHUNK_ELEMS)
    } else {
        most
    };
    ranges
        .flat_map(|(unit, range)| {
            let border = border(unit).clamp(range.start, range.end);
            let parts = [range.start..border, border..range.end].into_iter();
            let chunks = parts.flat_map(move |part| region_chunks(part, most));
            chunks.map(move |range| Chunk { unit, range })
        })
        .collect()
}

/// The update rule with the numbers of one update.
#[derive(Clone, Copy)]
pub(crate) struct Rule<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) optimizer: &'a OptimizerConfig,
    pub(crate) scalars: Scalars,
}

/// Reads in flight of one chunk: gradients, weights, then every state. `None` for data in memory, or if buffers ran
/// out.
pub(crate) type Reads = Vec<Option<PendingRead>>;

/// Byte range of the elements `range` in a region of `dtype` that begins at the element `start` of the parameter group.
pub(crate) fn bytes(range: &Range<usize>, start: usize, dtype: DType) -> Range<usize> {
    let size = dtype.size_bytes();
    (range.start - start) * size..(range.end - start) * size
}

impl Rule<'_> {
    /// Whether the update reads the weights. With master weights it only writes them.
    pub(crate) fn reads_weights(&self) -> bool {
        !self.plan.config().precision.has_master()
    }

    /// Starts the reads of a chunk. `gradients` is `None` if gradients come from elsewhere. `weights` begin at the
    /// element `start` of the parameter group.
    pub(crate) fn read_ahead(
        &self,
        range: &Range<usize>,
        gradients: Option<&Accumulator>,
        (weights, start): (&Region, usize),
        state: &UnitState,
    ) -> Result<Reads> {
        let mut reads = Vec::new();
        reads.push(match gradients {
            Some(g) => {
                let bytes = bytes(range, g.range().start, g.dtype());
                g.region().read_ahead(bytes)?
            }
            None => None,
        });
        let dtype = self.plan.dtype_of(GroupKind::Trainable);
        reads.push(if self.reads_weights() {
            weights.read_ahead(bytes(range, start, dtype))?
        } else {
            None
        });
        for kind in state.kinds() {
            if let Some(bytes) = kind.bytes(range) {
                reads.push(kind.region.read_ahead(bytes)?);
            }
        }
        Ok(reads)
    }

    /// Applies the update rule to a chunk of weights and states, and writes the chunk back.
    pub(crate) fn apply(
        &self,
        chunk: &Chunk,
        grads: &[u8],
        mut weight_chunk: RegionChunk<'_>,
        mut state_chunks: Vec<(DType, RegionChunk<'_>)>,
    ) -> Result<()> {
        let Chunk { unit, range } = chunk;
        let config = self.plan.config();
        let precision = config.precision;
        for (slot, part) in self.plan.unit(*unit).trainable.parts(range.clone()) {
            let own = part.start - range.start..part.end - range.start;
            let options = self.optimizer.groups[slot.param.index()];
            let Scalars {
                step,
                lr,
                grad_scale,
            } = self.scalars;
            let mut slots = state_chunks.iter_mut();
            let grad = match config.grad_dtype() {
                DType::BF16 => GradChunk::Bf16(&bytemuck::cast_slice(grads)[own.clone()]),
                _ => GradChunk::F32(&bytemuck::cast_slice(grads)[own.clone()]),
            };
            let weight = weight_chunk.as_mut_bytes();
            let weight = match precision {
                Precision::F32 => WeightChunk::F32(&mut elements(weight)[own.clone()]),
                Precision::PureBf16 => WeightChunk::PureBf16(&mut elements(weight)[own.clone()]),
                Precision::Bf16 | Precision::Fp16 => {
                    let Some((_, master)) = slots.next() else {
                        return Ok(());
                    };
                    let master = &mut master.as_mut_slice()[own.clone()];
                    if precision == Precision::Bf16 {
                        WeightChunk::Mixed {
                            master,
                            weight: &mut elements(weight)[own.clone()],
                        }
                    } else {
                        WeightChunk::MixedF16 {
                            master,
                            weight: &mut elements(weight)[own.clone()],
                        }
                    }
                }
            };
            let mut state = Vec::new();
            while let Some((dtype, window)) = slots.next() {
                state.push(match dtype {
                    DType::BF16 => StateChunk::Bf16(&mut window.as_mut_slice()[own.clone()]),
                    DType::U8 => {
                        let Some((_, absmax)) = slots.next() else {
                            return Ok(());
                        };
                        let blocks = own.start / BLOCK_ELEMS..own.end.div_ceil(BLOCK_ELEMS);
                        StateChunk::Blockwise {
                            codes: &mut window.as_mut_bytes()[own.clone()],
                            absmax: &mut absmax.as_mut_slice()[blocks],
                        }
                    }
                    _ => StateChunk::F32(&mut window.as_mut_slice()[own.clone()]),
                });
            }
            self.optimizer.rule.step(StepArgs {
                step,
                lr: (lr * f64::from(options.lr_scale)) as f32,
                weight_decay: options.weight_decay,
                grad_scale,
                seed: config.seed,
                first_element: self.plan.first_element(slot.param)
                    + (part.start - slot.offset) as u64,
                grad,
                weight,
                state,
            })?;
        }
        weight_chunk.commit()?;
        for (_, window) in state_chunks {
            window.commit()?;
        }
        Ok(())
    }
}

/// Data of a unit that an update reads and writes.
pub(crate) struct Parts<'p> {
    pub(crate) gradients: &'p mut Accumulator,
    /// Stored weights, and the element of the parameter group at which they begin.
    pub(crate) weights: (&'p mut Region, usize),
    pub(crate) state: &'p mut UnitState,
}

impl Rule<'_> {
    /// Updates a chunk of a unit in place. `gathered`, if given, are the gradients of the unit's whole trainable group,
    /// used instead of the accumulated ones.
    pub(crate) fn step(
        &self,
        chunk: &Chunk,
        reads: Reads,
        gathered: Option<&ReadBuffer>,
        parts: Parts<'_>,
    ) -> Result<()> {
        let (range, dtype) = (&chunk.range, self.plan.dtype_of(GroupKind::Trainable));
        let Parts {
            gradients,
            weights: (weights, weights_start),
            state,
        } = parts;
        let weight_access = if self.reads_weights() {
            Access::Update
        } else {
            Access::Write
        };
        let mut reads = reads.into_iter();
        let mut prefetched = || reads.next().flatten();

        let (grads_start, grad_dtype) = (gradients.range().start, gradients.dtype());
        let of_gradients = prefetched();
        let mut grad_chunk = match gathered {
            Some(_) => None,
            None => {
                let bytes = bytes(range, grads_start, grad_dtype);
                let region = gradients.region_mut();
                Some(region.window(bytes, Access::Read, of_gradients)?)
            }
        };
        let grads: &[u8] = match (gathered, &mut grad_chunk) {
            (Some(all), _) => all.part(bytes(range, 0, grad_dtype)),
            (None, Some(window)) => window.as_mut_bytes(),
            (None, None) => &[],
        };

        let weight_bytes = bytes(range, weights_start, dtype);
        let weight_chunk = weights.window(weight_bytes, weight_access, prefetched())?;
        let mut state_chunks: Vec<(DType, RegionChunk<'_>)> = Vec::new();
        for kind in state.kinds_mut() {
            if let Some(bytes) = kind.bytes(range) {
                let region = &mut kind.region;
                let window = region.window(bytes, Access::Update, prefetched())?;
                state_chunks.push((kind.dtype, window));
            }
        }
        self.apply(chunk, grads, weight_chunk, state_chunks)
    }
}

fn elements<T: bytemuck::Pod>(bytes: &mut [u8]) -> &mut [T] {
    bytemuck::cast_slice_mut(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_end_at_aligned_offsets_of_the_flat_buffer() {
        let ranges = [(UnitId(0), 32..5_000), (UnitId(3), 0..4_096)];
        let all = chunks(ranges.into_iter(), |_| usize::MAX, 1, false);
        let of = |unit| {
            let own = all.iter().filter(move |c| c.unit == UnitId(unit));
            own.map(|c| c.range.clone()).collect::<Vec<_>>()
        };
        assert_eq!(of(0), [32..2_048, 2_048..4_096, 4_096..5_000]);
        assert_eq!(of(3), [0..2_048, 2_048..4_096]);
        let ranges = || [(UnitId(0), 0..1 << 20)].into_iter();
        let large = |on_disk| chunks(ranges(), |_| 0, 1 << 24, on_disk);
        let region_chunks = (1 << 20) / REGION_CHUNK_ELEMS;
        assert_eq!((large(false).len(), large(true).len()), (1, region_chunks));
        let cut = chunks(ranges(), |_| 4_096, 1 << 24, false);
        assert_eq!(cut[0].range, 0..4_096);
        assert_eq!(cut[1].range, 4_096..1 << 20);
    }
}

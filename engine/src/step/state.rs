//! Master weights and optimizer state of one unit on one rank.

use crate::error::EngineError;
use crate::offload::spill::PendingRead;
use crate::offload::tier::{Access, Region, RegionChunk};
use crate::plan::{MASTER, Row, Stored};
use kernels::DType;
use std::ops::Range;

/// Master weights and optimizer state of the elements `range` of a unit's trainable group.
#[derive(Debug)]
pub(crate) struct UnitState {
    range: Range<usize>,
    /// Master weights, if the precision has any, then the optimizer's slots.
    kinds: Vec<Kind>,
    /// Second copy of this rank's part of the weights, which an optimizer in backward writes.
    spare_weights: Option<Region>,
}

/// One state and, for an optimizer in backward, its second copy.
#[derive(Debug)]
pub(crate) struct Kind {
    pub(crate) name: &'static str,
    pub(crate) dtype: DType,
    /// Elements that share one stored value.
    pub(crate) per: usize,
    /// Range of stored values: elements of the parameter group, divided by `per`.
    values: Range<usize>,
    pub(crate) region: Region,
    spare: Option<Region>,
}

impl Kind {
    /// Stored values of the elements `elems`, counted from the region's first one. `None` if the state covers other
    /// parameters.
    pub(crate) fn of(&self, elems: &Range<usize>) -> Option<Range<usize>> {
        let values = elems.start / self.per..elems.end.div_ceil(self.per);
        let covered = self.values.start <= values.start && values.end <= self.values.end;
        covered.then(|| values.start - self.values.start..values.end - self.values.start)
    }

    /// Bytes in the region of the elements `elems`; `None` as in [`Kind::of`].
    pub(crate) fn bytes(&self, elems: &Range<usize>) -> Option<Range<usize>> {
        let size = self.dtype.size_bytes();
        let values = self.of(elems)?;
        Some(values.start * size..values.end * size)
    }
}

impl UnitState {
    /// State of the elements `range` of a unit's trainable group, without memory. [`UnitState::add`] adds the memory of one
    /// optimizer state, e.g. Adam's first moment, at a time.
    pub(crate) fn new(range: Range<usize>) -> Self {
        Self {
            range,
            kinds: Vec::new(),
            spare_weights: None,
        }
    }

    /// Adds the memory of one row of the inventory.
    pub(crate) fn add(&mut self, row: &Row, region: Region) {
        match row.what {
            Stored::State(name) if row.spare => {
                let same = |kind: &&mut Kind| kind.name == name && kind.dtype == row.dtype;
                let kind = self.kinds.iter_mut().find(same);
                if let Some(kind) = kind {
                    kind.spare = Some(region);
                }
            }
            Stored::State(name) => self.kinds.push(Kind {
                name,
                dtype: row.dtype,
                per: row.per,
                values: row.range.clone(),
                region,
                spare: None,
            }),
            _ => self.spare_weights = Some(region),
        }
    }

    /// Copies f32 values to the master weights. `part` is their range in the parameter group; elements of other ranks
    /// are ignored.
    pub(crate) fn set_master(
        &mut self,
        part: Range<usize>,
        values: &[f32],
    ) -> Result<(), EngineError> {
        let Some(master) = self.kinds.iter_mut().find(|kind| kind.name == MASTER) else {
            return Ok(());
        };
        let kept = part.start.max(self.range.start)..part.end.min(self.range.end);
        if kept.start >= kept.end {
            return Ok(());
        }
        let values = &values[kept.start - part.start..kept.end - part.start];
        let start = self.range.start;
        master
            .region
            .write_rounded(master.dtype, start, kept, values)
    }

    /// Range of elements in the parameter group whose state this rank stores.
    pub(crate) fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// The master weights, if any, and every slot.
    pub(crate) fn kinds(&self) -> &[Kind] {
        &self.kinds
    }

    /// The master weights, if any, and every slot, writable.
    pub(crate) fn kinds_mut(&mut self) -> &mut [Kind] {
        &mut self.kinds
    }

    /// Chunks of the elements `range` for an optimizer in backward: of the weights, then of master weights and slots.
    /// They contain the stored values; writes go to the second copy. `weights` begin at the element `start` of the
    /// parameter group, and are read only if `reads_weights`. `prefetched` returns the reads in flight, in the order of
    /// the chunks.
    pub(crate) fn backward_chunks(
        &mut self,
        range: &Range<usize>,
        dtype: DType,
        (weights, start): (&Region, usize),
        reads_weights: bool,
        prefetched: &mut dyn FnMut() -> Option<PendingRead>,
    ) -> Result<Option<(RegionChunk<'_>, Vec<(DType, RegionChunk<'_>)>)>, EngineError> {
        let first = self.range.start;
        let bytes = |start: usize, dtype: DType| {
            let size = dtype.size_bytes();
            (range.start - start) * size..(range.end - start) * size
        };
        let Some(spare_weights) = &mut self.spare_weights else {
            return Ok(None);
        };
        let (own, of_weights) = (bytes(first, dtype), prefetched());
        let weight_chunk = if reads_weights {
            let from = bytes(start, dtype);
            spare_weights.chunk_from(own, weights, from, of_weights)?
        } else {
            spare_weights.window(own, Access::Write, of_weights)?
        };
        let mut region_chunks = Vec::new();
        for kind in &mut self.kinds {
            let own = kind.bytes(range);
            if let (Some(spare), Some(own)) = (&mut kind.spare, own) {
                let window = spare.chunk_from(own.clone(), &kind.region, own, prefetched())?;
                region_chunks.push((kind.dtype, window));
            }
        }
        Ok(Some((weight_chunk, region_chunks)))
    }

    /// The second copies, which an optimizer in backward writes.
    pub(crate) fn spare_mut(&mut self) -> impl Iterator<Item = &mut Region> {
        let states = self.kinds.iter_mut().filter_map(|kind| kind.spare.as_mut());
        states.chain(&mut self.spare_weights)
    }

    /// Swaps the second copies with the state and `weights`, which begin at the element `start` of the parameter group.
    pub(crate) fn commit(
        &mut self,
        weights: &mut Region,
        start: usize,
        dtype: DType,
    ) -> Result<(), EngineError> {
        let Some(spare_weights) = &mut self.spare_weights else {
            return Ok(());
        };
        for kind in &mut self.kinds {
            if let Some(spare) = &mut kind.spare {
                std::mem::swap(&mut kind.region, spare);
            }
        }
        if weights.len() == spare_weights.len() {
            std::mem::swap(weights, spare_weights);
            return Ok(());
        }
        // Stages 1 and 2: every rank stores whole weights, so this rank's part is copied.
        let (first, range) = (self.range.start, self.range.clone());
        let size = dtype.size_bytes();
        let target = weights;
        spare_weights.for_each_chunk::<u16>(
            first * size / 2,
            range.start * size / 2..range.end * size / 2,
            Access::Read,
            |part, values| {
                target.write(part.start * 2 - start * size, bytemuck::cast_slice(values))
            },
        )
    }
}

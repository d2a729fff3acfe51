//! Writes a rank's training state to a checkpoint and restores it, at any world size and stage.
//!
//! Only trainable tensors are written: `master` (or `weight` if there is no master) and every optimizer state, each
//! as the element ranges that this rank owns. Frozen weights are in the model directory that the run started from.

use super::Zero;
use crate::checkpoint::{Checkpoint, Piece, PieceBytes, Writer};
use crate::error::EngineError;
use crate::offload::tier::{Access, Region, region_chunks};
use crate::plan::{GroupKind, MASTER, Plan};
use crate::spec::ParamId;
use kernels::{DType, Tag, Tensor, TensorMut};
use std::collections::BTreeSet;
use std::ops::Range;

/// Number of elements, or of bytes, that are copied between a disk and a checkpoint at once.
const CHUNK_ELEMS: usize = 1 << 22;
const WEIGHT: &str = "weight";

impl Zero {
    /// Writes this rank's part of a checkpoint's training state: for each trainable parameter, the elements
    /// of master weight (or weight) and optimizer states that this rank updates. With hybrid sharding only
    /// the first shard group writes, because the others have copies.
    ///
    /// # Errors
    /// When the disk fails.
    pub fn write_state(&mut self, writer: &mut Writer) -> Result<(), EngineError> {
        self.finish_updates()?;
        let plan = self.plan().clone();
        let rank = self.shard();
        let weight_dtype = plan.dtype_of(GroupKind::Trainable);
        let mut pieces = Vec::new();
        // Other shard groups hold the same values.
        let writes = self.comm().world().rank < plan.shards();
        let store = &*self.store.get_mut();
        for unit in plan.units() {
            let Some(state) = store.state(unit.id).filter(|_| writes) else {
                continue;
            };
            let mut kinds: Vec<(&str, DType, usize, &Region)> = state
                .kinds()
                .map(|(name, d, r)| (name, d, state.range().start, r))
                .collect();
            if !plan.config().precision.has_master() {
                let start = store.resting(unit.id, GroupKind::Trainable).start;
                let weights = store.weights(unit.id, GroupKind::Trainable);
                kinds.extend(weights.map(|w| (WEIGHT, weight_dtype, start, w)));
            }
            for (slot, part) in unit.trainable.parts(unit.trainable.shard(rank)) {
                let spec = &plan.spec().params[slot.param.index()];
                for (kind, dtype, start, region) in &kinds {
                    let size = dtype.size_bytes();
                    let own = (part.start - start) * size..(part.end - start) * size;
                    pieces.push(Piece {
                        name: &spec.name,
                        kind,
                        dtype: *dtype,
                        shape: spec.shape.dims(),
                        start: (part.start - slot.offset) as u64,
                        elems: part.len() as u64,
                        bytes: piece_bytes(region, own),
                    });
                }
            }
        }
        writer.write_pieces(pieces)?;
        Ok(())
    }

    /// Calls `visit` with this rank's part of the trainable weights: a parameter, a range of its elements, and a tensor
    /// of their values, at most 2^22 elements at a time. The parts of the ranks of one shard group have every element
    /// once. No rank communicates.
    ///
    /// # Errors
    /// When memory, the disk or `visit` fails.
    pub fn visit_sharded_weights<E: From<EngineError>>(
        &mut self,
        mut visit: impl FnMut(ParamId, Range<usize>, &Tensor) -> Result<(), E>,
    ) -> Result<(), E> {
        self.finish_updates()?;
        let (plan, rank) = (self.plan().clone(), self.shard());
        let dtype = plan.dtype_of(GroupKind::Trainable);
        let store = &*self.store.get_mut();
        for unit in plan.units() {
            let Some(weights) = store.weights(unit.id, GroupKind::Trainable) else {
                continue;
            };
            let start = store.resting(unit.id, GroupKind::Trainable).start;
            for (slot, part) in unit.trainable.parts(unit.trainable.shard(rank)) {
                for part in region_chunks(part, CHUNK_ELEMS) {
                    let values =
                        TensorMut::new(&self.tiers.host, Tag::Workspace, [part.len()], dtype);
                    let mut values = values.map_err(EngineError::from)?;
                    let first_byte = (part.start - start) * dtype.size_bytes();
                    weights.read(first_byte, values.as_bytes_mut())?;
                    let elements = part.start - slot.offset..part.end - slot.offset;
                    visit(slot.param, elements, &values.freeze())?;
                }
            }
        }
        Ok(())
    }

    /// Names of the states that this rank stores for each trainable tensor, with their dtypes: master weights (or
    /// weights) and every optimizer state. Empty without trainable tensors.
    pub(crate) fn state_kinds(&mut self) -> Vec<(&'static str, DType)> {
        let plan = self.plan().clone();
        let store = &*self.store.get_mut();
        let mut states = plan.units().iter().filter_map(|unit| store.state(unit.id));
        let mut kinds: Vec<_> = states
            .next()
            .map(|state| {
                state
                    .kinds()
                    .map(|(name, dtype, _)| (name, dtype))
                    .collect()
            })
            .unwrap_or_default();
        if !plan.config().precision.has_master() {
            kinds.push((WEIGHT, plan.dtype_of(GroupKind::Trainable)));
        }
        kinds
    }

    /// Restores trainable weights and all optimizer states from a checkpoint. `updates` is the number of
    /// updates applied before it was saved, and becomes the step count. Frozen weights are not in a
    /// checkpoint; they must be loaded before.
    ///
    /// # Errors
    /// When the checkpoint has other tensors than this run trains, or cannot be read. The state is then incomplete
    /// and the run must end.
    pub fn restore(&mut self, checkpoint: &Checkpoint, updates: u64) -> Result<(), EngineError> {
        check_trained(self.plan(), checkpoint)?;
        self.finish_updates()?;
        let plan = self.plan().clone();
        let precision = plan.config().precision;
        for unit in plan.units() {
            let Some(state) = self.store.get_mut().state_mut(unit.id) else {
                continue;
            };
            let kept = state.range();
            for (kind, dtype, region) in state.kinds_mut() {
                for (slot, part) in unit.trainable.parts(kept.clone()) {
                    let name = &plan.spec().params[slot.param.index()].name;
                    fill(region, dtype, kept.start, part, |part, bytes| {
                        read(checkpoint, kind, name, logical(&part, slot.offset), bytes)
                    })?;
                }
            }
            let resting = self.resting_range(unit.id);
            let dtype = plan.dtype_of(GroupKind::Trainable);
            let mut scratch = Vec::new();
            for (slot, part) in unit.trainable.parts(resting.clone()) {
                let name = &plan.spec().params[slot.param.index()].name;
                let weights = self
                    .store
                    .get_mut()
                    .weights_mut(unit.id, GroupKind::Trainable)?;
                if !precision.has_master() {
                    fill(weights, dtype, resting.start, part, |part, bytes| {
                        read(checkpoint, WEIGHT, name, logical(&part, slot.offset), bytes)
                    })?;
                    continue;
                }
                for part in region_chunks(part, CHUNK_ELEMS) {
                    scratch.resize(part.len(), 0f32);
                    let bytes = bytemuck::cast_slice_mut(&mut scratch);
                    let elements = logical(&part, slot.offset);
                    read(checkpoint, MASTER, name, elements, bytes)?;
                    weights.write_rounded(dtype, resting.start, part, &scratch)?;
                }
            }
        }
        self.set_step(updates);
        Ok(())
    }
}

/// The bytes `own` of a region, from memory, or chunk by chunk from its disk.
fn piece_bytes(region: &Region, own: Range<usize>) -> PieceBytes<'_> {
    if let Some(bytes) = region.in_memory() {
        return PieceBytes::Slice(&bytes[own]);
    }
    PieceBytes::Produce(Box::new(move |sink| {
        let mut chunk = vec![0; CHUNK_ELEMS.min(own.len())];
        for part in own.clone().step_by(CHUNK_ELEMS) {
            let len = CHUNK_ELEMS.min(own.end - part);
            region.read(part, &mut chunk[..len])?;
            sink.write(&chunk[..len])?;
        }
        Ok(())
    }))
}

/// Fills the elements `part` of a region; the region begins at element `start` of the parameter group.
fn fill(
    region: &mut Region,
    dtype: DType,
    start: usize,
    part: Range<usize>,
    mut read: impl FnMut(Range<usize>, &mut [u8]) -> Result<(), EngineError>,
) -> Result<(), EngineError> {
    match dtype.size_bytes() {
        2 => region.for_each_chunk::<u16>(start, part, Access::Write, |part, out| {
            read(part, bytemuck::cast_slice_mut(out))
        }),
        _ => region.for_each_chunk::<u32>(start, part, Access::Write, |part, out| {
            read(part, bytemuck::cast_slice_mut(out))
        }),
    }
}

/// Checks that the trainable parameters of `plan` are exactly those with training state in `checkpoint`, by
/// name.
///
/// # Errors
/// [`EngineError::CheckpointMismatch`] if the plan or the checkpoint has a parameter that the other lacks.
pub fn check_trained(plan: &Plan, checkpoint: &Checkpoint) -> Result<(), EngineError> {
    let slot = if plan.config().precision.has_master() {
        MASTER
    } else {
        WEIGHT
    };
    let theirs: BTreeSet<&str> = checkpoint
        .tensors()
        .iter()
        .filter(|t| t.kind == slot)
        .map(|t| t.name.as_str())
        .collect();
    let params = plan.spec().params.iter();
    let ours: BTreeSet<&str> = params
        .filter(|p| p.trainable)
        .map(|p| p.name.as_str())
        .collect();
    let names = |names: &mut dyn Iterator<Item = &&str>| names.map(|n| (*n).to_owned()).collect();
    let missing: Vec<String> = names(&mut ours.difference(&theirs));
    let extra: Vec<String> = names(&mut theirs.difference(&ours));
    if missing.is_empty() && extra.is_empty() {
        return Ok(());
    }
    Err(EngineError::CheckpointMismatch { missing, extra })
}

/// Range in the parameter, from a range in its parameter group.
fn logical(part: &Range<usize>, offset: usize) -> Range<u64> {
    (part.start - offset) as u64..(part.end - offset) as u64
}

fn read(
    checkpoint: &Checkpoint,
    kind: &str,
    name: &str,
    elements: Range<u64>,
    out: &mut [u8],
) -> Result<(), EngineError> {
    Ok(checkpoint.read(kind, name, elements, out)?)
}

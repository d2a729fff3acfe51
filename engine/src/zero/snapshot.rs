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
use crate::step::update::bytes;
use kernels::{DType, Tag, Tensor, TensorMut};
use optim::adamw::BLOCK_ELEMS;
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
        let params = plan.spec().params.iter();
        let blocks: Vec<_> = params
            .map(|param| [param.shape.elems().div_ceil(BLOCK_ELEMS)])
            .collect();
        let mut pieces = Vec::new();
        // Other shard groups hold the same values.
        let writes = self.comm().world().rank < plan.shards();
        let store = &*self.store.get_mut();
        for unit in plan.units() {
            let Some(state) = store.state(unit.id).filter(|_| writes) else {
                continue;
            };
            let weights = store.weights(unit.id, GroupKind::Trainable);
            let weights = weights.filter(|_| !plan.config().precision.has_master());
            let start = store.resting(unit.id, GroupKind::Trainable).start;
            for (slot, part) in unit.trainable.parts(unit.trainable.shard(rank)) {
                let spec = &plan.spec().params[slot.param.index()];
                for kind in state.kinds() {
                    let (Some(values), Some(own)) = (kind.of(&part), kind.bytes(&part)) else {
                        continue;
                    };
                    pieces.push(Piece {
                        name: &spec.name,
                        kind: kind.name,
                        dtype: kind.dtype,
                        shape: match kind.per {
                            1 => spec.shape.dims(),
                            _ => &blocks[slot.param.index()],
                        },
                        start: ((part.start - slot.offset) / kind.per) as u64,
                        elems: values.len() as u64,
                        bytes: piece_bytes(&kind.region, own),
                    });
                }
                if let Some(region) = weights {
                    pieces.push(Piece {
                        name: &spec.name,
                        kind: WEIGHT,
                        dtype: weight_dtype,
                        shape: spec.shape.dims(),
                        start: (part.start - slot.offset) as u64,
                        elems: part.len() as u64,
                        bytes: piece_bytes(region, bytes(&part, start, weight_dtype)),
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

    /// Tensors that a checkpoint has for a trainable parameter: name, dtype and shape of master weights (or weights) and
    /// every optimizer state.
    pub(crate) fn state_tensors(&self, param: ParamId) -> Vec<(&'static str, DType, Vec<usize>)> {
        let (plan, precision) = (self.plan(), self.plan().config().precision);
        let slots = self.optimizer.rule.slots(precision);
        let mut tensors: Vec<_> = plan.state_tensors(param, slots).collect();
        if !precision.has_master() {
            let shape = plan.spec().params[param.index()].shape.dims().to_vec();
            tensors.push((WEIGHT, plan.dtype_of(GroupKind::Trainable), shape));
        }
        tensors
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
            for kind in state.kinds_mut() {
                for (slot, part) in unit.trainable.parts(kept.clone()) {
                    let name = &plan.spec().params[slot.param.index()].name;
                    let Some(values) = kind.of(&part) else {
                        continue;
                    };
                    let first = (part.start - slot.offset) / kind.per;
                    let start = values.start;
                    let (dtype, of) = (kind.dtype, kind.name);
                    fill(&mut kind.region, dtype, 0, values, |part, bytes| {
                        let own = first + part.start - start..first + part.end - start;
                        read(checkpoint, of, name, logical(&own, 0), bytes)
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
        1 => region.for_each_chunk::<u8>(start, part, Access::Write, read),
        2 => region.for_each_chunk::<u16>(start, part, Access::Write, |part, out| {
            read(part, bytemuck::cast_slice_mut(out))
        }),
        4 => region.for_each_chunk::<u32>(start, part, Access::Write, |part, out| {
            read(part, bytemuck::cast_slice_mut(out))
        }),
        _ => region.for_each_chunk::<u64>(start, part, Access::Write, |part, out| {
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

//! A rank's training state going into a checkpoint and coming back, at any world size and stage.
//!
//! Only trained tensors are written: `master` or (where there is none) `weight`, and every
//! optimizer slot, each as the element ranges that this rank owns. Frozen weights belong to the
//! model folder the run started from.

use crate::checkpoint::{Checkpoint, Piece, PieceBytes, Writer};
use crate::error::EngineError;
use crate::plan::{GroupKind, Plan};
use crate::zero::Zero;
use kernels::DType;
use std::collections::BTreeSet;
use std::ops::Range;

const MASTER: &str = "master";
const WEIGHT: &str = "weight";

impl Zero {
    /// Writes this rank's pieces.
    ///
    /// # Errors
    /// When the disk fails.
    pub fn write_state(&mut self, writer: &mut Writer) -> Result<(), EngineError> {
        let plan = self.plan().clone();
        let rank = self.comm().world().rank;
        let weight_dtype = plan.config().precision.weight_dtype();
        let mut pieces = Vec::new();
        let Self { store, states, .. } = self;
        let store = store.get_mut();
        for unit in plan.units() {
            let Some(state) = &states[unit.id.index()] else {
                continue;
            };
            let mut kinds: Vec<(&str, DType, usize, &[u8])> = state
                .kinds()
                .map(|(name, d, r)| (name, d, state.start(), r.as_ref()))
                .collect();
            if !plan.config().precision.has_master() {
                let start = store.resting(unit.id, GroupKind::Trainable).start;
                let weights = store.weights(unit.id, GroupKind::Trainable);
                kinds.extend(weights.map(|w| (WEIGHT, weight_dtype, start, w.as_ref())));
            }
            for (slot, part) in unit.trainable.parts(unit.trainable.shard(rank)) {
                let spec = &plan.spec().params[slot.param.index()];
                for (kind, dtype, start, bytes) in &kinds {
                    let size = dtype.size_bytes();
                    let own = (part.start - start) * size..(part.end - start) * size;
                    pieces.push(Piece {
                        name: &spec.name,
                        kind,
                        dtype: *dtype,
                        shape: spec.shape.dims(),
                        start: (part.start - slot.offset) as u64,
                        elems: part.len() as u64,
                        bytes: PieceBytes::Slice(&bytes[own]),
                    });
                }
            }
        }
        writer.write_pieces(pieces)?;
        Ok(())
    }

    /// Fills trained weights and all optimizer state from a checkpoint saved after `updates`
    /// applied updates; frozen weights must have been loaded before.
    ///
    /// # Errors
    /// When the checkpoint holds other tensors than this run trains, or cannot be read. The state
    /// is then incomplete and the run must end.
    pub fn restore(&mut self, checkpoint: &Checkpoint, updates: u64) -> Result<(), EngineError> {
        check_trained(self.plan(), checkpoint)?;
        let plan = self.plan().clone();
        let precision = plan.config().precision;
        for unit in plan.units() {
            let Some(state) = &mut self.states[unit.id.index()] else {
                continue;
            };
            let start = state.start();
            for (kind, dtype, region) in state.kinds_mut() {
                let size = dtype.size_bytes();
                let len = region.as_ref().len() / size;
                let bytes = region.as_mut_slice::<u8>();
                for (slot, part) in unit.trainable.parts(start..start + len) {
                    let name = &plan.spec().params[slot.param.index()].name;
                    let own = (part.start - start) * size..(part.end - start) * size;
                    read(
                        checkpoint,
                        kind,
                        name,
                        logical(&part, slot.offset),
                        &mut bytes[own],
                    )?;
                }
            }
            let resting = self.resting_range(unit.id);
            let mut scratch = Vec::new();
            for (slot, part) in unit.trainable.parts(resting.clone()) {
                let name = &plan.spec().params[slot.param.index()].name;
                let target = part.start - resting.start..part.end - resting.start;
                let elements = logical(&part, slot.offset);
                let weights = self
                    .store
                    .get_mut()
                    .weights_mut(unit.id, GroupKind::Trainable)?;
                if precision.has_master() {
                    scratch.resize(part.len(), 0f32);
                    let bytes = bytemuck::cast_slice_mut(&mut scratch);
                    read(checkpoint, MASTER, name, elements, bytes)?;
                    weights.write_rounded(precision.weight_dtype(), target, &scratch);
                } else {
                    let size = precision.weight_dtype().size_bytes();
                    let bytes = target.start * size..target.end * size;
                    let out = &mut weights.as_mut_slice::<u8>()[bytes];
                    read(checkpoint, WEIGHT, name, elements, out)?;
                }
            }
        }
        self.set_step(updates);
        Ok(())
    }
}

/// Compares the tensors that a run of `plan` trains with those that `checkpoint` was trained on.
///
/// # Errors
/// [`EngineError::CheckpointMismatch`] when they are not the same.
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

/// Elements of the parameter behind a part of its group.
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

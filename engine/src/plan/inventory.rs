//! Inventory: every state that a rank stores between passes, with its elements, dtype and tier.
//!
//! Only this module derives the rows. The store allocates them in order; memory reports and sizes of spill files are
//! sums over them. A dry run counts them because it runs the store.

use super::blocks::BLOCK_BYTES;
use super::{GroupKind, GroupLayout, Plan, StateKind, Tier, UnitPlan};
use crate::spec::{ParamId, UnitId};
use kernels::{DType, Tag};
use optim::adamw::has_blocks;
use optim::{Coverage, StateSlot};
use std::ops::Range;

/// Name of the f32 master weights in inventory rows and in checkpoints.
pub const MASTER: &str = "master";

/// Content of an inventory [`Row`]: weights, gradients, one optimizer state, or a gradient buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stored {
    /// Weights of a unit's trainable, frozen or quantized parameters.
    Weights(GroupKind),
    /// Gradients of a unit, summed over micro-batches.
    Gradients,
    /// Optimizer state, by its name in checkpoints: [`MASTER`] or the name of a state of the update rule,
    /// e.g. `exp_avg`.
    State(&'static str),
    /// Buffer for the reduced gradients of any unit, until the optimizer in backward consumes them.
    Waiting,
}

/// Entry of the inventory of one rank's stored states: one state of one unit (usually a layer), or a gradient
/// buffer that units share.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Row {
    /// Unit whose state this row describes; `None` for a buffer that units share.
    pub unit: Option<UnitId>,
    /// State that this row describes: weights, gradients, an optimizer state, or a gradient buffer.
    pub what: Stored,
    /// Whether this row is the second copy of a state. The optimizer in backward writes the second copy while
    /// the first stays unchanged.
    pub spare: bool,
    /// Range of stored values: elements in the flat buffer of the unit's trainable, frozen or quantized parameters, divided
    /// by `per`.
    pub range: Range<usize>,
    /// Elements of the flat buffer that share one stored value: 1, or those of a block.
    pub per: usize,
    /// Element type of the stored elements.
    pub dtype: DType,
    /// Memory tier (device, host or disk) that stores the elements.
    pub tier: Tier,
}

impl Row {
    /// Number of bytes of the row's elements, without padding on disk.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        (self.range.len() * self.dtype.size_bytes()) as u64
    }

    /// Number of bytes between a block boundary and the first byte on disk.
    pub(crate) fn phase(&self) -> u64 {
        disk_phase(&self.range, self.dtype)
    }

    /// Category of the row's state by which it is offloaded: weights, or optimizer state (gradients
    /// included).
    #[must_use]
    pub fn kind(&self) -> StateKind {
        match self.what {
            Stored::Weights(_) => StateKind::Param,
            Stored::Gradients | Stored::State(_) | Stored::Waiting => StateKind::Optimizer,
        }
    }

    /// Tag under which a memory pool counts the state.
    pub(crate) fn tag(&self) -> Tag {
        match self.what {
            Stored::Weights(_) => Tag::Parameters,
            Stored::Gradients | Stored::Waiting => Tag::Gradients,
            Stored::State(_) => Tag::Optimizer,
        }
    }
}

/// Number of bytes between a block boundary and the first byte of a region of `range` on disk.
pub(crate) fn disk_phase(range: &Range<usize>, dtype: DType) -> u64 {
    (range.start * dtype.size_bytes()) as u64 % BLOCK_BYTES
}

impl Plan {
    /// Element type of a parameter group's flat buffer; bytes if its parameters are quantized.
    #[must_use]
    pub fn dtype_of(&self, group: GroupKind) -> DType {
        match group {
            GroupKind::Trainable | GroupKind::Frozen => self.config().precision.weight_dtype(),
            GroupKind::Quantized => DType::U8,
        }
    }

    /// Range of elements of a parameter group whose weights `rank` stores.
    pub(crate) fn stored_range(&self, unit: UnitId, group: GroupKind, rank: usize) -> Range<usize> {
        self.part(
            self.unit(unit).group(group),
            self.shards_weights(group),
            rank,
        )
    }

    /// Range of elements of the trainable group that `rank` updates.
    pub(crate) fn updated_range(&self, unit: UnitId, rank: usize) -> Range<usize> {
        let shards = self.config().stage.shards_optimizer();
        self.part(&self.unit(unit).trainable, shards, rank)
    }

    fn part(&self, group: &GroupLayout, is_sharded: bool, rank: usize) -> Range<usize> {
        match is_sharded {
            true => group.shard(self.shard_of(rank)),
            false => 0..group.padded_elems,
        }
    }

    /// Inventory of `rank`: one row for each state that it stores between passes, in the order of allocation.
    /// `slots` are the states that the optimizer stores per element, e.g. `exp_avg`. Empty parameter groups
    /// have no rows. Activations have none, since they depend on the batch.
    #[must_use]
    pub fn inventory(&self, rank: usize, slots: &[StateSlot]) -> Vec<Row> {
        let mut rows = Vec::new();
        for unit in self.units() {
            let groups = GroupKind::ALL.into_iter();
            let groups = groups.filter(|kind| !unit.group(*kind).is_empty());
            rows.extend(groups.map(|kind| self.weights_row(unit, kind, rank)));
            if !unit.trainable.is_empty() && !self.consumes_gradients(unit.id) {
                rows.push(Row {
                    unit: Some(unit.id),
                    what: Stored::Gradients,
                    spare: false,
                    range: self.part(&unit.trainable, self.config().shards_gradients(), rank),
                    per: 1,
                    dtype: self.config().grad_dtype(),
                    tier: self.config().offload.optimizer,
                });
            }
        }
        for unit in self
            .units()
            .iter()
            .filter(|unit| !unit.trainable.is_empty())
        {
            rows.extend(self.state_rows(unit, rank, slots));
            if self.updates_in_backward(unit.id) {
                let second = |row| Row { spare: true, ..row };
                rows.extend(self.state_rows(unit, rank, slots).map(second));
                let weights = self.weights_row(unit, GroupKind::Trainable, rank);
                rows.push(Row {
                    range: self.updated_range(unit.id, rank),
                    ..second(weights)
                });
            }
        }
        let waiting = Row {
            unit: None,
            what: Stored::Waiting,
            spare: false,
            range: 0..self.waiting_elems(),
            per: 1,
            dtype: DType::F32,
            tier: Tier::Host,
        };
        rows.extend(std::iter::repeat_n(waiting, self.waiting_buffers()));
        rows
    }

    fn weights_row(&self, unit: &UnitPlan, kind: GroupKind, rank: usize) -> Row {
        Row {
            unit: Some(unit.id),
            what: Stored::Weights(kind),
            spare: false,
            range: self.stored_range(unit.id, kind, rank),
            per: 1,
            dtype: self.dtype_of(kind),
            tier: self.config().offload.param,
        }
    }

    /// Rows of the master weights, if the precision has any, and of every optimizer slot.
    fn state_rows(
        &self,
        unit: &UnitPlan,
        rank: usize,
        slots: &[StateSlot],
    ) -> impl Iterator<Item = Row> {
        let (unit, layout) = (unit.id, &unit.trainable);
        let range = self.updated_range(unit, rank);
        let border = layout.elementwise_elems.clamp(range.start, range.end);
        let tier = self.config().offload.optimizer;
        let states = self.states(slots).filter_map(move |slot| {
            let elems = match slot.coverage {
                Coverage::All => range.clone(),
                Coverage::Elements => range.start..border,
                Coverage::Blocks => border..range.end,
            };
            Some((slot, elems))
                .filter(|(slot, elems)| slot.coverage == Coverage::All || !elems.is_empty())
        });
        states.map(move |(slot, elems)| Row {
            unit: Some(unit),
            what: Stored::State(slot.name),
            spare: false,
            range: elems.start / slot.per..elems.end.div_ceil(slot.per),
            per: slot.per,
            dtype: slot.dtype,
            // One number per block: too few for the disk.
            tier: match (slot.per, tier) {
                (1, _) | (_, Tier::Device) => tier,
                (_, Tier::Host | Tier::Nvme) => Tier::Host,
            },
        })
    }

    /// The master weights, if the precision has any, then the optimizer's slots.
    fn states(&self, slots: &[StateSlot]) -> impl Iterator<Item = StateSlot> {
        let master = self.config().precision.has_master();
        let master = master.then_some(StateSlot::new(MASTER, DType::F32));
        master.into_iter().chain(slots.to_vec())
    }

    /// Tensors that a checkpoint stores for a trainable parameter besides weights without master weights: name, dtype
    /// and shape of the master weights, if any, and of every optimizer state. `slots` are the optimizer's states.
    pub fn state_tensors(
        &self,
        param: ParamId,
        slots: &[StateSlot],
    ) -> impl Iterator<Item = (&'static str, DType, Vec<usize>)> {
        let spec = &self.spec().params[param.index()];
        let blocks = self.config().states_in_blocks && has_blocks(&spec.name, spec.shape.elems());
        let covered = move |slot: &StateSlot| match slot.coverage {
            Coverage::All => true,
            Coverage::Blocks => blocks,
            Coverage::Elements => !blocks,
        };
        let shape = spec.shape.dims().to_vec();
        self.states(slots).filter(covered).map(move |slot| {
            let shape = match slot.per {
                1 => shape.clone(),
                per => vec![shape.iter().product::<usize>().div_ceil(per)],
            };
            (slot.name, slot.dtype, shape)
        })
    }
}

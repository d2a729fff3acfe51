//! Inventory: every state that a rank stores between passes, with its elements, dtype and tier.
//!
//! Only this module derives the rows. The store allocates them in order; memory reports and sizes of spill files are
//! sums over them. A dry run counts them because it runs the store.

use super::blocks::WINDOW_ALIGN;
use super::{GroupKind, GroupLayout, Plan, StateKind, Tier, UnitPlan};
use crate::spec::UnitId;
use kernels::{DType, Tag};
use optim::StateSlot;
use std::ops::Range;

/// Name of the f32 master weights in inventory rows and in checkpoints.
pub const MASTER: &str = "master";

/// Content of an inventory [`Row`]: weights, gradients, one optimizer state, or a gradient buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stored {
    /// Weights of a unit's trainable, frozen or packed parameters.
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
    /// Range of elements that the rank stores, in the flat buffer of the unit's trainable, frozen
    /// or packed parameters.
    pub range: Range<usize>,
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
        (self.range.start % WINDOW_ALIGN * self.dtype.size_bytes()) as u64
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

impl Plan {
    /// Element type of a parameter group's flat buffer; bytes if its parameters are packed.
    #[must_use]
    pub fn dtype_of(&self, group: GroupKind) -> DType {
        match group {
            GroupKind::Trainable | GroupKind::Frozen => self.config().precision.weight_dtype(),
            GroupKind::Packed => DType::U8,
        }
    }

    /// Range of elements of a parameter group whose weights `rank` stores.
    pub(crate) fn stored_range(&self, unit: UnitId, group: GroupKind, rank: usize) -> Range<usize> {
        let shards = self.config().stage.shards_parameters();
        self.part(self.unit(unit).group(group), shards, rank)
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
        let (unit, range) = (unit.id, self.updated_range(unit.id, rank));
        let tier = self.config().offload.optimizer;
        let master = self.config().precision.has_master();
        let master = master.then_some((MASTER, DType::F32));
        let slots = slots.iter().map(|slot| (slot.name, slot.dtype));
        master
            .into_iter()
            .chain(slots)
            .map(move |(name, dtype)| Row {
                unit: Some(unit),
                what: Stored::State(name),
                spare: false,
                range: range.clone(),
                dtype,
                tier,
            })
    }
}

//! The order in which a pass uses units.

use super::{GroupKind, UnitPlan};
use crate::spec::UnitId;
use std::ops::Range;

/// Phase of a pass in which a unit's weights are used: forward, recompute or backward.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// Forward: computes outputs.
    Forward,
    /// Recompute: computes the inputs that a later unit's backward starts from.
    Recompute,
    /// Backward: backpropagates, after recomputing values that forward did not save. When the lease ends, the unit's
    /// gradients are complete.
    Backward,
}

impl Phase {
    /// Name of the phase in lower case: `forward`, `recompute` or `backward`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Recompute => "recompute",
            Self::Backward => "backward",
        }
    }
}

/// Kind of a pass through the model: training or inference.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PassKind {
    /// Forward and backward of one micro-batch.
    Train,
    /// Forward of one micro-batch, whose backward is a pass of its own: a pipeline stage runs other passes in between.
    Forward,
    /// Backward of one micro-batch after its pass of kind [`PassKind::Forward`].
    Backward,
    /// Forward only: evaluation, generation, export.
    Infer,
}

/// Entry of a pass's schedule: the use of one unit (usually a layer) in one phase.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    /// Unit whose weights are used.
    pub unit: UnitId,
    /// Phase in which the unit is used: forward, recompute or backward.
    pub phase: Phase,
}

/// Weights that a pass reads into host memory to save them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Visit {
    /// All weights, those of frozen parameters included.
    All,
    /// Trainable weights only.
    Trained,
}

impl Visit {
    /// Whether this parameter group is read.
    pub(crate) fn reads(self, kind: GroupKind) -> bool {
        self == Self::All || kind == GroupKind::Trainable
    }
}

/// Progress of a pass through its schedule. A run and its dry run use the same code.
#[derive(Default)]
pub(crate) struct Pass {
    pub(crate) schedule: Vec<Entry>,
    /// Number of schedule entries that are done.
    pub(crate) position: usize,
    /// Number of schedule entries whose all-gathers have started.
    pub(crate) started: usize,
    /// Whether devices gather, instead of the communicator.
    pub(crate) on_device: bool,
    /// The weights to read into host memory; `None` for a pass that computes.
    pub(crate) visits: Option<Visit>,
    /// The next entry that this rank is known to lease; it skips the entries before it.
    pub(crate) wanted: usize,
}

impl Pass {
    /// A pass through `schedule`. With `visits` it reads weights into host memory. Devices gather if `gathers`,
    /// except with `visits`.
    pub(crate) fn new(
        mut schedule: Vec<Entry>,
        units: &[UnitPlan],
        visits: Option<Visit>,
        gathers: bool,
    ) -> Self {
        if visits == Some(Visit::Trained) {
            schedule.retain(|entry| !units[entry.unit.index()].trainable.is_empty());
        }
        Self {
            schedule,
            on_device: gathers && visits.is_none(),
            visits,
            ..Self::default()
        }
    }

    /// Whether this parameter group is read.
    pub(crate) fn reads(&self, kind: GroupKind) -> bool {
        self.visits.is_none_or(|visits| visits.reads(kind))
    }

    /// Whether the weights of entry `at` are still readable, because one of the `ahead` entries before it uses the
    /// same unit.
    pub(crate) fn keeps(&self, at: usize, ahead: usize) -> bool {
        let unit = self.schedule[at].unit;
        self.schedule[at.saturating_sub(ahead.max(1))..at]
            .iter()
            .any(|before| before.unit == unit)
    }

    /// Index of the first schedule entry after the current one that uses another unit; `None` if there is none.
    pub(crate) fn next_unit(&self) -> Option<usize> {
        let unit = self.schedule.get(self.position)?.unit;
        let mut behind = self.position + 1..self.schedule.len();
        behind.find(|at| self.schedule[*at].unit != unit)
    }

    /// Advances to the next entry up to `last` that devices gather. Returns its unit, and whether this rank needs it.
    pub(crate) fn next_gather(&mut self, last: usize, ahead: usize) -> Option<(UnitId, bool)> {
        while self.on_device && self.started <= last && self.started < self.schedule.len() {
            let at = self.started;
            self.started += 1;
            if !self.keeps(at, ahead) {
                return Some((self.schedule[at].unit, at >= self.wanted));
            }
        }
        None
    }

    /// Skips the entries before `entry`, or all remaining ones.
    pub(crate) fn want(&mut self, entry: Option<usize>) {
        self.wanted = entry.unwrap_or(self.schedule.len());
    }
}

/// Entries for the units `own`: forward, then backward. Before the backward of a recompute group, all its units but the last run forward again.
pub(super) fn schedule(
    units: &[UnitPlan],
    own: &Range<u32>,
    recomputed: &[Range<u32>],
    kind: PassKind,
) -> Vec<Entry> {
    let entry = |unit, phase| Entry { unit, phase };
    let units = &units[own.start as usize..own.end as usize];
    let forward = units.iter().filter(|_| kind != PassKind::Backward);
    let mut entries: Vec<Entry> = forward.map(|unit| entry(unit.id, Phase::Forward)).collect();
    let backward = units.iter().rev().filter(|unit| unit.needs_backward);
    let trains = matches!(kind, PassKind::Train | PassKind::Backward);
    for unit in backward.filter(|_| trains) {
        let group = recomputed.iter().find(|group| group.end == unit.id.0 + 1);
        let again = group.map_or(0..0, |group| group.start..unit.id.0);
        entries.extend(again.map(|unit| entry(UnitId(unit), Phase::Recompute)));
        entries.push(entry(unit.id, Phase::Backward));
    }
    entries
}

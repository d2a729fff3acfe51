//! The order in which units are needed during a pass.

use super::{GroupKind, UnitPlan};
use crate::spec::UnitId;
use std::ops::Range;

/// Which half of a pass a lease serves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// Computing outputs.
    Forward,
    /// Computing outputs again, from which a unit behind begins its backward.
    Recompute,
    /// Replaying and sweeping back. Ending the lease closes the unit's gradients.
    Backward,
}

impl Phase {
    /// A word for it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Recompute => "recompute",
            Self::Backward => "backward",
        }
    }
}

/// What a pass does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PassKind {
    /// Forward and backward of one micro-batch.
    Train,
    /// Forward only: evaluation, generation, export.
    Infer,
}

/// One use of one unit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    /// The unit.
    pub unit: UnitId,
    /// The half of the pass.
    pub phase: Phase,
}

/// What is read of all weights, to be saved.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Visit {
    /// Everything.
    All,
    /// What trains; the rest is left where it is.
    Trained,
}

impl Visit {
    /// Whether weights of this kind are read.
    pub(crate) fn reads(self, kind: GroupKind) -> bool {
        self == Self::All || kind == GroupKind::Trainable
    }
}

/// A walk through the uses of one pass: the same in a run and in its dry run.
#[derive(Default)]
pub(crate) struct Pass {
    pub(crate) schedule: Vec<Entry>,
    /// Entries that are behind.
    pub(crate) position: usize,
    /// Entries whose gathers have begun.
    pub(crate) started: usize,
    /// Whether the devices gather, and not the communicator.
    pub(crate) on_device: bool,
    /// The weights that are read, where that is in host memory.
    pub(crate) visits: Option<Visit>,
    /// The entry that is leased next, as far as that is known: this rank passes over those in front of it.
    pub(crate) wanted: usize,
}

impl Pass {
    /// Through the whole `schedule`, in host memory as far as `visits` says; the devices gather if `gathers`, where they read.
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

    /// Whether weights of this kind are read.
    pub(crate) fn reads(&self, kind: GroupKind) -> bool {
        self.visits.is_none_or(|visits| visits.reads(kind))
    }

    /// Whether the unit of entry `at` is still readable from an entry just before it.
    pub(crate) fn keeps(&self, at: usize, ahead: usize) -> bool {
        let unit = self.schedule[at].unit;
        self.schedule[at.saturating_sub(ahead.max(1))..at]
            .iter()
            .any(|before| before.unit == unit)
    }

    /// The first entry behind the cursor's whose unit is another one.
    pub(crate) fn next_unit(&self) -> Option<usize> {
        let unit = self.schedule.get(self.position)?.unit;
        let mut behind = self.position + 1..self.schedule.len();
        behind.find(|at| self.schedule[*at].unit != unit)
    }

    /// Passes on to the next entry up to `last` that the devices gather: its unit, and whether this rank needs it.
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

    /// Passes over everything in front of `entry`, or over all that is left.
    pub(crate) fn want(&mut self, entry: Option<usize>) {
        self.wanted = entry.unwrap_or(self.schedule.len());
    }
}

/// Forward, then backward; in front of a group of `recomputed`, its units but the last again.
pub(super) fn schedule(
    units: &[UnitPlan],
    recomputed: &[Range<u32>],
    kind: PassKind,
) -> Vec<Entry> {
    let entry = |unit, phase| Entry { unit, phase };
    let mut entries: Vec<Entry> = units
        .iter()
        .map(|unit| entry(unit.id, Phase::Forward))
        .collect();
    let backward = units.iter().rev().filter(|unit| unit.needs_backward);
    for unit in backward.filter(|_| kind == PassKind::Train) {
        let group = recomputed.iter().find(|group| group.end == unit.id.0 + 1);
        let again = group.map_or(0..0, |group| group.start..unit.id.0);
        entries.extend(again.map(|unit| entry(UnitId(unit), Phase::Recompute)));
        entries.push(entry(unit.id, Phase::Backward));
    }
    entries
}

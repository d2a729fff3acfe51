//! The order in which units are needed during a pass.

use super::UnitPlan;
use crate::access::Phase;
use crate::spec::UnitId;

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

pub(super) fn schedule(units: &[UnitPlan], kind: PassKind) -> Vec<Entry> {
    let forward = units.iter().map(|u| Entry {
        unit: u.id,
        phase: Phase::Forward,
    });
    let backward = units
        .iter()
        .rev()
        .filter(|u| u.needs_backward && kind == PassKind::Train)
        .map(|u| Entry {
            unit: u.id,
            phase: Phase::Backward,
        });
    forward.chain(backward).collect()
}

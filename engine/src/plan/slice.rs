//! Division of a model's units among pipeline stages.
//!
//! A stage's plan has the units and parameters of the whole model, so their indices, which are keys of random streams,
//! are those of an undivided model. The units of other stages are empty: they have no bytes and no schedule entry.

use super::layout::{GroupLayout, UnitPlan, plan_units};
use super::{Plan, PlanError, ZeroConfig};
use crate::spec::{ModelSpec, UnitId};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Division of a model's units among pipeline stages, and the stage of one rank.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Slice {
    /// Number of consecutive units of each pipeline stage, at least 1.
    pub counts: Vec<u32>,
    /// Index of the rank's pipeline stage.
    pub stage: usize,
}

impl Slice {
    /// Indices of the units of pipeline stage `stage`.
    #[must_use]
    pub fn units(&self, stage: usize) -> Range<u32> {
        let start = self.counts[..stage].iter().sum();
        start..start + self.counts[stage]
    }

    /// Index of the pipeline stage that has the unit.
    #[must_use]
    pub fn stage_of(&self, unit: UnitId) -> usize {
        let mut stages = 0..self.counts.len();
        let found = stages.find(|stage| self.units(*stage).contains(&unit.0));
        found.unwrap_or(self.counts.len() - 1)
    }

    fn check(&self, units: usize) -> Result<(), PlanError> {
        let all = self
            .counts
            .iter()
            .map(|count| *count as usize)
            .sum::<usize>();
        let valid = all == units && self.counts.iter().all(|count| *count > 0);
        match valid && self.stage < self.counts.len() {
            true => Ok(()),
            false => Err(PlanError::Slice {
                units,
                counts: self.counts.clone(),
                stage: self.stage,
            }),
        }
    }
}

/// Empties the units of other pipeline stages. Returns the stage's units, and the recompute groups cut at the borders of
/// the stage.
pub(super) fn cut(
    config: &ZeroConfig,
    units: &mut [UnitPlan],
) -> Result<(Range<u32>, Vec<Range<u32>>), PlanError> {
    let Some(slice) = &config.slice else {
        return Ok((0..units.len() as u32, config.recomputed.clone()));
    };
    slice.check(units.len())?;
    let own = slice.units(slice.stage);
    for unit in units.iter_mut().filter(|unit| !own.contains(&unit.id.0)) {
        for group in [&mut unit.trainable, &mut unit.frozen, &mut unit.quantized] {
            *group = GroupLayout::default();
        }
    }
    let groups = config.recomputed.iter();
    let groups = groups.map(|group| group.start.max(own.start)..group.end.min(own.end));
    let groups = groups.filter(|group| !group.is_empty()).collect();
    Ok((own, groups))
}

/// Hash of a plan, equal on all pipeline stages.
pub(super) fn hash(spec: &ModelSpec, config: &ZeroConfig, world_size: usize) -> String {
    let mut config = config.clone();
    if let Some(slice) = &mut config.slice {
        slice.stage = 0;
    }
    let mut hasher = blake3::Hasher::new();
    hasher.update(format!("{spec:?}{config:?}{world_size}").as_bytes());
    hasher.finalize().to_hex()[..16].to_string()
}

impl Plan {
    /// Indices of the units that this rank's pipeline stage has.
    #[must_use]
    pub fn own_units(&self) -> Range<u32> {
        self.own.clone()
    }

    /// Index of the pipeline stage that has the unit; 0 without pipeline stages.
    #[must_use]
    pub fn stage_of(&self, unit: UnitId) -> usize {
        let slice = self.config.slice.as_ref();
        slice.map_or(0, |slice| slice.stage_of(unit))
    }

    /// The plan of another pipeline stage of the same division.
    ///
    /// # Errors
    /// [`PlanError::Slice`] if there is no such stage.
    pub fn at_stage(&self, stage: usize) -> Result<Self, PlanError> {
        let mut config = self.config.clone();
        if let Some(slice) = &mut config.slice {
            slice.stage = stage;
        }
        Self::new(self.spec.clone(), config, self.world_size)
    }

    /// Number of pipeline stages.
    #[must_use]
    pub fn stages(&self) -> usize {
        let slice = self.config.slice.as_ref();
        slice.map_or(1, |slice| slice.counts.len())
    }

    /// Layouts of the units of all pipeline stages.
    #[must_use]
    pub fn whole_units(&self) -> Vec<UnitPlan> {
        plan_units(&self.spec, self.shards(), self.config.states_in_blocks)
    }
}

#[cfg(test)]
mod tests {
    use super::super::PassKind;
    use super::*;
    use crate::spec::{ParamSpec, UnitSpec};
    use kernels::Shape;

    fn spec() -> ModelSpec {
        let unit = |i: u32| UnitSpec {
            name: format!("unit{i}"),
        };
        let param = |i: u32| ParamSpec {
            name: format!("weight{i}"),
            shape: Shape::new(&[100 + i as usize]),
            unit: UnitId(i),
            trainable: i != 0,
            quantization: None,
        };
        ModelSpec {
            units: (0..5).map(unit).collect(),
            params: (0..5).map(param).collect(),
        }
    }

    fn plan(counts: &[u32], stage: usize) -> Result<Plan, PlanError> {
        let counts = counts.to_vec();
        let config = ZeroConfig {
            slice: Some(Slice { counts, stage }),
            recomputed: std::iter::once(1..4).collect(),
            ..ZeroConfig::default()
        };
        Plan::new(spec(), config, 2)
    }

    #[test]
    fn stages_have_all_units_once_under_the_indices_of_the_whole_model() {
        let recomputed = std::iter::once(1..4).collect();
        let config = ZeroConfig {
            recomputed,
            ..ZeroConfig::default()
        };
        let whole = Plan::new(spec(), config, 2).expect("a plan");
        let stages = [0, 1].map(|stage| plan(&[3, 2], stage).expect("a plan"));
        for (i, unit) in whole.units().iter().enumerate() {
            let (own, other) = (usize::from(i >= 3), usize::from(i < 3));
            assert_eq!(stages[own].units()[i], *unit);
            assert!(stages[other].units()[i].trainable.is_empty());
            assert_eq!(stages[0].stage_of(unit.id), own);
            assert_eq!(stages[0].whole_units()[i], *unit);
            let id = crate::spec::ParamId(i as u32);
            assert_eq!(stages[1].first_element(id), whole.first_element(id));
        }
        let visited = |stage: usize| {
            let entries = stages[stage].schedule(PassKind::Train).into_iter();
            entries.map(|entry| entry.unit.0).collect::<Vec<_>>()
        };
        assert_eq!(visited(0), [0, 1, 2, 1, 2, 1]);
        assert_eq!(visited(1), [3, 4, 4, 3]);
        assert_eq!(stages[0].hash(), stages[1].hash());
        assert_ne!(stages[0].hash(), plan(&[2, 3], 0).expect("a plan").hash());
        let [forward, backward] = [PassKind::Forward, PassKind::Backward].map(|kind| {
            stages[0]
                .schedule(kind)
                .into_iter()
                .map(|entry| entry.unit.0)
        });
        assert_eq!(forward.chain(backward).collect::<Vec<_>>(), visited(0));
    }

    #[test]
    fn stages_that_do_not_divide_the_units_are_refused() {
        for (counts, stage) in [(&[3, 3][..], 0), (&[5, 0], 0), (&[3, 2], 2)] {
            let refused = plan(counts, stage);
            assert!(
                matches!(refused, Err(PlanError::Slice { .. })),
                "{counts:?}"
            );
        }
    }
}

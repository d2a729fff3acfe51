//! Recompute groups: groups of layers that save only the input of their first layer for backward (Chen et al.,
//! "Training Deep Nets with Sublinear Memory Cost", 2016). Before its backward a group runs forward once more,
//! layer by layer. The inner values of at most one layer exist at a time.

use super::{PlanError, UnitPlan};
use crate::spec::{ModelSpec, UnitId};
use std::ops::Range;

/// Stack and number of a layer unit, from a name such as `stack.7`; `None` for other units.
fn layer(spec: &ModelSpec, unit: usize) -> Option<(&str, usize)> {
    let (stack, number) = spec.units[unit].name.rsplit_once('.')?;
    Some((stack, number.parse().ok()?))
}

/// Stacks of layers that backward visits and `again` accepts, as ranges of units. The names of a stack differ only in
/// the number at the end, which grows by one.
fn stacks(spec: &ModelSpec, again: &dyn Fn(UnitId) -> bool) -> Vec<Range<usize>> {
    let trained = spec.params.iter().filter(|param| param.trainable);
    let Some(first) = trained.map(|param| param.unit.index()).min() else {
        return Vec::new();
    };
    let mut stacks: Vec<Range<usize>> = Vec::new();
    for unit in first..spec.units.len() {
        let (Some((stack, number)), true) = (layer(spec, unit), again(UnitId(unit as u32))) else {
            continue;
        };
        let before = number.checked_sub(1).map(|before| (stack, before));
        match stacks.last_mut() {
            Some(last)
                if last.end == unit && before.is_some() && layer(spec, unit - 1) == before =>
            {
                last.end += 1;
            }
            _ => stacks.push(unit..unit + 1),
        }
    }
    stacks
}

impl ModelSpec {
    /// Recompute groups of up to `num_layers` consecutive layers, as ranges of unit indices for
    /// [`ZeroConfig::recomputed`](super::ZeroConfig::recomputed). Layers are units whose names differ only in
    /// the number at the end. `again` says which units are recomputed in backward; others are in no group. A
    /// group has at least two layers.
    ///
    /// The last group before the model's head is left out. Backward begins with it, so it would be recomputed
    /// right after its forward; it saves all its inputs instead.
    #[must_use]
    pub fn layer_groups(
        &self,
        num_layers: usize,
        again: &dyn Fn(UnitId) -> bool,
    ) -> Vec<Range<u32>> {
        let mut groups = Vec::new();
        for stack in stacks(self, again) {
            let starts = stack.clone().step_by(num_layers.max(1));
            let mut of_stack: Vec<Range<usize>> = starts
                .map(|start| start..stack.end.min(start + num_layers))
                .collect();
            // The head follows the last layer and stores its inner values.
            if stack.end + 1 >= self.units.len() {
                of_stack.pop();
            }
            groups.extend(of_stack);
        }
        groups
            .into_iter()
            .filter(|group| group.len() > 1)
            .map(|group| group.start as u32..group.end as u32)
            .collect()
    }
}

/// Checks that `groups` ascend, do not overlap, and consist of units that backward visits.
pub(super) fn check(groups: &[Range<u32>], units: &[UnitPlan]) -> Result<(), PlanError> {
    let mut last = 0;
    for group in groups {
        let known = group.start < group.end && (group.end as usize) <= units.len();
        let visited = |unit: u32| units[unit as usize].needs_backward;
        if !known || group.start < last || !group.clone().all(visited) {
            return Err(PlanError::Recomputed {
                group: group.clone(),
            });
        }
        last = group.end;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![expect(
        clippy::single_range_in_vec_init,
        reason = "a list of one group of units"
    )]

    use super::*;
    use crate::plan::{Plan, ZeroConfig};
    use crate::spec::{ParamId, ParamSpec, UnitSpec};
    use kernels::Shape;

    /// A model of one parameter per unit; those from unit `trained` on are trainable.
    fn model(names: &[&str], trained: usize) -> ModelSpec {
        let mut spec = ModelSpec::default();
        for (i, name) in names.iter().enumerate() {
            spec.units.push(UnitSpec {
                name: (*name).to_owned(),
            });
            spec.params.push(ParamSpec {
                name: format!("p{i}"),
                shape: Shape::new(&[4]),
                unit: UnitId(i as u32),
                trainable: i >= trained,
                quantization: None,
            });
        }
        assert_eq!(spec.find("p0"), Some(ParamId(0)));
        spec
    }

    const NAMES: [&str; 13] = [
        "vpm.embed",
        "vpm.0",
        "vpm.1",
        "vpm.2",
        "vpm.3",
        "resampler",
        "llm.embed",
        "llm.0",
        "llm.1",
        "llm.2",
        "llm.3",
        "llm.4",
        "llm.head",
    ];

    #[test]
    fn recompute_groups_are_layers_of_one_stack_except_the_last() {
        let all = |_: UnitId| true;
        let spec = model(&NAMES, 0);
        assert_eq!(spec.layer_groups(2, &all), [1..3, 3..5, 7..9, 9..11]);
        // The last two layers of the language model are their own group and store their inputs.
        assert_eq!(spec.layer_groups(3, &all), [1..4, 7..10]);
        assert_eq!(spec.layer_groups(8, &all), [1..5]);
        assert!(spec.layer_groups(1, &all).is_empty());
        assert!(spec.layer_groups(0, &all).is_empty());
    }

    #[test]
    fn units_that_are_not_visited_or_not_recomputed_are_in_no_group() {
        let all = |_: UnitId| true;
        assert_eq!(model(&NAMES, 8).layer_groups(2, &all), [8..10]);
        let llm = |unit: UnitId| unit.0 >= 6;
        assert_eq!(model(&NAMES, 0).layer_groups(2, &llm), [7..9, 9..11]);
        assert!(model(&NAMES, 13).layer_groups(2, &all).is_empty());
        // A number that does not follow the previous one begins another stack.
        let spec = model(&["a.0", "a.1", "a.0", "a.1", "b", "c"], 0);
        assert_eq!(spec.layer_groups(4, &all), [0..2, 2..4]);
    }

    #[test]
    fn invalid_recompute_groups_are_refused() {
        let plan = |recomputed: Vec<Range<u32>>| {
            let config = ZeroConfig {
                recomputed,
                ..ZeroConfig::default()
            };
            Plan::new(model(&NAMES, 2), config, 1)
        };
        assert!(plan(vec![2..4, 4..6]).is_ok());
        #[expect(clippy::reversed_empty_ranges, reason = "one of the mistakes")]
        for groups in [vec![2..4, 3..6], vec![1..3], vec![11..14], vec![5..4]] {
            assert!(matches!(plan(groups), Err(PlanError::Recomputed { .. })));
        }
    }
}

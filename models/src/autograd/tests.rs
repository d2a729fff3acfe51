//! Tests of the invariants in `README.md`, each by its number.

use super::gradcheck::{backend, index, resident, spec, tensor, values};
use super::{AccessEvent, Loss, ResidentParams, Scope, Tape, Var};
use crate::error::{ModelError, Result};
use crate::ops::LinearParams;
use engine::{EngineError, Lease, LeaseOwner, ModelSpec, ParamAccess, ParamId, Phase, UnitId};
use kernels::{Backend, Gelu, Tag, Tensor};
use proptest::prelude::{ProptestConfig, prop_assert_eq, proptest};
use std::cell::Cell;
use std::sync::Arc;

/// A block `x + gelu(x W^T)`.
fn block(scope: &Scope<'_>, x: &Var, weight: usize) -> Result<Var> {
    let weight = LinearParams::new(ParamId(weight as u32), None);
    let h = scope.linear(x, &weight)?;
    scope.add(x, &scope.gelu(&h, Gelu::Tanh)?)
}

fn blocks(depth: usize, width: usize, segmented: bool) -> ModelSpec {
    let shape = [width, width];
    let params: Vec<(u32, &[usize], bool)> = (0..depth as u32)
        .map(|i| (if segmented { i } else { 0 }, shape.as_slice(), true))
        .collect();
    spec(&params)
}

/// Runs `depth` blocks, as one segment each or all in one segment.
fn run<'m>(tape: &Tape<'_, 'm>, x: &Var, depth: usize, segmented: bool) -> Var {
    let step = if segmented { 1 } else { depth };
    let mut x = x.clone();
    for (unit, first) in (0..depth).step_by(step).enumerate() {
        let [y] = tape
            .segment(UnitId(unit as u32), [&x], move |scope, [x]| {
                let mut x = x.clone();
                for i in first..first + step {
                    x = block(scope, &x, i)?;
                }
                Ok([x])
            })
            .unwrap();
        x = y;
    }
    x
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    let values = tensor.to_f32_vec().unwrap();
    values.iter().map(|x| x.to_bits()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn a_segment_equals_inline_operations(depth in 1usize..5, width in 1usize..7, rows in 1usize..6) {
        let outcome = |segmented: bool| {
            let access = resident(&blocks(depth, width, segmented));
            let tape = Tape::training(&access).with_recompute_check(true);
            let x = tape.leaf(tensor(tape.backend(), &[rows, width], &values(1, rows * width)));
            let y = run(&tape, &x, depth, segmented);
            let seed = tensor(tape.backend(), &[rows, width], &values(2, rows * width));
            let mut all = vec![bits(y.value())];
            let grads = tape.backward_from(&[(&y, seed)]).unwrap();
            all.push(bits(grads.get(&x).unwrap()));
            all.extend((0..depth).map(|i| bits(&access.grad(ParamId(i as u32)).unwrap())));
            all
        };
        prop_assert_eq!(outcome(true), outcome(false));
    }
}

#[test]
fn leases_ascend_then_descend_and_gradients_are_deposited_under_them() {
    let access = resident(&blocks(2, 3, true));
    let tape = Tape::training(&access);
    let x = tape.leaf(tensor(tape.backend(), &[2, 3], &values(1, 6)));
    let y = run(&tape, &x, 2, true);
    let seed = tensor(tape.backend(), &[2, 3], &values(2, 6));
    tape.backward_from(&[(&y, seed)]).unwrap();
    let (u0, u1) = (UnitId(0), UnitId(1));
    assert_eq!(
        access.take_events(),
        [
            AccessEvent::Lease(u0, Phase::Forward),
            AccessEvent::End(u0, Phase::Forward, true),
            AccessEvent::Lease(u1, Phase::Forward),
            AccessEvent::End(u1, Phase::Forward, true),
            AccessEvent::Lease(u1, Phase::Backward),
            AccessEvent::Deposit(ParamId(1)),
            AccessEvent::End(u1, Phase::Backward, true),
            AccessEvent::Lease(u0, Phase::Backward),
            AccessEvent::Deposit(ParamId(0)),
            AccessEvent::End(u0, Phase::Backward, true),
        ]
    );
}

#[test]
fn only_segment_inputs_are_kept() {
    let access = resident(&blocks(4, 3, true));
    let tape = Tape::training(&access);
    let x = tape.input(tensor(tape.backend(), &[5, 3], &values(1, 15)));
    run(&tape, &x, 4, true);
    assert_eq!(tape.saved_elems(), 4 * 15);
    let pool = tape.backend().pool();
    drop(x);
    // The last output was dropped. What remains of activations are the segments' inputs.
    let inputs = 4 * 15u64.next_multiple_of(16) * 4;
    let weights = 4 * 9u64.next_multiple_of(16) * 4;
    assert_eq!(pool.stats().tag(Tag::Activations).in_use, inputs + weights);
}

/// Groups of `num_layers` layers, with a smaller last group, as the engine makes them.
fn groups(depth: usize, num_layers: usize) -> Vec<std::ops::Range<u32>> {
    let starts = (0..depth as u32).step_by(num_layers);
    let groups = starts.map(|start| start..(depth as u32).min(start + num_layers as u32));
    let mut groups: Vec<_> = groups.collect();
    groups.pop();
    groups
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn recomputed_inputs_have_the_same_bits(
        depth in 1usize..9, num_layers in 1usize..5, kept in 0usize..9, rows in 1usize..4,
    ) {
        let stored = |unit: UnitId| unit.index() == kept;
        let outcome = |recomputed: Vec<std::ops::Range<u32>>| {
            let access = resident(&blocks(depth, 3, true)).with_recomputed(recomputed);
            let tape = Tape::training(&access).with_recompute_check(true).with_stored(&stored);
            let x = tape.leaf(tensor(tape.backend(), &[rows, 3], &values(1, rows * 3)));
            let y = run(&tape, &x, depth, true);
            let seed = tensor(tape.backend(), &[rows, 3], &values(2, rows * 3));
            let mut all = vec![bits(y.value())];
            let grads = tape.backward_from(&[(&y, seed)]).unwrap();
            all.push(bits(grads.get(&x).unwrap()));
            all.extend((0..depth).map(|i| bits(&access.grad(ParamId(i as u32)).unwrap())));
            all
        };
        prop_assert_eq!(outcome(groups(depth, num_layers)), outcome(Vec::new()));
    }
}

#[test]
fn a_recompute_group_saves_its_first_input_and_reruns_before_its_backward() {
    let access = resident(&blocks(6, 3, true)).with_recomputed(vec![0..3, 3..5]);
    let tape = Tape::training(&access).with_recompute_check(true);
    let x = tape.leaf(tensor(tape.backend(), &[2, 3], &values(1, 6)));
    let y = run(&tape, &x, 6, true);
    // The inputs of units 0, 3 and 5.
    assert_eq!(tape.saved_elems(), 3 * 6);
    let seed = tensor(tape.backend(), &[2, 3], &values(2, 6));
    access.take_events();
    tape.backward_from(&[(&y, seed)]).unwrap();
    let leases = access.take_events().into_iter();
    let leases: Vec<(u32, Phase)> = leases
        .filter_map(|event| match event {
            AccessEvent::Lease(unit, phase) => Some((unit.0, phase)),
            _ => None,
        })
        .collect();
    let (again, backward) = (Phase::Recompute, Phase::Backward);
    let expected = [
        (5, backward),
        (3, again),
        (4, backward),
        (3, backward),
        (0, again),
        (1, again),
        (2, backward),
        (1, backward),
        (0, backward),
    ];
    assert_eq!(leases, expected);
}

/// An input that several segments share is stored once. A value that skips a segment is stored, not recomputed.
#[test]
fn only_inputs_from_the_previous_unit_are_recomputed() {
    let outcome = |recomputed: Vec<std::ops::Range<u32>>| {
        let access = resident(&blocks(4, 3, true)).with_recomputed(recomputed);
        let tape = Tape::training(&access).with_recompute_check(true);
        let x = tape.leaf(tensor(tape.backend(), &[2, 3], &values(1, 6)));
        let shared = tape.leaf(tensor(tape.backend(), &[2, 3], &values(3, 6)));
        let mut before: [Var; 2] = [x.clone(), x.clone()];
        for unit in 0..4 {
            let [far, near] = &before;
            let inputs = [near, far, &shared];
            let [y] = tape
                .segment(UnitId(unit), inputs, move |scope, [near, far, shared]| {
                    let sum = scope.add(far, shared)?;
                    Ok([block(scope, &scope.add(near, &sum)?, unit as usize)?])
                })
                .unwrap();
            before = [near.clone(), y];
        }
        let kept = tape.saved_elems();
        let seed = tensor(tape.backend(), &[2, 3], &values(2, 6));
        let grads = tape.backward_from(&[(&before[1], seed)]).unwrap();
        let weights = (0..4).map(|i| bits(&access.grad(ParamId(i)).unwrap()));
        let mut all: Vec<Vec<u32>> = weights.collect();
        all.extend([&x, &shared].map(|leaf| bits(grads.get(leaf).unwrap())));
        (kept, all)
    };
    let (kept, plain) = outcome(Vec::new());
    let group = 0..4;
    let (fewer, grouped) = outcome(vec![group]);
    assert_eq!(plain, grouped);
    assert_eq!(kept - fewer, 3 * 6);
}

#[test]
fn inference_saves_no_activations() {
    let access = resident(&blocks(3, 3, true));
    let tape = Tape::inference(&access);
    let x = tape.leaf(tensor(tape.backend(), &[5, 3], &values(1, 15)));
    let y = run(&tape, &x, 3, true);
    assert_eq!((tape.saved_elems(), y.requires_grad()), (0, false));
    let loss = Loss {
        rows: y,
        supervised: 1,
    };
    tape.backward(&loss, 1.0).unwrap();
    assert!(access.grad(ParamId(0)).is_none());
}

#[test]
fn frozen_units_before_the_first_trained_one_are_not_recorded() {
    let shape: &[usize] = &[3, 3];
    let access = resident(&spec(&[
        (0, shape, false),
        (1, shape, true),
        (2, shape, false),
    ]));
    let tape = Tape::training(&access);
    let x = tape.input(tensor(tape.backend(), &[2, 3], &values(1, 6)));
    let y = run(&tape, &x, 3, true);
    assert_eq!(tape.saved_elems(), 2 * 6);
    access.take_events();
    let seed = tensor(tape.backend(), &[2, 3], &values(2, 6));
    tape.backward_from(&[(&y, seed)]).unwrap();
    let events = access.take_events();
    let deposits = |e: &&AccessEvent| matches!(e, AccessEvent::Deposit(_));
    let deposited: Vec<_> = events.iter().filter(deposits).collect();
    assert_eq!(deposited, [&AccessEvent::Deposit(ParamId(1))]);
    assert!(!events.contains(&AccessEvent::Lease(UnitId(0), Phase::Backward)));
}

#[test]
fn a_parameter_used_twice_is_deposited_once() {
    let access = resident(&blocks(1, 3, true));
    let tape = Tape::training(&access);
    let x = tape.input(tensor(tape.backend(), &[2, 3], &values(1, 6)));
    let [y] = tape
        .segment(UnitId(0), [&x], |s, [x]| {
            Ok([block(s, &block(s, x, 0)?, 0)?])
        })
        .unwrap();
    let seed = tensor(tape.backend(), &[2, 3], &values(2, 6));
    tape.backward_from(&[(&y, seed)]).unwrap();
    let deposits = access.take_events();
    let count = deposits
        .iter()
        .filter(|e| **e == AccessEvent::Deposit(ParamId(0)))
        .count();
    assert_eq!(count, 1);
}

#[test]
fn an_unused_output_gives_no_gradient_but_the_used_one_does() {
    let access = resident(&blocks(2, 3, false));
    let tape = Tape::training(&access);
    let x = tape.input(tensor(tape.backend(), &[2, 3], &values(1, 6)));
    let [y, _] = tape
        .segment(UnitId(0), [&x], |s, [x]| {
            Ok([block(s, x, 0)?, block(s, x, 1)?])
        })
        .unwrap();
    let seed = tensor(tape.backend(), &[2, 3], &values(2, 6));
    tape.backward_from(&[(&y, seed)]).unwrap();
    assert!(access.grad(ParamId(0)).is_some());
    assert!(access.grad(ParamId(1)).is_none());
}

#[test]
fn segments_of_units_out_of_order_are_refused() {
    let access = resident(&blocks(2, 3, true));
    let tape = Tape::training(&access);
    let x = tape.input(tensor(tape.backend(), &[2, 3], &values(1, 6)));
    let body = |s: &Scope<'_>, [x]: [&Var; 1]| Ok([s.scale(x, 1.0)?]);
    tape.segment(UnitId(1), [&x], body).unwrap();
    for unit in [UnitId(1), UnitId(0)] {
        let error = tape.segment(unit, [&x], body).unwrap_err();
        assert!(matches!(error, ModelError::UnitOrder { .. }));
    }
}

#[test]
fn values_of_another_recorder_are_refused() {
    let access = resident(&blocks(2, 3, true));
    let other = Tape::training(&access);
    let x = other.leaf(tensor(other.backend(), &[2, 3], &values(1, 6)));
    let tape = Tape::training(&access);
    let body = |s: &Scope<'_>, [x]: [&Var; 1]| Ok([s.scale(x, 1.0)?]);
    let foreign = tape.segment(UnitId(0), [&x], body).unwrap_err();
    assert!(matches!(foreign, ModelError::ForeignVar { .. }));
    // Captured by the closure instead of passed as an input.
    let smuggled = tape.segment(UnitId(1), [], |s, []| Ok([s.scale(&x, 1.0)?]));
    assert!(matches!(
        smuggled.unwrap_err(),
        ModelError::ForeignVar { .. }
    ));
    let last = access.take_events().pop();
    assert_eq!(
        last,
        Some(AccessEvent::End(UnitId(1), Phase::Forward, false))
    );
}

#[test]
fn a_segment_that_recomputes_other_values_is_an_error() {
    let access = resident(&blocks(1, 3, true));
    let runs = Cell::new(0.0f32);
    let tape = Tape::training(&access).with_recompute_check(true);
    let x = tape.input(tensor(tape.backend(), &[2, 3], &values(1, 6)));
    let [y] = tape
        .segment(UnitId(0), [&x], |s, [x]| {
            runs.set(runs.get() + 1.0);
            Ok([s.scale(&block(s, x, 0)?, runs.get())?])
        })
        .unwrap();
    let seed = tensor(tape.backend(), &[2, 3], &values(2, 6));
    let error = tape.backward_from(&[(&y, seed)]).unwrap_err();
    assert!(matches!(error, ModelError::RecomputeDiffers { .. }));
    let last = access.take_events().pop();
    assert_eq!(
        last,
        Some(AccessEvent::End(UnitId(0), Phase::Backward, false))
    );
}

#[test]
fn a_gradient_is_taken_once_and_only_under_its_lease() {
    let access = resident(&blocks(2, 3, true));
    let grad = tensor(&**access.backend(), &[3, 3], &values(3, 9));
    assert!(access.deposit(ParamId(0), &grad).is_err());
    let lease = access.lease(UnitId(0), Phase::Backward).unwrap();
    assert!(access.deposit(ParamId(1), &grad).is_err());
    access.deposit(ParamId(0), &grad).unwrap();
    assert!(access.deposit(ParamId(0), &grad).is_err());
    lease.end().unwrap();
}

#[test]
fn the_recomputed_loss_skips_its_value_and_keeps_its_gradient() {
    let access = resident(&spec(&[(0, &[4, 3], true)]));
    let tape = Tape::training(&access).with_recompute_check(true);
    let x = tape.input(tensor(tape.backend(), &[2, 3], &values(1, 6)));
    let labels = index(tape.backend(), &[1, 3]);
    let [rows] = tape
        .segment(UnitId(0), [&x], move |s, [x]| {
            Ok([s.linear_cross_entropy(x, ParamId(0), &labels)?])
        })
        .unwrap();
    let loss = Loss {
        rows,
        supervised: 2,
    };
    assert!(loss.sum().unwrap() > 0.0);
    tape.backward(&loss, 0.5).unwrap();
    assert!(access.grad(ParamId(0)).is_some());
}

#[test]
fn a_loss_in_the_last_segment_has_the_bits_of_a_recomputed_one() {
    let run = |last: bool, expected: f32, factor: f32| {
        let access = resident(&spec(&[(0, &[3, 3], true), (1, &[4, 3], true)]));
        let tape = Tape::training(&access).with_loss_factor(expected);
        let x = tape.input(tensor(tape.backend(), &[2, 3], &values(1, 6)));
        let labels = index(tape.backend(), &[1, 3]);
        let [y] = tape
            .segment(UnitId(0), [&x], |s, [x]| {
                Ok([s.linear(x, &LinearParams::new(ParamId(0), None))?])
            })
            .unwrap();
        let body = move |s: &Scope<'_>, [y]: [&Var; 1]| {
            Ok([s.linear_cross_entropy(y, ParamId(1), &labels)?])
        };
        let [rows] = match last {
            true => tape.last_segment(UnitId(1), [&y], body),
            false => tape.segment(UnitId(1), [&y], body),
        }
        .unwrap();
        let loss = Loss {
            rows,
            supervised: 2,
        };
        let sum = loss.sum().unwrap();
        tape.backward(&loss, factor).unwrap();
        let grads = [0, 1].map(|i| access.grad(ParamId(i)).unwrap().to_f32_vec().unwrap());
        (sum.to_bits(), grads)
    };
    let recomputed = run(false, 1.0, 0.5);
    assert_eq!(run(true, 0.5, 0.5), recomputed);
    assert_eq!(
        run(true, 1.0, 0.5),
        recomputed,
        "not what the tape expected"
    );
}

#[test]
fn an_observer_sees_each_value_once() {
    let access = resident(&blocks(1, 3, true));
    let seen = std::cell::RefCell::new(Vec::new());
    let observer = |name: &str, value: &Tensor| {
        seen.borrow_mut().push((name.to_owned(), value.shape()));
    };
    let tape = Tape::training(&access).with_observer(&observer);
    let x = tape.input(tensor(tape.backend(), &[2, 3], &values(1, 6)));
    let [y] = tape
        .segment(UnitId(0), [&x], |s, [x]| {
            let y = block(s, x, 0)?;
            s.observe("inner", &y);
            Ok([y])
        })
        .unwrap();
    tape.observe(format_args!("block.{}", 0), &y);
    let seed = tensor(tape.backend(), &[2, 3], &values(2, 6));
    tape.backward_from(&[(&y, seed)]).unwrap();
    let names: Vec<String> = seen.borrow().iter().map(|(n, _)| n.clone()).collect();
    assert_eq!(names, ["inner", "block.0"]);
}

/// Parameter access that copies a unit's weights for each lease, as a sharded store does.
#[derive(Debug)]
struct Gathering {
    inner: ResidentParams,
    backend: Arc<dyn Backend>,
}

impl ParamAccess for Gathering {
    fn backend(&self) -> &Arc<dyn Backend> {
        &self.backend
    }

    fn lease(&self, unit: UnitId, phase: Phase) -> Result<Lease<'_>, EngineError> {
        let spec = self.inner.spec();
        let ids = (0..spec.params.len() as u32).map(ParamId);
        let params = ids
            .filter(|id| spec.params[id.index()].unit == unit)
            .map(|id| {
                let weight = self.inner.weight(id);
                let copy = self.backend.upload(
                    weight.as_bytes(),
                    weight.shape(),
                    weight.dtype(),
                    Tag::Gathered,
                );
                (id, copy.unwrap())
            })
            .collect();
        Ok(Lease::new(self, unit, phase, params))
    }

    fn deposit(&self, _: ParamId, _: &Tensor) -> Result<(), EngineError> {
        Ok(())
    }

    fn is_trainable(&self, id: ParamId) -> bool {
        self.inner.is_trainable(id)
    }

    fn needs_backward(&self, unit: UnitId) -> bool {
        self.inner.needs_backward(unit)
    }
}

impl LeaseOwner for Gathering {
    fn end_lease(&self, _: UnitId, _: Phase, _: bool) -> Result<(), EngineError> {
        assert_eq!(gathered(&*self.backend).0, 0, "a weight outlives its lease");
        Ok(())
    }
}

/// Current and peak bytes of gathered weights.
fn gathered(backend: &dyn Backend) -> (u64, u64) {
    let bytes = backend.pool().stats().tag(Tag::Gathered);
    (bytes.in_use, bytes.peak)
}

#[test]
fn never_more_than_the_leased_unit_is_resident() {
    let access = Gathering {
        inner: resident(&blocks(5, 4, true)),
        backend: backend(),
    };
    let tape = Tape::training(&access);
    let x = tape.leaf(tensor(tape.backend(), &[2, 4], &values(1, 8)));
    let y = run(&tape, &x, 5, true);
    let seed = tensor(tape.backend(), &[2, 4], &values(2, 8));
    tape.backward_from(&[(&y, seed)]).unwrap();
    assert_eq!(gathered(&*access.backend), (0, 64));
}

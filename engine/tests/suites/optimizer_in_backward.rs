//! Updates that begin while backward runs have the bits of updates behind it: when they are kept, when clipping asks for
//! other numbers, and when nothing may change (I6; "exact optimizer in backward").

use crate::toy;
use crate::toy::{Case, announce, engine_for, load_initial, micro_batch, run_world, train_step};
use engine::{
    EngineError, GradDtype, Offload, OptimizerInBackward, Precision, StepReport, Tier, Zero,
};

pub(crate) const ALL: u64 = u64::MAX;
pub(crate) const OFFLOADS: [Offload; 4] = [
    Offload::states(Tier::Device),
    Offload::CPU,
    Offload {
        param: Tier::Host,
        optimizer: Tier::Nvme,
        activation: Tier::Device,
    },
    Offload::states(Tier::Nvme),
];

/// Everything that a run leaves on one rank.
#[derive(Debug, PartialEq)]
pub(crate) struct Left {
    weights: Vec<Vec<u32>>,
    /// Their hash: a difference would fill the screen.
    states: blake3::Hash,
    reports: Vec<StepReport>,
}

pub(crate) fn left(zero: &Zero, reports: Vec<StepReport>) -> Left {
    Left {
        weights: toy::weight_bits(zero),
        states: blake3::hash(&zero.state_bytes().unwrap()),
        reports,
    }
}

/// What every rank is left with after the case's steps.
pub(crate) fn run(case: &Case) -> Vec<Left> {
    run_world(case.world, |comm| {
        let mut zero = engine_for(case, comm).unwrap();
        load_initial(&mut zero);
        let reports = (0..case.steps).map(|step| train_step(case, &mut zero, step).unwrap());
        let reports = reports.collect();
        left(&zero, reports)
    })
}

pub(crate) fn early(case: &Case, most_elems: u64) -> Case {
    let mut case = case.clone();
    case.config.optimizer_in_backward = Some(OptimizerInBackward {
        most_elems,
        single_micro_batch: case.accumulation == 1,
    });
    case
}

fn check(case: &Case, most_elems: u64) {
    let case = &early(case, most_elems);
    let mut plain = case.clone();
    plain.config.optimizer_in_backward = None;
    assert_eq!(run(case), run(&plain), "{case:?}");
}

#[test]
fn committed_updates_in_backward_have_the_bits_of_updates_after_it() {
    for precision in [Precision::F32, Precision::Bf16, Precision::PureBf16] {
        for world in 1..=3 {
            for stage in 0..=3 {
                for offload in OFFLOADS {
                    let case = Case::new(world, stage);
                    check(&case.precision(precision).offload(offload), ALL);
                }
            }
        }
    }
}

#[test]
fn updates_in_backward_have_the_same_bits_with_clipping_and_accumulation() {
    let norms = {
        let reports = &run(&Case::new(2, 3))[0].reports;
        let mut norms: Vec<f64> = reports.iter().map(|report| report.grad_norm).collect();
        norms.sort_by(f64::total_cmp);
        norms
    };
    // Clips every step, about half of them, none.
    let between = (norms[2] + norms[3]) / 2.0;
    for max in [norms[0] / 2.0, between, 10.0 * norms[5]] {
        for accumulation in [1, 3] {
            for (world, stage) in [(1, 0), (2, 2), (3, 3)] {
                for offload in OFFLOADS {
                    let mut case = Case::new(world, stage).offload(offload);
                    case = case.precision(Precision::Bf16);
                    case.accumulation = accumulation;
                    case.config.max_grad_norm = Some(max as f32);
                    check(&case, ALL);
                }
            }
        }
    }
}

#[test]
fn a_bound_on_spare_memory_chooses_units_in_backward_order() {
    let unit = run_world(1, |comm| {
        let zero = engine_for(&Case::new(1, 3), comm).unwrap();
        zero.plan().units()[0].trainable.shard_elems as u64
    })[0];
    for units in 0..=toy::UNITS as u64 {
        // One element short of the next unit.
        let most = (units + 1) * unit - 1;
        let case = early(&Case::new(1, 3).offload(Offload::CPU), most);
        run_world(1, |comm| {
            let zero = engine_for(&case, comm).unwrap();
            let chosen = zero.plan().units().iter().rev();
            let chosen: Vec<bool> = chosen
                .map(|u| zero.plan().updates_in_backward(u.id))
                .collect();
            let expected: Vec<bool> = (0..toy::UNITS as u64).map(|u| u < units).collect();
            assert_eq!(chosen, expected);
        });
        check(&case, most);
    }
}

#[test]
fn updates_in_backward_have_the_same_bits_with_any_chunks_buckets_and_bf16_sums() {
    for sub_group in [1, 2048, 1 << 20] {
        for buckets in [1, 3] {
            let mut case = Case::new(2, 3).offload(Offload::states(Tier::Nvme));
            case.config.sub_group_elems = sub_group;
            case.config.buckets_in_flight = buckets;
            check(&case, ALL);
            case.config.grad_dtype = Some(GradDtype::Bf16);
            check(&case, ALL);
        }
    }
}

#[test]
fn a_non_finite_gradient_rolls_back_every_update_in_backward() {
    for precision in [Precision::F32, Precision::Bf16, Precision::PureBf16] {
        for offload in OFFLOADS {
            for clip in [None, Some(0.05)] {
                let mut case = Case::new(3, 3).precision(precision).offload(offload);
                case.config.max_grad_norm = clip;
                let case = early(&case, ALL);
                let poisoned = run_world(3, |comm| {
                    let rank = comm.world().rank;
                    let mut zero = engine_for(&case, comm).unwrap();
                    load_initial(&mut zero);
                    train_step(&case, &mut zero, 0).unwrap();
                    let before = left(&zero, Vec::new());
                    let own = toy::own_samples(&case, zero.comm().world(), 1);
                    announce(&mut zero, &own).unwrap();
                    let value = if rank == 1 { f32::NAN } else { 0.0 };
                    micro_batch(&mut zero, &own, value).unwrap();
                    assert!(!zero.step(toy::RATE).unwrap().applied);
                    assert_eq!(left(&zero, Vec::new()), before);
                    train_step(&case, &mut zero, 1).unwrap();
                    left(&zero, Vec::new()).weights
                });
                let mut clean = case.clone();
                (clean.config.optimizer_in_backward, clean.steps) = (None, 2);
                assert_eq!(poisoned[0], run(&clean)[0].weights, "{case:?}");
            }
        }
    }
}

#[test]
fn an_update_with_other_arguments_than_announced_is_redone_or_refused() {
    let mut case = Case::new(2, 3).offload(Offload::CPU);
    let step = |case: &Case, announced: bool, rate: f64| {
        run_world(2, |comm| {
            let mut zero = engine_for(case, comm).unwrap();
            load_initial(&mut zero);
            let own = toy::own_samples(case, zero.comm().world(), 0);
            if announced {
                announce(&mut zero, &own).unwrap();
            }
            micro_batch(&mut zero, &own, 0.0)?;
            let before = left(&zero, Vec::new());
            let report = zero.step(rate);
            if report.is_err() {
                assert_eq!(left(&zero, Vec::new()), before, "nothing is half changed");
            }
            report?;
            Ok::<_, EngineError>(left(&zero, Vec::new()))
        })
    };
    let plain = step(&case, true, 0.5);
    // Gradients that nothing keeps.
    for (announced, rate) in [(true, 0.5), (false, toy::RATE)] {
        for outcome in step(&early(&case, ALL), announced, rate) {
            let refused = matches!(outcome, Err(EngineError::Consumed { .. }));
            assert!(refused, "{outcome:?}");
        }
    }
    // Gradients that are kept: another rate is no reason to fail.
    case.config.max_grad_norm = Some(1e9);
    for (kept, plain) in step(&early(&case, ALL), true, 0.5).iter().zip(&plain) {
        assert_eq!(kept.as_ref().unwrap(), plain.as_ref().unwrap());
    }
}

#[test]
fn a_failed_pass_rolls_back_its_updates() {
    let case = early(&Case::new(1, 3).offload(Offload::CPU), ALL);
    let mut plain = case.clone();
    plain.config.optimizer_in_backward = None;
    let failed = run_world(1, |comm| {
        let mut zero = engine_for(&case, comm).unwrap();
        load_initial(&mut zero);
        let own = toy::own_samples(&case, zero.comm().world(), 0);
        announce(&mut zero, &own).unwrap();
        // The last unit's gradients are at the thread when the next lease is dropped.
        toy::abandoned_pass(&mut zero, &own);
        zero.announce_update(0.0, 1.0, 1).unwrap();
        let reports = (0..case.steps).map(|step| train_step(&case, &mut zero, step).unwrap());
        let reports = reports.collect();
        left(&zero, reports)
    });
    assert_eq!(failed, run(&plain));
}

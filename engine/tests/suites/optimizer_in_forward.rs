//! Updates that go on beside the next pass have the bits of updates before it (I6).

use crate::optimizer_in_backward::{ALL, OFFLOADS, early, left, run};
use crate::toy;
use crate::toy::{Case, engine_for, load_initial, micro_batch, run_world, train_step};
use engine::trace::Lane;
use engine::{GradDtype, Offload, Precision};

fn late(case: &Case) -> Case {
    let mut case = case.clone();
    case.config.optimizer_in_forward = true;
    case
}

fn check(case: &Case) {
    assert_eq!(run(&late(case)), run(case), "{case:?}");
}

#[test]
fn updates_in_forward_have_the_bits_of_updates_before_it() {
    for precision in [Precision::F32, Precision::Bf16, Precision::PureBf16] {
        for world in 1..=3 {
            for stage in 0..=3 {
                for offload in OFFLOADS {
                    let case = Case::new(world, stage);
                    check(&case.precision(precision).offload(offload));
                }
            }
        }
    }
}

/// Units that wait for the norm go late, where others were updated early.
#[test]
fn updates_in_forward_have_the_same_bits_in_every_configuration() {
    for (prefetch, sub_group) in [(0, 1), (1, 2048), (3, 1 << 20)] {
        for max_norm in [None, Some(1e-3), Some(1e9)] {
            for accumulation in [1, 3] {
                let mut case = Case::new(2, 3).offload(Offload::CPU);
                case.accumulation = accumulation;
                case.config.prefetch_units = prefetch;
                case.config.sub_group_elems = sub_group;
                case.config.max_grad_norm = max_norm;
                check(&case);
                for most_elems in [2048, ALL] {
                    check(&early(&case, most_elems));
                }
                case.config.grad_dtype = Some(GradDtype::Bf16);
                check(&case);
            }
        }
    }
}

#[test]
fn every_unit_is_updated_in_forward_where_the_plan_says_so() {
    for (stage, world, expected) in [(3, 2, true), (0, 2, true), (2, 1, true), (2, 2, false)] {
        let case = late(&Case::new(world, stage).offload(Offload::CPU));
        let lanes = run_world(world, |comm| {
            let mut zero = engine_for(&case, comm).unwrap();
            load_initial(&mut zero);
            assert_eq!(zero.plan().updates_in_forward(), expected, "{case:?}");
            zero.trace().start();
            train_step(&case, &mut zero, 0).unwrap();
            zero.finish_updates().unwrap();
            let spans = zero.trace().stop();
            let count = |lane| spans.iter().filter(|span| span.lane == lane).count();
            [count(Lane::UpdateInForward), count(Lane::Update)]
        });
        for [behind, before] in lanes {
            assert_eq!(behind, if expected { toy::UNITS } else { 0 }, "{case:?}");
            assert_eq!(before == 0, expected, "{case:?}");
        }
    }
    let on_disk = late(&Case::new(1, 3).offload(OFFLOADS[2]));
    run_world(1, |comm| {
        let zero = engine_for(&on_disk, comm).unwrap();
        assert!(!zero.plan().updates_in_forward());
    });
}

#[test]
fn after_a_failed_pass_or_a_skipped_step_every_unit_is_updated() {
    let plain = Case::new(1, 3).offload(Offload::CPU);
    let case = late(&plain);
    let disturbed = run_world(1, |comm| {
        let mut zero = engine_for(&case, comm).unwrap();
        load_initial(&mut zero);
        let mut reports = vec![train_step(&case, &mut zero, 0).unwrap()];
        let own = toy::own_samples(&case, zero.comm().world(), 0);
        toy::abandoned_pass(&mut zero, &own);
        micro_batch(&mut zero, &own, f32::NAN).unwrap();
        assert!(!zero.step(toy::RATE).unwrap().applied);
        let rest = (1..case.steps).map(|step| train_step(&case, &mut zero, step).unwrap());
        reports.extend(rest);
        left(&zero, reports)
    });
    assert_eq!(disturbed, run(&plain));
}

//! The golden packs through the real engine: every quantity in one rank, trajectories in every
//! layout, a batch divided over ranks.
#![allow(clippy::unwrap_used, reason = "a test binary")]

use engine::Offload;
use models::open_processor;
use tests::golden::{Comparison, Pack, compare_run};
use tests::parity::{check_pack, check_trajectory};
use tests::world::{Layout, NO_OFFLOAD, run_case};

fn all_ok(what: &str, comparisons: &[Comparison]) {
    assert!(!comparisons.is_empty(), "{what}: nothing was compared");
    let failed: Vec<String> = comparisons
        .iter()
        .filter(|c| !c.ok())
        .map(ToString::to_string)
        .collect();
    assert!(failed.is_empty(), "{what}:\n{}", failed.join("\n"));
}

#[test]
fn every_stored_quantity_agrees() {
    for dir in Pack::built_in() {
        for (title, comparisons) in check_pack(&dir).unwrap() {
            all_ok(&format!("{} {title}", dir.display()), &comparisons);
        }
    }
}

#[test]
fn the_full_trajectory_is_followed_in_every_layout() {
    for dir in Pack::built_in() {
        let pack = Pack::read(&dir).unwrap();
        for world in 1..=3 {
            for stage in 0..=3 {
                for offload in [NO_OFFLOAD, Offload::CPU] {
                    let layout = Layout {
                        world,
                        stage,
                        offload,
                    };
                    let result = check_trajectory(&pack, "full", layout).unwrap();
                    all_ok(&format!("{} {layout:?}", dir.display()), &result);
                }
            }
        }
    }
}

#[test]
fn adapters_and_frozen_parts_follow_their_trajectories_sharded() {
    for dir in Pack::built_in() {
        let pack = Pack::read(&dir).unwrap();
        let layout = Layout {
            world: 2,
            stage: 3,
            offload: Offload::CPU,
        };
        for name in pack.trajectory.runs.keys() {
            let result = check_trajectory(&pack, name, layout).unwrap();
            all_ok(&format!("{} {name}", dir.display()), &result);
        }
    }
}

#[test]
fn a_batch_divided_over_two_ranks_gives_its_stored_loss_and_gradients() {
    for dir in Pack::built_in() {
        let pack = Pack::read(&dir).unwrap();
        let processor = open_processor(&dir).unwrap();
        let case = pack.case("padded_batch").unwrap();
        let samples = case.encode(&*processor).unwrap();
        for stage in [1, 3] {
            let layout = Layout {
                world: 2,
                stage,
                offload: Offload::CPU,
            };
            let run = run_case(&pack, &samples, layout).unwrap();
            all_ok(
                &format!("{} {layout:?}", dir.display()),
                &compare_run(case, &run).unwrap(),
            );
        }
    }
}

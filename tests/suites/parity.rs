//! The golden packs on the real engine: every quantity on one rank, trajectories in every layout, a batch divided over
//! ranks.
#![allow(clippy::unwrap_used, reason = "a test binary")]

use engine::Offload;
use models::open_processor;
use tests::golden::{Comparison, Pack, packs_of};
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
fn every_stored_quantity_of_the_packs_agrees() {
    for dir in Pack::built_in() {
        for (title, comparisons) in check_pack(&dir).unwrap() {
            all_ok(&format!("{} {title}", dir.display()), &comparisons);
        }
    }
}

#[test]
fn stored_trajectories_are_followed_in_every_layout() {
    for dir in Pack::built_in() {
        let (pack, processor) = (Pack::read(&dir).unwrap(), open_processor(&dir).unwrap());
        let family = packs_of(pack.family);
        let mut all = family.trajectories(&pack, &*processor).unwrap();
        let full = all.iter().position(|t| t.name == "full").unwrap_or(0);
        let first = &mut all[full];
        // Three updates reveal a wrong layout. All eight run in one layout and in the most sharded one.
        first.losses.truncate(4);
        first.grad_norms.truncate(3);
        first.after.clear();
        first.norms_after.clear();
        for world in 1..=3 {
            for stage in 0..=3 {
                for offload in [NO_OFFLOAD, Offload::CPU] {
                    let layout = Layout {
                        world,
                        stage,
                        offload,
                        ..Layout::SINGLE
                    };
                    let result = check_trajectory(&pack, first, layout).unwrap();
                    all_ok(&format!("{} {layout:?}", dir.display()), &result);
                }
            }
        }
    }
}

#[test]
fn sharded_adapters_and_frozen_parts_follow_their_trajectories() {
    for dir in Pack::built_in() {
        let (pack, processor) = (Pack::read(&dir).unwrap(), open_processor(&dir).unwrap());
        let layout = Layout {
            world: 2,
            stage: 3,
            offload: Offload::CPU,
            ..Layout::SINGLE
        };
        let all = packs_of(pack.family).trajectories(&pack, &*processor);
        for trajectory in all.unwrap() {
            let result = check_trajectory(&pack, &trajectory, layout).unwrap();
            all_ok(&format!("{} {}", dir.display(), trajectory.name), &result);
        }
    }
}

#[test]
fn a_batch_divided_over_two_ranks_gives_its_stored_loss_and_gradients() {
    for dir in Pack::built_in() {
        let (pack, processor) = (Pack::read(&dir).unwrap(), open_processor(&dir).unwrap());
        let family = packs_of(pack.family);
        let batches = pack.cases.iter().filter_map(|case| {
            let samples = family.samples(&pack, case, &*processor).unwrap();
            (samples.len() > 1).then_some((case, samples))
        });
        for (case, samples) in batches {
            for stage in [1, 3] {
                let layout = Layout {
                    world: 2,
                    stage,
                    offload: Offload::CPU,
                    ..Layout::SINGLE
                };
                let run = run_case(&pack, &samples, layout).unwrap();
                // Observed row values exist on one rank only.
                let divided: Vec<Comparison> = family
                    .compare_run(case, &samples, &run)
                    .unwrap()
                    .into_iter()
                    .filter(|c| c.quantity.starts_with("grad") || c.quantity == "loss")
                    .collect();
                all_ok(&format!("{} {layout:?}", dir.display()), &divided);
            }
        }
    }
}

//! Checkpoints through the engine: exact resume, other world sizes and stages (I9, I10).

use crate::toy::{Case, engine_for, load_initial, run_world, train, train_step, weight_bits};
use engine::checkpoint::{Checkpoint, Writer, find_latest};
use engine::comm::Tag;
use engine::{EngineError, Offload, Precision, Zero};
use std::path::Path;

/// All ranks save; rank 0 commits.
pub fn save(zero: &mut Zero, output: &Path) {
    let world = zero.comm().world();
    let step = zero.step_count();
    let mut writer = Writer::begin(output, step, world.rank as u32, world.size as u32).unwrap();
    zero.write_state(&mut writer).unwrap();
    writer.finish_rank().unwrap();
    zero.comm().barrier(Tag::new("saved", 0)).unwrap();
    if world.rank == 0 {
        writer.commit(serde_json::Value::Null, 0).unwrap();
    }
    zero.comm().barrier(Tag::new("committed", 0)).unwrap();
}

fn train_and_save(case: &Case, output: &Path) {
    run_world(case.world, |comm| {
        let mut zero = engine_for(case, comm).unwrap();
        load_initial(&mut zero);
        for step in 0..case.steps {
            train_step(case, &mut zero, step).unwrap();
        }
        save(&mut zero, output);
    });
}

/// Restores the latest checkpoint into a fresh world and trains on to `until`.
fn resume(case: &Case, output: &Path, until: usize) -> Vec<Vec<u32>> {
    run_world(case.world, |comm| {
        let mut zero = engine_for(case, comm).unwrap();
        load_initial(&mut zero);
        let directory = find_latest(output).unwrap().unwrap();
        let checkpoint = Checkpoint::open(&directory).unwrap();
        checkpoint.verify().unwrap();
        zero.restore(&checkpoint, checkpoint.step()).unwrap();
        let done = zero.step_count() as usize;
        for step in done..until {
            train_step(case, &mut zero, step).unwrap();
        }
        weight_bits(&zero)
    })
    .remove(0)
}

#[test]
fn resume_is_bit_identical_in_every_precision_and_across_stages_and_tiers() {
    for precision in [
        Precision::F32,
        Precision::Bf16,
        Precision::Fp16,
        Precision::PureBf16,
    ] {
        for (saved, loaded) in [(3, 3), (0, 3), (3, 0), (1, 2), (2, 1)] {
            let dir = tempfile::tempdir().unwrap();
            let mut first = Case::new(2, saved).precision(precision);
            first.steps = 3;
            train_and_save(&first, dir.path());
            let second = Case::new(2, loaded)
                .precision(precision)
                .offload(Offload::CPU);
            let whole = train(&Case::new(2, saved).precision(precision)).0;
            assert_eq!(
                resume(&second, dir.path(), 6),
                whole,
                "{precision:?} {saved} -> {loaded}"
            );
        }
    }
}

#[test]
fn shard_groups_save_one_copy_and_resume_at_any_group_size() {
    let case = |group: Option<usize>| {
        let mut case = Case::new(4, 3);
        case.config.shard_group = group;
        case
    };
    let whole = train(&case(None)).0;
    for (saved, loaded) in [
        (Some(2), Some(2)),
        (Some(1), None),
        (None, Some(2)),
        (Some(2), Some(1)),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let mut first = case(saved);
        first.steps = 3;
        train_and_save(&first, dir.path());
        assert_eq!(
            resume(&case(loaded), dir.path(), 6),
            whole,
            "{saved:?} -> {loaded:?}"
        );
    }
}

#[test]
fn a_checkpoint_loads_unchanged_at_every_world_size() {
    for (from, to) in [(1, 4), (4, 1), (2, 3), (3, 2), (4, 3)] {
        for stage in [1, 3] {
            let dir = tempfile::tempdir().unwrap();
            let mut first = Case::new(from, stage);
            first.steps = 2;
            train_and_save(&first, dir.path());
            let saved = train(&first).0;
            assert_eq!(
                resume(&Case::new(to, 3), dir.path(), 2),
                saved,
                "{from} -> {to}"
            );
            // And on through a second checkpoint at the other size, back to the first.
            let again = tempfile::tempdir().unwrap();
            run_world(to, |comm| {
                let mut zero = engine_for(&Case::new(to, stage), comm).unwrap();
                let directory = find_latest(dir.path()).unwrap().unwrap();
                let checkpoint = Checkpoint::open(&directory).unwrap();
                zero.restore(&checkpoint, checkpoint.step()).unwrap();
                save(&mut zero, again.path());
            });
            assert_eq!(resume(&first, again.path(), 2), saved);
        }
    }
}

#[test]
fn a_checkpoint_with_other_trainable_parts_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut first = Case::new(1, 2);
    first.frozen_units = vec![0];
    train_and_save(&first, dir.path());
    run_world(1, |comm| {
        let mut zero = engine_for(&Case::new(1, 2), comm).unwrap();
        let checkpoint = Checkpoint::open(&find_latest(dir.path()).unwrap().unwrap()).unwrap();
        let names: Vec<_> = checkpoint
            .tensors()
            .iter()
            .map(|t| t.name.as_str())
            .collect();
        assert!(
            !names.iter().any(|n| n.starts_with("units.0.")),
            "frozen parts are not written"
        );
        let error = zero.restore(&checkpoint, 6).unwrap_err();
        assert!(
            matches!(&error, EngineError::CheckpointMismatch { missing, .. }
                if missing.len() == 2 && missing[0] == "units.0.bias"),
            "{error}"
        );
    });
}

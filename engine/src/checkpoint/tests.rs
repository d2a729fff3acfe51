//! Tests of whole saves and loads.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kernels::DType;
use proptest::prelude::*;
use serde_json::json;

use super::faulty::{DiskFault, FaultyDisk};
use super::fs::{Disk, FileSystem};
use super::*;

/// A tensor of the test model.
#[derive(Clone, Debug)]
struct Tensor {
    name: String,
    kind: &'static str,
    dtype: DType,
    shape: Vec<usize>,
}

impl Tensor {
    fn elems(&self) -> u64 {
        self.shape.iter().product::<usize>() as u64
    }

    /// Bytes of an element range, different in each generation of the model.
    fn bytes(&self, generation: u64, elems: Range<u64>) -> Vec<u8> {
        let size_bytes = self.dtype.size_bytes() as u64;
        let salt = self.name.len() as u64 * 31 + self.kind.len() as u64 * 7 + generation * 101;
        (elems.start * size_bytes..elems.end * size_bytes)
            .map(|i| ((i + salt).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8)
            .collect()
    }
}

fn model() -> Vec<Tensor> {
    let tensor = |name: &str, kind, dtype, shape: &[usize]| Tensor {
        name: name.into(),
        kind,
        dtype,
        shape: shape.to_vec(),
    };
    vec![
        tensor("llm.a.weight", "weight", DType::BF16, &[5, 7]),
        tensor("llm.a.weight", "master", DType::F32, &[5, 7]),
        tensor("llm.a.weight", "exp_avg", DType::F32, &[5, 7]),
        tensor("vision/odd name.bias", "weight", DType::BF16, &[1]),
        tensor("empty", "weight", DType::F32, &[0, 3]),
    ]
}

fn shard(elems: u64, rank: u32, world_size: u32) -> Range<u64> {
    let edge = |rank: u32| elems * u64::from(rank) / u64::from(world_size);
    edge(rank)..edge(rank + 1)
}

/// Inputs of a save.
#[derive(Clone, Copy)]
struct Save<'a> {
    output: &'a Path,
    step: u64,
    generation: u64,
    world_size: u32,
    save_total_limit: usize,
}

fn save_on(
    disk: &Arc<dyn FileSystem>,
    tensors: &[Tensor],
    save: Save<'_>,
) -> Result<PathBuf, CheckpointError> {
    let Save {
        output,
        step,
        generation,
        world_size,
        save_total_limit,
    } = save;
    let mut writers = (0..world_size)
        .map(|rank| Writer::begin_on(disk.clone(), output, step, rank, world_size))
        .collect::<Result<Vec<_>, _>>()?;
    for (rank, writer) in (0..).zip(&mut writers) {
        let ranges: Vec<_> = tensors
            .iter()
            .map(|t| shard(t.elems(), rank, world_size))
            .collect();
        let bytes: Vec<_> = tensors
            .iter()
            .zip(&ranges)
            .map(|(t, r)| t.bytes(generation, r.clone()))
            .collect();
        let pieces = tensors.iter().zip(&ranges).zip(&bytes).enumerate();
        writer.write_pieces(pieces.map(|(i, ((tensor, range), bytes))| Piece {
            name: &tensor.name,
            kind: tensor.kind,
            dtype: tensor.dtype,
            shape: &tensor.shape,
            start: range.start,
            elems: range.end - range.start,
            bytes: if i % 2 == 0 {
                PieceBytes::Slice(bytes)
            } else {
                PieceBytes::Produce(Box::new(move |sink| {
                    bytes.chunks(40).try_for_each(|part| sink.write(part))?;
                    Ok(())
                }))
            },
        }))?;
        writer.finish_rank()?;
    }
    let mut main = writers.swap_remove(0);
    main.add_file(
        "trainer_state.json",
        format!("{{\"generation\": {generation}}}").as_bytes(),
    )?;
    main.add_file("nested/deep/config.json", b"{}")?;
    main.commit(json!({ "generation": generation }), save_total_limit)
}

fn save(tensors: &[Tensor], save: Save<'_>) -> PathBuf {
    let disk: Arc<dyn FileSystem> = Arc::new(FaultyDisk::new(DiskFault::None, 0, true));
    save_on(&disk, tensors, save).unwrap()
}

fn simple(output: &Path, step: u64, world_size: u32) -> Save<'_> {
    Save {
        output,
        step,
        generation: step,
        world_size,
        save_total_limit: 0,
    }
}

fn assert_holds(checkpoint: &Checkpoint, tensors: &[Tensor], generation: u64, world_size: u32) {
    assert_eq!(checkpoint.meta()["generation"], generation);
    assert_eq!(checkpoint.tensors().len(), tensors.len());
    for tensor in tensors {
        for rank in 0..world_size {
            let range = shard(tensor.elems(), rank, world_size);
            let expected = tensor.bytes(generation, range.clone());
            let mut out = vec![0; expected.len()];
            checkpoint
                .read(tensor.kind, &tensor.name, range, &mut out)
                .unwrap();
            assert_eq!(out, expected, "{tensor:?}");
        }
    }
}

#[test]
fn a_checkpoint_on_the_real_disk_reads_back_and_verifies() {
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().join("runs/a");
    let disk: Arc<dyn FileSystem> = Arc::new(Disk);
    let path = save_on(&disk, &model(), simple(&output, 3, 2)).unwrap();
    assert_eq!(find_latest(&output).unwrap(), Some(path.clone()));
    let checkpoint = Checkpoint::open(&path).unwrap();
    checkpoint.verify().unwrap();
    assert_eq!((checkpoint.step(), checkpoint.world_size()), (3, 2));
    assert_eq!(
        checkpoint.read_file("nested/deep/config.json").unwrap(),
        b"{}"
    );
    assert_holds(&checkpoint, &model(), 3, 1);
    let names: Vec<String> = fs::read_dir(&output)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(names.len(), 2, "{names:?}");
    // The same step again, over the existing directory.
    save_on(
        &disk,
        &model(),
        Save {
            generation: 9,
            ..simple(&output, 3, 1)
        },
    )
    .unwrap();
    assert_holds(&Checkpoint::open(&path).unwrap(), &model(), 9, 1);
}

fn dtype() -> impl Strategy<Value = DType> {
    proptest::sample::select(vec![
        DType::F32,
        DType::BF16,
        DType::F16,
        DType::I32,
        DType::U8,
    ])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn a_checkpoint_of_any_world_size_loads_at_any_other(
        shapes in proptest::collection::vec(
            (proptest::collection::vec(0usize..6, 0..4), dtype()), 1..6),
        writers in 1u32..6,
        readers in 1u32..6,
    ) {
        let tensors: Vec<Tensor> = shapes
            .into_iter()
            .enumerate()
            .map(|(i, (shape, dtype))| Tensor { name: format!("t{i}"), kind: "weight", dtype, shape })
            .collect();
        let directory = tempfile::tempdir().unwrap();
        let path = save(&tensors, simple(directory.path(), 1, writers));
        let checkpoint = Checkpoint::open(&path).unwrap();
        checkpoint.verify().unwrap();
        assert_holds(&checkpoint, &tensors, 1, readers);
    }
}

#[test]
fn ranges_and_names_are_checked_on_reading() {
    let directory = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(&save(&model(), simple(directory.path(), 1, 2))).unwrap();
    let read = |name: &str, range, bytes| {
        checkpoint
            .read("weight", name, range, &mut vec![0; bytes])
            .map_err(|e| e.to_string())
    };
    assert!(read("llm.a.weight", 34..35, 2).is_ok());
    assert!(read("llm.a.weight", 34..36, 4).is_err());
    assert!(read("llm.a.weight", Range { start: 3, end: 2 }, 0).is_err());
    assert!(read("llm.a.weight", 0..2, 5).is_err());
    assert!(
        read("llm.b.weight", 0..1, 2)
            .unwrap_err()
            .contains("no weight of `llm.b.weight`")
    );
    assert!(checkpoint.tensor("exp_avg", "llm.a.weight").is_some());
    assert!(checkpoint.read_file("../latest").is_err());
}

fn all_files(directory: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(all_files(&path));
        } else {
            files.push(path);
        }
    }
    files
}

#[test]
fn a_missing_truncated_or_longer_file_is_refused_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let path = save(&model(), simple(directory.path(), 1, 2));
    for file in all_files(&path) {
        let bytes = fs::read(&file).unwrap();
        fs::remove_file(&file).unwrap();
        let missing = Checkpoint::open(&path).unwrap_err();
        assert!(matches!(&missing, CheckpointError::MissingFile { path } if *path == file));
        for changed in [&bytes[..bytes.len() - 1], &[&bytes[..], b"x"].concat()] {
            fs::write(&file, changed).unwrap();
            let error = Checkpoint::open(&path).unwrap_err().to_string();
            let name = file.file_name().unwrap().to_str().unwrap();
            assert!(error.contains(name), "{error}");
        }
        fs::write(&file, &bytes).unwrap();
    }
    Checkpoint::open(&path).unwrap().verify().unwrap();
}

#[test]
fn a_flipped_byte_anywhere_is_found_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let path = save(&model(), simple(directory.path(), 1, 2));
    for file in all_files(&path) {
        let bytes = fs::read(&file).unwrap();
        for i in (0..bytes.len()).step_by(1 + bytes.len() / 50) {
            let mut flipped = bytes.clone();
            flipped[i] ^= 0x10;
            fs::write(&file, &flipped).unwrap();
            let error = Checkpoint::open(&path).and_then(|checkpoint| checkpoint.verify());
            let error = error.expect_err("a flipped byte").to_string();
            let name = file.file_name().unwrap().to_str().unwrap();
            assert!(error.contains(name), "byte {i}: {error}");
        }
        fs::write(&file, &bytes).unwrap();
    }
}

#[test]
fn exchanged_rank_files_and_links_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = save(&model(), simple(directory.path(), 1, 2));
    let state = |rank: u32| path.join(format!("state/rank-{rank:04}.safetensors"));
    fs::rename(state(0), path.join("x")).unwrap();
    fs::rename(state(1), state(0)).unwrap();
    fs::rename(path.join("x"), state(1)).unwrap();
    assert!(
        Checkpoint::open(&path)
            .and_then(|checkpoint| checkpoint.verify())
            .is_err()
    );

    let path = save(&model(), simple(directory.path(), 2, 1));
    let outside = directory.path().join("outside.json");
    let file = path.join("trainer_state.json");
    fs::rename(&file, &outside).unwrap();
    std::os::unix::fs::symlink(&outside, &file).unwrap();
    assert!(matches!(
        Checkpoint::open(&path),
        Err(CheckpointError::UnsafePath { .. })
    ));
}

#[test]
fn gaps_overlaps_and_absent_ranks_are_found_before_anything_is_published() {
    let directory = tempfile::tempdir().unwrap();
    let attempt = |ranges: &[(u64, u64)], finish: bool| {
        let world_size = ranges.len() as u32;
        let mut writers: Vec<Writer> = (0..world_size)
            .map(|rank| Writer::begin(directory.path(), 1, rank, world_size).unwrap())
            .collect();
        for (rank, writer) in writers.iter_mut().enumerate() {
            let (start, elems) = ranges[rank];
            let bytes = vec![0; elems as usize];
            let (name, kind, shape) = ("a", "weight", &[10][..]);
            let bytes = PieceBytes::Slice(&bytes);
            let piece = Piece {
                name,
                kind,
                dtype: DType::U8,
                shape,
                start,
                elems,
                bytes,
            };
            writer.write_pieces([piece]).unwrap();
            if finish || rank == 0 {
                writer.finish_rank().unwrap();
            }
        }
        writers.swap_remove(0).commit(json!({}), 0)
    };
    let coverage = |result| matches!(result, Err(CheckpointError::Coverage { .. }));
    assert!(coverage(attempt(&[(0, 4), (5, 5)], true)));
    assert!(coverage(attempt(&[(0, 6), (5, 5)], true)));
    assert!(coverage(attempt(&[(0, 9)], true)));
    let incomplete = attempt(&[(0, 5), (5, 5)], false);
    assert!(matches!(
        incomplete,
        Err(CheckpointError::RankIncomplete { rank: 1, .. })
    ));
    assert_eq!(find_latest(directory.path()).unwrap(), None);
    attempt(&[(0, 5), (5, 5)], true).unwrap();
}

#[test]
fn pieces_that_contradict_themselves_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let attempt = |name, kind, start, elems, bytes: PieceBytes<'_>| {
        let mut writer = Writer::begin(directory.path(), 1, 0, 1).unwrap();
        let piece = Piece {
            name,
            kind,
            dtype: DType::F32,
            shape: &[3],
            start,
            elems,
            bytes,
        };
        writer.write_pieces([piece]).unwrap_err()
    };
    let slice = |n: usize| PieceBytes::Slice(&[0; 64][..n]);
    let bad = |error| matches!(error, CheckpointError::BadTensor { .. });
    assert!(bad(attempt("a", "weight", 1, 3, slice(12))));
    assert!(bad(attempt("a", "weight", u64::MAX, 3, slice(12))));
    assert!(bad(attempt("a", "weight", 0, 3, slice(11))));
    assert!(bad(attempt("", "weight", 0, 3, slice(12))));
    assert!(bad(attempt("a", "we/ight", 0, 3, slice(12))));
    let short = PieceBytes::Produce(Box::new(|sink| Ok(sink.write(&[0; 8])?)));
    assert!(matches!(
        attempt("a", "w", 0, 3, short),
        CheckpointError::WriteOrder { .. }
    ));
    let failing = PieceBytes::Produce(Box::new(|_| Err("tier is gone".into())));
    assert!(matches!(
        attempt("a", "w", 0, 3, failing),
        CheckpointError::Producer { .. }
    ));
    let long = PieceBytes::Produce(Box::new(|sink| Ok(sink.write(&[0; 16])?)));
    assert!(matches!(
        attempt("a", "w", 0, 3, long),
        CheckpointError::WriteOrder { .. }
    ));
}

#[test]
fn extra_files_stay_inside_the_checkpoint_and_off_reserved_names() {
    let directory = tempfile::tempdir().unwrap();
    let mut other = Writer::begin(directory.path(), 1, 1, 2).unwrap();
    assert!(matches!(
        other.add_file("a", b""),
        Err(CheckpointError::OutOfTurn { .. })
    ));
    let mut main = Writer::begin(directory.path(), 1, 0, 2).unwrap();
    for path in ["../a", "/a", "MANIFEST.json", "state/rank-0000.json", ""] {
        assert!(main.add_file(path, b"").is_err(), "{path}");
    }
    let model = main.directory().join("model.safetensors");
    assert!(matches!(
        main.adopt_file("model.safetensors"),
        Err(CheckpointError::MissingFile { .. })
    ));
    fs::write(&model, b"weights").unwrap();
    // A file that nobody adopts is not part of the checkpoint.
    fs::write(main.directory().join("state/rank-0007.json"), b"stale").unwrap();
    main.adopt_file("model.safetensors").unwrap();
    for writer in [&mut main, &mut other] {
        writer.finish_rank().unwrap();
    }
    let path = main.commit(json!(null), 0).unwrap();
    assert_eq!(
        fs::read(path.join("model.safetensors")).unwrap(),
        b"weights"
    );
    assert!(!path.join("state/rank-0007.json").exists());
    assert_eq!(Checkpoint::open(&path).unwrap().files().len(), 3);
}

#[test]
fn pruning_keeps_the_newest_checkpoints_and_foreign_directories() {
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path();
    for foreign in ["checkpoint-1", "checkpoint-2x", "notes"] {
        fs::create_dir(output.join(foreign)).unwrap();
    }
    let steps = || {
        list(output)
            .unwrap()
            .into_iter()
            .map(|(step, _)| step)
            .collect::<Vec<_>>()
    };
    for step in [10, 20, 30, 40] {
        save(&model(), simple(output, step, 1));
    }
    assert_eq!(steps(), [10, 20, 30, 40]);
    save(
        &model(),
        Save {
            save_total_limit: 3,
            ..simple(output, 50, 1)
        },
    );
    assert_eq!(steps(), [30, 40, 50]);
    // A run resumed from an earlier step: its checkpoint is the newest although its step is not the highest.
    let newest = save(
        &model(),
        Save {
            save_total_limit: 1,
            ..simple(output, 35, 1)
        },
    );
    assert_eq!(steps(), [35]);
    assert_eq!(find_latest(output).unwrap(), Some(newest));
    // Checkpoints that a run left behind when it went back are removed before its own.
    for step in [40, 50, 60] {
        save(&model(), simple(output, step, 1));
    }
    set_latest(output, 40).unwrap();
    save(
        &model(),
        Save {
            save_total_limit: 3,
            ..simple(output, 45, 1)
        },
    );
    assert_eq!(steps(), [35, 40, 45]);
    assert!(output.join("checkpoint-1").exists() && output.join("notes").exists());
    assert!(matches!(
        Writer::begin(output, 1, 0, 1),
        Err(CheckpointError::ForeignDirectory { .. })
    ));
}

#[test]
fn without_latest_the_highest_step_is_found() {
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path();
    for step in [9, 10] {
        save(&model(), simple(output, step, 1));
    }
    for text in ["", "checkpoint-77", "../../etc", "checkpoint-10/../x"] {
        fs::write(output.join("latest"), text).unwrap();
        assert_eq!(
            find_latest(output).unwrap(),
            Some(output.join("checkpoint-10")),
            "{text}"
        );
    }
    fs::write(output.join("latest"), "checkpoint-9").unwrap();
    assert_eq!(
        find_latest(output).unwrap(),
        Some(output.join("checkpoint-9"))
    );
    let writer = Writer::begin(output, 11, 0, 1).unwrap();
    assert_eq!(sweep(output).unwrap(), [writer.directory().to_owned()]);
    assert_eq!(list(output).unwrap().len(), 2);
    let writer = Writer::begin(output, 11, 0, 1).unwrap();
    let tmp = writer.directory().to_owned();
    writer.abandon().unwrap();
    assert!(!tmp.exists());
}

/// The state before the faulty save, and the save that will fail.
struct Scenario {
    old_step: u64,
    new_step: u64,
    can_exchange: bool,
    save_total_limit: usize,
}

const OLD: u64 = 1;
const NEW: u64 = 2;

impl Scenario {
    /// Runs the save with one fault and returns the number of its calls.
    fn run(&self, fault: DiskFault, fail_at: u64) -> u64 {
        let directory = tempfile::tempdir().unwrap();
        let output = directory.path();
        let old = Save {
            generation: OLD,
            ..simple(output, self.old_step, 1)
        };
        save(&model(), old);
        let new = Save {
            output,
            step: self.new_step,
            generation: NEW,
            world_size: 2,
            save_total_limit: self.save_total_limit,
        };
        let faulty = FaultyDisk::new(fault, fail_at, self.can_exchange);
        let disk: Arc<dyn FileSystem> = Arc::new(faulty.clone());
        let result = save_on(&disk, &model(), new);
        let context = format!("{fault:?} at call {fail_at}: {result:?}");

        let generation = assert_whole(output, &context);
        match (&result, fault) {
            (Ok(_), _) => assert_eq!(generation, NEW, "{context}"),
            (Err(error), DiskFault::NoSpace) => {
                assert!(
                    matches!(error, CheckpointError::NoSpace { .. }),
                    "{context}"
                );
            }
            (Err(_), DiskFault::None | DiskFault::ShortWrite) => panic!("{context}"),
            (Err(_), _) => {}
        }
        sweep(output).unwrap();
        assert_eq!(
            assert_whole(output, &context),
            generation,
            "sweeping: {context}"
        );
        if fail_at.is_multiple_of(4) {
            // The save succeeds when it is repeated.
            save(&model(), new);
            assert_eq!(assert_whole(output, &context), NEW, "retry: {context}");
        }
        faulty.calls()
    }
}

/// Checks that every listed checkpoint opens, and that the latest one verifies and belongs to one generation. Returns
/// that generation.
fn assert_whole(output: &Path, context: &str) -> u64 {
    for (_, directory) in list(output).unwrap() {
        Checkpoint::open(&directory).unwrap_or_else(|e| panic!("{e}: {context}"));
    }
    let latest = find_latest(output)
        .unwrap()
        .unwrap_or_else(|| panic!("none left: {context}"));
    let checkpoint = Checkpoint::open(&latest).unwrap_or_else(|e| panic!("{e}: {context}"));
    checkpoint
        .verify()
        .unwrap_or_else(|e| panic!("{e}: {context}"));
    let generation = checkpoint.meta()["generation"].as_u64().unwrap();
    assert_holds(&checkpoint, &model(), generation, 3);
    generation
}

#[test]
fn a_fault_at_any_call_leaves_the_old_or_the_new_checkpoint_whole() {
    let scenarios = [
        Scenario {
            old_step: 1,
            new_step: 2,
            can_exchange: true,
            save_total_limit: 1,
        },
        Scenario {
            old_step: 1,
            new_step: 1,
            can_exchange: true,
            save_total_limit: 2,
        },
        Scenario {
            old_step: 1,
            new_step: 1,
            can_exchange: false,
            save_total_limit: 0,
        },
    ];
    for scenario in scenarios {
        let calls = scenario.run(DiskFault::None, 0);
        assert!((40..120).contains(&calls), "{calls}");
        for fault in [
            DiskFault::Kill,
            DiskFault::PowerLoss,
            DiskFault::NoSpace,
            DiskFault::ShortWrite,
        ] {
            for fail_at in 0..calls {
                scenario.run(fault, fail_at);
            }
        }
    }
}

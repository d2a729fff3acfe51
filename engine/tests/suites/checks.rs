//! Checks of the list in `docs/faults.md` that the other suites of the engine leave open, by their numbers.

use crate::toy;
use crate::toy::{
    Case, distance, engine_for, load_initial, micro_batch, run_world, train, weight_bits,
};
use engine::Offload;

/// Relative L2 of f32 weights after `steps` Adam steps whose sums are taken in another order: each gradient differs by a
/// few units in the last place, Adam's steps have unit size, so that a weight changes by about steps * 1e-2 * 2^-20.
fn other_order(steps: usize) -> f64 {
    steps as f64 * 1e-2 / f64::from(1 << 20) * 16.0
}

/// Every kind of tensor size, against the rule on whole tensors.
mod check_02_sizes_that_do_not_divide {
    use super::run_world;
    use engine::sharded::{BridgeError, ShardedOptimizer, TensorBridge, TensorGroup, TensorInfo};
    use engine::{Stage, ZeroConfig};
    use optim::{AdamW, GradChunk, Optimizer, StateChunk, StepArgs, WeightChunk};
    use std::sync::Arc;

    /// A scalar, fewer elements than ranks, around the alignment of 32, and none at all, alone in a group too.
    const GROUPS: [&[usize]; 4] = [&[1, 2, 3], &[31, 32, 33, 65], &[0, 7, 0], &[0]];
    const STEPS: u64 = 8;
    const LR: f64 = 1e-2;

    struct Vectors {
        weights: Vec<Vec<f32>>,
        step: u64,
    }

    impl Vectors {
        fn new() -> Self {
            let sizes = GROUPS.iter().copied().flatten();
            let value = |i: usize| ((i * 37) % 101) as f32 / 101.0 - 0.5;
            Self {
                weights: sizes.map(|n| (0..*n).map(value).collect()).collect(),
                step: 0,
            }
        }

        /// The same on every rank, a power of two so that its mean over ranks is itself.
        fn gradient(&self, tensor: usize) -> Vec<f32> {
            let value = |i: usize| 2f32.powi(((i + tensor + self.step as usize) % 5) as i32 - 2);
            (0..self.weights[tensor].len()).map(value).collect()
        }
    }

    impl TensorBridge for Vectors {
        fn groups(&self) -> Vec<TensorGroup> {
            let mut number = 0;
            let group = |(g, sizes): (usize, &&[usize])| TensorGroup {
                name: format!("g{g}"),
                tensors: sizes
                    .iter()
                    .map(|n| {
                        number += 1;
                        TensorInfo::new(format!("t{number}"), *n, 0.1)
                    })
                    .collect(),
            };
            GROUPS.iter().enumerate().map(group).collect()
        }
        fn read_weight(&self, tensor: usize, out: &mut [f32]) -> Result<(), BridgeError> {
            out.copy_from_slice(&self.weights[tensor]);
            Ok(())
        }
        fn read_gradient(&self, tensor: usize, out: &mut [f32]) -> Result<(), BridgeError> {
            out.copy_from_slice(&self.gradient(tensor));
            Ok(())
        }
        fn write_weight(&mut self, tensor: usize, values: &[f32]) -> Result<(), BridgeError> {
            self.weights[tensor].copy_from_slice(values);
            Ok(())
        }
    }

    fn whole() -> Vec<Vec<f32>> {
        let mut model = Vectors::new();
        let zeros = |w: &Vec<f32>| [vec![0.0; w.len()], vec![0.0; w.len()]];
        let mut moments: Vec<_> = model.weights.iter().map(zeros).collect();
        for step in 0..STEPS {
            model.step = step;
            for (t, [m, v]) in moments.iter_mut().enumerate() {
                let gradient = model.gradient(t);
                let args = StepArgs {
                    step: step + 1,
                    lr: LR as f32,
                    weight_decay: 0.1,
                    grad_scale: 1.0,
                    seed: 0,
                    first_element: 0,
                    grad: GradChunk::F32(&gradient),
                    weight: WeightChunk::F32(&mut model.weights[t]),
                    state: vec![StateChunk::F32(m), StateChunk::F32(v)],
                };
                AdamW::default().step(args).unwrap();
            }
        }
        model.weights
    }

    #[test]
    fn the_rule_sees_every_element_once_and_no_padding() {
        let expected = whole();
        for world in [1, 2, 3, 4, 7] {
            for stage in [Stage::Zero0, Stage::Zero1, Stage::Zero2, Stage::Zero3] {
                let config = ZeroConfig {
                    stage,
                    ..ZeroConfig::default()
                };
                let finals = run_world(world, |comm| {
                    let mut model = Vectors::new();
                    let rule = Arc::new(AdamW::default());
                    let mut optimizer =
                        ShardedOptimizer::new(&model, comm, rule, config.clone()).unwrap();
                    for step in 0..STEPS {
                        model.step = step;
                        optimizer.accumulate(&model, 1.0, 1).unwrap();
                        assert!(optimizer.step(&mut model, LR).unwrap().applied);
                    }
                    model.weights
                });
                for weights in finals {
                    let lengths = |w: &[Vec<f32>]| w.iter().map(Vec::len).collect::<Vec<_>>();
                    assert_eq!(lengths(&weights), lengths(&expected));
                    let pairs = weights.iter().flatten().zip(expected.iter().flatten());
                    let difference = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                    let bound = super::other_order(STEPS as usize) as f32;
                    assert!(
                        difference <= bound,
                        "{world} ranks, {stage:?}: {difference:e}"
                    );
                }
            }
        }
    }
}

/// Delays of any length between collectives change no bit.
mod check_05_delays {
    use super::{Case, Offload, engine_for, load_initial, run_world, toy, train, weight_bits};
    use crate::toy::hooked::Hooked;
    use engine::comm::Collective;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    /// Lets other threads run for a while; how long follows from `seed`.
    fn delay(seed: &AtomicU64) {
        let step = |s: u64| s.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let seed = seed.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |s| Some(step(s)));
        for _ in 0..seed.unwrap() >> 58 {
            std::thread::yield_now();
        }
    }

    #[test]
    fn twenty_runs_with_random_delays_have_the_same_bits() {
        let mut case = Case::new(3, 3).offload(Offload::CPU);
        case.accumulation = 2;
        let expected = train(&case).0;
        for seed in 0..20u64 {
            case.config.prefetch_units = (seed % 4) as usize;
            let finals = run_world(3, |inner| {
                let rank = inner.world().rank as u64;
                let seed = AtomicU64::new((seed * 3 + rank) << 40 | 0x9e37_79b9);
                let before = move |_: &Collective| delay(&seed);
                let comm = Arc::new(Hooked { inner, before });
                let mut zero = engine_for(&case, comm).unwrap();
                load_initial(&mut zero);
                for step in 0..case.steps {
                    toy::train_step(&case, &mut zero, step).unwrap();
                }
                weight_bits(&zero)
            });
            assert!(
                finals.iter().all(|weights| *weights == expected),
                "seed {seed}"
            );
        }
    }
}

/// The norm is that of the undivided gradient, wherever it lies.
mod check_07_clipping {
    use super::{Case, Offload, engine_for, load_initial, run_world, toy};
    use engine::Tier;

    fn norms(case: &Case) -> Vec<u64> {
        let norms = run_world(case.world, |comm| {
            let mut zero = engine_for(case, comm).unwrap();
            load_initial(&mut zero);
            let report = toy::train_step(case, &mut zero, 0).unwrap();
            report.grad_norm.to_bits()
        });
        let same = norms.iter().all(|norm| *norm == norms[0]);
        assert!(same, "ranks log different norms: {norms:?}");
        norms
    }

    #[test]
    fn the_norm_is_the_same_in_every_stage_tier_and_world() {
        for frozen in [vec![], vec![0, 3]] {
            let with = |world, stage| {
                let mut case = Case::new(world, stage);
                case.frozen_units.clone_from(&frozen);
                case
            };
            let whole = f64::from_bits(norms(&with(1, 0))[0]);
            assert!(whole > 0.0);
            for world in [1, 2, 3] {
                for stage in 0..=3 {
                    for tier in [Tier::Device, Tier::Host, Tier::Nvme] {
                        let case = with(world, stage).offload(Offload::states(tier));
                        let norm = f64::from_bits(norms(&case)[0]);
                        let off = (norm / whole - 1.0).abs();
                        assert!(off < 1e-6, "{world} {stage} {tier:?}: {norm} {whole}");
                    }
                }
            }
        }
        let mut frozen = Case::new(1, 0);
        frozen.frozen_units = vec![0, 3];
        let [all, part] = [Case::new(1, 0), frozen].map(|case| f64::from_bits(norms(&case)[0]));
        assert!(part < all, "frozen gradients count: {part} {all}");
    }
}

/// What was gathered is given back, however a pass ends.
mod check_15_gathered_weights {
    use super::{Case, Offload, engine_for, load_initial, micro_batch, run_world, toy};
    use engine::access::LeaseOwner;
    use engine::{ParamAccess, PassKind, Phase, UnitId};
    use kernels::Tag;

    #[test]
    fn nothing_stays_gathered_after_an_error_or_a_skipped_step() {
        for (frozen, prefetch) in [(vec![], 0), (vec![0, 1], 2), (vec![4], 3)] {
            let mut case = Case::new(2, 3).offload(Offload::CPU);
            case.config.prefetch_units = prefetch;
            case.frozen_units = frozen;
            run_world(2, |comm| {
                let mut zero = engine_for(&case, comm).unwrap();
                load_initial(&mut zero);
                let gathered = |zero: &engine::Zero| {
                    let stats = zero.device_pool().stats().tag(Tag::Gathered);
                    assert!(stats.peak <= zero.plan().memory(&[]).gathered);
                    stats.in_use
                };
                // A forward pass that ends in the middle, on every rank.
                zero.begin_pass(PassKind::Train);
                let lease = zero.lease(UnitId(1), Phase::Forward).unwrap();
                assert!(gathered(&zero) > 0, "nothing was gathered");
                drop(lease);
                zero.end_lease(UnitId(1), Phase::Forward, false).unwrap();
                zero.end_pass().unwrap();
                assert_eq!(gathered(&zero), 0, "behind a pass that was cut off");
                // One that only reads.
                zero.begin_pass(PassKind::Infer);
                for unit in 0..toy::UNITS {
                    let lease = zero.lease(UnitId(unit as u32), Phase::Forward).unwrap();
                    lease.end().unwrap();
                }
                zero.end_pass().unwrap();
                assert_eq!(gathered(&zero), 0, "behind an evaluation");
                let own = toy::own_samples(&case, zero.comm().world(), 0);
                micro_batch(&mut zero, &own, f32::NAN).unwrap();
                assert!(!zero.step(1e-2).unwrap().applied);
                assert_eq!(gathered(&zero), 0, "behind a skipped step");
                toy::train_step(&case, &mut zero, 0).unwrap();
                assert_eq!(gathered(&zero), 0, "behind a step");
            });
        }
    }
}

/// Images on one rank and none on the other, in turns.
mod check_16_branches_that_depend_on_data {
    use super::{
        Case, distance, engine_for, load_initial, micro_batch, other_order, run_world, toy,
        weight_bits,
    };

    const STEPS: usize = 50;

    /// What rank `rank` of two trains on in `step`: only one of them sees images.
    fn batch(step: usize, rank: usize) -> Vec<toy::Sample> {
        let mut samples = toy::samples(2 * step + rank, 3);
        for sample in &mut samples {
            sample.supervised = true;
            sample.image = (step % 2 == rank).then_some(sample.target);
        }
        samples
    }

    #[test]
    fn fifty_steps_do_not_hang_and_follow_the_losses_of_one_process() {
        let run = |world: usize, stage: u8, prefetch: usize| {
            let mut case = Case::new(world, stage);
            case.config.prefetch_units = prefetch;
            run_world(world, |comm| {
                let rank = comm.world().rank;
                let mut zero = engine_for(&case, comm).unwrap();
                load_initial(&mut zero);
                for step in 0..STEPS {
                    let own: Vec<_> = match world {
                        1 => (0..2).flat_map(|rank| batch(step, rank)).collect(),
                        _ => batch(step, rank),
                    };
                    micro_batch(&mut zero, &own, 0.0).unwrap();
                    assert!(zero.step(1e-2).unwrap().applied);
                }
                weight_bits(&zero)
            })
            .remove(0)
        };
        let one = run(1, 0, 0);
        for prefetch in [0, 1, 3] {
            let two = run(2, 3, prefetch);
            let off = distance(&two, &one);
            assert!(off < other_order(STEPS), "{off:e}");
        }
    }
}

/// A checkpoint of four ranks with states on a disk, at every other size, stage and tier, and back.
mod check_20_resharding {
    use super::{Case, Offload, engine_for, load_initial, run_world, toy};
    use crate::checkpoints::save;
    use engine::checkpoint::{Checkpoint, find_latest, reshard};
    use engine::{Precision, Tier};
    use std::collections::BTreeMap;
    use std::fs;
    use std::path::{Path, PathBuf};

    fn latest(output: &Path) -> Checkpoint {
        let checkpoint = Checkpoint::open(&find_latest(output).unwrap().unwrap()).unwrap();
        checkpoint.verify().unwrap();
        checkpoint
    }

    /// Bytes of every tensor by kind and name.
    fn content(checkpoint: &Checkpoint) -> BTreeMap<(String, String), Vec<u8>> {
        let tensors = checkpoint.tensors().iter();
        tensors
            .map(|tensor| {
                let elems = tensor.elems().unwrap();
                let mut bytes = vec![0; elems as usize * tensor.dtype.size_bytes()];
                checkpoint
                    .read(&tensor.kind, &tensor.name, 0..elems, &mut bytes)
                    .unwrap();
                ((tensor.kind.clone(), tensor.name.clone()), bytes)
            })
            .collect()
    }

    /// The ranks' files.
    fn state(checkpoint: &Checkpoint) -> BTreeMap<PathBuf, Vec<u8>> {
        let entries = fs::read_dir(checkpoint.directory().join("state")).unwrap();
        entries
            .map(|entry| {
                let path = entry.unwrap().path();
                (path.file_name().unwrap().into(), fs::read(&path).unwrap())
            })
            .collect()
    }

    #[test]
    fn state_resumed_at_other_world_sizes_and_back_is_unchanged() {
        for precision in [Precision::Bf16, Precision::PureBf16] {
            let first = Case::new(4, 3)
                .precision(precision)
                .offload(Offload::states(Tier::Nvme));
            let dir = tempfile::tempdir().unwrap();
            let units = run_world(4, |comm| {
                let mut zero = engine_for(&first, comm).unwrap();
                load_initial(&mut zero);
                toy::train_step(&first, &mut zero, 0).unwrap();
                toy::train_step(&first, &mut zero, 1).unwrap();
                save(&mut zero, dir.path());
                let plan = zero.plan();
                let units = plan.units().iter();
                let names = units.map(|unit| {
                    let slots = unit.trainable.slots.iter();
                    slots
                        .map(|slot| plan.spec().params[slot.param.index()].name.clone())
                        .collect()
                });
                names.collect::<Vec<Vec<String>>>()
            })
            .remove(0);
            let original = latest(dir.path());
            let (expected, files) = (content(&original), state(&original));
            for (world, stage, offload) in [
                (1, 0, Offload::default()),
                (2, 1, Offload::CPU),
                (3, 2, Offload::states(Tier::Nvme)),
                (5, 3, Offload::default()),
                (8, 3, Offload::CPU),
            ] {
                // Through ranks that load and save it …
                let there = tempfile::tempdir().unwrap();
                let back = tempfile::tempdir().unwrap();
                let load = |case: &Case, from: &Path, to: &Path| {
                    run_world(case.world, |comm| {
                        let mut zero = engine_for(case, comm).unwrap();
                        let checkpoint = latest(from);
                        load_initial(&mut zero);
                        zero.restore(&checkpoint, checkpoint.step()).unwrap();
                        save(&mut zero, to);
                    });
                };
                let case = Case::new(world, stage)
                    .precision(precision)
                    .offload(offload);
                load(&case, dir.path(), there.path());
                assert!(content(&latest(there.path())) == expected, "{world} ranks");
                load(&first, there.path(), back.path());
                assert!(
                    state(&latest(back.path())) == files,
                    "{world} ranks and back"
                );
                // … and on the disk alone, which cuts as such ranks would.
                let cut = tempfile::tempdir().unwrap();
                let meta = serde_json::Value::Null;
                reshard(&original, &units, world as u32, cut.path(), meta.clone()).unwrap();
                let cut = latest(cut.path());
                assert!(state(&cut) == state(&latest(there.path())), "{world} ranks");
                // Also where nobody knows which tensors shared a buffer.
                let alone = tempfile::tempdir().unwrap();
                reshard(&cut, &[], 3, alone.path(), meta).unwrap();
                assert!(content(&latest(alone.path())) == expected);
            }
            let meta = serde_json::Value::Null;
            let wrong = reshard(&original, &units[1..], 2, dir.path(), meta);
            assert!(wrong.unwrap_err().to_string().contains("every parameter"));
        }
    }
}

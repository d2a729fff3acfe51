//! Tests with a linear model of plain vectors: every stage and world size equals the unsharded rule.

use super::*;
use crate::checkpoint::find_latest;
use crate::comm::{Communicator, threads};
use crate::{EngineError, GradDtype, Offload, Phase, Precision, Stage, ZeroConfig};
use kernels::{Pool, Tag, Tensor};
use optim::adamw::{Bf16Storage, MomentDtype, PureBf16};
use optim::{AdamW, GradChunk, Optimizer, StateChunk, StepArgs, WeightChunk};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;

const SIZES: [usize; 3] = [7, 3, 40];
const DECAY: [f32; 3] = [0.1, 0.0, 0.2];
const STEPS: usize = 20;
/// Samples of a step over all ranks and micro-batches.
const SAMPLES: usize = 12;
const LR: f64 = 1e-2;

#[derive(Clone)]
struct Plain {
    weights: Vec<Vec<f32>>,
    gradients: Vec<Vec<f32>>,
    fails: bool,
}

impl Plain {
    fn new() -> Self {
        Self::of(SIZES)
    }

    fn of(sizes: [usize; 3]) -> Self {
        let weight = |t: usize, i: usize| ((t * 31 + i * 17) % 11) as f32 / 11.0 - 0.5;
        let weights: Vec<Vec<f32>> = (0..sizes.len())
            .map(|t| (0..sizes[t]).map(|i| weight(t, i)).collect())
            .collect();
        Self {
            gradients: weights.clone(),
            weights,
            fails: false,
        }
    }

    /// Computes gradients of the mean of `(w - target)^2` over samples, and returns the mean loss.
    fn backward(&mut self, step: usize, samples: std::ops::Range<usize>) -> f64 {
        let target = |t: usize, i: usize, s: usize| {
            ((t * 7 + i * 13 + s * 29 + step * 5) % 23) as f32 / 23.0
        };
        let count = samples.len().max(1) as f32;
        let mut loss = 0.0;
        for t in 0..SIZES.len() {
            for i in 0..SIZES[t] {
                let errors = samples
                    .clone()
                    .map(|s| self.weights[t][i] - target(t, i, s));
                self.gradients[t][i] = errors.clone().map(|e| 2.0 * e).sum::<f32>() / count;
                loss += errors.map(|e| f64::from(e * e)).sum::<f64>() / f64::from(count);
            }
        }
        loss
    }
}

impl TensorBridge for Plain {
    fn groups(&self) -> Vec<TensorGroup> {
        let tensor = |t: usize| TensorInfo::new(format!("t{t}"), self.weights[t].len(), DECAY[t]);
        let group = |name: &str, tensors| TensorGroup {
            name: name.into(),
            tensors,
        };
        vec![
            group("a", vec![tensor(0), tensor(1)]),
            group("b", vec![tensor(2)]),
        ]
    }
    fn read_weight(&self, tensor: usize, out: &mut [f32]) -> Result<(), BridgeError> {
        out.copy_from_slice(&self.weights[tensor]);
        Ok(())
    }
    fn read_gradient(&self, tensor: usize, out: &mut [f32]) -> Result<(), BridgeError> {
        if self.fails {
            return Err("no gradient".into());
        }
        out.copy_from_slice(&self.gradients[tensor]);
        Ok(())
    }
    fn write_weight(&mut self, tensor: usize, values: &[f32]) -> Result<(), BridgeError> {
        self.weights[tensor].copy_from_slice(values);
        Ok(())
    }
}

/// The rule on whole tensors and whole batches.
fn unsharded() -> Vec<Vec<f32>> {
    let mut model = Plain::new();
    let mut moments: Vec<[Vec<f32>; 2]> = SIZES
        .iter()
        .map(|n| [vec![0.0; *n], vec![0.0; *n]])
        .collect();
    for step in 0..STEPS {
        model.backward(step, 0..SAMPLES);
        for (t, [m, v]) in moments.iter_mut().enumerate() {
            let args = StepArgs {
                step: step as u64 + 1,
                lr: LR as f32,
                weight_decay: DECAY[t],
                grad_scale: 1.0,
                seed: 0,
                first_element: 0,
                grad: GradChunk::F32(&model.gradients[t]),
                weight: WeightChunk::F32(&mut model.weights[t]),
                state: vec![StateChunk::F32(m), StateChunk::F32(v)],
            };
            AdamW::default().step(args).unwrap();
        }
    }
    model.weights
}

fn sharded(comm: Arc<dyn Communicator>, config: ZeroConfig) -> Vec<Vec<f32>> {
    let world = comm.world();
    let mut model = Plain::new();
    let rule = Arc::new(AdamW::default());
    let mut optimizer = ShardedOptimizer::new(&model, comm, rule, config).unwrap();
    for step in 0..STEPS {
        // Ranks have different numbers of samples. Rank 0 takes the remaining ones in two micro-batches, and with four
        // ranks one rank has none.
        let share = SAMPLES / 3;
        let own = if world.rank == 0 {
            0..SAMPLES.saturating_sub(share * (world.size - 1))
        } else {
            SAMPLES - share * world.rank..SAMPLES - share * (world.rank - 1)
        };
        let cut = own.start + own.len() / 2;
        for part in [own.start..cut, cut..own.end] {
            let loss = model.backward(step, part.clone());
            optimizer
                .accumulate(&model, loss, part.len() as u64)
                .unwrap();
        }
        let report = optimizer.step(&mut model, LR).unwrap();
        assert!(report.applied && report.supervised_tokens == SAMPLES as u64);
    }
    model.weights
}

fn in_threads<T: Send>(size: usize, body: impl Fn(Arc<dyn Communicator>) -> T + Sync) -> Vec<T> {
    let comms = threads::world(size, 1 << 20).unwrap();
    std::thread::scope(|scope| {
        let body = &body;
        let ranks: Vec<_> = comms
            .into_iter()
            .map(|comm| scope.spawn(move || body(comm)))
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn every_stage_and_world_equals_the_unsharded_rule() {
    let expected = unsharded();
    for world in [1, 2, 3, 4] {
        for stage in [Stage::Zero0, Stage::Zero1, Stage::Zero2, Stage::Zero3] {
            let offload = if world == 2 {
                Offload::CPU
            } else {
                Offload::default()
            };
            let config = ZeroConfig {
                stage,
                offload,
                ..ZeroConfig::default()
            };
            for weights in in_threads(world, |comm| sharded(comm, config.clone())) {
                let pairs = weights.iter().flatten().zip(expected.iter().flatten());
                let difference = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(
                    difference <= 1e-6,
                    "{world} ranks, {stage:?}: {difference:e}"
                );
            }
        }
    }
}

#[test]
fn each_rank_holds_its_share_of_the_state() {
    let bytes = |world| {
        let config = ZeroConfig {
            stage: Stage::Zero1,
            precision: Precision::F32,
            ..ZeroConfig::default()
        };
        let sizes = in_threads(world, |comm| {
            let rule = Arc::new(AdamW::default());
            let optimizer = ShardedOptimizer::new(&Plain::new(), comm, rule, config.clone());
            optimizer.unwrap().zero().state_bytes().unwrap().len()
        });
        sizes[0]
    };
    assert_eq!(bytes(1), 2 * bytes(2));
}

#[test]
fn non_finite_gradients_change_nothing_and_errors_name_the_tensor() {
    let config = || ZeroConfig {
        stage: Stage::Zero2,
        ..ZeroConfig::default()
    };
    in_threads(2, |comm| {
        let rank = comm.world().rank;
        let mut model = Plain::new();
        let before = model.weights.clone();
        let rule = Arc::new(AdamW::default());
        let mut optimizer = ShardedOptimizer::new(&model, comm, rule, config()).unwrap();
        model.backward(0, 0..2);
        if rank == 1 {
            model.gradients[2][5] = f32::NAN;
        }
        optimizer.accumulate(&model, 1.0, 2).unwrap();
        assert!(!optimizer.step(&mut model, LR).unwrap().applied);
        assert_eq!(model.weights, before);
    });
    let comm = threads::world(1, 1 << 20).unwrap().remove(0);
    let mut model = Plain::new();
    let rule = Arc::new(AdamW::default());
    let mut optimizer = ShardedOptimizer::new(&model, comm, rule, config()).unwrap();
    model.fails = true;
    let error = optimizer.accumulate(&model, 1.0, 1).unwrap_err();
    assert!(
        matches!(&error, EngineError::Bridge { tensor, .. } if tensor == "t2"),
        "{error}"
    );
}

/// Gradients of one sample, so coarse that sums of all samples are exact in any order.
fn coarse(model: &mut Plain, step: usize, sample: usize) {
    for (t, gradients) in model.gradients.iter_mut().enumerate() {
        for (i, gradient) in gradients.iter_mut().enumerate() {
            let target = ((t * 7 + i * 13 + sample * 29 + step * 5) % 23) as f32 / 16.0;
            *gradient = (64.0 * (model.weights[t][i] - target)).round() / 64.0;
        }
    }
}

fn optimizer(model: &Plain, comm: Arc<dyn Communicator>, config: &ZeroConfig) -> ShardedOptimizer {
    let pure_bf16 = PureBf16 {
        weights: Bf16Storage::Stochastic,
        moments: MomentDtype::Bf16,
    };
    let rule = Arc::new(AdamW {
        pure_bf16,
        eight_bit: config.states_in_blocks,
        ..AdamW::default()
    });
    ShardedOptimizer::new(model, comm, rule, config.clone()).unwrap()
}

/// Trains up to `until` updates, from the latest checkpoint in `directory` if there is one, and saves there.
fn continued(
    comm: Arc<dyn Communicator>,
    config: &ZeroConfig,
    directory: &Path,
    until: u64,
) -> Vec<Vec<f32>> {
    let world = comm.world();
    let mut model = Plain::of(match config.states_in_blocks {
        // One tensor with blocks, whose last block is short, and two that keep f32.
        true => [7, 5000, 40],
        false => SIZES,
    });
    let mut optimizer = optimizer(&model, comm, config);
    if let Some(checkpoint) = find_latest(directory).unwrap() {
        let meta = optimizer.load(&checkpoint, &mut model).unwrap();
        assert_eq!(meta, json!({ "updates": optimizer.zero().step_count() }));
    }
    for step in optimizer.zero().step_count()..until {
        for sample in (world.rank..SAMPLES).step_by(world.size) {
            coarse(&mut model, step as usize, sample);
            optimizer.accumulate(&model, 1.0, 1).unwrap();
        }
        optimizer.step(&mut model, LR).unwrap();
    }
    let saved = optimizer.save(directory, json!({ "updates": until }), 0);
    assert_eq!(
        saved.unwrap(),
        directory.join(format!("checkpoint-{until}"))
    );
    model.weights
}

fn configs() -> impl Strategy<Value = ZeroConfig> {
    let stages = prop::sample::select(vec![Stage::Zero0, Stage::Zero1, Stage::Zero2, Stage::Zero3]);
    let offloads = prop::sample::select(vec![Offload::default(), Offload::CPU]);
    (stages, offloads).prop_map(|(stage, offload)| ZeroConfig {
        stage,
        offload,
        ..ZeroConfig::default()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// What `n` ranks saved, `m` ranks continue at another stage and tier with the bits of a run that never stopped.
    #[test]
    fn a_saved_run_continues_with_the_same_bits_on_any_number_of_ranks(
        (first, second) in (configs(), configs()),
        precision in prop::sample::select(vec![Precision::F32, Precision::Bf16, Precision::PureBf16]),
        (n, m) in prop::sample::select(vec![(1, 2), (2, 1), (2, 3), (3, 4), (4, 2), (3, 3), (1, 4)]),
        (before, after) in (0_u64..4, 1_u64..4),
        eight_bit in any::<bool>(),
    ) {
        let in_precision = |config: ZeroConfig| ZeroConfig {
            states_in_blocks: eight_bit,
            precision,
            grad_dtype: Some(GradDtype::F32),
            ..config
        };
        let (first, second) = (in_precision(first), in_precision(second));
        let (whole, parted) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let expected = in_threads(n, |comm| continued(comm, &first, whole.path(), before + after));
        in_threads(n, |comm| continued(comm, &first, parted.path(), before));
        for weights in in_threads(m, |comm| continued(comm, &second, parted.path(), before + after)) {
            prop_assert_eq!(&weights, &expected[0]);
        }
    }
}

#[test]
fn a_checkpoint_with_other_tensors_or_states_is_refused() {
    struct Resized(Plain, usize);
    impl TensorBridge for Resized {
        fn groups(&self) -> Vec<TensorGroup> {
            let mut groups = self.0.groups();
            groups[1].tensors[0].elems = self.1;
            groups
        }
        fn read_weight(&self, _: usize, _: &mut [f32]) -> Result<(), BridgeError> {
            Ok(())
        }
        fn read_gradient(&self, _: usize, _: &mut [f32]) -> Result<(), BridgeError> {
            Ok(())
        }
        fn write_weight(&mut self, _: usize, _: &[f32]) -> Result<(), BridgeError> {
            Ok(())
        }
    }
    let directory = tempfile::tempdir().unwrap();
    let config = ZeroConfig::default();
    in_threads(2, |comm| continued(comm, &config, directory.path(), 1));
    let checkpoint = find_latest(directory.path()).unwrap().unwrap();
    let load = |elems: usize, rule: AdamW, precision| {
        let mut model = Resized(Plain::new(), elems);
        let comm = threads::world(1, 1 << 20).unwrap().remove(0);
        let config = ZeroConfig {
            precision,
            ..ZeroConfig::default()
        };
        let optimizer = ShardedOptimizer::new(&model, comm, Arc::new(rule), config);
        optimizer.unwrap().load(&checkpoint, &mut model)
    };
    let own = ZeroConfig::default().precision;
    assert!(load(SIZES[2], AdamW::default(), own).is_ok());
    for elems in [SIZES[2] - 1, SIZES[2] + 1] {
        let error = load(elems, AdamW::default(), own).unwrap_err();
        assert!(
            matches!(&error, EngineError::CheckpointTensor { name, .. } if name == "t2"),
            "{error}"
        );
    }
    for precision in [Precision::F32, Precision::PureBf16] {
        if precision != own {
            let error = load(SIZES[2], AdamW::default(), precision).unwrap_err();
            let refused = matches!(
                &error,
                EngineError::CheckpointTensor { .. } | EngineError::CheckpointMismatch { .. }
            );
            assert!(refused, "{precision:?}: {error}");
        }
    }
}

#[test]
fn gradients_between_a_micro_batch_and_its_step_are_not_lost_in_silence() {
    let directory = tempfile::tempdir().unwrap();
    in_threads(2, |comm| {
        let mut model = Plain::new();
        let mut optimizer = optimizer(&model, comm, &ZeroConfig::default());
        coarse(&mut model, 0, 0);
        optimizer.accumulate(&model, 1.0, 1).unwrap();
        let error = optimizer
            .save(directory.path(), Value::Null, 0)
            .unwrap_err();
        assert!(matches!(error, EngineError::GradientsPending), "{error}");
        assert!(find_latest(directory.path()).unwrap().is_none());
        optimizer.step(&mut model, LR).unwrap();
        optimizer.save(directory.path(), Value::Null, 0).unwrap();
    });
}

#[test]
fn if_one_rank_cannot_save_or_load_no_rank_waits_for_it() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    std::fs::write(&file, "").unwrap();
    in_threads(3, |comm| {
        let (rank, mut model) = (comm.world().rank, Plain::new());
        let mut optimizer = optimizer(&model, comm, &ZeroConfig::default());
        let output = if rank == 1 { &file } else { directory.path() };
        let error = optimizer.save(output, Value::Null, 0).unwrap_err();
        match rank {
            1 => assert!(matches!(error, EngineError::Checkpoint(_)), "{error}"),
            _ => assert!(
                matches!(error, EngineError::OtherRank { rank: 1, .. }),
                "{error}"
            ),
        }
        assert!(find_latest(directory.path()).unwrap().is_none());
        let saved = optimizer
            .save(&directory.path().join("a"), json!(1), 0)
            .unwrap();
        optimizer
            .save(&directory.path().join("b"), json!(2), 0)
            .unwrap();
        let other = saved.parent().unwrap().join("none");
        let chosen = if rank == 2 { &other } else { &saved };
        let error = optimizer.load(chosen, &mut model).unwrap_err();
        match rank {
            2 => assert!(matches!(error, EngineError::Checkpoint(_)), "{error}"),
            _ => assert!(
                matches!(error, EngineError::OtherRank { rank: 2, .. }),
                "{error}"
            ),
        }
    });
}

#[test]
fn ranks_that_open_different_checkpoints_are_told_so() {
    let directories = [1, 2].map(|until| {
        let directory = tempfile::tempdir().unwrap();
        in_threads(2, |comm| {
            continued(comm, &ZeroConfig::default(), directory.path(), until)
        });
        directory
    });
    in_threads(2, |comm| {
        let (rank, mut model) = (comm.world().rank, Plain::new());
        let mut optimizer = optimizer(&model, comm, &ZeroConfig::default());
        let checkpoint = find_latest(directories[rank].path()).unwrap().unwrap();
        let error = optimizer.load(&checkpoint, &mut model).unwrap_err();
        let other =
            matches!(error, EngineError::CheckpointsDiffer { rank: other } if other != rank);
        assert!(other, "{error}");
    });
}

/// Weights are read group by group and never whole; the results are those of the bridge.
#[test]
fn a_model_with_sharded_weights_trains_as_one_with_whole_weights() {
    for stage in [Stage::Zero1, Stage::Zero2, Stage::Zero3] {
        let config = ZeroConfig {
            stage,
            ..ZeroConfig::default()
        };
        let directory = tempfile::tempdir().unwrap();
        let whole = in_threads(2, |comm| continued(comm, &config, directory.path(), 3));
        let parts = in_threads(2, |comm| {
            let (rank, pool) = (comm.world().rank, Pool::new("gradients", None));
            let mut optimizer = optimizer(&Plain::new(), comm, &config);
            for step in 0..3 {
                for sample in (rank..SAMPLES).step_by(2) {
                    let batch = optimizer.micro_batch(1);
                    assert!(batch.weights(2, Phase::Backward).is_err());
                    for (group, tensors) in [(1, 2..3), (0, 0..2)] {
                        let lease = batch.weights(group, Phase::Backward).unwrap();
                        for tensor in tensors {
                            let weight = lease.param(crate::ParamId(tensor as u32)).unwrap();
                            let mut model = Plain::new();
                            model.weights[tensor] = weight.to_f32_vec().unwrap();
                            coarse(&mut model, step, sample);
                            let gradient = &model.gradients[tensor];
                            let shape = [gradient.len()];
                            let gradient =
                                Tensor::from_slice(&pool, Tag::Gradients, shape, gradient);
                            batch.deposit(tensor, &gradient.unwrap()).unwrap();
                        }
                        lease.end().unwrap();
                    }
                    batch.end(1.0).unwrap();
                }
                optimizer.step_sharded(LR).unwrap();
            }
            let mut parts = Vec::new();
            let visited = optimizer.visit_sharded_weights(|tensor, elements, values| {
                parts.push((tensor, elements, values.to_vec()));
                Ok(())
            });
            visited.unwrap();
            parts
        });
        let mut joined: Vec<Vec<f32>> = SIZES.iter().map(|n| vec![f32::NAN; *n]).collect();
        for (tensor, elements, values) in parts.into_iter().flatten() {
            let part = &mut joined[tensor][elements];
            assert!(
                part.iter().all(|value| value.is_nan()),
                "a part of two ranks"
            );
            part.copy_from_slice(&values);
        }
        assert_eq!(joined, whole[0], "{stage:?}");
    }
}

//! Tests with a linear model of plain vectors: every stage and world size equals the unsharded rule.

use super::*;
use crate::comm::{Communicator, threads};
use crate::{EngineError, Offload, Precision, Stage, ZeroConfig};
use optim::{AdamW, GradChunk, Optimizer, StateChunk, StepArgs, WeightChunk};
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
        let weight = |t: usize, i: usize| ((t * 31 + i * 17) % 11) as f32 / 11.0 - 0.5;
        let weights: Vec<Vec<f32>> = (0..SIZES.len())
            .map(|t| (0..SIZES[t]).map(|i| weight(t, i)).collect())
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
        let tensor = |t: usize| TensorInfo::new(format!("t{t}"), SIZES[t], DECAY[t]);
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

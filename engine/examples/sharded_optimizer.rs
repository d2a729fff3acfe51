//! A model of plain vectors under ZeRO-1 and ZeRO-2 on two processes:
//! `cargo run --release -p tessera-engine --example sharded_optimizer`.
//!
//! The model computes its own gradients; the optimizer sums them over ranks, keeps half of the state on each and writes
//! the weights back. Half-way the run is saved, and another optimizer continues it. At the end the weights equal those of
//! an AdamW that nobody divides.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "an example speaks to people"
)]

#[path = "common/mlp.rs"]
mod mlp;
#[path = "common/ranks.rs"]
mod ranks;

use engine::comm::Communicator;
use engine::sharded::{BridgeError, ShardedOptimizer, TensorBridge, TensorGroup, TensorInfo};
use engine::{Stage, ZeroConfig};
use mlp::{LAYERS, LR, Rows, SAMPLES, STEPS, WEIGHT_DECAY};
use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;

const RANKS: usize = 2;

struct Model {
    weights: Rows,
    gradients: Rows,
}

impl TensorBridge for Model {
    /// One group per layer.
    fn groups(&self) -> Vec<TensorGroup> {
        let tensor = |name: &str, layer: usize, part: usize| {
            let elems = self.weights[2 * layer + part].len();
            TensorInfo::new(format!("layers.{layer}.{name}"), elems, WEIGHT_DECAY)
        };
        (0..LAYERS)
            .map(|layer| TensorGroup {
                name: format!("layers.{layer}"),
                tensors: vec![tensor("weight", layer, 0), tensor("bias", layer, 1)],
            })
            .collect()
    }

    fn read_weight(&self, tensor: usize, out: &mut [f32]) -> Result<(), BridgeError> {
        out.copy_from_slice(&self.weights[tensor]);
        Ok(())
    }

    fn read_gradient(&self, tensor: usize, out: &mut [f32]) -> Result<(), BridgeError> {
        out.copy_from_slice(&self.gradients[tensor]);
        Ok(())
    }

    fn write_weight(&mut self, tensor: usize, values: &[f32]) -> Result<(), BridgeError> {
        self.weights[tensor].copy_from_slice(values);
        Ok(())
    }
}

/// The initial model, and an optimizer for it.
fn start(
    comm: &Arc<dyn Communicator>,
    stage: Stage,
) -> Result<(Model, ShardedOptimizer), Box<dyn Error>> {
    let model = Model {
        weights: mlp::initial(),
        gradients: Rows::new(),
    };
    let config = ZeroConfig {
        stage,
        ..ZeroConfig::default()
    };
    let rule = Arc::new(optim::AdamW::default());
    let optimizer = ShardedOptimizer::new(&model, comm.clone(), rule, config)?;
    Ok((model, optimizer))
}

fn train(comm: &Arc<dyn Communicator>, stage: Stage) -> Result<Rows, Box<dyn Error>> {
    let rank = comm.world().rank;
    let (mut model, mut optimizer) = start(comm, stage)?;
    let share = SAMPLES / RANKS;
    for step in 0..STEPS {
        if step == STEPS / 2 {
            let checkpoint = optimizer.save(&ranks::directory(), Default::default(), 1)?;
            (model, optimizer) = start(comm, stage)?;
            optimizer.load(&checkpoint, &mut model)?;
        }
        let batch = mlp::batch(step, rank * share..(rank + 1) * share);
        let (sum, gradients) = mlp::gradients(&model.weights, &batch);
        // The optimizer takes gradients of the mean.
        model.gradients = gradients;
        for gradient in model.gradients.iter_mut().flatten() {
            *gradient /= share as f32;
        }
        optimizer.accumulate(&model, sum / share as f64, share as u64)?;
        optimizer.step(&mut model, LR)?;
    }
    Ok(model.weights)
}

fn main() -> ExitCode {
    ranks::in_processes(RANKS, |comm| {
        for stage in [Stage::Zero1, Stage::Zero2] {
            let weights = train(&comm, stage)?;
            mlp::check(
                &format!("{stage:?} on {RANKS} processes"),
                comm.world().rank,
                &weights,
            )?;
        }
        Ok(())
    })
}

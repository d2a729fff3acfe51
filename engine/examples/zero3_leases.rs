//! A model of plain vectors under ZeRO-3 on two processes: `cargo run --release -p tessera-engine --example zero3_leases`.
//!
//! While it trains, no rank has the whole model. A layer's weights are readable while its lease lasts: once in forward,
//! once in backward, where its gradients are handed over. Half-way the run is saved, and another optimizer continues it.
//! At the end the weights equal those of an AdamW that nobody divides.
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
use engine::{EngineError, ParamId, Phase, Stage, ZeroConfig};
use kernels::{Pool, Tag, Tensor};
use mlp::{LAYERS, LR, Rows, SAMPLES, STEPS, WEIGHT_DECAY};
use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;

const RANKS: usize = 2;

/// Weights at the start, and those that are compared at the end. Training does not use them.
struct Model(Rows);

impl TensorBridge for Model {
    /// One group per layer: what is gathered, used and released together.
    fn groups(&self) -> Vec<TensorGroup> {
        let tensor = |layer: usize, part: usize, name: &str| {
            let elems = self.0[2 * layer + part].len();
            TensorInfo::new(format!("layers.{layer}.{name}"), elems, WEIGHT_DECAY)
        };
        (0..LAYERS)
            .map(|layer| TensorGroup {
                name: format!("layers.{layer}"),
                tensors: vec![tensor(layer, 0, "weight"), tensor(layer, 1, "bias")],
            })
            .collect()
    }

    fn read_weight(&self, tensor: usize, out: &mut [f32]) -> Result<(), BridgeError> {
        out.copy_from_slice(&self.0[tensor]);
        Ok(())
    }

    fn read_gradient(&self, _: usize, _: &mut [f32]) -> Result<(), BridgeError> {
        Err("the pass hands over gradients itself".into())
    }

    fn write_weight(&mut self, tensor: usize, values: &[f32]) -> Result<(), BridgeError> {
        self.0[tensor].copy_from_slice(values);
        Ok(())
    }
}

/// Forward and backward of one micro-batch.
fn pass(
    optimizer: &mut ShardedOptimizer,
    (inputs, targets): &(Rows, Rows),
) -> Result<(), EngineError> {
    let pool = Pool::new("gradients", None);
    let samples = inputs.len();
    let batch = optimizer.micro_batch(samples as u64);
    let mut values = vec![inputs.clone()];
    for layer in 0..LAYERS {
        let lease = batch.weights(layer, Phase::Forward)?;
        let [weight, bias] = tensors(layer);
        let (weight, bias) = (lease.param(weight)?, lease.param(bias)?);
        values.push(mlp::forward(
            layer,
            weight.as_slice(),
            bias.as_slice(),
            &values[layer],
        ));
        lease.end()?; // the layer's weights are gone
    }
    let (sum, mut flowing) = mlp::loss(&values[LAYERS], targets);
    for layer in (0..LAYERS).rev() {
        let lease = batch.weights(layer, Phase::Backward)?;
        let [weight, bias] = tensors(layer);
        let read = lease.param(weight)?.as_slice();
        let (of_weight, of_bias, of_inputs) =
            mlp::backward(layer, read, &values[layer], &values[layer + 1], &flowing);
        for (id, mut gradient) in [(weight, of_weight), (bias, of_bias)] {
            // The optimizer takes gradients of the mean.
            for value in &mut gradient {
                *value /= samples as f32;
            }
            let gradient = Tensor::from_slice(&pool, Tag::Workspace, [gradient.len()], &gradient)?;
            batch.deposit(id.index(), &gradient)?;
        }
        flowing = of_inputs;
        lease.end()?; // the layer's gradients are on their way
    }
    batch.end(sum / samples as f64)
}

/// Weight and bias of a layer.
fn tensors(layer: usize) -> [ParamId; 2] {
    [ParamId(2 * layer as u32), ParamId(2 * layer as u32 + 1)]
}

fn start(comm: &Arc<dyn Communicator>) -> Result<ShardedOptimizer, EngineError> {
    let config = ZeroConfig {
        stage: Stage::Zero3,
        ..ZeroConfig::default()
    };
    let rule = Arc::new(optim::AdamW::default());
    ShardedOptimizer::new(&Model(mlp::initial()), comm.clone(), rule, config)
}

fn train(comm: &Arc<dyn Communicator>) -> Result<Rows, Box<dyn Error>> {
    let rank = comm.world().rank;
    let mut optimizer = start(comm)?;
    let share = SAMPLES / RANKS;
    for step in 0..STEPS {
        if step == STEPS / 2 {
            let checkpoint = optimizer.save(&ranks::directory(), Default::default(), 1)?;
            optimizer = start(comm)?;
            optimizer.load_sharded(&checkpoint)?;
        }
        let own = rank * share..(rank + 1) * share;
        pass(&mut optimizer, &mlp::batch(step, own))?;
        optimizer.step_sharded(LR)?;
    }
    let mut model = Model(mlp::initial());
    optimizer.write_weights(&mut model)?;
    Ok(model.0)
}

fn main() -> ExitCode {
    ranks::in_processes(RANKS, |comm| {
        let rank = comm.world().rank;
        let weights = train(&comm)?;
        mlp::check(
            &format!("Zero3 with leases on {RANKS} processes"),
            rank,
            &weights,
        )
    })
}

//! A model of plain vectors under ZeRO-3 on two processes: `cargo run --release -p tessera-engine --example zero3_leases`.
//!
//! No rank ever holds the whole model. A layer's weights are readable while its lease lasts: once in forward, once in
//! backward, where its gradients are handed over. At the end the weights equal those of an AdamW that nobody divides.
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
use engine::{
    EngineError, ModelSpec, OptimizerConfig, ParamAccess, ParamId, ParamSpec, PassKind, Phase,
    Plan, Stage, Tiers, UnitId, UnitSpec, Zero, ZeroConfig,
};
use kernels::{MetaBackend, Pool, Tag, Tensor};
use mlp::{LAYERS, LR, Rows, SAMPLES, SIZES, STEPS, WEIGHT_DECAY};
use optim::GroupOptions;
use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;

const RANKS: usize = 2;

/// One unit per layer: what is gathered, used and released together.
fn spec() -> ModelSpec {
    let mut spec = ModelSpec::default();
    for layer in 0..LAYERS {
        let name = format!("layers.{layer}");
        for (part, shape) in [
            ("weight", vec![SIZES[layer + 1], SIZES[layer]]),
            ("bias", vec![SIZES[layer + 1]]),
        ] {
            spec.params.push(ParamSpec {
                name: format!("{name}.{part}"),
                shape: shape.as_slice().into(),
                unit: UnitId(layer as u32),
                trainable: true,
            });
        }
        spec.units.push(UnitSpec { name });
    }
    spec
}

fn unit(layer: usize) -> UnitId {
    UnitId(layer as u32)
}

fn ids(layer: usize) -> [ParamId; 2] {
    [ParamId(2 * layer as u32), ParamId(2 * layer as u32 + 1)]
}

/// Forward and backward of one micro-batch; returns the sum of the losses.
fn pass(zero: &Zero, (inputs, targets): &(Rows, Rows)) -> Result<f64, EngineError> {
    let pool = zero.device_pool();
    zero.begin_pass(PassKind::Train);
    let mut values = vec![inputs.clone()];
    for layer in 0..LAYERS {
        let lease = zero.lease(unit(layer), Phase::Forward)?;
        let [weight, bias] = ids(layer);
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
        let lease = zero.lease(unit(layer), Phase::Backward)?;
        let [weight, bias] = ids(layer);
        let read = lease.param(weight)?.as_slice();
        let (of_weight, of_bias, of_inputs) =
            mlp::backward(layer, read, &values[layer], &values[layer + 1], &flowing);
        for (id, gradient) in [(weight, of_weight), (bias, of_bias)] {
            let shape = lease.param(id)?.shape();
            let gradient = Tensor::from_slice(pool, Tag::Workspace, shape, &gradient)?;
            zero.deposit(id, &gradient)?;
        }
        flowing = of_inputs;
        lease.end()?; // the layer's gradients are on their way
    }
    Ok(sum)
}

fn train(comm: Arc<dyn Communicator>) -> Result<Rows, Box<dyn Error>> {
    let rank = comm.world().rank;
    let config = ZeroConfig {
        stage: Stage::Zero3,
        ..ZeroConfig::default()
    };
    let plan = Arc::new(Plan::new(spec(), config, RANKS)?);
    let device = Pool::new("device", None);
    let backend = Arc::new(MetaBackend::new(device.clone()));
    let tiers = Tiers::new(device, Pool::new("host", None));
    let group = GroupOptions {
        weight_decay: WEIGHT_DECAY,
        lr_scale: 1.0,
    };
    let optimizer = OptimizerConfig {
        rule: Arc::new(optim::AdamW::default()),
        groups: vec![group; 2 * LAYERS],
    };
    let mut zero = Zero::new(plan, comm, backend, tiers, optimizer)?;
    // Only the parts that rest on this rank are asked for.
    let initial = mlp::initial();
    zero.load(|id, elements, out| {
        out.copy_from_slice(&initial[id.index()][elements]);
        Ok::<(), EngineError>(())
    })?;
    let share = SAMPLES / RANKS;
    for step in 0..STEPS {
        let sum = pass(&zero, &mlp::batch(step, rank * share..(rank + 1) * share))?;
        zero.end_micro_batch(sum, share as u64)?;
        zero.step(LR)?;
    }
    let mut weights = vec![Vec::new(); 2 * LAYERS];
    zero.visit_weights(|id, weight| {
        weights[id.index()] = weight.to_f32_vec()?;
        Ok::<(), EngineError>(())
    })?;
    Ok(weights)
}

fn main() -> ExitCode {
    ranks::in_processes(RANKS, |comm| {
        let rank = comm.world().rank;
        let weights = train(comm)?;
        mlp::check(
            &format!("Zero3 with leases on {RANKS} processes"),
            rank,
            &weights,
        )
    })
}

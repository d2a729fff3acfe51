//! A candle model trained by two processes under ZeRO-2: `cargo run`.
//!
//! candle computes losses and gradients; [`ShardedOptimizer`] sums the gradients over the processes, keeps half of the
//! optimizer state on each and writes the new weights into candle's variables. Half-way the run is saved, and another
//! model and optimizer continue it. Rank 0 trains a second model on whole
//! batches with candle's own AdamW and ends with an error unless both agree.

#[path = "../../../engine/examples/common/ranks.rs"]
mod ranks;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{AdamW, Optimizer, ParamsAdamW};
use engine::comm::Communicator;
use engine::sharded::{BridgeError, ShardedOptimizer, TensorBridge, TensorGroup, TensorInfo};
use engine::{Stage, ZeroConfig};
use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;

const RANKS: usize = 2;
const STEPS: usize = 30;
/// Samples of a step over all ranks.
const SAMPLES: usize = 8;
const SIZES: [usize; 3] = [5, 16, 3];
const LR: f64 = 1e-2;
const WEIGHT_DECAY: f64 = 0.1;
const TOLERANCE: f32 = 1e-6;

/// Weight and bias of two layers.
struct Mlp {
    vars: Vec<(&'static str, Var)>,
}

impl Mlp {
    fn new() -> Result<Self> {
        let [inputs, hidden, outputs] = SIZES;
        let shapes: [(&str, Vec<usize>, f32); 4] = [
            ("first.weight", vec![hidden, inputs], 0.4),
            ("first.bias", vec![hidden], 0.1),
            ("second.weight", vec![outputs, hidden], 0.4),
            ("second.bias", vec![outputs], 0.1),
        ];
        let vars = shapes
            .into_iter()
            .enumerate()
            .map(|(t, (name, shape, scale))| {
                let values = numbers(1000 * t, shape.iter().product()).map(|x| scale * x);
                let tensor = Tensor::from_iter(values, &Device::Cpu)?.reshape(shape)?;
                Ok((name, Var::from_tensor(&tensor)?))
            });
        Ok(Self {
            vars: vars.collect::<Result<_>>()?,
        })
    }

    /// Mean squared error of the samples `range` of a step.
    fn loss(&self, step: usize, range: std::ops::Range<usize>) -> Result<Tensor> {
        let rows = |width: usize, part: usize| {
            let seeds = range.clone().map(|s| 7919 * (step * SAMPLES + s) + part);
            let values = seeds.flat_map(|seed| numbers(seed, width));
            Tensor::from_iter(values, &Device::Cpu)?.reshape((range.len(), width))
        };
        let [w1, b1, w2, b2] = [0, 1, 2, 3].map(|t| self.vars[t].1.as_tensor());
        let hidden = rows(SIZES[0], 0)?
            .matmul(&w1.t()?)?
            .broadcast_add(b1)?
            .tanh()?;
        let output = hidden.matmul(&w2.t()?)?.broadcast_add(b2)?;
        (output - rows(SIZES[2], 100)?)?.sqr()?.mean_all()
    }

    fn values(&self) -> Result<Vec<f32>> {
        let all: Result<Vec<Vec<f32>>> = self
            .vars
            .iter()
            .map(|(_, var)| var.flatten_all()?.to_vec1())
            .collect();
        Ok(all?.concat())
    }
}

/// Numbers in -1..1 that look random.
fn numbers(seed: usize, count: usize) -> impl Iterator<Item = f32> {
    (seed..seed + count)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 7 & 0xffff) as f32 / 32_768.0 - 1.0)
}

/// The model and its gradients, as the optimizer sees them.
struct Bridge {
    model: Mlp,
    gradients: Option<GradStore>,
}

impl TensorBridge for Bridge {
    /// One group per layer.
    fn groups(&self) -> Vec<TensorGroup> {
        let layers = self.model.vars.chunks(2).zip(["first", "second"]);
        layers
            .map(|(vars, layer)| TensorGroup {
                name: layer.to_owned(),
                tensors: vars
                    .iter()
                    .map(|(name, var)| {
                        TensorInfo::new(*name, var.elem_count(), WEIGHT_DECAY as f32)
                    })
                    .collect(),
            })
            .collect()
    }

    fn read_weight(&self, tensor: usize, out: &mut [f32]) -> std::result::Result<(), BridgeError> {
        copy(self.model.vars[tensor].1.as_tensor(), out)
    }

    fn read_gradient(
        &self,
        tensor: usize,
        out: &mut [f32],
    ) -> std::result::Result<(), BridgeError> {
        let var = self.model.vars[tensor].1.as_tensor();
        match self
            .gradients
            .as_ref()
            .and_then(|gradients| gradients.get(var))
        {
            Some(gradient) => copy(gradient, out),
            None => Ok(()),
        }
    }

    fn write_weight(
        &mut self,
        tensor: usize,
        values: &[f32],
    ) -> std::result::Result<(), BridgeError> {
        let var = &self.model.vars[tensor].1;
        Ok(var.set(&Tensor::from_slice(values, var.shape(), var.device())?)?)
    }
}

fn copy(tensor: &Tensor, out: &mut [f32]) -> std::result::Result<(), BridgeError> {
    out.copy_from_slice(
        &tensor
            .to_dtype(DType::F32)?
            .flatten_all()?
            .to_vec1::<f32>()?,
    );
    Ok(())
}

/// The initial model, and an optimizer for it.
fn start(
    comm: &Arc<dyn Communicator>,
) -> std::result::Result<(Bridge, ShardedOptimizer), Box<dyn Error>> {
    let bridge = Bridge {
        model: Mlp::new()?,
        gradients: None,
    };
    let config = ZeroConfig {
        stage: Stage::Zero2,
        ..ZeroConfig::default()
    };
    let rule = Arc::new(optim::AdamW::default());
    let optimizer = ShardedOptimizer::new(&bridge, comm.clone(), rule, config)?;
    Ok((bridge, optimizer))
}

fn sharded(comm: &Arc<dyn Communicator>) -> std::result::Result<Vec<f32>, Box<dyn Error>> {
    let rank = comm.world().rank;
    let (mut bridge, mut optimizer) = start(comm)?;
    let share = SAMPLES / RANKS;
    for step in 0..STEPS {
        if step == STEPS / 2 {
            let checkpoint = optimizer.save(&ranks::directory(), Default::default(), 1)?;
            (bridge, optimizer) = start(comm)?;
            optimizer.load(&checkpoint, &mut bridge)?;
        }
        let loss = bridge.model.loss(step, rank * share..(rank + 1) * share)?;
        bridge.gradients = Some(loss.backward()?);
        let loss = f64::from(loss.to_scalar::<f32>()?);
        optimizer.accumulate(&bridge, loss, share as u64)?;
        optimizer.step(&mut bridge, LR)?;
    }
    Ok(bridge.model.values()?)
}

/// candle alone: one process, whole batches, whole state.
fn undivided() -> Result<Vec<f32>> {
    let model = Mlp::new()?;
    let settings = ParamsAdamW {
        lr: LR,
        weight_decay: WEIGHT_DECAY,
        ..ParamsAdamW::default()
    };
    let vars = model.vars.iter().map(|(_, var)| var.clone()).collect();
    let mut optimizer = AdamW::new(vars, settings)?;
    for step in 0..STEPS {
        let loss = model.loss(step, 0..SAMPLES)?;
        optimizer.step(&loss.backward()?)?;
    }
    model.values()
}

fn main() -> ExitCode {
    ranks::in_processes(RANKS, |comm| {
        let rank = comm.world().rank;
        let weights = sharded(&comm)?;
        let expected = undivided()?;
        let pairs = weights.iter().zip(&expected);
        let difference = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        if rank == 0 {
            println!(
                "candle, ZeRO-2 on {RANKS} processes: largest difference from candle's AdamW {difference:.1e}"
            );
        }
        let finite = weights.iter().chain(&expected).all(|w| w.is_finite());
        match finite && difference <= TOLERANCE {
            true => Ok(()),
            false => Err(format!("{difference:e} is more than {TOLERANCE:e}").into()),
        }
    })
}

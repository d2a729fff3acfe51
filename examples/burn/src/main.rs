//! A burn module trained by two processes under ZeRO-2: `cargo run`.
//!
//! burn computes losses and gradients; [`ShardedOptimizer`] sums the gradients over the processes, keeps half of the
//! optimizer state on each and writes the new weights into the module. Half-way the run is saved, and another module and
//! optimizer continue it. Rank 0 trains a module on whole batches with burn's own AdamW and ends with an error unless
//! both agree.

#[path = "../../../engine/examples/common/ranks.rs"]
mod ranks;

use burn::backend::{Autodiff, NdArray};
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::{Tensor, TensorData, activation};
use engine::comm::Communicator;
use engine::sharded::{BridgeError, ShardedOptimizer, TensorBridge, TensorGroup, TensorInfo};
use engine::{Stage, ZeroConfig};
use std::error::Error;
use std::ops::Range;
use std::process::ExitCode;
use std::sync::Arc;

type Plain = NdArray<f32>;
type B = Autodiff<Plain>;

const RANKS: usize = 2;
const STEPS: usize = 30;
/// Samples of a step over all ranks.
const SAMPLES: usize = 8;
const SIZES: [usize; 3] = [5, 16, 3];
const LR: f64 = 1e-2;
const WEIGHT_DECAY: f32 = 0.1;
/// burn keeps them in f32, where these two are exact.
const BETAS: [f32; 2] = [0.875, 0.968_75];
const EPS: f32 = 1e-8;
const TOLERANCE: f32 = 1e-6;

#[derive(Module, Debug)]
struct Mlp<B: burn::tensor::backend::Backend> {
    first: Linear<B>,
    second: Linear<B>,
}

impl Mlp<B> {
    /// The same weights in every process.
    fn new() -> Self {
        let device = Default::default();
        let mut model = Self {
            first: LinearConfig::new(SIZES[0], SIZES[1]).init(&device),
            second: LinearConfig::new(SIZES[1], SIZES[2]).init(&device),
        };
        for (tensor, elems) in sizes(&model).into_iter().enumerate() {
            let values: Vec<f32> = numbers(1000 * tensor, elems).map(|x| 0.4 * x).collect();
            model = write(model, tensor, &values);
        }
        model
    }

    /// Mean squared error of the samples `range` of a step.
    fn loss(&self, step: usize, range: Range<usize>) -> Tensor<B, 1> {
        let rows = |width: usize, part: usize| -> Tensor<B, 2> {
            let seeds = range.clone().map(|s| 7919 * (step * SAMPLES + s) + part);
            let values: Vec<f32> = seeds.flat_map(|seed| numbers(seed, width)).collect();
            let data = TensorData::new(values, [range.len(), width]);
            Tensor::from_data(data, &Default::default())
        };
        let hidden = activation::tanh(self.first.forward(rows(SIZES[0], 0)));
        let errors = self.second.forward(hidden) - rows(SIZES[2], 100);
        errors.powi_scalar(2).mean()
    }

    fn values(&self) -> Result<Vec<f32>, Box<dyn Error>> {
        let mut all = Vec::new();
        for (tensor, elems) in sizes(self).into_iter().enumerate() {
            let mut values = vec![0.0; elems];
            read(self, tensor, None, &mut values).map_err(|error| error.to_string())?;
            all.extend(values);
        }
        Ok(all)
    }
}

/// Numbers in -1..1 that look random.
fn numbers(seed: usize, count: usize) -> impl Iterator<Item = f32> {
    (seed..seed + count)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 7 & 0xffff) as f32 / 32_768.0 - 1.0)
}

/// Elements of every tensor of a module, in burn's order.
fn sizes<M: Module<B>>(model: &M) -> Vec<usize> {
    struct Sizes(Vec<usize>);
    impl ModuleVisitor<B> for Sizes {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            self.0.push(param.val().shape().num_elements());
        }
    }
    let mut sizes = Sizes(Vec::new());
    model.visit(&mut sizes);
    sizes.0
}

/// Copies a tensor of a module, or its gradient, into `out`.
fn read<M: Module<B>>(
    model: &M,
    tensor: usize,
    gradients: Option<&GradientsParams>,
    out: &mut [f32],
) -> Result<(), BridgeError> {
    struct Reader<'a> {
        left: usize,
        gradients: Option<&'a GradientsParams>,
        found: Option<TensorData>,
    }
    impl ModuleVisitor<B> for Reader<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            if self.left == 0 {
                let tensor: Option<Tensor<Plain, D>> = match self.gradients {
                    Some(gradients) => gradients.get(param.id),
                    None => Some(param.val().inner()),
                };
                self.found = tensor.map(Tensor::into_data);
            }
            self.left = self.left.wrapping_sub(1);
        }
    }
    let mut reader = Reader {
        left: tensor,
        gradients,
        found: None,
    };
    model.visit(&mut reader);
    if let Some(found) = reader.found {
        let values = found
            .to_vec::<f32>()
            .map_err(|error| format!("{error:?}"))?;
        out.copy_from_slice(&values);
    }
    Ok(())
}

/// The module with other weights in one tensor.
fn write<M: Module<B>>(model: M, tensor: usize, values: &[f32]) -> M {
    struct Writer<'a> {
        left: usize,
        values: &'a [f32],
    }
    impl ModuleMapper<B> for Writer<'_> {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
            let here = self.left == 0;
            self.left = self.left.wrapping_sub(1);
            param.map(|old| match here {
                true => {
                    let data = TensorData::new(self.values.to_vec(), old.dims());
                    Tensor::from_data(data, &old.device()).require_grad()
                }
                false => old,
            })
        }
    }
    model.map(&mut Writer {
        left: tensor,
        values,
    })
}

/// A module and its gradients, as the optimizer sees them.
struct Bridge {
    model: Mlp<B>,
    gradients: GradientsParams,
}

impl TensorBridge for Bridge {
    /// One group per layer: a weight and a bias.
    fn groups(&self) -> Vec<TensorGroup> {
        let sizes = sizes(&self.model);
        let layers = sizes.chunks(2).zip(["first", "second"]);
        layers
            .map(|(sizes, layer)| TensorGroup {
                name: layer.to_owned(),
                tensors: sizes
                    .iter()
                    .zip(["weight", "bias"])
                    .map(|(elems, part)| {
                        TensorInfo::new(format!("{layer}.{part}"), *elems, WEIGHT_DECAY)
                    })
                    .collect(),
            })
            .collect()
    }

    fn read_weight(&self, tensor: usize, out: &mut [f32]) -> Result<(), BridgeError> {
        read(&self.model, tensor, None, out)
    }

    fn read_gradient(&self, tensor: usize, out: &mut [f32]) -> Result<(), BridgeError> {
        read(&self.model, tensor, Some(&self.gradients), out)
    }

    fn write_weight(&mut self, tensor: usize, values: &[f32]) -> Result<(), BridgeError> {
        self.model = write(self.model.clone(), tensor, values);
        Ok(())
    }
}

/// The initial module, and an optimizer for it.
fn start(comm: &Arc<dyn Communicator>) -> Result<(Bridge, ShardedOptimizer), Box<dyn Error>> {
    let bridge = Bridge {
        model: Mlp::new(),
        gradients: GradientsParams::new(),
    };
    let config = ZeroConfig {
        stage: Stage::Zero2,
        ..ZeroConfig::default()
    };
    let [beta1, beta2] = BETAS.map(f64::from);
    let rule = Arc::new(optim::AdamW::new(beta1, beta2, f64::from(EPS))?);
    let optimizer = ShardedOptimizer::new(&bridge, comm.clone(), rule, config)?;
    Ok((bridge, optimizer))
}

fn sharded(comm: &Arc<dyn Communicator>) -> Result<Vec<f32>, Box<dyn Error>> {
    let rank = comm.world().rank;
    let (mut bridge, mut optimizer) = start(comm)?;
    let share = SAMPLES / RANKS;
    for step in 0..STEPS {
        if step == STEPS / 2 {
            let checkpoint = optimizer.save(&ranks::directory(), Default::default(), 1)?;
            (bridge, optimizer) = start(comm)?;
            optimizer.load(&checkpoint, &mut bridge)?;
        }
        let loss = bridge.model.loss(step, rank * share..(rank + 1) * share);
        bridge.gradients = GradientsParams::from_grads(loss.backward(), &bridge.model);
        let loss = f64::from(loss.into_scalar());
        optimizer.accumulate(&bridge, loss, share as u64)?;
        optimizer.step(&mut bridge, LR)?;
    }
    bridge.model.values()
}

/// burn alone: one process, whole batches, whole state.
fn undivided() -> Result<Vec<f32>, Box<dyn Error>> {
    let mut model = Mlp::new();
    let settings = AdamWConfig::new()
        .with_beta_1(BETAS[0])
        .with_beta_2(BETAS[1])
        .with_epsilon(EPS)
        .with_weight_decay(WEIGHT_DECAY);
    let mut optimizer = settings.init::<B, Mlp<B>>();
    for step in 0..STEPS {
        let gradients = model.loss(step, 0..SAMPLES).backward();
        let gradients = GradientsParams::from_grads(gradients, &model);
        model = optimizer.step(LR, model, gradients);
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
                "burn, ZeRO-2 on {RANKS} processes: largest difference from burn's AdamW {difference:.1e}"
            );
        }
        let finite = weights.iter().chain(&expected).all(|w| w.is_finite());
        match finite && difference <= TOLERANCE {
            true => Ok(()),
            false => Err(format!("{difference:e} is more than {TOLERANCE:e}").into()),
        }
    })
}

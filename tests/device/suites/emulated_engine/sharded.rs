//! The optimizer for another library's tensors, with gradients in the memory of the emulated GPU: results have the bits
//! of gradients in host memory, wherever the states are.

#![allow(
    clippy::unwrap_used,
    reason = "ranks are threads that should end where they stand"
)]

use std::sync::Arc;

use device_tests::emulator::Order;
use device_tests::executor::EmulatedGpu;
use engine::comm::{Communicator, threads};
use engine::sharded::{BridgeError, ShardedOptimizer, TensorBridge, TensorGroup, TensorInfo};
use engine::{Offload, Precision, Stage, Tier, Tiers, ZeroConfig};
use kernels::cuda::CudaBackend;
use kernels::{Backend, DType, Pool, Tag, Tensor};

const ARENA_BYTES: u64 = 1 << 20;
const WINDOW_BYTES: usize = 1 << 20;
const RANKS: usize = 2;
const STEPS: usize = 4;
/// Elements of the tensors. The first two are one group.
const SIZES: [usize; 3] = [300, 5, 1031];

/// Where the bridge has gradients, by the number of the tensor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Gradients {
    /// All in host memory.
    Host,
    /// Uploaded, in memory of another library, and in host memory.
    Device,
}

struct Model {
    weights: Vec<Vec<f32>>,
    gradients: Vec<Vec<f32>>,
    place: Gradients,
    device: Option<(CudaBackend, Arc<EmulatedGpu>)>,
}

impl Model {
    fn new(place: Gradients, device: Option<(CudaBackend, Arc<EmulatedGpu>)>) -> Self {
        let weight = |t: usize, i: usize| ((t * 31 + i * 17) % 11) as f32 / 11.0 - 0.5;
        let all = |t: usize| (0..SIZES[t]).map(|i| weight(t, i)).collect();
        let weights: Vec<Vec<f32>> = (0..SIZES.len()).map(all).collect();
        Self {
            gradients: weights.clone(),
            weights,
            place,
            device,
        }
    }

    fn backward(&mut self, step: usize, rank: usize) {
        for (t, gradients) in self.gradients.iter_mut().enumerate() {
            for (i, gradient) in gradients.iter_mut().enumerate() {
                let target = ((t * 7 + i * 13 + rank * 29 + step * 5) % 23) as f32 / 23.0;
                *gradient = self.weights[t][i] - target;
            }
        }
    }
}

impl TensorBridge for Model {
    fn groups(&self) -> Vec<TensorGroup> {
        let tensor = |t: usize| TensorInfo::new(format!("t{t}"), SIZES[t], 0.1);
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
        assert!(self.place == Gradients::Host || tensor == 2);
        out.copy_from_slice(&self.gradients[tensor]);
        Ok(())
    }

    fn device_gradient(&self, tensor: usize) -> Result<Option<Tensor>, BridgeError> {
        let Some((backend, gpu)) = self
            .device
            .as_ref()
            .filter(|_| self.place == Gradients::Device)
        else {
            return Ok(None);
        };
        let bytes: &[u8] = bytemuck::cast_slice(&self.gradients[tensor]);
        let shape = [SIZES[tensor]];
        match tensor {
            0 => Ok(Some(backend.upload(
                bytes,
                shape.into(),
                DType::F32,
                Tag::Gradients,
            )?)),
            1 => {
                let theirs = gpu.foreign(bytes)?;
                // SAFETY: the memory has as many bytes, which nothing changes.
                let ours = unsafe { backend.import(theirs, shape, DType::F32, Tag::Gradients)? };
                Ok(Some(ours))
            }
            _ => Ok(None),
        }
    }

    fn write_weight(&mut self, tensor: usize, values: &[f32]) -> Result<(), BridgeError> {
        self.weights[tensor].copy_from_slice(values);
        Ok(())
    }
}

/// Trains one rank. It saves half-way and goes on with a new optimizer.
fn train(
    comm: &Arc<dyn Communicator>,
    config: &ZeroConfig,
    place: Gradients,
    on_device: bool,
    directory: &std::path::Path,
) -> Vec<Vec<u32>> {
    let device = || {
        let gpu = Arc::new(EmulatedGpu::new(Order::Ascending));
        (CudaBackend::new(gpu.clone(), ARENA_BYTES).unwrap(), gpu)
    };
    let optimizer = |model: &Model| {
        let rule = Arc::new(optim::AdamW::default());
        let tiers = Tiers::new(Pool::new("buffers", None), Pool::new("host", None));
        let (comm, config) = (comm.clone(), config.clone());
        match &model.device {
            Some((backend, _)) => {
                let backend = Arc::new(backend.clone());
                ShardedOptimizer::on_device(model, comm, rule, config, tiers, backend)
            }
            None => ShardedOptimizer::with_tiers(model, comm, rule, config, tiers),
        }
        .unwrap()
    };
    let mut model = Model::new(place, on_device.then(device));
    let mut trained = optimizer(&model);
    for step in 0..STEPS {
        if step == STEPS / 2 {
            let saved = trained.save(directory, serde_json::Value::Null, 0).unwrap();
            model = Model::new(place, on_device.then(device));
            trained = optimizer(&model);
            trained.load(&saved, &mut model).unwrap();
        }
        for micro_batch in 0..2 {
            model.backward(2 * step + micro_batch, comm.world().rank);
            trained
                .accumulate(&model, 1.0, 1 + 2 * micro_batch as u64)
                .unwrap();
        }
        assert!(trained.step(&mut model, 1e-2).unwrap().applied);
    }
    let bits = |weights: &Vec<f32>| weights.iter().map(|w| w.to_bits()).collect();
    model.weights.iter().map(bits).collect()
}

fn in_ranks(config: &ZeroConfig, place: Gradients, on_device: bool) -> Vec<Vec<Vec<u32>>> {
    let directory = tempfile::tempdir().unwrap();
    let comms = threads::world(RANKS, WINDOW_BYTES).unwrap();
    std::thread::scope(|scope| {
        let path = directory.path();
        let start = |comm| scope.spawn(move || train(&comm, config, place, on_device, path));
        let ranks: Vec<_> = comms.into_iter().map(start).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn gradients_in_device_memory_give_the_bits_of_gradients_in_host_memory() {
    for (stage, precision) in [
        (Stage::Zero1, Precision::F32),
        (Stage::Zero2, Precision::Bf16),
        (Stage::Zero3, Precision::Bf16),
    ] {
        let config = |states| ZeroConfig {
            stage,
            precision,
            offload: Offload::states(states),
            max_grad_norm: Some(1.0),
            ..ZeroConfig::default()
        };
        let expected = in_ranks(&config(Tier::Host), Gradients::Host, false);
        assert_eq!(expected[0], expected[1]);
        for states in [Tier::Host, Tier::Device] {
            for place in [Gradients::Host, Gradients::Device] {
                assert!(
                    in_ranks(&config(states), place, true) == expected,
                    "{stage:?}, {precision:?}, states on {states:?}, gradients on {place:?}"
                );
            }
        }
    }
}

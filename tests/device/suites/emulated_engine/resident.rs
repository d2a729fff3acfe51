//! Model states located on the GPU. Everything has the bits of a run with states in host memory, the plan has every
//! offset, and an update copies nothing over the bus.

use std::sync::Arc;

use anyhow::{Result, ensure};
use device_tests::emulator::Order;
use device_tests::executor::{EmulatedGpu, Library};
use engine::comm::{Communicator, threads};
use engine::{
    DryRun, GradDtype, Offload, OptimizerConfig, ParamId, PassKind, Plan, Precision, Stage, Tier,
    ZeroConfig,
};
use kernels::cuda::CudaBackend;
use kernels::{Backend, PoolStats};
use models::autograd::Tape;
use models::{ModelOptions, SampleInput, VisionLanguageModel, open_model};
use optim::adamw::{Bf16Storage, MomentDtype, PureBf16};
use optim::{AdamW, GroupOptions};

use crate::setup::{self, ARENA_BYTES, pack};

const FAMILY: &str = "glm-4v-9b";
const TOKENS: usize = 16;
const MOST_TOKENS: usize = 100;
const LEARNING_RATE: f64 = 1e-3;
/// Small compared with a unit, so a unit's update has several chunks.
const SUB_GROUP_ELEMS: usize = 5000;

/// Number formats of a run.
#[derive(Clone, Copy)]
struct Numbers {
    stage: Stage,
    precision: Precision,
    grad_dtype: Option<GradDtype>,
    pure: PureBf16,
    /// Whether moments have 8 bits.
    eight_bit: bool,
}

const PLAIN: Numbers = Numbers {
    stage: Stage::Zero2,
    precision: Precision::F32,
    grad_dtype: None,
    pure: PureBf16 {
        weights: Bf16Storage::Stochastic,
        moments: MomentDtype::Bf16,
    },
    eight_bit: false,
};

/// Results of a run.
#[derive(PartialEq)]
struct Left {
    losses: Vec<u64>,
    norms: Vec<u64>,
    gradients: Vec<(ParamId, Vec<f32>)>,
    weights: Vec<(ParamId, Vec<f32>)>,
    states: Vec<u8>,
}

/// Resources of a run: device memory, and bytes copied to the device while it trained.
struct Took {
    stats: PoolStats,
    inward: u64,
}

impl Numbers {
    fn rule(self) -> AdamW {
        AdamW {
            pure_bf16: self.pure,
            eight_bit: self.eight_bit,
            ..AdamW::default()
        }
    }

    fn plan(self, model: &dyn VisionLanguageModel, offload: Offload) -> Result<Arc<Plan>> {
        let config = ZeroConfig {
            stage: self.stage,
            precision: self.precision,
            grad_dtype: self.grad_dtype,
            offload,
            max_grad_norm: Some(1.0),
            sub_group_elems: SUB_GROUP_ELEMS,
            states_in_blocks: self.eight_bit,
            ..ZeroConfig::default()
        };
        Ok(Arc::new(Plan::new(model.spec().clone(), config, 1)?))
    }

    /// Two updates of two micro-batches each, then one more micro-batch. Every other parameter has its own learning
    /// rate and weight decay.
    fn train(self, offload: Offload) -> Result<(Left, Took)> {
        let dir = pack(FAMILY);
        let model = open_model(&dir, ModelOptions::new(self.precision.weight_dtype()))?;
        let gpu = Arc::new(EmulatedGpu::new(Order::Ascending));
        let device = CudaBackend::new(gpu.clone(), ARENA_BYTES)?;
        let backend: Arc<dyn Backend> = Arc::new(device.clone());
        let plan = self.plan(&*model, offload)?;
        let of = |(weight_decay, lr_scale)| GroupOptions {
            weight_decay,
            lr_scale,
        };
        let groups = (0..model.spec().params.len()).map(|i| of([(0.01, 1.0), (0.0, 0.5)][i % 2]));
        let optimizer = OptimizerConfig {
            rule: Arc::new(self.rule()),
            groups: groups.collect(),
        };
        let mut zero = setup::loaded_with(&dir, &*model, plan, backend.clone(), optimizer)?;
        let sample = setup::sample(&dir, TOKENS, MOST_TOKENS)?;
        let mut left = Left {
            losses: Vec::new(),
            norms: Vec::new(),
            gradients: Vec::new(),
            weights: Vec::new(),
            states: Vec::new(),
        };
        let before = gpu.uploads().bytes;
        for micro_batch in 0..5 {
            zero.begin_pass(PassKind::Train);
            let batch = model.collate(&[SampleInput::from(&sample)], &*backend)?;
            let tape = Tape::training(&zero).with_recompute_check(false);
            let loss = model.forward(&tape, &batch)?;
            let fetch = loss.fetch()?;
            tape.backward(&loss, 1.0)?;
            let (sum, supervised) = (fetch.sum()?, loss.supervised);
            drop((fetch, loss, batch));
            zero.end_micro_batch(sum, supervised as u64)?;
            left.losses.push(sum.to_bits());
            if micro_batch % 2 == 1 {
                left.gradients.extend(zero.gradients()?);
                left.norms
                    .push(zero.step(LEARNING_RATE)?.grad_norm.to_bits());
            }
        }
        let inward = gpu.uploads().bytes - before;
        zero.visit_weights(|id, tensor| {
            left.weights.push((id, tensor.to_f32_vec()?));
            Ok::<_, engine::EngineError>(())
        })?;
        left.states = zero.state_bytes()?;
        let stats = device.pool().stats();
        Ok((left, Took { stats, inward }))
    }

    fn planned(self, offload: Offload) -> Result<PoolStats> {
        let model = open_model(
            &pack(FAMILY),
            ModelOptions::new(self.precision.weight_dtype()),
        )?;
        let plan = self.plan(&*model, offload)?;
        let device = CudaBackend::counting(Library::Absent.kind());
        let backend: Arc<dyn Backend> = Arc::new(device.clone());
        let mut dry_run = DryRun::on_discrete_device(plan, Arc::new(self.rule()), backend.clone())?;
        let sample = setup::sample(&pack(FAMILY), TOKENS, MOST_TOKENS)?;
        for micro_batch in 0..5 {
            dry_run.begin_pass(PassKind::Train);
            let batch = model.collate(&[SampleInput::from(&sample)], &*backend)?;
            let tape = Tape::training(&*dry_run);
            let loss = model.forward(&tape, &batch)?;
            tape.backward(&loss, 1.0)?;
            drop((loss, batch));
            dry_run.end_pass()?;
            if micro_batch % 2 == 1 {
                dry_run.take_step()?;
            }
        }
        dry_run.save_all()?;
        Ok(device.pool().stats())
    }

    fn agrees(self, tiers: &[(Tier, Tier)]) -> Result<()> {
        let (want, _) = self.train(Offload::states(Tier::Host))?;
        for (param, optimizer) in tiers {
            let offload = Offload {
                param: *param,
                optimizer: *optimizer,
                activation: Tier::Device,
            };
            let (got, took) = self.train(offload)?;
            ensure!(got.losses == want.losses, "{offload:?}: losses");
            ensure!(got.norms == want.norms, "{offload:?}: norms");
            ensure!(got.gradients == want.gradients, "{offload:?}: gradients");
            ensure!(got.weights == want.weights, "{offload:?}: weights");
            ensure!(got.states == want.states, "{offload:?}: states");
            let planned = self.planned(offload)?;
            ensure!(
                planned == took.stats,
                "{offload:?}: {planned:?} planned, {:?}",
                took.stats
            );
            if offload == Offload::states(Tier::Device) {
                // The constants of two updates.
                ensure!(took.inward < 1000, "{} bytes for updates", took.inward);
            }
        }
        Ok(())
    }
}

const THERE: (Tier, Tier) = (Tier::Device, Tier::Device);

#[test]
fn states_on_the_gpu_in_f32_have_the_bits_of_host_states() -> Result<()> {
    PLAIN.agrees(&[
        THERE,
        (Tier::Device, Tier::Host),
        (Tier::Host, Tier::Device),
    ])
}

#[test]
fn states_on_the_gpu_in_bf16_have_the_bits_of_host_states() -> Result<()> {
    let numbers = Numbers {
        precision: Precision::Bf16,
        stage: Stage::Zero0,
        ..PLAIN
    };
    numbers.agrees(&[THERE, (Tier::Host, Tier::Device)])
}

#[test]
fn states_on_the_gpu_in_fp16_with_bf16_sums_have_the_bits_of_host_states() -> Result<()> {
    let numbers = Numbers {
        precision: Precision::Fp16,
        grad_dtype: Some(GradDtype::Bf16),
        stage: Stage::Zero3,
        ..PLAIN
    };
    numbers.agrees(&[THERE])
}

#[test]
fn states_on_the_gpu_in_pure_bf16_have_the_bits_of_host_states() -> Result<()> {
    let numbers = Numbers {
        precision: Precision::PureBf16,
        ..PLAIN
    };
    numbers.agrees(&[THERE, (Tier::Host, Tier::Device)])
}

#[test]
fn states_on_the_gpu_in_pure_bf16_with_f32_moments_have_the_bits_of_host_states() -> Result<()> {
    let numbers = Numbers {
        precision: Precision::PureBf16,
        grad_dtype: Some(GradDtype::F32),
        pure: PureBf16 {
            moments: MomentDtype::F32,
            ..PLAIN.pure
        },
        ..PLAIN
    };
    numbers.agrees(&[THERE])
}

/// Moments of 8 bits stay on the GPU, with weights there or in host memory.
#[test]
fn eight_bit_states_on_the_gpu_have_the_bits_of_host_states() -> Result<()> {
    let eight_bit = Numbers {
        eight_bit: true,
        ..PLAIN
    };
    eight_bit.agrees(&[(Tier::Host, Tier::Device)])?;
    for (precision, stage, grad_dtype) in [
        (Precision::Fp16, Stage::Zero3, Some(GradDtype::Bf16)),
        (Precision::PureBf16, Stage::Zero2, None),
    ] {
        let numbers = Numbers {
            precision,
            stage,
            grad_dtype,
            ..eight_bit
        };
        numbers.agrees(&[THERE])?;
    }
    Ok(())
}

/// An update rule without a GPU kernel steps in host memory, and its states are copied there and back.
#[test]
fn states_of_a_rule_without_gpu_kernel_are_stepped_on_the_host() -> Result<()> {
    let numbers = Numbers {
        precision: Precision::PureBf16,
        pure: PureBf16 {
            weights: Bf16Storage::Kahan,
            ..PLAIN.pure
        },
        ..PLAIN
    };
    let (want, _) = numbers.train(Offload::states(Tier::Host))?;
    for param in [Tier::Device, Tier::Host] {
        let offload = Offload {
            param,
            ..Offload::states(Tier::Device)
        };
        let (got, took) = numbers.train(offload)?;
        ensure!(got == want, "{offload:?}: other bits");
        let planned = numbers.planned(offload)?;
        ensure!(planned == took.stats, "{offload:?}: another plan");
    }
    Ok(())
}

/// Weights located on the GPUs and gathered through the host are fetched during compute. The fetch waits for their last
/// update, not for the pass.
#[test]
fn shards_on_the_gpu_leave_while_the_gpu_computes() -> Result<()> {
    let rank = |comm: Arc<dyn Communicator>| -> Result<[u64; 2]> {
        let dir = pack(FAMILY);
        let model = open_model(&dir, ModelOptions::new(kernels::DType::F32))?;
        let config = ZeroConfig {
            offload: Offload::states(Tier::Device),
            ..ZeroConfig::default()
        };
        let plan = Arc::new(Plan::new(model.spec().clone(), config, comm.world().size)?);
        let gpu = Arc::new(EmulatedGpu::new(Order::Ascending));
        let backend: Arc<dyn Backend> = Arc::new(CudaBackend::new(gpu.clone(), ARENA_BYTES)?);
        let zero = setup::loaded_on(&dir, &*model, plan, backend.clone(), comm)?;
        let sample = setup::sample(&dir, TOKENS, MOST_TOKENS)?;
        let before = gpu.fetches();
        zero.begin_pass(PassKind::Infer);
        let batch = model.collate(&[SampleInput::from(&sample)], &*backend)?;
        drop(model.forward(&Tape::inference(&zero), &batch)?);
        drop(batch);
        zero.end_pass()?;
        let after = gpu.fetches();
        Ok([
            after.bytes - before.bytes,
            after.overlapping - before.overlapping,
        ])
    };
    let ranks: Vec<_> = threads::world(2, 1 << 26)?
        .into_iter()
        .map(|comm| std::thread::spawn(move || rank(comm)))
        .collect();
    for rank in ranks {
        let Ok(fetched) = rank.join() else {
            anyhow::bail!("a rank panicked");
        };
        let [bytes, overlapping] = fetched?;
        ensure!(
            bytes > 0 && overlapping * 2 > bytes,
            "{overlapping} of {bytes}"
        );
    }
    Ok(())
}

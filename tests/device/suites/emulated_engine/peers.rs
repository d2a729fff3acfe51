//! Ranks whose emulated GPUs read each other's memory. Weights, losses and gradients have the bits of ranks that
//! exchange through host memory, and the plan knows their memory.

use std::sync::Arc;

use anyhow::{Result, ensure};
use device_tests::emulator::Order;
use device_tests::executor::Library;
use device_tests::linked::{Copies, LinkedGpu, Lost, Stream};
use engine::comm::{Communicator, threads};
use engine::{
    DeviceTransport, DryRun, Offload, ParamId, PassKind, Plan, Precision, Stage, Tier, Zero,
    ZeroConfig,
};
use kernels::cuda::CudaBackend;
use kernels::cuda::backend::Executor;
use kernels::cuda::backend::graphs::{Mode, Replaying};
use kernels::{Backend, Lane, PoolStats};
use models::autograd::Tape;
use models::data::EncodedSample;
use models::{ModelOptions, SampleInput, VisionLanguageModel, open_model};

use crate::setup::{self, ARENA_BYTES, LOST_SEEDS, pack};

const TOKENS: usize = 12;
const MOST_TOKENS: usize = 80;
const WINDOW_BYTES: usize = 1 << 26;
const LEARNING_RATE: f64 = 1e-3;

/// Settings of a run.
#[derive(Clone, Copy)]
struct Case {
    family: &'static str,
    ranks: usize,
    stage: Stage,
    group: Option<usize>,
    precision: Precision,
    prefetch_units: usize,
    /// Tier of weights, gradients and optimizer states.
    states: Tier,
    /// Tier of the weights, if another one.
    weights: Option<Tier>,
    /// Whether the optimizer runs in forward even when hosts exchange.
    late: bool,
    /// Whether weights are prefetched one unit ahead.
    ahead: bool,
    /// Whether layer inputs are recomputed.
    again: bool,
    /// Number of passes. The fourth has no image on any rank, so nobody uses the vision units prefetched for it.
    passes: usize,
}

const PLAIN: Case = Case {
    family: "glm-4v-9b",
    ranks: 2,
    stage: Stage::Zero3,
    group: None,
    precision: Precision::F32,
    prefetch_units: 1,
    states: Tier::Host,
    weights: None,
    late: false,
    ahead: false,
    again: false,
    passes: 3,
};

/// Results of a rank.
#[derive(PartialEq)]
struct Left {
    losses: Vec<f64>,
    gradients: Vec<(ParamId, Vec<f32>)>,
    weights: Vec<(ParamId, Vec<f32>)>,
}

impl Case {
    fn plan(&self, model: &dyn VisionLanguageModel, transport: DeviceTransport) -> Result<Plan> {
        let config = ZeroConfig {
            stage: self.stage,
            precision: self.precision,
            shard_group: self.group,
            offload: Offload {
                param: self.weights.unwrap_or(self.states),
                ..Offload::states(self.states)
            },
            device_transport: transport,
            prefetch_units: self.prefetch_units,
            prefetch_weights: self.ahead,
            recomputed: match self.again {
                true => setup::stacks(model.spec()),
                false => Vec::new(),
            },
            max_grad_norm: Some(1.0),
            // The reference updates after the pass.
            optimizer_in_forward: (self.late || transport != DeviceTransport::Host)
                && self.states == Tier::Host,
            // A few chunks, the last one shorter.
            sub_group_elems: 1000,
            ..ZeroConfig::default()
        };
        Ok(Plan::new(model.spec().clone(), config, self.ranks)?)
    }

    fn open(&self) -> Result<Arc<dyn VisionLanguageModel>> {
        let options = ModelOptions::new(self.precision.weight_dtype());
        Ok(open_model(&pack(self.family), options)?)
    }

    /// Runs the ranks on GPUs with these copies.
    fn train(&self, transport: DeviceTransport, copies: Copies) -> Result<Vec<Trained>> {
        let gpus = LinkedGpu::node(self.ranks, Order::Ascending, copies);
        self.train_on(transport, gpus)
    }

    /// Runs every rank on its own thread. Also returns the traffic of each GPU.
    fn train_on(&self, transport: DeviceTransport, gpus: Vec<LinkedGpu>) -> Result<Vec<Trained>> {
        let comms = threads::world(self.ranks, WINDOW_BYTES)?;
        let ranks = gpus.into_iter().zip(comms).map(|(gpu, comm)| {
            let case = *self;
            std::thread::spawn(move || {
                let done = case.rank(transport, gpu, comm.clone());
                done.inspect_err(|error| comm.abort(&error.to_string()))
            })
        });
        let ranks: Vec<_> = ranks.collect();
        let join = |rank: std::thread::JoinHandle<Result<Trained>>| match rank.join() {
            Ok(trained) => trained,
            Err(_) => anyhow::bail!("a rank panicked"),
        };
        ranks.into_iter().map(join).collect()
    }

    /// Runs two micro-batches and a step, then one or two more passes. The last rank has no image in the first
    /// micro-batch, the first rank none in the second, and no rank any in the last.
    fn rank(
        &self,
        transport: DeviceTransport,
        gpu: LinkedGpu,
        comm: Arc<dyn Communicator>,
    ) -> Result<Trained> {
        let model = self.open()?;
        let plan = Arc::new(self.plan(&*model, transport)?);
        let gpu = Arc::new(gpu);
        // Ranks that share memory also replay runs of commands as graphs.
        let replays = transport == DeviceTransport::Peers;
        let executor: Arc<dyn Executor> = match replays {
            true => Arc::new(Replaying::new(gpu.clone(), Mode::On)),
            false => gpu.clone(),
        };
        let device = CudaBackend::new(executor, ARENA_BYTES)?;
        let backend: Arc<dyn Backend> = Arc::new(device.clone());
        let rank = comm.world().rank;
        let dir = pack(self.family);
        let mut zero = setup::loaded_on(&dir, &*model, plan, backend.clone(), comm)?;
        let mut left = Left {
            losses: Vec::new(),
            gradients: Vec::new(),
            weights: Vec::new(),
        };
        let with_image = setup::sample(&dir, TOKENS + rank, MOST_TOKENS + rank)?;
        let without = setup::text_sample(&dir, TOKENS)?;
        for pass in 0..self.passes {
            let text = pass == 3 || [self.ranks - 1, 0].get(pass) == Some(&rank);
            let sample = if text { &without } else { &with_image };
            left.losses
                .push(micro_batch(&mut zero, &*model, sample, &backend)?);
            if pass == 1 {
                left.gradients = zero.gradients()?;
                zero.step(LEARNING_RATE)?;
            }
        }
        zero.visit_weights(|id, tensor| {
            left.weights.push((id, tensor.to_f32_vec()?));
            Ok::<_, engine::EngineError>(())
        })?;
        let stats = device.pool().stats();
        Ok(Trained {
            left,
            stats,
            traffic: gpu.traffic(),
            beside: gpu.beside(),
        })
    }

    /// The same passes of rank 0 as a dry run.
    fn planned(&self, transport: DeviceTransport) -> Result<PoolStats> {
        let model = self.open()?;
        let plan = Arc::new(self.plan(&*model, transport)?);
        let device = CudaBackend::counting(Library::Absent.kind());
        let rule = Arc::new(optim::AdamW::default());
        let mut dry_run = DryRun::on_discrete_device(plan, rule, Arc::new(device.clone()))?;
        let backend: Arc<dyn Backend> = Arc::new(device.clone());
        let dir = pack(self.family);
        let with_image = setup::sample(&dir, TOKENS, MOST_TOKENS)?;
        let without = setup::text_sample(&dir, TOKENS)?;
        for pass in 0..self.passes {
            dry_run.begin_pass(PassKind::Train);
            let sample = if pass == 1 || pass == 3 {
                &without
            } else {
                &with_image
            };
            let batch = model.collate(&[SampleInput::from(sample)], &*backend)?;
            let tape = Tape::training(&*dry_run);
            let loss = model.forward(&tape, &batch)?;
            tape.backward(&loss, 1.0)?;
            drop((loss, batch));
            dry_run.end_pass()?;
            if pass == 1 {
                dry_run.take_step()?;
            }
        }
        dry_run.save_all()?;
        Ok(device.pool().stats())
    }

    /// Compares with the results of states in host memory and exchange through the host. The emulated library adds in
    /// rank order, which the real one does not guarantee.
    fn agrees(&self, how: &[(DeviceTransport, Copies)]) -> Result<()> {
        let plain = Self {
            ahead: false,
            again: false,
            states: Tier::Host,
            ..*self
        };
        let want = plain.train(DeviceTransport::Host, Copies::Late)?;
        for (transport, copies) in how {
            let got = self.train(*transport, *copies)?;
            for (rank, (got, want)) in got.iter().zip(&want).enumerate() {
                ensure!(
                    got.left.losses == want.left.losses,
                    "rank {rank}: losses {:?} instead of {:?}",
                    got.left.losses,
                    want.left.losses
                );
                ensure!(got.left == want.left, "rank {rank}: {copies:?} copies");
                // One shard crosses the bus, and the rest comes from the other GPUs.
                let ((pulled, put), (_, all)) = (got.traffic, want.traffic);
                if *transport == DeviceTransport::Host {
                    continue;
                }
                ensure!(pulled > 0, "rank {rank} read no other GPU");
                // Gradients have no compute to overlap with. With shard groups they are most of the pulled bytes.
                let beside = got.beside;
                ensure!(
                    self.ahead == (beside > 0) && (!self.ahead || beside * 5 > pulled),
                    "rank {rank}: {beside} of {pulled} bytes beside work"
                );
                if self.stage == Stage::Zero3 {
                    ensure!(put < all, "rank {rank}: {put} of {all} bytes uploaded");
                }
            }
            let planned = self.planned(*transport)?;
            let used = &got[0].stats;
            ensure!(planned == *used, "{planned:?} planned, {used:?} used");
        }
        Ok(())
    }
}

struct Trained {
    left: Left,
    stats: PoolStats,
    traffic: (u64, u64),
    beside: u64,
}

fn micro_batch(
    zero: &mut Zero,
    model: &dyn VisionLanguageModel,
    sample: &EncodedSample,
    backend: &Arc<dyn Backend>,
) -> Result<f64> {
    zero.begin_pass(PassKind::Train);
    let batch = model.collate(&[SampleInput::from(sample)], &**backend)?;
    let tape = Tape::training(zero);
    let loss = model.forward(&tape, &batch)?;
    let fetch = loss.fetch()?;
    tape.backward(&loss, 1.0)?;
    let (sum, supervised) = (fetch.sum()?, loss.supervised);
    drop((fetch, loss, batch));
    zero.end_micro_batch(sum, supervised as u64)?;
    Ok(sum)
}

#[test]
fn two_ranks_at_stage_3_have_the_bits_of_the_host_path() -> Result<()> {
    PLAIN.agrees(&[
        (DeviceTransport::Peers, Copies::Early),
        (DeviceTransport::Peers, Copies::Late),
        (DeviceTransport::Nccl, Copies::Late),
    ])
}

#[test]
fn stage_2_in_bf16_has_the_bits_of_the_host_path() -> Result<()> {
    let case = Case {
        family: "minicpm-v-2_6",
        stage: Stage::Zero2,
        precision: Precision::Bf16,
        ..PLAIN
    };
    case.agrees(&[
        (DeviceTransport::Peers, Copies::Late),
        (DeviceTransport::Nccl, Copies::Early),
    ])
}

#[test]
fn prefetched_gathers_have_the_bits_of_the_host_path() -> Result<()> {
    let case = Case {
        ahead: true,
        passes: 4,
        ..PLAIN
    };
    case.agrees(&[
        (DeviceTransport::Peers, Copies::Early),
        (DeviceTransport::Peers, Copies::Late),
        (DeviceTransport::Nccl, Copies::Late),
        (DeviceTransport::Host, Copies::Early),
    ])?;
    let farther = Case {
        prefetch_units: 3,
        ..case
    };
    farther.agrees(&[(DeviceTransport::Peers, Copies::Late)])
}

/// Units are gathered once more for recomputed layer inputs, also by a rank whose batch has no such layers.
#[test]
fn recomputed_layer_inputs_have_the_bits_of_the_host_path() -> Result<()> {
    let case = Case {
        again: true,
        ..PLAIN
    };
    case.agrees(&[
        (DeviceTransport::Peers, Copies::Late),
        (DeviceTransport::Nccl, Copies::Early),
        (DeviceTransport::Host, Copies::Late),
    ])?;
    let ahead = Case {
        family: "minicpm-v-2_6",
        precision: Precision::Bf16,
        prefetch_units: 2,
        ahead: true,
        passes: 4,
        ..case
    };
    ahead.agrees(&[
        (DeviceTransport::Peers, Copies::Early),
        (DeviceTransport::Host, Copies::Early),
    ])
}

#[test]
fn prefetched_gathers_in_two_shard_groups_have_the_bits_of_the_host_path() -> Result<()> {
    let case = Case {
        family: "minicpm-v-2_6",
        ranks: 4,
        group: Some(2),
        precision: Precision::PureBf16,
        ahead: true,
        passes: 4,
        ..PLAIN
    };
    case.agrees(&[(DeviceTransport::Peers, Copies::Late)])
}

#[test]
fn two_shard_groups_in_pure_bf16_have_the_bits_of_the_host_path() -> Result<()> {
    let case = Case {
        ranks: 4,
        group: Some(2),
        precision: Precision::PureBf16,
        prefetch_units: 0,
        ..PLAIN
    };
    case.agrees(&[(DeviceTransport::Peers, Copies::Late)])
}

/// States located on the GPUs are gathered, summed and stepped on the GPUs.
#[test]
fn states_on_the_gpus_at_stage_3_have_the_bits_of_the_host_path() -> Result<()> {
    let case = Case {
        states: Tier::Device,
        ..PLAIN
    };
    case.agrees(&[
        (DeviceTransport::Host, Copies::Late),
        (DeviceTransport::Peers, Copies::Early),
        (DeviceTransport::Peers, Copies::Late),
        (DeviceTransport::Nccl, Copies::Late),
    ])
}

#[test]
fn states_on_the_gpus_in_two_shard_groups_have_the_bits_of_the_host_path() -> Result<()> {
    let case = Case {
        ranks: 4,
        group: Some(2),
        precision: Precision::PureBf16,
        states: Tier::Device,
        ..PLAIN
    };
    case.agrees(&[
        (DeviceTransport::Host, Copies::Early),
        (DeviceTransport::Peers, Copies::Late),
    ])
}

/// In stage 0 the bf16 sums are divided among ranks and gathered for the update.
#[test]
fn states_on_the_gpus_below_stage_3_have_the_bits_of_the_host_path() -> Result<()> {
    for (stage, precision, transport) in [
        (Stage::Zero0, Precision::PureBf16, DeviceTransport::Host),
        (Stage::Zero1, Precision::Bf16, DeviceTransport::Host),
        (Stage::Zero2, Precision::F32, DeviceTransport::Host),
        (Stage::Zero2, Precision::PureBf16, DeviceTransport::Peers),
    ] {
        let case = Case {
            stage,
            precision,
            states: Tier::Device,
            ..PLAIN
        };
        case.agrees(&[(transport, Copies::Late)])?;
    }
    Ok(())
}

/// Weights located on the GPUs are updated in host memory during the next pass, in which other ranks read them.
#[test]
fn weights_on_the_gpus_are_updated_during_the_next_forward() -> Result<()> {
    let case = Case {
        weights: Some(Tier::Device),
        precision: Precision::PureBf16,
        passes: 4,
        ..PLAIN
    };
    case.agrees(&[
        (DeviceTransport::Peers, Copies::Early),
        (DeviceTransport::Peers, Copies::Late),
        (DeviceTransport::Peers, Copies::Drawn(0)),
        (DeviceTransport::Nccl, Copies::Drawn(1)),
    ])?;
    let want = case.train(DeviceTransport::Host, Copies::Late)?;
    for copies in [Copies::Early, Copies::Late, Copies::Drawn(2)] {
        let late = Case { late: true, ..case };
        let got = late.train(DeviceTransport::Host, copies)?;
        for (got, want) in got.iter().zip(&want) {
            ensure!(got.left == want.left, "{copies:?} copies");
        }
    }
    Ok(())
}

/// Lanes of two GPUs at every time that waits allow.
#[test]
fn ranks_have_the_same_bits_under_any_delays() -> Result<()> {
    let seeds = if setup::every() { 3 } else { 1 };
    let days = |transport| (0..seeds).map(move |seed| (transport, Copies::Drawn(seed)));
    let ahead = Case {
        ahead: true,
        passes: 4,
        ..PLAIN
    };
    let carriers = [DeviceTransport::Peers, DeviceTransport::Nccl].map(days);
    let races = Stream::ALL.map(|lane| (DeviceTransport::Peers, Copies::Racing(lane)));
    let all: Vec<_> = carriers.into_iter().flatten().chain(races).collect();
    ahead.agrees(&all)?;
    let resident = Case {
        states: Tier::Device,
        ..PLAIN
    };
    let days: Vec<_> = days(DeviceTransport::Peers).collect();
    resident.agrees(&days)
}

/// Each kind of wait is necessary: a case and a timing reveal its absence. The timing named here does today, however
/// the threads of the ranks run; after a change of the pass another one may.
#[test]
fn a_lost_wait_changes_the_bits() -> Result<()> {
    let of_states = |states, weights, prefetch_units| Case {
        states,
        weights,
        prefetch_units,
        ahead: states == Tier::Host,
        passes: 4,
        ..PLAIN
    };
    let transport = DeviceTransport::Peers;
    let racing = Copies::Racing(Stream::Communication);
    let in_host_memory = [
        (Lost::Uses, racing),
        (Lost::Puts, racing),
        (
            Lost::Marks(Lane::Communication, Lane::Communication),
            racing,
        ),
        (
            Lost::Marks(Lane::Compute, Lane::Communication),
            Copies::Racing(Stream::Inward),
        ),
        (Lost::ReservedUploads, racing),
    ];
    // With weights from the host, the wait for a range's last use hides the two kinds on the GPU. Gathers one unit ahead
    // hide the second kind as well.
    for (case, kinds) in [
        (of_states(Tier::Host, None, 1), &in_host_memory[..]),
        (of_states(Tier::Device, None, 1), &[(Lost::Own, racing)]),
        (
            of_states(Tier::Device, None, 0),
            &[(
                Lost::Marks(Lane::Communication, Lane::Compute),
                Copies::Drawn(0),
            )],
        ),
        (
            of_states(Tier::Host, Some(Tier::Device), 1),
            &[(Lost::Deliveries, racing)],
        ),
    ] {
        let want = case.train(transport, Copies::Late)?;
        for (lost, known) in kinds {
            let shows = |copies| {
                let gpus = LinkedGpu::node(case.ranks, Order::Ascending, copies);
                let gpus = gpus.into_iter().map(|gpu| gpu.without(*lost)).collect();
                // Memory that nobody wrote may also end a launch of the emulator.
                let got = case.train_on(transport, gpus);
                got.map_or(true, |got| {
                    got.iter()
                        .zip(&want)
                        .any(|(got, want)| got.left != want.left)
                })
            };
            let races = Stream::ALL.map(Copies::Racing).into_iter();
            let others = races.chain((0..LOST_SEEDS).map(Copies::Drawn));
            let others = others.filter(|copies| copies != known);
            let mut timings = std::iter::once(*known).chain(others);
            ensure!(timings.any(shows), "{lost:?}");
        }
    }
    Ok(())
}

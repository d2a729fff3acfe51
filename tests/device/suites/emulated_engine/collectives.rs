//! Conformance of the transports by which devices of several ranks gather weights and sum gradients: through the host's
//! window, by reading each other's memory, or by a library's process group.
//!
//! The cases use the engine's passes, since a device has no collectives that others could call.
//! `engine/src/comm/conformance.rs` tests the host's communicators. `peers.rs` compares whole models.

#![allow(
    clippy::unwrap_used,
    reason = "ranks are threads that should end where they stand"
)]

use std::sync::Arc;
use std::time::Duration;

use device_tests::emulator::Order;
use device_tests::linked::{Copies, LinkedGpu, OTHER_VERSION, REFUSAL, Trouble, VERSION};
use engine::comm::shm::{self, ShmOptions};
use engine::comm::{CommError, Communicator, Tag as CommTag, World};
use engine::plan::PlanError;
use engine::{
    DeviceTransport, EngineError, ModelSpec, Offload, OptimizerConfig, ParamAccess, ParamId,
    ParamSpec, PassKind, Phase, Plan, Precision, Stage, Tier, Tiers, UnitId, UnitSpec, Zero,
    ZeroConfig,
};
use kernels::cuda::CudaBackend;
use kernels::{Backend, DType, Pool, Shape, Tag};
use optim::GroupOptions;

const ARENA_BYTES: u64 = 1 << 20;
const WINDOW_BYTES: usize = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(60);
/// Deadline for opening the ranks of a world, after which a missing rank is a timeout.
const SHORT: Duration = Duration::from_secs(1);
const WORLDS: std::ops::RangeInclusive<usize> = 1..=4;

/// Per unit: elements of each parameter, and whether it is trainable. Some units are so small that ranks have only
/// padding. Others exceed the elements summed at once. One unit is frozen, and some parameters are in the shards of two
/// ranks.
const UNITS: [&[(usize, bool)]; 4] = [
    &[(1, true), (2, true)],
    &[(1000, true), (3, false), (2049, true)],
    &[(13, false)],
    &[(5, false), (4096, true), (7, true)],
];
/// Sub-group size: a quarter of the elements that a device sums at once.
const SUB_GROUP_ELEMS: usize = 100;

#[derive(Clone, Copy, PartialEq, Debug)]
enum Carrier {
    Shm,
    Ipc(Copies),
    Nccl(Copies),
}

impl Carrier {
    fn transport(self) -> DeviceTransport {
        match self {
            Self::Shm => DeviceTransport::Host,
            Self::Ipc(_) => DeviceTransport::Peers,
            Self::Nccl(_) => DeviceTransport::Nccl,
        }
    }

    fn copies(self) -> Copies {
        match self {
            Self::Shm => Copies::Late,
            Self::Ipc(copies) | Self::Nccl(copies) => copies,
        }
    }

    /// A gradient element of a rank. Its f32 sum depends on the order of additions, except where the transport chooses
    /// the order.
    fn operand(self, rank: usize, i: usize) -> f32 {
        let value = ((i * 31 + rank * 17) % 101) as f32;
        match self {
            Self::Nccl(_) => value,
            _ => value * [1.0, -3e7, 2e-6, 3e7][rank % 4] + 0.1,
        }
    }
}

/// Settings of a world other than the transport.
#[derive(Clone, Copy)]
struct Layout {
    size: usize,
    group: Option<usize>,
    precision: Precision,
    states: Tier,
    prefetch_units: usize,
    ahead: bool,
    deadline: Duration,
}

impl Layout {
    const fn of(size: usize) -> Self {
        Self {
            size,
            group: None,
            precision: Precision::F32,
            states: Tier::Host,
            prefetch_units: 1,
            ahead: false,
            deadline: PATIENCE,
        }
    }

    fn plan(&self, carrier: Carrier) -> Result<Plan, PlanError> {
        let config = ZeroConfig {
            stage: Stage::Zero3,
            precision: self.precision,
            shard_group: self.group,
            offload: Offload::states(self.states),
            device_transport: carrier.transport(),
            prefetch_units: self.prefetch_units,
            prefetch_weights: self.ahead,
            sub_group_elems: SUB_GROUP_ELEMS,
            ..ZeroConfig::default()
        };
        Plan::new(spec(), config, self.size)
    }

    /// Runs `rank` on every rank and returns the results in rank order.
    fn run<R: Send>(self, carrier: Carrier, rank: impl Fn(Rank) -> R + Sync) -> Vec<R> {
        let gpus = LinkedGpu::node(self.size, Order::Ascending, carrier.copies());
        self.run_on(carrier, gpus, |opened| rank(opened.unwrap()))
    }

    /// Opens the ranks, the last of which has a failing GPU. Returns the error of each rank.
    fn refused(self, carrier: Carrier, trouble: Trouble) -> Vec<EngineError> {
        let mut gpus = LinkedGpu::node(self.size, Order::Ascending, carrier.copies());
        let last = gpus.pop().unwrap().with_trouble(trouble);
        gpus.push(last);
        self.run_on(carrier, gpus, |opened| opened.err().unwrap())
    }

    fn run_on<R: Send>(
        self,
        carrier: Carrier,
        gpus: Vec<LinkedGpu>,
        rank: impl Fn(Result<Rank>) -> R + Sync,
    ) -> Vec<R> {
        let dir = tempfile::tempdir().unwrap();
        let plan = Arc::new(self.plan(carrier).unwrap());
        let (rank, dir, plan) = (&rank, dir.path(), &plan);
        std::thread::scope(|scope| {
            let ranks = gpus.into_iter().enumerate().map(|(number, gpu)| {
                scope.spawn(move || {
                    let world = World {
                        rank: number,
                        size: self.size,
                    };
                    let mut options = ShmOptions::new("devices", world, WINDOW_BYTES);
                    options.deadline = self.deadline;
                    options.dirs = vec![dir.to_owned()];
                    let comm = shm::join(&options).unwrap();
                    let _guard = AbortOnPanic(comm.clone());
                    rank(Rank::open(plan.clone(), gpu, comm))
                })
            });
            let ranks: Vec<_> = ranks.collect();
            let results = ranks.into_iter().map(|rank| rank.join().unwrap());
            results.collect()
        })
    }
}

/// Ends the world of a failed test at once.
struct AbortOnPanic(Arc<dyn Communicator>);

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.abort("test failed");
        }
    }
}

fn spec() -> ModelSpec {
    let mut spec = ModelSpec::default();
    for (unit, params) in UNITS.iter().enumerate() {
        let name = format!("units.{unit}");
        for (i, (elems, trainable)) in params.iter().enumerate() {
            spec.params.push(ParamSpec {
                name: format!("{name}.{i}"),
                shape: Shape::new(&[*elems]),
                unit: UnitId(unit as u32),
                trainable: *trainable,
                quantization: None,
            });
        }
        spec.units.push(UnitSpec { name });
    }
    spec
}

/// One rank with its loaded weights.
struct Rank {
    zero: Zero,
    comm: Arc<dyn Communicator>,
    device: CudaBackend,
    world: World,
    spec: ModelSpec,
}

type Result<T, E = EngineError> = std::result::Result<T, E>;

impl Rank {
    fn open(plan: Arc<Plan>, gpu: LinkedGpu, comm: Arc<dyn Communicator>) -> Result<Self> {
        let device = CudaBackend::new(Arc::new(gpu), ARENA_BYTES)?;
        let backend: Arc<dyn Backend> = Arc::new(device.clone());
        let same = GroupOptions {
            weight_decay: 0.01,
            lr_scale: 1.0,
        };
        let spec = plan.spec().clone();
        let optimizer = OptimizerConfig {
            rule: Arc::new(optim::AdamW::default()),
            groups: vec![same; spec.params.len()],
        };
        let [pool, host] = ["device", "host"].map(|name| Pool::new(name, None));
        let mut zero = Zero::new(
            plan,
            comm.clone(),
            backend,
            Tiers::new(pool, host),
            optimizer,
        )?;
        zero.load(|id, elems, out| {
            let values = elems.map(|i| weight(id, i));
            out.iter_mut().zip(values).for_each(|(to, x)| *to = x);
            Ok::<_, EngineError>(())
        })?;
        let world = comm.world();
        Ok(Self {
            zero,
            comm,
            device,
            world,
            spec,
        })
    }

    fn of_unit(&self, unit: UnitId) -> impl Iterator<Item = (ParamId, &ParamSpec)> {
        let params = self.spec.params.iter().enumerate();
        let params = params.map(|(i, param)| (ParamId(i as u32), param));
        params.filter(move |(_, param)| param.unit == unit)
    }

    /// Leases a unit and passes each parameter's device values to `see`.
    fn lease(&self, unit: UnitId, phase: Phase, see: impl Fn(ParamId, &[f32])) -> Result<()> {
        let lease = self.zero.lease(unit, phase)?;
        for (id, _) in self.of_unit(unit) {
            let weights = lease.param(id)?;
            assert!(weights.is_on_device());
            see(id, &weights.to_f32_vec()?);
        }
        lease.end()
    }

    /// A forward pass over the units that are `used`.
    fn forward(&self, used: impl Fn(UnitId) -> bool, see: impl Fn(ParamId, &[f32])) -> Result<()> {
        let mut units = units().filter(|unit| used(*unit));
        units.try_for_each(|unit| self.lease(unit, Phase::Forward, &see))
    }

    /// Forward and backward with the gradients of this rank.
    fn micro_batch(
        &mut self,
        gradient: impl Fn(ParamId, usize) -> Option<f32>,
        see: impl Fn(ParamId, &[f32]),
    ) -> Result<()> {
        self.zero.begin_pass(PassKind::Train);
        self.forward(|_| true, &see)?;
        for unit in units().rev().filter(|unit| self.zero.needs_backward(*unit)) {
            let lease = self.zero.lease(unit, Phase::Backward)?;
            for (id, param) in self.of_unit(unit).filter(|(_, param)| param.trainable) {
                see(id, &lease.param(id)?.to_f32_vec()?);
                let elems = 0..param.shape.elems();
                let values: Option<Vec<f32>> = elems.map(|i| gradient(id, i)).collect();
                if let Some(values) = values {
                    let bytes = bytemuck::cast_slice(&values);
                    let (shape, tag) = (param.shape, Tag::Gradients);
                    let gradient = self.device.upload(bytes, shape, DType::F32, tag)?;
                    self.zero.deposit(id, &gradient)?;
                }
            }
            lease.end()?;
        }
        self.zero.end_micro_batch(1.0, 1)
    }
}

fn units() -> impl DoubleEndedIterator<Item = UnitId> {
    (0..UNITS.len() as u32).map(UnitId)
}

/// Integers that every element type represents exactly.
fn weight(id: ParamId, i: usize) -> f32 {
    ((i * 31 + id.index() * 17) % 251) as f32
}

fn is_loaded(id: ParamId, got: &[f32]) {
    let want: Vec<f32> = (0..got.len()).map(|i| weight(id, i)).collect();
    assert!(got == want, "{id:?} is not what was loaded");
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

// ---- cases for every transport ----

fn every_rank_gathers_every_parameter_whole(carrier: Carrier) {
    for size in WORLDS {
        for (precision, states) in [
            (Precision::F32, Tier::Host),
            (Precision::Bf16, Tier::Host),
            (Precision::Bf16, Tier::Device),
        ] {
            let layout = Layout {
                precision,
                states,
                ..Layout::of(size)
            };
            layout.run(carrier, |rank| {
                let elems: usize = rank.spec.params.iter().map(|p| p.shape.elems()).sum();
                assert_eq!(elems, 7176);
                for _ in 0..2 {
                    rank.zero.begin_pass(PassKind::Infer);
                    rank.forward(|_| true, is_loaded).unwrap();
                    rank.zero.end_pass().unwrap();
                }
            });
        }
    }
}

/// Each rank skips another unit, and the others still gather its shard.
fn a_rank_serves_units_that_it_does_not_use(carrier: Carrier) {
    for size in WORLDS {
        for ahead in [false, true] {
            let layout = Layout {
                ahead,
                ..Layout::of(size)
            };
            layout.run(carrier, |rank| {
                for round in 0..UNITS.len() {
                    let left_out = (round + rank.world.rank) % UNITS.len();
                    let used = |unit: UnitId| unit.index() != left_out;
                    rank.zero.begin_pass(PassKind::Infer);
                    rank.forward(used, is_loaded).unwrap();
                    rank.zero.end_pass().unwrap();
                }
            });
        }
    }
}

/// The sum over the ranks with a gradient, in rank order, and over micro-batches in theirs.
fn sum(carrier: Carrier, size: usize, rounds: usize, id: ParamId, i: usize) -> f32 {
    let of = |rank, round| gradient(carrier, rank, round, id, i).unwrap_or(0.0);
    let reduced = |round| (1..size).fold(of(0, round), |sum, rank| sum + of(rank, round));
    (1..rounds).fold(reduced(0), |sum, round| sum + reduced(round))
}

/// A gradient of a rank. Each parameter lacks the gradient of one rank in turn.
fn gradient(carrier: Carrier, rank: usize, round: usize, id: ParamId, i: usize) -> Option<f32> {
    let misses = rank == (id.index() + round) % 5;
    (!misses).then(|| carrier.operand(rank, i + id.index() + 13 * round))
}

fn gradients_are_summed_over_all_ranks(carrier: Carrier, layout: Layout) {
    const ROUNDS: usize = 2;
    layout.run(carrier, |mut rank| {
        let number = rank.world.rank;
        for round in 0..ROUNDS {
            let own = |id, i| gradient(carrier, number, round, id, i);
            rank.micro_batch(own, is_loaded).unwrap();
        }
        let sums = rank.zero.gradients().unwrap();
        let trained = rank.spec.params.iter().filter(|param| param.trainable);
        assert_eq!(sums.len(), trained.count());
        for (id, got) in sums {
            let of = |i| sum(carrier, layout.size, ROUNDS, id, i);
            let want: Vec<f32> = (0..got.len()).map(of).collect();
            assert!(bits(&got) == bits(&want), "{id:?} on rank {number}");
        }
    });
}

fn gradients_are_added_in_rank_order(carrier: Carrier) {
    for size in WORLDS {
        for states in [Tier::Host, Tier::Device] {
            let layout = Layout {
                states,
                ..Layout::of(size)
            };
            gradients_are_summed_over_all_ranks(carrier, layout);
        }
    }
}

fn shard_groups_hold_copies_and_sum_over_all_ranks(carrier: Carrier) {
    for (size, group) in [(2, 1), (2, 2), (4, 1), (4, 2)] {
        let layout = Layout {
            group: Some(group),
            ..Layout::of(size)
        };
        if matches!(carrier, Carrier::Nccl(_)) && group < size {
            let refused = layout.plan(carrier).unwrap_err();
            assert!(matches!(refused, PlanError::GroupsInNccl { .. }));
        } else {
            gradients_are_summed_over_all_ranks(carrier, layout);
        }
    }
}

/// With as many gathers in flight as allowed, the devices get each update's weights from the host's communicator. They
/// equal the reference, and no device memory remains in use.
fn updates_reach_every_rank_with_many_gathers_in_flight(carrier: Carrier) {
    for size in WORLDS {
        let layout = Layout {
            prefetch_units: 3,
            ahead: true,
            ..Layout::of(size)
        };
        let train = |by: Carrier| {
            layout.run(by, |mut rank| {
                let mut left = Vec::new();
                let in_use = rank.device.pool().stats().in_use;
                for round in 0..3 {
                    let number = rank.world.rank;
                    let own = |id, i| gradient(carrier, number, round, id, i);
                    rank.micro_batch(own, |_, _| ()).unwrap();
                    rank.zero.step(0.01).unwrap();
                    left.clear();
                    let keep = |id, tensor: &kernels::Tensor| {
                        left.push((id, tensor.to_f32_vec()?));
                        Ok::<_, EngineError>(())
                    };
                    rank.zero.visit_weights(keep).unwrap();
                    let updated = |id: ParamId, got: &[f32]| {
                        let (_, want) = left.iter().find(|(other, _)| *other == id).unwrap();
                        assert!(bits(got) == bits(want), "{id:?} after update {round}");
                    };
                    rank.zero.begin_pass(PassKind::Infer);
                    rank.forward(|_| true, updated).unwrap();
                    rank.zero.end_pass().unwrap();
                    assert_eq!(rank.device.pool().stats().in_use, in_use);
                }
                left
            })
        };
        let (got, want) = (train(carrier), train(Carrier::Shm));
        assert!(got == want, "{size} ranks by {carrier:?}");
    }
}

/// A pass that ends in the middle does not affect the next one.
fn an_abandoned_pass_leaves_no_trace_in_the_next(carrier: Carrier) {
    for size in WORLDS {
        let mut layout = Layout::of(size);
        layout.ahead = size % 2 == 0;
        layout.run(carrier, |mut rank| {
            let number = rank.world.rank;
            for round in 0..4 {
                rank.zero.begin_pass(PassKind::Train);
                let until = |unit: UnitId| unit.index() < round;
                rank.forward(until, is_loaded).unwrap();
                drop(rank.zero.lease(UnitId(round as u32), Phase::Forward));
            }
            let own = |id, i| gradient(carrier, number, 0, id, i);
            rank.micro_batch(own, is_loaded).unwrap();
            for (id, got) in rank.zero.gradients().unwrap() {
                let want = (0..got.len()).map(|i| sum(carrier, size, 1, id, i));
                assert!(bits(&got) == bits(&want.collect::<Vec<_>>()), "{id:?}");
            }
        });
    }
}

fn different_collectives_are_an_error_on_every_rank(carrier: Carrier) {
    for size in 2..=4 {
        let errors = Layout::of(size).run(carrier, |rank| {
            if rank.world.rank == size - 1 {
                let error = rank.comm.barrier(CommTag::new("other", 7)).unwrap_err();
                return EngineError::Comm(error);
            }
            rank.zero.begin_pass(PassKind::Infer);
            rank.forward(|_| true, |_, _| ()).unwrap_err()
        });
        for error in errors {
            let EngineError::Comm(CommError::Mismatch { first, second, .. }) = error else {
                panic!("{error}")
            };
            assert_eq!(
                (first.op.tag_name.as_str(), first.op.tag_index),
                ("gather", 0)
            );
            assert_eq!(
                (second.rank, second.op.tag_name.as_str()),
                (size - 1, "other")
            );
        }
    }
}

fn a_rank_that_fails_is_named_on_every_rank(carrier: Carrier) {
    for size in 2..=4 {
        let errors = Layout::of(size).run(carrier, |mut rank| {
            let own = |id, i| gradient(carrier, 0, 0, id, i);
            rank.micro_batch(own, is_loaded).unwrap();
            if rank.world.rank == 1 {
                rank.comm.abort("disk full");
            }
            rank.zero.begin_pass(PassKind::Train);
            rank.forward(|_| true, |_, _| ()).unwrap_err().to_string()
        });
        assert_eq!(errors, vec!["rank 1 aborted: disk full"; size]);
    }
}

fn a_missing_rank_is_a_timeout_with_the_table_of_ranks(carrier: Carrier) {
    for size in [2, 4] {
        let layout = Layout {
            deadline: SHORT,
            ..Layout::of(size)
        };
        let errors = layout.run(carrier, |rank| {
            if rank.world.rank == size - 1 {
                // The rank is alive but does not start the collective.
                return Err(rank.comm);
            }
            rank.zero.begin_pass(PassKind::Infer);
            Ok(rank.forward(|_| true, |_, _| ()).unwrap_err())
        });
        for error in errors.iter().filter_map(|result| result.as_ref().ok()) {
            let EngineError::Comm(CommError::Timeout { op, ranks, .. }) = error else {
                panic!("{error}")
            };
            assert_eq!((op.tag_name.as_str(), op.tag_index), ("gather", 0));
            let started: Vec<u64> = ranks.iter().map(|status| status.started).collect();
            let most = started.iter().max();
            assert!(Some(&started[size - 1]) < most, "{started:?}");
        }
    }
}

// ---- cases for some transports ----

/// Every rank learns which ranks cannot reach which others, and why.
#[test]
fn a_driver_that_refuses_is_named_on_every_rank() {
    for size in 2..=4 {
        for (trouble, cannot) in [
            (
                Trouble::Refuses,
                format!("cannot open memory of other ranks: rank 0: {REFUSAL}"),
            ),
            (
                Trouble::OpensOther,
                "cannot read memory of other ranks: rank 0: what is there is not what that rank wrote"
                    .to_owned(),
            ),
        ] {
            let errors = Layout::of(size).refused(Carrier::Ipc(Copies::Late), trouble);
            assert_eq!(errors.len(), size);
            for error in errors {
                let EngineError::NoPeerAccess { refusals } = error else {
                    panic!("{error}")
                };
                assert_eq!(refusals, [(size - 1, cannot.clone())]);
            }
        }
    }
}

/// A rank waits for a missing rank of the library's process group no longer than for the host's collectives.
#[test]
fn a_rank_that_does_not_join_the_nccl_group_is_a_timeout() {
    let layout = Layout {
        deadline: SHORT,
        ..Layout::of(3)
    };
    let errors = layout.refused(Carrier::Nccl(Copies::Late), Trouble::StaysAway);
    let said: Vec<String> = errors.iter().map(chain).collect();
    assert!(said[2].contains("the network is down"), "{said:?}");
    for said in &said[..2] {
        assert!(said.contains("GPU 2 has not come after 1s"), "{said}");
    }
}

/// No rank joins a process group whose ranks have different library versions. Each rank learns who differs from it.
#[test]
fn ranks_with_different_nccl_versions_are_named_on_every_rank() {
    for size in 2..=4 {
        let carrier = Carrier::Nccl(Copies::Late);
        let errors = Layout::of(size).refused(carrier, Trouble::OtherVersion);
        assert_eq!(errors.len(), size);
        for (rank, error) in errors.iter().enumerate() {
            let (other, versions) = match rank + 1 == size {
                true => (0, [VERSION, OTHER_VERSION]),
                false => (size - 1, [OTHER_VERSION, VERSION]),
            };
            let said = error.to_string();
            let EngineError::LibraryDiffers { rank, theirs, ours } = error else {
                panic!("{said}")
            };
            assert_eq!((*rank, [&**theirs, &**ours]), (other, versions), "{said}");
            assert!(said.contains(theirs) && said.contains(ours), "{said}");
        }
    }
}

fn chain(error: &EngineError) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(inner) = source {
        text += &format!(": {inner}");
        source = inner.source();
    }
    text
}

macro_rules! conformance {
    ($($case:ident)*) => {
        mod over_shm {
            $(#[test] fn $case() { super::$case(super::Carrier::Shm); })*
        }
        mod over_ipc_with_early_copies {
            $(#[test] fn $case() { super::$case(super::Carrier::Ipc(super::Copies::Early)); })*
        }
        mod over_ipc_with_late_copies {
            $(#[test] fn $case() { super::$case(super::Carrier::Ipc(super::Copies::Late)); })*
        }
        mod over_nccl_with_early_copies {
            $(#[test] fn $case() { super::$case(super::Carrier::Nccl(super::Copies::Early)); })*
        }
        mod over_nccl_with_late_copies {
            $(#[test] fn $case() { super::$case(super::Carrier::Nccl(super::Copies::Late)); })*
        }
    };
}

conformance! {
    every_rank_gathers_every_parameter_whole
    a_rank_serves_units_that_it_does_not_use
    gradients_are_added_in_rank_order
    shard_groups_hold_copies_and_sum_over_all_ranks
    updates_reach_every_rank_with_many_gathers_in_flight
    an_abandoned_pass_leaves_no_trace_in_the_next
    different_collectives_are_an_error_on_every_rank
    a_rank_that_fails_is_named_on_every_rank
    a_missing_rank_is_a_timeout_with_the_table_of_ranks
}

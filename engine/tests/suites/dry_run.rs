//! A dry run counts what a rank really takes: the same pools, the same places, the same window.
use engine::comm::{Communicator, threads};
use engine::{
    DryRun, EngineError, ModelSpec, Offload, OptimizerConfig, OptimizerInBackward, ParamAccess,
    ParamSpec, PassKind, Phase, Plan, Precision, Stage, Tier, Tiers, UnitId, UnitSpec, Zero,
    ZeroConfig,
};
use kernels::{Backend, Codebook, CpuBackend, Pool, PoolStats, Quantization, Tag, Tensor};
use optim::{AdamW, Bf16Storage, GroupOptions, MomentDtype, Optimizer, PureBf16};
use std::sync::Arc;

/// Elements of the parameters of each unit; the second one is frozen where the unit is odd, and quantized in unit 3.
const UNITS: [[usize; 2]; 5] = [
    [90_000, 3_000],
    [60_000, 40_000],
    [70_000, 70_000],
    [60_000, 40_000],
    [90_000, 11],
];
/// Messages of a few numbers, which a dry run leaves to the window's slack.
const SMALL_BYTES: u64 = 256 << 10;

fn spec() -> ModelSpec {
    let mut spec = ModelSpec::default();
    for (u, sizes) in UNITS.iter().enumerate() {
        spec.units.push(UnitSpec {
            name: format!("units.{u}"),
        });
        for (i, elems) in sizes.iter().enumerate() {
            spec.params.push(ParamSpec {
                name: format!("units.{u}.{i}"),
                shape: [*elems].as_slice().into(),
                unit: UnitId(u as u32),
                trainable: i == 0 || u % 2 == 0,
                quantization: (u == 3 && i == 1)
                    .then_some(Quantization::four_bit(Codebook::Nf4, true)),
            });
        }
    }
    spec
}

/// A training pass that uses every unit but the second.
fn pass(access: &dyn ParamAccess, spec: &ModelSpec) -> Result<(), EngineError> {
    let grads = Pool::new("grads", None);
    let used = (0..UNITS.len()).filter(|u| *u != 1);
    for unit in used.clone() {
        access.lease(UnitId(unit as u32), Phase::Forward)?.end()?;
    }
    for unit in used.rev() {
        let unit = UnitId(unit as u32);
        let lease = access.lease(unit, Phase::Backward)?;
        for (i, param) in spec.params.iter().enumerate() {
            let id = engine::ParamId(i as u32);
            if param.unit == unit && access.is_trainable(id) {
                let zeros = vec![0f32; param.shape.elems()];
                let grad = Tensor::from_slice(&grads, Tag::Gradients, param.shape, &zeros)?;
                access.deposit(id, &grad)?;
            }
        }
        lease.end()?;
    }
    Ok(())
}

/// Device pool, host pool and window of a rank after a run.
type Seen = (PoolStats, u64, u64);

fn real(config: &ZeroConfig, comm: Arc<dyn Communicator>) -> Seen {
    let spec = spec();
    let plan = Arc::new(Plan::new(spec.clone(), config.clone(), comm.world().size).unwrap());
    let device = Pool::new("device", None);
    let backend: Arc<dyn Backend> = Arc::new(CpuBackend::new(device.clone()));
    let optimizer = OptimizerConfig {
        rule: Arc::new(AdamW::default()),
        groups: vec![
            GroupOptions {
                weight_decay: 0.0,
                lr_scale: 1.0
            };
            spec.params.len()
        ],
    };
    let tiers = Tiers::new(device, Pool::new("host", None));
    let mut zero = Zero::new(plan, comm, backend, tiers, optimizer).unwrap();
    for _ in 0..2 {
        zero.begin_pass(PassKind::Train);
        pass(&zero, &spec).unwrap();
        zero.end_micro_batch(1.0, 1).unwrap();
        zero.step(1e-3).unwrap();
    }
    zero.visit_weights(|_, _| Ok::<_, EngineError>(())).unwrap();
    (
        zero.device_pool().stats(),
        zero.host_pool().stats().in_use,
        zero.comm().memory().peak_bytes as u64,
    )
}

fn counted(config: &ZeroConfig, world: usize) -> Seen {
    let spec = spec();
    let plan = Arc::new(Plan::new(spec.clone(), config.clone(), world).unwrap());
    let mut dry_run = DryRun::new(plan, Arc::new(AdamW::default())).unwrap();
    for _ in 0..2 {
        dry_run.begin_pass(PassKind::Train);
        pass(&*dry_run, &spec).unwrap();
        dry_run.end_pass().unwrap();
        dry_run.take_step().unwrap();
    }
    dry_run.save_all().unwrap();
    (
        dry_run.device_pool().stats(),
        dry_run.host_pool().stats().in_use,
        dry_run.window().region,
    )
}

#[test]
fn a_dry_run_counts_the_memory_of_a_real_rank() {
    let host = Offload::states(Tier::Host);
    let half = Offload {
        param: Tier::Device,
        ..host
    };
    for (world, shard_group) in [(1, None), (2, None), (3, None), (2, Some(1)), (4, Some(2))] {
        for stage in 0..=3 {
            if shard_group.is_some() && stage == 0 {
                continue;
            }
            for precision in [Precision::F32, Precision::Bf16, Precision::PureBf16] {
                for offload in [Offload::default(), half, host] {
                    let config = ZeroConfig {
                        stage: Stage::try_from(stage).unwrap(),
                        precision,
                        shard_group,
                        offload,
                        shares_host_memory: true,
                        ..ZeroConfig::default()
                    };
                    let comms = threads::world(world, 16 << 20).unwrap();
                    let first = std::thread::scope(|scope| {
                        let ranks = comms.into_iter().map(|c| scope.spawn(|| real(&config, c)));
                        let ranks: Vec<_> = ranks.collect();
                        let seen = ranks.into_iter().map(|rank| rank.join().unwrap());
                        seen.collect::<Vec<Seen>>().swap_remove(0)
                    });
                    let (device, on_host, window) = counted(&config, world);
                    let what = format!(
                        "{world} ranks in groups of {shard_group:?}, stage {stage}, {precision:?}, {offload:?}"
                    );
                    assert_eq!(first.0, device, "{what}");
                    assert_eq!(first.1, on_host, "{what}");
                    let small = first.2.checked_sub(window);
                    assert!(
                        small.is_some_and(|s| s <= SMALL_BYTES),
                        "{what}: {} {window}",
                        first.2
                    );
                }
            }
        }
    }
}

#[test]
fn a_dry_run_counts_the_bytes_of_spill_files_and_their_buffers() {
    let config = ZeroConfig {
        offload: Offload::states(Tier::Nvme),
        ..ZeroConfig::default()
    };
    let plan = Arc::new(Plan::new(spec(), config, 2).unwrap());
    let slots = AdamW::default().slots(Precision::F32);
    let dry_run = DryRun::new(plan.clone(), Arc::new(AdamW::default())).unwrap();
    let files = [engine::StateKind::Param, engine::StateKind::Optimizer];
    let files = files.map(|kind| plan.spill_file_bytes(0, kind, slots));
    let counted = dry_run.nvme_pool().stats().in_use;
    assert_eq!(counted, files.iter().sum::<u64>());
    let buffers = dry_run.host_pool().stats().tag(Tag::Workspace).in_use;
    assert_eq!(buffers, plan.spill_buffer_bytes());
}

#[test]
fn the_plan_counts_what_the_store_allocates_whatever_the_optimizer_stores() {
    for (weights, moments) in [
        (Bf16Storage::Stochastic, MomentDtype::Bf16),
        (Bf16Storage::Kahan, MomentDtype::Bf16),
        (Bf16Storage::Kahan, MomentDtype::F32),
    ] {
        let early = OptimizerInBackward {
            most_elems: 100_000,
            single_micro_batch: true,
        };
        for optimizer_in_backward in [None, Some(early)] {
            let config = ZeroConfig {
                precision: Precision::PureBf16,
                offload: Offload::CPU,
                optimizer_in_backward,
                ..ZeroConfig::default()
            };
            let rule = AdamW {
                pure_bf16: PureBf16 { weights, moments },
                ..AdamW::default()
            };
            let plan = Arc::new(Plan::new(spec(), config, 2).unwrap());
            let memory = plan.memory(rule.slots(Precision::PureBf16));
            let dry_run = DryRun::new(plan, Arc::new(rule)).unwrap();
            let counted = dry_run.host_pool().stats();
            for (tag, planned) in [
                (Tag::Parameters, memory.parameters),
                (Tag::Gradients, memory.gradients),
                (Tag::Optimizer, memory.optimizer),
            ] {
                assert_eq!(counted.tag(tag).in_use, planned.host, "{tag:?}");
            }
        }
    }
}

/// The window of a rank that only saves, and what it saw.
fn saved(config: &ZeroConfig, comm: Arc<dyn Communicator>, all: bool) -> (u64, Vec<u32>) {
    let spec = spec();
    let plan = Arc::new(Plan::new(spec.clone(), config.clone(), comm.world().size).unwrap());
    let device = Pool::new("device", None);
    let backend: Arc<dyn Backend> = Arc::new(CpuBackend::new(device.clone()));
    let same = GroupOptions {
        weight_decay: 0.0,
        lr_scale: 1.0,
    };
    let optimizer = OptimizerConfig {
        rule: Arc::new(AdamW::default()),
        groups: vec![same; spec.params.len()],
    };
    let tiers = Tiers::new(device, Pool::new("host", None));
    let zero = Zero::new(plan, comm, backend, tiers, optimizer).unwrap();
    let mut seen = Vec::new();
    let see = |id: engine::ParamId, _: &Tensor| {
        seen.push(id.0);
        Ok::<_, EngineError>(())
    };
    match all {
        true => zero.visit_weights(see),
        false => zero.visit_trained_weights(see),
    }
    .unwrap();
    (zero.comm().memory().peak_bytes as u64, seen)
}

#[test]
fn saving_trainable_parameters_gathers_nothing_else() {
    for offload in [Offload::default(), Offload::states(Tier::Host)] {
        let config = ZeroConfig {
            offload,
            ..ZeroConfig::default()
        };
        let window = |all: bool| {
            let comms = threads::world(2, 16 << 20).unwrap();
            let (peak, seen) = std::thread::scope(|scope| {
                let ranks = comms
                    .into_iter()
                    .map(|comm| scope.spawn(|| saved(&config, comm, all)));
                let ranks: Vec<_> = ranks.collect();
                let mut ranks = ranks.into_iter().map(|rank| rank.join().unwrap());
                let first = ranks.next().unwrap();
                assert_eq!(ranks.next().unwrap(), first);
                first
            });
            let plan = Arc::new(Plan::new(spec(), config.clone(), 2).unwrap());
            let dry_run = DryRun::new(plan, Arc::new(AdamW::default())).unwrap();
            match all {
                true => dry_run.save_all(),
                false => dry_run.save_trained(),
            }
            .unwrap();
            let planned = dry_run.window().region;
            let what = format!("{peak} bytes, {planned} planned");
            assert!(planned <= peak && peak <= planned + SMALL_BYTES, "{what}");
            (planned, seen)
        };
        let (whole, all) = window(true);
        let (less, trained) = window(false);
        let trains = |id: &u32| spec().params[*id as usize].trainable;
        assert!(less < whole, "{less} {whole}");
        assert_eq!(all.len(), spec().params.len());
        assert_eq!(trained, all.into_iter().filter(trains).collect::<Vec<_>>());
    }
}

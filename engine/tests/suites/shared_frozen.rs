//! Frozen weights that the ranks of one machine store once: no gather, one copy in memory and on disk, the same bits.

use crate::toy::hooked::Hooked;
use crate::toy::{self, Case, engine_for, load_initial, run_world, train_step, weight_bits};
use engine::comm::{Collective, CommError, Communicator, Tag as CommTag, World, shm};
use engine::{
    EngineError, ModelSpec, Offload, OptimizerConfig, ParamAccess, ParamSpec, PassKind, Phase,
    Plan, Stage, Tier, Tiers, UnitId, UnitSpec, Zero, ZeroConfig,
};
use kernels::{Backend, Codebook, CpuBackend, Pool, Quantization};
use optim::{AdamW, GroupOptions, Optimizer};
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

/// A toy with two frozen units, whose matrices are quantized.
fn case(stage: u8, param: Tier, shares: bool) -> Case {
    let mut case = Case::new(3, stage).offload(Offload {
        param,
        ..Offload::default()
    });
    case.frozen_units = vec![1, 3];
    case.quantization = Some(Quantization::four_bit(Codebook::Nf4, true));
    case.config.shares_host_memory = shares;
    case.steps = 2;
    case
}

/// Collectives of two steps and one export by tag, for one rank.
fn collectives(case: &Case) -> BTreeMap<&'static str, usize> {
    let mut ranks = run_world(case.world, |inner| {
        let by_tag = Arc::<Mutex<BTreeMap<_, _>>>::default();
        let counted = by_tag.clone();
        let before = move |op: &Collective| {
            *counted.lock().unwrap().entry(op.tag.name).or_default() += 1;
        };
        let mut zero = engine_for(case, Arc::new(Hooked { inner, before })).unwrap();
        load_initial(&mut zero);
        for step in 0..case.steps {
            train_step(case, &mut zero, step).unwrap();
        }
        zero.visit_weights(|_, _| Ok::<_, EngineError>(())).unwrap();
        by_tag.lock().unwrap().clone()
    });
    ranks.remove(0)
}

#[test]
fn no_collective_gathers_shared_frozen_weights() {
    for stage in 0..=3 {
        let shared = collectives(&case(stage, Tier::Host, true));
        for tag in ["gather-frozen", "gather-quantized"] {
            assert!(!shared.contains_key(tag), "stage {stage}: {tag}");
        }
        assert_eq!(shared.contains_key("gather"), stage == 3);
        let private = collectives(&case(stage, Tier::Host, false));
        assert_eq!(private.contains_key("gather-quantized"), stage == 3);
    }
}

/// Bytes of weights that all ranks store, in host memory and on disk.
fn stored(config: &ZeroConfig, frozen: usize) -> u64 {
    let plan = Plan::new(large(frozen, 1 << 18), config.clone(), 2).unwrap();
    let weights = plan
        .memory(AdamW::default().slots(config.precision))
        .parameters;
    2 * (weights.host + weights.nvme)
}

#[test]
fn each_frozen_byte_is_stored_once_on_the_machine() {
    for tier in [Tier::Host, Tier::Nvme] {
        for stage in 0..=3u8 {
            let mut config = ZeroConfig {
                stage: Stage::try_from(stage).unwrap(),
                offload: Offload::states(tier),
                shares_host_memory: true,
                ..ZeroConfig::default()
            };
            // The trainable parameters take the same in both.
            let [few, many] = [1, 5].map(|frozen| stored(&config, frozen));
            assert_eq!(many - few, 4 << 20, "{tier:?} {stage}");
            config.shares_host_memory = false;
            let [few, many] = [1, 5].map(|frozen| stored(&config, frozen));
            let copies = if stage == 3 { 1 } else { 2 };
            assert_eq!(many - few, copies * (4 << 20), "{tier:?} {stage}");
        }
    }
}

/// Each rank reads its shard only. The spill files have the planned size, which `engine_for` checks.
#[test]
fn shared_weights_on_disk_are_gathered_in_every_stage() {
    for stage in 0..=3 {
        let shared = collectives(&case(stage, Tier::Nvme, true));
        let private = collectives(&case(3, Tier::Nvme, false));
        for tag in ["gather-frozen", "gather-quantized"] {
            assert_eq!(shared[tag], private[tag], "stage {stage} {tag}");
        }
    }
}

#[test]
fn shared_weights_are_not_written_while_a_lease_reads_them() {
    let case = case(2, Tier::Host, true);
    run_world(3, |comm| {
        let mut zero = engine_for(&case, comm.clone()).unwrap();
        load_initial(&mut zero);
        let before = weight_bits(&zero);
        zero.begin_pass(PassKind::Infer);
        for unit in 0..toy::UNITS as u32 {
            let lease = zero.lease(UnitId(unit), Phase::Forward).unwrap();
            lease.end().unwrap();
        }
        zero.end_pass().unwrap();
        let mut views = Vec::new();
        zero.visit_weights(|_, weight| {
            views.push(weight.clone());
            Ok::<_, EngineError>(())
        })
        .unwrap();
        let none = |_, _: std::ops::Range<usize>, _: &mut [f32]| Ok::<_, std::io::Error>(());
        let refused = zero.load(none).unwrap_err();
        assert!(
            matches!(refused, EngineError::WeightsBorrowed { .. }),
            "{refused}"
        );
        drop(views);
        load_initial(&mut zero);
        assert_eq!(weight_bits(&zero), before);
    });
}

#[test]
fn a_rank_that_cannot_load_ends_the_wait_of_the_others() {
    let case = case(2, Tier::Host, true);
    let errors = run_world(3, |comm| {
        let rank = comm.world().rank;
        let mut zero = engine_for(&case, comm).unwrap();
        let read = |_, _: std::ops::Range<usize>, _: &mut [f32]| match rank {
            1 => Err(std::io::Error::other("no such file")),
            _ => Ok(()),
        };
        zero.load(read).unwrap_err()
    });
    assert!(
        matches!(errors[1], EngineError::Load { .. }),
        "{}",
        errors[1]
    );
    for error in [&errors[0], &errors[2]] {
        let aborted = matches!(
            error,
            EngineError::Comm(CommError::Aborted { by_rank: 1, .. })
        );
        assert!(aborted, "{error}");
    }
}

/// Name of the file with the frozen weights.
const FILE: &str = "weights-in-a-file";
/// Bytes before the weights in it: a header that ends inside a page.
const HEADER_BYTES: usize = 72;

/// An element of a frozen weight.
fn value(id: engine::ParamId, e: usize) -> f32 {
    (id.index() * 7 + e % 1009) as f32
}

/// Bytes of a frozen weight in the file.
fn place(id: engine::ParamId) -> std::ops::Range<u64> {
    let start = (HEADER_BYTES + (id.index() - 1) * ELEMS * 4) as u64;
    start..start + (ELEMS * 4) as u64
}

fn write_file(dir: &Path) {
    let mut bytes = vec![0u8; HEADER_BYTES];
    for id in 1..=FROZEN as u32 {
        let values = (0..ELEMS).flat_map(|e| value(engine::ParamId(id), e).to_le_bytes());
        bytes.extend(values);
    }
    std::fs::write(dir.join(FILE), bytes).unwrap();
}

/// Environment variable with `case rank dir` of a process that this test binary starts.
const ROLE: &str = "ENGINE_SHARED_ROLE";
const RANKS: usize = 2;
const FROZEN: usize = 6;
const ELEMS: usize = 1 << 20;
/// Bound on the share of the base that counts for all ranks together.
const MOST_COPIES: f64 = 1.1;

/// A unit with one trainable parameter, then `frozen` units with one frozen parameter of `elems` elements.
fn large(frozen: usize, elems: usize) -> ModelSpec {
    let mut spec = ModelSpec::default();
    for unit in 0..=frozen {
        let name = format!("units.{unit}");
        spec.units.push(UnitSpec { name: name.clone() });
        spec.params.push(ParamSpec {
            name: format!("{name}.weight"),
            shape: [if unit == 0 { 64 } else { elems }].as_slice().into(),
            unit: UnitId(unit as u32),
            trainable: unit == 0,
            quantization: None,
        });
    }
    spec
}

/// A rank whose plan reads the frozen weights in their file, if `in_file`.
fn rank_of(comm: Arc<dyn Communicator>, in_file: bool) -> Zero {
    let spec = large(FROZEN, ELEMS);
    let config = ZeroConfig {
        offload: Offload::CPU,
        shares_host_memory: true,
        ..ZeroConfig::default()
    };
    let same = GroupOptions {
        weight_decay: 0.0,
        lr_scale: 1.0,
    };
    let optimizer = OptimizerConfig {
        rule: Arc::new(AdamW::default()),
        groups: vec![same; spec.params.len()],
    };
    let plan = Plan::new(spec, config, RANKS).unwrap();
    let plan = match in_file {
        true => plan.with_mapped_files(false, |id| id.index() > 0),
        false => plan,
    };
    let plan = Arc::new(plan);
    let device = Pool::new("device", None);
    let backend: Arc<dyn Backend> = Arc::new(CpuBackend::new(device.clone()));
    let tiers = Tiers::new(device, Pool::new("host", None));
    Zero::new(plan, comm, backend, tiers, optimizer).unwrap()
}

fn spawn(case: &str, dir: &Path) -> Vec<Child> {
    let rank = |rank| {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "shared_frozen::child", "--nocapture"])
            .env(ROLE, format!("{case} {rank} {}", dir.display()))
            .stdout(Stdio::null())
            .spawn()
            .unwrap()
    };
    (0..RANKS).map(rank).collect()
}

/// Proportional resident bytes of the maps called `name` in this process.
fn proportional_bytes(name: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let (mut is_shared, mut kib) = (false, 0);
    for line in text.lines() {
        if let Some(pss) = line.strip_prefix("Pss:") {
            let pss: u64 = pss.trim().trim_end_matches(" kB").parse().unwrap();
            kib += if is_shared { pss } else { 0 };
        } else if line
            .split_whitespace()
            .next()
            .is_some_and(|word| !word.ends_with(':'))
        {
            // The first line of a map has an address and a name, the others a field.
            is_shared = line.contains(name);
        }
    }
    kib << 10
}

/// Body of a child process. It returns at once unless the environment names a case.
#[test]
fn child() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    let [case, rank, dir] = role.splitn(3, ' ').collect::<Vec<_>>()[..] else {
        panic!("{role}")
    };
    let world = World {
        rank: rank.parse().unwrap(),
        size: RANKS,
    };
    let options = shm::ShmOptions {
        dirs: vec![PathBuf::from(dir)],
        ..shm::ShmOptions::new("shared-frozen", world, 1 << 16)
    };
    let comm = shm::join(&options).unwrap();
    let in_file = case == "file";
    let mut zero = rank_of(comm.clone(), in_file);
    if case == "kill" {
        // Every process is lost while the weights are mapped.
        comm.barrier(CommTag::new("mapped", 0)).unwrap();
        let this = rustix::process::getpid();
        rustix::process::kill_process(this, rustix::process::Signal::KILL).unwrap();
    }
    if in_file {
        let path = Path::new(dir).join(FILE);
        zero.map_files(|id| Ok::<_, std::io::Error>((File::open(&path)?, place(id))))
            .unwrap();
    }
    zero.load(|id, range, out| {
        out.iter_mut()
            .zip(range)
            .for_each(|(o, e)| *o = value(id, e));
        Ok::<_, std::io::Error>(())
    })
    .unwrap();
    let check = |id: engine::ParamId, weight: &kernels::Tensor| {
        let values = weight.to_f32_vec()?;
        assert!(values.iter().enumerate().all(|(e, v)| *v == value(id, e)));
        Ok::<_, EngineError>(())
    };
    zero.visit_weights(check).unwrap();
    comm.barrier(CommTag::new("read", 0)).unwrap();
    let all = comm
        .all_gather_f64(
            &["tessera-frozen", FILE].map(|name| proportional_bytes(name) as f64),
            CommTag::new("pss", 0),
        )
        .unwrap();
    let [copied, mapped] = [0, 1].map(|i| all.iter().map(|rank| rank[i]).sum::<f64>());
    let base = (FROZEN * ELEMS * 4) as f64;
    let (sum, other, shared) = match in_file {
        true => (mapped, copied, 0.0),
        false => (copied, mapped, base),
    };
    assert_eq!(zero.plan().shared_bytes() as f64, shared);
    assert_eq!(other, 0.0, "bytes of a second copy");
    assert!(
        (base..=MOST_COPIES * base).contains(&sum),
        "{sum} of {base}"
    );
}

/// Processes of one machine map the frozen weights once. If all are killed, nothing remains, and the next ones start.
#[test]
fn processes_share_one_copy_and_leave_nothing() {
    let dir = tempfile::tempdir().unwrap();
    for mut rank in spawn("kill", dir.path()) {
        assert!(!rank.wait().unwrap().success());
    }
    assert_eq!(dir.path().read_dir().unwrap().count(), 0);
    for mut rank in spawn("measure", dir.path()) {
        assert!(rank.wait().unwrap().success());
    }
}

/// Processes of one machine read the frozen weights in the map of their file: its pages count once, and nothing is copied.
#[test]
fn processes_read_weights_in_the_map_of_their_file() {
    let dir = tempfile::tempdir().unwrap();
    write_file(dir.path());
    for mut rank in spawn("file", dir.path()) {
        assert!(rank.wait().unwrap().success());
    }
}

#[test]
fn a_file_of_another_size_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    write_file(dir.path());
    let path = dir.path().join(FILE);
    let cut = File::options().write(true).open(&path).unwrap();
    cut.set_len(place(engine::ParamId(FROZEN as u32)).end - 1)
        .unwrap();
    run_world(RANKS, |comm| {
        let mut zero = rank_of(comm, true);
        let longer = |id| {
            let range = place(id);
            Ok::<_, std::io::Error>((File::open(&path)?, range.start..range.end + 4))
        };
        let refused = zero.map_files(longer).unwrap_err();
        assert!(
            matches!(refused, EngineError::NotMapped { .. }),
            "{refused}"
        );
        let short = |id| Ok::<_, std::io::Error>((File::open(&path)?, place(id)));
        let refused = zero.map_files(short).unwrap_err();
        assert!(matches!(refused, EngineError::Load { .. }), "{refused}");
    });
}

/// All pipeline stages have one hash, also where a stage has no frozen weights.
#[test]
fn stages_agree_on_weights_in_files() {
    let mut spec = large(2, 1 << 12);
    spec.params[2].trainable = true;
    let at = |stage| {
        let config = ZeroConfig {
            offload: Offload::CPU,
            shares_host_memory: true,
            slice: Some(engine::Slice {
                counts: vec![2, 1],
                stage,
            }),
            ..ZeroConfig::default()
        };
        let plan = Plan::new(spec.clone(), config, RANKS).unwrap();
        plan.with_mapped_files(false, |id| id.index() == 1)
    };
    let plans = [at(0), at(1)];
    let mapped = plans.each_ref().map(|plan| plan.mapped_params().count());
    assert_eq!(mapped, [1, 0]);
    assert_eq!(plans[0].hash(), plans[1].hash());
}

/// Ranks that read weights in other places must not train together. A unit with a weight that no file has is copied.
#[test]
fn a_plan_says_which_weights_are_in_files() {
    let plan = |is_there: &dyn Fn(usize) -> bool| {
        let config = ZeroConfig {
            offload: Offload::CPU,
            shares_host_memory: true,
            ..ZeroConfig::default()
        };
        let plan = Plan::new(large(3, 1 << 12), config, RANKS).unwrap();
        plan.with_mapped_files(false, |id| is_there(id.index()))
    };
    let [all, one] = [plan(&|_| true), plan(&|id| id == 2)];
    assert_ne!(all.hash(), one.hash());
    let mapped = |plan: &Plan| {
        plan.mapped_params()
            .map(|id| id.index())
            .collect::<Vec<_>>()
    };
    assert_eq!((mapped(&all), mapped(&one)), (vec![1, 2, 3], vec![2]));
    assert_eq!((all.shared_bytes(), one.shared_bytes()), (0, 2 << 14));
    let slots = AdamW::default();
    let slots = slots.slots(all.config().precision);
    assert_eq!(all.memory(slots), one.memory(slots));
}

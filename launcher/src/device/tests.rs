use crate::cli::{self, Command, resolve_on};
use crate::config::{Products, RunGpu};
use crate::device::survey::facts::{AttemptFacts, GpuProcess, LibraryFacts, LibraryKind};
use crate::device::*;
use crate::rank_env::Env;
use std::ffi::OsString;
use std::path::PathBuf;

/// An emulated machine.
#[derive(Debug, Clone, Default)]
struct Machine {
    cuda: Cuda,
    gpus: Vec<Gpu>,
}

impl Devices for Machine {
    fn survey(&self, _variables: &Variables) -> (Cuda, Vec<Gpu>) {
        (self.cuda.clone(), self.gpus.clone())
    }

    fn open(
        &self,
        _: &RunGpu,
        _: u64,
        _: CudaGraph,
        _: &Variables,
    ) -> Result<Arc<dyn Backend>, Failure> {
        unreachable!("nothing is opened when a device is chosen")
    }

    fn free_bytes(&self, gpu: &RunGpu, _: &Variables) -> Option<u64> {
        Some(gpu.free_bytes)
    }
}

fn gpu(ordinal: u32) -> Gpu {
    Gpu {
        ordinal: Some(ordinal),
        index: Some(ordinal),
        name: Some("RTX 3090".into()),
        uuid: Some(format!("GPU-{ordinal}")),
        compute_capability: Some((8, 6)),
        multiprocessors: Some(82),
        memory_bytes: Some(24 << 30),
        used_bytes: Some(1 << 30),
        free_bytes: Some(23 << 30),
        peers: Some((0..2).filter(|peer| *peer != ordinal).collect()),
        ..Gpu::default()
    }
}

fn with(gpus: Vec<Gpu>) -> Machine {
    Machine {
        cuda: Cuda {
            driver: Some("580.65.06".into()),
            cuda_version: Some((13, 0)),
            minimum_cuda_version: Some((12, 8)),
            pci_devices: gpus.len(),
            libraries: vec![driver(Some("/usr/lib/libcuda.so.1".into()))],
            ..Cuda::default()
        },
        gpus,
    }
}

fn driver(path: Option<PathBuf>) -> LibraryFacts {
    LibraryFacts {
        kind: LibraryKind::Driver,
        name: "NVIDIA driver".into(),
        path,
        version: None,
        attempts: vec![AttemptFacts {
            place: "dynamic linker: libcuda.so.1".into(),
            outcome: "no such file".into(),
        }],
    }
}

fn without() -> Machine {
    Machine {
        cuda: Cuda {
            problem: Some("the NVIDIA driver (libcuda.so.1) is not installed".into()),
            libraries: vec![driver(None)],
            ..Cuda::default()
        },
        gpus: Vec::new(),
    }
}

fn variables(mask: Option<&str>) -> Variables {
    let mask = mask.map(|mask| (MASK.to_owned(), OsString::from(mask)));
    mask.into_iter().collect()
}

fn chosen(choice: DeviceChoice, machine: &Machine) -> Result<Chosen, Failure> {
    choose(choice, machine, &variables(None))
}

fn config(line: &str, chosen: &Chosen) -> RunConfig {
    let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
    let Ok(Command::Train { args, .. }) = cli::parse(&words) else {
        panic!("a training line");
    };
    let env = Env::from_lookup(&|_| None).expect("an environment");
    resolve_on(&args, &env, chosen).expect("resolves").config
}

/// Text of all events at the start.
fn shown(chosen: &Chosen, config: &RunConfig) -> String {
    let events = chosen.events(config);
    let lines = events.iter().flat_map(crate::ui::lines);
    lines.map(|line| line + "\n").collect()
}

#[test]
fn device_cpu_does_not_depend_on_gpus() {
    let chosen = chosen(DeviceChoice::Cpu, &with(vec![gpu(0)])).expect("chosen");
    assert_eq!(chosen, Chosen::cpu());
    assert_eq!(shown(&chosen, &config("", &chosen)), "");
}

#[test]
fn auto_uses_gpus_where_available_and_says_why() {
    let two = chosen(DeviceChoice::Auto, &with(vec![gpu(0), gpu(1)])).expect("chosen");
    let run = config("", &two);
    assert_eq!(
        (run.device, run.world_size, run.gpus.len()),
        (Device::Cuda, 2, 2)
    );
    let text = shown(&two, &run);
    for words in [
        "cuda · auto: 2 GPUs can be used · driver 580.65.06 (CUDA 13.0)",
        "GPU 0 RTX 3090 · 24.0G, 23.0G free · rank 0",
        "GPU 1 RTX 3090 · 24.0G, 23.0G free · rank 1",
        "states are in GPU memory",
    ] {
        assert!(text.contains(words), "no {words:?} in\n{text}");
    }
    let none = chosen(DeviceChoice::Auto, &without()).expect("chosen");
    let run = config("", &none);
    assert_eq!((run.device, run.world_size), (Device::Cpu, 2));
    let text = shown(&none, &run);
    assert!(
        text.contains("cpu · auto: no NVIDIA GPU was found"),
        "{text}"
    );
}

#[test]
fn cuda_without_a_gpu_lists_attempts_and_suggestions() {
    let failure = chosen(DeviceChoice::Cuda, &without()).expect_err("refused");
    assert_eq!((failure.code.as_str(), failure.code.status()), ("E12", 13));
    crate::lang::assert_chinese(&failure);
    let text = failure.to_string();
    for words in ["dynamic linker: libcuda.so.1", "--gpus all", "--device cpu"] {
        assert!(text.contains(words), "no {words:?} in\n{text}");
    }
    let mut hidden = with(vec![gpu(0)]);
    hidden.gpus[0].ordinal = None;
    let mask = variables(Some(""));
    let failure = choose(DeviceChoice::Cuda, &hidden, &mask).expect_err("refused");
    assert_eq!(failure.code, ErrorCode::Cuda);
    assert!(
        failure.evidence.contains(&format!("{MASK}=").into()),
        "{failure}"
    );
    assert!(failure.cause.contains("hides every GPU"), "{failure}");
    let mut old = with(vec![gpu(0)]);
    old.cuda.cuda_version = Some((12, 2));
    let failure = chosen(DeviceChoice::Cuda, &old).expect_err("refused");
    assert!(failure.cause.contains("12.8 is needed"), "{failure}");
    let mut mismatched = with(vec![]);
    mismatched.cuda.is_mismatched = true;
    let failure = chosen(DeviceChoice::Cuda, &mismatched).expect_err("refused");
    assert!(failure.cause.contains("different versions"), "{failure}");
}

#[test]
fn a_gpu_of_an_old_compute_capability_is_not_used() {
    let mut machine = with(vec![gpu(0), gpu(1)]);
    machine.gpus[0].compute_capability = Some((7, 0));
    let run = chosen(DeviceChoice::Cuda, &machine).expect("the other one");
    let ordinals: Vec<u32> = run.gpus.iter().map(|gpu| gpu.ordinal).collect();
    assert_eq!(ordinals, [1]);
    assert!(shown(&run, &config("", &run)).contains("compute capability 7.0"));
    machine.gpus.pop();
    let failure = chosen(DeviceChoice::Cuda, &machine).expect_err("refused");
    assert_eq!((failure.code.as_str(), failure.code.status()), ("E11", 13));
    crate::lang::assert_chinese(&failure);
    let run = chosen(DeviceChoice::Auto, &machine).expect("the CPU");
    assert_eq!(run.device, Device::Cpu);
    let text = shown(&run, &config("", &run));
    assert!(text.contains("compute capability 7.0"), "{text}");
}

#[test]
fn memory_of_other_processes_and_unequal_gpus_are_reported() {
    let mut machine = with(vec![gpu(0), gpu(1)]);
    machine.gpus[0].processes = Some(vec![GpuProcess {
        pid: 4711,
        used_bytes: Some(5 << 30),
    }]);
    machine.gpus[0].free_bytes = Some(18 << 30);
    machine.gpus[1].name = Some("RTX 4090".into());
    let run = chosen(DeviceChoice::Cuda, &machine).expect("chosen");
    let text = shown(&run, &config("", &run));
    for words in [
        "GPU 0: other processes hold 5.0G of 24.0G (process 4711)",
        "the GPUs differ",
        "18.0G free",
    ] {
        assert!(text.contains(words), "no {words:?} in\n{text}");
    }
    // The GPU with less memory bounds every rank; each of its two ranks gets half.
    assert_eq!(free_bytes(&config("", &run)), Some(18 << 30));
    assert_eq!(free_bytes(&config("--nproc 4", &run)), Some(9 << 30));
}

#[test]
fn a_rank_that_sees_one_gpu_has_all_of_its_memory() {
    let run = chosen(DeviceChoice::Cuda, &with(vec![gpu(1)])).expect("chosen");
    let alone = one_gpu_each(config("--nproc 4", &run));
    assert_eq!(free_bytes(&alone), Some(23 << 30));
    assert!(!alone.shares_gpus());
    let shared = RunConfig {
        ranks_per_gpu: Some(4),
        ..alone
    };
    assert_eq!(free_bytes(&shared), Some(23 << 28));
    assert!(shared.shares_gpus());
}

#[test]
fn the_backward_of_attention_is_fused_by_request() {
    let machine = with(vec![gpu(0)]);
    let chosen = |value: Option<&str>| {
        let name = "TESSERA_ATTENTION_BACKWARD".to_owned();
        let variable = value.map(|value| (name, OsString::from(value)));
        choose(
            DeviceChoice::Cuda,
            &machine,
            &variable.into_iter().collect(),
        )
    };
    for (value, fused) in [
        (None, false),
        (Some(""), false),
        (Some("split"), false),
        (Some("fused"), true),
    ] {
        let chosen = chosen(value).expect("chosen");
        assert_eq!(chosen.gpus[0].fused_attention_backward, fused);
        let text = shown(&chosen, &config("", &chosen));
        assert_eq!(text.contains("fused attention backward"), fused, "{text}");
    }
    let failure = chosen(Some("flash")).expect_err("no such value");
    assert_eq!(failure.code.status(), 2);
}

#[test]
fn matrix_products_use_the_library_that_is_installed() {
    let mut machine = with(vec![gpu(0)]);
    let products = |machine: &Machine, matmul: Option<&str>| {
        let variable = matmul.map(|value| ("TESSERA_MATMUL".to_owned(), OsString::from(value)));
        let chosen = choose(DeviceChoice::Cuda, machine, &variable.into_iter().collect())?;
        let text = shown(&chosen, &config("", &chosen));
        let by = chosen.gpus[0].products;
        assert!(text.contains(&format!("matrix products by {by}")), "{text}");
        Ok::<_, Failure>(by)
    };
    for matmul in [None, Some("auto"), Some("own"), Some("")] {
        assert_eq!(products(&machine, matmul).expect("chosen"), Products::Own);
    }
    let failure = products(&machine, Some("cublaslt")).expect_err("no library");
    assert_eq!(failure.code.status(), 13);
    machine.cuda.libraries.push(LibraryFacts {
        kind: LibraryKind::CublasLt,
        name: "cuBLASLt".into(),
        path: Some("/lib/libcublasLt.so.13".into()),
        ..driver(None)
    });
    for (matmul, by) in [
        (None, Products::CublasLt),
        (Some("cublaslt"), Products::CublasLt),
        (Some("own"), Products::Own),
    ] {
        assert_eq!(products(&machine, matmul).expect("chosen"), by);
    }
    let failure = products(&machine, Some("CUBLAS")).expect_err("no such value");
    assert_eq!(failure.code.status(), 2);
}

#[test]
fn code_of_an_older_architecture_is_used_on_request_only() {
    let machine = with(vec![gpu(0)]);
    let first_line = |code: Option<&str>| {
        let variable = code.map(|value| ("TESSERA_CUDA_ARCH".to_owned(), OsString::from(value)));
        let chosen = choose(
            DeviceChoice::Cuda,
            &machine,
            &variable.into_iter().collect(),
        )?;
        Ok::<_, Failure>(shown(&chosen, &config("", &chosen)))
    };
    for code in [None, Some(""), Some("native")] {
        let text = first_line(code).expect("chosen");
        assert!(!text.contains("sm_80"), "{text}");
    }
    let text = first_line(Some("sm_80")).expect("chosen");
    assert!(text.contains("kernels of sm_80"), "{text}");
    let failure = first_line(Some("sm_86")).expect_err("no such value");
    assert_eq!(failure.code.status(), 2);
}

#[test]
fn more_ranks_than_gpus_take_turns() {
    let run = chosen(DeviceChoice::Cuda, &with(vec![gpu(0), gpu(1)])).expect("chosen");
    let config = config("--nproc 5", &run);
    let ordinals: Vec<u32> = (0..5)
        .filter_map(|rank| gpu_of(&config, rank))
        .map(|gpu| gpu.ordinal)
        .collect();
    assert_eq!(ordinals, [0, 1, 0, 1, 0]);
    assert_eq!(config.ranks_per_gpu(), 3);
    let text = shown(&run, &config);
    assert!(text.contains("ranks 0, 2, 4"), "{text}");
    assert!(
        text.contains(
            "5 ranks share 2 GPUs: each rank has a part of the memory, and the ranks take turns"
        ),
        "{text}"
    );
}

/// States are located where the configuration says. Exception: states for which a GPU has no update kernel are on the
/// host.
#[test]
fn states_are_located_on_gpus_that_can_update_them() {
    let run = chosen(DeviceChoice::Cuda, &with(vec![gpu(0)])).expect("chosen");
    let offload = |line: &str| config(line, &run).offload.to_string();
    for (line, tiers) in [
        ("", "none"),
        ("--nproc 2", "none"),
        ("--offload cpu", "cpu"),
        ("--offload optimizer=cpu", "optimizer=cpu"),
        ("--precision pure-bf16", "none"),
        (
            "--precision pure-bf16 --pure-bf16-weights kahan",
            "optimizer=cpu",
        ),
    ] {
        assert_eq!(offload(line), tiers, "{line}");
    }
    for (line, early) in [
        ("--optimizer-in-backward all", "off"),
        ("--optimizer-in-backward all --offload cpu", "all"),
        ("", "auto"),
    ] {
        assert_eq!(
            config(line, &run).optimizer_in_backward.to_string(),
            early,
            "{line}"
        );
    }
    let config = config("--offload optimizer=cpu", &run);
    let text = shown(&run, &config);
    let words = "weights are in GPU memory, gradients and optimizer states in host memory";
    assert!(text.contains(words), "{text}");
}

#[test]
fn an_arena_is_larger_than_its_plan_where_memory_allows() {
    assert_eq!(arena_bytes(1 << 20, None), (1 << 20) + (33 << 20));
    assert_eq!(arena_bytes(16 << 30, None), 17 << 30);
    assert_eq!(arena_bytes(16 << 30, Some(33 << 29)), 33 << 29);
    // A plan that does not fit is refused by another check.
    assert_eq!(arena_bytes(100, Some(50)), 100);
}

/// Blocks in another order than the planned one need up to the largest block more.
#[cfg(feature = "cuda")]
#[test]
fn an_arena_has_room_for_the_largest_block_in_another_order() {
    use kernels::cuda::{
        CudaBackend,
        device_kind::{AttentionBackward, DeviceKind},
    };
    use kernels::{DType, Shape, Tag};

    let kind = DeviceKind {
        multiprocessors: 1,
        compute_capability: None,
        has_library: true,
        attention_backward: AttentionBackward::Split,
    };
    let device = CudaBackend::counting_within(kind, arena_bytes(34 << 20, None));
    let block = |mib: usize| {
        let shape = Shape::new(&[mib << 18]);
        device
            .zeros(shape, DType::F32, Tag::Workspace)
            .expect("room")
    };
    // At most 34 MiB live at a time: scratch memory and two blocks.
    let scratch = block(32);
    let _first = block(1);
    drop(scratch);
    let _in_its_hole = block(1);
    let _again = block(32);
}

/// Two GPUs with peer access to each other, or in one direction only.
fn linked(both: bool) -> Chosen {
    let mut gpus = vec![gpu(0), gpu(1)];
    gpus[0].peers = Some(vec![1]);
    gpus[1].peers = Some(if both { vec![0] } else { Vec::new() });
    chosen(DeviceChoice::Cuda, &with(gpus)).expect("chosen")
}

fn refused(line: &str, chosen: &Chosen) -> Failure {
    let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
    let Ok(Command::Train { args, .. }) = cli::parse(&words) else {
        panic!("a training line");
    };
    let env = Env::from_lookup(&|_| None).expect("an environment");
    resolve_on(&args, &env, chosen).expect_err("refused")
}

#[test]
fn gpus_with_peer_access_use_ipc_collectives() {
    let (both, one) = (linked(true), linked(false));
    let config_of = |line: &str, chosen: &Chosen| config(line, chosen);
    let auto = config_of("--device cuda", &both);
    assert_eq!(auto.resolved_collectives(), Collectives::Ipc);
    assert!(shown(&both, &auto).contains("ipc, GPUs read each other's memory"));
    let apart = config_of("--device cuda", &one);
    assert_eq!(apart.resolved_collectives(), Collectives::Shm);
    assert!(shown(&one, &apart).contains("GPU 1 has no peer access to GPU 0"));
    // Ranks of one GPU share its memory.
    let shared = config_of("--device cuda --nproc 2", &linked_to_itself());
    assert_eq!(shared.resolved_collectives(), Collectives::Ipc);
    let stages = config_of("--device cuda --nproc 2 --mp-size 2", &both);
    assert_eq!(stages.resolved_collectives(), Collectives::Ipc);
    let alone = config_of("--device cuda --nproc 1", &one);
    assert_eq!(alone.resolved_collectives(), Collectives::Shm);
    let asked = config_of("--device cuda --collectives shm", &both);
    assert_eq!(asked.resolved_collectives(), Collectives::Shm);
    assert!(shown(&both, &asked).contains("shm, through host memory"));
    let nccl = config_of(
        "--device cuda --nproc 2 --collectives nccl",
        &linked_to_itself(),
    );
    assert!(nccl.shares_gpus());
    assert!(shown(&both, &nccl).contains("nccl"));
}

fn linked_to_itself() -> Chosen {
    chosen(DeviceChoice::Cuda, &with(vec![gpu(0)])).expect("chosen")
}

#[test]
fn impossible_collectives_are_refused() {
    let failure = refused("--device cuda --collectives ipc", &linked(false));
    assert!(failure.to_string().contains("no peer access"), "{failure}");
    let failure = refused("--collectives nccl", &Chosen::cpu());
    assert!(failure.to_string().contains("on the CPU"), "{failure}");
    let line = "--device cuda --nproc 4 --shard-group 2 --collectives nccl";
    let failure = refused(line, &linked(true));
    assert!(failure.to_string().contains("one group"), "{failure}");
    let line = "--device cuda --nproc 2 --mp-size 2 --collectives nccl";
    let failure = refused(line, &linked(true));
    assert!(failure.to_string().contains("pipeline stages"), "{failure}");
}

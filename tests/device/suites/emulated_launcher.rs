//! Runs of the whole launcher on emulated GPUs: supervisor, two ranks, saving, resuming and evaluating.
//!
//! This binary starts itself as the program under test, whose ranks are this binary again. The program under test
//! offers emulated GPUs, which the real launcher does not know.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "helpers of a test binary"
)]

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;

use device_tests::emulator::Order;
use device_tests::executor::{EmulatedGpu, Library, MULTIPROCESSORS, with_graphs};
use device_tests::linked::{Copies, LinkedGpu, OTHER_VERSION, REFUSAL, Trouble, VERSION};
use device_tests::tolerance;
use kernels::cuda::CudaBackend;
use kernels::cuda::backend::graphs::Mode;
use kernels::{Backend, DType};
use launcher::config::CudaGraph;
use launcher::config::{Products, RunGpu};
use launcher::device::survey::facts::{Cuda, Gpu, LibraryFacts, LibraryKind};
use launcher::device::{Devices, no_room};
use launcher::error::Failure;
use launcher::lang::Text;
use launcher::rank_env::{RANK, Variables, WORLD_SIZE};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Number of GPUs to emulate. It also distinguishes the program under test from the driver.
const GPUS: &str = "TESSERA_EMULATED_GPUS";
/// Bytes that a rank gets instead of its requested arena.
const ARENA: &str = "TESSERA_EMULATED_ARENA";
/// Versions of compiler and driver that a machine reports.
const NVRTC: &str = "TESSERA_EMULATED_NVRTC";
const DRIVER: &str = "TESSERA_EMULATED_DRIVER";
/// Version of a product library that a machine reports.
const CUBLASLT: &str = "TESSERA_EMULATED_CUBLASLT";
/// States that GPUs share memory, and the failure of it on the last rank.
const IPC: &str = "TESSERA_EMULATED_IPC";
/// Version of a collectives library on a rank's GPU.
const NCCL: &str = "TESSERA_EMULATED_NCCL";
/// Bytes of a GPU that another process takes after the plan, before a rank opens the GPU.
const TAKEN: &str = "TESSERA_EMULATED_TAKEN";
/// File in which a GPU notes how its memory was freed.
const NOTE: &str = "TESSERA_EMULATED_NOTE";
/// UUID of a rank's only GPU.
const UUID: &str = "TESSERA_EMULATED_UUID";
/// The variable that CUDA reads.
const MASK: &str = "CUDA_VISIBLE_DEVICES";
/// Memory of each GPU.
const MEMORY_BYTES: u64 = 2 << 30;

fn main() -> ExitCode {
    if std::env::var_os(GPUS).is_some() {
        return launcher::run_on(&Emulated);
    }
    drive()
}

// ---- the program under test ----

/// GPUs for a run. Every rank emulates its own.
#[derive(Debug)]
struct Emulated;

/// A run without the verification of its GPUs, which `fake_driver.rs` tests.
fn unverified(line: &str) -> String {
    match line.contains("--device cuda") {
        true => format!("{line} --verify-gpu off"),
        false => line.to_owned(),
    }
}

impl Devices for Emulated {
    fn survey(&self, variables: &Variables) -> (Cuda, Vec<Gpu>) {
        let count = variables.get(GPUS).unwrap().to_string_lossy();
        // The driver hides all GPUs from CUDA, and NVML shows them.
        let text = |name| Some(variables.get(name)?.to_string_lossy().into_owned());
        let hidden = text(MASK).is_some_and(|mask| mask.is_empty());
        let gpu = |ordinal| Gpu {
            ordinal: (!hidden).then_some(ordinal),
            name: Some("emulated".into()),
            uuid: text(UUID),
            compute_capability: Some((8, 6)),
            multiprocessors: Some(MULTIPROCESSORS),
            memory_bytes: Some(MEMORY_BYTES),
            ..Gpu::default()
        };
        let gpus: Vec<Gpu> = (0..count.parse().unwrap()).map(gpu).collect();
        let library = LibraryFacts {
            kind: LibraryKind::Driver,
            name: "CUDA driver".into(),
            path: Some("emulated".into()),
            version: None,
            attempts: Vec::new(),
        };
        let nvrtc = text(NVRTC).map(|version| LibraryFacts {
            kind: LibraryKind::Nvrtc,
            name: "NVRTC".into(),
            path: Some("emulated".into()),
            version: Some(version),
            attempts: Vec::new(),
        });
        let cublaslt = text(CUBLASLT).map(|version| LibraryFacts {
            kind: LibraryKind::CublasLt,
            name: "cuBLASLt".into(),
            path: Some("emulated".into()),
            version: Some(version),
            attempts: Vec::new(),
        });
        let cuda = Cuda {
            driver: text(DRIVER),
            libraries: nvrtc.into_iter().chain(cublaslt).chain([library]).collect(),
            pci_devices: gpus.len(),
            ..Cuda::default()
        };
        (cuda, gpus)
    }

    fn open(
        &self,
        gpu: &RunGpu,
        arena_bytes: u64,
        graphs: CudaGraph,
        variables: &Variables,
    ) -> Result<Arc<dyn Backend>, Failure> {
        let given = variables.get(ARENA).map(|bytes| bytes.to_string_lossy());
        let arena_bytes = given.map_or(arena_bytes, |bytes| bytes.parse().unwrap());
        let library = match gpu.products {
            Products::Own => Library::Absent,
            Products::CublasLt => Library::Multiplies,
        };
        if let Some(version) = variables.get(NCCL) {
            let linked = LinkedGpu::node(1, Order::Ascending, Copies::Late).remove(0);
            let linked = linked.with_network(&version.to_string_lossy());
            let device = CudaBackend::new(Arc::new(linked), arena_bytes);
            return opened(device, gpu, arena_bytes, variables);
        }
        if let Some(trouble) = variables.get(IPC) {
            let rank: usize = text(variables, RANK).parse().unwrap();
            let size: usize = text(variables, WORLD_SIZE).parse().unwrap();
            // Memory of another process is out of reach, so ranks find their own instead.
            let mut linked = LinkedGpu::node(1, Order::Ascending, Copies::Late).remove(0);
            if trouble == "refused" && rank + 1 == size {
                linked = linked.with_trouble(Trouble::Refuses);
            }
            let device = CudaBackend::new(Arc::new(linked), arena_bytes);
            return opened(device, gpu, arena_bytes, variables);
        }
        let emulated = EmulatedGpu::new(Order::Ascending)
            .with_library(library)
            .with_room(MEMORY_BYTES - taken(variables));
        let emulated = match variables.get(NOTE) {
            Some(file) => emulated.with_note(file.into()),
            None => emulated,
        };
        let emulated = Arc::new(emulated);
        let graphed = |mode| with_graphs(emulated.clone(), arena_bytes, mode);
        let device = match graphs {
            CudaGraph::Off => CudaBackend::new(emulated.clone(), arena_bytes),
            CudaGraph::Auto => graphed(Mode::Auto).map(|(device, _)| device),
            CudaGraph::On => graphed(Mode::On).map(|(device, _)| device),
        };
        opened(device, gpu, arena_bytes, variables)
    }

    fn free_bytes(&self, _gpu: &RunGpu, _variables: &Variables) -> Option<u64> {
        None
    }
}

/// Describes a GPU as the launcher does for one of the machine.
fn opened(
    device: kernels::Result<CudaBackend>,
    gpu: &RunGpu,
    arena_bytes: u64,
    variables: &Variables,
) -> Result<Arc<dyn Backend>, Failure> {
    let taken = variables.get(TAKEN).map(|_| taken(variables));
    let device = device.map_err(|error| {
        let left = taken.map(|taken| MEMORY_BYTES - taken);
        let others = taken.map(|taken| Text::literal(format!("process 4242 holds {taken} bytes")));
        no_room(gpu, arena_bytes, left, others, &error)
    })?;
    Ok(Arc::new(device))
}

/// Bytes that another process has taken.
fn taken(variables: &Variables) -> u64 {
    let bytes = variables.get(TAKEN);
    bytes.map_or(0, |bytes| bytes.to_string_lossy().parse().unwrap())
}

fn text(variables: &Variables, name: &str) -> String {
    variables.get(name).unwrap().to_string_lossy().into_owned()
}

// ---- the driver ----

/// Variables that torchrun gives a rank of two on one machine.
fn torchrun(rank: &'static str) -> Vec<(&'static str, &'static str)> {
    vec![
        (RANK, rank),
        ("LOCAL_RANK", rank),
        (WORLD_SIZE, "2"),
        ("LOCAL_WORLD_SIZE", "2"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "29400"),
    ]
}

/// A directory with a model, samples, and runs.
struct Site(TempDir);

impl Site {
    fn new() -> Self {
        let site = Self(tempfile::tempdir().unwrap());
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../golden/minicpm-v-2_6");
        fs::create_dir(site.path("model")).unwrap();
        for name in [
            "config.json",
            "model.safetensors",
            "preprocessor_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
        ] {
            fs::copy(golden.join(name), site.path("model").join(name)).unwrap();
        }
        let image = golden.join("cases/square_no_slice");
        let image = fs::read_dir(image)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .find(|path| path.extension().is_some_and(|e| e == "png"));
        fs::copy(image.unwrap(), site.path("a.png")).unwrap();
        let sample = |i: usize| {
            let mut sample = json!({"id": i.to_string(), "conversations": [
                {"role": "user", "content": format!("What is {i}?")},
                {"role": "assistant", "content": format!("It is {i}.")},
            ]});
            if i.is_multiple_of(2) {
                sample["image"] = "a.png".into();
            }
            sample
        };
        let samples: Vec<Value> = (0..4).map(sample).collect();
        fs::write(site.path("data.json"), json!(samples).to_string()).unwrap();
        fs::write(site.path("held_out.json"), json!(samples[..2]).to_string()).unwrap();
        site
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Runs the launcher with `gpus` emulated GPUs. Returns its exit status and its screen.
    fn run(&self, gpus: usize, line: &str) -> (Option<i32>, String) {
        self.run_with(gpus, &[], line)
    }

    /// As [`Site::run`], with these variables.
    fn run_with(&self, gpus: usize, own: &[(&str, &str)], line: &str) -> (Option<i32>, String) {
        let done = Command::new(std::env::current_exe().unwrap())
            .args(unverified(line).split_whitespace())
            .envs(own.iter().copied())
            .current_dir(self.0.path())
            .env(GPUS, gpus.to_string())
            .env("TMPDIR", self.0.path())
            .env("XDG_CACHE_HOME", self.path("cache"))
            .output()
            .unwrap();
        let text = [done.stdout, done.stderr].concat();
        let text = String::from_utf8(text).unwrap();
        (done.status.code(), text)
    }

    /// Starts machine `number` of two, with one GPU and its own value of a variable.
    fn machine(&self, number: usize, port: u16, own: (&str, &str), line: &str) -> Child {
        Command::new(std::env::current_exe().unwrap())
            .args(unverified(line).split_whitespace())
            .current_dir(self.0.path())
            .env_clear()
            .envs(std::env::var_os("PATH").map(|path| ("PATH", path)))
            .env(GPUS, "1")
            .env(own.0, own.1)
            .env("TMPDIR", self.0.path())
            .env("XDG_CACHE_HOME", self.path("cache"))
            .env("NNODES", "2")
            .env("NODE_RANK", number.to_string())
            .env("NPROC_PER_NODE", "1")
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string())
            .env("TESSERA_JOB_TOKEN", "a token of these tests alone")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }

    /// Runs two machines with different values of a variable. Returns exit statuses and screens.
    fn machines(&self, name: &str, values: [&str; 2], line: &str) -> [(Option<i32>, String); 2] {
        let port = free_port();
        let children = [0, 1].map(|i| self.machine(i, port, (name, values[i]), line));
        children.map(|child| {
            let done = child.wait_with_output().unwrap();
            let text = String::from_utf8(done.stderr).unwrap();
            (done.status.code(), text)
        })
    }

    /// Runs two ranks of one machine, started by another program with these variables. Returns exit statuses and
    /// screens.
    fn ranks_alone(
        &self,
        own: &[(&'static str, &'static str)],
        line: &str,
    ) -> [(Option<i32>, String); 2] {
        let variables = |rank| [torchrun(rank), own.to_vec()].concat();
        self.started(["0", "1"].map(variables), line)
    }

    /// Runs two ranks with one GPU each, started by another program with the variables of each. Returns exit statuses
    /// and screens.
    fn started(&self, variables: [Vec<(&str, &str)>; 2], line: &str) -> [(Option<i32>, String); 2] {
        let children = variables.map(|variables| {
            Command::new(std::env::current_exe().unwrap())
                .args(unverified(&format!("{MODEL} {line}")).split_whitespace())
                .current_dir(self.0.path())
                .env_clear()
                .envs(std::env::var_os("PATH").map(|path| ("PATH", path)))
                .envs(variables)
                .env(GPUS, "1")
                .env("TMPDIR", self.0.path())
                .env("XDG_CACHE_HOME", self.path("cache"))
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        });
        children.map(|child| {
            let done = child.wait_with_output().unwrap();
            let text = String::from_utf8(done.stderr).unwrap();
            (done.status.code(), text)
        })
    }

    /// Runs a training run that must succeed, and returns its screen.
    fn train(&self, gpus: usize, line: &str) -> String {
        self.train_with(gpus, &[], line)
    }

    /// As [`Site::train`], with these variables.
    fn train_with(&self, gpus: usize, own: &[(&str, &str)], line: &str) -> String {
        let line = format!("{MODEL} {line}");
        let (code, text) = self.run_with(gpus, own, &line);
        assert_eq!(code, Some(0), "{line}\n{text}");
        text
    }

    fn rows(&self, run: &str) -> Vec<Value> {
        let log = fs::read_to_string(self.path(run).join("trainer_log.jsonl")).unwrap();
        log.lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }

    /// A number of the log, from the rows that have it.
    fn logged(&self, run: &str, field: &str) -> Vec<f64> {
        let rows = self.rows(run);
        rows.iter().filter_map(|row| row[field].as_f64()).collect()
    }

    fn weights(&self, run: &str, step: u64) -> Vec<u8> {
        let file = format!("{run}/checkpoint-{step}/model.safetensors");
        fs::read(self.path(&file)).unwrap()
    }

    fn json(&self, name: &str) -> Value {
        serde_json::from_slice(&fs::read(self.path(name)).unwrap()).unwrap()
    }
}

/// A port of this machine without a listener.
fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

const MODEL: &str = "--model model --data data.json --zero 3 --learning-rate 1e-3 --model-max-length 96 --max-slice-nums 1 \
                     --lr-scheduler-type constant";
const EVALUATES: &str = "--eval-data held_out.json";

/// Losses of training and of the held-out samples.
fn losses(site: &Site, run: &str) -> Vec<f64> {
    let mut losses = site.logged(run, "loss");
    let eval = site.json(&format!("{run}/eval_results.json"));
    losses.push(eval["eval_loss"].as_f64().unwrap());
    losses
}

/// Two ranks on two GPUs, saved after two of three updates and resumed. The losses are those of the CPU, and the bits
/// those of an uninterrupted run.
fn a_run_agrees_with_the_cpu_and_resumes_exactly(precision: &str, dtype: DType) {
    let site = Site::new();
    let line = format!("--precision {precision} --max-steps 3 {EVALUATES}");
    site.train(
        2,
        &format!("{line} --device cpu --nproc 2 --offload cpu --output cpu"),
    );
    let screen = site.train(
        2,
        &format!("{line} --device cuda --save-steps 2 --trace-steps 3..4 --output whole"),
    );
    for words in [
        "2 ranks on cuda",
        "GPU 1 emulated · 2.0G, 2.0G free · rank 1",
        "weights, gradients and optimizer states are in GPU memory",
        "GPU memory per rank: ",
        "waits for copies",
    ] {
        assert!(screen.contains(words), "no {words:?} in\n{screen}");
    }
    let (cpu, gpu) = (losses(&site, "cpu"), losses(&site, "whole"));
    assert_eq!(cpu.len(), 4);
    assert!(cpu[2] < cpu[0], "{cpu:?}");
    for (step, (got, want)) in gpu.iter().zip(&cpu).enumerate() {
        let allowed = tolerance::trajectory(dtype, *want, step);
        assert!((got - want).abs() <= allowed, "{gpu:?} instead of {cpu:?}");
    }
    assert_ne!(
        site.weights("cpu", 3),
        site.weights("whole", 3),
        "the GPU did nothing"
    );

    // The tier of the states changes no bit.
    for (output, offload, rest) in [
        ("again", "none", "states are in GPU memory"),
        ("moved", "cpu", "optimizer states are in host memory"),
        (
            "half",
            "optimizer=cpu",
            "weights are in GPU memory, gradients",
        ),
    ] {
        fs::create_dir(site.path(output)).unwrap();
        let resumed = format!("--output {output} --resume whole/checkpoint-2 --offload {offload}");
        let screen = site.train(2, &format!("{line} --device cuda {resumed}"));
        assert!(screen.contains(rest), "no {rest:?} in\n{screen}");
        assert!(
            site.weights("whole", 3) == site.weights(output, 3),
            "{offload}: weights differ"
        );
        assert_eq!(losses(&site, "whole")[2..], losses(&site, output)[..]);
    }
    takes_what_the_plan_says(&site, "whole");
    tells_the_time_of_the_devices(&site, "whole", "cpu");
}

/// Log rows and traces of a GPU run have the devices' own times. Those of a CPU run have none.
fn tells_the_time_of_the_devices(site: &Site, run: &str, cpu: &str) {
    for row in site
        .rows(run)
        .iter()
        .filter(|row| row["seconds"].is_object())
    {
        for part in ["compute", "inward", "outward"] {
            let seconds = row["device_seconds"][part].as_f64().unwrap();
            assert!(seconds > 0.0, "{part}: {row}");
        }
    }
    assert!(
        site.rows(cpu)
            .iter()
            .all(|row| row["device_seconds"].is_null())
    );
    for rank in 0..2 {
        let trace = site.json(&format!("{run}/traces/rank-{rank:04}.json"));
        let events = trace["traceEvents"].as_array().unwrap();
        let named = events.iter().filter(|event| event["name"] == "thread_name");
        let lanes: Vec<&str> = named
            .filter_map(|event| event["args"]["name"].as_str())
            .collect();
        for lane in ["device", "to the device", "from the device"] {
            assert!(lanes.contains(&lane), "no {lane} in {lanes:?}");
        }
    }
}

/// The peak of device memory in use is the planned one.
fn takes_what_the_plan_says(site: &Site, run: &str) {
    let planned = site.json(&format!("{run}/plan.json"));
    let phases = planned["plan"]["memory"]["phases"].as_object().unwrap();
    let total = |kinds: &Value| -> u64 {
        let kinds = kinds["device"].as_object().unwrap();
        let used = kinds.iter().filter(|(kind, _)| *kind != "margin");
        used.filter_map(|(_, bytes)| bytes.as_u64()).sum()
    };
    let planned = phases.values().map(total).max().unwrap();
    let rows = site.rows(run);
    let measured = rows
        .iter()
        .filter_map(|row| row["bytes"]["device"].as_u64());
    assert_eq!(measured.max(), Some(planned));
}

/// GPUs that cannot read each other's memory. The run reports it once and is planned again. It has the bits and the
/// memory of a run through host memory, also when another program starts the ranks. An explicit `ipc` is refused.
fn a_refused_ipc_falls_back_to_host_memory() {
    let site = Site::new();
    let line = "--precision bf16 --max-steps 2 --device cuda --nproc 2 --save-strategy steps --save-steps 2";
    let screen = site.train(1, &format!("{line} --collectives shm --output shm"));
    assert!(!screen.contains("cannot read each other's memory"));
    let refused = format!("rank 1 cannot open memory of other ranks: rank 0: {REFUSAL};");
    let other = "rank 0 cannot read memory of other ranks: rank 1: what is there is not what that rank wrote (and 1 more)";
    for (output, trouble, note) in [("refused", "refused", &*refused), ("other", "other", other)] {
        let screen = site.train_with(1, &[(IPC, trouble)], &format!("{line} --output {output}"));
        for words in ["between ranks: ipc", note, "through host memory (shm)"] {
            assert_eq!(screen.matches(words).count(), 1, "{words:?} in\n{screen}");
        }
        goes_as(&site, output, "shm");
    }
    // Ranks that plan for themselves leave out options for which another kind of GPU may lack memory.
    site.ranks_alone(&[], &format!("{line} --collectives shm --output shm_alone"));
    let alone = site.ranks_alone(&[(IPC, "refused")], &format!("{line} --output alone"));
    for (rank, (code, screen)) in alone.iter().enumerate() {
        assert_eq!(*code, Some(0), "{screen}");
        let said = screen.matches(&refused).count();
        assert_eq!(said, usize::from(rank == 0), "rank {rank}:\n{screen}");
    }
    goes_as(&site, "alone", "shm_alone");
    assert!(site.weights("alone", 2) == site.weights("shm", 2));

    let asked = format!("{MODEL} {line} --collectives ipc --output asked");
    let (code, screen) = site.run_with(1, &[(IPC, "refused")], &asked);
    assert_eq!(code, Some(13), "{screen}");
    for words in [
        "which --collectives ipc needs",
        refused.trim_end_matches(';'),
        "--collectives shm",
        "--ipc=host",
    ] {
        assert!(screen.contains(words), "no {words:?} in\n{screen}");
    }
}

/// The kernels of a run are compiled together. After a failure, destructors do not wait for a GPU that may wait for a
/// lost rank.
fn a_rank_compiles_its_kernels_ahead_and_abandons_its_gpu_when_it_fails() {
    let site = Site::new();
    let line = format!("{MODEL} --device cuda --max-steps 2 --save-steps 1 --save-strategy steps");
    let how = |output: &str, inject: &str| {
        let note = site.path(output).with_extension("note");
        let own = [(NOTE, note.to_str().unwrap())];
        let (code, screen) = site.run_with(1, &own, &format!("{line} --output {output} {inject}"));
        (code, fs::read_to_string(note).expect(&screen))
    };
    let (code, good) = how("good", "");
    assert_eq!(code, Some(0));
    let count = good
        .strip_prefix("freed, ")
        .and_then(|text| text.split(' ').next());
    let count: u64 = count.and_then(|count| count.parse().ok()).expect(&good);
    assert!(count > 10, "{good}");
    let (code, bad) = how("bad", "--inject disk-full:rank=0,step=1");
    assert_ne!(code, Some(0));
    assert!(bad.starts_with("abandoned"), "{bad}");
    let failure = fs::read_dir(site.path("bad/errors"));
    assert!(failure.is_ok_and(|files| files.count() == 1));
}

/// Another launcher shows each rank one GPU: the same, or one of its own as Slurm's `--gpus-per-task=1` does. The
/// ranks notice when they meet.
fn ranks_that_see_one_gpu_find_out_whether_they_share_it() {
    let site = Site::new();
    let line = "--precision bf16 --max-steps 2 --device cuda --collectives shm --save-strategy steps --save-steps 2";
    let trained = |output: &str, uuids: [(&'static str, &'static str); 2]| {
        let ranks = uuids.map(|(rank, uuid)| [torchrun(rank), vec![(UUID, uuid)]].concat());
        let ended = site.started(ranks, &format!("{line} --output {output}"));
        for (code, screen) in &ended {
            assert_eq!(*code, Some(0), "{screen}");
        }
        let shared = ended[0].1.matches("2 ranks share a GPU").count();
        let config = site.json(&format!("{output}/config.resolved.json"));
        (shared, config["ranks_per_gpu"].as_u64())
    };
    let own = trained("own", [("0", "GPU-a"), ("1", "GPU-b")]);
    assert_eq!(own, (0, Some(1)));
    let shared = trained("shared", [("0", "GPU-a"), ("1", "gpu-A")]);
    assert_eq!(shared, (1, Some(2)));
    assert!(site.weights("own", 2) == site.weights("shared", 2));
}

/// Checks that the run has weights, losses and planned memory of another run without a refusal.
fn goes_as(site: &Site, run: &str, like: &str) {
    takes_what_the_plan_says(site, run);
    let peak = |run: &str| site.json(&format!("{run}/plan.json"))["plan"]["memory"]["peak"].clone();
    assert_eq!(peak(run), peak(like), "{run}");
    assert_eq!(site.logged(run, "loss"), site.logged(like, "loss"));
    assert!(site.weights(run, 2) == site.weights(like, 2), "{run}");
    let config = site.json(&format!("{run}/config.resolved.json"));
    assert!(config["ipc_refused"].is_string(), "{config}");
}

/// Two nodes of one rank each, as torchrun, Slurm and mpirun start them, exchange through the collectives library. They
/// have the bits of ranks that share host memory, since a sum of two has one order. Another version on one node ends
/// the run on both.
fn two_nodes_over_nccl_have_the_bits_of_one_node() {
    let site = Site::new();
    let line = "--precision bf16 --max-steps 2 --device cuda --save-strategy steps --save-steps 2 --eval-strategy no \
                --comm-timeout 120";
    site.train(
        2,
        &format!("{line} --nproc 2 --collectives shm --output shm"),
    );
    let port = free_port().to_string();
    let common = |version| {
        vec![
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", &*port),
            ("TESSERA_JOB_TOKEN", "a token of these tests alone"),
            (NCCL, version),
        ]
    };
    let torchrun = |rank| {
        vec![
            (RANK, rank),
            ("LOCAL_RANK", "0"),
            (WORLD_SIZE, "2"),
            ("LOCAL_WORLD_SIZE", "1"),
            ("GROUP_RANK", rank),
        ]
    };
    let slurm = |rank| {
        vec![
            ("SLURM_JOB_ID", "70001"),
            ("SLURM_STEP_ID", "0"),
            ("SLURM_PROCID", rank),
            ("SLURM_STEP_NUM_TASKS", "2"),
            ("SLURM_NTASKS", "2"),
            ("SLURM_LOCALID", "0"),
            ("SLURM_NODEID", rank),
            ("SLURM_STEP_TASKS_PER_NODE", "1(x2)"),
            ("SLURM_JOB_NODELIST", "gpu[07-08]"),
        ]
    };
    let mpirun = |rank| {
        vec![
            ("OMPI_COMM_WORLD_RANK", rank),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "1"),
        ]
    };
    let starters = [
        ("torchrun", ["0", "1"].map(torchrun)),
        ("slurm", ["0", "1"].map(slurm)),
        ("mpirun", ["0", "1"].map(mpirun)),
    ];
    let run = |[first, second]: [Vec<_>; 2], versions: [&'static str; 2], output: &str| {
        let first = [first, common(versions[0])].concat();
        let second = [second, common(versions[1])].concat();
        let line = format!("{line} --collectives nccl --output {output}");
        site.started([first, second], &line)
    };
    for (starter, ranks) in starters.clone() {
        let both = run(ranks, [VERSION; 2], starter);
        for (code, screen) in &both {
            assert_eq!(*code, Some(0), "{starter}:\n{screen}");
        }
        let config =
            fs::read_to_string(site.path(&format!("{starter}/config.resolved.json"))).unwrap();
        assert!(config.contains("\"nccl\""), "{config}");
        assert_eq!(site.logged(starter, "loss"), site.logged("shm", "loss"));
        let same = site.weights(starter, 2) == site.weights("shm", 2);
        assert!(same, "{starter}: weights differ");
        takes_what_the_plan_says(&site, starter);
    }
    let [(_, torchrun), ..] = starters;
    for (code, screen) in run(torchrun, [VERSION, OTHER_VERSION], "unlike") {
        assert_eq!(code, Some(13), "{screen}");
        for words in ["different versions of NCCL", VERSION, OTHER_VERSION] {
            assert!(screen.contains(words), "no {words:?} in\n{screen}");
        }
    }
    assert!(!site.path("unlike/checkpoint-2").exists());
}

/// These GPUs share no memory. The refusal of `ipc` suggests a transport that works.
fn ipc_without_shared_gpu_memory_is_refused_with_a_suggestion() {
    let site = Site::new();
    let line = "--model model --data data.json --device cuda --nproc 2 --max-steps 1 --model-max-length 96 --max-slice-nums 1";
    let (code, screen) = site.run(1, &format!("{line} --collectives ipc --output shared"));
    assert_eq!(code, Some(13), "{screen}");
    for words in [
        "between ranks: ipc",
        "cannot share memory",
        "--collectives shm",
    ] {
        assert!(screen.contains(words), "no {words:?} in\n{screen}");
    }
}

/// More ranks than GPUs, chosen by the program. Two ranks have the results of one.
fn two_ranks_on_one_gpu_have_the_results_of_one_rank() {
    let site = Site::new();
    let line = "--precision f32 --max-steps 1 --device auto --save-strategy no --eval-strategy no";
    let two = "--nproc 2 --output two --collectives shm";
    let screen = site.train(1, &format!("{line} {two}"));
    for words in [
        "auto: 1 GPU can be used",
        "ranks 0, 1",
        "2 ranks share 1 GPU: each rank has a part of the memory",
    ] {
        assert!(screen.contains(words), "no {words:?} in\n{screen}");
    }
    // By default each rank has one GPU.
    let screen = site.train(
        1,
        &format!("{line} --output one --gradient-accumulation-steps 2"),
    );
    for words in ["1 rank on cuda", "states are in GPU memory"] {
        assert!(screen.contains(words), "no {words:?} in\n{screen}");
    }
    takes_what_the_plan_says(&site, "one");
    let (two, one) = (site.logged("two", "loss"), site.logged("one", "loss"));
    assert_eq!(two, one);
}

/// Library products, chosen by the program. The plan includes their scratch memory. Losses are those of our own kernels
/// up to the order of sums, and the variable restores our kernels.
fn products_of_a_run_use_the_library() {
    let site = Site::new();
    let line = "--precision f32 --max-steps 2 --device cuda --save-strategy no --eval-strategy no";
    let library = (CUBLASLT, "13.1.0");
    for (output, own, by) in [
        ("library", &[library][..], "cuBLASLt"),
        (
            "chosen",
            &[library, ("TESSERA_MATMUL", "own")],
            "own kernels",
        ),
        ("none", &[], "own kernels"),
    ] {
        let screen = site.train_with(1, own, &format!("{line} --output {output}"));
        let words = format!("matrix products by {by}");
        assert!(screen.contains(&words), "no {words:?} in\n{screen}");
        takes_what_the_plan_says(&site, output);
    }
    let [library, chosen, none] = ["library", "chosen", "none"].map(|run| site.logged(run, "loss"));
    assert_eq!(chosen, none);
    assert_ne!(library, none, "the library did nothing");
    for (step, (got, want)) in library.iter().zip(&none).enumerate() {
        let allowed = tolerance::trajectory(DType::F32, *want, step);
        assert!(
            (got - want).abs() <= allowed,
            "{library:?} instead of {none:?}"
        );
    }
    let asked = [("TESSERA_MATMUL", "cublaslt")];
    let (code, text) = site.run_with(1, &asked, "--device cuda --output out");
    assert_eq!(code, Some(13), "{text}");
    assert!(text.contains("cuBLASLt was not found"), "{text}");
}

/// Graphs change neither digits nor memory of a run.
fn graphs_change_neither_results_nor_memory() {
    let site = Site::new();
    let line = "--precision bf16 --max-steps 3 --device cuda --save-strategy steps --save-steps 3 --eval-strategy no";
    for mode in ["off", "auto", "on"] {
        site.train(1, &format!("{line} --cuda-graph {mode} --output {mode}"));
        takes_what_the_plan_says(&site, mode);
        assert_eq!(site.logged(mode, "loss"), site.logged("off", "loss"));
        let same = site.weights(mode, 3) == site.weights("off", 3);
        assert!(same, "--cuda-graph {mode} has other weights");
    }
}

/// Weights are prefetched if the plan then fits the GPU, with the same bits. An explicit request must fit.
fn weights_are_prefetched_where_they_fit() {
    let site = Site::new();
    let line = "--precision bf16 --max-steps 2 --device cuda --eval-data held_out.json";
    let ahead = "are prefetched one unit ahead";
    let peak = |run: &str| {
        let plan = site.json(&format!("{run}/plan.json"));
        plan["plan"]["memory"]["peak"]["device"].as_u64().unwrap()
    };
    for (mode, comes) in [("off", false), ("on", true), ("auto", true)] {
        let screen = site.train(
            2,
            &format!("{line} --prefetch-weights {mode} --output {mode}"),
        );
        assert_eq!(screen.contains(ahead), comes, "{screen}");
        takes_what_the_plan_says(&site, mode);
    }
    assert!(peak("off") < peak("on") && peak("auto") == peak("on"));
    // CUDA's own memory beside the plan.
    let limit = peak("on") - 1 + kernels::footprint::device_bytes(MULTIPROCESSORS);
    let line = format!("{line} --device-memory-limit {limit}");
    let screen = site.train(2, &format!("{line} --output tight"));
    let words = "are copied when they are used; a prefetch of one unit needs";
    assert!(screen.contains(words), "{screen}");
    takes_what_the_plan_says(&site, "tight");
    assert_eq!(peak("tight"), peak("off"));
    for run in ["on", "auto", "tight"] {
        assert_eq!(losses(&site, run), losses(&site, "off"), "{run}");
        assert!(site.weights(run, 2) == site.weights("off", 2), "{run}");
    }
    let model = "--model model --data data.json --zero 3 --model-max-length 96 --max-slice-nums 1";
    let (code, text) = site.run(
        2,
        &format!("{model} {line} --prefetch-weights on --output out"),
    );
    assert_eq!(code, Some(5), "{text}");
    let words = "of device memory, the limit is";
    assert!(text.contains(words), "{text}");
}

/// The optimizer runs in backward where host memory is spare, with the same bits. The plan includes the second states.
fn the_optimizer_runs_in_backward_where_host_memory_is_spare() {
    let site = Site::new();
    let plan_of = |run: &str| site.json(&format!("{run}/plan.json"));
    let need = |run: &str| plan_of(run)["plan"]["host_need_bytes"].as_u64().unwrap();
    for (cell, flags) in [
        ("whole", "--precision bf16 --offload cpu"),
        (
            "consumed",
            "--precision bf16 --offload cpu --max-grad-norm 0",
        ),
        (
            "kahan",
            "--precision pure-bf16 --pure-bf16-weights kahan --offload cpu",
        ),
    ] {
        let line = format!(
            "--device cuda --max-steps 3 --save-strategy steps --save-steps 3 --eval-strategy no \
             --trace-steps 2..4 {flags}"
        );
        let run = |mode: &str| format!("{cell}-{mode}");
        let check = |mode: &str, more: &str, begins: bool| {
            let run = run(mode);
            let screen = site.train(2, &format!("{line} {more} --output {run}"));
            let said = screen.contains("units are updated while backward runs");
            assert_eq!(said, begins, "{screen}");
            let costs = screen.contains("more of spare host memory");
            assert_eq!(costs, mode == "auto", "{screen}");
            for rank in 0..2 {
                let seen = |lane| spans(&site, &run, rank, lane);
                let (early, late) = (seen("early update"), seen("late update"));
                assert_eq!(early > 0, begins, "{run}, rank {rank}: {early}");
                // The other units are updated in the next forward. If all were updated in backward, only rolled-back
                // ones are.
                assert!(begins || (late > 0) == (mode == "tight"), "{run}: {late}");
            }
            let rows = site.rows(&run);
            let updates = rows
                .iter()
                .filter_map(|row| row["device_seconds"]["updates"].as_f64());
            assert_eq!(updates.sum::<f64>() > 0.0, mode != "off", "{run}");
            let first = format!("{cell}-off");
            assert_eq!(site.logged(&run, "loss"), site.logged(&first, "loss"));
            assert!(
                site.weights(&run, 3) == site.weights(&first, 3),
                "{run}: weights"
            );
            takes_what_the_plan_says(&site, &run);
            takes_the_planned_host_memory(&site, &run);
        };
        check(
            "off",
            "--optimizer-in-backward off --optimizer-in-forward off",
            false,
        );
        check("auto", "", true);
        check("bound", "--optimizer-in-backward 1GiB", true);
        assert!(need(&run("off")) < need(&run("auto")), "{cell}");
        // A tenth of the memory stays free, so nothing is left for second states.
        let limit = need(&run("off")) / 9 * 10;
        check("tight", &format!("--host-memory-limit {limit}"), false);
        assert_eq!(need(&run("tight")), need(&run("off")));
    }
    // Second weights would be on the GPU, which has no spare memory for them, so they need an explicit request.
    let line = "--device cuda --max-steps 3 --save-strategy steps --save-steps 3 --eval-strategy no --trace-steps 2..4 \
                --precision bf16 --offload optimizer=cpu";
    for (mode, begins) in [("off", false), ("auto", false), ("1GiB", true)] {
        let run = format!("stay-{mode}");
        site.train(
            2,
            &format!("{line} --optimizer-in-backward {mode} --output {run}"),
        );
        assert_eq!(spans(&site, &run, 0, "early update") > 0, begins, "{run}");
        assert_eq!(site.logged(&run, "loss"), site.logged("stay-off", "loss"));
        assert!(site.weights(&run, 3) == site.weights("stay-off", 3));
        takes_what_the_plan_says(&site, &run);
    }
}

/// The peak of host memory of every kind of state is the planned one.
fn takes_the_planned_host_memory(site: &Site, run: &str) {
    let log = fs::read_to_string(site.path(run).join("memory.jsonl")).unwrap();
    let rows = log.lines().map(|row| serde_json::from_str(row).unwrap());
    let rows: Vec<Value> = rows.collect();
    let plan = site.json(&format!("{run}/plan.json"));
    let planned = plan["plan"]["memory"]["phases"].as_object().unwrap();
    for kind in ["parameters", "gradients", "optimizer"] {
        let phases = rows
            .iter()
            .flat_map(|row| row["phases"].as_object().unwrap().values());
        let taken = phases.filter_map(|phase| phase["host"]["by_kind"][kind].as_u64());
        let foreseen = planned
            .values()
            .filter_map(|phase| phase["host"][kind].as_u64());
        assert_eq!(taken.max(), foreseen.max(), "{run}: {kind}");
    }
}

/// Number of spans of one lane in a rank's trace.
fn spans(site: &Site, run: &str, rank: usize, lane: &str) -> usize {
    let trace = site.json(&format!("{run}/traces/rank-{rank:04}.json"));
    let events = trace["traceEvents"].as_array().unwrap();
    let mut named = events.iter().filter(|event| event["ph"] == "M");
    let lane = named.find(|event| event["args"]["name"] == lane);
    let Some(lane) = lane.map(|event| &event["tid"]) else {
        return 0;
    };
    let spans = events.iter().filter(|event| event["ph"] == "X");
    spans.filter(|event| &event["tid"] == lane).count()
}

/// A plan that does not fit the GPU is refused before a weight is read.
fn a_plan_that_does_not_fit_is_refused() {
    let site = Site::new();
    let line = "--model model --data data.json --device cuda --precision f32 --device-memory-limit 321MiB --output out";
    let (code, text) = site.run(1, line);
    assert_eq!(code, Some(5), "{text}");
    assert!(
        text.contains("of device memory, the limit is 321M"),
        "{text}"
    );
    assert!(!site.path("out").exists());
    // Without the variable the program offers no emulated GPU.
    let (code, text) = site.run(0, "--device cuda --output out");
    assert_eq!(code, Some(13), "{text}");
    assert!(text.contains("error[E12]"), "{text}");
}

/// Memory beyond the plan ends the run with the code of device memory and names its holders.
fn an_arena_that_is_too_small_ends_the_run() {
    let site = Site::new();
    let line = "--model model --data data.json --device cuda --nproc 2 --offload cpu --precision f32 --max-steps 1 --output out";
    let (code, text) = site.run_with(2, &[(ARENA, "262144")], line);
    assert_eq!(code, Some(11), "{text}");
    for words in [
        "error[E01]",
        "the memory set aside on the GPU ran out",
        "of the reserved 256K are unused",
        "in use ",
        "step 1",
    ] {
        assert!(text.contains(words), "no {words:?} in\n{text}");
    }
}

/// Another process takes GPU memory after the plan. The run ends before a rank has read a weight, and names the
/// process.
fn gpu_memory_taken_by_another_process_ends_the_run_and_names_it() {
    let site = Site::new();
    let line = "--model model --data data.json --device cuda --nproc 2 --offload cpu --precision f32 --max-steps 1 --output out";
    let all = MEMORY_BYTES - (1 << 20);
    let (code, text) = site.run_with(2, &[(TAKEN, &all.to_string())], line);
    assert_eq!(code, Some(11), "{text}");
    for words in [
        "error[E01]",
        "(emulated) has too little free memory for this run",
        "CUDA_ERROR_OUT_OF_MEMORY",
        "2.0G were free when the plan was made, 1.0M are free now",
        &format!("process 4242 holds {all} bytes"),
        "end the other processes on the GPU",
    ] {
        assert!(text.contains(words), "no {words:?} in\n{text}");
    }
    let log = site.path("out/trainer_log.jsonl");
    let rows = fs::read_to_string(log).unwrap_or_default();
    assert!(rows.is_empty(), "{rows}");
}

/// An empty list of visible GPUs hides all of them. A request for a GPU names that variable; other runs use the CPU.
fn the_variable_that_hides_all_gpus_is_named() {
    let site = Site::new();
    let line = "--model model --data data.json --max-steps 1 --model-max-length 96 --max-slice-nums 1 --nproc 1";
    let hidden = [(MASK, "")];
    let (code, text) = site.run_with(2, &hidden, &format!("{line} --device cuda --output out"));
    assert_eq!(code, Some(13), "{text}");
    for words in [
        "error[E12]",
        "CUDA_VISIBLE_DEVICES= hides every GPU",
        "unset it, or name GPUs by their numbers",
        "2 on the bus, 2 seen by CUDA or NVML",
    ] {
        assert!(text.contains(words), "no {words:?} in\n{text}");
    }
    assert!(!site.path("out").exists());
    let (code, text) = site.run_with(2, &hidden, &format!("{line} --device auto --output auto"));
    assert_eq!(code, Some(0), "{text}");
    for words in ["on cpu", "hides every GPU"] {
        assert!(text.contains(words), "no {words:?} in\n{text}");
    }
}

/// Another kernel compiler on one machine ends the run on both before it begins. Another driver is only a warning.
fn machines_with_different_libraries_are_named() {
    let site = Site::new();
    let line = "--model model --data data.json --zero 3 --model-max-length 96 --max-slice-nums 1 --device cuda --precision f32 \
                --max-steps 1 --save-strategy no --eval-strategy no --comm-timeout 120 --offload cpu --output out";
    for (code, text) in site.machines(NVRTC, ["13.0", "12.8"], line) {
        assert_eq!(code, Some(13), "{text}");
        for words in [
            "error[E03] rank 1 computes with another NVRTC than the other ranks",
            "NVRTC of rank 0 (",
            "): \"13.0\"",
            "): \"12.8\"",
            "TESSERA_CUDA_LIBS",
        ] {
            assert!(text.contains(words), "no {words:?} in\n{text}");
        }
    }
    assert!(!site.path("out/trainer_log.jsonl").exists());
    let [first, second] = site.machines(DRIVER, ["580.65", "575.1"], line);
    assert_eq!((first.0, second.0), (Some(0), Some(0)), "{}", first.1);
    let words = "ranks differ, without an effect on results: GPU driver of rank 0";
    let said = |text: &str| text.matches(words).count();
    assert_eq!((said(&first.1), said(&second.1)), (1, 0), "{}", first.1);
    let alone = "--optimizer-in-backward auto keeps updates after the pass";
    assert!(first.1.contains(alone), "{}", first.1);
    assert!(
        !first.1.contains("units are updated while backward"),
        "{}",
        first.1
    );
    assert_eq!(site.logged("out", "loss").len(), 1);
}

type Test = (&'static str, fn());

const TESTS: [Test; 17] = [
    (
        "gpu_memory_taken_by_another_process_ends_the_run_and_names_it",
        gpu_memory_taken_by_another_process_ends_the_run_and_names_it,
    ),
    (
        "the_variable_that_hides_all_gpus_is_named",
        the_variable_that_hides_all_gpus_is_named,
    ),
    (
        "a_run_in_f32_agrees_with_the_cpu_and_resumes_exactly",
        || {
            a_run_agrees_with_the_cpu_and_resumes_exactly("f32", DType::F32);
        },
    ),
    (
        "a_run_in_bf16_agrees_with_the_cpu_and_resumes_exactly",
        || {
            a_run_agrees_with_the_cpu_and_resumes_exactly("bf16", DType::BF16);
        },
    ),
    (
        "two_ranks_on_one_gpu_have_the_results_of_one_rank",
        two_ranks_on_one_gpu_have_the_results_of_one_rank,
    ),
    (
        "graphs_change_neither_results_nor_memory",
        graphs_change_neither_results_nor_memory,
    ),
    (
        "weights_are_prefetched_where_they_fit",
        weights_are_prefetched_where_they_fit,
    ),
    (
        "a_refused_ipc_falls_back_to_host_memory",
        a_refused_ipc_falls_back_to_host_memory,
    ),
    (
        "a_rank_compiles_its_kernels_ahead_and_abandons_its_gpu_when_it_fails",
        a_rank_compiles_its_kernels_ahead_and_abandons_its_gpu_when_it_fails,
    ),
    (
        "ranks_that_see_one_gpu_find_out_whether_they_share_it",
        ranks_that_see_one_gpu_find_out_whether_they_share_it,
    ),
    (
        "the_optimizer_runs_in_backward_where_host_memory_is_spare",
        the_optimizer_runs_in_backward_where_host_memory_is_spare,
    ),
    (
        "two_nodes_over_nccl_have_the_bits_of_one_node",
        two_nodes_over_nccl_have_the_bits_of_one_node,
    ),
    (
        "ipc_without_shared_gpu_memory_is_refused_with_a_suggestion",
        ipc_without_shared_gpu_memory_is_refused_with_a_suggestion,
    ),
    (
        "products_of_a_run_use_the_library",
        products_of_a_run_use_the_library,
    ),
    (
        "a_plan_that_does_not_fit_is_refused",
        a_plan_that_does_not_fit_is_refused,
    ),
    (
        "machines_with_different_libraries_are_named",
        machines_with_different_libraries_are_named,
    ),
    (
        "an_arena_that_is_too_small_ends_the_run",
        an_arena_that_is_too_small_ends_the_run,
    ),
];

fn drive() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let filter: Vec<&String> = words.iter().filter(|word| !word.starts_with('-')).collect();
    let is_wanted =
        |name: &str| filter.is_empty() || filter.iter().any(|part| name.contains(part.as_str()));
    if words.iter().any(|word| word == "--list") {
        TESTS.iter().for_each(|(name, _)| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    let mut all_good = true;
    for (name, test) in TESTS.into_iter().filter(|(name, _)| is_wanted(name)) {
        let is_good = std::panic::catch_unwind(test).is_ok();
        println!("test {name} ... {}", if is_good { "ok" } else { "FAILED" });
        all_good &= is_good;
    }
    if all_good {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

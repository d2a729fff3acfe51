//! The unmodified launcher on the fake driver of `tests/fake_driver`, and the driver's own rules.
//!
//! This binary starts itself as the program under test, which is the launcher's own entry point: it finds the fake
//! driver through `TESSERA_CUDA_LIBS`, as it would find NVIDIA's.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "helpers of a test binary"
)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::OnceLock;

use device_tests::{fake_driver, tolerance};
use kernels::DType;
use serde_json::{Value, json};
use tempfile::TempDir;

/// Makes this binary the program under test.
const PROGRAM: &str = "TESSERA_FAKE_PROGRAM";

fn main() -> ExitCode {
    if std::env::var_os(PROGRAM).is_some() {
        return launcher::run();
    }
    drive()
}

/// Directory of the driver, built once, inside the target directory.
fn driver() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let program = std::env::current_exe().unwrap();
        let directory = program.parent().unwrap().join("fake-driver");
        fake_driver::build(&directory).unwrap();
        directory
    })
}

/// Runs of one test.
struct Site(TempDir);

impl Site {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    /// Exit code and output of the program with these words and variables.
    fn run(&self, variables: &[(&str, &str)], line: &str) -> (Option<i32>, String) {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(line.split_whitespace())
            .current_dir(self.0.path())
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap())
            .env("XDG_CACHE_HOME", self.0.path())
            .env("TESSERA_CUDA_LIBS", driver())
            // The fake driver has the built-in PTX only.
            .env("TESSERA_CUDA_ARCH", "sm_80")
            .env("TESSERA_MATMUL", "own")
            .env(PROGRAM, "1")
            .envs(variables.iter().copied());
        let output = command.output().unwrap();
        let text = [output.stdout, output.stderr].concat();
        (
            output.status.code(),
            String::from_utf8_lossy(&text).into_owned(),
        )
    }

    /// Trains the demo and returns the losses.
    fn train(&self, variables: &[(&str, &str)], line: &str, output: &str) -> Vec<f64> {
        let line = format!("{DEMO} {line} --output {output}");
        let (code, text) = self.run(variables, &line);
        assert_eq!(code, Some(0), "{line}\n{text}");
        assert!(!text.contains("fake driver: "), "{text}");
        self.losses(output)
    }

    /// Trains the demo with a fault, which must happen. Returns exit code and output.
    fn faulty(&self, fault: &str, eager: &str, line: &str) -> (Option<i32>, String) {
        let variables = [("TESSERA_FAKE_FAULT", fault), ("TESSERA_FAKE_EAGER", eager)];
        let output = directory_of(fault);
        let line = format!("{DEMO} {line} --device cuda --output {output}");
        let (code, text) = self.run(&variables, &line);
        let said = format!("fake driver: fault {fault}");
        assert!(text.contains(&said), "{fault}: {text}");
        (code, text)
    }

    fn losses(&self, output: &str) -> Vec<f64> {
        let log = fs::read_to_string(self.0.path().join(output).join("trainer_log.jsonl")).unwrap();
        let rows = log
            .lines()
            .map(|line| serde_json::from_str::<Value>(line).unwrap());
        rows.filter_map(|row| row["loss"].as_f64()).collect()
    }
}

/// Two updates of the demo, without what takes long on an emulator.
const DEMO: &str = "--zero 3 --max-steps 2 --lr-scheduler-type constant --logging-steps 1 --eval-strategy no \
                    --save-strategy no --per-device-train-batch-size 2 --verify-gpu off";

/// Every rule of the driver, each in a process of its own.
fn the_driver_keeps_its_rules() {
    let directory = driver();
    let program = fake_driver::build_contract(directory).unwrap();
    let list = Command::new(&program).output().unwrap();
    let names = String::from_utf8(list.stdout).unwrap();
    assert!(names.lines().count() > 10, "{names}");
    for name in names.lines() {
        let output = Command::new(&program).arg(name).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{name}: {text}");
    }
}

fn doctor_reports_the_driver_and_its_gpus() {
    let site = Site::new();
    let (code, text) = site.run(&[], "doctor --json");
    assert_eq!(code, Some(0), "{text}");
    let report: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(report["cuda"]["problem"], Value::Null, "{text}");
    assert_eq!(report["gpus"].as_array().unwrap().len(), 2);
    let gpu = &report["gpus"][1];
    assert_eq!(
        (&gpu["name"], &gpu["ordinal"]),
        (&"Fake GPU".into(), &1.into())
    );
    assert_eq!(
        (&gpu["index"], &gpu["multiprocessors"]),
        (&1.into(), &4.into())
    );
    assert_eq!(gpu["memory_bytes"], 2u64 << 30);
    let (_, text) = site.run(&[("CUDA_VISIBLE_DEVICES", "")], "doctor");
    assert!(
        text.contains("shows no GPU") || text.contains("hides every GPU"),
        "{text}"
    );
}

/// Whether the losses are those of the CPU.
fn agree(gpu: &[f64], cpu: &[f64]) {
    agree_in(DType::F32, gpu, cpu);
}

/// The same with weights in `dtype`.
fn agree_in(dtype: DType, gpu: &[f64], cpu: &[f64]) {
    assert_eq!((cpu.len(), gpu.len()), (2, 2));
    for (step, (got, want)) in gpu.iter().zip(cpu).enumerate() {
        let allowed = tolerance::trajectory(dtype, *want, step);
        assert!((got - want).abs() <= allowed, "{gpu:?} instead of {cpu:?}");
    }
}

const ONE: &str = "--nproc 1 --offload cpu";
const TWO: &str = "--nproc 2 --offload cpu";

/// Early kernels beside late copies, and the other way round, give the losses of the CPU, with graphs and without.
fn one_rank_agrees_with_the_cpu() {
    let site = Site::new();
    let cpu = site.train(&[], &format!("{ONE} --device cpu"), "cpu");
    for (eager, graphs) in [("1", "off"), ("14", "on")] {
        let line = format!("{ONE} --device cuda --cuda-graph {graphs}");
        let gpu = site.train(&[("TESSERA_FAKE_EAGER", eager)], &line, graphs);
        agree(&gpu, &cpu);
    }
}

/// Ranks exchange through each other's memory, through the host's where handles are refused, and through NCCL.
fn two_ranks_agree_with_the_cpu() {
    let site = Site::new();
    let cpu = site.train(&[], &format!("{TWO} --device cpu"), "cpu");
    for (refused, collectives, output) in [
        ("0", "auto", "ipc"),
        ("1", "auto", "refused"),
        ("1", "nccl", "nccl"),
    ] {
        let line =
            format!("{DEMO} {TWO} --device cuda --collectives {collectives} --output {output}");
        let (code, text) = site.run(&[("TESSERA_FAKE_NO_IPC", refused)], &line);
        assert_eq!(code, Some(0), "{text}");
        assert!(!text.contains("fake driver: "), "{text}");
        // NVML is found in the same directory.
        assert!(text.contains("the driver counts 0 bytes more"), "{text}");
        agree(&site.losses(output), &cpu);
    }
}

/// The library computes products, with states on the GPU.
fn products_by_the_library_agree_with_the_cpu() {
    let site = Site::new();
    let line = "--nproc 1 --offload none";
    let cpu = site.train(&[], &format!("{line} --device cpu"), "cpu");
    let library = [("TESSERA_MATMUL", "cublaslt")];
    let gpu = site.train(&library, &format!("{line} --device cuda"), "gpu");
    agree(&gpu, &cpu);
    let own = site.train(&[], &format!("{line} --device cuda"), "own");
    assert_ne!(gpu, own, "the library computed nothing");
}

/// Model families, by their golden packs. Without `TESSERA_EVERY_PACK` only the first one trains.
const FAMILIES: [&str; 12] = [
    "minicpm-v-2_6",
    "minicpm-o-2_6",
    "cogvlm-chat-hf",
    "cogagent-chat-hf",
    "cogvlm2-llama3-chat-19B",
    "glm-4v-9b",
    "glm-4.1v-9b-thinking",
    "minicpm-v-4_5",
    "minicpm-o-4_5",
    "cogagent-9b-20241220",
    "glm-4.6v-flash",
    "glm-ocr",
];

/// A site with four samples of one image in `data.json`, and the golden packs.
fn with_samples() -> (Site, PathBuf) {
    let site = Site::new();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../golden");
    let images = fs::read_dir(golden.join("minicpm-v-2_6/cases/square_no_slice")).unwrap();
    let mut images = images.map(|entry| entry.unwrap().path());
    let image = images.find(|path| path.extension().is_some_and(|end| end == "png"));
    fs::copy(image.unwrap(), site.0.path().join("a.png")).unwrap();
    let sample = json!({"id": "0", "image": "a.png", "conversations": [
        {"role": "user", "content": "<image>\nWhat is it?"},
        {"role": "assistant", "content": "It is this."},
    ]});
    let samples = vec![sample; 4];
    fs::write(site.0.path().join("data.json"), json!(samples).to_string()).unwrap();
    (site, golden)
}

/// Updates of a family's model, in full and with adapters, on one rank.
fn families_agree_with_the_cpu() {
    let (site, golden) = with_samples();
    let all = std::env::var_os("TESSERA_EVERY_PACK").is_some();
    for family in &FAMILIES[..if all { FAMILIES.len() } else { 1 }] {
        for rest in [
            "",
            "--lora-rank 4",
            "--lora-rank 4 --quantize nf4 --quantize-double",
        ] {
            let model = golden.join(family).display().to_string();
            let line = format!("{ONE} --model {model} --data data.json --precision f32 {rest}");
            let [cpu, gpu] = ["cpu", "cuda"].map(|device| {
                let output = format!("{family}{}-{device}", rest.len());
                site.train(&[], &format!("{line} --device {device}"), &output)
            });
            agree(&gpu, &cpu);
        }
    }
}

/// Adapters on a directory that bitsandbytes packed, with states and packed weights on every tier.
fn packed_directories_agree_with_the_cpu() {
    let (site, golden) = with_samples();
    let all = std::env::var_os("TESSERA_EVERY_PACK").is_some();
    let packs = ["glm-4.1v-nf4-decoder", "minicpm-v-nf4", "glm-4.1v-int8"];
    for pack in &packs[..if all { packs.len() } else { 1 }] {
        let model = golden.join(pack).display().to_string();
        let line =
            format!("--nproc 1 --model {model} --data data.json --precision f32 --lora-rank 4");
        let on_cpu = format!("{line} --offload cpu --device cpu");
        let cpu = site.train(&[], &on_cpu, &format!("{pack}-on-cpu"));
        for offload in ["none", "cpu", "nvme:spill"] {
            let on_gpu = format!("{line} --offload {offload} --device cuda");
            let output = format!("{pack}-{}", &offload[..3]);
            agree(&site.train(&[], &on_gpu, &output), &cpu);
        }
    }
}

/// Moments of 8 bits stay in device memory, and the GPU updates them.
fn moments_of_8_bits_agree_with_the_cpu() {
    let site = Site::new();
    for precision in ["f32", "fp16"] {
        let line = format!("--nproc 1 --offload none --moments 8bit --precision {precision}");
        let cpu = site.train(
            &[],
            &format!("{line} --device cpu"),
            &format!("{precision}-cpu"),
        );
        let output = format!("{precision}-gpu");
        let line = format!("{DEMO} {line} --device cuda --output {output}");
        let (code, text) = site.run(&[], &line);
        assert_eq!(code, Some(0), "{text}");
        assert!(!text.contains("fake driver: "), "{text}");
        assert!(!text.contains("no GPU kernel"), "{text}");
        let gpu = site.losses(&output);
        let dtype = if precision == "f32" {
            DType::F32
        } else {
            DType::F16
        };
        agree_in(dtype, &gpu, &cpu);
    }
}

/// Spilled states pass through pinned memory.
fn states_on_disk_agree_with_the_cpu() {
    let site = Site::new();
    let line = "--nproc 1 --offload nvme:spill";
    let cpu = site.train(&[], &format!("{line} --device cpu"), "cpu");
    agree(
        &site.train(&[], &format!("{line} --device cuda"), "gpu"),
        &cpu,
    );
}

/// A missing wait, a late copy or a wrong parameter of the layer that calls the driver does not stay hidden: the run
/// ends, or its losses are others.
fn seeded_mistakes_are_caught() {
    let site = Site::new();
    let clean = site.train(&[], &format!("{ONE} --device cuda"), "clean");
    for (fault, eager) in [
        ("wait0:1+", "1"),
        ("wait2:1+", "4"),
        ("late:1+", "0"),
        ("synchronization:2", "0"),
        ("argument:30", "0"),
        ("bind:1+", "0"),
    ] {
        let (code, text) = site.faulty(fault, eager, ONE);
        let differs = || site.losses(&directory_of(fault)) != clean;
        assert!(code != Some(0) || differs(), "{fault}: {text}");
    }
}

/// Output directory of a run with a fault.
fn directory_of(fault: &str) -> String {
    fault.replace([':', '+'], "-")
}

/// Failures that a driver may report are named, and a refused capture costs only the graph.
fn failures_of_the_driver_are_named() {
    let site = Site::new();
    for (fault, words) in [
        ("memory:1", "CUDA_ERROR_OUT_OF_MEMORY"),
        ("pinned:1", "pinning 8388608 bytes"),
    ] {
        let (code, text) = site.faulty(fault, "0", ONE);
        assert_eq!(code, Some(11), "{text}");
        assert!(text.contains(words), "{text}");
    }
    let (code, text) = site.faulty("capture:1", "0", ONE);
    assert_eq!(code, Some(0), "{text}");
}

/// As [`DEMO`], on one rank, on a machine whose GPUs were not met before.
const FIRST: &str = "--zero 3 --max-steps 2 --lr-scheduler-type constant --logging-steps 1 --eval-strategy no \
                     --save-strategy no --per-device-train-batch-size 2 --nproc 1 --offload cpu";

/// The first run on a GPU compares it with the CPU. The next one knows the result.
fn a_new_gpu_is_verified_once() {
    let site = Site::new();
    let line = format!("{FIRST} --device cuda --output");
    let (code, text) = site.run(&[], &format!("{line} first"));
    assert_eq!(code, Some(0), "{text}");
    assert!(
        text.contains("and two steps of a tiny model on 1 GPUs agree with the CPU"),
        "{text}"
    );
    assert!(!text.contains("verified before"), "{text}");
    let (code, text) = site.run(&[], &format!("{line} second"));
    assert_eq!(
        (code, text.contains("verified before")),
        (Some(0), true),
        "{text}"
    );
}

/// A wrong kernel, or an order that is missing, is found before the run. The demo then takes the CPU.
fn a_wrong_gpu_is_refused() {
    let site = Site::new();
    for (fault, eager) in [("argument:3+", "0"), ("wait0:1+", "1")] {
        let variables = [("TESSERA_FAKE_FAULT", fault), ("TESSERA_FAKE_EAGER", eager)];
        let output = directory_of(fault);
        let line = format!("{FIRST} --device cuda --output {output}");
        let (code, text) = site.run(&variables, &line);
        assert_eq!(code, Some(13), "{text}");
        assert!(text.contains("error[E22] GPU 0"), "{text}");
        assert!(!site.0.path().join(&output).exists(), "{text}");
    }
    let variables = [("TESSERA_FAKE_FAULT", "argument:3+")];
    let (code, text) = site.run(&variables, &format!("{FIRST} --device auto --output cpu"));
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("the demo takes the CPU"), "{text}");
    assert!(text.contains("1 rank on cpu"), "{text}");
}

/// Graphs that lose a command are not used.
fn wrong_graphs_fall_back_to_launches() {
    let site = Site::new();
    let variables = [("TESSERA_FAKE_FAULT", "graph:1+")];
    let (code, text) = site.run(&variables, &format!("{FIRST} --device cuda --output off"));
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("CUDA graphs are off, because"), "{text}");
    let cpu = site.train(&[], &format!("{ONE} --device cpu"), "cpu");
    agree(&site.losses("off"), &cpu);
}

/// Wrong products of the library are computed by our kernels instead.
fn wrong_products_fall_back_to_our_kernels() {
    let site = Site::new();
    let variables = [
        ("TESSERA_FAKE_FAULT", "product:1+"),
        ("TESSERA_MATMUL", "auto"),
    ];
    let (code, text) = site.run(&variables, &format!("{FIRST} --device cuda --output own"));
    assert_eq!(code, Some(0), "{text}");
    assert!(
        text.contains("matrix products by own kernels, because"),
        "{text}"
    );
    let cpu = site.train(&[], &format!("{ONE} --device cpu"), "cpu");
    agree(&site.losses("own"), &cpu);
}

type Test = (&'static str, fn());

const TESTS: [Test; 15] = [
    ("the_driver_keeps_its_rules", the_driver_keeps_its_rules),
    (
        "doctor_reports_the_driver_and_its_gpus",
        doctor_reports_the_driver_and_its_gpus,
    ),
    ("one_rank_agrees_with_the_cpu", one_rank_agrees_with_the_cpu),
    ("two_ranks_agree_with_the_cpu", two_ranks_agree_with_the_cpu),
    (
        "products_by_the_library_agree_with_the_cpu",
        products_by_the_library_agree_with_the_cpu,
    ),
    ("families_agree_with_the_cpu", families_agree_with_the_cpu),
    (
        "packed_directories_agree_with_the_cpu",
        packed_directories_agree_with_the_cpu,
    ),
    (
        "moments_of_8_bits_agree_with_the_cpu",
        moments_of_8_bits_agree_with_the_cpu,
    ),
    (
        "states_on_disk_agree_with_the_cpu",
        states_on_disk_agree_with_the_cpu,
    ),
    ("seeded_mistakes_are_caught", seeded_mistakes_are_caught),
    (
        "failures_of_the_driver_are_named",
        failures_of_the_driver_are_named,
    ),
    ("a_new_gpu_is_verified_once", a_new_gpu_is_verified_once),
    ("a_wrong_gpu_is_refused", a_wrong_gpu_is_refused),
    (
        "wrong_graphs_fall_back_to_launches",
        wrong_graphs_fall_back_to_launches,
    ),
    (
        "wrong_products_fall_back_to_our_kernels",
        wrong_products_fall_back_to_our_kernels,
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

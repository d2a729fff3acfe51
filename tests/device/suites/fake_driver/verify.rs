//! Verification of GPUs before a run: done once, and what fails falls back or is refused.

use device_tests::emulator::object_name;
use kernels::cuda::ptx;
use serde_json::Value;

use crate::runs::agree;
use crate::site::{Site, TWO_UPDATES, every, says};

/// Runs the program on the directory's model with GPUs that were not met before.
fn first(site: &Site, variables: &[(&str, &str)], output: &str) -> (Option<i32>, String) {
    let line = "--device cuda --nproc 1 --offload cpu --verify-gpu auto";
    site.try_train(
        variables,
        &format!("{line} {TWO_UPDATES} --output {output}"),
    )
}

/// The first run on a GPU compares it with the CPU, and its context with the plan. The next one knows the result.
pub(crate) fn a_new_gpu_is_verified_once() {
    let site = Site::with_model();
    let context = [("TESSERA_FAKE_CONTEXT", "536870912")];
    let (code, text) = first(&site, &context, "first");
    assert_eq!(code, Some(0), "{text}");
    let words = [
        "a process takes 192M more of the GPU than the plan assumes",
        "and two steps of a tiny model on 1 GPUs agree with the CPU",
    ];
    says(&text, &words);
    assert!(!text.contains("verified before"), "{text}");
    let (code, text) = first(&site, &[], "second");
    assert_eq!(code, Some(0), "{text}");
    says(&text, &["verified before"]);
}

/// A wrong kernel, or an order that is missing, is found before the run. The demo then takes the CPU.
pub(crate) fn a_wrong_gpu_is_refused() {
    let site = Site::with_model();
    let wrong = ("TESSERA_FAKE_FAULT", "argument:3+");
    let unordered = [
        ("TESSERA_FAKE_FAULT", "wait0:1+"),
        ("TESSERA_FAKE_EAGER", "1"),
    ];
    for variables in [&[wrong][..], &unordered] {
        let (code, text) = first(&site, variables, "none");
        assert_eq!(code, Some(13), "{text}");
        says(&text, &["error[E22] GPU 0"]);
        assert!(!site.path("none").exists(), "{text}");
    }
    let line = "--zero 3 --max-steps 1 --eval-strategy no --save-strategy no --nproc 1 --device auto --verify-gpu auto --output cpu";
    let (code, text) = site.run(&[wrong], line);
    assert_eq!(code, Some(0), "{text}");
    says(&text, &["the demo takes the CPU", "1 rank on cpu"]);
}

/// Adapters of answers and evaluations are verified with the model: a kernel that only they launch and that is wrong is
/// found before a token.
pub(crate) fn adapters_of_answers_are_verified() {
    let site = Site::with_model();
    let line = "--device cpu --nproc 1 --precision bf16 --lora-rank 8 --max-steps 1 --eval-strategy no \
                --save-strategy steps --save-steps 1 --output lora";
    site.train(&[], line);
    // Products with the rank as their width.
    let narrow = |name: &str| {
        name.starts_with("lora_linear-type1-out1-transpose_a0-transpose_b0-block_m64-block_n16-")
    };
    let modules = ptx::bundle().iter().filter(|(name, _)| narrow(name));
    let faults: Vec<String> = modules
        .map(|(_, entry)| format!("{}:1+", object_name(&entry.ptx)))
        .collect();
    let wrong = [("TESSERA_FAKE_FAULT", &*faults.join(","))];
    let asks = [
        "generate --model model --prompt Why? --max-new-tokens 2",
        "eval --model model --data held_out.json --max-new-tokens 2",
    ];
    for ask in asks {
        let ask = format!("{ask} --precision bf16 --device cuda --verify-gpu auto");
        let (code, text) = site.run(&wrong, &ask);
        assert_eq!(code, Some(0), "{text}");
        assert!(!text.contains("fake driver: fault"), "{text}");
        let adapted = format!("{ask} --adapter lora/checkpoint-1");
        let (code, text) = site.run(&wrong, &adapted);
        assert_eq!(code, Some(13), "{text}");
        says(&text, &["error[E22] GPU 0", "matmul [2100, 12, 136]"]);
        assert!(!text.contains(" load "), "{text}");
    }
    let adapted = format!(
        "{} --device cuda --verify-gpu auto --adapter lora/checkpoint-1",
        asks[0]
    );
    let (code, text) = site.run(&[], &adapted);
    assert_eq!(code, Some(0), "{text}");
    says(&text, &["8 adapters"]);
}

/// Graphs that lose a command are not used, and wrong products of the library are computed by our kernels instead.
pub(crate) fn wrong_graphs_and_products_are_not_used() {
    let site = Site::with_model();
    let variables = [
        ("TESSERA_FAKE_FAULT", "graph:1+,product:1+"),
        ("TESSERA_MATMUL", "auto"),
    ];
    let (code, text) = first(&site, &variables, "own");
    assert_eq!(code, Some(0), "{text}");
    let words = [
        "CUDA graphs are off, because",
        "matrix products by own kernels, because",
    ];
    says(&text, &words);
    let line = format!("--device cpu --nproc 1 --offload cpu {TWO_UPDATES} --output cpu");
    site.train(&[], &line);
    agree(&site, "own", "cpu");
}

/// Ranks whose GPUs show each other wrong memory exchange through the host's. They see it when they meet. The nightly
/// run also drops copies later, which the verification sees.
pub(crate) fn wrong_peers_fall_back_to_host_memory() {
    let site = Site::with_model();
    let line = format!("--nproc 2 --offload cpu {TWO_UPDATES}");
    site.train(&[], &format!("{line} --device cpu --output cpu"));
    let cases = [
        ("ipc:1+", "off", "is not what that rank wrote"),
        ("peer:9+", "auto", "because steps over ipc differ"),
    ];
    for (fault, verify, why) in &cases[..if every() { 2 } else { 1 }] {
        let variables = [("TESSERA_FAKE_FAULT", *fault)];
        let gpu = format!("{line} --device cuda --verify-gpu {verify} --output {verify}");
        let (code, text) = site.try_train(&variables, &gpu);
        assert_eq!(code, Some(0), "{text}");
        says(&text, &["exchange through host memory (shm)", why]);
        agree(&site, verify, "cpu");
    }
}

/// `launcher doctor --verify-gpu` writes what it found into a report, also about a GPU that does not open.
pub(crate) fn doctor_reports_what_it_verified() {
    let site = Site::new();
    let variables = [
        ("TESSERA_FAKE_FAULT", "memory:1"),
        ("TESSERA_FAKE_GPUS", "1"),
    ];
    let (code, text) = site.run(&variables, "doctor --verify-gpu");
    assert_eq!(code, Some(13), "{text}");
    let report: Value = site.json("gpu-verification.json");
    let refused = report["refused"].as_str().unwrap();
    says(refused, &["E22", "GPU 0"]);
    assert_eq!(report["doctor"]["gpus"].as_array().unwrap().len(), 1);
    // Operations whose kernels are neither built in nor compiled here are no differences.
    let (code, text) = site.run(&[("TESSERA_FAKE_GPUS", "1")], "doctor --verify-gpu");
    assert_eq!(code, Some(0), "{text}");
    let report: Value = site.json("gpu-verification.json");
    let verified = report["verification"].to_string();
    says(&verified, &["operations and two steps of a tiny model"]);
    assert!(report["refused"].is_null());
}

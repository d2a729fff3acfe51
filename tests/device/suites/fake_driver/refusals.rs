//! What cannot run is refused before it begins, and a run that fails leaves its GPU.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::site::{Site, says};

/// Memory of a GPU, in bytes.
const MEMORY_BYTES: u64 = 2 << 30;

/// Another process takes GPU memory after the plan. The run ends before a rank has read a weight, and names the
/// process.
pub(crate) fn gpu_memory_taken_by_another_process_ends_the_run_and_names_it() {
    let site = Site::with_model();
    let all = MEMORY_BYTES - (1 << 20);
    let taken = [
        ("TESSERA_FAKE_FAULT", "memory:1+"),
        ("TESSERA_FAKE_PROCESS", &all.to_string()),
    ];
    let line = "--device cuda --nproc 2 --offload cpu --precision f32 --max-steps 1 --output out";
    let (code, text) = site.try_train(&taken, line);
    assert_eq!(code, Some(11), "{text}");
    let words = [
        "error[E01]",
        "(Fake GPU) has too little free memory for this run",
        "CUDA_ERROR_OUT_OF_MEMORY",
        "2.0G were free when the plan was made, 2.0G are free now",
        "process 4242",
        "end the other processes on the GPU",
    ];
    says(&text, &words);
    let log = site.path("out/trainer_log.jsonl");
    let rows = fs::read_to_string(log).unwrap_or_default();
    assert!(rows.is_empty(), "{rows}");
}

/// An empty list of visible GPUs hides all of them. A request for a GPU names that variable; other runs use the CPU.
pub(crate) fn the_variable_that_hides_all_gpus_is_named() {
    let site = Site::with_model();
    let line = "--max-steps 1 --nproc 1";
    let hidden = [("CUDA_VISIBLE_DEVICES", "")];
    let (code, text) = site.try_train(&hidden, &format!("{line} --device cuda --output out"));
    assert_eq!(code, Some(13), "{text}");
    let words = [
        "error[E12]",
        "CUDA_VISIBLE_DEVICES= hides every GPU",
        "unset it, or name GPUs by their numbers",
        "2 seen by CUDA or NVML",
    ];
    says(&text, &words);
    assert!(!site.path("out").exists());
    let text = site.train(&hidden, &format!("{line} --device auto --output auto"));
    says(&text, &["on cpu", "hides every GPU"]);
}

/// A plan that does not fit the GPU is refused before a weight is read.
pub(crate) fn a_plan_that_does_not_fit_is_refused() {
    let site = Site::with_model();
    let line = "--device cuda --precision f32 --device-memory-limit 321MiB --output out";
    let (code, text) = site.try_train(&[], line);
    assert_eq!(code, Some(5), "{text}");
    says(&text, &["of device memory, the limit is 321M"]);
    assert!(!site.path("out").exists());
    let none = [("TESSERA_FAKE_GPUS", "0")];
    let (code, text) = site.run(&none, "--device cuda --output out");
    assert_eq!(code, Some(13), "{text}");
    says(&text, &["error[E12]"]);
}

/// Attention with a head dim that is not built in needs NVRTC. Without it, what would launch the kernel is refused before
/// a plan is made and a weight is read.
pub(crate) fn a_kernel_that_is_not_built_in_is_refused_before_the_plan() {
    let site = Site::with_samples();
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../launcher/src/commands/verify/tiny/minicpm.json");
    let mut config: Value = serde_json::from_slice(&fs::read(tiny).unwrap()).unwrap();
    // 128 / 16 = 8.
    config["num_attention_heads"] = 16.into();
    fs::write(site.path("narrow.json"), config.to_string()).unwrap();
    let made = "synth --model-config narrow.json --weights seeded --samples 2 --output narrow";
    let (code, text) = site.run(&[], made);
    assert_eq!(code, Some(0), "{text}");
    let data = "--data data.json";
    let train = format!("--model narrow {data} --max-steps 1 --nproc 1 --output out");
    let lines = [
        train.clone(),
        format!("{train} --verify-gpu auto"),
        format!("plan --model narrow {data} --nproc 1"),
        "plan --model narrow/config.json --nproc 1".to_owned(),
        "generate --model narrow --prompt Why? --max-new-tokens 2".to_owned(),
        format!("eval --model narrow {data} --nproc 2"),
    ];
    let words = [
        "error[E12] cannot start the run: a kernel is neither built in nor can it be compiled",
        "module attention-type1-head_dim8 is not among the built-in PTX and NVRTC was not found",
        "built in for head dims 16, 32, 48, 64, 72, 80, 112, 128",
        "pip install nvidia-cuda-nvrtc",
    ];
    for line in &lines {
        let (code, text) = site.run(&[], &format!("{line} --device cuda --precision bf16"));
        assert_eq!(code, Some(13), "{line}\n{text}");
        says(&text, &words);
        let early = ["\n plan ", "verify ", "answer", "loaded"];
        let late = early.iter().find(|word| text.contains(**word));
        assert_eq!(late, None, "{line}\n{text}");
        assert!(!site.path("out").exists(), "{line}");
    }
    // Attention in f32 has a kernel for every head dim.
    for line in [&train, &lines[4]] {
        let (code, text) = site.run(&[], &format!("{line} --device cuda --precision f32"));
        assert_eq!(code, Some(0), "{line}\n{text}");
    }
    // A described GPU is on another machine, which may have NVRTC.
    let described = format!(
        "{} --device cuda --precision bf16 --hw 24GiB",
        lines[2].replace(" --nproc 1", "")
    );
    let (code, text) = site.run(&[], &described);
    assert_eq!(code, Some(0), "{text}");
}

/// After a failure, destructors do not wait for a GPU that may wait for a lost rank.
pub(crate) fn a_rank_abandons_its_gpu_when_it_fails() {
    let site = Site::with_model();
    let line = "--device cuda --nproc 2 --max-steps 2 --save-steps 1 --save-strategy steps --eval-strategy no";
    let released = |output: &str, inject: &str| {
        let log = site.path(output).with_extension("log");
        let own = [("TESSERA_FAKE_LOG", log.to_str().unwrap())];
        let (code, screen) = site.try_train(&own, &format!("{line} --output {output} {inject}"));
        let log = fs::read_to_string(log).expect(&screen);
        assert_eq!(log.matches("opened").count(), 2, "{log}");
        (code, log.matches("released").count())
    };
    assert_eq!(released("good", ""), (Some(0), 2));
    let (code, count) = released("bad", "--inject disk-full:rank=0,step=1");
    assert!(
        code != Some(0) && count == 0,
        "{code:?}: {count} of 2 GPUs are released"
    );
    let failure = fs::read_dir(site.path("bad/errors"));
    assert!(failure.is_ok_and(|files| files.count() == 1));
}

/// GPUs whose memory has no handles. The refusal of `ipc` suggests a transport that works.
pub(crate) fn gpus_that_share_no_memory_are_refused_for_ipc() {
    let site = Site::with_model();
    let refused = [("TESSERA_FAKE_FAULT", "handle:1+")];
    let line = "--device cuda --nproc 2 --max-steps 1 --collectives ipc --output shared";
    let (code, screen) = site.try_train(&refused, line);
    assert_eq!(code, Some(13), "{screen}");
    let words = [
        "between ranks: ipc",
        "cannot share memory",
        "--collectives shm",
    ];
    says(&screen, &words);
}

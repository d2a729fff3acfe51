//! Whole runs: they agree with the CPU, resume exactly, and take the planned memory.

use std::fs;
use std::os::unix::fs::symlink;

use device_tests::tolerance;
use kernels::DType;
use serde_json::json;

use crate::site::{DEMO, Site, TWO_UPDATES, driver, every, says};

/// Losses of training and of the held-out samples.
fn losses(site: &Site, run: &str) -> Vec<f64> {
    let mut losses = site.losses(run);
    let eval = site.json(&format!("{run}/eval_results.json"));
    losses.push(eval["eval_loss"].as_f64().unwrap());
    losses
}

pub(crate) fn a_run_in_f32_agrees_with_the_cpu_and_resumes_exactly() {
    // The tier of the states changes no bit.
    let tiers = [
        ("none", "states are in GPU memory"),
        ("cpu", "optimizer states are in host memory"),
        ("optimizer=cpu", "weights are in GPU memory, gradients"),
    ];
    agrees_with_the_cpu_and_resumes_exactly("f32", DType::F32, &tiers);
}

pub(crate) fn a_run_in_bf16_agrees_with_the_cpu_and_resumes_exactly() {
    let tiers = [("cpu", "optimizer states are in host memory")];
    agrees_with_the_cpu_and_resumes_exactly("bf16", DType::BF16, &tiers);
}

/// Two ranks on two GPUs, saved after two of three updates and resumed. The losses are those of the CPU, and the bits
/// those of an uninterrupted run.
fn agrees_with_the_cpu_and_resumes_exactly(precision: &str, dtype: DType, tiers: &[(&str, &str)]) {
    let site = Site::with_model();
    let line = format!("--precision {precision} --max-steps 3 --eval-data held_out.json --nproc 2");
    let cpu = format!("{line} --device cpu --offload cpu --output cpu");
    site.train(&[], &cpu);
    let whole = format!("{line} --device cuda --save-steps 2 --output whole");
    let screen = site.train(&[], &whole);
    let words = [
        "2 ranks on cuda",
        "GPU 1 Fake GPU · 2.0G, 2.0G free · rank 1",
        "weights, gradients and optimizer states are in GPU memory",
        "GPU memory per rank: ",
        "waits for copies",
    ];
    says(&screen, &words);
    let (cpu, gpu) = (losses(&site, "cpu"), losses(&site, "whole"));
    assert_eq!(cpu.len(), 4);
    assert!(cpu[2] < cpu[0], "{cpu:?}");
    near(&gpu, &cpu, dtype);
    let same = site.weights("cpu", 3) == site.weights("whole", 3);
    assert!(!same, "the GPU did nothing");
    for (offload, words) in tiers {
        let output = format!("resumed-{offload}");
        fs::create_dir(site.path(&output)).unwrap();
        let resumed = format!(
            "--output {output} --resume whole/checkpoint-2 --offload {offload} --trace-steps 3..4"
        );
        let screen = site.train(&[], &format!("{line} --device cuda {resumed}"));
        says(&screen, &[words]);
        let same = site.weights("whole", 3) == site.weights(&output, 3);
        assert!(same, "{offload}: weights differ");
        assert_eq!(losses(&site, "whole")[2..], losses(&site, &output)[..]);
    }
    site.takes_what_the_plan_says("whole");
    tells_the_time_of_the_devices(&site, "resumed-cpu", "cpu");
}

/// Log rows and traces of a GPU run have the devices' own times. Those of a CPU run have none.
fn tells_the_time_of_the_devices(site: &Site, run: &str, cpu: &str) {
    let rows = site.rows(run);
    for row in rows.iter().filter(|row| row["seconds"].is_object()) {
        for part in ["compute", "inward", "outward"] {
            let seconds = row["device_seconds"][part].as_f64().unwrap();
            assert!(seconds > 0.0, "{part}: {row}");
        }
    }
    let mut rows = site.rows(cpu).into_iter();
    assert!(rows.all(|row| row["device_seconds"].is_null()));
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

/// Weights are prefetched if the plan then fits the GPU, with the same bits. An explicit request must fit.
pub(crate) fn weights_are_prefetched_where_they_fit() {
    let site = Site::with_model();
    let line = "--precision bf16 --max-steps 2 --device cuda --nproc 2 --eval-data held_out.json";
    let ahead = "are prefetched one unit ahead";
    for (mode, comes) in [("off", false), ("on", true), ("auto", true)] {
        let run = format!("{line} --prefetch-weights {mode} --output {mode}");
        let screen = site.train(&[], &run);
        assert_eq!(screen.contains(ahead), comes, "{screen}");
        site.takes_what_the_plan_says(mode);
    }
    let peak = |run| site.planned_peak(run);
    assert!(peak("off") < peak("on") && peak("auto") == peak("on"));
    // CUDA's own memory beside the plan.
    let limit = peak("on") - 1 + kernels::footprint::device_bytes(4);
    let line = format!("{line} --device-memory-limit {limit}");
    let screen = site.train(&[], &format!("{line} --output tight"));
    let words = "are copied when they are used; a prefetch of one unit needs";
    says(&screen, &[words]);
    site.takes_what_the_plan_says("tight");
    assert_eq!(peak("tight"), peak("off"));
    for run in ["on", "auto", "tight"] {
        assert_eq!(losses(&site, run), losses(&site, "off"), "{run}");
        assert!(site.weights(run, 2) == site.weights("off", 2), "{run}");
    }
    let asked = format!("{line} --prefetch-weights on --output out");
    let (code, text) = site.try_train(&[], &asked);
    assert_eq!(code, Some(5), "{text}");
    says(&text, &["of device memory, the limit is"]);
}

/// Early kernels beside late copies, and the other way round, with graphs and without: the bits and the memory are the
/// same, and the losses are those of the CPU.
pub(crate) fn graphs_and_timing_change_neither_results_nor_memory() {
    let site = Site::with_model();
    let line = "--precision f32 --max-steps 2 --nproc 1 --offload cpu --save-strategy steps --save-steps 2 \
                --eval-strategy no";
    site.train(&[], &format!("{line} --device cpu --output cpu"));
    for (mode, eager) in [("off", "1"), ("auto", "0"), ("on", "14")] {
        let run = format!("{line} --device cuda --cuda-graph {mode} --output {mode}");
        site.train(&[("TESSERA_FAKE_EAGER", eager)], &run);
        site.takes_what_the_plan_says(mode);
        let same = site.weights(mode, 2) == site.weights("off", 2);
        assert!(same, "--cuda-graph {mode} has other weights");
    }
    agree(&site, "off", "cpu");
}

/// The demo on two ranks that read each other's memory.
pub(crate) fn the_demo_on_two_ranks_agrees_with_the_cpu() {
    let site = Site::new();
    for device in ["cpu", "cuda"] {
        let line = format!("{DEMO} --nproc 2 --offload cpu --device {device} --output {device}");
        let (code, text) = site.run(&[], &line);
        assert_eq!(code, Some(0), "{text}");
        assert!(!text.contains("fake driver: "), "{text}");
        if device == "cuda" {
            // NVML is found in the same directory.
            let words = ["between ranks: ipc", "the driver counts"];
            says(&text, &words);
        }
    }
    agree(&site, "cuda", "cpu");
}

/// Spilled states pass through pinned memory.
pub(crate) fn states_on_disk_agree_with_the_cpu() {
    let site = Site::with_model();
    let line = format!("--nproc 1 --offload nvme:spill {TWO_UPDATES}");
    for device in ["cpu", "cuda"] {
        let run = format!("{line} --device {device} --output {device}");
        site.train(&[], &run);
    }
    agree(&site, "cuda", "cpu");
}

/// A driver of CUDA 12.2 has all functions that a run calls. The run asks for tiles, and says how many rows they have.
pub(crate) fn a_driver_of_cuda_12_trains() {
    let site = Site::with_model();
    let line = format!("--nproc 1 --offload cpu --mlp-tile-tokens 16 {TWO_UPDATES}");
    let note = "run on 4096 tokens at a time: on a GPU --mlp-tile-tokens 16 is rounded up";
    let screen = site.train(&[], &format!("{line} --device cpu --output cpu"));
    assert!(
        !screen.contains("rounded up"),
        "no other tiles on the CPU: {screen}"
    );
    let version = [("TESSERA_FAKE_VERSION", "12020")];
    let screen = site.train(&version, &format!("{line} --device cuda --output gpu"));
    says(&screen, &[note]);
    agree(&site, "gpu", "cpu");
}

/// Checks that the two losses of a run in f32 are those of another run, up to the order of sums.
pub(crate) fn agree(site: &Site, run: &str, like: &str) {
    let (got, want) = (site.losses(run), site.losses(like));
    assert_eq!((got.len(), want.len()), (2, 2));
    near(&got, &want, DType::F32);
}

pub(crate) fn near(got: &[f64], want: &[f64], dtype: DType) {
    assert_eq!(got.len(), want.len());
    for (step, (x, y)) in got.iter().zip(want).enumerate() {
        let allowed = tolerance::trajectory(dtype, *y, step);
        assert!((x - y).abs() <= allowed, "{got:?} instead of {want:?}");
    }
}

/// Library products, chosen by the program. The plan includes their scratch memory. Losses are those of our own kernels
/// up to the order of sums, and the variable restores our kernels.
pub(crate) fn products_of_a_run_use_the_library() {
    let site = Site::with_model();
    // A machine with the driver alone.
    let bare = site.path("bare");
    fs::create_dir(&bare).unwrap();
    symlink(driver().join("libcuda.so.1"), bare.join("libcuda.so.1")).unwrap();
    let bare = ("TESSERA_CUDA_LIBS", bare.to_str().unwrap());
    let line = "--precision f32 --max-steps 2 --device cuda --nproc 1 --save-strategy no --eval-strategy no";
    let auto = ("TESSERA_MATMUL", "auto");
    for (output, own, by) in [
        ("library", &[auto][..], "cuBLASLt"),
        ("chosen", &[], "own kernels"),
        ("none", &[auto, bare], "own kernels"),
    ] {
        let screen = site.train(own, &format!("{line} --output {output}"));
        says(&screen, &[&format!("matrix products by {by}")]);
        site.takes_what_the_plan_says(output);
    }
    let [library, chosen, none] = ["library", "chosen", "none"].map(|run| site.losses(run));
    assert_eq!(chosen, none);
    assert_ne!(library, none, "the library did nothing");
    near(&library, &none, DType::F32);
    let asked = [("TESSERA_MATMUL", "cublaslt"), bare];
    let (code, text) = site.run(&asked, "--device cuda --output out");
    assert_eq!(code, Some(13), "{text}");
    says(&text, &["cuBLASLt was not found"]);
}

/// The variable reaches the plan and the run: the memory is what the plan says, and the gradients are those of the other
/// kernels up to the order of sums.
pub(crate) fn the_backward_of_attention_is_fused_by_request() {
    let site = Site::with_model();
    // Longer than a tile of keys.
    let sample = |i: usize| {
        json!({"id": i.to_string(), "conversations": [
            {"role": "user", "content": "What?"},
            {"role": "assistant", "content": "It is. ".repeat(60 + i)},
        ]})
    };
    fs::write(
        site.path("data.json"),
        json!([sample(0), sample(1)]).to_string(),
    )
    .unwrap();
    let line =
        format!("{DEMO} --nproc 1 --model model --data data.json --precision bf16 --device cuda");
    let fused = [("TESSERA_ATTENTION_BACKWARD", "fused")];
    let norms = [("split", &[][..]), ("fused", &fused)].map(|(output, variables)| {
        let (code, screen) = site.run(variables, &format!("{line} --output {output}"));
        assert_eq!(code, Some(0), "{screen}");
        assert!(!screen.contains("fake driver: "), "{screen}");
        let says_so = screen.contains("fused attention backward");
        assert_eq!(says_so, output == "fused", "{screen}");
        site.takes_what_the_plan_says(output);
        let rows = site.rows(output);
        rows[0]["grad_norm"].as_f64().unwrap()
    });
    let [split, fused] = norms;
    assert!(
        split != fused,
        "the variable did nothing: {split} and {fused}"
    );
    assert!(
        (split - fused).abs() < 1e-3 * split,
        "{fused} instead of {split}"
    );
}

/// Model families, by their golden packs. Without [`every`] only the first one trains.
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

/// Updates of a family's model, in full and with adapters, on one rank.
pub(crate) fn families_agree_with_the_cpu() {
    let site = Site::with_samples();
    let rests = [
        "",
        "--lora-rank 4",
        "--lora-rank 4 --quantize nf4 --quantize-double",
    ];
    let (families, rests) = match every() {
        true => (&FAMILIES[..], &rests[..]),
        // Other tests train all parameters of the first family.
        false => (&FAMILIES[..1], &rests[1..]),
    };
    for family in families {
        for rest in rests {
            let outputs = ["cpu", "cuda"].map(|device| {
                let output = format!("{family}{}-{device}", rest.len());
                let line = format!("--offload cpu --precision f32 {rest} --device {device}");
                site.train_pack(family, &format!("{line} --output {output}"));
                output
            });
            agree(&site, &outputs[1], &outputs[0]);
        }
    }
}

/// Adapters on a directory that bitsandbytes quantized, with states and quantized weights on every tier.
pub(crate) fn quantized_directories_agree_with_the_cpu() {
    let site = Site::with_samples();
    let packs = ["glm-4.1v-nf4-decoder", "minicpm-v-nf4", "glm-4.1v-int8"];
    for pack in &packs[..if every() { packs.len() } else { 1 }] {
        let line = "--precision f32 --lora-rank 4";
        let cpu = format!("{pack}-on-cpu");
        let on_cpu = format!("{line} --offload cpu --device cpu --output {cpu}");
        site.train_pack(pack, &on_cpu);
        for offload in ["none", "cpu", "nvme:spill"] {
            let output = format!("{pack}-{}", &offload[..3]);
            let on_gpu = format!("{line} --offload {offload} --device cuda --output {output}");
            site.train_pack(pack, &on_gpu);
            agree(&site, &output, &cpu);
        }
    }
}

/// The GPU reads frozen weights where the driver registered them: the maps of the weight files, and memory that the ranks
/// share. If the driver refuses, they go through pinned chunks. The bits are the same.
pub(crate) fn frozen_weights_are_registered_or_copied_through_pinned_chunks() {
    let site = Site::with_model();
    let cases = [
        (
            "plain",
            "--nproc 1 --precision f32",
            "read in the mapped weight files",
        ),
        (
            "shared",
            "--nproc 2 --precision f32 --quantize nf4",
            "one copy in shared memory",
        ),
    ];
    for (name, line, place) in cases {
        let line = format!(
            "{line} --zero 2 --lora-rank 4 --offload cpu --max-steps 2 --save-strategy steps --save-steps 2 \
             --eval-strategy no --device cuda"
        );
        let (used, refused) = (format!("{name}-used"), format!("{name}-refused"));
        let log = site.path(&format!("{name}.log"));
        let log = [("TESSERA_FAKE_LOG", log.to_str().unwrap())];
        let screen = site.train(&log, &format!("{line} --output {used}"));
        says(&screen, &[place, "frozen weights: the driver registered "]);
        let lines = fs::read_to_string(log[0].1).unwrap();
        assert!(lines.contains("read registered memory"), "{lines}");
        let fault = [("TESSERA_FAKE_FAULT", "register:1+")];
        let (code, screen) = site.try_train(&fault, &format!("{line} --output {refused}"));
        assert_eq!(code, Some(0), "{screen}");
        says(
            &screen,
            &["copied to the GPU through pinned memory; the driver registered 0 "],
        );
        let off = format!("{name}-off");
        let chosen = [("TESSERA_HOST_REGISTER", "off")];
        let screen = site.train(&chosen, &format!("{line} --output {off}"));
        assert!(!screen.contains("the driver registered"), "{screen}");
        let runs = [used, refused, off];
        let [used, others @ ..] = runs.each_ref().map(|run| site.losses(run));
        assert!(others.iter().all(|losses| *losses == used), "{name}");
        let adapters = runs.map(|run| {
            let file = format!("{run}/checkpoint-2/adapter_model.safetensors");
            fs::read(site.path(&file)).unwrap()
        });
        let same = adapters.iter().all(|adapter| *adapter == adapters[0]);
        assert!(same, "{name}: adapters differ");
    }
}

/// Moments of 8 bits stay in device memory, and the GPU updates them: on one GPU, and on two that each have a shard.
pub(crate) fn moments_of_8_bits_agree_with_the_cpu() {
    let site = Site::with_model();
    for (ranks, stage, precision, dtype) in [
        (1, 3, "f32", DType::F32),
        (1, 3, "fp16", DType::F16),
        (2, 2, "f32", DType::F32),
        (2, 3, "bf16", DType::BF16),
    ] {
        let line = format!(
            "--nproc {ranks} --zero {stage} --offload none --moments 8bit --precision {precision} --max-steps 3 \
             --save-strategy no --eval-strategy no"
        );
        let outputs = ["cpu", "cuda"].map(|device| {
            let output = format!("{ranks}-{precision}-{device}");
            let screen = site.train(&[], &format!("{line} --device {device} --output {output}"));
            assert!(!screen.contains("no GPU kernel"), "{screen}");
            output
        });
        near(&site.losses(&outputs[1]), &site.losses(&outputs[0]), dtype);
    }
}

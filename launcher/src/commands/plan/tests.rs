//! Properties of plans over a grid of settings.

use super::planner::{Planner, made_up_sample};
use super::{configuration, named_model, propose};
use crate::cli::{self, Command, resolve};
use crate::config::{Found, OptimizerInBackward, PrefetchWeights, RunConfig, RunPlan, ZeroAuto};
use crate::device::Nvidia;
use crate::error::{ErrorCode, Failure};
use crate::lang::{Lang, columns};
use crate::memory::{Phase, RankMemory};
use crate::model::setup::shapes;
use crate::plan::rank_memory::{fixed, plan_event};
use crate::plan::{
    DECODING, HeldOut, Machine, MemoryCheck, Settled, Work, dry_run, quantized_event,
    settle_one_by_one, stage_line, window_region,
};
use crate::rank_env::Env;
use crate::ui::Event;
use crate::units::bytes;
use models::SampleInput;
use models::generate::Prompt;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const UNBOUNDED: u64 = 1 << 50;

fn write_config(directory: &Path) {
    let config = json!({
        "version": 2.6, "model_type": "minicpmv", "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "vocab_size": 2000, "query_num": 16, "drop_vision_last_layer": false,
        "slice_config": {"max_slice_nums": 2, "patch_size": 14, "scale_resolution": 112},
        "vision_config": {
            "hidden_size": 96, "image_size": 112, "intermediate_size": 192, "num_attention_heads": 4,
            "num_hidden_layers": 2, "patch_size": 14,
        },
    });
    std::fs::write(directory.join("config.json"), config.to_string()).expect("written");
}

fn config(directory: &Path, flags: &str) -> RunConfig {
    let dir = directory.display();
    let line = format!(
        "--model {dir} --data d --output {dir} --model-max-length 128 --max-slice-nums 2 {flags}"
    );
    let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
    let Command::Train { args, .. } = cli::parse(&words).expect("parses") else {
        panic!("a training line");
    };
    let env = Env::from_lookup(&|_| None).expect("an environment");
    resolve(&args, &env).expect("resolves").config
}

fn planned(config: &RunConfig) -> (RankMemory, MemoryCheck) {
    planned_run(&config.draft())
}

fn planned_run(config: &RunPlan) -> (RankMemory, MemoryCheck) {
    let (model, plan) = shapes(config).expect("a model");
    let plan = Arc::new(plan);
    let sample = vec![made_up_sample(config, None).expect("a sample")];
    let prompt = Prompt {
        input: SampleInput::from(&sample[0]),
        index: 0,
        max_new_tokens: 16,
    };
    let work = Work {
        train: &sample,
        held_out: Some(HeldOut {
            longest: &sample,
            prompts: vec![prompt],
        }),
        fixed: fixed(config, &*model),
    };
    let memory = dry_run(config, &*model, &plan, &work).expect("runs");
    let machine = Machine::described(None, UNBOUNDED, None);
    let fit = MemoryCheck::new(config, &memory, machine);
    (memory, fit)
}

#[test]
fn decoding_images_is_a_row_and_a_part_of_the_need() {
    const MIB: u64 = 1 << 20;
    let directory = tempfile::tempdir().expect("temp dir");
    write_config(directory.path());
    let of = |flags: &str, image_bytes: Option<u64>| {
        let run = config(directory.path(), flags).draft();
        let found = run.found().clone();
        planned_run(&run.with_found(Found {
            image_bytes,
            ..found
        }))
    };
    let row = |flags: &str, image_bytes| of(flags, image_bytes).0.of_part(&DECODING)[1];
    // The loader's threads, and the evaluation in the training thread.
    let four = "--nproc 2 --data-workers 4";
    assert_eq!(row(four, Some(10 * MIB)), 50 * MIB);
    assert_eq!(row("--nproc 2 --data-workers 0", Some(10 * MIB)), 20 * MIB);
    // Ranks share the machine's budget, and a larger image is decoded alone.
    assert_eq!(
        row("--nproc 2 --data-workers 64", Some(10 * MIB)),
        512 * MIB
    );
    assert_eq!(
        row("--nproc 8 --data-workers 64", Some(10 * MIB)),
        128 * MIB
    );
    assert_eq!(
        row("--nproc 8 --data-workers 4", Some(500 * MIB)),
        500 * MIB
    );
    let photo = row("--nproc 2 --data-workers 0", None);
    assert!((144 * MIB..180 * MIB).contains(&photo), "{photo}");
    let (without, with) = (of(four, Some(0)), of(four, Some(10 * MIB)));
    assert_eq!(with.1.need.host - without.1.need.host, 2 * 50 * MIB);
    assert!(super::text::table(&with.0).contains("image decoding         -     50.0M"));
    assert!(!super::text::table(&without.0).contains("image decoding"));
    // Chinese characters take two columns.
    let table = Lang::Zh.speak(|| super::text::table(&with.0));
    for line in table
        .lines()
        .filter(|line| line.contains(" 其") || line.contains("M"))
    {
        assert_eq!(columns(line), 8 + 14 + 30, "{table}");
    }
}

/// Flags for every stage × offload × precision × number of ranks.
fn grid() -> impl Iterator<Item = String> {
    let offloads = [
        "none",
        "optimizer=cpu",
        "cpu",
        "nvme:/d",
        "param=cpu,activation=cpu",
    ];
    let precisions = ["f32", "bf16", "pure-bf16"];
    (0..=3).flat_map(move |stage| {
        offloads.into_iter().flat_map(move |offload| {
            precisions.into_iter().flat_map(move |precision| {
                [1, 2].map(|ranks| {
                    format!(
                        "--zero {stage} --offload {offload} --precision {precision} --nproc {ranks}"
                    )
                })
            })
        })
    })
}

#[test]
fn a_hostfile_gives_the_ranks_of_all_machines_and_is_judged() {
    let directory = tempfile::tempdir().expect("temp dir");
    let hosts = directory.path().join("hosts");
    let plan = |text: &str| {
        std::fs::write(&hosts, text).expect("written");
        let line = format!("plan --model minicpm-v-2_6 --hostfile {}", hosts.display());
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        let Ok(Command::Plan { args, .. }) = cli::parse(&words) else {
            panic!("{line}")
        };
        let env = Env {
            cache_dir: directory.path().to_owned(),
            ..Env::read_alone()
        };
        let args = named_model(&args, &env)?;
        configuration(&args, &env, false, &Nvidia)
    };
    let config = plan("gpu01 slots=2\ngpu02 slots=3\n").expect("a plan");
    assert_eq!((config.world_size, config.ranks_here), (5, Some(3)));
    let failure = plan("gpu01 slots=2\ngpu02 slots=x\n").expect_err("a wrong file");
    assert_eq!(failure.code.status(), 2);
    assert!(failure.to_string().contains("slots"), "{failure}");
}

#[test]
fn a_frozen_base_never_costs_more_than_full_tuning() {
    let directory = tempfile::tempdir().expect("temp dir");
    write_config(directory.path());
    for cell in grid() {
        let of = |more: &str| {
            planned(&config(directory.path(), &format!("{cell} {more}")))
                .1
                .need
        };
        let full = of("");
        for frozen in [
            "--tune-vision false --tune-llm false",
            "--use-lora --lora-rank 4 --tune-vision false --tune-llm false --modules-to-save none",
            "--train resampler",
        ] {
            let need = of(frozen);
            assert!(
                need.device <= full.device,
                "{cell} {frozen}: {need:?} {full:?}"
            );
            // The window gathers the one copy on the disk, instead of a second copy.
            let window = match cell.contains("nvme") {
                true => need.window.saturating_sub(full.window),
                false => 0,
            };
            assert!(
                need.host <= full.host + window,
                "{cell} {frozen}: {need:?} {full:?}"
            );
            assert!(need.nvme <= full.nvme, "{cell} {frozen}: {need:?} {full:?}");
        }
    }
}

#[test]
fn every_tier_and_phase_is_counted_as_configured() {
    let directory = tempfile::tempdir().expect("temp dir");
    write_config(directory.path());
    for cell in grid() {
        let (memory, fit) = planned(&config(directory.path(), &cell));
        assert!(fit.fits(), "{cell}");
        let backward = &memory.phases[&Phase::Backward];
        let (device, host, nvme) = (&backward.device, &backward.host, &backward.nvme);
        let on_disk = cell.contains("nvme");
        assert_eq!(nvme.contains_key("optimizer"), on_disk, "{cell}");
        assert_eq!(memory.peak.nvme > 0, on_disk, "{cell}");
        let optimizer_on_host = cell.contains("optimizer=cpu") || cell.contains("offload cpu");
        assert_eq!(host.contains_key("optimizer"), optimizer_on_host, "{cell}");
        assert_eq!(
            host.contains_key("activations"),
            cell.contains("activation=cpu"),
            "{cell}"
        );
        assert!(
            device.contains_key("activations") && device.contains_key("workspace"),
            "{cell}"
        );
        assert!(host["process"] > 0 && host["loader"] > 0, "{cell}");
        assert!(memory.peak.resident >= memory.peak.host, "{cell}");
        assert_eq!(fit.need.window > 0, cell.ends_with("nproc 2"), "{cell}");
    }
}

#[test]
fn more_ranks_and_more_sharding_never_need_more_device_memory() {
    let directory = tempfile::tempdir().expect("temp dir");
    write_config(directory.path());
    let of = |flags: &str| planned(&config(directory.path(), flags)).0.peak.device;
    for precision in ["f32", "bf16"] {
        let line = |stage: u8| format!("--nproc 4 --precision {precision} --zero {stage}");
        let stages: Vec<u64> = [0, 1, 2].map(|stage| of(&line(stage))).to_vec();
        assert!(
            stages.windows(2).all(|pair| pair[1] <= pair[0]),
            "{stages:?}"
        );
        let kept = of(&format!("{} --checkpoint-activations none", line(2)));
        let every = of(&line(2));
        assert!(every < kept);
        let shared = of(&format!("{} --checkpoint-num-layers 3", line(2)));
        assert!(shared < every, "{shared} {every}");
    }
}

#[test]
fn limits_and_the_machine_decide_what_fits() {
    let directory = tempfile::tempdir().expect("temp dir");
    write_config(directory.path());
    let free = config(directory.path(), "--nproc 2 --offload nvme:/d");
    let (memory, fit) = planned(&free);
    let need = fit.need;
    let on = |config: &RunConfig, machine: Machine| MemoryCheck::new(config, &memory, machine);
    // A machine of this size reserves the least that any does.
    let host = need.host + (256 << 20);
    let enough = Machine::described(None, host, Some(need.nvme));
    assert!(on(&free, enough).fits());
    let less = [
        Machine::described(None, host - 1, Some(need.nvme)),
        Machine::described(None, host, Some(need.nvme - 1)),
    ];
    for machine in less {
        let fit = on(&free, machine);
        let failure = fit.check(&free, &memory).expect_err("too little");
        assert_eq!((fit.fits(), failure.code.status()), (false, 5), "{failure}");
    }
    let exact = Machine::described(None, need.host, Some(need.nvme));
    let whole = config(
        directory.path(),
        "--nproc 2 --offload nvme:/d --host-reserve 0",
    );
    assert!(on(&whole, exact).fits(), "no reserve");
    let without_window = Machine {
        window_free_bytes: Some(need.window - 1),
        ..enough
    };
    let failure = on(&free, without_window)
        .check(&free, &memory)
        .expect_err("too little");
    assert_eq!(failure.code.as_str(), "E15", "{failure}");
    for flag in ["--host-memory-limit", "--device-memory-limit"] {
        let limited = config(
            directory.path(),
            &format!("--nproc 2 --offload nvme:/d {flag} 1MiB"),
        );
        assert!(!on(&limited, enough).fits(), "{flag}");
    }
}

/// Plan of `launcher plan` for GPUs of `device` bytes.
fn planned_on(directory: &Path, device: u64, flags: &str) -> Settled {
    planned_by(
        directory,
        &format!("--device cuda --hw 2x{device} --ram 1TiB {flags}"),
    )
}

#[test]
fn proposals_compare_zero_with_pipeline_stages_and_quantization() {
    let directory = tempfile::tempdir().expect("temp dir");
    write_config(directory.path());
    let model = directory.path().join("config.json");
    let proposals = |hw: &str| {
        let line = format!(
            "plan --model {} --no-weights true --model-max-length 128 --max-slice-nums 2 --precision bf16 --lora-rank 4 --gradient-accumulation-steps 4 --propose true --hw {hw} --ram 1TiB --bus 12GB/s --tflops 0.001",
            model.display()
        );
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        let Command::Plan { args, .. } = cli::parse(&words).expect("parses") else {
            panic!("a line of `launcher plan`");
        };
        let env = Env::from_lookup(&|_| None).expect("an environment");
        let config = configuration(&args, &env, false, &Nvidia).expect("resolves");
        let planner = Planner::new(&config, &args, false).expect("a planner");
        let found = propose::candidates(&planner, &config, &args).expect("candidates");
        let text = propose::as_text(&config, &found, &args);
        let rows = propose::as_json(&found);
        (config.global_batch(), rows, (found, text))
    };
    let (samples, rows, (found, text)) = proposals("2x1TiB");
    let rows = rows.as_array().expect("a list");
    let flags = |row: &serde_json::Value| row["flags"].as_str().expect("flags").to_owned();
    let all: Vec<String> = rows.iter().map(flags).collect();
    // Four ZeRO stages undivided, one with stages, each with and without quantization.
    assert_eq!(all.len(), 10, "{all:?}");
    let stages = "--zero 0 --mp-size 2 --gradient-accumulation-steps 8";
    assert!(all.iter().any(|row| row == stages), "{all:?}");
    assert!(
        all.iter().any(|row| row.ends_with("--quantize nf4")),
        "{all:?}"
    );
    assert!(found.iter().all(|candidate| candidate.samples() == samples));
    let seconds = |row: &serde_json::Value| row["step_seconds"].as_f64().expect("seconds");
    assert!(
        rows.windows(2)
            .all(|pair| seconds(&pair[0]) <= seconds(&pair[1]))
    );
    // Pipeline stages transfer less than gathered weights, and wait for each other.
    let of = |flags: &str| {
        rows.iter()
            .find(|row| row["flags"] == flags)
            .expect("a row")
    };
    let gathered = of("--zero 3 --gradient-accumulation-steps 4");
    let divided = of(stages);
    let number = |row: &serde_json::Value, key: &str| row[key].as_f64().expect("a number");
    assert!(number(divided, "transfer_seconds") < number(gathered, "transfer_seconds"));
    assert!(number(divided, "compute_seconds") > number(gathered, "compute_seconds"));
    // An activation and its gradient cross for each of 8 micro-batches, and once while nothing is computed.
    let crossing = found.iter().find_map(propose::Candidate::boundary_bytes);
    let crossing = 2.0 * crossing.expect("a boundary") as f64 / 12e9;
    assert_eq!(number(divided, "transfer_seconds"), crossing * 8.0);
    let waited = number(divided, "step_seconds") - number(divided, "compute_seconds");
    assert!(
        (waited / crossing - 1.0).abs() < 1e-6,
        "{waited} {crossing}"
    );
    let lines: Vec<&str> = text.lines().collect();
    let head = "2 ranks · 8 samples a step · 12.0 GB/s between cards · 0.001 TFLOPS each";
    assert!(lines[0].contains(head), "{text}");
    for (line, row) in lines[2..].iter().zip(rows) {
        assert!(
            line.starts_with(&flags(row)) && line.ends_with("yes"),
            "{text}"
        );
    }
    let (_, rows, (_, text)) = proposals("2x1MiB");
    assert_eq!(text.lines().filter(|line| line.ends_with("no")).count(), 10);
    assert!(
        rows.as_array()
            .is_some_and(|rows| rows.iter().all(|row| row["fits"] == false))
    );
}

#[test]
fn a_stage_needs_less_memory_than_the_whole_model() {
    let directory = tempfile::tempdir().expect("temp dir");
    write_config(directory.path());
    let plan = |flags: &str| {
        let config = config(
            directory.path(),
            &format!("--zero 0 --precision f32 {flags}"),
        );
        planned(&config).0
    };
    let whole = plan("--nproc 1");
    let divided = plan("--nproc 2 --mp-size 2");
    assert!(whole.boundary_bytes.is_empty());
    assert_eq!(divided.boundary_bytes.len(), 1);
    // One f32 hidden state of 256 elements for each of 128 tokens.
    assert_eq!(divided.boundary_bytes[0], 128 * 256 * 4);
    assert_eq!(divided.resident_by_rank.len(), 2);
    let share = divided.peak.device as f64 / whole.peak.device as f64;
    assert!((0.5..0.9).contains(&share), "{share}");
}

/// Planner of `launcher plan` with these flags, and its run.
fn planner_by(model: &Path, flags: &str) -> Result<(Planner, RunConfig), Failure> {
    let line = format!(
        "plan --model {} --no-weights true --max-slice-nums 2 --precision bf16 {flags}",
        model.display()
    );
    let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
    let Command::Plan { args, .. } = cli::parse(&words).expect("parses") else {
        panic!("a line of `launcher plan`");
    };
    let env = Env::from_lookup(&|_| None).expect("an environment");
    let has_data = args.run.data.is_some();
    let config = configuration(&args, &env, has_data, &Nvidia).expect("resolves");
    Ok((Planner::new(&config, &args, has_data)?, config))
}

/// Plan of `launcher plan` with these flags.
fn planned_by(directory: &Path, flags: &str) -> Settled {
    let flags = format!("--model-max-length 128 {flags}");
    let planner = planner_by(&directory.join("config.json"), &flags);
    let (planner, config) = planner.expect("a planner");
    planner.plan(&config).expect("a plan")
}

/// `config.json` of a golden pack.
fn pack(name: &str) -> PathBuf {
    let packs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden");
    packs.join(name).join("config.json")
}

#[test]
fn a_plan_without_data_counts_a_video_of_the_given_frames() {
    for (name, flags, blocks) in [
        ("glm-4.1v-9b-thinking", "", [2, 4]),
        ("glm-4.6v-flash", "--max-frame-pixels 3136", [2, 4]),
        // A frame of one slice, and one of at most three.
        ("minicpm-v-4_5", "--max-frame-pixels 3136", [4, 8]),
        ("minicpm-v-4_5", "", [12, 24]),
    ] {
        let of = |frames: usize| {
            let flags = format!(
                "--model-max-length 512 --device cuda --hw 80GiB --ram 64GiB --use-lora --max-frames {frames} {flags}"
            );
            let (planner, config) = planner_by(&pack(name), &flags).expect("a planner");
            let sample = planner.sample(&config).expect("a sample");
            let planned = planner.plan(&config).expect("a plan");
            (sample.image_bounds.len(), planned.fit.need.device)
        };
        let (four, eight) = (of(4), of(8));
        assert_eq!([four.0, eight.0], blocks, "{name}");
        // GLM divides the tokens among the frames.
        assert!(name.starts_with("glm") || four.1 < eight.1, "{name}");
    }
    // Every frame is seen, although frames share features from 181 on.
    let flags = "--model-max-length 8192 --max-frame-pixels 3136 --max-frames 200";
    let (planner, config) = planner_by(&pack("minicpm-v-4_5"), flags).expect("a planner");
    let sample = planner.sample(&config).expect("a sample");
    assert_eq!((sample.slices.len(), sample.image_bounds.len()), (200, 100));
}

#[test]
fn a_video_that_cannot_be_planned_is_refused_with_the_reason() {
    for (name, flags, reason) in [
        ("cogvlm-chat-hf", "--max-frames 4", "no videos"),
        ("glm-ocr", "--max-frames 4", "no videos"),
        ("minicpm-v-2_6", "--max-frames 4", "no videos"),
        ("glm-4.6v-flash", "--max-frames 641", "2 to 640 frames"),
        ("glm-4.6v-flash", "--max-frames 1", "2 to 640 frames"),
        ("minicpm-v-4_5", "--max-frames 1081", "1 to 1080 frames"),
        (
            "glm-4.6v-flash",
            "--max-frame-pixels 9",
            "--max-frames is absent",
        ),
        (
            "glm-4.6v-flash",
            "--max-frames 640 --model-max-length 2048",
            "more than 2048 tokens",
        ),
    ] {
        let refused = planner_by(&pack(name), flags)
            .and_then(|(planner, config)| planner.plan(&config).map(|_| ()))
            .expect_err(name);
        assert_eq!(refused.code, ErrorCode::Usage);
        let cause = refused.cause.to_string();
        assert!(cause.contains(reason), "{name} {flags}: {cause}");
    }
}

#[test]
fn auto_takes_the_lowest_of_the_stages_with_equal_bits_that_fits() {
    let directory = tempfile::tempdir().expect("temp dir");
    write_config(directory.path());
    let adapters = "--use-lora --prefetch-weights off";
    let on = |device: u64, flags: &str| {
        planned_on(directory.path(), device, &format!("{adapters} {flags}"))
    };
    let needs = |stage: u8| on(UNBOUNDED, &format!("--zero {stage}")).fit.need.device;
    let (two, three) = (needs(2), needs(3));
    assert!(three < two, "{three} {two}");
    let chosen = |device: u64| {
        let planned = on(device, "");
        let line = stage_line(&planned.run, planned.lower_stage.as_ref());
        let Some(Event::Info { text, .. }) = line else {
            panic!("a line about the stage")
        };
        let fits = planned.fit.fits();
        (
            planned.run.zero,
            planned.run.zero_auto,
            fits,
            text.to_string(),
        )
    };
    let (stage, why, fits, line) = chosen(two);
    assert_eq!((stage, why, fits), (2, Some(ZeroAuto::LowestFits), true));
    assert!(line.contains("stage 2 · the lowest"), "{line}");
    let (stage, why, fits, line) = chosen(two - 1);
    assert_eq!((stage, why, fits), (3, Some(ZeroAuto::LowestExceeds), true));
    assert!(line.contains("stage 3 · stage 2 needs"), "{line}");
    let (stage, _, fits, _) = chosen(three - 1);
    assert_eq!((stage, fits), (3, false));
    let asked = on(UNBOUNDED, "--zero 2");
    assert!(stage_line(&asked.run, None).is_none());
}

#[test]
fn ranks_that_plan_one_by_one_take_the_stage_that_fits_most() {
    let directory = tempfile::tempdir().expect("temp dir");
    write_config(directory.path());
    let config = config(directory.path(), "--use-lora");
    let apart = settle_one_by_one(&config).expect("possible");
    assert_eq!(
        (apart.zero, apart.zero_auto),
        (3, Some(ZeroAuto::PlannedApart))
    );
}

#[test]
fn auto_prefetches_weights_where_the_plan_then_fits() {
    let directory = tempfile::tempdir().expect("temp dir");
    write_config(directory.path());
    let needs = |device, flags: &str| planned_on(directory.path(), device, flags).fit.need.device;
    for flags in [
        "--zero 3 --collectives shm",
        "--zero 3 --collectives ipc",
        "--zero 2 --offload cpu",
    ] {
        let of = |device, mode: &str| {
            planned_on(
                directory.path(),
                device,
                &format!("{flags} --prefetch-weights {mode}"),
            )
        };
        let [on, off] = ["on", "off"]
            .map(|mode| needs(UNBOUNDED, &format!("{flags} --prefetch-weights {mode}")));
        assert!(off < on, "{flags}: {off} {on}");
        for (device, want) in [
            (UNBOUNDED, PrefetchWeights::On),
            (on, PrefetchWeights::On),
            (on - 1, PrefetchWeights::Off),
        ] {
            let auto = of(device, "auto");
            assert_eq!(auto.run.prefetch_weights, want, "{flags}, {device}");
            assert_eq!(auto.plan.prefetch_weights(), want == PrefetchWeights::On);
            let need = if want == PrefetchWeights::On { on } else { off };
            assert_eq!(auto.fit.need.device, need, "{flags}, {device}");
            assert!(auto.fit.fits());
        }
        let tight = of(on - 1, "on");
        let failure = tight.fit.check(&tight.run, &tight.memory);
        let failure = failure.expect_err("more than there is");
        assert!(
            failure.cause.contains("of device memory, the limit is"),
            "{failure:?}"
        );
    }
    // Weights that stay on the GPU need no host-to-device copies.
    let stays = "--zero 2 --offload optimizer=cpu";
    let on = planned_on(
        directory.path(),
        UNBOUNDED,
        &format!("{stays} --prefetch-weights on"),
    );
    assert!(!on.plan.prefetch_weights());
    let off = needs(UNBOUNDED, &format!("{stays} --prefetch-weights off"));
    assert_eq!(on.fit.need.device, off);
    let auto = planned_on(directory.path(), UNBOUNDED, stays);
    assert_eq!(auto.run.prefetch_weights, PrefetchWeights::Off);
}

/// `auto` uses spare host memory less the reserve of one tenth. It resolves to `off` if that is too little for one
/// unit.
#[test]
fn auto_runs_the_optimizer_in_backward_within_spare_host_memory() {
    let directory = tempfile::tempdir().expect("temp dir");
    write_config(directory.path());
    let run = |flags: &str| planned_on(directory.path(), UNBOUNDED, flags);
    let of = |flags: &str| run(&format!("--zero 2 --offload cpu {flags}"));
    let on = |ram: u64, flags: &str| of(&format!("--host-memory-limit {ram} {flags}"));
    let early = |planned: &Settled| {
        let units = planned.plan.units().iter();
        units
            .filter(|u| planned.plan.updates_in_backward(u.id))
            .count()
    };
    for flags in ["", "--max-grad-norm 0", "--prefetch-weights off"] {
        let off = of(&format!("{flags} --optimizer-in-backward off"));
        let all = of(&format!("{flags} --optimizer-in-backward all"));
        let auto = of(flags);
        assert_eq!(
            auto.run.optimizer_in_backward,
            OptimizerInBackward::All,
            "{flags}"
        );
        assert_eq!(auto.fit.need, all.fit.need, "{flags}");
        assert!(early(&all) > 2 && early(&off) == 0, "{flags}");
        let (least, most) = (off.fit.need.host, all.fit.need.host);
        assert!(least < most, "{flags}");
        // Host memory whose reserve leaves exactly `need` bytes.
        let room = |need: u64| need.div_ceil(9) * 10;
        assert_eq!(early(&on(room(most), flags)), early(&all), "{flags}");
        let between = on(room(u64::midpoint(least, most)), flags);
        assert!((1..early(&all)).contains(&early(&between)), "{flags}");
        let OptimizerInBackward::Most(bound) = between.run.optimizer_in_backward else {
            panic!("{:?}", between.run.optimizer_in_backward)
        };
        assert_eq!(bound % (1 << 20), 0);
        assert_eq!(between.fit.host_overrun(), 0, "{flags}");
        // The same bound as an explicit flag gives the same plan.
        let by_hand = of(&format!("{flags} --optimizer-in-backward {bound}"));
        assert_eq!(by_hand.memory, between.memory, "{flags}");
        for tight in [room(least), least] {
            let none = on(tight, flags);
            assert_eq!(
                none.run.optimizer_in_backward,
                OptimizerInBackward::Off,
                "{flags}"
            );
            assert_eq!(none.memory, off.memory, "{flags}");
            assert!(none.fit.fits(), "{flags}");
        }
        assert!(!on(least - 1, flags).fit.fits());
    }
    // `auto` stays off if updates run on the GPU, weights or states are not in host memory, or gradients are only
    // final after the pass.
    for flags in [
        "--zero 2",
        "--zero 2 --offload param=cpu",
        "--zero 2 --offload optimizer=cpu",
        "--zero 2 --offload param=nvme:/d,optimizer=cpu",
        "--zero 2 --offload nvme:/d",
        "--zero 1 --offload cpu",
    ] {
        let auto = run(flags);
        assert_eq!(
            auto.run.optimizer_in_backward,
            OptimizerInBackward::Off,
            "{flags}"
        );
        assert_eq!(auto.spare, None, "{flags}");
    }
    let on_cpu = planned_by(
        directory.path(),
        "--hw 2x1TiB --ram 1TiB --device cpu --zero 2 --offload cpu",
    );
    assert_eq!(on_cpu.run.optimizer_in_backward, OptimizerInBackward::Off);
    // The search for a smaller run compares minimum needs.
    let asked = config(directory.path(), "--device cuda --zero 2 --offload cpu");
    assert_eq!(asked.optimizer_in_backward, OptimizerInBackward::Auto);
    assert_eq!(
        asked.without_spare().optimizer_in_backward,
        OptimizerInBackward::Off
    );
    let on_disk = config(directory.path(), "--offload nvme:/d --max-grad-norm 0");
    assert_eq!(
        on_disk.without_spare().optimizer_in_backward,
        OptimizerInBackward::Auto
    );
}

/// The window of ranks on GPUs has the planned size with every transport.
#[test]
fn the_shared_memory_of_gpu_ranks_is_as_planned() {
    let directory = tempfile::tempdir().expect("temp dir");
    write_config(directory.path());
    for collectives in ["shm", "ipc", "nccl"] {
        for (stage, save) in [(3, "steps"), (3, "no"), (2, "steps")] {
            let flags =
                format!("--zero {stage} --collectives {collectives} --save-strategy {save}");
            let planned = planned_on(directory.path(), UNBOUNDED, &flags);
            let taken = window_region(&planned.run, &planned.plan).expect("a window");
            assert_eq!(taken, planned.memory.peak.window, "{flags}");
        }
    }
}

/// A published name plans without a download; a family without fp16 is refused as in training.
#[test]
fn a_published_name_stands_for_its_configuration() {
    let cache = tempfile::tempdir().expect("temp dir");
    let home = cache.path().to_owned();
    let env = Env::from_lookup(&|name| (name == "XDG_CACHE_HOME").then(|| home.clone().into()));
    let env = env.expect("an environment");
    let of = |line: &str| {
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        let Command::Plan { args, .. } = cli::parse(&words).expect("parses") else {
            panic!("a line of plan");
        };
        let args = named_model(&args, &env).expect("a model");
        let config = configuration(&args, &env, false, &Nvidia).expect("a configuration");
        (config, args.no_weights)
    };
    let (config, no_weights) = of("plan --model openbmb/MiniCPM-V-2_6 --hw 24GiB --lora-rank 8");
    assert_eq!(
        (config.name().as_str(), no_weights),
        ("minicpm-v-2_6", Some(true))
    );
    assert_eq!(config.world_size, 1);
    shapes(&config.draft()).expect("a plan");
    let (config, _) = of("plan --model glm-4v-9b --precision fp16 --nproc 1");
    let refused = shapes(&config.draft()).expect_err("fp16").to_string();
    assert!(refused.contains("fp16"), "{refused}");
}

/// A plan that needs all but 1 % of the machine's memory leaves too little to the system.
#[test]
fn a_plan_leaves_memory_to_the_system() {
    let directory = tempfile::tempdir().expect("temp dir");
    write_config(directory.path());
    let need = planned(&config(directory.path(), "--nproc 2")).1.need.host;
    let on = |ram: u64, flags: &str| {
        let flags = format!("--hw 2x1TiB --ram {ram} {flags}");
        planned_by(directory.path(), &flags).fit
    };
    let with = on(need + need / 100, "--offload cpu");
    assert!(with.exceeds_host(), "{}", with.needs());
    let small = on(1 << 40, "").machine.host_reserve_bytes;
    assert_eq!(small, 8 << 30);
    assert_eq!(on(64 << 30, "").machine.host_reserve_bytes, (64 << 30) / 20);
    let asked = on(64 << 30, "--host-reserve 10GiB").machine;
    assert_eq!(asked.usable_host_bytes(), 54 << 30);
}

/// Line, table and refusal of one plan give one figure for each part.
#[test]
fn a_part_of_memory_has_one_figure_everywhere() {
    let directory = tempfile::tempdir().expect("temp dir");
    write_config(directory.path());
    for flags in [
        "--device cuda --collectives shm --zero 3",
        "--device cpu --zero 3 --offload cpu",
        "--device cuda --zero 2 --offload activation=cpu",
    ] {
        let tight = planned_by(
            directory.path(),
            &format!("--hw 2x1MiB --ram 64GiB {flags}"),
        );
        let event = plan_event(&tight.run, &tight.plan, &tight.memory, &tight.fit);
        let table = super::text::table(&tight.memory);
        let rows: Vec<Vec<&str>> = table
            .lines()
            .map(|line| line.split_whitespace().collect())
            .collect();
        let refusal = tight.fit.check(&tight.run, &tight.memory);
        let refusal = refusal.expect_err("too small").to_string();
        for part in &event.per_rank {
            if part.device_bytes + part.host_bytes == 0 {
                continue;
            }
            assert!(refusal.contains(&part.to_string()), "{part}: {refusal}");
            let of_part = |row: &&Vec<&str>| row[0] == part.name;
            let shown: Vec<&Vec<&str>> = rows.iter().filter(of_part).collect();
            let cell = |amount| match amount {
                0 => "-".to_owned(),
                amount => bytes(amount),
            };
            let want = [cell(part.device_bytes), cell(part.host_bytes)];
            assert_eq!(shown.len(), 1, "{part}: {table}");
            assert_eq!(shown[0][1..3], want, "{part}: {table}");
        }
        let gathered = event.per_rank.iter().find(|part| part.name == "gathered");
        let gathered = gathered.expect("a part");
        let kind = |phase: &crate::memory::PhaseBytes| phase.device.get("gathered").copied();
        let most = tight.memory.phases.values().filter_map(kind).max();
        assert_eq!(gathered.device_bytes, most.unwrap_or(0), "{flags}");
    }
}

/// A recipe that trains modules besides its adapters is told first that the adapters alone fit.
#[test]
fn adapters_alone_are_proposed_before_offload_and_pure_bf16() {
    let directory = tempfile::tempdir().expect("temp dir");
    write_config(directory.path());
    let modules = "--zero 3 --lora-rank 50 --modules-to-save embed_tokens,lm_head,resampler,vpm";
    let need = |flags: &str| {
        planned_on(directory.path(), UNBOUNDED, flags)
            .fit
            .need
            .device
    };
    let (with, without) = (need(modules), need("--zero 3 --lora-rank 50"));
    assert!(without < with);
    let line = format!(
        "plan --model {} --no-weights true --model-max-length 128 --max-slice-nums 2 --precision bf16 \
         --device cuda --hw 2x{} --ram 1TiB {modules}",
        directory.path().join("config.json").display(),
        u64::midpoint(with, without),
    );
    let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
    let Ok(Command::Plan { args, .. }) = cli::parse(&words) else {
        panic!("{line}");
    };
    let env = Env::from_lookup(&|_| None).expect("an environment");
    let config = configuration(&args, &env, false, &Nvidia).expect("resolves");
    let planner = Planner::new(&config, &args, false).expect("a planner");
    let found = super::nearest::nearest(&planner, &config).expect("a search");
    assert_eq!(found[0].flags, [("modules-to-save", "none".to_owned())]);
    assert!(found.iter().all(|proposal| proposal.planned.fit.fits()));
    assert_eq!(found[0].planned.fit.need.device, without);
}

/// A run of adapters that does not fit is also told that quantized frozen weights fit.
#[test]
fn quantized_weights_are_proposed_beside_the_nearest_layout() {
    let directory = tempfile::tempdir().expect("temp dir");
    write_config(directory.path());
    let flags = "--zero 3 --lora-rank 8";
    let plain = planned_on(directory.path(), UNBOUNDED, flags)
        .fit
        .need
        .device;
    let line = format!(
        "plan --model {} --no-weights true --model-max-length 128 --max-slice-nums 2 --precision bf16 \
         --device cuda --hw 2x{} --ram 1TiB {flags}",
        directory.path().join("config.json").display(),
        plain - 1,
    );
    let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
    let Ok(Command::Plan { args, .. }) = cli::parse(&words) else {
        panic!("{line}");
    };
    let env = Env::from_lookup(&|_| None).expect("an environment");
    let config = configuration(&args, &env, false, &Nvidia).expect("resolves");
    let planner = Planner::new(&config, &args, false).expect("a planner");
    let found = super::nearest::nearest(&planner, &config).expect("a search");
    let [layout, quantized] = &found[..] else {
        panic!("{found:?}");
    };
    assert!(!layout.quantizes(), "{layout:?}");
    let in_four_bits = [("quantize", "nf4"), ("quantize-double", "true")];
    assert_eq!(
        quantized.flags,
        in_four_bits.map(|(name, value)| (name, value.to_owned()))
    );
    assert!(quantized.planned.fit.need.device < plain);
    let event = quantized_event(quantized.planned.plan.spec());
    let Some(Event::Quantized(weights)) = event else {
        panic!("no quantized weights");
    };
    assert_eq!(weights.formats, ["nf4, double"]);
    assert!(weights.bytes * 3 < 2 * weights.params, "{weights:?}");
}

/// A sample longer than a tile that does not fit: the first proposal keeps the result and computes the feed-forward
/// layers in tiles.
#[test]
fn tiles_are_proposed_where_no_other_layout_fits() {
    let directory = tempfile::tempdir().expect("temp dir");
    write_config(directory.path());
    let config_file = directory.path().join("config.json");
    let text = std::fs::read_to_string(&config_file).expect("a file");
    let wide = text.replace("\"intermediate_size\":512", "\"intermediate_size\":8192");
    std::fs::write(&config_file, wide).expect("written");
    let flags = "--model-max-length 12000 --eval-strategy no --zero 3 --lora-rank 8 --ram 1TiB --device cuda \
                 --checkpoint-num-layers 6 --offload param=cpu,optimizer=cpu,activation=cpu";
    let by = |device: u64, more: &str| {
        planner_by(&config_file, &format!("{flags} --hw 1x{device} {more}")).expect("a planner")
    };
    let need = |more: &str| {
        let (planner, config) = by(UNBOUNDED, more);
        planner.plan(&config).expect("a plan").fit.need.device
    };
    let (whole, tiles) = (need(""), need("--mlp-tile-tokens 4096"));
    assert!(tiles < whole, "{tiles} {whole}");
    let (planner, config) = by(u64::midpoint(tiles, whole), "");
    let found = super::nearest::nearest(&planner, &config).expect("a search");
    let first = found.first().expect("a proposal");
    assert_eq!(first.flags, [("mlp-tile-tokens", "4096".to_owned())]);
    assert!(first.planned.fit.fits());
}

/// `--eval-strategy no` leaves the passes of an evaluation out of a plan without data.
#[test]
fn a_plan_without_data_counts_an_evaluation_unless_it_is_off() {
    let directory = tempfile::tempdir().expect("temp dir");
    write_config(directory.path());
    let phases = |flags: &str| {
        let planned = planned_by(directory.path(), flags);
        let phases: Vec<Phase> = planned.memory.phases.keys().copied().collect();
        phases
    };
    assert!(phases("").contains(&Phase::Eval));
    assert!(!phases("--eval-strategy no").contains(&Phase::Eval));
}

/// The search for proposals skips what a micro-batch alone exceeds, so its bytes are a lower bound of the need.
#[test]
fn a_micro_batch_needs_at_most_what_the_plan_needs() {
    let directory = tempfile::tempdir().expect("temp dir");
    write_config(directory.path());
    let config_file = directory.path().join("config.json");
    for flags in [
        "--zero 2 --eval-strategy no",
        "--zero 3 --lora-rank 8",
        "--zero 3 --offload cpu --optimizer-in-backward off",
        "--zero 3 --lora-rank 8 --offload param=cpu,optimizer=cpu,activation=cpu --mlp-tile-tokens 256",
        "--zero 0 --tokens-per-batch 4096 --prefetch-weights off",
    ] {
        let line =
            format!("--model-max-length 1024 --device cuda --hw 2x{UNBOUNDED} --ram 1TiB {flags}");
        let (planner, config) = planner_by(&config_file, &line).expect("a planner");
        let config = config.without_spare();
        let least = planner.least_device_bytes(&config).expect("a bound");
        let need = planner.plan(&config).expect("a plan").memory.peak.device;
        assert!(
            least <= need && 2 * least > need,
            "{flags}: {least} of {need}"
        );
    }
}

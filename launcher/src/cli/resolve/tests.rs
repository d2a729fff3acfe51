//! What flags become.

use crate::cli::resolve::*;
use crate::cli::{Command, parse};
use crate::config::{CONFIG_FILE, InitChoice, RunPlan, Scheduler, ZeroAuto};
use proptest::prelude::*;
use std::time::Duration;

fn env() -> Env {
    Env::from_lookup(&|name| (name == "HOME").then(|| "/home/u".into())).expect("reads")
}

fn try_config(line: &str) -> Result<Resolved, Failure> {
    let argv: Vec<String> = line.split_whitespace().map(str::to_string).collect();
    let Command::Train { args, .. } = parse(&argv)? else {
        panic!("train")
    };
    resolve(&args, &env())
}

fn config(line: &str) -> RunConfig {
    try_config(line).expect("resolves").config
}

fn refused(line: &str) -> Failure {
    let failure = try_config(line).expect_err(line);
    assert_eq!(failure.code.status(), 2, "{line}");
    failure
}

#[test]
fn defaults_of_a_model_are_those_of_its_scripts() {
    let config = config("--model m --data d.json");
    assert_eq!((config.zero, config.world_size, config.seed), (3, 2, 42));
    assert_eq!(config.precision, PrecisionChoice::Bf16);
    assert_eq!(config.init, InitChoice::Checkpoint);
    assert_eq!(config.length, Length::Epochs(3.0));
    assert_eq!(config.optimizer.learning_rate, 1e-6);
    assert_eq!(config.optimizer.scheduler, Scheduler::Cosine);
    assert_eq!(config.optimizer.warmup, Warmup::Ratio(0.01));
    assert_eq!(
        (config.optimizer.weight_decay, config.optimizer.adam_beta2),
        (0.1, 0.95)
    );
    assert_eq!(config.optimizer.max_grad_norm, Some(1.0));
    assert_eq!(
        (config.batch.model_max_length, config.batch.max_slice_nums),
        (2048, 9)
    );
    assert!(config.trainable.tune_llm && config.trainable.tune_vision);
    assert!(config.trainable.lora.is_none() && config.offload.is_none());
    assert_eq!(config.eval, Cadence::Never);
    assert!(config.output.is_absolute() && !config.output_is_explicit);
}

#[test]
fn weights_come_ahead_on_gpus_only() {
    let auto = config("--device cuda");
    assert!(auto.prefetch_weights());
    assert!(!config("--device cuda --prefetch-weights off").prefetch_weights());
    assert!(!config("--device cpu").prefetch_weights());
    let failure = refused("--device cpu --prefetch-weights on");
    assert!(failure.cause.contains("it needs GPUs"), "{failure:?}");
}

#[test]
fn updates_go_on_beside_the_next_pass_where_the_optimizer_is_in_host_memory() {
    let late = |line: &str| config(line).updates_in_forward();
    assert!(late("--device cuda --zero 3 --offload cpu"));
    assert!(late("--device cuda --zero 3 --offload optimizer=cpu"));
    assert!(!late("--device cuda --zero 3 --offload param=cpu"));
    assert!(!late(
        "--device cuda --zero 3 --offload cpu --optimizer-in-forward off"
    ));
    // Cores that compute have no time for updates, unless that is asked for.
    assert!(!late("--device cpu --zero 3 --offload cpu"));
    assert!(late(
        "--device cpu --zero 3 --offload cpu --optimizer-in-forward on"
    ));
    // Ranks of stages 1 and 2 share what they updated before a pass.
    for (line, can) in [
        ("--zero 2 --nproc 1", true),
        ("--zero 2 --nproc 2", false),
        ("--zero 0 --nproc 2 --precision bf16", true),
        ("--zero 0 --nproc 2 --precision pure-bf16", false),
        ("--zero 3 --nproc 2 --offload optimizer=nvme:/tmp", false),
        ("--zero 3 --device cuda --offload optimizer=cpu", true),
        ("--zero 3 --device cuda --offload param=cpu", false),
    ] {
        let device = if line.contains("--device") {
            ""
        } else {
            "--device cpu"
        };
        let on = format!("{device} {line} --optimizer-in-forward on");
        if can {
            assert!(late(&on), "{on}");
            continue;
        }
        let failure = refused(&on);
        let words = "--optimizer-in-forward on cannot be used";
        assert!(failure.to_string().contains(words), "{failure:?}");
    }
}

#[test]
fn the_demo_has_its_own_defaults_and_keeps_its_global_batch() {
    let demo = config("--zero 3 --offload cpu");
    assert!(demo.is_demo());
    assert_eq!(demo.precision, PrecisionChoice::F32);
    assert_eq!(
        demo.offload,
        Offload {
            optimizer: Tier::Cpu,
            param: Tier::Cpu,
            activation: Tier::None,
        }
    );
    assert_eq!((demo.world_size, demo.global_batch()), (2, 32));
    assert_eq!(config("--nproc 1").global_batch(), 32);
    assert_eq!(
        config("--nproc 4 --gradient-accumulation-steps 2")
            .batch
            .micro_batch,
        4
    );
    assert_eq!(demo.eval, Cadence::End);
}

#[test]
fn adapters_freeze_everything_else() {
    let config = config("--model m --data d --use-lora true --lora_r 8");
    assert!(!config.trainable.tune_llm && !config.trainable.tune_vision);
    assert_eq!(config.optimizer.learning_rate, 1e-4);
    let lora = config.trainable.lora.expect("adapters");
    assert_eq!((lora.lora_rank, lora.lora_alpha), (8, 16.0));
    let implied = try_config("--model m --data d --lora-rank 8").expect("resolves");
    assert!(implied.config.trainable.lora.is_some());
    let off = try_config("--model m --data d --lora-rank 8 --use-lora false").expect("resolves");
    assert!(off.config.trainable.lora.is_none());
    assert_eq!(off.notes[0].flag, "--lora-rank");
}

#[test]
fn contradictions_name_both_flags() {
    for (line, first, second) in [
        (
            "--bf16 true --precision f32",
            "--bf16 true",
            "--precision f32",
        ),
        (
            "--bf16 false --precision pure-bf16",
            "--bf16 false",
            "--precision pure-bf16",
        ),
        ("--model m", "--model", "--data"),
        ("--data d", "--data", "--model"),
        ("--eval-data d", "--eval-data", "--model"),
        ("--resume auto", "--resume auto", "--output"),
    ] {
        let title = refused(line).title;
        assert!(
            title.contains(first) && title.contains(second),
            "{line}: {title}"
        );
    }
}

#[test]
fn values_out_of_range_are_refused() {
    for line in [
        "--nproc 0",
        "--nproc 65",
        "--max-steps 0",
        "--num-train-epochs 0",
        "--num-train-epochs nan",
        "--per-device-train-batch-size 0",
        "--gradient-accumulation-steps 0",
        "--learning-rate 0",
        "--learning-rate -1",
        "--learning-rate inf",
        "--adam-beta1 1",
        "--adam-beta2 -0.1",
        "--warmup-ratio 1.5",
        "--weight-decay -1",
        "--max-grad-norm -1",
        "--save-steps 0",
        "--save-total-limit 0",
        "--lora-rank 0",
        "--model-max-length 0",
    ] {
        refused(line);
    }
}

#[test]
fn bf16_stands_for_a_precision() {
    assert_eq!(config("--bf16 true").precision, PrecisionChoice::Bf16);
    assert_eq!(config("--bf16 false").precision, PrecisionChoice::F32);
    assert_eq!(
        config("--bf16 --precision pure-bf16").precision,
        PrecisionChoice::PureBf16
    );
}

#[test]
fn length_and_warmup_follow_hugging_face() {
    assert_eq!(
        config("--max-steps -1 --num-train-epochs 2").length,
        Length::Epochs(2.0)
    );
    let both = try_config("--max-steps 5 --num-train-epochs 2").expect("resolves");
    assert_eq!(
        (both.config.length, both.notes.len()),
        (Length::Steps(5), 1)
    );
    let warmup = |line| config(line).optimizer.warmup;
    assert_eq!(
        warmup("--warmup-steps 0 --warmup-ratio 0.1"),
        Warmup::Ratio(0.1)
    );
    assert_eq!(
        warmup("--warmup-steps 7 --warmup-ratio 0.1"),
        Warmup::Steps(7)
    );
    assert_eq!(warmup("--warmup-steps 0.1"), Warmup::Ratio(0.1));
    assert_eq!(Warmup::Ratio(0.01).steps(150), 2);
    let epochs = config("--num-train-epochs 3 --per-device-train-batch-size 5");
    assert_eq!(epochs.total_steps(100), 30);
    assert_eq!(epochs.total_steps(101), 31);
    assert_eq!(epochs.total_steps(1), 1);
}

#[test]
fn strategies_decide_cadences() {
    let of = |line: &str| config(line).save;
    assert_eq!(of(""), Cadence::End);
    assert_eq!(of("--save_strategy no --save_steps 5"), Cadence::Never);
    assert_eq!(of("--save_strategy epoch"), Cadence::Epoch);
    assert_eq!(
        of("--save_strategy steps --save_steps 5"),
        Cadence::Steps(5)
    );
    assert_eq!(of("--save_steps 5"), Cadence::Steps(5));
    assert_eq!(of("--save_steps 0.25"), Cadence::Share(0.25));
    assert_eq!(of("--save_steps 1e3"), Cadence::Steps(1000));
    for wrong in ["--save_steps 1.5", "--eval_steps -1", "--logging_steps nan"] {
        assert!(try_config(wrong).is_err(), "{wrong}");
    }
    assert_eq!(
        config("--evaluation_strategy steps").eval,
        Cadence::Steps(500)
    );
    assert_eq!(
        config("--model m --data d --eval_steps 5").eval,
        Cadence::Never
    );
}

#[test]
fn models_are_saved_every_500_steps_and_two_checkpoints_are_kept() {
    let of = |line: &str| {
        let config = config(&format!("--model m --data d {line}"));
        (config.save, config.save_total_limit)
    };
    assert_eq!(of(""), (Cadence::Steps(500), Some(2)));
    assert_eq!(of("--save-total-limit 9"), (Cadence::Steps(500), Some(9)));
    assert_eq!(of("--save-steps 5"), (Cadence::Steps(5), None));
    assert_eq!(of("--save-strategy steps"), (Cadence::Steps(500), None));
    assert_eq!(config("").save_total_limit, None);
}

#[test]
fn adapters_leave_the_stage_open_unless_it_is_asked_for() {
    let of = |line: &str| {
        let config = config(line);
        (config.zero, config.zero_auto)
    };
    let open = Some(ZeroAuto::Open);
    let model = |flags: &str| of(&format!("--model m --data d {flags}"));
    assert_eq!(model(""), (3, None));
    assert_eq!(model("--zero auto"), (3, open));
    assert_eq!(model("--use-lora"), (3, open));
    assert_eq!(model("--lora-rank 8 --quantize nf4"), (3, open));
    assert_eq!(model("--use-lora --zero 1"), (1, None));
    assert_eq!(model("--preset minicpm-lora"), (2, None));
    assert_eq!(of("--use-lora"), (3, None));
    let by_forward = "--use-lora --optimizer-in-forward on --offload cpu";
    let needs = Some(ZeroAuto::OptimizerInForward);
    assert_eq!(model(by_forward), (3, needs));
    for (line, flag) in [("--zero auto", "auto"), ("--zero 2", "2")] {
        let flags = config(&format!("--model m --data d {line}")).to_flags();
        assert!(flags.contains(&("zero", flag.to_owned())), "{line}");
    }
    let chosen = RunConfig {
        zero: 2,
        zero_auto: Some(ZeroAuto::LowestFits),
        ..config("--model m --data d --use-lora")
    };
    // A resumed run chooses again.
    assert!(chosen.to_flags().contains(&("zero", "auto".to_owned())));
    let failure = try_config("--model m --data d --zero 4").expect_err("out of range");
    assert!(failure.to_string().contains("0 to 3"), "{failure}");
}

#[test]
fn booleans_of_other_trainers_resume_the_latest_checkpoint() {
    let of = |word: &str| config(&format!("--output o --resume_from_checkpoint {word}")).resume;
    assert_eq!(of("True"), Resume::Latest);
    assert_eq!(of("AUTO"), Resume::Latest);
    assert_eq!(of("False"), Resume::No);
}

#[test]
fn a_repeated_flag_takes_its_last_value() {
    let config = config("--zero 1 --lora-rank 4 --zero 2 --lora_rank 8 --zero=3");
    assert_eq!(config.zero, 3);
    assert_eq!(config.trainable.lora.expect("adapters").lora_rank, 8);
    refused("--model a --model_name_or_path b --data d");
}

#[test]
fn resuming_a_checkpoint_continues_its_run() {
    let config = config("--resume /runs/a/checkpoint-40");
    assert_eq!(config.output, PathBuf::from("/runs/a"));
    assert_eq!(config.resume, Resume::From("/runs/a/checkpoint-40".into()));
}

#[test]
fn run_directories_are_named_by_model_and_time() {
    assert_eq!(
        timestamp(UNIX_EPOCH + Duration::from_secs(951_827_696)),
        "20000229-123456"
    );
    assert_eq!(
        timestamp(UNIX_EPOCH + Duration::from_secs(1_767_225_599)),
        "20251231-235959"
    );
    for line in [
        "--model a/MyModel --data d",
        "--model a/MyModel --tokenizer b/Words --data d",
    ] {
        let path = config(line).output;
        assert!(path.to_string_lossy().contains("runs/MyModel-"), "{line}");
    }
}

#[test]
fn pipeline_stages_divide_the_ranks_and_sats_variables_set_them() {
    let stages = |line: &str, variables: &[(&str, &str)]| {
        let env = Env::from_lookup(&|name| {
            let found = variables.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| value.into())
        });
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        let Ok(Command::Train { args, .. }) = parse(&words) else {
            panic!("{line}");
        };
        let resolved = resolve(&args, &env.expect("reads"));
        resolved.map(|resolved| {
            let config = resolved.config;
            (config.world_size, config.mp_size, config.data_ranks())
        })
    };
    let of = |line, variables| stages(line, variables).expect("resolves");
    assert_eq!(of("--mp-size 3", &[]), (3, 3, 1));
    assert_eq!(of("--mp_size 2 --nproc 4", &[]), (4, 2, 2));
    assert_eq!(of("--model-parallel-size 2", &[]), (2, 2, 1));
    assert_eq!(of("--pipeline-parallel-size 2", &[]), (2, 2, 1));
    let sat = [("MP_SIZE", "2"), ("NUM_GPUS_PER_WORKER", "4")];
    assert_eq!(of("", &sat), (4, 2, 2));
    assert_eq!(of("--mp-size 1 --nproc 3", &sat), (3, 1, 3));
    assert!(stages("--mp-size 3 --nproc 4", &[]).is_err());
    for (line, variable) in [
        ("", ("MP_SIZE", "two")),
        ("--nproc 3", ("MP_SIZE", "2")),
        ("", ("NUM_GPUS_PER_WORKER", "0")),
    ] {
        let refused = stages(line, &[variable]).expect_err("a value of no use");
        let named = format!("{}={}", variable.0, variable.1);
        assert!(refused.title.to_string().contains(&named), "{refused}");
    }
    assert_eq!(of("--mp-size 2", &[("MP_SIZE", "two")]), (2, 2, 1));
    assert_eq!(of("", &[("MP_SIZE", "")]).1, 1);
    assert!(stages("--mp-size 2 --mp-split 3", &[]).is_err());
    assert!(stages("--mp-size 2 --optimizer-in-backward all", &[]).is_err());
    let mpirun =
        ["RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"].map(|part| format!("OMPI_COMM_WORLD_{part}"));
    let values = ["0", "2", "0", "2"];
    let mpirun: Vec<(&str, &str)> = mpirun.iter().map(String::as_str).zip(values).collect();
    assert_eq!(of("--output out", &mpirun), (2, 1, 2));
    assert_eq!(of("--output out --mp-size 2", &mpirun), (2, 2, 1));
}

#[test]
fn shard_groups_divide_the_ranks_of_a_stage_that_shards() {
    let groups = |nproc, zero: u8, ranks| {
        let args = Args {
            nproc: Some(nproc),
            zero: Some(ZeroChoice::Stage(zero)),
            shard_group: Some(ranks),
            ..Args::default()
        };
        let env = Env::from_lookup(&|_| None).expect("reads");
        resolve(&args, &env).map(|resolved| resolved.config.shard_group)
    };
    assert_eq!(groups(4, 3, 2).expect("resolves"), Some(2));
    assert_eq!(groups(4, 1, 1).expect("resolves"), Some(1));
    assert_eq!(groups(4, 0, 4).expect("resolves"), None);
    // The check of a resumed checkpoint, and a run that lost a rank, have other numbers of ranks.
    let mut config = try_config("--nproc 4 --shard-group 2")
        .expect("resolves")
        .config;
    for (nproc, expected) in [(4, Some(2)), (6, Some(2)), (3, None), (2, None), (1, None)] {
        config.world_size = nproc;
        assert_eq!(config.shard_groups(), expected, "{nproc}");
    }
    for (nproc, zero, ranks) in [(4, 3, 0), (4, 3, 3), (4, 3, 8), (4, 0, 2)] {
        assert!(
            groups(nproc, zero, ranks).is_err(),
            "{nproc} {zero} {ranks}"
        );
    }
}

#[test]
fn a_foreign_launcher_fixes_the_world() {
    let vars = |name: &str| {
        let value = match name {
            "RANK" | "LOCAL_RANK" => "1",
            "WORLD_SIZE" => "3",
            _ => return None,
        };
        Some(value.into())
    };
    let env = Env::from_lookup(&vars).expect("reads");
    let args = Args {
        output: Some("o".into()),
        ..Args::default()
    };
    assert_eq!(resolve(&args, &env).expect("resolves").config.world_size, 3);
    let args = Args {
        nproc: Some(2),
        ..args
    };
    assert!(resolve(&args, &env).is_err());
    assert!(
        resolve(&Args::default(), &env).is_err(),
        "the output folder must be named"
    );
}

fn again(config: &RunConfig) -> RunConfig {
    let argv: Vec<String> = config
        .to_flags()
        .into_iter()
        .map(|(flag, value)| format!("--{flag}={value}"))
        .collect();
    let Command::Train { args, .. } = parse(&argv).expect("parses") else {
        panic!("train")
    };
    let mut resolved = resolve(&args, &env()).expect("resolves").config;
    resolved.output_is_explicit = config.output_is_explicit;
    resolved
}

proptest! {
    #[test]
    fn a_saved_configuration_resolves_to_itself(
        lr in 1e-9f64..1.0,
        epochs in prop::option::of(0.01f64..100.0),
        nproc in 1usize..9,
        which in 0usize..10,
    ) {
        let mut line = format!("--learning-rate {lr} --nproc {nproc} ");
        line += [
            "",
            "--model m --data d.json --use-lora --save-steps 7 --resume /r/checkpoint-3",
            "--model m --data d --eval-data e --eval-strategy epoch --host-memory-limit 64G",
            "--max-grad-norm 0 --save-strategy no --warmup-ratio 0.3 --report-to tensorboard",
            "--model m --data d --tune-vision false --offload optimizer=cpu --zero 1",
            "--output o --resume auto --logging-strategy epoch --precision pure-bf16 --save-steps 0.1",
            "--lr-scheduler-type warmup_cosine_lr --lr-scheduler-kwargs warmup_type=linear,total_num_steps=9",
            "--device cuda --offload activation=cpu",
            "--lr-scheduler-type cosine_with_min_lr --lr-scheduler-kwargs min_lr=1e-10,num_cycles=0.7",
            "--lr-scheduler-type inverse_sqrt --lr-scheduler-kwargs timescale=9",
        ][which];
        if let Some(epochs) = epochs {
            line += &format!(" --num-train-epochs {epochs}");
        }
        let config = config(&line);
        prop_assert_eq!(&again(&config), &config);
        let directory = tempfile::tempdir().expect("temp dir");
        let path = directory.path().join(CONFIG_FILE);
        config.draft().save_to(&path).expect("saved");
        prop_assert_eq!(RunPlan::load_from(&path).expect("loaded"), config.draft());
    }
}

#[test]
fn a_schedule_takes_its_own_arguments() {
    let kind = |line: &str| {
        let config = try_config(line).expect(line).config;
        config
            .optimizer
            .scheduler_kwargs
            .kind(config.optimizer.scheduler)
    };
    let typed = |name: &str| format!("--lr-scheduler-type {name} --lr-scheduler-kwargs");
    let cosine = kind(&format!("{} min_lr_rate=0.1", typed("cosine_with_min_lr")));
    let options = optim::CurveOptions {
        min_lr_rate: Some(0.1),
        ..optim::CurveOptions::default()
    };
    assert_eq!(cosine, optim::ScheduleKind::CosineWithMinLr(options));
    let plain = optim::ScheduleKind::InverseSqrt(optim::CurveOptions::default());
    assert_eq!(kind("--lr-scheduler-type inverse_sqrt"), plain);
    kind(&format!("{} {{}}", typed("linear")));
    for (line, why) in [
        (format!("{} num_cycles=2", typed("linear")), "it takes none"),
        (
            format!("{} power=2", typed("cosine_with_restarts")),
            "it takes num_cycles",
        ),
        (
            format!("{} min_lr=1e-7", typed("warmup_lr")),
            "warmup_min_lr",
        ),
        (
            format!("{} cos_min_ratio=0.5", typed("warmup_lr")),
            "warmup_min_lr",
        ),
        (
            format!("{} warmup_min_lr=1e-5", typed("warmup_cosine_lr")),
            "cos_min_ratio",
        ),
        (
            format!(
                "{} min_lr=1e-7,min_lr_rate=0.1",
                typed("cosine_with_min_lr")
            ),
            "min_lr_rate",
        ),
        (
            "--lr-scheduler-type cosine_with_min_lr".to_owned(),
            "min_lr_rate",
        ),
        (
            "--lr-scheduler-type polynomial --learning-rate 1e-8".to_owned(),
            "1e-8",
        ),
    ] {
        let failure = try_config(&line).expect_err(&line);
        assert_eq!(failure.code.status(), 2);
        assert!(failure.to_string().contains(why), "{line}: {failure}");
    }
}

#[test]
fn a_damaged_configuration_names_the_place() {
    let directory = tempfile::tempdir().expect("temp dir");
    let path = directory.path().join(CONFIG_FILE);
    let text = serde_json::to_string(&config("").draft()).expect("serialises");
    std::fs::write(&path, text.replace("\"micro_batch\":", "\"micro_bach\":")).expect("written");
    let failure = RunPlan::load_from(&path).expect_err("refused");
    assert_eq!(failure.code.status(), 2);
    assert!(failure.evidence[0].contains("batch"), "{failure}");
}

#[test]
fn names_of_data_sets_become_entries_of_dataset_info() {
    let source = |words: &str| {
        let resolved = try_config(&format!("--model m --output o {words}")).expect("resolves");
        let here = std::env::current_dir().expect("a directory");
        let data = resolved.config.data_file().display().to_string();
        let data = data.replace(&format!("{}/", here.display()), "");
        (data, resolved.notes.len())
    };
    let entries = "d/dataset_info.json#a,d/dataset_info.json#b".to_owned();
    assert_eq!(source("--dataset a,b --dataset_dir d"), (entries, 0));
    let default = "data/dataset_info.json#a".to_owned();
    assert_eq!(source("--dataset a"), (default, 0));
    let both = "--data x.json,y.json --dataset a";
    assert_eq!(source(both), ("x.json,y.json".to_owned(), 1));
}

#[test]
fn sizes_and_numbers_out_of_range_are_refused() {
    for line in [
        "--per-device-train-batch-size 9223372036854775807 --gradient-accumulation-steps 4",
        "--gradient-accumulation-steps 18446744073709551615",
        "--global-batch-size 18446744073709551615",
        "--tokens-per-batch 18446744073709551615",
        "--lora-rank 99999999999",
        "--weight-decay 1e300",
        "--learning-rate 1e300",
        "--adam-epsilon 1e-60",
        "--max-grad-norm -1",
    ] {
        let failure = try_config(&format!("--model m --data d {line}")).expect_err(line);
        assert!(failure.title.contains("out of range"), "{failure}");
    }
}

#[test]
fn evaluation_by_steps_takes_the_number_of_logging_as_hugging_face() {
    let eval = |line: &str| config(&format!("--model m --data d --eval-data e {line}")).eval;
    let every = |line: &str| eval(&format!("--eval-strategy steps {line}"));
    assert_eq!(every("--logging-steps 2"), Cadence::Steps(2));
    assert_eq!(every("--logging-steps 2 --eval-steps 3"), Cadence::Steps(3));
    assert_eq!(every(""), Cadence::Steps(500));
    assert_eq!(eval("--logging-steps 2"), Cadence::End);
}

#[test]
fn a_tilde_is_the_home_directory() {
    let home = std::env::home_dir().expect("a home");
    let config = config("--model ~/m --data d --output ~/runs/a");
    assert_eq!(config.output, home.join("runs/a"));
    assert_eq!(config.model_dir(), home.join("m"));
}

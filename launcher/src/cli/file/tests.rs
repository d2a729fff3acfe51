//! Recipes of other trainers, as files and as command lines.

use super::*;
use crate::cli::trainers::{Effect, Meaning};
use crate::cli::{Args, Command, parse};
use crate::config::ZeroChoice;

/// Arguments of a line, with the flags of its files and the defaults of its trainer.
fn read(line: &str) -> (Args, Loaded) {
    let (args, loaded, _) = read_with_notes(line);
    (args, loaded)
}

pub(super) fn read_with_notes(line: &str) -> (Args, Loaded, Vec<Note>) {
    let argv: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
    let Command::Train { args, typed, notes } = parse(&argv).expect(line) else {
        panic!("train");
    };
    match load(&typed).expect(line) {
        Some(loaded) => (train_args(&loaded.words).expect(line), loaded, notes),
        None => (*args, Loaded::default(), notes),
    }
}

/// A file of flags with this text, and its directory, which must live as long.
pub(super) fn write_file(text: &str) -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().expect("temp dir");
    let path = directory.path().join("run.yaml");
    std::fs::write(&path, text).expect("written");
    (directory, path)
}

fn with_file(text: &str, line: &str) -> (Args, Loaded) {
    let (_directory, path) = write_file(text);
    read(&format!("--config {} {line}", path.display()))
}

#[test]
fn absent_keys_of_a_file_take_the_defaults_of_its_trainer() {
    let file =
        "stage: sft\nfinetuning_type: lora\nlora_rank: 8\nlearning_rate: 1.0e-4\nbf16: true\n";
    let (args, loaded) = with_file(file, "--data d --output o");
    assert_eq!(args.lora_alpha, Some(16.0));
    assert_eq!(
        (args.tune_vision, args.modules_to_save.as_deref()),
        (Some(false), Some("none"))
    );
    assert_eq!(
        (args.weight_decay, args.adam_beta2),
        (Some(0.0), Some(0.999))
    );
    assert_eq!((args.learning_rate, args.precision), (Some(1e-4), None));
    let table = Text::join(&loaded.defaults, "\n");
    assert!(table.contains("a recipe of LLaMA-Factory"), "{table}");
    assert!(
        table.contains("lora-alpha") && !table.contains("learning-rate"),
        "{table}"
    );

    let (args, loaded) = with_file(file, "--data d --output o --defaults ours");
    assert_eq!((args.lora_alpha, args.weight_decay), (None, None));
    assert!(loaded.defaults.is_empty());
    let (args, _) = with_file(file, "--lora_alpha 3");
    assert_eq!(args.lora_alpha, Some(3.0));

    let glm = "training_args:\n  learning_rate: 5e-4\npeft_config:\n  peft_type: LORA\n  r: 8\n";
    let (args, _) = with_file(glm, "");
    assert_eq!(
        (args.tune_vision, args.modules_to_save.as_deref()),
        (Some(false), Some("none"))
    );
    assert_eq!((args.weight_decay, args.lora_alpha), (Some(0.0), Some(8.0)));
    let (args, _) = with_file("max_input_length: 512\nfreezeV: true\n", "");
    assert_eq!(
        (args.freeze.as_deref(), args.use_lora),
        (Some("vision"), None)
    );
}

#[test]
fn files_of_this_program_take_its_defaults() {
    let (args, loaded) = with_file("lora-rank: 8\nseed: 3\n", "--model m --data d");
    assert_eq!((args.lora_alpha, args.weight_decay), (None, None));
    assert!(loaded.defaults.is_empty());
    let argv = ["--model=m", "--defaults=theirs"].map(str::to_owned);
    let failure = load(&argv).expect_err("no recipe");
    assert!(
        failure.to_string().contains("--defaults llama-factory"),
        "{failure}"
    );
    let (args, _) = with_file("lora-rank: 8\n", "--defaults llama-factory");
    assert_eq!(args.lora_alpha, Some(16.0));
}

#[test]
fn a_line_of_openbmb_has_the_dropout_of_its_script() {
    let line = "--model_name_or_path m --data_path d --use_lora true --max_steps 1";
    let (args, loaded) = read(line);
    assert_eq!(
        (args.lora_dropout, args.lora_alpha),
        (Some(0.05), Some(64.0))
    );
    assert_eq!(
        args.modules_to_save.as_deref(),
        Some("embed_tokens,resampler,vpm")
    );
    assert_eq!(args.num_train_epochs, None);
    assert!(loaded.defaults[0].contains("OpenBMB"), "{loaded:?}");
    let (args, _) = read(&format!("{line} --defaults ours"));
    assert_eq!(args.lora_dropout, None);
    // A preset is complete.
    let (args, loaded) = read(&format!("{line} --preset minicpm-lora"));
    assert_eq!((args.learning_rate, loaded.defaults.len()), (Some(1e-6), 0));
}

#[test]
fn a_line_of_ms_swift_is_read_with_its_defaults() {
    let (args, _) = read(
        "--model m --dataset d.jsonl --train_type lora --target_modules q_proj v_proj --torch_dtype float16 --freeze_vit true --freeze_aligner true --deepspeed zero2",
    );
    assert_eq!(
        (args.data, args.model),
        (Some("d.jsonl".into()), Some("m".into()))
    );
    assert_eq!(args.lora_target_modules.as_deref(), Some("q_proj,v_proj"));
    assert_eq!(
        (args.lora_alpha, args.lora_dropout),
        (Some(32.0), Some(0.05))
    );
    assert_eq!(
        (args.global_batch, args.zero),
        (Some(16), Some(ZeroChoice::Stage(2)))
    );
    assert_eq!(args.precision, Some(crate::config::PrecisionChoice::Fp16));
}

#[test]
fn a_line_of_swiss_army_transformer_is_read_with_its_scripts_choices() {
    let (args, _) = read(
        "--experiment-name x --model-parallel-size 1 --mode finetune --train-iters 800 --resume-dataloader --from_pretrained cogvlm-base-490 --max_length 1288 --lora_rank 10 --use_lora --local_tokenizer t --version base --train-data a --valid-data b --distributed-backend nccl --lr-decay-style cosine --warmup .02 --checkpoint-activations --vit_checkpoint_activations --save-interval 200 --eval-interval 200 --save ./checkpoints --eval-iters 10 --eval-batch-size 1 --split 1. --lr 1e-5 --skip-init --seed 2023",
    );
    assert_eq!(
        (args.max_steps, args.learning_rate),
        (Some(800), Some(1e-5))
    );
    assert_eq!(
        (args.lora_alpha, args.lora_per_projection),
        (Some(1.0), Some(true))
    );
    assert_eq!(
        (args.output, args.seed),
        (Some("./checkpoints".into()), Some(2023))
    );
    assert!(args.train.is_some_and(|parts| parts.contains("mlp")));
}

#[test]
fn keys_of_trainers_mean_the_same_on_the_line_as_in_a_file() {
    for (words, key) in [
        ("--freeze_vision_tower True", "freeze_vision_tower: true"),
        (
            "--lora_target_modules all-linear",
            "lora_target_modules: all-linear",
        ),
        ("--save_steps 0.5", "save_steps: 0.5"),
        ("--use_liger_kernel True", "use_liger_kernel: true"),
        ("--scale_resolution 448", "scale_resolution: 448"),
        ("--report_to wandb", "report_to: wandb"),
        ("--freezeV true", "freezeV: true"),
        ("--cutoff_len 64", "cutoff_len: 64"),
    ] {
        let own = "--model m --data d --output o --defaults ours";
        let (of_line, _) = read(&format!("{own} {words}"));
        let (mut of_file, _) = with_file(&format!("{key}\n"), own);
        of_file.config = None;
        assert_eq!(of_line, of_file, "{words}");
    }
    let (args, loaded, notes) =
        read_with_notes("--model m --data d --report_to wandb --use_liger_kernel --output o");
    assert_eq!((args.report_to, loaded.defaults.len()), (None, 0));
    assert_eq!(notes.len(), 2, "{notes:?}");
}

/// Flags that a line of `trainer` gives, with the notes on those without effect.
fn pasted(line: &str) -> (Args, Vec<Note>) {
    let (args, _, notes) = read_with_notes(line);
    (args, notes)
}

#[test]
fn no_key_of_another_trainer_is_unknown_on_the_line() {
    let known: Vec<String> = <Args as clap::CommandFactory>::command()
        .get_arguments()
        .filter_map(|arg| arg.get_long().map(str::to_owned))
        .collect();
    let mut count = 0;
    for (trainer, keys) in trainers::TABLES {
        for (names, meaning) in keys {
            for name in names.split(' ') {
                count += 1;
                let argv: Vec<String> = ["--model=m", "--data=d", "--output=o", "--defaults=ours"]
                    .into_iter()
                    .map(str::to_owned)
                    .chain([format!("--{name}"), "odd".to_owned()])
                    .collect();
                if let Err(failure) = parse(&argv) {
                    assert!(
                        failure.title.contains(name) || failure.title.contains("odd"),
                        "{trainer}: {failure}"
                    );
                    assert!(
                        !failure.title.contains("unknown flag"),
                        "{trainer}: {failure}"
                    );
                    crate::lang::assert_chinese(&failure);
                }
                for value in ["odd", "true", "false", "none", "0", "1"] {
                    let Effect::Flags(flags) = meaning.effect(value) else {
                        continue;
                    };
                    for (flag, _) in flags {
                        assert!(known.iter().any(|known| known == flag), "{name}: --{flag}");
                    }
                }
            }
        }
    }
    assert!(count > 250, "{count} keys");
}

#[test]
fn values_of_words_are_values_of_their_flags() {
    for (trainer, keys) in trainers::TABLES {
        for (names, meaning) in keys {
            let (Meaning::Words(words) | Meaning::WordsOr(words, _)) = meaning else {
                continue;
            };
            for (word, flags) in *words {
                let line = flags
                    .iter()
                    .map(|(flag, value)| format!("--{flag}={value}"));
                let read = train_args(&line.collect::<Vec<_>>());
                assert!(read.is_ok(), "{trainer} {names} {word}: {read:?}");
            }
        }
    }
}

#[test]
fn lines_of_published_scripts_paste_in() {
    let (args, _) = pasted(
        "--experiment-name finetune-cogagent-chat --model-parallel-size 1 --mode finetune --train-iters 800 --resume-dataloader --from_pretrained cogagent-chat --max_length 319 --lora_rank 10 --use_lora --local_tokenizer lmsys/vicuna-7b-v1.5 --version base --train-data ./archive_split/train --valid-data ./archive_split/valid --distributed-backend nccl --lr-decay-style cosine --warmup .02 --checkpoint-activations --vit_checkpoint_activations --save-interval 200 --eval-interval 200 --save ./checkpoints --eval-iters 10 --eval-batch-size 1 --split 1. --deepspeed --skip-init --seed 2023 --ignore_pad_token_for_loss --strategy BaseStrategy",
    );
    assert_eq!(
        (args.max_steps, args.model_max_length),
        (Some(800), Some(319))
    );
    assert_eq!(
        args.checkpoint_activations,
        Some(crate::config::Recompute::ALL)
    );
    let (args, _) = pasted(
        "--lr 1e-5 --num_epochs 3 --batch_size 2 --torch_type torch.bfloat16 --save_step 100 --train_dataset_rate 1.0 --lora_rank 8 --lora_alpha 32 --lora_target vision_expert_query_key_value --lora_dropout 0.1 --warmup_steps 0 --max_input_len 1024 --max_output_len 1024 --model_path m --dataset_path d --save_path o",
    );
    assert_eq!(
        (args.learning_rate, args.num_train_epochs),
        (Some(1e-5), Some(3.0))
    );
    assert_eq!(
        (args.adam_beta2, args.weight_decay),
        (Some(0.999), Some(0.01))
    );
    let (args, _) = pasted(
        "--dataset_dir d --train_rate 1 --lr 2e-4 --num_epochs 20 --per_device_train_batch_size 4 --gradient_accumulation_steps 4 --model_dir m --tokenizer_dir t --save_dir o --save_freq 1 --lora_rank 64 --lora_dropout 0.1 --lora_alpha 32 --max_length 350",
    );
    assert_eq!((args.data, args.dataset_dir), (Some("d".into()), None));
    let (args, notes) = pasted(
        "--lora_enable True --vision_lora False --lora_namespan_exclude ['lm_head','embed_tokens'] --lora_rank 64 --lora_alpha 128 --lora_dropout 0.05 --num_lora_modules -1 --model_id m --data_path d --image_folder i --freeze_vision_tower True --freeze_llm True --freeze_merger False --bf16 True --fp16 False --disable_flash_attn2 False --output_dir o --num_train_epochs 1 --per_device_train_batch_size 1 --gradient_accumulation_steps 1 --learning_rate 2e-4 --weight_decay 0. --warmup_ratio 0.03 --lr_scheduler_type cosine --logging_steps 1 --tf32 False --gradient_checkpointing True --report_to tensorboard --lazy_preprocess True --save_strategy steps --save_steps 1 --save_total_limit 10 --dataloader_num_workers 4",
    );
    assert_eq!(
        (args.train.as_deref(), args.use_lora),
        (Some("projector"), Some(true))
    );
    assert_eq!(
        (args.tune_llm, args.image_dir),
        (Some(false), Some("i".into()))
    );
    assert!(
        notes.iter().any(|note| note.flag == "--lazy_preprocess"),
        "{notes:?}"
    );
    let (args, _) = pasted(
        "--model m --train_type lora --dataset d --torch_dtype bfloat16 --num_train_epochs 1 --per_device_train_batch_size 1 --learning_rate 1e-4 --lora_rank 8 --lora_alpha 32 --target_modules all-linear --freeze_vit true --gradient_accumulation_steps 16 --eval_steps 50 --save_steps 50 --save_total_limit 2 --logging_steps 5 --max_length 2048 --output_dir o --warmup_ratio 0.05 --dataloader_num_workers 4 --model_author swift --model_name x --adapters a --check_model false --use_chat_template true",
    );
    assert_eq!(args.adapter, Some("a".into()));
    let (args, _) = pasted(
        "--stage sft --finetuning_type lora --model_name_or_path m --adapter_name_or_path a --create_new_adapter false --dataset d --pure_bf16 true --freeze_vision_tower true --cutoff_len 2048 --output_dir o --data x",
    );
    assert_eq!(args.adapter, Some("a".into()));
}

#[test]
fn flags_of_trainers_without_a_twin_are_refused_with_what_replaces_them() {
    let sat = "--from_pretrained m --train-data d --train-iters 3";
    let (args, _) = pasted(&format!("{sat} --batch-size 4 --use_qlora"));
    assert_eq!((args.load_in_4bit, args.use_lora), (Some(true), Some(true)));
    assert_eq!(args.per_device_train_batch_size, Some(4));
    let (args, _) = pasted(&format!("{sat} --use_qlora false"));
    assert_eq!((args.load_in_4bit, args.use_lora), (None, Some(false)));
    let (args, _) = with_file("from_pretrained: m\ntrain_iters: 3\nuse_qlora: true\n", "");
    assert_eq!((args.load_in_4bit, args.use_lora), (Some(true), Some(true)));
    assert_eq!(args.lora_rank, Some(10), "the trainer's own");
    let (args, _) = with_file("from_pretrained: m\nuse_qlora: false\n", "");
    assert_eq!((args.load_in_4bit, args.use_lora), (None, Some(false)));
    let (args, _) = with_file("from_pretrained: m\nload_in_4bit: true\n", "");
    assert_eq!(args.use_lora, Some(false));
    let (args, _) = with_file("use_qlora: true\n", "--model m --use_lora false");
    assert_eq!(args.use_lora, Some(false), "the line decides");
    // Python's words, and the rate under its short name.
    let (args, _) =
        pasted("--model m --data d --lr 2e-5 --bits 4 --lora_enable True --double_quant True");
    assert_eq!((args.learning_rate, args.lr), (Some(2e-5), None));
    assert_eq!(args.quantize_double, Some(true));
    let (_, notes) = pasted(
        "--stage sft --finetuning_type lora --model_name_or_path m --dataset d --output_dir o --data x --pref_beta 0.1 --galore_rank 8 --do_sample true",
    );
    for flag in ["--pref_beta", "--galore_rank", "--do_sample"] {
        assert!(
            notes.iter().any(|note| note.flag == flag),
            "{flag}: {notes:?}"
        );
    }
    let swift = "--train_type lora --model m --dataset d";
    let (_, notes) = pasted(&format!("{swift} --lora_dtype none --norm_bbox none"));
    assert_eq!(notes.len(), 2, "{notes:?}");
    for (line, flag, instead) in [
        (sat, "--layer_range 0-16", "--lora-layers 0..16"),
        (sat, "--use_ptlora", "--ptuning-tokens N"),
        (swift, "--lora_dtype bfloat16", "--precision"),
        (swift, "--norm_bbox norm1000", "as they are"),
        (
            swift,
            "--target_parameters mlp.experts",
            "--lora-target-modules",
        ),
        (swift, "--resampler_lr 1e-5", "--lr PART=X"),
    ] {
        let line = format!("{line} {flag}");
        let argv: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        let failure = match parse(&argv) {
            Ok(Command::Train { typed, .. }) => load(&typed).map(drop),
            Ok(_) => panic!("train"),
            Err(failure) => Err(failure),
        };
        let failure = failure.expect_err(flag);
        let said = format!("{} {}", failure.title, failure.cause);
        assert!(said.contains(instead), "{flag}: {said}");
    }
}

#[test]
fn a_key_of_swiss_army_transformer_acts_on_any_model() {
    let model = tempfile::tempdir().expect("temp dir");
    let config = r#"{"model_type": "minicpmv", "version": 2.6}"#;
    std::fs::write(model.path().join("config.json"), config).expect("written");
    let line = format!(
        "--model {} --data d --train-iters 3",
        model.path().display()
    );
    let (args, _) = read(&line);
    assert_eq!((args.max_steps, args.train), (Some(3), None));
    let (args, _) = read("--model m --data d --version base");
    assert_eq!(args.template, Some(crate::config::TemplateChoice::SatBase));
    let (args, _) = read("--model cogvlm --data d --train-iters 3");
    assert!(args.train.is_some());
}

#[test]
fn a_number_of_samples_cuts_training_data_only() {
    let line = "--stage sft --model_name_or_path m --output_dir o --max_samples 4 --dataset a";
    let named = |note: &Note| note.flag == "max_samples";
    let (args, loaded) = read(&format!("{line} --eval_dataset b"));
    assert_eq!(args.limit, Some(4));
    assert!(loaded.notes.iter().any(named), "{loaded:?}");
    assert!(!read(line).1.notes.iter().any(named));
}

#[test]
fn a_file_of_accelerate_is_named_as_one() {
    let text =
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nmixed_precision: bf16\n";
    let (_directory, path) = write_file(text);
    let failure = load(&[format!("--config={}", path.display())]).expect_err("accelerate");
    let failure = failure.to_string();
    assert!(
        failure.contains("accelerate") && failure.contains("--deepspeed FILE"),
        "{failure}"
    );
}

#[test]
fn every_refusal_of_a_file_names_a_next_step() {
    let refused = |path: &Path| {
        let failure = load(&[format!("--config={}", path.display())]).expect_err("refused");
        assert!(failure.to_string().contains("\n  next "), "{failure}");
        failure.to_string()
    };
    for key in [
        "val_size: 0.1",
        "muon: true",
        "optim: muon",
        "max_steps: {a: 1}",
    ] {
        let (_directory, path) = write_file(&format!("stage: sft\n{key}\n"));
        let failure = refused(&path);
        assert!(failure.contains("the key in line 2"), "{failure}");
    }
    let (directory, path) = write_file("deepspeed: none.json\n");
    refused(&path);
    refused(directory.path());
}

#[test]
fn empty_lists_of_a_file_set_nothing() {
    let (args, _) = with_file(
        "tuner_type: lora\nval_dataset: []\ndataset: [d]\nadapters: []\nlora_target_modules: []\n",
        "--output o",
    );
    assert_eq!((args.eval_data, args.adapter), (None, None));
    assert_eq!(args.data, Some("d".into()));
}

#[test]
fn a_line_of_llama_boards_preview_pastes_in() {
    let (args, loaded, _) = read_with_notes(
        "--stage sft --do_train True --model_name_or_path m --preprocessing_num_workers 16 --finetuning_type lora --template minicpm_v --flash_attn auto --dataset_dir data --dataset x --cutoff_len 2048 --learning_rate 5e-05 --num_train_epochs 3.0 --max_samples 100000 --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --lr_scheduler_type cosine --max_grad_norm 1.0 --logging_steps 5 --save_steps 100 --warmup_steps 0 --packing False --enable_thinking True --report_to none --output_dir saves --bf16 True --plot_loss True --trust_remote_code True --ddp_timeout 180000000 --include_num_input_tokens_seen True --optim adamw_torch --lora_rank 8 --lora_alpha 16 --lora_dropout 0 --lora_target all --freeze_vision_tower True --freeze_multi_modal_projector True --image_max_pixels 589824 --image_min_pixels 1024 --video_max_pixels 65536 --video_min_pixels 256 --data d",
    );
    assert_eq!(
        (args.data, args.tune_vision),
        (Some("d".into()), Some(false))
    );
    assert_eq!(
        (args.image_max_pixels, args.template),
        (Some(589_824), None)
    );
    assert_eq!(args.freeze.as_deref(), Some("projector"));
    assert!(loaded.defaults[0].contains("LLaMA-Factory"), "{loaded:?}");
    // The run names it as without effect beside --data.
    assert_eq!(args.dataset.as_deref(), Some("x"));
    let (args, _) = read("--model m --data d --report_to wandb tensorboard --output o");
    assert_eq!(args.report_to, Some(crate::config::ReportTo::Tensorboard));
}

#[test]
fn projectors_are_tuned_and_frozen_under_every_published_name() {
    let two_u1 = "--model_id m --data_path d --output_dir o --lora_enable False";
    for key in ["tune_merger", "tune_connector", "tune_mm_mlp"] {
        for (value, freeze) in [("False", "projector"), ("True", "none")] {
            let (args, _) = read(&format!("{two_u1} --{key} {value}"));
            assert_eq!(args.freeze.as_deref(), Some(freeze), "{key} {value}");
            let file = format!("model_id: m\nlora_enable: false\n{key}: {value}\n");
            let (args, _) = with_file(&file, "");
            assert_eq!(
                args.freeze.as_deref(),
                Some(freeze),
                "{key} {value} in a file"
            );
        }
    }
    let (args, _) = read("--model m --data d --freeze_connector True --tune_vision_tower False");
    assert_eq!(args.freeze.as_deref(), Some("projector"));
    assert_eq!(args.tune_vision, Some(false));
}

#[test]
fn names_of_an_earlier_ms_swift_are_honored() {
    let line = "--model_type minicpm-v-v2_6-chat --model_id_or_path m --sft_type lora --template_type minicpm --custom_train_dataset_path d --custom_val_dataset_path e --dtype bf16 --lora_dropout_p 0.1 --lora_target_modules DEFAULT --batch_size 2 --eval_batch_size 3 --train_dataset_sample -1 --dataset_test_ratio 0 --add_output_dir_suffix false --use_flash_attn true --only_save_model true --deepspeed default-zero2 --lora_lr_ratio 16";
    let (args, _, notes) = read_with_notes(line);
    assert_eq!(
        (args.model, args.data),
        (Some("m".into()), Some("d".into()))
    );
    assert_eq!(args.eval_data, Some("e".into()));
    assert_eq!(args.per_device_train_batch_size, Some(2));
    assert_eq!(args.per_device_eval_batch_size, Some(3));
    assert_eq!((args.limit, args.zero), (None, Some(ZeroChoice::Stage(2))));
    assert_eq!(
        (args.lora_dropout, args.loraplus_lr_ratio),
        (Some(0.1), Some(16.0))
    );
    assert!(notes.iter().any(|note| note.flag == "--use_flash_attn"));
}

#[test]
fn keys_without_a_twin_are_named_with_what_replaces_them() {
    for (key, value, instead) in [
        ("lora_modules", "a=dir", "--adapter DIR"),
        ("model_kwargs", "x", "--image-max-pixels"),
        ("optimizer", "lorap", "--loraplus-lr-ratio"),
        ("load_args", "true", "--resume RUN"),
        ("callbacks", "lisa", "no Python"),
        ("num_crops", "4", "config.json"),
        (
            "train_sampling_strategy",
            "group_by_length",
            "seed and epoch",
        ),
    ] {
        let argv = [format!("--model=m --data=d --{key} {value}")];
        let argv: Vec<String> = argv[0].split(' ').map(str::to_owned).collect();
        let failure = parse(&argv).expect_err(key);
        assert!(failure.cause.contains(instead), "{key}: {}", failure.cause);
        let directory = tempfile::tempdir().expect("temp dir");
        let path = directory.path().join("run.yaml");
        std::fs::write(&path, format!("model: m\n{key}: {value}\n")).expect("written");
        let failure = load(&[format!("--config={}", path.display())]).expect_err(key);
        assert!(failure.to_string().contains(instead), "{key}: {failure}");
    }
    // Without effect on a line of this program, too.
    let (_, _, notes) = read_with_notes("--model m --data d --show_progress True");
    assert_eq!(notes.len(), 1, "{notes:?}");
    let (args, _) = with_file(
        "peft_config:\n  peft_type: LORA\n  r: 8\n  inference_mode: false\n  rank_pattern: {}\n  layers_to_transform: null\n",
        "",
    );
    assert_eq!(args.lora_rank, Some(8));
}

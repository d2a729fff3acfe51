//! Tests with published files, recreated with their keys and values, and the page that each becomes.

use crate::cli::file::explain::page;
use crate::cli::file::{Loaded, load};
use crate::config::{Quantize, QuantizeFormat};
use crate::error::Failure;
use crate::rank_env::Env;
use proptest::prelude::*;
use std::fs;
use std::path::{Path, PathBuf};

fn configs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/configs")
}

fn env() -> Env {
    Env::from_lookup(&|_| None).expect("an environment")
}

/// The printed page of a file without the directory's path, followed by the failure, if any.
fn shown(path: &Path) -> String {
    let (page, verdict) = page(path, &["--nproc=2".to_owned()], &env()).expect("is read");
    let mut text = page.to_string();
    if let Err(failure) = verdict {
        text += &format!("{failure}\n");
    }
    text.replace(&format!("{}/", configs().display()), "")
}

#[test]
fn every_published_file_explains_as_its_stored_page() {
    let mut count = 0;
    for entry in fs::read_dir(configs()).expect("is there") {
        let path = entry.expect("is there").path();
        if path.extension().is_some_and(|ending| ending == "txt") {
            continue;
        }
        let mut page = path.clone().into_os_string();
        page.push(".txt");
        let expected = fs::read_to_string(&page).unwrap_or_default();
        assert_eq!(shown(&path), expected, "{}", path.display());
        count += 1;
    }
    assert_eq!(count, 28);
}

#[test]
fn two_published_files_are_refused_with_a_reason() {
    let refused = |name: &str| {
        let word = format!("--deepspeed={}", configs().join(name).display());
        load(&[word]).expect_err(name).to_string()
    };
    let parallel = refused("llama-factory-z2-autotp.json");
    assert!(
        parallel.contains("tensor_parallel.autotp_size 2 is not available"),
        "{parallel}"
    );
    let optimizer = refused("sat-ema.json");
    assert!(
        optimizer.contains("sat.ops.FusedEmaAdam is not available"),
        "{optimizer}"
    );
    assert!(optimizer.contains("the optimizer is AdamW"), "{optimizer}");
}

/// Loads a file with this text next to a command line.
fn with(text: &str, line: &str) -> Result<Loaded, Failure> {
    let directory = tempfile::tempdir().expect("temp dir");
    let path = directory.path().join("ds.json");
    fs::write(&path, text).expect("written");
    let mut words = vec![format!("--deepspeed={}", path.display())];
    words.extend(line.split_whitespace().map(str::to_owned));
    load(&words).map(|loaded| loaded.expect("a file is named"))
}

/// The flags of a file with this text next to a command line, in order.
fn words(text: &str, line: &str) -> String {
    let loaded = with(text, line).unwrap_or_else(|failure| panic!("{text} {line}\n{failure}"));
    loaded.words.join(" ")
}

fn refused(text: &str, line: &str) -> String {
    let failure = with(text, line).expect_err(text);
    assert_eq!(failure.code.status(), 2);
    failure.to_string()
}

const Z: &str = "\"zero_optimization\": {\"stage\": 2}, \"bf16\": {\"enabled\": \"auto\"}, \"gradient_clipping\": \"auto\"";

#[test]
fn every_combination_of_the_three_batch_sizes_resolves_or_is_refused() {
    for (sizes, expected) in [
        ("", ""),
        (
            "\"train_batch_size\": 8",
            " --global-batch-size=8 --gradient-accumulation-steps=1",
        ),
        (
            "\"train_micro_batch_size_per_gpu\": 2",
            " --per-device-train-batch-size=2",
        ),
        (
            "\"train_batch_size\": 8, \"train_micro_batch_size_per_gpu\": 2",
            " --global-batch-size=8 --per-device-train-batch-size=2",
        ),
        (
            "\"train_batch_size\": 8, \"gradient_accumulation_steps\": 2",
            " --global-batch-size=8 --gradient-accumulation-steps=2",
        ),
        (
            "\"train_micro_batch_size_per_gpu\": 2.0, \"gradient_accumulation_steps\": 4e0",
            " --per-device-train-batch-size=2 --gradient-accumulation-steps=4",
        ),
        (
            "\"train_batch_size\": 8, \"train_micro_batch_size_per_gpu\": 2, \"gradient_accumulation_steps\": 2",
            " --global-batch-size=8 --per-device-train-batch-size=2 --gradient-accumulation-steps=2",
        ),
        (
            "\"train_batch_size\": \"auto\", \"gradient_accumulation_steps\": 4",
            " --gradient-accumulation-steps=4",
        ),
    ] {
        let text = format!("{{{Z}, {sizes}}}");
        assert_eq!(words(&text, ""), format!("--zero=2{expected}"), "{sizes}");
    }
    let alone = format!("{{{Z}, \"gradient_accumulation_steps\": 4}}");
    assert!(refused(&alone, "").contains("alone does not determine the batch"));
    assert!(words(&alone, "--per-device-train-batch-size=2").contains("accumulation-steps=4"));
}

#[test]
fn contradictions_are_listed_together_and_auto_contradicts_nothing() {
    let text = "{\"zero_optimization\": {\"stage\": 3,\n\"offload_optimizer\": {\"device\": \"cpu\"}},\n\
                \"gradient_clipping\": 0.5, \"bf16\": {\"enabled\": true},\n\
                \"optimizer\": {\"type\": \"AdamW\", \"params\": {\"lr\": 1e-5, \"betas\": \"auto\"}}}";
    let failure = refused(
        text,
        "--zero=2 --offload=none --max-grad-norm=1 --fp16=true --learning-rate=2e-5 --adam-beta2=0.9",
    );
    for part in [
        "zero_optimization.stage 3",
        "but --zero 2",
        "offload_optimizer.device cpu",
        "line 2",
        "but --offload none",
        "gradient_clipping 0.5",
        "but --max-grad-norm 1",
        "bf16.enabled true",
        "but --fp16 true",
        "optimizer.params.lr 1e-5",
    ] {
        assert!(failure.contains(part), "{part}\n{failure}");
    }
    assert!(!failure.contains("beta"), "{failure}");
    let agrees = "--zero=3 --offload=optimizer=cpu --max-grad-norm=0.50 --precision=pure-bf16 --learning-rate=0.00001";
    let words = words(text, agrees);
    assert!(words.starts_with(agrees), "{words}");
    // Flags that follow from DeepSpeed's defaults alone give way to the command line.
    assert!(
        words.ends_with(" --adam-epsilon=1e-8 --weight-decay=0"),
        "{words}"
    );
}

#[test]
fn an_open_stage_is_that_of_the_line_or_auto() {
    let text = "{\"zero_optimization\": {\"stage\": \"auto\", \"offload_param\": {\"device\": \"cpu\"}}, \"bf16\": {\"enabled\": \"auto\"}}";
    let loaded = with(text, "").expect("valid");
    assert!(loaded.words.contains(&"--zero=auto".to_owned()));
    assert!(loaded.warnings.is_empty(), "{:?}", loaded.warnings);
    assert!(!words(text, "--zero=1").contains("--zero=auto"));
    // DeepSpeed offloads parameters from stage 3 on.
    assert!(!with(text, "--zero=1").expect("valid").warnings.is_empty());
}

#[test]
fn gradients_are_not_clipped_unless_the_file_says_so() {
    let of = |clipping: &str| {
        words(
            &format!("{{\"zero_optimization\": {{\"stage\": 1}}{clipping}}}"),
            "",
        )
    };
    assert!(of("").contains("--max-grad-norm=0"));
    assert!(of(", \"gradient_clipping\": 0.5").contains("--max-grad-norm=0.5"));
    assert!(!of(", \"gradient_clipping\": \"auto\"").contains("--max-grad-norm"));
}

#[test]
fn precision_follows_the_switches_of_the_file() {
    let of = |sections: &str, line: &str| {
        words(
            &format!(
                "{{\"zero_optimization\": {{\"stage\": 1}}, \"gradient_clipping\": \"auto\", {sections}}}"
            ),
            line,
        )
    };
    let on = |name: &str| format!("\"{name}\": {{\"enabled\": true}}");
    assert!(of(&on("bf16"), "").ends_with("--precision=bf16"));
    assert!(of(&on("bfloat16"), "").ends_with("--precision=bf16"));
    assert!(of("\"fp16\": {\"enabled\": false}", "").ends_with("--precision=f32"));
    assert!(of("", "").ends_with("--precision=f32"));
    assert!(of("", "--bf16=true").ends_with("--zero=1"));
    let pure = "\"bf16\": {\"enabled\": true, \"bf16_master_weights_and_grads\": true, \"bf16_optimizer_states\": true}";
    assert!(of(pure, "").contains("--pure-bf16-moments=bf16 --precision=pure-bf16"));
    // The pair of flag and file that the Hugging Face trainers expect.
    for pure in [pure, &pure.replace("true, \"bf16_m", "\"auto\", \"bf16_m")] {
        let words = of(pure, "--bf16=true");
        assert!(
            words.contains("--pure-bf16-moments=bf16 --precision=pure-bf16"),
            "{words}"
        );
        assert!(!words.contains("--bf16=true"), "{words}");
    }
    let text = format!("{{\"zero_optimization\": {{\"stage\": 1}}, {pure}}}");
    assert!(refused(&text, "--precision=bf16").contains("--precision bf16"));
    let open = text.replace("true, \"bf16_m", "\"auto\", \"bf16_m");
    assert!(refused(&open, "").contains("add --bf16 true"));
    assert!(
        !of(
            &pure.replace("true, \"bf16_m", "\"auto\", \"bf16_m"),
            "--fp16=true"
        )
        .contains("pure")
    );
    let scale =
        "\"fp16\": {\"enabled\": \"auto\", \"loss_scale_window\": 5e2, \"min_loss_scale\": 0.01}";
    assert!(of(scale, "--fp16=true").contains("--loss-scale-window=500 --min-loss-scale=0.01"));
    assert!(!of(scale, "").contains("scale"));
    let both = format!("{{{}, {}}}", on("bf16"), on("fp16"));
    assert!(refused(&both, "").contains("both enabled"));
}

#[test]
fn numbers_in_quotes_lose_them() {
    let refused = refused("{\"zero_optimization\": {\"stage\": \"3\"}}", "");
    assert!(refused.contains("write 3 without quotes"), "{refused}");
}

#[test]
fn tiers_are_those_that_deepspeed_reads_at_the_stage() {
    let of = |stage: u8, inside: &str| {
        let text = format!(
            "{{\"zero_optimization\": {{\"stage\": {stage}, {inside}}}, \"bf16\": {{\"enabled\": \"auto\"}}, \"gradient_clipping\": \"auto\"}}"
        );
        with(&text, "")
    };
    let nvme = "\"offload_param\": {\"device\": \"nvme\", \"nvme_path\": \"/fast\"}, \"offload_optimizer\": {\"device\": \"cpu\"}";
    let loaded = of(3, nvme).expect("loads");
    assert_eq!(
        loaded.words.join(" "),
        "--zero=3 --offload=optimizer=cpu,param=nvme:/fast"
    );
    let loaded = of(2, nvme).expect("loads");
    assert_eq!(loaded.words.join(" "), "--zero=2 --offload=optimizer=cpu");
    assert!(
        loaded.warnings[0].contains("from stage 3 on"),
        "{:?}",
        loaded.warnings
    );
    let groups = |size: &str| of(3, &format!("\"mics_shard_size\": {size}"));
    let loaded = groups("4").expect("loads");
    assert_eq!(loaded.words.join(" "), "--zero=3 --shard-group=4");
    let loaded = groups("-1").expect("loads");
    assert_eq!(loaded.words.join(" "), "--zero=3");
    assert!(groups("\"all\"").is_err());
    let old = of(2, "\"cpu_offload\": true").expect("loads");
    assert!(old.words.join(" ").ends_with("--offload=optimizer=cpu"));
    assert!(
        old.warnings[0].contains("an old name"),
        "{:?}",
        old.warnings
    );
    let both = of(
        2,
        "\"cpu_offload\": true, \"offload_optimizer\": {\"device\": \"cpu\"}",
    );
    assert!(
        both.expect_err("both")
            .to_string()
            .contains("and the file has both")
    );
    let nowhere = of(3, "\"offload_param\": {\"device\": \"nvme\"}");
    assert!(
        nowhere
            .expect_err("no path")
            .to_string()
            .contains("nvme_path")
    );
}

#[test]
fn the_schedule_of_the_file_wins_and_says_so() {
    let text = |params: &str| {
        format!(
            "{{{Z}, \"scheduler\": {{\"type\": \"WarmupCosineLR\", \"params\": {{{params}}}}}}}"
        )
    };
    let loaded = with(
        &text(
            "\"total_num_steps\": \"auto\", \"warmup_num_steps\": 10, \"warmup_type\": \"linear\"",
        ),
        "--lr-scheduler-type=cosine --learning-rate=1e-4",
    )
    .expect("loads");
    assert_eq!(
        loaded.words.join(" "),
        "--learning-rate=1e-4 --zero=2 --lr-scheduler-type=warmup_cosine_lr --warmup-steps=10 \
         --lr-scheduler-kwargs=warmup_type=linear"
    );
    assert!(loaded.warnings[0].contains("--lr-scheduler-type cosine has no effect"));
    assert!(refused(&text(""), "").contains("needs total_num_steps"));
    let length = text("\"total_num_steps\": 100, \"warmup_num_steps\": \"auto\"");
    assert!(refused(&length, "--max-steps=50").contains("but --max-steps 50"));
    let steps = text("\"total_num_steps\": 100, \"warmup_num_steps\": 3");
    assert!(words(&steps, "--max-steps=100 --warmup-ratio=0.03").contains("total_num_steps=100"));
    assert!(refused(&steps, "--max-steps=100 --warmup-ratio=0.1").contains("--warmup-ratio 0.1"));
    let other = text("\"total_num_steps\": 9, \"warmup_max_lr\": 1e-4");
    assert!(refused(&other, "").contains("no argument warmup_max_lr"));
    let peak = format!(
        "{{{Z}, \"optimizer\": {{\"type\": \"Adam\", \"params\": {{\"lr\": 1e-5}}}}, \"scheduler\": {{\"type\": \
         \"WarmupLR\", \"params\": {{\"warmup_max_lr\": 3e-5, \"warmup_num_steps\": \"auto\"}}}}}}"
    );
    let words = words(&peak, "");
    assert!(
        words.contains("--learning-rate=3e-5") && !words.contains("1e-5"),
        "{words}"
    );
}

#[test]
fn mistakes_in_strict_sections_are_errors_and_elsewhere_warnings() {
    let inside = |keys: &str| format!("{{\"zero_optimization\": {{\"stage\": 2, {keys}}}}}");
    for (text, part) in [
        (
            inside("\"overlap_com\": true"),
            "did you mean overlap_comm?",
        ),
        (
            inside("\"gradient_clipping\": 1"),
            "it belongs at the top level",
        ),
        (inside("\"overlap_comm\": 3"), "true or false"),
        (inside("\"reduce_bucket_size\": 0.5"), "whole number"),
        (inside("\"zero_quantized_weights\": true"), "not available"),
        (
            inside("\"zenflow\": {\"topk_ratio\": 0.1}"),
            "changes results",
        ),
        (inside("\"stage\": 1"), "twice"),
        (
            "{\"zero_optimization\": {\"stage\": 4}}".to_owned(),
            "stages are",
        ),
        (
            format!("{{{Z}, \"amp\": {{\"enabled\": true}}}}"),
            "remove the section",
        ),
        (
            format!("{{{Z}, \"sequence_parallel_size\": 2}}"),
            "other kinds of parallelism",
        ),
        (
            inside(
                "\"stage3_gather_fp16_weights_on_model_save\": true, \"stage3_gather_16bit_weights_on_model_save\": true",
            ),
            "and the file has both",
        ),
        (
            inside("\"reduce_scatter\": true},\n\"fp16\": {\"enabled\": true, \"hysteresis\": 0"),
            "ds.json line 2",
        ),
        (
            format!("{{{Z}, \"comms_logger\": {{\"prof_al\": true}}}}"),
            "did you mean prof_all?",
        ),
        (
            "{\"learning_rate\": 1}".to_owned(),
            "not a DeepSpeed configuration",
        ),
    ] {
        let failure = refused(&text, "");
        assert!(failure.contains(part), "{text}\n{failure}");
    }
    let misplaced = format!(
        "{{{Z},\n\"offload_optimizer\": {{\"device\": \"cpu\"}},\n\"aio\": {{\"thread_count\": 2}}, \"_note\": 1}}"
    );
    let loaded = with(&misplaced, "").expect("loads");
    assert_eq!(loaded.warnings.len(), 2);
    assert!(
        loaded.warnings[0].ends_with(
            "line 2: \"offload_optimizer\" has no effect at the top level: it belongs in \"zero_optimization\", and \
             DeepSpeed does not report it; move it, or use --offload optimizer=cpu"
        ),
        "{:?}",
        loaded.warnings
    );
    assert!(loaded.warnings[1].contains("did you mean intra_op_parallelism?"));
    let strict = refused(&misplaced, "--strict-config=true");
    assert!(strict.contains("2 keys cannot be used"), "{strict}");
    assert!(words(&format!("{{{Z}}}"), "--strict-config=true").starts_with("--zero=2"));
}

#[test]
fn command_line_flags_override_those_of_a_file() {
    let path = configs().join("llama-factory-lora.yaml");
    let line = |more: &str| {
        let mut words = vec![format!("--config={}", path.display())];
        words.extend(more.split_whitespace().map(str::to_owned));
        load(&words).expect("loads").expect("a file is named")
    };
    let loaded = line("--data=d.json --warmup-steps=5 --global-batch-size=4");
    let words = loaded.words.join(" ");
    for part in [
        "--data=d.json",
        "--zero=3",
        "--use-lora=true",
        "--learning-rate=1.0e-4",
    ] {
        assert!(words.contains(part), "{part} in {words}");
    }
    for part in ["warmup-ratio", "accumulation", "precision", "config"] {
        assert!(!words.contains(part), "{part} in {words}");
    }
    assert_eq!(loaded.gives.len(), 2);
    let misplaced = load(&[format!(
        "--config={}",
        configs().join("swift-zero3.json").display()
    )]);
    assert!(misplaced.expect_err("refused").next[0].starts_with("--deepspeed "));
}

#[test]
fn unknown_keys_of_a_flag_file_are_named() {
    let directory = tempfile::tempdir().expect("temp dir");
    let path = directory.path().join("run.yaml");
    for (text, part) in [
        ("learning_rat: 1e-5", "did you mean learning_rate?"),
        ("zero: 7", "zero 7"),
        ("stage: dpo", "supervised"),
        ("quantization_bit: 3", "only 4, 8"),
        ("optim: sgd", "adamw_8bit"),
        ("config: other.yaml", "cannot include another"),
        ("seed: {a: 1}", "not a section"),
        ("lora_rank: 4\nlora_r: 8", "lora_rank says 4"),
        ("peft_config:\n  rank: 8", "not known"),
        ("stage: sft\nfreeze_vision_tower: false", "puts adapters on"),
        ("deepspeed: none.json", "cannot read"),
    ] {
        fs::write(&path, text).expect("written");
        let failure = load(&[format!("--config={}", path.display())]).expect_err(text);
        assert!(failure.to_string().contains(part), "{text}\n{failure}");
    }
    fs::write(&path, "save_steps: 5e2\nmax_steps: -1\n").expect("written");
    let loaded = load(&[format!("--config={}", path.display())]).expect("loads");
    let words = loaded.map(|loaded| loaded.words.join(" "));
    assert_eq!(words.as_deref(), Some("--save-steps=5e2 --max-steps=-1"));
}

/// Every spelling of a quantized base in files of LLaMA-Factory, Hugging Face, OpenBMB, ms-swift and 2U1.
#[test]
fn files_of_other_trainers_quantize_the_base() {
    let directory = tempfile::tempdir().expect("temp dir");
    let path = directory.path().join("run.yaml");
    let quantized = |format, double, modules: Option<&str>| {
        Some(Quantize {
            format,
            double,
            modules: modules.map(str::to_owned),
        })
    };
    let (nf4, fp4, int8) = (
        QuantizeFormat::Nf4,
        QuantizeFormat::Fp4,
        QuantizeFormat::Int8,
    );
    let all = Some("all");
    let factory = "stage: sft\nfinetuning_type: lora\n";
    let swift = "train_type: lora\n";
    let two_u1 = "lora_enable: true\n";
    for (head, text, expected) in [
        (factory, "quantization_bit: 4", quantized(nf4, true, all)),
        (
            factory,
            "quantization_bit: 4\nquantization_method: bnb\ndouble_quantization: false\nquantization_type: fp4",
            quantized(fp4, false, all),
        ),
        (
            factory,
            "quantization_bit: 8\nquantization_method: bitsandbytes",
            quantized(int8, false, all),
        ),
        (factory, "quantization_bit: null", None),
        (
            "use_lora: true\n",
            "load_in_4bit: true\nbnb_4bit_quant_type: nf4\nbnb_4bit_use_double_quant: true\n\
             bnb_4bit_compute_dtype: bfloat16\nbnb_4bit_quant_storage: uint8\nload_in_8bit: false\n\
             llm_int8_skip_modules: null",
            quantized(nf4, true, None),
        ),
        (
            "use_lora: true\n",
            "load_in_8bit: true\nllm_int8_threshold: 6.0\nllm_int8_has_fp16_weight: false\n\
             llm_int8_enable_fp32_cpu_offload: false",
            quantized(int8, false, None),
        ),
        (
            "use_lora: true\nlora_rank: 8\n",
            "load_in_4bit: true\nbnb_4bit_quant_type: fp4\nuse_bnb_nested_quant: true",
            quantized(fp4, true, None),
        ),
        (
            "use_lora: true\n",
            "q_lora: true",
            quantized(nf4, false, None),
        ),
        ("use_lora: true\n", "q_lora: false", None),
        (
            swift,
            "quant_method: bnb\nquant_bits: 4\nbnb_4bit_compute_dtype: bfloat16\nbnb_4bit_quant_type: nf4\n\
             bnb_4bit_use_double_quant: true\nbnb_4bit_quant_storage: null",
            quantized(nf4, true, all),
        ),
        (
            swift,
            "quant_method: bnb\nquant_bits: 4\nbnb_4bit_use_double_quant: false",
            quantized(nf4, false, all),
        ),
        (
            swift,
            "quant_bits: 8\nquant_method: bnb",
            quantized(int8, false, all),
        ),
        (
            two_u1,
            "bits: 4\nquant_type: nf4",
            quantized(nf4, true, all),
        ),
        (
            two_u1,
            "bits: 4\ndouble_quant: false\nquant_type: fp4",
            quantized(fp4, false, all),
        ),
        (two_u1, "bits: 16", None),
    ] {
        let text = format!("{head}{text}\nmodel: m\ndata: d\n");
        fs::write(&path, &text).expect("written");
        let loaded = load(&[format!("--config={}", path.display())]).expect(&text);
        let args = crate::cli::train_args(&loaded.expect("a file").words).expect(&text);
        let config = crate::cli::resolve(&args, &env()).expect(&text).config;
        assert_eq!(config.quantize, expected, "{text}");
    }
    for (text, part) in [
        ("quantization_method: gptq", "bitsandbytes"),
        (
            "quantization_method: hqq\nquantization_bit: 4",
            "bitsandbytes",
        ),
        ("llm_int8_skip_modules: [visual]", "--quantize-modules"),
    ] {
        let text = format!("{factory}{text}\n");
        fs::write(&path, &text).expect("written");
        let failure = load(&[format!("--config={}", path.display())]).expect_err(&text);
        assert!(failure.to_string().contains(part), "{text}\n{failure}");
    }
}

#[test]
fn secrets_are_not_shown() {
    let directory = tempfile::tempdir().expect("temp dir");
    for (name, text) in [
        (
            "ds.json",
            format!("{{{Z}, \"comet\": {{\"api_key\": \"hunter2\"}}}}"),
        ),
        ("run.yaml", "hub_token: hunter2".to_owned()),
    ] {
        let path = directory.path().join(name);
        fs::write(&path, text).expect("written");
        let page = shown(&path);
        assert!(page.contains("…") && !page.contains("hunter2"), "{page}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// A published file in which a part is replaced is accepted or refused, without a panic.
    #[test]
    fn damaged_deepspeed_files_are_read_or_refused(
        file in 0usize..100, at in 0usize..1000, cut in 0usize..9, put in "[\\PC\n]{0,4}",
    ) {
        let files = fs::read_dir(configs()).expect("is there");
        let mut files: Vec<PathBuf> = files.map(|entry| entry.expect("is there").path()).collect();
        files.retain(|path| path.extension().is_some_and(|ending| ending != "txt"));
        files.sort();
        let path = &files[file % files.len()];
        let text = fs::read(path).expect("is read");
        let from = at * text.len() / 1000;
        let to = (from + cut).min(text.len());
        let directory = tempfile::tempdir().expect("temp dir");
        let damaged = directory.path().join(path.file_name().expect("a name"));
        fs::write(&damaged, [&text[..from], put.as_bytes(), &text[to..]].concat()).expect("written");
        match page(&damaged, &[], &env()) {
            Ok((text, verdict)) => {
                prop_assert!(text.len() < 100_000);
                let status = verdict.err().map(|failure| failure.code.status());
                prop_assert!(matches!(status, None | Some(2)), "{status:?}");
            }
            Err(failure) => prop_assert_eq!(failure.code.status(), 2),
        }
    }

    /// Values of any type at any known key, and unknown keys, cause no panic.
    #[test]
    fn any_deepspeed_values_are_applied_or_refused(picks in prop::collection::vec((0usize..400, 0usize..12), 0..6)) {
        let values = [
            "null", "true", "-1", "5e8", "1e-300", "\"auto\"", "\"\"", "[]", "[0.9, 0.95]", "{}", "{\"enabled\": true}",
            "\"nvme\"",
        ];
        let mut sections: std::collections::BTreeMap<&str, Vec<String>> = std::collections::BTreeMap::new();
        let keys: Vec<(&str, &str)> = super::keys::SECTIONS
            .iter()
            .flat_map(|section| section.keys.iter().map(|key| (section.path, key.name)))
            .collect();
        for (key, value) in picks {
            let (section, name) = keys[key % keys.len()];
            let entry = format!("\"{name}\": {}", values[value]);
            let own = sections.entry(section).or_default();
            if !own.iter().any(|other| other.starts_with(&format!("\"{name}\""))) {
                own.push(entry);
            }
        }
        let mut text = String::from("{\"zero_optimization\": {\"stage\": 1}");
        for (section, entries) in &sections {
            let open: String = section.split('.').map(|name| format!("\"{name}\": {{")).collect();
            let close = "}".repeat(section.split('.').count());
            match *section {
                "" => text += &format!(", {}", entries.join(", ")),
                _ => text += &format!(", {open}{}{close}", entries.join(", ")),
            }
        }
        if let Err(failure) = with(&(text + "}"), "") {
            prop_assert_eq!(failure.code.status(), 2);
        }
    }
}

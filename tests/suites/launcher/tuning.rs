//! Every way to choose trainable parameters, from the command line to the exported directory.

use crate::generate::run;
use crate::site::{
    Outcome, Site, fixture, golden, listing, losses, read_json, tensors, write_weights,
};
use models::adapter::{ADAPTER_STEM, Adapter};
use models::{WeightError, WeightSource};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use tests::tolerance::LOSS;

/// Flags of a tuning method, and a part of the path of every tensor that it changes.
const METHODS: [(&str, &str, &[&str]); 10] = [
    ("full", "", &[""]),
    (
        "frozen-vision",
        "--tune-vision false",
        &["llm.", "resampler."],
    ),
    ("frozen-llm", "--tune-llm false", &["vpm.", "resampler."]),
    ("resampler", "--train resampler", &["resampler."]),
    (
        "norm-bias",
        "--train norm,bias --freeze vpm",
        &["norm", "bias", "ln_"],
    ),
    (
        "head",
        r"--train lm_head,llm\.model\.layers\.0\.mlp --learning-rate 1e-2",
        &["lm_head", "layers.0.mlp"],
    ),
    (
        "lora",
        "--use-lora --lora-rank 4 --modules-to-save embed_tokens,resampler,vpm",
        &["self_attn", "embed_tokens", "resampler", "vpm."],
    ),
    (
        "lora-alone",
        "--lora-rank 2 --lora-target-modules all --lora-layers 1..2 --lora-dropout 0.2",
        &["llm.model.layers.1."],
    ),
    (
        "lora-and-head",
        "--lora-rank 4 --lora-target-modules q_proj,v_proj --modules-to-save resampler --train lm_head",
        &["q_proj", "v_proj", "resampler", "lm_head"],
    ),
    ("lora-and-llm", "--use-lora --tune-llm true", &["llm."]),
];

/// Tensors that differ between two directories.
fn changed(before: &Path, after: &Path) -> BTreeSet<String> {
    let (old, new) = (
        WeightSource::open(before).unwrap(),
        WeightSource::open(after).unwrap(),
    );
    assert!(
        old.names().eq(new.names()),
        "the export has the names of the model"
    );
    let names = old.names().map(str::to_owned);
    names
        .filter(|name| {
            assert_eq!(old.dtype(name), new.dtype(name), "{name}");
            assert_eq!(old.shape(name), new.shape(name), "{name}");
            let dtype = old.dtype(name).unwrap();
            old.read(name, dtype).unwrap() != new.read(name, dtype).unwrap()
        })
        .collect()
}

fn succeed(outcome: Outcome) -> String {
    assert_eq!(outcome.code, Some(0), "{}", outcome.screen);
    outcome.screen
}

/// Trains two ranks under ZeRO-3 with offload, resumes on one rank, exports, and compares the answers of the merged
/// model with those of base and adapter.
pub(crate) fn journey(site: &Site, name: &str, flags: &str, parts: &[&str]) {
    let common = format!("{flags} --zero 3 --offload cpu --save-total-limit 2 --output run");
    let screen = site
        .train(&format!("{common} --nproc 2 --max-steps 3"))
        .screen;
    assert!(screen.contains(" trains "), "{name}\n{screen}");
    site.train(&format!(
        "{common} --nproc 1 --gradient-accumulation-steps 2 --max-steps 4 --resume auto"
    ));
    assert_eq!(losses(&site.path("run")).len(), 4, "{name}");
    let checkpoint = site.path("run/checkpoint-4");
    let whole = !matches!(
        WeightSource::open(&checkpoint),
        Err(WeightError::NoWeights { .. })
    );
    let merge = if whole { "" } else { " --merge" };
    succeed(
        site.start_plain(&format!("export run/checkpoint-4 --output merged{merge}"))
            .finish(),
    );
    let model = site.path("model");
    let changed = changed(&model, &site.path("merged"));
    assert!(!changed.is_empty(), "{name}: nothing was trained");
    for tensor in &changed {
        assert!(
            parts.iter().any(|part| tensor.contains(part)),
            "{name}: {tensor} changed"
        );
    }
    for part in parts {
        assert!(
            changed.iter().any(|tensor| tensor.contains(part)),
            "{name}: nothing of {part:?} changed"
        );
    }
    let copied = |file: &str| site.path("merged").join(file).is_file();
    let tokenizer = copied("tokenizer.json") || copied("tokenizer.model");
    assert!(copied("config.json") && tokenizer, "{name}");
    assert!(
        !listing(&site.path(""))
            .iter()
            .any(|name| name.ends_with(".tmp"))
    );
    if !whole {
        saved_parts(&checkpoint, &changed);
    }
    let answers = |model: &str| answers(site, model);
    let merged = answers("--model merged");
    let saved = if whole {
        answers("--model run/checkpoint-4")
    } else {
        answers("--model model --adapter run/checkpoint-4")
    };
    assert_eq!(merged.0, saved.0, "{name}");
    assert!(
        (merged.1 - saved.1).abs() < LOSS,
        "{name}: {merged:?} {saved:?}"
    );
    assert_ne!(merged.1, answers("--model model").1, "{name}");
    // The merged directory is an ordinary model.
    site.train("--model merged --nproc 1 --max-steps 1 --output again --text-without-cross");
}

/// A model's answer about an image, and its loss on all samples.
fn answers(site: &Site, model: &str) -> (String, f64) {
    let ask =
        "--image data/image_wide.png --prompt What? --max-new-tokens 5 --precision f32 --json";
    let said = run(site, &format!("generate {model} {ask}")).json();
    let eval = format!("eval {model} --data data/samples.json --precision f32 --max-new-tokens 2");
    let result = run(site, &eval).json();
    (
        said["answer"].as_str().unwrap().to_owned(),
        result["eval_loss"].as_f64().unwrap(),
    )
}

/// Checks that the checkpoint has everything trained and nothing frozen.
fn saved_parts(checkpoint: &Path, changed: &BTreeSet<String>) {
    let adapter = Adapter::open(checkpoint).unwrap();
    let modules: BTreeSet<String> = adapter.modules().map(|m| format!("{m}.weight")).collect();
    for name in changed {
        assert!(
            adapter.has(name) || modules.contains(name),
            "{name} is not saved"
        );
    }
    let config = checkpoint.join("adapter_config.json");
    assert_eq!(config.is_file(), adapter.config().is_some());
    assert!(
        !listing(checkpoint)
            .iter()
            .any(|name| name.starts_with("model"))
    );
}

macro_rules! journeys {
    ($($test:ident $index:literal)*) => {$(
        #[test]
        fn $test() {
            let (name, flags, parts) = METHODS[$index];
            journey(&Site::new(), name, flags, parts);
        }
    )*};
}

journeys! {
    full 0
    frozen_vision 1
    frozen_llm 2
    resampler_alone 3
    norms_and_biases 4
    head_and_an_expression 5
    lora_with_the_published_modules 6
    lora_alone_with_dropout_on_some_layers 7
    lora_beside_a_trained_head 8
    lora_beside_the_whole_language_model 9
}

#[test]
fn learning_rates_of_parts_are_applied_and_printed() {
    let site = Site::new();
    let line = "--lr resampler=0,norm=5e-4 --lr-scale linear --nproc 2 --weight-decay 0";
    let screen = site.train(line).screen;
    for row in [
        "lr 0.0e0",
        "lr 1.0e-3",
        "lr 2.0e-3",
        "learning rate 2.0e-3 = 1.0e-3 × 2.000 for 2 micro-batches",
    ] {
        assert!(screen.contains(row), "{row}\n{screen}");
    }
    let changed = changed(&site.path("model"), &site.path("out/checkpoint-2"));
    assert!(
        !changed
            .iter()
            .any(|name| name.starts_with("resampler.attn"))
    );
    assert!(changed.iter().any(|name| name.starts_with("llm.")));
    let unused = "nothing of this part trains";
    assert!(!screen.contains(unused), "{screen}");
    let line = "--freeze vpm --lr vpm=1e-5,resampler=1e-4 --output frozen";
    let screen = site.train(line).screen;
    assert_eq!(screen.matches(unused).count(), 1, "{screen}");
    assert!(screen.contains("--lr vpm=1e-5"), "{screen}");
}

#[test]
fn an_adapter_is_exported_for_peft_and_a_trained_part_alone_is_refused() {
    let site = Site::new();
    site.train("--lora-rank 2 --train lm_head --output run");
    let screen = succeed(
        site.start_plain("export run/checkpoint-2 --output adapter --dtype bf16")
            .finish(),
    );
    drop(screen);
    let files = listing(&site.path("adapter"));
    assert_eq!(
        files,
        [
            "README.md",
            "adapter_config.json",
            "adapter_model.safetensors",
            "trained.safetensors"
        ]
    );
    let names = tensors(&site.path("adapter/adapter_model.safetensors"));
    assert!(
        names
            .keys()
            .all(|name| name.starts_with("base_model.model."))
    );
    assert!(
        names
            .values()
            .all(|(dtype, _)| *dtype == Some(kernels::DType::BF16))
    );
    let config = read_json(&site.path("adapter/adapter_config.json"));
    assert_eq!(
        (config["r"].as_u64(), &config["peft_type"]),
        (Some(2), &"LORA".into())
    );

    for (flags, words) in [
        ("--quantize nf4", "add --merge"),
        ("--dequantize", "add --merge"),
        ("--model model", "add --merge"),
        ("--max-shard-size 1KB", "add --merge"),
        ("--merge-base original", "add --merge"),
        (
            "--merge --quantize-double",
            "--quantize-double without --quantize",
        ),
        ("--merge --tokenizer none", "none is of no use"),
    ] {
        let line = format!("export run/checkpoint-2 --output x {flags}");
        let refused = site.start_plain(&line).finish();
        assert_ne!(refused.code, Some(0), "{line}");
        assert!(refused.screen.contains(words), "{line}\n{}", refused.screen);
        assert!(!site.path("x").exists() && !site.path(".x.tessera-tmp").exists());
    }

    site.train("--train resampler --output part");
    let refused = site
        .start_plain("export part/checkpoint-2 --output x")
        .finish();
    assert_eq!(refused.code, Some(2), "{}", refused.screen);
    assert!(refused.screen.contains("--merge"), "{}", refused.screen);
    for (line, code) in [
        ("export part/checkpoint-2 --merge --output adapter", 2),
        ("export part/checkpoint-2 --merge", 2),
        ("export nowhere --output x", 10),
        (
            "export part/checkpoint-2 --merge --output x --model data",
            10,
        ),
    ] {
        let refused = site.start_plain(line).finish();
        assert_eq!(refused.code, Some(code), "{line}\n{}", refused.screen);
        assert!(
            !site.path("x").exists() && !site.path(".x.tessera-tmp").exists(),
            "{line}"
        );
    }
}

/// Every tensor of an adapter's files, as f32.
fn values(directory: &Path) -> BTreeMap<String, Vec<f32>> {
    let source = WeightSource::open_stem(directory, ADAPTER_STEM).unwrap();
    let read = |name: &str| {
        let bytes = source.read(name, kernels::DType::F32).unwrap();
        bytemuck::pod_collect_to_vec(&bytes)
    };
    source
        .names()
        .map(|name| (name.to_owned(), read(name)))
        .collect()
}

#[test]
fn rank_stabilized_adapters_train_with_their_scale_and_say_so_to_peft() {
    let site = Site::new();
    // 8 / √4 = 16 / 4.
    let screen = site
        .train("--lora-rank 4 --lora-alpha 8 --use_rslora true --output rs")
        .screen;
    assert!(screen.contains("scale 4 (alpha ÷ √rank)"), "{screen}");
    site.train("--lora-rank 4 --lora-alpha 16 --output plain");
    let [rs, plain] = ["rs", "plain"].map(|run| site.path(run).join("checkpoint-2"));
    assert_eq!(values(&rs), values(&plain));
    let config = read_json(&rs.join("adapter_config.json"));
    assert_eq!(
        (&config["use_rslora"], &config["lora_alpha"]),
        (&true.into(), &8.0.into())
    );
    for run in ["rs", "plain"] {
        let line = format!("export {run}/checkpoint-2 --merge --output {run}-merged");
        succeed(site.start_plain(&line).finish());
    }
    assert!(changed(&site.path("rs-merged"), &site.path("plain-merged")).is_empty());
    assert!(!changed(&site.path("model"), &site.path("rs-merged")).is_empty());
    // Its files decide the scale of a run that starts from them.
    let screen = site
        .train("--adapter rs/checkpoint-2 --max-steps 1 --output further")
        .screen;
    assert!(screen.contains("scale 4 (alpha ÷ √rank)"), "{screen}");
}

#[test]
fn training_starts_from_adapters_of_peft_with_the_loss_of_its_model() {
    for (name, file) in [
        // Patterns of ranks and alphas, rank-stabilized, as torch.save writes them.
        ("patterns", "adapter_model.bin"),
        // A regular expression, an excluded layer, and a norm in full.
        ("modules", "adapter_model.safetensors"),
    ] {
        let adapter = fixture("adapters").join(name);
        assert!(adapter.join(file).is_file());
        let expected = read_json(&adapter.join("expected.json"));
        let pack = expected["pack"].as_str().unwrap();
        let site = Site::with_family(pack);
        let cases = fs::read_dir(golden(pack).join("cases")).unwrap();
        let images = cases.flat_map(|case| fs::read_dir(case.unwrap().path()).unwrap());
        let images = images.map(|file| file.unwrap().path());
        let is_image = |path: &PathBuf| {
            let name = path.file_name().unwrap().to_str().unwrap();
            name.starts_with("image") && name.ends_with(".png")
        };
        let image = images.filter(is_image).min().unwrap();
        let turns = |question: &str| json!([{"role": "user", "content": question}, {"role": "assistant", "content": "A cat."}]);
        let samples = [
            json!({"image": image, "messages": turns("<image>What is this?")}),
            json!({"messages": turns("Who are you?")}),
        ];
        site.write_samples("both", &samples);
        let line = format!(
            "--adapter {} --data data/both.json --per-device-train-batch-size 2 --max-steps 1",
            adapter.display()
        );
        site.train(&format!("{line} --output run"));
        let (got, want) = (
            losses(&site.path("run"))[0],
            expected["loss"].as_f64().unwrap(),
        );
        assert!(
            (got - want).abs() <= LOSS,
            "{name}: {got} instead of {want}"
        );
        // The run saves what it started from, and all of it trains.
        let saved = site.path("run/checkpoint-1/adapter_model.safetensors");
        let (saved, given) = (tensors(&saved), Adapter::open(&adapter).unwrap());
        assert_eq!(saved.len(), given.names().count(), "{name}");
        let config = read_json(&site.path("run/checkpoint-1/adapter_config.json"));
        assert_eq!(config["use_rslora"], json!(name == "patterns"));
    }
}

#[test]
fn b_learns_faster_by_the_ratio_of_lora_plus() {
    let site = Site::new();
    let line = "--lora-rank 2 --max-steps 1 --warmup-ratio 0 --weight-decay 0 --learning-rate 1e-3 --train norm";
    site.train(&format!("{line} --output one"));
    let screen = site
        .train(&format!("{line} --lorap_lr_ratio 4 --output fast"))
        .screen;
    // B and the norms, which are vectors; A.
    for row in ["lr 4.0e-3", "lr 1.0e-3", "B learns 4 times as fast"] {
        assert!(screen.contains(row), "{row}\n{screen}");
    }
    let [one, fast] = ["one", "fast"].map(|run| values(&site.path(run).join("checkpoint-1")));
    // B starts at 0, so its first update is its value. The gradient of A is 0.
    for (name, values) in &fast {
        let factor = if name.ends_with("lora_B.weight") {
            4.0
        } else {
            1.0
        };
        let expected: Vec<f32> = one[name].iter().map(|value| value * factor).collect();
        assert_eq!(values, &expected, "{name}");
        assert!(values.iter().any(|value| *value != 0.0), "{name}");
    }
    // A resumed run keeps the ratio.
    let screen = site
        .train("--resume fast/checkpoint-1 --max-steps 2 --model model --data data/samples.json --output fast")
        .screen;
    assert!(screen.contains("B learns 4 times as fast"), "{screen}");
}

#[test]
fn an_export_keeps_unknown_tensors_and_splits_files() {
    let site = Site::with_model("minicpm-o-2_6");
    site.train("--lora-rank 2 --modules-to-save none --output run");
    succeed(
        site.start_plain(
            "export run/checkpoint-2 --merge --output merged --max-shard-size 100KB --dtype f32",
        )
        .finish(),
    );
    let names = |directory: &str| -> Vec<String> {
        let source = WeightSource::open(&site.path(directory)).unwrap();
        source.names().map(str::to_owned).collect()
    };
    assert_eq!(names("merged"), names("model"));
    let files = listing(&site.path("merged"));
    assert!(
        files.iter().any(|f| f.starts_with("model-00001-of-000")),
        "{files:?}"
    );
    assert!(files.contains(&"model.safetensors.index.json".to_owned()));
}

#[test]
fn an_export_that_would_lose_a_trained_tensor_is_refused() {
    let site = Site::new();
    site.train("--lora-rank 2 --modules-to-save none --output run");
    // A base without one of the adapted layers.
    fs::create_dir(site.path("other")).unwrap();
    let source = WeightSource::open(&site.path("model")).unwrap();
    let kept: Vec<&str> = source
        .names()
        .filter(|n| !n.contains("layers.1.self_attn"))
        .collect();
    write_weights(&source, &kept, &site.path("other"), u64::MAX);
    let refused = site
        .start_plain("export run/checkpoint-2 --merge --model other --output x")
        .finish();
    assert_eq!(refused.code, Some(10), "{}", refused.screen);
    assert!(
        refused.screen.contains("would be lost"),
        "{}",
        refused.screen
    );
    assert!(!site.path("x").exists());
}

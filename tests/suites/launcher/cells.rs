//! Runs that combine what the newest checkpoints can do: methods, stages, tiers, precisions, forms of data, devices, and
//! what comes before or after training. Each pair of values of two of these is in one run.

use crate::generate::run;
use crate::site::{Site, losses, read_json};
use device_tests::tolerance;
use kernels::DType;
use models::WeightSource;
use serde_json::{Value, json};
use std::fs;
use tests::pairwise;

const CHECKPOINTS: [&str; 5] = [
    "minicpm-v-4_5",
    "minicpm-o-4_5",
    "glm-ocr",
    "glm-4.6v-flash",
    "cogagent-9b-20241220",
];
/// Everything, parts, and kinds of adapters, on plain weights and on weights in 4 and 8 bits.
const METHODS: [&str; 8] = [
    "",
    "--tune-vision false",
    "--train norm,bias",
    "--lora-rank 4",
    "--lora-rank 4 --use-rslora --lora-target-modules all",
    "--lora-rank 4 --loraplus-lr-ratio 4 --lora-dropout 0.1",
    "--lora-rank 4 --quantize nf4 --quantize-double",
    "--lora-rank 2 --quantize int8",
];
const STAGES: [&str; 4] = ["--zero 0", "--zero 1", "--zero 2", "--zero 3"];
const TIERS: [&str; 3] = ["--offload none", "--offload cpu", "--offload nvme:disk"];
const PRECISIONS: [&str; 4] = ["f32", "bf16", "fp16", "pure-bf16"];
const FORMS: [Form; 3] = [Form::OpenBmb, Form::Messages, Form::ShareGpt];
/// The GPU is the fake driver's. It computes in f32: the built-in kernels in 16 bits are those of published heads, and
/// these tiny models have narrower ones. Golden packs run in 16 bits on the emulator.
const DEVICES: [&str; 2] = ["cpu", "cuda"];
const NEXT: [Next; 7] = [
    Next::Export,
    Next::Generate,
    Next::Evaluate,
    Next::Resume,
    Next::Plan,
    Next::Synth,
    Next::Preset,
];
/// Presets for each checkpoint.
const PRESETS: [[&str; 2]; 5] = [
    ["minicpm-lora", "minicpm-full"],
    ["minicpm-qlora", "minicpm-full"],
    ["glm-ocr-lora", "glm-ocr-full"],
    ["glm-4.6v-flash-lora", "glm4v-qlora"],
    ["cogagent-9b-lora", "cogagent-9b-full"],
];

/// Layout of a data file.
#[derive(Clone, Copy)]
enum Form {
    OpenBmb,
    Messages,
    ShareGpt,
}

/// What a user does with a run, or with its flags.
#[derive(Clone, Copy)]
enum Next {
    Export,
    Generate,
    Evaluate,
    Resume,
    /// The plan of the same flags is that of the run.
    Plan,
    /// The same flags train a synthetic checkpoint of the same sizes.
    Synth,
    /// The flags without the method are added to a preset of the checkpoint.
    Preset,
}

impl Form {
    /// Name as for `--data-format`.
    fn name(self) -> &'static str {
        match self {
            Self::OpenBmb => "minicpm",
            Self::Messages => "messages",
            Self::ShareGpt => "sharegpt",
        }
    }

    /// Writes the samples of the site, and returns the path of the file.
    fn write(self, site: &Site) -> &'static str {
        let convert = |sample: &Value| {
            let turns = sample["conversations"].as_array().unwrap();
            let image = sample.get("image");
            let text = |turn: &Value| {
                let mark = image.filter(|_| turn["role"] == "user").map(|_| "<image>");
                format!(
                    "{}{}",
                    mark.unwrap_or_default(),
                    turn["content"].as_str().unwrap()
                )
            };
            let images: Vec<&Value> = image.into_iter().collect();
            match self {
                Self::OpenBmb => sample.clone(),
                Self::Messages => {
                    let turn = |turn: &Value| json!({"role": turn["role"], "content": text(turn)});
                    let turns: Vec<Value> = turns.iter().map(turn).collect();
                    json!({"messages": turns, "images": images})
                }
                Self::ShareGpt => {
                    let from = |turn: &Value| match turn["role"] == "user" {
                        true => "human",
                        false => "gpt",
                    };
                    let turn = |turn: &Value| json!({"from": from(turn), "value": text(turn)});
                    let turns: Vec<Value> = turns.iter().map(turn).collect();
                    json!({"conversations": turns, "images": images})
                }
            }
        };
        let samples: Vec<Value> = site.samples().iter().map(convert).collect();
        site.write_samples("form", &samples);
        "data/form.json"
    }
}

/// One run, and what comes before or after it. A run on the GPU has the losses of the CPU.
fn cell(row: &[usize]) {
    let [pack, method, stage, tier, precision, form, device, next] = *row else {
        panic!("a row has eight values");
    };
    let (checkpoint, device) = (CHECKPOINTS[pack], DEVICES[device]);
    let mut site = Site::with_family(checkpoint);
    if device == "cuda" {
        site.take_fake_driver();
    }
    fs::create_dir(site.path("disk")).unwrap();
    let data = FORMS[form].write(&site);
    let mut precision = PRECISIONS[precision];
    let common = |precision: &str| {
        let (stage, tier) = (STAGES[stage], TIERS[tier]);
        format!("{stage} {tier} --precision {precision} --nproc 2 --verify-gpu off")
    };
    let method = METHODS[method];
    if precision == "fp16" && !checkpoint.starts_with("minicpm") {
        let line = format!("{method} {} --device {device}", common(precision));
        let outcome = site.run(&line);
        assert_eq!(outcome.code, Some(2), "{}", outcome.screen);
        assert!(outcome.screen.contains("fp16"), "{}", outcome.screen);
        precision = "bf16";
    }
    if device == "cuda" {
        precision = "f32";
    }
    let common = common(precision);
    let train = |flags: &str, device: &str, output: &str| {
        let line = format!("{flags} --device {device} --output {output}");
        let screen = site.train(&line).screen;
        let is_preset = flags.contains("--preset");
        assert_eq!(screen.contains(" preset  "), is_preset, "{line}\n{screen}");
        losses(&site.path(output))
    };
    let like_the_cpu = |flags: &str, output: &str| {
        let got = train(flags, device, output);
        if device == "cuda" {
            let want = train(flags, "cpu", &format!("{output}-on-cpu"));
            near(&got, &want);
        }
        got
    };
    let line = format!("{method} {common} --data {data}");
    let cell = format!("{checkpoint}: {line} --device {device}");
    match NEXT[next] {
        Next::Plan => {
            train(&line, device, "out");
            let flags = format!("--model model --learning-rate 1e-3 --max-steps 2 {line}");
            let plan = run(&site, &format!("plan {flags} --device {device} --json")).json();
            let own = read_json(&site.path("out/plan.json"));
            let planned = &plan["peak_bytes_per_rank"]["device"];
            assert_eq!(planned, &own["plan"]["memory"]["peak"]["device"], "{cell}");
            assert!(planned.is_u64(), "{cell}: {plan}");
            return;
        }
        Next::Synth => {
            let synth = "synth --model-config model --output made --samples 4 --sample-tokens 150";
            run(&site, synth);
            let flags = format!("{method} {common} --model made --data made/samples.json");
            let loss = like_the_cpu(&flags, "out")[0];
            let vocabulary = vocabulary(&site).ln();
            assert!((loss - vocabulary).abs() < 0.5, "{cell}: {loss}");
            return;
        }
        Next::Preset => {
            let preset = PRESETS[pack][form % 2];
            let form = FORMS[form].name();
            let flags = format!(
                "--preset {preset} {common} --data {data} --data-format {form} --gradient-accumulation-steps 1"
            );
            assert_eq!(like_the_cpu(&flags, "out").len(), 2, "{cell}");
            return;
        }
        _ => like_the_cpu(&line, "out"),
    };
    let adapts = !site.path("out/checkpoint-2/model.safetensors").is_file();
    let model = match adapts {
        true => "--model model --adapter out/checkpoint-2",
        false => "--model out/checkpoint-2",
    };
    match NEXT[next] {
        Next::Export => {
            let merge = if adapts { "--merge" } else { "" };
            run(
                &site,
                &format!("export out/checkpoint-2 {merge} --output exported"),
            );
            let open = |name: &str| WeightSource::open(&site.path(name)).unwrap();
            let (base, exported) = (open("model"), open("exported"));
            assert!(base.names().eq(exported.names()), "{cell}");
        }
        Next::Generate => {
            let ask = "--prompt Hello --max-new-tokens 3 --precision f32 --verify-gpu off";
            run(&site, &format!("generate {model} {ask} --device {device}"));
        }
        Next::Evaluate => {
            let ask = "--precision f32 --max-new-tokens 2 --verify-gpu off";
            let line = format!("eval {model} --data {data} {ask} --device {device}");
            let loss = run(&site, &line).json()["eval_loss"].as_f64();
            assert!(loss.is_some_and(f64::is_finite), "{cell}: {loss:?}");
        }
        Next::Resume => {
            let more = format!("{line} --max-steps 3 --resume auto");
            assert_eq!(train(&more, device, "out").len(), 3, "{cell}");
        }
        Next::Plan | Next::Synth | Next::Preset => {}
    }
}

/// Losses of two devices in f32, up to the order of sums.
fn near(got: &[f64], want: &[f64]) {
    assert_eq!(got.len(), want.len());
    for (step, (got, want)) in got.iter().zip(want).enumerate() {
        let allowed = tolerance::trajectory(DType::F32, *want, step);
        assert!((got - want).abs() <= allowed, "{got} instead of {want}");
    }
}

/// Number of tokens of the site's model.
fn vocabulary(site: &Site) -> f64 {
    let config = read_json(&site.path("model/config.json"));
    let sizes = [
        "/vocab_size",
        "/text_config/vocab_size",
        "/padded_vocab_size",
    ];
    let size = sizes.iter().find_map(|path| config.pointer(path)?.as_f64());
    size.unwrap()
}

fn rows() -> Vec<Vec<usize>> {
    pairwise::rows(&[
        CHECKPOINTS.len(),
        METHODS.len(),
        STAGES.len(),
        TIERS.len(),
        PRECISIONS.len(),
        FORMS.len(),
        DEVICES.len(),
        NEXT.len(),
    ])
}

/// One combination of each checkpoint on the CPU; the nightly run takes all.
#[test]
fn the_newest_checkpoints_take_combinations() {
    let rows = rows();
    for pack in 0..CHECKPOINTS.len() {
        // Another method for each.
        let row = rows.iter().find(|row| row[0] == pack && row[1] == 2 + pack);
        let mut row = row.expect("every checkpoint meets every method").clone();
        row[6] = 0;
        cell(&row);
    }
}

#[test]
#[ignore = "minutes: the nightly run asks for it"]
fn the_newest_checkpoints_take_every_pair() {
    let rows = rows();
    let failed: Vec<&Vec<usize>> = rows
        .iter()
        .filter(|row| std::panic::catch_unwind(|| cell(row)).is_err())
        .collect();
    assert!(failed.is_empty(), "of {} rows: {failed:?}", rows.len());
}

//! Runs that combine what the checkpoints can do: methods, stages, tiers, precisions, forms of data, devices, and
//! what comes before or after training. Each pair of values of two of these is in one run.

use crate::generate::run;
use crate::site::{Site, log_rows, losses, read_json};
use device_tests::tolerance;
use kernels::DType;
use models::WeightSource;
use serde_json::{Value, json};
use std::fs;
use tests::pairwise;

/// Golden pack of a published checkpoint.
struct Checkpoint {
    name: &'static str,
    presets: [&'static str; 2],
    /// Fields of its `config.json` that give all heads 32 elements. GPUs have built-in kernels in 16 bits for such heads,
    /// while heads of the packs are narrower.
    wide: &'static [(&'static str, u64)],
}

const CHECKPOINTS: [Checkpoint; 12] = [
    Checkpoint {
        name: "minicpm-v-4_5",
        presets: ["minicpm-lora", "minicpm-full"],
        wide: &[
            ("/head_dim", 32),
            ("/vision_config/hidden_size", 64),
            ("/vision_config/num_attention_heads", 2),
        ],
    },
    Checkpoint {
        name: "minicpm-o-4_5",
        presets: ["minicpm-qlora", "minicpm-full"],
        wide: &[("/vision_config/num_attention_heads", 1)],
    },
    Checkpoint {
        name: "glm-ocr",
        presets: ["glm-ocr-lora", "glm-ocr-full"],
        wide: &[
            ("/vision_config/hidden_size", 64),
            ("/vision_config/num_heads", 2),
        ],
    },
    Checkpoint {
        name: "glm-4.6v-flash",
        presets: ["glm-4.6v-flash-lora", "glm4v-qlora"],
        wide: &[
            ("/text_config/num_attention_heads", 2),
            ("/text_config/num_key_value_heads", 1),
            ("/text_config/rope_parameters/mrope_section/0", 2),
            ("/text_config/rope_parameters/mrope_section/1", 2),
            ("/text_config/rope_parameters/mrope_section/2", 4),
            ("/vision_config/num_heads", 1),
        ],
    },
    Checkpoint {
        name: "cogagent-9b-20241220",
        presets: ["cogagent-9b-lora", "cogagent-9b-full"],
        wide: GLM4V_WIDE,
    },
    Checkpoint {
        name: "minicpm-v-2_6",
        presets: ["minicpm-lora", "minicpm-full"],
        wide: &[
            ("/vision_config/hidden_size", 64),
            ("/vision_config/num_attention_heads", 2),
        ],
    },
    Checkpoint {
        name: "minicpm-o-2_6",
        presets: ["minicpm-lora", "minicpm-qlora"],
        wide: &[("/vision_config/num_attention_heads", 1)],
    },
    Checkpoint {
        name: "glm-4.1v-9b-thinking",
        presets: ["glm-4.6v-flash-lora", "glm4v-qlora"],
        wide: &[
            ("/text_config/num_attention_heads", 2),
            ("/text_config/num_key_value_heads", 1),
            ("/text_config/rope_scaling/mrope_section/0", 2),
            ("/text_config/rope_scaling/mrope_section/1", 2),
            ("/text_config/rope_scaling/mrope_section/2", 4),
            ("/vision_config/num_heads", 1),
        ],
    },
    Checkpoint {
        name: "glm-4v-9b",
        presets: ["glm4v-lora", "glm4v-full"],
        wide: GLM4V_WIDE,
    },
    Checkpoint {
        name: "cogvlm-chat-hf",
        presets: ["cogvlm-captcha", "cogvlm-qlora"],
        wide: &[
            ("/hidden_size", 64),
            ("/num_attention_heads", 2),
            ("/vision_config/num_heads", 1),
        ],
    },
    Checkpoint {
        name: "cogvlm2-llama3-chat-19B",
        presets: ["cogvlm2-peft", "cogvlm-qlora"],
        wide: &[
            ("/num_attention_heads", 2),
            ("/num_multi_query_heads", 1),
            ("/vision_config/hidden_size", 32),
            ("/vision_config/num_heads", 1),
        ],
    },
    Checkpoint {
        name: "cogagent-chat-hf",
        presets: ["cogagent-captcha", "cogvlm-qlora"],
        wide: &[
            ("/hidden_size", 64),
            ("/num_attention_heads", 2),
            ("/vision_config/num_heads", 1),
            ("/cross_hidden_size", 64),
            ("/cross_compute_hidden_size", 64),
            ("/cross_vision_config/width", 64),
            ("/cross_vision_config/head_width", 32),
        ],
    },
];
const GLM4V_WIDE: &[(&str, u64)] = &[
    ("/num_attention_heads", 2),
    ("/kv_channels", 32),
    ("/multi_query_group_num", 1),
    ("/vision_config/num_heads", 1),
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
const FORMS: [Form; 3] = [Form::OpenBmb, Form::Messages, Form::ShareGpt];
/// Devices with precisions. The GPU is the fake driver's. In 16 bits the model there is one with wide heads.
const NUMBERS: [(&str, &str); 8] = [
    ("cpu", "f32"),
    ("cpu", "bf16"),
    ("cpu", "fp16"),
    ("cpu", "pure-bf16"),
    ("cuda", "f32"),
    ("cuda", "bf16"),
    ("cuda", "fp16"),
    ("cuda", "pure-bf16"),
];
const NEXT: [Next; 7] = [
    Next::Export,
    Next::Generate,
    Next::Evaluate,
    Next::Resume,
    Next::Plan,
    Next::Synth,
    Next::Preset,
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
    let [pack, method, stage, tier, numbers, form, next] = *row else {
        panic!("a row has seven values");
    };
    let Checkpoint {
        name,
        presets,
        wide,
    } = &CHECKPOINTS[pack];
    let (device, mut precision) = NUMBERS[numbers];
    let mut site = Site::with_family(name);
    if device == "cuda" {
        site.take_fake_driver();
    }
    fs::create_dir(site.path("disk")).unwrap();
    let data = FORMS[form].write(&site);
    let common = |precision: &str| {
        let (stage, tier) = (STAGES[stage], TIERS[tier]);
        let text = match *name {
            "cogagent-chat-hf" => " --text-without-cross true",
            _ => "",
        };
        // With the default scale the first updates overflow.
        let scale = match precision {
            "fp16" => " --initial-scale-power 8",
            _ => "",
        };
        format!("{stage} {tier} --precision {precision}{scale} --nproc 2 --verify-gpu off{text}")
    };
    let method = METHODS[method];
    // Activations of the GLM-4 decoders exceed the range of f16.
    let exceeds =
        name.starts_with("glm-4") || name.starts_with("glm-ocr") || name.starts_with("cogagent-9b");
    if precision == "fp16" && exceeds {
        let line = format!("{method} {} --device {device}", common(precision));
        let outcome = site.run(&line);
        assert_eq!(outcome.code, Some(2), "{}", outcome.screen);
        assert!(outcome.screen.contains("fp16"), "{}", outcome.screen);
        precision = "bf16";
    }
    if device == "cuda" && precision != "f32" {
        widen(&site, wide);
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
            let reference = format!("{output}-on-cpu");
            train(flags, "cpu", &reference);
            near(&site, [output, &reference], precision);
        }
        got
    };
    let line = format!("{method} {common} --data {data}");
    let cell = format!("{name}: {line} --device {device}");
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
            let preset = presets[form % 2];
            let form = FORMS[form].name();
            // Those presets train layers that the published towers have.
            let train = match preset.ends_with("captcha") {
                true => r" --train model\.vision\.transformer\.layers\.1\.mlp",
                false => "",
            };
            let flags = format!(
                "--preset {preset} {common} --data {data} --data-format {form} --gradient-accumulation-steps 1{train}"
            );
            assert_eq!(like_the_cpu(&flags, "out").len(), 2, "{cell}");
            return;
        }
        _ => like_the_cpu(&line, "out"),
    };
    let adapts = !site.path("out/checkpoint-2/model.safetensors").is_file();
    let computed = precision.trim_start_matches("pure-");
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
            let ask = format!(
                "--prompt Hello --max-new-tokens 3 --precision {computed} --verify-gpu off"
            );
            run(&site, &format!("generate {model} {ask} --device {device}"));
        }
        Next::Evaluate => {
            let ask = format!("--precision {computed} --max-new-tokens 2 --verify-gpu off");
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

/// Two runs have the same losses and gradient norms, up to the order of sums and the roundings of the precision.
fn near(site: &Site, runs: [&str; 2], precision: &str) {
    let dtype = match precision {
        "f32" => DType::F32,
        "fp16" => DType::F16,
        _ => DType::BF16,
    };
    for (key, allowed) in [
        (
            "loss",
            tolerance::trajectory as fn(DType, f64, usize) -> f64,
        ),
        ("grad_norm", |dtype, want, updates| {
            (updates + 1) as f64 * tolerance::trained(dtype, want)
        }),
    ] {
        let [got, want] = runs.map(|run| {
            let rows = log_rows(&site.path(run)).into_iter();
            rows.filter_map(|row| row[key].as_f64()).collect::<Vec<_>>()
        });
        assert_eq!((got.len(), want.len()), (2, 2), "{key}");
        for (step, (got, want)) in got.iter().zip(&want).enumerate() {
            let allowed = allowed(dtype, *want, step);
            assert!(
                (got - want).abs() <= allowed,
                "{key}: {got} instead of {want}"
            );
        }
    }
}

/// Gives the site's model these sizes and random weights.
fn widen(site: &Site, sizes: &[(&str, u64)]) {
    let path = site.path("model/config.json");
    let mut config = read_json(&path);
    for (field, size) in sizes {
        *config.pointer_mut(field).unwrap() = (*size).into();
    }
    fs::write(path, config.to_string()).unwrap();
    run(site, "synth --model-config model --output wide --shards 1");
    let weights = "model.safetensors";
    fs::rename(
        site.path("wide").join(weights),
        site.path("model").join(weights),
    )
    .unwrap();
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
        NUMBERS.len(),
        FORMS.len(),
        NEXT.len(),
    ])
}

/// One combination of each checkpoint on the CPU; the nightly run takes all.
#[test]
fn checkpoints_take_combinations() {
    let rows = rows();
    for pack in 0..CHECKPOINTS.len() {
        // Another method for each.
        let row = rows
            .iter()
            .find(|row| row[0] == pack && row[1] == (2 + pack) % METHODS.len());
        let mut row = row.expect("every checkpoint meets every method").clone();
        row[4] %= NUMBERS.len() / 2;
        cell(&row);
    }
}

#[test]
#[ignore = "minutes: the nightly run asks for it"]
fn checkpoints_take_every_pair() {
    let rows = rows();
    let failed: Vec<&Vec<usize>> = rows
        .iter()
        .filter(|row| std::panic::catch_unwind(|| cell(row)).is_err())
        .collect();
    assert!(failed.is_empty(), "of {} rows: {failed:?}", rows.len());
}

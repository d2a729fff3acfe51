//! Runs that combine what the newest checkpoints can do: methods, stages, tiers, precisions, forms of data, and what
//! comes after training. Each pair of values of two of these is in one run.

use crate::generate::run;
use crate::site::{Site, losses};
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
const NEXT: [Next; 4] = [Next::Export, Next::Generate, Next::Evaluate, Next::Resume];

/// Layout of a data file.
#[derive(Clone, Copy)]
enum Form {
    OpenBmb,
    Messages,
    ShareGpt,
}

/// What a user does with a run.
#[derive(Clone, Copy)]
enum Next {
    Export,
    Generate,
    Evaluate,
    Resume,
}

impl Form {
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

/// One run, and what comes after it.
fn cell(row: &[usize]) {
    let [pack, method, stage, tier, precision, form, next] = *row else {
        panic!("a row has seven values");
    };
    let site = Site::with_family(CHECKPOINTS[pack]);
    fs::create_dir(site.path("disk")).unwrap();
    let data = FORMS[form].write(&site);
    let method = METHODS[method];
    let line = |precision: &str| {
        format!(
            "{method} {} {} --precision {precision} --nproc 2 --data {data}",
            STAGES[stage], TIERS[tier]
        )
    };
    let mut precision = PRECISIONS[precision];
    if precision == "fp16" && !CHECKPOINTS[pack].starts_with("minicpm") {
        let outcome = site.run(&line(precision));
        assert_eq!(outcome.code, Some(2), "{}", outcome.screen);
        assert!(outcome.screen.contains("fp16"), "{}", outcome.screen);
        precision = "bf16";
    }
    let line = line(precision);
    let cell = format!("{}: {line}", CHECKPOINTS[pack]);
    site.train(&line);
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
            let ask = "--prompt Hello --max-new-tokens 3 --precision f32";
            run(&site, &format!("generate {model} {ask}"));
        }
        Next::Evaluate => {
            let line = format!("eval {model} --data {data} --precision f32 --max-new-tokens 2");
            let loss = run(&site, &line).json()["eval_loss"].as_f64();
            assert!(loss.is_some_and(f64::is_finite), "{cell}: {loss:?}");
        }
        Next::Resume => {
            site.train(&format!("{line} --max-steps 3 --resume auto"));
            assert_eq!(losses(&site.path("out")).len(), 3, "{cell}");
        }
    }
}

fn rows() -> Vec<Vec<usize>> {
    pairwise::rows(&[
        CHECKPOINTS.len(),
        METHODS.len(),
        STAGES.len(),
        TIERS.len(),
        PRECISIONS.len(),
        FORMS.len(),
        NEXT.len(),
    ])
}

/// One combination of each checkpoint; the nightly run takes all.
#[test]
fn the_newest_checkpoints_take_combinations() {
    let rows = rows();
    for pack in 0..CHECKPOINTS.len() {
        // Another method for each.
        let row = rows.iter().find(|row| row[0] == pack && row[1] == 2 + pack);
        cell(row.expect("every checkpoint meets every method"));
    }
}

#[test]
#[ignore = "half a minute: the nightly run asks for it"]
fn the_newest_checkpoints_take_every_pair() {
    rows().iter().for_each(|row| cell(row));
}

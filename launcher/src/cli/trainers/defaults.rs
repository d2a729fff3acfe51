//! Defaults of other trainers: the values that their own keys take when a recipe leaves them out.
//!
//! Listed is what changes a result. Sharding, offload, recomputation, ranks and logging keep this program's defaults.

use super::Trainer;
use crate::cli::Preset;
use crate::error::Failure;
use crate::lang::{both, text};
use models::Family;
use std::path::Path;

/// A setting that a recipe leaves out, with the value of its trainer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::cli) struct Absent {
    /// The flag in kebab-case, without dashes.
    pub(in crate::cli) flag: &'static str,
    /// Its value.
    pub(in crate::cli) value: String,
}

type Flags = &'static [(&'static str, &'static str)];

/// transformers, `src/transformers/training_args.py`, `TrainingArguments` (the same in 4.x and 5.x).
const TRANSFORMERS: Flags = &[
    ("learning-rate", "5e-5"),
    ("lr-scheduler-type", "linear"),
    ("warmup-steps", "0"),
    ("weight-decay", "0"),
    ("adam-beta1", "0.9"),
    ("adam-beta2", "0.999"),
    ("adam-epsilon", "1e-8"),
    ("max-grad-norm", "1"),
    ("num-train-epochs", "3"),
    ("per-device-train-batch-size", "8"),
    ("gradient-accumulation-steps", "1"),
    ("seed", "42"),
];
/// `bf16` and `fp16` are false in `TrainingArguments`.
const F32: Flags = &[("precision", "f32")];
/// peft, `src/peft/tuners/lora/config.py`, `LoraConfig`. Its `target_modules` depend on the model.
const PEFT: Flags = &[
    ("lora-rank", "8"),
    ("lora-alpha", "8"),
    ("lora-dropout", "0"),
    ("modules-to-save", "none"),
    ("tune-vision", "false"),
];

/// LLaMA-Factory, `src/llamafactory/hparams/`: `finetuning_args.py` (`finetuning_type`, `freeze_vision_tower`,
/// `freeze_multi_modal_projector`), `data_args.py` (`cutoff_len`) and `model_args.py` (`image_max_pixels`, 768 x 768, and
/// `image_min_pixels`, 32 x 32). The weights' own type is the compute type.
const LLAMA_FACTORY: Flags = &[
    ("use-lora", "true"),
    ("tune-vision", "false"),
    ("model-max-length", "2048"),
    ("image-max-pixels", "589824"),
    ("image-min-pixels", "1024"),
    ("precision", "bf16"),
];
/// The same, `LoraArguments`. `lora_alpha` is twice the rank.
const LLAMA_FACTORY_ADAPTERS: Flags = &[
    ("lora-rank", "8"),
    ("lora-dropout", "0"),
    ("lora-target-modules", "all"),
    ("modules-to-save", "none"),
];
/// The same, full fine-tuning.
const FROZEN_PROJECTOR: Flags = &[("freeze", "projector")];

/// ms-swift, `swift/llm/argument/tuner_args.py` and `train_args.py`, `swift/trainers/arguments.py` (3.x). The type of
/// `config.json` is the compute type.
const MS_SWIFT: Flags = &[
    ("use-lora", "true"),
    ("tune-vision", "false"),
    ("weight-decay", "0.1"),
    ("adam-beta2", "0.95"),
    ("lr-scheduler-type", "cosine"),
    ("per-device-train-batch-size", "1"),
    ("precision", "bf16"),
];
/// The same, `TunerArguments`.
const MS_SWIFT_ADAPTERS: Flags = &[
    ("lora-rank", "8"),
    ("lora-alpha", "32"),
    ("lora-dropout", "0.05"),
    ("lora-target-modules", "all"),
    ("modules-to-save", "none"),
    ("learning-rate", "1e-4"),
];
const MS_SWIFT_FULL: Flags = &[("learning-rate", "1e-5"), ("freeze", "projector")];

/// OpenBMB/MiniCPM-V, `finetune/finetune.py`, `TrainingArguments`.
const OPENBMB: Flags = &[
    ("use-lora", "false"),
    ("tune-vision", "true"),
    ("model-max-length", "2048"),
    ("max-slice-nums", "9"),
];
/// The same, `LoraArguments`. The script also trains resampler, token embeddings and, if tuned, the vision tower.
const OPENBMB_ADAPTERS: Flags = &[
    ("tune-llm", "false"),
    ("lora-rank", "64"),
    ("lora-alpha", "64"),
    ("lora-dropout", "0.05"),
    (
        "lora-target-modules",
        r"llm\..*layers\.\d+\.self_attn\.(q_proj|k_proj|v_proj)",
    ),
];
const OPENBMB_FULL: Flags = &[("tune-llm", "true")];

/// THUDM/GLM-4, `finetune_demo/finetune_vision.py`: the model is loaded in bf16, `training_args` are
/// `Seq2SeqTrainingArguments` and `peft_config` is peft's.
const GLM4: Flags = &[("precision", "bf16")];

/// SwissArmyTransformer, `sat/arguments.py` and `sat/training/deepspeed_zero*.json`. Its `linear` decays to zero after
/// the warmup; here it ends with the run.
const SAT: Flags = &[
    ("use-lora", "false"),
    ("learning-rate", "1e-4"),
    ("lr-scheduler-type", "sat_linear"),
    ("warmup-ratio", "0.01"),
    ("weight-decay", "0.01"),
    ("adam-beta1", "0.9"),
    ("adam-beta2", "0.95"),
    ("adam-epsilon", "1e-8"),
    ("max-grad-norm", "0.1"),
    ("per-device-train-batch-size", "4"),
    ("gradient-accumulation-steps", "1"),
    ("seed", "1234"),
];
/// THUDM/CogVLM, `finetune_demo/finetune_cogvlm_demo.py` and `finetune_cogagent_demo.py`: what these scripts train and
/// read is fixed in their code. The presets after them name it.
const SAT_FIXED: [&str; 4] = ["data-format", "template", "no-decay", "train"];
const SAT_ADAPTERS: [&str; 4] = [
    "lora-alpha",
    "lora-per-projection",
    "lora-target-modules",
    "modules-to-save",
];

/// Settings of `trainer` for a recipe that has the flags `given`; the first row of a flag counts. Rows of flags that are
/// given are included. Saved adapters bring their own rank, alpha, dropout and layers, as in every trainer.
pub(in crate::cli) fn absent(
    trainer: Trainer,
    given: &dyn Fn(&str) -> Option<String>,
) -> Vec<Absent> {
    let adapters = has_adapters(trainer, given);
    let mut rows = Rows::default();
    packed(trainer, given, &mut rows);
    match trainer {
        Trainer::LlamaFactory => {
            rows.add(LLAMA_FACTORY);
            if adapters {
                rows.add(LLAMA_FACTORY_ADAPTERS);
                let rank = given("lora-rank").and_then(|rank| rank.parse::<usize>().ok());
                rows.push("lora-alpha", (2 * rank.unwrap_or(8)).to_string());
            } else {
                rows.add(FROZEN_PROJECTOR);
            }
            rows.add(TRANSFORMERS);
        }
        Trainer::MsSwift => {
            rows.add(MS_SWIFT);
            rows.add(if adapters {
                MS_SWIFT_ADAPTERS
            } else {
                MS_SWIFT_FULL
            });
            if let Some(tokens) = given("model").and_then(|model| positions(Path::new(&model))) {
                rows.push("model-max-length", tokens.to_string());
            }
            if let Some(samples) = swift_global_batch(given) {
                rows.push("global-batch-size", samples.to_string());
            }
            rows.add(TRANSFORMERS);
        }
        Trainer::OpenBmb => {
            rows.add(OPENBMB);
            rows.add(if adapters {
                OPENBMB_ADAPTERS
            } else {
                OPENBMB_FULL
            });
            if adapters {
                let tower = given("tune-vision").is_none_or(|value| value != "false");
                let tower = if tower { ",vpm" } else { "" };
                rows.push("modules-to-save", format!("embed_tokens,resampler{tower}"));
            }
            rows.add(F32);
            rows.add(TRANSFORMERS);
        }
        Trainer::Glm4 | Trainer::HuggingFace => {
            rows.add(if trainer == Trainer::Glm4 { GLM4 } else { F32 });
            rows.add(if adapters { PEFT } else { &[] });
            rows.add(TRANSFORMERS);
        }
        Trainer::Sat => sat(adapters, given, &mut rows),
        Trainer::CogVlm2 => cogvlm2(&mut rows),
        Trainer::TwoU1 => two_u1(adapters, given, &mut rows),
    }
    if given("adapter").is_some() {
        rows.0.retain(|row| !row.flag.starts_with("lora-"));
    }
    rows.0
}

#[derive(Default)]
struct Rows(Vec<Absent>);

impl Rows {
    fn push(&mut self, flag: &'static str, value: String) {
        let has = |flag: &str| self.0.iter().any(|row| row.flag == flag);
        // A global batch stands for the accumulation.
        let follows = flag == "gradient-accumulation-steps" && has("global-batch-size");
        if !has(flag) && !follows {
            self.0.push(Absent { flag, value });
        }
    }

    fn add(&mut self, flags: Flags) {
        for (flag, value) in flags {
            self.push(flag, (*value).to_owned());
        }
    }
}

fn has_adapters(trainer: Trainer, given: &dyn Fn(&str) -> Option<String>) -> bool {
    let implied = ["lora-rank", "lora-alpha", "lora-target-modules"];
    match given("use-lora") {
        Some(value) => value == "true",
        None => {
            matches!(trainer, Trainer::LlamaFactory | Trainer::MsSwift)
                || (trainer == Trainer::HuggingFace
                    && implied.iter().any(|flag| given(flag).is_some()))
        }
    }
}

/// transformers packs every linear layer but the head; LLaMA-Factory (`model_args.py`), ms-swift (`model_args.py`) and 2U1
/// (`params.py`) pack the scales too.
fn packed(trainer: Trainer, given: &dyn Fn(&str) -> Option<String>, rows: &mut Rows) {
    let is = |flag: &str| given(flag).is_some_and(|value| value == "true");
    if trainer == Trainer::Sat || !(is("load-in-4bit") || is("load-in-8bit")) {
        return;
    }
    rows.push("quantize-modules", "all".to_owned());
    if is("load-in-4bit")
        && matches!(
            trainer,
            Trainer::LlamaFactory | Trainer::MsSwift | Trainer::TwoU1
        )
    {
        rows.push("quantize-double", "true".to_owned());
    }
}

/// Longest sequence of the model in this directory, which is ms-swift's `max_length` where none is given.
fn positions(model: &Path) -> Option<u64> {
    let text = std::fs::read_to_string(model.join("config.json")).ok()?;
    let config: serde_json::Value = serde_json::from_str(&text).ok()?;
    let of = |config: &serde_json::Value| {
        let names = ["max_position_embeddings", "seq_length"];
        names.iter().find_map(|name| config[name].as_u64())
    };
    of(&config).or_else(|| of(&config["text_config"]))
}

/// ms-swift accumulates to at least 16 samples over all ranks.
fn swift_global_batch(given: &dyn Fn(&str) -> Option<String>) -> Option<usize> {
    let number = |flag: &str| given(flag).and_then(|value| value.parse::<usize>().ok());
    if given("gradient-accumulation-steps").is_some() {
        return None;
    }
    let each = number("per-device-train-batch-size").unwrap_or(1) * number("nproc").unwrap_or(1);
    Some(16_usize.div_ceil(each.max(1)) * each)
}

/// 2U1/Qwen2-VL-Finetune, `src/params.py`. Tower and projector train in full beside adapters unless they are frozen.
fn two_u1(adapters: bool, given: &dyn Fn(&str) -> Option<String>, rows: &mut Rows) {
    rows.add(&[("use-lora", "false"), ("model-max-length", "32768")]);
    if adapters {
        rows.add(&[
            ("lora-rank", "64"),
            ("lora-alpha", "16"),
            ("lora-dropout", "0.05"),
            ("lora-target-modules", "all"),
            ("modules-to-save", "none"),
        ]);
        let projector = given("freeze").is_none_or(|parts| parts == "none");
        let tower = given("tune-vision").is_none_or(|value| value != "false");
        let parts = [(projector, "projector"), (tower, "vision")];
        let trained: Vec<&str> = parts
            .into_iter()
            .filter_map(|(trains, part)| trains.then_some(part))
            .collect();
        if !trained.is_empty() {
            rows.push("train", trained.join(","));
        }
    }
    rows.add(F32);
    rows.add(TRANSFORMERS);
}

/// THUDM/CogVLM2, `finetune_demo/peft_lora.py`: the preset, and the script's own epochs and batch.
fn cogvlm2(rows: &mut Rows) {
    rows.add(&[
        ("num-train-epochs", "5"),
        ("per-device-train-batch-size", "2"),
        ("use-lora", "true"),
    ]);
    let preset = Preset::named("cogvlm2-peft").map_or(&[][..], |preset| preset.flags);
    // Sharding and recomputation keep this program's defaults.
    let settings = |flag: &str| !matches!(flag, "zero" | "checkpoint-activations");
    for (flag, value) in preset.iter().filter(|(flag, _)| settings(flag)) {
        rows.push(flag, (*value).to_owned());
    }
}

fn sat(adapters: bool, given: &dyn Fn(&str) -> Option<String>, rows: &mut Rows) {
    let agent = given("model").is_some_and(|model| model.to_lowercase().contains("cogagent"));
    let script = if agent {
        "cogagent-captcha"
    } else {
        "cogvlm-captcha"
    };
    let preset = Preset::named(script).map_or(&[][..], |preset| preset.flags);
    // What the scripts train and read are parts of CogVLM and CogAgent; another model has none of them.
    let family = given("model").and_then(|model| Family::of(Path::new(&model)).ok());
    let is_cog = family.is_none_or(|family| matches!(family, Family::CogVlm | Family::CogAgent));
    let preset = if is_cog { preset } else { &[] };
    let mut take = |names: &[&str]| {
        for (flag, value) in preset.iter().filter(|(flag, _)| names.contains(flag)) {
            rows.push(flag, (*value).to_owned());
        }
    };
    take(&SAT_FIXED);
    if adapters {
        take(&SAT_ADAPTERS);
        rows.push("lora-rank", "10".to_owned());
    }
    rows.add(SAT);
    // The framework turns fp16 on for every ZeRO stage above 0.
    let sharded = given("zero").is_some_and(|stage| stage != "0");
    let precision = if sharded { "fp16" } else { "f32" };
    rows.push("precision", precision.to_owned());
}

/// Refuses a recipe whose trainer would put adapters on the vision tower or the projector: here they would train in
/// full.
pub(in crate::cli) fn refuse_adapted_tower(
    trainer: Trainer,
    given: &dyn Fn(&str) -> Option<String>,
) -> Result<(), Failure> {
    let puts = matches!(trainer, Trainer::LlamaFactory | Trainer::MsSwift);
    let is = |flag: &str, value: &str| given(flag).is_some_and(|given| given == value);
    let part = match () {
        () if is("tune-vision", "true") => both("the vision tower", "视觉塔"),
        () if is("freeze", "none") => both("the projector", "投影层"),
        () if is("tune-llm", "false") => {
            both("nothing of the language model", "语言模型之外的部分")
        }
        () => return Ok(()),
    };
    if !puts || !has_adapters(trainer, given) {
        return Ok(());
    }
    Err(Failure::usage(
        text!("{} puts adapters on {part}", "{} 把适配器加在{part}上", trainer.name()),
        both("adapters by name are on the language model here; the rest trains in full or not at all", "这里按名称选择的适配器在语言模型上；其余部分要么全量训练，要么不训练"),
    )
    .next(both("freeze vision tower and projector in the recipe, and not the language model", "请在配方中冻结视觉塔和投影层，而不冻结语言模型"))
    .next(both("--defaults ours, with --tune-vision true or --modules-to-save NAMES, trains a part in full", "使用 --defaults ours，并用 --tune-vision true 或 --modules-to-save NAMES 全量训练某个部分")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(trainer: Trainer, line: &str) -> Vec<(&'static str, String)> {
        let given = |flag: &str| {
            let mut words = line.split_whitespace();
            let found = words.find_map(|word| word.strip_prefix(&format!("{flag}=")));
            found.map(str::to_owned)
        };
        let rows = absent(trainer, &given);
        rows.into_iter().map(|row| (row.flag, row.value)).collect()
    }

    fn check(trainer: Trainer, line: &str, expected: &[(&str, &str)]) {
        let rows = rows(trainer, line);
        for (flag, value) in expected {
            let row = rows.iter().find(|(name, _)| name == flag);
            assert_eq!(
                row.map(|(_, value)| &**value),
                Some(*value),
                "{trainer:?} {line}: {flag}"
            );
        }
    }

    #[test]
    fn every_trainer_has_the_defaults_of_its_source() {
        use Trainer::{Glm4, HuggingFace, LlamaFactory, MsSwift, OpenBmb, Sat};
        check(
            LlamaFactory,
            "load-in-4bit=true",
            &[("quantize-double", "true"), ("quantize-modules", "all")],
        );
        check(
            LlamaFactory,
            "lora-rank=16",
            &[
                ("use-lora", "true"),
                ("lora-alpha", "32"),
                ("modules-to-save", "none"),
                ("tune-vision", "false"),
                ("weight-decay", "0"),
                ("adam-beta2", "0.999"),
                ("learning-rate", "5e-5"),
                ("per-device-train-batch-size", "8"),
            ],
        );
        check(LlamaFactory, "use-lora=false", &[("freeze", "projector")]);
        for trainer in [LlamaFactory, MsSwift, OpenBmb, Glm4, Sat] {
            let rows = rows(trainer, "adapter=a use-lora=true");
            assert!(
                !rows.iter().any(|(flag, _)| flag.starts_with("lora-")),
                "{trainer:?}: {rows:?}"
            );
        }
        check(
            MsSwift,
            "",
            &[
                ("lora-alpha", "32"),
                ("lora-dropout", "0.05"),
                ("learning-rate", "1e-4"),
                ("adam-beta2", "0.95"),
                ("weight-decay", "0.1"),
                ("global-batch-size", "16"),
            ],
        );
        let directory = tempfile::tempdir().expect("temp dir");
        let file = directory.path().join("config.json");
        for config in [
            "{\"max_position_embeddings\": 640}",
            "{\"text_config\": {\"max_position_embeddings\": 640}}",
        ] {
            std::fs::write(&file, config).expect("written");
            let line = format!("model={}", directory.path().display());
            check(MsSwift, &line, &[("model-max-length", "640")]);
        }
        check(MsSwift, "nproc=3", &[("global-batch-size", "18")]);
        check(MsSwift, "use-lora=false", &[("learning-rate", "1e-5")]);
        check(
            OpenBmb,
            "use-lora=true",
            &[
                ("lora-dropout", "0.05"),
                ("lora-alpha", "64"),
                ("modules-to-save", "embed_tokens,resampler,vpm"),
                ("precision", "f32"),
            ],
        );
        check(
            OpenBmb,
            "use-lora=true tune-vision=false",
            &[("modules-to-save", "embed_tokens,resampler")],
        );
        check(
            Glm4,
            "use-lora=true",
            &[
                ("modules-to-save", "none"),
                ("tune-vision", "false"),
                ("precision", "bf16"),
            ],
        );
        check(
            HuggingFace,
            "lora-rank=4",
            &[("lora-alpha", "8"), ("precision", "f32")],
        );
        check(
            Sat,
            "use-lora=true model=cogagent-chat",
            &[
                ("lora-rank", "10"),
                ("lora-alpha", "1"),
                ("template", "sat-chat"),
                ("max-grad-norm", "0.1"),
                ("seed", "1234"),
            ],
        );
        check(
            Sat,
            "zero=1",
            &[("precision", "fp16"), ("template", "sat-base")],
        );
    }

    #[test]
    fn every_default_is_a_flag_with_a_value_it_takes() {
        for trainer in [
            "llama-factory",
            "ms-swift",
            "openbmb",
            "glm-4",
            "sat",
            "hugging-face",
        ] {
            let trainer = Trainer::named(trainer).expect("a trainer");
            for line in ["use-lora=true", "use-lora=false"] {
                for (flag, value) in rows(trainer, line) {
                    crate::cli::train_args(&[format!("--{flag}={value}")]).expect(flag);
                }
            }
        }
    }

    #[test]
    fn recipes_with_adapters_on_the_tower_are_refused() {
        let judge = |line: &str| {
            let given = |flag: &str| {
                let mut words = line.split_whitespace();
                let found = words.find_map(|word| word.strip_prefix(&format!("{flag}=")));
                found.map(str::to_owned)
            };
            refuse_adapted_tower(Trainer::LlamaFactory, &given)
        };
        judge("tune-vision=true").expect_err("adapters on the tower");
        judge("freeze=none").expect_err("adapters on the projector");
        judge("tune-vision=true use-lora=false").expect("full fine-tuning");
        judge("tune-vision=false").expect("adapters on the language model");
    }
}

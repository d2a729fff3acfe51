//! Files with training flags: TOML for this program, YAML of LLaMA-Factory and of the Hugging Face trainers, and the
//! files of GLM-4's scripts.

use super::given::Given;
use super::report::{Choice, Outcome, Problem, Report, Row};
use super::value::{Entry, Value};
use crate::cli::{FileKey, file_key};
use crate::config::TemplateChoice;
use clap::ValueEnum;

const MAX_LENGTH: &str =
    "--model-max-length counts all tokens of the decoder, including those of images";
const IMAGES: &str = "--max-slice-nums limits the size of images";
const NO_TORCH: &str = "this program does not use PyTorch";
const GENERATION: &str =
    "it concerns generation; `launcher generate` and `launcher eval` have flags for it";
const CACHE: &str = "samples are read when they are needed";
const ADAPTER_KIND: &str = "adapters are low-rank matrices";

/// Meaning of a key that is not a flag here.
enum Meaning {
    /// It becomes this flag with the same value.
    Flag(&'static str),
    /// Words with the flag and value that each means; other words are refused.
    Words(&'static [(&'static str, &'static str, &'static str)]),
    /// No effect, for this reason.
    Unused(&'static str),
    /// No effect for these values; others are refused, for this reason.
    Only(&'static [&'static str], &'static str),
}

use Meaning::{Flag, Only, Unused, Words};

/// Keys of LLaMA-Factory's files.
const LLAMA_FACTORY: &[(&str, Meaning)] = &[
    ("stage", Only(&["sft"], "a run is supervised fine-tuning")),
    (
        "finetuning_type",
        Words(&[("lora", "use-lora", "true"), ("full", "use-lora", "false")]),
    ),
    ("lora_target", Flag("lora-target-modules")),
    ("additional_target", Flag("modules-to-save")),
    ("cutoff_len", Flag("model-max-length")),
    ("max_samples", Flag("limit")),
    (
        "pure_bf16",
        Words(&[("true", "precision", "pure-bf16"), ("false", "", "")]),
    ),
    (
        "freeze_vision_tower",
        Words(&[
            ("true", "tune-vision", "false"),
            ("false", "tune-vision", "true"),
        ]),
    ),
    (
        "freeze_language_model",
        Words(&[("true", "tune-llm", "false"), ("false", "tune-llm", "true")]),
    ),
    ("overwrite_cache", Unused(CACHE)),
    ("tokenized_path", Unused(CACHE)),
    ("preprocessing_batch_size", Unused(CACHE)),
    (
        "plot_loss",
        Unused("report.html and training_loss.svg are always drawn"),
    ),
    ("flash_attn", Unused("attention is always tiled")),
    ("enable_liger_kernel", Unused(NO_TORCH)),
    ("use_unsloth", Unused(NO_TORCH)),
    ("image_max_pixels", Unused(IMAGES)),
    ("image_min_pixels", Unused(IMAGES)),
    ("video_max_pixels", Unused(IMAGES)),
    (
        "val_size",
        Only(&["0", "0.0"], "--eval-data gives the held-out samples"),
    ),
    (
        "quantization_bit",
        Only(&[], "quantized base weights are not available"),
    ),
    ("use_dora", Only(&["false"], ADAPTER_KIND)),
    (
        "use_rslora",
        Only(&["false"], "the scale of an adapter is alpha ÷ rank"),
    ),
    ("generation_config", Unused(GENERATION)),
    ("generation_max_length", Unused(GENERATION)),
];

/// Keys of `data_config` in GLM-4's files, and of the top level.
const GLM_DATA: &[(&str, Meaning)] = &[
    ("train_file", Flag("data")),
    ("val_file", Flag("eval-data")),
    (
        "test_file",
        Unused("`launcher eval` evaluates a checkpoint on any file"),
    ),
    ("num_proc", Unused(CACHE)),
];
const GLM_TOP: &[(&str, Meaning)] = &[
    ("max_input_length", Unused(MAX_LENGTH)),
    ("max_output_length", Unused(MAX_LENGTH)),
    ("combine", Unused("a conversation is one sample")),
    (
        "freezeV",
        Words(&[
            ("true", "tune-vision", "false"),
            ("false", "tune-vision", "true"),
        ]),
    ),
];
/// Keys of `peft_config`.
const PEFT: &[(&str, Meaning)] = &[
    ("peft_type", Words(&[("lora", "use-lora", "true")])),
    (
        "task_type",
        Only(&["causal_lm"], "a run trains a language model"),
    ),
    ("r", Flag("lora-rank")),
    ("lora_alpha", Flag("lora-alpha")),
    ("lora_dropout", Flag("lora-dropout")),
    ("target_modules", Flag("lora-target-modules")),
    ("modules_to_save", Flag("modules-to-save")),
    ("bias", Only(&["none"], "adapters do not train biases")),
];

/// Sections: name, keys that are not flags, and whether flags may be in the section.
const SECTIONS: [(&str, &[(&str, Meaning)], bool); 3] = [
    ("training_args", LLAMA_FACTORY, true),
    ("data_config", GLM_DATA, false),
    ("peft_config", PEFT, false),
];

/// Report on the flags in `file`. The flags that are `given` override them.
pub(super) fn report(file: &Value, given: &Given) -> Report {
    let mut report = Report::default();
    for entry in file.entries().unwrap_or_default() {
        let section = SECTIONS.iter().find(|section| section.0 == entry.key);
        match (section, entry.value.entries()) {
            (Some((name, own, flags)), Some(entries)) => {
                for entry in entries {
                    take(entry, &format!("{name}."), own, *flags, given, &mut report);
                }
            }
            _ => {
                let is_glm = GLM_TOP.iter().any(|(name, _)| *name == entry.key);
                let own = if is_glm { GLM_TOP } else { LLAMA_FACTORY };
                take(entry, "", own, true, given, &mut report);
            }
        }
    }
    settle_batch(given, &mut report);
    report
}

fn take(
    entry: &Entry,
    prefix: &str,
    own: &[(&str, Meaning)],
    flags: bool,
    given: &Given,
    report: &mut Report,
) {
    let path = format!("{prefix}{}", entry.key);
    let name = entry.key.replace('-', "_");
    let meaning = own.iter().find(|(own, _)| *own == name).map(|(_, m)| m);
    let outcome = match meaning {
        _ if entry.value == Value::Null => Outcome::Here("nothing is set"),
        Some(Unused(reason)) => Outcome::Unused(reason),
        Some(Flag(flag)) => choose(flag, written(&entry.value), entry, &path, given, report),
        Some(Words(words)) => {
            let text = entry.value.to_string().to_ascii_lowercase();
            match words.iter().find(|(word, ..)| *word == text) {
                Some((_, "", _)) => Outcome::Here("it is off"),
                Some((_, flag, value)) => {
                    choose(flag, Some((*value).to_owned()), entry, &path, given, report)
                }
                None => {
                    let words: Vec<&str> = words.iter().map(|(word, ..)| *word).collect();
                    refuse(
                        entry,
                        &path,
                        &format!("only {} is available", words.join(", ")),
                        None,
                        report,
                    )
                }
            }
        }
        Some(Only(neutral, reason)) => only(neutral, reason, None, entry, &path, report),
        None if flags => flag(entry, &name, &path, given, report),
        None => {
            let near = crate::config::words::nearest(&name, own.iter().map(|(name, _)| *name));
            unknown(entry, &path, near, report)
        }
    };
    report.rows.push(Row::new(path, entry, outcome));
}

/// Handles a key that should be a flag.
fn flag(entry: &Entry, name: &str, path: &str, given: &Given, report: &mut Report) -> Outcome {
    match file_key(name) {
        FileKey::Flag(flag) if flag == "config" => refuse(
            entry,
            path,
            "a configuration file cannot include another one",
            None,
            report,
        ),
        FileKey::Flag(flag) if flag == "template" && !is_template(&entry.value) => {
            Outcome::Unused("the chat template of the model directory is used")
        }
        FileKey::Flag(flag) => choose(&flag, written(&entry.value), entry, path, given, report),
        FileKey::Unused(reason) => Outcome::Unused(reason),
        FileKey::Only(neutral, reason, next) => {
            only(neutral, reason, Some(next), entry, path, report)
        }
        FileKey::Unknown(near) => unknown(entry, path, near.as_deref(), report),
    }
}

fn is_template(value: &Value) -> bool {
    let text = value.as_text().unwrap_or_default();
    TemplateChoice::from_str(text, true).is_ok()
}

/// A value as it would be typed: lists are joined by commas; `None` for sections.
fn written(value: &Value) -> Option<String> {
    match value {
        Value::Null | Value::Map(_) => None,
        Value::Bool(value) => Some(value.to_string()),
        Value::Number(text) | Value::Text(text) => Some(text.clone()),
        Value::List(items) => {
            let items: Option<Vec<String>> = items.iter().map(written).collect();
            items.map(|items| items.join(","))
        }
    }
}

/// Chooses `flag` with `value`, unless the command line has the flag.
fn choose(
    flag: &str,
    value: Option<String>,
    entry: &Entry,
    path: &str,
    given: &Given,
    report: &mut Report,
) -> Outcome {
    let Some(value) = value else {
        return refuse(
            entry,
            path,
            "it must be one value, not a section",
            None,
            report,
        );
    };
    if let Some(word) = given.set_by(flag) {
        return Outcome::Overridden(word.to_string());
    }
    if let Some(first) = report.choices.iter().find(|choice| choice.flag == flag) {
        if first.value == value {
            return Outcome::Flag(flag.to_owned());
        }
        let why = format!("{} says {}", first.keys.join(", "), first.value);
        return refuse(entry, path, &why, Some("keep one of them"), report);
    }
    // 3e3 steps are written as 3000.
    let whole = entry.value.as_u64().map(|whole| whole.to_string());
    let tried = [Some(value), whole].into_iter().flatten();
    let mut failure = None;
    for value in tried {
        match crate::cli::train_args(&[format!("--{flag}={value}")]) {
            Ok(_) => {
                report.choices.push(Choice {
                    flag: flag.to_owned(),
                    value,
                    keys: vec![path.to_owned()],
                });
                return Outcome::Flag(flag.to_owned());
            }
            Err(error) => failure = failure.or(Some(error.title)),
        }
    }
    refuse(entry, path, &failure.unwrap_or_default(), None, report)
}

fn only(
    neutral: &[&str],
    reason: &'static str,
    next: Option<&str>,
    entry: &Entry,
    path: &str,
    report: &mut Report,
) -> Outcome {
    let text = entry.value.to_string();
    if neutral.iter().any(|word| word.eq_ignore_ascii_case(&text)) {
        return Outcome::Here(reason);
    }
    refuse(entry, path, reason, next, report)
}

fn refuse(
    entry: &Entry,
    path: &str,
    why: &str,
    next: Option<&str>,
    report: &mut Report,
) -> Outcome {
    report.errors.push(Problem {
        line: entry.line,
        what: format!("{path} {} is not available", entry.value),
        why: why.to_owned(),
        next: next.map(str::to_owned),
    });
    Outcome::Refused(why.to_owned())
}

fn unknown(entry: &Entry, path: &str, near: Option<&str>, report: &mut Report) -> Outcome {
    let why = "no flag has this name";
    report.errors.push(Problem {
        line: entry.line,
        what: format!("\"{path}\" is not known"),
        why: why.to_owned(),
        next: near.map(|near| format!("did you mean {near}?")),
    });
    Outcome::Refused(why.to_owned())
}

/// Drops the file's accumulation if the global batch and the micro-batch are given, since it follows from them.
fn settle_batch(given: &Given, report: &mut Report) {
    let steps = "gradient-accumulation-steps";
    let Some(word) = given.get("global-batch-size") else {
        return;
    };
    let micro = "per-device-train-batch-size";
    let has_micro = report.choices.iter().any(|choice| choice.flag == micro);
    let position = report
        .choices
        .iter()
        .position(|choice| choice.flag == steps);
    if let Some(position) = position.filter(|_| has_micro || given.set_by(micro).is_some()) {
        let choice = report.choices.remove(position);
        for row in report
            .rows
            .iter_mut()
            .filter(|row| choice.keys.contains(&row.path))
        {
            row.outcome = Outcome::Overridden(word.to_string());
        }
    }
}

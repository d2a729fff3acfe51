//! Files with training flags: TOML for this program, YAML of LLaMA-Factory and of the Hugging Face trainers, and the
//! files of GLM-4's scripts.

use super::given::Given;
use super::report::{Choice, Outcome, Problem, Report, Row};
use super::value::{Entry, Value};
use crate::cli::trainers::{
    Effect, GLM_DATA, GLM_TOP, Meaning, PEFT, Trainer, find, is_word, meaning, own_meaning,
};
use crate::cli::{FileKey, OTHER_REPORT, file_key, split_reports, typed_value};
use crate::config::TemplateChoice;
use crate::error::Failure;
use crate::lang::{Both, Text, both, text};
use clap::ValueEnum;

/// Sections: name, and the keys that are not flags; `None` where keys are those of the top level.
type Section = (&'static str, Option<&'static [(&'static str, Meaning)]>);

const SECTIONS: [Section; 3] = [
    ("training_args", None),
    ("data_config", Some(GLM_DATA)),
    ("peft_config", Some(PEFT)),
];

/// The trainer whose file this is; `None` for a file of this program.
pub(super) fn trainer_of(file: &Value) -> Option<Trainer> {
    let entries = file.entries().unwrap_or_default();
    let keys: Vec<String> = entries
        .iter()
        .map(|entry| entry.key.replace('-', "_"))
        .collect();
    Trainer::of_keys(&keys)
}

/// Report on the flags in `file`, a recipe of `trainer`. The flags that are `given` override them.
pub(super) fn report(file: &Value, trainer: Option<Trainer>, given: &Given) -> Report {
    let mut report = Report::default();
    for entry in file.entries().unwrap_or_default() {
        let section = SECTIONS.iter().find(|section| section.0 == entry.key);
        match (section, entry.value.entries()) {
            (Some((name, own)), Some(entries)) => {
                for entry in entries {
                    take(
                        entry,
                        &format!("{name}."),
                        *own,
                        trainer,
                        given,
                        &mut report,
                    );
                }
            }
            _ => take(entry, "", None, trainer, given, &mut report),
        }
    }
    settle_batch(given, &mut report);
    settle_adapters(given, &mut report);
    report
}

/// Adds the adapters that SwissArmyTransformer's `use_qlora` asks for beside weights of 4 bits.
fn settle_adapters(given: &Given, report: &mut Report) {
    let chosen = |flag: &str| report.choices.iter().find(|choice| choice.flag == flag);
    let by_qlora = chosen("load-in-4bit").is_some_and(|choice| choice.keys == ["use_qlora"]);
    if by_qlora && chosen("use-lora").is_none() && given.set_by("use-lora").is_none() {
        report.choices.push(Choice {
            flag: "use-lora".to_owned(),
            value: "true".to_owned(),
            keys: vec!["use_qlora".to_owned()],
        });
    }
}

/// Judges one key. `section` has the keys of a section without flags.
fn take(
    entry: &Entry,
    prefix: &str,
    section: Option<&'static [(&'static str, Meaning)]>,
    trainer: Option<Trainer>,
    given: &Given,
    report: &mut Report,
) {
    let path = format!("{prefix}{}", entry.key);
    let name = entry.key.replace('-', "_");
    let found = match section {
        Some(keys) => find(keys, &name),
        None => own_meaning(trainer, &name)
            .or_else(|| find(GLM_TOP, &name))
            .or_else(|| meaning(trainer, &name).filter(|_| !is_flag(&name))),
    };
    let outcome = match (found, section) {
        _ if is_unset(&entry.value) => Outcome::Here(both("nothing is set", "没有设定任何内容")),
        (Some(meaning), _) => effect(meaning, entry, &path, given, report),
        (None, None) => flag(entry, &name, &path, given, report),
        (None, Some(keys)) => {
            let names = keys.iter().flat_map(|(names, _)| names.split(' '));
            let near = crate::config::words::nearest(&name, names);
            unknown(entry, &path, near, report)
        }
    };
    report.rows.push(Row::new(path, entry, outcome));
}

/// Whether a value sets nothing: `null`, or an empty list, as trainers store what was not given.
fn is_unset(value: &Value) -> bool {
    matches!(value, Value::Null) || matches!(value, Value::List(items) if items.is_empty())
}

fn is_flag(name: &str) -> bool {
    matches!(file_key(name), FileKey::Flag(_))
}

fn effect(
    meaning: &Meaning,
    entry: &Entry,
    path: &str,
    given: &Given,
    report: &mut Report,
) -> Outcome {
    if let Meaning::Unused(reason) = meaning {
        return Outcome::Unused(*reason);
    }
    let text = match (written(&entry.value), meaning) {
        (Some(text), _) => text,
        // Settings that a section would change.
        (None, Meaning::Only(_, reason)) => return refuse(entry, path, *reason, None, report),
        (None, _) => return refuse_section(entry, path, report),
    };
    match meaning.effect(&text) {
        Effect::Flags(flags) => {
            let outcomes = flags
                .into_iter()
                .map(|(flag, value)| choose(flag, Some(value), entry, path, given, report));
            let outcomes: Vec<Outcome> = outcomes.collect();
            // A flag that has an effect stands for the key.
            let first = outcomes
                .into_iter()
                .min_by_key(|outcome| !matches!(outcome, Outcome::Flag(_)));
            first.unwrap_or(Outcome::Here(both("nothing is set", "没有设定任何内容")))
        }
        Effect::Here(reason) => Outcome::Here(reason),
        Effect::Unused(reason) => Outcome::Unused(reason),
        Effect::Refused(why) => refuse(entry, path, &why, None, report),
    }
}

/// Handles a key that should be a flag.
fn flag(entry: &Entry, name: &str, path: &str, given: &Given, report: &mut Report) -> Outcome {
    match file_key(name) {
        FileKey::Flag(flag) if flag == "config" => refuse(
            entry,
            path,
            both(
                "a configuration file cannot include another one",
                "配置文件不能包含另一个配置文件",
            ),
            None,
            report,
        ),
        FileKey::Flag(flag) if flag == "template" && !is_template(&entry.value) => {
            Outcome::Unused(both(
                "the chat template of the model directory is used",
                "使用模型目录中的对话模板",
            ))
        }
        FileKey::Flag(flag) if flag == "report-to" => {
            let Some(value) = written(&entry.value) else {
                return refuse_section(entry, path, report);
            };
            let (left, others) = split_reports(&value);
            if left.is_none() {
                return Outcome::Unused(OTHER_REPORT);
            }
            if !others.is_empty() {
                let value = Value::Text(others.join(","));
                let entry = Entry {
                    value,
                    ..entry.clone()
                };
                let unused = Outcome::Unused(OTHER_REPORT);
                report.rows.push(Row::new(path.to_owned(), &entry, unused));
            }
            choose(&flag, left, entry, path, given, report)
        }
        FileKey::Flag(flag) => {
            let value = match flag.as_str() {
                "lr-scheduler-kwargs" => pairs(&entry.value),
                _ => None,
            };
            let value = value.or_else(|| written(&entry.value));
            choose(&flag, value, entry, path, given, report)
        }
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
        Value::Map(entries) if entries.is_empty() => Some("{}".to_owned()),
        Value::Null | Value::Map(_) => None,
        Value::Bool(value) => Some(value.to_string()),
        Value::Number(text) | Value::Text(text) => Some(text.clone()),
        Value::List(items) => {
            let items: Option<Vec<String>> = items.iter().map(written).collect();
            items.map(|items| items.join(","))
        }
    }
}

/// Why a flag does not take a value: what clap says, with the values that it takes.
fn reason(failure: &Failure) -> Text {
    match failure.evidence.first() {
        Some(values) => text!("{} {values}", "{} {values}", failure.title),
        None => failure.title.clone(),
    }
}

/// A section of plain values as `name=value`, separated by commas.
fn pairs(value: &Value) -> Option<String> {
    let pair = |entry: &Entry| match &entry.value {
        Value::Map(_) | Value::List(_) | Value::Null => None,
        value => Some(format!("{}={}", entry.key, written(value)?)),
    };
    let pairs: Option<Vec<String>> = value.entries()?.iter().map(pair).collect();
    pairs.map(|pairs| pairs.join(","))
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
        return refuse_section(entry, path, report);
    };
    if let Some(word) = given.set_by(flag) {
        return Outcome::Overridden(word.to_string());
    }
    if let Some(first) = report.choices.iter().find(|choice| choice.flag == flag) {
        if first.value == value {
            return Outcome::Flag(flag.to_owned());
        }
        let why = text!("{} says {}", "{} 为 {}", first.keys.join(", "), first.value);
        return refuse(
            entry,
            path,
            why,
            Some(both("keep one of them", "请只保留其中一个")),
            report,
        );
    }
    let value = typed_value(flag, &value);
    // 3e3 steps are written as 3000, also in quotes, and 3_000 as well.
    let digits = Value::Number(value.replace('_', ""));
    let whole = digits.as_u64().map(|whole| whole.to_string());
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
            Err(error) => failure = failure.or_else(|| Some(reason(&error))),
        }
    }
    refuse(entry, path, failure.unwrap_or_default(), None, report)
}

fn only(
    neutral: &[&str],
    reason: Both,
    next: Option<Both>,
    entry: &Entry,
    path: &str,
    report: &mut Report,
) -> Outcome {
    let text = written(&entry.value);
    let is = |word: &&str| text.as_ref().is_some_and(|text| is_word(word, text));
    if neutral.iter().any(is) {
        return Outcome::Here(reason);
    }
    refuse(entry, path, reason, next, report)
}

fn refuse_section(entry: &Entry, path: &str, report: &mut Report) -> Outcome {
    let reason = both(
        "it must be one value, not a section",
        "它必须是一个值，而不是一节",
    );
    refuse(entry, path, reason, None, report)
}

fn refuse(
    entry: &Entry,
    path: &str,
    why: impl Into<Text>,
    next: Option<Both>,
    report: &mut Report,
) -> Outcome {
    let why = why.into();
    report.errors.push(Problem {
        line: entry.line,
        what: text!(
            "{path} {} is not available",
            "{path} {} 不可用",
            entry.value
        ),
        why: why.clone(),
        next: next.map(Text::from),
    });
    Outcome::Refused(why)
}

fn unknown(entry: &Entry, path: &str, near: Option<&str>, report: &mut Report) -> Outcome {
    let why = both("no flag has this name", "没有这个名称的参数");
    report.errors.push(Problem {
        line: entry.line,
        what: text!("\"{path}\" is not known", "未知的键 \"{path}\""),
        why: why.into(),
        next: near.map(|near| text!("did you mean {near}?", "您是否想用 {near}？")),
    });
    Outcome::Refused(why.into())
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

//! Check of a file against the table of keys.

use super::schema::{Fate, Key, Meant, Section};
use crate::cli::file::report::{Outcome, Problem, Report, Row};
use crate::cli::file::value::{Entry, Value};
use crate::lang::{Both, Text, both, text};

/// Report with one row per key of `file`. It does not look at keys together.
pub(super) fn check(file: &Value) -> Report {
    let mut report = Report::default();
    if let (Some(top), Some(entries)) = (Section::at(""), file.entries()) {
        walk(top, entries, &mut report);
    }
    report
}

fn walk(section: &Section, entries: &[Entry], report: &mut Report) {
    for entry in entries {
        let Some(key) = section.key(&entry.key) else {
            let outcome = unknown(section, entry, report);
            push(section, entry, outcome, report);
            continue;
        };
        if let (Fate::Section, Some(inner)) = (key.fate, entry.value.entries()) {
            if let Some(inner_section) = Section::at(&path(section, &entry.key)) {
                walk(inner_section, inner, report);
            }
            continue;
        }
        let outcome = known(section, key, entry, entries, report);
        push(section, entry, outcome, report);
    }
}

fn push(section: &Section, entry: &Entry, outcome: Outcome, report: &mut Report) {
    let path = path(section, &entry.key);
    report.rows.push(Row::new(path, entry, outcome));
}

fn path(section: &Section, key: &str) -> String {
    match section.path {
        "" => key.to_owned(),
        path => format!("{path}.{key}"),
    }
}

fn known(
    section: &Section,
    key: &Key,
    entry: &Entry,
    entries: &[Entry],
    report: &mut Report,
) -> Outcome {
    let Entry { line, value, .. } = entry;
    let path = path(section, key.name);
    let mut refuse = |why: Text, next: Option<Both>| {
        report.errors.push(Problem {
            line: *line,
            what: text!("{path} {value} is not available", "{path} {value} 不可用"),
            why: why.clone(),
            next: next.map(Text::from),
        });
        Outcome::Refused(why)
    };
    // A section may be null, and `zero_optimization` may be a Boolean.
    let is_switch = path == "zero_optimization" && value.as_bool().is_some();
    if *value == Value::Null || is_switch {
        return match key.fate {
            Fate::Section if is_switch => Outcome::Flag("zero".to_owned()),
            _ => Outcome::Here(both("nothing is set", "没有设定任何内容")),
        };
    }
    if value.is_auto() {
        return match key.fate {
            Fate::Flag(flag) => Outcome::Auto(flag),
            Fate::Unused(reason) => Outcome::Unused(reason),
            _ => Outcome::Default(key.default),
        };
    }
    if let Some(why) = key.kind.refuse(value) {
        report.errors.push(Problem {
            line: *line,
            what: text!("{path} cannot be {value}", "{path} 不能是 {value}"),
            why: why.clone(),
            next: value
                .as_text()
                .filter(|text| text.parse::<f64>().is_ok())
                .map(|text| text!("write {text} without quotes", "请写成不带引号的 {text}")),
        });
        return Outcome::Refused(why);
    }
    match key.fate {
        Fate::Flag(flag) => Outcome::Flag(flag.to_owned()),
        Fate::Unused(reason) => Outcome::Unused(reason),
        Fate::Only(neutral, reason, next) => {
            let shown = match value.as_f64() {
                // 1.0 equals 1.
                Some(number) => number.to_string(),
                None => value.to_string().to_ascii_lowercase(),
            };
            if neutral.contains(&&*shown) {
                return Outcome::Here(reason);
            }
            refuse(reason.into(), Some(next))
        }
        Fate::Off(reason) => match is_on(value) {
            true => refuse(
                reason.into(),
                Some(both("remove the section", "请删除该节")),
            ),
            false => Outcome::Here(both("it is off", "它是关闭的")),
        },
        Fate::Old(new)
            if entries
                .iter()
                .any(|other| new.split('.').next() == Some(&other.key)) =>
        {
            let why = text!(
                "it is an old name of {new}, and the file has both",
                "它是 {new} 的旧名称，而文件中两者都有"
            );
            refuse(why, Some(both("remove the old name", "请删除旧名称")))
        }
        Fate::Old(new) => {
            report.warnings.push(Problem {
                line: *line,
                what: text!("{path} is an old name", "{path} 是旧名称"),
                why: text!("the key is now {new}", "该键现在叫 {new}"),
                next: None,
            });
            Outcome::Here(both("it is read under its new name", "按新名称读取"))
        }
        // A value that is not a section was already refused.
        Fate::Section => Outcome::Here(both("nothing is set", "没有设定任何内容")),
    }
}

/// Whether a section is enabled: by its `enabled`, or by its presence.
fn is_on(section: &Value) -> bool {
    match section.get("enabled") {
        Some(enabled) => enabled.as_bool() != Some(false),
        None => section.entries().is_some_and(|entries| !entries.is_empty()),
    }
}

fn unknown(section: &Section, entry: &Entry, report: &mut Report) -> Outcome {
    let name = &entry.key;
    if name.starts_with('_') && !section.strict {
        return Outcome::Comment;
    }
    let at = section.place();
    let problem = match section.meant(name) {
        Meant::Nested(place) => {
            let silently = if section.strict {
                both("", "")
            } else {
                both(
                    ", and DeepSpeed does not report it",
                    "，而 DeepSpeed 不会提示",
                )
            };
            Problem {
                line: entry.line,
                what: text!("\"{name}\" has no effect {at}", "\"{name}\" {at}不起作用"),
                why: text!(
                    "it belongs {}{silently}",
                    "它应当{}{silently}",
                    place.place()
                ),
                next: Some(match moved(entry) {
                    Some(flag) => text!("move it, or use {flag}", "请移动它，或使用 {flag}"),
                    None => both("move it", "请移动它").into(),
                }),
            }
        }
        meant => Problem {
            line: entry.line,
            what: text!("\"{name}\" is not a key {at}", "\"{name}\" 不是{at}的键"),
            why: both("DeepSpeed does not know it", "DeepSpeed 没有这个键").into(),
            next: match meant {
                Meant::Name(meant) => Some(text!("did you mean {meant}?", "您是否想用 {meant}？")),
                _ => None,
            },
        },
    };
    if section.strict {
        let sentence = problem.why.clone();
        report.errors.push(problem);
        return Outcome::Refused(sentence);
    }
    let sentence = problem.why.clone();
    report.warnings.push(problem);
    Outcome::Warning(sentence)
}

/// The `--offload` flag that corresponds to a misplaced section `offload_*`.
fn moved(entry: &Entry) -> Option<String> {
    let kind = entry.key.strip_prefix("offload_")?;
    let device = entry.value.get("device")?.as_text()?;
    let tier = match entry.value.get("nvme_path").and_then(Value::as_text) {
        Some(directory) if device == "nvme" => format!("nvme:{directory}"),
        _ => device.to_owned(),
    };
    Some(format!("--offload {kind}={tier}"))
}

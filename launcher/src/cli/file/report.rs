//! Report on a configuration file: its keys, the flags that it gives, its mistakes.

use super::value::Entry;
use crate::error::Failure;
use crate::lang::{Both, Text, both, text};
use std::path::Path;

/// Report on a file.
#[derive(Debug, Default)]
pub(crate) struct Report {
    /// Keys in file order, with keys inside sections but without the sections themselves.
    pub(crate) rows: Vec<Row>,
    /// Flags that it gives.
    pub(crate) choices: Vec<Choice>,
    /// Warnings: keys in the wrong place, unknown and outdated keys, flags that the file overrides.
    pub(crate) warnings: Vec<Problem>,
    /// Keys and values that cannot be honored.
    pub(crate) errors: Vec<Problem>,
    /// Values that contradict flags on the command line, one sentence each.
    pub(crate) contradictions: Vec<Text>,
}

/// A key of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Row {
    /// Path of the key, joined by dots.
    pub(crate) path: String,
    /// Line of the file.
    pub(crate) line: usize,
    /// Its value, as written.
    pub(crate) value: String,
    /// Effect of the key.
    pub(crate) outcome: Outcome,
}

impl Row {
    /// Row of `entry` at `path`. Values that may be secret are hidden.
    pub(crate) fn new(path: String, entry: &Entry, outcome: Outcome) -> Self {
        let secret = ["api_key", "hub_token"].contains(&&*entry.key);
        let value = match secret {
            true => "…".to_owned(),
            false => entry.value.to_string(),
        };
        Self {
            path,
            line: entry.line,
            value,
            outcome,
        }
    }
}

/// Effect of a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It becomes this flag, unless the choices have more detail.
    Flag(String),
    /// `auto`: it follows this flag.
    Auto(&'static str),
    /// No effect, for this reason.
    Unused(Both),
    /// `auto`: nothing determines it, so this default applies.
    Default(&'static str),
    /// It matches what always happens here.
    Here(Both),
    /// A flag on the command line overrides it.
    Overridden(String),
    /// A comment: the key begins with `_`.
    Comment,
    /// No effect, with a warning.
    Warning(Text),
    /// It cannot be honored.
    Refused(Text),
}

/// A flag that a file gives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Choice {
    /// The flag in kebab-case, without dashes.
    pub(crate) flag: String,
    /// Its value.
    pub(crate) value: String,
    /// Keys that it comes from; empty if it follows from the absence of a key.
    pub(crate) keys: Vec<String>,
}

impl Choice {
    /// Whether a key of the file gives it.
    pub(crate) fn is_written(&self) -> bool {
        !self.keys.is_empty()
    }

    /// The flag as it would be typed.
    pub(crate) fn typed(&self) -> String {
        format!("--{} {}", self.flag, self.value)
    }
}

/// A mistake of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Problem {
    /// Line of the file.
    pub(crate) line: usize,
    /// What is wrong.
    pub(crate) what: Text,
    /// Why.
    pub(crate) why: Text,
    /// What to do.
    pub(crate) next: Option<Text>,
}

impl Problem {
    /// The mistake on one line.
    pub(crate) fn sentence(&self, name: &Path) -> Text {
        let Self {
            line,
            what,
            why,
            next,
        } = self;
        let sentence = text!(
            "{} line {line}: {what}: {why}",
            "{} 第 {line} 行：{what}：{why}",
            name.display()
        );
        match next {
            Some(next) => text!("{sentence}; {next}", "{sentence}；{next}"),
            None => sentence,
        }
    }

    fn failure(&self, name: &Path) -> Failure {
        let Self {
            line,
            what,
            why,
            next,
        } = self;
        let name = name.display();
        let failure = Failure::usage(text!("{name}: {what}", "{name}：{what}"), why.clone());
        let failure = failure.evidence(text!("{name} line {line}", "{name} 第 {line} 行"));
        failure.next(match next {
            Some(next) => next.clone(),
            None => text!(
                "change or remove the key in line {line} of {name}",
                "请修改或删除 {name} 第 {line} 行的键"
            ),
        })
    }
}

impl Report {
    /// The flags that keys of the file give, as they would be typed.
    pub(crate) fn given(&self) -> String {
        let written = self.choices.iter().filter(|choice| choice.is_written());
        written.map(Choice::typed).collect::<Vec<_>>().join(" ")
    }

    /// Keys without effect, grouped by reason.
    pub(crate) fn unused(&self) -> Vec<(Both, Vec<&str>)> {
        let mut groups: Vec<(Both, Vec<&str>)> = Vec::new();
        for row in &self.rows {
            let Outcome::Unused(reason) = row.outcome else {
                continue;
            };
            let name = row.path.rsplit('.').next().unwrap_or(&row.path);
            match groups.iter_mut().find(|(known, _)| *known == reason) {
                Some((_, names)) if names.contains(&name) => {}
                Some((_, names)) => names.push(name),
                None => groups.push((reason, vec![name])),
            }
        }
        groups
    }

    /// An error if the file has mistakes; with `strict`, also if it has warnings.
    pub(crate) fn verdict(&self, name: &Path, strict: bool) -> Result<(), Failure> {
        let warnings: &[Problem] = if strict { &self.warnings } else { &[] };
        let mut problems: Vec<&Problem> = self.errors.iter().chain(warnings).collect();
        problems.sort_by_key(|problem| problem.line);
        let shown = name.display();
        if !self.contradictions.is_empty() {
            let failure = Failure::usage(
                text!(
                    "{shown} and the command line contradict each other",
                    "{shown} 与命令行互相矛盾"
                ),
                both(
                    "a flag may replace only the value \"auto\" of the file",
                    "参数只能替换文件中的 \"auto\" 值",
                ),
            )
            .evidence_lines(self.contradictions.iter().cloned())
            .evidence_lines(problems.iter().map(|problem| problem.sentence(name)));
            return Err(failure.next(both(
                "omit these flags, or write \"auto\" in the file",
                "请去掉这些参数，或在文件中写 \"auto\"",
            )));
        }
        match problems[..] {
            [] => Ok(()),
            [one] => Err(one.failure(name)),
            _ => Err(Failure::usage(
                text!(
                    "{shown}: {} keys cannot be used",
                    "{shown}：有 {} 个键无法使用",
                    problems.len()
                ),
                both(
                    "each is listed below with its line",
                    "逐个列在下面，并注明所在的行",
                ),
            )
            .evidence_lines(problems.iter().map(|problem| problem.sentence(name)))
            .next(text!(
                "`launcher explain-config {shown}` shows the file key by key",
                "`launcher explain-config {shown}` 会逐键解释该文件"
            ))),
        }
    }
}

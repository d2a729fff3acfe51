//! Report on a configuration file: its keys, the flags that it gives, its mistakes.

use super::value::Entry;
use crate::error::Failure;
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
    pub(crate) contradictions: Vec<String>,
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
    Unused(&'static str),
    /// `auto`: nothing determines it, so this default applies.
    Default(&'static str),
    /// It matches what always happens here.
    Here(&'static str),
    /// A flag on the command line overrides it.
    Overridden(String),
    /// A comment: the key begins with `_`.
    Comment,
    /// No effect, with a warning.
    Warning(String),
    /// It cannot be honored.
    Refused(String),
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
    pub(crate) what: String,
    /// Why.
    pub(crate) why: String,
    /// What to do.
    pub(crate) next: Option<String>,
}

impl Problem {
    /// The mistake on one line.
    pub(crate) fn sentence(&self, name: &Path) -> String {
        let Self {
            line,
            what,
            why,
            next,
        } = self;
        let sentence = format!("{} line {line}: {what}: {why}", name.display());
        match next {
            Some(next) => format!("{sentence}; {next}"),
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
        let failure = Failure::usage(format!("{name}: {what}"), why.clone());
        let failure = failure.evidence(format!("{name} line {line}"));
        match next {
            Some(next) => failure.next(next.clone()),
            None => failure,
        }
    }
}

impl Report {
    /// The flags that keys of the file give, as they would be typed.
    pub(crate) fn given(&self) -> String {
        let written = self.choices.iter().filter(|choice| choice.is_written());
        written.map(Choice::typed).collect::<Vec<_>>().join(" ")
    }

    /// Keys without effect, grouped by reason.
    pub(crate) fn unused(&self) -> Vec<(&'static str, Vec<&str>)> {
        let mut groups: Vec<(&'static str, Vec<&str>)> = Vec::new();
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
                format!("{shown} and the command line contradict each other"),
                "a flag may replace only the value \"auto\" of the file",
            )
            .evidence_lines(self.contradictions.iter().cloned())
            .evidence_lines(problems.iter().map(|problem| problem.sentence(name)));
            return Err(failure.next("omit these flags, or write \"auto\" in the file"));
        }
        match problems[..] {
            [] => Ok(()),
            [one] => Err(one.failure(name)),
            _ => Err(Failure::usage(
                format!("{shown}: {} keys cannot be used", problems.len()),
                "each is listed below with its line",
            )
            .evidence_lines(problems.iter().map(|problem| problem.sentence(name)))
            .next(format!(
                "`launcher explain-config {shown}` shows the file key by key"
            ))),
        }
    }
}

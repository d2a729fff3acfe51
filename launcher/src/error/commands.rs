//! Next steps that are command lines. Each can be pasted into a shell; a reason follows as a comment.

use super::Failure;
use crate::lang::{Lang, Text};
use std::path::Path;

/// Text between the flags of a suggestion and its reason.
const REASON: &str = "   (";

/// A word as a shell reads it back.
pub(crate) fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=,:@%+".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

/// The command that continues from a run's directory or from a checkpoint.
pub(crate) fn continue_run(directory: &Path) -> String {
    format!(
        "launcher --resume {}",
        quoted(&directory.display().to_string())
    )
}

impl Failure {
    /// Makes command lines of the next steps that are flags alone: the line `launcher` with the words `typed`, in which
    /// these flags replace earlier ones.
    pub(crate) fn complete(mut self, typed: &[String]) -> Self {
        for line in &mut self.next {
            let completed = |lang| completed(typed, line.get(lang));
            *line = Text::new(completed(Lang::En), completed(Lang::Zh));
        }
        self
    }
}

/// The step `line` as a command line, if it is flags alone.
fn completed(typed: &[String], line: &str) -> String {
    let (flags, reason) = match line.split_once(REASON) {
        Some((flags, reason)) => (flags, reason.strip_suffix(')')),
        None => (line, None),
    };
    if !are_flags(flags) {
        return line.to_owned();
    }
    let reason = reason.map_or_else(String::new, |text| format!("   # {text}"));
    let kept = without(typed, flags);
    format!("launcher {kept}{flags}{reason}")
}

/// The words `typed` for a shell, each with a blank after it, without the flags that `flags` has too.
fn without(typed: &[String], flags: &str) -> String {
    let name = |word: &str| {
        let name = word.strip_prefix("--")?.split('=').next();
        name.map(|name| name.replace('_', "-"))
    };
    let replaced: Vec<String> = flags.split_whitespace().filter_map(name).collect();
    let mut kept = String::new();
    let mut words = typed.iter().peekable();
    while let Some(word) = words.next() {
        if name(word).is_none_or(|name| !replaced.contains(&name)) {
            kept += &quoted(word);
            kept.push(' ');
        } else if !word.contains('=') {
            words.next_if(|value| !value.starts_with("--"));
        }
    }
    kept
}

/// Whether `text` consists of flags, each with at most one value, and no placeholder.
fn are_flags(text: &str) -> bool {
    let mut after_flag = false;
    let is_part = |word: &str| {
        let is_flag = word.starts_with("--");
        let is_value = after_flag && word.chars().any(|c| !c.is_ascii_uppercase());
        after_flag = is_flag;
        (is_flag || is_value) && !word.ends_with([',', ':', ';'])
    };
    text.starts_with("--") && text.split_whitespace().all(is_part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_become_a_command_line_and_sentences_stay() {
        let failure = Failure::usage("t", "c")
            .next("--zero 3 --offload cpu   (plan: 5.0G, fits)")
            .next("--offload none")
            .next("--comm-timeout gives ranks more time")
            .next("--rank-is node: each process is a machine")
            .next("--hostfile FILE")
            .next("launcher doctor");
        let typed = ["--data", "a b"].map(str::to_owned);
        assert_eq!(
            failure.complete(&typed).next,
            [
                "launcher --data 'a b' --zero 3 --offload cpu   # plan: 5.0G, fits",
                "launcher --data 'a b' --offload none",
                "--comm-timeout gives ranks more time",
                "--rank-is node: each process is a machine",
                "--hostfile FILE",
                "launcher doctor",
            ]
        );
    }

    #[test]
    fn suggested_flags_replace_typed_ones() {
        for typed in [
            "eval --nproc 5 x.json --mp-size 2",
            "eval --nproc=5 x.json --mp_size=2 --nproc 7",
        ] {
            let typed: Vec<String> = typed.split(' ').map(str::to_owned).collect();
            let suggested = |flags: &str| {
                let failure = Failure::usage("t", "c").next(flags.to_owned());
                failure.complete(&typed).next.remove(0).to_string()
            };
            assert!(suggested("--zero 3").starts_with("launcher eval --nproc"));
            assert_eq!(
                suggested("--nproc 6 --mp-size 3"),
                "launcher eval x.json --nproc 6 --mp-size 3"
            );
        }
    }

    #[test]
    fn words_are_quoted_for_a_shell() {
        assert_eq!(quoted("/runs/a-1"), "/runs/a-1");
        assert_eq!(quoted("it's"), "'it'\\''s'");
        assert_eq!(continue_run(Path::new("a b")), "launcher --resume 'a b'");
    }
}

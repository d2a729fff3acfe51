//! Flags that the command line and a trainer's file already give.

use crate::config::{Offload, PrecisionChoice};

/// A given flag.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Word {
    /// The flag in kebab-case, without dashes.
    pub(crate) flag: String,
    /// Its value.
    pub(crate) value: String,
    /// The file and line it comes from; empty for the command line.
    pub(crate) place: String,
}

/// Groups of flags that set the same thing.
const GROUPS: [&[&str]; 5] = [
    &["precision", "bf16", "fp16"],
    &["checkpoint-activations", "gradient-checkpointing"],
    &["max-steps", "num-train-epochs"],
    &["warmup-steps", "warmup-ratio"],
    &["per-device-train-batch-size", "find-batch"],
];

/// Whether two flags set the same thing.
pub(crate) fn exclude_each_other(one: &str, other: &str) -> bool {
    one == other
        || GROUPS
            .iter()
            .any(|group| group.contains(&one) && group.contains(&other))
}

/// All given flags.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Given {
    words: Vec<Word>,
}

impl Given {
    /// Flags of a rewritten line, `--flag=value` each.
    pub(crate) fn of_line(typed: &[String]) -> Self {
        let words = typed.iter().filter_map(|word| {
            let (flag, value) = word.strip_prefix("--")?.split_once('=')?;
            Some(Word {
                flag: flag.to_owned(),
                value: value.to_owned(),
                place: String::new(),
            })
        });
        Self {
            words: words.collect(),
        }
    }

    /// Adds a flag from a file.
    pub(crate) fn add(&mut self, flag: &str, value: &str, place: &str) {
        self.words.push(Word {
            flag: flag.to_owned(),
            value: value.to_owned(),
            place: place.to_owned(),
        });
    }

    /// Removes a flag.
    pub(crate) fn remove(&mut self, flag: &str) {
        self.words.retain(|word| word.flag != flag);
    }

    /// Whether a switch is given and on.
    pub(crate) fn is_on(&self, flag: &str) -> bool {
        self.get(flag).is_some_and(|word| word.value == "true")
    }

    /// All flags in order.
    pub(crate) fn words(&self) -> &[Word] {
        &self.words
    }

    /// The flag, if it is given.
    pub(crate) fn get(&self, flag: &str) -> Option<&Word> {
        self.words.iter().find(|word| word.flag == flag)
    }

    /// The flag, or another flag of its group, if one is given.
    pub(crate) fn set_by(&self, flag: &str) -> Option<&Word> {
        let own = self.get(flag);
        own.or_else(|| {
            self.words
                .iter()
                .find(|word| exclude_each_other(&word.flag, flag))
        })
    }

    /// The parsed value of a flag; `None` if it is not given or does not parse.
    pub(crate) fn parsed<T: std::str::FromStr>(&self, flag: &str) -> Option<T> {
        self.get(flag)?.value.parse().ok()
    }

    pub(crate) fn offload(&self) -> Option<Offload> {
        self.parsed("offload")
    }

    /// The number format that the flags ask for, and the flag that says so.
    pub(crate) fn precision(&self) -> Option<(PrecisionChoice, &Word)> {
        use PrecisionChoice as P;
        let is = |word: &Word, value: &str| word.value == value;
        if let Some(word) = self.get("precision") {
            let named = <P as clap::ValueEnum>::from_str(&word.value, true);
            return named.ok().map(|precision| (precision, word));
        }
        let (bf16, fp16) = (self.get("bf16"), self.get("fp16"));
        if let Some(word) = bf16.filter(|word| is(word, "true")) {
            return Some((P::Bf16, word));
        }
        if let Some(word) = fp16.filter(|word| is(word, "true")) {
            return Some((P::Fp16, word));
        }
        bf16.filter(|word| is(word, "false"))
            .map(|word| (P::F32, word))
    }
}

impl std::fmt::Display for Word {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { flag, value, place } = self;
        if place.is_empty() {
            write!(f, "--{flag} {value}")
        } else {
            write!(f, "{flag} {value} in {place}")
        }
    }
}

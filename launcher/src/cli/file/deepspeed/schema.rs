//! Form of the table of keys, and its search.

use super::keys::SECTIONS;
use crate::cli::file::value::Value;
use crate::config::words::nearest;
use crate::lang::{Both, Text, both, text};

/// A section of the file.
#[derive(Debug)]
pub(super) struct Section {
    /// Path of keys to the section, joined by dots; empty for the top level.
    pub(super) path: &'static str,
    /// Whether DeepSpeed refuses unknown keys in this section.
    pub(super) strict: bool,
    /// Its keys.
    pub(super) keys: &'static [Key],
}

/// A key that DeepSpeed knows.
#[derive(Debug)]
pub(super) struct Key {
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    /// Default as it would be written; empty if the default is nothing.
    pub(super) default: &'static str,
    pub(super) fate: Fate,
}

/// Type of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Bool,
    /// A whole number of at least 0; a float counts if it is whole.
    Whole,
    /// A finite number.
    Number,
    Text,
    /// One of these words, case-insensitive.
    Words(&'static [&'static str]),
    /// Two numbers.
    Pair,
    /// Anything.
    Any,
    /// A section.
    Map,
}

/// Effect of a key.
#[derive(Debug, Clone, Copy)]
pub(super) enum Fate {
    /// It becomes this flag, alone or with other keys.
    Flag(&'static str),
    /// It has no effect, for this reason.
    Unused(Both),
    /// These values match what always happens here. Others are refused; the texts are the reason and what to do
    /// instead.
    Only(&'static [&'static str], Both, Both),
    /// A section that must not be enabled, for this reason.
    Off(Both),
    /// An outdated name; the key that replaced it.
    Old(&'static str),
    /// A section with its own keys.
    Section,
}

/// Common mistakes: section, name, and what was meant.
const SLIPS: [(&str, &str, &str); 3] = [
    ("", "comms_config", "comms_logger"),
    (
        "",
        "monitor_config",
        "tensorboard, wandb, csv_monitor or comet",
    ),
    ("aio", "thread_count", "intra_op_parallelism"),
];

impl Section {
    pub(super) fn at(path: &str) -> Option<&'static Self> {
        SECTIONS.iter().find(|section| section.path == path)
    }

    pub(super) fn key(&self, name: &str) -> Option<&'static Key> {
        self.keys.iter().find(|key| key.name == name)
    }

    /// Place of one of its keys, in words.
    pub(super) fn place(&self) -> Text {
        match self.path {
            "" => both("at the top level", "位于顶层").into(),
            path => text!("in \"{path}\"", "位于 \"{path}\" 中"),
        }
    }

    /// What an unknown key of this section probably means.
    pub(super) fn meant(&self, name: &str) -> Meant {
        let slip = SLIPS
            .iter()
            .find(|slip| (slip.0, slip.1) == (self.path, name));
        if let Some((.., meant)) = slip {
            return Meant::Name((*meant).to_owned());
        }
        let others = SECTIONS.iter().filter(|other| other.path != self.path);
        let mut places = others.filter(|other| other.key(name).is_some());
        match (places.next(), places.next()) {
            (Some(place), None) => return Meant::Nested(place),
            // The key exists in a section and in a section inside it.
            (Some(place), Some(inner)) if inner.path.starts_with(place.path) => {
                return Meant::Nested(place);
            }
            _ => {}
        }
        match nearest(name, self.keys.iter().map(|key| key.name)) {
            Some(meant) => Meant::Name(meant.to_owned()),
            None => Meant::Nothing,
        }
    }
}

/// What an unknown key probably means.
#[derive(Debug)]
pub(super) enum Meant {
    /// The same key in another section.
    Nested(&'static Section),
    /// A similar name.
    Name(String),
    /// No known key.
    Nothing,
}

impl Kind {
    /// Why `value` is not of this kind; `None` if it is.
    pub(super) fn refuse(self, value: &Value) -> Option<Text> {
        let fits = match self {
            Self::Bool => value.as_bool().is_some(),
            Self::Whole => value.as_u64().is_some(),
            Self::Number => value.as_f64().is_some(),
            Self::Text => value.as_text().is_some(),
            Self::Words(words) => {
                let text = value.to_string();
                words.iter().any(|word| word.eq_ignore_ascii_case(&text))
            }
            Self::Pair => match value {
                Value::List(items) => {
                    items.len() == 2 && items.iter().all(|x| x.as_f64().is_some())
                }
                _ => false,
            },
            Self::Any => true,
            Self::Map => value.entries().is_some(),
        };
        (!fits).then(|| match self {
            Self::Bool => both("it must be true or false", "它必须是 true 或 false").into(),
            Self::Whole => both(
                "it must be a whole number of at least 0",
                "它必须是不小于 0 的整数",
            )
            .into(),
            Self::Number => both("it must be a number", "它必须是数").into(),
            Self::Text => both("it must be a text in quotes", "它必须是带引号的文本").into(),
            Self::Words(words) => text!(
                "it must be one of {}",
                "它必须是以下之一：{}",
                words.join(", ")
            ),
            Self::Pair => both(
                "it must be two numbers in brackets",
                "它必须是方括号中的两个数",
            )
            .into(),
            Self::Any | Self::Map => {
                both("it must be a section in braces", "它必须是花括号中的一节").into()
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_section_is_reachable_and_no_key_occurs_twice() {
        for section in SECTIONS {
            for (i, key) in section.keys.iter().enumerate() {
                let path = match section.path {
                    "" => key.name.to_owned(),
                    path => format!("{path}.{}", key.name),
                };
                let is_section = matches!(key.fate, Fate::Section);
                assert_eq!(Section::at(&path).is_some(), is_section, "{path}");
                assert!(
                    section.keys[..i].iter().all(|other| other.name != key.name),
                    "{path}"
                );
                if !key.default.is_empty() && key.kind != Kind::Pair {
                    let default = Value::plain(key.default);
                    assert_eq!(key.kind.refuse(&default), None, "{path}");
                }
            }
        }
    }

    #[test]
    fn unknown_keys_get_a_section_a_similar_name_or_no_suggestion() {
        let top = Section::at("").expect("the top level");
        let zero = Section::at("zero_optimization").expect("a section");
        assert!(
            matches!(top.meant("offload_optimizer"), Meant::Nested(s) if s.path == "zero_optimization")
        );
        assert!(matches!(top.meant("comms_config"), Meant::Name(n) if n == "comms_logger"));
        assert!(matches!(zero.meant("overlap_com"), Meant::Name(n) if n == "overlap_comm"));
        assert!(matches!(zero.meant("gradient_clipping"), Meant::Nested(s) if s.path.is_empty()));
        assert!(matches!(top.meant("quite_another_thing"), Meant::Nothing));
    }
}

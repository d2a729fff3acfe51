//! Values of a configuration file, for every file format.

use crate::lang::{Text, text};
use std::fmt;

/// Maximal nesting depth of lists and maps.
pub(super) const MAX_DEPTH: usize = 32;
/// Maximal number of keys in a map. Each key is compared with all previous ones.
const MAX_KEYS: usize = 4096;

/// A value of a configuration file.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Value {
    /// `null`, or a key without a value.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// A finite number, as written.
    Number(String),
    /// A text.
    Text(String),
    /// A list.
    List(Vec<Self>),
    /// Keys with values in the order of the file; keys are unique.
    Map(Vec<Entry>),
}

/// A key with its value.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Entry {
    /// The key.
    pub(crate) key: String,
    /// Line of the file, from 1.
    pub(crate) line: usize,
    /// Its value.
    pub(crate) value: Value,
}

/// Syntax error of a file: where, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fault {
    /// Line of the file, from 1.
    pub(crate) line: usize,
    /// What is wrong.
    pub(crate) why: Text,
}

impl Fault {
    pub(super) fn new(line: usize, why: impl Into<Text>) -> Self {
        let why = why.into();
        Self { line, why }
    }

    pub(super) fn too_deep(line: usize) -> Self {
        Self::new(
            line,
            text!(
                "nested deeper than {MAX_DEPTH} levels",
                "嵌套超过 {MAX_DEPTH} 层"
            ),
        )
    }
}

/// Adds an entry to a map; an error if the map has the key.
pub(super) fn insert(map: &mut Vec<Entry>, entry: Entry) -> Result<(), Fault> {
    if map.len() == MAX_KEYS {
        return Err(Fault::new(
            entry.line,
            text!("more than {MAX_KEYS} keys", "超过 {MAX_KEYS} 个键"),
        ));
    }
    match map.iter().find(|known| known.key == entry.key) {
        Some(first) => Err(Fault::new(
            entry.line,
            text!(
                "\"{}\" is given twice, first in line {}",
                "\"{}\" 给出了两次，第一次在第 {} 行",
                entry.key,
                first.line
            ),
        )),
        None => {
            map.push(entry);
            Ok(())
        }
    }
}

impl Value {
    /// Value of an unquoted word, by the rules of YAML and JSON.
    pub(super) fn plain(word: &str) -> Self {
        match word {
            "" | "~" | "null" | "Null" | "NULL" => Self::Null,
            "true" | "True" | "TRUE" => Self::Bool(true),
            "false" | "False" | "FALSE" => Self::Bool(false),
            _ if is_number(word) => Self::Number(word.to_owned()),
            _ => Self::Text(word.to_owned()),
        }
    }

    /// Whether the value is the word `auto`.
    pub(crate) fn is_auto(&self) -> bool {
        matches!(self, Self::Text(text) if text == "auto")
    }

    /// The entries of a map.
    pub(crate) fn entries(&self) -> Option<&[Entry]> {
        match self {
            Self::Map(entries) => Some(entries),
            _ => None,
        }
    }

    /// The value under `key` of a map.
    pub(crate) fn get(&self, key: &str) -> Option<&Self> {
        let entry = self.entries()?.iter().find(|entry| entry.key == key)?;
        Some(&entry.value)
    }

    /// A Boolean. The spellings of Python and YAML count, even as text.
    pub(crate) fn as_bool(&self) -> Option<bool> {
        match self {
            Self::Bool(value) => Some(*value),
            Self::Text(text) => match &*text.to_ascii_lowercase() {
                "true" | "yes" | "on" => Some(true),
                "false" | "no" | "off" => Some(false),
                _ => None,
            },
            _ => None,
        }
    }

    /// A finite number.
    pub(crate) fn as_f64(&self) -> Option<f64> {
        match self {
            Self::Number(text) => text.parse().ok().filter(|x: &f64| x.is_finite()),
            _ => None,
        }
    }

    /// A whole number of at least 0; a float such as `5e8` counts if it is whole.
    pub(crate) fn as_u64(&self) -> Option<u64> {
        let Self::Number(text) = self else {
            return None;
        };
        // Whole numbers up to 2^53 are exact in f64.
        let exact = |x: &f64| x.fract() == 0.0 && (0.0..=9_007_199_254_740_992.0).contains(x);
        let float = || text.parse().ok().filter(exact).map(|x: f64| x as u64);
        text.parse().ok().or_else(float)
    }

    /// The text, if it is one.
    pub(crate) fn as_text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }
}

/// The value on one line, shortened if it is long.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => f.write_str("null"),
            Self::Bool(value) => value.fmt(f),
            Self::Number(text) => f.write_str(text),
            Self::Text(text) => {
                let shown: String = text.chars().take(40).collect();
                let more = if shown.len() < text.len() { "…" } else { "" };
                write!(f, "{}{more}", shown.escape_debug())
            }
            Self::List(items) => {
                f.write_str("[")?;
                for (i, item) in items.iter().take(8).enumerate() {
                    let comma = if i == 0 { "" } else { ", " };
                    write!(f, "{comma}{item}")?;
                }
                f.write_str(if items.len() > 8 { ", …]" } else { "]" })
            }
            Self::Map(_) => f.write_str("{…}"),
        }
    }
}

/// Whether a word is a number in JSON, or in YAML with a leading `+`, `.5` or `5.`.
fn is_number(word: &str) -> bool {
    let first = word.trim_start_matches(['+', '-', '.']).chars().next();
    // Rust also parses `inf`, `nan` and `infinity`; these files do not have them.
    first.is_some_and(|c| c.is_ascii_digit()) && word.parse().is_ok_and(|x: f64| x.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_numbers_may_be_written_as_floats() {
        let whole = |text: &str| Value::plain(text).as_u64();
        assert_eq!(whole("5e8"), Some(500_000_000));
        assert_eq!(whole("2.0"), Some(2));
        assert_eq!(whole("18446744073709551615"), Some(u64::MAX));
        for text in ["0.5", "-1", "1e300", "true", "x", "1e17"] {
            assert_eq!(whole(text), None, "{text}");
        }
    }

    #[test]
    fn plain_words_become_numbers_booleans_null_or_text() {
        assert_eq!(Value::plain("1e-5"), Value::Number("1e-5".into()));
        assert_eq!(Value::plain("True"), Value::Bool(true));
        assert_eq!(Value::plain("~"), Value::Null);
        for word in ["inf", "nan", "1e999", "0x10", "1_000", "-", "e5"] {
            assert_eq!(Value::plain(word), Value::Text(word.into()), "{word}");
        }
        assert_eq!(Value::Text("yes".into()).as_bool(), Some(true));
    }
}

//! What a configuration file holds, whatever it is written in.

use std::fmt;

/// Deepest nesting of lists and maps.
pub(super) const MAX_DEPTH: usize = 32;
/// Most keys of one map: each is compared with all before it.
const MAX_KEYS: usize = 4096;

/// A value of a configuration file.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Value {
    /// `null`, or nothing behind a key.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// A finite number, as it is written.
    Number(String),
    /// Words.
    Text(String),
    /// A list.
    List(Vec<Self>),
    /// Keys with values, in the order of the file, each key once.
    Map(Vec<Entry>),
}

/// A key with its value.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Entry {
    /// The key.
    pub(crate) key: String,
    /// Line of the file, from 1.
    pub(crate) line: usize,
    /// What it is set to.
    pub(crate) value: Value,
}

/// A file that cannot be read: where, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fault {
    /// Line of the file, from 1.
    pub(crate) line: usize,
    /// What is wrong.
    pub(crate) why: String,
}

impl Fault {
    pub(super) fn new(line: usize, why: impl Into<String>) -> Self {
        let why = why.into();
        Self { line, why }
    }

    pub(super) fn too_deep(line: usize) -> Self {
        Self::new(line, format!("nested deeper than {MAX_DEPTH} levels"))
    }
}

/// Adds an entry to a map that does not have its key yet.
pub(super) fn insert(map: &mut Vec<Entry>, entry: Entry) -> Result<(), Fault> {
    if map.len() == MAX_KEYS {
        return Err(Fault::new(entry.line, format!("more than {MAX_KEYS} keys")));
    }
    match map.iter().find(|known| known.key == entry.key) {
        Some(first) => Err(Fault::new(
            entry.line,
            format!(
                "\"{}\" is given twice, first in line {}",
                entry.key, first.line
            ),
        )),
        None => {
            map.push(entry);
            Ok(())
        }
    }
}

impl Value {
    /// An unquoted word: what YAML and JSON mean by it.
    pub(super) fn plain(word: &str) -> Self {
        match word {
            "" | "~" | "null" | "Null" | "NULL" => Self::Null,
            "true" | "True" | "TRUE" => Self::Bool(true),
            "false" | "False" | "FALSE" => Self::Bool(false),
            _ if is_number(word) => Self::Number(word.to_owned()),
            _ => Self::Text(word.to_owned()),
        }
    }

    /// Whether it is the word `auto`.
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

    /// A truth value; words in Python's and YAML's spellings count.
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

    /// A whole number of at least 0; `5e8` is one too.
    pub(crate) fn as_u64(&self) -> Option<u64> {
        let Self::Number(text) = self else {
            return None;
        };
        // Whole numbers up to 2^53 are exact in f64.
        let exact = |x: &f64| x.fract() == 0.0 && (0.0..=9_007_199_254_740_992.0).contains(x);
        let float = || text.parse().ok().filter(exact).map(|x: f64| x as u64);
        text.parse().ok().or_else(float)
    }

    /// Words.
    pub(crate) fn as_text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }
}

/// As it would be written on one line, cut where it is long.
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

/// A number as JSON writes it, a leading `+` and YAML's `.5` and `5.` included.
fn is_number(word: &str) -> bool {
    let first = word.trim_start_matches(['+', '-', '.']).chars().next();
    // `inf`, `nan` and `infinity` are numbers to Rust, not to these files.
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

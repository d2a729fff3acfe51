//! Entries of a data file, as JSON values whatever the file is written in, and the keys of an object that a rule takes one by one.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use serde::de::{DeserializeSeed, Error as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Number, Value};

use super::csv;
use crate::data::lines::sample_lines;
use crate::data::raw::{DataError, invalid};
use crate::parquet;

const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";
/// Beginnings of packed files, with the name of their form and the program that unpacks them to its output.
const PACKED: [(&[u8], &str, &str); 4] = [
    (b"\x1f\x8b", "gzip", "zcat"),
    (b"\x28\xb5\x2f\xfd", "zstd", "zstdcat"),
    (b"\xfd7zXZ", "xz", "xzcat"),
    (b"PK\x03\x04", "zip", "unzip -p"),
];

/// Keys of a list of turns.
const TURNS: [&str; 2] = ["messages", "conversations"];

/// The name of the form in which `bytes` are packed, and the program that unpacks it to its output.
#[must_use]
pub fn packing(bytes: &[u8]) -> Option<(&'static str, &'static str)> {
    let found = PACKED.iter().find(|(mark, ..)| bytes.starts_with(mark));
    found.map(|(_, name, tool)| (*name, *tool))
}

/// Reads the entries of the file `path`, each by `each`: the rows of Parquet or CSV, a JSON list, or one object per line.
///
/// # Errors
/// [`DataError`] if the file cannot be read, is not valid, has no entry, or `each` refuses one.
pub(super) fn read_entries<T>(
    path: &Path,
    mut each: impl FnMut(Value) -> Result<T, String>,
) -> Result<Vec<T>, DataError> {
    let mut list = List {
        each: &mut each,
        read: Vec::new(),
        refused: None,
    };
    let read = match kind(path)? {
        Kind::Parquet => list.rows(path),
        Kind::Table(text) => list.table(path, &text),
        Kind::Json(bytes) => list.json(path, &bytes),
    };
    if let Some(reason) = list.refused {
        return Err(refused_entry(path, list.read.len(), reason));
    }
    read?;
    match list.read.is_empty() {
        true => Err(DataError::Empty {
            path: path.to_owned(),
        }),
        false => Ok(list.read),
    }
}

/// The error of the entry `index` of the file `path`, which is refused for `reason`.
pub(super) fn refused_entry(path: &Path, index: usize, reason: String) -> DataError {
    match sample_places(path).get(index) {
        None => row_error(path, index, reason),
        Some(&line) => DataError::Json {
            path: path.to_owned(),
            line,
            column: 1,
            reason,
        },
    }
}

/// Lines, counted from 1, on which the samples of the file `path` begin. Empty for a Parquet file, whose rows have none,
/// and for a file that cannot be read.
pub fn sample_places(path: &Path) -> Vec<usize> {
    match kind(path) {
        Ok(Kind::Table(text)) => csv::lines(&text),
        Ok(Kind::Json(bytes)) => sample_lines(&bytes),
        Ok(Kind::Parquet) | Err(_) => Vec::new(),
    }
}

/// How a file writes its entries.
enum Kind {
    Parquet,
    /// Text of a CSV file.
    Table(String),
    /// Content of a file with JSON.
    Json(Vec<u8>),
}

fn kind(path: &Path) -> Result<Kind, DataError> {
    let failed = |source| DataError::Read {
        path: path.to_owned(),
        source,
    };
    if parquet::is_parquet(path).map_err(failed)? {
        return Ok(Kind::Parquet);
    }
    let mut bytes = std::fs::read(path).map_err(failed)?;
    // Some editors put a byte order mark in front.
    if bytes.starts_with(BYTE_ORDER_MARK) {
        bytes.drain(..BYTE_ORDER_MARK.len());
    }
    if let Some((name, _)) = packing(&bytes) {
        return Err(DataError::Json {
            path: path.to_owned(),
            line: 1,
            column: 1,
            reason: format!("the file is packed with {name}"),
        });
    }
    if !csv::is_csv(path) {
        return Ok(Kind::Json(bytes));
    }
    let text = String::from_utf8(bytes).map_err(|error| DataError::Json {
        path: path.to_owned(),
        line: 1 + error.as_bytes()[..error.utf8_error().valid_up_to()]
            .iter()
            .filter(|byte| **byte == b'\n')
            .count(),
        column: 1,
        reason: "the text is not UTF-8".to_owned(),
    })?;
    Ok(Kind::Table(text))
}

fn row_error(path: &Path, row: usize, reason: String) -> DataError {
    DataError::Row {
        path: path.to_owned(),
        row,
        reason,
    }
}

/// Reads the only entry of the file `path`, whose content is `bytes`, by `each`.
///
/// # Errors
/// [`DataError::Json`] if it is not valid JSON, or `each` refuses it.
pub(super) fn read_entry<T>(
    path: &Path,
    bytes: &[u8],
    each: impl FnOnce(Value) -> Result<T, String>,
) -> Result<T, DataError> {
    let bytes = bytes.strip_prefix(BYTE_ORDER_MARK).unwrap_or(bytes);
    let entry: Result<Entry, _> = serde_json::from_slice(bytes);
    let entry = entry.map_err(|error| invalid(path, 0, &error))?;
    each(entry.0).map_err(|reason| DataError::Json {
        path: path.to_owned(),
        line: 1,
        column: 1,
        reason,
    })
}

/// The first entry of the file `path`.
///
/// # Errors
/// As [`read_entries`]; the other entries are not read.
pub(super) fn first_entry(path: &Path) -> Result<Value, DataError> {
    let mut first = None;
    let read = read_entries(path, |value| match first.replace(value) {
        None => Err::<(), _>(String::new()),
        Some(_) => Ok(()),
    });
    match (first, read) {
        (Some(value), _) => Ok(value),
        (None, Err(error)) => Err(error),
        (None, Ok(_)) => Err(DataError::Empty {
            path: path.to_owned(),
        }),
    }
}

/// Entries read so far, and why the next one was refused.
struct List<'f, T, F> {
    each: &'f mut F,
    read: Vec<T>,
    refused: Option<String>,
}

impl<T, F: FnMut(Value) -> Result<T, String>> List<'_, T, F> {
    fn json(&mut self, path: &Path, bytes: &[u8]) -> Result<(), DataError> {
        match bytes.trim_ascii_start().first() {
            Some(b'[') => self.whole(path, bytes),
            _ => self.lines(path, bytes),
        }
    }

    fn rows(&mut self, path: &Path) -> Result<(), DataError> {
        let rows = parquet::each_row(path, &mut |row| self.add(row));
        rows.map_err(|reason| row_error(path, self.read.len(), reason))
    }

    fn table(&mut self, path: &Path, text: &str) -> Result<(), DataError> {
        let rows = csv::each_row(text, &mut |row| self.add(row));
        rows.map_err(|(line, reason)| DataError::Json {
            path: path.to_owned(),
            line,
            column: 1,
            reason,
        })
    }

    fn whole(&mut self, path: &Path, bytes: &[u8]) -> Result<(), DataError> {
        let mut json = serde_json::Deserializer::from_slice(bytes);
        json.deserialize_seq(&mut *self)
            .and_then(|()| json.end())
            .map_err(|error| invalid(path, 0, &error))
    }

    fn lines(&mut self, path: &Path, bytes: &[u8]) -> Result<(), DataError> {
        for (index, line) in bytes.split(|&byte| byte == b'\n').enumerate() {
            if line.trim_ascii().is_empty() {
                continue;
            }
            let entry: Result<Entry, _> = serde_json::from_slice(line);
            let entry = entry.map_err(|error| invalid(path, index, &error))?;
            if !self.add(entry.0) {
                break;
            }
        }
        Ok(())
    }

    fn add(&mut self, mut value: Value) -> bool {
        for key in TURNS {
            if let Some(turns) = value.get_mut(key) {
                unquote(turns);
            }
        }
        match (self.each)(value) {
            Ok(entry) => self.read.push(entry),
            Err(reason) => self.refused = Some(reason),
        }
        self.refused.is_none()
    }
}

/// Replaces a text that is a JSON list, as tables hold lists, by the list.
fn unquote(value: &mut Value) {
    let list = value
        .as_str()
        .filter(|text| text.trim_start().starts_with('['));
    if let Some(Ok(Entry(list))) = list.map(serde_json::from_str) {
        *value = list;
    }
}

impl<'de, T, F: FnMut(Value) -> Result<T, String>> Visitor<'de> for &mut List<'_, T, F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of samples")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        while let Some(Entry(value)) = list.next_element()? {
            if !self.add(value) {
                return Err(A::Error::custom("an entry is refused"));
            }
        }
        Ok(())
    }
}

/// A JSON value whose objects have no key twice.
struct Entry(Value);

impl<'de> Deserialize<'de> for Entry {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        Unique.deserialize(input).map(Self)
    }
}

#[derive(Clone, Copy)]
struct Unique;

impl<'de> DeserializeSeed<'de> for Unique {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, input: D) -> Result<Value, D::Error> {
        input.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Unique {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_str<E>(self, text: &str) -> Result<Value, E> {
        Ok(text.into())
    }

    fn visit_string<E>(self, text: String) -> Result<Value, E> {
        Ok(text.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = list.next_element_seed(self)? {
            values.push(value);
        }
        Ok(values.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut values = Map::new();
        while let Some(key) = map.next_key::<String>()? {
            if values.contains_key(&key) {
                return Err(A::Error::custom(format_args!("{key:?} is given twice")));
            }
            values.insert(key, map.next_value_seed(self)?);
        }
        Ok(values.into())
    }
}

/// Keys without effect.
#[derive(Debug, Default)]
pub(super) struct Ignored {
    /// Number of objects that have each key.
    counts: BTreeMap<String, usize>,
    /// The keys of a sample that hold images, each with such a text.
    images: Vec<(String, String)>,
}

impl Ignored {
    pub(super) fn count(&mut self, key: String) {
        *self.counts.entry(key).or_default() += 1;
    }

    /// The keys of the sample that hold images, each with such a text; the next sample begins without.
    pub(super) fn take_images(&mut self) -> Vec<(String, String)> {
        std::mem::take(&mut self.images)
    }

    /// Every key with the number of objects that have it.
    pub(super) fn into_counts(self) -> Vec<(String, usize)> {
        self.counts.into_iter().collect()
    }
}

/// Keys of an object. A rule takes those it understands; the others are named at the end.
pub(super) struct Keys {
    fields: Map<String, Value>,
    /// The object in words, such as `turn 3`; empty for a sample.
    place: String,
}

impl Keys {
    pub(super) fn of(value: Value, place: &str) -> Result<Self, String> {
        let place = place.to_owned();
        match value {
            Value::Object(fields) => Ok(Self { fields, place }),
            other => Err(said(&place, &format!("{other} is no object"))),
        }
    }

    /// The value of `key` unless it is absent, null, an empty text, list or object.
    pub(super) fn take(&mut self, key: &str) -> Option<Value> {
        self.fields.remove(key).filter(|value| !is_empty(value))
    }

    /// The value of `key`, empty or not; `None` if it is absent or null.
    pub(super) fn take_any(&mut self, key: &str) -> Option<Value> {
        self.fields.remove(key).filter(|value| !value.is_null())
    }

    /// Whether the object has `key`.
    pub(super) fn has(&self, key: &str) -> bool {
        self.fields.contains_key(key)
    }

    /// The value of `key`, which stays for another rule.
    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        self.fields.get(key)
    }

    /// Whether the object gives `key` the value `value`.
    pub(super) fn is(&self, key: &str, value: &Value) -> bool {
        self.fields.get(key) == Some(value)
    }

    /// Value and name of the one key of `keys` that the object has.
    pub(super) fn take_one_of(
        &mut self,
        keys: &[&'static str],
    ) -> Result<Option<(&'static str, Value)>, String> {
        let mut found: Option<(&'static str, Value)> = None;
        for &key in keys {
            let Some(value) = self.take(key) else {
                continue;
            };
            if let Some((other, _)) = found {
                return Err(
                    self.refusal(&format!("it has {other:?} and {key:?}; give one of them"))
                );
            }
            found = Some((key, value));
        }
        Ok(found)
    }

    /// The text of `key`.
    pub(super) fn text(&mut self, key: &str) -> Result<Option<String>, String> {
        match self.take(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.refusal(&format!("{key:?} is {other}, not a text"))),
        }
    }

    /// What a speaker says under `key`: a text, or a number as its text.
    pub(super) fn said(&mut self, key: &str) -> Result<Option<String>, String> {
        match self.take(key) {
            Some(Value::Number(number)) => {
                let text = number_text(&number);
                text.map(Some).map_err(|reason| self.refusal(&reason))
            }
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.refusal(&format!("{key:?} is {other}, not a text"))),
        }
    }

    /// `reason` with the place of the object.
    pub(super) fn refusal(&self, reason: &str) -> String {
        said(&self.place, reason)
    }

    /// Counts the keys that no rule took, each as `prefix` and its name.
    pub(super) fn finish(self, prefix: &str, ignored: &mut Ignored) {
        for (key, value) in self.fields.iter().filter(|(_, value)| !is_empty(value)) {
            let key_of = |text: &str| (format!("{prefix}{key}"), text.to_owned());
            ignored
                .images
                .extend(named_images(value).into_iter().map(key_of));
            ignored.count(format!("{prefix}{key}"));
        }
    }
}

/// The text of a number that is given as a question or an answer.
///
/// # Errors
/// It is so small or large, or is `-0`, that the file may write it otherwise: `1e-05`, or 20 digits.
pub(super) fn number_text(number: &Number) -> Result<String, String> {
    let text = number.to_string();
    let fraction = number.as_f64().filter(|_| number.is_f64());
    let is_usual = |value: f64| (1e-4..1e16).contains(&value.abs()) || value.to_bits() == 0;
    match fraction.is_none_or(is_usual) {
        true => Ok(text),
        false => Err(format!(
            "the number {text} may be written otherwise in the file; give it as a text, in quotes"
        )),
    }
}

fn said(place: &str, reason: &str) -> String {
    match place.is_empty() {
        true => reason.to_owned(),
        false => format!("{place}: {reason}"),
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::Bool(_) | Value::Number(_) => false,
    }
}

/// The texts of a value that are paths of images or the bytes of a file.
fn named_images(value: &Value) -> Vec<&str> {
    match value {
        Value::String(text) if super::images::is_image_path(text) => vec![text],
        Value::Array(list) => list.iter().flat_map(named_images).collect(),
        Value::Object(fields) => {
            let bytes = fields.get("bytes").and_then(Value::as_str);
            let others = fields.values().flat_map(named_images);
            bytes.into_iter().chain(others).collect()
        }
        _ => Vec::new(),
    }
}

//! Names of columns and tags that `dataset_info.json` states, replaced by those that the reader knows.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::entry::{Ignored, Keys};
use super::{DATASET_INFO, DataFormat};

/// Columns of the formatting alpaca: LLaMA-Factory's name, the reader's key, the default column.
const ALPACA: [(&str, &str, &str); 12] = [
    ("prompt", "instruction", "instruction"),
    ("query", "input", "input"),
    ("response", "output", "output"),
    ("history", "history", "history"),
    ("system", "system", "system"),
    ("tools", "tools", "tools"),
    ("images", "images", "images"),
    ("videos", "videos", "videos"),
    ("audios", "audios", "audios"),
    ("chosen", "chosen", "chosen"),
    ("rejected", "rejected", "rejected"),
    ("kto_tag", "kto_tag", "kto_tag"),
];
/// Columns of the formatting sharegpt in addition to those of alpaca.
const MESSAGES: (&str, &str, &str) = ("messages", "messages", "conversations");
/// Tags of speakers: LLaMA-Factory's name, the reader's role, the default word.
const SPEAKERS: [(&str, &str, &str); 5] = [
    ("user_tag", "user", "human"),
    ("assistant_tag", "assistant", "gpt"),
    ("observation_tag", "observation", "observation"),
    ("function_tag", "function_call", "function_call"),
    ("system_tag", "system", "system"),
];

/// How the keys of a file are called.
#[derive(Clone, Debug)]
pub(super) struct Columns {
    /// (column of the file, key of the reader).
    keys: Vec<(String, &'static str)>,
    /// (LLaMA-Factory's name, column of the file) of each column that the entry states.
    stated: Vec<(&'static str, String)>,
    role: String,
    content: String,
    /// (word of the file, role of the reader).
    speakers: Vec<(String, &'static str)>,
}

impl Columns {
    /// Columns and tags of an entry of `dataset_info.json`.
    ///
    /// # Errors
    /// A column or tag is not known, or no text.
    pub(super) fn of(
        format: DataFormat,
        columns: Option<Value>,
        tags: Option<Value>,
    ) -> Result<Self, String> {
        let mut columns = Keys::of(columns.unwrap_or(Map::new().into()), "columns")?;
        let messages = (format == DataFormat::Messages).then_some(MESSAGES);
        let (mut keys, mut stated) = (Vec::new(), Vec::new());
        for (name, key, default) in ALPACA.into_iter().chain(messages) {
            let column = columns.text(name)?;
            stated.extend(column.clone().map(|column| (name, column)));
            keys.push((column.unwrap_or_else(|| default.to_owned()), key));
        }
        complete(columns)?;
        let mut tags = Keys::of(tags.unwrap_or(Map::new().into()), "tags")?;
        let mut text = |name: &str, default: &str| -> Result<String, String> {
            Ok(tags.text(name)?.unwrap_or_else(|| default.to_owned()))
        };
        let (role, content) = (text("role_tag", "from")?, text("content_tag", "value")?);
        let speakers: Result<Vec<_>, String> = SPEAKERS
            .iter()
            .map(|(name, role, default)| Ok((text(name, default)?, *role)))
            .collect();
        let speakers = speakers?;
        complete(tags)?;
        Ok(Self {
            keys,
            stated,
            role,
            content,
            speakers,
        })
    }

    /// Names a column that the entry of `dataset_info.json` states and that is not among `found`, the keys of all samples
    /// so far.
    pub(super) fn missing(&self, found: &BTreeSet<String>) -> Option<String> {
        let (name, column) = self
            .stated
            .iter()
            .find(|(_, column)| !found.contains(column))?;
        let found: Vec<&str> = found.iter().map(String::as_str).collect();
        Some(format!(
            "{DATASET_INFO} states the column {column:?} as {name:?}, which the samples lack; they have {}",
            found.join(", ")
        ))
    }

    /// `entry` with the reader's keys and roles.
    pub(super) fn apply(&self, entry: Value) -> Value {
        let Value::Object(fields) = entry else {
            return entry;
        };
        let taken: Vec<&str> = self
            .keys
            .iter()
            .filter(|(column, _)| fields.contains_key(column))
            .map(|(_, name)| *name)
            .collect();
        let renamed = |(key, value): (String, Value)| {
            let known = self.keys.iter().find(|(column, _)| *column == key);
            match known {
                Some((_, "messages")) => ("messages".to_owned(), self.turns(value)),
                Some((_, name)) => ((*name).to_owned(), value),
                None if taken.contains(&&*key) => (beside(&key), value),
                None => (key, value),
            }
        };
        Value::Object(fields.into_iter().map(renamed).collect())
    }

    fn turns(&self, turns: Value) -> Value {
        let Value::Array(turns) = turns else {
            return turns;
        };
        turns.into_iter().map(|turn| self.turn(turn)).collect()
    }

    fn turn(&self, turn: Value) -> Value {
        let Value::Object(fields) = turn else {
            return turn;
        };
        let [has_role, has_content] =
            [&self.role, &self.content].map(|key| fields.contains_key(key));
        let renamed = |(key, value): (String, Value)| {
            if key == self.content {
                return ("content".to_owned(), value);
            }
            if key != self.role {
                let is_other = has_role && key == "role" || has_content && key == "content";
                return (if is_other { beside(&key) } else { key }, value);
            }
            let known = self.speakers.iter().find(|(word, _)| value == **word);
            let role = known.map_or(value.clone(), |(_, role)| (*role).into());
            ("role".to_owned(), role)
        };
        Value::Object(fields.into_iter().map(renamed).collect())
    }
}

/// Name of a key of the file that the reader would take, were another column not named for it.
fn beside(key: &str) -> String {
    format!("{key} (another column is named)")
}

fn complete(keys: Keys) -> Result<(), String> {
    let place = keys.refusal("");
    let mut unknown = Ignored::default();
    keys.finish("", &mut unknown);
    match unknown.into_counts().first() {
        None => Ok(()),
        Some((key, _)) => Err(format!("{place}{key:?} is not known")),
    }
}

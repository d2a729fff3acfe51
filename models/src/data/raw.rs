//! Reader of fine-tuning data: a JSON list, or one JSON object per line.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::de::{DeserializeOwned, Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use thiserror::Error;

use crate::text::Message;

/// Name given to the image of a sample whose data file states one image path without a name.
pub const SINGLE_IMAGE: &str = "<image>";

/// Why a data file cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DataError {
    /// The file is missing or cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// Path of the data file.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// The content is not valid JSON, or an entry of it is not a sample.
    #[error("{}:{line}:{column}: {reason}", path.display())]
    Json {
        /// Path of the data file.
        path: PathBuf,
        /// Line of the error, from 1.
        line: usize,
        /// Column of the error in bytes, from 1; 0 for the end of a line.
        column: usize,
        /// What the parser expected or found.
        reason: String,
    },
    /// The file or directory holds no sample.
    #[error("{} contains no sample", path.display())]
    Empty {
        /// Path of the file or directory.
        path: PathBuf,
    },
    /// The content is of none of the formats.
    #[error("the format of {} is unknown: {found}", path.display())]
    UnknownFormat {
        /// Path of the file or directory.
        path: PathBuf,
        /// What the file or directory holds instead.
        found: String,
    },
    /// The content could be of several formats, or of one in several ways.
    #[error("the format of {} is ambiguous: {reason}", path.display())]
    AmbiguousFormat {
        /// Path of the file or directory.
        path: PathBuf,
        /// The possible meanings, and the flag that selects one.
        reason: String,
    },
    /// A label file without the image it describes.
    #[error("{} describes no image of {}", label.display(), images.display())]
    NoImage {
        /// Path of the label file.
        label: PathBuf,
        /// Directory in which the image was looked for.
        images: PathBuf,
    },
    /// An image without its label file.
    #[error("{} has no label in {}", image.display(), labels.display())]
    NoLabel {
        /// Path of the image.
        image: PathBuf,
        /// Directory in which the label file was looked for.
        labels: PathBuf,
    },
}

/// One sample of a data file: a conversation with its images, not yet tokenized. Unknown fields of the file are
/// ignored.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct RawSample {
    /// The sample's name, used only in messages to the user.
    #[serde(default, deserialize_with = "text_or_number")]
    pub id: Option<String>,
    /// The sample's images in the order of the file: the name that stands for the image in the text, and the image's
    /// path.
    #[serde(default, rename = "image", deserialize_with = "images")]
    pub images: Vec<(String, PathBuf)>,
    /// The turns of the conversation, in order.
    pub conversations: Vec<Message>,
}

impl RawSample {
    /// Content of the last turn, which is the supervised answer; `None` if the last turn is not the assistant's.
    pub fn answer(&self) -> Option<&str> {
        let last = self
            .conversations
            .last()
            .filter(|turn| turn.role == "assistant");
        last.map(|turn| turn.content.as_str())
    }

    /// Whether the sample has exactly one image, given by its path without a name in the text.
    pub fn has_single_image(&self) -> bool {
        matches!(self.images.as_slice(), [(name, _)] if name == SINGLE_IMAGE)
    }
}

/// Reads all samples of the data file `path`.
///
/// # Errors
/// [`DataError`] if the file cannot be read, is not valid (with line and column) or holds no sample.
pub fn read_samples(path: &Path) -> Result<Vec<RawSample>, DataError> {
    read_list(path)
}

/// Reads all samples of the file `path`, each as a `T`.
pub(super) fn read_list<T: DeserializeOwned>(path: &Path) -> Result<Vec<T>, DataError> {
    let bytes = std::fs::read(path).map_err(|source| DataError::Read {
        path: path.to_owned(),
        source,
    })?;
    // some editors put a byte order mark in front
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&bytes);
    let is_list = bytes.trim_ascii_start().first() == Some(&b'[');
    let samples = if is_list {
        serde_json::from_slice(bytes).map_err(|error| invalid(path, 0, &error))?
    } else {
        read_lines(path, bytes)?
    };
    if samples.is_empty() {
        return Err(DataError::Empty {
            path: path.to_owned(),
        });
    }
    Ok(samples)
}

fn read_lines<T: DeserializeOwned>(path: &Path, bytes: &[u8]) -> Result<Vec<T>, DataError> {
    let lines = bytes.split(|&byte| byte == b'\n').enumerate();
    lines
        .filter(|(_, line)| !line.trim_ascii().is_empty())
        .map(|(index, line)| {
            serde_json::from_slice(line).map_err(|error| invalid(path, index, &error))
        })
        .collect()
}

/// `error` at its line of the file `path`; parsing began after `lines_before` lines.
pub(super) fn invalid(path: &Path, lines_before: usize, error: &serde_json::Error) -> DataError {
    let (line, column) = (error.line(), error.column());
    let text = error.to_string();
    let place = format!(" at line {line} column {column}");
    let reason = text.strip_suffix(&place).unwrap_or(&text).to_owned();
    DataError::Json {
        path: path.to_owned(),
        // what a whole sample lacks has no place of its own
        line: lines_before + line.max(1),
        column,
        reason,
    }
}

pub(super) fn text_or_number<'de, D: Deserializer<'de>>(
    input: D,
) -> Result<Option<String>, D::Error> {
    match Option::<serde_json::Value>::deserialize(input)? {
        None | Some(serde_json::Value::Null) => Ok(None),
        Some(serde_json::Value::String(text)) => Ok(Some(text)),
        Some(serde_json::Value::Number(number)) => Ok(Some(number.to_string())),
        Some(_) => Err(D::Error::custom("id must be a text or a number")),
    }
}

fn images<'de, D: Deserializer<'de>>(input: D) -> Result<Vec<(String, PathBuf)>, D::Error> {
    input.deserialize_any(Images)
}

struct Images;

impl<'de> Visitor<'de> for Images {
    type Value = Vec<(String, PathBuf)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a picture's path or an object of names and paths")
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(Vec::new())
    }

    fn visit_str<E>(self, path: &str) -> Result<Self::Value, E> {
        Ok(vec![(SINGLE_IMAGE.to_owned(), PathBuf::from(path))])
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut images = Vec::<(String, PathBuf)>::new();
        while let Some((name, path)) = map.next_entry::<String, PathBuf>()? {
            if images.iter().any(|(known, _)| *known == name) {
                return Err(A::Error::custom(format_args!(
                    "image {name:?} is given twice"
                )));
            }
            images.push((name, path));
        }
        Ok(images)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(content: &[u8]) -> Result<Vec<RawSample>, DataError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("data.json");
        std::fs::write(&path, content).unwrap();
        read_samples(&path)
    }

    const TURNS: &str = r#""conversations": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]"#;

    #[test]
    fn every_form_of_id_and_image_is_read() {
        let text = format!(
            r#"[{{"id": 7, "image": "a.png", {TURNS}}},
                {{"id": "x", "image": {{"<image_01>": "b", "<image_00>": "c"}}, {TURNS}, "extra": 1}},
                {{"image": null, {TURNS}}}, {{{TURNS}}}]"#
        );
        let samples = read(text.as_bytes()).unwrap();
        assert_eq!(samples[0].id.as_deref(), Some("7"));
        assert!(samples[0].has_single_image());
        let names: Vec<&str> = samples[1]
            .images
            .iter()
            .map(|(name, _)| name.as_str())
            .collect();
        assert_eq!(names, ["<image_01>", "<image_00>"]);
        assert!(!samples[1].has_single_image());
        assert!(samples[2].images.is_empty() && samples[3].images.is_empty());
        assert_eq!(samples[3].answer(), Some("a"));
    }

    #[test]
    fn json_lines_and_a_byte_order_mark_are_read() {
        let lines = format!("\u{feff}{{\"id\": \"1\", {TURNS}}}\n\n{{\"id\": \"2\", {TURNS}}}\r\n");
        let samples = read(lines.as_bytes()).unwrap();
        assert_eq!(samples[1].id.as_deref(), Some("2"));
    }

    #[test]
    fn errors_in_json_are_located() {
        let list = format!("[{{{TURNS}}},\n\n{{{TURNS}]");
        let lines = format!("{{{TURNS}}}\n\n{{\"id\" 3}}");
        for (text, at) in [(list, 3), (lines, 3)] {
            let error = read(text.as_bytes()).unwrap_err();
            let DataError::Json {
                line,
                column,
                reason,
                ..
            } = error
            else {
                panic!("{error}")
            };
            assert_eq!(line, at, "{reason}");
            assert!(column > 0 && !reason.contains("line"));
        }
    }

    #[test]
    fn wrong_fields_are_located_and_explained() {
        for (text, reason) in [
            (r#"[{"id": 1}]"#.to_owned(), "missing field `conversations`"),
            (
                format!("[{{\"image\": 3, {TURNS}}}]"),
                "a picture's path or an object",
            ),
            (
                format!("[{{\"image\": {{\"a\": \"x\", \"a\": \"y\"}}, {TURNS}}}]"),
                "given twice",
            ),
            (
                format!("[{{\"id\": [], {TURNS}}}]"),
                "id must be a text or a number",
            ),
        ] {
            let error = read(text.as_bytes()).unwrap_err();
            assert!(matches!(error, DataError::Json { line: 1, .. }));
            assert!(error.to_string().contains(reason), "{error}");
        }
        assert!(matches!(
            read(b"[{\"id\": \"\xff\"}]"),
            Err(DataError::Json { .. })
        ));
    }

    #[test]
    fn an_empty_or_missing_file_is_an_error() {
        for text in ["", "[]", " \n"] {
            assert!(matches!(
                read(text.as_bytes()),
                Err(DataError::Empty { .. })
            ));
        }
        let missing = read_samples(Path::new("/nonexistent/data.json"));
        assert!(matches!(missing, Err(DataError::Read { .. })));
    }
}

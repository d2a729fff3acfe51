//! The forms in which projects keep fine-tuning data, read into one.
//!
//! | format | of | what it looks like |
//! |---|---|---|
//! | [`DataFormat::MiniCpm`] | MiniCPM-V's fine-tuning | `{id, image, conversations: [{role, content}]}` |
//! | [`DataFormat::Messages`] | GLM-4V's fine-tuning, LLaMA-Factory | `{messages: [{role, content, image?}], images?}` |
//! | [`DataFormat::ShareGpt`] | LLaMA-Factory, LLaVA | `{conversations: [{from, value}], images? or image?}` |
//! | [`DataFormat::CogVlmSft`] | CogVLM-SFT-311K | folder with `images/` and `labels_*/` of the same names |
//! | [`DataFormat::Captcha`] | CogVLM's demo | folder of pictures, each named by its label |

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::folders;
use super::raw::{DataError, RawSample, SINGLE_IMAGE, read_list};
use crate::text::Message;

/// A form of fine-tuning data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DataFormat {
    /// A list of `{id, image, conversations: [{role, content}]}`.
    MiniCpm,
    /// A list of `{messages: [{role, content}]}`, pictures in `images` or in the messages.
    Messages,
    /// A list of `{conversations: [{from, value}]}`, pictures in `images` or `image`.
    ShareGpt,
    /// A folder with `images/` and `labels_*/`.
    CogVlmSft,
    /// A folder of pictures named by their labels.
    Captcha,
}

impl DataFormat {
    /// All formats, with their names on command lines.
    pub const ALL: [(Self, &'static str); 5] = [
        (Self::MiniCpm, "minicpm"),
        (Self::Messages, "messages"),
        (Self::ShareGpt, "sharegpt"),
        (Self::CogVlmSft, "cogvlm-sft"),
        (Self::Captcha, "captcha"),
    ];

    /// The name on command lines.
    #[must_use]
    pub fn name(self) -> &'static str {
        let found = Self::ALL.iter().find(|(format, _)| *format == self);
        found.map_or("", |(_, name)| name)
    }

    /// The format of the file or folder `path`, by what it holds.
    ///
    /// # Errors
    /// When it cannot be read, or has none of the forms.
    pub fn detect(path: &Path) -> Result<Self, DataError> {
        if path.is_dir() {
            return folders::detect(path);
        }
        let first: Vec<Value> = read_list(path, Some(1))?;
        let unknown = |found: String| DataError::UnknownFormat {
            path: path.to_owned(),
            found,
        };
        let Some(Value::Object(sample)) = first.first() else {
            return Err(unknown("the first sample is no JSON object".to_owned()));
        };
        if sample.contains_key("messages") {
            return Ok(Self::Messages);
        }
        let turn = sample.get("conversations").and_then(|turns| turns.get(0));
        match turn {
            Some(turn) if turn.get("from").is_some() => Ok(Self::ShareGpt),
            // Anything else with turns is refused where it is read, with line and column.
            Some(_) => Ok(Self::MiniCpm),
            None if sample.contains_key("conversations") => Ok(Self::MiniCpm),
            None => {
                let keys: Vec<&str> = sample.keys().map(String::as_str).collect();
                Err(unknown(format!(
                    "the first sample has the fields {}",
                    keys.join(", ")
                )))
            }
        }
    }
}

impl fmt::Display for DataFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DataFormat {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        let word = word.replace('_', "-");
        let found = Self::ALL.iter().find(|(_, name)| *name == word);
        found.map(|(format, _)| *format).ok_or_else(|| {
            let names: Vec<&str> = Self::ALL.iter().map(|(_, name)| *name).collect();
            format!("expected one of {}", names.join(", "))
        })
    }
}

/// Reads all samples of the file or folder `path`, whose form is detected unless it is given. Relative paths of
/// pictures start at the file's folder, or at the folder itself.
///
/// # Errors
/// [`DataError`] if the data cannot be read, is not valid (files: with line and column) or holds no sample.
pub fn read_samples_as(
    path: &Path,
    format: Option<DataFormat>,
) -> Result<Vec<RawSample>, DataError> {
    let format = match format {
        Some(format) => format,
        None => DataFormat::detect(path)?,
    };
    let samples = match format {
        DataFormat::MiniCpm => read_list(path, None)?,
        DataFormat::Messages => convert(path, Messages::into_sample)?,
        DataFormat::ShareGpt => convert(path, ShareGpt::into_sample)?,
        DataFormat::CogVlmSft => folders::cogvlm_sft(path)?,
        DataFormat::Captcha => folders::captcha(path)?,
    };
    if samples.is_empty() {
        return Err(DataError::Empty {
            path: path.to_owned(),
        });
    }
    Ok(samples)
}

fn convert<T: DeserializeOwned>(
    path: &Path,
    into: impl Fn(T) -> Result<RawSample, String>,
) -> Result<Vec<RawSample>, DataError> {
    let samples: Vec<T> = read_list(path, None)?;
    let converted = samples.into_iter().enumerate().map(|(index, sample)| {
        into(sample).map_err(|reason| DataError::Sample {
            path: path.to_owned(),
            index,
            reason,
        })
    });
    converted.collect()
}

/// One path or several.
#[derive(Deserialize)]
#[serde(untagged)]
enum Paths {
    One(PathBuf),
    Several(Vec<PathBuf>),
}

impl Paths {
    fn into_vec(self) -> Vec<PathBuf> {
        match self {
            Self::One(path) => vec![path],
            Self::Several(paths) => paths,
        }
    }
}

#[derive(Deserialize)]
struct Messages {
    #[serde(default)]
    id: Option<Value>,
    messages: Vec<MessageWithImage>,
    #[serde(default)]
    images: Option<Paths>,
}

#[derive(Deserialize)]
struct MessageWithImage {
    role: String,
    content: String,
    #[serde(default)]
    image: Option<PathBuf>,
}

impl Messages {
    fn into_sample(self) -> Result<RawSample, String> {
        let mut paths = self.images.map(Paths::into_vec).unwrap_or_default();
        let listed = !paths.is_empty();
        let mut turns = Vec::with_capacity(self.messages.len());
        for message in self.messages {
            let MessageWithImage {
                role,
                mut content,
                image,
            } = message;
            if let Some(image) = image {
                if listed {
                    return Err("pictures stand both in images and in a message".to_owned());
                }
                // The picture of a message stands before its text unless the text places it.
                if !content.contains(SINGLE_IMAGE) {
                    content.insert_str(0, SINGLE_IMAGE);
                }
                paths.push(image);
            }
            turns.push(Message { role, content });
        }
        with_pictures(name(self.id), turns, paths)
    }
}

#[derive(Deserialize)]
struct ShareGpt {
    #[serde(default)]
    id: Option<Value>,
    conversations: Vec<Said>,
    #[serde(default)]
    system: Option<String>,
    #[serde(default, alias = "image")]
    images: Option<Paths>,
}

#[derive(Deserialize)]
struct Said {
    from: String,
    value: String,
}

impl ShareGpt {
    fn into_sample(self) -> Result<RawSample, String> {
        let system = self.system.filter(|text| !text.is_empty());
        let system = system.map(|content| Message {
            role: "system".to_owned(),
            content,
        });
        let mut turns: Vec<Message> = system.into_iter().collect();
        for said in self.conversations {
            let role = match said.from.as_str() {
                "human" | "user" => "user",
                "gpt" | "assistant" => "assistant",
                "system" => "system",
                other => {
                    return Err(format!(
                        "a turn is from {other:?}, not human, gpt or system"
                    ));
                }
            };
            turns.push(Message {
                role: role.to_owned(),
                content: said.value,
            });
        }
        let paths = self.images.map(Paths::into_vec).unwrap_or_default();
        with_pictures(name(self.id), turns, paths)
    }
}

fn name(id: Option<Value>) -> Option<String> {
    match id? {
        Value::String(text) => Some(text),
        Value::Number(number) => Some(number.to_string()),
        _ => None,
    }
}

/// A sample whose `<image>` markers stand for `paths` in order; several get names. Pictures without any marker stand
/// before the first turn of the user.
fn with_pictures(
    id: Option<String>,
    mut turns: Vec<Message>,
    paths: Vec<PathBuf>,
) -> Result<RawSample, String> {
    let marked: usize = turns
        .iter()
        .map(|turn| turn.content.matches(SINGLE_IMAGE).count())
        .sum();
    if marked == 0 && !paths.is_empty() {
        let first = turns.iter_mut().find(|turn| turn.role == "user");
        let first = first.ok_or("nobody asks anything")?;
        first
            .content
            .insert_str(0, &SINGLE_IMAGE.repeat(paths.len()));
    } else if marked != paths.len() {
        return Err(format!(
            "{marked} {SINGLE_IMAGE} markers for {} pictures",
            paths.len()
        ));
    }
    if paths.len() <= 1 {
        let images = paths
            .into_iter()
            .map(|path| (SINGLE_IMAGE.to_owned(), path));
        return Ok(RawSample {
            id,
            images: images.collect(),
            conversations: turns,
        });
    }
    let names: Vec<String> = (0..paths.len())
        .map(|i| format!("<image_{i:02}>"))
        .collect();
    let mut next = names.iter();
    for turn in &mut turns {
        let mut pieces = turn.content.split(SINGLE_IMAGE);
        let mut written = pieces.next().unwrap_or_default().to_owned();
        for piece in pieces {
            written.push_str(next.next().map_or("", String::as_str));
            written.push_str(piece);
        }
        turn.content = written;
    }
    Ok(RawSample {
        id,
        images: names.into_iter().zip(paths).collect(),
        conversations: turns,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, format: Option<DataFormat>) -> Result<Vec<RawSample>, DataError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("data.jsonl");
        std::fs::write(&path, text).unwrap();
        read_samples_as(&path, format)
    }

    fn turns(sample: &RawSample) -> Vec<(&str, &str)> {
        let turns = sample.conversations.iter();
        turns.map(|t| (&*t.role, &*t.content)).collect()
    }

    fn pictures(sample: &RawSample) -> Vec<(&str, &str)> {
        let images = sample.images.iter();
        images
            .map(|(name, path)| (&**name, path.to_str().unwrap()))
            .collect()
    }

    #[test]
    fn messages_have_their_pictures_inside_or_in_a_list() {
        let samples = read(
            r#"{"messages": [{"role": "user", "content": "Why?", "image": "a.png"}, {"role": "assistant", "content": "So."}]}
               {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "x <image> y <image>"}, {"role": "assistant", "content": "z"}], "images": ["a", "b"]}
               {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}], "images": []}"#,
            None,
        )
        .unwrap();
        assert_eq!(
            turns(&samples[0]),
            [("user", "<image>Why?"), ("assistant", "So.")]
        );
        assert_eq!(pictures(&samples[0]), [("<image>", "a.png")]);
        assert_eq!(turns(&samples[1])[1].1, "x <image_00> y <image_01>");
        assert_eq!(
            pictures(&samples[1]),
            [("<image_00>", "a"), ("<image_01>", "b")]
        );
        assert!(samples[2].images.is_empty());
    }

    #[test]
    fn sharegpt_turns_get_roles() {
        let samples = read(
            r#"[{"id": 3, "conversations": [{"from": "human", "value": "<image>\nq"}, {"from": "gpt", "value": "a"}], "image": "p.jpg", "system": "be kind"}]"#,
            None,
        )
        .unwrap();
        assert_eq!(samples[0].id.as_deref(), Some("3"));
        assert_eq!(
            turns(&samples[0]),
            [
                ("system", "be kind"),
                ("user", "<image>\nq"),
                ("assistant", "a")
            ]
        );
        assert!(samples[0].has_single_image());
    }

    #[test]
    fn forms_are_told_by_their_fields() {
        let of = |text: &str| {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("data.json");
            std::fs::write(&path, text).unwrap();
            DataFormat::detect(&path)
        };
        let minicpm = r#"[{"conversations": [{"role": "user", "content": "q"}]}]"#;
        assert_eq!(of(minicpm).unwrap(), DataFormat::MiniCpm);
        let lines = "{\"messages\": []}\n{broken";
        assert_eq!(of(lines).unwrap(), DataFormat::Messages);
        let error = of(r#"[{"prompt": "a", "response": "b"}]"#).unwrap_err();
        assert!(error.to_string().contains("prompt, response"), "{error}");
        assert!(
            of("[3]")
                .unwrap_err()
                .to_string()
                .contains("no JSON object")
        );
        assert_eq!("cogvlm_sft".parse(), Ok(DataFormat::CogVlmSft));
        assert!(
            "parquet"
                .parse::<DataFormat>()
                .unwrap_err()
                .contains("captcha")
        );
    }

    #[test]
    fn what_does_not_fit_is_told_with_its_place() {
        let bad = |text: &str| read(text, None).unwrap_err().to_string();
        let two = r#"[{"messages": [{"role": "user", "content": "q"}]}, {"messages": [{"role": "user", "content": "<image><image>"}], "images": ["a"]}]"#;
        assert!(bad(two).contains("sample 1: 2 <image> markers for 1 pictures"));
        let from = r#"[{"conversations": [{"from": "tool", "value": "q"}]}]"#;
        assert!(bad(from).contains("from \"tool\""));
        let missing = "{\"messages\": [{\"role\": \"user\"}]}";
        assert!(bad(missing).contains(":1:") && bad(missing).contains("content"));
        let both =
            r#"{"messages": [{"role": "user", "content": "q", "image": "a"}], "images": ["b"]}"#;
        assert!(bad(both).contains("both"));
        let forced = read(r#"[{"messages": []}]"#, Some(DataFormat::ShareGpt));
        assert!(forced.unwrap_err().to_string().contains("conversations"));
    }
}

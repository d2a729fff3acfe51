//! Samples of the JSON formats. Parsing checks them, so that each error has its line and column.

use std::path::PathBuf;

use serde::Deserialize;

use crate::data::raw::{RawSample, SINGLE_IMAGE, text_or_number};
use crate::text::Message;

/// A [`RawSample`] read from an entry of a file in the format [`DataFormat::Glm4v`](super::DataFormat::Glm4v).
#[derive(Deserialize)]
#[serde(try_from = "Glm4vFields")]
pub(super) struct Glm4v(RawSample);

/// A [`RawSample`] read from an entry of a file in the format [`DataFormat::ShareGpt`](super::DataFormat::ShareGpt).
#[derive(Deserialize)]
#[serde(try_from = "ShareGptFields")]
pub(super) struct ShareGpt(RawSample);

/// A [`RawSample`] read from an entry of a file in the format [`DataFormat::Messages`](super::DataFormat::Messages).
#[derive(Deserialize)]
#[serde(try_from = "MessagesFields")]
pub(super) struct Messages(RawSample);

impl From<Glm4v> for RawSample {
    fn from(sample: Glm4v) -> Self {
        sample.0
    }
}

impl From<ShareGpt> for RawSample {
    fn from(sample: ShareGpt) -> Self {
        sample.0
    }
}

impl From<Messages> for RawSample {
    fn from(sample: Messages) -> Self {
        sample.0
    }
}

#[derive(Deserialize)]
struct Glm4vFields {
    #[serde(default, deserialize_with = "text_or_number")]
    id: Option<String>,
    messages: Vec<Turn>,
    images: Option<Paths>,
}

#[derive(Deserialize)]
struct MessagesFields {
    #[serde(default, deserialize_with = "text_or_number")]
    id: Option<String>,
    messages: Vec<Turn>,
    images: Option<Paths>,
    #[serde(flatten)]
    others: Others,
}

#[derive(Deserialize)]
struct ShareGptFields {
    #[serde(default, deserialize_with = "text_or_number")]
    id: Option<String>,
    conversations: Vec<Spoken>,
    #[serde(alias = "image")]
    images: Option<Paths>,
    #[serde(flatten)]
    others: Others,
}

/// Optional fields of a sample in addition to its turns.
#[derive(Deserialize)]
struct Others {
    system: Option<String>,
    videos: Option<Paths>,
    audios: Option<Paths>,
}

#[derive(Deserialize)]
struct Turn {
    role: String,
    content: String,
    image: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Spoken {
    from: String,
    value: String,
}

/// One path, or a list of them.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a path or a list of paths")]
enum Paths {
    One(PathBuf),
    Many(Vec<PathBuf>),
}

impl Paths {
    fn list(paths: Option<Self>) -> Vec<PathBuf> {
        match paths {
            None => Vec::new(),
            Some(Self::One(path)) => vec![path],
            Some(Self::Many(paths)) => paths,
        }
    }
}

impl TryFrom<Glm4vFields> for Glm4v {
    type Error = String;

    fn try_from(fields: Glm4vFields) -> Result<Self, String> {
        if !Paths::list(fields.images).is_empty() {
            return Err(
                "\"images\" next to the messages belongs to the format messages".to_owned(),
            );
        }
        let mut turns = fields.messages;
        let paths: Vec<(usize, PathBuf)> = turns
            .iter_mut()
            .enumerate()
            .filter_map(|(turn, message)| Some((turn, message.image.take()?)))
            .collect();
        let conversations = turns.into_iter().map(Turn::message);
        let mut conversations: Vec<Message> = conversations.collect();
        let mut images = Vec::with_capacity(paths.len());
        match <[_; 1]>::try_from(paths) {
            Ok([(0, path)]) => images.push((SINGLE_IMAGE.to_owned(), path)),
            other => {
                let paths = other.map_or_else(|paths| paths, Vec::from);
                for (index, (turn, path)) in paths.into_iter().enumerate() {
                    let name = numbered(index);
                    conversations[turn].content.insert_str(0, &name);
                    images.push((name, path));
                }
            }
        }
        Ok(Self(RawSample {
            id: fields.id,
            images,
            conversations,
        }))
    }
}

impl TryFrom<MessagesFields> for Messages {
    type Error = String;

    fn try_from(fields: MessagesFields) -> Result<Self, String> {
        if fields.messages.iter().any(|turn| turn.image.is_some()) {
            return Err("\"image\" in a message belongs to the format glm4v".to_owned());
        }
        let turns = fields.messages.into_iter().map(Turn::message).collect();
        sample(fields.id, turns, fields.images, fields.others).map(Self)
    }
}

impl TryFrom<ShareGptFields> for ShareGpt {
    type Error = String;

    fn try_from(fields: ShareGptFields) -> Result<Self, String> {
        let turns: Result<Vec<Message>, String> = fields
            .conversations
            .into_iter()
            .map(Spoken::message)
            .collect();
        sample(fields.id, turns?, fields.images, fields.others).map(Self)
    }
}

impl Turn {
    fn message(self) -> Message {
        Message {
            role: self.role,
            content: self.content,
        }
    }
}

impl Spoken {
    fn message(self) -> Result<Message, String> {
        let role = match self.from.as_str() {
            "human" => "user",
            "gpt" => "assistant",
            "system" => "system",
            other => {
                return Err(format!(
                    "\"from\" is {other:?} instead of human, gpt or system"
                ));
            }
        };
        Ok(Message {
            role: role.to_owned(),
            content: self.value,
        })
    }
}

fn sample(
    id: Option<String>,
    mut turns: Vec<Message>,
    images: Option<Paths>,
    others: Others,
) -> Result<RawSample, String> {
    for (name, paths) in [("videos", others.videos), ("audios", others.audios)] {
        if !Paths::list(paths).is_empty() {
            return Err(format!("{name} are not supported"));
        }
    }
    if let Some(content) = others.system.filter(|content| !content.is_empty()) {
        let role = "system".to_owned();
        turns.insert(0, Message { role, content });
    }
    let images = place(Paths::list(images), &mut turns)?;
    Ok(RawSample {
        id,
        images,
        conversations: turns,
    })
}

/// Names the images `paths`: the marks `<image>` of the text stand for them in order.
fn place(paths: Vec<PathBuf>, turns: &mut [Message]) -> Result<Vec<(String, PathBuf)>, String> {
    let marks = turns
        .iter()
        .map(|turn| turn.content.matches(SINGLE_IMAGE).count());
    let marks: usize = marks.sum();
    let images = paths.len();
    let in_front = images == 1 && marks == 0;
    if marks != images && !in_front {
        return Err(format!(
            "{marks} times {SINGLE_IMAGE} in the text, but {images} images"
        ));
    }
    if images == 1 {
        let name = SINGLE_IMAGE.to_owned();
        return Ok(paths.into_iter().map(|path| (name.clone(), path)).collect());
    }
    let mut index = 0;
    for turn in turns {
        let mut pieces = turn.content.split(SINGLE_IMAGE);
        let mut content = pieces.next().unwrap_or_default().to_owned();
        for piece in pieces {
            content.push_str(&numbered(index));
            content.push_str(piece);
            index += 1;
        }
        turn.content = content;
    }
    Ok(paths
        .into_iter()
        .enumerate()
        .map(|(index, path)| (numbered(index), path))
        .collect())
}

/// Name of the image `index` of a sample.
fn numbered(index: usize) -> String {
    format!("<image_{index:02}>")
}

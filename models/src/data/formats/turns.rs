//! Turns of a conversation, with roles, marks of the loss and images as the known trainers write them.

use std::path::PathBuf;
use std::sync::LazyLock;

use regex::{Captures, Regex};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::ser::{Formatter, Serializer};

use super::entry::{Ignored, Keys, number_text};
use super::images::{self, Given};
use crate::data::raw::{SINGLE_IMAGE, THOUGHTS};
use crate::glm4v::agent::AgentPrompt;
use crate::text::Message;
use crate::text::literal::hidden;

/// Marks that a text holds as plain text after a backslash.
static ESCAPED: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r"\\(<(image(_\d+)?|img|bbox|ref-object|audio|video)>)")
        .expect("a constant pattern is valid")
});
/// Mark of media that no family reads.
const UNREAD: &str = "<audio>";
/// Marks of images in other programs.
static FOREIGN: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(
        r"<\|(image_pad|image_\d+|image|img|vision_start|begin_of_image)\|>|<(IMAGE|Image|IMG|ImageHere|IMG_CONTEXT)>|<image ?\d+>",
    )
    .expect("a constant pattern is valid")
});
/// Mark of an image in the prompts that MiniCPM's published code writes.
const MINICPM_MARK: &str = "(<image>./</image>)";

/// Keys that put parts of an answer into the loss.
const PARTIAL: [&str; 4] = ["train_detail", "training_detail", "loss_mask", "label_mask"];

/// A turn, with the images that it gives itself.
pub(super) struct Turn {
    pub(super) message: Message,
    pub(super) images: Vec<PathBuf>,
    /// Whether the images stand before the text, which has no marks for them.
    pub(super) in_front: bool,
}

impl Turn {
    fn of(message: Message, images: Vec<PathBuf>) -> Self {
        Self {
            message,
            images,
            in_front: false,
        }
    }

    /// A turn without images of its own.
    pub(super) fn said(role: &str, text: String) -> Self {
        Self::of(Message::new(role, escaped(text)), Vec::new())
    }
}

/// Reads the turns of `list`.
///
/// # Errors
/// The first turn that cannot be read, or that asks for something that training does not do.
pub(super) fn read(list: Value, ignored: &mut Ignored) -> Result<Vec<Turn>, String> {
    let Value::Array(list) = list else {
        return Err(format!("{list} is no list of turns"));
    };
    let turns = list.into_iter().enumerate();
    turns
        .map(|(index, turn)| one(index, turn, ignored))
        .collect()
}

fn one(index: usize, turn: Value, ignored: &mut Ignored) -> Result<Turn, String> {
    let mut keys = Keys::of(turn, &format!("turn {index}"))?;
    let role = keys.take_one_of(&["role", "from"])?;
    let role = match role {
        Some((_, Value::String(role))) => role,
        Some((key, other)) => return Err(keys.refusal(&format!("{key:?} is {other}, not a text"))),
        None => return Err(keys.refusal("missing field `role` or `from`")),
    };
    let (content, inline) = content(&mut keys, ignored)?;
    let mut turn = spoken(&role, content, &mut keys)?;
    turn.images.extend(inline);
    turn.message.unsupervised = !is_supervised(&mut keys)?;
    if let Some(metadata) = keys.text("metadata")? {
        turn.message.metadata = metadata;
    }
    if turn.message.role == "assistant" {
        turn.message.reasoning_content = thought(&mut keys, ignored)?;
    }
    let Given::List(own) = images::take(&mut keys)? else {
        return Err(keys.refusal("an image of a turn is a path or a list of paths"));
    };
    if !own.is_empty() && !turn.images.is_empty() {
        return Err(keys.refusal("it gives images in its text and beside it"));
    }
    match images::marks(&turn.message.content) {
        marks if own.is_empty() || marks == own.len() => {}
        0 => turn.in_front = true,
        marks => {
            let reason = format!("{marks} times {SINGLE_IMAGE}, but {} images", own.len());
            return Err(keys.refusal(&reason));
        }
    }
    turn.images.extend(own);
    refuse_media(&mut keys)?;
    refuse_video(&mut keys)?;
    refuse_tools(&mut keys)?;
    let text = &turn.message.content;
    let unread = text.contains(UNREAD).then_some(UNREAD);
    for mark in unread.into_iter().chain(foreign_mark(text)) {
        ignored.count(format!("{mark} in a text"));
    }
    keys.finish("turns[].", ignored);
    Ok(turn)
}

/// The first mark in `text` that is one of an image in another program.
pub(super) fn foreign_mark(text: &str) -> Option<&str> {
    FOREIGN.find(text).map(|mark| mark.as_str())
}

/// The thought before an answer. An empty one is a thought, too: the answer's text is then no place of another.
fn thought(keys: &mut Keys, ignored: &mut Ignored) -> Result<Option<String>, String> {
    match keys.take_any("reasoning_content") {
        None => Ok(None),
        Some(Value::String(text)) => {
            if !text.is_empty() {
                ignored.count(THOUGHTS.to_owned());
            }
            Ok(Some(escaped(text)))
        }
        Some(other) => Err(keys.refusal(&format!("\"reasoning_content\" is {other}, not a text"))),
    }
}

/// The text of a turn, and the images given inside of it.
fn content(keys: &mut Keys, ignored: &mut Ignored) -> Result<(String, Vec<PathBuf>), String> {
    let mut content = keys.take_any("content");
    if let Some(fields) = keys.take("agent") {
        let prompt = AgentPrompt::deserialize(fields)
            .map_err(|error| keys.refusal(&format!("\"agent\": {error}")))?;
        let query = prompt.query().map_err(|reason| keys.refusal(&reason))?;
        match content.replace(query.clone().into()) {
            Some(Value::String(given)) if given != query => {
                return Err(keys.refusal("\"agent\" gives another text than \"content\""));
            }
            _ => {}
        }
    }
    if let Some(value) = keys.take_any("value") {
        if content.is_some() {
            return Err(keys.refusal("it has \"content\" and \"value\"; give one of them"));
        }
        content = Some(value);
    }
    match content {
        Some(Value::String(text)) => Ok((escaped(text), Vec::new())),
        Some(Value::Number(number)) => match number_text(&number) {
            Ok(text) => Ok((text, Vec::new())),
            Err(reason) => Err(keys.refusal(&reason)),
        },
        Some(Value::Array(parts)) => joined(parts, ignored).map_err(|reason| keys.refusal(&reason)),
        Some(other) => Err(keys.refusal(&format!("the content is {other}, not a text"))),
        None => Err(keys.refusal("missing field `content` or `value`")),
    }
}

/// The text of typed parts. An image leaves its mark where it stands.
fn joined(parts: Vec<Value>, ignored: &mut Ignored) -> Result<(String, Vec<PathBuf>), String> {
    let mut text = String::new();
    let mut images = Vec::new();
    for (index, part) in parts.into_iter().enumerate() {
        if let Value::String(part) = part {
            text.push_str(&escaped(part));
            continue;
        }
        let mut keys = Keys::of(part, &format!("part {index}"))?;
        let kind = keys.text("type")?;
        let kind =
            kind.unwrap_or_else(|| if keys.has("text") { "text" } else { "image" }.to_owned());
        match kind.as_str() {
            "text" | "input_text" | "output_text" => {
                let part = keys.take_one_of(&["text", "value", "content"])?;
                let Some((_, Value::String(part))) = part else {
                    return Err(keys.refusal("a part of the type \"text\" has no text"));
                };
                text.push_str(&escaped(part));
            }
            "image" | "image_url" | "input_image" => {
                let path = keys.take_one_of(&[
                    "image",
                    "image_url",
                    "url",
                    "path",
                    "value",
                    "bytes",
                    "base64",
                    "source",
                ])?;
                if let Some((key, value)) = path {
                    let value = match key {
                        "bytes" | "base64" => serde_json::json!({"bytes": value}),
                        "source" => sourced(&value).map_err(|reason| keys.refusal(&reason))?,
                        _ => value,
                    };
                    images.extend(images::path(&value).map_err(|reason| keys.refusal(&reason))?);
                }
                text.push_str(SINGLE_IMAGE);
            }
            other => {
                return Err(keys.refusal(&format!("parts of the type {other:?} are not supported")));
            }
        }
        keys.finish("turns[].content[].", ignored);
    }
    Ok((text, images))
}

/// The image of a source `{type: base64, data}` or `{type: url, url}`, as Anthropic's interface writes it.
fn sourced(source: &Value) -> Result<Value, String> {
    match (&source["data"], &source["url"]) {
        (data @ Value::String(_), Value::Null) => Ok(serde_json::json!({"bytes": data})),
        (Value::Null, url @ Value::String(_)) => Ok(url.clone()),
        _ => Err(format!("{source} is no source of an image")),
    }
}

/// `text` with the marks after a backslash as plain text.
fn escaped(text: String) -> String {
    match ESCAPED.is_match(&text) {
        true => ESCAPED
            .replace_all(&text, |mark: &Captures<'_>| hidden(&mark[1]))
            .into_owned(),
        false => text,
    }
}

/// The turn of a `role` in any of the known spellings.
fn spoken(role: &str, mut content: String, keys: &mut Keys) -> Result<Turn, String> {
    let role = match role.to_ascii_lowercase().as_str() {
        "user" | "human" | "prompter" => "user",
        "assistant" | "gpt" | "bot" | "chatbot" | "chatgpt" | "bing" | "bard" | "model" | "ai" => {
            "assistant"
        }
        "system" | "developer" => "system",
        "observation" | "tool" | "tool_response" | "function" | "function_response" => {
            "observation"
        }
        "function_call" | "tool_call" => {
            let (metadata, content) = call(&content).map_err(|reason| keys.refusal(&reason))?;
            let mut message = Message::new("assistant", content);
            message.metadata = metadata;
            return Ok(Turn::of(message, Vec::new()));
        }
        _ => role,
    };
    if role == "user" {
        content = content.replace(MINICPM_MARK, SINGLE_IMAGE);
    }
    let images = images::take_tags(&mut content).map_err(|reason| keys.refusal(&reason))?;
    if role == "assistant" && !images.is_empty() {
        let reason = "an answer holds <img>…</img>; images stand in questions, a literal one is written \\<img>";
        return Err(keys.refusal(reason));
    }
    Ok(Turn::of(Message::new(role, content), images))
}

/// Name and arguments of a call `{"name", "arguments"}`, as GLM-4 writes them: metadata and content.
fn call(content: &str) -> Result<(String, String), String> {
    let wrong = || format!("{content:?} is no call {{\"name\", \"arguments\"}}");
    let call: Value = serde_json::from_str(content).map_err(|_| wrong())?;
    match (&call["name"], &call["arguments"]) {
        (Value::String(name), Value::String(arguments)) => Ok((name.clone(), arguments.clone())),
        (Value::String(name), arguments @ Value::Object(_)) => {
            let mut json = Vec::new();
            let mut serializer = Serializer::with_formatter(&mut json, Spaced);
            arguments.serialize(&mut serializer).map_err(|_| wrong())?;
            let arguments = String::from_utf8(json).map_err(|_| wrong())?;
            Ok((name.clone(), arguments))
        }
        _ => Err(wrong()),
    }
}

/// JSON with a space after every comma and colon, as Python writes it.
struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        self.begin_array_value(writer, first)
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
    ) -> std::io::Result<()> {
        writer.write_all(b": ")
    }
}

/// Whether the marks of a turn leave it in the loss.
pub(super) fn is_supervised(keys: &mut Keys) -> Result<bool, String> {
    for key in PARTIAL {
        if keys.take(key).is_some() {
            let reason =
                format!("{key:?} marks parts of an answer; an answer is in the loss or not");
            return Err(keys.refusal(&reason));
        }
    }
    let mut supervised = true;
    for key in [
        "loss",
        "weight",
        "train",
        "loss_scale",
        "loss_weight",
        "trainable",
        "training",
    ] {
        let Some(value) = keys.take(key) else {
            continue;
        };
        let on = match &value {
            Value::Bool(on) => Some(*on),
            Value::Number(number) if number.as_f64() == Some(1.0) => Some(true),
            Value::Number(number) if number.as_f64() == Some(0.0) => Some(false),
            _ => None,
        };
        supervised &= on.ok_or_else(|| {
            keys.refusal(&format!(
                "{key:?} is {value}; a turn is in the loss (1, true) or not (0, false)"
            ))
        })?;
    }
    Ok(supervised)
}

/// Fails if a turn gives a video; those of a sample are given beside its turns.
pub(super) fn refuse_video(keys: &mut Keys) -> Result<(), String> {
    for key in ["video", "videos"] {
        if keys.take(key).is_some() {
            let reason = format!("{key:?} is not supported in a turn; give it beside the turns");
            return Err(keys.refusal(&reason));
        }
    }
    Ok(())
}

/// Fails if an object gives media that no family reads.
pub(super) fn refuse_media(keys: &mut Keys) -> Result<(), String> {
    for key in ["audio", "audios", "video_path", "audio_path"] {
        if keys.take(key).is_some() {
            return Err(keys.refusal(&format!("{key:?} is not supported: no family reads it")));
        }
    }
    Ok(())
}

/// Fails if an object declares or calls tools in a way that no family's template writes.
pub(super) fn refuse_tools(keys: &mut Keys) -> Result<(), String> {
    // Tables hold a list as its JSON text.
    let is_some = |value: &Value| !matches!(value.as_str().map(str::trim), Some("[]" | "null"));
    for key in ["tools", "tool_calls"] {
        if keys.take(key).is_some_and(|value| is_some(&value)) {
            let reason = format!("{key:?} is not supported; write them into the text of the turns");
            return Err(keys.refusal(&reason));
        }
    }
    Ok(())
}

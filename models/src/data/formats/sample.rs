//! A sample of a JSON form. Every key is honored, refused with its place, or counted as one without effect.

use std::path::{Path, PathBuf};

use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::entry::{Ignored, Keys};
use super::images::{self, Given};
use super::turns::{self, Turn};
use super::{DataFormat, objects, videos};
use crate::data::raw::{RawSample, RawVideo, SINGLE_IMAGE, VIDEO};
use crate::text::Message;

/// Keys of an answer that the model should not learn.
const PREFERENCES: [&str; 6] = [
    "chosen",
    "rejected",
    "rejected_response",
    "rejected_messages",
    "rejected_images",
    "rejected_answer",
];

/// Keys of a question, and of its answer.
pub(super) const QUESTIONS: [&str; 3] = ["query", "question", "prompt"];
pub(super) const ANSWERS: [&str; 3] = ["response", "answer", "completion"];
/// Keys that change what a question asks.
const CONTEXT: [&str; 6] = [
    "choices", "options", "context", "hint", "lecture", "passage",
];
/// Keys of a list of rounds.
pub(super) const ROUNDS: [&str; 2] = ["texts", "conversation"];
/// Keys of the text of an image.
pub(super) const CAPTIONS: [&str; 2] = ["text", "caption"];

/// Reader of the samples of one file.
pub(super) struct Reader<'a> {
    pub(super) format: DataFormat,
    /// Directory at which relative paths of images start.
    pub(super) root: &'a Path,
    /// Keys without effect that were found.
    pub(super) ignored: Ignored,
}

impl<'a> Reader<'a> {
    pub(super) fn new(format: DataFormat, root: &'a Path) -> Self {
        let ignored = Ignored::default();
        Self {
            format,
            root,
            ignored,
        }
    }

    /// Reads one entry.
    ///
    /// # Errors
    /// The entry is not of the format, or asks for something that training does not do.
    pub(super) fn sample(&mut self, entry: Value) -> Result<RawSample, String> {
        let mut keys = Keys::of(entry, "")?;
        refuse_unwanted(&mut keys)?;
        turns::refuse_media(&mut keys)?;
        turns::refuse_tools(&mut keys)?;
        if !turns::is_supervised(&mut keys)? {
            return Err("the sample is marked as one not to train on".to_owned());
        }
        let id = id(&mut keys)?;
        let given = images::take(&mut keys)?;
        let videos = videos::take(&mut keys, self.root, &mut self.ignored)?;
        let enable_thinking = switch(&mut keys)?;
        let system = keys.take_one_of(&["system", "system_prompt"])?;
        let objects = keys.take("objects");
        let mut turns = self.turns(&mut keys)?;
        keys.finish("", &mut self.ignored);
        match system {
            None => {}
            Some((_, Value::String(_))) if turns.first().is_some_and(is_system) => {
                return Err("\"system\" stands beside a turn of the system".to_owned());
            }
            Some((_, Value::String(text))) => turns.insert(0, Turn::said("system", text)),
            Some((key, other)) => return Err(format!("{key:?} is {other}, not a text")),
        }
        let (mut images, conversations) = self.placed(given, turns, objects)?;
        let texts = conversations.iter().map(|turn| &turn.content);
        for _ in texts.filter(|text| videos.is_empty() && text.contains(VIDEO)) {
            self.ignored.count(format!("{VIDEO} in a text"));
        }
        let videos = with_frames(videos, &mut images);
        if images.is_empty()
            && self.format.asks_by_key()
            && conversations.iter().any(has_no_question)
        {
            return Err("the sample has no question and no image".to_owned());
        }
        // An address or another name of an image that the sample gives adds none.
        let adds = |text: &str| {
            let name = Path::new(text).file_name();
            let same = |(_, path): &(_, PathBuf)| path.file_name() == name;
            images.is_empty() || !(images::is_address(text) || images.iter().any(same))
        };
        let named = self.ignored.take_images();
        if let Some((key, _)) = named.iter().find(|(_, text)| adds(text)) {
            return Err(format!(
                "{key:?} names an image that nothing shows; all images of a sample are given as \"images\""
            ));
        }
        match images.is_empty() {
            true => self.check_named_files(&conversations)?,
            false => refuse_foreign_marks(&conversations)?,
        }
        Ok(RawSample {
            id,
            images,
            videos,
            enable_thinking,
            conversations,
        })
    }

    /// Fails if a question of a sample without images is the name of an image file, or names one that exists. Other names
    /// are counted: the model reads them as text.
    fn check_named_files(&mut self, turns: &[Message]) -> Result<(), String> {
        for (index, turn) in turns
            .iter()
            .enumerate()
            .filter(|(_, turn)| turn.role == "user")
        {
            for file in images::named_files(&turn.content) {
                let name = file.name;
                if file.is_whole || name.starts_with("data:") || self.root.join(name).is_file() {
                    return Err(format!(
                        "turn {index}: the text names the image {name:?}, and the sample has none; give it as \"images\": [{name:?}], with <image> at its place in the text"
                    ));
                }
                self.ignored
                    .count("name of an image file in a question".to_owned());
            }
        }
        Ok(())
    }

    /// The turns in the sample's form.
    fn turns(&mut self, keys: &mut Keys) -> Result<Vec<Turn>, String> {
        let list = match self.format {
            DataFormat::Alpaca => alpaca(keys)?,
            DataFormat::QueryResponse => question_and_answer(keys)?,
            DataFormat::Rounds => listed_rounds(keys, &mut self.ignored)?,
            DataFormat::Caption => caption(keys)?,
            DataFormat::CogvlmSft if keys.has("captions") => described(keys)?,
            DataFormat::Messages | DataFormat::Glm4v => return self.listed(keys, "messages"),
            _ => return self.listed(keys, "conversations"),
        };
        turns::read(list.into(), &mut self.ignored)
    }

    fn listed(&mut self, keys: &mut Keys, key: &str) -> Result<Vec<Turn>, String> {
        let list = keys.take_any(key);
        let list = list.ok_or_else(|| format!("missing field `{key}`"))?;
        turns::read(list, &mut self.ignored)
    }

    /// Names and places the images, and writes the objects into the text.
    fn placed(
        &mut self,
        given: Given,
        mut turns: Vec<Turn>,
        objects: Option<Value>,
    ) -> Result<(Vec<(String, PathBuf)>, Vec<Message>), String> {
        mark(&mut turns);
        let own: Vec<PathBuf> = turns
            .iter_mut()
            .flat_map(|turn| std::mem::take(&mut turn.images))
            .collect();
        let mut messages: Vec<Message> = turns.into_iter().map(|turn| turn.message).collect();
        let given = match given {
            Given::List(list) if list.is_empty() => Given::List(own),
            _ if !own.is_empty() => {
                return Err("images are given beside the turns and in a turn".to_owned());
            }
            given => given,
        };
        let paths = match &given {
            Given::List(paths) => paths.clone(),
            Given::Named(named) => named.iter().map(|(_, path)| path.clone()).collect(),
        };
        if let Some(objects) = objects {
            let ignored = &mut self.ignored;
            objects::place(objects, &paths, self.root, &mut messages, ignored)?;
        }
        let images = match given {
            Given::Named(named) => named,
            Given::List(paths) => images::named(paths, &mut messages),
        };
        Ok((images, messages))
    }
}

/// Reads the form of MiniCPM, [`DataFormat::Minicpm`]. Relative paths start at the current directory.
impl<'de> Deserialize<'de> for RawSample {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(input)?;
        let mut reader = Reader::new(DataFormat::Minicpm, Path::new("."));
        reader.sample(value).map_err(D::Error::custom)
    }
}

/// Writes marks of the images that stand before the text of their turn. The only one, in the user's first turn, needs none.
fn mark(turns: &mut [Turn]) {
    let images: usize = turns.iter().map(|turn| turn.images.len()).sum();
    let first = turns.iter().position(|turn| turn.message.role == "user");
    for (index, turn) in turns.iter_mut().enumerate() {
        if turn.in_front && (images > 1 || Some(index) != first) {
            let marks = SINGLE_IMAGE.repeat(turn.images.len());
            turn.message.content.insert_str(0, &marks);
        }
    }
}

/// Adds the frames of `videos` to the images of a sample.
fn with_frames(videos: Vec<videos::Given>, images: &mut Vec<(String, PathBuf)>) -> Vec<RawVideo> {
    let videos = videos.into_iter().enumerate().map(|(index, video)| {
        let first = images.len();
        let frames = video.frames.into_iter().enumerate();
        images.extend(frames.map(|(frame, path)| (format!("<video_{index:02}_{frame:03}>"), path)));
        RawVideo {
            frames: first..images.len(),
            clock: video.clock,
        }
    });
    videos.collect()
}

/// The sample's switch for thoughts.
fn switch(keys: &mut Keys) -> Result<Option<bool>, String> {
    match keys.take("enable_thinking") {
        None => Ok(None),
        Some(Value::Bool(on)) => Ok(Some(on)),
        Some(other) => Err(keys.refusal(&format!(
            "\"enable_thinking\" is {other}, not true or false"
        ))),
    }
}

/// Fails if questions mark the images as another program does, and none as this one does.
fn refuse_foreign_marks(turns: &[Message]) -> Result<(), String> {
    let questions = || turns.iter().filter(|turn| turn.role == "user");
    let foreign = questions().find_map(|turn| turns::foreign_mark(&turn.content));
    match foreign.filter(|_| !questions().any(|turn| images::has_mark(&turn.content))) {
        None => Ok(()),
        Some(mark) => Err(format!(
            "{mark:?} in a question is plain text; the place of an image is marked with {SINGLE_IMAGE:?}"
        )),
    }
}

/// Whether a turn is the user's and has no text.
fn has_no_question(turn: &Message) -> bool {
    turn.role == "user" && turn.content.is_empty()
}

fn is_system(turn: &Turn) -> bool {
    turn.message.role == "system"
}

fn id(keys: &mut Keys) -> Result<Option<String>, String> {
    match keys.take("id") {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(Value::Number(number)) => Ok(Some(number.to_string())),
        Some(_) => Err("id must be a text or a number".to_owned()),
    }
}

/// Fails if the sample holds an answer that should not be trained on.
fn refuse_unwanted(keys: &mut Keys) -> Result<(), String> {
    for key in PREFERENCES {
        if keys.take(key).is_some() {
            return Err(format!(
                "{key:?} makes it a preference pair; a run learns every answer it is given"
            ));
        }
    }
    let unwanted = keys.has("kto_tag") && !keys.is("kto_tag", &Value::Bool(true));
    if unwanted || keys.get("label").is_some_and(is_false) {
        let key = if unwanted { "kto_tag" } else { "label" };
        return Err(format!(
            "{key:?} is not true: the answer is disliked; a run learns every answer it is given. Remove the key if it is a class"
        ));
    }
    Ok(())
}

/// Whether a label is false, as a number or a text too.
fn is_false(label: &Value) -> bool {
    match label {
        Value::Bool(label) => !label,
        Value::Number(label) => label.as_f64() == Some(0.0),
        Value::String(label) => ["false", "0"].contains(&&*label.trim().to_ascii_lowercase()),
        _ => false,
    }
}

fn turn(role: &str, content: impl Into<Value>) -> Value {
    serde_json::json!({"role": role, "content": content.into()})
}

/// The turns of the key `history`.
fn history(keys: &mut Keys) -> Result<Vec<Value>, String> {
    let Some(history) = keys.take("history") else {
        return Ok(Vec::new());
    };
    let rounds = rounds(&history)?.into_iter();
    Ok(rounds
        .flat_map(|[question, answer]| [turn("user", question), turn("assistant", answer)])
        .collect())
}

fn alpaca(keys: &mut Keys) -> Result<Vec<Value>, String> {
    let mut list = history(keys)?;
    let mut question: Vec<String> = Vec::new();
    for key in ["instruction", "input"] {
        question.extend(keys.said(key)?);
    }
    let answer = keys.said("output")?.ok_or("missing field `output`")?;
    list.extend([turn("user", question.join("\n")), turn("assistant", answer)]);
    Ok(list)
}

/// A question and its answer. Each is a text, or a list of turns.
fn question_and_answer(keys: &mut Keys) -> Result<Vec<Value>, String> {
    for key in CONTEXT {
        if keys.take(key).is_some() {
            return Err(format!(
                "{key:?} beside a question belongs into its text, in the words that the model shall see"
            ));
        }
    }
    let mut list = history(keys)?;
    for (role, names) in [("user", QUESTIONS), ("assistant", ANSWERS)] {
        match keys.take_one_of(&names)? {
            Some((_, text @ (Value::String(_) | Value::Number(_)))) => list.push(turn(role, text)),
            Some((_, Value::Array(turns))) if turns.iter().all(Value::is_object) => {
                list.extend(turns);
            }
            Some((key, other)) => return Err(format!("{key:?} is {other}, not a text")),
            // An image alone may ask.
            None if role == "user" => list.push(turn(role, "")),
            None => return Err(format!("missing field `{}`", names.join("` or `"))),
        }
    }
    Ok(list)
}

/// Rounds as objects of a question and an answer.
fn listed_rounds(keys: &mut Keys, ignored: &mut Ignored) -> Result<Vec<Value>, String> {
    let (key, rounds) = match keys.take_one_of(&ROUNDS)? {
        Some((key, Value::Array(rounds))) => (key, rounds),
        Some((key, other)) => return Err(format!("{key:?} is {other}, not a list of rounds")),
        None => return Err(format!("missing field `{}`", ROUNDS.join("` or `"))),
    };
    let mut list = Vec::new();
    for (index, round) in rounds.into_iter().enumerate() {
        let mut keys = Keys::of(round, &format!("{key}[{index}]"))?;
        let system = keys.said("system")?;
        list.extend(system.map(|text| turn("system", text)));
        for (role, names) in [
            ("user", ["user", "input"]),
            ("assistant", ["assistant", "output"]),
        ] {
            match keys.take_one_of(&names)? {
                Some((_, text)) => list.push(turn(role, text)),
                None if role == "user" => list.push(turn(role, "")),
                None => {
                    let reason = format!("missing field `{}`", names.join("` or `"));
                    return Err(keys.refusal(&reason));
                }
            }
        }
        keys.finish(&format!("{key}[]."), ignored);
    }
    Ok(list)
}

/// The text of an image: the answer to the image alone.
fn caption(keys: &mut Keys) -> Result<Vec<Value>, String> {
    match keys.take_one_of(&CAPTIONS)? {
        Some((_, Value::String(text))) => Ok(vec![turn("user", ""), turn("assistant", text)]),
        Some((key, other)) => Err(format!("{key:?} is {other}, not a text")),
        None => Err(format!("missing field `{}`", CAPTIONS.join("` or `"))),
    }
}

/// The description of an image in a label of CogVLM-SFT-311K, `captions: [{role: caption, content}]`: the answer to the
/// image alone.
fn described(keys: &mut Keys) -> Result<Vec<Value>, String> {
    let list = keys.take("captions");
    let list = list.as_ref().and_then(Value::as_array).map(Vec::as_slice);
    let is = |one: &Value, key: &str| one.get(key).and_then(Value::as_str).map(str::to_owned);
    match list {
        Some([one]) if is(one, "role").is_some_and(|role| role == "caption") => {
            let text = is(one, "content");
            let text = text.ok_or_else(|| "\"captions\" has no text as `content`".to_owned())?;
            Ok(vec![turn("user", ""), turn("assistant", text)])
        }
        _ => Err("\"captions\" is not one {role: caption, content}".to_owned()),
    }
}

/// The rounds of a history, each a question and an answer.
fn rounds(history: &Value) -> Result<Vec<[String; 2]>, String> {
    let round = |round: &Value| match round.as_array().map(Vec::as_slice) {
        Some([Value::String(question), Value::String(answer)]) => {
            Some([question.clone(), answer.clone()])
        }
        _ => None,
    };
    let rounds = history
        .as_array()
        .map(|list| list.iter().map(round).collect());
    rounds
        .flatten()
        .ok_or_else(|| "\"history\" is no list of [question, answer]".to_owned())
}

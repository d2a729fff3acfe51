//! Formats of users' data, all read into [`RawSample`]s.
//!
//! | format | where | content |
//! |---|---|---|
//! | `minicpm` | JSON list or lines | `{id, image, conversations: [{role, content}]}` |
//! | `glm4v` | JSON list or lines | `{messages: [{role, content, image?}]}` |
//! | `sharegpt` | JSON list or lines | `{conversations: [{from: human\|gpt\|system, value}], images: [..]}` |
//! | `messages` | JSON list or lines | `{messages: [{role, content}], images: [..]}` |
//! | `alpaca` | JSON list or lines | `{instruction, input, output, history, images: [..]}` |
//! | `query-response` | JSON list or lines | `{query, response, history, images: [..]}`; also question and answer, prompt and completion |
//! | `rounds` | JSON list or lines | `{texts: [{user, assistant}], images: [..]}` or `{conversation: [{input, output}]}` |
//! | `caption` | JSON list or lines | `{image, text}` |
//! | `cogvlm-sft` | directory | `images/NAME.jpg` and `labels_*/NAME.json` with `{conversations: [{role, content}]}` |
//! | `captcha` | directory | images whose file names, up to the first dot, are the answers |
//!
//! A JSON form may also be the rows of a Parquet file or of CSV.
//!
//! Where a sample has several images without names, they get the names `<image_00>`, `<image_01>`, ... at
//! their places in the text. A single image keeps the name [`SINGLE_IMAGE`](super::SINGLE_IMAGE): it stands
//! where the text says so, otherwise in front.

mod columns;
mod csv;
mod directories;
mod entry;
mod images;
mod objects;
mod sample;
mod sources;
mod turns;
mod videos;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::raw::{DataError, RawSample};
use columns::Columns;
use entry::{first_entry, read_entries, refused_entry};
pub use entry::{packing, sample_places};
use sample::{ANSWERS, CAPTIONS, QUESTIONS, ROUNDS, Reader};
pub use sources::{DATASET_INFO, data_files, data_parts, read_datasets, weight_of};

/// A file or directory format of training data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataFormat {
    /// MiniCPM-V's format: turns of role and content, images by name.
    Minicpm,
    /// GLM-4V's format: messages, each with at most one image.
    Glm4v,
    /// Conversations of `from` and `value`, with a list of images.
    ShareGpt,
    /// Messages of `role` and `content`, with a list of images.
    Messages,
    /// An instruction, an input and an output, with a list of images.
    Alpaca,
    /// A query and a response, with a list of images.
    QueryResponse,
    /// Rounds of a question and an answer, with a list of images.
    Rounds,
    /// An image and its text.
    Caption,
    /// A directory of images and one of conversations about them.
    CogvlmSft,
    /// A directory of images whose file names are the answers.
    Captcha,
}

impl DataFormat {
    /// All data formats that are supported.
    pub const ALL: [Self; 10] = [
        Self::Minicpm,
        Self::Glm4v,
        Self::ShareGpt,
        Self::Messages,
        Self::Alpaca,
        Self::QueryResponse,
        Self::Rounds,
        Self::Caption,
        Self::CogvlmSft,
        Self::Captcha,
    ];

    /// Name of the format on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Minicpm => "minicpm",
            Self::Glm4v => "glm4v",
            Self::ShareGpt => "sharegpt",
            Self::Messages => "messages",
            Self::Alpaca => "alpaca",
            Self::QueryResponse => "query-response",
            Self::Rounds => "rounds",
            Self::Caption => "caption",
            Self::CogvlmSft => "cogvlm-sft",
            Self::Captcha => "captcha",
        }
    }

    /// Shape of the file or directory, in words.
    pub fn shape(self) -> &'static str {
        match self {
            Self::Minicpm => "{id, image, conversations: [{role, content}]}",
            Self::Glm4v => "{messages: [{role, content, image}]}",
            Self::ShareGpt => "{conversations: [{from, value}], images: [..]}",
            Self::Messages => "{messages: [{role, content}], images: [..]}",
            Self::Alpaca => "{instruction, input, output, images: [..]}",
            Self::QueryResponse => "{query, response, images: [..]}",
            Self::Rounds => "{texts: [{user, assistant}], images: [..]}",
            Self::Caption => "{image, text}",
            Self::CogvlmSft => "a directory with images/ and labels_*/",
            Self::Captcha => "a directory of images whose names are the answers",
        }
    }

    /// Whether the format is objects: a JSON list, one object per line, or rows.
    pub fn is_json(self) -> bool {
        !matches!(self, Self::CogvlmSft | Self::Captcha)
    }

    /// Whether keys of a sample are its questions and answers, not turns of a list.
    fn asks_by_key(self) -> bool {
        use DataFormat::{Alpaca, Caption, QueryResponse, Rounds};
        matches!(self, Alpaca | QueryResponse | Rounds | Caption)
    }

    /// The format that is called `name` on the command line; `None` for an unknown name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.name() == name)
    }
}

/// The samples of a data file or directory.
#[derive(Clone, Debug, PartialEq)]
pub struct Dataset {
    /// The file or directory.
    pub path: PathBuf,
    /// Format of the file or directory that the samples were read from.
    pub format: DataFormat,
    /// How often an epoch takes each sample.
    pub weight: f64,
    /// Whether an entry of `dataset_info.json` states the format.
    pub described: bool,
    /// The directory at which relative paths of images start.
    pub root: PathBuf,
    /// The samples, in the order of the file, or of the names in a directory.
    pub samples: Vec<RawSample>,
    /// Keys that have no effect, such as `source` or `turns[].name`, each with the number of objects that have it. That of
    /// [`THOUGHTS`](super::THOUGHTS) has one in some families.
    pub ignored: Vec<(String, usize)>,
}

/// Reads the samples at `path` in the given `format`, or in the one that [`detect`] finds.
///
/// # Errors
/// [`DataError`] if the format is not clear, if something cannot be read or is not of the format (with line and
/// column where it is JSON), or if there is no sample.
pub fn read_samples_as(path: &Path, format: Option<DataFormat>) -> Result<Dataset, DataError> {
    read_file(path, format, directory_of(path), None)
}

/// Reads the samples of the file `path` in the form of MiniCPM.
///
/// # Errors
/// As [`read_samples_as`].
pub fn read_samples(path: &Path) -> Result<Vec<RawSample>, DataError> {
    let dataset = read_samples_as(path, Some(DataFormat::Minicpm))?;
    Ok(dataset.samples)
}

/// As [`read_samples_as`], with images of JSON forms below `root` and the names of `columns`.
fn read_file(
    path: &Path,
    format: Option<DataFormat>,
    root: &Path,
    columns: Option<&Columns>,
) -> Result<Dataset, DataError> {
    let format = format.map_or_else(|| detect(path), Ok)?;
    let mut reader = Reader::new(format, root);
    let (root, samples) = match format {
        DataFormat::CogvlmSft => directories::read_sft(path, &mut reader)?,
        DataFormat::Captcha => (path.to_owned(), directories::read_captcha(path)?),
        _ => {
            let samples = match columns {
                None => read_entries(path, |entry| reader.sample(entry))?,
                Some(columns) => read_columns(path, &mut reader, columns)?,
            };
            (root.to_owned(), samples)
        }
    };
    Ok(Dataset {
        path: path.to_owned(),
        format,
        weight: 1.0,
        described: columns.is_some(),
        root,
        samples,
        ignored: reader.ignored.into_counts(),
    })
}

/// The samples of the file `path`, whose columns `dataset_info.json` states. One that no sample has is refused.
fn read_columns(
    path: &Path,
    reader: &mut Reader<'_>,
    columns: &Columns,
) -> Result<Vec<RawSample>, DataError> {
    let mut found = BTreeSet::new();
    let samples = read_entries(path, |entry| {
        let keys = entry.as_object().into_iter().flat_map(|keys| keys.keys());
        found.extend(keys.cloned());
        let sample = reader.sample(columns.apply(entry));
        sample.map_err(|reason| columns.missing(&found).unwrap_or(reason))
    })?;
    match columns.missing(&found) {
        None => Ok(samples),
        Some(reason) => Err(refused_entry(path, 0, reason)),
    }
}

/// The directory that holds `path`.
fn directory_of(path: &Path) -> &Path {
    let parent = path.parent();
    let parent = parent.filter(|parent| !parent.as_os_str().is_empty());
    parent.unwrap_or(Path::new("."))
}

/// Finds the format of the file or directory `path` by the shape of the directory or the fields of the first sample.
///
/// # Errors
/// [`DataError::UnknownFormat`] or [`DataError::AmbiguousFormat`] if it is not clear, and other [`DataError`]s if
/// the content cannot be read.
pub fn detect(path: &Path) -> Result<DataFormat, DataError> {
    if path.is_dir() {
        return directories::detect(path);
    }
    let sample = &first_entry(path)?;
    let unknown = |found: String| DataError::UnknownFormat {
        path: path.to_owned(),
        found,
    };
    let Some(fields) = sample.as_object() else {
        return Err(unknown("the first sample is no object".to_owned()));
    };
    let has = |names: &[&str]| names.iter().all(|name| fields.contains_key(*name));
    let has_one = |names: &[&str]| names.iter().any(|name| fields.contains_key(*name));
    match (sample.get("messages"), sample.get("conversations")) {
        (Some(messages), None) => of_messages(path, sample, messages),
        (None, Some(turns)) => {
            let first = &turns[0];
            match (first.get("role").is_some(), first.get("from").is_some()) {
                (true, false) => Ok(DataFormat::Minicpm),
                (false, true) => Ok(DataFormat::ShareGpt),
                _ => Err(unknown(
                    "the first turn has not one of the fields \"role\" and \"from\"".to_owned(),
                )),
            }
        }
        (Some(_), Some(_)) => Err(DataError::AmbiguousFormat {
            path: path.to_owned(),
            reason: "the first sample has \"messages\" and \"conversations\"".to_owned(),
        }),
        (None, None) if has(&["instruction", "output"]) => Ok(DataFormat::Alpaca),
        (None, None) if has_one(&QUESTIONS) && has_one(&ANSWERS) => Ok(DataFormat::QueryResponse),
        (None, None) if has_one(&ROUNDS) => Ok(DataFormat::Rounds),
        (None, None) if has_one(&CAPTIONS) && images::has_any(fields) => Ok(DataFormat::Caption),
        (None, None) => {
            let names: Vec<&str> = fields.keys().map(String::as_str).collect();
            let names = names.join(", ");
            Err(unknown(format!("the first sample has the fields {names}")))
        }
    }
}

fn of_messages(path: &Path, sample: &Value, messages: &Value) -> Result<DataFormat, DataError> {
    let has = |object: &Value, field| object.get(field).is_some_and(|value| !value.is_null());
    let empty = sample["images"].as_array().is_some_and(Vec::is_empty);
    let has_list = has(sample, "images") && !empty;
    let mut turns = messages.as_array().into_iter().flatten();
    let has_own = turns.any(|turn| has(turn, "image"));
    match (has_list, has_own) {
        (true, true) => Err(DataError::AmbiguousFormat {
            path: path.to_owned(),
            reason: "the first sample has \"images\", and an \"image\" in a message".to_owned(),
        }),
        (false, true) => Ok(DataFormat::Glm4v),
        // without an image both read the same
        (_, false) => Ok(DataFormat::Messages),
    }
}

#[cfg(test)]
mod tests;

//! Samples that are directories of images. The order is that of the names, whatever the file system's.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::DirEntry;
use std::path::{Path, PathBuf};

use optim::rng::RandomStream;
use serde::Deserialize;

use super::{DataFormat, directory_of};
use crate::data::raw::{DataError, RawSample, SINGLE_IMAGE, invalid};
use crate::text::Message;

/// Question of a captcha sample.
const CAPTCHA_PROMPT: &str = "CAPTCHA:";
/// Directory of the images beside those of the labels.
const IMAGES: &str = "images";
/// Prefix of the names of label directories.
const LABELS: &str = "labels_";
/// Extensions of image files.
const ENDINGS: [&str; 5] = ["jpg", "jpeg", "png", "webp", "bmp"];

pub(super) fn detect(directory: &Path) -> Result<DataFormat, DataError> {
    let images = directory.join(IMAGES).is_dir();
    if is_labels(directory) || (images && !label_directories(directory)?.is_empty()) {
        return Ok(DataFormat::CogvlmSft);
    }
    let path = directory.to_owned();
    if images {
        let reason = "it has images/ but no labels_*/; only the format captcha takes answers from image names";
        return Err(DataError::AmbiguousFormat {
            path,
            reason: reason.to_owned(),
        });
    }
    if images_below(directory)?.is_empty() {
        let found = "a folder without pictures".to_owned();
        return Err(DataError::UnknownFormat { path, found });
    }
    Ok(DataFormat::Captcha)
}

/// Reads `directory`, which holds `images` and one directory of labels, or is a directory of labels beside `images`.
/// Also returns the directory that holds both.
pub(super) fn read_sft(directory: &Path) -> Result<(PathBuf, Vec<RawSample>), DataError> {
    let (root, labels) = if is_labels(directory) {
        (directory_of(directory), directory.to_owned())
    } else {
        (directory, only_labels(directory)?)
    };
    let images = root.join(IMAGES);
    let mut by_stem = BTreeMap::new();
    for entry in entries(&images)? {
        let name = PathBuf::from(entry.file_name());
        if is_image(&name) {
            by_stem.insert(stem(&name), name);
        }
    }
    let mut samples = Vec::with_capacity(by_stem.len());
    for entry in entries(&labels)? {
        let label = entry.path();
        if label.extension() != Some(OsStr::new("json")) {
            continue;
        }
        let Some(name) = by_stem.remove(&stem(&label)) else {
            return Err(DataError::NoImage { label, images });
        };
        let turns = read_label(&label)?;
        samples.extend(rounds(&stem(&label), &Path::new(IMAGES).join(name), &turns));
    }
    if let Some((_, name)) = by_stem.pop_first() {
        let image = images.join(name);
        return Err(DataError::NoLabel { image, labels });
    }
    if samples.is_empty() {
        let path = directory.to_owned();
        return Err(DataError::Empty { path });
    }
    Ok((root.to_owned(), samples))
}

/// Reads one sample per image below `directory`: the answer is the image's file name up to the first `.`.
pub(super) fn read_captcha(directory: &Path) -> Result<Vec<RawSample>, DataError> {
    let turn = |role: &str, content: String| Message {
        role: role.to_owned(),
        content,
    };
    let sample = |path: PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let answer = name.split('.').next().unwrap_or_default().to_owned();
        RawSample {
            id: Some(path.to_string_lossy().into_owned()),
            conversations: vec![
                turn("user", CAPTCHA_PROMPT.to_owned()),
                turn("assistant", answer),
            ],
            images: vec![(SINGLE_IMAGE.to_owned(), path)],
        }
    };
    let samples: Vec<RawSample> = images_below(directory)?.into_iter().map(sample).collect();
    if samples.is_empty() {
        let path = directory.to_owned();
        return Err(DataError::Empty { path });
    }
    Ok(samples)
}

/// One sample per round of a conversation. About half of them, by a draw that depends on name and round only, have the
/// previous round as history. The published script draws one round per image and epoch instead.
fn rounds<'a>(
    name: &'a str,
    image: &'a Path,
    turns: &'a [Message],
) -> impl Iterator<Item = RawSample> + 'a {
    let ends = (2..=turns.len()).step_by(2).enumerate();
    ends.map(move |(round, end)| {
        let id = format!("{name}#{round}");
        let with_past = round > 0 && RandomStream::new(0, &id).uniform(0) < 0.5;
        let start = end - if with_past { 4 } else { 2 };
        RawSample {
            images: vec![(SINGLE_IMAGE.to_owned(), image.to_owned())],
            conversations: turns[start..end].to_vec(),
            id: Some(id),
        }
    })
}

#[derive(Deserialize)]
struct Label {
    conversations: Vec<Message>,
}

fn read_label(path: &Path) -> Result<Vec<Message>, DataError> {
    let bytes = std::fs::read(path).map_err(|error| unreadable(path, error))?;
    let label: Result<Label, _> = serde_json::from_slice(&bytes);
    let label = label.map_err(|error| invalid(path, 0, &error))?;
    Ok(label.conversations)
}

fn is_labels(directory: &Path) -> bool {
    let name = directory.file_name().unwrap_or_default().to_string_lossy();
    let beside = directory_of(directory).join(IMAGES);
    name.starts_with(LABELS) && beside.is_dir()
}

fn label_directories(directory: &Path) -> Result<Vec<PathBuf>, DataError> {
    let entries = entries(directory)?.into_iter().filter(|entry| {
        let name = entry.file_name();
        name.to_string_lossy().starts_with(LABELS) && entry.path().is_dir()
    });
    Ok(entries.map(|entry| entry.path()).collect())
}

fn only_labels(directory: &Path) -> Result<PathBuf, DataError> {
    let mut directories = label_directories(directory)?;
    let path = directory.to_owned();
    match (directories.pop(), directories.pop()) {
        (Some(labels), None) => Ok(labels),
        (None, _) => Err(DataError::UnknownFormat {
            path,
            found: "a folder without labels_*/".to_owned(),
        }),
        (Some(one), Some(other)) => Err(DataError::AmbiguousFormat {
            path,
            reason: format!(
                "it contains {} and {}; give one of them",
                other.display(),
                one.display()
            ),
        }),
    }
}

/// The images in `directory` and the directories below it, relative to it, in the order of their paths. Links to
/// directories are not followed, since they may lead in circles; names that begin with a dot are passed over.
fn images_below(directory: &Path) -> Result<Vec<PathBuf>, DataError> {
    let mut images = Vec::new();
    let mut waiting = vec![PathBuf::new()];
    while let Some(below) = waiting.pop() {
        for entry in entries(&directory.join(&below))? {
            let path = below.join(entry.file_name());
            let kind = entry.file_type();
            if kind
                .map_err(|error| unreadable(&entry.path(), error))?
                .is_dir()
            {
                waiting.push(path);
            } else if is_image(&path) && entry.path().is_file() {
                images.push(path);
            }
        }
    }
    images.sort_unstable();
    Ok(images)
}

/// The entries of `directory` in the order of their names, without those that begin with a dot.
fn entries(directory: &Path) -> Result<Vec<DirEntry>, DataError> {
    let read = || -> std::io::Result<Vec<DirEntry>> { std::fs::read_dir(directory)?.collect() };
    let mut entries = read().map_err(|error| unreadable(directory, error))?;
    entries.retain(|entry| !entry.file_name().as_encoded_bytes().starts_with(b"."));
    entries.sort_unstable_by_key(DirEntry::file_name);
    Ok(entries)
}

fn is_image(path: &Path) -> bool {
    let ending = path.extension().unwrap_or_default();
    ENDINGS
        .iter()
        .any(|known| ending.eq_ignore_ascii_case(known))
}

fn stem(path: &Path) -> String {
    let stem = path.file_stem().unwrap_or_default();
    stem.to_string_lossy().into_owned()
}

fn unreadable(path: &Path, source: std::io::Error) -> DataError {
    DataError::Read {
        path: path.to_owned(),
        source,
    }
}

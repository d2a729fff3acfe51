//! Samples that are folders of pictures. The order is that of the names, whatever the file system's.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::DirEntry;
use std::path::{Path, PathBuf};

use optim::rng::RandomStream;
use serde::Deserialize;

use super::{DataFormat, folder_of};
use crate::data::raw::{DataError, RawSample, SINGLE_IMAGE, invalid};
use crate::text::Message;

/// Question of a captcha sample.
const CAPTCHA_PROMPT: &str = "CAPTCHA:";
/// Folder of the pictures beside those of the labels.
const PICTURES: &str = "images";
/// Prefix of the names of label directories.
const LABELS: &str = "labels_";
/// Extensions of image files.
const ENDINGS: [&str; 5] = ["jpg", "jpeg", "png", "webp", "bmp"];

pub(super) fn detect(folder: &Path) -> Result<DataFormat, DataError> {
    let pictures = folder.join(PICTURES).is_dir();
    if is_labels(folder) || (pictures && !label_folders(folder)?.is_empty()) {
        return Ok(DataFormat::CogvlmSft);
    }
    let path = folder.to_owned();
    if pictures {
        let reason = "it has images/ but no labels_*/; only the format captcha takes answers from image names";
        return Err(DataError::AmbiguousFormat {
            path,
            reason: reason.to_owned(),
        });
    }
    if pictures_below(folder)?.is_empty() {
        let found = "a folder without pictures".to_owned();
        return Err(DataError::UnknownFormat { path, found });
    }
    Ok(DataFormat::Captcha)
}

/// Reads `folder`, which holds `images` and one folder of labels, or is a folder of labels beside `images`.
/// Also returns the folder that holds both.
pub(super) fn read_sft(folder: &Path) -> Result<(PathBuf, Vec<RawSample>), DataError> {
    let (root, labels) = if is_labels(folder) {
        (folder_of(folder), folder.to_owned())
    } else {
        (folder, only_labels(folder)?)
    };
    let pictures = root.join(PICTURES);
    let mut by_stem = BTreeMap::new();
    for entry in entries(&pictures)? {
        let name = PathBuf::from(entry.file_name());
        if is_picture(&name) {
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
            return Err(DataError::NoPicture { label, pictures });
        };
        let turns = read_label(&label)?;
        samples.extend(rounds(
            &stem(&label),
            &Path::new(PICTURES).join(name),
            &turns,
        ));
    }
    if let Some((_, name)) = by_stem.pop_first() {
        let picture = pictures.join(name);
        return Err(DataError::NoLabel { picture, labels });
    }
    if samples.is_empty() {
        let path = folder.to_owned();
        return Err(DataError::Empty { path });
    }
    Ok((root.to_owned(), samples))
}

/// Reads the pictures below `folder`.
pub(super) fn read_captcha(folder: &Path) -> Result<Vec<RawSample>, DataError> {
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
    let samples: Vec<RawSample> = pictures_below(folder)?.into_iter().map(sample).collect();
    if samples.is_empty() {
        let path = folder.to_owned();
        return Err(DataError::Empty { path });
    }
    Ok(samples)
}

/// One sample per round of a conversation. About half of them, by a draw that depends on name and round only, have the
/// previous round as history. The published script draws one round per image and epoch instead.
fn rounds<'a>(
    name: &'a str,
    picture: &'a Path,
    turns: &'a [Message],
) -> impl Iterator<Item = RawSample> + 'a {
    let ends = (2..=turns.len()).step_by(2).enumerate();
    ends.map(move |(round, end)| {
        let id = format!("{name}#{round}");
        let with_past = round > 0 && RandomStream::new(0, &id).uniform(0) < 0.5;
        let start = end - if with_past { 4 } else { 2 };
        RawSample {
            images: vec![(SINGLE_IMAGE.to_owned(), picture.to_owned())],
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

fn is_labels(folder: &Path) -> bool {
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    let beside = folder_of(folder).join(PICTURES);
    name.starts_with(LABELS) && beside.is_dir()
}

fn label_folders(folder: &Path) -> Result<Vec<PathBuf>, DataError> {
    let entries = entries(folder)?.into_iter().filter(|entry| {
        let name = entry.file_name();
        name.to_string_lossy().starts_with(LABELS) && entry.path().is_dir()
    });
    Ok(entries.map(|entry| entry.path()).collect())
}

fn only_labels(folder: &Path) -> Result<PathBuf, DataError> {
    let mut folders = label_folders(folder)?;
    let path = folder.to_owned();
    match (folders.pop(), folders.pop()) {
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

/// The pictures in `folder` and the folders below it, relative to it, in the order of their paths. Links to
/// folders are not followed, since they may lead in circles; names that begin with a dot are passed over.
fn pictures_below(folder: &Path) -> Result<Vec<PathBuf>, DataError> {
    let mut pictures = Vec::new();
    let mut waiting = vec![PathBuf::new()];
    while let Some(below) = waiting.pop() {
        for entry in entries(&folder.join(&below))? {
            let path = below.join(entry.file_name());
            let kind = entry.file_type();
            if kind
                .map_err(|error| unreadable(&entry.path(), error))?
                .is_dir()
            {
                waiting.push(path);
            } else if is_picture(&path) && entry.path().is_file() {
                pictures.push(path);
            }
        }
    }
    pictures.sort_unstable();
    Ok(pictures)
}

/// The entries of `folder` in the order of their names, without those that begin with a dot.
fn entries(folder: &Path) -> Result<Vec<DirEntry>, DataError> {
    let read = || -> std::io::Result<Vec<DirEntry>> { std::fs::read_dir(folder)?.collect() };
    let mut entries = read().map_err(|error| unreadable(folder, error))?;
    entries.retain(|entry| !entry.file_name().as_encoded_bytes().starts_with(b"."));
    entries.sort_unstable_by_key(DirEntry::file_name);
    Ok(entries)
}

fn is_picture(path: &Path) -> bool {
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

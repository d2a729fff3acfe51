//! Samples that are directories of images. The order is that of the names, whatever the file system's.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::DirEntry;
use std::path::{Path, PathBuf};

use optim::rng::RandomStream;

use super::entry::read_entry;
use super::images::ENDINGS;
use super::sample::Reader;
use super::sources::DATASET_INFO;
use super::{DataFormat, directory_of};
use crate::data::raw::{DataError, RawSample, SINGLE_IMAGE};
use crate::text::Message;

/// Question of a captcha sample.
const CAPTCHA_PROMPT: &str = "CAPTCHA:";
/// Directory of the images beside those of the labels.
const IMAGES: &str = "images";
/// Prefix of the names of label directories.
const LABELS: &str = "labels";
/// Files that describe the images beside them.
const METADATA: [&str; 3] = ["metadata.jsonl", "metadata.csv", "metadata.parquet"];
/// Files of samples that a directory may hold.
const SAMPLES: [&str; 7] = [
    METADATA[0],
    METADATA[1],
    METADATA[2],
    "train.json",
    "train.jsonl",
    "train.csv",
    DATASET_INFO,
];
/// Directory of Parquet files.
const SHARDS: &str = "data";
/// Most characters of a captcha.
const LONGEST_ANSWER: usize = 12;

/// Format of a directory by what lies in it. File names count as answers only if nothing else is there.
pub(super) fn detect(directory: &Path) -> Result<DataFormat, DataError> {
    let path = directory.to_owned();
    if is_sft(directory)? {
        return Ok(DataFormat::CogvlmSft);
    }
    let unknown = |found: String| DataError::UnknownFormat {
        path: path.clone(),
        found,
    };
    if directory.join(IMAGES).is_dir() {
        let reason = "it has images/ but no labels_*/; only the format captcha takes answers from image names";
        return Err(DataError::AmbiguousFormat {
            path,
            reason: reason.to_owned(),
        });
    }
    let found = below(directory)?;
    if let Some(other) = found.others.first() {
        let (images, others) = (found.images.len(), found.others.len());
        return Err(unknown(format!(
            "a directory of {images} images and {others} other files, such as {}; give the file with the samples",
            other.display()
        )));
    }
    if found.images.is_empty() {
        return Err(unknown("a directory without images".to_owned()));
    }
    match not_an_answer(&found.images) {
        None => Ok(DataFormat::Captcha),
        Some(name) => Err(unknown(format!(
            "images without samples; names such as {name} are no answers to learn unless --data-format captcha says so"
        ))),
    }
}

/// What `directory` should be read as: a file with samples in it, the Parquet files of one split, the only directory
/// below it with images and labels, or itself. `split` names one of several.
///
/// # Errors
/// [`DataError::AmbiguousFormat`] if it has several, [`DataError::UnknownFormat`] if it has no such split.
pub(super) fn files_in(directory: &Path, split: Option<&str>) -> Result<Vec<PathBuf>, DataError> {
    let mut shards = shards(directory)?;
    if let Some(split) = split {
        let below = directory.join(split);
        if below.is_dir() {
            return files_in(&below, None);
        }
        return shards
            .remove(split)
            .ok_or_else(|| DataError::UnknownFormat {
                path: directory.to_owned(),
                found: format!("it has no directory {split} and no Parquet files {split}-*"),
            });
    }
    let mut found: Vec<Vec<PathBuf>> = Vec::new();
    if is_sft(directory)? {
        found.push(vec![directory.to_owned()]);
    }
    let files = SAMPLES.map(|name| directory.join(name)).into_iter();
    found.extend(files.filter(|file| file.is_file()).map(|file| vec![file]));
    found.extend(shards.into_values());
    for entry in entries(directory)? {
        let path = entry.path();
        let is_labels = entry.file_name().to_string_lossy().starts_with(LABELS);
        if !path.is_dir() || is_labels {
            continue;
        }
        if is_sft(&path)? {
            found.push(vec![path]);
        } else {
            let metadata = METADATA.map(|name| path.join(name)).into_iter();
            found.extend(
                metadata
                    .filter(|file| file.is_file())
                    .map(|file| vec![file]),
            );
        }
    }
    match &found[..] {
        [] => Ok(vec![directory.to_owned()]),
        [_] => Ok(found.remove(0)),
        [one, other, ..] => Err(DataError::AmbiguousFormat {
            path: directory.to_owned(),
            reason: format!(
                "it contains {} and {}; give one of them, or one split with {}#SPLIT",
                one[0].display(),
                other[0].display(),
                directory.display()
            ),
        }),
    }
}

/// Parquet files in `directory` and in `data/` below it by their splits: what comes before the number of the file.
fn shards(directory: &Path) -> Result<BTreeMap<String, Vec<PathBuf>>, DataError> {
    let mut splits: BTreeMap<String, Vec<PathBuf>> = BTreeMap::new();
    let data = directory.join(SHARDS);
    let places = std::iter::once(directory).chain(data.is_dir().then_some(&*data));
    for place in places {
        for entry in entries(place)? {
            let path = entry.path();
            let is_parquet = path.extension() == Some(OsStr::new("parquet"));
            if is_parquet && !METADATA.iter().any(|name| path.ends_with(name)) {
                let stem = stem(&path);
                let number = stem.find(|c: char| c.is_ascii_digit());
                let split = stem[..number.unwrap_or(stem.len())].trim_end_matches(['-', '_']);
                splits.entry(split.to_owned()).or_default().push(path);
            }
        }
    }
    Ok(splits)
}

/// Files with samples directly in `directory`, which all have one form.
pub(super) fn all_files(directory: &Path) -> Result<Vec<PathBuf>, DataError> {
    let files = entries(directory)?.into_iter().map(|entry| entry.path());
    let known = |path: &PathBuf| {
        let ending = path.extension().unwrap_or_default();
        ["json", "jsonl", "csv", "parquet"]
            .iter()
            .any(|known| ending == *known)
    };
    let files: Vec<PathBuf> = files.filter(known).collect();
    match files.is_empty() {
        true => Err(DataError::Empty {
            path: directory.to_owned(),
        }),
        false => Ok(files),
    }
}

/// Whether `directory` holds images and their labels, or is such labels.
fn is_sft(directory: &Path) -> Result<bool, DataError> {
    let images = directory.join(IMAGES).is_dir();
    Ok(is_labels(directory) || (images && !label_directories(directory)?.is_empty()))
}

/// The first name that cannot be the answer to a captcha: one with other characters than letters and digits, a long
/// one, or any of names that only number the images.
fn not_an_answer(images: &[PathBuf]) -> Option<String> {
    let answers: Vec<String> = images.iter().map(|path| answer(path)).collect();
    let is_word = |answer: &String| {
        let length = answer.chars().count();
        (1..=LONGEST_ANSWER).contains(&length) && answer.chars().all(char::is_alphanumeric)
    };
    if let Some(other) = answers.iter().find(|answer| !is_word(answer)) {
        return Some(other.clone());
    }
    let stem = |answer: &str| {
        answer
            .trim_end_matches(|c: char| c.is_ascii_digit())
            .to_owned()
    };
    let first = answers.first()?;
    let numbers = |answer: &String| stem(answer) == stem(first) && stem(answer) != **answer;
    answers.iter().all(numbers).then(|| first.clone())
}

/// The answer that an image's name gives: all up to its first dot.
fn answer(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.split('.').next().unwrap_or_default().to_owned()
}

/// Reads `directory`, which holds `images` and one directory of labels, or is a directory of labels beside `images`.
/// Also returns the directory that holds both.
pub(super) fn read_sft(
    directory: &Path,
    reader: &mut Reader<'_>,
) -> Result<(PathBuf, Vec<RawSample>), DataError> {
    let (root, labels) = if is_labels(directory) {
        (directory_of(directory), directory.to_owned())
    } else {
        (directory, only_labels(directory)?)
    };
    let images = root.join(IMAGES);
    let (mut by_stem, mut others) = (BTreeMap::new(), BTreeMap::new());
    for entry in entries(&images)? {
        let name = PathBuf::from(entry.file_name());
        if !is_image(&name) {
            others.insert(stem(&name), name.clone());
            reader
                .ignored
                .count(format!("{IMAGES}/*.{}", ending(&name)));
            continue;
        }
        if let Some(other) = by_stem.insert(stem(&name), name.clone()) {
            return Err(DataError::AmbiguousFormat {
                path: images,
                reason: format!(
                    "{} and {} have one label; give each image a name of its own",
                    other.display(),
                    name.display()
                ),
            });
        }
    }
    let mut samples = Vec::with_capacity(by_stem.len());
    for entry in entries(&labels)? {
        let label = entry.path();
        if label.extension() != Some(OsStr::new("json")) {
            reader.ignored.count(format!("labels *.{}", ending(&label)));
            continue;
        }
        let Some(name) = by_stem.remove(&stem(&label)) else {
            return Err(match others.remove(&stem(&label)) {
                Some(other) => DataError::OtherImage {
                    label,
                    image: images.join(other),
                },
                None => DataError::NoImage { label, images },
            });
        };
        let turns = read_label(&label, reader)?;
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
    let sample = |path: PathBuf| {
        let answer = answer(&path);
        RawSample {
            id: Some(path.to_string_lossy().into_owned()),
            conversations: vec![
                Message::new("user", CAPTCHA_PROMPT),
                Message::new("assistant", answer),
            ],
            images: vec![(SINGLE_IMAGE.to_owned(), path)],
            ..RawSample::default()
        }
    };
    let samples: Vec<RawSample> = below(directory)?.images.into_iter().map(sample).collect();
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
            ..RawSample::default()
        }
    })
}

/// The turns of a label file, which is one object. Its image is the one of the same name.
fn read_label(path: &Path, reader: &mut Reader<'_>) -> Result<Vec<Message>, DataError> {
    let bytes = std::fs::read(path).map_err(|error| unreadable(path, error))?;
    let label = read_entry(path, &bytes, |entry| reader.sample(entry))?;
    match label.images.first() {
        None => Ok(label.conversations),
        Some((_, image)) => Err(DataError::Json {
            path: path.to_owned(),
            line: 1,
            column: 1,
            reason: format!(
                "a label names no image of its own, but has {}",
                image.display()
            ),
        }),
    }
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

/// Files in a directory and the directories below it, relative to it, in the order of their paths.
struct Below {
    images: Vec<PathBuf>,
    others: Vec<PathBuf>,
}

/// The files below `directory`. Links to directories are not followed, since they may lead in circles; names that begin
/// with a dot are passed over.
fn below(directory: &Path) -> Result<Below, DataError> {
    let (mut images, mut others) = (Vec::new(), Vec::new());
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
            } else if entry.path().is_file() {
                match is_image(&path) {
                    true => images.push(path),
                    false => others.push(path),
                }
            }
        }
    }
    images.sort_unstable();
    others.sort_unstable();
    Ok(Below { images, others })
}

/// The entries of `directory` in the order of their names, without those that begin with a dot.
fn entries(directory: &Path) -> Result<Vec<DirEntry>, DataError> {
    let read = || -> std::io::Result<Vec<DirEntry>> { std::fs::read_dir(directory)?.collect() };
    let mut entries = read().map_err(|error| unreadable(directory, error))?;
    entries.retain(|entry| !entry.file_name().as_encoded_bytes().starts_with(b"."));
    entries.sort_unstable_by_key(DirEntry::file_name);
    Ok(entries)
}

/// The extension of `path` as messages show it.
fn ending(path: &Path) -> String {
    let ending = path.extension().unwrap_or_default();
    ending.to_string_lossy().into_owned()
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

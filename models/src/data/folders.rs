//! Data that is a folder: pictures named by their labels, and pictures beside files of conversations.

use std::path::{Path, PathBuf};

use optim::rng::RandomStream;
use serde::Deserialize;

use super::formats::DataFormat;
use super::raw::{DataError, RawSample, SINGLE_IMAGE, invalid};
use crate::text::Message;

/// What CogVLM's demo asks of a captcha.
const CAPTCHA_PROMPT: &str = "CAPTCHA:";
/// Endings of picture files, in lower case.
const PICTURES: [&str; 5] = ["jpg", "jpeg", "png", "webp", "bmp"];
/// Folders inside folders are followed this deep.
const MAX_DEPTH: usize = 16;

/// The format of the folder `path`.
pub(super) fn detect(path: &Path) -> Result<DataFormat, DataError> {
    if path.join("images").is_dir() && !label_folders(path)?.is_empty() {
        return Ok(DataFormat::CogVlmSft);
    }
    if pictures(path)?.is_empty() {
        return Err(DataError::UnknownFormat {
            path: path.to_owned(),
            found: "the folder holds neither pictures nor images/ with labels_*/".to_owned(),
        });
    }
    Ok(DataFormat::Captcha)
}

/// One sample per picture in `path` and the folders below: its label is its name up to the first dot.
pub(super) fn captcha(path: &Path) -> Result<Vec<RawSample>, DataError> {
    let sample = |picture: PathBuf| {
        let label = stem(&picture);
        RawSample {
            id: Some(picture.display().to_string()),
            images: vec![(SINGLE_IMAGE.to_owned(), picture)],
            conversations: vec![
                turn("user", CAPTCHA_PROMPT.to_owned()),
                turn("assistant", label),
            ],
        }
    };
    Ok(pictures(path)?.into_iter().map(sample).collect())
}

/// One sample per round of the conversation about each picture of `images/`. Every second round, by a draw that
/// depends on names only, has the round before it as its past.
pub(super) fn cogvlm_sft(path: &Path) -> Result<Vec<RawSample>, DataError> {
    #[derive(Deserialize)]
    struct Labels {
        conversations: Vec<Message>,
    }
    let mut samples = Vec::new();
    let images = pictures(&path.join("images"))?;
    for folder in label_folders(path)? {
        for picture in &images {
            let name = stem(picture);
            let file = folder.join(format!("{name}.json"));
            let bytes = match std::fs::read(&file) {
                Ok(bytes) => bytes,
                // A picture without labels in one language may have them in another.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
                Err(source) => return Err(DataError::Read { path: file, source }),
            };
            let labels: Labels =
                serde_json::from_slice(&bytes).map_err(|error| invalid(&file, 0, &error))?;
            let rounds = labels.conversations.as_chunks::<2>().0;
            let id = |round: usize| {
                let folder = folder.file_name().unwrap_or_default().to_string_lossy();
                format!("{folder}/{name}#{round}")
            };
            for (i, round) in rounds.iter().enumerate() {
                let id = id(i);
                let with_past = i > 0 && RandomStream::new(0, &id).uniform(0) < 0.5;
                let first = if with_past { i - 1 } else { i };
                samples.push(RawSample {
                    images: vec![(SINGLE_IMAGE.to_owned(), Path::new("images").join(picture))],
                    conversations: rounds[first..i]
                        .iter()
                        .chain([round])
                        .flatten()
                        .cloned()
                        .collect(),
                    id: Some(id),
                });
            }
        }
    }
    Ok(samples)
}

fn turn(role: &str, content: String) -> Message {
    Message {
        role: role.to_owned(),
        content,
    }
}

/// The name of a file up to its first dot.
fn stem(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.split('.').next().unwrap_or_default().to_owned()
}

/// Folders of conversations, sorted.
fn label_folders(path: &Path) -> Result<Vec<PathBuf>, DataError> {
    let mut folders: Vec<PathBuf> = entries(path)?
        .into_iter()
        .filter(|entry| entry.is_dir())
        .filter(|entry| {
            let name = entry.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with("labels")
        })
        .collect();
    folders.sort();
    Ok(folders)
}

/// Picture files below `root`, relative to it, sorted.
fn pictures(root: &Path) -> Result<Vec<PathBuf>, DataError> {
    let mut found = Vec::new();
    let mut open = vec![(root.to_owned(), 0)];
    while let Some((folder, depth)) = open.pop() {
        for entry in entries(&folder)? {
            // Links are not followed: they may lead round in a circle.
            let kind = entry.symlink_metadata().map(|meta| meta.file_type());
            if kind.as_ref().is_ok_and(std::fs::FileType::is_dir) && depth < MAX_DEPTH {
                open.push((entry, depth + 1));
            } else if is_picture(&entry) {
                let relative = entry.strip_prefix(root).unwrap_or(&entry);
                found.push(relative.to_owned());
            }
        }
    }
    found.sort();
    Ok(found)
}

fn is_picture(path: &Path) -> bool {
    let ending = path.extension().unwrap_or_default().to_string_lossy();
    PICTURES.contains(&&*ending.to_lowercase())
}

fn entries(folder: &Path) -> Result<Vec<PathBuf>, DataError> {
    let read = || -> std::io::Result<Vec<PathBuf>> {
        std::fs::read_dir(folder)?
            .map(|entry| Ok(entry?.path()))
            .collect()
    };
    read().map_err(|source| DataError::Read {
        path: folder.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::super::formats::read_samples_as;
    use super::*;

    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, content) in files {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, content).unwrap();
        }
        dir
    }

    #[test]
    fn a_captcha_is_named_by_its_label() {
        let dir = folder(&[
            ("b/kQ7xZ.v2.PNG", ""),
            ("a/0042.jpg", ""),
            ("notes.txt", ""),
        ]);
        let samples = read_samples_as(dir.path(), None).unwrap();
        let answers: Vec<_> = samples.iter().map(|s| s.answer().unwrap()).collect();
        assert_eq!(answers, ["0042", "kQ7xZ"]);
        assert_eq!(samples[0].images[0].1, Path::new("a/0042.jpg"));
        assert_eq!(samples[0].conversations[0].content, "CAPTCHA:");
    }

    #[test]
    fn every_round_of_a_conversation_is_a_sample() {
        let rounds: Vec<String> = (0..20)
            .map(|i| {
                format!(
                    r#"{{"role": "user", "content": "q{i}"}}, {{"role": "assistant", "content": "a{i}"}}"#
                )
            })
            .collect();
        let labels = format!(r#"{{"conversations": [{}]}}"#, rounds.join(", "));
        let dir = folder(&[
            ("images/x.jpg", ""),
            ("images/unlabelled.jpg", ""),
            ("labels_en/x.json", &labels),
        ]);
        let samples = read_samples_as(dir.path(), None).unwrap();
        assert_eq!(samples.len(), 20);
        assert_eq!(samples[0].conversations.len(), 2);
        assert_eq!(samples[7].answer(), Some("a7"));
        assert_eq!(samples[7].images[0].1, Path::new("images/x.jpg"));
        let with_past = samples
            .iter()
            .filter(|s| s.conversations.len() == 4)
            .count();
        assert!((5..=15).contains(&with_past), "{with_past} of 20");
        assert_eq!(samples, read_samples_as(dir.path(), None).unwrap());
    }

    #[test]
    fn folders_that_are_no_data_are_refused() {
        let empty = folder(&[("a.txt", "")]);
        let error = read_samples_as(empty.path(), None).unwrap_err();
        assert!(error.to_string().contains("neither pictures"), "{error}");
        let broken = folder(&[("images/x.jpg", ""), ("labels_en/x.json", "{\n3")]);
        let error = read_samples_as(broken.path(), None).unwrap_err();
        assert!(error.to_string().contains("x.json:2:"), "{error}");
        let unlabelled = folder(&[("images/x.jpg", ""), ("labels_en/y.json", "{}")]);
        let error = read_samples_as(unlabelled.path(), None).unwrap_err();
        assert!(matches!(error, DataError::Empty { .. }), "{error}");
    }
}

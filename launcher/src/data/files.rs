//! Files that samples were read from: their forms, their keys without effect, and the lines of their samples.

use super::mix::Mix;
use crate::lang::{Text, both, text};
use std::path::PathBuf;

use models::Processor;
use models::data::{DataFormat, Dataset, RawSample, THOUGHTS, sample_places};
use models::image::is_inside;
use serde::Serialize;

/// Keys without effect that a message names.
const NAMED_KEYS: usize = 8;

/// A file or directory of samples.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct DataFile {
    pub(crate) path: PathBuf,
    /// Name of the form, as for `--data-format`.
    pub(crate) format: &'static str,
    /// What decided the form, in words.
    #[serde(serialize_with = "Text::english")]
    pub(crate) by: Text,
    /// Number of samples that it holds.
    pub(crate) samples: usize,
    /// How often an epoch takes each sample.
    pub(crate) weight: f64,
    /// Keys without effect, each with the number of objects that have it.
    pub(crate) ignored: Vec<(String, usize)>,
}

impl DataFile {
    /// The file of `set`, whose form was `given`, for samples of `processor`.
    pub(super) fn of(set: &Dataset, given: Option<DataFormat>, processor: &dyn Processor) -> Self {
        let ignored = set.ignored.iter();
        let has_no_effect =
            |(key, _): &&(String, usize)| key != THOUGHTS || !processor.reads_thoughts();
        Self {
            path: set.path.clone(),
            format: set.format.name(),
            by: match (set.described, given) {
                (true, _) => Text::literal("dataset_info.json"),
                (false, Some(_)) => Text::literal("--data-format"),
                (false, None) => both("its content", "其内容").into(),
            },
            samples: set.samples.len(),
            weight: set.weight,
            ignored: ignored.filter(has_no_effect).cloned().collect(),
        }
    }

    /// Text such as `train.json: sharegpt, by its content`.
    pub(crate) fn form(&self) -> Text {
        text!(
            "{}: {}, by {}",
            "{}：{}，依据{}",
            self.path.display(),
            self.format,
            self.by
        )
    }

    /// Text that names the keys without effect, if there are any.
    pub(crate) fn without_effect(&self) -> Option<Text> {
        let keys = self.ignored.iter().take(NAMED_KEYS);
        let mut keys: Vec<Text> = keys
            .map(|(key, count)| text!("{key} ({count} times)", "{key}（{count} 次）"))
            .collect();
        if self.ignored.len() > NAMED_KEYS {
            keys.push(text!(
                "{} more",
                "另有 {} 个",
                self.ignored.len() - NAMED_KEYS
            ));
        }
        let keys = Text::list(&keys);
        let text = text!(
            "{}: no effect: {keys}",
            "{}：不起作用的键：{keys}",
            self.path.display()
        );
        (!self.ignored.is_empty()).then_some(text)
    }
}

/// Mix of the samples of `files`, of which those with the indices `kept`, in rising order, are used.
pub(crate) fn mix_of(files: &[DataFile], kept: impl IntoIterator<Item = usize>) -> Mix {
    let mut kept = kept.into_iter().peekable();
    let mut end = 0;
    Mix::of(files.iter().map(|file| {
        end += file.samples;
        let own = std::iter::from_fn(|| kept.next_if(|index| *index < end));
        (own.count(), file.weight)
    }))
}

/// The samples of `set`, with relative paths of images below its directory.
pub(super) fn relocated(set: Dataset) -> Vec<RawSample> {
    let root = std::path::absolute(&set.root).unwrap_or(set.root);
    let place = |path: &mut PathBuf| {
        // A path that leaves the directory stays as it is, and the image source refuses it.
        if !is_inside(path)
            && !path
                .components()
                .any(|part| part == std::path::Component::ParentDir)
        {
            *path = root.join(&*path);
        }
    };
    let mut samples = set.samples;
    for (_, path) in samples.iter_mut().flat_map(|sample| &mut sample.images) {
        place(path);
    }
    samples
}

/// Lines on which the samples of some files begin.
pub(crate) struct Places {
    /// Each file with the number of its samples and their lines.
    files: Vec<(PathBuf, usize, Vec<usize>)>,
}

impl Places {
    /// Reads `files` again. The lines of one that cannot be read stay unknown.
    pub(crate) fn of(files: &[DataFile]) -> Self {
        let files = files.iter();
        Self {
            files: files
                .map(|file| (file.path.clone(), file.samples, sample_places(&file.path)))
                .collect(),
        }
    }

    /// File and line of sample `index` of all files together. The file is absent if there is only one.
    pub(crate) fn at(&self, index: usize) -> (Option<PathBuf>, Option<usize>) {
        let mut left = index;
        for (path, samples, lines) in &self.files {
            if left < *samples {
                let path = (self.files.len() > 1).then(|| path.clone());
                return (path, lines.get(left).copied());
            }
            left -= samples;
        }
        (None, None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_of_several_files_is_found_in_its_own() {
        let dir = tempfile::tempdir().expect("temp dir");
        let file = |name: &str, text: &str, samples: usize| {
            let path = dir.path().join(name);
            std::fs::write(&path, text).expect("written");
            DataFile {
                path,
                format: "messages",
                by: both("its content", "其内容").into(),
                samples,
                weight: 1.0,
                ignored: vec![("source".to_owned(), 2)],
            }
        };
        let files = [file("a", "{}\n\n{}\n", 2), file("b", "[\n{}]", 1)];
        let both = Places::of(&files);
        assert_eq!(both.at(1), (Some(files[0].path.clone()), Some(3)));
        assert_eq!(both.at(2), (Some(files[1].path.clone()), Some(2)));
        assert_eq!(both.at(3), (None, None));
        assert_eq!(Places::of(&files[..1]).at(0), (None, Some(1)));
        let named = files[0].without_effect().expect("a key without effect");
        assert!(named.ends_with("a: no effect: source (2 times)"), "{named}");
        assert!(files[0].form().ends_with("a: messages, by its content"));
    }
}

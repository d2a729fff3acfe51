//! Samples of a data file, read and checked one by one.

use crate::error::{ErrorCode, Failure, chain};
use crate::lang::{Both, Text, both, text};
use std::path::Path;

use models::Processor;
use models::data::{
    DATASET_INFO, DataError, DataFormat, EncodeOptions, EncodedSample, RawSample, SampleSize,
    read_datasets,
};
use models::image::ImageFolder;
use rayon::prelude::*;

use super::files::{DataFile, Places, mix_of, relocated};
use super::images::LargestImage;
use super::losses::ImageLosses;
use super::mix::Mix;
use super::problems::Problem;
use crate::config::{DataFormatChoice, ExifRotation};

/// Bytes at the beginning of a file that is no valid JSON in which words of a form are looked for.
const LOOKED_AT_BYTES: usize = 4096;

/// Usable samples of one data file, with the directory of their images and the results of the check.
#[derive(Debug)]
pub(crate) struct SampleSet {
    /// Samples that can be used, in the order of the file.
    pub(crate) samples: Vec<RawSample>,
    /// Indices of the usable samples in the file. Empty if the samples were read without a check: then all are kept.
    pub(crate) kept: Vec<usize>,
    /// Directory at which relative image paths of the samples start.
    pub(crate) images: ImageFolder,
    /// Tokens and image patches of each usable sample. Empty if the samples were not measured.
    pub(crate) sizes: Vec<SampleSize>,
    /// Problems of the samples left out.
    pub(crate) problems: Vec<Problem>,
    /// Number of images of all usable samples together; 0 if they were not counted.
    pub(crate) image_count: usize,
    /// Files that the samples were read from.
    pub(crate) files: Vec<DataFile>,
    /// Images of which the model sees less than their files hold; none were counted without a check.
    pub(crate) losses: ImageLosses,
    /// The image that takes the most memory; `None` without images or without a check.
    pub(crate) largest_image: Option<LargestImage>,
}

impl SampleSet {
    /// Index in the file, from 0, of sample `index` of this set.
    pub(crate) fn index_in_file(&self, index: usize) -> usize {
        self.kept.get(index).copied().unwrap_or(index)
    }

    /// How many samples of each file an epoch takes.
    pub(crate) fn mix(&self) -> Mix {
        match self.kept.is_empty() {
            true => mix_of(&self.files, 0..self.samples.len()),
            false => mix_of(&self.files, self.kept.iter().copied()),
        }
    }

    /// Lines about the files: the form of each, and what the model does not see of them.
    pub(crate) fn lines(&self) -> Vec<Text> {
        let forms = self.files.iter().map(DataFile::form);
        forms
            .chain(self.mix().line())
            .chain(self.unseen())
            .collect()
    }

    /// A line for each part of the data that the model does not see.
    pub(crate) fn unseen(&self) -> impl Iterator<Item = Text> {
        let keys = self.files.iter().filter_map(DataFile::without_effect);
        keys.chain(self.losses.lines()).chain(self.truncated())
    }

    /// How many samples `--model-max-length` truncates, if any.
    fn truncated(&self) -> Option<Text> {
        let sizes = self.sizes.iter();
        let cut = sizes.filter(|size| size.untruncated_tokens > size.tokens);
        let (count, all) = (cut.clone().count(), self.sizes.len());
        let longest = cut.map(|size| size.untruncated_tokens).max()?;
        Some(text!(
            "--model-max-length cuts off the end of {count} of {all} samples; {longest} tokens would keep the longest",
            "--model-max-length 截去了 {all} 个样本中 {count} 个的结尾；{longest} 个 token 才能保留最长的样本"
        ))
    }
}

/// Data files or directories, and how much of them to read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reading<'a> {
    /// Paths of the files or directories, separated by commas.
    pub(crate) path: &'a Path,
    /// Format of the files or directories; `Auto` detects it.
    pub(crate) format: DataFormatChoice,
    /// Directory at which relative paths of images start; `None` is beside each file.
    pub(crate) images: Option<&'a Path>,
    /// What becomes of the orientation of images.
    pub(crate) exif: ExifRotation,
    /// Maximum number of samples to read, from the start.
    pub(crate) limit: Option<usize>,
    /// Whether they are held-out samples: of a file with a number of samples only these are read, from its start.
    pub(crate) held_out: bool,
}

/// Samples that a run reads of its data.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Taken {
    /// This number of training samples; all of them if `None`.
    Training(Option<usize>),
    /// The held-out samples.
    HeldOut,
}

impl Taken {
    pub(super) const fn limit(self) -> Option<usize> {
        match self {
            Self::Training(limit) => limit,
            Self::HeldOut => None,
        }
    }

    pub(super) const fn is_held_out(self) -> bool {
        matches!(self, Self::HeldOut)
    }
}

/// Samples as they were read.
#[derive(Debug)]
pub(crate) struct ReadSamples {
    pub(crate) samples: Vec<RawSample>,
    /// Directory at which relative image paths of the samples start.
    pub(crate) images: ImageFolder,
    pub(crate) files: Vec<DataFile>,
}

/// Reads samples. Relative paths of images start at `reading.images`, at the file's directory, or at the directory
/// itself.
///
/// # Errors
/// When the data cannot be read or has no samples (exit 3).
pub(crate) fn read(
    reading: Reading<'_>,
    processor: &dyn Processor,
) -> Result<ReadSamples, Failure> {
    let format = reading.format.format();
    let sets = read_datasets(reading.path, format, reading.images);
    let mut sets = sets.map_err(|error| refusal(reading.path, format, &error))?;
    for set in sets.iter_mut().filter(|_| reading.held_out) {
        let taken = (set.samples.len() as f64 * set.weight).round() as usize;
        set.samples.truncate(taken.max(1));
        set.weight = 1.0;
    }
    let files = sets.iter();
    let files = files
        .map(|set| DataFile::of(set, format, processor))
        .collect();
    let (mut samples, root) = match <[_; 1]>::try_from(sets) {
        Ok([only]) => (only.samples, only.root),
        Err(sets) => (sets.into_iter().flat_map(relocated).collect(), ".".into()),
    };
    samples.truncate(reading.limit.unwrap_or(usize::MAX));
    Ok(ReadSamples {
        samples,
        images: ImageFolder::new(root).upright(reading.exif == ExifRotation::Apply),
        files,
    })
}

/// Why data cannot be read, with the form that it looks like.
fn refusal(path: &Path, format: Option<DataFormat>, error: &DataError) -> Failure {
    let title = text!("cannot read {}", "无法读取 {}", path.display());
    let failure = Failure::new(ErrorCode::DataFile, title, chain(error));
    let forms = || {
        let all = DataFormat::ALL.iter();
        let all: Vec<String> = all
            .map(|format| format!("{} {}", format.name(), format.shape()))
            .collect();
        all.join("; ")
    };
    match error {
        DataError::Read { path, .. } if !path.exists() => failure.next(both(
            "check the path; relative paths start at the current directory",
            "请检查路径；相对路径以当前目录为起点",
        )),
        DataError::Json { path, .. } if path.ends_with(DATASET_INFO) => failure.next(text!(
            "change the entry in {DATASET_INFO}: `file_name` is a file or directory beside it, with `formatting`, `columns` and `tags`; or give the file itself as --data",
            "请修改 {DATASET_INFO} 中的条目：`file_name` 是它旁边的文件或目录，另有 `formatting`、`columns` 和 `tags`；或直接用 --data 指定该文件"
        )),
        DataError::Json { path, reason, .. } | DataError::Row { path, reason, .. }
            if refuses_key(reason) =>
        {
            let failure = match looks_like(path).or(format) {
                Some(form) => failure.next(text!(
                    "the file has the form {}: {}; another form does not help",
                    "该文件是 {} 格式：{}；换一种格式没有用",
                    form.name(),
                    form.shape()
                )),
                None => failure,
            };
            failure.next(both(
                "change or remove what the cause names, or leave out the samples that have it",
                "请修改或删除原因中指出的内容，或去掉含有它的样本",
            ))
        }
        DataError::Json { path, reason, .. } | DataError::Row { path, reason, .. } => {
            let failure = match syntax_hint(reason) {
                Some(hint) => failure.next(hint),
                None => failure,
            };
            match (looks_like(path), format) {
                (Some(form), Some(given)) if form != given => failure.next(text!(
                    "--data-format {}   (the file looks like it: {})",
                    "--data-format {}   (该文件看起来是这种格式：{})",
                    form.name(),
                    form.shape()
                )),
                (Some(form), _) | (None, Some(form)) => failure.next(text!(
                    "the file looks like the form {}: {}; --data-format names another",
                    "该文件看起来是 {} 格式：{}；可用 --data-format 指定另一种",
                    form.name(),
                    form.shape()
                )),
                (None, None) => failure.next(text!(
                    "write the samples in one of the forms {}",
                    "请按以下格式之一书写样本：{}",
                    forms()
                )),
            }
        }
        DataError::OtherImage { image, .. } => failure.next(text!(
            "magick {0} {0}.png, or with Pillow; then remove {0}",
            "magick {0} {0}.png，或用 Pillow；然后删除 {0}",
            image.display()
        )),
        DataError::UnknownFormat { .. } => failure.next(text!(
            "write the samples in one of the forms {}",
            "请按以下格式之一书写样本：{}",
            forms()
        )),
        DataError::AmbiguousFormat { .. } => failure.next(both(
            "give the file or directory that holds the samples, or its form with --data-format",
            "请指定包含样本的文件或目录，或用 --data-format 指定其格式",
        )),
        _ => failure.next(both(
            "give a file or directory that holds samples",
            "请指定包含样本的文件或目录",
        )),
    }
}

/// The form of the file `path` by its first sample, otherwise by the words at its beginning.
fn looks_like(path: &Path) -> Option<DataFormat> {
    if let Ok(format) = models::data::detect(path) {
        return Some(format);
    }
    let text = std::fs::read(path).ok()?;
    let start = String::from_utf8_lossy(&text[..text.len().min(LOOKED_AT_BYTES)]);
    let words = |words: &[&str]| words.iter().all(|word| start.contains(word));
    [
        (&["conversations", "from"][..], DataFormat::ShareGpt),
        (&["conversations"], DataFormat::Minicpm),
        (&["messages"], DataFormat::Messages),
        (&["instruction", "output"], DataFormat::Alpaca),
        (&["query", "response"], DataFormat::QueryResponse),
    ]
    .into_iter()
    .find_map(|(all, format)| words(all).then_some(format))
}

/// Whether a reader's `reason` names a key that no form reads, so that another form does not help.
fn refuses_key(reason: &str) -> bool {
    let about = [
        "is not supported",
        "a run learns every answer",
        "is no directory of frames",
    ];
    reason.contains('"') && about.iter().any(|words| reason.contains(words))
}

/// What JSON demands, if the parser stopped at something that other languages allow, or within an entry.
fn syntax_hint(reason: &str) -> Option<Both> {
    let begins = |words: &[&str]| words.iter().any(|word| reason.starts_with(word));
    if begins(&["expected value", "trailing comma", "key must be a string"]) {
        return Some(both(
            "JSON writes texts in double quotes, and no comma after the last entry",
            "JSON 的文本要用双引号，最后一项之后没有逗号",
        ));
    }
    let split = begins(&["EOF while parsing"]);
    split.then_some(both(
        "samples are a JSON list, or one object on each line",
        "样本应是一个 JSON 列表，或每行一个对象",
    ))
}

/// Size of every sample, or why it cannot be used, and what its images lose. `images` has the headers of all images,
/// so no file is read.
pub(crate) fn verdicts(
    files: &[DataFile],
    samples: &[RawSample],
    images: &ImageFolder,
    processor: &dyn Processor,
    options: &EncodeOptions,
) -> (Vec<Result<SampleSize, Problem>>, ImageLosses) {
    let (mut verdicts, losses): (Vec<_>, Vec<ImageLosses>) = samples
        .par_iter()
        .enumerate()
        .map(|(index, sample)| {
            let mut losses = ImageLosses::default();
            let verdict = verdict(index, sample, images, processor, options, &mut losses);
            (verdict, losses)
        })
        .unzip();
    if verdicts.iter().any(Result::is_err) {
        let places = Places::of(files);
        for problem in verdicts.iter_mut().filter_map(|v| v.as_mut().err()) {
            (problem.file, problem.line) = places.at(problem.index);
        }
    }
    (
        verdicts,
        losses
            .into_iter()
            .fold(ImageLosses::default(), ImageLosses::with),
    )
}

fn verdict(
    index: usize,
    sample: &RawSample,
    images: &ImageFolder,
    processor: &dyn Processor,
    options: &EncodeOptions,
    losses: &mut ImageLosses,
) -> Result<SampleSize, Problem> {
    let size = processor
        .measure(sample, images, options)
        .map_err(|error| {
            Problem::new(index, sample, &error).measured(sample, images, processor, options)
        })?;
    for (_, image) in &sample.images {
        images
            .header(image)
            .map_err(|error| Problem::image(index, sample, chain(&error)))?;
        losses.add(image, images.losses(image).unwrap_or_default());
    }
    Ok(size)
}

/// Adds to `failure` how to find samples that the check before training did not find.
pub(crate) fn missed(failure: Failure) -> Failure {
    failure
        .evidence(both(
            "the check before training reads the beginning and the end of an image, and decodes some",
            "训练前的检查读取图片的开头和结尾，并解码其中一部分",
        ))
        .next(both(
            "launcher data check decodes the images and lists the damaged ones",
            "launcher data check 会解码所有图片并列出损坏的图片",
        ))
        .next(both(
            "--skip-bad-samples true decodes them before training and leaves their samples out",
            "--skip-bad-samples true 会在训练前解码图片，并跳过含损坏图片的样本",
        ))
}

/// Encodes `count` samples in the order `order`, which is repeated if it is shorter.
///
/// # Errors
/// When a sample cannot be read (exit 3).
pub(crate) fn encode_in_order(
    samples: &[RawSample],
    images: &ImageFolder,
    processor: &dyn Processor,
    options: &EncodeOptions,
    order: &[usize],
    count: usize,
) -> Result<Vec<EncodedSample>, Failure> {
    let picked = order.iter().cycle().take(count);
    picked
        .map(|i| {
            processor
                .encode(&samples[*i], images, options)
                .map_err(|e| {
                    let title = text!("sample {i} cannot be used", "样本 {i} 无法使用");
                    missed(Failure::new(ErrorCode::DataFile, title, chain(&e)))
                })
        })
        .collect()
}

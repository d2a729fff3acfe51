//! Samples of a data file, read and checked one by one.

use crate::error::{ErrorCode, Failure, chain};
use crate::lang::{Text, both, text};
use std::path::Path;

use models::Processor;
use models::data::{EncodeOptions, EncodedSample, RawSample, SampleSize, read_datasets};
use models::image::ImageFolder;
use rayon::prelude::*;

use super::files::{DataFile, Places, mix_of, relocated};
use super::images::LargestImage;
use super::losses::ImageLosses;
use super::mix::Mix;
use super::problems::Problem;
use super::unreadable::refusal;
use crate::config::{DataFormatChoice, ExifRotation};

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
    /// Maximum number of samples to take of each file, from its start; at least 1.
    pub(crate) limit: Option<usize>,
    /// Whether they are held-out samples: of a file with a number of samples only these are read, from its start.
    pub(crate) held_out: bool,
}

/// Samples that a run reads of its data.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Taken {
    /// This number of training samples of each file; all of them if `None`.
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
    for set in &mut sets {
        // Samples that an epoch takes of the file.
        let mut taken = set.samples.len() as f64 * set.weight;
        if reading.held_out {
            set.samples.truncate((taken.round() as usize).max(1));
            set.weight = 1.0;
            taken = set.samples.len() as f64;
        }
        if let Some(limit) = reading.limit.filter(|limit| *limit < set.samples.len()) {
            set.samples.truncate(limit);
            set.weight = taken.min(limit as f64) / limit as f64;
        }
    }
    let files = sets.iter();
    let files = files
        .map(|set| DataFile::of(set, format, processor))
        .collect();
    let (samples, root) = match <[_; 1]>::try_from(sets) {
        Ok([only]) => (only.samples, only.root),
        Err(sets) => (sets.into_iter().flat_map(relocated).collect(), ".".into()),
    };
    Ok(ReadSamples {
        samples,
        images: ImageFolder::new(root).upright(reading.exif == ExifRotation::Apply),
        files,
    })
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

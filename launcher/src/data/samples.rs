//! Samples of a data file, read and checked one by one.

use crate::error::{ErrorCode, Failure, chain};
use std::path::Path;

use models::Processor;
use models::data::{EncodeOptions, EncodedSample, RawSample, SampleSize, read_samples_as};
use models::image::{ImageFolder, ImageSource};
use rayon::prelude::*;

use super::lines;
use super::problems::Problem;
use crate::config::DataFormatChoice;

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
}

impl SampleSet {
    /// Index in the file, from 0, of sample `index` of this set.
    pub(crate) fn index_in_file(&self, index: usize) -> usize {
        self.kept.get(index).copied().unwrap_or(index)
    }
}

/// A data file or directory, and how much of it to read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reading<'a> {
    /// Path of the file or directory.
    pub(crate) path: &'a Path,
    /// Format of the file or directory; `Auto` detects it.
    pub(crate) format: DataFormatChoice,
    /// Maximum number of samples to read, from the start.
    pub(crate) limit: Option<usize>,
}

/// Reads samples. Relative paths of images start at the file's directory, or at the directory itself.
///
/// # Errors
/// When the data cannot be read or has no samples (exit 3).
pub(crate) fn read(reading: Reading<'_>) -> Result<(Vec<RawSample>, ImageFolder), Failure> {
    let Reading {
        path,
        format,
        limit,
    } = reading;
    let refuse = |cause: String| {
        let next = if path.exists() {
            "use a JSON list of {id, image, conversations: [{role, content}]}, the format of MiniCPM-V fine-tuning, or give another format with --data-format"
        } else {
            "check the path; relative paths start at the current directory"
        };
        let title = format!("cannot read {}", path.display());
        Failure::new(ErrorCode::DataFile, title, cause).next(next)
    };
    let dataset = read_samples_as(path, format.format()).map_err(|e| refuse(chain(&e)))?;
    let mut samples = dataset.samples;
    samples.truncate(limit.unwrap_or(usize::MAX));
    Ok((samples, ImageFolder::new(dataset.root)))
}

/// Size of every sample, or why it cannot be used. Each image is decoded once, so damaged content is found before
/// training and not at step 8000.
pub(crate) fn verdicts(
    path: &Path,
    samples: &[RawSample],
    images: &ImageFolder,
    processor: &dyn Processor,
    options: &EncodeOptions,
) -> Vec<Result<SampleSize, Problem>> {
    let mut verdicts: Vec<_> = samples
        .par_iter()
        .enumerate()
        .map(|(index, sample)| verdict(index, sample, images, processor, options))
        .collect();
    if verdicts.iter().any(Result::is_err) {
        // The file was read before. If it cannot be read again, the line numbers stay unknown.
        let lines =
            std::fs::read(path).map_or_else(|_| Vec::new(), |text| lines::of_samples(&text));
        for problem in verdicts.iter_mut().filter_map(|v| v.as_mut().err()) {
            problem.line = lines.get(problem.index).copied();
        }
    }
    verdicts
}

fn verdict(
    index: usize,
    sample: &RawSample,
    images: &ImageFolder,
    processor: &dyn Processor,
    options: &EncodeOptions,
) -> Result<SampleSize, Problem> {
    let size = processor
        .measure(sample, images, options)
        .map_err(|error| {
            Problem::new(index, sample, &error).measured(sample, images, processor, options)
        })?;
    for (_, image) in &sample.images {
        images
            .load(image)
            .map_err(|error| Problem::image(index, sample, chain(&error)))?;
    }
    Ok(size)
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
                    let title = format!("sample {i} cannot be used");
                    Failure::new(ErrorCode::DataFile, title, chain(&e))
                })
        })
        .collect()
}

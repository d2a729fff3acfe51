//! The samples of a data file, read and checked one by one.

use crate::error::{ErrorCode, Failure, chain};
use std::path::Path;

use models::Processor;
use models::data::{EncodeOptions, EncodedSample, RawSample, SampleSize, read_samples_as};
use models::image::{ImageFolder, ImageSource};
use rayon::prelude::*;

use super::lines;
use super::problems::Problem;
use crate::config::DataFormatChoice;

/// Samples of one file, checked, with their pictures' place.
#[derive(Debug)]
pub(crate) struct SampleSet {
    /// Those that can be used.
    pub(crate) samples: Vec<RawSample>,
    /// Their indices in the file; empty where all of them are there.
    pub(crate) kept: Vec<usize>,
    /// Where their pictures are.
    pub(crate) images: ImageFolder,
    /// What each costs; empty where nobody counted.
    pub(crate) sizes: Vec<SampleSize>,
    /// Samples left out, with their indices in the file.
    pub(crate) problems: Vec<Problem>,
    /// Pictures of all samples.
    pub(crate) pictures: usize,
}

impl SampleSet {
    /// Where the sample `index` of this set stands in its file, from 0.
    pub(crate) fn index_in_file(&self, index: usize) -> usize {
        self.kept.get(index).copied().unwrap_or(index)
    }
}

/// A data file or folder, and how much of it to read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reading<'a> {
    /// Where it is.
    pub(crate) path: &'a Path,
    /// Its form.
    pub(crate) format: DataFormatChoice,
    /// Only the first samples.
    pub(crate) limit: Option<usize>,
}

/// Reads samples; relative paths of pictures start at the file's folder, or at the folder itself.
///
/// # Errors
/// The data cannot be read or holds no samples (exit 3).
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

/// What every sample costs, or why it cannot be used. Each picture is decoded once, so that damage
/// behind a header is found now and not at step 8000.
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
        // The file was read a moment ago; without it the lines stay unknown.
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
    for (_, picture) in &sample.images {
        images
            .load(picture)
            .map_err(|error| Problem::picture(index, sample, chain(&error)))?;
    }
    Ok(size)
}

/// `count` samples of `order`, again from its beginning where it is shorter.
///
/// # Errors
/// A sample cannot be read (exit 3).
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

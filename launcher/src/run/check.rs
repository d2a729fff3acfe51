//! Every sample is checked before training.

use super::failures::chain;
use crate::config::RunConfig;
use crate::exit::{ErrorCode, Failure};
use models::image::{ImageFolder, ImageSource};
use models::minicpm::processor::Processor;
use models::minicpm::sample::{EncodeOptions, EncodedSample, RawSample, SampleError, read_samples};
use rayon::prelude::*;
use std::path::Path;

/// Problems listed in the report; the rest is counted.
const LISTED: usize = 5;

/// Samples of one file, checked, with their pictures' place.
#[derive(Debug)]
pub(crate) struct SampleSet {
    pub(crate) samples: Vec<RawSample>,
    pub(crate) images: ImageFolder,
    pub(super) sizes: Vec<Size>,
    pub(super) skipped: usize,
    pub(super) pictures: usize,
}

/// What a sample costs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Size {
    pub(super) tokens: usize,
    pub(super) supervised: usize,
    pub(super) patches: usize,
}

/// Why a sample cannot be used.
pub(crate) struct Problem {
    pub(crate) code: ErrorCode,
    pub(crate) text: String,
}

/// Reads and checks the first `limit` samples of `path`. Unusable samples are an error listing them, or left out when the
/// configuration says so.
pub(super) fn check(
    config: &RunConfig,
    path: &Path,
    limit: Option<usize>,
    processor: &Processor,
) -> Result<SampleSet, Failure> {
    let options = encode_options(config);
    check_samples(
        path,
        processor,
        &options,
        limit,
        config.batch.skip_bad_samples,
    )
}

/// As [`check`] with settings of its own.
pub(crate) fn check_samples(
    path: &Path,
    processor: &Processor,
    options: &EncodeOptions,
    limit: Option<usize>,
    skip_bad: bool,
) -> Result<SampleSet, Failure> {
    let (samples, images) = read(path, limit)?;
    let verdicts: Vec<Result<Size, Problem>> = samples
        .par_iter()
        .map(|s| verdict(s, &images, processor, options))
        .collect();
    let bad: Vec<(usize, &Problem)> = verdicts
        .iter()
        .enumerate()
        .filter_map(|(i, v)| v.as_ref().err().map(|p| (i, p)))
        .collect();
    if !bad.is_empty() && !skip_bad {
        return Err(refusal(path, &samples, &bad));
    }
    let skipped = bad.len();
    let (samples, sizes): (Vec<RawSample>, Vec<Size>) = samples
        .into_iter()
        .zip(verdicts)
        .filter_map(|(s, v)| v.ok().map(|v| (s, v)))
        .unzip();
    if samples.is_empty() {
        return Err(Failure::new(
            ErrorCode::Samples,
            format!("{} holds no usable sample", path.display()),
            if skipped > 0 {
                "all samples were left out"
            } else {
                "the list is empty"
            },
        ));
    }
    let pictures = samples.iter().map(|s| s.images.len()).sum();
    Ok(SampleSet {
        samples,
        images,
        sizes,
        skipped,
        pictures,
    })
}

/// The samples of a rank: those the supervisor has checked. Only when bad ones are to be left out
/// the check runs again, to find the same ones.
pub(super) fn load(
    config: &RunConfig,
    path: &Path,
    limit: Option<usize>,
    processor: &Processor,
) -> Result<SampleSet, Failure> {
    if config.batch.skip_bad_samples {
        return check(config, path, limit, processor);
    }
    let (samples, images) = read(path, limit)?;
    Ok(SampleSet {
        samples,
        images,
        sizes: Vec::new(),
        skipped: 0,
        pictures: 0,
    })
}

fn read(path: &Path, limit: Option<usize>) -> Result<(Vec<RawSample>, ImageFolder), Failure> {
    let refuse = |cause: String| {
        Failure::new(ErrorCode::DataFile, format!("cannot read {}", path.display()), cause)
            .next("a JSON list of {id, image, conversations: [{role, content}]}, as MiniCPM-V's fine-tuning takes it")
    };
    let mut samples = read_samples(path).map_err(|e| refuse(chain(&e)))?;
    samples.truncate(limit.unwrap_or(usize::MAX));
    let images = ImageFolder::beside(path);
    Ok((samples, images))
}

impl SampleSet {
    /// Indices of all samples, the longest by tokens and patches first.
    pub(super) fn by_weight(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.samples.len()).collect();
        let weight = |i: usize| self.sizes[i].tokens + self.sizes[i].patches;
        order.sort_by_key(|i| std::cmp::Reverse(weight(*i)));
        order
    }

    /// The samples that a worst micro-batch would hold: the longest by tokens and patches.
    pub(super) fn largest(
        &self,
        config: &RunConfig,
        processor: &Processor,
    ) -> Result<Vec<EncodedSample>, Failure> {
        let order = self.by_weight();
        let options = encode_options(config);
        let picked = order.iter().cycle().take(config.batch.micro_batch);
        picked
            .map(|i| {
                processor
                    .encode(&self.samples[*i], &self.images, &options)
                    .map_err(|e| {
                        let title = format!("sample {i} cannot be used");
                        Failure::new(ErrorCode::DataFile, title, chain(&e))
                    })
            })
            .collect()
    }
}

pub(super) fn encode_options(config: &RunConfig) -> EncodeOptions {
    EncodeOptions {
        model_max_length: config.batch.model_max_length,
        max_slice_nums: Some(config.batch.max_slice_nums),
    }
}

/// Lengths from headers and text, then each picture decoded once, so that damage behind a header
/// is found now and not at step 8000.
fn verdict(
    sample: &RawSample,
    images: &ImageFolder,
    processor: &Processor,
    options: &EncodeOptions,
) -> Result<Size, Problem> {
    let size = processor
        .measure(sample, images, options)
        .map_err(|e| problem(&e))?;
    for (_, picture) in &sample.images {
        images.load(picture).map_err(|e| Problem {
            code: ErrorCode::DataFile,
            text: chain(&e),
        })?;
    }
    Ok(Size {
        tokens: size.tokens,
        supervised: size.supervised,
        patches: size.patches,
    })
}

/// The code and the words of an error.
pub(crate) fn problem(error: &SampleError) -> Problem {
    let code = match error {
        SampleError::MorePlaceholdersThanImages { .. }
        | SampleError::UnknownPlaceholder { .. }
        | SampleError::UnusedImage { .. } => ErrorCode::Placeholders,
        SampleError::Image { .. } => ErrorCode::DataFile,
        _ => ErrorCode::Samples,
    };
    Problem {
        code,
        text: chain(error),
    }
}

fn refusal(path: &Path, samples: &[RawSample], bad: &[(usize, &Problem)]) -> Failure {
    let title = format!(
        "{} of {} samples in {} cannot be used",
        bad.len(),
        samples.len(),
        path.display()
    );
    let mut failure = Failure::new(bad[0].1.code, title, bad[0].1.text.clone());
    for (i, problem) in bad.iter().take(LISTED) {
        let id = samples[*i].id.as_deref().unwrap_or("-");
        failure = failure.evidence(format!("sample {i} (id {id}): {}", problem.text));
    }
    if bad.len() > LISTED {
        failure = failure.evidence(format!("and {} more", bad.len() - LISTED));
    }
    if bad
        .iter()
        .any(|(_, problem)| problem.code == ErrorCode::Samples)
    {
        failure = failure.next("a higher --model-max-length, where samples are cut off");
    }
    failure.next("mend these samples, or leave them out with --skip-bad-samples true")
}

//! Check of every sample before training.

use crate::config::RunConfig;
use crate::data::images::{self, ImageCheck, share_budget};
use crate::data::losses::ImageLosses;
use crate::data::problems::{self, Context, Problem};
use crate::data::{self, ReadSamples, Reading, SampleSet};
use crate::error::{ErrorCode, Failure};
use crate::lang::{Text, both, text};
use models::Processor;
use models::data::{EncodeOptions, EncodedSample, RawSample, SampleSize};
use std::path::Path;

/// Reads and checks the first `limit` samples of `path`. With `--skip-bad-samples`, unusable samples are left out, and
/// all images are decoded to find them. `show` gets lines of progress.
///
/// # Errors
/// The file cannot be read, a sample is unusable, or an image is too large for the memory. The failure lists unusable
/// samples.
pub(crate) fn check(
    config: &RunConfig,
    path: &Path,
    limit: Option<usize>,
    processor: &dyn Processor,
    show: &mut dyn FnMut(Text),
) -> Result<SampleSet, Failure> {
    share_budget(config);
    let options = encode_options(config);
    let skip_bad = config.batch.skip_bad_samples;
    let reading = Reading {
        path,
        format: config.samples.data_format,
        images: config.image_dir(),
        exif: config.samples.exif_rotation,
        limit,
    };
    let model = config.model_dir();
    let mut images = ImageCheck::here(show);
    if let Some(limit) = config.host_memory_limit {
        images.memory_bytes = images.memory_bytes.min(limit);
    }
    check_samples(reading, &model, processor, &options, skip_bad, images)
}

/// As [`check`], with the settings given one by one instead of by a run's configuration. `model` is the model
/// directory.
pub(crate) fn check_samples(
    reading: Reading<'_>,
    model: &Path,
    processor: &dyn Processor,
    options: &EncodeOptions,
    skip_bad: bool,
    mut check: ImageCheck<'_>,
) -> Result<SampleSet, Failure> {
    let ReadSamples {
        samples,
        images,
        files,
    } = data::read(reading)?;
    let path = reading.path;
    check.decode_all |= skip_bad;
    let (images, largest_image) = images::check(&samples, &images, path, &mut check)?;
    let (verdicts, losses) = data::verdicts(&files, &samples, &images, processor, options);
    let bad: Vec<Problem> = verdicts
        .iter()
        .filter_map(|v| v.as_ref().err().cloned())
        .collect();
    if !bad.is_empty() && !skip_bad {
        let context = Context {
            path,
            model,
            samples: &samples,
            images: &images,
            processor,
            options,
        };
        return Err(problems::refusal(&context, &bad));
    }
    let kept = (0..samples.len())
        .filter(|i| verdicts[*i].is_ok())
        .collect();
    let (samples, sizes): (Vec<RawSample>, Vec<SampleSize>) = samples
        .into_iter()
        .zip(verdicts)
        .filter_map(|(s, v)| v.ok().map(|v| (s, v)))
        .unzip();
    if samples.is_empty() {
        return Err(Failure::new(
            ErrorCode::Samples,
            text!(
                "{} contains no usable sample",
                "{} 中没有可用的样本",
                path.display()
            ),
            text!(
                "all {} samples were skipped",
                "全部 {} 个样本都被跳过",
                bad.len()
            ),
        )
        .evidence_lines(bad.iter().take(1).map(Problem::describe))
        .next(both(
            "fix the samples, or omit --skip-bad-samples to see the problems",
            "请修正样本，或去掉 --skip-bad-samples 以查看问题",
        )));
    }
    let image_count = samples.iter().map(|s| s.images.len()).sum();
    Ok(SampleSet {
        samples,
        kept,
        images,
        sizes,
        problems: bad,
        image_count,
        files,
        losses,
        largest_image,
    })
}

/// Reads the samples in a rank, without the check that the supervisor has already made. With `--skip-bad-samples` the
/// check runs again, to skip the same samples.
pub(crate) fn load(
    config: &RunConfig,
    path: &Path,
    limit: Option<usize>,
    processor: &dyn Processor,
) -> Result<SampleSet, Failure> {
    if config.batch.skip_bad_samples {
        return check(config, path, limit, processor, &mut |_| ());
    }
    share_budget(config);
    let ReadSamples {
        samples,
        images,
        files,
    } = data::read(Reading {
        path,
        format: config.samples.data_format,
        images: config.image_dir(),
        exif: config.samples.exif_rotation,
        limit,
    })?;
    Ok(SampleSet {
        samples,
        kept: Vec::new(),
        images,
        sizes: Vec::new(),
        problems: Vec::new(),
        image_count: 0,
        files,
        losses: ImageLosses::default(),
        largest_image: None,
    })
}

/// Encodes the largest possible micro-batch: the samples with the most tokens plus image patches.
pub(crate) fn largest(
    set: &SampleSet,
    config: &RunConfig,
    processor: &dyn Processor,
) -> Result<Vec<EncodedSample>, Failure> {
    let options = encode_options(config);
    let (order, count) = (set.by_size(), config.batch.micro_batch);
    data::encode_in_order(
        &set.samples,
        &set.images,
        processor,
        &options,
        &order,
        count,
    )
}

/// Reads samples again that [`check`] has accepted, with the sizes that it found.
///
/// # Errors
/// As [`load`].
pub(crate) fn reload(
    config: &RunConfig,
    path: &Path,
    limit: Option<usize>,
    processor: &dyn Processor,
    sizes: &[SampleSize],
) -> Result<SampleSet, Failure> {
    let set = load(config, path, limit, processor)?;
    let sizes = sizes.to_vec();
    Ok(SampleSet { sizes, ..set })
}

/// Options of `config` that affect how a sample is converted to tokens: maximum length, slices, prompt template.
pub(crate) fn encode_options(config: &RunConfig) -> EncodeOptions {
    EncodeOptions {
        model_max_length: config.batch.model_max_length,
        max_slice_nums: Some(config.batch.max_slice_nums),
        image_max_pixels: config.batch.image_max_pixels,
        image_min_pixels: config.batch.image_min_pixels,
        prompt: config.samples.template.style(),
        train_on_turn_end: config.samples.train_on_turn_end,
        enable_thinking: None,
        text_without_cross: config.samples.text_without_cross,
    }
}

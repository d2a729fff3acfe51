//! Check of every sample before training.

use crate::config::{BatchConfig, RunConfig};
use crate::data::images::{self, ImageCheck, share_budget};
use crate::data::losses::ImageLosses;
use crate::data::problems::{self, Context, Problem};
use crate::data::{self, ReadSamples, Reading, SampleSet, Sampler, Taken};
use crate::error::{ErrorCode, Failure};
use crate::lang::{Text, both, text};
use models::Processor;
use models::data::{EncodeOptions, EncodedSample, RawSample, SampleSize};
use std::path::Path;

/// Reads and checks the samples of `path` that are `taken`. With `--skip-bad-samples`, unusable samples are left out, and
/// all images are decoded to find them. `show` gets lines of progress.
///
/// # Errors
/// The file cannot be read, a sample is unusable, or an image is too large for the memory. The failure lists unusable
/// samples.
pub(crate) fn check(
    config: &RunConfig,
    path: &Path,
    taken: Taken,
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
        limit: taken.limit(),
        held_out: taken.is_held_out(),
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
    } = data::read(reading, processor)?;
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
/// check runs again, to skip the same samples, and with `--tokens-per-batch` to know their lengths.
pub(crate) fn load(
    config: &RunConfig,
    path: &Path,
    taken: Taken,
    processor: &dyn Processor,
) -> Result<SampleSet, Failure> {
    if config.batch.skip_bad_samples || config.batch.tokens_per_batch.is_some() {
        return check(config, path, taken, processor, &mut |_| ());
    }
    share_budget(config);
    let ReadSamples {
        samples,
        images,
        files,
    } = data::read(
        Reading {
            path,
            format: config.samples.data_format,
            images: config.image_dir(),
            exif: config.samples.exif_rotation,
            limit: taken.limit(),
            held_out: taken.is_held_out(),
        },
        processor,
    )?;
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

/// Indices of the samples that the first update takes: the largest, if these come first.
pub(crate) fn first_samples(config: &RunConfig, set: &SampleSet) -> Vec<usize> {
    if !config.batch.worst_first {
        return Vec::new();
    }
    let mut first = set.by_size();
    if !set.mix().is_plain() {
        let plain = BatchConfig {
            tokens_per_batch: None,
            ..config.batch
        };
        let plain = RunConfig {
            batch: plain,
            ..config.clone()
        };
        let taken = Sampler::of(&plain, set, &[]).of_first_epoch();
        first.retain(|index| taken.contains(index));
    }
    first.truncate(config.global_batch());
    first
}

/// Encodes the largest possible micro-batch: the samples with the most tokens plus image patches. With a budget of tokens
/// it is the micro-batch with the most patches, filled up to the budget and supervised everywhere.
pub(crate) fn largest(
    set: &SampleSet,
    config: &RunConfig,
    processor: &dyn Processor,
) -> Result<Vec<EncodedSample>, Failure> {
    let options = encode_options(config);
    if let Some(most) = config.batch.tokens_per_batch {
        let longest = (0..set.sizes.len()).max_by_key(|i| set.sizes[*i].tokens);
        check_budget(
            most,
            longest.map(|i| (set.index_in_file(i), set.sizes[i].tokens)),
        )?;
        let sampler = Sampler::of(config, set, &first_samples(config, set));
        let patches =
            |batch: &Vec<usize>| batch.iter().map(|i| set.sizes[*i].patches).sum::<usize>();
        let batch = sampler.all_micro_batches().max_by_key(patches);
        let batch = batch.unwrap_or_default();
        let (samples, images) = (&set.samples, &set.images);
        let mut worst =
            data::encode_in_order(samples, images, processor, &options, &batch, batch.len())?;
        fill(&mut worst, most, config.batch.model_max_length);
        return Ok(worst);
    }
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

/// Adds samples of text, of at most `longest` tokens, up to `most` tokens together, and supervises every position.
pub(crate) fn fill(samples: &mut Vec<EncodedSample>, most: usize, longest: usize) {
    let tokens: usize = samples.iter().map(|sample| sample.input_ids.len()).sum();
    let mut missing = most.saturating_sub(tokens);
    while missing > 0 {
        let tokens = missing.min(longest);
        samples.push(EncodedSample {
            input_ids: vec![0; tokens],
            labels: vec![0; tokens],
            image_bounds: Vec::new(),
            slices: Vec::new(),
            untruncated_tokens: tokens,
        });
        missing -= tokens;
    }
    for label in samples.iter_mut().flat_map(|sample| &mut sample.labels) {
        *label = (*label).max(0);
    }
}

/// Fails if the longest sample alone, given by its index in the file and its tokens, has more than `most` tokens.
pub(crate) fn check_budget(most: usize, longest: Option<(usize, usize)>) -> Result<(), Failure> {
    let Some((index, tokens)) = longest.filter(|(_, tokens)| *tokens > most) else {
        return Ok(());
    };
    Err(Failure::new(
        ErrorCode::Samples,
        text!(
            "sample {index} has more tokens than --tokens-per-batch {most}",
            "样本 {index} 的 token 多于 --tokens-per-batch {most}"
        ),
        text!(
            "it has {tokens} tokens, and a sample is not divided",
            "它有 {tokens} 个 token，而样本不会被拆分"
        ),
    )
    .next(text!(
        "--tokens-per-batch {tokens}   (the longest sample needs it)",
        "--tokens-per-batch {tokens}   (最长的样本需要这么多)"
    ))
    .next(text!(
        "--model-max-length {most}   (cuts longer samples)",
        "--model-max-length {most}   (较长的样本会被截断)"
    )))
}

/// Reads samples again that [`check`] has accepted, with the sizes that it found.
///
/// # Errors
/// As [`load`].
pub(crate) fn reload(
    config: &RunConfig,
    path: &Path,
    taken: Taken,
    processor: &dyn Processor,
    sizes: &[SampleSize],
) -> Result<SampleSet, Failure> {
    let set = load(config, path, taken, processor)?;
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

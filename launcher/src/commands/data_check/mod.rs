//! `launcher data check`: checks a data file and reports how training would use it.

mod rendered;
mod report;
mod statistics;

use crate::lang::{Lang, Text, both, text};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use models::Processor;
use models::data::{EncodeOptions, IGNORED, RawSample, SampleTokens};
use models::image::{ImageFolder, ImageSource};
use rayon::prelude::*;

use crate::cli::{Args, DataCheckArgs, resolve};
use crate::config::RunConfig;
use crate::data::Until;
use crate::data::check::{check_budget, encode_options};
use crate::data::files::{DataFile, Places, mix_of};
use crate::data::images::{self, ImageCheck};
use crate::data::problems::{self, Context, Kind, Problem};
use crate::data::{Mix, ReadSamples, Reading, Sampler, SamplerSizes, read, verdicts};
use crate::error::failures::{check_directory, unusable};
use crate::error::{ErrorCode, Failure, output};
use crate::rank_env::{Env, Variables};
use report::{Answers, Images, Length, Rendered, Report, Sized};
use statistics::{Batches, Spread, balance};

/// Number of longest samples listed.
const LONGEST: usize = 5;

/// Checks a data file and prints a report on standard output. Exits with 0 if every sample can be used, else with 3.
///
/// # Errors
/// The command line lacks the file or the model (exit 2), or one of them cannot be read.
pub(crate) fn run(args: &DataCheckArgs, variables: &Variables) -> Result<ExitCode, Failure> {
    let config = configuration(args, variables)?;
    let file = config.data_file();
    let dir = config.model_dir();
    check_directory(text!("use {}", "使用 {}", dir.display()), &dir)?;
    let processor = models::open_processor(&dir).map_err(|error| {
        unusable(&dir, &error).next(both(
            "its weights are not needed here",
            "此处不需要它的权重",
        ))
    })?;
    let reading = Reading {
        path: &file,
        format: config.samples.data_format,
        images: config.image_dir(),
        exif: config.samples.exif_rotation,
        limit: args.limit,
        held_out: false,
    };
    let mut data = read(reading, &*processor)?;
    // If standard error is closed, nobody reads it.
    let mut progress = |line: Text| {
        let line = line.get(Lang::chosen());
        drop(writeln!(std::io::stderr(), " {line}"));
    };
    let mut images = ImageCheck {
        decode_all: true,
        ..ImageCheck::here(&mut progress)
    };
    (data.images, _) = images::check(&data.samples, &data.images, &file, &mut images)?;
    let mut report = check(&config, &file, &data, &*processor)?;
    if let Some(directory) = &args.output {
        std::fs::create_dir_all(directory).map_err(|error| {
            Failure::io(ErrorCode::Disk, both("make", "创建"), directory, &error)
        })?;
        problems::write(directory, &report.problems)?;
        report.written_to = Some(directory.clone());
    }
    print(&report, args.json == Some(true), variables)?;
    Ok(match report.problems.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::from(ErrorCode::Samples.status()),
    })
}

/// Configuration that training would have with the same flags, and the same variables about images.
fn configuration(args: &DataCheckArgs, variables: &Variables) -> Result<RunConfig, Failure> {
    let missing = |what: Text| {
        Failure::usage(
            text!(
                "`launcher data check` needs {what}",
                "`launcher data check` 需要 {what}"
            ),
            both(
                "lengths depend on the model's tokenizer and its rules for images",
                "长度取决于模型的分词器及其图片规则",
            ),
        )
        .next(both(
            "launcher data check samples.json --model ./MiniCPM-V-2_6",
            "launcher data check samples.json --model ./MiniCPM-V-2_6",
        ))
    };
    if args.limit == Some(0) {
        return Err(Failure::usage(
            both("--limit 0 selects no sample", "--limit 0 没有选择任何样本"),
            both("at least 1 sample is needed", "至少需要 1 个样本"),
        )
        .next(both(
            "omit --limit to check all samples",
            "请去掉 --limit 以检查所有样本",
        )));
    }
    if args.file.is_none() && args.dataset.is_none() {
        return Err(missing(both("a file", "一个文件").into()));
    }
    let training = Args {
        model: Some(
            args.model
                .clone()
                .ok_or_else(|| missing(Text::literal("--model")))?,
        ),
        tokenizer: args.tokenizer.clone(),
        data: args.file.clone(),
        output: Some(PathBuf::from(".")),
        data_format: args.data_format,
        template: args.template,
        train_on_turn_end: args.train_on_turn_end,
        text_without_cross: args.text_without_cross,
        image_dir: args.image_dir.clone(),
        dataset: args.dataset.clone(),
        dataset_dir: args.dataset_dir.clone(),
        exif_rotation: args.exif_rotation,
        model_max_length: args.model_max_length,
        max_slice_nums: args.max_slice_nums,
        image_max_pixels: args.image_max_pixels,
        image_min_pixels: args.image_min_pixels,
        nproc: args.nproc,
        per_device_train_batch_size: args.per_device_train_batch_size,
        tokens_per_batch: args.tokens_per_batch,
        gradient_accumulation_steps: args.gradient_accumulation_steps,
        seed: args.seed,
        ..Args::default()
    };
    let of_images = |name: &str| {
        let is_read = ["MAX_PIXELS", "MIN_PIXELS", "MAX_SLICE_NUMS"].contains(&name);
        let value = variables.get(name).filter(|_| is_read);
        value.map(ToOwned::to_owned)
    };
    Ok(resolve(&training, &Env::from_lookup(&of_images)?)?.config)
}

fn print(report: &Report, as_json: bool, variables: &Variables) -> Result<(), Failure> {
    let text = if as_json {
        let json = serde_json::to_string_pretty(report).map_err(|error| {
            Failure::new(
                ErrorCode::Disk,
                both("the report cannot be written", "无法写入报告"),
                Text::literal(&error),
            )
        })?;
        json + "\n"
    } else {
        let color = std::io::stdout().is_terminal() && variables.get("NO_COLOR").is_none();
        Lang::chosen().speak(|| report.to_text(color))
    };
    output::print(&text).map(drop)
}

/// Lengths of a usable sample.
struct Measured {
    index: usize,
    tokens: usize,
    image_tokens: usize,
    supervised: usize,
    cut: bool,
    answers: Answers,
}

fn check(
    config: &RunConfig,
    file: &Path,
    data: &ReadSamples,
    processor: &dyn Processor,
) -> Result<Report, Failure> {
    let ReadSamples {
        samples,
        images,
        files,
    } = data;
    let options = encode_options(config);
    let (verdicts, losses) = verdicts(files, samples, images, processor, &options);
    let problems: Vec<Problem> = verdicts
        .iter()
        .filter_map(|verdict| verdict.as_ref().err().cloned())
        .collect();
    let usable: Vec<usize> = (0..samples.len())
        .filter(|i| verdicts[*i].is_ok())
        .collect();
    let turn_end = processor.turn_end();
    let measured: Vec<Measured> = usable
        .par_iter()
        .filter_map(|index| {
            let tokens = processor.tokens(&samples[*index], images, &options).ok()?;
            Some(measure(*index, &samples[*index], &tokens, turn_end))
        })
        .collect();
    if let Some(most) = config.batch.tokens_per_batch {
        let longest = measured.iter().max_by_key(|m| m.tokens);
        check_budget(most, longest.map(|m| (m.index, m.tokens)))?;
    }
    let mix = mix_of(files, measured.iter().map(|m| m.index));
    let context = Context {
        path: file,
        model: &config.model_dir(),
        samples,
        images,
        processor,
        options: &options,
    };
    let with_images = samples.iter().filter(|s| !s.images.is_empty()).count();
    Ok(Report {
        file: file.to_owned(),
        files: files.clone(),
        samples: samples.len(),
        usable: usable.len(),
        turns: samples.iter().map(|s| s.conversations.len()).sum(),
        with_images,
        without_images: samples.len() - with_images,
        losses,
        images: image_sizes(samples, images, processor, &options),
        tokens: Spread::of(measured.iter().map(|m| m.tokens)),
        text_tokens: Spread::of(measured.iter().map(|m| m.tokens - m.image_tokens)),
        image_tokens: Spread::of(measured.iter().map(|m| m.image_tokens)),
        supervised_tokens: Spread::of(measured.iter().map(|m| m.supervised)),
        answers: Answers {
            count: measured.iter().map(|m| m.answers.count).sum(),
            with_end: measured.iter().map(|m| m.answers.with_end).sum(),
        },
        length: Length {
            model_max_length: options.model_max_length,
            cut_in_text: measured.iter().filter(|m| m.cut).count(),
            unusable: problems.iter().filter(|p| p.kind == Kind::TooLong).count(),
        },
        longest: longest(files, samples, &measured),
        duplicate_ids: duplicate_ids(samples),
        balance: (!measured.is_empty()).then(|| balance_of(config, &measured, mix.clone())),
        mix: mix.line(),
        rendered: rendered(samples, images, processor, &options, &usable),
        next: next(&context, &problems),
        problems,
        written_to: None,
    })
}

fn measure(index: usize, sample: &RawSample, tokens: &SampleTokens, turn_end: i32) -> Measured {
    let turns = sample.conversations.iter();
    // Supervised positions of one answer are consecutive; the next question separates them from the next answer.
    let runs = tokens.labels.split(|label| *label == IGNORED);
    Measured {
        index,
        tokens: tokens.input_ids.len(),
        image_tokens: tokens.image_bounds.iter().map(|(a, b)| b - a).sum(),
        supervised: tokens.labels.iter().filter(|l| **l != IGNORED).count(),
        cut: tokens.untruncated_tokens > tokens.input_ids.len(),
        answers: Answers {
            count: turns
                .filter(|turn| turn.role == "assistant" && !turn.unsupervised)
                .count(),
            with_end: runs.filter(|run| run.contains(&turn_end)).count(),
        },
    }
}

fn image_sizes(
    samples: &[RawSample],
    images: &ImageFolder,
    processor: &dyn Processor,
    options: &EncodeOptions,
) -> Images {
    let paths: Vec<&PathBuf> = samples
        .iter()
        .flat_map(|sample| sample.images.iter().map(|(_, path)| path))
        .collect();
    let sizes: Vec<(usize, usize)> = paths
        .par_iter()
        .filter_map(|path| images.dimensions(path).ok())
        .collect();
    let mut by_slices = BTreeMap::new();
    let mut tokens = BTreeSet::new();
    for size in &sizes {
        let plan = processor.image(*size, options);
        *by_slices.entry(plan.slices).or_insert(0) += 1;
        tokens.insert(plan.tokens_per_slice);
    }
    Images {
        count: sizes.len(),
        widths: Spread::of(sizes.iter().map(|(width, _)| *width)),
        heights: Spread::of(sizes.iter().map(|(_, height)| *height)),
        by_slices: by_slices.into_iter().collect(),
        tokens_per_slice: tokens.first().copied().zip(tokens.last().copied()),
    }
}

fn longest(files: &[DataFile], samples: &[RawSample], measured: &[Measured]) -> Vec<Sized> {
    let mut order: Vec<&Measured> = measured.iter().collect();
    order.sort_by_key(|m| std::cmp::Reverse(m.tokens));
    let places = Places::of(files);
    let named = order.into_iter().take(LONGEST);
    named
        .map(|m| Sized {
            index: m.index,
            line: places.at(m.index).1,
            id: samples[m.index].id.clone(),
            tokens: m.tokens,
            image_tokens: m.image_tokens,
        })
        .collect()
}

fn duplicate_ids(samples: &[RawSample]) -> Vec<(String, usize)> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for id in samples.iter().filter_map(|sample| sample.id.as_deref()) {
        *counts.entry(id).or_insert(0) += 1;
    }
    let repeated = counts.into_iter().filter(|(_, count)| *count > 1);
    repeated.map(|(id, count)| (id.to_owned(), count)).collect()
}

fn balance_of(config: &RunConfig, measured: &[Measured], mix: Mix) -> statistics::Balance {
    let (ranks, batch) = (config.data_ranks(), &config.batch);
    let sizes = SamplerSizes {
        samples: mix.per_epoch(),
        world_size: ranks,
        micro_batch: batch.micro_batch,
        accumulation_steps: batch.accumulation_steps,
    };
    let tokens: Vec<usize> = measured.iter().map(|m| m.tokens).collect();
    let mut sampler = Sampler::new(sizes, config.seed).mixing(mix);
    if let Some(most) = batch.tokens_per_batch {
        let epoch = Until::Samples(sizes.samples as u64);
        sampler = sampler.filling(most, tokens.clone(), epoch);
    }
    let batches = Batches {
        ranks,
        micro_batch: batch.micro_batch,
        tokens_per_batch: batch.tokens_per_batch,
        accumulation_steps: batch.accumulation_steps,
    };
    balance(&sampler, &tokens, batches)
}

/// The first usable sample with an image, else the first usable one.
fn rendered(
    samples: &[RawSample],
    images: &ImageFolder,
    processor: &dyn Processor,
    options: &EncodeOptions,
    usable: &[usize],
) -> Option<Rendered> {
    let with_image = usable.iter().find(|i| !samples[**i].images.is_empty());
    let index = *with_image.or(usable.first())?;
    let tokens = processor.tokens(&samples[index], images, options).ok()?;
    Some(Rendered {
        index,
        id: samples[index].id.clone(),
        pieces: rendered::pieces(processor, &tokens),
    })
}

fn next(context: &Context<'_>, problems: &[Problem]) -> Vec<Text> {
    if problems.is_empty() {
        return Vec::new();
    }
    let mut lines = problems::remedies(context, problems);
    lines.push(
        both(
            "fix these samples, or train with --skip-bad-samples true",
            "请修正这些样本，或用 --skip-bad-samples true 训练",
        )
        .into(),
    );
    lines
}

//! `launcher eval`: loss and answers of held-out samples.

use super::model::{OpenModel, path_text, positive, required};
use super::note;
use super::ranks::{Asking, Largest, Outcome};
use crate::cli::{Args, EvalArgs, refuse_weights};
use crate::data::answers::{Answer, Question};
use crate::data::check::encode_options;
use crate::data::images::ImageCheck;
use crate::data::{self, Reading, SampleSet, check, stream};
use crate::error::output::print;
use crate::error::{ErrorCode, Failure, failures};
use crate::lang::{Text, both, text};
use crate::plan::image_bytes;
use crate::rank_env::{RankEnv, Variables};
use crate::train::evaluate::{self, Asking as Asked};
use crate::train::replica::Replica;
use crate::units::seconds as format_seconds;
use engine::comm::Tag;
use models::data::EncodeOptions;
use models::places;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

const DEFAULT_BATCH: usize = 8;
const DEFAULT_LENGTH: usize = 2048;
const DEFAULT_SLICES: usize = 9;
/// Time between lines of progress.
const PROGRESS: Duration = Duration::from_secs(10);

/// Result of one sample, in the file of `--output`.
#[derive(Serialize, Deserialize)]
struct Row {
    #[serde(flatten)]
    answer: Answer,
    /// Sum of the losses of its supervised tokens.
    loss_sum: f64,
    supervised_tokens: usize,
}

/// Result of all samples.
#[derive(Serialize, Deserialize)]
struct Evaluated {
    rows: Vec<Row>,
    seconds: f64,
}

/// Evaluates the samples of `args` and prints the result as JSON.
///
/// # Errors
/// Invalid flags; a model, adapter, sample or image that cannot be used; an output file that cannot be written.
pub(crate) fn run(mut args: EvalArgs, asking: &mut Asking<'_>) -> Result<ExitCode, Failure> {
    if asking.is_first() {
        let cache = Variables::read().cache_dir();
        stream::store(&mut args.data, &mut args.image_dir, &cache)?;
    }
    let dir = required(args.model.as_ref(), "eval", "--model")?;
    let dir = &places::with_tokenizer(dir, args.tokenizer.as_deref());
    let data = required(args.data.as_ref(), "eval", "--data")?;
    refuse_weights(data)?;
    let batch = args.per_device_eval_batch_size.unwrap_or(DEFAULT_BATCH);
    let batch = positive(batch, "--per-device-eval-batch-size")?;
    let limit = args.limit.map(|n| positive(n, "--limit")).transpose()?;
    if let Some(count) = args.max_new_tokens {
        positive(count, "--max-new-tokens")?;
    }
    let slices = args.max_slice_nums.unwrap_or(DEFAULT_SLICES);
    if let Some(path) = &args.output {
        check_place(path, data)?;
    }
    let open = OpenModel::open(dir, args.adapter.as_deref(), args.precision)?;
    if let (true, Some(line)) = (asking.is_first(), open.unused_settings()) {
        note(line);
    }
    let more = Args {
        per_device_eval_batch_size: Some(batch),
        model_max_length: Some(args.model_max_length.unwrap_or(DEFAULT_LENGTH)),
        max_slice_nums: Some(positive(slices, "--max-slice-nums")?),
        skip_bad_samples: args.skip_bad_samples,
        data_format: args.data_format,
        template: args.template,
        train_on_turn_end: args.train_on_turn_end,
        text_without_cross: Some(true),
        exif_rotation: args.exif_rotation,
        ..Args::default()
    };
    let source = (data.clone(), args.image_dir.clone());
    let run = asking.plan(&open, &args.ranks, more, source)?;
    let options = EncodeOptions {
        enable_thinking: args.enable_thinking,
        ..encode_options(&run)
    };
    let reading = Reading {
        // Data that can be read only once was stored.
        path: &run.data_file(),
        format: run.samples.data_format,
        images: run.image_dir(),
        exif: run.samples.exif_rotation,
        limit,
        held_out: true,
    };
    let is_first = asking.is_first();
    let mut progress = |line: Text| {
        if is_first {
            note(line);
        }
    };
    let images = ImageCheck::here(&mut progress);
    let (processor, skip_bad) = (open.processor(), run.batch.skip_bad_samples);
    let set = check::check_samples(reading, &open.dir, processor, &options, skip_bad, images)?;
    set.lines().into_iter().for_each(&mut progress);
    let order = set.by_size();
    let longest = data::encode_in_order(&set.samples, &set.images, processor, &options, &order, 1)?;
    let questions = order.iter().take(batch).map(|i| {
        let sample = &set.samples[*i];
        let question = Question::new(processor, sample, &set.images, *i, &options)?;
        Ok(question.with_limit(args.max_new_tokens))
    });
    let questions: Vec<Question> = questions.collect::<Result<_, Failure>>()?;
    let largest = Largest {
        longest: &longest,
        prompts: questions.iter().map(Question::prompt).collect(),
        image_bytes: image_bytes(&set, None),
    };
    let outcome = asking.answer(&open, &run, &largest, &|replica, rank| {
        rows(replica, rank, &set, &options, args.max_new_tokens)
    })?;
    let evaluated = match outcome {
        Outcome::Found(value) => serde_json::from_value(value),
        Outcome::Rank(code) => return Ok(code),
    };
    let Evaluated { rows, seconds } = evaluated.map_err(|error| {
        let title = both("the answers cannot be read", "无法读取回答");
        Failure::new(ErrorCode::Collective, title, Text::literal(&error))
    })?;
    let mut result = summary(&rows, seconds);
    result["model"] = json!(path_text(&open.dir));
    result["adapter"] = json!(open.adapter_dir().map(path_text));
    result["data"] = json!(path_text(data));
    note(text!(
        "eval    {} samples in {}",
        "评估    {} 个样本，用时 {}",
        rows.len(),
        format_seconds(seconds)
    ));
    if let Some(path) = &args.output {
        write(path, &result, &rows)?;
    }
    print(&format!("{result:#}\n"))
}

fn summary(rows: &[Row], seconds: f64) -> Value {
    let tokens: usize = rows.iter().map(|row| row.supervised_tokens).sum();
    let loss: f64 = rows.iter().map(|row| row.loss_sum).sum();
    let exact = rows.iter().filter(|row| row.answer.exact).count();
    let count = rows.len() as f64;
    json!({
        "eval_loss": loss / tokens.max(1) as f64,
        "exact_match": exact as f64 / count.max(1.0),
        "eval_samples": rows.len(),
        "eval_supervised_tokens": tokens,
        "eval_runtime": seconds,
        "eval_samples_per_second": count / seconds.max(1e-9),
    })
}

/// Checks that a file can be written to `path`, before the work begins.
fn check_place(path: &Path, data: &Path) -> Result<(), Failure> {
    let real = |path: &Path| path.canonicalize().ok();
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty());
    let (file, place) = (real(path), real(parent.unwrap_or(Path::new("."))));
    let mut all = places::directories(data)
        .into_iter()
        .filter_map(|data| real(&data));
    if all.any(|data| [&file, &place].contains(&&Some(data.clone()))) {
        return Err(Failure::usage(
            text!(
                "--output {} is one of the files of --data",
                "--output {} 是 --data 的文件之一",
                path.display()
            ),
            both(
                "the result would replace samples or be read as samples",
                "结果会覆盖样本，或被当作样本读取",
            ),
        )
        .next(both(
            "give a file in another directory",
            "请指定另一个目录中的文件",
        )));
    }
    let directory = path.parent().filter(|p| !p.as_os_str().is_empty());
    if path.is_dir() || directory.is_some_and(|directory| !directory.is_dir()) {
        return Err(Failure::new(
            ErrorCode::Disk,
            text!("cannot write {}", "无法写入 {}", path.display()),
            both(
                "it is a directory, or its parent directory does not exist",
                "它是目录，或其上级目录不存在",
            ),
        )
        .next(both(
            "give a file in an existing directory",
            "请指定已有目录中的文件",
        )));
    }
    Ok(())
}

fn write(path: &Path, result: &Value, rows: &[Row]) -> Result<(), Failure> {
    let fail =
        |error: std::io::Error| Failure::io(ErrorCode::Disk, both("write", "写入"), path, &error);
    let mut whole = result.clone();
    whole["samples"] = serde_json::to_value(rows).map_err(|e| fail(e.into()))?;
    std::fs::write(path, format!("{whole:#}\n")).map_err(fail)
}

/// Loss and answer of every sample, in file order. Each rank has its share of the samples.
fn rows(
    replica: &Replica<'_>,
    rank: &RankEnv,
    set: &SampleSet,
    options: &EncodeOptions,
    max_new_tokens: Option<usize>,
) -> Result<Value, Failure> {
    let started = Instant::now();
    let losses = evaluate::losses(replica, set, options)?;
    let total = set.samples.len();
    let mut shown = Instant::now();
    let mut progress = |done: usize| {
        if rank.rank == 0 && shown.elapsed() >= PROGRESS {
            shown = Instant::now();
            note(text!(
                "eval    {done} of {total} samples",
                "评估    {done} / {total} 个样本"
            ));
        }
    };
    let asked = Asked {
        options,
        count: total,
        max_new_tokens,
    };
    let own = evaluate::answers(replica, set, &asked, &mut progress)?;
    let bytes = serde_json::to_vec(&own).unwrap_or_default();
    let all = replica
        .comm
        .all_gather_bytes(&bytes, Tag::new("eval-answers", 0))
        .map_err(|e| failures::comm(&e))?;
    let answers = all
        .iter()
        .filter_map(|bytes| serde_json::from_slice::<Vec<Answer>>(bytes).ok());
    let mut answers: Vec<Answer> = answers.flatten().collect();
    answers.sort_by_key(|answer| answer.index);
    // Pipeline stages have the same answers.
    answers.dedup_by_key(|answer| answer.index);
    let rows = answers.into_iter().map(|answer| {
        let (loss_sum, supervised) = losses[answer.index];
        Row {
            answer,
            loss_sum,
            supervised_tokens: supervised as usize,
        }
    });
    Ok(json!(Evaluated {
        rows: rows.collect(),
        seconds: started.elapsed().as_secs_f64(),
    }))
}

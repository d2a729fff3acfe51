//! `launcher eval`: loss and answers of held-out samples.

use super::model::{LoadedModel, OpenModel, path_text, positive, required};
use super::note;
use crate::cli::{EvalArgs, refuse_weights};
use crate::data::answers::{Answer, Question, sample_failure};
use crate::data::images::ImageCheck;
use crate::data::{Reading, SampleSet, check};
use crate::error::output::print;
use crate::error::{ErrorCode, Failure, failures};
use crate::lang::{Text, both, text};
use crate::model::not_finite::{first_not_finite, not_finite_loss};
use crate::units::seconds as format_seconds;
use models::autograd::Tape;
use models::data::EncodeOptions;
use models::generate::{GenerateOptions, Prompt, Sampling, cache_bytes, generate};
use models::places;
use models::{ModelError, SampleInput};
use serde::Serialize;
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
#[derive(Serialize)]
struct Row {
    #[serde(flatten)]
    answer: Answer,
    /// Sum of the losses of its supervised tokens.
    loss_sum: f64,
    supervised_tokens: usize,
}

/// Evaluates the samples of `args` and prints the result as JSON.
///
/// # Errors
/// Invalid flags; a model, adapter, sample or image that cannot be used; an output file that cannot be written.
pub(crate) fn run(args: &EvalArgs) -> Result<ExitCode, Failure> {
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
    let options = EncodeOptions {
        model_max_length: args.model_max_length.unwrap_or(DEFAULT_LENGTH),
        max_slice_nums: Some(positive(slices, "--max-slice-nums")?),
        prompt: args.template.unwrap_or_default().style(),
        enable_thinking: args.enable_thinking,
        train_on_turn_end: args.train_on_turn_end.unwrap_or(false),
        text_without_cross: true,
        ..EncodeOptions::default()
    };
    if let Some(path) = &args.output {
        check_place(path)?;
    }
    let open = OpenModel::open(dir, args.adapter.as_deref(), args.precision)?;
    let skip_bad = args.skip_bad_samples == Some(true);
    let reading = Reading {
        path: data,
        format: args.data_format.unwrap_or_default(),
        images: args.image_dir.as_deref(),
        exif: args.exif_rotation.unwrap_or_default(),
        limit,
    };
    let mut progress = |line: Text| note(line);
    let images = ImageCheck::here(&mut progress);
    let processor = &*open.processor;
    let set = check::check_samples(reading, &open.dir, processor, &options, skip_bad, images)?;
    for line in set.lines() {
        note(line);
    }
    let named = (path_text(&open.dir), open.adapter_dir().map(path_text));
    let loaded = open.load(0)?;
    note(&loaded.summary);
    let run = Evaluation {
        loaded: &loaded,
        set: &set,
        options: &options,
        max_new_tokens: args.max_new_tokens,
        batch,
    };
    let started = Instant::now();
    let rows = run.rows()?;
    let seconds = started.elapsed().as_secs_f64();
    let mut result = summary(&rows, seconds);
    result["model"] = json!(named.0);
    result["adapter"] = json!(named.1);
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
fn check_place(path: &Path) -> Result<(), Failure> {
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

struct Evaluation<'a> {
    loaded: &'a LoadedModel,
    set: &'a SampleSet,
    options: &'a EncodeOptions,
    max_new_tokens: Option<usize>,
    batch: usize,
}

impl Evaluation<'_> {
    /// Loss and answer of every sample, in file order.
    fn rows(&self) -> Result<Vec<Row>, Failure> {
        let total = self.set.samples.len();
        let mut rows: Vec<Row> = Vec::with_capacity(total);
        let mut shown = Instant::now();
        while rows.len() < total {
            let indices = rows.len()..total.min(rows.len() + self.batch);
            let losses = indices
                .clone()
                .map(|i| self.loss(i))
                .collect::<Result<Vec<_>, _>>()?;
            let answers = self.answers(indices)?;
            for (answer, (loss_sum, supervised_tokens)) in answers.into_iter().zip(losses) {
                rows.push(Row {
                    answer,
                    loss_sum,
                    supervised_tokens,
                });
            }
            if shown.elapsed() >= PROGRESS {
                shown = Instant::now();
                note(text!(
                    "eval    {} of {total} samples",
                    "评估    {} / {total} 个样本",
                    rows.len()
                ));
            }
        }
        Ok(rows)
    }

    /// Sum of the losses and number of supervised tokens of a sample. As during training, each sample is a pass of
    /// its own, so that the mean has the same bits.
    fn loss(&self, index: usize) -> Result<(f64, usize), Failure> {
        let LoadedModel {
            model,
            processor,
            access,
            ..
        } = self.loaded;
        let encoded = processor
            .encode(&self.set.samples[index], &self.set.images, self.options)
            .map_err(|e| sample_failure(index, &e))?;
        let run = || -> Result<_, ModelError> {
            let backend = engine::ParamAccess::backend(access);
            let batch = model.collate(&[SampleInput::from(&encoded)], &**backend)?;
            let tape = Tape::inference(access);
            let loss = model.forward(&tape, &batch)?;
            let sum = loss.sum()?;
            if sum.is_finite() {
                return Ok((sum, loss.supervised, None));
            }
            let first = first_not_finite(model.spec(), &|| None, &|observer| {
                let tape = Tape::inference(access).with_op_observer(observer);
                model.forward(&tape, &batch).map(drop)
            })?;
            Ok((sum, loss.supervised, Some(first)))
        };
        match run().map_err(|e| failures::model(both("evaluate", "评估"), &e))? {
            (sum, supervised, None) => Ok((sum, supervised)),
            (sum, _, Some(first)) => {
                Err(not_finite_loss(&self.set.samples[index], index, sum, first))
            }
        }
    }

    fn answers(&self, indices: std::ops::Range<usize>) -> Result<Vec<Answer>, Failure> {
        let (model, processor) = (&self.loaded.model, &self.loaded.processor);
        let ask = |i: usize| -> Result<Question, Failure> {
            let sample = &self.set.samples[i];
            let question = Question::new(&**processor, sample, &self.set.images, i, self.options)?;
            Ok(match self.max_new_tokens {
                Some(limit) => question.with_limit(limit),
                None => question,
            })
        };
        let questions = indices.map(ask).collect::<Result<Vec<_>, _>>()?;
        let prompts: Vec<Prompt<'_>> = questions.iter().map(Question::prompt).collect();
        self.check_disk_space(cache_bytes(model.cache_shape(), &prompts))?;
        let options = GenerateOptions {
            sampling: Sampling::GREEDY,
            stop_ids: processor.stop_ids(),
        };
        let tokens = generate(&**model, &self.loaded.access, &prompts, &options, &mut Ok)
            .map_err(|e| failures::model(both("generate answers", "生成回答"), &e))?;
        let pairs = questions.iter().zip(&tokens);
        pairs
            .map(|(q, tokens)| q.judge(&**processor, tokens))
            .collect()
    }

    /// Refuses a batch whose cache does not fit into memory, before the operating system kills the process.
    fn check_disk_space(&self, cache: u64) -> Result<(), Failure> {
        let free = crate::memory::host().free_bytes;
        if cache <= free {
            return Ok(());
        }
        Err(Failure::new(
            ErrorCode::HostMemory,
            both(
                "the KV cache of a batch of answers does not fit",
                "一批回答的 KV 缓存放不下",
            ),
            text!(
                "{} are needed, {} are available",
                "需要 {}，可用 {}",
                crate::units::bytes(cache),
                crate::units::bytes(free)
            ),
        )
        .next(both(
            "use a smaller --per-device-eval-batch-size or --max-new-tokens",
            "请减小 --per-device-eval-batch-size 或 --max-new-tokens",
        )))
    }
}

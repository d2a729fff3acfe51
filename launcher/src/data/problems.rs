//! Problems of samples that cannot be used, with enough detail to fix them.

use crate::lang::{Text, both, text};
use std::io::Write;
use std::path::{Component, Path, PathBuf};

use models::Processor;
use models::data::{EncodeOptions, RawSample, SampleError, data_files};
use models::image::{ImageFolder, is_inside};
use serde::Serialize;

use super::SampleSet;
use crate::error::{ErrorCode, Failure};
use crate::units::grouped;

/// File name of the list of problems.
pub(crate) const PROBLEMS_FILE: &str = "data_problems.jsonl";
/// Maximum samples listed in a report; the others are only counted.
const LISTED: usize = 5;
/// Most entries of a directory among which one with the images is looked for.
const SEARCHED: usize = 256;
/// Characters of text that a message shows around an image placeholder.
const EXCERPT: usize = 24;

/// Why a sample cannot be used, as a category.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Kind {
    /// Too long: truncation would remove its answers or part of an image.
    TooLong,
    /// The conversation has no answer.
    NoAnswer,
    /// The turns or roles do not form a conversation.
    Roles,
    /// The placeholders in the text do not match the list of images.
    Placeholders,
    /// An image is missing or cannot be read.
    #[serde(rename = "picture")]
    Image,
    /// The sample has no image, and the family needs one.
    NoImage,
    /// Any other problem.
    Other,
}

impl Kind {
    fn reason(self, options: &EncodeOptions) -> Text {
        match self {
            Self::TooLong => text!(
                "--model-max-length {} cuts off the answer, or cuts an image in two",
                "--model-max-length {} 截掉了回答，或把图片截成了两半",
                options.model_max_length
            ),
            Self::NoAnswer => both("no answer of the assistant", "没有 assistant 的回答").into(),
            Self::Roles => both(
                "the turns or roles do not form a conversation",
                "对话的轮次或角色不成对话",
            )
            .into(),
            Self::Placeholders => both(
                "the text and the list of images disagree",
                "文本与图片列表不一致",
            )
            .into(),
            Self::Image => both(
                "an image is missing or cannot be read",
                "图片缺失或无法读取",
            )
            .into(),
            Self::NoImage => both(
                "no image, which the model's cross attention needs",
                "没有图片，而模型的 cross attention 需要图片",
            )
            .into(),
            Self::Other => both("other reasons", "其他原因").into(),
        }
    }
}

/// Why one sample cannot be used. It is one row of `data_problems.jsonl`.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Problem {
    /// Index in the data files, from 0.
    pub(crate) index: usize,
    /// The data file, if the samples are from several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) file: Option<PathBuf>,
    /// Line in the data file on which the sample begins, from 1.
    pub(crate) line: Option<usize>,
    /// Id that the data file gives the sample, if any.
    pub(crate) id: Option<String>,
    /// Error code of the failure that this problem causes on its own.
    pub(crate) code: ErrorCode,
    /// Category of the problem.
    pub(crate) kind: Kind,
    /// Description of the problem in one line.
    #[serde(serialize_with = "Text::english")]
    pub(crate) problem: Text,
    /// Tokens of the whole sample, if they can be counted.
    pub(crate) tokens: Option<usize>,
}

impl Problem {
    /// Problem of sample `index` of the data file, whose encoding failed with `error`.
    pub(crate) fn new(index: usize, sample: &RawSample, error: &SampleError) -> Self {
        let (code, kind) = classify(error);
        let mut problem = crate::error::chain(error);
        if kind == Kind::Placeholders {
            let names_images = matches!(error, SampleError::UnknownPlaceholder { .. });
            problem += excerpt(sample, !names_images);
        }
        Self {
            index,
            file: None,
            line: None,
            id: sample.id.clone(),
            code,
            kind,
            problem,
            tokens: None,
        }
    }

    /// Problem of an image that cannot be used.
    pub(crate) fn image(index: usize, sample: &RawSample, problem: Text) -> Self {
        Self {
            index,
            file: None,
            line: None,
            id: sample.id.clone(),
            code: ErrorCode::DataFile,
            kind: Kind::Image,
            problem,
            tokens: None,
        }
    }

    /// For a sample that is too long: counts its tokens without truncation and describes them.
    pub(crate) fn measured(
        mut self,
        sample: &RawSample,
        images: &ImageFolder,
        processor: &dyn Processor,
        options: &EncodeOptions,
    ) -> Self {
        if self.kind != Kind::TooLong {
            return self;
        }
        let whole = EncodeOptions {
            model_max_length: usize::MAX,
            ..*options
        };
        if let Ok(size) = processor.measure(sample, images, &whole) {
            let tokens = size.untruncated_tokens;
            self.tokens = Some(tokens);
            let features = size.image_tokens / size.slices.max(1);
            let text = tokens.saturating_sub(size.image_tokens);
            self.problem = text!(
                "{} tokens, images {} x {features} + text {}; {}",
                "{} 个 token，图片 {} x {features} + 文本 {}；{}",
                grouped(tokens as u64),
                size.slices,
                grouped(text as u64),
                self.problem
            );
        }
        self
    }

    /// Text such as `line 18, sample 3 (id a): what is wrong`.
    pub(crate) fn describe(&self) -> Text {
        let file = self.file.as_ref();
        let file = file.map_or_else(String::new, |file| format!("{} ", file.display()));
        let line = self
            .line
            .map(|line| text!("line {line}, ", "第 {line} 行，"));
        let line = line.unwrap_or_default();
        let id = self.id.as_deref().unwrap_or("-");
        let (index, problem) = (self.index, &self.problem);
        text!(
            "{file}{line}sample {index} (id {id}): {problem}",
            "{file}{line}样本 {index}（id {id}）：{problem}"
        )
    }
}

/// Error code and category of the problem that `error` causes.
pub(crate) fn classify(error: &SampleError) -> (ErrorCode, Kind) {
    match error {
        SampleError::MorePlaceholdersThanImages { .. }
        | SampleError::UnknownPlaceholder { .. }
        | SampleError::UnusedImage { .. }
        | SampleError::LaterImage { .. }
        | SampleError::MisplacedImage { .. }
        | SampleError::TooManyImages { .. } => (ErrorCode::Placeholders, Kind::Placeholders),
        SampleError::Image { .. } | SampleError::AspectRatio { .. } => {
            (ErrorCode::DataFile, Kind::Image)
        }
        SampleError::NoSupervisedToken {
            tokens,
            kept,
            answer_start: Some(_),
        } if kept < tokens => (ErrorCode::Samples, Kind::TooLong),
        SampleError::UnpairedImageMarkers { tokens, kept, .. } if kept < tokens => {
            (ErrorCode::Samples, Kind::TooLong)
        }
        SampleError::NoSupervisedToken { .. }
        | SampleError::NoAssistantTurn { .. }
        | SampleError::NoSupervisedTurn { .. } => (ErrorCode::Samples, Kind::NoAnswer),
        SampleError::NoImage => (ErrorCode::Samples, Kind::NoImage),
        SampleError::TooFewTurns { .. }
        | SampleError::FirstRoleNotUser { .. }
        | SampleError::Metadata { .. }
        | SampleError::TurnOrder { .. }
        | SampleError::UnknownRole { .. } => (ErrorCode::Samples, Kind::Roles),
        _ => (ErrorCode::Samples, Kind::Other),
    }
}

/// Text around the first placeholder of an image and, with `with_names`, the names of the images.
fn excerpt(sample: &RawSample, with_names: bool) -> Text {
    let shown = sample
        .conversations
        .iter()
        .enumerate()
        .find_map(|(i, turn)| {
            let at = turn.content.find("<image")?;
            let before: Vec<char> = turn.content[..at].chars().rev().take(EXCERPT).collect();
            let before: String = before.into_iter().rev().collect();
            let after: String = turn.content[at..].chars().take(2 * EXCERPT).collect();
            let excerpt = format!("\"{before}{after}\"").replace('\n', " ");
            Some(text!(
                "; message {}: {excerpt}",
                "；第 {} 条消息：{excerpt}",
                i + 1
            ))
        });
    let names: Vec<&str> = sample.images.iter().map(|(name, _)| &**name).collect();
    let images = match names.as_slice() {
        [] => both("; no images are listed", "；图片列表为空").into(),
        names => text!("; images: {}", "；图片：{}", names.join(" ")),
    };
    let mut text = shown.unwrap_or_default();
    if with_names {
        text += images;
    }
    text
}

/// Data file, model and settings that a failure report needs besides the problems.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Context<'a> {
    /// Path of the data file (or data directory).
    pub(crate) path: &'a Path,
    /// Model directory, for the command that lists all problems.
    pub(crate) model: &'a Path,
    /// All samples that were read from the file, usable or not.
    pub(crate) samples: &'a [RawSample],
    /// Directory at which relative image paths of the samples start.
    pub(crate) images: &'a ImageFolder,
    /// Processor that converts samples to tokens.
    pub(crate) processor: &'a dyn Processor,
    /// Options with which the samples were encoded.
    pub(crate) options: &'a EncodeOptions,
}

/// Failure that refuses a file because of `problems`, which are sorted by index.
pub(crate) fn refusal(context: &Context<'_>, problems: &[Problem]) -> Failure {
    let mut kinds: Vec<(Kind, usize)> = Vec::new();
    for problem in problems {
        match kinds.iter_mut().find(|(kind, _)| *kind == problem.kind) {
            Some((_, count)) => *count += 1,
            None => kinds.push((problem.kind, 1)),
        }
    }
    kinds.sort_by_key(|(kind, count)| (std::cmp::Reverse(*count), *kind));
    let most = kinds.first().map(|(kind, _)| *kind);
    let code = problems
        .iter()
        .find(|problem| Some(problem.kind) == most)
        .map_or(ErrorCode::Samples, |problem| problem.code);
    let causes: Vec<Text> = kinds
        .iter()
        .map(|(kind, count)| {
            text!(
                "{} ({count})",
                "{}（{count} 个）",
                kind.reason(context.options)
            )
        })
        .collect();
    let mut failure = Failure::new(
        code,
        text!(
            "{} of {} samples in {} cannot be used",
            "{2} 的 {1} 个样本中有 {0} 个无法使用",
            problems.len(),
            context.samples.len(),
            context.path.display()
        ),
        Text::list(&causes),
    );
    for problem in problems.iter().take(LISTED) {
        failure = failure.evidence(problem.describe());
    }
    if problems.len() > LISTED {
        failure = failure.evidence(text!("and {} more", "另有 {} 个", problems.len() - LISTED));
    }
    for line in remedies(context, problems) {
        failure = failure.next(line);
    }
    failure
        .next(both(
            "fix these samples, or skip them with --skip-bad-samples true",
            "请修正这些样本，或用 --skip-bad-samples true 跳过它们",
        ))
        .next(text!(
            "for the whole list: launcher data check {} --model {} --output .",
            "查看完整列表：launcher data check {} --model {} --output .",
            context.path.display(),
            context.model.display()
        ))
}

/// Suggested settings with which the samples that are too long could be used, computed from their lengths.
pub(crate) fn remedies(context: &Context<'_>, problems: &[Problem]) -> Vec<Text> {
    let long: Vec<&Problem> = problems
        .iter()
        .filter(|problem| problem.kind == Kind::TooLong)
        .collect();
    let mut lines = Vec::new();
    if let Some((directory, image)) = image_directory(context, problems) {
        lines.push(text!(
            "--image-dir {}   ({} is there)",
            "--image-dir {}   ({} 在该目录中)",
            directory.display(),
            image.display()
        ));
    }
    if let Some((image, file)) = image_outside(context, problems) {
        lines.push(text!(
            "write {} instead of {}: relative paths do not leave the directory of images",
            "请写 {}，而不是 {}：相对路径不能离开图片目录",
            file.display(),
            image.display()
        ));
    }
    if problems.iter().any(|problem| problem.kind == Kind::NoImage) {
        let text = both(
            "--text-without-cross true skips the cross attention for samples without an image",
            "--text-without-cross true 会让没有图片的样本跳过 cross attention",
        );
        lines.push(text.into());
    }
    if let Some(longest) = long.iter().filter_map(|problem| problem.tokens).max() {
        let step = if longest < 1024 { 64 } else { 1024 };
        lines.push(text!(
            "--model-max-length {} is enough for all {} samples that are too long",
            "--model-max-length {} 足以容纳全部 {} 个过长的样本",
            longest.next_multiple_of(step),
            long.len()
        ));
    }
    if context.options.max_slice_nums != Some(1) {
        let one_slice = EncodeOptions {
            max_slice_nums: Some(1),
            ..*context.options
        };
        let usable: Vec<(usize, usize)> = long
            .iter()
            .filter_map(|problem| {
                let sample = context.samples.get(problem.index)?;
                let size = context
                    .processor
                    .measure(sample, context.images, &one_slice);
                Some((problem.index, size.ok()?.untruncated_tokens))
            })
            .collect();
        if let Some((index, tokens)) = usable.first() {
            lines.push(text!(
                "--max-slice-nums 1 makes {} of {} usable (sample {index} -> {} tokens)",
                "--max-slice-nums 1 可使 {1} 个样本中的 {0} 个可用（样本 {index} -> {2} 个 token）",
                usable.len(),
                long.len(),
                grouped(*tokens as u64)
            ));
        }
    }
    lines
}

/// Paths of the images of samples whose images cannot be read.
fn unread_images<'c>(
    context: &Context<'c>,
    problems: &[Problem],
) -> impl Iterator<Item = &'c Path> {
    let samples = context.samples;
    let images = problems
        .iter()
        .filter(|problem| problem.kind == Kind::Image)
        .filter_map(|problem| samples.get(problem.index))
        .flat_map(|sample| &sample.images);
    images.map(|(_, path)| path.as_path())
}

/// Whether a path goes up, which no directory of images allows.
fn goes_up(path: &Path) -> bool {
    path.is_relative() && path.components().any(|part| part == Component::ParentDir)
}

/// The directory of the first data file.
fn data_directory(context: &Context<'_>) -> Option<PathBuf> {
    let data = data_files(context.path).into_iter().next()?;
    Some(std::path::absolute(data).ok()?.parent()?.to_owned())
}

/// The first image whose path leaves the directory of images, and the file that it names beside the data.
fn image_outside<'c>(context: &Context<'c>, problems: &[Problem]) -> Option<(&'c Path, PathBuf)> {
    let path = unread_images(context, problems).find(|path| goes_up(path) && !is_inside(path))?;
    let beside = data_directory(context)?;
    let near = [beside, PathBuf::from(".")];
    let mut files = near
        .iter()
        .filter_map(|near| near.join(path).canonicalize().ok());
    Some((path, files.find(|file| file.is_file())?))
}

/// A directory near the data that has the first missing image, and its path in the sample.
fn image_directory<'c>(context: &Context<'c>, problems: &[Problem]) -> Option<(PathBuf, &'c Path)> {
    let missing = unread_images(context, problems).find(|path| {
        let file = context.images.file(path);
        let is_missing = file.is_none_or(|file| !file.is_file());
        path.is_relative() && !goes_up(path) && !is_inside(path) && is_missing
    })?;
    let beside = data_directory(context)?;
    let mut near = vec![PathBuf::from("."), beside.clone()];
    for directory in std::iter::once(&*beside).chain(beside.parent()) {
        let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
        let mut inner: Vec<PathBuf> = entries.take(SEARCHED).map(|entry| entry.path()).collect();
        inner.sort();
        near.extend(inner.into_iter().filter(|path| path.is_dir()));
    }
    let found = near.into_iter().find(|near| near.join(missing).is_file())?;
    let here = std::env::current_dir().unwrap_or_default();
    let found = match found.strip_prefix(&here) {
        Ok(inside) if !inside.as_os_str().is_empty() => inside.to_owned(),
        _ => found,
    };
    Some((found, missing))
}

/// Writes one row per problem to `data_problems.jsonl` in `directory`.
///
/// # Errors
/// When the file cannot be written (exit 16).
pub(crate) fn write(directory: &Path, problems: &[Problem]) -> Result<(), Failure> {
    let path = directory.join(PROBLEMS_FILE);
    let write = || -> std::io::Result<()> {
        let mut file = std::io::BufWriter::new(std::fs::File::create(&path)?);
        for problem in problems {
            serde_json::to_writer(&mut file, problem)?;
            file.write_all(b"\n")?;
        }
        file.flush()
    };
    write().map_err(|error| Failure::io(ErrorCode::Disk, both("write", "写入"), &path, &error))
}

impl SampleSet {
    /// Indices of the samples, in decreasing order of tokens plus patches.
    pub(crate) fn by_size(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.sizes.len()).collect();
        let weight = |i: usize| self.sizes[i].tokens + self.sizes[i].patches;
        order.sort_by_key(|i| std::cmp::Reverse(weight(*i)));
        order
    }
}

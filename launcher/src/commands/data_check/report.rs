//! Report of `launcher data check`, as JSON and as text.

use serde::Serialize;
use std::path::PathBuf;

use super::rendered::{self, Piece};
use super::statistics::{Balance, Spread};
use crate::data::files::DataFile;
use crate::data::losses::ImageLosses;
use crate::data::problems::{PROBLEMS_FILE, Problem};
use crate::lang::{Both, Text, both, text};
use crate::units::grouped;
use std::fmt::Display;

/// Maximum problems shown as text. The list of problems and the JSON report contain all.
const SHOWN: usize = 10;

/// Findings about a data file. The fields are the keys of the JSON report.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Report {
    pub(super) file: PathBuf,
    /// The files that were read, with their forms.
    pub(super) files: Vec<DataFile>,
    pub(super) samples: usize,
    pub(super) usable: usize,
    pub(super) turns: usize,
    #[serde(rename = "with_pictures")]
    pub(super) with_images: usize,
    #[serde(rename = "without_pictures")]
    pub(super) without_images: usize,
    #[serde(rename = "pictures")]
    pub(super) images: Images,
    /// How many samples an epoch takes of each file, if that is not each once.
    #[serde(skip)]
    pub(super) mix: Option<Text>,
    /// Images of which the model sees less than their files hold.
    #[serde(rename = "picture_losses")]
    pub(super) losses: ImageLosses,
    /// Tokens per usable sample, after truncation, image tokens included.
    pub(super) tokens: Spread,
    /// Text tokens per usable sample, including the marker tokens around images.
    pub(super) text_tokens: Spread,
    #[serde(rename = "picture_tokens")]
    pub(super) image_tokens: Spread,
    /// Supervised tokens per usable sample: positions on which the loss is computed.
    pub(super) supervised_tokens: Spread,
    pub(super) answers: Answers,
    pub(super) length: Length,
    pub(super) longest: Vec<Sized>,
    pub(super) duplicate_ids: Vec<(String, usize)>,
    pub(super) balance: Option<Balance>,
    pub(super) rendered: Option<Rendered>,
    pub(super) problems: Vec<Problem>,
    /// Advice on unusable samples, such as flags with which they could be used. Empty if all samples are usable.
    #[serde(serialize_with = "Text::english_list")]
    pub(super) next: Vec<Text>,
    /// Directory that the list of problems was written to.
    #[serde(skip)]
    pub(super) written_to: Option<PathBuf>,
}

/// Sizes and slices of all images of the data file that can be read.
#[derive(Debug, Clone, Default, Serialize)]
pub(super) struct Images {
    pub(super) count: usize,
    pub(super) widths: Spread,
    pub(super) heights: Spread,
    /// (Slices, number of images with that many slices), ascending.
    pub(super) by_slices: Vec<(usize, usize)>,
    /// Minimum and maximum tokens per slice, if the data has images.
    pub(super) tokens_per_slice: Option<(usize, usize)>,
}

/// Number of answers in usable samples, and how many of them teach the model to stop.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(super) struct Answers {
    pub(super) count: usize,
    /// Answers whose end-of-sequence token is supervised.
    pub(super) with_end: usize,
}

/// Effects of the maximum length on the samples.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(super) struct Length {
    pub(super) model_max_length: usize,
    /// Number of usable samples from which truncation to `model_max_length` removes text.
    pub(super) cut_in_text: usize,
    /// Number of samples that are unusable because truncation would remove their answers or part of an image.
    pub(super) unusable: usize,
}

/// Lengths in tokens of one of the longest samples, with its place in the data file.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Sized {
    pub(super) index: usize,
    pub(super) line: Option<usize>,
    pub(super) id: Option<String>,
    pub(super) tokens: usize,
    #[serde(rename = "picture_tokens")]
    pub(super) image_tokens: usize,
}

/// One sample of the data file as the model sees it: its token sequence, decoded in pieces.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Rendered {
    pub(super) index: usize,
    pub(super) id: Option<String>,
    pub(super) pieces: Vec<Piece>,
}

impl Report {
    /// Report as aligned text, in the language that is spoken. Supervised tokens are in color or in «…».
    pub(super) fn to_text(&self, color: bool) -> String {
        let mut lines = Vec::new();
        let mut add = |label: Both, text: &dyn Display| lines.push(format!(" {label:<8} {text}"));
        let number = |value: usize| grouped(value as u64);
        add(
            both("samples", "样本"),
            &text!(
                "{} in {} · {} turns · {} with images, {} without",
                "{1} 中 {0} 个 · {2} 轮对话 · {3} 个有图片，{4} 个没有",
                number(self.samples),
                self.file.display(),
                number(self.turns),
                number(self.with_images),
                number(self.without_images)
            ),
        );
        for (i, file) in self.files.iter().enumerate() {
            add(first(i, both("form", "格式")), &file.form());
        }
        let ignored = self.files.iter().filter_map(DataFile::without_effect);
        for (i, text) in ignored.enumerate() {
            add(first(i, both("keys", "键")), &text);
        }
        if let Some(line) = &self.mix {
            add(both("mix", "混合"), line);
        }
        let (words, images) = (both("text", "文本"), both("images", "图片"));
        add(both("tokens", "token"), &spread(&self.tokens));
        add(
            NONE,
            &format_args!("{words:<8} {}", spread(&self.text_tokens)),
        );
        add(
            NONE,
            &format_args!("{images:<8} {}", spread(&self.image_tokens)),
        );
        if self.images.count > 0 {
            self.add_images(&mut add);
        }
        for line in self.losses.lines() {
            add(NONE, &line);
        }
        let supervised = spread(&self.supervised_tokens);
        add(
            both("answers", "回答"),
            &text!("supervised {supervised}", "参与损失 {supervised}"),
        );
        let Answers { count, with_end } = self.answers;
        add(
            NONE,
            &text!(
                "end of sequence supervised in {} of {} answers{}",
                "{1} 个回答中有 {0} 个的结束 token 参与损失{2}",
                number(with_end),
                number(count),
                match self.length.cut_in_text {
                    _ if with_end >= count => NONE,
                    0 => both(
                        "; the others have no end in the loss, as published (GLM-4V: --train-on-turn-end true)",
                        "；其余的结束 token 不参与损失，与官方做法相同（GLM-4V：--train-on-turn-end true）",
                    ),
                    _ => both(
                        "; the limit cuts off the end of the others",
                        "；其余的结尾被长度上限截去",
                    ),
                }
            ),
        );
        add(
            both("length", "长度"),
            &text!(
                "--model-max-length {}: {} samples are truncated, {} cannot be used; images are never cut",
                "--model-max-length {}：{} 个样本被截断，{} 个无法使用；图片从不截断",
                self.length.model_max_length,
                number(self.length.cut_in_text),
                number(self.length.unusable)
            ),
        );
        for (i, sample) in self.longest.iter().enumerate() {
            let id = sample.id.as_deref().unwrap_or("-");
            let line = sample
                .line
                .map_or_else(Text::default, |l| text!("line {l}, ", "第 {l} 行，"));
            let text = text!(
                "{line}sample {} (id {id}): {} tokens, {} of images",
                "{line}样本 {}（id {id}）：{} 个 token，其中图片 {} 个",
                sample.index,
                number(sample.tokens),
                number(sample.image_tokens)
            );
            add(first(i, both("longest", "最长")), &text);
        }
        if !self.duplicate_ids.is_empty() {
            let shown: Vec<Text> = self
                .duplicate_ids
                .iter()
                .take(SHOWN)
                .map(|(id, count)| text!("{id} ({count} times)", "{id}（{count} 次）"))
                .collect();
            add(
                both("ids", "id"),
                &text!(
                    "{} are not unique: {}",
                    "{} 个不唯一：{}",
                    self.duplicate_ids.len(),
                    Text::list(&shown)
                ),
            );
        }
        if let Some(balance) = &self.balance {
            add(both("balance", "均衡"), &balance_line(balance));
        }
        if let Some(sample) = &self.rendered {
            let id = sample.id.as_deref().unwrap_or("-");
            let marks = match color {
                true => both("in color", "有颜色"),
                false => both("in «»", "在 «» 中"),
            };
            add(
                both("sample", "样本"),
                &text!(
                    "{} (id {id}), supervised tokens {marks}:",
                    "{}（id {id}），参与损失的 token {marks}：",
                    sample.index
                ),
            );
            for line in rendered::text(&sample.pieces, color).lines() {
                add(NONE, &format_args!("| {line}"));
            }
        }
        self.add_problems(&mut add);
        lines
            .iter()
            .map(|line| format!("{}\n", line.trim_end()))
            .collect()
    }

    fn add_images(&self, add: &mut impl FnMut(Both, &dyn Display)) {
        let Images {
            count,
            widths,
            heights,
            by_slices,
            tokens_per_slice,
        } = &self.images;
        add(
            both("images", "图片"),
            &text!(
                "{} · width {} to {} (median {}) · height {} to {} (median {})",
                "{} 张 · 宽 {} 到 {}（中位数 {}） · 高 {} 到 {}（中位数 {}）",
                grouped(*count as u64),
                widths.min,
                widths.max,
                widths.p50,
                heights.min,
                heights.max,
                heights.p50
            ),
        );
        let slices: Vec<Text> = by_slices
            .iter()
            .map(|(slices, count)| {
                let count = grouped(*count as u64);
                text!("{slices} ({count})", "{slices}（{count}）")
            })
            .collect();
        let slices = Text::list(&slices);
        add(
            NONE,
            &match tokens_per_slice {
                Some((least, most)) if least < most => text!(
                    "slices of {least} to {most} tokens (images): {slices}",
                    "切片数（图片数），每个切片 {least} 到 {most} 个 token：{slices}"
                ),
                Some((tokens, _)) => text!(
                    "slices of {tokens} tokens (images): {slices}",
                    "切片数（图片数），每个切片 {tokens} 个 token：{slices}"
                ),
                None => both("no image can be read", "没有可读的图片").into(),
            },
        );
    }

    fn add_problems(&self, add: &mut impl FnMut(Both, &dyn Display)) {
        for (i, problem) in self.problems.iter().take(SHOWN).enumerate() {
            add(first(i, both("problems", "问题")), &problem.describe());
        }
        if self.problems.len() > SHOWN {
            let more = self.problems.len() - SHOWN;
            add(NONE, &text!("and {more} more", "另有 {more} 个"));
        }
        if let Some(directory) = &self.written_to {
            let list = directory.join(PROBLEMS_FILE);
            let list = list.display();
            add(NONE, &text!("all in {list}", "全部列在 {list}"));
        }
        let bad = self.problems.len();
        add(
            both("verdict", "结论"),
            &if bad == 0 {
                both("all samples can be used", "所有样本都可以使用").into()
            } else {
                text!(
                    "{} of {} samples cannot be used",
                    "{1} 个样本中有 {0} 个无法使用",
                    grouped(bad as u64),
                    grouped(self.samples as u64)
                )
            },
        );
        for (i, next) in self.next.iter().enumerate() {
            add(first(i, both("next", "下一步")), next);
        }
    }
}

const NONE: Both = both("", "");

/// `label` on the first of several lines.
fn first(place: usize, label: Both) -> Both {
    if place == 0 { label } else { NONE }
}

fn spread(spread: &Spread) -> Text {
    let number = |value: usize| grouped(value as u64);
    text!(
        "min {} · mean {:.1} · p50 {} · p95 {} · max {}",
        "最小 {} · 平均 {:.1} · p50 {} · p95 {} · 最大 {}",
        number(spread.min),
        spread.mean,
        number(spread.p50),
        number(spread.p95),
        number(spread.max)
    )
}

fn balance_line(balance: &Balance) -> Text {
    let (batches, steps) = (&balance.batches, grouped(balance.steps_per_epoch));
    let micro_batch = match (batches.tokens_per_batch, balance.fill) {
        (Some(most), Some(fill)) => text!(
            "micro-batches of {most} tokens ({:.0} % filled)",
            "每个微批 {most} 个 token（填满 {:.0} %）",
            100.0 * fill
        ),
        _ => text!("micro-batch {}", "微批 {}", batches.micro_batch),
    };
    text!(
        "{} ranks x {micro_batch} x accumulation {}: {steps} steps per epoch; most loaded rank {:.2} x the mean, {:.2} x in the worst step ({})",
        "{} 个 rank x {micro_batch} x 累积 {}：每个 epoch {steps} 步；负载最大的 rank 为平均值的 {:.2} 倍，最差的一步为 {:.2} 倍（第 {} 步）",
        batches.ranks,
        batches.accumulation_steps,
        balance.mean_imbalance,
        balance.worst_imbalance,
        balance.worst_step
    )
}

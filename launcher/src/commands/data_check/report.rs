//! Report of `launcher data check`, as JSON and as text.

use serde::Serialize;
use std::path::PathBuf;

use super::rendered::{self, Piece};
use super::statistics::{Balance, Spread};
use crate::data::files::DataFile;
use crate::data::losses::ImageLosses;
use crate::data::problems::{PROBLEMS_FILE, Problem};
use crate::units::grouped;

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
    pub(super) mix: Option<crate::lang::Text>,
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
    pub(super) next: Vec<String>,
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
    /// Report as aligned text. Supervised tokens are in color or in «…».
    pub(super) fn to_text(&self, color: bool) -> String {
        let mut lines = Vec::new();
        let mut add = |label: &str, text: String| lines.push(format!(" {label:<8} {text}"));
        let number = |value: usize| grouped(value as u64);
        add(
            "samples",
            format!(
                "{} in {} · {} turns · {} with images, {} without",
                number(self.samples),
                self.file.display(),
                number(self.turns),
                number(self.with_images),
                number(self.without_images)
            ),
        );
        for (i, file) in self.files.iter().enumerate() {
            add(if i == 0 { "form" } else { "" }, file.form().to_string());
        }
        let ignored = self.files.iter().filter_map(DataFile::without_effect);
        for (i, text) in ignored.enumerate() {
            add(if i == 0 { "keys" } else { "" }, text.to_string());
        }
        if let Some(line) = &self.mix {
            add("mix", line.to_string());
        }
        add("tokens", spread(&self.tokens));
        add("", format!("text     {}", spread(&self.text_tokens)));
        add("", format!("images   {}", spread(&self.image_tokens)));
        if self.images.count > 0 {
            self.add_images(&mut add);
        }
        for line in self.losses.lines() {
            add("", line.to_string());
        }
        add(
            "answers",
            format!("supervised {}", spread(&self.supervised_tokens)),
        );
        let Answers { count, with_end } = self.answers;
        add(
            "",
            format!(
                "end of sequence supervised in {} of {} answers{}",
                number(with_end),
                number(count),
                match self.length.cut_in_text {
                    _ if with_end >= count => "",
                    0 =>
                        "; the others have no end in the loss, as published (GLM-4V: --train-on-turn-end true)",
                    _ => "; the limit cuts off the end of the others",
                }
            ),
        );
        add(
            "length",
            format!(
                "--model-max-length {}: {} samples are truncated, {} cannot be used; images are never cut",
                self.length.model_max_length,
                number(self.length.cut_in_text),
                number(self.length.unusable)
            ),
        );
        for (i, sample) in self.longest.iter().enumerate() {
            let id = sample.id.as_deref().unwrap_or("-");
            let line = sample
                .line
                .map_or_else(String::new, |l| format!("line {l}, "));
            let text = format!(
                "{line}sample {} (id {id}): {} tokens, {} of images",
                sample.index,
                number(sample.tokens),
                number(sample.image_tokens)
            );
            add(if i == 0 { "longest" } else { "" }, text);
        }
        if !self.duplicate_ids.is_empty() {
            let shown: Vec<String> = self
                .duplicate_ids
                .iter()
                .take(SHOWN)
                .map(|(id, count)| format!("{id} ({count} times)"))
                .collect();
            add(
                "ids",
                format!(
                    "{} are not unique: {}",
                    self.duplicate_ids.len(),
                    shown.join(", ")
                ),
            );
        }
        if let Some(balance) = &self.balance {
            add(
                "balance",
                format!(
                    "{} ranks x micro-batch {} x accumulation {}: {} steps per epoch; most loaded rank {:.2} x the mean, {:.2} x in the worst step ({})",
                    balance.ranks,
                    balance.micro_batch,
                    balance.accumulation_steps,
                    grouped(balance.steps_per_epoch),
                    balance.mean_imbalance,
                    balance.worst_imbalance,
                    balance.worst_step
                ),
            );
        }
        if let Some(sample) = &self.rendered {
            let id = sample.id.as_deref().unwrap_or("-");
            let marks = if color { "in color" } else { "in «»" };
            add(
                "sample",
                format!("{} (id {id}), supervised tokens {marks}:", sample.index),
            );
            for line in rendered::text(&sample.pieces, color).lines() {
                add("", format!("| {line}"));
            }
        }
        self.add_problems(&mut add);
        lines
            .iter()
            .map(|line| format!("{}\n", line.trim_end()))
            .collect()
    }

    fn add_images(&self, add: &mut impl FnMut(&str, String)) {
        let Images {
            count,
            widths,
            heights,
            by_slices,
            tokens_per_slice,
        } = &self.images;
        add(
            "images",
            format!(
                "{} · width {} to {} (median {}) · height {} to {} (median {})",
                grouped(*count as u64),
                widths.min,
                widths.max,
                widths.p50,
                heights.min,
                heights.max,
                heights.p50
            ),
        );
        let slices: Vec<String> = by_slices
            .iter()
            .map(|(slices, count)| format!("{slices} ({})", grouped(*count as u64)))
            .collect();
        add(
            "",
            match tokens_per_slice {
                Some((least, most)) if least < most => format!(
                    "slices of {least} to {most} tokens (images): {}",
                    slices.join(", ")
                ),
                Some((tokens, _)) => {
                    format!("slices of {tokens} tokens (images): {}", slices.join(", "))
                }
                None => "no image can be read".to_owned(),
            },
        );
    }

    fn add_problems(&self, add: &mut impl FnMut(&str, String)) {
        for (i, problem) in self.problems.iter().take(SHOWN).enumerate() {
            add(
                if i == 0 { "problems" } else { "" },
                problem.describe().to_string(),
            );
        }
        if self.problems.len() > SHOWN {
            add("", format!("and {} more", self.problems.len() - SHOWN));
        }
        if let Some(directory) = &self.written_to {
            add(
                "",
                format!("all in {}", directory.join(PROBLEMS_FILE).display()),
            );
        }
        let bad = self.problems.len();
        add(
            "verdict",
            if bad == 0 {
                "all samples can be used".to_owned()
            } else {
                format!(
                    "{} of {} samples cannot be used",
                    grouped(bad as u64),
                    grouped(self.samples as u64)
                )
            },
        );
        for (i, next) in self.next.iter().enumerate() {
            add(if i == 0 { "next" } else { "" }, next.clone());
        }
    }
}

fn spread(spread: &Spread) -> String {
    let number = |value: usize| grouped(value as u64);
    format!(
        "min {} · mean {:.1} · p50 {} · p95 {} · max {}",
        number(spread.min),
        spread.mean,
        number(spread.p50),
        number(spread.p95),
        number(spread.max)
    )
}

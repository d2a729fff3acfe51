//! Sample rules: a raw sample to token ids, labels and pixels.
//!
//! A row is the begin token, placeholders of the image's features, the prompt, the answer and the end token. Prompt and
//! answer are tokenized separately. Only the last answer is supervised. Labels are **already shifted**.

use super::processor::CogProcessor;
use super::prompt::Turns;
use crate::data::conversation::{
    Abilities, check_abilities, check_metadata, check_vocabulary, image_pixels, image_size,
    plain_text, question, shifted,
};
use crate::data::{
    EncodeOptions, EncodedPrompt, IGNORED, ImagePlan, PlaceholderStyle, PlannedSample,
    PromptSource, PromptStyle, RawSample, SampleError, SampleTokens, Slice,
};
use crate::image::{ImageSource, RgbImage, resize};
use crate::processor::Processor;
use crate::text::Tokenizer;
use std::ops::Range;

/// Number of tokens that the training scripts keep free for the answer after the context.
const ANSWER_ROOM: usize = 10;
/// Tokens by which the training scripts cut a row below its limit, before the end token; an image counts as one.
const CUT_ROOM: usize = 5;

/// The text of a sample: its turns, and the answer to train on.
struct Text {
    turns: Turns,
    answer: Option<String>,
}

impl CogProcessor {
    fn style(&self, options: &EncodeOptions) -> PromptStyle {
        options.prompt.unwrap_or(PromptStyle {
            template: self.config.template,
            source: PromptSource::Hub,
        })
    }

    /// Rounds, question and answer; `asks` leaves the last answer out.
    fn text(&self, sample: &RawSample, asks: bool) -> Result<Text, SampleError> {
        let turns = &sample.conversations;
        let needed = if asks { 1 } else { 2 };
        let answered = sample.answer().is_some();
        let given = if asks {
            question(sample).len()
        } else {
            turns.len()
        };
        if given < needed {
            return Err(SampleError::TooFewTurns {
                turns: given,
                needed,
            });
        }
        for (turn, (message, expected)) in turns
            .iter()
            .zip(["user", "assistant"].iter().cycle())
            .enumerate()
        {
            let role = message.role.clone();
            match &*role {
                role if role == *expected => {}
                _ if turn == 0 => return Err(SampleError::FirstRoleNotUser { role }),
                "user" | "assistant" => return Err(SampleError::TurnOrder { turn, role }),
                _ => return Err(SampleError::UnknownRole { turn, role }),
            }
        }
        if !asks && !answered {
            return Err(SampleError::TurnOrder {
                turn: turns.len() - 1,
                role: "user".to_owned(),
            });
        }
        self.check_markers(sample)?;
        check_metadata(turns)?;
        if !asks && turns.last().is_some_and(|turn| turn.unsupervised) {
            return Err(SampleError::NoSupervisedTurn { answers: 1 });
        }
        let plain = |i: usize| {
            let text = plain(&turns[i].content, sample);
            plain_text(&text, &self.control).into_owned()
        };
        let last = (turns.len() - 1) / 2;
        Ok(Text {
            turns: Turns {
                history: (0..last)
                    .map(|r| (plain(2 * r), plain(2 * r + 1)))
                    .collect(),
                query: plain(2 * last),
            },
            answer: answered.then(|| plain(2 * last + 1)),
        })
    }

    /// Checks markers: an image precedes the whole conversation, so one marker may be anywhere in the first question.
    fn check_markers(&self, sample: &RawSample) -> Result<(), SampleError> {
        let can = Abilities {
            first_turn_only: true,
            ..Abilities::default()
        };
        check_abilities(sample, can)?;
        if sample.images.len() > 1 {
            return Err(SampleError::TooManyImages {
                images: sample.images.len(),
                limit: 1,
            });
        }
        let markers = markers(sample);
        let count = |text: &str| {
            markers
                .iter()
                .map(|m| text.matches(*m).count())
                .sum::<usize>()
        };
        let placeholders = sample.conversations.iter().map(|turn| count(&turn.content));
        let (placeholders, images) = (placeholders.sum(), sample.images.len());
        if placeholders > images {
            return Err(SampleError::MorePlaceholdersThanImages {
                placeholders,
                images,
            });
        }
        Ok(())
    }

    /// The begin token, the image's placeholders and the prompt.
    fn context(
        &self,
        text: &Text,
        images: usize,
        style: PromptStyle,
    ) -> Result<(Vec<i32>, Vec<(usize, usize)>), SampleError> {
        let mut ids = vec![self.config.bos];
        let mut bounds = Vec::new();
        if images > 0 {
            ids.resize(1 + self.places(), self.config.pad);
            bounds.push((1, ids.len()));
        }
        ids.extend(self.tokenize(&text.turns.render(self.config.edition, style))?);
        Ok((ids, bounds))
    }

    /// Number of tokens that an image takes in the prompt: its features and a learned row before and after them.
    fn places(&self) -> usize {
        self.config.features() + 2
    }

    fn training_tokens(
        &self,
        sample: &RawSample,
        options: &EncodeOptions,
    ) -> Result<SampleTokens, SampleError> {
        let needs_image = self.config.cross.is_some() && !options.text_without_cross;
        if needs_image && sample.images.is_empty() {
            return Err(SampleError::NoImage);
        }
        let text = self.text(sample, false)?;
        let style = self.style(options);
        let (mut input_ids, image_bounds) = self.context(&text, sample.images.len(), style)?;
        let context = input_ids.len();
        input_ids.extend(self.tokenize(text.answer.as_deref().unwrap_or_default())?);
        let untruncated = input_ids.len() + 1;
        let limit = options.model_max_length;
        match style.source {
            PromptSource::Hub => {
                input_ids.push(self.config.eos);
                input_ids.truncate(limit);
            }
            PromptSource::Sat => {
                let room = limit.saturating_sub(ANSWER_ROOM);
                if context > room {
                    return Err(SampleError::ContextTooLong {
                        tokens: context,
                        limit: room,
                    });
                }
                // The scripts count an image as one token while they cut, and take its features off the limit.
                let expanded = image_bounds.len();
                let features = expanded * self.config.features();
                let cut =
                    limit.saturating_sub(features + CUT_ROOM) + expanded * (self.places() - 1);
                input_ids.truncate(cut);
                input_ids.push(self.config.eos);
            }
        }
        let kept = input_ids.len();
        if kept <= context {
            return Err(SampleError::NoSupervisedToken {
                tokens: untruncated,
                kept,
                answer_start: Some(context),
            });
        }
        let mut own = input_ids.clone();
        own[..context].fill(IGNORED);
        Ok(SampleTokens {
            slices: image_bounds.len() * self.config.slices_per_image(),
            labels: shifted(&own),
            input_ids,
            image_bounds,
            untruncated_tokens: untruncated,
        })
    }

    fn tokenize(&self, text: &str) -> Result<Vec<i32>, SampleError> {
        let ids = self.tokenizer.encode(text)?;
        check_vocabulary(&ids, self.config.language.vocab_size)?;
        Ok(ids)
    }

    /// Decodes the sample's image: one slice per tower.
    fn slices(
        &self,
        sample: &RawSample,
        images: &dyn ImageSource,
    ) -> Result<Vec<Slice>, SampleError> {
        let mut slices = Vec::new();
        for image in &sample.images {
            let image = image_pixels(images, image)?;
            let sides = self.sides();
            slices.extend(sides.map(|(size, patch)| scaled(&image, size, patch)));
        }
        Ok(slices)
    }

    /// Side of the image and of its patches in pixels, for each tower.
    fn sides(&self) -> impl Iterator<Item = (usize, usize)> {
        let (vision, cross) = (&self.config.vision, self.config.cross.as_ref());
        let cross = cross.map(|cross| (cross.image_size, cross.patch_size));
        std::iter::once((vision.image_size, vision.patch_size)).chain(cross)
    }

    fn check_headers(
        &self,
        sample: &RawSample,
        images: &dyn ImageSource,
    ) -> Result<(), SampleError> {
        let mut sizes = sample.images.iter().map(|image| image_size(images, image));
        sizes.try_for_each(|size| size.map(drop))
    }
}

impl Processor for CogProcessor {
    fn plan<'a>(
        &'a self,
        sample: &'a RawSample,
        images: &'a dyn ImageSource,
        options: &EncodeOptions,
    ) -> Result<PlannedSample<'a>, SampleError> {
        let tokens = self.training_tokens(sample, options)?;
        self.check_headers(sample, images)?;
        let patches = self.sides().map(|(size, patch)| (size / patch).pow(2));
        Ok(PlannedSample {
            patches: tokens.image_bounds.len() * patches.sum::<usize>(),
            tokens,
            cut: Box::new(move || self.slices(sample, images)),
        })
    }

    fn encode_prompt(
        &self,
        sample: &RawSample,
        images: &dyn ImageSource,
        options: &EncodeOptions,
        _: PlaceholderStyle,
    ) -> Result<EncodedPrompt, SampleError> {
        let text = self.text(sample, true)?;
        let count = sample.images.len();
        let (input_ids, image_bounds) = self.context(&text, count, self.style(options))?;
        Ok(EncodedPrompt {
            input_ids,
            image_bounds,
            slices: self.slices(sample, images)?,
        })
    }

    fn render(
        &self,
        sample: &RawSample,
        images: &dyn ImageSource,
        options: &EncodeOptions,
    ) -> Result<String, SampleError> {
        let text = self.text(sample, false)?;
        self.check_headers(sample, images)?;
        let mut rendered = text.turns.render(self.config.edition, self.style(options));
        rendered.extend(text.answer);
        Ok(rendered)
    }

    fn image(&self, _: (usize, usize), _: &EncodeOptions) -> ImagePlan {
        let slices = self.config.slices_per_image();
        ImagePlan {
            slices,
            // One range of tokens, however many towers see the image.
            tokens_per_slice: self.places().div_ceil(slices),
        }
    }

    fn images(&self, tokens: &SampleTokens) -> Vec<(Range<usize>, usize)> {
        let slices = self.config.slices_per_image();
        let bounds = tokens.image_bounds.iter();
        bounds.map(|(start, end)| (*start..*end, slices)).collect()
    }

    fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    fn turn_end(&self) -> i32 {
        self.config.eos
    }

    fn stop_ids(&self) -> Vec<i32> {
        self.stop_ids.clone()
    }
}

/// The image resized to a square, whatever its aspect ratio.
fn scaled(image: &RgbImage, size: usize, patch: usize) -> Slice {
    Slice::cut(&resize(image, size, size), (0, 0), (size, size), patch)
}

/// Markers of images in the text.
fn markers(sample: &RawSample) -> Vec<&str> {
    let names = sample.images.iter().map(|(name, _)| name.as_str());
    let mut markers: Vec<&str> = names.chain([crate::data::SINGLE_IMAGE]).collect();
    markers.dedup();
    markers
}

/// `content` without markers of images and the line break next to each.
fn plain(content: &str, sample: &RawSample) -> String {
    let mut text = content.to_owned();
    for marker in markers(sample) {
        for set_off in [
            format!("{marker}\n"),
            format!("\n{marker}"),
            marker.to_owned(),
        ] {
            text = text.replace(&set_off, "");
        }
    }
    text
}

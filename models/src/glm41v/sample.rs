//! Sample rules: a raw sample to token ids, labels, places of images and patches.
//!
//! Text: `[gMASK]<sop>`, then `<|role|>`, the metadata, a line break and the content of every turn; after the last answer
//! `<|endoftext|>`. An image replaces each `<image>` in the user's text: unnamed ones in the order of the sample, named ones
//! (`<image_01>`) by name. A single image that the text never names comes before all text.
//!
//! The loss covers the line break and the text of every answer, and `<|endoftext|>` after it. At the end of the sample it
//! is a token; elsewhere it is the label of the next role's token.

use std::ops::Range;

use super::config::MERGE;
use super::images::{Images, Part, may_show};
use super::processor::{Glm41vProcessor, marker};
use super::resize::{ImageLimits, smart_resize};
use crate::data::conversation::{
    Roles, check_roles, check_turns, check_vocabulary, image_error, plain_text, question, shifted,
    supervised,
};
use crate::data::{
    EncodeOptions, EncodedPrompt, EncodedSample, IGNORED, ImagePlan, PlaceholderStyle, RawSample,
    SampleError, SampleSize, SampleTokens, Slice,
};
use crate::image::{ImageSource, resize};
use crate::processor::Processor;
use crate::text::{Message, Tokenizer};

/// Size (width, height) of a resized image, in pixels.
type Plan = (usize, usize);

/// A part of the conversation.
struct Piece {
    text: String,
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Given,
    /// Not supervised, but the label of its first token is an answer's end.
    BehindAnswer,
    Supervised,
    /// Features of the image with this number.
    Image(usize),
}

/// A conversation as tokens.
#[derive(Default)]
struct Tokens {
    input_ids: Vec<i32>,
    /// Label of each token itself, before the shift.
    own_labels: Vec<i32>,
    /// Token range of each image's features, without markers.
    bounds: Vec<(usize, usize)>,
    /// Images in the order of the text.
    order: Vec<usize>,
}

/// Tokens after truncation.
struct Training {
    input_ids: Vec<i32>,
    labels: Vec<i32>,
    bounds: Vec<(usize, usize)>,
    order: Vec<usize>,
    untruncated: usize,
}

impl Processor for Glm41vProcessor {
    fn encode(
        &self,
        sample: &RawSample,
        images: &dyn ImageSource,
        options: &EncodeOptions,
    ) -> Result<EncodedSample, SampleError> {
        check_turns(&sample.conversations, Roles::SystemAndTools)?;
        let (plans, slices) = self.cut(sample, images, options)?;
        let tokens = self.training(sample, &plans, options)?;
        Ok(EncodedSample {
            slices: in_order(slices, &tokens.order),
            input_ids: tokens.input_ids,
            labels: tokens.labels,
            image_bounds: tokens.bounds,
            untruncated_tokens: tokens.untruncated,
        })
    }

    fn measure(
        &self,
        sample: &RawSample,
        images: &dyn ImageSource,
        options: &EncodeOptions,
    ) -> Result<SampleSize, SampleError> {
        check_turns(&sample.conversations, Roles::SystemAndTools)?;
        let plans = self.plan_all(sample, images, options)?;
        let tokens = self.training(sample, &plans, options)?;
        let image_tokens = tokens.bounds.iter().map(|(start, end)| end - start).sum();
        Ok(SampleSize {
            tokens: tokens.input_ids.len(),
            untruncated_tokens: tokens.untruncated,
            image_tokens,
            supervised: supervised(&tokens.labels),
            patches: image_tokens * MERGE * MERGE,
            slices: tokens.bounds.len(),
        })
    }

    fn tokens(
        &self,
        sample: &RawSample,
        images: &dyn ImageSource,
        options: &EncodeOptions,
    ) -> Result<SampleTokens, SampleError> {
        check_turns(&sample.conversations, Roles::SystemAndTools)?;
        let plans = self.plan_all(sample, images, options)?;
        let tokens = self.training(sample, &plans, options)?;
        Ok(SampleTokens {
            slices: tokens.bounds.len(),
            input_ids: tokens.input_ids,
            labels: tokens.labels,
            image_bounds: tokens.bounds,
            untruncated_tokens: tokens.untruncated,
        })
    }

    fn encode_prompt(
        &self,
        sample: &RawSample,
        images: &dyn ImageSource,
        options: &EncodeOptions,
        _: PlaceholderStyle,
    ) -> Result<EncodedPrompt, SampleError> {
        let turns = question(sample);
        check_roles(turns, 1, Roles::SystemAndTools)?;
        let (plans, slices) = self.cut(sample, images, options)?;
        let mut pieces = self.pieces(sample, turns, &plans)?;
        pieces.push(Piece::given(format!("{}\n", marker::ASSISTANT)));
        let tokens = self.tokenize(&pieces, &plans)?;
        Ok(EncodedPrompt {
            input_ids: tokens.input_ids,
            image_bounds: tokens.bounds,
            slices: in_order(slices, &tokens.order),
        })
    }

    fn render(
        &self,
        sample: &RawSample,
        images: &dyn ImageSource,
        options: &EncodeOptions,
    ) -> Result<String, SampleError> {
        check_turns(&sample.conversations, Roles::SystemAndTools)?;
        let plans = self.plan_all(sample, images, options)?;
        let pieces = self.pieces(sample, &sample.conversations, &plans)?;
        Ok(pieces.into_iter().map(|piece| piece.text).collect())
    }

    fn image(&self, size: (usize, usize), options: &EncodeOptions) -> ImagePlan {
        let plan = smart_resize(size, &self.limits(options));
        ImagePlan {
            slices: 1,
            tokens_per_slice: plan.map_or(0, |plan| self.features(plan)),
        }
    }

    fn images(&self, tokens: &SampleTokens) -> Vec<(Range<usize>, usize)> {
        let bounds = tokens.image_bounds.iter();
        bounds.map(|(start, end)| (start - 1..end + 1, 1)).collect()
    }

    fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    fn turn_end(&self) -> i32 {
        self.ids.end
    }

    fn stop_ids(&self) -> Vec<i32> {
        self.stop_ids.clone()
    }
}

impl Piece {
    fn given(text: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            kind: Kind::Given,
        }
    }
}

impl Glm41vProcessor {
    /// Number of features of an image of the size `plan`.
    fn features(&self, (width, height): Plan) -> usize {
        let block = self.config.limits.block;
        (width / block) * (height / block)
    }

    /// The model directory's limits, narrowed by those of the run.
    fn limits(&self, options: &EncodeOptions) -> ImageLimits {
        let own = self.config.limits;
        let most = options
            .image_max_pixels
            .map(|area| area.saturating_mul(own.frames));
        let least = options
            .image_min_pixels
            .map(|area| area.saturating_mul(own.frames));
        let max_pixels = own.max_pixels.min(most.unwrap_or(usize::MAX));
        ImageLimits {
            max_pixels,
            min_pixels: own.min_pixels.max(least.unwrap_or(0)).min(max_pixels),
            ..own
        }
    }

    fn plan(
        &self,
        name: &str,
        (width, height): (usize, usize),
        options: &EncodeOptions,
    ) -> Result<Plan, SampleError> {
        smart_resize((width, height), &self.limits(options)).ok_or_else(|| {
            SampleError::AspectRatio {
                name: name.to_owned(),
                width,
                height,
            }
        })
    }

    /// Plans every image from the headers of the files.
    fn plan_all(
        &self,
        sample: &RawSample,
        images: &dyn ImageSource,
        options: &EncodeOptions,
    ) -> Result<Vec<Plan>, SampleError> {
        let named = sample.images.iter();
        named
            .map(|(name, path)| {
                let size = images.dimensions(path);
                let size = size.map_err(|error| image_error(name, path, error))?;
                self.plan(name, size, options)
            })
            .collect()
    }

    /// Decodes and cuts the images one after the other, so that one is in memory at a time.
    fn cut(
        &self,
        sample: &RawSample,
        images: &dyn ImageSource,
        options: &EncodeOptions,
    ) -> Result<(Vec<Plan>, Vec<Slice>), SampleError> {
        let named = sample.images.iter();
        named
            .map(|(name, path)| {
                let image = images.load(path);
                let image = image.map_err(|error| image_error(name, path, error))?;
                let plan = self.plan(name, (image.width(), image.height()), options)?;
                let image = resize(&image, plan.0, plan.1);
                Ok((
                    plan,
                    Slice::cut(&image, (0, 0), plan, self.config.patch_size),
                ))
            })
            .collect()
    }

    fn training(
        &self,
        sample: &RawSample,
        plans: &[Plan],
        options: &EncodeOptions,
    ) -> Result<Training, SampleError> {
        let pieces = self.pieces(sample, &sample.conversations, plans)?;
        let mut tokens = self.tokenize(&pieces, plans)?;
        let untruncated = tokens.input_ids.len();
        let answer_start = tokens.own_labels.iter().position(|label| *label != IGNORED);
        let kept = untruncated.min(options.model_max_length);
        // Markers stand before and behind the features.
        let starts = tokens.bounds.iter().filter(|(s, _)| *s <= kept).count();
        let ends = tokens.bounds.iter().filter(|(_, e)| *e < kept).count();
        if starts != ends {
            return Err(SampleError::UnpairedImageMarkers {
                starts,
                ends,
                tokens: untruncated,
                kept,
            });
        }
        tokens.input_ids.truncate(kept);
        tokens.own_labels.truncate(kept);
        tokens.bounds.truncate(ends);
        tokens.order.truncate(ends);
        let labels = shifted(&tokens.own_labels);
        if supervised(&labels) == 0 {
            return Err(SampleError::NoSupervisedToken {
                tokens: untruncated,
                kept,
                answer_start,
            });
        }
        Ok(Training {
            input_ids: tokens.input_ids,
            labels,
            bounds: tokens.bounds,
            order: tokens.order,
            untruncated,
        })
    }

    /// Pieces of `turns`, which are all or the first turns of `sample`.
    fn pieces(
        &self,
        sample: &RawSample,
        turns: &[Message],
        plans: &[Plan],
    ) -> Result<Vec<Piece>, SampleError> {
        let mut images = Images::new(sample, turns)?;
        let mut pieces = vec![Piece::given(marker::PREFIX)];
        let mut answered = false;
        for turn in turns {
            let role = format!("<|{}|>", turn.role);
            self.tokenizer.id(&role)?;
            pieces.push(Piece {
                text: role,
                kind: match answered {
                    true => Kind::BehindAnswer,
                    false => Kind::Given,
                },
            });
            answered = turn.role == "assistant" && !turn.unsupervised;
            let content = plain_text(&turn.content, &self.control);
            let metadata = plain_text(&turn.metadata, &self.control);
            if !may_show(turn) {
                pieces.push(Piece {
                    text: format!("{metadata}\n{content}"),
                    kind: match answered {
                        true => Kind::Supervised,
                        false => Kind::Given,
                    },
                });
                continue;
            }
            let mut text = format!("{metadata}\n");
            for part in images.parts(&content)? {
                match part {
                    Part::Text(part) => text.push_str(part),
                    Part::Image(i) => {
                        pieces.push(Piece::given(std::mem::take(&mut text)));
                        pieces.push(Piece {
                            text: image_text(self.features(plans[i])),
                            kind: Kind::Image(i),
                        });
                    }
                }
            }
            pieces.push(Piece::given(text));
        }
        images.finish()?;
        if turns.last().is_some_and(|turn| turn.role == "assistant") {
            pieces.push(Piece {
                text: marker::END.to_owned(),
                kind: match answered {
                    true => Kind::Supervised,
                    false => Kind::Given,
                },
            });
        }
        Ok(pieces)
    }

    fn tokenize(&self, pieces: &[Piece], plans: &[Plan]) -> Result<Tokens, SampleError> {
        let mut tokens = Tokens::default();
        let mut stray = 0;
        for piece in pieces {
            let start = tokens.input_ids.len();
            let ids = match piece.kind {
                Kind::Image(i) => {
                    let features = self.features(plans[i]);
                    tokens.bounds.push((start + 1, start + 1 + features));
                    tokens.order.push(i);
                    let mut ids = vec![self.ids.image; features + 2];
                    ids[0] = self.ids.image_start;
                    ids[features + 1] = self.ids.image_end;
                    ids
                }
                _ => {
                    let ids = self.tokenizer.encode(&piece.text)?;
                    stray += ids.iter().filter(|id| **id == self.ids.image).count();
                    ids
                }
            };
            let own = tokens.own_labels.len();
            match piece.kind {
                Kind::Supervised => tokens.own_labels.extend(&ids),
                _ => tokens.own_labels.resize(own + ids.len(), IGNORED),
            }
            if let (Kind::BehindAnswer, Some(label)) = (piece.kind, tokens.own_labels.get_mut(own))
            {
                *label = self.ids.end;
            }
            tokens.input_ids.extend(ids);
        }
        check_vocabulary(&tokens.input_ids, self.vocab_size)?;
        if stray > 0 {
            return Err(SampleError::MorePlaceholdersThanImages {
                placeholders: tokens.bounds.len() + stray,
                images: tokens.bounds.len(),
            });
        }
        Ok(tokens)
    }
}

fn image_text(features: usize) -> String {
    let (start, end) = (marker::IMAGE_START, marker::IMAGE_END);
    format!("{start}{}{end}", marker::IMAGE.repeat(features))
}

fn in_order(slices: Vec<Slice>, order: &[usize]) -> Vec<Slice> {
    let mut slices: Vec<Option<Slice>> = slices.into_iter().map(Some).collect();
    let taken = order.iter().map(|&i| slices[i].take());
    taken.map(|s| s.expect("a picture stands once")).collect()
}

//! Sample rules: a raw sample to token ids, labels, the place of the image and its patches.
//!
//! Tokens: `[gMASK] <sop>`, then `<|role|>`, the metadata, a line break and the content of every turn, at last one
//! `<|user|>`. Roles are system, user, assistant and observation. Content is text: a marker spelled out in it is no
//! marker. The image precedes the content of the user's first turn; an `<image>` in that content is removed. A sample
//! without an image gets a black one. In samples of CogAgent the last question may hold the image; it still stands in
//! the first.
//!
//! The loss covers every token of an answer, including its role token. [`EncodeOptions::train_on_turn_end`] adds the role
//! token after the answer.

use std::borrow::Cow;
use std::path::PathBuf;

use super::processor::{Glm4vProcessor, marker};
use crate::data::conversation::{
    Abilities, Roles, Written, check_abilities, check_roles, check_turns, check_vocabulary,
    first_question, image_pixels, image_size, question,
};
use crate::data::{
    EncodeOptions, EncodedPrompt, ImagePlan, PlaceholderStyle, PlannedSample, RawSample,
    SINGLE_IMAGE, SampleError, Slice,
};
use crate::image::{ImageSource, RgbImage, resize};
use crate::processor::Processor;
use crate::text::{Message, Tokenizer, TokenizerError};

impl Processor for Glm4vProcessor {
    fn plan<'a>(
        &'a self,
        sample: &'a RawSample,
        images: &'a dyn ImageSource,
        options: &EncodeOptions,
    ) -> Result<PlannedSample<'a>, SampleError> {
        check_turns(&sample.conversations, Roles::SystemAndTools)?;
        check_abilities(sample, Abilities::default())?;
        if let Some(image) = self.only_image(sample)? {
            image_size(images, image)?;
        }
        let mut tokens = self.tokenize(sample, &sample.conversations, true, options)?;
        let ended = sample.conversations.last().is_some_and(is_supervised);
        tokens.push(&[self.ids.user], options.train_on_turn_end && ended);
        let untruncated = tokens.input_ids.len();
        let kept = untruncated.min(options.model_max_length);
        if let Some((start, _)) = tokens.bounds.iter().find(|(_, end)| *end > kept) {
            return Err(SampleError::UnpairedImageMarkers {
                starts: usize::from(*start < kept),
                ends: 0,
                tokens: untruncated,
                kept,
            });
        }
        let images_kept = tokens.bounds.len();
        Ok(PlannedSample {
            tokens: tokens.cut(kept, images_kept)?,
            patches: self.side() * self.side(),
            cut: Box::new(move || Ok(vec![self.slice(sample, images)?])),
        })
    }

    /// With [`PlaceholderStyle::Inference`] a sample without an image gets none.
    fn encode_prompt(
        &self,
        sample: &RawSample,
        images: &dyn ImageSource,
        options: &EncodeOptions,
        style: PlaceholderStyle,
    ) -> Result<EncodedPrompt, SampleError> {
        let turns = question(sample);
        check_roles(turns, 1, Roles::SystemAndTools)?;
        check_abilities(sample, Abilities::default())?;
        let own = self.only_image(sample)?.is_some();
        let image = own || style == PlaceholderStyle::Training;
        let mut tokens = self.tokenize(sample, turns, image, options)?;
        tokens.push(&[self.ids.assistant], false);
        let slices = match image {
            true => vec![self.slice(sample, images)?],
            false => Vec::new(),
        };
        Ok(EncodedPrompt {
            input_ids: tokens.input_ids,
            image_bounds: tokens.bounds,
            slices,
        })
    }

    fn render(
        &self,
        sample: &RawSample,
        _: &dyn ImageSource,
        _: &EncodeOptions,
    ) -> Result<String, SampleError> {
        check_turns(&sample.conversations, Roles::SystemAndTools)?;
        self.only_image(sample)?;
        let mut text = marker::PREFIX.concat();
        let first = first_question(&sample.conversations);
        let marked = self.marked(sample, &sample.conversations)?;
        for (i, turn) in sample.conversations.iter().enumerate() {
            text.push_str(&format!("<|{}|>{}\n", turn.role, turn.metadata));
            if i == first {
                text.extend([marker::IMAGE_START, marker::IMAGE, marker::IMAGE_END]);
            }
            text.push_str(&content(sample, i == marked, turn));
        }
        text.push_str(marker::USER);
        Ok(text)
    }

    fn image(&self, _: (usize, usize), _: &EncodeOptions) -> ImagePlan {
        ImagePlan {
            slices: 1,
            tokens_per_slice: self.features + 2,
        }
    }

    fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    fn turn_end(&self) -> i32 {
        self.ids.user
    }

    fn stop_ids(&self) -> Vec<i32> {
        self.stop_ids.clone()
    }

    /// An answer begins with the line break after its role token, which is not part of its text.
    fn decode(&self, ids: &[i32]) -> Result<String, TokenizerError> {
        let text = self.tokenizer.decode(ids)?;
        Ok(match text.strip_prefix('\n') {
            Some(text) => text.to_owned(),
            None => text,
        })
    }
}

impl Glm4vProcessor {
    /// Patches per side of an image.
    fn side(&self) -> usize {
        self.image_size / self.patch_size
    }

    /// The image of a sample, which has one at most.
    fn only_image<'s>(
        &self,
        sample: &'s RawSample,
    ) -> Result<Option<&'s (String, PathBuf)>, SampleError> {
        match &sample.images[..] {
            [] => Ok(None),
            [one] => Ok(Some(one)),
            more => Err(SampleError::TooManyImages {
                images: more.len(),
                limit: 1,
            }),
        }
    }

    /// The image resized to a square; black without one.
    fn slice(&self, sample: &RawSample, images: &dyn ImageSource) -> Result<Slice, SampleError> {
        let side = self.image_size;
        let image = match self.only_image(sample)? {
            Some(image) => {
                let image = image_pixels(images, image)?;
                resize(&image, side, side)
            }
            None => RgbImage::new(side, side, vec![0; side * side * 3]),
        };
        Ok(Slice::cut(&image, (0, 0), (side, side), self.patch_size))
    }

    /// Tokens of `turns`, which are all or the first turns of `sample`; `image` includes the image.
    fn tokenize(
        &self,
        sample: &RawSample,
        turns: &[Message],
        image: bool,
        options: &EncodeOptions,
    ) -> Result<Written, SampleError> {
        let ids = &self.ids;
        let mut tokens = Written::default();
        tokens.push(&ids.prefix, false);
        let mut answered = false;
        let first = first_question(turns);
        let marked = self.marked(sample, turns)?;
        for (i, turn) in turns.iter().enumerate() {
            let answer = is_supervised(turn);
            let role = match turn.role.as_str() {
                "assistant" => ids.assistant,
                "user" => ids.user,
                role => self.tokenizer.id(&format!("<|{role}|>"))?,
            };
            tokens.push(&[role], answer || (answered && options.train_on_turn_end));
            // Apart from the content, so that no token spans the line break.
            let line = format!("{}\n", turn.metadata);
            tokens.push(&self.tokenizer.encode_plain(&line)?, answer);
            if i == first && image {
                let start = tokens.input_ids.len();
                tokens.push(&[ids.image_start], false);
                tokens.push(&vec![ids.image; self.features], false);
                tokens.push(&[ids.image_end], false);
                tokens.bounds.push((start, tokens.input_ids.len()));
            }
            let text = content(sample, i == marked, turn);
            tokens.push(&self.tokenizer.encode_plain(&text)?, answer);
            answered = answer;
        }
        check_vocabulary(&tokens.input_ids, self.vocab_size)?;
        Ok(tokens)
    }

    /// The turn that may hold the marker of the sample's image: the user's first, or for CogAgent the last question if
    /// it begins with the marker.
    ///
    /// # Errors
    /// The marker stands twice, or in another turn.
    fn marked(&self, sample: &RawSample, turns: &[Message]) -> Result<usize, SampleError> {
        let first = first_question(turns);
        let [(name, _)] = &sample.images[..] else {
            return Ok(first);
        };
        let count = |turn: &Message| {
            let named = if name == SINGLE_IMAGE {
                0
            } else {
                turn.content.matches(name).count()
            };
            named + turn.content.matches(SINGLE_IMAGE).count()
        };
        let placeholders: usize = turns.iter().map(count).sum();
        if placeholders > 1 {
            let images = 1;
            return Err(SampleError::MorePlaceholdersThanImages {
                placeholders,
                images,
            });
        }
        let last = turns.iter().rposition(|turn| turn.role == "user");
        let is_in_front = |turn: usize| {
            let text = turns[turn].content.trim_start();
            text.starts_with(name) || text.starts_with(SINGLE_IMAGE)
        };
        match turns.iter().position(|turn| count(turn) > 0) {
            None => Ok(first),
            Some(turn) if turn == first => Ok(first),
            Some(turn) if self.later_image && Some(turn) == last && is_in_front(turn) => Ok(turn),
            Some(turn) => Err(SampleError::LaterImage { turn }),
        }
    }
}

/// Whether the loss covers a turn.
fn is_supervised(turn: &Message) -> bool {
    turn.role == "assistant" && !turn.unsupervised
}

/// The content of a turn; the `marked` one is without the marker of the image.
fn content<'t>(sample: &RawSample, marked: bool, turn: &'t Message) -> Cow<'t, str> {
    let name = match &sample.images[..] {
        [(name, _)] if marked => name,
        _ => return Cow::Borrowed(&turn.content),
    };
    let names = [name.as_str(), SINGLE_IMAGE];
    let found = names
        .into_iter()
        .find_map(|name| turn.content.split_once(name));
    match found {
        Some((before, behind)) => {
            let behind = behind.strip_prefix('\n').unwrap_or(behind);
            Cow::Owned(format!("{before}{behind}"))
        }
        None => Cow::Borrowed(&turn.content),
    }
}

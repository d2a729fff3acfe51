//! Sample rules: a raw sample to token ids, labels, places of images and patches.
//!
//! Text: `[gMASK]<sop>`, then `<|role|>`, the metadata, a line break and the content of every turn; after the last answer
//! `<|endoftext|>`. An image replaces each `<image>` in the user's text: unnamed ones in the order of the sample, named ones
//! (`<image_01>`) by name. A single image that the text never names comes before all text.
//!
//! The loss covers the line break and the text of every answer, and `<|endoftext|>` after it. At the end of the sample it
//! is a token; elsewhere it is the label of the next role's token.
//!
//! Both write videos as steps of two frames with their times (`videos`). GLM-4.6V-Flash writes answers with their thoughts
//! (`thinking`), and results of tools between marks of their own.

use std::ops::Range;
use std::path::PathBuf;

use super::config::MERGE;
use super::images::{Images, Part, may_show};
use super::processor::{Glm41vProcessor, marker};
use super::resize::{ImageLimits, smart_resize};
use super::thinking::{self, Answer};
use super::videos::{frame_size, step_seconds, time_text};
use crate::data::conversation::{
    Abilities, Roles, Written, check_abilities, check_metadata, check_roles, check_turns,
    check_vocabulary, image_pixels, image_size, plain_text, question, thinking_switch,
};
use crate::data::{
    EncodeOptions, EncodedPrompt, ImagePlan, PlaceholderStyle, PlannedSample, RawSample,
    SampleError, SampleTokens, Slice,
};
use crate::image::{ImageSource, resize};
use crate::processor::Processor;
use crate::text::{Message, Tokenizer};

/// Size (width, height) of a resized image, in pixels.
type Plan = (usize, usize);

/// What the tower sees of a sample.
#[derive(Default)]
struct Shown {
    /// Size of each input of the tower: of all stills, then of the steps of all videos.
    plans: Vec<Plan>,
    /// Seconds to each step of each video.
    videos: Vec<Vec<f64>>,
    /// Number of stills.
    stills: usize,
}

impl Shown {
    /// Inputs of the tower that the steps of `video` are.
    fn steps(&self, video: usize) -> Range<usize> {
        let before: usize = self.videos[..video].iter().map(Vec::len).sum();
        let first = self.stills + before;
        first..first + self.videos[video].len()
    }
}

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
    /// Features of the tower's input with this number.
    Image(usize),
}

impl Processor for Glm41vProcessor {
    fn plan<'a>(
        &'a self,
        sample: &'a RawSample,
        images: &'a dyn ImageSource,
        options: &EncodeOptions,
    ) -> Result<PlannedSample<'a>, SampleError> {
        let shown = self.checked(sample, images, options)?;
        let (tokens, order) = self.training(sample, &shown, options)?;
        let features = tokens.image_bounds.iter().map(|(start, end)| end - start);
        Ok(PlannedSample {
            patches: features.sum::<usize>() * MERGE * MERGE,
            tokens,
            cut: Box::new(move || Ok(in_order(self.cut(sample, images, &shown)?, &order))),
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
        self.check(sample)?;
        let shown = self.plan_all(sample, images, options)?;
        let slices = self.cut(sample, images, &shown)?;
        let mut pieces = self.pieces(sample, turns, &shown, options)?;
        let opening = match thinking_switch(sample, options, self.thinks) {
            Some(false) => thinking::NO_THOUGHT,
            _ => "\n",
        };
        pieces.push(Piece::given(format!("{}{opening}", marker::ASSISTANT)));
        let (tokens, order) = self.tokenize(&pieces, &shown.plans)?;
        Ok(EncodedPrompt {
            input_ids: tokens.input_ids,
            image_bounds: tokens.bounds,
            slices: in_order(slices, &order),
        })
    }

    fn render(
        &self,
        sample: &RawSample,
        images: &dyn ImageSource,
        options: &EncodeOptions,
    ) -> Result<String, SampleError> {
        let shown = self.checked(sample, images, options)?;
        let pieces = self.pieces(sample, &sample.conversations, &shown, options)?;
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

    fn reads_thoughts(&self) -> bool {
        self.thinks
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

    /// Fails if the sample asks for something that the model's template does not write.
    fn check(&self, sample: &RawSample) -> Result<(), SampleError> {
        let can = Abilities {
            videos: self.video_limits.is_some(),
            thinking: self.thinks,
            first_turn_only: false,
        };
        check_abilities(sample, can)?;
        match self.thinks {
            true => check_metadata(&sample.conversations),
            false => Ok(()),
        }
    }

    /// Checks a sample to train on and plans its images.
    fn checked(
        &self,
        sample: &RawSample,
        images: &dyn ImageSource,
        options: &EncodeOptions,
    ) -> Result<Shown, SampleError> {
        check_turns(&sample.conversations, Roles::SystemAndTools)?;
        self.check(sample)?;
        self.plan_all(sample, images, options)
    }

    /// Plans every image and video from the headers of the files.
    fn plan_all(
        &self,
        sample: &RawSample,
        images: &dyn ImageSource,
        options: &EncodeOptions,
    ) -> Result<Shown, SampleError> {
        let size = |image: &_| image_size(images, image);
        let stills = sample.stills();
        let plan = |image: &(String, PathBuf)| self.plan(&image.0, size(image)?, options);
        let plans: Result<Vec<Plan>, SampleError> = stills.iter().map(plan).collect();
        let mut shown = Shown {
            plans: plans?,
            videos: Vec::new(),
            stills: stills.len(),
        };
        for (index, video) in sample.videos.iter().enumerate() {
            let wrong = |reason| SampleError::VideoFrames {
                video: index,
                reason,
            };
            let patch_frames = self.config.limits.frames;
            let seconds = step_seconds(video, patch_frames).map_err(wrong)?;
            let frames = &sample.images[video.frames.clone()];
            let first = size(&frames[0])?;
            for frame in &frames[1..] {
                if size(frame)? != first {
                    return Err(wrong(format!("{} has another size", frame.1.display())));
                }
            }
            let limits = self.video_limits.unwrap_or(self.config.limits);
            let plan = frame_size(first, frames.len(), patch_frames, &limits);
            let plan = plan.ok_or_else(|| SampleError::AspectRatio {
                name: frames[0].0.clone(),
                width: first.0,
                height: first.1,
            })?;
            shown.plans.extend(vec![plan; seconds.len()]);
            shown.videos.push(seconds);
        }
        Ok(shown)
    }

    /// Decodes and cuts the images one after the other, so that one is in memory at a time.
    fn cut(
        &self,
        sample: &RawSample,
        images: &dyn ImageSource,
        shown: &Shown,
    ) -> Result<Vec<Slice>, SampleError> {
        let cut = |image: &(String, PathBuf), plan: Plan| {
            let image = image_pixels(images, image)?;
            let image = resize(&image, plan.0, plan.1);
            Ok(Slice::cut(&image, (0, 0), plan, self.config.patch_size))
        };
        let stills = sample.stills().iter().zip(&shown.plans);
        let stills = stills.map(|(image, plan)| cut(image, *plan));
        let mut slices = stills.collect::<Result<Vec<Slice>, SampleError>>()?;
        for (index, video) in sample.videos.iter().enumerate() {
            let patch_frames = self.config.limits.frames;
            let frames = &sample.images[video.frames.clone()];
            for (step, frames) in shown.steps(index).zip(frames.chunks(patch_frames)) {
                let mut whole = cut(&frames[0], shown.plans[step])?;
                for frame in &frames[1..] {
                    whole.push_frame(&cut(frame, shown.plans[step])?);
                }
                while whole.frames < patch_frames {
                    whole.repeat_frame();
                }
                slices.push(whole);
            }
        }
        Ok(slices)
    }

    /// Tokens of a sample to train on, and its images in the order of the text.
    fn training(
        &self,
        sample: &RawSample,
        shown: &Shown,
        options: &EncodeOptions,
    ) -> Result<(SampleTokens, Vec<usize>), SampleError> {
        let pieces = self.pieces(sample, &sample.conversations, shown, options)?;
        let (tokens, mut order) = self.tokenize(&pieces, &shown.plans)?;
        let untruncated = tokens.input_ids.len();
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
        order.truncate(ends);
        Ok((tokens.cut(kept, ends)?, order))
    }

    /// Pieces of `turns`, which are all or the first turns of `sample`.
    fn pieces(
        &self,
        sample: &RawSample,
        turns: &[Message],
        shown: &Shown,
        options: &EncodeOptions,
    ) -> Result<Vec<Piece>, SampleError> {
        let switch = thinking_switch(sample, options, self.thinks);
        let last_question = turns.iter().rposition(|turn| turn.role == "user");
        let mut images = Images::new(sample, turns)?;
        let mut pieces = vec![Piece::given(marker::PREFIX)];
        let mut answered = false;
        for (index, turn) in turns.iter().enumerate() {
            let role = format!("<|{}|>", turn.role);
            self.tokenizer.id(&role)?;
            let is_result = self.thinks && turn.role == "observation";
            let before = index.checked_sub(1).map(|before| &turns[before]);
            // One role's token opens a run of results.
            if !(is_result && before.is_some_and(|before| before.role == turn.role)) {
                pieces.push(Piece {
                    text: role,
                    kind: match answered {
                        true => Kind::BehindAnswer,
                        false => Kind::Given,
                    },
                });
            }
            answered = turn.role == "assistant" && !turn.unsupervised;
            let content = plain_text(&turn.content, &self.control);
            let metadata = plain_text(&turn.metadata, &self.control);
            if !may_show(turn) {
                let thought = turn.reasoning_content.as_deref();
                let thought = thought.map(|text| plain_text(text, &self.control));
                let is_past = Some(index) < last_question;
                let answer = match self.thinks && turn.role == "assistant" {
                    true => Answer::new(&content, thought.as_deref(), is_past, switch),
                    false => Answer {
                        given: String::new(),
                        said: format!("{metadata}\n{content}"),
                    },
                };
                pieces.push(Piece::given(answer.given));
                pieces.push(Piece {
                    text: answer.said,
                    kind: match answered {
                        true => Kind::Supervised,
                        false => Kind::Given,
                    },
                });
                continue;
            }
            let [opening, ending] = match turn.role.as_str() {
                "observation" if self.thinks => ["<tool_response>\n", "\n</tool_response>\n"],
                "user" if switch == Some(false) && !content.ends_with(thinking::OFF) => {
                    ["", thinking::OFF]
                }
                _ => ["", ""],
            };
            let mut text = format!("{metadata}\n{opening}");
            for part in images.parts(&content)? {
                if let Part::Text(part) = part {
                    text.push_str(part);
                    continue;
                }
                pieces.push(Piece::given(std::mem::take(&mut text)));
                match part {
                    Part::Image(i) => pieces.push(self.image_piece(i, shown)),
                    Part::Video(video) => self.video_pieces(video, shown, &mut pieces),
                    Part::Text(_) => {}
                }
            }
            text.push_str(ending);
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

    /// The features of input `i` of the tower.
    fn image_piece(&self, i: usize, shown: &Shown) -> Piece {
        Piece {
            text: image_text(self.features(shown.plans[i])),
            kind: Kind::Image(i),
        }
    }

    /// The steps of a video, each with its time.
    fn video_pieces(&self, video: usize, shown: &Shown, pieces: &mut Vec<Piece>) {
        pieces.push(Piece::given(marker::VIDEO_START));
        for (step, seconds) in shown.steps(video).zip(&shown.videos[video]) {
            pieces.push(self.image_piece(step, shown));
            pieces.push(Piece::given(time_text(*seconds, self.thinks)));
        }
        pieces.push(Piece::given(marker::VIDEO_END));
    }

    /// The conversation as tokens, and its images in the order of the text.
    fn tokenize(
        &self,
        pieces: &[Piece],
        plans: &[Plan],
    ) -> Result<(Written, Vec<usize>), SampleError> {
        let (mut tokens, mut order) = (Written::default(), Vec::new());
        let mut stray = 0;
        for piece in pieces {
            let start = tokens.input_ids.len();
            let ids = match piece.kind {
                Kind::Image(i) => {
                    let features = self.features(plans[i]);
                    tokens.bounds.push((start + 1, start + 1 + features));
                    order.push(i);
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
            tokens.push(&ids, piece.kind == Kind::Supervised);
            if let (Kind::BehindAnswer, Some(label)) =
                (piece.kind, tokens.own_labels.get_mut(start))
            {
                *label = self.ids.end;
            }
        }
        check_vocabulary(&tokens.input_ids, self.vocab_size)?;
        if stray > 0 {
            return Err(SampleError::MorePlaceholdersThanImages {
                placeholders: tokens.bounds.len() + stray,
                images: tokens.bounds.len(),
            });
        }
        Ok((tokens, order))
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

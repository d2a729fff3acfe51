//! Markers and feature tokens in place of a conversation's images.

use std::sync::LazyLock;

use regex::Regex;

use super::processor::{MiniCpmProcessor, ProcessorConfig};
use super::slicing::{Cells, SlicePlan};
use crate::data::conversation::{first_question, plain_text};
use crate::data::{PlaceholderStyle, RawSample, SINGLE_IMAGE, SampleError, VIDEO};
use crate::text::Message;

/// A conversation with markers and feature tokens for its images.
#[derive(Debug)]
pub(super) struct Substituted {
    pub(super) turns: Vec<Message>,
    /// Images by index into the sample's list, in the order of the text.
    pub(super) order: Vec<usize>,
}

static NAMED: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"<image_\d+>").expect("a constant pattern is valid"));

/// Replaces the images of `sample` in `turns`, which are all or its first turns; `plans` has one
/// entry per image, or one for each group of a video's frames.
pub(super) fn substitute(
    sample: &RawSample,
    turns: &[Message],
    plans: &[SlicePlan],
    processor: &MiniCpmProcessor,
    style: PlaceholderStyle,
) -> Result<Substituted, SampleError> {
    let config = &processor.config;
    let turns: Vec<Message> = turns
        .iter()
        .map(|turn| Message {
            content: plain_text(&turn.content, &processor.control).into_owned(),
            // A thought has no place for an image.
            reasoning_content: turn.reasoning_content.as_deref().map(|text| {
                let text = plain_text(text, &processor.control);
                plain_text(&text, &[SINGLE_IMAGE.to_owned()]).into_owned()
            }),
            ..turn.clone()
        })
        .collect();
    let turns = &turns[..];
    let is_video = !sample.videos.is_empty();
    let texts = placeholders(plans, config, (!is_video).then_some(style));
    if is_video {
        Ok(substitute_video(turns, &texts.join("\n")))
    } else if sample.has_single_image() {
        substitute_single(turns, &texts[0])
    } else if sample.images.is_empty() {
        check_text_only(turns)?;
        Ok(Substituted {
            turns: turns.to_vec(),
            order: Vec::new(),
        })
    } else {
        substitute_named(sample, turns, &texts)
    }
}

/// The placeholder text of each image, in the order of `plans`. Without a `style`, as for frames, none gets a number.
fn placeholders(
    plans: &[SlicePlan],
    config: &ProcessorConfig,
    style: Option<PlaceholderStyle>,
) -> Vec<String> {
    let markers = &config.markers;
    let features = markers.feature.repeat(config.query_num);
    let mut numbered = 0;
    let mut one = |plan: &SlicePlan| {
        let mut text = String::new();
        let counts = match style {
            None => false,
            Some(PlaceholderStyle::Inference) => true,
            Some(PlaceholderStyle::Training) => plan.cells.is_some(),
        };
        if config.use_image_id && counts {
            text = format!(
                "{}{numbered}{}",
                markers.image_id_start, markers.image_id_end
            );
            numbered += 1;
        }
        text.extend([&markers.image_start, &features, &markers.image_end].map(String::as_str));
        if let Some(Cells { cols, rows, .. }) = plan.cells {
            let cell = format!("{}{features}{}", markers.slice_start, markers.slice_end);
            text.push_str(&vec![cell.repeat(cols); rows].join("\n"));
        }
        text
    };
    plans.iter().map(&mut one).collect()
}

fn substitute_single(turns: &[Message], text: &str) -> Result<Substituted, SampleError> {
    if let Some(name) = turns.iter().find_map(|turn| NAMED.find(&turn.content)) {
        return Err(unknown(name.as_str(), &[SINGLE_IMAGE]));
    }
    let marked: usize = turns.iter().map(single_marks).sum();
    let opening = first_question(turns);
    let in_first = single_marks(&turns[opening]);
    // without a mark in the first turn the image is put in front of it
    let placeholders = marked + usize::from(in_first == 0);
    if placeholders > 1 {
        return Err(SampleError::MorePlaceholdersThanImages {
            placeholders,
            images: 1,
        });
    }
    let mut turns = turns.to_vec();
    let first = &mut turns[opening].content;
    *first = match in_first {
        0 => format!("{text}\n{first}"),
        _ => first.replace(SINGLE_IMAGE, text),
    };
    Ok(Substituted {
        turns,
        order: vec![0],
    })
}

/// The placeholders of a video replace its marks in the first turn of the user, or precede it.
fn substitute_video(turns: &[Message], text: &str) -> Substituted {
    let mut turns = turns.to_vec();
    let opening = first_question(&turns);
    let first = &mut turns[opening].content;
    *first = match first.contains(VIDEO) {
        true => first.replace(VIDEO, text),
        false => format!("{text}\n{first}"),
    };
    Substituted {
        turns,
        order: Vec::new(),
    }
}

fn check_text_only(turns: &[Message]) -> Result<(), SampleError> {
    let named: usize = turns
        .iter()
        .map(|turn| NAMED.find_iter(&turn.content).count())
        .sum();
    let placeholders = named + turns.iter().map(single_marks).sum::<usize>();
    if placeholders > 0 {
        return Err(SampleError::MorePlaceholdersThanImages {
            placeholders,
            images: 0,
        });
    }
    Ok(())
}

fn substitute_named(
    sample: &RawSample,
    turns: &[Message],
    texts: &[String],
) -> Result<Substituted, SampleError> {
    let mut order = Vec::new();
    let mut written = Vec::with_capacity(turns.len());
    for turn in turns {
        // text and names alternate; every piece gets a line of its own, empty ones too
        let mut pieces = Vec::new();
        let mut rest = 0;
        for name in NAMED.find_iter(&turn.content) {
            let image = sample
                .images
                .iter()
                .position(|(known, _)| known == name.as_str());
            let image = image.ok_or_else(|| unknown(name.as_str(), &names(sample)))?;
            order.push(image);
            pieces.extend([&turn.content[rest..name.start()], &texts[image]]);
            rest = name.end();
        }
        pieces.push(&turn.content[rest..]);
        written.push(Message {
            content: pieces.join("\n"),
            ..turn.clone()
        });
    }
    let placeholders = order.len() + turns.iter().map(single_marks).sum::<usize>();
    let images = sample.images.len();
    if placeholders > images {
        return Err(SampleError::MorePlaceholdersThanImages {
            placeholders,
            images,
        });
    }
    let unused = (0..images).find(|image| !order.contains(image));
    if let Some(image) = unused {
        return Err(SampleError::UnusedImage {
            name: sample.images[image].0.clone(),
        });
    }
    Ok(Substituted {
        turns: written,
        order,
    })
}

fn single_marks(turn: &Message) -> usize {
    turn.content.matches(SINGLE_IMAGE).count()
}

fn names(sample: &RawSample) -> Vec<&str> {
    sample
        .images
        .iter()
        .map(|(name, _)| name.as_str())
        .collect()
}

fn unknown(name: &str, known: &[&str]) -> SampleError {
    let known = known.iter().map(|&name| name.to_owned()).collect();
    SampleError::UnknownPlaceholder {
        name: name.to_owned(),
        known,
    }
}

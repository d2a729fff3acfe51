//! Places of a sample's images in the text of its conversation.

use std::sync::LazyLock;

use regex::Regex;

use crate::data::{RawSample, SINGLE_IMAGE, SampleError, VIDEO};
use crate::text::Message;

static PLACES: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"<image(_\d+)?>|<video>").expect("a constant pattern is valid"));

/// Whether images may stand in a turn.
pub(super) fn may_show(turn: &Message) -> bool {
    matches!(turn.role.as_str(), "user" | "observation")
}

/// A part of the user's text.
pub(super) enum Part<'a> {
    Text(&'a str),
    Image(usize),
    Video(usize),
}

/// Images of a sample, and which of them the text has used.
pub(super) struct Images<'a> {
    sample: &'a RawSample,
    used: Vec<bool>,
    /// The only image or video if the text never names it, until the first turn of the user.
    front: Option<Part<'static>>,
    /// Number of videos that the text has used.
    videos: usize,
}

impl<'a> Images<'a> {
    pub(super) fn new(sample: &'a RawSample, turns: &[Message]) -> Result<Self, SampleError> {
        let showing = turns.iter().filter(|turn| may_show(turn));
        let marks = showing.flat_map(|turn| PLACES.find_iter(&turn.content));
        let (of_videos, places): (Vec<_>, Vec<_>) = marks.partition(|mark| mark.as_str() == VIDEO);
        let (images, videos) = (sample.stills().len(), sample.videos.len());
        // Without a video the mark is text.
        let of_videos = if videos == 0 { 0 } else { of_videos.len() };
        for (placeholders, images) in [(places.len(), images), (of_videos, videos)] {
            if placeholders > images {
                return Err(SampleError::MorePlaceholdersThanImages {
                    placeholders,
                    images,
                });
            }
        }
        Ok(Self {
            sample,
            used: vec![false; images],
            front: match (images, videos, places.len() + of_videos) {
                (1, 0, 0) => Some(Part::Image(0)),
                (0, 1, 0) => Some(Part::Video(0)),
                _ => None,
            },
            videos: 0,
        })
    }

    /// Splits the user's `text` at the places of images.
    pub(super) fn parts<'t>(&mut self, text: &'t str) -> Result<Vec<Part<'t>>, SampleError> {
        let mut parts = Vec::new();
        if let Some(front) = self.front.take() {
            match front {
                Part::Image(image) => self.used[image] = true,
                _ => self.videos = 1,
            }
            parts.push(front);
        }
        let mut rest = 0;
        for place in PLACES.find_iter(text) {
            let part = match place.as_str() {
                VIDEO if self.sample.videos.is_empty() => continue,
                VIDEO => {
                    self.videos += 1;
                    Part::Video(self.videos - 1)
                }
                name => Part::Image(self.take(name)?),
            };
            parts.push(Part::Text(&text[rest..place.start()]));
            parts.push(part);
            rest = place.end();
        }
        parts.push(Part::Text(&text[rest..]));
        Ok(parts)
    }

    /// The image of the marker `name`: the one of that name, or the next one.
    fn take(&mut self, name: &str) -> Result<usize, SampleError> {
        let images = self.sample.stills();
        let found = match name {
            SINGLE_IMAGE => self.used.iter().position(|used| !used),
            _ => images
                .iter()
                .zip(&self.used)
                .position(|((known, _), used)| known == name && !used),
        };
        let index = found.ok_or_else(|| SampleError::UnknownPlaceholder {
            name: name.to_owned(),
            known: images.iter().map(|(known, _)| known.clone()).collect(),
        })?;
        self.used[index] = true;
        Ok(index)
    }

    pub(super) fn finish(self) -> Result<(), SampleError> {
        match self.used.iter().position(|used| !used) {
            None if self.videos < self.sample.videos.len() => Err(SampleError::UnusedImage {
                name: VIDEO.to_owned(),
            }),
            None => Ok(()),
            Some(index) => Err(SampleError::UnusedImage {
                name: self.sample.images[index].0.clone(),
            }),
        }
    }
}

//! Places of a sample's images in the text of its conversation.

use std::sync::LazyLock;

use regex::Regex;

use crate::data::{RawSample, SINGLE_IMAGE, SampleError};
use crate::text::Message;

static PLACES: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"<image(_\d+)?>").expect("a constant pattern is valid"));

/// Whether images may stand in a turn.
pub(super) fn may_show(turn: &Message) -> bool {
    matches!(turn.role.as_str(), "user" | "observation")
}

/// A part of the user's text.
pub(super) enum Part<'a> {
    Text(&'a str),
    Image(usize),
}

/// Images of a sample, and which of them the text has used.
pub(super) struct Images<'a> {
    sample: &'a RawSample,
    used: Vec<bool>,
    /// The only image if the text never names it, until the first turn of the user.
    front: Option<usize>,
}

impl<'a> Images<'a> {
    pub(super) fn new(sample: &'a RawSample, turns: &[Message]) -> Result<Self, SampleError> {
        let showing = turns.iter().filter(|turn| may_show(turn));
        let places: usize = showing
            .map(|turn| PLACES.find_iter(&turn.content).count())
            .sum();
        let images = sample.images.len();
        if places > images {
            return Err(SampleError::MorePlaceholdersThanImages {
                placeholders: places,
                images,
            });
        }
        Ok(Self {
            sample,
            used: vec![false; images],
            front: (images == 1 && places == 0).then_some(0),
        })
    }

    /// Splits the user's `text` at the places of images.
    pub(super) fn parts<'t>(&mut self, text: &'t str) -> Result<Vec<Part<'t>>, SampleError> {
        let mut parts = Vec::new();
        if let Some(front) = self.front.take() {
            self.used[front] = true;
            parts.push(Part::Image(front));
        }
        let mut rest = 0;
        for place in PLACES.find_iter(text) {
            parts.push(Part::Text(&text[rest..place.start()]));
            parts.push(Part::Image(self.take(place.as_str())?));
            rest = place.end();
        }
        parts.push(Part::Text(&text[rest..]));
        Ok(parts)
    }

    /// The image of the marker `name`: the one of that name, or the next one.
    fn take(&mut self, name: &str) -> Result<usize, SampleError> {
        let images = &self.sample.images;
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
            None => Ok(()),
            Some(index) => Err(SampleError::UnusedImage {
                name: self.sample.images[index].0.clone(),
            }),
        }
    }
}

//! Errors of unusable samples.

use std::path::PathBuf;

use thiserror::Error;

use crate::image::ImageError;
use crate::text::{TemplateError, TokenizerError};

/// Why a sample cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SampleError {
    /// The conversation has fewer turns than needed.
    #[error("the conversation has {turns} turns, at least {needed} are needed")]
    TooFewTurns {
        /// Number of turns.
        turns: usize,
        /// Turns needed: 2 to train, 1 to generate.
        needed: usize,
    },
    /// The first turn is not the user's.
    #[error("the first turn has role {role:?} instead of \"user\"")]
    FirstRoleNotUser {
        /// Role found.
        role: String,
    },
    /// A role is neither user nor assistant.
    #[error("turn {turn} has the unknown role {role:?}")]
    UnknownRole {
        /// Index of the turn, from 0.
        turn: usize,
        /// Role found.
        role: String,
    },
    /// A turn of the wrong speaker. User and assistant alternate, and a training sample ends with the assistant.
    #[error("turn {turn} has role {role:?}, where the other speaker was expected next")]
    TurnOrder {
        /// Index of the turn, from 0.
        turn: usize,
        /// Role found.
        role: String,
    },
    /// The tokens before the answer exceed the limit.
    #[error("{tokens} tokens before the answer leave no space for it, at most {limit} would")]
    ContextTooLong {
        /// Tokens found.
        tokens: usize,
        /// Tokens allowed.
        limit: usize,
    },
    /// No turn is the assistant's.
    #[error("none of the {turns} turns has role \"assistant\"")]
    NoAssistantTurn {
        /// Number of turns.
        turns: usize,
    },
    /// The text names an image that the sample does not have.
    #[error("the text names {name} but the images are {known:?}")]
    UnknownPlaceholder {
        /// The name in the text.
        name: String,
        /// Names of the sample's images.
        known: Vec<String>,
    },
    /// The text has more image placeholders than the sample has images.
    #[error("{placeholders} image placeholders but {images} images")]
    MorePlaceholdersThanImages {
        /// Placeholders in the text.
        placeholders: usize,
        /// Images, or slices when markers are counted.
        images: usize,
    },
    /// The text never shows an image of the sample.
    #[error("the text does not mention image {name}")]
    UnusedImage {
        /// The image's name in the text.
        name: String,
    },
    /// An image cannot be read.
    #[error("image {name}")]
    Image {
        /// Its name in the text.
        name: String,
        /// The path that the sample gives.
        path: PathBuf,
        /// What is wrong with the file.
        source: ImageError,
    },
    /// The sample has more images than the family supports.
    #[error("the sample has {images} images, the model takes at most {limit}")]
    TooManyImages {
        /// Number of images.
        images: usize,
        /// Maximal number of images.
        limit: usize,
    },
    /// The aspect ratio of an image is too large for the model's resize.
    #[error("image {name} of {width} x {height} pixels has an aspect ratio that is too large")]
    AspectRatio {
        /// Its name in the text.
        name: String,
        /// Width in pixels.
        width: usize,
        /// Height in pixels.
        height: usize,
    },
    /// The chat template failed.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// The tokenizer failed.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The model has no embedding for a token.
    #[error("token {id} at position {position} is beyond the model's vocabulary of {vocab_size}")]
    TokenOutOfRange {
        /// The token's id.
        id: i32,
        /// Index of the token.
        position: usize,
        /// Rows of the embedding.
        vocab_size: usize,
    },
    /// Start and end markers of images do not pair up: truncation cut an image in two, or the text contains markers.
    #[error("{starts} image starts but {ends} image ends within {kept} of {tokens} tokens")]
    UnpairedImageMarkers {
        /// Start markers.
        starts: usize,
        /// End markers.
        ends: usize,
        /// Tokens of the whole sample.
        tokens: usize,
        /// Tokens after truncation.
        kept: usize,
    },
    /// A pair of markers does not enclose the features of exactly one slice.
    #[error("image span {index} is {start}..{end}, expected {expected} tokens")]
    WrongImageSpan {
        /// Index of the span.
        index: usize,
        /// First token after the start marker.
        start: usize,
        /// Index of the end marker.
        end: usize,
        /// Features per slice.
        expected: usize,
    },
    /// No supervised token: no answer, or truncation removed it.
    #[error("no supervised token within {kept} of {tokens} tokens")]
    NoSupervisedToken {
        /// Tokens of the whole sample.
        tokens: usize,
        /// Tokens after truncation.
        kept: usize,
        /// Index of the first answer's first token, if there is one.
        answer_start: Option<usize>,
    },
}

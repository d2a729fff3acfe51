//! Errors of unusable samples.

use std::path::PathBuf;

use thiserror::Error;

use crate::image::ImageError;
use crate::text::{TemplateError, TokenizerError};

/// Why a sample cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SampleError {
    /// Fewer turns than a question and an answer.
    #[error("the conversation has {turns} turns, at least {needed} are needed")]
    TooFewTurns {
        /// Turns found.
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
    /// A role other than user and assistant.
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
    /// Too many tokens before the answer.
    #[error("{tokens} tokens before the answer leave no space for it, at most {limit} would")]
    ContextTooLong {
        /// Tokens found.
        tokens: usize,
        /// Tokens allowed.
        limit: usize,
    },
    /// The assistant never speaks.
    #[error("none of the {turns} turns has role \"assistant\"")]
    NoAssistantTurn {
        /// Turns found.
        turns: usize,
    },
    /// The text names an image the sample does not have.
    #[error("the text names {name} but the images are {known:?}")]
    UnknownPlaceholder {
        /// The name in the text.
        name: String,
        /// Names of the sample's images.
        known: Vec<String>,
    },
    /// The text shows more images than the sample has.
    #[error("{placeholders} image placeholders but {images} images")]
    MorePlaceholdersThanImages {
        /// Places in the text.
        placeholders: usize,
        /// Images, or slices where markers are counted.
        images: usize,
    },
    /// The text never shows an image of the sample.
    #[error("the text does not mention image {name}")]
    UnusedImage {
        /// Its name.
        name: String,
    },
    /// An image cannot be read.
    #[error("image {name}")]
    Image {
        /// Its name in the text.
        name: String,
        /// The path as the sample gives it.
        path: PathBuf,
        /// What is wrong with the file.
        source: ImageError,
    },
    /// More images than the family takes.
    #[error("the sample has {images} images, the model takes at most {limit}")]
    TooManyImages {
        /// Images found.
        images: usize,
        /// Images allowed.
        limit: usize,
    },
    /// An image so long that the model's resizing refuses it.
    #[error("image {name} of {width} x {height} pixels has an aspect ratio that is too large")]
    AspectRatio {
        /// Its name in the text.
        name: String,
        /// Pixels side by side.
        width: usize,
        /// Pixels on top of each other.
        height: usize,
    },
    /// The chat template failed.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// The tokenizer failed.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// A token the model has no embedding for.
    #[error("token {id} at position {position} is beyond the model's vocabulary of {vocab_size}")]
    TokenOutOfRange {
        /// The token.
        id: i32,
        /// Its position.
        position: usize,
        /// Rows of the embedding.
        vocab_size: usize,
    },
    /// Start and end markers do not pair up, because truncation cut an image in two or because the
    /// text holds markers of its own.
    #[error("{starts} image starts but {ends} image ends within {kept} of {tokens} tokens")]
    UnpairedImageMarkers {
        /// Start markers.
        starts: usize,
        /// End markers.
        ends: usize,
        /// Tokens of the whole sample.
        tokens: usize,
        /// Tokens left by truncation.
        kept: usize,
    },
    /// A pair of markers does not hold the features of one slice.
    #[error("image span {index} is {start}..{end}, expected {expected} tokens")]
    WrongImageSpan {
        /// Index of the span.
        index: usize,
        /// First token after the start marker.
        start: usize,
        /// Position of the end marker.
        end: usize,
        /// Features per slice.
        expected: usize,
    },
    /// No supervised token: no answer, or truncation removed it.
    #[error("no supervised token within {kept} of {tokens} tokens")]
    NoSupervisedToken {
        /// Tokens of the whole sample.
        tokens: usize,
        /// Tokens left by truncation.
        kept: usize,
        /// Where the first answer starts, if there is one.
        answer_start: Option<usize>,
    },
}

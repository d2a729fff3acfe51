//! Errors of unusable samples.

use std::path::PathBuf;

use thiserror::Error;

use crate::image::ImageError;
use crate::text::{TemplateError, TokenizerError};

/// Why a sample cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SampleError {
    /// The conversation has fewer turns than a question and an answer.
    #[error("the conversation has {turns} turns, at least {needed} are needed")]
    TooFewTurns {
        /// Number of turns in the conversation.
        turns: usize,
        /// Turns needed: 2 to train, 1 to generate.
        needed: usize,
    },
    /// The first turn is not the user's.
    #[error("the first turn has role {role:?} instead of \"user\"")]
    FirstRoleNotUser {
        /// Role of the first turn.
        role: String,
    },
    /// A turn has a role other than user and assistant.
    #[error("turn {turn} has the unknown role {role:?}")]
    UnknownRole {
        /// Index of the turn, from 0.
        turn: usize,
        /// Role that the turn has.
        role: String,
    },
    /// A turn of the wrong speaker. User and assistant alternate, and a training sample ends with the assistant.
    #[error("turn {turn} has role {role:?}, where the other speaker was expected next")]
    TurnOrder {
        /// Index of the turn, from 0.
        turn: usize,
        /// Role that the turn has.
        role: String,
    },
    /// Too many tokens come before the answer.
    #[error("{tokens} tokens before the answer leave no space for it, at most {limit} would")]
    ContextTooLong {
        /// Number of tokens before the answer.
        tokens: usize,
        /// Largest number of tokens before the answer.
        limit: usize,
    },
    /// The assistant never speaks.
    #[error("none of the {turns} turns has role \"assistant\"")]
    NoAssistantTurn {
        /// Number of turns in the conversation.
        turns: usize,
    },
    /// The data leaves every answer that the family learns out of the loss.
    #[error("the data leaves all answers that the model would learn ({answers}) out of the loss")]
    NoSupervisedTurn {
        /// Number of answers that the family learns.
        answers: usize,
    },
    /// A turn has metadata, e.g. the name of a called tool, which the family's template does not write.
    #[error("turn {turn} has metadata or calls a tool, which the model's template cannot write")]
    Metadata {
        /// Index of the turn, from 0.
        turn: usize,
    },
    /// An image stands after the user's first turn, in a family that takes it in that turn only.
    #[error("the image stands in turn {turn}, the model takes it in the user's first turn only")]
    LaterImage {
        /// Index of the turn, from 0.
        turn: usize,
    },
    /// The mark of an image or video stands in a turn of the assistant or the system.
    #[error(
        "an image or video stands in turn {turn} of the {role}; only turns of the user and of tools show one. As plain text its mark is \\\\<image> in JSON"
    )]
    MisplacedImage {
        /// Index of the turn, from 0.
        turn: usize,
        /// Role of the turn.
        role: String,
    },
    /// The text names an image the sample does not have.
    #[error("the text names {name} but the images are {known:?}")]
    UnknownPlaceholder {
        /// Name of the image in the text.
        name: String,
        /// Names of the sample's images.
        known: Vec<String>,
    },
    /// The text shows more images than the sample has.
    #[error("{placeholders} image placeholders but {images} images")]
    MorePlaceholdersThanImages {
        /// Number of image placeholders in the text.
        placeholders: usize,
        /// Number of images, or of slices where markers are counted.
        images: usize,
    },
    /// The text never shows an image of the sample.
    #[error("the text does not mention image {name}")]
    UnusedImage {
        /// Name of the image.
        name: String,
    },
    /// An image cannot be read.
    #[error("image {name}")]
    Image {
        /// Name of the image in the text.
        name: String,
        /// The path as the sample gives it.
        path: PathBuf,
        /// What is wrong with the file.
        source: ImageError,
    },
    /// The sample has no image, and the family needs one.
    #[error("the sample has no image, which the model's cross attention reads in every layer")]
    NoImage,
    /// The sample has more images than the family takes.
    #[error("the sample has {images} images, the model takes at most {limit}")]
    TooManyImages {
        /// Number of images of the sample.
        images: usize,
        /// Largest number of images that the family takes.
        limit: usize,
    },
    /// The sample has a video, which the family does not read.
    #[error("the sample has a video, which the model does not read")]
    Video,
    /// The times of a video's frames do not fit the frames, or the family does not use such times.
    #[error("video {video}: {reason}")]
    VideoFrames {
        /// Index of the video in the sample, from 0.
        video: usize,
        /// What does not fit.
        reason: String,
    },
    /// The sample sets `enable_thinking`, a switch that the family's template does not have.
    #[error("the sample sets enable_thinking, which the model's template does not read")]
    Thinking,
    /// An image so long that the model's resizing refuses it.
    #[error("image {name} of {width} x {height} pixels has an aspect ratio that is too large")]
    AspectRatio {
        /// Name of the image in the text.
        name: String,
        /// Width of the image in pixels.
        width: usize,
        /// Height of the image in pixels.
        height: usize,
    },
    /// The chat template failed.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// The tokenizer failed.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The sample holds a token for which the model has no embedding.
    #[error("token {id} at position {position} is beyond the model's vocabulary of {vocab_size}")]
    TokenOutOfRange {
        /// Id of the token.
        id: i32,
        /// Position of the token in the sample, from 0.
        position: usize,
        /// Number of rows of the model's embedding.
        vocab_size: usize,
    },
    /// Start and end markers do not pair up, because truncation cut an image in two or because the
    /// text holds markers of its own.
    #[error("{starts} image starts but {ends} image ends within {kept} of {tokens} tokens")]
    UnpairedImageMarkers {
        /// Number of start markers among the tokens that truncation left.
        starts: usize,
        /// Number of end markers among the tokens that truncation left.
        ends: usize,
        /// Tokens of the whole sample.
        tokens: usize,
        /// Tokens left by truncation.
        kept: usize,
    },
    /// A pair of markers does not hold the features of one slice.
    #[error("image span {index} is {start}..{end}, expected {expected} tokens")]
    WrongImageSpan {
        /// Number of the pair of markers, from 0.
        index: usize,
        /// Position of the first token after the start marker.
        start: usize,
        /// Position of the end marker.
        end: usize,
        /// Number of features of a slice, which the markers should enclose.
        expected: usize,
    },
    /// No token is supervised: there is no answer, or truncation removed it.
    #[error("no supervised token within {kept} of {tokens} tokens")]
    NoSupervisedToken {
        /// Tokens of the whole sample.
        tokens: usize,
        /// Tokens left by truncation.
        kept: usize,
        /// Position of the first token of the first answer, if there is one.
        answer_start: Option<usize>,
    },
}

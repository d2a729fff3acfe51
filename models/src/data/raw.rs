//! Samples before they are tokenized, and the errors of data files.

use std::ops::Range;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::text::Message;

/// Name given to the image of a sample whose data file states one image path without a name.
pub const SINGLE_IMAGE: &str = "<image>";
/// Mark of a video in a text; the n-th mark stands for the n-th video.
pub const VIDEO: &str = "<video>";

/// Name by which [`Dataset::ignored`](super::Dataset::ignored) counts thoughts before answers. They have an effect where
/// [`Processor::reads_thoughts`](crate::Processor::reads_thoughts) says so.
pub const THOUGHTS: &str = "turns[].reasoning_content";

/// Why a data file cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DataError {
    /// The file is missing or cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// Path of the data file.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// The content is not valid JSON, or an entry of it is not a sample.
    #[error("{}:{line}:{column}: {reason}", path.display())]
    Json {
        /// Path of the data file.
        path: PathBuf,
        /// Line of the error, from 1.
        line: usize,
        /// Column of the error in bytes, from 1; 0 for the end of a line.
        column: usize,
        /// What the parser expected or found.
        reason: String,
    },
    /// A row of a Parquet file cannot be read, or is not a sample.
    #[error("{}, row {row}: {reason}", path.display())]
    Row {
        /// Path of the data file.
        path: PathBuf,
        /// Index of the row, from 0.
        row: usize,
        /// What is wrong with the row.
        reason: String,
    },
    /// A file is to be taken a number of times that is not above 0.
    #[error("{} has the weight {weight}, which is not above 0", path.display())]
    Weight {
        /// Path of the file or directory.
        path: PathBuf,
        /// The weight as it is given.
        weight: f64,
    },
    /// The file or directory holds no sample.
    #[error("{} contains no sample", path.display())]
    Empty {
        /// Path of the file or directory.
        path: PathBuf,
    },
    /// The content is of none of the formats.
    #[error("the format of {} is unknown: {found}", path.display())]
    UnknownFormat {
        /// Path of the file or directory.
        path: PathBuf,
        /// What the file or directory holds instead.
        found: String,
    },
    /// The content could be of several formats, or of one in several ways.
    #[error("the format of {} is ambiguous: {reason}", path.display())]
    AmbiguousFormat {
        /// Path of the file or directory.
        path: PathBuf,
        /// The possible meanings, and the flag that selects one.
        reason: String,
    },
    /// A label file without the image it describes.
    #[error("{} describes no image of {}", label.display(), images.display())]
    NoImage {
        /// Path of the label file.
        label: PathBuf,
        /// Directory in which the image was looked for.
        images: PathBuf,
    },
    /// A label file whose image is of a format that is not read.
    #[error("{} is the image of {}, and not a PNG, JPEG, WebP, BMP, GIF or TIFF file: convert it", image.display(), label.display())]
    OtherImage {
        /// Path of the label file.
        label: PathBuf,
        /// Path of the image.
        image: PathBuf,
    },
    /// An image without its label file.
    #[error("{} has no label in {}", image.display(), labels.display())]
    NoLabel {
        /// Path of the image.
        image: PathBuf,
        /// Directory in which the label file was looked for.
        labels: PathBuf,
    },
}

/// One sample of a data file: a conversation with its images, not yet tokenized.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RawSample {
    /// The sample's name, used only in messages to the user.
    pub id: Option<String>,
    /// The sample's images in the order of the file: the name that stands for the image in the text, and the image's
    /// path. The frames of its videos come after all other images.
    pub images: Vec<(String, PathBuf)>,
    /// The sample's videos, in the order of the file.
    pub videos: Vec<RawVideo>,
    /// Whether the answer begins with a thought, in families whose template has that switch; `None` leaves it to
    /// the template.
    pub enable_thinking: Option<bool>,
    /// The turns of the conversation, in order.
    pub conversations: Vec<Message>,
}

/// A video as images of its frames.
#[derive(Clone, Debug, PartialEq)]
pub struct RawVideo {
    /// Indices of the frames in [`RawSample::images`], in order of time.
    pub frames: Range<usize>,
    /// When the frames were taken; `None` if the data does not say.
    pub clock: Option<Clock>,
}

/// When the frames of a video were taken.
#[derive(Clone, Debug, PartialEq)]
pub enum Clock {
    /// Frames per second: frame `i` is `i / fps` seconds after the beginning.
    Rate(f64),
    /// Seconds from the beginning, one number per frame.
    Seconds(Vec<f64>),
    /// Tenths of seconds, one number or none per frame, in groups of consecutive frames that become features together.
    /// Only MiniCPM-V 4.5 groups frames.
    Groups(Vec<Vec<Option<u32>>>),
}

impl RawSample {
    /// The images that are no frames of a video.
    #[must_use]
    pub fn stills(&self) -> &[(String, PathBuf)] {
        let frames: usize = self.videos.iter().map(|video| video.frames.len()).sum();
        &self.images[..self.images.len() - frames]
    }

    /// Content of the last turn, which is the supervised answer; `None` if the last turn is not the assistant's.
    pub fn answer(&self) -> Option<&str> {
        let last = self
            .conversations
            .last()
            .filter(|turn| turn.role == "assistant");
        last.map(|turn| turn.content.as_str())
    }

    /// Whether the sample has exactly one image, given by its path without a name in the text.
    pub fn has_single_image(&self) -> bool {
        matches!(self.stills(), [(name, _)] if name == SINGLE_IMAGE)
    }
}

/// `error` at its line of the file `path`; parsing began after `lines_before` lines.
pub(super) fn invalid(path: &Path, lines_before: usize, error: &serde_json::Error) -> DataError {
    let (line, column) = (error.line(), error.column());
    let text = error.to_string();
    let place = format!(" at line {line} column {column}");
    let reason = text.strip_suffix(&place).unwrap_or(&text).to_owned();
    DataError::Json {
        path: path.to_owned(),
        // what a whole sample lacks has no place of its own
        line: lines_before + line.max(1),
        column,
        reason,
    }
}

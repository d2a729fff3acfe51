//! Fine-tuning data: samples in users' formats, and as inputs of models.

pub(crate) mod conversation;
mod encoded;
mod error;
mod formats;
mod raw;

pub use encoded::{
    EncodeOptions, EncodedPrompt, EncodedSample, IGNORED, ImagePlan, PlaceholderStyle,
    PromptSource, PromptStyle, SampleSize, SampleTokens, Slice,
};
pub use error::SampleError;
pub use formats::{DataFormat, Dataset, detect, read_samples_as};
pub use raw::{DataError, RawSample, SINGLE_IMAGE, read_samples};

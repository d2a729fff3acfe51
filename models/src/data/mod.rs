//! Fine-tuning data: samples in users' formats, and as inputs of models.

pub(crate) mod conversation;
mod encoded;
mod error;
mod formats;
mod lines;
mod raw;

pub use encoded::{
    Cut, EncodeOptions, EncodedPrompt, EncodedSample, IGNORED, ImagePlan, PlaceholderStyle,
    PlannedSample, PromptSource, PromptStyle, SampleSize, SampleTokens, Slice, Stamp,
};
pub use error::SampleError;
pub use formats::{
    DATASET_INFO, DataFormat, Dataset, data_files, data_parts, detect, packing, read_datasets,
    read_samples, read_samples_as, sample_places, weight_of,
};
pub use lines::sample_lines;
pub use raw::{Clock, DataError, RawSample, RawVideo, SINGLE_IMAGE, THOUGHTS, VIDEO};

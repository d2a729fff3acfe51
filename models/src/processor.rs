//! Interface of processors, which convert samples to model inputs; each family implements it.

use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use thiserror::Error;

use crate::config::ConfigError;
use crate::data::conversation::supervised;
use crate::data::{
    EncodeOptions, EncodedPrompt, EncodedSample, ImagePlan, PlaceholderStyle, PlannedSample,
    RawSample, SampleError, SampleSize, SampleTokens,
};
use crate::image::ImageSource;
use crate::text::{TemplateError, Tokenizer, TokenizerError};

/// Converter of samples to model inputs. It has the family's rules for prompts, labels and images, and the
/// tokenizer and settings of a model directory.
pub trait Processor: Send + Sync + std::fmt::Debug {
    /// The tokens of a training sample, from the headers of its images alone, and how to cut the images.
    ///
    /// # Errors
    /// [`SampleError`] for each way a sample can be unusable; nothing is repaired silently.
    fn plan<'a>(
        &'a self,
        sample: &'a RawSample,
        images: &'a dyn ImageSource,
        options: &EncodeOptions,
    ) -> Result<PlannedSample<'a>, SampleError>;

    /// Turns a sample into model inputs for training.
    ///
    /// # Errors
    /// As [`Processor::plan`], and for images that cannot be decoded.
    fn encode(
        &self,
        sample: &RawSample,
        images: &dyn ImageSource,
        options: &EncodeOptions,
    ) -> Result<EncodedSample, SampleError> {
        let PlannedSample { tokens, cut, .. } = self.plan(sample, images, options)?;
        Ok(EncodedSample {
            slices: cut()?,
            input_ids: tokens.input_ids,
            labels: tokens.labels,
            image_bounds: tokens.image_bounds,
            untruncated_tokens: tokens.untruncated_tokens,
        })
    }

    /// Counts the results of [`Processor::encode`], with the same checks. Of image files it reads only
    /// the headers.
    ///
    /// # Errors
    /// As [`Processor::plan`].
    fn measure(
        &self,
        sample: &RawSample,
        images: &dyn ImageSource,
        options: &EncodeOptions,
    ) -> Result<SampleSize, SampleError> {
        let planned = self.plan(sample, images, options)?;
        let tokens = &planned.tokens;
        Ok(SampleSize {
            tokens: tokens.input_ids.len(),
            untruncated_tokens: tokens.untruncated_tokens,
            image_tokens: tokens.image_bounds.iter().map(|(s, e)| e - s).sum(),
            supervised: supervised(&tokens.labels),
            patches: planned.patches,
            slices: tokens.slices,
        })
    }

    /// The tokens that [`Processor::encode`] would yield, from the headers of the images alone.
    ///
    /// # Errors
    /// As [`Processor::plan`].
    fn tokens(
        &self,
        sample: &RawSample,
        images: &dyn ImageSource,
        options: &EncodeOptions,
    ) -> Result<SampleTokens, SampleError> {
        Ok(self.plan(sample, images, options)?.tokens)
    }

    /// Turns the conversation without its last answer into a prompt; nothing is truncated.
    /// The style [`PlaceholderStyle::Training`] writes images exactly as [`Processor::encode`] does.
    ///
    /// # Errors
    /// [`SampleError`] as for [`Processor::encode`], except for missing answers.
    fn encode_prompt(
        &self,
        sample: &RawSample,
        images: &dyn ImageSource,
        options: &EncodeOptions,
        style: PlaceholderStyle,
    ) -> Result<EncodedPrompt, SampleError>;

    /// The text of a training sample, with its markers, before it is tokenized.
    ///
    /// # Errors
    /// As [`Processor::measure`].
    fn render(
        &self,
        sample: &RawSample,
        images: &dyn ImageSource,
        options: &EncodeOptions,
    ) -> Result<String, SampleError>;

    /// The number of slices and tokens that an image of `size` (width, height in pixels) becomes.
    fn image(&self, size: (usize, usize), options: &EncodeOptions) -> ImagePlan;

    /// Token ranges of the images of a sample, markers included, each with its number of slices.
    fn images(&self, tokens: &SampleTokens) -> Vec<(Range<usize>, usize)> {
        let bounds = tokens.image_bounds.iter();
        bounds.map(|(start, end)| (*start..*end, 1)).collect()
    }

    /// Whether prompts and answers are written with the thoughts that a sample gives beside its answers
    /// (`reasoning_content`); a family without them ignores the key.
    fn reads_thoughts(&self) -> bool {
        false
    }

    /// The tokenizer of the model directory.
    fn tokenizer(&self) -> &Tokenizer;

    /// Id of the token that follows an answer in training samples.
    fn turn_end(&self) -> i32;

    /// Ids of the tokens that end a generated answer.
    fn stop_ids(&self) -> Vec<i32>;

    /// Decodes the token ids `ids` to text, without special tokens.
    ///
    /// # Errors
    /// [`TokenizerError::Decode`] for a negative id, or if the tokenizer fails.
    fn decode(&self, ids: &[i32]) -> Result<String, TokenizerError> {
        self.tokenizer().decode(ids)
    }
}

/// Why the processor of a model directory cannot be opened.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ProcessorError {
    /// `config.json` cannot be used.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The tokenizer files cannot be used.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The chat template cannot be used.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// A file of image settings cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// The directory has no image settings.
    #[error("{} has neither preprocessor_config.json nor image_processor in processor_config.json", dir.display())]
    NoSettings {
        /// The model directory.
        dir: PathBuf,
    },
    /// The directory has image settings in two files, of which each version of transformers reads another.
    #[error("{own} and {nested} in processor_config.json of {} differ; remove the one that was not used in training", dir.display())]
    TwoSettings {
        /// The model directory.
        dir: PathBuf,
        /// Name of the file.
        own: &'static str,
        /// Name of the object.
        nested: &'static str,
    },
    /// A file of image settings is not valid.
    #[error("{} is not valid", path.display())]
    Json {
        /// Path of the file.
        path: PathBuf,
        /// Line, column and cause.
        source: serde_json::Error,
    },
    /// The two configuration files disagree.
    #[error("{field} is {config} in config.json but {preprocessor} in preprocessor_config.json")]
    Disagree {
        /// Name of the setting.
        field: &'static str,
        /// Its value in `config.json`.
        config: usize,
        /// Its value in `preprocessor_config.json`.
        preprocessor: usize,
    },
    /// A standard deviation in the file is zero, or a mean or deviation is not finite.
    #[error("norm_mean {mean:?} and norm_std {std:?} are not a usable normalization")]
    Normalization {
        /// Mean per channel.
        mean: [f32; 3],
        /// Standard deviation per channel.
        std: [f32; 3],
    },
}

/// Reads the image settings of the model directory `dir`: `preprocessor_config.json`, or, as transformers 5 saves them,
/// `image_processor` in `processor_config.json`.
///
/// # Errors
/// [`ProcessorError::Read`] or [`ProcessorError::Json`] for a file; [`ProcessorError::NoSettings`] for none;
/// [`ProcessorError::TwoSettings`] for two that differ.
pub(crate) fn read_preprocessor<T: DeserializeOwned + PartialEq>(
    dir: &Path,
) -> Result<T, ProcessorError> {
    let found = settings_of(dir, "preprocessor_config.json", "image_processor")?;
    found.ok_or_else(|| ProcessorError::NoSettings {
        dir: crate::places::main(dir),
    })
}

/// Settings of the model directory `dir`: the file `own`, or the object `nested` of `processor_config.json`. `None` if
/// there are none.
///
/// # Errors
/// As [`read_preprocessor`], except for missing settings.
pub(crate) fn settings_of<T: DeserializeOwned + PartialEq>(
    dir: &Path,
    own: &'static str,
    nested: &'static str,
) -> Result<Option<T>, ProcessorError> {
    let dir = crate::places::main(dir);
    let path = dir.join("processor_config.json");
    let whole: Option<Map<String, Value>> = read_settings(&path)?;
    let object = whole.and_then(|mut file| file.remove(nested));
    let object = object.filter(|object| !object.is_null());
    let inner: Option<T> = object
        .map(serde_json::from_value)
        .transpose()
        .map_err(|source| ProcessorError::Json { path, source })?;
    match (read_settings::<T>(&dir.join(own))?, inner) {
        (Some(file), Some(inner)) if file != inner => {
            Err(ProcessorError::TwoSettings { dir, own, nested })
        }
        (file, inner) => Ok(file.or(inner)),
    }
}

/// The settings in the file `path`; `None` if it does not exist.
///
/// # Errors
/// [`ProcessorError::Read`] or [`ProcessorError::Json`].
fn read_settings<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, ProcessorError> {
    let path = path.to_owned();
    match crate::text::read_optional(&path) {
        Ok(None) => Ok(None),
        Ok(Some(bytes)) => {
            serde_json::from_slice(&bytes).map_err(|source| ProcessorError::Json { path, source })
        }
        Err(source) => Err(ProcessorError::Read { path, source }),
    }
}

/// Fails if `preprocessor_config.json` has another value than `config.json`.
///
/// # Errors
/// [`ProcessorError::Disagree`].
pub(crate) fn agree(
    field: &'static str,
    config: usize,
    preprocessor: Option<usize>,
) -> Result<(), ProcessorError> {
    match preprocessor {
        Some(preprocessor) if preprocessor != config => Err(ProcessorError::Disagree {
            field,
            config,
            preprocessor,
        }),
        _ => Ok(()),
    }
}

/// Mean per channel of the images that CLIP's towers were trained on.
pub(crate) const CLIP_MEAN: [f32; 3] = [0.481_454_66, 0.457_827_5, 0.408_210_73];
/// Standard deviation per channel of the same images.
pub(crate) const CLIP_STD: [f32; 3] = [0.268_629_54, 0.261_302_6, 0.275_777_1];

/// Normalization of pixel bytes `v` to inputs of the vision tower, in `f32`: `(v / 255 - mean) / std`, per channel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Normalization {
    mean: [f32; 3],
    std: [f32; 3],
}

impl Normalization {
    /// Normalization by `mean` and `std` per channel (red, green, blue).
    ///
    /// # Errors
    /// [`ProcessorError::Normalization`] if a standard deviation is zero or any value is not finite.
    pub fn new(mean: [f32; 3], std: [f32; 3]) -> Result<Self, ProcessorError> {
        let finite = mean.iter().chain(&std).all(|v| v.is_finite());
        if !finite || std.contains(&0.0) {
            return Err(ProcessorError::Normalization { mean, std });
        }
        Ok(Self { mean, std })
    }

    /// Normalization with the mean and standard deviation that CLIP's vision towers were trained with.
    #[must_use]
    pub fn clip() -> Self {
        Self {
            mean: CLIP_MEAN,
            std: CLIP_STD,
        }
    }

    /// Normalized value of the pixel value `byte` in `channel` (0 red, 1 green, 2 blue).
    pub fn normalize(&self, channel: usize, byte: u8) -> f32 {
        (f32::from(byte) / 255.0 - self.mean[channel]) / self.std[channel]
    }

    /// Normalized values of the pixel bytes `patches`, in the order of
    /// [`Slice::patches`](crate::data::Slice::patches). A patch has `3 * patch_size * patch_size` bytes.
    pub fn normalize_patches(&self, patches: &[u8], patch_size: usize) -> Vec<f32> {
        let table: [[f32; 256]; 3] =
            std::array::from_fn(|c| std::array::from_fn(|byte| self.normalize(c, byte as u8)));
        let mut values = Vec::with_capacity(patches.len());
        for (i, plane) in patches.chunks(patch_size * patch_size).enumerate() {
            values.extend(plane.iter().map(|&byte| table[i % 3][usize::from(byte)]));
        }
        values
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    #[test]
    fn normalization_is_per_channel() {
        let norm = Normalization::new([0.5, 0.0, 1.0], [0.5, 1.0, 2.0]).unwrap();
        let values = norm.normalize_patches(&[0, 255, 255, 0, 0, 255], 1);
        assert_eq!(values, [-1.0, 1.0, 0.0, -1.0, 0.0, 0.0]);
    }

    #[test]
    fn image_settings_are_found_in_the_files_of_both_versions_of_transformers() {
        #[derive(Deserialize, PartialEq, Debug)]
        struct Settings {
            size: usize,
        }
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        let read = || read_preprocessor::<Settings>(dir.path());
        assert!(matches!(read(), Err(ProcessorError::NoSettings { .. })));
        write("processor_config.json", r#"{"processor_class": "P"}"#);
        assert!(matches!(read(), Err(ProcessorError::NoSettings { .. })));
        write(
            "processor_config.json",
            r#"{"image_processor": {"size": 3, "x": 1}}"#,
        );
        assert_eq!(read().unwrap().size, 3);
        write("preprocessor_config.json", r#"{"size": 3}"#);
        assert_eq!(read().unwrap().size, 3, "both, and alike");
        write("preprocessor_config.json", r#"{"size": 4}"#);
        assert!(matches!(read(), Err(ProcessorError::TwoSettings { .. })));
        write("processor_config.json", "{");
        assert!(matches!(read(), Err(ProcessorError::Json { .. })));
    }

    #[test]
    fn a_zero_standard_deviation_is_refused() {
        let result = Normalization::new([0.5; 3], [0.5, 0.0, 0.5]);
        assert!(matches!(result, Err(ProcessorError::Normalization { .. })));
    }
}

//! Generated samples for a model directory: one image each and text of a given length, ready for training.

use crate::lang::{Text, both, text};
use std::fs;
use std::path::Path;

use models::data::{EncodeOptions, RawSample};
use models::image::ImageFolder;
use models::{Family, open_processor};
use serde_json::Value;

use super::png;
use super::writer::{self, FileWriter};
use crate::error::{ErrorCode, Failure, chain};

/// Name of the generated samples' file in the model directory.
pub(super) const FILE: &str = "samples.json";
const IMAGES: &str = "pictures";
/// Default side of an image in pixels if the configuration has none, and the largest default.
const LARGEST_SIDE: usize = 448;
/// Allowed sides of an image in pixels.
const SIDES: std::ops::RangeInclusive<usize> = 28..=4096;
/// A length at which nothing is truncated while samples are measured.
const NO_LIMIT: usize = 1 << 24;
/// Text with one token per byte in the tokenizers of these directories.
const FILLER: &str = "the quick brown fox jumps over the lazy dog ";

/// Number and length of the samples that [`write()`] wrote, measured on the first one.
#[derive(Debug)]
pub(super) struct Samples {
    pub(super) count: usize,
    /// Tokens of the first sample, image tokens included.
    pub(super) tokens: usize,
    /// Image tokens of the first sample.
    pub(super) image_tokens: usize,
}

/// Requested size of each generated sample.
#[derive(Debug, Clone, Copy)]
pub(super) struct Size {
    /// Tokens per sample, including the image tokens.
    pub(super) tokens: usize,
    /// Side of the image in pixels. The default is one slice, or the vision tower's own size.
    pub(super) image_side: Option<usize>,
}

/// Writes `count` samples of about `size` into the model directory `directory`. A sample is longer than requested if its
/// image alone takes more tokens.
///
/// # Errors
/// When the image size is not allowed, or the disk fails.
pub(super) fn write(directory: &Path, count: usize, size: Size) -> Result<Samples, Failure> {
    if let Some(side) = size.image_side
        && !SIDES.contains(&side)
    {
        return Err(Failure::usage(
            text!(
                "--image-size {side} is out of range",
                "--image-size {side} 超出范围"
            ),
            text!(
                "it must be between {} and {}",
                "它必须在 {} 和 {} 之间",
                SIDES.start(),
                SIDES.end()
            ),
        )
        .next(both(
            "omit --image-size to use the size of one slice or of the vision tower",
            "去掉 --image-size 时使用一个切片或视觉塔的大小",
        )));
    }
    let tokens = size.tokens;
    let side = size.image_side.unwrap_or_else(|| image_side(directory));
    let mut writer = FileWriter::new(directory, "\n");
    writer.put_images(IMAGES, (0..count).map(|index| image(index, side)))?;
    let shortest = measure(directory, &sample(0, 0))?;
    let filler = tokens.saturating_sub(shortest.tokens);
    let measured = measure(directory, &sample(0, filler))?;
    let samples = (0..count).map(|index| sample(index, filler));
    writer.put_json(FILE, &samples.collect())?;
    Ok(Samples { count, ..measured })
}

/// Sample with `filler` tokens more than the shortest one: three quarters in the question, one quarter in the answer.
fn sample(index: usize, filler: usize) -> Value {
    let answered = filler / 4;
    let question = format!("{}?", text(index, filler - answered));
    let answer = format!("{}.", text(index + 7, answered));
    writer::sample(IMAGES, index, &question, &answer)
}

/// `length` letters of the filler, from a position that depends on the sample. It does not start or end with a space.
fn text(index: usize, length: usize) -> String {
    let start = 5 * index % FILLER.len();
    let mut text: String = FILLER.chars().cycle().skip(start).take(length).collect();
    let ends = [
        text.starts_with(' ').then_some(0),
        text.ends_with(' ').then(|| text.len() - 1),
    ];
    for at in ends.into_iter().flatten() {
        text.replace_range(at..=at, "x");
    }
    text
}

/// Image of a bar whose position and width differ between images.
fn image(index: usize, side: usize) -> Vec<u8> {
    let start = (index * 37 + side / 4) % side;
    let width = side / 8 + index % 7;
    let pixels: Vec<bool> = (0..side * side)
        .map(|pixel| (pixel % side + side - start) % side < width)
        .collect();
    png::encode(side, &pixels, [[30, 30, 40], [220, 180, 60]])
}

/// Side of one slice for MiniCPM, and the vision tower's own side for other families.
fn image_side(directory: &Path) -> usize {
    let config: Value = fs::read(directory.join("config.json"))
        .ok()
        .and_then(|bytes| serde_json::from_slice(&bytes).ok())
        .unwrap_or_default();
    let side = match Family::of(directory) {
        Ok(Family::MiniCpm) => &config["slice_config"]["scale_resolution"],
        _ => &config["vision_config"]["image_size"],
    };
    let side = side.as_u64().and_then(|side| usize::try_from(side).ok());
    side.unwrap_or(LARGEST_SIDE).clamp(28, LARGEST_SIDE)
}

fn measure(directory: &Path, sample: &Value) -> Result<Samples, Failure> {
    // The program made these files itself, so a failure here is a bug.
    let failed = |cause: Text| {
        Failure::new(
            ErrorCode::Panic,
            both("cannot make samples", "无法生成样本"),
            cause,
        )
    };
    let processor = open_processor(directory).map_err(|error| failed(chain(&error)))?;
    let sample: RawSample =
        serde_json::from_value(sample.clone()).map_err(|error| failed(chain(&error)))?;
    let options = EncodeOptions {
        model_max_length: NO_LIMIT,
        ..EncodeOptions::default()
    };
    let images = ImageFolder::new(directory);
    let size = processor.measure(&sample, &images, &options);
    let size = size.map_err(|error| failed(chain(&error)))?;
    Ok(Samples {
        count: 1,
        tokens: size.tokens,
        image_tokens: size.image_tokens,
    })
}

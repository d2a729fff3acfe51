//! Samples that fit a folder: one picture each and text of a given length, so that it can be trained on at once.

use std::fs;
use std::path::Path;

use models::data::{EncodeOptions, RawSample};
use models::image::ImageFolder;
use models::{Family, open_processor};
use serde_json::{Value, json};

use crate::commands::demo::png;
use crate::error::{ErrorCode, Failure, chain};

/// Name of the data file.
pub(super) const FILE: &str = "samples.json";
const PICTURES: &str = "pictures";
/// Side of the pictures where the configuration leaves it open, in pixels; also the largest.
const LARGEST_SIDE: usize = 448;
/// Sides that can be asked for, in pixels.
const SIDES: std::ops::RangeInclusive<usize> = 28..=4096;
/// Long enough that nothing is cut while samples are measured.
const NO_LIMIT: usize = 1 << 24;
/// One token per byte in the tokenizers of these folders.
const FILLER: &str = "the quick brown fox jumps over the lazy dog ";

/// What was written.
#[derive(Debug)]
pub(super) struct Samples {
    pub(super) count: usize,
    /// Tokens of each.
    pub(super) tokens: usize,
    /// Of those, the picture's.
    pub(super) picture_tokens: usize,
}

/// What is asked of samples.
#[derive(Debug, Clone, Copy)]
pub(super) struct Size {
    /// Length in tokens, the picture's included.
    pub(super) tokens: usize,
    /// Side of the picture in pixels; that of one slice, or the tower's own, where nothing is said.
    pub(super) picture_side: Option<usize>,
}

/// Writes `count` samples of about `size` into the model folder `folder`. A picture that alone takes more tokens leaves
/// them longer.
///
/// # Errors
/// The picture has too few pixels, or the disk fails.
pub(super) fn write(folder: &Path, count: usize, size: Size) -> Result<Samples, Failure> {
    if let Some(side) = size.picture_side
        && !SIDES.contains(&side)
    {
        return Err(Failure::usage(
            format!("--image-size {side} is out of range"),
            format!("it must be between {} and {}", SIDES.start(), SIDES.end()),
        )
        .next("omit --image-size to use the size of one slice or of the vision tower"));
    }
    let tokens = size.tokens;
    let disk = |path: &Path| {
        let path = path.to_owned();
        move |error| Failure::io(ErrorCode::Disk, "write", &path, &error)
    };
    let pictures = folder.join(PICTURES);
    fs::create_dir(&pictures).map_err(disk(&pictures))?;
    let side = size.picture_side.unwrap_or_else(|| picture_side(folder));
    for index in 0..count {
        let path = pictures.join(picture_name(index));
        fs::write(&path, picture(index, side)).map_err(disk(&path))?;
    }
    let shortest = measure(folder, &sample(0, 0))?;
    let filler = tokens.saturating_sub(shortest.tokens);
    let measured = measure(folder, &sample(0, filler))?;
    let samples: Vec<Value> = (0..count).map(|index| sample(index, filler)).collect();
    let path = folder.join(FILE);
    let text = format!("{:#}\n", Value::from(samples));
    fs::write(&path, text).map_err(disk(&path))?;
    Ok(Samples { count, ..measured })
}

fn picture_name(index: usize) -> String {
    format!("{index:04}.png")
}

/// A sample with `filler` tokens beyond the shortest: three quarters of them asked, one quarter answered.
fn sample(index: usize, filler: usize) -> Value {
    let answered = filler / 4;
    json!({
        "id": index.to_string(),
        "image": format!("{PICTURES}/{}", picture_name(index)),
        "conversations": [
            { "role": "user", "content": format!("<image>\n{}?", text(index, filler - answered)) },
            { "role": "assistant", "content": format!("{}.", text(index + 7, answered)) },
        ],
    })
}

/// `length` letters of the filler from a place that depends on the sample; the last is no blank.
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

/// A bar whose place and width differ from picture to picture.
fn picture(index: usize, side: usize) -> Vec<u8> {
    let start = (index * 37 + side / 4) % side;
    let width = side / 8 + index % 7;
    let pixels: Vec<bool> = (0..side * side)
        .map(|pixel| (pixel % side + side - start) % side < width)
        .collect();
    png::encode(side, &pixels, [[30, 30, 40], [220, 180, 60]])
}

/// A side that makes one slice in MiniCPM, and the tower's own in the others.
fn picture_side(folder: &Path) -> usize {
    let config: Value = fs::read(folder.join("config.json"))
        .ok()
        .and_then(|bytes| serde_json::from_slice(&bytes).ok())
        .unwrap_or_default();
    let side = match Family::of(folder) {
        Ok(Family::MiniCpm) => &config["slice_config"]["scale_resolution"],
        _ => &config["vision_config"]["image_size"],
    };
    let side = side.as_u64().and_then(|side| usize::try_from(side).ok());
    side.unwrap_or(LARGEST_SIDE).clamp(28, LARGEST_SIDE)
}

fn measure(folder: &Path, sample: &Value) -> Result<Samples, Failure> {
    // Files of our own making: a failure here is a mistake of this program.
    let failed = |cause: String| Failure::new(ErrorCode::Panic, "cannot make samples", cause);
    let processor = open_processor(folder).map_err(|error| failed(chain(&error)))?;
    let sample: RawSample =
        serde_json::from_value(sample.clone()).map_err(|error| failed(chain(&error)))?;
    let options = EncodeOptions {
        model_max_length: NO_LIMIT,
        ..EncodeOptions::default()
    };
    let images = ImageFolder::new(folder);
    let size = processor.measure(&sample, &images, &options);
    let size = size.map_err(|error| failed(chain(&error)))?;
    Ok(Samples {
        count: 1,
        tokens: size.tokens,
        picture_tokens: size.picture_tokens,
    })
}

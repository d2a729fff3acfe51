//! The largest possible sample of a run, from `config.json` alone, for plans without data.

use crate::cogvlm::CogConfig;
use crate::config::ConfigError;
use crate::data::{EncodedSample, Slice, Stamp};
use crate::families::Family;
use crate::glm4v::config::Glm4vConfig;
use crate::glm41v::config::{Glm41vConfig, Network};
use crate::glm41v::videos::MAX_FRAMES;
use crate::minicpm::config::MiniCpmConfig;
use crate::minicpm::frames::{MAX_GROUP, MAX_GROUPS};
use std::ops::RangeInclusive;
use std::path::Path;

/// Token id that fills the sample; every family's vocabulary has it.
const TOKEN: i32 = 5;
/// Number of text tokens in front of the image.
const FRONT: usize = 4;
/// Largest number of pixels of an image that the published files of GLM-4.1V allow.
const GLM41V_MAX_PIXELS: usize = 9_633_792;
/// Number of patches along each side of the block that one image token of GLM-4.1V stands for.
const GLM41V_MERGE: usize = 2;

/// Largest number of pixels of all frames of a video that the published files of GLM-4.1V allow.
const GLM41V_MAX_VOLUME: usize = 47_040_000;
/// Number of frames that one step of a video of GLM-4.1V holds.
const GLM41V_STEP: usize = 2;
/// Tokens around the features of a step, at least as many as its markers and its time.
const STEP_TEXT: usize = 10;

/// Bounds of a video that a plan without data counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VideoBounds {
    /// Number of frames.
    pub frames: usize,
    /// Largest area of a frame in pixels; the family's largest if absent.
    pub frame_pixels: Option<usize>,
}

/// Numbers of frames of a video that the model of the directory `dir` takes; `None` if it takes no videos.
///
/// # Errors
/// As [`largest_sample`].
pub fn video_frames(dir: &Path) -> Result<Option<RangeInclusive<usize>>, ConfigError> {
    Ok(match Family::of(dir)? {
        Family::MiniCpm => MiniCpmConfig::load(dir)?
            .takes_videos()
            .then_some(1..=MAX_GROUP * MAX_GROUPS),
        Family::Glm41v => (Glm41vConfig::load(dir)?.network == Network::Glm41v)
            .then_some(GLM41V_STEP..=MAX_FRAMES),
        Family::Glm4v | Family::CogVlm | Family::CogVlm2 | Family::CogAgent => None,
    })
}

/// Builds a sample as [`largest_sample`] does, with a video of `bounds` instead of an image. `None` if its features do
/// not fit into the tokens, or the model takes no such video.
///
/// # Errors
/// As [`largest_sample`].
pub fn largest_video(
    dir: &Path,
    max_tokens: usize,
    max_slices: usize,
    bounds: VideoBounds,
) -> Result<Option<EncodedSample>, ConfigError> {
    let known = video_frames(dir)?;
    if !known.is_some_and(|known| known.contains(&bounds.frames)) {
        return Ok(None);
    }
    let mut sample = text(max_tokens);
    let room = max_tokens.saturating_sub(FRONT + 1);
    let pixels = bounds.frame_pixels.unwrap_or(usize::MAX);
    let features = match Family::of(dir)? {
        Family::MiniCpm => {
            let config = MiniCpmConfig::load(dir)?;
            let (side, patch) = (config.slicing.scale_resolution, config.slicing.patch_size);
            // The grid with the most cells that such a frame may get.
            let cells = pixels.div_ceil(side * side).saturating_add(1);
            let slices = match pixels > side * side && max_slices > 1 {
                true => cells.min(max_slices) + 1,
                false => 1,
            };
            let group = bounds.frames.div_ceil(MAX_GROUPS);
            let frames: Vec<usize> = (0..bounds.frames).collect();
            for frames in frames.chunks(group) {
                for at in 0..slices * frames.len() {
                    let stamp = Some(Stamp {
                        tenths: None,
                        joins: at % frames.len() > 0,
                    });
                    let slice = slice(side / patch, side / patch, patch);
                    sample.slices.push(Slice { stamp, ..slice });
                }
            }
            let blocks = slices * bounds.frames.div_ceil(group);
            (blocks, config.query_num, config.query_num + 2)
        }
        _ => {
            let patch = Glm41vConfig::load(dir)?.vision.patch_size;
            let block = patch * GLM41V_MERGE;
            let steps = bounds.frames.div_ceil(GLM41V_STEP);
            let most = pixels.min(GLM41V_MAX_VOLUME / (steps * GLM41V_STEP));
            // Smaller frames are enlarged to one block at least.
            let tokens = (room / steps)
                .saturating_sub(STEP_TEXT)
                .min((most / (block * block)).max(1));
            let side = tokens.isqrt();
            let mut step = slice(side * GLM41V_MERGE, side * GLM41V_MERGE, patch);
            step.repeat_frame();
            sample.slices = vec![step; steps];
            (steps, side * side, side * side + STEP_TEXT)
        }
    };
    let (blocks, features, step) = features;
    let starts = (0..blocks).map(|k| FRONT + k * step);
    sample.image_bounds = starts.map(|at| (at, at + features)).collect();
    Ok((features > 0 && blocks * step <= room).then_some(sample))
}

/// A sample of `tokens` supervised tokens without an image.
fn text(tokens: usize) -> EncodedSample {
    EncodedSample {
        input_ids: vec![TOKEN; tokens],
        labels: vec![TOKEN; tokens],
        image_bounds: Vec::new(),
        slices: Vec::new(),
        untruncated_tokens: tokens,
    }
}

/// Builds a sample of `max_tokens` supervised tokens with one image, to plan memory without data. The image
/// has the family's largest size, as far as its features fit into the tokens. MiniCPM cuts it into at most
/// `max_slices` cells, and an image of GLM-4.1V has at most `max_pixels`, if given.
///
/// # Errors
/// [`ConfigError`] if `config.json` of the directory `dir` cannot be read or is of no known family.
pub fn largest_sample(
    dir: &Path,
    max_tokens: usize,
    max_slices: usize,
    max_pixels: Option<usize>,
) -> Result<EncodedSample, ConfigError> {
    let mut sample = text(max_tokens);
    let room = max_tokens.saturating_sub(FRONT + 1);
    match Family::of(dir)? {
        Family::MiniCpm => {
            let config = MiniCpmConfig::load(dir)?;
            let side = config.slicing.scale_resolution / config.slicing.patch_size;
            // The overview comes on top of the cells.
            let slices = if max_slices > 1 { max_slices + 1 } else { 1 };
            // A marker stands at both ends of a slice's tokens.
            let step = config.query_num + 2;
            sample.slices = vec![slice(side, side, config.slicing.patch_size); slices];
            let bounds = (0..slices.min(room / step)).map(|k| FRONT + k * step);
            sample.image_bounds = bounds.map(|at| (at, at + config.query_num)).collect();
        }
        Family::Glm4v => {
            let config = Glm4vConfig::load(dir)?;
            let grid = config.vision.grid();
            let whole = [slice(grid, grid, config.vision.patch_size)];
            place(&mut sample, room, config.features() + 2, &whole);
        }
        Family::Glm41v => {
            let patch = Glm41vConfig::load(dir)?.vision.patch_size;
            let block = patch * GLM41V_MERGE;
            let most = max_pixels.unwrap_or(usize::MAX).min(GLM41V_MAX_PIXELS);
            let tokens = room.min(most / (block * block));
            let side = tokens.isqrt();
            let grid = side * GLM41V_MERGE;
            if side > 0 {
                place(&mut sample, room, side * side, &[slice(grid, grid, patch)]);
            }
        }
        Family::CogVlm | Family::CogVlm2 | Family::CogAgent => {
            let config = CogConfig::load(dir)?;
            let grid = config.vision.grid();
            let mut towers = vec![slice(grid, grid, config.vision.patch_size)];
            if let Some(cross) = &config.cross {
                towers.push(slice(cross.grid(), cross.grid(), cross.patch_size));
            }
            place(&mut sample, room, config.features() + 2, &towers);
        }
    }
    Ok(sample)
}

fn slice(rows: usize, cols: usize, patch: usize) -> Slice {
    Slice {
        rows,
        cols,
        patches: vec![0; rows * cols * 3 * patch * patch],
        frames: 1,
        stamp: None,
    }
}

/// Puts an image of `tokens` tokens into the sample, if there is room.
fn place(sample: &mut EncodedSample, room: usize, tokens: usize, slices: &[Slice]) {
    if tokens <= room {
        sample.image_bounds = vec![(FRONT, FRONT + tokens)];
        sample.slices = slices.to_vec();
    }
}

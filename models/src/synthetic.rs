//! The largest possible sample of a run, from `config.json` alone, for plans without data.

use crate::cogvlm::CogConfig;
use crate::config::ConfigError;
use crate::data::{EncodedSample, Slice};
use crate::families::Family;
use crate::glm4v::config::Glm4vConfig;
use crate::glm41v::config::Glm41vConfig;
use crate::minicpm::config::MiniCpmConfig;
use std::path::Path;

/// Token id that fills the sample; every family's vocabulary has it.
const TOKEN: i32 = 5;
/// Number of text tokens in front of the image.
const FRONT: usize = 4;
/// Largest number of pixels of an image that the published files of GLM-4.1V allow.
const GLM41V_MAX_PIXELS: usize = 9_633_792;
/// Number of patches along each side of the block that one image token of GLM-4.1V stands for.
const GLM41V_MERGE: usize = 2;

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
    let mut sample = EncodedSample {
        input_ids: vec![TOKEN; max_tokens],
        labels: vec![TOKEN; max_tokens],
        image_bounds: Vec::new(),
        slices: Vec::new(),
        untruncated_tokens: max_tokens,
    };
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

//! Packs of GLM-4.1V.

use super::shared::{
    TOKENIZER_CASES, compare_common, encode, image_bytes, ones, own_labels, padded, special_tokens,
    tokenizer_cases, wide,
};
use super::trajectories::trajectories;
use crate::golden::{
    Case, CaseRun, Comparison, Pack, PackFamily, Section, Trajectory, compare_activation,
    compare_floats, compare_ints, quantized, read_json,
};
use crate::tolerance;
use anyhow::{Context, Result};
use kernels::{CpuBackend, DType};
use models::data::{EncodeOptions, EncodedSample, IGNORED};
use models::glm41v::config::Glm41vConfig;
use models::glm41v::positions::TokenPositions;
use models::glm41v::resize::{ImageLimits, smart_resize};
use models::{ModelOptions, Processor, SampleInput, open_model};
use serde::Deserialize;

/// Sizes that images are resized to, which a pack may lack.
const SIZES: &str = "smart_resize_cases.json";
/// The flat configuration beside a nested one, which a pack may lack. A pack with one layout has `config.json` alone.
const FLAT: &str = "config.flat.json";

/// Reader of these packs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Glm41vPacks;

impl PackFamily for Glm41vPacks {
    fn samples(
        &self,
        pack: &Pack,
        case: &Case,
        processor: &dyn Processor,
    ) -> Result<Vec<EncodedSample>> {
        encode(pack, case, processor, &EncodeOptions::default())
    }

    fn compare_inputs(
        &self,
        pack: &Pack,
        case: &Case,
        processor: &dyn Processor,
        samples: &[EncodedSample],
    ) -> Result<Vec<Comparison>> {
        let patch = Glm41vConfig::load(&pack.dir)?.vision.patch_size;
        let end = i64::from(processor.tokenizer().id("<|endoftext|>")?);
        let mut all = Vec::new();
        for (name, stored) in &case.expected.0 {
            let (kind, rest) = name.split_once('.').unwrap_or((name, ""));
            let length = stored.shape.last().copied().unwrap_or(0);
            let rows = |filler: i64, row: &dyn Fn(&EncodedSample) -> Vec<i64>| {
                padded(samples.iter().map(row), length, filler)
            };
            let ours = match kind {
                "input_ids" => rows(end, &|s| wide(&s.input_ids)),
                "labels" => rows(i64::from(IGNORED), &own_labels),
                "attention_mask" => rows(0, &ones),
                // The published code leaves the positions of padding at one.
                "position_ids" => (0..3)
                    .flat_map(|axis| rows(1, &|s| wide(&positions(s).rows[axis])))
                    .collect(),
                "mm_token_type_ids" => rows(0, &kinds),
                "image_grid_thw" => samples.iter().flat_map(grids).collect(),
                "resized_u8" => {
                    let k: usize = rest.parse().context("resized_u8 without a number")?;
                    image_bytes(&samples[0], k, patch).unwrap_or_default()
                }
                "pixel_values" => {
                    let ours = pixels(pack, samples)?;
                    let bound = tolerance::PIXEL;
                    all.push(compare_floats(name, &ours, stored.floats()?, bound));
                    continue;
                }
                _ => continue,
            };
            all.push(compare_ints(name, &ours, stored.ints()?));
        }
        Ok(all)
    }

    fn compare_run(
        &self,
        case: &Case,
        samples: &[EncodedSample],
        run: &CaseRun,
    ) -> Result<Vec<Comparison>> {
        let mut all = Vec::new();
        let own = |name: &&String| !quantized::is_own(name);
        for (name, stored) in case.expected.0.iter().filter(|(name, _)| own(name)) {
            let (kind, rest) = name.split_once('.').unwrap_or((name, ""));
            let tap = |tap: &str| compare_activation(name, run.taps.get(tap), stored);
            let compared = match kind {
                "input_ids" | "labels" | "attention_mask" | "position_ids"
                | "mm_token_type_ids" | "image_grid_thw" | "resized_u8" | "pixel_values" => {
                    continue;
                }
                "patch_embed" => tap("vision.patch_embed")?,
                "vit_embed" => tap("vision.embed")?,
                "vit_hidden" => tap(&format!("vision.block.{rest}"))?,
                "vit_out" => tap("vision.post_layernorm")?,
                _ => compare_common(name, stored, samples, run)?
                    .unwrap_or_else(|| Comparison::failed(name, "not a known quantity")),
            };
            all.push(compared);
        }
        Ok(all)
    }

    fn trajectories(&self, pack: &Pack, processor: &dyn Processor) -> Result<Vec<Trajectory>> {
        trajectories(pack, processor)
    }

    fn tables(&self, pack: &Pack, processor: &dyn Processor) -> Result<Vec<Section>> {
        let has = |name: &str| pack.dir.join(name).is_file();
        let mut tables = Vec::new();
        if has(TOKENIZER_CASES) {
            tables.push(special_tokens(pack, processor)?);
            tables.push(tokenizer_cases(pack, "with_specials", |text| {
                Ok(processor.tokenizer().encode(text)?)
            })?);
        }
        if has(SIZES) {
            tables.push(sizes(pack)?);
        }
        if has(FLAT) {
            tables.push(layouts(pack)?);
        }
        Ok(vec![("tables".into(), tables)])
    }
}

/// Positions of a sample as the model computes them.
fn positions(sample: &EncodedSample) -> TokenPositions {
    let images = sample.image_bounds.iter().zip(&sample.slices);
    let images: Vec<_> = images
        .map(|((start, _), slice)| (*start, [slice.rows / 2, slice.cols / 2]))
        .collect();
    TokenPositions::new(sample.input_ids.len(), &images)
}

/// 1 for image tokens, 0 for text.
fn kinds(sample: &EncodedSample) -> Vec<i64> {
    let inside = |i: &usize| sample.image_bounds.iter().any(|(s, e)| s <= i && i < e);
    let tokens = 0..sample.input_ids.len();
    tokens.map(|i| i64::from(inside(&i))).collect()
}

fn grids(sample: &EncodedSample) -> Vec<i64> {
    let slices = sample.slices.iter();
    slices
        .flat_map(|s| [1, s.rows as i64, s.cols as i64])
        .collect()
}

/// Inputs of the patch embedding as the model computes them.
fn pixels(pack: &Pack, samples: &[EncodedSample]) -> Result<Vec<f32>> {
    let model = open_model(&pack.dir, ModelOptions::new(DType::F32))?;
    let inputs: Vec<SampleInput<'_>> = samples.iter().map(SampleInput::from).collect();
    let batch = model.collate(&inputs, &CpuBackend::unlimited())?;
    let vision = batch.vision.context("no pictures in the batch")?;
    Ok(vision.patches.to_f32_vec()?)
}

/// Compares `smart_resize_cases.json`.
fn sizes(pack: &Pack) -> Result<Comparison> {
    #[derive(Deserialize)]
    struct Row {
        height: usize,
        width: usize,
        min_pixels: usize,
        max_pixels: usize,
        out_height: i64,
        out_width: i64,
    }
    let rows: Vec<Row> = read_json(&pack.dir.join(SIZES))?;
    let ours = rows.iter().flat_map(|row| {
        let limits = ImageLimits {
            block: 28,
            frames: 2,
            min_pixels: row.min_pixels,
            max_pixels: row.max_pixels,
        };
        let size = smart_resize((row.width, row.height), &limits);
        size.map_or([-1, -1], |(w, h)| [w as i64, h as i64])
    });
    let ours: Vec<i64> = ours.collect();
    let theirs = rows.iter().flat_map(|row| [row.out_width, row.out_height]);
    let theirs: Vec<i64> = theirs.collect();
    Ok(compare_ints("smart_resize_cases", &ours, &theirs))
}

/// Compares the models of the nested and the flat configuration.
fn layouts(pack: &Pack) -> Result<Comparison> {
    let path = pack.dir.join(FLAT);
    let flat = Glm41vConfig::parse(&std::fs::read(&path)?, &path)?;
    let same = flat == Glm41vConfig::load(&pack.dir)?;
    Ok(compare_ints(FLAT, &[i64::from(same)], &[1]))
}

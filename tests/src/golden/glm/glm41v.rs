//! Packs of GLM-4.1V, GLM-4.6V-Flash and GLM-OCR.

use super::greedy::compare_greedy;
use super::shared::{
    TOKENIZER_CASES, compare_common, encode, image_bytes, ones, own_labels, padded, special_tokens,
    tokenizer_cases, wide,
};
use crate::golden::trajectories::trajectories;
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
use models::text::{ChatTemplate, Message};
use models::{ModelOptions, Processor, SampleInput, open_model};
use serde::Deserialize;
use serde_json::Value;

/// Sizes that images are resized to, which a pack may lack.
const SIZES: &str = "smart_resize_cases.json";
/// Other configurations of the same model, which a pack may lack.
const OTHERS: [&str; 3] = [
    "config.flat.json",
    "config.glm46v.json",
    "config.glm4v.json",
];

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
        let tokenizer = processor.tokenizer();
        let end = i64::from(tokenizer.id("<|endoftext|>")?);
        // The published code of GLM-4.1V leaves the positions of padding at one; the later ones at zero.
        let padding = i64::from(tokenizer.id("/nothink").is_err());
        let video_marks = ["<|begin_of_video|>", "<|end_of_video|>"];
        let video_marks = [tokenizer.id(video_marks[0])?, tokenizer.id(video_marks[1])?];
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
                "position_ids" => (0..3)
                    .flat_map(|axis| rows(padding, &|s| wide(&positions(s).rows[axis])))
                    .collect(),
                "mm_token_type_ids" => rows(0, &|s| kinds(s, video_marks)),
                "image_grid_thw" => samples.iter().flat_map(grids).collect(),
                "video_grid_thw" => video_grids(samples),
                "greedy_ids" => {
                    let ids = |_: &[(usize, usize)], ids| ids;
                    all.extend(compare_greedy(pack, case, processor, &ids)?);
                    continue;
                }
                "resized_u8" => {
                    let k: usize = rest.parse().context("resized_u8 without a number")?;
                    image_bytes(&samples[0], k, patch).unwrap_or_default()
                }
                "pixel_values" | "pixel_values_videos" => {
                    let ours = pixels(pack, samples)?;
                    let bound = match kind {
                        "pixel_values" => tolerance::PIXEL,
                        _ => tolerance::VIDEO_PIXEL,
                    };
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
                "input_ids"
                | "labels"
                | "attention_mask"
                | "position_ids"
                | "mm_token_type_ids"
                | "image_grid_thw"
                | "video_grid_thw"
                | "resized_u8"
                | "pixel_values"
                | "pixel_values_videos"
                | "greedy_prompt_ids"
                | "greedy_ids"
                | "greedy_margin" => continue,
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
        trajectories(pack, &|case| self.samples(pack, case, processor))
    }

    fn tables(&self, pack: &Pack, processor: &dyn Processor) -> Result<Vec<Section>> {
        let has = |name: &str| pack.dir.join(name).is_file();
        let mut tables = Vec::new();
        if has(TOKENIZER_CASES) {
            tables.push(special_tokens(pack, processor)?);
            tables.push(tokenizer_cases(pack, "with_specials", |text| {
                Ok(processor.tokenizer().encode(text)?)
            })?);
            tables.extend(chat(pack, processor)?);
        }
        if has(SIZES) {
            tables.push(sizes(pack)?);
        }
        for other in OTHERS.into_iter().filter(|other| has(other)) {
            tables.push(same_model(pack, other)?);
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

/// 1 for image tokens, 2 for those between the marks of a video, 0 for text.
fn kinds(sample: &EncodedSample, [start, end]: [i32; 2]) -> Vec<i64> {
    let inside = |i: usize| sample.image_bounds.iter().any(|(s, e)| *s <= i && i < *e);
    let mut of_video = false;
    let tokens = sample.input_ids.iter().enumerate();
    let kind = |(i, id): (usize, &i32)| {
        of_video = (of_video || *id == start) && *id != end;
        i64::from(inside(i)) * (1 + i64::from(of_video))
    };
    tokens.map(kind).collect()
}

/// Steps, rows and columns of each video; all steps of a sample are those of its only video.
fn video_grids(samples: &[EncodedSample]) -> Vec<i64> {
    let grid = |s: &EncodedSample| {
        let first = s.slices.first().filter(|slice| slice.frames > 1)?;
        Some([s.slices.len() as i64, first.rows as i64, first.cols as i64])
    };
    samples.iter().filter_map(grid).flatten().collect()
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

/// Compares the model of another configuration with that of `config.json`.
fn same_model(pack: &Pack, other: &str) -> Result<Comparison> {
    let path = pack.dir.join(other);
    let model = Glm41vConfig::parse(&std::fs::read(&path)?, &path)?;
    let same = model == Glm41vConfig::load(&pack.dir)?;
    Ok(compare_ints(other, &[i64::from(same)], &[1]))
}

/// Compares the texts and ids that the pack's chat template gives; `tokenizer_cases.json` may lack them.
fn chat(pack: &Pack, processor: &dyn Processor) -> Result<Vec<Comparison>> {
    #[derive(Deserialize)]
    struct Stored {
        #[serde(default)]
        chat_prompts: Vec<Prompt>,
    }
    #[derive(Deserialize)]
    struct Prompt {
        messages: Vec<Value>,
        add_generation_prompt: bool,
        enable_thinking: Option<bool>,
        text: String,
        ids: Vec<i64>,
    }
    let stored: Stored = read_json(&pack.dir.join(TOKENIZER_CASES))?;
    let mut all = Vec::new();
    for prompt in &stored.chat_prompts {
        let tokenizer = processor.tokenizer();
        let template = ChatTemplate::load(&pack.dir, tokenizer)?;
        let messages: Vec<Message> = prompt.messages.iter().map(shown).collect();
        let text = template.render_thinking(
            &messages,
            prompt.add_generation_prompt,
            prompt.enable_thinking,
        )?;
        let name = "tokenizer_cases chat_prompts";
        all.push(compare_ints(name, &[i64::from(text == prompt.text)], &[1]));
        all.push(compare_ints(
            name,
            &wide(&tokenizer.encode(&prompt.text)?),
            &prompt.ids,
        ));
    }
    Ok(all)
}

/// A stored message, with the placeholders of its images in the text.
fn shown(message: &Value) -> Message {
    let text = |field: &str| message[field].as_str().unwrap_or_default().to_owned();
    let content = text("content")
        .replace("<image>", "<|begin_of_image|><|image|><|end_of_image|>")
        .replace("<video>", "<|begin_of_video|><|video|><|end_of_video|>");
    Message::new(text("role"), content)
}

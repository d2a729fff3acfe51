//! Packs of GLM-4V. Their batches are padded on the left and stored before and after the expansion of image tokens.

use super::greedy::compare_greedy;
use super::shared::{
    TOKENIZER_CASES, compare_common, encode, image_bytes, ones, own_labels, padded, special_tokens,
    tokenizer_cases, wide,
};
use crate::golden::trajectories::trajectories;
use crate::golden::{
    Case, CaseRun, Comparison, Pack, PackFamily, Section, Trajectory, compare_activation,
    compare_floats, compare_ints, compare_loss, read_json,
};
use crate::tolerance;
use crate::world::{Layout, run_case};
use anyhow::{Context, Result};
use kernels::{CpuBackend, DType};
use models::data::{EncodeOptions, EncodedSample, IGNORED, PlaceholderStyle, RawSample};
use models::glm4v::agent::AgentPrompt;
use models::glm4v::config::Glm4vConfig;
use models::glm4v::positions::token_positions;
use models::image::ImageFolder;
use models::text::Message;
use models::{ModelOptions, Processor, SampleInput, open_model};
use serde::Deserialize;

/// File of agent prompts, which a pack may lack.
const AGENT_PROMPTS: &str = "prompt_cases.json";

/// Reader of these packs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Glm4vPacks;

impl PackFamily for Glm4vPacks {
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
        let patch = Glm4vConfig::load(&pack.dir)?.vision.patch_size;
        // Labels that include the role token after an answer.
        let with_turn_end = EncodeOptions {
            train_on_turn_end: true,
            ..EncodeOptions::default()
        };
        let ended = encode(pack, case, processor, &with_turn_end)?;
        let ignored = i64::from(IGNORED);
        let end = i64::from(processor.tokenizer().id("<|endoftext|>")?);
        let mut all = Vec::new();
        for (name, stored) in &case.expected.0 {
            let length = stored.shape.last().copied().unwrap_or(0);
            let rows = |filler: i64, row: &dyn Fn(&EncodedSample) -> Vec<i64>| {
                padded(samples.iter().map(row), length, filler)
            };
            let ours = match name.as_str() {
                "input_ids" => rows(end, &|s| folded(s, wide(&s.input_ids))),
                "labels" => rows(ignored, &|s| folded(s, own_labels(s))),
                "labels_train_eos" => {
                    let row = |s: &EncodedSample| folded(s, own_labels(s));
                    padded(ended.iter().map(row), length, ignored)
                }
                "position_ids" => rows(0, &|s| folded(s, positions(s))),
                "attention_mask" => rows(0, &|s| folded(s, ones(s))),
                "expanded_position_ids" => rows(0, &positions),
                "expanded_attention_mask" => rows(0, &ones),
                "expanded_labels" => rows(ignored, &own_labels),
                "image_span" => spans(samples),
                "resized_u8" => image_bytes(&samples[0], 0, patch).unwrap_or_default(),
                "n_loss_tokens_train_eos" => {
                    let counts = ended.iter().map(EncodedSample::supervised_tokens);
                    vec![counts.sum::<usize>() as i64]
                }
                "pixel_values" => {
                    let ours = pixels(pack, &samples[0], patch)?;
                    let bound = tolerance::PIXEL;
                    all.push(compare_floats(name, &ours, stored.floats()?, bound));
                    continue;
                }
                "loss_train_eos" => {
                    let run = run_case(pack, &ended, Layout::SINGLE)?;
                    let mut compared = compare_loss(&run, stored)?;
                    compared.quantity.clone_from(name);
                    all.push(compared);
                    continue;
                }
                "greedy_ids" => {
                    all.extend(compare_greedy(pack, case, processor, &fold)?);
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
        for (name, stored) in &case.expected.0 {
            let kind = name.split('.').next().unwrap_or_default();
            let compared = match kind {
                "input_ids"
                | "labels"
                | "labels_train_eos"
                | "position_ids"
                | "attention_mask"
                | "expanded_position_ids"
                | "expanded_attention_mask"
                | "expanded_labels"
                | "image_span"
                | "resized_u8"
                | "pixel_values"
                | "n_loss_tokens_train_eos"
                | "loss_train_eos"
                | "greedy_prompt_ids"
                | "greedy_ids"
                | "greedy_margin" => continue,
                "vit_hidden" => compare_activation(name, run.taps.get("vision.tower"), stored)?,
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
        if !pack.dir.join(TOKENIZER_CASES).is_file() {
            return Ok(Vec::new());
        }
        let text = tokenizer_cases(pack, "ordinary", |text| {
            Ok(processor.tokenizer().encode_plain(text)?)
        })?;
        let mut tables = vec![special_tokens(pack, processor)?, text];
        tables.extend(chat(pack, processor)?);
        if pack.dir.join(AGENT_PROMPTS).is_file() {
            tables.push(agent_prompts(pack)?);
        }
        Ok(vec![("tables".into(), tables)])
    }
}

/// Values per token before image expansion: one entry for all features of an image.
fn folded(sample: &EncodedSample, values: Vec<i64>) -> Vec<i64> {
    fold(&sample.image_bounds, values)
}

/// Ids before the expansion of images.
fn fold(bounds: &[(usize, usize)], mut values: Vec<i64>) -> Vec<i64> {
    for (start, end) in bounds.iter().rev() {
        values.drain(start + 2..end - 1);
    }
    values
}

fn positions(sample: &EncodedSample) -> Vec<i64> {
    wide(&token_positions(
        sample.input_ids.len(),
        &sample.image_bounds,
    ))
}

/// First row and number of rows of each image in a batch padded on the left.
fn spans(samples: &[EncodedSample]) -> Vec<i64> {
    let longest = samples.iter().map(|s| s.input_ids.len()).max().unwrap_or(0);
    let span = |s: &EncodedSample| {
        let padding = longest - s.input_ids.len();
        let bounds = s.image_bounds.clone().into_iter();
        bounds.flat_map(move |(start, end)| [(padding + start) as i64, (end - start) as i64])
    };
    samples.iter().flat_map(span).collect()
}

/// Pixels `[3, side, side]` as the model computes them.
fn pixels(pack: &Pack, sample: &EncodedSample, patch: usize) -> Result<Vec<f32>> {
    let model = open_model(&pack.dir, ModelOptions::new(DType::F32))?;
    let batch = model.collate(&[SampleInput::from(sample)], &CpuBackend::unlimited())?;
    let vision = batch.vision.context("no picture in the batch")?;
    let rows = vision.patches.to_f32_vec()?;
    let cols = sample.slices[0].cols;
    let side = cols * patch;
    let at = |i: usize| {
        let (c, y, x) = (i / (side * side), i / side % side, i % side);
        let plane = (y / patch * cols + x / patch) * 3 + c;
        rows[(plane * patch + y % patch) * patch + x % patch]
    };
    Ok((0..3 * side * side).map(at).collect())
}

/// Compares `prompt_cases.json`, the prompts of an agent.
fn agent_prompts(pack: &Pack) -> Result<Comparison> {
    #[derive(Deserialize)]
    struct Row {
        query: String,
        #[serde(flatten)]
        parts: serde_json::Map<String, serde_json::Value>,
    }
    let rows: Vec<Row> = read_json(&pack.dir.join(AGENT_PROMPTS))?;
    let mut same = Vec::new();
    for row in &rows {
        let prompt: AgentPrompt = serde_json::from_value(row.parts.clone().into())?;
        let ours = prompt.query().map_err(anyhow::Error::msg)?;
        same.push(i64::from(ours == row.query));
    }
    Ok(compare_ints(AGENT_PROMPTS, &same, &vec![1; rows.len()]))
}

/// Compares prompts and decoded ids of `tokenizer_cases.json`.
fn chat(pack: &Pack, processor: &dyn Processor) -> Result<Vec<Comparison>> {
    #[derive(Deserialize)]
    struct Stored {
        chat_prompts: Vec<Prompt>,
        partial_decode: Vec<Decoded>,
    }
    #[derive(Deserialize)]
    struct Prompt {
        messages: Vec<Message>,
        image_on_first: bool,
        ids: Vec<i64>,
    }
    #[derive(Deserialize)]
    struct Decoded {
        ids: Vec<i32>,
        text: String,
    }
    let stored: Stored = read_json(&pack.dir.join(TOKENIZER_CASES))?;
    let mut all = Vec::new();
    for prompt in stored.chat_prompts {
        let style = match prompt.image_on_first {
            true => PlaceholderStyle::Training,
            false => PlaceholderStyle::Inference,
        };
        let sample = RawSample {
            conversations: prompt.messages,
            ..RawSample::default()
        };
        let (images, options) = (ImageFolder::new(&pack.dir), EncodeOptions::default());
        let ours = processor.encode_prompt(&sample, &images, &options, style)?;
        let ids = fold(&ours.image_bounds, wide(&ours.input_ids));
        all.push(compare_ints(
            "tokenizer_cases chat_prompts",
            &ids,
            &prompt.ids,
        ));
    }
    for case in stored.partial_decode {
        let ours = processor.tokenizer().decode(&case.ids)?;
        let same = i64::from(ours == case.text);
        all.push(compare_ints(
            "tokenizer_cases partial_decode",
            &[same],
            &[1],
        ));
    }
    Ok(all)
}

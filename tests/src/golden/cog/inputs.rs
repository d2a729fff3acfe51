//! Stored inputs of a case.

use super::super::compare::{Comparison, compare_floats, compare_ints};
use super::super::pack::{Case, Pack, Stored, read_json};
use super::Conversation;
use anyhow::Result;
use models::Processor;
use models::cogvlm::CogConfig;
use models::cogvlm::positions::{position_ids, token_types, vision_mask};
use models::data::{EncodedSample, IGNORED, PlaceholderStyle, Slice};
use models::image::ImageFolder;
use models::processor::Normalization;

/// Prefixes of the names compared here.
pub(super) const KINDS: [&str; 9] = [
    "input_ids",
    "labels",
    "attention_mask",
    "token_type_ids",
    "position_ids",
    "vision_expert_mask",
    "pixel_values",
    "cross_pixel_values",
    "sat",
];

/// Compares ids, labels, masks, positions, pixels and prompts exactly.
pub(super) fn compare(
    pack: &Pack,
    case: &Case,
    processor: &dyn Processor,
    samples: &[EncodedSample],
) -> Result<Vec<Comparison>> {
    let config = CogConfig::load(&pack.dir)?;
    let pad = i64::from(config.pad);
    let mut all = Vec::new();
    for (name, stored) in &case.expected.0 {
        let fill = |filler: i64, field: &dyn Fn(&EncodedSample) -> Vec<i64>| -> Vec<i64> {
            let longest = stored.shape.last().copied().unwrap_or(0);
            let row = |s: &EncodedSample| {
                let mut row = field(s);
                row.resize(longest, filler);
                row
            };
            samples.iter().flat_map(row).collect()
        };
        let got = match name.as_str() {
            "input_ids" => fill(pad, &|s| wide(&s.input_ids)),
            "labels" => fill(i64::from(IGNORED), &unshifted),
            "attention_mask" => fill(0, &|s| vec![1; s.input_ids.len()]),
            "token_type_ids" => fill(0, &|s| bits(&types(s))),
            "vision_expert_mask" => fill(0, &|s| bits(&vision_mask(&types(s)))),
            "position_ids" => {
                let longest = stored.shape.last().copied().unwrap_or(0);
                fill(0, &|s| {
                    // Padding repeats the last position.
                    let mut row = wide(&position_ids(&types(s)));
                    row.resize(longest, row.last().copied().unwrap_or(0));
                    row
                })
            }
            "pixel_values" => {
                all.push(pixels(name, samples, 0, &config, stored)?);
                continue;
            }
            "cross_pixel_values" => {
                all.push(pixels(name, samples, 1, &config, stored)?);
                continue;
            }
            _ => continue,
        };
        all.push(compare_ints(name, &got, stored.ints()?));
    }
    let path = case.dir.join("conversation.json");
    if let Ok(conversation) = read_json::<Conversation>(&path) {
        let images = ImageFolder::beside(&path);
        all.extend(prompts(&conversation, &images, processor, samples)?);
        if case.expected.get("sat.input_ids").is_ok() {
            let options = conversation.sat()?;
            let sample = processor.encode(&conversation.sat_raw(), &images, &options)?;
            all.extend(scripts(case, &sample, pad)?);
        }
    }
    Ok(all)
}

/// Compares the prompt's text and the tokens that generation starts from.
fn prompts(
    conversation: &Conversation,
    images: &ImageFolder,
    processor: &dyn Processor,
    samples: &[EncodedSample],
) -> Result<Vec<Comparison>> {
    let (raw, options) = (conversation.raw(), conversation.hub()?);
    let answer = raw.answer().unwrap_or_default();
    let mut all = Vec::new();
    if let Some(rendered) = &conversation.rendered_prompt {
        let text = processor.render(&raw, images, &options)?;
        let bytes = |text: &str| text.bytes().map(i64::from).collect::<Vec<_>>();
        let want = format!("{rendered}{answer}");
        all.push(compare_ints(
            "rendered_prompt",
            &bytes(&text),
            &bytes(&want),
        ));
    }
    let style = PlaceholderStyle::Training;
    let prompt = processor.encode_prompt(&raw, images, &options, style)?;
    let sample = &samples[0];
    let first = sample.labels.iter().position(|l| *l != IGNORED);
    let context = first.map_or(0, |first| first + 1);
    all.push(compare_ints(
        "prompt ids",
        &wide(&prompt.input_ids),
        &wide(&sample.input_ids[..context]),
    ));
    Ok(all)
}

/// Compares the rows of the training scripts, padded to their length.
fn scripts(case: &Case, sample: &EncodedSample, pad: i64) -> Result<Vec<Comparison>> {
    let types = types(sample);
    let positions = wide(&position_ids(&types));
    let places = |margin: usize| {
        let mut mask = vec![0; types.len()];
        for (start, end) in &sample.image_bounds {
            mask[start + margin..end - margin].fill(1);
        }
        mask
    };
    let labels = unshifted(sample);
    let context = labels.iter().position(|l| *l != i64::from(IGNORED));
    let mut all = Vec::new();
    for (name, stored) in &case.expected.0 {
        let Some(kind) = name.strip_prefix("sat.") else {
            continue;
        };
        let longest = stored.shape.last().copied().unwrap_or(0);
        let fill = |mut row: Vec<i64>, filler: i64| {
            row.resize(longest, filler);
            row
        };
        let got = match kind {
            "input_ids" => fill(wide(&sample.input_ids), pad),
            "labels" => fill(labels.clone(), i64::from(IGNORED)),
            "image_embed_mask" => fill(places(0), 0),
            "image_rope_mask" => fill(places(1), 0),
            "vision_expert_mask" => fill(bits(&vision_mask(&types)), 0),
            "context_length" => vec![context.unwrap_or(0) as i64],
            // The scripts continue to count over padding.
            "position_ids" => {
                let last = positions.last().copied().unwrap_or(0);
                let more = (longest - positions.len()) as i64;
                positions
                    .iter()
                    .copied()
                    .chain(last + 1..=last + more)
                    .collect()
            }
            _ => {
                all.push(Comparison::failed(name, "not a known quantity"));
                continue;
            }
        };
        all.push(compare_ints(name, &got, stored.ints()?));
    }
    Ok(all)
}

fn types(sample: &EncodedSample) -> Vec<bool> {
    token_types(sample.input_ids.len(), &sample.image_bounds)
}

fn bits(mask: &[bool]) -> Vec<i64> {
    mask.iter().map(|bit| i64::from(*bit)).collect()
}

fn wide(ids: &[i32]) -> Vec<i64> {
    ids.iter().map(|id| i64::from(*id)).collect()
}

/// The label of each position, before the shift by one.
fn unshifted(sample: &EncodedSample) -> Vec<i64> {
    let labels = sample.labels.iter().map(|label| i64::from(*label));
    let all = std::iter::once(i64::from(IGNORED)).chain(labels);
    all.take(sample.labels.len()).collect()
}

/// Images of one tower as `[N, 3, side, side]`.
fn pixels(
    name: &str,
    samples: &[EncodedSample],
    tower: usize,
    config: &CogConfig,
    stored: &Stored,
) -> Result<Comparison> {
    let side = match (&config.cross, tower) {
        (Some(cross), 1) => cross.patch_size,
        _ => config.vision.patch_size,
    };
    let step = config.slices_per_image();
    let normalization = Normalization::clip();
    let slices = samples
        .iter()
        .flat_map(|s| s.slices.iter().skip(tower).step_by(step));
    let image = |slice: &Slice| {
        let values = normalization.normalize_patches(&slice.patches, side);
        let width = slice.cols * side;
        let mut image = vec![0.0; values.len()];
        for (i, value) in values.into_iter().enumerate() {
            let (patch, within) = (i / (3 * side * side), i % (3 * side * side));
            let (c, y, x) = (within / (side * side), within / side % side, within % side);
            let row = patch / slice.cols * side + y;
            let col = patch % slice.cols * side + x;
            image[(c * slice.rows * side + row) * width + col] = value;
        }
        image
    };
    let got: Vec<f32> = slices.flat_map(image).collect();
    Ok(compare_floats(name, &got, stored.floats()?, 0.0))
}

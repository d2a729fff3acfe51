//! Samples and quantities that the packs of both models store.

use crate::golden::{
    Case, CaseRun, Comparison, Pack, Stored, compare_computed, compare_floats, compare_gradient,
    compare_ints, compare_loss, largest_gradient, read_json,
};
use crate::tolerance;
use anyhow::{Context, Result};
use models::Processor;
use models::data::{EncodeOptions, EncodedSample, IGNORED, RawSample, SINGLE_IMAGE};
use models::image::ImageFolder;
use models::text::Message;
use serde::Deserialize;
use std::path::{Path, PathBuf};

/// Contents of a `conversation.json`.
#[derive(Deserialize)]
struct Conversation {
    messages: Vec<Turn>,
    #[serde(default)]
    images: Vec<PathBuf>,
}

#[derive(Deserialize)]
struct Turn {
    role: String,
    content: String,
    image: Option<PathBuf>,
}

#[derive(Deserialize, Default)]
struct Batch {
    #[serde(default)]
    batch_of: Vec<String>,
}

/// Directories of a case's samples: its own, or those of the cases in its batch.
pub(super) fn directories(case: &Case) -> Result<Vec<PathBuf>> {
    let batch: Batch = read_json(&case.dir.join("conversation.json"))?;
    if batch.batch_of.is_empty() {
        return Ok(vec![case.dir.clone()]);
    }
    let names = batch.batch_of.iter();
    Ok(names.map(|name| case.dir.with_file_name(name)).collect())
}

/// The sample in the directory `dir`.
pub(super) fn raw_sample(dir: &Path) -> Result<RawSample> {
    let stored: Conversation = read_json(&dir.join("conversation.json"))?;
    let of_turns = stored.messages.iter().filter_map(|turn| turn.image.clone());
    let images = of_turns.chain(stored.images);
    let images = images.map(|path| (SINGLE_IMAGE.to_owned(), path)).collect();
    let turn = |turn: Turn| Message::new(turn.role, turn.content);
    Ok(RawSample {
        id: None,
        images,
        conversations: stored.messages.into_iter().map(turn).collect(),
    })
}

/// Encodes the samples of a case as for training.
pub(super) fn encode(
    case: &Case,
    processor: &dyn Processor,
    options: &EncodeOptions,
) -> Result<Vec<EncodedSample>> {
    let encode = |dir: PathBuf| {
        let raw = raw_sample(&dir)?;
        let images = ImageFolder::new(&dir);
        let sample = processor.encode(&raw, &images, options);
        sample.with_context(|| format!("encoding {}", dir.display()))
    };
    directories(case)?.into_iter().map(encode).collect()
}

/// Labels before the shift by one, as the packs store them.
pub(super) fn own_labels(sample: &EncodedSample) -> Vec<i64> {
    let shifted = sample.labels.iter().take(sample.labels.len() - 1);
    std::iter::once(&IGNORED)
        .chain(shifted)
        .map(|label| i64::from(*label))
        .collect()
}

/// `ids` as i64.
pub(super) fn wide(ids: &[i32]) -> Vec<i64> {
    ids.iter().map(|id| i64::from(*id)).collect()
}

/// Pixels of image `k` of a sample, `[height, width, 3]`.
pub(super) fn image_bytes(sample: &EncodedSample, k: usize, patch: usize) -> Option<Vec<i64>> {
    let slice = sample.slices.get(k)?;
    let plane = patch * patch;
    let byte = |y: usize, x: usize, c: usize| {
        let at = (y / patch * slice.cols + x / patch) * 3 + c;
        i64::from(slice.patches[at * plane + y % patch * patch + x % patch])
    };
    let rows = 0..slice.rows * patch;
    let cols = 0..slice.cols * patch;
    let pixels = rows.flat_map(|y| cols.clone().map(move |x| (y, x)));
    Some(
        pixels
            .flat_map(|(y, x)| (0..3).map(move |c| (y, x, c)))
            .map(|(y, x, c)| byte(y, x, c))
            .collect(),
    )
}

/// Compares a value that both models store; `None` for any other name.
pub(super) fn compare_common(
    name: &str,
    stored: &Stored,
    samples: &[EncodedSample],
    run: &CaseRun,
) -> Result<Option<Comparison>> {
    let (kind, rest) = name.split_once('.').unwrap_or((name, ""));
    let tap = |tap: &str| compare_computed(name, run.taps.get(tap), stored, tolerance::ACTIVATION);
    let compared = match kind {
        "conv_out" => tap("vision.conv")?,
        "vision_features" => compare_computed(
            name,
            run.taps.get("vision_features"),
            stored,
            tolerance::GLM_FEATURES,
        )?,
        "inputs_embeds" | "hidden" | "final_hidden" => tap(name)?,
        "logits" if rest.is_empty() => {
            compare_computed(name, run.logits.as_ref(), stored, tolerance::ACTIVATION)?
        }
        "loss" => compare_loss(run, stored)?,
        "n_loss_tokens" => {
            let supervised: usize = samples.iter().map(EncodedSample::supervised_tokens).sum();
            compare_ints(name, &[supervised as i64], stored.ints()?)
        }
        "grad_norm" => grad_norm(run, stored)?,
        "grad" => compare_gradient(run, name, stored, largest_gradient(run))?,
        _ => return Ok(None),
    };
    Ok(Some(compared))
}

/// Compares the L2 norm of all gradients together.
fn grad_norm(run: &CaseRun, stored: &Stored) -> Result<Comparison> {
    let squares = run.grads.values().flatten().map(|g| f64::from(*g).powi(2));
    let norm = squares.sum::<f64>().sqrt() as f32;
    let want = stored.floats()?;
    let bound = tolerance::GRAD_NORM * f64::from(want[0]);
    Ok(compare_floats("grad_norm", &[norm], want, bound))
}

/// Compares the ids of the texts under `list` in `tokenizer_cases.json`.
pub(super) fn tokenizer_cases(
    pack: &Pack,
    list: &str,
    encode: impl Fn(&str) -> Result<Vec<i32>>,
) -> Result<Comparison> {
    #[derive(Deserialize)]
    struct Text {
        text: String,
        ids: Vec<i64>,
    }
    let stored: serde_json::Value = read_json(&pack.dir.join("tokenizer_cases.json"))?;
    let texts = stored.get(list).cloned();
    let texts: Vec<Text> = serde_json::from_value(texts.with_context(|| format!("no {list}"))?)?;
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for case in texts {
        // The number of ids before each text separates the texts in one list.
        let ids = encode(&case.text)?;
        ours.push(ids.len() as i64);
        ours.extend(wide(&ids));
        theirs.push(case.ids.len() as i64);
        theirs.extend(case.ids);
    }
    Ok(compare_ints(
        &format!("tokenizer_cases {list}"),
        &ours,
        &theirs,
    ))
}

/// Compares the ids of special tokens in `tokenizer_cases.json`.
pub(super) fn special_tokens(pack: &Pack, processor: &dyn Processor) -> Result<Comparison> {
    #[derive(Deserialize)]
    struct Stored {
        specials: std::collections::BTreeMap<String, i64>,
    }
    let stored: Stored = read_json(&pack.dir.join("tokenizer_cases.json"))?;
    let names = stored.specials.keys();
    let ours = names.map(|name| Ok(i64::from(processor.tokenizer().id(name)?)));
    let ours = ours.collect::<Result<Vec<_>>>()?;
    let theirs: Vec<i64> = stored.specials.into_values().collect();
    Ok(compare_ints("tokenizer_cases specials", &ours, &theirs))
}

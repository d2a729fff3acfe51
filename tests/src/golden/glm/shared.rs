//! Samples and quantities that the packs of both models store.

use crate::golden::{
    Case, CaseRun, Comparison, Pack, Stored, compare_activation, compare_computed, compare_floats,
    compare_gradient, compare_ints, compare_loss, largest_gradient, read_json,
};
use crate::tolerance;
use anyhow::{Context, Result, ensure};
use models::data::{
    Clock, EncodeOptions, EncodedSample, IGNORED, RawSample, RawVideo, SINGLE_IMAGE,
};
use models::glm4v::agent::AgentPrompt;
use models::image::ImageFolder;
use models::text::Message;
use models::{Family, Processor};
use serde::Deserialize;
use std::path::{Path, PathBuf};

/// File of tokenized texts, which a pack may lack.
pub(super) const TOKENIZER_CASES: &str = "tokenizer_cases.json";

/// Contents of a `conversation.json`.
#[derive(Deserialize)]
struct Conversation {
    messages: Vec<Turn>,
    #[serde(default)]
    images: Vec<PathBuf>,
    #[serde(default)]
    videos: Vec<Video>,
    enable_thinking: Option<bool>,
    max_length: Option<usize>,
    agent: Option<AgentPrompt>,
}

#[derive(Deserialize)]
struct Video {
    frames: Vec<PathBuf>,
    fps: Option<f64>,
}

#[derive(Deserialize)]
struct Turn {
    #[serde(flatten)]
    message: Message,
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
    let images = images.map(|path| (SINGLE_IMAGE.to_owned(), path));
    let mut images: Vec<(String, PathBuf)> = images.collect();
    let videos = stored.videos.into_iter().map(|video| {
        let first = images.len();
        let frames = video.frames.into_iter();
        images.extend(frames.map(|path| ("frame".to_owned(), path)));
        RawVideo {
            frames: first..images.len(),
            clock: video.fps.map(Clock::Rate),
        }
    });
    let videos = videos.collect();
    if let Some(agent) = stored.agent {
        let asked = stored
            .messages
            .iter()
            .rfind(|turn| turn.message.role == "user");
        let asked = asked.map(|turn| &turn.message.content);
        let query = agent.query().map_err(anyhow::Error::msg)?;
        ensure!(
            asked == Some(&query),
            "the agent asks {query:?}, not {asked:?}"
        );
    }
    Ok(RawSample {
        id: None,
        images,
        videos,
        enable_thinking: stored.enable_thinking,
        conversations: stored
            .messages
            .into_iter()
            .map(|turn| turn.message)
            .collect(),
    })
}

/// Encodes the samples of a case as for training, cut to their `max_length`.
pub(super) fn encode(
    pack: &Pack,
    case: &Case,
    processor: &dyn Processor,
    options: &EncodeOptions,
) -> Result<Vec<EncodedSample>> {
    let encode = |dir: PathBuf| {
        let stored: Conversation = read_json(&dir.join("conversation.json"))?;
        let (limit, raw) = (stored.max_length, raw_sample(&dir)?);
        let encode = |options: &EncodeOptions| {
            let sample = processor.encode(&raw, &ImageFolder::new(&dir), options);
            sample.with_context(|| format!("encoding {}", dir.display()))
        };
        let Some(limit) = limit else {
            return encode(options);
        };
        let uncut = encode(&EncodeOptions {
            model_max_length: usize::MAX,
            ..*options
        })?;
        let uncounted = match pack.family {
            // GLM-4V cuts before the expansion of image tokens.
            Family::Glm4v => added_by_expansion(&uncut),
            _ => 0,
        };
        encode(&EncodeOptions {
            model_max_length: limit + uncounted,
            ..*options
        })
    };
    directories(case)?.into_iter().map(encode).collect()
}

/// Tokens that the expansion of image tokens adds to a sample of GLM-4V.
fn added_by_expansion(sample: &EncodedSample) -> usize {
    let added = |(start, end): &(usize, usize)| end - start - 3;
    sample.image_bounds.iter().map(added).sum()
}

/// The rows of a batch, padded on the left with `filler` up to `length`.
pub(super) fn padded(rows: impl Iterator<Item = Vec<i64>>, length: usize, filler: i64) -> Vec<i64> {
    rows.flat_map(|row| {
        let missing = length.saturating_sub(row.len());
        std::iter::repeat_n(filler, missing).chain(row)
    })
    .collect()
}

/// One per token.
pub(super) fn ones(sample: &EncodedSample) -> Vec<i64> {
    vec![1; sample.input_ids.len()]
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
    let tap = |tap: &str| compare_activation(name, run.taps.get(tap), stored);
    let compared = match kind {
        "conv_out" => tap("vision.conv")?,
        "vision_features" => compare_computed(
            name,
            run.taps.get("vision_features"),
            stored,
            tolerance::GLM_FEATURES,
        )?,
        "inputs_embeds" | "hidden" | "final_hidden" => tap(name)?,
        "logits" if rest.is_empty() => compare_activation(name, run.logits.as_ref(), stored)?,
        "logits" => logits_of(name, rest, stored, samples, run)?,
        "loss" => compare_loss(run, stored)?,
        "n_loss_tokens" => {
            let supervised: usize = samples.iter().map(EncodedSample::supervised_tokens).sum();
            compare_ints(name, &[supervised as i64], stored.ints()?)
        }
        "grad_norm" => grad_norm(run, stored)?,
        "grad" | "gradnorm" | "gradsub" => {
            compare_gradient(run, name, stored, largest_gradient(run))?
        }
        _ => return Ok(None),
    };
    Ok(Some(compared))
}

/// Compares the logits of sample `index` of a batch.
fn logits_of(
    name: &str,
    index: &str,
    stored: &Stored,
    samples: &[EncodedSample],
    run: &CaseRun,
) -> Result<Comparison> {
    let index: usize = index.parse().context("logits of no sample")?;
    ensure!(index < samples.len(), "{name} of {} samples", samples.len());
    let width = stored.shape.last().copied().unwrap_or(1);
    let before: usize = samples[..index].iter().map(|s| s.input_ids.len()).sum();
    let own = before * width..(before + samples[index].input_ids.len()) * width;
    let logits = run.logits.as_ref().and_then(|all| all.get(own));
    let logits = logits.map(<[f32]>::to_vec);
    compare_activation(name, logits.as_ref(), stored)
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
    let stored: serde_json::Value = read_json(&pack.dir.join(TOKENIZER_CASES))?;
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
    let stored: Stored = read_json(&pack.dir.join(TOKENIZER_CASES))?;
    let names = stored.specials.keys();
    let ours = names.map(|name| Ok(i64::from(processor.tokenizer().id(name)?)));
    let ours = ours.collect::<Result<Vec<_>>>()?;
    let theirs: Vec<i64> = stored.specials.into_values().collect();
    Ok(compare_ints("tokenizer_cases specials", &ours, &theirs))
}

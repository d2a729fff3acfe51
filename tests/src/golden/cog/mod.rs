//! Packs of CogVLM, CogVLM2 and CogAgent.

mod flows;
mod inputs;

use super::compare::{
    CaseRun, Comparison, compare_activation, compare_floats, compare_gradient, compare_loss,
    largest_gradient,
};
use super::family::{PackFamily, Section, Trajectory};
use super::pack::{Case, Pack, Stored, read_json};
use super::trajectories::of_users;
use crate::tolerance;
use anyhow::{Context, Result, ensure};
use models::Processor;
use models::cogvlm::config::TemplateVersion;
use models::data::{EncodeOptions, EncodedSample, PromptSource, PromptStyle, RawSample};
use models::image::ImageFolder;
use models::text::Message;
use serde::Deserialize;
use std::path::PathBuf;

/// Reader of these packs.
#[derive(Clone, Copy, Debug)]
pub struct CogPacks;

impl PackFamily for CogPacks {
    fn samples(
        &self,
        _: &Pack,
        case: &Case,
        processor: &dyn Processor,
    ) -> Result<Vec<EncodedSample>> {
        encode(case, processor)
    }

    fn compare_inputs(
        &self,
        pack: &Pack,
        case: &Case,
        processor: &dyn Processor,
        samples: &[EncodedSample],
    ) -> Result<Vec<Comparison>> {
        inputs::compare(pack, case, processor, samples)
    }

    fn compare_run(
        &self,
        case: &Case,
        samples: &[EncodedSample],
        run: &CaseRun,
    ) -> Result<Vec<Comparison>> {
        let largest = largest_gradient(run);
        let mut all = Vec::new();
        for (name, stored) in &case.expected.0 {
            let comparison = match name.split('.').next().unwrap_or_default() {
                kind if inputs::KINDS.contains(&kind) => continue,
                "loss" => compare_loss(run, stored)?,
                "logits" => rows(name, run.logits.as_ref(), samples, stored)?,
                "hidden" | "inputs_embeds" => rows(name, run.taps.get(name), samples, stored)?,
                "vit_hidden" | "vision_features" | "cross_features" => {
                    compare_activation(name, run.taps.get(name), stored)?
                }
                "grad" | "gradnorm" => compare_unused(run, name, stored, largest)?,
                _ => Comparison::failed(name, "not a known quantity"),
            };
            all.push(comparison);
        }
        Ok(all)
    }

    fn trajectories(&self, pack: &Pack, processor: &dyn Processor) -> Result<Vec<Trajectory>> {
        match of_users(pack, &|case| encode(case, processor))? {
            Some(runs) => Ok(runs),
            None => flows::trajectories(pack, processor),
        }
    }

    fn tables(&self, pack: &Pack, processor: &dyn Processor) -> Result<Vec<Section>> {
        flows::tables(pack, processor)
    }
}

/// Compares the gradient of an unused tensor. The pack stores zeros, and a run has zeros or no gradient.
fn compare_unused(run: &CaseRun, name: &str, stored: &Stored, largest: f64) -> Result<Comparison> {
    let (_, param) = name.split_once('.').unwrap_or((name, ""));
    let zero = stored.floats()?.iter().all(|v| *v == 0.0);
    match run.grads.get(param) {
        None if zero => Ok(compare_floats(name, &[], &[], 0.0)),
        _ => compare_gradient(run, name, stored, largest),
    }
}

/// Compares values of token rows. The pack stores `[samples, longest, c]`, and the rows after each sample are padding.
fn rows(
    name: &str,
    got: Option<&Vec<f32>>,
    samples: &[EncodedSample],
    stored: &Stored,
) -> Result<Comparison> {
    let Some(got) = got else {
        return Ok(Comparison::failed(name, "not computed"));
    };
    let &[_, longest, c] = &stored.shape[..] else {
        return Ok(Comparison::failed(name, "not [samples, rows, c]"));
    };
    let each = stored.floats()?.chunks(longest * c).zip(samples);
    let want: Vec<f32> = each
        .flat_map(|(rows, sample)| &rows[..sample.input_ids.len() * c])
        .copied()
        .collect();
    Ok(compare_floats(
        name,
        got,
        &want,
        tolerance::activation(&want),
    ))
}

/// Contents of a case's `conversation.json`.
#[derive(Deserialize)]
struct Conversation {
    conversations: Vec<Message>,
    images: Vec<PathBuf>,
    template_version: String,
    rendered_prompt: Option<String>,
    max_length: Option<usize>,
    sat_version: Option<String>,
    sat_max_length: Option<usize>,
}

/// Contents of a batch's `conversation.json`.
#[derive(Deserialize)]
struct Batch {
    batch: Vec<String>,
}

impl Conversation {
    fn raw(&self) -> RawSample {
        let images = self.images.iter();
        RawSample {
            images: images
                .map(|path| ("<image>".into(), path.clone()))
                .collect(),
            conversations: self.conversations.clone(),
            ..RawSample::default()
        }
    }

    fn hub(&self) -> Result<EncodeOptions> {
        options(
            &self.template_version,
            PromptSource::Hub,
            self.max_length.unwrap_or(2048),
        )
    }

    /// The sample of the training scripts, which have no history: the last round alone.
    fn sat_raw(&self) -> RawSample {
        let mut raw = self.raw();
        let turns = raw.conversations.len();
        raw.conversations.drain(..turns.saturating_sub(2));
        raw
    }

    /// Options of the training scripts, if the case has their tensors.
    fn sat(&self) -> Result<EncodeOptions> {
        let version = self.sat_version.as_deref().context("no sat_version")?;
        let length = self.sat_max_length.context("no sat_max_length")?;
        options(version, PromptSource::Sat, length)
    }
}

fn options(version: &str, source: PromptSource, model_max_length: usize) -> Result<EncodeOptions> {
    let template = match version {
        "base" => TemplateVersion::Base,
        "chat" => TemplateVersion::Chat,
        "vqa" => TemplateVersion::Vqa,
        "chat_old" => TemplateVersion::ChatOld,
        other => anyhow::bail!("unknown template {other}"),
    };
    Ok(EncodeOptions {
        model_max_length,
        prompt: Some(PromptStyle { template, source }),
        ..EncodeOptions::default()
    })
}

/// Encodes the samples of a case as for training.
///
/// # Errors
/// When a file is missing or a sample cannot be encoded.
pub fn encode(case: &Case, processor: &dyn Processor) -> Result<Vec<EncodedSample>> {
    let path = case.dir.join("conversation.json");
    let dirs = match read_json::<Batch>(&path) {
        Ok(batch) => {
            let names = batch.batch.iter();
            names.map(|name| case.dir.with_file_name(name)).collect()
        }
        Err(_) => vec![case.dir.clone()],
    };
    ensure!(!dirs.is_empty(), "{} names no sample", path.display());
    let encode = |dir: PathBuf| {
        let path = dir.join("conversation.json");
        let conversation: Conversation = read_json(&path)?;
        let images = ImageFolder::beside(&path);
        processor
            .encode(&conversation.raw(), &images, &conversation.hub()?)
            .with_context(|| format!("encoding {}", dir.display()))
    };
    dirs.into_iter().map(encode).collect()
}

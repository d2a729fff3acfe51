//! Greedy answers of a pack's model.

use super::shared::raw_sample;
use crate::golden::Pack;
use anyhow::Result;
use kernels::{Backend, CpuBackend, DType, Tag};
use models::autograd::{ResidentParams, Tape};
use models::data::{EncodeOptions, EncodedPrompt, PlaceholderStyle};
use models::generate::{GenerateOptions, Prompt, Sampling, generate};
use models::image::ImageFolder;
use models::{ModelOptions, Processor, SampleInput, VisionLanguageModel, WeightSource, open_model};
use std::path::Path;
use std::sync::Arc;

/// A greedy answer to a question, and the margin of each token's logit over the second best.
pub(super) struct Greedy {
    pub(super) prompt: EncodedPrompt,
    pub(super) answer: Vec<i32>,
    pub(super) margins: Vec<f32>,
}

/// The first `count` tokens after the first question of the case in `dir`. No end token stops it earlier.
pub(super) fn greedy(
    pack: &Pack,
    dir: &Path,
    count: usize,
    processor: &dyn Processor,
) -> Result<Greedy> {
    let mut raw = raw_sample(dir)?;
    raw.conversations.truncate(1);
    let style = PlaceholderStyle::Training;
    let options = EncodeOptions::default();
    let prompt = processor.encode_prompt(&raw, &ImageFolder::new(dir), &options, style)?;
    let model = open_model(&pack.dir, ModelOptions::new(DType::F32))?;
    let source = WeightSource::open(&pack.dir)?;
    let backend: Arc<dyn Backend> = Arc::new(CpuBackend::unlimited());
    let weights = model.spec().params.iter().map(|p| {
        let bytes = source.read(&p.name, DType::F32)?;
        Ok(backend.upload(&bytes, p.shape, DType::F32, Tag::Parameters)?)
    });
    let weights = weights.collect::<Result<Vec<_>>>()?;
    let access = ResidentParams::new(backend.clone(), model.spec().clone(), weights)?;
    let prompts = [Prompt {
        input: SampleInput::from(&prompt),
        index: 0,
        max_new_tokens: count,
    }];
    let options = GenerateOptions {
        sampling: Sampling::GREEDY,
        stop_ids: Vec::new(),
    };
    let answer = generate(&*model, &access, &prompts, &options, &mut Ok)?.remove(0);
    let margins = margins(&*model, &access, &prompt, &answer)?;
    Ok(Greedy {
        prompt,
        answer,
        margins,
    })
}

/// The margin of the best logit before each token of `answer`, from one uncached pass.
fn margins(
    model: &dyn VisionLanguageModel,
    access: &ResidentParams,
    prompt: &EncodedPrompt,
    answer: &[i32],
) -> Result<Vec<f32>> {
    use engine::ParamAccess;

    let text = [&prompt.input_ids[..], answer].concat();
    let input = SampleInput {
        input_ids: &text,
        ..SampleInput::from(prompt)
    };
    let batch = model.collate(&[input], &**access.backend())?;
    let tape = Tape::inference(access);
    let logits = model.full_logits(&tape, &batch)?;
    let (rows, vocabulary) = (logits.to_f32_vec()?, logits.shape().last());
    let behind_prompt = rows.chunks(vocabulary).skip(prompt.input_ids.len() - 1);
    let lead = |row: &[f32]| {
        let mut sorted = row.to_vec();
        sorted.sort_by(|a, b| b.total_cmp(a));
        sorted[0] - sorted[1]
    };
    Ok(behind_prompt.take(answer.len()).map(lead).collect())
}

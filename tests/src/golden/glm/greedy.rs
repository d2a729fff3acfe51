//! Greedy answers of a pack's model.

use super::shared::{raw_sample, wide};
use crate::golden::{Case, Comparison, Pack, compare_floats, compare_ints};
use crate::tolerance;
use anyhow::Result;
use kernels::{Backend, CpuBackend, DType, Tag};
use models::autograd::{ResidentParams, Tape};
use models::data::{EncodeOptions, EncodedPrompt, PlaceholderStyle};
use models::generate::{GenerateOptions, Prompt, Sampling, generate};
use models::image::ImageFolder;
use models::{ModelOptions, Processor, SampleInput, VisionLanguageModel, WeightSource, open_model};
use std::path::Path;
use std::sync::Arc;

/// Compares prompt, answer and logit margins of greedy decoding. `fold` gives the ids that the pack stores of a prompt.
pub(super) fn compare_greedy(
    pack: &Pack,
    case: &Case,
    processor: &dyn Processor,
    fold: &dyn Fn(&[(usize, usize)], Vec<i64>) -> Vec<i64>,
) -> Result<Vec<Comparison>> {
    let expected = &case.expected;
    let prompt = expected.get("greedy_prompt_ids")?.ints()?;
    let answer = expected.get("greedy_ids")?.ints()?;
    let ours = greedy(pack, &case.dir, answer.len(), processor)?;
    let ids = fold(&ours.prompt.image_bounds, wide(&ours.prompt.input_ids));
    let margins = expected.get("greedy_margin")?.floats()?;
    // A margin is the difference of two logits.
    let bound = 2.0 * tolerance::ACTIVATION;
    Ok(vec![
        compare_ints("greedy_prompt_ids", &ids, prompt),
        compare_ints("greedy_ids", &wide(&ours.answer), answer),
        compare_floats("greedy_margin", &ours.margins, margins, bound),
    ])
}

/// A greedy answer to a question, and the margin of each token's logit over the second best.
struct Greedy {
    prompt: EncodedPrompt,
    answer: Vec<i32>,
    margins: Vec<f32>,
}

/// The first `count` tokens after the first question of the case in `dir`. No end token stops it earlier.
fn greedy(pack: &Pack, dir: &Path, count: usize, processor: &dyn Processor) -> Result<Greedy> {
    let mut raw = raw_sample(dir)?;
    let question = raw
        .conversations
        .iter()
        .position(|turn| turn.role == "user");
    raw.conversations
        .truncate(question.map_or(1, |turn| turn + 1));
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
        mlp_tiles: None,
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

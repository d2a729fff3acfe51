//! Generation with CogVLM, CogVLM2 and CogAgent: cached decoding compared with uncached passes. Samples with and
//! without images are mixed, also with learned prefixes.
#![allow(clippy::unwrap_used, reason = "helpers of a test binary")]

use engine::ParamId;
use kernels::{Backend, CpuBackend, DType, Tag, Tensor};
use models::autograd::{ResidentParams, Tape};
use models::data::{EncodeOptions, EncodedPrompt, PlaceholderStyle, RawSample};
use models::generate::{GenerateOptions, Prompt, Sampling, cache_bytes, generate};
use models::image::ImageFolder;
use models::params::is_added;
use models::{ModelOptions, SampleInput, VisionLanguageModel, WeightSource};
use models::{open_model, open_processor};
use serde_json::json;
use std::path::Path;
use std::sync::Arc;
use tests::golden::Pack;

struct Setup {
    model: Arc<dyn VisionLanguageModel>,
    access: ResidentParams,
}

impl Setup {
    fn new(dir: &Path, dtype: DType, ptuning_tokens: usize) -> Self {
        let options = ModelOptions {
            ptuning_tokens,
            ..ModelOptions::new(dtype)
        };
        let model = open_model(dir, options).unwrap();
        let source = WeightSource::open(dir).unwrap();
        let backend: Arc<dyn Backend> = Arc::new(CpuBackend::unlimited());
        let load = |(i, p): (usize, &engine::ParamSpec)| -> Tensor {
            let upload = |bytes: &[u8], dtype| {
                backend
                    .upload(bytes, p.shape, dtype, Tag::Parameters)
                    .unwrap()
            };
            if !is_added(&p.name) {
                return upload(&source.read(&p.name, dtype).unwrap(), dtype);
            }
            let mut values = vec![0.0f32; p.shape.elems()];
            model.init(ParamId(i as u32), 1, 0..values.len(), &mut values);
            // Large enough to change the answers.
            values.iter_mut().for_each(|v| *v *= 100.0);
            let wide = upload(bytemuck::cast_slice(&values), DType::F32);
            backend.cast(&wide, dtype).unwrap()
        };
        let weights = model.spec().params.iter().enumerate().map(load).collect();
        let access = ResidentParams::new(backend.clone(), model.spec().clone(), weights).unwrap();
        Self { model, access }
    }

    fn backend(&self) -> &dyn Backend {
        use engine::ParamAccess;
        &**self.access.backend()
    }

    /// The most likely tokens after a text, each from an uncached pass.
    fn whole(&self, prompt: &EncodedPrompt, tokens: usize) -> Vec<i32> {
        let mut text = prompt.input_ids.clone();
        for n in 0..tokens {
            let input = SampleInput {
                input_ids: &text,
                ..SampleInput::from(prompt)
            };
            let batch = self.model.collate(&[input], self.backend()).unwrap();
            let tape = Tape::inference(&self.access);
            let logits = self.model.next_token_logits(&tape, &batch).unwrap();
            let next = Sampling::GREEDY.next(&logits.to_f32_vec().unwrap(), 0, n as u64);
            text.push(next);
        }
        text.split_off(prompt.input_ids.len())
    }
}

fn question(dir: &Path, case: &str, text: &str) -> EncodedPrompt {
    let image = dir.join("cases").join(case).join("image_0.png");
    let turns = json!({"conversations": [{"role": "user", "content": text}]});
    let mut sample: RawSample = serde_json::from_value(turns).unwrap();
    if !case.is_empty() {
        sample.images = vec![("<image>".into(), image)];
    }
    let (images, options) = (ImageFolder::new(dir), EncodeOptions::default());
    let processor = open_processor(dir).unwrap();
    let style = PlaceholderStyle::Training;
    let prompt = processor.encode_prompt(&sample, &images, &options, style);
    prompt.unwrap()
}

/// Prompts of several lengths, with and without an image, and the number of tokens for each.
fn questions(dir: &Path) -> Vec<(EncodedPrompt, usize)> {
    let wide = match dir.ends_with("cogagent-chat-hf") {
        true => "vqa_wide",
        false => "chat_history_wide",
    };
    vec![
        (question(dir, "", "Where is it, and why?"), 9),
        (question(dir, "chat_square", "What is this?"), 12),
        (question(dir, "chat_square", "Never asked."), 0),
        (
            question(
                dir,
                wide,
                "How many shapes are there, and which of them is red?",
            ),
            5,
        ),
        (question(dir, "", "No."), 4),
    ]
}

fn prompts(questions: &[(EncodedPrompt, usize)]) -> Vec<Prompt<'_>> {
    let numbered = questions.iter().enumerate();
    numbered
        .map(|(i, (question, max_new_tokens))| Prompt {
            input: SampleInput::from(question),
            index: i as u64,
            max_new_tokens: *max_new_tokens,
        })
        .collect()
}

#[test]
fn cached_decoding_gives_the_tokens_of_uncached_passes() {
    let greedy = GenerateOptions {
        sampling: Sampling::GREEDY,
        stop_ids: Vec::new(),
        mlp_tiles: None,
    };
    for dir in Pack::cogs() {
        let questions = questions(&dir);
        let mut answers = Vec::new();
        for (dtype, prefix) in [(DType::F32, 0), (DType::F32, 3), (DType::BF16, 2)] {
            let setup = Setup::new(&dir, dtype, prefix);
            let whole = questions.iter().map(|(q, tokens)| setup.whole(q, *tokens));
            let whole: Vec<_> = whole.collect();
            let all = prompts(&questions);
            let (model, access) = (&*setup.model, &setup.access);
            let got = generate(model, access, &all, &greedy, &mut Ok).unwrap();
            assert_eq!(got, whole, "{} {dtype:?} {prefix}", dir.display());
            let alone = generate(model, access, &all[3..4], &greedy, &mut Ok).unwrap();
            assert_eq!(alone[0], whole[3]);
            answers.push(got);
        }
        assert_ne!(answers[0], answers[1], "learned keys and values matter");
    }
}

#[test]
fn cache_bytes_include_image_features_and_learned_tokens() {
    let dir = Pack::beside("cogagent-chat-hf");
    let questions = questions(&dir);
    let all = prompts(&questions);
    let bytes = |prefix, prompts: &[Prompt<'_>]| {
        let setup = Setup::new(&dir, DType::F32, prefix);
        cache_bytes(setup.model.cache_shape(), prompts)
    };
    // 2 layers, keys and values, 4 bytes; 48 elements of a token, 64 features of 32.
    let text = (questions[0].0.input_ids.len() + 8) as u64 * 2 * 2 * 48 * 4;
    assert_eq!(bytes(0, &all[..1]), text);
    assert_eq!(bytes(3, &all[..1]), text + 3 * 2 * 2 * 48 * 4);
    let image = (questions[1].0.input_ids.len() + 11) as u64 * 2 * 2 * 48 * 4;
    assert_eq!(bytes(0, &all[1..2]), image + 64 * 32 * 2 * 2 * 4);
}

//! Generation on the golden packs: cached decoding against uncached passes, several ranks against one process.
#![allow(clippy::unwrap_used, reason = "helpers of a test binary")]

use engine::comm::Tag;
use engine::{EngineError, ParamAccess, PassKind};
use kernels::{Backend, CpuBackend, DType, Tag as PoolTag, Tensor};
use models::autograd::{ResidentParams, Tape};
use models::data::{EncodeOptions, EncodedPrompt, PlaceholderStyle, RawSample, read_samples};
use models::generate::{CachePass, GenerateOptions, KvCache, Prompt, Sampling, generate};
use models::image::ImageFolder;
use models::{ModelError, SampleInput, VisionLanguageModel, WeightSource};
use models::{ModelOptions, open_model, open_processor};
use serde_json::json;
use std::cell::Cell;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;
use tests::golden::Pack;
use tests::world::{self, Layout, NO_OFFLOAD, Rank, run_world};

const NEW_TOKENS: usize = 24;

struct Setup {
    model: Arc<dyn VisionLanguageModel>,
    access: ResidentParams,
}

impl Setup {
    fn new(dir: &Path, dtype: DType) -> Self {
        let model = open_model(dir, ModelOptions::new(dtype)).unwrap();
        let source = WeightSource::open(dir).unwrap();
        let backend: Arc<dyn Backend> = Arc::new(CpuBackend::unlimited());
        let load = |p: &engine::ParamSpec| -> Tensor {
            let bytes = source.read(&p.name, dtype).unwrap();
            backend
                .upload(&bytes, p.shape, dtype, PoolTag::Parameters)
                .unwrap()
        };
        let weights = model.spec().params.iter().map(load).collect();
        let access = ResidentParams::new(backend.clone(), model.spec().clone(), weights).unwrap();
        Self { model, access }
    }

    /// The model of a `config.json`, with weights of zeros.
    fn of_zeros(dir: &Path) -> Self {
        let model = open_model(dir, ModelOptions::new(DType::F32)).unwrap();
        let backend: Arc<dyn Backend> = Arc::new(CpuBackend::unlimited());
        let zeros = |p: &engine::ParamSpec| {
            let zeros = backend.zeros(p.shape, DType::F32, PoolTag::Parameters);
            zeros.unwrap()
        };
        let weights = model.spec().params.iter().map(zeros).collect();
        let access = ResidentParams::new(backend.clone(), model.spec().clone(), weights).unwrap();
        Self { model, access }
    }

    fn backend(&self) -> &dyn Backend {
        &**self.access.backend()
    }

    /// Logits after the last token of a text, from an uncached pass.
    fn whole_logits(&self, prompt: &EncodedPrompt, answer: &[i32]) -> Vec<f32> {
        let text = [&prompt.input_ids[..], answer].concat();
        let input = SampleInput {
            input_ids: &text,
            ..SampleInput::from(prompt)
        };
        let batch = self.model.collate(&[input], self.backend()).unwrap();
        let tape = Tape::inference(&self.access);
        let logits = self.model.next_token_logits(&tape, &batch).unwrap();
        logits.to_f32_vec().unwrap()
    }

    fn generate(&self, prompts: &[Prompt<'_>], options: &GenerateOptions) -> Vec<Vec<i32>> {
        generate(&*self.model, &self.access, prompts, options, &mut Ok).unwrap()
    }
}

/// Prompts of several lengths: those of the pack's cases, with images, and one without.
fn questions(dir: &Path) -> Vec<EncodedPrompt> {
    let processor = open_processor(dir).unwrap();
    let options = EncodeOptions::default();
    let style = PlaceholderStyle::Training;
    let mut names: Vec<_> = std::fs::read_dir(dir.join("cases"))
        .unwrap()
        .map(|entry| entry.unwrap().path().join("conversation.json"))
        .filter(|path| path.is_file())
        .collect();
    names.sort();
    let encode = |sample: &RawSample, images: &ImageFolder| {
        let prompt = processor.encode_prompt(sample, images, &options, style);
        prompt.unwrap()
    };
    let mut prompts: Vec<EncodedPrompt> = names
        .iter()
        .map(|path| encode(&read_samples(path).unwrap()[0], &ImageFolder::beside(path)))
        .collect();
    let turns = json!({"conversations": [{"role": "user", "content": "Where is it, and why?"}]});
    let text: RawSample = serde_json::from_value(turns).unwrap();
    prompts.insert(1, encode(&text, &ImageFolder::new(dir)));
    assert!(prompts.iter().any(|p| p.slices.len() > 1));
    assert!(prompts.iter().any(|p| p.slices.is_empty()));
    prompts
}

/// Samples number `10, 11, …` with token limits of different size.
fn prompts(questions: &[EncodedPrompt]) -> Vec<Prompt<'_>> {
    let numbered = questions.iter().enumerate();
    numbered
        .map(|(i, question)| Prompt {
            input: SampleInput::from(question),
            index: 10 + i as u64,
            max_new_tokens: NEW_TOKENS - 3 * i,
        })
        .collect()
}

fn options(sampling: Sampling, stop_ids: &[i32]) -> GenerateOptions {
    GenerateOptions {
        sampling,
        stop_ids: stop_ids.to_vec(),
        mlp_tiles: None,
    }
}

#[test]
fn answers_in_tiles_have_the_same_tokens_and_need_less_memory() {
    let dir = &Pack::minicpm()[0];
    let said = "Where is it, and why? ".repeat(200);
    let turns = json!({"conversations": [{"role": "user", "content": said}]});
    let text: RawSample = serde_json::from_value(turns).unwrap();
    let (processor, style) = (open_processor(dir).unwrap(), PlaceholderStyle::Training);
    let images = ImageFolder::new(dir);
    let options = EncodeOptions::default();
    let prompt = processor
        .encode_prompt(&text, &images, &options, style)
        .unwrap();
    // On the CPU a tile has at most 256 rows.
    assert!(prompt.input_ids.len() > 768, "{}", prompt.input_ids.len());
    // The pack's inner width is below its width, so attention needs most there.
    let wide = tempfile::tempdir().unwrap();
    let config = std::fs::read(dir.join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_slice(&config).unwrap();
    config["intermediate_size"] = 4096.into();
    std::fs::write(wide.path().join("config.json"), config.to_string()).unwrap();
    let settings = "preprocessor_config.json";
    std::fs::copy(dir.join(settings), wide.path().join(settings)).unwrap();
    let run = |setup: Setup, rows: Option<usize>| {
        setup.backend().pool().reset_peaks();
        let options = GenerateOptions {
            mlp_tiles: rows.and_then(NonZeroUsize::new),
            ..self::options(Sampling::GREEDY, &[])
        };
        let answer = setup.generate(&prompts(std::slice::from_ref(&prompt)), &options);
        (answer, setup.backend().pool().stats().peak)
    };
    let pack = |rows| run(Setup::new(dir, DType::F32), rows).0;
    assert_eq!(pack(Some(1)), pack(None));
    let peak = |rows| run(Setup::of_zeros(wide.path()), rows).1;
    let (most, least) = (peak(None), peak(Some(1)));
    assert!(2 * least < most, "{least} {most}");
}

const DRAWN: Sampling = Sampling {
    temperature: 1.5,
    top_p: 0.95,
    top_k: 50,
    seed: 9,
};

/// Models and prompts in both dtypes. Answers of the f32 packs differ from token to token.
fn setups() -> Vec<(Setup, Vec<EncodedPrompt>)> {
    let packs = Pack::minicpm();
    assert_eq!(packs.len(), 4);
    let both = packs.iter().flat_map(|dir| {
        [DType::F32, DType::BF16].map(|dtype| (Setup::new(dir, dtype), questions(dir)))
    });
    both.collect()
}

#[test]
fn cached_decoding_gives_the_tokens_of_uncached_passes() {
    for (setup, questions) in setups() {
        for sampling in [Sampling::GREEDY, DRAWN] {
            let expected: Vec<Vec<i32>> = prompts(&questions)
                .iter()
                .zip(&questions)
                .map(|(prompt, question)| {
                    let mut answer = Vec::new();
                    while answer.len() < prompt.max_new_tokens {
                        let logits = setup.whole_logits(question, &answer);
                        answer.push(sampling.next(&logits, prompt.index, answer.len() as u64));
                    }
                    answer
                })
                .collect();
            let got = setup.generate(&prompts(&questions), &options(sampling, &[]));
            assert_eq!(got, expected);
            // A token from the middle of an answer serves as end token.
            let stop = expected[0][expected[0].len() / 2];
            let got = setup.generate(&prompts(&questions), &options(sampling, &[stop]));
            for (got, free) in got.iter().zip(&expected) {
                let end = free.iter().position(|t| *t == stop);
                assert_eq!(got[..], free[..end.unwrap_or(free.len())]);
            }
        }
    }
}

#[test]
fn cached_logits_have_the_bits_of_uncached_passes() {
    for (setup, questions) in setups() {
        let backend = setup.backend();
        // The last prompt takes part only in every other pass, so the caches grow differently.
        let fed = |i: usize, pass: usize| i + 1 < questions.len() || pass.is_multiple_of(2);
        let token = |i: usize, n: usize| (7 * i + 5 * n + 40) as i32;
        let lengths: Vec<usize> = questions.iter().map(|q| q.input_ids.len()).collect();
        let capacities: Vec<usize> = lengths.iter().map(|n| n + 9).collect();
        let shape = setup.model.cache_shape();
        let cache = Arc::new(KvCache::new(backend, shape, &capacities).unwrap());
        let inputs: Vec<SampleInput<'_>> = questions.iter().map(SampleInput::from).collect();
        let mut batch = setup.model.collate(&inputs, backend).unwrap();
        let numbered: Vec<(usize, usize)> = lengths.iter().copied().enumerate().collect();
        batch.cache = Some(CachePass::prefill(cache.clone(), &numbered, backend).unwrap());
        let mut answers: Vec<Vec<i32>> = vec![Vec::new(); questions.len()];
        let mut rows: Vec<usize> = (0..questions.len()).collect();
        for pass in 0..8 {
            let tape = Tape::inference(&setup.access);
            let logits = setup.model.next_token_logits(&tape, &batch).unwrap();
            drop(tape);
            let vocabulary = logits.shape().last();
            let got = logits.to_f32_vec().unwrap();
            for (i, got) in rows.iter().zip(got.chunks_exact(vocabulary)) {
                let whole = setup.whole_logits(&questions[*i], &answers[*i]);
                let same = got
                    .iter()
                    .zip(&whole)
                    .all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "prompt {i}, pass {pass}, {:?}", shape.dtype);
            }
            rows = (0..questions.len()).filter(|i| fed(*i, pass)).collect();
            let (mut tokens, mut positions, mut cached) = (Vec::new(), Vec::new(), Vec::new());
            for i in &rows {
                let before = lengths[*i] + answers[*i].len();
                tokens.push(token(*i, answers[*i].len()));
                positions.push(before as i32);
                cached.push((*i, before));
                answers[*i].extend(tokens.last());
            }
            batch = setup
                .model
                .collate_next(&tokens, &positions, backend)
                .unwrap();
            batch.cache = Some(CachePass::decode(cache.clone(), &cached, backend).unwrap());
        }
    }
}

#[test]
fn answers_do_not_depend_on_the_rest_of_the_batch() {
    for (setup, questions) in setups() {
        for sampling in [Sampling::GREEDY, DRAWN] {
            let all = prompts(&questions);
            let options = options(sampling, &[]);
            let together = setup.generate(&all, &options);
            let apart: Vec<_> = all
                .iter()
                .flat_map(|prompt| setup.generate(std::slice::from_ref(prompt), &options))
                .collect();
            assert_eq!(together, apart);
        }
        let reseeded = Sampling { seed: 10, ..DRAWN };
        assert_ne!(
            setup.generate(&prompts(&questions), &options(DRAWN, &[])),
            setup.generate(&prompts(&questions), &options(reseeded, &[]))
        );
    }
}

/// Generation as in a run: all ranks agree before each pass.
fn in_lock_step(
    rank: &Rank,
    prompts: &[Prompt<'_>],
    options: &GenerateOptions,
) -> anyhow::Result<(Vec<Vec<i32>>, usize)> {
    let open = Cell::new(false);
    let mut passes = 0;
    let mut anyone_left = |left: bool| -> Result<bool, ModelError> {
        if open.replace(false) {
            rank.zero.end_pass()?;
        }
        let tag = Tag::new("decoding", 0);
        let all = rank.zero.comm().all_gather_f64(&[f64::from(left)], tag);
        let anyone = all.map_err(EngineError::from)?.iter().any(|r| r[0] > 0.0);
        if anyone {
            passes += 1;
            rank.zero.begin_pass(PassKind::Infer);
            open.set(true);
        }
        Ok(anyone)
    };
    let answers = generate(&*rank.model, &rank.zero, prompts, options, &mut anyone_left)?;
    Ok((answers, passes))
}

#[test]
fn ranks_with_answers_of_different_lengths_agree_with_one_process() {
    for dir in Pack::minicpm() {
        let pack = Pack::read(&dir).unwrap();
        let questions = questions(&dir);
        let all = prompts(&questions);
        for sampling in [Sampling::GREEDY, DRAWN] {
            let options = options(sampling, &[]);
            let alone = Setup::new(&dir, DType::F32).generate(&all, &options);
            // Three ranks have fewer prompts than ranks in the second round, so one rank has none.
            for (world, stage) in [(2, 3), (2, 1), (3, 3)] {
                let layout = Layout {
                    world,
                    stage,
                    offload: NO_OFFLOAD,
                    ..Layout::SINGLE
                };
                let results = run_world(&pack, layout, &world::Setup::full(), |rank| {
                    let own = rank.zero.comm().world().rank;
                    let mut answers = Vec::new();
                    let mut passes = Vec::new();
                    for round in all.chunks(2 * world - 1) {
                        let mine: Vec<Prompt<'_>> =
                            round.iter().skip(own).step_by(world).copied().collect();
                        let (new, count) = in_lock_step(rank, &mine, &options)?;
                        answers.extend(mine.iter().map(|prompt| prompt.index).zip(new));
                        passes.push(count);
                    }
                    Ok((answers, passes))
                })
                .unwrap();
                assert!(results.iter().all(|(_, passes)| *passes == results[0].1));
                let mut got: Vec<_> = results.into_iter().flat_map(|(a, _)| a).collect();
                got.sort();
                let got: Vec<Vec<i32>> = got.into_iter().map(|(_, answer)| answer).collect();
                assert_eq!(got, alone, "{world} ranks, stage {stage}");
            }
        }
    }
}

//! Benchmark of generation in tokens per second: `cargo bench -p benches --bench generation`.
//!
//! A decoder with 28 M parameters continues prompts of 256 tokens by 16 tokens. Tokens are criterion's elements. The
//! time includes the prompt's forward pass.
#![allow(missing_docs, reason = "criterion's macros define public functions")]
#![allow(clippy::unwrap_used, reason = "a benchmark may panic")]

use benches::{config, decoder};
use criterion::{Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use engine::{ParamAccess, ParamId};
use kernels::{Backend, CpuBackend, CpuMath, DType, Tag};
use models::autograd::{ResidentParams, Tape};
use models::config::LanguageConfig;
use models::generate::{GenerateOptions, Prompt, Sampling, generate};
use models::minicpm::MiniCpm;
use models::{SampleInput, VisionLanguageModel};
use std::sync::Arc;

const PROMPT_TOKENS: i32 = 256;
const NEW_TOKENS: usize = 16;
const VOCABULARY: i32 = 4096;

fn model(dtype: DType) -> MiniCpm {
    let language = LanguageConfig {
        hidden_size: 512,
        intermediate_size: 1536,
        num_layers: 8,
        num_heads: 8,
        num_kv_heads: 2,
        head_dim: 64,
        vocab_size: VOCABULARY as usize,
        rms_norm_eps: 1e-6,
        rope_theta: 1e6,
        initializer_range: 0.02,
    };
    decoder(language, dtype).unwrap()
}

fn resident(model: &MiniCpm) -> ResidentParams {
    let backend: Arc<dyn Backend> = Arc::new(CpuBackend::unlimited().with_math(CpuMath::native()));
    let params = model.spec().params.iter().enumerate();
    let weights = params.map(|(i, p)| {
        let mut values = vec![0.0; p.shape.elems()];
        model.init(ParamId(i as u32), 1, 0..values.len(), &mut values);
        let bytes = bytes_of(&values);
        let wide = backend.upload(&bytes, p.shape, DType::F32, Tag::Parameters);
        backend.cast(&wide.unwrap(), model.dtype()).unwrap()
    });
    let weights = weights.collect();
    ResidentParams::new(backend.clone(), model.spec().clone(), weights).unwrap()
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn prompt(start: i32) -> Vec<i32> {
    (0..PROMPT_TOKENS)
        .map(|i| (start + 37 * i) % VOCABULARY)
        .collect()
}

fn input(ids: &[i32]) -> SampleInput<'_> {
    SampleInput {
        input_ids: ids,
        labels: &[],
        image_bounds: &[],
        slices: &[],
    }
}

fn cached(model: &MiniCpm, access: &ResidentParams, texts: &[Vec<i32>]) {
    let numbered = texts.iter().zip(0..);
    let prompts: Vec<Prompt<'_>> = numbered
        .map(|(ids, index)| Prompt {
            input: input(ids),
            index,
            max_new_tokens: NEW_TOKENS,
        })
        .collect();
    let options = GenerateOptions {
        sampling: Sampling::GREEDY,
        stop_ids: Vec::new(),
        mlp_tiles: None,
    };
    generate(model, access, &prompts, &options, &mut Ok).unwrap();
    access.take_events();
}

/// Generation without a cache: every token takes a forward pass over the whole text.
fn whole(model: &MiniCpm, access: &ResidentParams, text: &[i32]) {
    let mut ids = text.to_vec();
    for _ in 0..NEW_TOKENS {
        let batch = model.collate(&[input(&ids)], &**access.backend()).unwrap();
        let tape = Tape::inference(access);
        let logits = model.next_token_logits(&tape, &batch).unwrap();
        let row = logits.to_f32_vec().unwrap();
        ids.push(Sampling::GREEDY.next(&row, 0, 0));
    }
    access.take_events();
}

fn decode(c: &mut Criterion) {
    let mut group = c.benchmark_group("generate");
    group.sampling_mode(SamplingMode::Flat);
    for dtype in [DType::F32, DType::BF16] {
        let model = model(dtype);
        let access = resident(&model);
        for count in [1, 8] {
            let texts: Vec<Vec<i32>> = (0..count).map(prompt).collect();
            group.throughput(Throughput::Elements((NEW_TOKENS * texts.len()) as u64));
            group.bench_function(format!("{dtype} cached, {count} prompts"), |b| {
                b.iter(|| cached(&model, &access, &texts));
            });
        }
        let text = prompt(0);
        group.throughput(Throughput::Elements(NEW_TOKENS as u64));
        group.bench_function(format!("{dtype} whole passes, 1 prompt"), |b| {
            b.iter(|| whole(&model, &access, &text));
        });
    }
    group.finish();
}

criterion_group! {
    name = generation;
    config = config();
    targets = decode
}
criterion_main!(generation);

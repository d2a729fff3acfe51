//! What the golden packs do not cover, on a tiny model with random start values.

use super::MiniCpm;
use super::config::{Family, MiniCpmConfig, Release, SlicingConfig, VisionConfig};
use crate::ModelOptions;
use crate::autograd::{AccessEvent, Dropout, ResidentParams, Tape};
use crate::config::LanguageConfig;
use crate::data::Slice;
use crate::error::ModelError;
use crate::generate::{GenerateOptions, Prompt, Sampling, cache_bytes, generate};
use crate::lora::{LoraConfig, LoraTargets};
use crate::processor::Normalization;
use crate::selection::Selection;
use crate::{SampleInput, Tower, VisionLanguageModel};
use engine::{EngineError, Lease, ParamAccess, ParamId, Phase, UnitId};
use kernels::{Backend, CpuBackend, DType, IGNORED_LABEL, MetaBackend, Pool, Tag, Tensor};
use std::sync::Arc;

const QUERIES: usize = 2;

fn config() -> MiniCpmConfig {
    MiniCpmConfig {
        family: Family::Vision,
        release: Release::V2_6,
        language: LanguageConfig {
            hidden_size: 128,
            intermediate_size: 24,
            num_layers: 2,
            num_heads: 4,
            num_kv_heads: 2,
            head_dim: 32,
            vocab_size: 19,
            rms_norm_eps: 1e-6,
            rope_theta: 1e6,
            // Larger than usual, so that a tiny model's logits differ.
            initializer_range: 0.2,
        },
        long_rope: None,
        tie_word_embeddings: false,
        vision: VisionConfig {
            hidden_size: 8,
            intermediate_size: 12,
            num_layers: 2,
            num_heads: 2,
            head_dim: 4,
            patch_size: 2,
            grid_side: 5,
            layer_norm_eps: 1e-6,
        },
        query_num: QUERIES,
        drop_vision_last_layer: false,
        vision_batch_size: 16,
        use_image_id: true,
        slicing: SlicingConfig {
            max_slice_nums: 9,
            scale_resolution: 4,
            patch_size: 2,
        },
    }
}

/// The published sizes.
fn published(vocab_size: usize) -> MiniCpmConfig {
    MiniCpmConfig {
        language: LanguageConfig {
            hidden_size: 3584,
            intermediate_size: 18944,
            num_layers: 28,
            num_heads: 28,
            num_kv_heads: 4,
            head_dim: 128,
            vocab_size,
            ..config().language
        },
        vision: VisionConfig {
            hidden_size: 1152,
            intermediate_size: 4304,
            num_layers: 27,
            num_heads: 16,
            head_dim: 72,
            patch_size: 14,
            grid_side: 70,
            layer_norm_eps: 1e-6,
        },
        query_num: 64,
        ..config()
    }
}

fn options(dtype: DType) -> ModelOptions {
    ModelOptions::new(dtype)
}

fn build_model(config: MiniCpmConfig, options: ModelOptions) -> crate::Result<MiniCpm> {
    let normalization = Normalization::new([0.5; 3], [0.5; 3]).unwrap();
    MiniCpm::new(config, normalization, options)
}

fn lora(targets: &str) -> LoraConfig {
    LoraConfig {
        lora_rank: 64,
        lora_alpha: 64.0,
        lora_dropout: 0.0,
        others: Default::default(),
        targets: LoraTargets::parse(targets),
        layers: None,
        per_projection: false,
        use_rslora: false,
        modules_to_save: Vec::new(),
    }
}

/// The model with start values of seed 1 in `dtype`.
fn resident(model: &MiniCpm) -> ResidentParams {
    let backend: Arc<dyn Backend> = Arc::new(CpuBackend::unlimited());
    let params = model.spec().params.iter().enumerate();
    let weights = params.map(|(i, p)| {
        let mut values = vec![0.0; p.shape.elems()];
        model.init(ParamId(i as u32), 1, 0..values.len(), &mut values);
        let bytes = bytemuck::cast_slice(&values);
        let wide = backend.upload(bytes, p.shape, DType::F32, Tag::Parameters);
        backend.cast(&wide.unwrap(), model.dtype()).unwrap()
    });
    let weights = weights.collect();
    ResidentParams::new(backend.clone(), model.spec().clone(), weights).unwrap()
}

struct Sample {
    ids: Vec<i32>,
    labels: Vec<i32>,
    bounds: Vec<(usize, usize)>,
    slices: Vec<Slice>,
}

impl Sample {
    /// A text with one place for each of the images of `grids` patches.
    fn new(grids: &[(usize, usize)], tail: usize) -> Self {
        let mut ids = vec![1];
        let mut bounds = Vec::new();
        for _ in grids {
            ids.extend([2, 0, 0, 3]);
            bounds.push((ids.len() - 3, ids.len() - 1));
        }
        ids.extend((0..tail as i32).map(|i| 4 + i % 15));
        let count = ids.len();
        let supervised = |i: usize| i + tail >= count && i + 1 < count;
        let labels = (0..count)
            .map(|i| {
                if supervised(i) {
                    ids[i + 1]
                } else {
                    IGNORED_LABEL
                }
            })
            .collect();
        let slices = grids.iter().enumerate().map(|(n, (rows, cols))| Slice {
            rows: *rows,
            cols: *cols,
            patches: (0..rows * cols * 12)
                .map(|i| (i * 37 + n * 11) as u8)
                .collect(),
            frames: 1,
            stamp: None,
        });
        Self {
            ids,
            labels,
            bounds,
            slices: slices.collect(),
        }
    }

    fn input(&self) -> SampleInput<'_> {
        SampleInput {
            input_ids: &self.ids,
            labels: &self.labels,
            image_bounds: &self.bounds,
            slices: &self.slices,
        }
    }
}

fn losses(model: &MiniCpm, access: &ResidentParams, samples: &[&Sample]) -> Vec<f32> {
    let inputs: Vec<SampleInput<'_>> = samples.iter().map(|s| s.input()).collect();
    let batch = model.collate(&inputs, &**access.backend()).unwrap();
    let tape = Tape::inference(access);
    let loss = model.forward(&tape, &batch).unwrap();
    loss.rows.value().to_f32_vec().unwrap()
}

/// Forward and backward of one batch; the events of the access.
fn step(model: &MiniCpm, access: &ResidentParams, samples: &[&Sample]) -> Vec<AccessEvent> {
    pass(model, access, samples);
    access.take_events()
}

fn pass(model: &MiniCpm, access: &dyn ParamAccess, samples: &[&Sample]) {
    let inputs: Vec<SampleInput<'_>> = samples.iter().map(|s| s.input()).collect();
    let batch = model.collate(&inputs, &**access.backend()).unwrap();
    let tape = Tape::training(access).with_recompute_check(true);
    let loss = model.forward(&tape, &batch).unwrap();
    tape.backward(&loss, 1.0 / loss.supervised.max(1) as f32)
        .unwrap();
}

/// Takes gradients and drops them, as an engine does once they are reduced.
struct Forgetful(ResidentParams);

impl ParamAccess for Forgetful {
    fn backend(&self) -> &Arc<dyn Backend> {
        self.0.backend()
    }

    fn lease(&self, unit: UnitId, phase: Phase) -> Result<Lease<'_>, EngineError> {
        self.0.lease(unit, phase)
    }

    fn deposit(&self, _: ParamId, _: &Tensor) -> Result<(), EngineError> {
        Ok(())
    }

    fn is_trainable(&self, id: ParamId) -> bool {
        self.0.is_trainable(id)
    }

    fn needs_backward(&self, unit: UnitId) -> bool {
        self.0.needs_backward(unit)
    }
}

fn leased(model: &MiniCpm, events: &[AccessEvent], phase: Phase) -> Vec<String> {
    let units = events.iter().filter_map(|e| match e {
        AccessEvent::Lease(unit, p) if *p == phase => Some(unit.index()),
        _ => None,
    });
    units.map(|u| model.spec().units[u].name.clone()).collect()
}

#[test]
fn published_models_have_their_published_sizes() {
    for (vocab, total) in [(151_666, 8_099_175_152), (151_700, 8_099_418_864)] {
        let model = build_model(published(vocab), options(DType::BF16)).unwrap();
        assert_eq!(model.spec().elems(), (total, total));
    }
    let mut with_lora = options(DType::BF16);
    (with_lora.tune_vision, with_lora.tune_llm) = (false, false);
    let pattern = r"llm\..*layers\.\d+\.self_attn\.(q_proj|k_proj|v_proj)";
    with_lora.lora = Some(lora(pattern));
    let model = build_model(published(151_666), with_lora.clone()).unwrap();
    assert_eq!(model.spec().elems().1, 27_525_120);
    with_lora.lora = Some(LoraConfig {
        layers: None,
        modules_to_save: vec!["embed_tokens".into(), "resampler".into()],
        ..lora("q_proj,k_proj,v_proj,o_proj")
    });
    let model = build_model(published(151_666), with_lora).unwrap();
    assert_eq!(
        model.spec().elems().1,
        40_370_176 + 543_570_944 + 68_619_264
    );
}

#[test]
fn tune_switches_freeze_whole_parts() {
    let trained = |vision: bool, llm: bool| {
        let mut o = options(DType::F32);
        (o.tune_vision, o.tune_llm) = (vision, llm);
        let model = build_model(config(), o).unwrap();
        let params = model.spec().params.iter().filter(|p| p.trainable);
        let mut parts: Vec<String> = params
            .map(|p| p.name.split('.').next().unwrap().to_owned())
            .collect();
        parts.dedup();
        parts.sort();
        parts.dedup();
        parts
    };
    assert_eq!(trained(true, true), ["llm", "resampler", "vpm"]);
    assert_eq!(trained(false, true), ["llm", "resampler"]);
    assert_eq!(trained(false, false), ["resampler"]);
}

#[test]
fn dropping_the_last_vision_layer_keeps_the_final_norm() {
    let mut config = config();
    config.vision.num_layers = 1;
    let model = build_model(config, options(DType::F32)).unwrap();
    assert!(
        model
            .spec()
            .find("vpm.encoder.layers.1.mlp.fc1.weight")
            .is_none()
    );
    assert!(model.spec().find("vpm.post_layernorm.weight").is_some());
    let access = resident(&model);
    step(&model, &access, &[&Sample::new(&[(2, 3)], 4)]);
}

#[test]
fn packed_samples_do_not_attend_to_each_other() {
    let model = build_model(config(), options(DType::F32)).unwrap();
    let access = resident(&model);
    let (a, b, c) = (
        Sample::new(&[(2, 3), (1, 4)], 5),
        Sample::new(&[], 7),
        Sample::new(&[(3, 2)], 2),
    );
    let together = losses(&model, &access, &[&a, &b, &c]);
    let apart = [&a, &b, &c].map(|s| losses(&model, &access, &[s])).concat();
    assert_eq!(together, apart);
}

#[test]
fn images_change_the_answer_and_unreferenced_ones_do_not() {
    let model = build_model(config(), options(DType::F32)).unwrap();
    let access = resident(&model);
    let one = Sample::new(&[(2, 3)], 5);
    let base = losses(&model, &access, &[&one]);
    let mut other = Sample::new(&[(2, 3)], 5);
    other.slices[0].patches[0] ^= 0x80;
    assert_ne!(losses(&model, &access, &[&other]), base);
    let mut more = Sample::new(&[(2, 3)], 5);
    more.slices.push(one.slices[0].clone());
    assert_eq!(losses(&model, &access, &[&more]), base);
}

#[test]
fn a_batch_without_images_leases_no_vision_units() {
    let model = build_model(config(), options(DType::F32)).unwrap();
    let access = resident(&model);
    let events = step(&model, &access, &[&Sample::new(&[], 6)]);
    let language = [
        "llm.embed_tokens",
        "llm.layers.0",
        "llm.layers.1",
        "llm.head",
    ];
    assert_eq!(leased(&model, &events, Phase::Forward), language);
    let backward: Vec<&str> = language.iter().rev().copied().collect();
    assert_eq!(leased(&model, &events, Phase::Backward), backward);
}

#[test]
fn a_frozen_vision_tower_is_not_recomputed_and_the_resampler_gets_gradients() {
    let mut o = options(DType::F32);
    (o.tune_vision, o.tune_llm) = (false, false);
    let model = build_model(config(), o).unwrap();
    let access = resident(&model);
    let events = step(&model, &access, &[&Sample::new(&[(2, 2)], 4)]);
    assert_eq!(leased(&model, &events, Phase::Forward).len(), 8);
    assert_eq!(
        leased(&model, &events, Phase::Backward),
        [
            "llm.head",
            "llm.layers.1",
            "llm.layers.0",
            "llm.embed_tokens",
            "resampler"
        ]
    );
    let proj = model.spec().find("resampler.proj").unwrap();
    assert!(access.grad(proj).is_some());
}

#[test]
fn more_images_than_one_chunk_give_every_parameter_a_gradient() {
    let model = build_model(config(), options(DType::F32)).unwrap();
    let access = resident(&model);
    let many = Sample::new(&[(2, 2); 20], 4);
    step(&model, &access, &[&many]);
    for i in 0..model.spec().params.len() {
        let id = ParamId(i as u32);
        let name = &model.spec().params[i].name;
        let grad = access
            .grad(id)
            .unwrap_or_else(|| panic!("{name} has no gradient"));
        assert!(
            grad.to_f32_vec().unwrap().iter().all(|g| g.is_finite()),
            "{name}"
        );
    }
}

#[test]
fn a_batch_without_supervision_has_no_loss() {
    let model = build_model(config(), options(DType::F32)).unwrap();
    let access = resident(&model);
    let silent = Sample {
        labels: Vec::new(),
        ..Sample::new(&[(2, 2)], 4)
    };
    step(&model, &access, &[&silent]);
    let head = model.spec().find("llm.lm_head.weight").unwrap();
    let grad = access.grad(head).unwrap().to_f32_vec().unwrap();
    assert!(grad.iter().all(|g| *g == 0.0));
}

#[test]
fn half_precision_stays_near_f32_and_deposits_f32() {
    let sample = Sample::new(&[(2, 3), (3, 3)], 6);
    let run = |dtype: DType| {
        let model = build_model(config(), options(dtype)).unwrap();
        let access = resident(&model);
        step(&model, &access, &[&sample]);
        let grads: Vec<Tensor> = (0..model.spec().params.len() as u32)
            .map(|i| access.grad(ParamId(i)).unwrap())
            .collect();
        assert!(grads.iter().all(|g| g.dtype() == DType::F32));
        losses(&model, &access, &[&sample]).iter().sum::<f32>()
    };
    let (wide, half) = (run(DType::F32), run(DType::BF16));
    // Two layers of eight-bit mantissas.
    assert!((wide - half).abs() < 0.02 * wide, "{wide} {half}");
    assert_ne!(wide, half);
}

#[test]
fn new_adapters_do_not_change_outputs_and_alone_are_trainable() {
    let sample = Sample::new(&[(2, 3)], 6);
    let plain = build_model(config(), options(DType::F32)).unwrap();
    let base = losses(&plain, &resident(&plain), &[&sample]);
    let mut o = options(DType::F32);
    (o.tune_vision, o.tune_llm) = (false, false);
    o.lora = Some(lora("q_proj,down_proj"));
    let model = build_model(config(), o).unwrap();
    let access = resident(&model);
    let adapted = losses(&model, &access, &[&sample]);
    assert!(base.iter().zip(&adapted).all(|(a, b)| (a - b).abs() < 1e-5));
    let events = step(&model, &access, &[&sample]);
    let deposits = events
        .iter()
        .filter(|e| matches!(e, AccessEvent::Deposit(_)));
    assert_eq!(deposits.count(), 8);
    // The embedding comes before everything that trains.
    assert_eq!(
        leased(&model, &events, Phase::Backward),
        ["llm.head", "llm.layers.1", "llm.layers.0"]
    );
}

#[test]
fn contradicting_adapter_settings_are_refused() {
    let build = |change: &dyn Fn(&mut ModelOptions)| {
        let mut o = options(DType::F32);
        o.tune_llm = false;
        o.lora = Some(lora("q_proj"));
        change(&mut o);
        build_model(config(), o)
    };
    assert!(build(&|_| ()).is_ok());
    let both = build(&|o| o.tune_llm = true).unwrap();
    assert!(
        both.spec()
            .params
            .iter()
            .all(|p| p.trainable || !p.name.starts_with("llm."))
    );
    for targets in ["lm_head", "nothing", r"llm\.model\.embed_tokens", "(["] {
        let error = build(&|o| o.lora = Some(lora(targets))).unwrap_err();
        assert!(
            matches!(error, ModelError::AdapterTarget { .. }),
            "{targets}"
        );
    }
    let mut tied = config();
    tied.tie_word_embeddings = true;
    assert!(build_model(tied, options(DType::F32)).is_err());
}

#[test]
fn samples_that_do_not_fit_the_model_are_named() {
    let model = build_model(config(), options(DType::F32)).unwrap();
    let backend = CpuBackend::unlimited();
    let good = Sample::new(&[(2, 3)], 4);
    let fails = |bad: &Sample| {
        let result = model.collate(&[good.input(), bad.input()], &backend);
        matches!(result, Err(ModelError::Sample { sample: 1, .. }))
    };
    let broken = |change: &dyn Fn(&mut Sample)| {
        let mut sample = Sample::new(&[(2, 3)], 4);
        change(&mut sample);
        fails(&sample)
    };
    assert!(broken(&|s| s.slices.clear()));
    assert!(broken(&|s| s.bounds[0].1 += 1));
    assert!(broken(&|s| s.bounds[0] = (100, 102)));
    assert!(broken(&|s| s.slices[0].patches.truncate(5)));
    assert!(broken(&|s| s.slices[0].rows = 0));
    assert!(broken(&|s| s.labels.truncate(2)));
    assert!(!broken(&|s| s.labels.clear()));
}

fn prompts(samples: &[Sample], max_new_tokens: usize) -> Vec<Prompt<'_>> {
    let numbered = samples.iter().zip(0..);
    numbered
        .map(|(sample, index)| Prompt {
            input: sample.input(),
            index,
            max_new_tokens,
        })
        .collect()
}

fn greedy(stop_id: i32) -> GenerateOptions {
    GenerateOptions {
        sampling: Sampling::GREEDY,
        stop_ids: vec![stop_id],
        mlp_tiles: None,
    }
}

#[test]
fn greedy_decoding_follows_the_largest_logit_until_the_end_token() {
    let model = build_model(config(), options(DType::F32)).unwrap();
    let access = resident(&model);
    let samples = [Sample::new(&[(2, 3)], 3), Sample::new(&[], 4)];
    let asked = prompts(&samples, 5);
    let run = |stop_id: i32, rounds: &mut usize| {
        generate(&model, &access, &asked, &greedy(stop_id), &mut |left| {
            *rounds += usize::from(left);
            Ok(left)
        })
        .unwrap()
    };
    let mut rounds = 0;
    let free = run(-1, &mut rounds);
    assert_eq!((free[0].len(), free[1].len(), rounds), (5, 5, 5));
    // The first token by hand.
    let batch = model
        .collate(&[asked[0].input], &**access.backend())
        .unwrap();
    let tape = Tape::inference(&access);
    let logits = model
        .full_logits(&tape, &batch)
        .unwrap()
        .to_f32_vec()
        .unwrap();
    let row = &logits[logits.len() - 19..];
    let best = (0..19).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap();
    assert_eq!(free[0][0], best as i32);
    // Ending at a token that occurs cuts the answer before it.
    let stopped = run(free[0][0], &mut 0);
    assert!(stopped[0].is_empty());
}

#[test]
fn each_prompt_has_its_own_token_limit() {
    let model = build_model(config(), options(DType::F32)).unwrap();
    let access = resident(&model);
    let samples = [
        Sample::new(&[], 4),
        Sample::new(&[(2, 3)], 3),
        Sample::new(&[], 6),
    ];
    let mut asked = prompts(&samples, 7);
    let free = generate(&model, &access, &asked, &greedy(-1), &mut Ok).unwrap();
    (asked[0].max_new_tokens, asked[1].max_new_tokens) = (0, 3);
    let limited = generate(&model, &access, &asked, &greedy(-1), &mut Ok).unwrap();
    assert!(limited[0].is_empty());
    assert_eq!(limited[1], free[1][..3]);
    assert_eq!(limited[2], free[2]);
}

#[test]
fn a_rank_without_prompts_takes_part_in_every_round() {
    let model = build_model(config(), options(DType::F32)).unwrap();
    let access = resident(&model);
    let mut rounds = 0;
    let answers = generate(&model, &access, &[], &greedy(1), &mut |left| {
        assert!(!left);
        rounds += 1;
        Ok(rounds <= 3)
    });
    assert!(answers.unwrap().is_empty());
    let passes = access.take_events();
    assert_eq!(leased(&model, &passes, Phase::Forward).len(), 3 * 4);
}

#[test]
fn a_generation_allocates_the_announced_cache_and_no_more() {
    let model = build_model(config(), options(DType::F32)).unwrap();
    let access = resident(&model);
    let pool = access.backend().pool().clone();
    let samples = [Sample::new(&[(2, 3)], 30), Sample::new(&[], 50)];
    let asked = prompts(&samples, 40);
    pool.reset_peaks();
    let mut activations = Vec::new();
    generate(&model, &access, &asked, &greedy(-1), &mut |left| {
        activations.push(pool.stats().tag(Tag::Activations).peak);
        pool.reset_peaks();
        Ok(left)
    })
    .unwrap();
    let announced = cache_bytes(model.cache_shape(), &asked);
    let taken = pool.stats().tag(Tag::Cache).peak;
    assert!(
        (announced..announced * 9 / 8).contains(&taken),
        "{taken} {announced}"
    );
    assert_eq!(pool.stats().tag(Tag::Cache).in_use, 0);
    // Before the first pass, after it, and after passes of one token, in which no cache is copied.
    let (first, later) = (activations[1], &activations[2..]);
    let most = *later.iter().max().unwrap();
    assert!(most * 8 < first, "{most} {first}");
    assert_eq!(later.iter().min(), later.iter().max());
}

#[test]
fn a_published_model_runs_on_the_meta_device_in_bounded_memory() {
    let model = build_model(published(151_666), options(DType::BF16)).unwrap();
    let pool = Pool::new("null", None);
    let backend: Arc<dyn Backend> = Arc::new(MetaBackend::new(pool.clone()));
    let weights = model
        .spec()
        .params
        .iter()
        .map(|p| Tensor::null(&pool, Tag::Parameters, p.shape, DType::BF16).unwrap());
    let weights = weights.collect();
    let access = ResidentParams::new(backend, model.spec().clone(), weights).unwrap();
    let mut sample = Sample::new(&[], 2048 - 1);
    for n in 0..10 {
        sample.bounds.push((100 * n + 1, 100 * n + 65));
        sample.slices.push(Slice {
            rows: 32,
            cols: 32,
            patches: vec![0; 32 * 32 * 3 * 14 * 14],
            frames: 1,
            stamp: None,
        });
    }
    pass(&model, &Forgetful(access), &[&sample]);
    let stats = pool.stats();
    let gib = |tag: Tag| stats.tag(tag).peak as f64 / f64::from(1 << 30);
    // Blocks are rounded up to classes, by an eighth at most.
    let weights = 2.0 * model.spec().elems().0 as f64 / f64::from(1 << 30);
    assert!((weights..weights * 1.125).contains(&gib(Tag::Parameters)));
    // 28 x 2048 x 3584 and 27 x 10240 x 1152 segment inputs in bf16 (1 GiB), one block's inner
    // values, and while the head is swept its gradient in f32 (2 GiB).
    let peak = stats.peak as f64 / f64::from(1 << 30) - gib(Tag::Parameters);
    assert!(peak < 5.0, "{peak}: {stats:?}");
}

#[test]
fn the_meta_device_predicts_the_memory_of_the_cpu() {
    let model = build_model(config(), options(DType::F32)).unwrap();
    let sample = Sample::new(&[(4, 5), (3, 3)], 40);
    let access = resident(&model);
    access.backend().pool().reset_peaks();
    step(&model, &access, &[&sample]);
    let pool = Pool::new("null", None);
    let backend: Arc<dyn Backend> = Arc::new(MetaBackend::new(pool.clone()));
    let weights = model
        .spec()
        .params
        .iter()
        .map(|p| Tensor::null(&pool, Tag::Parameters, p.shape, DType::F32).unwrap())
        .collect();
    let planned = ResidentParams::new(backend, model.spec().clone(), weights).unwrap();
    step(&model, &planned, &[&sample]);
    let measured = access.backend().pool().stats();
    let predicted = pool.stats();
    for tag in [Tag::Activations, Tag::Gradients] {
        let (real, plan) = (
            measured.tag(tag).peak as f64,
            predicted.tag(tag).peak as f64,
        );
        assert!((real / plan - 1.0).abs() < 0.05, "{tag}: {real} {plan}");
    }
}

#[test]
fn selections_decide_which_parts_are_trainable_beside_adapters() {
    let trained = |change: &dyn Fn(&mut ModelOptions)| -> Vec<String> {
        let mut o = options(DType::F32);
        change(&mut o);
        let model = build_model(config(), o).unwrap();
        let params = model.spec().params.iter().filter(|p| p.trainable);
        params.map(|p| p.name.clone()).collect()
    };
    let select = |text: &str| Some(Selection::parse(text).unwrap());
    let head = trained(&|o| o.train = select("lm_head"));
    assert_eq!(head, ["llm.lm_head.weight"]);
    let no_bias = trained(&|o| o.freeze = select("bias,vpm"));
    assert!(!no_bias.is_empty());
    assert!(
        no_bias
            .iter()
            .all(|n| !n.ends_with("bias") && !n.starts_with("vpm."))
    );
    let mixed = trained(&|o| {
        o.lora = Some(lora("q_proj"));
        o.train = select("resampler");
        o.freeze = select("resampler.query");
    });
    assert!(
        mixed.iter().any(|n| n.contains("lora_A"))
            && mixed.iter().any(|n| n.starts_with("resampler."))
    );
    assert!(
        !mixed
            .iter()
            .any(|n| n == "resampler.query" || n.starts_with("llm.") || n.starts_with("vpm."))
    );
    let mut o = options(DType::F32);
    o.train = select("no_such_part");
    assert!(matches!(
        build_model(config(), o).unwrap_err(),
        ModelError::Selection { .. }
    ));
}

#[test]
fn dropout_masks_depend_on_samples_not_on_batches() {
    let (mut with, mut without) = (options(DType::F32), options(DType::F32));
    without.lora = Some(lora("q_proj,down_proj"));
    with.lora = Some(LoraConfig {
        lora_dropout: 0.3,
        ..lora("q_proj,down_proj")
    });
    let (a, b) = (Sample::new(&[(2, 3)], 6), Sample::new(&[(3, 2), (1, 1)], 9));
    let rows = |options: &ModelOptions, samples: &[(&Sample, u64)]| -> Vec<f32> {
        let model = build_model(config(), options.clone()).unwrap();
        let access = resident(&model);
        // Adapters begin with B = 0, which would hide the mask.
        for (i, param) in model.spec().params.iter().enumerate() {
            if param.name.contains("lora_B") {
                let values: Vec<f32> = (0..param.shape.elems())
                    .map(|i| (i % 7) as f32 / 50.0)
                    .collect();
                let bytes = bytemuck::cast_slice(&values);
                let weight =
                    access
                        .backend()
                        .upload(bytes, param.shape, DType::F32, Tag::Parameters);
                access.set_weight(ParamId(i as u32), weight.unwrap());
            }
        }
        let inputs: Vec<SampleInput<'_>> = samples.iter().map(|(s, _)| s.input()).collect();
        let keys: Vec<u64> = samples.iter().map(|(_, key)| *key).collect();
        let batch = model.collate(&inputs, &**access.backend()).unwrap();
        let state = Dropout::new(5, &keys, &inputs, &**access.backend()).unwrap();
        // The check of replays sees a mask that changed its mind.
        let tape = Tape::training(&access)
            .with_dropout(state)
            .with_recompute_check(true);
        let loss = model.forward(&tape, &batch).unwrap();
        let rows = loss.rows.value().to_f32_vec().unwrap();
        tape.backward(&loss, 1.0).unwrap();
        rows
    };
    let together = rows(&with, &[(&b, 4), (&a, 3)]);
    let alone = rows(&with, &[(&a, 3)]);
    assert_eq!(together[b.ids.len()..], alone[..]);
    assert_ne!(
        alone,
        rows(&with, &[(&a, 2)]),
        "another epoch, another mask"
    );
    assert_ne!(alone, rows(&without, &[(&a, 3)]));
}

#[test]
fn saved_activations_give_the_gradients_of_recomputed_ones() {
    let mut adapted = options(DType::F32);
    adapted.tune_llm = false;
    adapted.lora = Some(LoraConfig {
        lora_dropout: 0.2,
        modules_to_save: vec!["resampler".into()],
        ..lora("q_proj,down_proj")
    });
    let (a, b) = (Sample::new(&[(2, 3)], 6), Sample::new(&[], 9));
    for options in [options(DType::F32), options(DType::BF16), adapted] {
        let model = build_model(config(), options).unwrap();
        let gradients = |stored: &[Tower]| -> (Vec<Option<Vec<f32>>>, usize) {
            let access = resident(&model);
            let inputs = [a.input(), b.input()];
            let batch = model.collate(&inputs, &**access.backend()).unwrap();
            let state = Dropout::new(5, &[1, 2], &inputs, &**access.backend()).unwrap();
            let keep = |unit: UnitId| stored.contains(&model.tower(unit));
            let tape = Tape::training(&access)
                .with_dropout(state)
                .with_stored(&keep)
                .with_recompute_check(true);
            let loss = model.forward(&tape, &batch).unwrap();
            let kept = tape.saved_elems();
            tape.backward(&loss, 0.5).unwrap();
            let ids = (0..model.spec().params.len()).map(|i| ParamId(i as u32));
            let grads = ids.map(|id| access.grad(id).map(|g| g.to_f32_vec().unwrap()));
            (grads.collect(), kept)
        };
        let (recomputed, all_inputs) = gradients(&[]);
        assert!(recomputed.iter().flatten().flatten().any(|g| *g != 0.0));
        let towers = [Tower::Vision, Tower::Resampler, Tower::Language];
        for stored in [&towers[..1], &towers[1..2], &towers[2..], &towers[..]] {
            let (grads, inputs) = gradients(stored);
            assert_eq!(grads, recomputed, "{stored:?}");
            assert!(
                inputs < all_inputs || model.options().lora.is_some(),
                "{stored:?}"
            );
        }
    }
}

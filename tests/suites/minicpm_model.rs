//! The model against the golden packs, all weights in one memory.
#![allow(clippy::unwrap_used, reason = "helpers of a test binary")]
#![allow(clippy::print_stdout, reason = "shown when a test fails")]

use engine::ParamId;
use kernels::{Backend, CpuBackend, DType, Shape, Tag, Tensor};
use models::autograd::{ResidentParams, Tape};
use models::data::EncodedSample;
use models::minicpm::config::MiniCpmConfig;
use models::minicpm::processor::ProcessorConfig;
use models::{Batch, SampleInput, VisionLanguageModel, WeightSource};
use models::{ModelOptions, Processor, open_model, open_processor};
use std::cell::RefCell;
use std::path::Path;
use std::sync::Arc;
use tests::golden::{
    CaseRun, Comparison, Expected, Pack, compare_inputs, compare_run, compare_trajectory,
};
use tests::tolerance;

struct Setup {
    model: Arc<dyn VisionLanguageModel>,
    access: ResidentParams,
    processor: Arc<dyn Processor>,
}

impl Setup {
    fn new(dir: &Path, change: impl Fn(&mut ModelOptions)) -> Self {
        let processor = open_processor(dir).unwrap();
        let mut options = ModelOptions::new(DType::F32);
        change(&mut options);
        let model = open_model(dir, options).unwrap();
        let source = WeightSource::open(dir).unwrap();
        let unused = source.check(model.spec()).unwrap();
        let foreign = ["apm.", "audio_projection_layer.", "tts."];
        assert!(
            unused
                .iter()
                .all(|n| foreign.iter().any(|p| n.starts_with(p)))
        );
        let adapter = dir.join("adapter_init/adapter_model.safetensors");
        let adapter = WeightSource::open_file(&adapter).unwrap();
        let backend: Arc<dyn Backend> = Arc::new(CpuBackend::unlimited());
        let load = |p: &engine::ParamSpec| -> Tensor {
            let from = if source.shape(&p.name).is_some() {
                &source
            } else {
                &adapter
            };
            let bytes = from.read(&p.name, DType::F32).unwrap();
            backend
                .upload(&bytes, p.shape, DType::F32, Tag::Parameters)
                .unwrap()
        };
        let weights = model.spec().params.iter().map(load).collect();
        let access = ResidentParams::new(backend.clone(), model.spec().clone(), weights).unwrap();
        Self {
            model,
            access,
            processor,
        }
    }

    fn backend(&self) -> &dyn Backend {
        &**engine::ParamAccess::backend(&self.access)
    }

    fn collate(&self, samples: &[EncodedSample]) -> Batch {
        let inputs: Vec<SampleInput<'_>> = samples.iter().map(SampleInput::from).collect();
        self.model.collate(&inputs, self.backend()).unwrap()
    }

    /// The mean loss; gradients are left in the access.
    fn pass(&self, batch: &Batch) -> f64 {
        self.access.clear_grads();
        let tape = Tape::training(&self.access).with_replay_check(true);
        let loss = self.model.forward(&tape, batch).unwrap();
        let mean = loss.sum().unwrap() / loss.supervised as f64;
        let factor = 1.0 / loss.supervised as f32;
        tape.backward(&loss, factor).unwrap();
        mean
    }

    fn run(&self, samples: &[EncodedSample]) -> CaseRun {
        let batch = self.collate(samples);
        let taps = RefCell::new(std::collections::BTreeMap::new());
        let observer = |name: &str, value: &Tensor| {
            let values = value.to_f32_vec().unwrap();
            taps.borrow_mut().insert(name.to_owned(), values);
        };
        let tape = Tape::inference(&self.access).with_observer(&observer);
        let logits = self.model.full_logits(&tape, &batch).unwrap();
        drop(tape);
        let loss = self.pass(&batch);
        let params = self.model.spec().params.iter().enumerate();
        let grads = params
            .filter_map(|(i, p)| {
                let grad = self.access.grad(ParamId(i as u32))?;
                Some((p.name.clone(), grad.to_f32_vec().unwrap()))
            })
            .collect();
        CaseRun {
            taps: taps.into_inner(),
            logits: Some(logits.to_f32_vec().unwrap()),
            loss: Some(loss),
            grads,
        }
    }
}

fn all_ok(what: &str, comparisons: &[Comparison]) {
    for c in comparisons {
        println!("{what} {c}");
    }
    assert!(!comparisons.is_empty(), "{what}: nothing compared");
    let failed: Vec<String> = comparisons
        .iter()
        .filter(|c| !c.ok())
        .map(|c| c.to_string())
        .collect();
    assert!(failed.is_empty(), "{what}:\n{}", failed.join("\n"));
}

#[test]
fn every_case_gives_the_stored_values_and_gradients() {
    for dir in Pack::built_in() {
        let pack = Pack::read(&dir).unwrap();
        let setup = Setup::new(&dir, |_| {});
        let config = MiniCpmConfig::load(&dir).unwrap();
        let grid_side = config.vision.grid_side;
        for case in &pack.cases {
            let what = format!("{}/{}", pack.model_type, case.name);
            let samples = case.encode(&*setup.processor).unwrap();
            let normalization = ProcessorConfig::load(&dir, &config).unwrap().normalization;
            let inputs = compare_inputs(case, &samples, &normalization, grid_side).unwrap();
            all_ok(&what, &inputs);
            let run = setup.run(&samples);
            all_ok(&what, &compare_run(case, &run).unwrap());
            let stored = pack.trajectory.case_losses[&case.name];
            assert!((run.loss.unwrap() - stored).abs() < tolerance::LOSS);
        }
    }
}

/// AdamW as the reference applies it: every trainable tensor, bias-corrected, decoupled decay.
struct AdamW {
    settings: tests::golden::AdamW,
    moments: Vec<(Vec<f64>, Vec<f64>)>,
    step: i32,
}

impl AdamW {
    fn new(settings: &tests::golden::AdamW, setup: &Setup) -> Self {
        let zeros = |p: &engine::ParamSpec| {
            let n = p.shape.elems();
            (vec![0.0; n], vec![0.0; n])
        };
        Self {
            settings: settings.clone(),
            moments: setup.model.spec().params.iter().map(zeros).collect(),
            step: 0,
        }
    }

    fn step(&mut self, setup: &Setup) {
        self.step += 1;
        let Self {
            settings: s, step, ..
        } = self;
        let [b1, b2] = s.betas;
        let (c1, c2) = (1.0 - b1.powi(*step), 1.0 - b2.powi(*step));
        for (i, p) in setup.model.spec().params.iter().enumerate() {
            if !p.trainable {
                continue;
            }
            let id = ParamId(i as u32);
            let grad = setup.access.grad(id).unwrap().to_f32_vec().unwrap();
            let mut weight = setup.access.weight(id).to_f32_vec().unwrap();
            let (m, v) = &mut self.moments[i];
            for (j, w) in weight.iter_mut().enumerate() {
                let g = f64::from(grad[j]);
                m[j] = b1 * m[j] + (1.0 - b1) * g;
                v[j] = b2 * v[j] + (1.0 - b2) * g * g;
                let decayed = f64::from(*w) * (1.0 - s.lr * s.weight_decay);
                *w = (decayed - s.lr * (m[j] / c1) / ((v[j] / c2).sqrt() + s.eps)) as f32;
            }
            let bytes = bytemuck::cast_slice(&weight);
            let shape: Shape = p.shape;
            let new = setup
                .backend()
                .upload(bytes, shape, DType::F32, Tag::Parameters);
            setup.access.set_weight(id, new.unwrap());
        }
    }
}

fn options(pack: &Pack, run: &str, options: &mut ModelOptions) {
    let (vision, llm) = match run {
        "full" => (true, true),
        "tune_vision_only" => (true, false),
        "tune_llm_only" => (false, true),
        _ => (false, false),
    };
    (options.tune_vision, options.tune_llm) = (vision, llm);
    let adapter = pack.adapter.as_ref().unwrap();
    options.lora = match run {
        "lora" => Some(adapter.to_lora(&[])),
        "lora_modules_to_save" => Some(adapter.to_lora(&["embed_tokens", "resampler"])),
        _ => None,
    };
}

#[test]
fn every_trajectory_is_followed() {
    for dir in Pack::built_in() {
        let pack = Pack::read(&dir).unwrap();
        let mut all = Vec::new();
        for (name, expected) in &pack.trajectory.runs {
            let setup = Setup::new(&dir, |o| options(&pack, name, o));
            assert_eq!(setup.model.spec().elems().1, expected.trainable, "{name}");
            let case = pack.case(&pack.trajectory.case).unwrap();
            let batch = setup.collate(&case.encode(&*setup.processor).unwrap());
            let mut optimizer = AdamW::new(&pack.trajectory.optimizer, &setup);
            let steps = expected.losses.len() - 1;
            let mut losses = Vec::new();
            for step in 0..=steps {
                losses.push(setup.pass(&batch));
                if step < steps {
                    optimizer.step(&setup);
                }
            }
            let bound = tolerance::trajectory(&pack.model_type);
            all.push(compare_trajectory(name, &losses, expected, bound));
            if name == "lora" {
                adapters_after(&dir, &setup);
            }
        }
        all_ok(&pack.model_type, &all);
    }
}

fn adapters_after(dir: &Path, setup: &Setup) {
    let after = Expected::read(&dir.join("adapter_after8/adapter_model.safetensors")).unwrap();
    for (name, stored) in &after.0 {
        let id = setup.model.spec().find(name).unwrap();
        let got = setup.access.weight(id).to_f32_vec().unwrap();
        let want = stored.floats().unwrap();
        let square = |f: &dyn Fn(usize) -> f64| (0..want.len()).map(|i| f(i).powi(2)).sum::<f64>();
        let apart = square(&|i| f64::from(got[i]) - f64::from(want[i]));
        let relative = (apart / square(&|i| f64::from(want[i]))).sqrt();
        assert!(relative <= tolerance::ADAPTER_L2, "{name}: {relative:e}");
    }
}

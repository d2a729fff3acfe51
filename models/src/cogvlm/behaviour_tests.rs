//! Rules that no golden pack shows, on the packs' tiny models.

use super::config::TemplateVersion;
use super::processor::CogProcessor;
use crate::autograd::{Dropout, ResidentParams, Tape};
use crate::data::{
    EncodeOptions, EncodedSample, PromptSource, PromptStyle, RawSample, SampleError,
};
use crate::image::{Decoded, ImageError, ImageSource, RgbImage};
use crate::lora::{LoraConfig, LoraTargets};
use crate::options::ModelOptions;
use crate::params::is_added;
use crate::processor::Processor;
use crate::{SampleInput, VisionLanguageModel, WeightSource, open_model};
use engine::{ParamAccess, ParamId};
use kernels::{Backend, CpuBackend, DType, Tag, Tensor};
use serde_json::{Value, json};
use std::cell::RefCell;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const AGENT: &str = "cogagent-chat-hf";
const VLM: &str = "cogvlm-chat-hf";
const VLM2: &str = "cogvlm2-llama3-chat-19B";

/// An image of one colour for any path: that of the path's length.
struct Plain;

impl ImageSource for Plain {
    fn dimensions(&self, _: &Path) -> Result<(usize, usize), ImageError> {
        Ok((30, 20))
    }

    fn load(&self, path: &Path) -> Result<Decoded, ImageError> {
        let byte = 40 * path.as_os_str().len() as u8;
        let pixels = (0..30 * 20 * 3).map(|i| byte.wrapping_add(i as u8));
        Ok(RgbImage::new(30, 20, pixels.collect()).into())
    }
}

fn pack(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/golden")
        .join(name)
}

fn sample(image: Value, turns: &[(&str, &str)]) -> RawSample {
    let turns = turns.iter();
    let turns: Vec<Value> = turns
        .map(|(role, content)| json!({"role": role, "content": content}))
        .collect();
    serde_json::from_value(json!({"image": image, "conversations": turns})).unwrap()
}

fn ask(image: Value, question: &str) -> RawSample {
    sample(image, &[("user", question), ("assistant", "It is blue.")])
}

fn processor(name: &str) -> CogProcessor {
    CogProcessor::load(&pack(name)).unwrap()
}

fn encode(name: &str, sample: &RawSample) -> Result<EncodedSample, SampleError> {
    let options = EncodeOptions::default();
    let measured = processor(name).measure(sample, &Plain, &options);
    let result = processor(name).encode(sample, &Plain, &options);
    if let (Ok(size), Ok(encoded)) = (&measured, &result) {
        assert_eq!(size.tokens, encoded.input_ids.len());
        assert_eq!(size.patches, encoded.patches());
        assert_eq!(size.slices, encoded.slices.len());
        assert_eq!(size.supervised, encoded.supervised_tokens());
    }
    assert_eq!(result.is_ok(), measured.is_ok());
    result
}

/// Losses of tokens, and gradients by name.
type Tiled = (Vec<f32>, Vec<(String, Option<Vec<f32>>)>);

struct Setup {
    model: Arc<dyn VisionLanguageModel>,
    access: ResidentParams,
}

impl Setup {
    fn new(name: &str, options: ModelOptions) -> Self {
        let model = open_model(&pack(name), options).unwrap();
        let source = WeightSource::open(&pack(name)).unwrap();
        let backend: Arc<dyn Backend> = Arc::new(CpuBackend::unlimited());
        let load = |(i, p): (usize, &engine::ParamSpec)| -> Tensor {
            let mut values = vec![0.0f32; p.shape.elems()];
            if is_added(&p.name) {
                model.init(ParamId(i as u32), 1, 0..values.len(), &mut values);
                // The second halves of adapters begin at zero, which would hide the first.
                values
                    .iter_mut()
                    .enumerate()
                    .for_each(|(i, v)| *v += 0.01 * (i % 7) as f32);
            } else {
                let bytes = source.read(&p.name, DType::F32).unwrap();
                values = bytemuck::pod_collect_to_vec(&bytes);
            }
            let bytes = bytemuck::cast_slice(&values);
            backend
                .upload(bytes, p.shape, DType::F32, Tag::Parameters)
                .unwrap()
        };
        let weights = model.spec().params.iter().enumerate().map(load).collect();
        let access = ResidentParams::new(backend.clone(), model.spec().clone(), weights).unwrap();
        Self { model, access }
    }

    /// Losses of all rows; gradients are summed in the access.
    fn run(&self, samples: &[&EncodedSample], dropout: Option<&[u64]>) -> Vec<f32> {
        let backend = &**self.access.backend();
        let inputs: Vec<SampleInput<'_>> = samples.iter().map(|s| SampleInput::from(*s)).collect();
        let batch = self.model.collate(&inputs, backend).unwrap();
        let mut tape = Tape::training(&self.access).with_recompute_check(true);
        if let Some(keys) = dropout {
            tape = tape.with_dropout(Dropout::new(5, keys, &inputs, backend).unwrap());
        }
        let loss = self.model.forward(&tape, &batch).unwrap();
        let rows = loss.rows.value().to_f32_vec().unwrap();
        tape.backward(&loss, 1.0).unwrap();
        rows
    }

    /// All gradients since the last call, by name; absent where none arrived.
    fn grads(&self) -> Vec<(String, Option<Vec<f32>>)> {
        let params = self.model.spec().params.iter().enumerate();
        let grads = params.map(|(i, p)| {
            let grad = self.access.grad(ParamId(i as u32));
            (p.name.clone(), grad.map(|g| g.to_f32_vec().unwrap()))
        });
        let grads = grads.collect();
        self.access.clear_grads();
        grads
    }
}

fn close(a: &[f32], b: &[f32]) -> bool {
    let largest = b.iter().fold(0f32, |m, x| m.max(x.abs()));
    let bound = 1e-5 * largest + 1e-6;
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() <= bound)
}

/// With and without an image, of several lengths.
fn mixed(name: &str) -> Vec<EncodedSample> {
    let all = [
        ask(Value::Null, "Why?"),
        ask(json!("a"), "What is it, and what colour does it have?"),
        ask(json!("bc"), "Where?"),
    ];
    all.iter().map(|s| encode(name, s).unwrap()).collect()
}

/// Losses and gradients of a batch are those of its samples one by one.
fn check_apart(setup: &Setup, samples: &[EncodedSample], dropout: Option<&[u64]>) {
    let all: Vec<&EncodedSample> = samples.iter().collect();
    let together = setup.run(&all, dropout);
    let grads = setup.grads();
    let apart: Vec<f32> = samples
        .iter()
        .enumerate()
        .flat_map(|(i, s)| setup.run(&[s], dropout.map(|keys| &keys[i..=i])))
        .collect();
    assert!(close(&together, &apart));
    for ((name, got), (_, want)) in grads.iter().zip(setup.grads()) {
        match (got, want) {
            (Some(got), Some(want)) => assert!(close(got, &want), "{name}"),
            (None, None) => {}
            (got, want) => panic!("{name}: {} {}", got.is_some(), want.is_some()),
        }
    }
}

#[test]
fn samples_of_a_batch_do_not_see_each_other() {
    for name in [VLM, VLM2, AGENT] {
        for ptuning_tokens in [0, 3] {
            let options = ModelOptions {
                ptuning_tokens,
                ..ModelOptions::new(DType::F32)
            };
            check_apart(&Setup::new(name, options), &mixed(name), None);
        }
    }
}

#[test]
fn adapter_dropout_depends_on_samples_not_on_batches() {
    let lora = LoraConfig {
        lora_rank: 2,
        lora_alpha: 2.0,
        lora_dropout: 0.3,
        others: Default::default(),
        // Rows of experts, of both towers, of the projector, and of features read by the decoder.
        targets: LoraTargets::parse(r"model\..*(query_key_value|dense.*|_proj|w1|key_value|query)"),
        layers: None,
        per_projection: false,
        use_rslora: false,
        modules_to_save: Vec::new(),
    };
    for name in [VLM2, AGENT] {
        for per_projection in [false, true] {
            let lora = LoraConfig {
                per_projection,
                ..lora.clone()
            };
            let options = ModelOptions {
                lora: Some(lora),
                ..ModelOptions::new(DType::F32)
            };
            let setup = Setup::new(name, options);
            let samples = mixed(name);
            check_apart(&setup, &samples, Some(&[3, 8, 1]));
            let all: Vec<&EncodedSample> = samples.iter().collect();
            let dropped = setup.run(&all, Some(&[3, 8, 1]));
            assert_ne!(dropped, setup.run(&all, Some(&[3, 8, 2])));
            assert_ne!(dropped, setup.run(&all, None));
            setup.access.clear_grads();
        }
    }
}

/// Losses and gradients of a pass whose feed-forward layers run in tiles of 256 rows, and the parameters of the tiles.
fn tiled(setup: &Setup, tile: Option<NonZeroUsize>) -> (Tiled, Vec<String>) {
    let samples = [mixed(AGENT), mixed(AGENT), mixed(AGENT)].concat();
    let inputs: Vec<SampleInput<'_>> = samples.iter().map(SampleInput::from).collect();
    let backend = &**setup.access.backend();
    let keys: Vec<u64> = (0..inputs.len() as u64).collect();
    let batch = setup.model.collate(&inputs, backend).unwrap();
    let names = RefCell::new(Vec::new());
    let observer = |op: &'static str, params: &[ParamId], _: &Tensor| {
        let params = params.iter().filter(|_| op == "tiles");
        let named = params.map(|id| setup.model.spec().params[id.0 as usize].name.clone());
        names.borrow_mut().extend(named);
    };
    let tape = Tape::training(&setup.access)
        .with_dropout(Dropout::new(5, &keys, &inputs, backend).unwrap())
        .with_op_observer(&observer)
        .with_recompute_check(true)
        .with_mlp_tiles(tile);
    let loss = setup.model.forward(&tape, &batch).unwrap();
    let rows = loss.rows.value().to_f32_vec().unwrap();
    tape.backward(&loss, 1.0).unwrap();
    ((rows, setup.grads()), names.into_inner())
}

#[test]
fn the_high_resolution_tower_runs_in_tiles_with_the_same_bits() {
    let lora = LoraConfig {
        lora_rank: 2,
        lora_alpha: 2.0,
        lora_dropout: 0.3,
        others: Default::default(),
        targets: LoraTargets::parse(r"model\.cross_vision\..*(q_proj|w1|w3)"),
        layers: None,
        per_projection: false,
        use_rslora: false,
        modules_to_save: Vec::new(),
    };
    // Adapters freeze the norm inside of the feed-forward layers. Where it trains, these layers have no tiles.
    for (lora, in_tower) in [(Some(lora), true), (None, false)] {
        let options = ModelOptions {
            tune_vision: !in_tower,
            tune_llm: !in_tower,
            lora,
            ..ModelOptions::new(DType::F32)
        };
        let setup = Setup::new(AGENT, options);
        let (whole, none) = tiled(&setup, None);
        assert!(none.is_empty(), "{none:?}");
        let (tiles, names) = tiled(&setup, NonZeroUsize::new(1));
        let tower = names.iter().any(|name| name.contains("cross_vision"));
        assert_eq!(tower, in_tower, "{names:?}");
        assert!(tiles == whole);
        let got = |name: &str| {
            whole
                .1
                .iter()
                .any(|(n, grad)| n.contains(name) && grad.is_some())
        };
        assert_eq!((got("w3"), got("ffn_ln")), (true, !in_tower));
    }
}

#[test]
fn text_alone_gives_image_parts_no_gradient() {
    for name in [VLM, AGENT] {
        let setup = Setup::new(name, ModelOptions::new(DType::F32));
        let text = encode(name, &ask(Value::Null, "Why?")).unwrap();
        setup.run(&[&text], None);
        for (name, grad) in setup.grads() {
            let images = name.contains("vision") || name.contains("cross_att");
            assert_eq!(grad.is_some(), !images, "{name}");
        }
    }
}

#[test]
fn padding_tokens_give_their_embedding_no_gradient() {
    let setup = Setup::new(VLM, ModelOptions::new(DType::F32));
    let mut text = encode(VLM, &ask(Value::Null, "Why is that so?")).unwrap();
    text.input_ids[3] = 0;
    setup.run(&[&text], None);
    let grads = setup.grads();
    let (_, grad) = grads
        .iter()
        .find(|(n, _)| n.contains("embed_tokens"))
        .unwrap();
    let rows: Vec<&[f32]> = grad.as_ref().unwrap().chunks(48).collect();
    assert!(rows[0].iter().all(|g| *g == 0.0));
    assert!(rows[1].iter().any(|g| *g != 0.0));
}

#[test]
fn image_tokens_follow_the_begin_token_wherever_the_marker_is() {
    let plain = encode(VLM, &ask(json!("a"), "What is it?")).unwrap();
    assert_eq!(plain.image_bounds, [(1, 19)]);
    assert_eq!(plain.input_ids[..3], [1, 0, 0]);
    for text in [
        "<image>\nWhat is it?",
        "What is it?\n<image>",
        "What is it?<image>",
    ] {
        assert_eq!(encode(VLM, &ask(json!("a"), text)).unwrap(), plain);
    }
    let named = ask(json!({"<image_00>": "a"}), "<image_00>\nWhat is it?");
    assert_eq!(encode(VLM, &named).unwrap(), plain);
    for (turns, later) in [
        (["q", "a", "look <image> here", "b"], true),
        (["q", "Here <image> it is", "r", "b"], false),
        (["q", "a", "r", "<image>"], false),
    ] {
        let roles = ["user", "assistant", "user", "assistant"];
        let turns: Vec<_> = roles.into_iter().zip(turns).collect();
        let error = encode(VLM, &sample(json!("a"), &turns)).unwrap_err();
        let expected = match later {
            true => matches!(error, SampleError::LaterImage { turn: 2 }),
            false => matches!(error, SampleError::MisplacedImage { .. }),
        };
        assert!(expected, "{error}");
    }
}

#[test]
fn only_the_last_answer_is_supervised() {
    let turns = [
        ("user", "a"),
        ("assistant", "b"),
        ("user", "c"),
        ("assistant", "Yes."),
    ];
    let encoded = encode(VLM, &sample(Value::Null, &turns)).unwrap();
    let answer = processor(VLM).tokenizer().encode("Yes.").unwrap();
    assert_eq!(encoded.supervised_tokens(), answer.len() + 1);
    assert_eq!(encoded.input_ids.last(), Some(&2));
    assert_eq!(encoded.labels[encoded.labels.len() - 2], 2);
}

#[test]
fn samples_that_cannot_be_encoded_are_named() {
    let fails = |turns: &[(&str, &str)]| encode(VLM, &sample(Value::Null, turns)).unwrap_err();
    assert!(matches!(
        fails(&[("user", "a")]),
        SampleError::TooFewTurns { turns: 1, .. }
    ));
    assert!(matches!(
        fails(&[]),
        SampleError::TooFewTurns { turns: 0, .. }
    ));
    let first = fails(&[("assistant", "a"), ("user", "b")]);
    assert!(matches!(first, SampleError::FirstRoleNotUser { .. }));
    let unknown = fails(&[("user", "a"), ("tool", "b")]);
    assert!(matches!(unknown, SampleError::UnknownRole { turn: 1, .. }));
    let twice = fails(&[("user", "a"), ("user", "b")]);
    assert!(matches!(twice, SampleError::TurnOrder { turn: 1, .. }));
    let open = fails(&[("user", "a"), ("assistant", "b"), ("user", "c")]);
    assert!(matches!(open, SampleError::TurnOrder { turn: 2, .. }));
    let two = ask(json!({"<image_00>": "a", "<image_01>": "b"}), "What?");
    let two = encode(VLM, &two).unwrap_err();
    assert!(matches!(
        two,
        SampleError::TooManyImages {
            images: 2,
            limit: 1
        }
    ));
    let shown = encode(VLM, &ask(Value::Null, "<image> What?")).unwrap_err();
    assert!(matches!(
        shown,
        SampleError::MorePlaceholdersThanImages { images: 0, .. }
    ));
}

#[test]
fn long_samples_are_cut_or_refused() {
    let answer = "It is a large blue circle above a small red square, and a tree.";
    let turns = [("user", "What is it?"), ("assistant", answer)];
    let long = sample(json!("a"), &turns);
    let whole = encode(VLM, &long).unwrap();
    let context = whole.labels.iter().position(|l| *l >= 0).unwrap() + 1;
    let with = |model_max_length, source| {
        let prompt = Some(PromptStyle {
            template: TemplateVersion::ChatOld,
            source,
        });
        let options = EncodeOptions {
            model_max_length,
            prompt,
            ..EncodeOptions::default()
        };
        processor(VLM).encode(&long, &Plain, &options)
    };
    let cut = with(context + 2, PromptSource::Hub).unwrap();
    assert_eq!(
        (cut.input_ids.len(), cut.supervised_tokens()),
        (context + 2, 2)
    );
    assert_eq!(cut.untruncated_tokens, whole.input_ids.len());
    let none = with(context, PromptSource::Hub).unwrap_err();
    assert!(matches!(none, SampleError::NoSupervisedToken { .. }));
    // The scripts keep ten tokens free, and cut three before their limit.
    let none = with(context + 9, PromptSource::Sat).unwrap_err();
    assert!(matches!(none, SampleError::ContextTooLong { limit, .. } if limit == context - 1));
    let cut = with(context + 10, PromptSource::Sat).unwrap();
    assert_eq!(
        cut.input_ids.len(),
        (context + 7).min(whole.input_ids.len())
    );
    assert_eq!(cut.input_ids.last(), Some(&2));
}

#[test]
fn samples_with_slices_of_a_wrong_shape_are_refused() {
    let setup = Setup::new(AGENT, ModelOptions::new(DType::F32));
    let good = encode(AGENT, &ask(json!("a"), "What?")).unwrap();
    let refused = |change: &dyn Fn(&mut EncodedSample)| {
        let mut sample = good.clone();
        change(&mut sample);
        let inputs = [SampleInput::from(&sample)];
        let backend = &**setup.access.backend();
        setup.model.collate(&inputs, backend).is_err()
    };
    assert!(!refused(&|_| {}));
    assert!(refused(&|s| s.slices.swap(0, 1)));
    assert!(refused(&|s| s.slices.truncate(1)));
    assert!(refused(&|s| s.slices[1].patches.truncate(5)));
    assert!(refused(&|s| s.image_bounds[0].1 -= 1));
    assert!(refused(&|s| s.image_bounds[0] = (1000, 1018)));
}

#[test]
fn typed_control_tokens_stay_text_and_metadata_and_left_out_answers_are_refused() {
    let name = "cogvlm-chat-hf";
    let typed = sample(Value::Null, &[("user", "a</s>b"), ("assistant", "x</s>y")]);
    let encoded = encode(name, &typed).unwrap();
    let eos = processor(name).tokenizer.id("</s>").unwrap();
    let ends = encoded.input_ids.iter().filter(|id| **id == eos).count();
    assert_eq!((ends, encoded.input_ids.last()), (1, Some(&eos)));
    let mut marked = ask(Value::Null, "q");
    marked.conversations[1].unsupervised = true;
    let error = encode(name, &marked).unwrap_err();
    assert!(
        matches!(error, SampleError::NoSupervisedTurn { .. }),
        "{error}"
    );
    marked.conversations[1].metadata = "f".to_owned();
    let error = encode(name, &marked).unwrap_err();
    assert!(
        matches!(error, SampleError::Metadata { turn: 1 }),
        "{error}"
    );
}

//! The golden packs on the real engine: every quantity on one rank, trajectories in every layout, a batch divided over
//! ranks.
#![allow(clippy::unwrap_used, reason = "a test binary")]

mod layouts;

use engine::{Offload, ParamId, Precision};
use kernels::{Codebook, DType, Quantization};
use models::lora::{LoraConfig, LoraTargets};
use models::params::is_added;
use models::selection::Selection;
use models::{ModelOptions, QuantizedWeights, WeightSource, open_model, open_processor};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use tests::golden::{Comparison, Pack, Trajectory, packs_of};
use tests::parity::{check_pack, check_trajectory};
use tests::world::{Layout, NO_OFFLOAD, Setup, run_case, run_case_with, run_trajectory};

fn all_ok(what: &str, comparisons: &[Comparison]) {
    assert!(!comparisons.is_empty(), "{what}: nothing was compared");
    let failed: Vec<String> = comparisons
        .iter()
        .filter(|c| !c.ok())
        .map(ToString::to_string)
        .collect();
    assert!(failed.is_empty(), "{what}:\n{}", failed.join("\n"));
}

#[test]
fn every_stored_quantity_of_the_packs_agrees() {
    for dir in Pack::built_in() {
        for (title, comparisons) in check_pack(&dir).unwrap() {
            all_ok(&format!("{} {title}", dir.display()), &comparisons);
        }
    }
}

/// MiniCPM-V 4.0: tower and resampler of the pack of 2.6, and a decoder that transformers computed (Llama with longrope).
#[test]
fn a_decoder_with_factors_of_its_rotary_wavelengths_agrees() {
    let sections = check_pack(&Pack::beside("minicpm-v-4_0")).unwrap();
    assert_eq!(sections.len(), 2);
    for (title, comparisons) in sections {
        all_ok(&title, &comparisons);
    }
}

/// A copy of a pack's directory, without its other cases than `case`.
fn copy_of(pack: &str, case: &str) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    copy_files(&Pack::beside(pack), copy.path());
    let (from, to) = (format!("cases/{case}"), copy.path().join("cases"));
    copy_files(&Pack::beside(pack).join(from), &to.join(case));
    copy
}

fn copy_files(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
        }
    }
}

/// Changes a case's `conversation.json`.
fn edit(pack: &Path, case: &str, change: impl Fn(&mut Value)) {
    let path = pack.join("cases").join(case).join("conversation.json");
    let mut stored: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut stored);
    fs::write(&path, stored.to_string()).unwrap();
}

#[test]
fn samples_are_cut_to_the_length_that_their_case_states() {
    for (name, case) in [
        ("glm-4.1v-9b-thinking", "square_single"),
        ("glm-4v-9b", "square_single"),
    ] {
        let copy = copy_of(name, case);
        let lengths = |limit: usize| {
            edit(copy.path(), case, |stored| {
                stored["max_length"] = json!(limit);
            });
            let pack = Pack::read(copy.path()).unwrap();
            let processor = open_processor(copy.path()).unwrap();
            let case = pack.case(case).unwrap();
            let samples = packs_of(pack.family).samples(&pack, case, &*processor);
            let stored = case.expected.get("input_ids").unwrap().shape[1];
            (samples.unwrap()[0].input_ids.len(), stored)
        };
        // The stored ids of GLM-4V are those before the expansion of image tokens.
        let (whole, stored) = lengths(4096);
        assert_eq!(lengths(stored).0, whole, "{name}");
        assert_eq!(lengths(stored - 3).0, whole - 3, "{name}");
    }
}

#[test]
fn a_pack_may_have_one_layout_of_its_config_and_no_tables() {
    let name = "glm-4.1v-9b-thinking";
    for file in ["config.json", "config.flat.json"] {
        let copy = copy_of(name, "text_only");
        let config = fs::read(Pack::beside(name).join(file)).unwrap();
        fs::write(copy.path().join("config.json"), config).unwrap();
        for absent in [
            "config.flat.json",
            "tokenizer_cases.json",
            "smart_resize_cases.json",
        ] {
            fs::remove_file(copy.path().join(absent)).unwrap();
        }
        fs::write(
            copy.path().join("trajectory.json"),
            json!({"optimizer": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8}}).to_string(),
        )
        .unwrap();
        let sections = check_pack(copy.path()).unwrap();
        let (title, case) = &sections[sections.len() - 1];
        assert_eq!(title, "case text_only");
        all_ok(file, case);
    }
}

/// As `scripts/compare_reference.py` writes a pack.
#[test]
fn a_pack_of_losses_logits_and_adapters_is_compared_without_gradients_of_all_weights() {
    let (name, case) = ("glm-4.1v-9b-thinking", "square_single");
    let copy = copy_of(name, case);
    for adapters in ["adapter_init", "adapter_after8"] {
        copy_files(
            &Pack::beside(name).join(adapters),
            &copy.path().join(adapters),
        );
    }
    let path = copy.path().join("cases").join(case);
    let bytes = fs::read(path.join("expected.safetensors")).unwrap();
    let all = SafeTensors::deserialize(&bytes).unwrap();
    let kept = ["input_ids", "labels", "pixel_values", "loss", "logits"];
    let kept = kept.map(|name| (name, all.tensor(name).unwrap()));
    let kept = safetensors::serialize(kept, None).unwrap();
    fs::write(path.join("expected.safetensors"), kept).unwrap();
    let trajectory = copy.path().join("trajectory.json");
    let mut runs: Value = serde_json::from_slice(&fs::read(&trajectory).unwrap()).unwrap();
    let runs = runs.as_object_mut().unwrap();
    runs.retain(|name, _| name == "optimizer" || name == "lora");
    fs::write(&trajectory, serde_json::to_vec(&runs).unwrap()).unwrap();
    let sections = check_pack(copy.path()).unwrap();
    for (title, comparisons) in &sections {
        all_ok(title, comparisons);
    }
    let quantities = sections.iter().flat_map(|(_, c)| c);
    let quantities: Vec<_> = quantities.map(|c| &*c.quantity).collect();
    for quantity in ["loss", "logits", "losses", "grad_norms"] {
        assert!(
            quantities.contains(&quantity),
            "{quantity} was not compared"
        );
    }

    let pack = Pack::read(copy.path()).unwrap();
    let processor = open_processor(copy.path()).unwrap();
    let samples = packs_of(pack.family).samples(&pack, pack.case(case).unwrap(), &*processor);
    let samples = samples.unwrap();
    let full = run_case(&pack, &samples, Layout::SINGLE).unwrap();
    let norms = run_case_with(&pack, &samples, Layout::SINGLE, &Setup::norms().unwrap()).unwrap();
    assert_eq!((full.loss, full.logits), (norms.loss, norms.logits));
    assert!(norms.grads.keys().all(|name| name.contains("norm")));
    assert!(norms.grads.len() < full.grads.len());
}

/// The LoRA run of a pack of another form, as the script writes that of a user's model: a list of modules or a pattern.
#[test]
fn adapters_of_a_users_model_are_compared_in_every_family() {
    for (name, case) in [
        ("minicpm-v-2_6", "wide_two_turns"),
        ("cogvlm2-llama3-chat-19B", "chat_square"),
    ] {
        let copy = copy_of(name, case);
        let read = |file: &str| -> Value {
            serde_json::from_slice(&fs::read(Pack::beside(name).join(file)).unwrap()).unwrap()
        };
        for adapters in ["adapter_init", "adapter_after8"] {
            copy_files(
                &Pack::beside(name).join(adapters),
                &copy.path().join(adapters),
            );
        }
        let (stored, config) = (
            read("trajectory.json"),
            read("adapter_init/adapter_config.json"),
        );
        let run = &stored["lora"];
        let losses = run.get("losses").unwrap_or(run).as_array().unwrap();
        let written = json!({"optimizer": stored["optimizer"], "lora": {
            "micro_batches": [case], "losses": losses[..8], "loss_after": losses[8], "grad_norms": [],
            "rank": config["r"], "alpha": config["lora_alpha"], "targets": config["target_modules"],
            "adapters": ["adapter_init", "adapter_after8"],
        }});
        fs::write(copy.path().join("trajectory.json"), written.to_string()).unwrap();
        let pack = Pack::read(copy.path()).unwrap();
        let processor = open_processor(copy.path()).unwrap();
        let runs = packs_of(pack.family).trajectories(&pack, &*processor);
        let [run] = &runs.unwrap()[..] else {
            panic!("{name}: not one run")
        };
        assert!(!run.after.is_empty());
        all_ok(name, &check_trajectory(&pack, run, Layout::SINGLE).unwrap());
    }
}

#[test]
fn rows_of_the_training_scripts_have_no_history() {
    let (name, case) = ("cogagent-chat-hf", "chat_square");
    for version in ["chat", "chat_old"] {
        let copy = copy_of(name, case);
        let stored = || -> Vec<String> {
            let pack = Pack::read(copy.path()).unwrap();
            let processor = open_processor(copy.path()).unwrap();
            let (case, family) = (pack.case(case).unwrap(), packs_of(pack.family));
            let samples = family.samples(&pack, case, &*processor).unwrap();
            let all = family.compare_inputs(&pack, case, &*processor, &samples);
            let all = all.unwrap().into_iter();
            all.filter(|c| c.quantity.starts_with("sat."))
                .map(|c| c.to_string())
                .collect()
        };
        edit(copy.path(), case, |stored| {
            stored["sat_version"] = json!(version);
        });
        let alone = stored();
        edit(copy.path(), case, |stored| {
            let turns = stored["conversations"].as_array_mut().unwrap();
            turns.splice(
                0..0,
                [
                    json!({"role": "user", "content": "Who?"}),
                    json!({"role": "assistant", "content": "She."}),
                ],
            );
        });
        assert_eq!(stored(), alone, "{version}");
        let right = alone.iter().filter(|line| line.ends_with("ok")).count();
        assert!(version != "chat" || right == alone.len(), "{alone:#?}");
    }
}

#[test]
fn stored_trajectories_are_followed_in_every_layout() {
    for dir in Pack::built_in() {
        let (pack, processor) = (Pack::read(&dir).unwrap(), open_processor(&dir).unwrap());
        let family = packs_of(pack.family);
        let mut all = family.trajectories(&pack, &*processor).unwrap();
        let full = all.iter().position(|t| t.name == "full").unwrap_or(0);
        let first = &mut all[full];
        // Three updates reveal a wrong layout. All eight run in one layout and in the most sharded one.
        first.losses.truncate(4);
        first.grad_norms.truncate(3);
        first.after.clear();
        first.norms_after.clear();
        for world in 1..=3 {
            for stage in 0..=3 {
                for offload in [NO_OFFLOAD, Offload::CPU] {
                    let layout = Layout {
                        world,
                        stage,
                        offload,
                        ..Layout::SINGLE
                    };
                    let result = check_trajectory(&pack, first, layout).unwrap();
                    all_ok(&format!("{} {layout:?}", dir.display()), &result);
                }
            }
        }
    }
}

#[test]
fn sharded_adapters_and_frozen_parts_follow_their_trajectories() {
    for dir in Pack::built_in() {
        let (pack, processor) = (Pack::read(&dir).unwrap(), open_processor(&dir).unwrap());
        let layout = Layout {
            world: 2,
            stage: 3,
            offload: Offload::CPU,
            ..Layout::SINGLE
        };
        let all = packs_of(pack.family).trajectories(&pack, &*processor);
        for trajectory in all.unwrap() {
            let result = check_trajectory(&pack, &trajectory, layout).unwrap();
            all_ok(&format!("{} {}", dir.display(), trajectory.name), &result);
        }
    }
}

/// Pairs of mesh and ZeRO stage, as (pipeline stages, data-parallel ranks, ZeRO stage).
const MESHES: [(usize, usize, u8); 5] = [(2, 1, 0), (3, 1, 3), (2, 2, 2), (3, 2, 1), (2, 2, 3)];

/// Trajectories of each pack on pipeline stages: two in one mesh each, or, with TESSERA_EVERY_PACK, all in all.
#[test]
fn pipeline_stages_have_the_bits_of_an_undivided_model() {
    let every = std::env::var_os("TESSERA_EVERY_PACK").is_some();
    for (turn, dir) in Pack::built_in().into_iter().enumerate() {
        let (pack, processor) = (Pack::read(&dir).unwrap(), open_processor(&dir).unwrap());
        let family = packs_of(pack.family);
        let samples = pack.cases.iter();
        let samples = samples.map(|case| family.samples(&pack, case, &*processor).unwrap());
        let without_images = samples.flatten().find(|sample| sample.slices.is_empty());
        let all = family.trajectories(&pack, &*processor).unwrap();
        let most = if every { all.len() } else { 2 };
        for (kind, mut trajectory) in all.into_iter().take(most).enumerate() {
            trajectory.losses.truncate(3);
            // More micro-batches than stages, the last one without images.
            let own = trajectory.micro_batches.clone();
            while trajectory.micro_batches.len() < 3 {
                trajectory.micro_batches.extend(own.iter().cloned());
            }
            let last = without_images
                .clone()
                .map_or_else(|| own[0].clone(), |sample| vec![sample]);
            trajectory.micro_batches.push(last);
            let meshes = match every {
                true => &MESHES[..],
                false => std::slice::from_ref(&MESHES[(turn + 2 * kind) % MESHES.len()]),
            };
            for (stages, world, stage) in meshes.iter().copied() {
                let layout = |stages| Layout {
                    world,
                    stages,
                    stage,
                    ..Layout::SINGLE
                };
                let whole = run_trajectory(&pack, &trajectory, layout(1)).unwrap();
                let divided = run_trajectory(&pack, &trajectory, layout(stages)).unwrap();
                let name = &trajectory.name;
                assert!(whole == divided, "{} {name} {stages}", dir.display());
            }
        }
    }
}

#[test]
fn a_batch_divided_over_two_ranks_gives_its_stored_loss_and_gradients() {
    for dir in Pack::built_in() {
        let (pack, processor) = (Pack::read(&dir).unwrap(), open_processor(&dir).unwrap());
        let family = packs_of(pack.family);
        let batches = pack.cases.iter().filter_map(|case| {
            let samples = family.samples(&pack, case, &*processor).unwrap();
            (samples.len() > 1).then_some((case, samples))
        });
        for (case, samples) in batches {
            for stage in [1, 3] {
                let layout = Layout {
                    world: 2,
                    stage,
                    offload: Offload::CPU,
                    ..Layout::SINGLE
                };
                let run = run_case(&pack, &samples, layout).unwrap();
                // Observed row values exist on one rank only.
                let divided: Vec<Comparison> = family
                    .compare_run(case, &samples, &run)
                    .unwrap()
                    .into_iter()
                    .filter(|c| c.quantity.starts_with("grad") || c.quantity == "loss")
                    .collect();
                all_ok(&format!("{} {layout:?}", dir.display()), &divided);
            }
        }
    }
}

/// Packs whose weights are quantized, saved by transformers, also with the `config.json` that transformers 5 writes.
#[test]
fn packs_with_packed_weights_agree() {
    for name in [
        "glm-4.1v-nf4",
        "glm-4.1v-nf4-decoder",
        "glm-4.1v-int8",
        "minicpm-v-nf4",
    ] {
        let dir = Pack::beside(name);
        for (title, comparisons) in check_pack(&dir).unwrap() {
            // The packs have no lookup tables.
            if title != "tables" {
                all_ok(&format!("{name} {title}"), &comparisons);
            }
        }
        let newer = dir.join("config.v5.json");
        if newer.is_file() {
            let copy = tempfile::tempdir().unwrap();
            copy_files(&dir, copy.path());
            fs::copy(newer, copy.path().join("config.json")).unwrap();
            let shapes = |dir: &Path| {
                let options = ModelOptions::new(DType::F32);
                open_model(dir, options).unwrap().spec().clone()
            };
            assert_eq!(shapes(copy.path()), shapes(&dir), "{name}");
            assert!(QuantizedWeights::declared(copy.path()).unwrap().is_some());
        }
    }
}

/// Layouts of runs on quantized weights: ZeRO stage, tiers, precision and ranks, each pair of values at least once.
const PACKED_LAYOUTS: [(u8, bool, Precision, usize); 8] = [
    (0, false, Precision::F32, 1),
    (1, true, Precision::Bf16, 2),
    (2, false, Precision::Fp16, 2),
    (3, true, Precision::PureBf16, 2),
    (0, true, Precision::PureBf16, 1),
    (1, false, Precision::Fp16, 1),
    (2, true, Precision::F32, 2),
    (3, false, Precision::Bf16, 3),
];

/// Adapters on quantized weights have the bits of adapters on the weights that the quantized ones stand for: every family in one
/// layout and quantization each, or, with TESSERA_EVERY_PACK, in all.
#[test]
fn quantized_bases_have_the_bits_of_their_dequantized_ones() {
    let every = std::env::var_os("TESSERA_EVERY_PACK").is_some();
    let quantizations = [
        Quantization::four_bit(Codebook::Nf4, true),
        Quantization::four_bit(Codebook::Fp4, false),
        Quantization::Int8,
    ];
    for (i, dir) in Pack::built_in().into_iter().enumerate() {
        for (j, (stage, offloads, precision, world)) in PACKED_LAYOUTS.into_iter().enumerate() {
            for (k, quantization) in quantizations.into_iter().enumerate() {
                if every || (j == i && k == i % quantizations.len()) {
                    let layout = Layout {
                        world,
                        stage,
                        offload: if offloads { Offload::CPU } else { NO_OFFLOAD },
                        precision,
                        ..Layout::SINGLE
                    };
                    quantized_beside_dequantized(&dir, quantization, layout);
                }
            }
        }
    }
}

fn quantized_beside_dequantized(dir: &Path, quantization: Quantization, layout: Layout) {
    let name = format!("{}, {quantization}, {layout:?}", dir.display());
    let pack = Pack::read(dir).unwrap();
    let processor = open_processor(dir).unwrap();
    let case = pack.cases.iter().min_by_key(|case| {
        case.expected
            .0
            .values()
            .map(|t| t.shape.iter().product::<usize>())
            .max()
    });
    let samples = packs_of(pack.family)
        .samples(&pack, case.unwrap(), &*processor)
        .unwrap();
    let mut run = Trajectory::new(
        "packed",
        Setup::full().optimizer,
        vec![samples],
        vec![0.0; 3],
        0.0,
    );
    (run.options.tune_vision, run.options.tune_llm) = (false, false);
    run.options.lora = Some(LoraConfig {
        lora_rank: 2,
        lora_alpha: 4.0,
        lora_dropout: 0.0,
        others: Default::default(),
        targets: LoraTargets::parse(pack.family.default_lora_targets()),
        layers: None,
        per_projection: false,
        use_rslora: false,
        modules_to_save: Vec::new(),
    });
    run.options.quantized = QuantizedWeights::Chosen {
        quantization,
        modules: Some(Selection::parse(".*").unwrap()),
    };
    let model = open_model(dir, run.options.clone()).unwrap();
    for (i, param) in model.spec().params.iter().enumerate() {
        if is_added(&param.name) {
            let mut values = vec![0.0; param.shape.elems()];
            model.init(ParamId(i as u32), 7, 0..values.len(), &mut values);
            run.start.insert(param.name.clone(), values);
        }
    }
    let quantizations = model.spec().params.iter();
    let quantizations: BTreeMap<String, Quantization> = quantizations
        .filter_map(|param| Some((param.name.clone(), param.stored_quantization()?)))
        .collect();
    assert!(
        quantizations.len() > 8,
        "{name}: {} weights are quantized",
        quantizations.len()
    );
    let quantized = run_trajectory(&pack, &run, layout).unwrap();
    let dequantized = tempfile::tempdir().unwrap();
    copy_files(dir, dequantized.path());
    let mut source = WeightSource::open(dir).unwrap();
    source.quantize_on_read(quantizations);
    write_plain(&source, &dequantized.path().join("model.safetensors"));
    let plain = Pack {
        dir: dequantized.path().to_owned(),
        ..pack
    };
    run.options.quantized = QuantizedWeights::None;
    let plain = run_trajectory(&plain, &run, layout).unwrap();
    assert!(
        quantized.losses == plain.losses,
        "{name}: {quantized:?} {plain:?}"
    );
    assert!(quantized.weights == plain.weights, "{name}");
    assert!(
        quantized.losses[0].is_finite() && quantized.losses[0] != quantized.losses[2],
        "{name}"
    );
}

/// Writes all weights of `source` in f32.
fn write_plain(source: &WeightSource, path: &Path) {
    let names: Vec<&str> = source.names().collect();
    let values: Vec<Vec<u8>> = names
        .iter()
        .map(|name| source.read(name, DType::F32).unwrap())
        .collect();
    let views = names.iter().zip(&values).map(|(name, bytes)| {
        let shape = source.shape(name).unwrap().to_vec();
        (*name, TensorView::new(Dtype::F32, shape, bytes).unwrap())
    });
    safetensors::serialize_to_file(views, None, path).unwrap();
}

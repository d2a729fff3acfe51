//! Quantized base weights, from the flag and from quantized directories to exports.

use crate::generate::{refuse, run};
use crate::site::{Site, golden, losses};
use kernels::{DType, Shape};
use models::WeightSource;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// All tensors of a file as f32.
fn values(path: &Path) -> BTreeMap<String, Vec<u8>> {
    let source = WeightSource::open_file(path).unwrap();
    let names = source.names();
    let read = |name: &str| (name.to_owned(), source.read(name, DType::F32).unwrap());
    names.map(read).collect()
}

/// A run on a quantized directory, one that quantizes while it loads and one on dequantized weights are one run; so are their merges.
#[test]
fn quantized_and_dequantized_bases_train_the_same_adapters() {
    let site = Site::with_family("glm-4.1v-9b-thinking");
    let flags = "--quantize nf4 --quantize-double";
    run(&site, &format!("export model {flags} --output quantized"));
    run(&site, "export quantized --dequantize --output dense");
    let adapters = "--lora-rank 4 --precision bf16";
    fs::create_dir(site.path("disk")).unwrap();
    let on_read = site.train(&format!(
        "{adapters} {flags} --zero 3 --nproc 2 --offload cpu --output a"
    ));
    assert!(!on_read.screen.contains("(100 %)"), "{}", on_read.screen);
    site.train(&format!(
        "{adapters} --model quantized --nproc 2 --zero 3 --offload nvme:disk --output b"
    ));
    site.train(&format!(
        "{adapters} --model dense --nproc 2 --zero 2 --output c"
    ));
    let trained = |name: &str| {
        let file = format!("{name}/checkpoint-2/adapter_model.safetensors");
        (losses(&site.path(name)), values(&site.path(&file)))
    };
    let dense = trained("c");
    assert!(trained("a") == dense, "quantized while loading");
    assert!(trained("b") == dense, "quantized in the directory");
    for name in ["a", "b", "c"] {
        run(
            &site,
            &format!("export {name} --merge --dtype f32 --output {name}-merged"),
        );
    }
    let merged = |name: &str| values(&site.path(&format!("{name}-merged/model.safetensors")));
    assert!(merged("a") == merged("c") && merged("b") == merged("c"));
    let config: Value = read(&site.path("b-merged/config.json"));
    assert_eq!(config.get("quantization_config"), None);
    run(
        &site,
        "export a --merge --merge-base original --dtype f32 --output original",
    );
    assert!(values(&site.path("original/model.safetensors")) != merged("a"));
    refuse(
        &site,
        "export b --merge --merge-base original --output nowhere",
        2,
        "E09",
        &["--model"],
    );
    let ask = "--prompt Hello --max-new-tokens 4 --precision f32";
    let answers = [
        "--model model --adapter a/checkpoint-2",
        "--model quantized --adapter b/checkpoint-2",
        "--model dense --adapter c/checkpoint-2",
    ]
    .map(|of| run(&site, &format!("generate {of} {ask}")).stdout);
    assert_eq!(answers[0], answers[2]);
    assert_eq!(answers[1], answers[2]);
}

/// Ranks that read frozen weights in the mapped files train what ranks with copies train. With shard groups the plan says
/// that each group has its own copy.
#[test]
fn weights_in_mapped_files_train_the_same_adapters() {
    let site = Site::with_family("glm-4.1v-9b-thinking");
    let line = "--lora-rank 4 --precision f32 --nproc 2 --zero 2";
    let mapped = site.train(&format!("{line} --offload cpu --output mapped"));
    let copied = site.train(&format!("{line} --offload none --output copied"));
    let words = "are read in the mapped weight files, without a copy";
    assert!(mapped.screen.contains(words), "{}", mapped.screen);
    assert!(!copied.screen.contains(words), "{}", copied.screen);
    let trained = |name: &str| {
        let file = format!("{name}/checkpoint-2/adapter_model.safetensors");
        (losses(&site.path(name)), values(&site.path(&file)))
    };
    assert!(trained("mapped") == trained("copied"));
    let groups = site.train(&format!(
        "{line} --offload cpu --shard-group 1 --max-steps 1 --output groups"
    ));
    let words = "with --shard-group, each rank stores a copy";
    assert!(groups.screen.contains(words), "{}", groups.screen);
}

fn read(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// Tensors of a file that bitsandbytes wrote and of ours: names, dtypes and shapes, and every value.
#[test]
fn exports_have_the_tensors_that_transformers_saves() {
    let site = Site::with_family("glm-4.1v-9b-thinking");
    for (pack, flags) in [
        (
            "glm-4.1v-nf4",
            "--quantize nf4 --quantize-double --quantize-modules all",
        ),
        ("glm-4.1v-nf4-decoder", "--quantize nf4"),
        ("glm-4.1v-int8", "--quantize int8 --quantize-modules all"),
    ] {
        run(&site, &format!("export model {flags} --output {pack}"));
        let (ours, theirs) = (site.path(pack), golden(pack));
        let files = [&ours, &theirs].map(|dir| fs::read(dir.join("model.safetensors")).unwrap());
        let [own, other] = files
            .each_ref()
            .map(|bytes| SafeTensors::deserialize(bytes).unwrap());
        let describe = |file: &SafeTensors<'_>| {
            let tensors = file.iter().map(|(name, view)| {
                let is_state = name.contains("quant_state");
                let shape = (!is_state).then(|| view.shape().to_vec());
                (name.to_owned(), (view.dtype(), shape))
            });
            tensors.collect::<BTreeMap<_, _>>()
        };
        assert_eq!(describe(&own), describe(&other), "{pack}");
        for (name, view) in other.iter() {
            let found = own.tensor(name).unwrap();
            let (found, wanted) = (found.data(), view.data());
            if name.contains("quant_state") {
                let [found, wanted] =
                    [found, wanted].map(|b| serde_json::from_slice::<Value>(b).unwrap());
                let without = |state: &Value| {
                    let mut state = state.clone();
                    state["nested_offset"] = json!(0);
                    state
                };
                assert_eq!(without(&found), without(&wanted), "{pack} {name}");
            } else if pack.ends_with("int8") && view.dtype() == Dtype::I8 {
                // The package's quotient is not rounded everywhere, so a tie may fall to the other side.
                let apart = found
                    .iter()
                    .zip(wanted)
                    .map(|(a, b)| a.wrapping_sub(*b) as i8);
                let others: Vec<i8> = apart.filter(|apart| *apart != 0).collect();
                let is_tie = others.len() <= found.len() / TIES_ONE_IN
                    && others.iter().all(|apart| apart.abs() == 1);
                assert!(is_tie, "{pack} {name}: {others:?}");
            } else if !name.contains("absmax") || !pack.ends_with("nf4") {
                assert!(found == wanted, "{pack} {name}");
            }
        }
        let settings = |dir: &Path| read(&dir.join("config.json"))["quantization_config"].clone();
        let (own, other) = (settings(&ours), settings(&theirs));
        for key in [
            "quant_method",
            "load_in_4bit",
            "load_in_8bit",
            "bnb_4bit_quant_type",
            "bnb_4bit_use_double_quant",
        ] {
            assert_eq!(own[key], other[key], "{pack} {key}");
        }
        let [own, other] = [&ours, &theirs].map(|dir| WeightSource::open(dir).unwrap());
        let quantizations = other.quantizations();
        assert_eq!(own.quantizations(), quantizations, "{pack}");
        for (name, quantization) in quantizations {
            let [a, b] = [&own, &other].map(|source| source.read(&name, DType::F32).unwrap());
            let elems = Shape::new(own.shape(&name).unwrap()).elems();
            assert_eq!(a.len(), 4 * elems, "{quantization}");
            let [a, b] = [a, b].map(|bytes| bytemuck::pod_collect_to_vec::<u8, f32>(&bytes));
            let apart = a
                .iter()
                .zip(&b)
                .map(|(a, b)| (a - b).abs())
                .fold(0.0, f32::max);
            let largest = b.iter().fold(0.0f32, |most, v| v.abs().max(most));
            assert!(
                apart <= NESTED_STEP * largest,
                "{pack} {name}: {apart} of {largest}"
            );
        }
    }
}

/// Least number of int8 codes for each that falls to the other side of a tie: the package has 6 in 102 400.
const TIES_ONE_IN: usize = 1000;

/// Largest distance of two values as a share of the largest one: the package on a CPU rounds quantized magnitudes to a
/// grid before it chooses their code, so a code may be the neighbor, at most 1 / 64 of the largest difference away.
const NESTED_STEP: f32 = 1.0 / 64.0;

#[test]
fn runs_that_make_no_sense_are_refused() {
    let site = Site::with_family("glm-4.1v-nf4");
    for (line, code, words) in [
        ("--precision bf16", "E09", "--lora-rank 16"),
        ("--lora-rank 4 --quantize int8", "E09", "--quantize nf4"),
    ] {
        let screen = site.refuse(line, 2, code);
        assert!(screen.contains(words), "{line}\n{screen}");
    }
    site.train("--quantize none --precision bf16");
    let saved = read(&site.path("out/checkpoint-2/config.json"));
    assert_eq!(saved.get("quantization_config"), None);
    let plain = Site::with_family("glm-4.1v-9b-thinking");
    let screen = plain.refuse("--quantize nf4", 2, "E09");
    assert!(screen.contains("--lora-rank 16"), "{screen}");
}

/// An export reads quantized weights only in the shapes of the model.
#[test]
fn quantized_weights_of_other_shapes_are_not_exported() {
    let site = Site::with_family("glm-4.1v-9b-thinking");
    run(&site, "export model --quantize nf4 --output quantized");
    let file = site.path("quantized/model.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    // The first state of a matrix that is not square. The header of the file has no space there.
    let shape = b"\"shape\": [";
    let mut windows = bytes.windows(shape.len()).enumerate();
    let (start, text) = windows
        .find_map(|(at, window)| {
            let start = (window == shape).then_some(at + shape.len())?;
            let end = start + bytes[start..].iter().position(|b| *b == b']')?;
            let (rows, columns) = std::str::from_utf8(&bytes[start..end])
                .ok()?
                .split_once(", ")?;
            (rows != columns).then(|| (start, format!("{columns}, {rows}")))
        })
        .unwrap();
    bytes[start..start + text.len()].copy_from_slice(text.as_bytes());
    fs::write(&file, bytes).unwrap();
    refuse(
        &site,
        "export quantized --dequantize --output dense",
        10,
        "E10",
        &["the configuration says"],
    );
    assert!(!site.path("dense").exists());
}

/// A resumed run has the bits of one without a break, and a run with other weights is refused.
#[test]
fn a_quantized_run_resumes() {
    let site = Site::with_family("glm-4.1v-9b-thinking");
    let flags = "--lora-rank 4 --quantize nf4 --precision bf16 --max-steps 4 --save-steps 2";
    site.train(&format!("{flags} --output whole"));
    site.train(&format!(
        "{flags} --output part --inject kill:rank=0,step=3 --max-restarts 1"
    ));
    let trained =
        |run: &str| values(&site.path(&format!("{run}/checkpoint-4/adapter_model.safetensors")));
    assert!(trained("whole") == trained("part"));
    let other = flags.replace("nf4", "fp4");
    let outcome = site.run(&format!(
        "{other} --max-steps 6 --resume whole/checkpoint-4 --output other"
    ));
    assert_ne!(outcome.code, Some(0), "{}", outcome.screen);
    assert!(
        outcome.screen.contains("frozen base weights"),
        "{}",
        outcome.screen
    );
}

/// The presets of QLoRA train tiny models, and the run says what it quantizes.
#[test]
fn presets_of_qlora_train_tiny_models() {
    for (preset, family) in [
        ("minicpm-qlora", "minicpm-v-2_6"),
        ("cogvlm-qlora", "cogvlm-chat-hf"),
        ("glm4v-qlora", "glm-4v-9b"),
    ] {
        let site = Site::with_family(family);
        let screen = site
            .train(&format!(
                "--preset {preset} --max-steps 2 --nproc 2 --gradient-accumulation-steps 1"
            ))
            .screen;
        assert!(screen.contains("in nf4, double"), "{screen}");
        let config: Value = read(&site.path("out/checkpoint-2/adapter_config.json"));
        assert_eq!(config["peft_type"], "LORA", "{preset}");
        let plan: Value = read(&site.path("out/plan.json"));
        assert_eq!(plan["quantized"]["formats"], json!(["nf4, double"]));
        assert!(plan["quantized"]["tensors"].as_u64() > Some(1), "{plan}");
        let report = fs::read_to_string(site.path("out/report.html")).unwrap();
        assert!(report.contains("quantized layers of the base"), "{preset}");
    }
}

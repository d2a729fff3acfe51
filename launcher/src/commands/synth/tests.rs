//! Tests of model directories of every family, from published and from reduced sizes.

use std::path::{Path, PathBuf};

use models::{ModelOptions, Processor, WeightSource, open_model, open_processor};

use crate::commands::synth::*;

fn golden(pack: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/golden")
        .join(pack)
}

fn args(model_config: &Path, output: &Path) -> SynthArgs {
    SynthArgs {
        model_config: Some(model_config.to_owned()),
        output: Some(output.to_owned()),
        samples: Some(2),
        sample_tokens: Some(200),
        ..SynthArgs::default()
    }
}

#[test]
fn every_family_gets_a_directory_that_opens() {
    let temp = tempfile::tempdir().expect("temp dir");
    for pack in [
        "minicpm-v-2_6",
        "minicpm-o-2_6",
        "cogvlm-chat-hf",
        "cogagent-chat-hf",
        "cogvlm2-llama3-chat-19B",
        "glm-4v-9b",
        "glm-4.1v-9b-thinking",
        "minicpm-v-4_5",
        "minicpm-o-4_5",
        "cogagent-9b-20241220",
        "glm-4.6v-flash",
        "glm-ocr",
    ] {
        let output = temp.path().join(pack);
        run(&args(&golden(pack), &output)).expect(pack);
        let model = open_model(&output, ModelOptions::new(DType::BF16)).expect(pack);
        let weights = WeightSource::open(&output).expect(pack);
        // No tensor is missing, and no tensor is extra.
        assert_eq!(
            weights.check(model.spec()).expect(pack),
            Vec::<String>::new()
        );
        let published = WeightSource::open(&golden(pack)).expect(pack);
        for name in weights.names() {
            assert_eq!(weights.shape(name), published.shape(name), "{pack}: {name}");
            assert_eq!(weights.dtype(name), Some(DType::BF16));
        }
        assert!(output.join("model.safetensors.index.json").is_file());
        assert!(weights.files().count() <= SHARDS);
        check_samples(&output, &*open_processor(&output).expect(pack));
    }
}

#[test]
fn weights_made_in_memory_equal_those_of_the_files() {
    let temp = tempfile::tempdir().expect("temp dir");
    for pack in ["minicpm-o-2_6", "cogagent-chat-hf", "glm-4.1v-9b-thinking"] {
        let [files, seeded] = ["files", "seeded"].map(|kind| temp.path().join(pack).join(kind));
        let args = |output, weights| SynthArgs {
            weights: Some(weights),
            seed: Some(7),
            ..args(&golden(pack), output)
        };
        run(&args(&files, SynthWeights::Files)).expect(pack);
        run(&args(&seeded, SynthWeights::Seeded)).expect(pack);
        let [files, made] =
            [&files, &seeded].map(|directory| WeightSource::open(directory).expect("weights"));
        assert_eq!(
            made.files().collect::<Vec<_>>(),
            [seeded.join(models::seeded::FILE)]
        );
        assert!(files.names().eq(made.names()), "{pack}");
        for name in files.names() {
            assert_eq!(files.shape(name), made.shape(name), "{pack}: {name}");
            assert_eq!(files.dtype(name), made.dtype(name));
            let elems: usize = files.shape(name).expect("a shape").iter().product();
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                let read = |source: &WeightSource, elements: std::ops::Range<usize>| {
                    let mut bytes = vec![0; elements.len() * dtype.size_bytes()];
                    source
                        .read_range(name, elements, dtype, &mut bytes)
                        .expect(name);
                    bytes
                };
                for elements in [0..elems, elems / 3..elems, elems / 2..elems / 2 + elems / 4] {
                    let range = format!("{name} {elements:?} {dtype}");
                    assert_eq!(
                        read(&files, elements.clone()),
                        read(&made, elements),
                        "{range}"
                    );
                }
            }
            let past = made.read_range(name, 1..elems + 1, DType::BF16, &mut vec![0; 2 * elems]);
            assert!(past.is_err(), "{name}");
        }
    }
    let marker = temp
        .path()
        .join("minicpm-o-2_6/seeded")
        .join(models::seeded::FILE);
    std::fs::write(&marker, r#"{"generator": "another", "seed": 7}"#).expect("written");
    let error = WeightSource::open(marker.parent().expect("a folder")).expect_err("unknown");
    assert!(error.to_string().contains("declaration"), "{error}");
}

#[test]
fn synthetic_images_of_any_size_make_the_expected_slices() {
    let temp = tempfile::tempdir().expect("temp dir");
    let output = temp.path().join("out");
    let large = SynthArgs {
        image_side: Some(1344),
        sample_tokens: Some(900),
        weights: Some(SynthWeights::Seeded),
        ..args(Path::new("minicpm-v-2_6"), &output)
    };
    run(&large).expect("made");
    let processor = open_processor(&output).expect("opens");
    let file = output.join(samples::FILE);
    let read = models::data::read_samples(&file).expect("a data file");
    let images = models::image::ImageFolder::beside(&file);
    let encoded = processor
        .encode(&read[0], &images, &models::data::EncodeOptions::default())
        .expect("encodes");
    // Nine slices and the overview image.
    assert_eq!((encoded.slices.len(), encoded.input_ids.len()), (10, 900));
    for side in [0, 5000] {
        let other = SynthArgs {
            output: Some(temp.path().join("other")),
            image_side: Some(side),
            ..large.clone()
        };
        assert_eq!(run(&other).expect_err("refused").code.status(), 2);
    }
    let both = SynthArgs {
        output: Some(temp.path().join("other")),
        shards: Some(2),
        ..large
    };
    assert_eq!(run(&both).expect_err("refused").code.status(), 2);
}

/// Checks that every sample has the requested length, or the length that its image requires.
fn check_samples(directory: &Path, processor: &dyn Processor) {
    let file = directory.join(samples::FILE);
    let read = models::data::read_samples(&file).expect("a data file");
    assert_eq!(read.len(), 2);
    let images = models::image::ImageFolder::beside(&file);
    let pixels: Vec<_> = read
        .iter()
        .map(|sample| {
            let encoded = processor
                .encode(sample, &images, &models::data::EncodeOptions::default())
                .expect("encodes");
            assert_eq!(encoded.input_ids.len(), 200, "{}", directory.display());
            assert!(encoded.supervised_tokens() > 20);
            encoded.slices
        })
        .collect();
    assert_ne!(pixels[0], pixels[1], "pictures differ");
}

#[test]
fn published_configurations_have_their_published_sizes() {
    let expected: [u64; 12] = [
        8_099_175_152,
        8_099_418_864,
        17_639_685_376,
        18_291_033_280,
        19_503_105_280,
        13_906_320_896,
        10_292_777_472,
        8_695_895_280,
        8_695_895_280,
        13_906_320_896,
        10_292_777_472,
        1_107_405_824,
    ];
    let temp = tempfile::tempdir().expect("temp dir");
    for ((name, _), expected) in config::PUBLISHED.iter().zip(expected) {
        let directory = temp.path().join(name);
        std::fs::create_dir(&directory).expect("made");
        let found = config::find(Some(Path::new(name))).expect(name);
        files::write(&found, &directory).expect(name);
        let model = open_model(&directory, ModelOptions::new(DType::BF16)).expect(name);
        open_processor(&directory).expect(name);
        let layout = Layout::new(&*model, SHARDS).expect(name);
        assert_eq!(layout.parameters(), expected, "{name}");
    }
}

#[test]
fn special_tokens_have_their_published_ids() {
    for (name, token, id) in [
        ("minicpm-v-2_6", "<|im_end|>", 151_645),
        ("minicpm-v-2_6", "<image>", 151_646),
        ("minicpm-v-2_6", "</image_id>", 151_659),
        ("minicpm-v-4_5", "<|im_end|>", 151_645),
        ("minicpm-v-4_5", "</think>", 151_668),
        ("minicpm-v-4_5", "<image>", 151_669),
        ("glm-4.1v-9b-thinking", "<|image|>", 151_343),
        ("glm-4.6v-flash", "/nothink", 151_360),
        ("glm-4.6v-flash", "<|image|>", 151_363),
        ("glm-ocr", "<|user|>", 59_253),
        ("glm-ocr", "<|image|>", 59_280),
    ] {
        let temp = tempfile::tempdir().expect("temp dir");
        let found = config::find(Some(Path::new(name))).expect("a name");
        files::write(&found, temp.path()).expect("written");
        let processor = open_processor(temp.path()).expect("opens");
        assert_eq!(processor.tokenizer().id(token).expect(token), id, "{name}");
    }
}

#[test]
fn impossible_requests_are_refused_and_leave_no_files() {
    let temp = tempfile::tempdir().expect("temp dir");
    let output = temp.path().join("out");
    let small = temp.path().join("small.json");
    let text = std::fs::read_to_string(golden("minicpm-v-2_6/config.json")).expect("read");
    let text = text.replace("\"vocab_size\": 335", "\"vocab_size\": 280");
    std::fs::write(&small, text).expect("written");
    let failure = run(&args(&small, &output)).expect_err("too small");
    assert!(failure.cause.contains("vocabulary"), "{failure}");
    let other = temp.path().join("other.json");
    std::fs::write(&other, r#"{"model_type": "llama"}"#).expect("written");
    let failure = run(&args(&other, &output)).expect_err("another family");
    assert_eq!(failure.code.status(), 10, "{failure}");
    let failure = run(&args(&golden("minicpm-v-2_6"), temp.path())).expect_err("taken");
    assert_eq!(failure.code.status(), 2, "{failure}");
    let failure = check_space(temp.path(), u64::MAX >> 1).expect_err("no disk is that large");
    assert_eq!(failure.code.status(), 16, "{failure}");
    assert_eq!(std::fs::read_dir(temp.path()).expect("listed").count(), 2);
}

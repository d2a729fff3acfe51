//! Compares the way from samples to model inputs with the golden packs, exactly.
#![allow(clippy::unwrap_used, reason = "helpers of a test binary")]

use std::fs;
use std::path::{Path, PathBuf};

use models::Processor;
use models::data::{EncodeOptions, EncodedSample, RawSample, Slice, read_samples};
use models::image::ImageFolder;
use models::minicpm::MiniCpmProcessor;
use models::minicpm::config::SlicingConfig;
use models::minicpm::positions::{position_buckets, position_ids};
use models::minicpm::slicing::SlicePlan;
use safetensors::SafeTensors;
use serde_json::Value;

const PATCH: usize = 14;
const PACKS: [&str; 2] = ["minicpm-v-2_6", "minicpm-o-2_6"];

fn pack(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/golden")
        .join(name)
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// A case with one sample.
struct Case {
    dir: PathBuf,
    sample: RawSample,
    images: ImageFolder,
    options: EncodeOptions,
    expected: Vec<u8>,
}

impl Case {
    fn read(dir: PathBuf) -> Self {
        let data = dir.join("conversation.json");
        let options = json(&dir.join("options.json"));
        let number = |name: &str| options[name].as_u64().unwrap() as usize;
        Self {
            sample: read_samples(&data).unwrap().remove(0),
            images: ImageFolder::beside(&data),
            options: EncodeOptions {
                model_max_length: number("model_max_length"),
                max_slice_nums: Some(number("max_slice_nums")),
                ..EncodeOptions::default()
            },
            expected: fs::read(dir.join("expected.safetensors")).unwrap(),
            dir,
        }
    }

    fn encode(&self, processor: &MiniCpmProcessor) -> EncodedSample {
        processor
            .encode(&self.sample, &self.images, &self.options)
            .unwrap()
    }
}

fn for_each_case(mut check: impl FnMut(&MiniCpmProcessor, &Case)) {
    let mut cases = 0;
    for name in PACKS {
        let processor = MiniCpmProcessor::load(&pack(name)).unwrap();
        for entry in fs::read_dir(pack(name).join("cases")).unwrap() {
            let dir = entry.unwrap().path();
            if dir.join("conversation.json").exists() {
                check(&processor, &Case::read(dir));
                cases += 1;
            }
        }
    }
    assert_eq!(cases, 6);
}

fn integers(tensors: &SafeTensors<'_>, name: &str) -> Vec<i64> {
    let tensor = tensors.tensor(name).unwrap();
    let (bytes, width) = (
        tensor.data(),
        tensor.data().len() / tensor.shape().iter().product::<usize>(),
    );
    bytes
        .chunks(width)
        .map(|chunk| match width {
            4 => i64::from(i32::from_le_bytes(chunk.try_into().unwrap())),
            _ => i64::from_le_bytes(chunk.try_into().unwrap()),
        })
        .collect()
}

fn flat(pairs: &[(usize, usize)]) -> Vec<i64> {
    pairs
        .iter()
        .flat_map(|&(a, b)| [a as i64, b as i64])
        .collect()
}

fn shapes(slices: &[Slice]) -> Vec<(usize, usize)> {
    slices
        .iter()
        .map(|slice| (slice.rows, slice.cols))
        .collect()
}

fn wide(ids: &[i32]) -> Vec<i64> {
    ids.iter().map(|&id| i64::from(id)).collect()
}

/// Patches `[l, 3, 14, 14]` at their places in the reference's `[3, 14, 14 * longest]`.
fn reference_index(patch: usize, within: usize, longest: usize) -> usize {
    let (channel, row, col) = (
        within / (PATCH * PATCH),
        within / PATCH % PATCH,
        within % PATCH,
    );
    (channel * PATCH + row) * PATCH * longest + PATCH * patch + col
}

#[test]
fn tokens_labels_bounds_and_sizes_equal_the_reference() {
    for_each_case(|processor, case| {
        let sample = case.encode(processor);
        let tensors = SafeTensors::deserialize(&case.expected).unwrap();
        let name = case.dir.display();
        assert_eq!(
            wide(&sample.input_ids),
            integers(&tensors, "input_ids"),
            "{name}"
        );
        assert_eq!(wide(&sample.labels), integers(&tensors, "labels"), "{name}");
        assert_eq!(
            flat(&sample.image_bounds),
            integers(&tensors, "image_bound"),
            "{name}"
        );
        assert_eq!(
            flat(&shapes(&sample.slices)),
            integers(&tensors, "tgt_sizes"),
            "{name}"
        );
        let positions: Vec<i64> = (0..sample.input_ids.len() as i64).collect();
        assert_eq!(positions, integers(&tensors, "position_ids"), "{name}");
    });
}

#[test]
fn rendered_text_equals_the_reference() {
    for_each_case(|processor, case| {
        let text = processor
            .render(&case.sample, &case.images, &case.options)
            .unwrap();
        assert_eq!(
            text,
            fs::read_to_string(case.dir.join("prompt.txt")).unwrap()
        );
    });
}

#[test]
fn pixels_equal_the_reference() {
    let (mut bytes, mut values) = (0, 0);
    for_each_case(|processor, case| {
        let sample = case.encode(processor);
        let tensors = SafeTensors::deserialize(&case.expected).unwrap();
        let longest = sample
            .slices
            .iter()
            .map(|slice| slice.rows * slice.cols)
            .max()
            .unwrap();
        let per_slice = 3 * PATCH * PATCH * longest;
        for (index, slice) in sample.slices.iter().enumerate() {
            let place = |i: usize| {
                let patch = 3 * PATCH * PATCH;
                index * per_slice + reference_index(i / patch, i % patch, longest)
            };
            if let Ok(expected) = tensors.tensor("pixel_u8") {
                for (i, &byte) in slice.patches.iter().enumerate() {
                    assert_eq!(
                        byte,
                        expected.data()[place(i)],
                        "{} {index}",
                        case.dir.display()
                    );
                }
                bytes += 1;
            }
            if let Ok(expected) = tensors.tensor("pixel_values") {
                let normalization = processor.config().normalization;
                let ours = normalization.normalize_patches(&slice.patches, PATCH);
                for (i, &value) in ours.iter().enumerate() {
                    let at = place(i) * 4;
                    let word = expected.data()[at..at + 4].try_into().unwrap();
                    assert_eq!(value.to_bits(), f32::from_le_bytes(word).to_bits());
                }
                values += 1;
            }
        }
    });
    assert_eq!((bytes, values), (14, 7), "slices compared");
}

#[test]
fn vision_positions_equal_the_reference() {
    for_each_case(|processor, case| {
        let sample = case.encode(processor);
        let tensors = SafeTensors::deserialize(&case.expected).unwrap();
        let expected = integers(&tensors, "vision.pos_ids");
        let longest = expected.len() / sample.slices.len();
        for (slice, row) in sample.slices.iter().zip(expected.chunks(longest)) {
            let mut ids = wide(&position_ids(slice.rows, slice.cols, 10));
            ids.resize(longest, 0);
            assert_eq!(ids, row);
        }
    });
}

#[test]
fn measuring_agrees_with_encoding() {
    for_each_case(|processor, case| {
        let sample = case.encode(processor);
        let size = processor
            .measure(&case.sample, &case.images, &case.options)
            .unwrap();
        assert_eq!(size.tokens, sample.input_ids.len());
        assert_eq!(size.untruncated_tokens, sample.untruncated_tokens);
        assert_eq!(size.supervised, sample.supervised_tokens());
        assert_eq!(
            (size.slices, size.patches),
            (sample.slices.len(), sample.patches())
        );
    });
}

#[test]
fn batches_are_the_padded_samples() {
    for name in PACKS {
        let processor = MiniCpmProcessor::load(&pack(name)).unwrap();
        let cases = pack(name).join("cases");
        let batch = json(&cases.join("padded_batch/batch.json"));
        let expected = fs::read(cases.join("padded_batch/expected.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&expected).unwrap();
        let ids = integers(&tensors, "input_ids");
        let labels = integers(&tensors, "labels");
        let samples = batch["samples"].as_array().unwrap();
        let longest = ids.len() / samples.len();
        for (row, sample) in samples.iter().enumerate() {
            let case = Case::read(cases.join(sample.as_str().unwrap()));
            let ours = case.encode(&processor);
            let padded = |values: &[i32], fill| {
                let mut values = wide(values);
                values.resize(longest, fill);
                values
            };
            // padding is id 0 and an ignored label
            assert_eq!(padded(&ours.input_ids, 0), ids[row * longest..][..longest]);
            assert_eq!(
                padded(&ours.labels, -100),
                labels[row * longest..][..longest]
            );
            let bounds = integers(&tensors, &format!("image_bound.{row}"));
            assert_eq!(flat(&ours.image_bounds), bounds);
        }
    }
}

#[test]
fn slice_plans_at_published_settings_equal_the_reference() {
    let rows = json(&pack(PACKS[0]).join("slicing_448.json"));
    let rows = rows.as_array().unwrap();
    assert!(rows.len() > 100);
    for row in rows {
        let number = |index: usize| row[index].as_u64().unwrap() as usize;
        let pair = |value: &Value| {
            let side = |index: usize| value[index].as_u64().unwrap() as usize;
            value.is_array().then(|| (side(0), side(1)))
        };
        let max_slice_nums = number(2);
        let config = SlicingConfig {
            max_slice_nums,
            scale_resolution: 448,
            patch_size: PATCH,
        };
        let plan = SlicePlan::new(number(0), number(1), &config);
        assert_eq!(
            plan.cells.map(|cells| (cells.cols, cells.rows)),
            pair(&row[3]),
            "{row}"
        );
        assert_eq!(Some(plan.overview), pair(&row[4]), "{row}");
        assert_eq!(
            plan.cells.map(|cells| cells.refined()),
            pair(&row[5]),
            "{row}"
        );
        assert_eq!(plan.slices() * 64, number(6), "{row}");
    }
}

#[test]
fn position_buckets_equal_the_reference_for_every_size() {
    let bytes = fs::read(pack(PACKS[0]).join("position_buckets_70.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let expected = tensors.tensor("buckets").unwrap();
    for patches in 1..=280 {
        let row = &expected.data()[patches * (patches - 1) / 2..][..patches];
        let ours = position_buckets(patches, 70);
        assert!(
            ours.iter().zip(row).all(|(&a, &b)| a == usize::from(b)),
            "{patches} patches"
        );
    }
}

#[test]
fn the_prompt_is_the_training_text_up_to_the_last_answer() {
    for_each_case(|processor, case| {
        let options = EncodeOptions {
            model_max_length: usize::MAX,
            ..case.options
        };
        let sample = processor
            .encode(&case.sample, &case.images, &options)
            .unwrap();
        let style = models::data::PlaceholderStyle::Training;
        let prompt = processor
            .encode_prompt(&case.sample, &case.images, &options, style)
            .unwrap();
        assert!(sample.input_ids.starts_with(&prompt.input_ids));
        assert_eq!(prompt.image_bounds, sample.image_bounds);
        assert_eq!(prompt.slices, sample.slices);
        // what follows is the answer, the end token and the template's line break
        let rest = &sample.input_ids[prompt.input_ids.len()..];
        let text = processor.decode(rest).unwrap();
        assert_eq!(text.trim_end_matches('\n'), case.sample.answer().unwrap());
    });
}

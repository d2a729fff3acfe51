//! Identity of what a run trains on: its frozen base weights, its samples, and the settings that change their meaning.
//!
//! A checkpoint stores it, and a resumed run is compared with it. Whatever does not change a result is left out: paths,
//! times, the number of ranks, the number of weight files. The hashes read little, so that a start stays fast:
//! - Base weights: name, shape, number format and content of every frozen tensor, and how the run quantizes it. A tensor of up to 4 MiB is read whole.
//!   Of a larger one, 16 blocks of 4 KiB are read, spread from its first byte to its last. Trained tensors come from the
//!   checkpoint and do not count.
//! - Data: role and text of every turn of every sample, in order, and of every image its size and up to three blocks of
//!   16 KiB: begin, middle and end. An image of up to 48 KiB is read whole.

use crate::config::{Origin, RunConfig};
use crate::data::SampleSet;
use crate::error::{Failure, failures};
use crate::lang::both;
use crate::model::{files, quantize};
use models::image::is_inside;
use models::params::is_added;
use models::{VisionLanguageModel, WeightError, WeightSource};
use rayon::prelude::*;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Bytes of a tensor that is hashed whole.
const WHOLE_TENSOR_BYTES: usize = 4 << 20;
/// Blocks of a larger tensor, and bytes of each.
const TENSOR_BLOCKS: usize = 16;
const TENSOR_BLOCK_BYTES: usize = 4 << 10;
/// Blocks of an image file, and bytes of each.
const IMAGE_BLOCKS: u64 = 3;
const IMAGE_BLOCK_BYTES: u64 = 16 << 10;

/// Identity of the run `config` that trains `model` on `train`. `weights` are the files of the base; `None` for random
/// weights, whose seed is compared by itself.
///
/// # Errors
/// A file cannot be read.
pub(crate) fn origin(
    config: &RunConfig,
    model: &dyn VisionLanguageModel,
    weights: Option<&WeightSource>,
    train: &SampleSet,
) -> Result<Origin, Failure> {
    let base = match weights {
        Some(source) => base(model, source).map_err(|e| failures::weights(&e))?,
        None => "random".to_owned(),
    };
    Ok(Origin {
        base,
        data: data(train),
        settings: settings(config)?,
    })
}

/// Hash of the frozen tensors, as they are used.
fn base(model: &dyn VisionLanguageModel, source: &WeightSource) -> Result<String, WeightError> {
    let frozen = model.spec().params.iter().filter(|param| !param.trainable);
    let names: BTreeSet<&str> = frozen
        .map(|param| &*param.name)
        .filter(|name| !is_added(name) && source.shape(name).is_some())
        .collect();
    let names: Vec<&str> = names.into_iter().collect();
    let hashes: Result<Vec<_>, WeightError> =
        names.par_iter().map(|name| tensor(source, name)).collect();
    let mut all = blake3::Hasher::new();
    for hash in hashes? {
        all.update(hash.as_bytes());
    }
    // Weights that are quantized while they are read have other values than the files.
    let quantized = quantize::quantizations(model.spec()).into_iter();
    for (name, quantization) in quantized.filter(|(name, _)| source.quantization(name).is_none()) {
        text(&mut all, &name);
        text(&mut all, &quantization.to_string());
    }
    Ok(all.finalize().to_hex().to_string())
}

fn tensor(source: &WeightSource, name: &str) -> Result<blake3::Hash, WeightError> {
    let mut hasher = blake3::Hasher::new();
    let shape = source.shape(name).unwrap_or_default();
    let dtype = source.dtype(name);
    text(&mut hasher, name);
    text(&mut hasher, &format!("{dtype:?} {shape:?}"));
    if let Some(dtype) = dtype {
        let elems = shape.iter().product();
        let mut bytes = Vec::new();
        for range in sampled(elems, dtype.size_bytes()) {
            bytes.resize(range.len() * dtype.size_bytes(), 0);
            source.read_range(name, range, dtype, &mut bytes)?;
            hasher.update(&bytes);
        }
    }
    Ok(hasher.finalize())
}

/// Elements of a tensor that its hash covers.
fn sampled(elems: usize, bytes_per_elem: usize) -> Vec<Range<usize>> {
    if elems * bytes_per_elem <= WHOLE_TENSOR_BYTES {
        return std::iter::once(0..elems).collect();
    }
    let block = TENSOR_BLOCK_BYTES / bytes_per_elem;
    let starts = (0..TENSOR_BLOCKS).map(|i| (elems - block) / (TENSOR_BLOCKS - 1) * i);
    let last = elems - block..elems;
    let before = starts.take(TENSOR_BLOCKS - 1);
    before
        .map(|start| start..start + block)
        .chain([last])
        .collect()
}

/// Hash of the samples in their order.
fn data(set: &SampleSet) -> String {
    let paths: BTreeSet<&Path> = set
        .samples
        .iter()
        .flat_map(|sample| sample.images.iter().map(|(_, path)| &**path))
        .collect();
    let paths: Vec<&Path> = paths.into_iter().collect();
    let hashes: Vec<_> = paths.par_iter().map(|path| image(set, path)).collect();
    let images: BTreeMap<&Path, blake3::Hash> = paths.into_iter().zip(hashes).collect();
    let mut all = blake3::Hasher::new();
    for sample in &set.samples {
        count(&mut all, sample.conversations.len());
        for turn in &sample.conversations {
            for part in [&turn.role, &turn.content, &turn.metadata] {
                text(&mut all, part);
            }
            count(&mut all, usize::from(turn.unsupervised));
        }
        count(&mut all, sample.images.len());
        for (name, path) in &sample.images {
            text(&mut all, name);
            all.update(images[&**path].as_bytes());
        }
    }
    let mix = set.mix();
    if !mix.is_plain() {
        for taken in mix.taken() {
            all.update(&taken.to_le_bytes());
        }
    }
    all.finalize().to_hex().to_string()
}

/// Hash of an image's content. An image that cannot be read has the hash of its path: the check of the samples names it.
fn image(set: &SampleSet, path: &Path) -> blake3::Hash {
    let spelled = path.as_os_str().as_encoded_bytes();
    if is_inside(path) {
        let content = models::image::stored_bytes(path);
        return content.map_or_else(|| blake3::hash(spelled), |bytes| blake3::hash(&bytes));
    }
    let read = set.images.resolve(path).map_err(io::Error::other);
    read.and_then(|file| content(&file))
        .unwrap_or_else(|_| blake3::hash(spelled))
}

fn content(path: &Path) -> io::Result<blake3::Hash> {
    let file = File::open(path)?;
    let size = file.metadata()?.len();
    let mut hasher = blake3::Hasher::new();
    hasher.update(&size.to_le_bytes());
    let block = size.min(IMAGE_BLOCK_BYTES);
    let mut bytes = vec![0; block as usize];
    let whole = size <= IMAGE_BLOCKS * IMAGE_BLOCK_BYTES;
    let mut starts: Vec<u64> = match whole {
        true => (0..size.div_ceil(IMAGE_BLOCK_BYTES))
            .map(|i| i * IMAGE_BLOCK_BYTES)
            .collect(),
        false => vec![0, size / 2],
    };
    if !whole {
        starts.push(size - block);
    }
    for start in starts {
        let part = &mut bytes[..block.min(size - start) as usize];
        file.read_exact_at(part, start)?;
        hasher.update(part);
    }
    Ok(hasher.finalize())
}

/// Settings that change what the loss is computed from, and the small files of the model: flag or file, and value.
fn settings(config: &RunConfig) -> Result<BTreeMap<String, String>, Failure> {
    let mut found = BTreeMap::new();
    let mut add = |name: &str, value: String| found.insert(format!("--{name}"), value);
    if let Some(lora) = &config.trainable.lora {
        add("lora-rank", lora.lora_rank.to_string());
        add("lora-alpha", lora.lora_alpha.to_string());
        add("use-rslora", lora.use_rslora.to_string());
        add("lora-dropout", lora.lora_dropout.to_string());
        let targets = lora.target_modules.clone();
        add(
            "lora-target-modules",
            targets.unwrap_or_else(|| "default".to_owned()),
        );
    }
    let (batch, samples) = (&config.batch, &config.samples);
    add("model-max-length", batch.model_max_length.to_string());
    add("max-slice-nums", batch.max_slice_nums.to_string());
    let area =
        |area: Option<usize>| area.map_or_else(|| "default".to_owned(), |area| area.to_string());
    add("image-max-pixels", area(batch.image_max_pixels));
    add("image-min-pixels", area(batch.image_min_pixels));
    add("template", word(samples.template));
    add("exif-rotation", word(samples.exif_rotation));
    add("train-on-turn-end", samples.train_on_turn_end.to_string());
    add("text-without-cross", samples.text_without_cross.to_string());
    let dir = config.model_dir();
    for (name, file) in files::small(&dir)? {
        // Code and notes beside the model change nothing here.
        if name.ends_with(".json") || name.ends_with(".model") {
            let title = both("cannot read a file of the model", "无法读取模型的文件");
            let bytes = file
                .read()
                .map_err(|e| failures::files(title, &file.path, &e))?;
            found.insert(name, blake3::hash(&bytes).to_hex().to_string());
        }
    }
    Ok(found)
}

/// Value of a setting as files spell it.
fn word(value: impl Serialize) -> String {
    let value = serde_json::to_value(value).unwrap_or_default();
    value
        .as_str()
        .map_or_else(|| value.to_string(), str::to_owned)
}

fn text(hasher: &mut blake3::Hasher, text: &str) {
    count(hasher, text.len());
    hasher.update(text.as_bytes());
}

/// Lengths separate what follows, so that different lists never give the same bytes.
fn count(hasher: &mut blake3::Hasher, count: usize) {
    hasher.update(&(count as u64).to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_tensor_is_sampled_from_its_first_element_to_its_last() {
        let whole = 0..7;
        assert_eq!(sampled(7, 4), [whole]);
        let elems = WHOLE_TENSOR_BYTES + 12_345;
        let ranges = sampled(elems, 2);
        assert_eq!(ranges.len(), TENSOR_BLOCKS);
        let ends = [ranges[0].start, ranges[TENSOR_BLOCKS - 1].end];
        assert_eq!(ends, [0, elems]);
        let block = TENSOR_BLOCK_BYTES / 2;
        assert!(ranges.iter().all(|range| range.len() == block));
        assert!(ranges.windows(2).all(|pair| pair[0].end <= pair[1].start));
    }

    #[test]
    fn an_image_is_known_by_its_content_wherever_it_is() {
        let directory = tempfile::tempdir().expect("temp dir");
        let path = |name: &str| directory.path().join(name);
        for size in [0usize, 1000, 40 << 10, 200 << 10] {
            let bytes: Vec<u8> = (0..size).map(|i| (i % 251) as u8).collect();
            let hash = |name: &str, bytes: &[u8]| {
                std::fs::write(path(name), bytes).expect("written");
                content(&path(name)).expect("read")
            };
            let whole = hash("a", &bytes);
            assert_eq!(whole, hash("b", &bytes), "{size}");
            assert_ne!(whole, hash("c", &[&bytes[..], &[0]].concat()), "{size}");
            for at in [0, size / 2, size.saturating_sub(1)] {
                let mut edited = bytes.clone();
                let Some(byte) = edited.get_mut(at) else {
                    continue;
                };
                *byte ^= 1;
                assert_ne!(whole, hash("d", &edited), "{size}, byte {at}");
            }
        }
    }
}

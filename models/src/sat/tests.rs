//! Checkpoints in `tests/fixtures/sat-checkpoints`, compared with the hashes of the published tensors.

use super::*;
use crate::sat::write::{SatWriter, TensorOf};
use crate::torch_file::write::TorchWriter;
use crate::{WeightSource, places};
use kernels::DType;
use serde_json::Value;
use sha2::{Digest, Sha256};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/golden")
        .join(name)
}

fn pack(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/fixtures/sat-checkpoints")
        .join(name)
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn sum(bytes: &[u8]) -> String {
    let sum = Sha256::digest(bytes);
    sum.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The bytes of `name` as stored, read in uneven parts.
fn stored(source: &WeightSource, name: &str) -> Vec<u8> {
    let dtype = source.dtype(name).unwrap();
    let elems: usize = source.shape(name).unwrap().iter().product();
    let mut bytes = vec![0; elems * dtype.size_bytes()];
    let (head, tail) = bytes.split_at_mut(elems / 3 * dtype.size_bytes());
    source.read_range(name, 0..elems / 3, dtype, head).unwrap();
    source
        .read_range(name, elems / 3..elems, dtype, tail)
        .unwrap();
    bytes
}

fn two_directories() -> PathBuf {
    let directory = |part: &str| pack("cogvlm-mp2-two-folders").join(part);
    places::joined(&[directory("part_b"), directory("part_a")])
}

#[test]
fn every_checkpoint_has_the_published_tensors() {
    let names = [
        "cogvlm-mp1-f32-views",
        "cogvlm-mp2-bf16",
        "cogvlm-mp1-bf16-lora",
        "cogagent-mp4-bf16",
        "cogvlm2-mp2-f32",
        "cogvlm-mp2-two-folders",
    ];
    for name in names {
        let place = match name {
            "cogvlm-mp2-two-folders" => two_directories(),
            _ => pack(name),
        };
        let source = WeightSource::open_sat(&place, LowRankMatrices::Separate)
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        let expected = json(&pack(name).join("expected.json"));
        let expected = expected["tensors"].as_object().unwrap();
        for (tensor, facts) in expected {
            assert_eq!(
                serde_json::json!(source.shape(tensor).unwrap()),
                facts["shape"],
                "{name} {tensor}"
            );
            assert_eq!(
                sum(&stored(&source, tensor)),
                facts["sha256"],
                "{name} {tensor}"
            );
        }
        let known = |tensor: &&str| expected.contains_key(*tensor) || tensor.contains(".matrix_");
        let others: Vec<&str> = source.names().filter(|tensor| !known(tensor)).collect();
        assert!(others.is_empty(), "{name}: {others:?}");
        let unused = usize::from(name == "cogvlm-mp1-f32-views") * 3;
        assert_eq!(source.ignored().len(), unused, "{name}");
    }
}

#[test]
fn configurations_are_those_of_the_hub() {
    for (name, published) in [
        ("cogvlm-mp2-bf16", "cogvlm-chat-hf"),
        ("cogagent-mp4-bf16", "cogagent-chat-hf"),
        ("cogvlm2-mp2-f32", "cogvlm2-llama3-chat-19B"),
    ] {
        let made = config::hub(&pack(name)).unwrap();
        let mut published = json(&golden(published).join("config.json"));
        let own = name.rsplit('-').next().unwrap();
        published["torch_dtype"] = if own == "f32" { "float32" } else { "bfloat16" }.into();
        assert_eq!(Value::Object(made.clone()), published, "{name}");
        let own = json(&pack(name).join(config::FILE));
        let ranks = own["model_parallel_size"].as_u64().unwrap() as usize;
        assert_eq!(config::sat(&made, ranks), own, "{name}");
    }
}

/// CogAgent's rotary table is a buffer. Without it, a `config.json` beside the tokenizer tells the width of the heads.
#[test]
fn a_second_tower_without_its_buffers_has_the_heads_of_the_configuration() {
    let temp = tempfile::tempdir().unwrap();
    let (place, dir) = (pack("cogagent-mp4-bf16"), temp.path().join("bare"));
    let source = WeightSource::open(&place).unwrap();
    let names = source.names().filter(|name| !name.contains("rope.freqs"));
    let names: Vec<&str> = names.collect();
    assert!(names.len() < source.names().count());
    write_tensors(&source, &names, &place, &dir, 2).unwrap();
    let error = config::hub(&dir).unwrap_err().to_string();
    assert!(error.contains("the heads of its second tower"), "{error}");
    let location = places::with_tokenizer(&dir, Some(&golden("cogagent-chat-hf")));
    assert_eq!(
        config::hub(&location).unwrap(),
        config::hub(&place).unwrap()
    );
}

#[test]
fn merged_matrices_make_the_weights_of_the_trained_model() {
    let name = "cogvlm-mp1-bf16-lora";
    let source = WeightSource::open(&pack(name)).unwrap();
    let expected =
        WeightSource::open_file(&pack(name).join("expected_merged.safetensors")).unwrap();
    assert_eq!(source.merged_layers(), expected.names().count());
    for tensor in expected.names() {
        let (got, want) = (stored(&source, tensor), stored(&expected, tensor));
        let differing = got
            .chunks(2)
            .zip(want.chunks(2))
            .filter(|(a, b)| a != b)
            .count();
        // Sums in another order may round to the neighboring value.
        assert!(differing * 1000 <= got.len() / 2, "{tensor}: {differing}");
    }
    let matrices = WeightSource::open_file(&pack(name).join("expected_lora.safetensors")).unwrap();
    let separate = WeightSource::open_sat(&pack(name), LowRankMatrices::Separate).unwrap();
    for tensor in matrices.names() {
        assert_eq!(
            stored(&separate, tensor),
            stored(&matrices, tensor),
            "{tensor}"
        );
    }
}

/// Writes the tensors of `source` as a checkpoint of `ranks` ranks.
fn write(source: &WeightSource, place: &Path, dir: &Path, ranks: usize) -> Result<()> {
    let names: Vec<&str> = source.names().collect();
    write_tensors(source, &names, place, dir, ranks)
}

fn write_tensors(
    source: &WeightSource,
    names: &[&str],
    place: &Path,
    dir: &Path,
    ranks: usize,
) -> Result<()> {
    let hub = config::hub(place)?;
    let tensors: Vec<TensorOf> = names
        .iter()
        .copied()
        .map(|name| TensorOf {
            name: name.to_owned(),
            dtype: source.dtype(name).unwrap(),
            shape: source.shape(name).unwrap().to_vec(),
        })
        .collect();
    std::fs::create_dir(dir).unwrap();
    let mut writer = SatWriter::create(dir, &hub, &tensors, ranks)?;
    for tensor in &tensors {
        for part in stored(source, &tensor.name).chunks(1000 * tensor.dtype.size_bytes()) {
            writer.write(&tensor.name, part)?;
        }
    }
    writer.finish()
}

/// The bytes of every tensor of every rank.
fn slices(dirs: &[PathBuf]) -> BTreeMap<(usize, String), Vec<u8>> {
    let (shards, tensors) = ranks(dirs).unwrap();
    let files = crate::pieces::Files {
        shards: &shards,
        gathered: &crate::pieces::Gathered::default(),
    };
    let mut all = BTreeMap::new();
    for (shard, tensors) in tensors.into_iter().enumerate() {
        for (name, tensor) in tensors {
            let shape = tensor.shape.clone();
            let mut bytes = vec![0; tensor.elems() * tensor.dtype.size_bytes()];
            let pieces = Pieces::one(shard, tensor);
            pieces.read(files, &name, &shape, 0, &mut bytes).unwrap();
            all.insert((shard, name), bytes);
        }
    }
    all
}

#[test]
fn ranks_that_are_joined_and_divided_again_have_the_same_bytes() {
    for (place, ranks) in [
        (pack("cogvlm-mp2-bf16"), 2),
        (pack("cogagent-mp4-bf16"), 4),
        (pack("cogvlm2-mp2-f32"), 2),
        (two_directories(), 2),
    ] {
        let temp = tempfile::tempdir().unwrap();
        let [one, again] = ["one", "again"].map(|name| temp.path().join(name));
        let source = WeightSource::open(&place).unwrap();
        write(&source, &place, &one, 1).unwrap();
        let joined = WeightSource::open(&one).unwrap();
        write(&joined, &one, &again, ranks).unwrap();
        let mut given = rank_directories(&place);
        // Ranks are sorted by their numbers, not by their directories.
        given.sort();
        assert_eq!(
            slices(std::slice::from_ref(&again)),
            slices(&given),
            "{}",
            place.display()
        );
        let files = |dir: &Path| std::fs::read(dir.join("1/mp_rank_01_model_states.pt")).unwrap();
        let twice = temp.path().join("twice");
        write(&WeightSource::open(&again).unwrap(), &again, &twice, ranks).unwrap();
        assert!(files(&again) == files(&twice));
    }
}

fn refused(place: &Path) -> String {
    WeightSource::open(place).unwrap_err().to_string()
}

/// A copy of a checkpoint.
fn copied(name: &str, temp: &Path) -> PathBuf {
    fn copy(from: &Path, to: &Path) {
        std::fs::create_dir(to).unwrap();
        for entry in std::fs::read_dir(from).unwrap().flatten() {
            let to = to.join(entry.file_name());
            match entry.path().is_dir() {
                true => copy(&entry.path(), &to),
                false => drop(std::fs::copy(entry.path(), to).unwrap()),
            }
        }
    }
    let to = temp.join("copy");
    copy(&pack(name), &to);
    to
}

#[test]
fn a_checkpoint_without_a_rank_or_a_tensor_is_refused_by_name() {
    let part = |name: &str| refused(&pack("cogvlm-mp2-two-folders").join(name));
    assert!(part("part_a").contains("rank 1 of 2"), "{}", part("part_a"));
    assert!(part("part_b").contains("rank 0"), "{}", part("part_b"));

    let temp = tempfile::tempdir().unwrap();
    let dir = copied("cogvlm-mp2-bf16", temp.path());
    std::fs::write(dir.join(LATEST), "800\n").unwrap();
    assert!(WeightSource::open(&dir).is_ok());
    // One rank of another model.
    let other = pack("cogagent-mp4-bf16").join("2000/mp_rank_01_model_states.pt");
    std::fs::copy(other, dir.join("800/mp_rank_01_model_states.pt")).unwrap();
    let error = refused(&dir);
    assert!(
        error.contains("on rank 1") || error.contains("on rank 0"),
        "{error}"
    );
    std::fs::write(dir.join(LATEST), "../800").unwrap();
    assert!(WeightSource::open(&dir).is_err());
}

#[test]
fn ranks_of_two_iterations_and_partitioned_ones_are_refused() {
    let temp = tempfile::tempdir().unwrap();
    let dir = copied("cogvlm-mp2-two-folders", temp.path());
    let [a, b] = ["part_a", "part_b"].map(|part| dir.join(part));
    assert!(WeightSource::open(&places::joined(&[a.clone(), b.clone()])).is_ok());
    std::fs::rename(b.join("1"), b.join("2")).unwrap();
    std::fs::write(b.join(LATEST), "2").unwrap();
    let error = refused(&places::joined(&[a.clone(), b]));
    assert!(error.contains("another iteration"), "{error}");
    let rank = a.join("1/mp_rank_00_model_states.pt");
    std::fs::rename(&rank, a.join("1/z3_rank_0_model_states.pt")).unwrap();
    assert!(refused(&a).contains("ZeRO-3"), "{}", refused(&a));
}

/// Without `model_config.json`, the configuration beside the tokenizer counts.
#[test]
fn a_configuration_beside_the_tokenizer_serves_a_bare_checkpoint() {
    let temp = tempfile::tempdir().unwrap();
    let dir = copied("cogvlm-mp2-bf16", temp.path());
    std::fs::remove_file(dir.join(config::FILE)).unwrap();
    assert!(
        refused(&dir).contains("cannot be opened"),
        "{}",
        refused(&dir)
    );
    let location = places::with_tokenizer(&dir, Some(&golden("cogvlm-chat-hf")));
    let source = WeightSource::open(&location).unwrap();
    let whole = WeightSource::open(&pack("cogvlm-mp2-bf16")).unwrap();
    let name = "model.layers.1.self_attn.vision_expert_query_key_value.weight";
    assert_eq!(stored(&source, name), stored(&whole, name));
}

/// With a vocabulary below 1000, SAT keeps the embedding whole.
#[test]
fn an_embedding_that_every_rank_has_is_read_once() {
    let temp = tempfile::tempdir().unwrap();
    let place = pack("cogvlm2-mp2-f32");
    let source = WeightSource::open(&place).unwrap();
    let name = "model.embed_tokens.weight";
    let shape = source.shape(name).unwrap().to_vec();
    let shapes: Shapes = BTreeMap::from([(name.to_owned(), shape.clone())]);
    let path = temp.path().join("mp_rank_00_model_states.pt");
    let tensor = TensorOf {
        name: "transformer.word_embeddings.weight".to_owned(),
        dtype: DType::F32,
        shape: shape.clone(),
    };
    let bytes = stored(&source, name);
    let rank = |rank: usize, bytes: &[u8]| {
        let path = path.with_file_name(format!("mp_rank_0{rank}_model_states.pt"));
        let _old = std::fs::remove_file(&path);
        let tensors = std::slice::from_ref(&tensor);
        let mut file = TorchWriter::create(&path, MODULE, tensors).unwrap();
        file.write(bytes).unwrap();
        file.finish().unwrap();
    };
    rank(0, &bytes);
    rank(1, &bytes);
    let dirs = [temp.path().to_owned()];
    let read = || {
        let opened = open(&dirs, &shapes, LowRankMatrices::Merged).unwrap();
        let (shape, pieces) = &opened.tensors[name];
        let gathered = crate::pieces::Gathered::default();
        let files = crate::pieces::Files {
            shards: &opened.shards,
            gathered: &gathered,
        };
        let mut out = vec![0; bytes.len()];
        pieces.read(files, name, shape, 0, &mut out).map(|()| out)
    };
    assert_eq!(read().unwrap(), bytes);
    let mut changed = bytes.clone();
    changed[7] ^= 1;
    rank(1, &changed);
    assert!(read().unwrap_err().to_string().contains(name));
}

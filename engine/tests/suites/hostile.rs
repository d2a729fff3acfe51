//! Bytes that nobody of good will wrote: a checkpoint's files say anything, and reading them is an error or a result,
//! never a panic, and never more memory than the files have.

use engine::checkpoint::{Checkpoint, Piece, PieceBytes, Writer, audit};
use kernels::DType;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Where a manifest's own hash stands, and how long it is.
const DIGEST: std::ops::Range<usize> = 15..79;
const STATE: &str = "state/rank-0000.safetensors";

/// A small checkpoint of one rank, as it was saved once.
fn checkpoint(output: &Path) -> PathBuf {
    static FILES: OnceLock<Vec<(PathBuf, Vec<u8>)>> = OnceLock::new();
    let files = FILES.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        let directory = saved(dir.path());
        let names = ["MANIFEST.json", STATE, "state/rank-0000.json"].map(PathBuf::from);
        let read = |name: PathBuf| (name.clone(), fs::read(directory.join(name)).unwrap());
        names.into_iter().map(read).collect()
    });
    let directory = output.join("checkpoint-3");
    fs::create_dir_all(directory.join("state")).unwrap();
    for (name, bytes) in files {
        fs::write(directory.join(name), bytes).unwrap();
    }
    directory
}

fn saved(output: &Path) -> PathBuf {
    let mut writer = Writer::begin(output, 3, 0, 1).unwrap();
    let values: Vec<u8> = (0..48).collect();
    let piece = |name, start, elems: u64| Piece {
        name,
        kind: "master",
        dtype: DType::F32,
        shape: &[3, 2],
        start,
        elems,
        bytes: PieceBytes::Slice(&values[..4 * elems as usize]),
    };
    let pieces = [piece("a", 0, 4), piece("a", 4, 2), piece("b", 0, 6)];
    writer.write_pieces(pieces).unwrap();
    writer.finish_rank().unwrap();
    let meta = json!({"seed": 1, "units": [["a"], ["b"]]});
    writer.commit(meta, 0).unwrap()
}

/// Looks at all of a checkpoint. Whatever comes of it is fine.
fn look(directory: &Path) -> bool {
    let whole = audit(directory).is_ok_and(|found| found.is_whole());
    let Ok(checkpoint) = Checkpoint::open(directory) else {
        assert!(!whole, "what cannot be opened is not whole");
        return false;
    };
    checkpoint.verify().ok();
    for tensor in checkpoint.tensors() {
        let elems = tensor.elems().unwrap();
        let bytes = elems * tensor.dtype.size_bytes() as u64;
        // What was opened lies in its files, so that it is no larger than they are.
        let mut out = vec![0; usize::try_from(bytes).unwrap()];
        checkpoint
            .read(&tensor.kind, &tensor.name, 0..elems, &mut out)
            .ok();
        checkpoint
            .read(&tensor.kind, &tensor.name, 1..u64::MAX, &mut out)
            .ok();
    }
    true
}

/// Writes the manifest with a hash that fits it.
fn sign(directory: &Path, manifest: &Value) {
    let mut text = serde_json::to_string_pretty(manifest).unwrap();
    // The digest comes first, whatever a map makes of the order.
    let rest = text.split_off(1);
    let rest = rest.replacen("\"digest\": \"\",", "", 1);
    text = format!("{{\n  \"digest\": \"{}\",{rest}", "0".repeat(64));
    assert_eq!(&text[DIGEST], "0".repeat(64));
    let digest = blake3::hash(text.as_bytes()).to_hex();
    text.replace_range(DIGEST, &digest);
    fs::write(directory.join("MANIFEST.json"), text).unwrap();
}

fn manifest(directory: &Path) -> Value {
    let text = fs::read(directory.join("MANIFEST.json")).unwrap();
    let mut manifest: Value = serde_json::from_slice(&text).unwrap();
    manifest["digest"] = json!("");
    manifest
}

/// Every place in a value.
fn places(value: &Value, at: String, found: &mut Vec<String>) {
    match value {
        Value::Object(map) => {
            for (key, inner) in map {
                places(inner, format!("{at}/{}", key.replace('/', "~1")), found);
            }
        }
        Value::Array(list) => {
            for (index, inner) in list.iter().enumerate() {
                places(inner, format!("{at}/{index}"), found);
            }
        }
        _ => {}
    }
    found.push(at);
}

fn odd() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        Just(json!([])),
        Just(json!({})),
        Just(json!(-1)),
        Just(json!(0)),
        Just(json!(1.5)),
        Just(json!(u64::MAX)),
        Just(json!(i64::MAX)),
        Just(json!(1u64 << 61)),
        Just(json!("")),
        Just(json!("../../etc/passwd")),
        Just(json!("/dev/zero")),
        Just(json!("F64")),
        Just(json!([u64::MAX, u64::MAX, 0])),
        any::<u32>().prop_map(|n| json!(n)),
        ".{0,40}".prop_map(|text| json!(text)),
    ]
}

#[test]
fn a_manifest_with_a_recomputed_hash_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let directory = checkpoint(dir.path());
    let own = manifest(&directory);
    sign(&directory, &own);
    // Otherwise the tests below would only ever see a wrong hash.
    assert!(look(&directory));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn any_manifest_content_is_read_or_refused(edits in prop::collection::vec((any::<prop::sample::Index>(), odd()), 1..4)) {
        let dir = tempfile::tempdir().unwrap();
        let directory = checkpoint(dir.path());
        let mut changed = manifest(&directory);
        for (index, value) in edits {
            let mut found = Vec::new();
            places(&changed, String::new(), &mut found);
            let place = found[index.index(found.len())].clone();
            if place == "/digest" || place.is_empty() {
                continue;
            }
            *changed.pointer_mut(&place).unwrap() = value;
        }
        sign(&directory, &changed);
        look(&directory);
    }

    #[test]
    fn any_manifest_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let dir = tempfile::tempdir().unwrap();
        let directory = checkpoint(dir.path());
        fs::write(directory.join("MANIFEST.json"), bytes).unwrap();
        prop_assert!(!look(&directory));
    }

    #[test]
    fn any_state_header_is_read_or_refused(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        length in prop_oneof![Just(None), any::<u64>().prop_map(Some), (0u64..400).prop_map(Some)],
    ) {
        let dir = tempfile::tempdir().unwrap();
        let directory = checkpoint(dir.path());
        let path = directory.join(STATE);
        let mut bytes = fs::read(&path).unwrap();
        // Its length stays, so that it is read at all.
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        for (index, byte) in edits {
            bytes[8 + index.index(header)] = byte;
        }
        if let Some(length) = length {
            bytes[..8].copy_from_slice(&length.to_le_bytes());
        }
        fs::write(&path, bytes).unwrap();
        look(&directory);
    }

    #[test]
    fn any_header_offsets_are_read_or_refused(begin in any::<u64>(), end in any::<u64>(), key in 0usize..3) {
        let dir = tempfile::tempdir().unwrap();
        let directory = checkpoint(dir.path());
        let path = directory.join(STATE);
        let bytes = fs::read(&path).unwrap();
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let mut parsed: Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
        let keys: Vec<String> = parsed.as_object().unwrap().keys().filter(|k| *k != "__metadata__").cloned().collect();
        parsed[&keys[key % keys.len()]]["data_offsets"] = json!([begin, end]);
        let text = parsed.to_string();
        let mut changed = (text.len() as u64).to_le_bytes().to_vec();
        changed.extend(text.as_bytes());
        changed.extend(&bytes[8 + header..]);
        fs::write(&path, &changed).unwrap();
        // The manifest says so, too: only the header itself is left to be doubted.
        let mut own = manifest(&directory);
        for file in own["files"].as_array_mut().unwrap() {
            if file["path"] == json!(STATE) {
                file["bytes"] = json!(changed.len());
                file["blake3"] = json!(blake3::hash(&changed).to_hex().as_str());
            }
        }
        sign(&directory, &own);
        look(&directory);
    }
}

//! Files that PyTorch wrote, and files that were made to harm a reader, in `tests/golden/torch-bin`.

use super::*;
use serde_json::Value as Json;
use sha2::{Digest, Sha256};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

fn pack(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/golden/torch-bin")
        .join(name)
}

fn listed(path: &Path, key: &str) -> Vec<Json> {
    let json: Json = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    json[key].as_array().unwrap().clone()
}

/// The elements of `tensor` in row-major order.
fn contiguous(file: &File, tensor: &TorchTensor) -> Vec<u8> {
    let size = tensor.dtype.size_bytes();
    let mut bytes = vec![0; tensor.elems() * size];
    for (i, element) in bytes.chunks_mut(size).enumerate() {
        let at = tensor.at + (tensor.position(i) * size) as u64;
        file.read_exact_at(element, at).unwrap();
    }
    bytes
}

fn torch_name(dtype: TorchDtype) -> &'static str {
    match dtype {
        TorchDtype::F32 => "float32",
        TorchDtype::F16 => "float16",
        TorchDtype::BF16 => "bfloat16",
        TorchDtype::F64 => "float64",
        TorchDtype::I64 => "int64",
        TorchDtype::I32 => "int32",
        TorchDtype::I16 => "int16",
        TorchDtype::I8 => "int8",
        TorchDtype::U8 => "uint8",
        TorchDtype::Bool => "bool",
    }
}

#[test]
fn every_valid_file_has_the_tensors_that_pytorch_reads() {
    let files = listed(&pack("valid/valid.json"), "files");
    assert!(files.len() > 10);
    for entry in files {
        let name = entry["file"].as_str().unwrap();
        let (file, found) = tensors(&pack("valid").join(name), Wanted::All)
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        let expected = entry["tensors"].as_object().unwrap();
        assert_eq!(found.len(), expected.len(), "{name}");
        for (path, facts) in expected {
            let tensor = &found[path];
            let sum = Sha256::digest(contiguous(&file, tensor));
            let sum: String = sum.iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(torch_name(tensor.dtype), facts["dtype"], "{name} {path}");
            assert_eq!(
                serde_json::json!(tensor.shape),
                facts["shape"],
                "{name} {path}"
            );
            assert_eq!(sum, facts["sha256"], "{name} {path}");
        }
    }
}

#[test]
fn no_hostile_file_is_read_or_executed() {
    let files = listed(&pack("hostile/hostile.json"), "files");
    assert!(files.len() > 50);
    for entry in files {
        let name = entry["file"].as_str().unwrap();
        let path = pack("hostile").join(name);
        let read = tensors(&path, Wanted::All);
        let acceptable = entry.get("acceptable_instead").and_then(Json::as_str);
        match (read, acceptable) {
            (Ok((_, found)), Some(instead))
                if instead.contains("'w'")
                    || instead.contains("flipped")
                    || instead.contains("key as an opaque") =>
            {
                assert_eq!(found["w"].shape, [2, 3], "{name}");
            }
            (Ok(_), _) => panic!("{name}: {} was accepted", entry["why"]),
            (Err(error), _) => assert!(!error.to_string().is_empty()),
        }
        // The unwanted part of a checkpoint may have any content, but not do anything either.
        drop(tensors(&path, Wanted::Entry("module")));
        let made = entry["must_not_create"].as_str().unwrap();
        assert!(!Path::new(made).exists(), "{name} created {made}");
    }
}

#[test]
fn a_name_that_no_state_dict_needs_is_named_in_the_error() {
    for (file, part) in [
        ("reduce_os_system", "os.system"),
        ("stack_global", "system"),
        ("builtin_eval", "eval"),
    ] {
        let path = pack("hostile").join(format!("{file}.bin"));
        let error = tensors(&path, Wanted::All).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
}

/// A file whose length fields were changed one byte at a time never makes a reader panic or read outside the file.
#[test]
fn damaged_files_are_errors_or_stay_inside_the_file() {
    for name in ["plain_dict.bin", "zip64.bin", "legacy.bin", "protocol4.bin"] {
        let bytes = std::fs::read(pack("valid").join(name)).unwrap();
        for at in (0..bytes.len()).step_by(3) {
            for change in [0x01, 0x80] {
                let mut damaged = bytes.clone();
                damaged[at] ^= change;
                let Ok(found) = read(&damaged[..], Wanted::All) else {
                    continue;
                };
                for tensor in found.values() {
                    let end = tensor.at as usize + tensor.span() * tensor.dtype.size_bytes();
                    assert!(end <= bytes.len(), "{name} at {at}");
                }
            }
        }
        for kept in (0..bytes.len()).step_by(13) {
            assert!(
                read(&bytes[..kept], Wanted::All).is_err(),
                "{name}, {kept} bytes"
            );
        }
    }
}

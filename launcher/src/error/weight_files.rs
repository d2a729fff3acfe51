//! Diagnosis of a model directory's weight files, beyond the first error: how many bytes and tensors are missing, and
//! whether a file is a git-lfs pointer that was never downloaded.

use super::chain;
use super::model_files::other_directory;
use super::system::remedy;
use crate::error::{ErrorCode, Failure, file_name};
use crate::units::{bytes, grouped};
use models::WeightError;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Beginning of a git-lfs pointer, the text file in place of a large file.
const LFS_MARK: &str = "version https://git-lfs";
/// Maximal size of a git-lfs pointer file in bytes.
const LFS_BYTES: u64 = 1024;
/// Maximal size of a safetensors header in bytes; a larger one counts as damage.
const MAX_HEADER_BYTES: u64 = 100_000_000;
const INDEX: &str = "model.safetensors.index.json";

/// The report of `error`, which occurred in a model directory.
pub(crate) fn report(error: &WeightError) -> Failure {
    if let WeightError::Read { source, .. } = error
        && let Some(remedy) = remedy(source)
    {
        let title = "a weight file cannot be read";
        return Failure::new(ErrorCode::ModelFiles, title, chain(error)).next(remedy);
    }
    match error {
        WeightError::Truncated { path, .. } | WeightError::Header { path, .. } => {
            match pointer(path) {
                Some((size, hash)) => pointer_report(path, size, &hash),
                None => damaged(path, error),
            }
        }
        WeightError::Read { path, source } if source.kind() == std::io::ErrorKind::NotFound => {
            missing_shard(path, error)
        }
        WeightError::NoWeights { dir } => no_weights(dir, error),
        WeightError::MissingTensor { dir, name } => missing_tensor(dir, name, error),
        WeightError::WrongShape { .. } => {
            plain(error).next("take config.json and the safetensors files from the same model")
        }
        WeightError::NotFinite { name, wanted, .. } => Failure::new(
            ErrorCode::Numeric,
            format!("the weights cannot be used: {name} is not finite"),
            chain(error),
        )
        .next(match wanted {
            Some(_) => "use --precision bf16 or f32, whose range is larger",
            None => "these values are in the file: take an earlier checkpoint, or download the weights again",
        }),
        WeightError::DType { .. } => plain(error)
            .evidence("a tensor of integers or 8-bit floats is in most cases a quantized weight")
            .next("take the weights that are not quantized, or convert them to bf16 or f32"),
        _ => plain(error).next("download the file again"),
    }
}

fn plain(error: &WeightError) -> Failure {
    Failure::new(
        ErrorCode::ModelFiles,
        "the model directory is incomplete or damaged",
        chain(error),
    )
}

fn incomplete(dir: &Path, cause: impl Into<String>) -> Failure {
    let title = format!("{} is incomplete", dir.display());
    Failure::new(ErrorCode::ModelFiles, title, cause)
}

/// Report of a directory without safetensors files.
fn no_weights(dir: &Path, error: &WeightError) -> Failure {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort();
    let with = |endings: &[&str]| {
        let mut found = names.iter();
        found.find(|name| endings.iter().any(|ending| name.ends_with(ending)))
    };
    let weights = |name: &&String| **name != "training_args.bin" && !name.starts_with("optimizer");
    let failure = incomplete(dir, error.to_string());
    if let Some((evidence, next)) = other_directory(dir) {
        return failure.evidence(evidence).next(next);
    }
    if let Some(name) = with(&[".gguf", ".ggml"]) {
        return failure
            .evidence(format!(
                "{name} is a file of llama.cpp, whose weights are quantized"
            ))
            .next("give --model the published directory with safetensors files");
    }
    match with(&[".bin", ".pt", ".pth", ".ckpt"]).filter(weights) {
        Some(name) => failure
            .evidence(format!("{name} has weights in PyTorch's pickle format, which can run code and is not read"))
            .next("convert them where they are trusted: python -c \"from transformers import AutoModel as M; M.from_pretrained('DIR', torch_dtype='auto', trust_remote_code=True).save_pretrained('NEW')\", then copy the tokenizer files to NEW"),
        None => failure
            .next("download the weights, or start from random weights with --init random"),
    }
}

/// Report of a tensor that no file has; other names in the files show why.
fn missing_tensor(dir: &Path, name: &str, error: &WeightError) -> Failure {
    let failure = incomplete(dir, error.to_string());
    let source = models::WeightSource::open(dir).ok();
    let mut names: Vec<&str> = source.iter().flat_map(|source| source.names()).collect();
    names.sort_unstable();
    let packed = [
        ".qweight",
        ".weight_packed",
        ".absmax",
        ".SCB",
        ".quant_state",
    ];
    if let Some(found) = names
        .iter()
        .find(|name| packed.iter().any(|end| name.contains(end)))
    {
        return failure
            .evidence(format!("{found} shows that the weights are quantized"))
            .next("take the weights that are not quantized (bf16)");
    }
    let wrapped = names.iter().find_map(|found| {
        let prefix = found.strip_suffix(name)?;
        (prefix.ends_with('.')).then(|| (*found, prefix.to_owned()))
    });
    match wrapped {
        Some((found, prefix)) if prefix.starts_with("base_model.") => failure
            .evidence(format!(
                "the files have {found}: peft saved the model with its adapters"
            ))
            .next("merge it in peft (merge_and_unload), then save_pretrained"),
        Some((found, prefix)) => failure
            .evidence(format!("the files have {found}"))
            .next(format!(
                "a wrapper of the model put {prefix} before all names: save the model inside it"
            )),
        None => failure
            .evidence_lines(
                names
                    .first()
                    .map(|first| format!("the files have {} tensors, first: {first}", names.len())),
            )
            .next("take config.json and the safetensors files from the same model"),
    }
}

fn directory(path: &Path) -> &Path {
    path.parent().unwrap_or(Path::new("."))
}

/// Size and hash of the file that `path` is a pointer to; `None` if it is not a pointer.
pub(super) fn pointer(path: &Path) -> Option<(u64, String)> {
    // Opening a pipe would block.
    let metadata = path.metadata().ok()?;
    if !metadata.is_file() || metadata.len() > LFS_BYTES {
        return None;
    }
    let mut text = String::new();
    File::open(path)
        .ok()?
        .take(LFS_BYTES)
        .read_to_string(&mut text)
        .ok()?;
    text.starts_with(LFS_MARK).then(|| {
        let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name));
        let size = field("size ").and_then(|size| size.trim().parse().ok());
        let hash = field("oid ").unwrap_or("unknown").trim().to_owned();
        (size.unwrap_or(0), hash)
    })
}

pub(super) fn pointer_report(path: &Path, size: u64, hash: &str) -> Failure {
    incomplete(
        directory(path),
        format!(
            "{} is a git-lfs pointer, not the {} file it stands for",
            file_name(path),
            bytes(size)
        ),
    )
    .evidence(format!("expected {} bytes, {hash}", grouped(size)))
    .evidence_lines(expected_tensors(path))
    .next("run `git lfs pull` in that directory, or download the file again")
}

/// Report of a file that ends early, or whose header is invalid.
fn damaged(path: &Path, error: &WeightError) -> Failure {
    let name = file_name(path);
    let got = path.metadata().map_or(0, |metadata| metadata.len());
    let failure = match (error, cut_off(path, got)) {
        (
            WeightError::Truncated {
                expected_bytes,
                got_bytes,
                ..
            },
            lost,
        ) if expected_bytes > got_bytes => incomplete(
            directory(path),
            format!(
                "{name} is {} of {} (an interrupted download)",
                bytes(*got_bytes),
                bytes(*expected_bytes)
            ),
        )
        .evidence(format!(
            "{} of {} bytes are present",
            grouped(*got_bytes),
            grouped(*expected_bytes)
        ))
        .evidence_lines(lost),
        _ => incomplete(directory(path), chain(error)).evidence(format!(
            "the file has {} bytes and does not begin with a safetensors header",
            grouped(got)
        )),
    };
    failure
        .evidence_lines(expected_tensors(path))
        .next("download the file again")
}

/// Tensors in the header of `path` that exceed its `got` bytes.
fn cut_off(path: &Path, got: u64) -> Option<String> {
    let mut file = File::open(path).ok()?;
    let mut length = [0; 8];
    file.read_exact(&mut length).ok()?;
    let header_bytes = u64::from_le_bytes(length);
    if header_bytes > MAX_HEADER_BYTES.min(got) {
        return None;
    }
    let mut header = vec![0; header_bytes as usize];
    file.read_exact(&mut header).ok()?;
    let header: BTreeMap<String, Value> = serde_json::from_slice(&header).ok()?;
    let mut tensors: Vec<(u64, &str)> = header
        .iter()
        .filter_map(|(name, info)| Some((info.get("data_offsets")?.get(1)?.as_u64()?, &**name)))
        .collect();
    tensors.sort_unstable();
    let all = tensors.len();
    tensors.retain(|(end, _)| 8 + header_bytes + end > got);
    let (_, first) = tensors.first()?;
    Some(format!(
        "{} of its {all} tensors are unreadable, first: {first}",
        tensors.len()
    ))
}

/// Tensors that the index expects in the file `path`.
fn expected_tensors(path: &Path) -> Option<String> {
    let index = std::fs::read(directory(path).join(INDEX)).ok()?;
    let index: Value = serde_json::from_slice(&index).ok()?;
    let map = index.get("weight_map")?.as_object()?;
    let name = file_name(path);
    let mut wanted: Vec<&String> = map
        .iter()
        .filter(|(_, file)| file.as_str() == Some(&name))
        .map(|(tensor, _)| tensor)
        .collect();
    wanted.sort_unstable();
    let first = wanted.first()?;
    Some(format!(
        "the index expects {} of {} tensors in it, first: {first}",
        wanted.len(),
        map.len()
    ))
}

fn missing_shard(path: &Path, error: &WeightError) -> Failure {
    incomplete(directory(path), format!("{} is missing", path.display()))
        .evidence(chain(error))
        .evidence_lines(expected_tensors(path))
        .next("download the file, or take the index and all of its files from one source")
}

#[cfg(test)]
mod tests {
    use super::*;
    use models::WeightSource;

    /// A safetensors file of two tensors, 16 bytes each.
    fn whole() -> Vec<u8> {
        let header = r#"{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"b":{"dtype":"F32","shape":[4],"data_offsets":[16,32]}}"#;
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.as_bytes());
        file.extend([0; 32]);
        file
    }

    fn refused(files: &[(&str, &[u8])]) -> Failure {
        let dir = tempfile::tempdir().expect("temp dir");
        for (name, content) in files {
            std::fs::write(dir.path().join(name), content).expect("written");
        }
        report(&WeightSource::open(dir.path()).expect_err("refused"))
    }

    #[test]
    fn a_cut_file_names_bytes_and_tensors() {
        let whole = whole();
        let failure = refused(&[("model.safetensors", &whole[..whole.len() - 20])]);
        let text = failure.to_string();
        let total = whole.len();
        for part in [
            format!("{} of {total} bytes", total - 20),
            "2 of its 2 tensors are unreadable, first: a".to_owned(),
            "is incomplete".to_owned(),
        ] {
            assert!(text.contains(&part), "{part}\n{text}");
        }
        let failure = refused(&[("model.safetensors", &whole[..total - 4])]);
        assert!(
            failure
                .to_string()
                .contains("1 of its 2 tensors are unreadable, first: b")
        );
    }

    #[test]
    fn a_git_lfs_pointer_is_recognized_and_its_size_named() {
        let pointer =
            b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 4903351912\n";
        let index = br#"{"weight_map": {"x": "model-1.safetensors", "y": "model-1.safetensors"}}"#;
        let failure = refused(&[("model-1.safetensors", pointer), (INDEX, index)]);
        let text = failure.to_string();
        for part in [
            "git-lfs pointer",
            "4.6G",
            "sha256:abc",
            "2 of 2 tensors in it, first: x",
            "git lfs pull",
        ] {
            assert!(text.contains(part), "{part}\n{text}");
        }
    }

    #[test]
    fn a_missing_shard_is_named_with_its_tensors() {
        let index = br#"{"weight_map": {"a": "model-1.safetensors", "c": "model-2.safetensors"}}"#;
        let failure = refused(&[("model-1.safetensors", &whole()), (INDEX, index)]);
        let text = failure.to_string();
        assert!(text.contains("model-2.safetensors is missing"), "{text}");
        assert!(text.contains("1 of 2 tensors in it, first: c"), "{text}");
    }
}

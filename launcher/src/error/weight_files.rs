//! Diagnosis of a model directory's weight files, beyond the first error: how many bytes and tensors are missing, and
//! whether a file is a git-lfs pointer that was never downloaded.

use super::chain;
use super::model_files::other_directory;
use super::system::remedy;
use crate::error::{ErrorCode, Failure, file_name};
use crate::lang::{Text, both, text};
use crate::units::{bytes, grouped};
use kernels::DType;
use models::WeightError;
use models::torch_file::TorchError;
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
const TORCH_INDEX: &str = "pytorch_model.bin.index.json";

/// The report of `error`, which occurred in a model directory.
pub(crate) fn report(error: &WeightError) -> Failure {
    if let WeightError::Read { source, .. } = error
        && let Some(remedy) = remedy(source)
    {
        let title = both("a weight file cannot be read", "无法读取某个权重文件");
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
        WeightError::Torch { path, source } => torch(path, source, error),
        WeightError::MissingRank { .. } => plain(error).next(both(
            "give the directories of all ranks, joined by a comma: --model DIR1,DIR2",
            "请给出所有 rank 的目录，用逗号连接：--model DIR1,DIR2",
        )),
        WeightError::Sat { .. } | WeightError::Slices { .. } => plain(error).next(both(
            "take latest, model_config.json and the mp_rank files of one save",
            "请使用同一次保存的 latest、model_config.json 和 mp_rank 文件",
        )),
        WeightError::Indivisible { .. } => not_sat(error).next(both(
            "give an --mp-size that divides the sizes of the model: 1 always does",
            "请给出能整除模型各尺寸的 --mp-size；1 总是可以",
        )),
        WeightError::NotInSat { .. } => not_sat(error).next(both(
            "omit --format sat: SAT has checkpoints of CogVLM, CogVLM2 and CogAgent only",
            "请去掉 --format sat：SAT 只有 CogVLM、CogVLM2 和 CogAgent 的检查点",
        )),
        WeightError::Write { path, source } => {
            Failure::io(ErrorCode::Disk, both("write", "写入"), path, source)
        }
        WeightError::NoWeights { dir } => no_weights(dir, error),
        WeightError::MissingTensor { dir, name } => missing_tensor(dir, name, error),
        WeightError::WrongShape { .. } => {
            plain(error).next(both("take config.json and the safetensors files from the same model", "请从同一个模型取得 config.json 和 safetensors 文件"))
        }
        WeightError::NotFinite { name, wanted, .. } => Failure::new(
            ErrorCode::Numeric,
            text!("the weights cannot be used: {name} is not finite", "权重无法使用：{name} 不是有限值"),
            chain(error),
        )
        .next(match wanted {
            Some(DType::F32) => both("lower --learning-rate, or raise --adam-epsilon: the updates leave the range of f32", "请降低 --learning-rate，或提高 --adam-epsilon：更新超出了 f32 的范围"),
            Some(_) => both("use --precision bf16 or f32, whose range is larger", "请使用范围更大的 --precision bf16 或 f32"),
            None => both("these values are in the file: take an earlier checkpoint, or download the weights again", "这些值就在文件中：请使用更早的检查点，或重新下载权重"),
        }),
        WeightError::DType { .. } => plain(error)
            .evidence(both("a tensor of integers or 8-bit floats is in most cases a quantized weight", "整数或 8 位浮点的张量多半是量化后的权重"))
            .next(both("take the weights that are not quantized, or convert them to bf16 or f32", "请使用未量化的权重，或把它们转换为 bf16 或 f32")),
        WeightError::Quantized { .. } => plain(error)
            .next(both("download the files again; they must be as bitsandbytes wrote them", "请重新下载文件；它们必须与 bitsandbytes 写出的一致"))
            .next(both("take the weights that are not quantized, and quantize them with --quantize", "请使用未压缩存储的权重，并用 --quantize 压缩")),
        _ => plain(error).next(both("download the file again", "请重新下载该文件")),
    }
}

/// Report of a file of `torch.save` that cannot be used.
fn torch(path: &Path, source: &TorchError, error: &WeightError) -> Failure {
    if let Some((size, hash)) = pointer(path) {
        return pointer_report(path, size, &hash);
    }
    match source {
        TorchError::Code { .. } => plain(error)
            .evidence(both(
                "a pickle can call any function; this program calls none",
                "pickle 可以调用任何函数；本程序不调用任何函数",
            ))
            .next(both(
                "if you trust the file, keep only its tensors: torch.save({name: tensor, …}, FILE)",
                "如果信任该文件，请只保留其中的张量：torch.save({name: tensor, …}, FILE)",
            )),
        _ => plain(error)
            .evidence_lines(expected_tensors(path))
            .next(both(
                "download the file again, or save it again with torch.save",
                "请重新下载该文件，或用 torch.save 重新保存",
            )),
    }
}

fn not_sat(error: &WeightError) -> Failure {
    let title = both(
        "this model cannot be written as that SAT checkpoint",
        "无法把该模型写成这样的 SAT 检查点",
    );
    Failure::new(ErrorCode::ModelFiles, title, chain(error))
}

fn plain(error: &WeightError) -> Failure {
    Failure::new(
        ErrorCode::ModelFiles,
        both(
            "the model directory is incomplete or damaged",
            "模型目录不完整或已损坏",
        ),
        chain(error),
    )
}

fn incomplete(dir: &Path, cause: impl Into<Text>) -> Failure {
    let title = text!("{} is incomplete", "{} 不完整", dir.display());
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
    let failure = incomplete(dir, Text::literal(error));
    if let Some((evidence, next)) = other_directory(dir) {
        return failure.evidence(evidence).next(next);
    }
    if let Some(name) = with(&[".gguf", ".ggml"]) {
        return failure
            .evidence(text!(
                "{name} is a file of llama.cpp, whose weights are quantized",
                "{name} 是 llama.cpp 的文件，其权重是量化的"
            ))
            .next(both(
                "give --model the published directory with safetensors files",
                "请把含有 safetensors 文件的官方目录交给 --model",
            ));
    }
    match with(&[".bin", ".pt", ".pth", ".ckpt"]).filter(weights) {
        Some(name) => failure
            .evidence(text!("{name} may have weights, but is not named pytorch_model.bin", "{name} 中可能有权重，但它的名称不是 pytorch_model.bin"))
            .next(both("name it pytorch_model.bin if it has the whole model, or add pytorch_model.bin.index.json", "如果其中是整个模型，请把它命名为 pytorch_model.bin，或加上 pytorch_model.bin.index.json")),
        None => failure
            .next(both("download the weights, or start from random weights with --init random", "请下载权重，或用 --init random 从随机权重开始")),
    }
}

/// Report of a tensor that no file has; other names in the files show why.
fn missing_tensor(dir: &Path, name: &str, error: &WeightError) -> Failure {
    let failure = incomplete(dir, Text::literal(error));
    let source = models::WeightSource::open(dir).ok();
    let mut names: Vec<&str> = source.iter().flat_map(|source| source.names()).collect();
    names.sort_unstable();
    let quantized = [
        ".qweight",
        ".weight_packed",
        ".absmax",
        ".SCB",
        ".quant_state",
    ];
    if let Some(found) = names
        .iter()
        .find(|name| quantized.iter().any(|end| name.contains(end)))
    {
        return failure
            .evidence(text!(
                "{found} shows that the weights are quantized",
                "{found} 表明这些权重是量化的"
            ))
            .next(both(
                "take the weights that are not quantized (bf16)",
                "请使用未量化的权重（bf16）",
            ));
    }
    let wrapped = names.iter().find_map(|found| {
        let prefix = found.strip_suffix(name)?;
        (prefix.ends_with('.')).then(|| (*found, prefix.to_owned()))
    });
    match wrapped {
        Some((found, prefix)) if prefix.starts_with("base_model.") => failure
            .evidence(text!(
                "the files have {found}: peft saved the model with its adapters",
                "文件中有 {found}：模型是由 peft 连同适配器一起保存的"
            ))
            .next(both(
                "merge it in peft (merge_and_unload), then save_pretrained",
                "请用 peft 合并（merge_and_unload），然后执行 save_pretrained",
            )),
        Some((found, prefix)) => failure
            .evidence(text!("the files have {found}", "文件中有 {found}"))
            .next(text!(
                "a wrapper of the model put {prefix} before all names: save the model inside it",
                "模型的某个包装在所有名称前加了 {prefix}：请保存其中的模型本身"
            )),
        None => failure
            .evidence_lines(names.first().map(|first| {
                text!(
                    "the files have {} tensors, first: {first}",
                    "文件中有 {} 个张量，第一个：{first}",
                    names.len()
                )
            }))
            .next(both(
                "take config.json and the safetensors files from the same model",
                "请从同一个模型取得 config.json 和 safetensors 文件",
            )),
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
        text!(
            "{} is a git-lfs pointer, not the file that it stands for",
            "{} 是 git-lfs 指针，而不是它所代表的文件",
            file_name(path)
        ),
    )
    .evidence(text!(
        "expected {} bytes, {hash}",
        "应为 {} 字节，{hash}",
        grouped(size)
    ))
    .evidence_lines(expected_tensors(path))
    .next(both(
        "run `git lfs pull` in that directory, or download the file again",
        "请在该目录中执行 `git lfs pull`，或重新下载该文件",
    ))
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
            text!(
                "{name} is {} of {} (an interrupted download)",
                "{name} 只有 {}，应为 {}（下载中断）",
                bytes(*got_bytes),
                bytes(*expected_bytes)
            ),
        )
        .evidence(text!(
            "{} of {} bytes are present",
            "应有 {1} 字节，实际只有 {0} 字节",
            grouped(*got_bytes),
            grouped(*expected_bytes)
        ))
        .evidence_lines(lost),
        _ => incomplete(directory(path), chain(error)).evidence(text!(
            "the file has {} bytes and does not begin with a safetensors header",
            "该文件有 {} 字节，但开头不是 safetensors 头",
            grouped(got)
        )),
    };
    failure
        .evidence_lines(expected_tensors(path))
        .next(both("download the file again", "请重新下载该文件"))
}

/// Tensors in the header of `path` that exceed its `got` bytes.
fn cut_off(path: &Path, got: u64) -> Option<Text> {
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
    Some(text!(
        "{} of its {all} tensors are unreadable, first: {first}",
        "它的 {all} 个张量中有 {} 个无法读取，第一个：{first}",
        tensors.len()
    ))
}

/// Tensors that the index expects in the file `path`.
fn expected_tensors(path: &Path) -> Option<Text> {
    let indexes = [INDEX, TORCH_INDEX].map(|name| directory(path).join(name));
    let index = indexes.iter().find_map(|index| std::fs::read(index).ok())?;
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
    Some(text!(
        "the index expects {} of {} tensors in it, first: {first}",
        "索引要求其中有 {} 个张量（共 {} 个），第一个：{first}",
        wanted.len(),
        map.len()
    ))
}

fn missing_shard(path: &Path, error: &WeightError) -> Failure {
    incomplete(
        directory(path),
        text!("{} is missing", "缺少 {}", path.display()),
    )
    .evidence(chain(error))
    .evidence_lines(expected_tensors(path))
    .next(both(
        "download the file, or take the index and all of its files from one source",
        "请下载该文件，或从同一来源取得索引及其所有文件",
    ))
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
            "not the file that it stands for",
            "expected 4 903 351 912 bytes",
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

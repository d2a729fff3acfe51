//! `launcher ckpt consolidate`: a checkpoint as safetensors in f32, like DeepSpeed's `zero_to_fp32`.
//!
//! Files and tensor names are those of the checkpoint (`model`, `adapter_model`, `trained`). Values come from the
//! training state if it has the tensor in the same shape: from master weights, or from weights if there is no master.
//! Otherwise they come from the checkpoint's weight file and are widened.
//!
//! Moments of 8 bits become the states of bitsandbytes' optimizers, with their names and unchanged: codes, absmax and maps.

use crate::lang::{both, text};
use std::collections::BTreeSet;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use engine::checkpoint::{
    Checkpoint, CheckpointError, LogicalTensor, ShardedTensorWriter, TensorSpec,
};
use half::{bf16, f16};
use kernels::DType;
use kernels::dynamic_map::{SIGNED, UNSIGNED};
use models::adapter::{ADAPTER_CONFIG, ADAPTER_STEM, TRAINED_STEM};
use models::params::ADAPTER_PREFIX;
use models::{WeightError, WeightSource};

use super::verify::is_weight;
use super::{open, required};
use crate::cli::CkptConsolidateArgs;
use crate::commands::export::copy;
use crate::commands::new_directory::NewDirectory;
use crate::error::output::say;
use crate::error::{ErrorCode, Failure, failures};
use crate::model::files;
use crate::model::stored::{bytes_of, max_shard_bytes, write_finite};
use crate::units::{bytes, grouped, seconds};

/// Elements of a tensor that are read, widened to f32 and written at a time.
const CHUNK_ELEMS: usize = 1 << 20;
const MODEL_STEM: &str = "model";
const OPTIMIZER_STEM: &str = "optimizer";

/// One tensor to write: its name and shape, and where its values are read from.
struct Entry<'a> {
    name: String,
    shape: Vec<usize>,
    from: From<'a>,
}

#[derive(Clone, Copy)]
enum From<'a> {
    State(&'a LogicalTensor),
    File(&'a WeightSource),
    /// Values of the codes of a moment.
    Map(&'static [f32; 256]),
}

impl Entry<'_> {
    /// Dtype in the written file: f32, or that of codes.
    fn dtype(&self) -> DType {
        match self.from {
            From::State(tensor) if tensor.dtype == DType::U8 => DType::U8,
            _ => DType::F32,
        }
    }
}

/// Runs `launcher ckpt consolidate`: writes the tensors of a checkpoint as f32 safetensors files into a new
/// directory.
pub(super) fn run(args: &CkptConsolidateArgs) -> Result<ExitCode, Failure> {
    let started = Instant::now();
    let output = required(args.output.as_ref())?;
    let directory =
        NewDirectory::begin(output, both("a consolidated checkpoint", "合并后的检查点"))?;
    let source = open(&args.checkpoint, both("consolidate", "合并"))?;
    let (mut tensors, mut written, mut from_state) = (0, 0, BTreeSet::new());
    let mut write = |stem: &str, entries: &[Entry<'_>]| {
        tensors += entries.len();
        let limit = match args.max_shard_size {
            Some(limit) if stem != ADAPTER_STEM => limit,
            _ => max_shard_bytes(stem),
        };
        written += write_file(directory.path(), stem, entries, &source, limit)?;
        Ok::<_, Failure>(())
    };
    let files = weight_files(&args.checkpoint)?;
    for (stem, file) in &files {
        let entries = entries(&source, file);
        from_state.extend(entries.iter().filter_map(|entry| match entry.from {
            From::State(tensor) => Some(tensor.name.clone()),
            From::File(_) | From::Map(_) => None,
        }));
        write(stem, &entries)?;
    }
    if files.is_empty() {
        // The checkpoint has no weight files: its program stores weights elsewhere.
        write(
            MODEL_STEM,
            &of_kinds(&source, is_weight, |t| t.name.clone()),
        )?;
    }
    if args.optimizer == Some(true) {
        let entries = of_optimizer(&source);
        if entries.is_empty() {
            return Err(Failure::new(
                ErrorCode::Resume,
                text!(
                    "{} contains no optimizer state",
                    "{} 中没有优化器状态",
                    args.checkpoint.display()
                ),
                both(
                    "--optimizer has nothing to write",
                    "--optimizer 没有可写的内容",
                ),
            )
            .next(both("omit --optimizer", "请去掉 --optimizer")));
        }
        write(OPTIMIZER_STEM, &entries)?;
    }
    for (name, file) in files::small(&args.checkpoint)? {
        copy(&file, &directory.path().join(name), Some(DType::F32), None)?;
    }
    let adapter = args.checkpoint.join(ADAPTER_CONFIG);
    if adapter.is_file() {
        copy(
            &adapter.into(),
            &directory.path().join(ADAPTER_CONFIG),
            None,
            None,
        )?;
    }
    directory.publish()?;
    let stems: Vec<&str> = files.iter().map(|(stem, _)| *stem).collect();
    say(&text!(
        " consolidate  step {} · {} · {} tensors in f32, {} weights from the training state · {} · {} · {}\n",
        " 合并    第 {} 步 · {} · {} 个 f32 张量，{} 个权重来自训练状态 · {} · {} · {}\n",
        source.step(),
        if stems.is_empty() {
            MODEL_STEM.to_owned()
        } else {
            stems.join(" + ")
        },
        grouped(tensors as u64),
        grouped(from_state.len() as u64),
        bytes(written),
        seconds(started.elapsed().as_secs_f64()),
        output.display()
    ))?;
    Ok(ExitCode::SUCCESS)
}

/// Opens the weight files of a checkpoint directory. Returns them as (file name without extension, source).
fn weight_files(directory: &Path) -> Result<Vec<(&'static str, WeightSource)>, Failure> {
    let mut files = Vec::new();
    for stem in [MODEL_STEM, ADAPTER_STEM, TRAINED_STEM] {
        match WeightSource::open_stem(directory, stem) {
            Ok(source) => files.push((stem, source)),
            Err(WeightError::NoWeights { .. }) => {}
            Err(error) => return Err(failures::weights(&error)),
        }
    }
    Ok(files)
}

/// Lists the tensors of a weight file. Values come from the training state if it has the tensor in the same shape.
fn entries<'a>(checkpoint: &'a Checkpoint, file: &'a WeightSource) -> Vec<Entry<'a>> {
    let state = |name: &str, shape: &[usize]| {
        // Modules trained in full beside adapters have names with peft's prefix.
        let bare = name.strip_prefix(ADAPTER_PREFIX).unwrap_or(name);
        let found = [name, bare].into_iter().find_map(|name| {
            let kinds = ["master", "weight"].into_iter();
            kinds
                .filter_map(|kind| checkpoint.tensor(kind, name))
                .next()
        });
        found.filter(|tensor| {
            let shape = shape.iter().map(|&n| n as u64);
            tensor.shape.iter().copied().eq(shape)
        })
    };
    let names = file.names();
    names
        .map(|name| {
            let shape = file.shape(name).unwrap_or_default().to_vec();
            Entry {
                name: name.to_owned(),
                from: state(name, &shape).map_or(From::File(file), From::State),
                shape,
            }
        })
        .collect()
}

/// Lists the tensors of the training state that `wanted` selects, under the names that `name` gives them.
fn of_kinds(
    checkpoint: &Checkpoint,
    wanted: impl Fn(&LogicalTensor) -> bool,
    name: impl Fn(&LogicalTensor) -> String,
) -> Vec<Entry<'_>> {
    let tensors = checkpoint.tensors().iter().filter(|tensor| wanted(tensor));
    tensors
        .map(|tensor| Entry {
            name: name(tensor),
            shape: tensor.shape.iter().map(|&n| n as usize).collect(),
            from: From::State(tensor),
        })
        .collect()
}

/// States of an optimizer of bitsandbytes: the kind here, the name there.
const STATES: [(&str, &str); 4] = [
    ("exp_avg", "state1"),
    ("exp_avg_absmax", "absmax1"),
    ("exp_avg_sq", "state2"),
    ("exp_avg_sq_absmax", "absmax2"),
];

/// Lists the optimizer's states. With moments of 8 bits they have the names of bitsandbytes, and each parameter with
/// codes has the maps of both.
fn of_optimizer(checkpoint: &Checkpoint) -> Vec<Entry<'_>> {
    let coded = |tensor: &LogicalTensor| tensor.dtype == DType::U8;
    let eight_bit = checkpoint.tensors().iter().any(coded);
    let name = |tensor: &LogicalTensor| {
        let theirs = STATES.iter().find(|(kind, _)| *kind == tensor.kind);
        let kind = match theirs {
            Some((_, name)) if eight_bit => name,
            _ => tensor.kind.as_str(),
        };
        format!("{}.{kind}", tensor.name)
    };
    let mut entries = of_kinds(checkpoint, |tensor| !is_weight(tensor), name);
    let codes = checkpoint.tensors().iter().filter(|tensor| coded(tensor));
    entries.extend(codes.map(|tensor| {
        let (map, values) = match tensor.kind.as_str() {
            "exp_avg" => ("qmap1", &SIGNED),
            _ => ("qmap2", &UNSIGNED),
        };
        Entry {
            name: format!("{}.{map}", tensor.name),
            shape: vec![values.len()],
            from: From::Map(values),
        }
    }));
    entries
}

/// Writes the tensors in f32, and codes as they are, to one safetensors file, or to several if it would exceed `max_shard_bytes`. Returns the
/// bytes written.
fn write_file(
    directory: &Path,
    stem: &str,
    entries: &[Entry<'_>],
    checkpoint: &Checkpoint,
    max_shard_bytes: u64,
) -> Result<u64, Failure> {
    let failed = |e: CheckpointError| {
        failures::checkpoint(both("consolidate a checkpoint", "合并检查点"), &e)
    };
    let tensors: Vec<TensorSpec> = entries
        .iter()
        .map(|entry| TensorSpec {
            name: entry.name.clone(),
            dtype: entry.dtype(),
            shape: entry.shape.clone(),
        })
        .collect();
    let metadata = [("format", "pt")];
    let mut file =
        ShardedTensorWriter::create(directory, stem, &tensors, &metadata, max_shard_bytes)
            .map_err(failed)?;
    for (entry, tensor) in entries.iter().zip(&tensors) {
        write_finite(&mut file, tensor, CHUNK_ELEMS, |range| match entry.from {
            From::File(source) => {
                let mut wide = vec![0; range.len() * size_of::<f32>()];
                source
                    .read_range(&entry.name, range, DType::F32, &mut wide)
                    .map_err(|e| failures::weights(&e))?;
                Ok(wide)
            }
            From::Map(values) => Ok(bytes_of(&values[range], DType::F32)),
            From::State(stored) => {
                let mut raw = vec![0; range.len() * stored.dtype.size_bytes()];
                let range = range.start as u64..range.end as u64;
                checkpoint
                    .read(&stored.kind, &stored.name, range, &mut raw)
                    .map_err(failed)?;
                widened(raw, stored.dtype).ok_or_else(|| unknown(stored))
            }
        })?;
    }
    let finished = file.finish().map_err(failed)?;
    Ok(finished.iter().map(|(_, digest)| digest.bytes).sum())
}

/// Converts the little-endian values `raw` of type `dtype` to little-endian f32; codes stay as they are. `None` if the
/// type is not f32, bf16, f16 or u8.
fn widened(raw: Vec<u8>, dtype: DType) -> Option<Vec<u8>> {
    let halves = |wide: fn([u8; 2]) -> f32| -> Vec<u8> {
        let halves = raw.chunks_exact(2);
        halves
            .flat_map(|half| wide([half[0], half[1]]).to_le_bytes())
            .collect()
    };
    match dtype {
        DType::F32 | DType::U8 => Some(raw),
        DType::BF16 => Some(halves(|b| bf16::from_le_bytes(b).to_f32())),
        DType::F16 => Some(halves(|b| f16::from_le_bytes(b).to_f32())),
        _ => None,
    }
}

fn unknown(tensor: &LogicalTensor) -> Failure {
    Failure::new(
        ErrorCode::Resume,
        text!(
            "{} of {} is in {}",
            "{1} 的 {0} 为 {2}",
            tensor.kind,
            tensor.name,
            tensor.dtype.name()
        ),
        both(
            "only f32, bf16 and f16 can be converted to f32",
            "只有 f32、bf16 和 f16 可以转换为 f32",
        ),
    )
    .next(both(
        "omit --optimizer if this tensor is optimizer state",
        "如果该张量是优化器状态，请去掉 --optimizer",
    ))
}

//! Export of adapters in peft's format.

use super::{BLOCK_ELEMS, Summary, copy, read};
use crate::error::{ErrorCode, Failure, failures};
use crate::lang::both;
use crate::model::stored::{max_shard_bytes, write_finite};
use engine::checkpoint::{CheckpointError, ShardedTensorWriter, TensorSpec};
use kernels::DType;
use models::adapter::{ADAPTER_CONFIG, ADAPTER_STEM, Adapter, TRAINED_STEM};
use models::params::ADAPTER_PREFIX;
use models::{WeightError, WeightSource};
use std::path::Path;

/// Writes the adapter's files in peft's format, and the other trained tensors.
pub(super) fn write(
    adapter: &Adapter,
    dtype: Option<DType>,
    directory: &Path,
) -> Result<Summary, Failure> {
    let mut summary = Summary {
        what: both("adapter", "适配器"),
        tensors: 0,
        bytes: 0,
    };
    let config = adapter.dir().join(ADAPTER_CONFIG);
    copy(&config.into(), &directory.join(ADAPTER_CONFIG), None)?;
    for stem in [ADAPTER_STEM, TRAINED_STEM] {
        let source = match WeightSource::open_stem(adapter.dir(), stem) {
            Ok(source) => source,
            Err(WeightError::NoWeights { .. }) => continue,
            Err(error) => return Err(failures::weights(&error)),
        };
        let tensors: Vec<TensorSpec> = source
            .names()
            .map(|name| TensorSpec {
                name: name.to_owned(),
                dtype: dtype.or(source.dtype(name)).unwrap_or(DType::F32),
                shape: source.shape(name).unwrap_or_default().to_vec(),
            })
            .collect();
        let failed =
            |e: CheckpointError| failures::checkpoint(both("export weights", "导出权重"), &e);
        let limit = max_shard_bytes(stem);
        let mut file =
            ShardedTensorWriter::create(directory, stem, &tensors, &[("format", "pt")], limit)
                .map_err(failed)?;
        for tensor in &tensors {
            summary.bytes += write_finite(&mut file, tensor, BLOCK_ELEMS, |range| {
                read(range, tensor.dtype, |r, d, out| {
                    source.read_range(&tensor.name, r, d, out)
                })
            })?;
        }
        file.finish().map_err(failed)?;
        summary.tensors += tensors.len();
        if stem == TRAINED_STEM {
            summary.what = both(
                "adapter and trained.safetensors (peft loads only the first; --merge writes both into one model)",
                "适配器和 trained.safetensors（peft 只加载前者；--merge 把两者写入一个模型）",
            );
        }
    }
    let card = model_card(adapter);
    let path = directory.join("README.md");
    std::fs::write(&path, card)
        .map_err(|error| Failure::io(ErrorCode::Disk, both("write", "写入"), &path, &error))?;
    Ok(summary)
}

/// The model card of an adapter, which model hubs show.
fn model_card(adapter: &Adapter) -> String {
    let base = adapter
        .config()
        .and_then(|config| config.base_model_name_or_path.as_deref())
        .unwrap_or_default();
    let main = models::places::main(Path::new(base));
    let name = main.file_name().unwrap_or_default();
    let modules = adapter.modules().count();
    let others = adapter
        .names()
        .filter(|name| !name.starts_with(ADAPTER_PREFIX))
        .count();
    format!(
        "---\nbase_model: {}\nlibrary_name: peft\ntags:\n- lora\n---\n\nLow-rank adapters on {modules} modules; {others} further tensors were fully trained.\n",
        name.to_string_lossy()
    )
}

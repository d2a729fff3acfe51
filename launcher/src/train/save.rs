//! Checkpoints: sharded training state of all ranks, and weights in the usual Hugging Face or peft files.

use super::inject::Faults;
use super::replica::Replica;
use crate::error::{ErrorCode, Failure, failures};
use crate::lang::{Text, both, text};
use crate::model::contents::{Contents, MODEL_STEM};
use crate::model::stored::{bytes_of, max_shard_bytes};
use crate::model::{files, split};
use crate::report::RunReport;
use crate::ui::SaveEvent;
use engine::checkpoint::{
    CheckpointError, FileDigest, ShardedTensorWriter, TensorSpec, Writer, verify_file,
};
use engine::comm::Tag;
use engine::{EngineError, ModelSpec, Plan};
use kernels::{DType, Tensor};
use models::adapter::ADAPTER_CONFIG;
use models::lora::LoraTargets;
use models::params::ADAPTER_PREFIX;
use models::weights::not_finite;
use models::{WeightError, WeightSource};
use serde_json::{Value, json};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

/// Number of elements of a weight converted at once.
const CHUNK_ELEMS: usize = 1 << 20;

/// Saves a checkpoint after `step` updates. All ranks take part. `meta` is the state of the training loop; the
/// checkpoint of the step `kept` survives the limit.
pub(crate) fn save(
    replica: &mut Replica<'_>,
    weights: Option<&WeightSource>,
    faults: &mut Faults,
    step: u64,
    (meta, kept): (&Value, Option<u64>),
    report: Option<&RunReport>,
) -> Result<SaveEvent, Failure> {
    let doing = both("save a checkpoint", "保存检查点");
    let world = replica.comm.world();
    let output = replica.config.output.clone();
    let mut writer = faults
        .writer(&output, step, world)
        .map_err(|e| failures::checkpoint(doing, &e))?;
    replica
        .zero
        .write_state(&mut writer)
        .map_err(|e| failures::engine(doing, &e))?;
    writer
        .finish_rank()
        .map_err(|e| failures::checkpoint(doing, &e))?;
    let weight_bytes = export(replica, weights, &mut writer)?;
    replica
        .comm
        .barrier(Tag::new("saved", step as u32))
        .map_err(|e| failures::comm(&e))?;
    let name = format!("checkpoint-{step}");
    let mut event = SaveEvent {
        name,
        weight_bytes,
        state_bytes: 0,
        files: 0,
    };
    if world.rank == 0 {
        copy_model_files(&replica.config.model_dir(), &mut writer)?;
        if let Some(report) = report {
            report.save_state(writer.directory())?;
            writer
                .adopt_file("trainer_state.json")
                .map_err(|e| failures::checkpoint(doing, &e))?;
        }
        let keep = replica.config.save_total_limit.unwrap_or(0);
        let directory = writer
            .keeping(kept)
            .commit(meta.clone(), keep)
            .map_err(|e| failures::checkpoint(doing, &e))?;
        (event.state_bytes, event.files) = measure(&directory);
    }
    replica
        .comm
        .barrier(Tag::new("committed", step as u32))
        .map_err(|e| failures::comm(&e))?;
    faults.saved(&output.join(&event.name), step, world)?;
    Ok(event)
}

/// Names of the trainable parameters, one list per unit, in the order of the unit's flat buffer. `launcher ckpt
/// reshard` needs them to divide the state among another number of ranks.
pub(crate) fn units(plan: &Plan) -> Value {
    let params = &plan.spec().params;
    let units = plan.whole_units();
    let units = units.iter().map(|unit| &unit.trainable.slots);
    let names = units.filter(|slots| !slots.is_empty()).map(|slots| {
        let names = slots.iter().map(|slot| &params[slot.param.index()].name);
        names.collect::<Vec<_>>()
    });
    json!(names.collect::<Vec<_>>())
}

/// Writes weights, and returns their bytes. If all parameters train, the file is `model.safetensors`. Otherwise only
/// trained parameters are written, to adapter files or `trained.safetensors`, so that no partial model looks
/// complete.
fn export(
    replica: &Replica<'_>,
    weights: Option<&WeightSource>,
    writer: &mut Writer,
) -> Result<u64, Failure> {
    let lora = replica.model.options().lora.is_some();
    let contents = Contents::of(&*replica.model, weights);
    let doing = both("save weights", "保存权重");
    let mut files = BTreeMap::new();
    if replica.comm.world().rank == 0 {
        for (stem, tensors) in &contents.files {
            let limit = max_shard_bytes(stem);
            let metadata = [("format", "pt")];
            let file =
                ShardedTensorWriter::create(writer.directory(), stem, tensors, &metadata, limit);
            files.insert(*stem, file.map_err(|e| failures::checkpoint(doing, &e))?);
        }
    }
    replica
        .zero
        .visit_trained_weights(|id, tensor| {
            if let Some((file, name, dtype)) = &contents.targets[id.index()]
                && let Some(file) = files.get_mut(file)
            {
                match split::joined(&*replica.model, name, tensor)? {
                    Some(values) => {
                        let bytes = bytes_of(&values, *dtype);
                        file.write(name, &finite(name, bytes.into(), *dtype)?)?;
                    }
                    None => in_chunks(tensor, *dtype, |bytes| {
                        Ok(file.write(name, &finite(name, bytes.into(), *dtype)?)?)
                    })?,
                }
            }
            Ok::<_, EngineError>(())
        })
        .map_err(|e| failures::engine(doing, &e))?;
    if let (Some(file), Some(weights)) = (files.get_mut(MODEL_STEM), weights) {
        for tensor in &contents.others {
            let elems: usize = tensor.shape.iter().product();
            let mut bytes = Vec::new();
            for start in (0..elems).step_by(CHUNK_ELEMS) {
                let part = start..elems.min(start + CHUNK_ELEMS);
                bytes.resize(part.len() * tensor.dtype.size_bytes(), 0);
                weights
                    .read_range(&tensor.name, part, tensor.dtype, &mut bytes)
                    .map_err(|e| failures::weights(&e))?;
                file.write(&tensor.name, &bytes)
                    .map_err(|e| failures::checkpoint(doing, &e))?;
            }
        }
    }
    let mut bytes = 0;
    for (stem, file) in files {
        let finished = file.finish().map_err(|e| failures::checkpoint(doing, &e))?;
        if stem != MODEL_STEM {
            check_written(writer.directory(), stem, &contents.files[stem], &finished)?;
        }
        for (name, digest) in finished {
            bytes += digest.bytes;
            writer
                .adopt_digest(&name, digest)
                .map_err(|e| failures::checkpoint(doing, &e))?;
        }
    }
    if lora && replica.comm.world().rank == 0 {
        let text = adapter_config(replica).to_string();
        writer
            .add_file(ADAPTER_CONFIG, text.as_bytes())
            .map_err(|e| failures::checkpoint(doing, &e))?;
    }
    Ok(bytes)
}

/// Reads written weights back. Verifies every byte, and that exactly the expected tensors exist.
fn check_written(
    directory: &Path,
    stem: &str,
    expected: &[TensorSpec],
    finished: &[(String, FileDigest)],
) -> Result<(), Failure> {
    let doing = both("save weights", "保存权重");
    for (name, digest) in finished {
        verify_file(&directory.join(name), digest).map_err(|e| failures::checkpoint(doing, &e))?;
    }
    let source = WeightSource::open_stem(directory, stem).map_err(|e| failures::weights(&e))?;
    let matches = |tensor: &TensorSpec| {
        source.shape(&tensor.name) == Some(&tensor.shape[..])
            && source.dtype(&tensor.name) == Some(tensor.dtype)
    };
    let wrong = expected.iter().find(|tensor| !matches(tensor));
    let count = source.names().count();
    if wrong.is_none() && count == expected.len() {
        return Ok(());
    }
    Err(Failure::new(
        ErrorCode::Disk,
        text!(
            "cannot {doing}: {stem}.safetensors differs from what was written when it is read back",
            "无法{doing}：回读的 {stem}.safetensors 与写入的内容不同"
        ),
        both(
            "the disk or its driver returned other content",
            "磁盘或其驱动返回了不同的内容",
        ),
    )
    .evidence(text!(
        "{count} tensors of {}; first that differs: {}",
        "{} 的 {count} 个张量；第一个不同的是：{}",
        expected.len(),
        wrong.map_or_else(
            || both("an unknown tensor", "未知的张量").into(),
            |tensor| Text::literal(&tensor.name)
        )
    ))
    .next(both(
        "check the disk; earlier checkpoints are intact",
        "请检查磁盘；之前的检查点完好",
    )))
}

/// Passes the tensor to `write` in `dtype`, in chunks. Converting a whole embedding would need several copies of it.
fn in_chunks(
    tensor: &Tensor,
    dtype: DType,
    mut write: impl FnMut(&[u8]) -> Result<(), EngineError>,
) -> Result<(), EngineError> {
    if tensor.dtype() == dtype {
        return write(tensor.as_bytes());
    }
    let flat = tensor.reshape([tensor.elems()])?;
    for start in (0..flat.elems()).step_by(CHUNK_ELEMS) {
        let part = flat.narrow(start, CHUNK_ELEMS.min(flat.elems() - start))?;
        write(&bytes_of(&part.to_f32_vec()?, dtype))?;
    }
    Ok(())
}

/// `bytes` of the trained tensor `name`, which must be finite in `dtype`: training skips updates that are not, but the
/// base model's format may have a smaller range.
fn finite<'b>(
    name: &str,
    bytes: Cow<'b, [u8]>,
    dtype: DType,
) -> Result<Cow<'b, [u8]>, EngineError> {
    match not_finite(dtype, &bytes) {
        0 => Ok(bytes),
        count => Err(EngineError::Load {
            param: name.to_owned(),
            source: WeightError::NotFinite {
                name: name.to_owned(),
                count,
                elems: bytes.len() / dtype.size_bytes(),
                stored: DType::F32,
                wanted: Some(dtype),
            }
            .into(),
        }),
    }
}

/// Content of peft's `adapter_config.json`.
fn adapter_config(replica: &Replica<'_>) -> Value {
    let Some(lora) = &replica.model.options().lora else {
        return Value::Null;
    };
    // A list of names would also match modules of other towers. A path matches one module.
    let targets = match (&lora.targets, &lora.layers) {
        (LoraTargets::Pattern(pattern), None) => json!(pattern),
        _ => json!(adapted_modules(replica.model.spec())),
    };
    json!({
        "peft_type": "LORA",
        "task_type": null,
        "base_model_name_or_path": replica.config.model_dir(),
        "r": lora.lora_rank,
        "lora_alpha": lora.lora_alpha,
        "use_rslora": lora.use_rslora,
        "lora_dropout": lora.lora_dropout,
        "bias": "none",
        "fan_in_fan_out": false,
        "inference_mode": true,
        "target_modules": targets,
        "modules_to_save": lora.modules_to_save,
        "rank_pattern": split::patterns(&*replica.model, |count| lora.lora_rank * count),
        "alpha_pattern": split::patterns(&*replica.model, |count| {
            // The scale stays alpha / r, or alpha / √r.
            let count = count as f32;
            lora.lora_alpha * if lora.use_rslora { count.sqrt() } else { count }
        }),
    })
}

/// Paths of the modules with adapters.
fn adapted_modules(spec: &ModelSpec) -> Vec<&str> {
    let names = spec.params.iter().map(|param| param.name.as_str());
    names
        .filter_map(|name| {
            let path = name.strip_suffix(".lora_A.weight")?;
            path.strip_prefix(ADAPTER_PREFIX)
        })
        .collect()
}

/// Copies the small files of the model directory (configuration, tokenizer, code) into the checkpoint.
fn copy_model_files(model: &Path, writer: &mut Writer) -> Result<(), Failure> {
    for (name, file) in files::small(model)? {
        let bytes = file.read().map_err(|e| {
            failures::files(
                both("cannot copy a file of the model", "无法复制模型的某个文件"),
                &file.path,
                &e,
            )
        })?;
        let bytes = match name == "config.json" {
            true => files::plain_config(bytes),
            false => bytes,
        };
        writer
            .add_file(&name, &bytes)
            .map_err(|e: CheckpointError| {
                failures::checkpoint(both("save a checkpoint", "保存检查点"), &e)
            })?;
    }
    Ok(())
}

/// Bytes of the sharded state, and the number of files whose hashes the manifest of the checkpoint lists.
fn measure(directory: &Path) -> (u64, usize) {
    let sizes = |dir: &Path| -> Vec<u64> {
        let entries = std::fs::read_dir(dir)
            .into_iter()
            .flatten()
            .filter_map(Result::ok);
        entries
            .filter_map(|e| e.metadata().ok())
            .filter(|m| m.is_file())
            .map(|m| m.len())
            .collect()
    };
    let (state, others) = (sizes(&directory.join("state")), sizes(directory));
    // The manifest is among the other files and does not list itself.
    let listed = state.len() + others.len().saturating_sub(1);
    (state.iter().sum(), listed)
}

//! `launcher import`: a SAT checkpoint, or a model in torch files, as a directory for transformers. LoRA matrices that
//! SAT did not merge become an adapter for peft.

use super::{Summary, copy, dtype_of, model};
use crate::cli::ImportArgs;
use crate::commands::new_directory::NewDirectory;
use crate::error::output::print;
use crate::error::{ErrorCode, Failure, failures};
use crate::lang::{both, text};
use crate::model::files;
use crate::model::stored::{MAX_SHARD_BYTES, bytes_of, write_finite};
use crate::units::{bytes, grouped, seconds};
use engine::checkpoint::{CheckpointError, ShardedTensorWriter, TensorSpec};
use kernels::DType;
use models::adapter::{ADAPTER_CONFIG, ADAPTER_STEM};
use models::params::ADAPTER_PREFIX;
use models::sat::LowRankMatrices;
use models::{WeightSource, places, sat};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

/// Directory of the adapter in the output.
const ADAPTER_DIR: &str = "adapter";
/// Names of a layer's matrices in SAT, and of the adapter's tensors in peft.
const HALVES: [(&str, &str); 2] = [("matrix_A", "lora_A"), ("matrix_B", "lora_B")];

/// Runs the subcommand.
///
/// # Errors
/// The checkpoint is incomplete or damaged, or the output cannot be written.
pub(crate) fn import(args: &ImportArgs) -> Result<ExitCode, Failure> {
    let started = Instant::now();
    let output = args.output.clone().ok_or_else(|| {
        Failure::usage(
            both("--output is missing", "缺少 --output"),
            both("the import needs a directory", "导入需要一个目录"),
        )
        .next(both("add --output DIR", "请加上 --output DIR"))
    })?;
    let location =
        places::with_tokenizer(&places::joined(&args.checkpoint), args.tokenizer.as_deref());
    for dir in places::directories(&location) {
        if !dir.is_dir() {
            return Err(Failure::new(
                ErrorCode::ModelFiles,
                text!("cannot import {}", "无法导入 {}", dir.display()),
                both("the directory does not exist", "该目录不存在"),
            )
            .next(both(
                "give the directory that has the file latest",
                "请指定含有 latest 文件的目录",
            )));
        }
    }
    let directory = NewDirectory::begin(&output, both("an import", "导入"))?;
    let is_sat = sat::is_checkpoint(&places::main(&location));
    let source = match is_sat && args.merge != Some(true) {
        true => WeightSource::open_sat(&location, LowRankMatrices::Separate),
        false => WeightSource::open(&location),
    };
    let source = source.map_err(|e| failures::weights(&e))?;
    let dtype = args.dtype.map(dtype_of);
    for (name, file) in files::small(&location)? {
        copy(&file, &directory.path().join(name), dtype, None)?;
    }
    let limit = args.max_shard_size.unwrap_or(MAX_SHARD_BYTES);
    let values = model::Values {
        model: &source,
        adapter: None,
        quantizes: None,
        dtype,
    };
    let (tensors, written) = model::write(&values, limit, directory.path())?;
    let adapter = adapter(&source, dtype, &output, directory.path())?;
    directory.publish()?;
    let mut line = format!(
        " import  model \u{b7} {} tensors \u{b7} {} \u{b7} {} \u{b7} {}\n",
        grouped(tensors as u64),
        bytes(written),
        seconds(started.elapsed().as_secs_f64()),
        output.display()
    );
    if let Some(adapter) = adapter {
        line += &format!(
            " {}: {} tensors \u{b7} {} \u{b7} {}\n",
            adapter.what,
            grouped(adapter.tensors as u64),
            bytes(adapter.bytes),
            output.join(ADAPTER_DIR).display()
        );
    }
    if let Some(first) = source.ignored().first() {
        line += &format!(
            " {} tensors of the checkpoint belong to no published model and are left out, first: {first}\n",
            source.ignored().len()
        );
    }
    print(&line)
}

/// LoRA matrices of one layer.
struct Layer {
    module: String,
    /// Rank of each projection's pair.
    rank: usize,
    /// Rows of each projection.
    rows: Vec<usize>,
    /// Width of the layer's input.
    columns: usize,
}

impl Layer {
    fn of(source: &WeightSource, module: &str) -> Self {
        let shape = |half: &str, i: usize| source.shape(&format!("{module}.{half}.{i}"));
        let rows = (0..).map_while(|i| Some(shape("matrix_B", i)?[0]));
        let first = shape("matrix_A", 0).unwrap_or(&[0, 0]);
        Self {
            module: module.to_owned(),
            rank: first[0],
            rows: rows.collect(),
            columns: first[1],
        }
    }

    /// A `[p r, k]`: the projections' matrices in order. B `[n, p r]`: block-diagonal.
    fn values(&self, source: &WeightSource, is_b: bool) -> Result<Vec<f32>, Failure> {
        let half = HALVES[usize::from(is_b)].0;
        let width = self.rank * self.rows.len();
        let mut joined = Vec::new();
        for i in 0..self.rows.len() {
            let name = format!("{}.{half}.{i}", self.module);
            let read = source
                .read(&name, DType::F32)
                .map_err(|e| failures::weights(&e))?;
            let values: Vec<f32> = bytemuck::pod_collect_to_vec(&read);
            match is_b {
                false => joined.extend(values),
                true => values.chunks(self.rank).for_each(|row| {
                    let start = joined.len() + i * self.rank;
                    joined.resize(joined.len() + width, 0.0);
                    joined[start..start + self.rank].copy_from_slice(row);
                }),
            }
        }
        Ok(joined)
    }

    fn shape(&self, is_b: bool) -> Vec<usize> {
        let rank = self.rank * self.rows.len();
        match is_b {
            false => vec![rank, self.columns],
            true => vec![self.rows.iter().sum(), rank],
        }
    }
}

/// Writes the LoRA matrices of `source`, if it has any, as an adapter of the base model `output`.
fn adapter(
    source: &WeightSource,
    dtype: Option<DType>,
    output: &Path,
    directory: &Path,
) -> Result<Option<Summary>, Failure> {
    let modules = source
        .names()
        .filter_map(|name| name.strip_suffix(".matrix_A.0"));
    let layers: Vec<Layer> = modules.map(|module| Layer::of(source, module)).collect();
    let Some(first) = layers.first() else {
        return Ok(None);
    };
    let directory = directory.join(ADAPTER_DIR);
    std::fs::create_dir(&directory)
        .map_err(|e| Failure::io(ErrorCode::Disk, both("make", "创建"), &directory, &e))?;
    let mut tensors: BTreeMap<String, (TensorSpec, &Layer, bool)> = BTreeMap::new();
    for layer in &layers {
        let stored = source.dtype(&format!("{}.matrix_A.0", layer.module));
        for (is_b, (_, half)) in [false, true].into_iter().zip(HALVES) {
            let name = format!("{ADAPTER_PREFIX}{}.{half}.weight", layer.module);
            let spec = TensorSpec {
                name: name.clone(),
                dtype: dtype.or(stored).unwrap_or(DType::F32),
                shape: layer.shape(is_b),
            };
            tensors.insert(name, (spec, layer, is_b));
        }
    }
    let specs: Vec<TensorSpec> = tensors.values().map(|(spec, ..)| spec.clone()).collect();
    let failed = |e: CheckpointError| failures::checkpoint(both("write weights", "写入权重"), &e);
    let metadata = [("format", "pt")];
    let mut file =
        ShardedTensorWriter::create(&directory, ADAPTER_STEM, &specs, &metadata, u64::MAX)
            .map_err(failed)?;
    let mut summary = Summary {
        what: both("adapter", "适配器"),
        tensors: specs.len(),
        bytes: 0,
    };
    for (spec, layer, is_b) in tensors.values() {
        let elems: usize = spec.shape.iter().product();
        summary.bytes += write_finite(&mut file, spec, elems.max(1), |_| {
            Ok(bytes_of(&layer.values(source, *is_b)?, spec.dtype))
        })?;
    }
    file.finish().map_err(failed)?;
    let config = directory.join(ADAPTER_CONFIG);
    let base = std::path::absolute(output).unwrap_or_else(|_| output.to_owned());
    std::fs::write(&config, settings(&layers, first.rank, &base))
        .map_err(|e| Failure::io(ErrorCode::Disk, both("write", "写入"), &config, &e))?;
    Ok(Some(summary))
}

/// Content of peft's `adapter_config.json`. Patterns name whole paths, since towers have layers of one name. SAT's alpha is 1. Layers of several projections have a multiple of rank and
/// alpha, so that their scale is the same.
fn settings(layers: &[Layer], rank: usize, base: &Path) -> String {
    let others = layers
        .iter()
        .filter(|layer| layer.rank * layer.rows.len() != rank);
    let others: Vec<&Layer> = others.collect();
    let pattern = |one: usize| -> BTreeMap<&str, usize> {
        let counts = others
            .iter()
            .map(|layer| (&*layer.module, one * layer.rows.len()));
        counts.collect()
    };
    let modules: Vec<&str> = layers.iter().map(|layer| &*layer.module).collect();
    let config = json!({
        "peft_type": "LORA",
        "task_type": null,
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": 1,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": false,
        "inference_mode": true,
        "target_modules": modules,
        "modules_to_save": null,
        "rank_pattern": pattern(rank),
        "alpha_pattern": pattern(1),
    });
    format!("{config:#}\n")
}

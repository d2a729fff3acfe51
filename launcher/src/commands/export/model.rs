//! Export of whole models, with adapters and trained parts merged.

use super::{BLOCK_ELEMS, QuantizedExport, quantized, read};
use crate::error::{ErrorCode, Failure, failures};
use crate::lang::{both, text};
use crate::model::stored::{TensorFiles, bytes_of, write_finite};
use engine::checkpoint::{CheckpointError, ShardedTensorWriter, TensorSpec};
use kernels::{Backend, CpuBackend, DType, MatmulArgs, Quantization, Shape, Tag, Transpose};
use models::WeightSource;
use models::adapter::Adapter;
use models::sat::write::{SatWriter, TensorOf};
use serde_json::{Map, Value};
use std::ops::Range;
use std::path::Path;

/// The tensors to write, and where their values come from.
pub(super) struct Values<'a> {
    pub(super) model: &'a WeightSource,
    pub(super) adapter: Option<&'a Adapter>,
    /// The weights to quantize.
    pub(super) quantizes: Option<&'a QuantizedExport>,
    /// Number format of all tensors; `None` keeps that of each.
    pub(super) dtype: Option<DType>,
}

impl Values<'_> {
    fn quantization(&self, tensor: &TensorSpec) -> Option<Quantization> {
        self.quantizes?.quantizations.get(&tensor.name).copied()
    }

    /// The tensors in files that `tensor` becomes.
    fn parts(&self, tensor: &TensorSpec) -> Vec<TensorSpec> {
        match self.quantization(tensor) {
            Some(quantization) => {
                quantized::specs(&tensor.name, quantization, &tensor.shape, tensor.dtype)
            }
            None => vec![tensor.clone()],
        }
    }
}

/// The tensors to write, before they are quantized.
fn listed(values: &Values<'_>) -> Result<Vec<TensorSpec>, Failure> {
    let (model, dtype) = (values.model, values.dtype);
    let mut tensors = Vec::new();
    // LoRA matrices of a SAT checkpoint become an adapter.
    for name in model.names().filter(|name| !is_matrix(name)) {
        let Some(stored) = model.dtype(name) else {
            return Err(Failure::new(
                ErrorCode::ModelFiles,
                text!(
                    "tensor {name} has a number format that cannot be copied",
                    "张量 {name} 的数值格式无法复制"
                ),
                both("weights are f32, bf16 or f16", "权重为 f32、bf16 或 f16"),
            )
            .next(both("convert the model first", "请先转换模型")));
        };
        tensors.push(TensorSpec {
            name: name.to_owned(),
            dtype: dtype.unwrap_or(stored),
            shape: model.shape(name).unwrap_or_default().to_vec(),
        });
    }
    Ok(tensors)
}

/// Whether `name` is a LoRA matrix of a SAT checkpoint.
fn is_matrix(name: &str) -> bool {
    [".matrix_A.", ".matrix_B."]
        .iter()
        .any(|half| name.contains(half))
}

/// Writes all tensors as a SAT checkpoint of `ranks` ranks; returns their number and bytes. `hub` is the content of
/// `config.json`.
pub(super) fn write_sat(
    values: &Values<'_>,
    (hub, ranks): (&Map<String, Value>, usize),
    directory: &Path,
) -> Result<(usize, u64), Failure> {
    let tensors = listed(values)?;
    let divided: Vec<TensorOf> = tensors
        .iter()
        .map(|tensor| TensorOf {
            name: tensor.name.clone(),
            dtype: tensor.dtype,
            shape: tensor.shape.clone(),
        })
        .collect();
    let mut file =
        SatWriter::create(directory, hub, &divided, ranks).map_err(|e| failures::weights(&e))?;
    let bytes = fill(&mut file, values, &tensors)?;
    file.finish().map_err(|e| failures::weights(&e))?;
    Ok((tensors.len(), bytes))
}

/// Writes all tensors; returns their number and bytes.
pub(super) fn write(
    values: &Values<'_>,
    max_shard_bytes: u64,
    directory: &Path,
) -> Result<(usize, u64), Failure> {
    let tensors = listed(values)?;
    let files: Vec<TensorSpec> = tensors.iter().flat_map(|t| values.parts(t)).collect();
    let doing = both("export weights", "导出权重");
    let failed = |e: CheckpointError| failures::checkpoint(doing, &e);
    let metadata = [("format", "pt")];
    let mut file =
        ShardedTensorWriter::create(directory, "model", &files, &metadata, max_shard_bytes)
            .map_err(failed)?;
    let bytes = fill(&mut file, values, &tensors)?;
    file.finish().map_err(failed)?;
    check(directory, &tensors)?;
    Ok((tensors.len(), bytes))
}

/// Writes the values of all `tensors` into `file`; returns their bytes.
fn fill(
    file: &mut impl TensorFiles,
    values: &Values<'_>,
    tensors: &[TensorSpec],
) -> Result<u64, Failure> {
    let (model, adapter) = (values.model, values.adapter);
    let backend = CpuBackend::unlimited();
    let mut bytes = 0u64;
    for tensor in tensors {
        let columns = tensor.shape.last().copied().unwrap_or(1).max(1);
        let rows_at_once = (BLOCK_ELEMS / columns).max(1) * columns;
        let own = adapter.filter(|a| a.has(&tensor.name));
        let low_rank = adapter.and_then(|a| Some((a, adapted(a, &tensor.name)?)));
        let block = |range: Range<usize>, tensor: &TensorSpec| {
            // A weight can be trained in full and have an adapter as well.
            let base = |range: Range<usize>, dtype: DType| {
                read(range, dtype, |r, d, out| match own {
                    Some(own) => own.read_range(&tensor.name, r, d, out),
                    None => model.read_range(&tensor.name, r, d, out),
                })
            };
            match low_rank {
                Some((adapter, module)) => {
                    let wide = base(range.clone(), DType::F32)?;
                    merged(&wide, adapter, module, tensor, range, &backend)
                }
                None => base(range, tensor.dtype),
            }
        };
        let Some(quantization) = values.quantization(tensor) else {
            bytes += write_finite(file, tensor, rows_at_once, |range| block(range, tensor))?;
            continue;
        };
        let unchanged = own.is_none() && low_rank.is_none();
        let quantized = if unchanged && model.quantization(&tensor.name) == Some(quantization) {
            model
                .read_quantized(&tensor.name)
                .map_err(|e| failures::weights(&e))?
        } else {
            let wide = TensorSpec {
                dtype: DType::F32,
                ..tensor.clone()
            };
            let shape = Shape::new(&tensor.shape);
            let plain = bytemuck::pod_collect_to_vec(&block(0..shape.elems(), &wide)?);
            let mut quantized = vec![0; quantization.bytes(shape)];
            quantization.quantize(&plain, shape, &mut quantized);
            quantized
        };
        let specs = values.parts(tensor);
        let of = (&tensor.shape[..], tensor.dtype);
        bytes += quantized::write(file, &specs, quantization, &quantized, of)?;
    }
    Ok(bytes)
}

/// Fails unless the weights in `directory` are `tensors`.
fn check(directory: &Path, tensors: &[TensorSpec]) -> Result<(), Failure> {
    let written = WeightSource::open(directory).map_err(|e| failures::weights(&e))?;
    let missing = tensors
        .iter()
        .find(|tensor| written.shape(&tensor.name) != Some(&tensor.shape));
    if let Some(tensor) = missing {
        return Err(Failure::new(
            ErrorCode::Disk,
            both(
                "the export differs from what was written when it is read back",
                "回读的导出结果与写入的内容不同",
            ),
            text!(
                "tensor {} is missing or has another shape",
                "张量 {} 缺失，或形状不同",
                tensor.name
            ),
        )
        .next(both(
            "check the disk, then export again",
            "请检查磁盘，然后重新导出",
        )));
    }
    Ok(())
}

/// The module of `weight`, if it has an adapter.
fn adapted<'n>(adapter: &Adapter, weight: &'n str) -> Option<&'n str> {
    let module = weight.strip_suffix(".weight")?;
    let [a, _] = adapter.halves(module);
    adapter.has(&a).then_some(module)
}

/// `W + scale B A` for whole rows of `W` (f32), summed in f32 and rounded once.
fn merged(
    base: &[u8],
    adapter: &Adapter,
    module: &str,
    tensor: &TensorSpec,
    range: Range<usize>,
    backend: &CpuBackend,
) -> Result<Vec<u8>, Failure> {
    let columns = tensor.shape.last().copied().unwrap_or(1).max(1);
    let config = adapter.config();
    let (rank, scale) = config.map_or((0, 0.0), |c| c.of(module));
    let scale = scale as f32;
    let [name_a, name_b] = adapter.halves(module);
    let rows = range.start / columns..range.end / columns;
    let upload = |name: &str, range: Range<usize>, shape: [usize; 2]| -> Result<_, Failure> {
        let bytes = read(range, DType::F32, |r, d, out| {
            adapter.read_range(name, r, d, out)
        })?;
        let shape = Shape::new(&shape);
        backend
            .upload(&bytes, shape, DType::F32, Tag::Parameters)
            .map_err(|e| failures::kernel(both("merge an adapter", "合并适配器"), &e))
    };
    let a = upload(&name_a, 0..rank * columns, [rank, columns])?;
    let b = upload(
        &name_b,
        rows.start * rank..rows.end * rank,
        [rows.len(), rank],
    )?;
    let delta = backend
        .matmul(MatmulArgs {
            a: &b,
            transpose_a: Transpose::No,
            b: &a,
            transpose_b: Transpose::No,
            bias: None,
            out: DType::F32,
        })
        .and_then(|delta| delta.to_f32_vec())
        .map_err(|e| failures::kernel(both("merge an adapter", "合并适配器"), &e))?;
    let base: Vec<f32> = bytemuck::pod_collect_to_vec(base);
    let sum = base.iter().zip(&delta).map(|(w, d)| w + scale * d);
    Ok(bytes_of(&sum.collect::<Vec<f32>>(), tensor.dtype))
}

//! Export of quantized weights, in the files and with the settings that transformers and bitsandbytes read.

use super::QuantizedExport;
use crate::config::Quantize;
use crate::error::{ErrorCode, Failure, failures};
use crate::lang::both;
use crate::model::quantize;
use crate::model::stored::TensorFiles;
use engine::checkpoint::TensorSpec;
use kernels::quantized::{NESTED_BLOCK, nested_values};
use kernels::{DType, Quantization, Shape};
use models::selection::Selection;
use models::weights::WeightError;
use models::{ModelOptions, QuantizedWeights, WeightSource, open_shapes};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The weights of `model`, whose `config.json` is in `dir`, that an export quantizes, and the settings for transformers.
///
/// # Errors
/// The model cannot be set up, or nothing is selected.
pub(super) fn choose(
    chosen: &Quantize,
    model: &WeightSource,
    dir: &Path,
) -> Result<QuantizedExport, Failure> {
    let stored = model.quantizations();
    let quantizations: BTreeMap<String, Quantization> = if stored.is_empty() {
        let mut options = ModelOptions::new(DType::F32);
        // Only what does not train is quantized.
        let all =
            Selection::parse(".*").map_err(|error| failures::selection("--quantize", &error))?;
        options.freeze = Some(all);
        options.quantized = quantize::by_flags(chosen)?;
        let opened = open_shapes(dir, options);
        let opened = opened.map_err(|error| failures::unusable(dir, &error))?;
        quantize::quantizations(opened.spec())
    } else {
        quantize::agree(chosen, &QuantizedWeights::Stored(stored.clone()))?;
        stored
    };
    let has = |name: &String| model.shape(name).is_some();
    let quantizations: BTreeMap<String, Quantization> = quantizations
        .into_iter()
        .filter(|(name, _)| has(name))
        .collect();
    let settings = settings(&quantizations, model)?;
    Ok(QuantizedExport {
        quantizations,
        settings,
    })
}

/// Checks that quantized weights are those that `config.json` in `dir` declares: its quantization is supported, and their
/// shapes are those of the model.
///
/// # Errors
/// A difference, or a model that cannot be set up.
pub(super) fn check_shapes(weights: &WeightSource, dir: &Path) -> Result<(), Failure> {
    let quantized = weights.quantizations();
    if quantized.is_empty() {
        return Ok(());
    }
    let unusable = |error| failures::unusable(dir, &error);
    QuantizedWeights::declared(dir).map_err(|error| unusable(error.into()))?;
    let mut options = ModelOptions::new(DType::F32);
    let all = Selection::parse(".*").map_err(|error| failures::selection("--freeze", &error))?;
    options.freeze = Some(all);
    let opened = open_shapes(dir, options).map_err(unusable)?;
    let params = opened.spec().params.iter();
    for param in params.filter(|param| quantized.contains_key(&param.name)) {
        let got = weights.shape(&param.name).unwrap_or_default();
        if got != param.shape.dims() {
            return Err(failures::weights(&WeightError::WrongShape {
                name: param.name.clone(),
                expected: param.shape,
                got: got.to_vec(),
            }));
        }
    }
    Ok(())
}

/// The value of `quantization_config` for these quantized weights.
fn settings(
    quantizations: &BTreeMap<String, Quantization>,
    model: &WeightSource,
) -> Result<Value, Failure> {
    let Some(first) = quantizations.values().next() else {
        return Err(Failure::new(
            ErrorCode::Usage,
            both(
                "--quantize quantizes nothing",
                "--quantize 没有可压缩存储的权重",
            ),
            both("no linear layer is selected", "没有选中任何线性层"),
        )
        .next(both(
            "name parts with --quantize-modules",
            "请用 --quantize-modules 指定部分",
        )));
    };
    let (four, quant_type, double) = match first {
        Quantization::FourBit {
            codebook, double, ..
        } => (true, codebook.name(), *double),
        Quantization::Int8 => (false, "fp4", false),
    };
    Ok(json!({
        "_load_in_4bit": four,
        "_load_in_8bit": !four,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": quant_type,
        "bnb_4bit_use_double_quant": double,
        "llm_int8_enable_fp32_cpu_offload": false,
        "llm_int8_has_fp16_weight": false,
        "llm_int8_skip_modules": skipped(quantizations, model),
        "llm_int8_threshold": 6.0,
        "load_in_4bit": four,
        "load_in_8bit": !four,
        "quant_method": "bitsandbytes",
    }))
}

/// Beginnings of the paths of all modules with a matrix that is not quantized: the shortest that no quantized module begins or
/// ends with.
fn skipped(quantizations: &BTreeMap<String, Quantization>, model: &WeightSource) -> Vec<String> {
    let module = |name: &str| name.strip_suffix(".weight").map(str::to_owned);
    let quantized: Vec<String> = quantizations
        .keys()
        .filter_map(|name| module(name))
        .collect();
    let is_matrix = |name: &&str| model.shape(name).is_some_and(|shape| shape.len() == 2);
    let plain = model.names().filter(is_matrix);
    let plain = plain.filter(|name| !quantizations.contains_key(*name));
    let mut found = BTreeSet::new();
    for path in plain.filter_map(module) {
        let ends = path.match_indices('.').map(|(at, _)| at);
        let mut beginnings = ends.chain([path.len()]).map(|end| &path[..end]);
        let fits = |begin: &&str| {
            !quantized
                .iter()
                .any(|other| other.starts_with(begin) || other.ends_with(begin))
        };
        found.extend(beginnings.find(fits).map(str::to_owned));
    }
    found.into_iter().collect()
}

/// The tensors in which the weight `name` is stored.
pub(super) fn specs(
    name: &str,
    quantization: Quantization,
    shape: &[usize],
    dtype: DType,
) -> Vec<TensorSpec> {
    let parts = quantization.parts(Shape::new(shape));
    let spec = |end: &str, dtype: DType, shape: &[usize]| TensorSpec {
        name: format!("{name}{end}"),
        dtype,
        shape: shape.to_vec(),
    };
    match quantization {
        Quantization::FourBit {
            codebook, double, ..
        } => {
            let state = state(quantization, shape, dtype, 0.5).len();
            let state_name = format!(".quant_state.bitsandbytes__{}", codebook.name());
            let mut all = vec![spec("", DType::U8, &[parts.codes.len(), 1])];
            if double {
                all.push(spec(".absmax", DType::U8, &[parts.magnitudes.len()]));
                all.push(spec(
                    ".nested_absmax",
                    DType::F32,
                    &[parts.nested.len() / 4],
                ));
                all.push(spec(".nested_quant_map", DType::F32, &[256]));
            } else {
                all.push(spec(".absmax", DType::F32, &[parts.magnitudes.len() / 4]));
            }
            all.push(spec(".quant_map", DType::F32, &[16]));
            all.push(spec(&state_name, DType::U8, &[state]));
            all
        }
        Quantization::Int8 => {
            let module = name.strip_suffix(".weight").unwrap_or(name);
            let beside = |end: &str, dtype: DType, shape: &[usize]| TensorSpec {
                name: format!("{module}{end}"),
                dtype,
                shape: shape.to_vec(),
            };
            vec![
                beside(".SCB", DType::F32, &[parts.magnitudes.len() / 4]),
                spec("", DType::I8, shape),
                beside(".weight_format", DType::U8, &[]),
            ]
        }
    }
}

/// Writes the tensors of [`specs`] from the quantized bytes of a weight; returns the number of bytes.
pub(super) fn write(
    file: &mut impl TensorFiles,
    specs: &[TensorSpec],
    quantization: Quantization,
    quantized: &[u8],
    (shape, dtype): (&[usize], DType),
) -> Result<u64, Failure> {
    let parts = quantization.parts(Shape::new(shape));
    let floats = |values: &[f32]| bytemuck::cast_slice::<f32, u8>(values).to_vec();
    let contents: Vec<Vec<u8>> = match quantization {
        Quantization::FourBit {
            codebook, double, ..
        } => {
            let mut all = vec![
                quantized[parts.codes].to_vec(),
                quantized[parts.magnitudes].to_vec(),
            ];
            let mut offset = 0.0;
            if double {
                let at = parts.offset.start;
                let bytes = [
                    quantized[at],
                    quantized[at + 1],
                    quantized[at + 2],
                    quantized[at + 3],
                ];
                offset = f32::from_le_bytes(bytes);
                all.push(quantized[parts.nested].to_vec());
                all.push(floats(nested_values()));
            }
            all.push(floats(codebook.values()));
            all.push(state(quantization, shape, dtype, offset).into_bytes());
            all
        }
        Quantization::Int8 => vec![
            quantized[parts.magnitudes].to_vec(),
            quantized[parts.codes].to_vec(),
            vec![0],
        ],
    };
    let mut written = 0;
    for (spec, bytes) in specs.iter().zip(contents) {
        file.append(&spec.name, &bytes)?;
        written += bytes.len() as u64;
    }
    Ok(written)
}

/// Longest text of an offset, to which shorter ones are filled: the size of the text must be known before its value.
const OFFSET_CHARS: usize = 24;

/// The description of a 4-bit weight, as bitsandbytes writes it; blanks at its end fill it to a fixed length.
fn state(quantization: Quantization, shape: &[usize], dtype: DType, offset: f32) -> String {
    let Quantization::FourBit {
        codebook,
        block_elems,
        double,
    } = quantization
    else {
        return String::new();
    };
    let dtype = match dtype {
        DType::BF16 => "bfloat16",
        DType::F16 => "float16",
        _ => "float32",
    };
    let dims: Vec<String> = shape.iter().map(ToString::to_string).collect();
    let mut text = format!(
        "{{\"quant_type\": \"{}\", \"blocksize\": {block_elems}, \"dtype\": \"{dtype}\", \"shape\": [{}]",
        codebook.name(),
        dims.join(", ")
    );
    if double {
        let number = json!(f64::from(offset)).to_string();
        let fill = " ".repeat(OFFSET_CHARS.saturating_sub(number.len()));
        text += &format!(
            ", \"nested_blocksize\": {NESTED_BLOCK}, \"nested_dtype\": \"float32\", \"nested_offset\": {number}}}{fill}"
        );
    } else {
        text.push('}');
    }
    text
}

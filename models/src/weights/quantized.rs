//! Weights that bitsandbytes quantized: which tensors belong together, whether they fit, and their bytes.
//!
//! A weight `M.weight` is quantized in 4 bits if `M.weight.quant_state.bitsandbytes__nf4` (or `__fp4`) is present, and in 8
//! bits if `M.SCB` is. Its parts become one entry with the shape of the weight; a source lists no part by itself. All of
//! what the files claim is checked when they are opened.

use super::{Entry, Location, Result, WeightError, WeightSource, read_error};
use kernels::quantized::{NESTED_BLOCK, nested_values};
use kernels::{Codebook, DType, MAX_RANK, Quantization, Shape};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};

/// Largest description of a quantized weight in bytes; bitsandbytes writes less than 300.
const MAX_STATE_BYTES: u64 = 1 << 16;
/// Largest block of elements that bitsandbytes makes, and the smallest.
const BLOCKS: Range<u32> = 32..4097;
/// Elements that are dequantized at once.
pub(super) const CHUNK_ELEMS: usize = 1 << 20;
/// Part of a tensor's name before the name of its codebook.
const STATE: &str = ".quant_state.bitsandbytes__";

/// Why a quantized weight cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QuantizationFault {
    /// The description of the weight is too large or not valid JSON.
    #[error("quant_state is not valid JSON of the known form")]
    State(#[source] Option<serde_json::Error>),
    /// A field of the description, or the format of the rows, has a value that is not supported.
    #[error("{field} is {value}")]
    Field {
        /// Name of the field.
        field: &'static str,
        /// Its value.
        value: String,
    },
    /// A tensor that belongs to the weight is in no file.
    #[error("{part} is missing")]
    Missing {
        /// End of the tensor's name.
        part: &'static str,
    },
    /// A tensor that belongs to the weight has another dtype or size.
    #[error("{part} is {got_bytes} bytes of {dtype}, not {expected_bytes} of {expected}")]
    Size {
        /// End of the tensor's name.
        part: &'static str,
        /// Its dtype.
        dtype: String,
        /// Its size in bytes.
        got_bytes: u64,
        /// The dtype that it should have.
        expected: &'static str,
        /// The size that it should have, in bytes.
        expected_bytes: u64,
    },
    /// A table of values is not the one that bitsandbytes has.
    #[error("{part} is not the table of bitsandbytes")]
    Table {
        /// End of the tensor's name.
        part: &'static str,
    },
    /// A scale is infinite or NaN.
    #[error("a scale is not finite")]
    NotFinite,
}

type Found<T> = std::result::Result<T, QuantizationFault>;

/// Place of one part of a quantized weight: file, first byte, size in bytes.
#[derive(Clone, Debug)]
struct Part {
    shard: usize,
    start: u64,
    bytes: u64,
}

/// A weight whose parts are quantized in the files.
#[derive(Debug)]
pub(super) struct StoredQuantized {
    pub(super) quantization: Quantization,
    shape: Shape,
    codes: Part,
    magnitudes: Part,
    nested: Option<Part>,
    offset: f32,
}

/// Content of a `quant_state` tensor.
#[derive(Deserialize)]
struct State {
    quant_type: String,
    blocksize: u32,
    dtype: String,
    shape: Vec<usize>,
    nested_blocksize: Option<u32>,
    nested_dtype: Option<String>,
    nested_offset: Option<f64>,
}

/// Weights that are quantized when they are read, and the one quantized last.
#[derive(Debug, Default)]
pub(super) struct QuantizedOnRead {
    quantizations: BTreeMap<String, Quantization>,
    last: Mutex<Option<(String, Vec<u8>)>>,
}

impl WeightSource {
    /// Quantizations of the weights that are quantized in the files, or with [`WeightSource::quantize_on_read`], by name.
    #[must_use]
    pub fn quantizations(&self) -> BTreeMap<String, Quantization> {
        let names = self.tensors.keys();
        let quantized = names.filter_map(|name| Some((name.clone(), self.quantization(name)?)));
        quantized.collect()
    }

    /// Quantization of the weight called `name`; `None` if it has plain values.
    #[must_use]
    pub fn quantization(&self, name: &str) -> Option<Quantization> {
        match &self.tensors.get(name)?.place {
            Location::Quantized(quantized) => Some(quantized.quantization),
            _ => self.on_read.quantizations.get(name).copied(),
        }
    }

    /// Quantizes plain weights when they are read: all later reads give the values that the quantized weights stand for. Names
    /// that no file has, and weights that are quantized already, stay as they are.
    pub fn quantize_on_read(&mut self, mut quantizations: BTreeMap<String, Quantization>) {
        quantizations.retain(|name, _| {
            let entry = self.tensors.get(name);
            entry.is_some_and(|entry| !matches!(entry.place, Location::Quantized(_)))
        });
        self.on_read.quantizations = quantizations;
    }

    /// Bytes of the quantized weight called `name`, in the form of [`Quantization`].
    ///
    /// # Errors
    /// When the weight is not quantized, a value is not finite, or reading fails.
    pub fn read_quantized(&self, name: &str) -> Result<Vec<u8>> {
        let entry = self.entry(name)?;
        match (&entry.place, self.on_read.quantizations.get(name)) {
            (Location::Quantized(quantized), _) => {
                let elems = 0..quantized.shape.elems();
                self.quantized_range(name, quantized, elems)
                    .map(|(bytes, _)| bytes)
            }
            (_, Some(quantization)) => self.quantize(name, *quantization, Shape::new(&entry.shape)),
            (_, None) => Err(entry.bad_dtype(name, DType::U8)),
        }
    }

    /// Values of a quantized weight's elements.
    pub(super) fn dequantize_range(&self, name: &str, elements: Range<usize>) -> Result<Vec<f32>> {
        let entry = self.entry(name)?;
        let (bytes, quantization, shape, start) = match &entry.place {
            Location::Quantized(quantized) => {
                let (bytes, whole) = self.quantized_range(name, quantized, elements.clone())?;
                let columns = quantized.shape.last().max(1);
                let shape = match quantized.quantization {
                    Quantization::Int8 => Shape::new(&[whole.len() / columns, columns]),
                    Quantization::FourBit { .. } => Shape::new(&[whole.len()]),
                };
                (bytes, quantized.quantization, shape, whole.start)
            }
            _ => {
                let shape = Shape::new(&entry.shape);
                let quantization = self.on_read.quantizations[name];
                (
                    self.quantize(name, quantization, shape)?,
                    quantization,
                    shape,
                    0,
                )
            }
        };
        let mut values = vec![0.0f32; shape.elems()];
        quantization.dequantize(&bytes, shape, &mut values);
        values.truncate(elements.end - start);
        values.drain(..elements.start - start);
        Ok(values)
    }

    /// Whether reads of the weight called `name` dequantize it.
    pub(super) fn dequantizes(&self, name: &str, entry: &Entry) -> bool {
        matches!(entry.place, Location::Quantized(_))
            || self.on_read.quantizations.contains_key(name)
    }

    /// Quantizes a plain weight, unless it was the last one quantized.
    fn quantize(&self, name: &str, quantization: Quantization, shape: Shape) -> Result<Vec<u8>> {
        let mut last = self
            .on_read
            .last
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some((_, bytes)) = last.as_ref().filter(|(quantized, _)| quantized == name) {
            return Ok(bytes.clone());
        }
        let mut values = vec![0.0f32; shape.elems()];
        let plain = bytemuck::cast_slice_mut(&mut values);
        self.read_plain(name, 0..shape.elems(), DType::F32, plain)?;
        let largest = match quantization {
            Quantization::Int8 => half::f16::MAX.to_f32(),
            Quantization::FourBit { .. } => f32::MAX,
        };
        if values
            .iter()
            .any(|value| value.is_nan() || value.abs() > largest)
        {
            let wanted = if quantization == Quantization::Int8 {
                DType::F16
            } else {
                DType::F32
            };
            return Err(self.not_finite_as(name, wanted)?);
        }
        let mut bytes = vec![0; quantization.bytes(shape)];
        quantization.quantize(&values, shape, &mut bytes);
        *last = Some((name.to_owned(), bytes.clone()));
        Ok(bytes)
    }

    /// Bytes of a part of a quantized weight that contains `elements`, and the elements of that part.
    fn quantized_range(
        &self,
        name: &str,
        quantized: &StoredQuantized,
        elements: Range<usize>,
    ) -> Result<(Vec<u8>, Range<usize>)> {
        let (shape, quantization) = (quantized.shape, quantized.quantization);
        let (cut, elems) = (quantization.cut_elems(shape), shape.elems());
        let start = elements.start / cut * cut;
        let whole = start..elements.end.next_multiple_of(cut).min(elems);
        let read = |part: &Part, range: Range<usize>, into: &mut [u8]| {
            debug_assert!(range.end as u64 <= part.bytes);
            let shard = &self.shards[part.shard];
            let read = shard
                .file
                .read_exact_at(into, part.start + range.start as u64);
            read.map_err(|source| read_error(&shard.path, source))
        };
        let columns = shape.last().max(1);
        let part_shape = match quantization {
            Quantization::Int8 => Shape::new(&[whole.len() / columns, columns]),
            Quantization::FourBit { .. } => Shape::new(&[whole.len()]),
        };
        let parts = quantization.parts(part_shape);
        let mut bytes = vec![0; quantization.bytes(part_shape)];
        let (code_start, first, magnitude_bytes) = match quantization {
            Quantization::Int8 => (whole.start, whole.start / columns, 4),
            Quantization::FourBit {
                block_elems,
                double,
                ..
            } => {
                let size = if double { 1 } else { 4 };
                (whole.start / 2, whole.start / block_elems as usize, size)
            }
        };
        let codes = code_start..code_start + parts.codes.len();
        read(&quantized.codes, codes, &mut bytes[parts.codes.clone()])?;
        let at = first * magnitude_bytes;
        let magnitudes = at..at + parts.magnitudes.len();
        read(
            &quantized.magnitudes,
            magnitudes,
            &mut bytes[parts.magnitudes.clone()],
        )?;
        let mut scales = vec![parts.magnitudes.clone()];
        if let Some(nested) = &quantized.nested {
            let at = first / NESTED_BLOCK * 4;
            let range = at..at + parts.nested.len();
            read(nested, range, &mut bytes[parts.nested.clone()])?;
            bytes[parts.offset.clone()].copy_from_slice(&quantized.offset.to_le_bytes());
            scales = vec![parts.nested.clone()];
        }
        let mut floats = scales
            .into_iter()
            .flat_map(|range| bytes[range].chunks_exact(4));
        let is_finite = |b: &[u8]| f32::from_le_bytes([b[0], b[1], b[2], b[3]]).is_finite();
        match floats.all(is_finite) {
            true => Ok((bytes, whole)),
            false => Err(fault(name, QuantizationFault::NotFinite)),
        }
    }

    /// Joins the parts of every quantized weight to one entry.
    pub(super) fn join_quantized(&mut self) -> Result<()> {
        let names: Vec<String> = self.tensors.keys().cloned().collect();
        for name in &names {
            if let Some((weight, codebook)) = name.split_once(STATE) {
                let joined = self.join_four_bit(weight, name, codebook);
                joined.map_err(|found| fault(weight, found))?;
            } else if let Some(module) = name.strip_suffix(".SCB") {
                let weight = format!("{module}.weight");
                let joined = self.join_int8(module, &weight);
                joined.map_err(|found| fault(&weight, found))?;
            }
        }
        Ok(())
    }

    fn join_four_bit(&mut self, weight: &str, state: &str, codebook: &str) -> Found<()> {
        let field = |field: &'static str, value: &dyn ToString| QuantizationFault::Field {
            field,
            value: value.to_string(),
        };
        let found = self.state(state)?;
        let codebook = [Codebook::Nf4, Codebook::Fp4]
            .into_iter()
            .find(|known| known.name() == codebook && codebook == found.quant_type)
            .ok_or_else(|| field("quant_type", &found.quant_type))?;
        if !found.blocksize.is_power_of_two() || !BLOCKS.contains(&found.blocksize) {
            return Err(field("blocksize", &found.blocksize));
        }
        if !["float32", "bfloat16", "float16"].contains(&&*found.dtype) {
            return Err(field("dtype", &found.dtype));
        }
        let elems = found
            .shape
            .iter()
            .try_fold(1usize, |n, dim| n.checked_mul(*dim));
        // Sizes are computed from it below, and must not overflow.
        let elems = elems.filter(|n| (1..isize::MAX as usize / 8).contains(n));
        let (Some(elems), true) = (elems, found.shape.len() <= MAX_RANK) else {
            return Err(field("shape", &format!("{:?}", found.shape)));
        };
        let blocks = elems.div_ceil(found.blocksize as usize) as u64;
        let absmax = format!("{weight}.absmax");
        let is_double = self
            .tensors
            .get(&absmax)
            .is_some_and(|entry| entry.dtype_name == "U8");
        let codes = self.part(weight, "weight", None, elems.div_ceil(2) as u64)?;
        self.table(weight, ".quant_map", codebook.values())?;
        let (magnitudes, nested, offset) = if is_double {
            let offset = found.nested_offset.unwrap_or(f64::NAN) as f32;
            if !offset.is_finite() {
                return Err(field(
                    "nested_offset",
                    &format!("{:?}", found.nested_offset),
                ));
            }
            if found.nested_blocksize != Some(NESTED_BLOCK as u32) {
                return Err(field(
                    "nested_blocksize",
                    &format!("{:?}", found.nested_blocksize),
                ));
            }
            if found.nested_dtype.as_deref() != Some("float32") {
                return Err(field("nested_dtype", &format!("{:?}", found.nested_dtype)));
            }
            self.table(weight, ".nested_quant_map", nested_values())?;
            let scales = 4 * blocks.div_ceil(NESTED_BLOCK as u64);
            let nested = format!("{weight}.nested_absmax");
            let nested = self.part(&nested, ".nested_absmax", Some("F32"), scales)?;
            let magnitudes = self.part(&absmax, ".absmax", Some("U8"), blocks)?;
            (magnitudes, Some(nested), offset)
        } else {
            let magnitudes = self.part(&absmax, ".absmax", Some("F32"), 4 * blocks)?;
            (magnitudes, None, 0.0)
        };
        let parts = [
            ".absmax",
            ".quant_map",
            ".nested_absmax",
            ".nested_quant_map",
        ];
        for part in parts {
            self.tensors.remove(&format!("{weight}{part}"));
        }
        self.tensors.remove(state);
        let quantization = Quantization::FourBit {
            codebook,
            block_elems: found.blocksize,
            double: is_double,
        };
        let stored = StoredQuantized {
            quantization,
            shape: Shape::new(&found.shape),
            codes,
            magnitudes,
            nested,
            offset,
        };
        self.join(weight, found.shape, stored);
        Ok(())
    }

    fn join_int8(&mut self, module: &str, weight: &str) -> Found<()> {
        let scales = format!("{module}.SCB");
        let entry = self.tensors.get(weight);
        let entry = entry.ok_or(QuantizationFault::Missing { part: "weight" })?;
        let shape = entry.shape.clone();
        if entry.dtype_name != "I8" || shape.len() != 2 || shape.contains(&0) {
            return Err(QuantizationFault::Field {
                field: "weight",
                value: format!("{} {shape:?}", entry.dtype_name),
            });
        }
        let codes = self.part(weight, "weight", Some("I8"), (shape[0] * shape[1]) as u64)?;
        let magnitudes = self.part(&scales, ".SCB", Some("F32"), 4 * shape[0] as u64)?;
        let format = format!("{module}.weight_format");
        if self.tensors.contains_key(&format) {
            let part = self.part(&format, ".weight_format", Some("U8"), 1)?;
            let value = self.small(&part)?[0];
            if value != 0 {
                return Err(QuantizationFault::Field {
                    field: "weight_format",
                    value: value.to_string(),
                });
            }
            self.tensors.remove(&format);
        }
        self.tensors.remove(&scales);
        let stored = StoredQuantized {
            quantization: Quantization::Int8,
            shape: Shape::new(&shape),
            codes,
            magnitudes,
            nested: None,
            offset: 0.0,
        };
        self.join(weight, shape, stored);
        Ok(())
    }

    fn join(&mut self, weight: &str, shape: Vec<usize>, stored: StoredQuantized) {
        if let Some(entry) = self.tensors.get_mut(weight) {
            entry.shape = shape;
            entry.dtype = Some(DType::F32);
            entry.place = Location::Quantized(Box::new(stored));
        }
    }

    fn state(&self, name: &str) -> Found<State> {
        let entry = self.tensors.get(name);
        let entry = entry.filter(|entry| entry.bytes <= MAX_STATE_BYTES);
        let part = entry.and_then(|entry| self.part_of(entry));
        let bytes = self.small(&part.ok_or(QuantizationFault::State(None))?)?;
        serde_json::from_slice(&bytes).map_err(|source| QuantizationFault::State(Some(source)))
    }

    fn table(&self, weight: &str, part: &'static str, values: &[f32]) -> Found<()> {
        let bytes = 4 * values.len() as u64;
        let place = self.part(&format!("{weight}{part}"), part, Some("F32"), bytes)?;
        let bytes = self.small(&place)?;
        let found = bytes
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        match found.eq(values.iter().copied()) {
            true => Ok(()),
            false => Err(QuantizationFault::Table { part }),
        }
    }

    /// The place of a tensor that must have this dtype, if any, and size.
    fn part(
        &self,
        name: &str,
        part: &'static str,
        dtype: Option<&'static str>,
        bytes: u64,
    ) -> Found<Part> {
        let entry = self
            .tensors
            .get(name)
            .ok_or(QuantizationFault::Missing { part })?;
        let place = self.part_of(entry);
        let fits = dtype.is_none_or(|dtype| entry.dtype_name == dtype) && entry.bytes == bytes;
        place
            .filter(|_| fits)
            .ok_or_else(|| QuantizationFault::Size {
                part,
                dtype: entry.dtype_name.clone(),
                got_bytes: entry.bytes,
                expected: dtype.unwrap_or("U8"),
                expected_bytes: bytes,
            })
    }

    fn part_of(&self, entry: &Entry) -> Option<Part> {
        match entry.place {
            Location::At(start) => Some(Part {
                shard: entry.shard,
                start,
                bytes: entry.bytes,
            }),
            Location::Made(_) | Location::Quantized(_) | Location::Pieces(_) => None,
        }
    }

    fn small(&self, part: &Part) -> Found<Vec<u8>> {
        let mut bytes = vec![0; part.bytes as usize];
        let file = &self.shards[part.shard].file;
        match file.read_exact_at(&mut bytes, part.start) {
            Ok(()) => Ok(bytes),
            Err(_) => Err(QuantizationFault::State(None)),
        }
    }
}

fn fault(name: &str, fault: QuantizationFault) -> WeightError {
    WeightError::Quantized {
        name: name.to_owned(),
        fault,
    }
}

//! Quantized weights: 4 or 8 bits a weight, with the numbers and roundings of bitsandbytes.
//!
//! A quantized tensor is one run of bytes, in this order; every part begins at a multiple of 16 bytes:
//!
//! | quantization | parts |
//! |---|---|
//! | 4 bits | codes, two a byte, the first in the high nibble; the largest magnitude of each block, f32 |
//! | 4 bits, double | codes; offset, f32; scale of each 256 magnitudes, f32; codes of the magnitudes, one byte each |
//! | int8 | codes, i8; the largest magnitude of each row, f32 |
//!
//! Blocks count from the tensor's first element and cross rows. Each block is quantized and dequantized by itself, so results
//! do not depend on threads.

mod tables;

use crate::{Float, Shape, dynamic_map};
use half::f16;
use rayon::prelude::*;
use std::ops::Range;
use tables::{FP4, FP4_RANKED, FP4_THRESHOLDS, NF4, NF4_THRESHOLDS};

/// Magnitudes that share one scale when they are quantized themselves.
pub const NESTED_BLOCK: usize = 256;
/// Bytes at whose multiples the parts of a quantized tensor begin.
const PART_ALIGN: usize = 16;
/// Smallest divisor of a block, as bitsandbytes has it.
const LEAST_MAGNITUDE: f32 = 1e-38;
/// `1 / 127` as bitsandbytes spells it.
const INT8_STEP: f32 = 7.874_016e-3;
/// Elements that one task quantizes or dequantizes, at least.
const TASK_ELEMS: usize = 1 << 15;

/// Meaning of 4-bit codes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Codebook {
    /// Quantiles of the normal distribution.
    Nf4,
    /// Floating-point numbers of 4 bits.
    Fp4,
}

impl Codebook {
    /// Name in files and on the command line: `nf4` or `fp4`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nf4 => "nf4",
            Self::Fp4 => "fp4",
        }
    }

    /// Values of the 16 codes, as fractions of a block's largest magnitude.
    #[must_use]
    pub fn values(self) -> &'static [f32; 16] {
        match self {
            Self::Nf4 => &NF4,
            Self::Fp4 => &FP4,
        }
    }

    fn code(self, y: f32) -> u8 {
        let below = |thresholds: &[f32], y: f32| thresholds.iter().filter(|t| y > **t).count();
        match self {
            Self::Nf4 => below(&NF4_THRESHOLDS, y) as u8,
            Self::Fp4 => FP4_RANKED[below(&FP4_THRESHOLDS, y.abs())] | (u8::from(y < 0.0) << 3),
        }
    }
}

/// Values of the 256 codes of quantized magnitudes, ascending.
#[must_use]
pub fn nested_values() -> &'static [f32; 256] {
    &dynamic_map::SIGNED
}

/// How a weight is quantized.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Quantization {
    /// 4 bits a weight.
    FourBit {
        /// Meaning of the codes.
        codebook: Codebook,
        /// Consecutive elements that share one magnitude: a power of two, at least 32.
        block_elems: u32,
        /// Whether the magnitudes are quantized too, in 8 bits (double quantization).
        double: bool,
    },
    /// 8 bits a weight, one scale per row.
    Int8,
}

impl Quantization {
    /// 4 bits a weight in blocks of 64, as bitsandbytes quantizes by default.
    #[must_use]
    pub const fn four_bit(codebook: Codebook, double: bool) -> Self {
        Self::FourBit {
            codebook,
            block_elems: 64,
            double,
        }
    }

    /// Name on the command line: `nf4`, `fp4` or `int8`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::FourBit { codebook, .. } => codebook.name(),
            Self::Int8 => "int8",
        }
    }

    /// Parts of a quantized tensor of `shape`, as ranges of its bytes.
    #[must_use]
    pub fn parts(self, shape: Shape) -> Parts {
        let elems = shape.elems();
        let after = |part: &Range<usize>, bytes: usize| {
            let start = part.end.next_multiple_of(PART_ALIGN);
            start..start + bytes
        };
        match self {
            Self::FourBit {
                block_elems,
                double,
                ..
            } => {
                let blocks = elems.div_ceil(block_elems as usize);
                let codes = 0..elems.div_ceil(2);
                if !double {
                    let magnitudes = after(&codes, 4 * blocks);
                    return Parts {
                        offset: 0..0,
                        nested: 0..0,
                        codes,
                        magnitudes,
                    };
                }
                let offset = after(&codes, 4);
                let nested = after(&offset, 4 * blocks.div_ceil(NESTED_BLOCK));
                let magnitudes = after(&nested, blocks);
                Parts {
                    codes,
                    offset,
                    nested,
                    magnitudes,
                }
            }
            Self::Int8 => {
                let codes = 0..elems;
                let magnitudes = after(&codes, 4 * rows(shape));
                Parts {
                    offset: 0..0,
                    nested: 0..0,
                    codes,
                    magnitudes,
                }
            }
        }
    }

    /// Bytes of a quantized tensor of `shape`.
    #[must_use]
    pub fn bytes(self, shape: Shape) -> usize {
        self.parts(shape).magnitudes.end
    }

    /// Elements at whose multiples a tensor of `shape` may be cut into tensors that are quantized the same.
    #[must_use]
    pub fn cut_elems(self, shape: Shape) -> usize {
        match self {
            Self::FourBit {
                block_elems,
                double: true,
                ..
            } => block_elems as usize * NESTED_BLOCK,
            Self::FourBit { block_elems, .. } => block_elems as usize,
            Self::Int8 => shape.last().max(1),
        }
    }

    /// Quantizes the finite `values` of a tensor of `shape` into `out`.
    ///
    /// # Panics
    /// When the lengths do not fit `shape`.
    pub fn quantize(self, values: &[f32], shape: Shape, out: &mut [u8]) {
        assert_eq!(values.len(), shape.elems(), "values of {shape}");
        assert_eq!(out.len(), self.bytes(shape), "bytes of {shape}");
        out.fill(0);
        let parts = self.parts(shape);
        let (codes, rest) = out.split_at_mut(parts.codes.end);
        let rest = &mut rest[parts.magnitudes_or_offset() - parts.codes.end..];
        match self {
            Self::FourBit {
                codebook,
                block_elems,
                double,
            } => {
                let block = block_elems as usize;
                let magnitudes = quantize_blocks(codebook, block, values, codes);
                match double {
                    true => quantize_magnitudes(&magnitudes, &parts, rest),
                    false => write_floats(&magnitudes, rest),
                }
            }
            Self::Int8 => write_floats(&quantize_rows(values, shape.last(), codes), rest),
        }
    }

    /// Dequantizes a quantized tensor of `shape` into `out`, each value rounded once to the nearest, ties to even.
    ///
    /// # Panics
    /// When the lengths do not fit `shape`.
    pub fn dequantize<T: Float>(self, quantized: &[u8], shape: Shape, out: &mut [T]) {
        assert_eq!(out.len(), shape.elems(), "values of {shape}");
        assert_eq!(quantized.len(), self.bytes(shape), "bytes of {shape}");
        let parts = self.parts(shape);
        let codes = &quantized[parts.codes.clone()];
        match self {
            Self::FourBit {
                codebook,
                block_elems,
                ..
            } => {
                let block = block_elems as usize;
                let task = TASK_ELEMS.next_multiple_of(block);
                let tasks = out.par_chunks_mut(task).zip(codes.par_chunks(task / 2));
                tasks.enumerate().for_each(|(i, (out, codes))| {
                    let first = i * (task / block);
                    let blocks = out.chunks_mut(block).zip(codes.chunks(block / 2));
                    for (j, (out, codes)) in blocks.enumerate() {
                        let magnitude = parts.magnitude(self, quantized, first + j);
                        let values = codebook.values().map(|v| T::from_f32(v * magnitude));
                        for (pair, code) in out.chunks_mut(2).zip(codes) {
                            pair[0] = values[usize::from(code >> 4)];
                            if let Some(second) = pair.get_mut(1) {
                                *second = values[usize::from(code & 15)];
                            }
                        }
                    }
                });
            }
            Self::Int8 => {
                let columns = shape.last().max(1);
                let rows = out.par_chunks_mut(columns).zip(codes.par_chunks(columns));
                let rows = rows.with_min_len(TASK_ELEMS.div_ceil(columns));
                rows.enumerate().for_each(|(row, (out, codes))| {
                    let magnitude = parts.magnitude(self, quantized, row);
                    for (out, code) in out.iter_mut().zip(codes) {
                        let code = f32::from(i8::from_ne_bytes([*code]));
                        *out = T::from_f32(code * magnitude * INT8_STEP);
                    }
                });
            }
        }
    }
}

impl std::fmt::Display for Quantization {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())?;
        match self {
            Self::FourBit {
                block_elems,
                double,
                ..
            } => {
                let double = if *double { ", double" } else { "" };
                let block = (*block_elems != 64).then(|| format!(", blocks of {block_elems}"));
                write!(f, "{double}{}", block.unwrap_or_default())
            }
            Self::Int8 => Ok(()),
        }
    }
}

/// Ranges of bytes of a quantized tensor's parts. Parts that a quantization lacks are empty.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Parts {
    /// Codes of the weights.
    pub codes: Range<usize>,
    /// Mean of the magnitudes, which their codes do not contain.
    pub offset: Range<usize>,
    /// Scales of the codes of the magnitudes.
    pub nested: Range<usize>,
    /// Magnitudes of blocks or rows: f32, or one byte each if they are quantized.
    pub magnitudes: Range<usize>,
}

impl Parts {
    /// First byte after the codes and their padding.
    fn magnitudes_or_offset(&self) -> usize {
        match self.offset.is_empty() {
            true => self.magnitudes.start,
            false => self.offset.start,
        }
    }

    fn magnitude(&self, quantization: Quantization, quantized: &[u8], index: usize) -> f32 {
        let float = |part: &Range<usize>, i: usize| {
            let at = part.start + 4 * i;
            f32::from_le_bytes([
                quantized[at],
                quantized[at + 1],
                quantized[at + 2],
                quantized[at + 3],
            ])
        };
        match quantization {
            Quantization::FourBit { double: true, .. } => {
                let code = quantized[self.magnitudes.start + index];
                let scale = float(&self.nested, index / NESTED_BLOCK);
                dynamic_map::SIGNED[usize::from(code)] * scale + float(&self.offset, 0)
            }
            _ => float(&self.magnitudes, index),
        }
    }
}

fn rows(shape: Shape) -> usize {
    shape.elems().checked_div(shape.last()).unwrap_or(0)
}

fn write_floats(values: &[f32], out: &mut [u8]) {
    for (value, out) in values.iter().zip(out.chunks_exact_mut(4)) {
        out.copy_from_slice(&value.to_le_bytes());
    }
}

/// Quantizes the codes of all blocks; returns the largest magnitude of each.
fn quantize_blocks(codebook: Codebook, block: usize, values: &[f32], codes: &mut [u8]) -> Vec<f32> {
    let mut magnitudes = vec![0.0; values.len().div_ceil(block)];
    let blocks = values
        .par_chunks(block)
        .zip(codes.par_chunks_mut(block / 2));
    let blocks = blocks.zip(magnitudes.par_iter_mut());
    let blocks = blocks.with_min_len(TASK_ELEMS.div_ceil(block));
    blocks.for_each(|((values, codes), magnitude)| {
        *magnitude = largest(values);
        let scale = 1.0 / magnitude.max(LEAST_MAGNITUDE);
        let code = |value: Option<&f32>| codebook.code(value.unwrap_or(&0.0) * scale);
        for (pair, out) in values.chunks(2).zip(codes) {
            *out = (code(pair.first()) << 4) | code(pair.get(1));
        }
    });
    magnitudes
}

/// Quantizes magnitudes around their mean. `out` begins with the offset.
fn quantize_magnitudes(magnitudes: &[f32], parts: &Parts, out: &mut [u8]) {
    let start = parts.offset.start;
    let sum: f64 = magnitudes.iter().map(|m| f64::from(*m)).sum();
    let offset = (sum / magnitudes.len().max(1) as f64) as f32;
    out[..4].copy_from_slice(&offset.to_le_bytes());
    for (i, block) in magnitudes.chunks(NESTED_BLOCK).enumerate() {
        let rests: Vec<f32> = block.iter().map(|m| m - offset).collect();
        let scale = largest(&rests);
        let at = parts.nested.start - start + 4 * i;
        out[at..at + 4].copy_from_slice(&scale.to_le_bytes());
        if scale == 0.0 {
            // All are the mean; bitsandbytes gives them the code 0.
            continue;
        }
        let inverse = 1.0 / scale.max(LEAST_MAGNITUDE);
        let at = parts.magnitudes.start - start + NESTED_BLOCK * i;
        for (out, rest) in out[at..].iter_mut().zip(rests) {
            *out = nested_code(rest * inverse);
        }
    }
}

/// Code of the value of the signed dynamic map that is nearest to `y`, by the search of bitsandbytes' kernel: a value in
/// the middle stays where the search ended.
fn nested_code(y: f32) -> u8 {
    let map = &dynamic_map::SIGNED;
    let (mut pivot, mut lower, mut upper) = (127, 0, 255);
    let mut step = 64;
    while step > 0 {
        if y > map[pivot] {
            lower = pivot;
            pivot += step;
        } else {
            upper = pivot;
            pivot -= step;
        }
        step >>= 1;
    }
    let middle = |other: usize| (map[pivot] + map[other]) * 0.5;
    if y > map[pivot] {
        if y > middle(upper) {
            upper as u8
        } else {
            pivot as u8
        }
    } else if y < middle(lower) {
        lower as u8
    } else {
        pivot as u8
    }
}

/// Quantizes the codes of all rows, from values rounded to f16; returns the largest magnitude of each row.
fn quantize_rows(values: &[f32], columns: usize, codes: &mut [u8]) -> Vec<f32> {
    let columns = columns.max(1);
    let mut magnitudes = vec![0.0; values.len() / columns];
    let rows = values
        .par_chunks(columns)
        .zip(codes.par_chunks_mut(columns));
    let rows = rows.zip(magnitudes.par_iter_mut());
    let rows = rows.with_min_len(TASK_ELEMS.div_ceil(columns));
    rows.for_each(|((values, codes), magnitude)| {
        let half = |value: &f32| f16::from_f32(*value).to_f32();
        *magnitude = values.iter().fold(0.0, |most, v| half(v).abs().max(most));
        if *magnitude == 0.0 {
            return;
        }
        let scale = 127.0 / *magnitude;
        for (value, out) in values.iter().zip(codes) {
            let code = (half(value) * scale).round_ties_even() as i8;
            *out = code.to_ne_bytes()[0];
        }
    });
    magnitudes
}

fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |most, v| v.abs().max(most))
}

//! Angles of rotary positions.

use crate::batch::upload;
use crate::error::Result;
use kernels::{Backend, DType, Float, RopeLayout, Tensor};

/// Cosines and sines of the rotary position embedding, one row per token or patch.
#[derive(Clone, Debug)]
pub struct Rotary {
    /// Cosines of the angles, f32 `[t, w]`: `t` rows (tokens or patches), `w` rotating pairs of a head.
    pub cos: Tensor,
    /// Sines of the angles, f32 `[t, w]`, like `cos`.
    pub sin: Tensor,
    /// Which two elements of a head rotate as a pair.
    pub layout: RopeLayout,
}

/// Rotary frequencies in radians per position, `theta^(-2i / rotary)` for each of the `rotary / 2` rotating
/// pairs `i` of a head.
#[must_use]
pub fn rope_frequencies(rotary: usize, theta: f32) -> Vec<f32> {
    (0..rotary / 2)
        .map(|i| 1.0 / theta.powf((2 * i) as f32 / rotary as f32))
        .collect()
}

/// Rotary frequencies of a head, and which elements rotate as pairs.
#[derive(Clone, PartialEq, Debug)]
pub struct RotaryTable {
    /// Radians per position of each rotating pair, `[w]`.
    pub frequencies: Vec<f32>,
    /// Which two elements of a head rotate as a pair.
    pub layout: RopeLayout,
}

impl RotaryTable {
    /// Cosines and sines of the angles `position * frequency`, one row per position, rounded to `dtype` but
    /// stored as f32.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn rotary(&self, positions: &[i32], dtype: DType, backend: &dyn Backend) -> Result<Rotary> {
        let angles = positions
            .iter()
            .flat_map(|p| self.frequencies.iter().map(move |w| *p as f32 * w));
        rotary_of(angles, self.frequencies.len(), self.layout, dtype, backend)
    }
}

/// Cosines and sines of `angles` (radians, in rows of `width`), rounded to `dtype` but stored as f32.
///
/// # Errors
/// When memory runs out.
pub fn rotary_of(
    angles: impl Iterator<Item = f32> + Clone,
    width: usize,
    layout: RopeLayout,
    dtype: DType,
    backend: &dyn Backend,
) -> Result<Rotary> {
    let table = |f: fn(f32) -> f32| -> Result<Tensor> {
        // A dry run of a long sample would spend most of its time on values that nothing reads.
        let values: Vec<f32> = match backend.has_values() {
            true => angles.clone().map(|a| round(f(a), dtype)).collect(),
            false => vec![0.0; angles.clone().count()],
        };
        upload(backend, &values, &[values.len() / width.max(1), width])
    };
    Ok(Rotary {
        cos: table(f32::cos)?,
        sin: table(f32::sin)?,
        layout,
    })
}

/// Rounds `x` to bf16 or f16 and returns it as f32; other dtypes leave it unchanged.
#[must_use]
pub fn round(x: f32, dtype: DType) -> f32 {
    match dtype {
        DType::BF16 => Float::to_f32(<half::bf16 as Float>::from_f32(x)),
        DType::F16 => Float::to_f32(<half::f16 as Float>::from_f32(x)),
        _ => x,
    }
}

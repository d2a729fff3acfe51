//! Rotary angles of the decoder.
//!
//! The published code has frequencies and positions in the dtype of the model and multiplies them in it. In bf16 it
//! rounds positions above 256 and all angles, and the checkpoints were trained this way.

use crate::error::Result;
use crate::nn::{Rotary, rope_frequencies, rotary_of, round};
use kernels::{Backend, DType, RopeLayout};

/// Cosines and sines of the decoder's rotary position embedding, one row for each of `positions`. All
/// `head_dim` elements of a head rotate. Values are rounded to `dtype` wherever the published code rounds.
///
/// # Errors
/// When memory runs out.
pub fn rotary(
    positions: &[i32],
    head_dim: usize,
    theta: f32,
    dtype: DType,
    backend: &dyn Backend,
) -> Result<Rotary> {
    let frequencies: Vec<f32> = rope_frequencies(head_dim, theta)
        .into_iter()
        .map(|w| round(w, dtype))
        .collect();
    let angles = positions.iter().flat_map(|p| {
        let position = round(*p as f32, dtype);
        frequencies.iter().map(move |w| round(position * w, dtype))
    });
    rotary_of(angles, head_dim / 2, RopeLayout::HalfSplit, dtype, backend)
}

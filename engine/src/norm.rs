//! The sum of squares behind the global gradient norm.

/// Elements summed one behind the other before blocks are combined; part of the result's
/// definition, so that it is the same for every stage, tier and number of threads.
pub const NORM_BLOCK_ELEMS: usize = 4096;

/// Sum of squares in f64. Not finite exactly when a value is not: the square of the largest f32 is
/// far inside the range of f64.
#[must_use]
pub fn sum_of_squares(values: &[f32]) -> f64 {
    values.chunks(NORM_BLOCK_ELEMS).map(block_sum).sum()
}

/// Eight interleaved partial sums, so that the loop vectorises with a fixed order.
fn block_sum(block: &[f32]) -> f64 {
    let mut lanes = [0f64; 8];
    let chunks = block.chunks_exact(8);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, v) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(*v) * f64::from(*v);
        }
    }
    let tail: f64 = rest.iter().map(|v| f64::from(*v) * f64::from(*v)).sum();
    lanes.iter().sum::<f64>() + tail
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equals_the_plain_sum_closely_and_flags_every_non_finite_value() {
        let values: Vec<f32> = (0..10_001).map(|i| (i as f32 * 0.37).sin()).collect();
        let plain: f64 = values.iter().map(|v| f64::from(*v).powi(2)).sum();
        assert!((sum_of_squares(&values) / plain - 1.0).abs() < 1e-13);
        assert!(sum_of_squares(&[f32::MAX; 100]).is_finite());
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = values.clone();
            values[7_777] = bad;
            assert!(!sum_of_squares(&values).is_finite());
        }
    }
}

//! Sums in rank order.

use std::ops::AddAssign;

/// Elements summed at a time: the accumulator stays in the first-level cache while each source is
/// streamed once.
const BLOCK: usize = 2048;

/// Replaces `out`, this rank's operand, by `operand 0 + operand 1 + …`, added in rank order.
///
/// `source` gives the operand of every other rank; all have the length of `out`.
pub(super) fn sum_in_rank_order<'a, T>(
    ranks: usize,
    own: usize,
    source: impl Fn(usize) -> &'a [T],
    out: &mut [T],
) where
    T: Copy + Default + AddAssign + 'a,
{
    if ranks == 1 {
        return;
    }
    let mut block = [T::default(); BLOCK];
    for start in (0..out.len()).step_by(BLOCK) {
        let out = &mut out[start..];
        let count = out.len().min(BLOCK);
        let out = &mut out[..count];
        let sum = &mut block[..count];
        for rank in 0..ranks {
            let operand = if rank == own {
                &*out
            } else {
                &source(rank)[start..][..count]
            };
            if rank == 0 {
                // Starting from the operand, not from zero, keeps the sign of -0.
                sum.copy_from_slice(operand);
            } else {
                sum.iter_mut().zip(operand).for_each(|(sum, &x)| *sum += x);
            }
        }
        out.copy_from_slice(sum);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_computes_the_ordered_sum() {
        let count = BLOCK + 17;
        let operands: Vec<Vec<f32>> = (0..4)
            .map(|r| {
                (0..count)
                    .map(|i| ((i * 7 + r * 13) % 29) as f32 * 10f32.powi(r as i32))
                    .collect()
            })
            .collect();
        let expected: Vec<u32> = (0..count)
            .map(|i| {
                let ordered = ((operands[0][i] + operands[1][i]) + operands[2][i]) + operands[3][i];
                ordered.to_bits()
            })
            .collect();
        for own in 0..4 {
            let mut out = operands[own].clone();
            sum_in_rank_order(4, own, |r| &operands[r][..], &mut out);
            assert_eq!(
                out.iter().map(|x| x.to_bits()).collect::<Vec<_>>(),
                expected
            );
        }
    }

    #[test]
    fn negative_zero_survives() {
        let mut out = [-0.0f64];
        sum_in_rank_order(2, 1, |_| &[-0.0], &mut out);
        assert_eq!(out[0].to_bits(), (-0.0f64).to_bits());
    }
}

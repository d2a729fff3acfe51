//! Sums in rank order.

use std::ops::AddAssign;

/// Largest number of operands read at once: a processor prefetches about so many streams.
const STREAMS: usize = 8;
/// Elements added up in registers at a time.
const LANES: usize = 32;
/// Elements summed at a time if operands are read one after another. The sum stays in the first-level cache.
const BLOCK: usize = 2048;

/// Replaces `out`, this rank's operand, by `operand 0 + operand 1 + …`, added in rank order.
///
/// `source` returns the operand of every other rank. All have the length of `out`.
pub(super) fn sum_in_rank_order<'a, T>(
    ranks: usize,
    own: usize,
    source: impl Fn(usize) -> &'a [T],
    out: &mut [T],
) where
    T: Copy + Default + AddAssign + 'a,
{
    match ranks {
        0 | 1 => {}
        2..=STREAMS => side_by_side(ranks, own, source, out),
        _ => one_by_one(ranks, own, source, out),
    }
}

/// Sums all operands at once: each operand is read once, and the sum is written once.
fn side_by_side<'a, T>(ranks: usize, own: usize, source: impl Fn(usize) -> &'a [T], out: &mut [T])
where
    T: Copy + Default + AddAssign + 'a,
{
    let len = out.len();
    let sources: [&[T]; STREAMS] = std::array::from_fn(|rank| {
        if rank < ranks && rank != own {
            &source(rank)[..len]
        } else {
            &[]
        }
    });
    let mut start = 0;
    while start + LANES <= len {
        let lanes = start..start + LANES;
        let mut sum = [T::default(); LANES];
        // Starting from the operand, not from zero, keeps the sign of -0.
        let first = if own == 0 { &*out } else { sources[0] };
        sum.copy_from_slice(&first[lanes.clone()]);
        for rank in 1..ranks {
            let operand = if rank == own { &*out } else { sources[rank] };
            for (sum, x) in sum.iter_mut().zip(&operand[lanes.clone()]) {
                *sum += *x;
            }
        }
        out[lanes].copy_from_slice(&sum);
        start += LANES;
    }
    one_by_one(
        ranks,
        own,
        |rank| &sources[rank][start..],
        &mut out[start..],
    );
}

/// Sums one operand after another, block by block.
fn one_by_one<'a, T>(ranks: usize, own: usize, source: impl Fn(usize) -> &'a [T], out: &mut [T])
where
    T: Copy + Default + AddAssign + 'a,
{
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
        // Both fewer and more operands than streams.
        let ranks = STREAMS + 3;
        let operands: Vec<Vec<f32>> = (0..ranks)
            .map(|r| {
                (0..count)
                    .map(|i| ((i * 7 + r * 13) % 29) as f32 * 10f32.powi(r as i32 % 5))
                    .collect()
            })
            .collect();
        for ranks in [2, 4, STREAMS, ranks] {
            let ordered = |i: usize| {
                let others = operands[1..ranks].iter();
                others.fold(operands[0][i], |sum, operand| sum + operand[i])
            };
            let expected: Vec<u32> = (0..count).map(|i| ordered(i).to_bits()).collect();
            for own in 0..ranks {
                let mut out = operands[own].clone();
                sum_in_rank_order(ranks, own, |r| &operands[r][..], &mut out);
                let bits: Vec<u32> = out.iter().map(|x| x.to_bits()).collect();
                assert_eq!(bits, expected);
            }
        }
    }

    #[test]
    fn a_sum_keeps_negative_zero() {
        let mut out = [-0.0f64];
        sum_in_rank_order(2, 1, |_| &[-0.0], &mut out);
        assert_eq!(out[0].to_bits(), (-0.0f64).to_bits());
    }
}

//! Random weights, a few nanoseconds each: a hash of (seed, tensor name, element) looks up the value of its quantile.
//!
//! 16 bits of a hash choose one of 65,536 equally likely values of the distribution, which is more than the number
//! format tells apart: a bf16 has 8 significant bits. One hash serves four elements. The same bytes on every machine
//! and for any number of threads.

use std::sync::LazyLock;

use half::bf16;
use models::init::Init;
use optim::rng::RandomStream;
use rayon::prelude::*;

/// Equally likely values of a distribution.
const VALUES: usize = 1 << 16;
/// Elements per hash.
const LANES: usize = 4;
/// Elements that one thread makes at once.
const PIECE: usize = 1 << 15;
/// Step of the integral over the normal density.
const STEP: f64 = 1e-4;

/// The generator of one tensor.
#[derive(Debug)]
pub(super) struct Values {
    key: u64,
    table: Vec<u16>,
}

impl Values {
    /// The values of the tensor `name` under `seed`, distributed as `init`.
    pub(super) fn new(seed: u64, name: &str, init: Init) -> Self {
        let bits = |value: f32| bf16::from_f32(value).to_bits();
        let table = match init {
            // A table of one value is what all hashes find.
            Init::Constant(value) => vec![bits(value)],
            Init::Normal(std) => NORMAL.iter().map(|quantile| bits(std * quantile)).collect(),
            Init::Uniform(half) => (0..VALUES)
                .map(|k| bits(half * (2.0 * middle(k) - 1.0) as f32))
                .collect(),
        };
        Self {
            key: RandomStream::new(seed, name).bits(0, 0),
            table,
        }
    }

    /// Writes the elements from `first` on, a multiple of four, as bf16 bits.
    pub(super) fn fill(&self, first: u64, out: &mut [u16]) {
        if let [value] = self.table[..] {
            out.fill(value);
            return;
        }
        let pieces = out.par_chunks_mut(PIECE).enumerate();
        pieces.for_each(|(piece, out)| {
            let start = (first + (piece * PIECE) as u64) / LANES as u64;
            for (lanes, block) in out.chunks_mut(LANES).zip(start..) {
                let mut hash = mix(self.key, block);
                for value in lanes {
                    *value = self.table[(hash & 0xffff) as usize];
                    hash >>= 16;
                }
            }
        });
    }
}

/// The `block`-th number of splitmix64's sequence from `key`.
fn mix(key: u64, block: u64) -> u64 {
    let value = key.wrapping_add((block + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// Probability of the middle of the `k`-th of equally likely parts.
fn middle(k: usize) -> f64 {
    (k as f64 + 0.5) / VALUES as f64
}

/// Quantiles of the standard normal distribution: its density summed up until each probability is reached.
static NORMAL: LazyLock<Vec<f32>> = LazyLock::new(|| {
    let density = |z: f64| (-0.5 * z * z).exp() / std::f64::consts::TAU.sqrt();
    let mut upper = Vec::with_capacity(VALUES / 2);
    let (mut z, mut probability) = (0.0, 0.5);
    for k in VALUES / 2..VALUES {
        let mut part = density(z + 0.5 * STEP) * STEP;
        while probability + part < middle(k) {
            probability += part;
            z += STEP;
            part = density(z + 0.5 * STEP) * STEP;
        }
        upper.push((z + STEP * (middle(k) - probability) / part) as f32);
    }
    let lower = upper.iter().rev().map(|z| -z);
    lower.chain(upper.iter().copied()).collect()
});

#[cfg(test)]
mod tests {
    use super::*;

    fn draw(values: &Values, first: u64, count: usize) -> Vec<f32> {
        let mut bits = vec![0; count];
        values.fill(first, &mut bits);
        bits.into_iter()
            .map(|b| bf16::from_bits(b).to_f32())
            .collect()
    }

    #[test]
    fn any_split_gives_the_same_values_and_seeds_and_names_give_others() {
        let values = Values::new(1, "a", Init::Normal(0.02));
        let whole = draw(&values, 0, 3 * PIECE + 5);
        assert_eq!(draw(&values, 8, 1000), whole[8..1008]);
        let from = 2 * PIECE as u64 + 4;
        assert_eq!(draw(&values, from, PIECE), whole[from as usize..][..PIECE]);
        for other in [
            Values::new(2, "a", Init::Normal(0.02)),
            Values::new(1, "b", Init::Normal(0.02)),
        ] {
            let same = draw(&other, 0, 1000)
                .iter()
                .zip(&whole)
                .filter(|(a, b)| a == b)
                .count();
            assert!(same < 50, "{same} of 1000");
        }
    }

    #[test]
    fn moments_are_those_of_the_distribution() {
        let n = 1 << 20;
        let moments = |init: Init| {
            let values = draw(&Values::new(7, "moments", init), 0, n);
            let mean = values.iter().map(|&x| f64::from(x)).sum::<f64>() / n as f64;
            let power =
                |p: i32| values.iter().map(|&x| f64::from(x).powi(p)).sum::<f64>() / n as f64;
            // Neighbours must not follow each other.
            let pairs = values.windows(2).map(|w| f64::from(w[0]) * f64::from(w[1]));
            (mean, power(2), power(4), pairs.sum::<f64>() / n as f64)
        };
        // Five standard errors; bf16 adds less than one of them.
        let (mean, square, fourth, pairs) = moments(Init::Normal(1.0));
        assert!(
            mean.abs() < 5e-3 && (square - 1.0).abs() < 7e-3,
            "{mean} {square}"
        );
        assert!(
            (fourth - 3.0).abs() < 0.05 && pairs.abs() < 5e-3,
            "{fourth} {pairs}"
        );
        let (mean, square, fourth, _) = moments(Init::Uniform(1.0));
        assert!(
            mean.abs() < 3e-3 && (square - 1.0 / 3.0).abs() < 2e-3,
            "{mean} {square}"
        );
        assert!((fourth - 0.2).abs() < 2e-3, "{fourth}");
        assert_eq!(
            draw(&Values::new(7, "c", Init::Constant(1.0)), 0, 9),
            [1.0; 9]
        );
    }

    #[test]
    fn quantiles_are_the_published_ones() {
        // Probabilities 0.975 and 0.5 + 1/65536 / 2.
        let at = |p: f64| NORMAL[(p * VALUES as f64) as usize];
        assert!((at(0.975) - 1.959_964).abs() < 5e-4, "{}", at(0.975));
        assert!((at(0.841_344_746) - 1.0).abs() < 1e-4);
        assert!(NORMAL.is_sorted() && NORMAL[VALUES - 1] < 4.5);
    }
}

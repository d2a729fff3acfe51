//! Random weights as functions of seed, tensor name and element. They make a model of any size without weight
//! files, or the contents of its files.
//!
//! A value takes a few nanoseconds: 16 bits of a hash choose one of 65,536 equally likely quantiles of the
//! distribution. A bf16 has 8 significant bits, fewer than that. One hash serves four elements. The bytes are
//! the same on every machine, for any number of threads and any split into ranges.
//!
//! A model directory that has [`FILE`] instead of weight files has these values;
//! [`WeightSource`](crate::WeightSource) reads them like files of bf16.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, LazyLock};

use engine::ParamSpec;
use half::bf16;
use optim::rng::RandomStream;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::init::{Init, rule};
use crate::{ModelOptions, OpenError, open_model};

/// Name of the file that declares random weights for a model directory without weight files.
pub const FILE: &str = "model.seeded.json";
/// Content of [`FILE`]: the seed from which a model's random weights are computed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Marker {
    /// Name of the generator; another one is an error.
    generator: Generator,
    /// Seed of the random weights.
    pub seed: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Generator {
    #[serde(rename = "quantiles-1")]
    Quantiles,
}

impl Marker {
    /// The marker of a model whose random weights have the seed `seed`.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self {
            generator: Generator::Quantiles,
            seed,
        }
    }
}

/// Parameters of the model that a directory's `config.json` describes, each with the distribution of its
/// random values. Adapters are not included.
///
/// # Errors
/// [`OpenError`] if the model cannot be opened.
pub fn tensors(dir: &Path) -> Result<Vec<(ParamSpec, Init)>, OpenError> {
    let model = open_model(dir, ModelOptions::new(kernels::DType::BF16))?;
    let params = model.spec().params.iter();
    let of = |param: &ParamSpec| (param.clone(), rule(param, model.start_values(param)));
    Ok(params.map(of).collect())
}

/// Factory of the generators ([`Values`]) of tensors' random values; tensors of equal distribution share a
/// table of quantiles.
#[derive(Debug, Default)]
pub struct Generators {
    tables: BTreeMap<(u8, u32), Arc<[u16]>>,
}

impl Generators {
    /// Returns the generator of the tensor `name` for the seed `seed`, with values distributed as `init`.
    pub fn of(&mut self, seed: u64, name: &str, init: Init) -> Values {
        let key = match init {
            Init::Constant(value) => (0, value.to_bits()),
            Init::Normal(std) => (1, std.to_bits()),
            Init::Uniform(half) => (2, half.to_bits()),
        };
        let table = self.tables.entry(key).or_insert_with(|| table(init));
        Values {
            key: RandomStream::new(seed, name).bits(0, 0),
            table: table.clone(),
        }
    }
}

/// Number of equally likely values by which a distribution is represented.
const VALUES: usize = 1 << 16;
/// Number of elements that one 64-bit hash serves.
const LANES: usize = 4;
/// Number of elements that one thread computes at once.
const PIECE: usize = 1 << 15;
/// Step of the numeric integral over the normal density.
const STEP: f64 = 1e-4;

/// Generator of the random values of one tensor.
#[derive(Debug)]
pub struct Values {
    key: u64,
    table: Arc<[u16]>,
}

impl Values {
    /// Writes consecutive elements of the tensor into `out`, beginning with element `first`, as bits of bf16.
    pub fn fill(&self, first: u64, out: &mut [u16]) {
        self.fill_as(first, out, |bits| bits);
    }

    /// As [`Values::fill`], but stores `convert(bits)` for each element, whose bf16 bit pattern is `bits`.
    pub fn fill_as<T: Copy + Send>(
        &self,
        first: u64,
        out: &mut [T],
        convert: impl Fn(u16) -> T + Sync,
    ) {
        if let [value] = self.table[..] {
            out.fill(convert(value));
            return;
        }
        // The rest of a block that began before.
        let head = (first.next_multiple_of(LANES as u64) - first) as usize;
        let (head, whole) = out.split_at_mut(head.min(out.len()));
        let begun = mix(self.key, first / LANES as u64);
        for (value, lane) in head.iter_mut().zip(first % LANES as u64..) {
            *value = convert(self.table[(begun >> (16 * lane) & 0xffff) as usize]);
        }
        let first = first + head.len() as u64;
        let pieces = whole.par_chunks_mut(PIECE).enumerate();
        pieces.for_each(|(piece, out)| {
            let start = (first + (piece * PIECE) as u64) / LANES as u64;
            for (lanes, block) in out.chunks_mut(LANES).zip(start..) {
                let mut hash = mix(self.key, block);
                for value in lanes {
                    *value = convert(self.table[(hash & 0xffff) as usize]);
                    hash >>= 16;
                }
            }
        });
    }
}

/// The values of a distribution by quantile, as bf16 bits.
fn table(init: Init) -> Arc<[u16]> {
    let bits = |value: f32| bf16::from_f32(value).to_bits();
    match init {
        // A table of one value is what all hashes find.
        Init::Constant(value) => [bits(value)].into(),
        Init::Normal(std) => NORMAL.iter().map(|quantile| bits(std * quantile)).collect(),
        Init::Uniform(half) => (0..VALUES)
            .map(|k| bits(half * (2.0 * middle(k) - 1.0) as f32))
            .collect(),
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

    fn values(seed: u64, name: &str, init: Init) -> Values {
        Generators::default().of(seed, name, init)
    }

    fn draw(values: &Values, first: u64, count: usize) -> Vec<f32> {
        let mut bits = vec![0; count];
        values.fill(first, &mut bits);
        bits.into_iter()
            .map(|b| bf16::from_bits(b).to_f32())
            .collect()
    }

    #[test]
    fn seeded_values_depend_on_seed_and_name_but_not_on_the_split() {
        let normal = values(1, "a", Init::Normal(0.02));
        let whole = draw(&normal, 0, 3 * PIECE + 5);
        for (from, count) in [
            (8, 1000),
            (1, 1),
            (5, 2),
            (6, 2 * PIECE + 3),
            (2 * PIECE + 4, PIECE),
        ] {
            assert_eq!(draw(&normal, from as u64, count), whole[from..][..count]);
        }
        for other in [
            values(2, "a", Init::Normal(0.02)),
            values(1, "b", Init::Normal(0.02)),
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
    fn seeded_values_have_the_moments_of_their_distribution() {
        let n = 1 << 20;
        let moments = |init: Init| {
            let values = draw(&values(7, "moments", init), 0, n);
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
        assert_eq!(draw(&values(7, "c", Init::Constant(1.0)), 0, 9), [1.0; 9]);
    }

    #[test]
    fn normal_quantiles_match_published_values() {
        // Probabilities 0.975 and 0.5 + 1/65536 / 2.
        let at = |p: f64| NORMAL[(p * VALUES as f64) as usize];
        assert!((at(0.975) - 1.959_964).abs() < 5e-4, "{}", at(0.975));
        assert!((at(0.841_344_746) - 1.0).abs() < 1e-4);
        assert!(NORMAL.is_sorted() && NORMAL[VALUES - 1] < 4.5);
    }
}

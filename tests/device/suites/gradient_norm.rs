//! The sum of squares of gradients beside exact arithmetic, and beside sums in f64, which it replaced.
//!
//! `cargo test -p device_tests --test gradient_norm -- --nocapture` prints the table of
//! `docs/decisions/54-two-level-gradient-norm.md`. CPU and GPU have equal bits, so the CPU's code is measured.

use device_tests::tolerance;
use half::{bf16, f16};
use optim::clip::{NORM_BLOCK_ELEMS, sum_of_squares};
use optim::rng::RandomStream;

/// Exponent of the unit of an [`Exact`] number. The square of the smallest f32 is 2^-298, and the last bit of an f64 of
/// that size 2^-350.
const UNIT: i32 = -384;

/// Number of 64-bit words: up to 2^320, above the sum of 2^32 squares of the largest f32.
const WORDS: usize = 11;

/// Exact number that is not negative, in words from the lowest on.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Exact([u64; WORDS]);

impl Exact {
    /// Adds `mantissa * 2^exponent`.
    fn add(&mut self, mantissa: u64, exponent: i32) {
        let at = usize::try_from(exponent - UNIT).expect("an exponent above the unit's");
        let shifted = u128::from(mantissa) << (at % 64);
        let (mut word, mut carry) = (at / 64, shifted);
        while carry != 0 {
            carry += u128::from(self.0[word]);
            self.0[word] = carry as u64;
            (carry, word) = (carry >> 64, word + 1);
        }
    }

    fn of(value: f64) -> Self {
        let bits = value.to_bits();
        let mut exact = Self([0; WORDS]);
        if value != 0.0 {
            let exponent = (bits >> 52) as i32;
            assert!(exponent > 0, "a normal number");
            exact.add(bits & ((1 << 52) - 1) | 1 << 52, exponent - 1075);
        }
        exact
    }

    fn squares(of: &[f32]) -> Self {
        let mut sum = Self([0; WORDS]);
        for x in of {
            let (bits, exponent) = (x.to_bits(), (x.to_bits() >> 23 & 255) as i32);
            let mantissa = u64::from(bits & 0x7f_ffff | if exponent > 0 { 1 << 23 } else { 0 });
            sum.add(mantissa * mantissa, 2 * (exponent.max(1) - 150));
        }
        sum
    }

    /// Rounded to f64, in units.
    fn rounded(&self) -> f64 {
        let words = self.0.iter().rev();
        words.fold(0.0, |sum, word| sum * 2f64.powi(64) + *word as f64)
    }

    /// Magnitude of the difference, in units.
    fn distance(&self, other: &Self) -> f64 {
        let mut difference = Self([0; WORDS]);
        let mut borrow = false;
        let larger = self.0.iter().rev().cmp(other.0.iter().rev()).is_ge();
        let (a, b) = if larger { (self, other) } else { (other, self) };
        for i in 0..WORDS {
            let (word, first) = a.0[i].overflowing_sub(b.0[i]);
            let (word, second) = word.overflowing_sub(borrow.into());
            difference.0[i] = word;
            borrow = first || second;
        }
        difference.rounded()
    }

    /// Relative error of `value`; 0 if both are 0.
    fn error_of(&self, value: f64) -> f64 {
        match self.distance(&Self::of(value)) {
            0.0 => 0.0,
            distance => distance / self.rounded(),
        }
    }
}

/// Sum of squares in f64, in the order that Tessera had before: 256 lanes and 64 quads a block, then blocks.
fn in_f64(values: &[f32]) -> f64 {
    fn halved(mut values: Vec<f64>) -> f64 {
        while values.len() > 1 {
            let half = values.len() / 2;
            values = (0..half).map(|k| values[k] + values[k + half]).collect();
        }
        values[0]
    }
    let mut blocks = vec![0.0; 1024];
    for (b, block) in values.chunks(NORM_BLOCK_ELEMS).enumerate() {
        let mut lanes = [0f64; 256];
        for (i, v) in block.iter().enumerate() {
            lanes[i % 256] += f64::from(*v) * f64::from(*v);
        }
        let quads = lanes.chunks(4).map(|q| (q[0] + q[1]) + (q[2] + q[3]));
        blocks[b % 1024] += halved(quads.collect());
    }
    halved(blocks)
}

/// Gradients of one kind: name, and the value from a normally distributed number, its index and the draw.
type Kind = (&'static str, fn(f32, u64, u64) -> f32);

/// Power of two of a size that the draw chooses, from 2^low to below 2^high.
fn power(draw: u64, low: i32, high: i32) -> f32 {
    2f32.powi(low + (draw.wrapping_mul(0x9e37_79b9) % (high - low) as u64) as i32)
}

const KINDS: [Kind; 9] = [
    ("f32, normal, 2^-30 to 1", |x, _, draw| {
        x * power(draw, -30, 1)
    }),
    ("bf16, normal, 2^-30 to 1", |x, _, draw| {
        bf16::from_f32(x * power(draw, -30, 1)).to_f32()
    }),
    ("f16, normal, 2^-16 to 2^8", |x, _, draw| {
        f16::from_f32(x * power(draw, -16, 8)).to_f32()
    }),
    ("equal elements", |_, _, draw| 1.0 + draw as f32 / 1024.0),
    ("nine orders of magnitude in a block", |x, i, draw| {
        x * power(i + 7 * draw, -30, 0)
    }),
    (
        "one element in 4096 is 2^24 times the rest",
        |x, i, draw| {
            if i % 4096 == draw { 2f32.powi(24) } else { x }
        },
    ),
    (
        "squares below the smallest f32 (2^-149 to 2^-75)",
        |x, _, draw| x * power(draw, -149, -75),
    ),
    ("around the limit 2^-40", |x, _, draw| {
        x * power(draw, -43, -39)
    }),
    (
        "squares above the largest f32 (2^64 to 2^125)",
        |x, _, draw| x.clamp(-4.0, 4.0) * power(draw, 64, 126),
    ),
];

#[test]
fn the_sum_of_squares_is_within_its_bound_of_the_exact_one() {
    println!("| gradients | f64 | two f32 |");
    let mut largest = 0f64;
    for (name, value) in KINDS {
        let mut worst = [0f64; 2];
        for draw in 0..60 {
            let stream = RandomStream::new(draw, name);
            let n = [1, 300, 4096, 5000, 3 * 4096][draw as usize % 5];
            let values = (0..n).map(|i| value(stream.normal(i), i, draw));
            let values: Vec<f32> = values.collect();
            let exact = Exact::squares(&values);
            for (worst, sum) in worst
                .iter_mut()
                .zip([in_f64(&values), sum_of_squares(&values)])
            {
                *worst = worst.max(exact.error_of(sum));
            }
            let bound = tolerance::square_sum(values.len().div_ceil(NORM_BLOCK_ELEMS));
            assert!(worst[1] <= bound, "{name}, {n} elements: {:e}", worst[1]);
        }
        println!("| {name} | {:.1e} | {:.1e} |", worst[0], worst[1]);
        largest = largest.max(worst[1]);
    }
    // The reference is able to see errors of this size, and the bound is not out of all proportion.
    assert!(
        largest > 1e-16 && largest > tolerance::square_sum(1) * 1e-4,
        "{largest:e}"
    );
}

/// A clip factor is an f32, which such an error leaves as it is in nearly all cases.
#[test]
fn the_bound_is_far_below_half_an_ulp_of_a_clip_factor() {
    assert!(tolerance::square_sum(1 << 20) < 2f64.powi(-24) / 1000.0);
}

#[test]
fn exact_numbers_know_their_neighbours() {
    for x in [1.5, 2f64.powi(-298), 2f64.powi(255), f64::from(0.1f32)] {
        let exact = Exact::of(x);
        assert!(exact.error_of(x) == 0.0);
        let error = exact.error_of(x.next_up());
        assert!((0.9e-16..2.3e-16).contains(&error), "{x:e}: {error:e}");
    }
    let squares = Exact::squares(&[3.0, -4.0, f32::from_bits(1)]);
    assert!(squares.error_of(25.0) > 0.0 && squares.error_of(25.0) < 1e-80);
}

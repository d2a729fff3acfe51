//! Counter-based random numbers: each value is a function of (seed, stream, position) alone. The order of calls has
//! no effect, so results do not depend on world size, ZeRO stage, split into chunks or thread.
//!
//! The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3").

use std::f64::consts::TAU;

use half::bf16;
use kernels::Float;
pub use kernels::random::philox4x32;

/// Named stream of random numbers from the counter-based generator Philox. Any position can be read directly.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RandomStream {
    key: [u32; 2],
}

impl RandomStream {
    /// Creates the stream `name` for a run's seed. Streams of different names or seeds are independent.
    #[must_use]
    pub fn new(seed: u64, name: &str) -> Self {
        let hash = split(fnv1a64(name.as_bytes()));
        let length = split(name.len() as u64);
        let block = philox4x32([hash[0], hash[1], length[0], length[1]], split(seed));
        Self {
            key: [block[0], block[1]],
        }
    }

    /// 128 random bits at the position (`major`, `minor`) of the stream, e.g. (step, element).
    #[must_use]
    pub fn block(self, major: u64, minor: u64) -> [u32; 4] {
        let ([a, b], [c, d]) = (split(minor), split(major));
        philox4x32([a, b, c, d], self.key)
    }

    /// 64 random bits at the position (`major`, `minor`) of the stream, e.g. (step, element).
    #[must_use]
    pub fn bits(self, major: u64, minor: u64) -> u64 {
        let block = self.block(major, minor);
        join(block[0], block[1])
    }

    /// Uniform random number in `0 <= x < 1` at the position `element` of the stream, with 24 random bits.
    #[must_use]
    pub fn uniform(self, element: u64) -> f32 {
        (self.block(0, element)[0] >> 8) as f32 * (1.0 / (1u32 << 24) as f32)
    }

    /// Standard normal random number at the position `element` of the stream (Box-Muller transform).
    #[must_use]
    pub fn normal(self, element: u64) -> f32 {
        let [a, b, c, d] = self.block(0, element);
        let unit = |bits: u64| (bits >> 11) as f64 * (1.0 / (1u64 << 53) as f64);
        // 1 - u is in (0, 1], so the logarithm is finite.
        let radius = (-2.0 * (1.0 - unit(join(a, b))).ln()).sqrt();
        (radius * (TAU * unit(join(c, d))).cos()) as f32
    }

    /// Philox key of the stream. With it another implementation, e.g. a GPU kernel, can compute
    /// [`RandomStream::block`].
    #[inline(always)]
    #[must_use]
    pub fn key(self) -> [u32; 2] {
        self.key
    }
}

/// Stochastic rounding to `bf16`: rounds away from zero with a probability equal to the fraction that truncation
/// would drop. It is unbiased when `random` is uniform. Representable values, infinities and NaN stay as they are.
/// Finite values never become infinite.
#[inline(always)]
#[must_use]
pub fn stochastic_round_bf16(value: f32, random: u16) -> bf16 {
    const MAX_FINITE: u32 = 0x7f7f;
    let bits = value.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    let rounded = ((magnitude + u32::from(random)) >> 16).min(MAX_FINITE);
    let stochastic = bf16::from_bits(((bits >> 16) & 0x8000) as u16 | rounded as u16);
    if magnitude < 0x7f80_0000 {
        stochastic
    } else {
        <bf16 as Float>::from_f32(value)
    }
}

const fn split(value: u64) -> [u32; 2] {
    [value as u32, (value >> 32) as u32]
}

const fn join(low: u32, high: u32) -> u64 {
    low as u64 | (high as u64) << 32
}

fn fnv1a64(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_matches_published_vectors() {
        let cases = [
            (
                [0; 4],
                [0; 2],
                [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8],
            ),
            (
                [!0; 4],
                [!0; 2],
                [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd],
            ),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, expected) in cases {
            assert_eq!(philox4x32(counter, key), expected);
        }
    }

    #[test]
    fn streams_differ_by_seed_name_and_position() {
        let base = RandomStream::new(1, "a");
        assert_ne!(base, RandomStream::new(2, "a"));
        assert_ne!(base, RandomStream::new(1, "b"));
        assert_ne!(base.bits(0, 1), base.bits(1, 0));
        assert_eq!(base.bits(5, 7), RandomStream::new(1, "a").bits(5, 7));
    }

    #[test]
    fn uniform_and_normal_have_their_moments() {
        let stream = RandomStream::new(7, "moments");
        let n = 200_000u64;
        let moments = |draw: &dyn Fn(u64) -> f32| {
            let (mut sum, mut squares) = (0.0, 0.0);
            for i in 0..n {
                let x = f64::from(draw(i));
                (sum, squares) = (sum + x, squares + x * x);
            }
            let mean = sum / n as f64;
            (mean, squares / n as f64 - mean * mean)
        };
        // Bounds are four standard errors of each moment.
        let (mean, variance) = moments(&|i| stream.uniform(i));
        assert!((mean - 0.5).abs() < 0.0026 && (variance - 1.0 / 12.0).abs() < 0.0008);
        let (mean, variance) = moments(&|i| stream.normal(i));
        assert!(mean.abs() < 0.009 && (variance - 1.0).abs() < 0.013);
    }

    #[test]
    fn stochastic_rounding_is_unbiased() {
        for value in [1.000_123_f32, -3.017, 1e-30, -7.3e20, 1e-41] {
            // Each random value occurs once, so the mean over all 65536 is exact but for the f64 sum.
            let sum: f64 = (0..=u16::MAX)
                .map(|r| f64::from(stochastic_round_bf16(value, r).to_f32()))
                .sum();
            let error = (sum / 65536.0 - f64::from(value)).abs();
            assert!(error <= f64::from(value).abs() * 1e-9, "{value}: {error}");
        }
    }

    #[test]
    fn stochastic_rounding_keeps_representable_and_special_values() {
        for high in 0..=u16::MAX {
            let exact = bf16::from_bits(high);
            for random in [0, 1, 0x8000, u16::MAX] {
                let rounded = stochastic_round_bf16(exact.to_f32(), random);
                assert!(rounded.to_bits() == high || (rounded.is_nan() && exact.is_nan()));
            }
        }
        let largest = stochastic_round_bf16(f32::MAX, u16::MAX);
        assert_eq!(largest, bf16::MAX);
        assert_eq!(stochastic_round_bf16(f32::MIN, u16::MAX), bf16::MIN);
        assert!(stochastic_round_bf16(f32::from_bits(0x7f80_0001), 0).is_nan());
    }
}

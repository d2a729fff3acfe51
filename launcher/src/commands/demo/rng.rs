//! Random numbers for the demo's images: splitmix64, the same on every machine.

/// Deterministic pseudo-random number generator (splitmix64). The field is its state.
#[derive(Debug, Clone)]
pub(super) struct Rng(u64);

impl Rng {
    /// Generator for item `index` of the data set with seed `seed`. Its sequence depends only on these two numbers.
    pub(super) fn new(seed: u64, index: u64) -> Self {
        let mut rng = Self(seed);
        let start = rng
            .next()
            .wrapping_add(index.wrapping_mul(0xd134_2543_de82_ef95));
        Self(start)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let value = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        value ^ (value >> 31)
    }

    /// Next random integer in `0..end`. The bias is below 2⁻³² for the small values of `end` used here.
    pub(super) fn below(&mut self, end: u32) -> u32 {
        (((self.next() >> 32) * u64::from(end)) >> 32) as u32
    }

    /// Next random number, uniformly distributed in `low..high`.
    pub(super) fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * ((self.next() >> 11) as f64 / (1u64 << 53) as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_streams_are_reproducible_and_differ() {
        let mut rng = Rng::new(1, 0);
        let mut other = Rng::new(1, 1);
        assert_ne!(rng.clone().next(), other.next());
        let mut counts = [0; 8];
        for _ in 0..8000 {
            counts[rng.below(8) as usize] += 1;
            let x = rng.between(-2.0, 2.0);
            assert!((-2.0..2.0).contains(&x));
        }
        assert!(
            counts.iter().all(|&count| (880..1120).contains(&count)),
            "{counts:?}"
        );
    }
}

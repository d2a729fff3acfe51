//! Random bits for stochastic rounding: a keyed hash of the element's global index.
//!
//! Elements `2k` and `2k + 1` of a run share three 32-bit words, one for each number that an update stores. The low
//! half of a word rounds the even element, the high half the odd one. A word is a function of (seed, stream, time,
//! element) alone, where time is e.g. the step number. So rounding does not depend on split, thread, rank or tier.
//!
//! Philox makes a 128-bit key for each page: (stream, time, 2^33 elements). Within a page the low 32 bits of the
//! pair's index pass two rounds of multiply and xor-shift, ten vector operations that the three words share. Then
//! each word adds its own part of the key, multiplies and shifts once more, five operations each. Rounding needs bits
//! that are uniform and independent of their neighbors, not secrecy.
//!
//! The tests of this module check 2^20 consecutive pairs, for random and extreme keys, at four to six standard
//! deviations:
//!
//! - Each half word is uniform over its 65536 values (chi-square) and in each of its bits.
//! - Half words are uncorrelated with those of the elements at distances 1 to 4096.
//! - Pairs of words are jointly uniform in their six high and six low bits (chi-square over 4096 cells). The pairs
//!   are the two halves of a word, the three words of a pair, and words of different steps, seeds and streams.

use crate::rng::RandomStream;

/// Base-2 logarithm of the elements per page.
const PAGE_BITS: u32 = 33;
/// Multipliers of the two rounds that the three words share.
pub(crate) const SHARED: [u32; 2] = [0x7feb_352d, 0x846c_a68b];
/// Multiplier of each word's own round.
const WORDS: [u32; 3] = [0x9e37_79b1, 0x85eb_ca6b, 0xc2b2_ae35];

/// Key of one page. With the low 32 bits of a pair's index it determines the pair's words.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PageKey([u32; 4]);

impl PageKey {
    /// Key of the page of `element` at `time`.
    pub(crate) fn new(stream: RandomStream, time: u64, element: u64) -> Self {
        Self(stream.block(time, element >> PAGE_BITS))
    }

    /// Elements from `element` to the end of its page.
    pub(crate) fn elems_left(element: u64) -> u64 {
        (1 << PAGE_BITS) - (element & ((1 << PAGE_BITS) - 1))
    }

    /// Addend to the pair's index, before the shared rounds.
    #[inline(always)]
    pub(crate) fn first(self) -> u32 {
        self.0[0]
    }

    /// Addend and multiplier of word `word`, before its last xor-shift by 17 bits.
    #[inline(always)]
    pub(crate) fn word(self, word: usize) -> (u32, u32) {
        (self.0[1 + word], WORDS[word])
    }

    /// The three words of a pair.
    #[inline(always)]
    pub(crate) fn words(self, pair: u32) -> [u32; 3] {
        let mut x = pair.wrapping_add(self.first());
        x = (x ^ x >> 16).wrapping_mul(SHARED[0]);
        x = (x ^ x >> 15).wrapping_mul(SHARED[1]);
        x ^= x >> 16;
        std::array::from_fn(|word| {
            let (add, multiplier) = self.word(word);
            let y = x.wrapping_add(add).wrapping_mul(multiplier);
            y ^ (y >> 17)
        })
    }

    /// The three 16-bit halves that round one element.
    #[inline(always)]
    pub(crate) fn halves(self, element: u64) -> [u16; 3] {
        let shift = 16 * (element % 2) as u32;
        self.words((element / 2) as u32)
            .map(|word| (word >> shift) as u16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAIRS: usize = 1 << 20;

    fn keys() -> Vec<PageKey> {
        let random = (0..3u64).map(|t| PageKey::new(RandomStream::new(9, "rounding test"), t, 0));
        let extreme = [PageKey([0; 4]), PageKey([!0; 4]), PageKey([0, 1, 2, 3])];
        random.chain(extreme).collect()
    }

    /// The six half words of each of `PAIRS` consecutive pairs, as six lists.
    fn halves(key: PageKey, first: u32) -> [Vec<u16>; 6] {
        let mut halves: [Vec<u16>; 6] = Default::default();
        for pair in 0..PAIRS as u32 {
            let words = key.words(first.wrapping_add(pair));
            for (i, halves) in halves.iter_mut().enumerate() {
                halves.push((words[i / 2] >> (16 * (i % 2))) as u16);
            }
        }
        halves
    }

    /// Distance of a chi-square statistic from its mean, in standard deviations.
    fn chi_square(cells: usize, draws: impl Iterator<Item = usize>) -> f64 {
        let (mut counts, mut n) = (vec![0u32; cells], 0.0);
        for cell in draws {
            counts[cell] += 1;
            n += 1.0;
        }
        let expected = n / cells as f64;
        let sum: f64 = counts
            .iter()
            .map(|&count| (f64::from(count) - expected).powi(2) / expected)
            .sum();
        let degrees = (cells - 1) as f64;
        (sum - degrees) / (2.0 * degrees).sqrt()
    }

    /// Distance of the mean product of centered half words from zero, in standard deviations.
    fn correlation(a: &[u16], b: &[u16]) -> f64 {
        let centred = |x: u16| f64::from(x) - 32767.5;
        let sum: f64 = a
            .iter()
            .zip(b)
            .map(|(&a, &b)| centred(a) * centred(b))
            .sum();
        let variance = (65536.0f64.powi(2) - 1.0) / 12.0;
        let n = a.len().min(b.len()) as f64;
        sum / variance / n.sqrt()
    }

    fn joint(a: &[u16], b: &[u16]) -> [f64; 2] {
        [10, 0].map(|shift| {
            let bits = move |x: u16| usize::from(x >> shift) % 64;
            chi_square(4096, a.iter().zip(b).map(|(&a, &b)| bits(a) * 64 + bits(b)))
        })
    }

    #[test]
    fn halves_are_uniform_and_their_mean_is_unbiased() {
        for key in keys() {
            for first in [0, 0xffff_f000] {
                for half in halves(key, first) {
                    let z = chi_square(65536, half.iter().map(|&x| x.into()));
                    assert!(z.abs() < 5.0, "{key:?}: {z}");
                    let mean = half.iter().map(|&x| f64::from(x)).sum::<f64>() / PAIRS as f64;
                    let z = (mean - 32767.5) * (12.0 * PAIRS as f64).sqrt() / 65536.0;
                    assert!(z.abs() < 4.5, "{key:?}: {z}");
                    for bit in 0..16 {
                        let ones = half.iter().filter(|&&x| x >> bit & 1 == 1).count() as f64;
                        let z = (ones - PAIRS as f64 / 2.0) * 2.0 / (PAIRS as f64).sqrt();
                        assert!(z.abs() < 5.0, "{key:?} bit {bit}: {z}");
                    }
                }
            }
        }
    }

    #[test]
    fn random_halves_of_nearby_elements_are_uncorrelated() {
        for key in keys() {
            let halves = halves(key, 77);
            for half in &halves {
                for lag in [1, 2, 3, 4, 8, 16, 64, 256, 1024, 4096] {
                    let z = correlation(half, &half[lag..]);
                    assert!(z.abs() < 5.0, "{key:?} lag {lag}: {z}");
                }
                for z in joint(half, &half[1..]) {
                    assert!(z.abs() < 6.0, "{key:?}: {z}");
                }
            }
        }
    }

    #[test]
    fn random_halves_of_other_words_steps_seeds_and_streams_are_uncorrelated() {
        let key = |seed, name, time| PageKey::new(RandomStream::new(seed, name), time, 0);
        let base = key(1, "a", 10);
        let own = halves(base, 0);
        for a in 0..6 {
            for b in 0..a {
                let z = correlation(&own[a], &own[b]);
                assert!(z.abs() < 5.0, "halves {a} and {b}: {z}");
                for z in joint(&own[a], &own[b]) {
                    assert!(z.abs() < 6.0, "halves {a} and {b}: {z}");
                }
            }
        }
        let next_page = PageKey::new(RandomStream::new(1, "a"), 10, 1 << PAGE_BITS);
        for other in [key(1, "a", 11), key(2, "a", 10), key(1, "b", 10), next_page] {
            for (own, other) in own.iter().zip(&halves(other, 0)) {
                let z = correlation(own, other);
                assert!(z.abs() < 5.0, "{z}");
                for z in joint(own, other) {
                    assert!(z.abs() < 6.0, "{z}");
                }
            }
        }
    }

    #[test]
    fn rounding_words_match_the_documented_formula() {
        // The GPU kernel computes the same words. A change here changes the results of every pure bf16 run.
        let key = PageKey([1, 2, 3, 4]);
        let (x, mut h) = (5u32, 6u32);
        h ^= h >> 16;
        h = h.wrapping_mul(0x7feb_352d);
        h ^= h >> 15;
        h = h.wrapping_mul(0x846c_a68b);
        h ^= h >> 16;
        let last = |y: u32| y ^ (y >> 17);
        let expected = [
            last(h.wrapping_add(2).wrapping_mul(0x9e37_79b1)),
            last(h.wrapping_add(3).wrapping_mul(0x85eb_ca6b)),
            last(h.wrapping_add(4).wrapping_mul(0xc2b2_ae35)),
        ];
        assert_eq!(key.words(x), expected);
        assert_eq!(key.halves(10), expected.map(|word| word as u16));
        assert_eq!(key.halves(11), expected.map(|word| (word >> 16) as u16));
        assert_eq!(PageKey::elems_left((1 << PAGE_BITS) - 3), 3);
        assert_eq!(PageKey::elems_left(1 << PAGE_BITS), 1 << PAGE_BITS);
    }
}

//! Gradient accumulation in `bf16` with stochastic rounding.

use half::bf16;
use kernels::RoundingCounter;

use crate::adamw::windows::{LARGE, Mode, Number};
use crate::lanes::{Lanes, Loop, Simd};
use crate::rng::RandomStream;
use crate::rounding::PageKey;

/// Position of a range of bf16 gradient sums in the random stream that rounds them. Elements `2k` and `2k +
/// 1` share random words; each is rounded by one half of word 0, see [`crate::rounding`].
#[derive(Clone, Copy, Debug)]
pub struct RoundingPosition {
    /// Random stream from which the keys of stochastic rounding come.
    pub stream: RandomStream,
    /// Index of the addition, e.g. of the micro-batch in the run. No two additions to one element may have
    /// the same index.
    pub time: u64,
    /// Global index of the first element of the range: its offset in the concatenation of all parameters
    /// without padding.
    pub first_element: u64,
}

impl RoundingPosition {
    /// The same position as an argument of GPU kernels.
    #[must_use]
    pub fn on_device(self) -> RoundingCounter {
        RoundingCounter {
            key: self.stream.key(),
            time: self.time,
            first_element: self.first_element,
        }
    }
}

/// Adds `values` to the gradient sums `sums` element by element, and rounds each result to bf16
/// stochastically. `place` is the position of the first of them. The result depends only on the element's
/// value, its sum, and its position in the random stream.
///
/// # Panics
/// When the lengths differ.
pub fn add_rounded(place: RoundingPosition, sums: &mut [bf16], values: &[f32]) {
    add_with(Simd::detect(), place, sums, values);
}

fn add_with(simd: Simd, place: RoundingPosition, sums: &mut [bf16], values: &[f32]) {
    assert_eq!(sums.len(), values.len(), "a value for every sum");
    let page = PageKey::elems_left(place.first_element);
    let mid = usize::try_from(page).map_or(sums.len(), |page| page.min(sums.len()));
    let (sums, rest) = sums.split_at_mut(mid);
    let (values, rest_values) = values.split_at(mid);
    simd.run(Add {
        place,
        sums,
        values,
    });
    if !rest.is_empty() {
        let first_element = place.first_element + page;
        let place = RoundingPosition {
            first_element,
            ..place
        };
        add_with(simd, place, rest, rest_values);
    }
}

/// One addition within one page of keys.
struct Add<'a> {
    place: RoundingPosition,
    sums: &'a mut [bf16],
    values: &'a [f32],
}

impl Add<'_> {
    fn scalar(&mut self, key: PageKey, range: std::ops::Range<usize>) {
        for i in range {
            let [random, ..] = key.halves(self.place.first_element + i as u64);
            let sum = self.sums[i].get() + self.values[i];
            self.sums[i].put(sum, Mode::Stochastic, random);
        }
    }
}

impl Loop for Add<'_> {
    #[inline(always)]
    fn run<L: Lanes>(mut self, l: L) {
        let RoundingPosition {
            stream,
            time,
            first_element,
        } = self.place;
        let key = PageKey::new(stream, time, first_element);
        let n = self.sums.len();
        let mut i = n.min((first_element % 2) as usize);
        self.scalar(key, 0..i);
        while i + L::ITEM <= n {
            let own = i..i + L::ITEM;
            let [a, b] = bf16::load::<L, false>(l, &self.sums[own.clone()]);
            let [c, d] = f32::load::<L, false>(l, &self.values[own.clone()]);
            let sum = [l.add(a, c), l.add(b, d)];
            let pair = ((first_element + i as u64) / 2) as u32;
            let random = l.word(key, 0, l.pairs(key, pair));
            let magnitude = l.u(0x7fff_ffff);
            let largest = l.max_u(
                l.and(l.bits(sum[0]), magnitude),
                l.and(l.bits(sum[1]), magnitude),
            );
            if l.all_below(largest, LARGE) {
                let packed = bf16::pack::<L, false>(l, sum, Some(random));
                bf16::store(l, &mut self.sums[own], packed);
            } else {
                self.scalar(key, own);
            }
            i += L::ITEM;
        }
        self.scalar(key, i..n);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::stochastic_round_bf16;

    #[test]
    fn every_instruction_set_adds_as_single_elements_do() {
        let n = 777;
        let stream = RandomStream::new(4, "sums");
        let mut values: Vec<f32> = (0..n).map(|i| stream.normal(i)).collect();
        values[100] = f32::MAX;
        values[300] = f32::NAN;
        values[301] = f32::NEG_INFINITY;
        let old: Vec<bf16> = (0..n)
            .map(|i| bf16::from_f32(stream.normal(n + i)))
            .collect();
        for first_element in [0, 13, (1 << 33) - 401] {
            let place = RoundingPosition {
                stream,
                time: 3,
                first_element,
            };
            let expected: Vec<u16> = (first_element..)
                .zip(old.iter().zip(&values))
                .map(|(element, (old, value))| {
                    let [random, ..] = PageKey::new(stream, 3, element).halves(element);
                    stochastic_round_bf16(old.to_f32() + value, random).to_bits()
                })
                .collect();
            for simd in Simd::available() {
                let mut sums = old.clone();
                add_with(simd, place, &mut sums, &values);
                let bits: Vec<u16> = sums.iter().map(|x| x.to_bits()).collect();
                assert_eq!(bits, expected, "{simd:?} {first_element}");
            }
        }
    }
}

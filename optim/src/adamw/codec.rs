//! Codes of 8 bits: the nearest value of a [dynamic map](kernels::dynamic_map), for blocks of moments.
//!
//! [`search`] is the definition. A [`Codec`] finds the same codes by arithmetic where no value of a block is close to a
//! threshold between two codes, else by a table.

use std::sync::LazyLock;

use kernels::dynamic_map;

use super::blockwise::BLOCK_ELEMS;
use crate::lanes::{Lanes, Portable};

/// Smallest magnitude with a bucket of its own, as bits: 2^-23. Smaller ones are counted to its bucket, because every
/// threshold between two codes is larger.
const LEAST: u32 = 0x3400_0000;
/// Entries of a table.
const ENTRIES: usize = 1 << 12;
/// Codes of 0 in the maps of both moments.
const ZEROS: [u8; 2] = [127, 0];
/// Numbers of the longest vector, or more.
const MOST_LANES: usize = 32;
/// Bits of a number without its sign.
pub(super) const MAGNITUDE: u32 = 0x7fff_ffff;

/// Numbers of one block.
pub(super) type Values = [f32; BLOCK_ELEMS];

/// Tables of a map: its values, and the code nearest to a number in one look-up.
///
/// A bucket is all numbers of one sign with the same bits above the lowest [`Codec::LOW_BITS`]. It contains at most one
/// threshold between two codes: the map of signed numbers has half as many codes an octave as the other one, so its
/// buckets are twice as long. Both tables have the size of half an L1 cache.
pub(super) struct Codec<const SIGNED: bool> {
    map: &'static [f32; 256],
    /// Bits of the map's values.
    values: [u32; 256],
    /// One entry for each sign and bucket. The bits above the low ones are a code. The low bits are chosen so that
    /// adding those of the number overflows into the code exactly if the number is beyond the threshold. (For negative
    /// numbers the lower bits are inverted first.)
    entries: [u32; ENTRIES],
    classes: Classes,
}

pub(super) static FIRST_MOMENT: LazyLock<Codec<true>> =
    LazyLock::new(|| Codec::new(&dynamic_map::SIGNED));
pub(super) static SECOND_MOMENT: LazyLock<Codec<false>> =
    LazyLock::new(|| Codec::new(&dynamic_map::UNSIGNED));

impl<const SIGNED: bool> Codec<SIGNED> {
    const LOW_BITS: u32 = if SIGNED { 17 } else { 16 };
    const LOW: u32 = (1 << Self::LOW_BITS) - 1;

    pub(super) fn new(map: &'static [f32; 256]) -> Self {
        let mut entries = [0; ENTRIES];
        let signs: &[u32] = if SIGNED { &[0, 1] } else { &[0] };
        for sign in signs {
            let code = |bits: u32| u32::from(search(map, f32::from_bits(sign << 31 | bits)));
            for start in (LEAST..=1f32.to_bits()).step_by(1 << Self::LOW_BITS) {
                let nearest = code(start);
                // Number of low bits of the bucket with the code of its first number.
                let (mut known, mut end) = (1, 1 << Self::LOW_BITS);
                while known < end {
                    let middle = (known + end) / 2;
                    if code(start | middle) == nearest {
                        known = middle + 1;
                    } else {
                        end = middle;
                    }
                }
                let beyond = (1 << Self::LOW_BITS) - known;
                let [at, _] = Self::locate(Portable, [f32::from_bits(sign << 31 | start); 8]);
                entries[at[0] as usize] = match sign {
                    0 => (nearest << Self::LOW_BITS) + beyond,
                    _ => (nearest << Self::LOW_BITS).wrapping_sub(beyond),
                };
            }
        }
        let zero = if SIGNED { ZEROS[0] } else { ZEROS[1] };
        Self {
            map,
            values: map.map(f32::to_bits),
            entries,
            classes: Classes::new(&map[usize::from(zero)..], SIGNED),
        }
    }

    /// Index of the entries of numbers, and what is added to them. Magnitudes must be at most 1. Without signs, negative
    /// numbers count as 0.
    #[inline(always)]
    fn locate<L: Lanes>(l: L, numbers: L::F) -> [L::U; 2] {
        let bits = l.bits(numbers);
        let sign = l.shr::<31>(bits);
        let magnitude = match SIGNED {
            true => l.and(bits, l.u(MAGNITUDE)),
            false => l.and(bits, l.add_u(sign, l.u(u32::MAX))),
        };
        let magnitude = l.max_u(magnitude, l.u(LEAST));
        let low = l.and(magnitude, l.u(Self::LOW));
        if !SIGNED {
            let bucket = l.shr::<16>(magnitude);
            return [l.add_u(bucket, l.u((LEAST >> 16).wrapping_neg())), low];
        }
        let bucket = l.add_u(l.shr::<17>(magnitude), l.u((LEAST >> 17).wrapping_neg()));
        let index = l.xor(bucket, l.shl::<11>(sign));
        let inverted = l.mul_u(sign, l.u(Self::LOW));
        [index, l.xor(low, inverted)]
    }

    /// Encodes the values of a block whose largest magnitude is `absmax`.
    #[inline(always)]
    pub(super) fn encode<L: Lanes>(
        &self,
        l: L,
        values: &Values,
        absmax: f32,
        codes: &mut [u8; BLOCK_ELEMS],
    ) {
        if absmax == 0.0 {
            // As the search for 0 / 0, NaN, ends.
            codes.fill(search(self.map, f32::NAN.copysign(1.0)));
            return;
        }
        if !absmax.is_finite() {
            return self.encode_each(values, absmax, codes);
        }
        if !L::PERMUTES || !self.estimate(l, values, absmax, codes) {
            self.encode_by_table(l, values, absmax, codes);
        }
    }

    /// As [`Codec::encode`], by arithmetic. Returns whether the codes are certain: no value is so close to a threshold
    /// that rounding could decide.
    #[inline(always)]
    pub(super) fn estimate<L: Lanes>(
        &self,
        l: L,
        values: &Values,
        absmax: f32,
        codes: &mut [u8; BLOCK_ELEMS],
    ) -> bool {
        if !EXACT_FACTORS.contains(&absmax) {
            return false;
        }
        let classes = &self.classes;
        let (factor, rounder) = (l.f(1.0 / absmax), l.f(ROUNDER));
        let mut doubts = [l.u(0); 2];
        for i in (0..BLOCK_ELEMS).step_by(L::N) {
            let bits = l.bits(l.mul(l.load(&values[i..]), factor));
            let sign = l.shr::<31>(bits);
            let magnitude = match SIGNED {
                true => l.and(bits, l.u(MAGNITUDE)),
                false => l.and(bits, l.add_u(sign, l.u(u32::MAX))),
            };
            let octaves = l.add_u(l.shr::<24>(magnitude), l.u((LEAST >> 24).wrapping_neg()));
            let lower = l.look_up_16(&classes.of_octaves, octaves);
            let distance = l.sub_u(l.look_up_8(&classes.near_end, lower), magnitude);
            doubts[0] = l.max_u(doubts[0], distance);
            let is_upper = l.above(magnitude, l.look_up_8(&classes.end, lower));
            let class = l.sub_u(lower, is_upper);
            let last = l.float(l.look_up_8(&classes.last, class));
            let scale = l.float(l.look_up_8(&classes.scale, class));
            let offset = l.float(l.look_up_8(&classes.offset, class));
            let share = l.min(l.float(magnitude), last);
            let exact = l.add(l.mul(share, scale), offset);
            let rounded = l.add(exact, rounder);
            let rest = l.sub(exact, l.sub(rounded, rounder));
            doubts[1] = l.max_u(doubts[1], l.and(l.bits(rest), l.u(MAGNITUDE)));
            let steps = l.and(l.bits(rounded), l.u(0x1ff));
            let code = match SIGNED {
                true => {
                    // A negative number is never encoded as 0.
                    let steps = l.max_u(steps, sign);
                    let inverted = l.sub_u(l.u(0), sign);
                    let steps = l.sub_u(l.xor(steps, inverted), inverted);
                    l.add_u(steps, l.u(ZEROS[0].into()))
                }
                false => steps,
            };
            l.store_bytes(&mut codes[i..], code);
        }
        largest(l, doubts[0]).to_bits() < NEAR && largest(l, doubts[1]) < MOST_REST
    }

    /// As [`Codec::encode`], by the table.
    #[inline(always)]
    pub(super) fn encode_by_table<L: Lanes>(
        &self,
        l: L,
        values: &Values,
        absmax: f32,
        codes: &mut [u8; BLOCK_ELEMS],
    ) {
        let divisor = l.f(absmax);
        for i in (0..BLOCK_ELEMS).step_by(L::N) {
            let [at, low] = Self::locate(l, l.div(l.load(&values[i..]), divisor));
            let sum = l.add_u(l.look_up(&self.entries, at), low);
            let code = match SIGNED {
                true => l.shr::<17>(sum),
                false => l.shr::<16>(sum),
            };
            l.store_bytes(&mut codes[i..], code);
        }
    }

    /// Encodes values one by one, for a block with an overflow.
    #[cold]
    fn encode_each(&self, values: &Values, absmax: f32, codes: &mut [u8; BLOCK_ELEMS]) {
        for (code, x) in codes.iter_mut().zip(values) {
            *code = search(self.map, (x / absmax).copysign(*x));
        }
    }

    /// Moment of one code.
    pub(super) fn value(&self, code: u8, absmax: f32) -> f32 {
        self.map[usize::from(code)] * absmax
    }

    /// Moments of the first codes of a slice.
    #[inline(always)]
    pub(super) fn decode<L: Lanes>(&self, l: L, codes: &[u8], absmax: L::F) -> L::F {
        l.mul(l.float(l.look_up_bytes(&self.values, codes)), absmax)
    }
}

/// Range of absmax whose reciprocal is a normal number.
const EXACT_FACTORS: std::ops::Range<f32> = 1e-30..1e30;
/// Sum with a small number that rounds it to a whole number, in the lowest bits.
const ROUNDER: f32 = 12_582_912.0;
/// Distance in units in the last place from the end of a class within which a code is in doubt. A product with the
/// reciprocal differs from the quotient by two units, and the ends for negative numbers by one.
const ULPS: u32 = 8;
/// Differences from [`Classes::near_end`] from here on are in doubt.
const NEAR: u32 = u32::MAX - 2 * ULPS;
/// Distance from a whole number of steps below which a code is certain. Half a step is a threshold. The steps of a
/// class are even up to 2^-14: values and thresholds are rounded to 24 bits, as are the sums of up to 2^8 steps here.
const MOST_REST: f32 = 0.5 - 1.0 / 8192.0;

/// Classes of a map: values at even steps, which are the decades of the map. The first class also has 0, and the last
/// one has 1 alone. Tables of eight entries fit a register.
struct Classes {
    /// Class at the start of each two octaves from 2^-23 on; the next class may start inside them.
    of_octaves: [u8; 16],
    /// Largest magnitude of each class, as bits.
    end: [u32; 8],
    /// [`NEAR`] plus a magnitude shortly above the end. After subtraction of a magnitude, sums that wrap are below it.
    near_end: [u32; 8],
    /// Largest value of each class, as bits.
    last: [u32; 8],
    /// Steps per unit of a share of the absmax, as bits.
    scale: [u32; 8],
    /// Steps from code 0 to a share of 0, as bits.
    offset: [u32; 8],
}

impl Classes {
    /// Classes of ascending values from 0 to 1. The first decade has one value, or two where there are no signs.
    fn new(values: &[f32], signed: bool) -> Self {
        let middle = |at: usize| (values[at] + values[at + 1]) * 0.5;
        let mut classes = Self {
            of_octaves: [0; 16],
            end: [MAGNITUDE; 8],
            near_end: [0; 8],
            last: [0; 8],
            scale: [0; 8],
            offset: [0; 8],
        };
        let (mut first, mut count) = (0, if signed { 2 } else { 3 });
        for class in 0..7 {
            let last = first + count - 1;
            // The steps are those between thresholds, or between values where there is one threshold.
            let (low, high, steps) = match last - first {
                1 => (values[first], values[last], 1.0),
                many => (middle(first), middle(last - 1), (many - 1) as f64),
            };
            let scale = steps / (f64::from(high) - f64::from(low));
            let offset = first as f64 + 0.5 - scale * f64::from(middle(first));
            let end = middle(last).to_bits();
            classes.end[class] = end;
            classes.near_end[class] = NEAR.wrapping_add(end + ULPS);
            classes.last[class] = values[last].to_bits();
            classes.scale[class] = (scale as f32).to_bits();
            classes.offset[class] = (offset as f32).to_bits();
            (first, count) = (last + 1, if signed { 2 << class } else { 4 << class });
        }
        classes.last[7] = 1f32.to_bits();
        classes.offset[7] = ((values.len() - 1) as f32).to_bits();
        for (pair, class) in classes.of_octaves.iter_mut().enumerate() {
            let start = LEAST + ((pair as u32) << 24);
            *class = classes.end.iter().filter(|end| **end < start).count() as u8;
        }
        classes
    }
}

/// Code of a number by the kernel's binary search. It ends at an even code, which then competes with one neighbor:
/// the number stays if it is as near. With the signed map, a code of the other sign than the number's moves by one.
pub(super) fn search(map: &[f32; 256], x: f32) -> u8 {
    let (mut lower, mut upper) = (0, 255);
    let (mut low, mut high) = (if map[0] < 0.0 { -1.0 } else { 0.0 }, 1.0);
    let mut pivot = 127;
    for step in [64, 32, 16, 8, 4, 2, 1] {
        if x > map[pivot] {
            (lower, low) = (pivot, map[pivot]);
            pivot += step;
        } else {
            (upper, high) = (pivot, map[pivot]);
            pivot -= step;
        }
    }
    let code = if x > map[pivot] {
        let nearer = x > (high + map[pivot]) * 0.5;
        if nearer { upper } else { pivot }
    } else {
        let nearer = x < (low + map[pivot]) * 0.5;
        if nearer { lower } else { pivot }
    } as u8;
    let signed = map[0] < 0.0;
    let agrees = map[usize::from(code)].is_sign_negative() == x.is_sign_negative();
    match (signed && !agrees, x > 0.0) {
        (false, _) => code,
        (true, true) => code.wrapping_add(1),
        (true, false) => code.wrapping_sub(1),
    }
}

/// The largest of some magnitudes, given as bits.
#[inline(always)]
pub(super) fn largest<L: Lanes>(l: L, bits: L::U) -> f32 {
    let mut numbers = [0f32; MOST_LANES];
    l.store(&mut numbers, l.float(bits));
    let most = numbers.iter().fold(0, |most, x| x.to_bits().max(most));
    f32::from_bits(most)
}

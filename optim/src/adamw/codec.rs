//! Codes of 8 bits: the nearest value of a [dynamic map](kernels::dynamic_map), for blocks of moments.
//!
//! [`search`] is the definition. A [`Codec`] finds the same codes by arithmetic where no value of a block is close to a
//! threshold between two codes, else by a table.

use std::sync::LazyLock;

use kernels::dynamic_map;

use super::blockwise::BLOCK_ELEMS;
use crate::lanes::{ByteTable, Lanes, Portable};

/// Smallest magnitude with a bucket of its own, as bits: 2^-23. Smaller ones are counted to its bucket, because every
/// threshold between two codes is larger.
const LEAST: u32 = 0x3400_0000;
/// Entries of a table.
const ENTRIES: usize = 1 << 12;
/// Codes of 0 in the maps of both moments.
const ZEROS: [u8; 2] = [127, 0];
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
    values: ByteTable,
    /// One entry for each sign and bucket. The bits above the low ones are a code. The low bits are chosen so that
    /// adding those of the number overflows into the code exactly if the number is beyond the threshold. (For negative
    /// numbers the lower bits are inverted first.)
    entries: [u32; ENTRIES],
    classes: Classes,
    octaves: Octaves,
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
        let classes = Classes::new(&map[usize::from(zero)..], SIGNED);
        Self {
            map,
            values: ByteTable::new(&map.map(f32::to_bits)),
            entries,
            octaves: Octaves::new(&classes),
            classes,
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

    /// What divides the values of a block by `absmax`, their largest magnitude, for [`Self`]'s codes. Where `absmax` is 0 or
    /// not a number, nothing is divided: `codes` are written here and the result is `None`.
    #[inline(always)]
    pub(super) fn begin<L: Lanes>(
        &self,
        l: L,
        values: &Values,
        absmax: f32,
        codes: &mut [u8; BLOCK_ELEMS],
    ) -> Option<Divisor<L>> {
        if absmax == 0.0 {
            // As the search for 0 / 0, NaN, ends.
            codes.fill(search(self.map, f32::NAN.copysign(1.0)));
            return None;
        }
        if !absmax.is_finite() {
            self.encode_each(values, absmax, codes);
            return None;
        }
        Some(Divisor {
            absmax: l.f(absmax),
            reciprocal: l.f(1.0 / absmax),
            estimates: L::PERMUTES && EXACT_FACTORS.contains(&absmax),
        })
    }

    /// Encodes the values from element `i` on, four vectors of them.
    #[inline(always)]
    pub(super) fn encode<L: Lanes>(
        &self,
        l: L,
        values: &Values,
        i: usize,
        divisor: &Divisor<L>,
        codes: &mut [u8; BLOCK_ELEMS],
    ) {
        if !divisor.estimates || !self.estimate(l, values, i, divisor.reciprocal, codes) {
            self.encode_by_table(l, values, i, divisor.absmax, codes);
        }
    }

    /// Encodes the values from element `i` on by arithmetic, four vectors of them, and returns whether the codes are certain:
    /// no value is so close to a threshold that rounding could decide. `factor` is the reciprocal of the absmax.
    #[inline(always)]
    pub(super) fn estimate<L: Lanes>(
        &self,
        l: L,
        values: &Values,
        i: usize,
        factor: L::F,
        codes: &mut [u8; BLOCK_ELEMS],
    ) -> bool {
        if L::PERMUTES_32 {
            return self.estimate_by_octaves(l, &values[i..], factor, &mut codes[i..]);
        }
        let mut doubts = [l.u(u32::MAX); 2];
        // Not a loop, so that the vectors stay in registers.
        let values = &values[i..i + 4 * L::N];
        let share = l.mul(l.load(values), factor);
        let a = self.estimate_vector(l, share, &mut doubts);
        let share = l.mul(l.load(&values[L::N..]), factor);
        let b = self.estimate_vector(l, share, &mut doubts);
        let share = l.mul(l.load(&values[2 * L::N..]), factor);
        let c = self.estimate_vector(l, share, &mut doubts);
        let share = l.mul(l.load(&values[3 * L::N..]), factor);
        let d = self.estimate_vector(l, share, &mut doubts);
        l.store_bytes(&mut codes[i..], [a, b, c, d]);
        l.all_at_least(doubts[0], ULPS) && l.all_at_least(doubts[1], 2 * MARGIN)
    }

    /// Codes of shares of the absmax. `doubts` are the smallest distances so far from ends of classes and from thresholds.
    #[inline(always)]
    fn estimate_vector<L: Lanes>(&self, l: L, share: L::F, doubts: &mut [L::U; 2]) -> L::U {
        let classes = &self.classes;
        let magnitude = match SIGNED {
            true => l.float(l.and(l.bits(share), l.u(MAGNITUDE))),
            false => share,
        };
        let magnitude = l.max(magnitude, l.f(f32::from_bits(LEAST)));
        let octaves = l.shr::<24>(l.bits(magnitude));
        let lower = l.look_up_16(&classes.of_octaves, octaves);
        let beyond = l.sub_u(l.bits(magnitude), l.look_up_8(&classes.end, lower));
        doubts[0] = l.min_u(doubts[0], l.abs(beyond));
        let class = l.sub_u(lower, l.above(beyond, l.u(0)));
        let last = l.float(l.look_up_8(&classes.last, class));
        let scale = l.float(l.look_up_8(&classes.scale, class));
        let offset = l.float(l.look_up_8(&classes.offset, class));
        let sum = l.bits(l.add(l.mul(l.min(magnitude, last), scale), offset));
        doubts[1] = l.min_u(doubts[1], l.and(sum, l.u((1 << FRACTION_BITS) - 1)));
        let steps = l.shr::<FRACTION_BITS>(sum);
        if !SIGNED {
            return steps;
        }
        // A negative number is never encoded as 0.
        let whole = l.sub_u(steps, l.u(BASE.to_bits() >> FRACTION_BITS));
        let sign = l.bits(share);
        let steps = l.negate(l.max_u(whole, l.shr::<31>(sign)), sign);
        l.add_u(steps, l.u(ZEROS[0].into()))
    }

    /// [`Codec::estimate`] of the first values, with tables of an entry for each octave.
    #[inline(always)]
    fn estimate_by_octaves<L: Lanes>(
        &self,
        l: L,
        values: &[f32],
        factor: L::F,
        codes: &mut [u8],
    ) -> bool {
        let mut doubts = [l.u(MAGNITUDE); 2];
        let share = [
            l.mul(l.load(values), factor),
            l.mul(l.load(&values[L::N..]), factor),
            l.mul(l.load(&values[2 * L::N..]), factor),
            l.mul(l.load(&values[3 * L::N..]), factor),
        ];
        let steps = [
            self.steps_by_octaves(l, share[0], &mut doubts),
            self.steps_by_octaves(l, share[1], &mut doubts),
            self.steps_by_octaves(l, share[2], &mut doubts),
            self.steps_by_octaves(l, share[3], &mut doubts),
        ];
        if SIGNED {
            l.store_signed_bytes(codes, steps, share, ZEROS[0]);
        } else {
            l.store_bytes(codes, steps);
        }
        l.all_at_least(doubts[0], 2 * ULPS) && l.all_at_least(doubts[1], 2 * MARGIN)
    }

    /// Steps from code 0 to shares of the absmax in the lowest bytes. `doubts` are the smallest distances so far above the
    /// zones around ends of classes and thresholds.
    #[inline(always)]
    fn steps_by_octaves<L: Lanes>(&self, l: L, share: L::F, doubts: &mut [L::U; 2]) -> L::U {
        let octaves = &self.octaves;
        let magnitude = match SIGNED {
            true => l.max_u(l.and(l.bits(share), l.u(MAGNITUDE)), l.u(LEAST)),
            false => l.bits(l.max(share, l.f(f32::from_bits(LEAST)))),
        };
        let octave = l.shr::<23>(magnitude);
        let beyond = l.sub_u(magnitude, l.look_up_32(&octaves.end, octave));
        doubts[0] = l.min_u(doubts[0], beyond);
        let at = l.sub_u(octave, l.above(beyond, l.u(ULPS)));
        let last = l.look_up_32(&octaves.last, at);
        let scale = l.float(l.look_up_32(&octaves.scale, at));
        let offset = l.float(l.look_up_32(&octaves.offset, at));
        let inside = l.float(l.min_u(magnitude, last));
        let sum = l.bits(l.near_mul_add(inside, scale, offset));
        doubts[1] = l.min_u(doubts[1], l.and(sum, l.u((1 << FRACTION_BITS) - 1)));
        l.shr::<FRACTION_BITS>(sum)
    }

    /// Encodes the values from element `i` on by the table, four vectors of them.
    #[inline(always)]
    pub(super) fn encode_by_table<L: Lanes>(
        &self,
        l: L,
        values: &Values,
        i: usize,
        absmax: L::F,
        codes: &mut [u8; BLOCK_ELEMS],
    ) {
        let mut all = [l.u(0); 4];
        for (vector, code) in all.iter_mut().enumerate() {
            let value = l.load(&values[i + vector * L::N..]);
            let [at, low] = Self::locate(l, l.div(value, absmax));
            let sum = l.add_u(l.look_up(&self.entries, at), low);
            *code = match SIGNED {
                true => l.shr::<17>(sum),
                false => l.shr::<16>(sum),
            };
        }
        l.store_bytes(&mut codes[i..], all);
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

    /// Moments of the first codes of a slice, four vectors of them.
    #[inline(always)]
    pub(super) fn decode<L: Lanes>(&self, l: L, codes: &[u8], absmax: L::F) -> [L::F; 4] {
        let [a, b, c, d] = l.look_up_bytes(&self.values, codes);
        [
            l.mul(l.float(a), absmax),
            l.mul(l.float(b), absmax),
            l.mul(l.float(c), absmax),
            l.mul(l.float(d), absmax),
        ]
    }
}

/// Absmax of a block that is encoded.
pub(super) struct Divisor<L: Lanes> {
    absmax: L::F,
    reciprocal: L::F,
    /// Whether shares are products with the reciprocal, unless one is in doubt.
    estimates: bool,
}

/// Range of absmax whose reciprocal is a normal number.
const EXACT_FACTORS: std::ops::Range<f32> = 1e-30..1e30;
/// Bits of a sum of [`BASE`] and up to 2^8 steps after the point.
const FRACTION_BITS: u32 = 15;
/// Number whose sums with steps have [`FRACTION_BITS`]: the bits above those end in the whole number of steps.
const BASE: f32 = 256.0;
/// Distance in units in the last place from the end of a class within which a code is in doubt. A product with the
/// reciprocal differs from the quotient by two units, and the ends for negative numbers by one.
const ULPS: u32 = 8;
/// Distance from a threshold, in units of 2^-15 steps, within which a code is in doubt. A share has an error of two units in
/// the last place, which are 0.6 units here for the 142 steps per unit of the largest class; its scale adds 0.1, the
/// product 0.3, and the offset and the sum 0.5 each. The steps of a class are even up to two units: values and thresholds
/// are rounded to 24 bits.
const MARGIN: u32 = 5;

/// Classes of a map: values at even steps, which are the decades of the map. The first class also has 0, and the last
/// one has 1 alone. Tables of eight entries fit a register.
struct Classes {
    /// Class at the start of each two octaves, by the lowest bits of their number; the next class may start inside them.
    of_octaves: [u8; 16],
    /// Largest magnitude of each class, as bits.
    end: [u32; 8],
    /// Largest value of each class, as bits.
    last: [u32; 8],
    /// Steps per unit of a share of the absmax, as bits.
    scale: [u32; 8],
    /// Sum of [`BASE`], the steps from code 0 to a share of 0, half a step, and [`MARGIN`], as bits. Thresholds are then
    /// [`MARGIN`] above whole numbers.
    offset: [u32; 8],
}

impl Classes {
    /// Classes of ascending values from 0 to 1. The first decade has one value, or two where there are no signs.
    fn new(values: &[f32], signed: bool) -> Self {
        let middle = |at: usize| (values[at] + values[at + 1]) * 0.5;
        let mut classes = Self {
            of_octaves: [0; 16],
            end: [MAGNITUDE; 8],
            last: [0; 8],
            scale: [0; 8],
            offset: [0; 8],
        };
        let margin = f64::from(MARGIN) / f64::from(1 << FRACTION_BITS);
        let origin = f64::from(BASE) + 0.5 + margin;
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
            classes.last[class] = values[last].to_bits();
            classes.scale[class] = (scale as f32).to_bits();
            classes.offset[class] = ((origin + offset) as f32).to_bits();
            (first, count) = (last + 1, if signed { 2 << class } else { 4 << class });
        }
        classes.last[7] = 1f32.to_bits();
        classes.offset[7] = ((origin + (values.len() - 1) as f64) as f32).to_bits();
        for octaves in LEAST >> 24..=1f32.to_bits() >> 24 {
            let start = octaves << 24;
            let class = classes.end.iter().filter(|end| **end < start).count();
            classes.of_octaves[octaves as usize % 16] = class as u8;
        }
        classes
    }
}

/// [`Classes`] by octaves: the entry of a number is at the lowest five bits of its exponent. A class that begins inside an
/// octave has the next octave's entry.
#[repr(align(64))]
struct Octaves {
    /// [`ULPS`] below the end of the class at the start of the octave, as bits, if the class ends inside.
    end: [u32; 32],
    /// As those of [`Classes`].
    last: [u32; 32],
    scale: [u32; 32],
    offset: [u32; 32],
}

impl Octaves {
    fn new(classes: &Classes) -> Self {
        let mut octaves = Self {
            end: [MAGNITUDE; 32],
            last: [0; 32],
            scale: [0; 32],
            offset: [0; 32],
        };
        for exponent in LEAST >> 23..=1f32.to_bits() >> 23 {
            let (start, after) = (exponent << 23, (exponent + 1) << 23);
            let class = classes.end.iter().filter(|end| **end < start).count();
            let at = exponent as usize % 32;
            if classes.end[class] < after {
                octaves.end[at] = classes.end[class] - ULPS;
            }
            octaves.last[at] = classes.last[class];
            octaves.scale[at] = classes.scale[class];
            octaves.offset[at] = classes.offset[class];
        }
        octaves
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

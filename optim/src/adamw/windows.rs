//! Data layouts of gradient, weights and moments, as traits that the update is generic over.
//!
//! Vectors pass through no closure and no `array::map`. The compiler would build those without the instruction set of
//! the surrounding loop, and every operation in them would become a call.

use half::bf16;
use kernels::Float;

use crate::lanes::Lanes;
use crate::rng::stochastic_round_bf16;

/// Distance in bytes between the memory that is read and the memory that is prefetched.
const AHEAD_BYTES: usize = 2048;
/// Smallest magnitude, as `f32` bits, that rounding to `bf16` may carry to infinity. Infinities and NaN are above it
/// too.
pub(crate) const LARGE: u32 = 0x7f00_0000;

/// [`LARGE`] for the stored `bf16` bits. The check may run on the rounded values if no input is a NaN with low bits:
/// then rounding cannot carry a NaN into the sign bit.
pub(crate) const LARGE_HALF: u16 = 0x7f00;

/// Numbers of one item, in two vectors. They are the first and second half of the elements, or with `PAIRED` the even
/// and the odd ones, whichever loads faster. All chunks of an update use the same order.
pub(crate) type Item<L> = [<L as Lanes>::F; 2];

/// The 16-bit numbers of an item, moved to the high halves of 32-bit words (the `bf16` position in an `f32`).
#[inline(always)]
fn split_high<L: Lanes, const PAIRED: bool>(l: L, words: L::U) -> [L::U; 2] {
    if PAIRED {
        [l.shl::<16>(words), l.and(words, l.u(0xffff_0000))]
    } else {
        let [a, b] = l.widen(words);
        [l.shl::<16>(a), l.shl::<16>(b)]
    }
}

/// The 16-bit numbers of an item, moved to the low halves of 32-bit words.
#[inline(always)]
fn split_low<L: Lanes, const PAIRED: bool>(l: L, words: L::U) -> [L::U; 2] {
    if PAIRED {
        [l.and(words, l.u(0xffff)), l.shr::<16>(words)]
    } else {
        l.widen(words)
    }
}

/// High halves of `bits + addend`, packed in memory order.
#[inline(always)]
fn round<L: Lanes, const PAIRED: bool>(l: L, bits: [L::U; 2], addend: [L::U; 2]) -> L::U {
    let [a, b] = [l.add_u(bits[0], addend[0]), l.add_u(bits[1], addend[1])];
    if PAIRED {
        l.high_halves(a, b)
    } else {
        l.narrow([l.shr::<16>(a), l.shr::<16>(b)])
    }
}

/// Addend that turns truncation to 16 bits into rounding to nearest even.
#[inline(always)]
fn nearest_addend<L: Lanes>(l: L, bits: L::U) -> L::U {
    let odd = l.and(l.shr::<16>(bits), l.u(1));
    l.add_u(odd, l.u(0x7fff))
}

/// How an `f32` is rounded when it is stored as `bf16`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Mode {
    Nearest,
    Stochastic,
}

/// Element type of gradients and moments.
pub(crate) trait Number: Copy + Send + Sync {
    /// Whether the type has 16 bits.
    const NARROW: bool;
    /// Vector form that [`Number::store`] writes.
    type Packed<L: Lanes>: Copy;

    fn get(self) -> f32;
    fn put(&mut self, value: f32, mode: Mode, random: u16);
    fn load<L: Lanes, const PAIRED: bool>(l: L, from: &[Self]) -> Item<L>;
    /// Rounds an item to the type. Magnitudes must be below [`LARGE`] where `NARROW`.
    fn pack<L: Lanes, const PAIRED: bool>(
        l: L,
        x: Item<L>,
        random: Option<L::U>,
    ) -> Self::Packed<L>;
    fn store<L: Lanes>(l: L, to: &mut [Self], x: Self::Packed<L>);
    /// The packed 16-bit numbers; zero unless `NARROW`.
    fn halves<L: Lanes>(l: L, x: Self::Packed<L>) -> L::U;
    #[inline(always)]
    fn prefetch<L: Lanes>(l: L, from: &[Self]) {
        let ahead = from.as_ptr().cast::<u8>().wrapping_add(AHEAD_BYTES);
        l.prefetch(ahead);
        if !Self::NARROW && L::ITEM * size_of::<f32>() > 64 {
            l.prefetch(ahead.wrapping_add(64));
        }
    }
}

impl Number for f32 {
    const NARROW: bool = false;
    type Packed<L: Lanes> = Item<L>;

    #[inline(always)]
    fn get(self) -> f32 {
        self
    }
    #[inline(always)]
    fn put(&mut self, value: f32, _: Mode, _: u16) {
        *self = value;
    }
    #[inline(always)]
    fn load<L: Lanes, const PAIRED: bool>(l: L, from: &[Self]) -> Item<L> {
        let [a, b] = [l.load(&from[..L::N]), l.load(&from[L::N..])];
        if PAIRED { l.even_odd(a, b) } else { [a, b] }
    }
    #[inline(always)]
    fn pack<L: Lanes, const PAIRED: bool>(_: L, x: Item<L>, _: Option<L::U>) -> Item<L> {
        x
    }
    #[inline(always)]
    fn store<L: Lanes>(l: L, to: &mut [Self], [a, b]: Item<L>) {
        let (low, high) = to.split_at_mut(L::N);
        l.store(low, a);
        l.store(high, b);
    }
    #[inline(always)]
    fn halves<L: Lanes>(l: L, _: Item<L>) -> L::U {
        l.u(0)
    }
}

impl Number for bf16 {
    const NARROW: bool = true;
    type Packed<L: Lanes> = L::U;

    #[inline(always)]
    fn get(self) -> f32 {
        <Self as Float>::to_f32(self)
    }
    #[inline(always)]
    fn put(&mut self, value: f32, mode: Mode, random: u16) {
        *self = match mode {
            Mode::Nearest => <Self as Float>::from_f32(value),
            Mode::Stochastic => stochastic_round_bf16(value, random),
        };
    }
    #[inline(always)]
    fn load<L: Lanes, const PAIRED: bool>(l: L, from: &[Self]) -> Item<L> {
        let [a, b] = split_high::<L, PAIRED>(l, l.load_halves(from));
        [l.float(a), l.float(b)]
    }
    #[inline(always)]
    fn pack<L: Lanes, const PAIRED: bool>(l: L, x: Item<L>, random: Option<L::U>) -> L::U {
        let bits = [l.bits(x[0]), l.bits(x[1])];
        let addend = match random {
            Some(words) => split_low::<L, PAIRED>(l, words),
            None => [nearest_addend(l, bits[0]), nearest_addend(l, bits[1])],
        };
        round::<L, PAIRED>(l, bits, addend)
    }
    #[inline(always)]
    fn store<L: Lanes>(l: L, to: &mut [Self], x: L::U) {
        l.store_halves(to, x);
    }
    #[inline(always)]
    fn halves<L: Lanes>(_: L, x: L::U) -> L::U {
        x
    }
}

/// Weights of an update, with the master copy or compensation that belongs to them.
pub(crate) trait Weights: Send + Sized {
    /// Whether all stored numbers have 16 bits.
    const NARROW: bool;
    /// Whether the store rounds anything to 16 bits.
    const ROUNDS: bool = true;
    /// Rounding of the weights.
    const MODE: Mode = Mode::Nearest;
    /// Rounding of `bf16` moments that belong to these weights.
    const MOMENTS: Mode = Mode::Stochastic;
    /// Whether weights are rounded before they decay, where decay follows the update.
    const ROUNDS_BETWEEN: bool = false;
    /// Vector form that [`Weights::store`] writes.
    type Packed<L: Lanes>: Copy;

    fn split_at(self, mid: usize) -> (Self, Self);
    fn get(&self, i: usize) -> f32;
    fn put(&mut self, i: usize, value: f32, random: u16);
    fn load<L: Lanes, const PAIRED: bool>(&self, l: L, i: usize) -> Item<L>;
    fn pack<L: Lanes, const PAIRED: bool>(
        l: L,
        x: Item<L>,
        random: Option<L::U>,
    ) -> Self::Packed<L>;
    fn store<L: Lanes>(&mut self, l: L, i: usize, x: Self::Packed<L>);
    /// The packed 16-bit weights; zero unless the layout has some.
    fn halves<L: Lanes>(l: L, x: Self::Packed<L>) -> L::U;
}

/// `f32` weights.
impl Weights for &mut [f32] {
    const NARROW: bool = false;
    const ROUNDS: bool = false;
    type Packed<L: Lanes> = Item<L>;

    fn split_at(self, mid: usize) -> (Self, Self) {
        self.split_at_mut(mid)
    }
    #[inline(always)]
    fn get(&self, i: usize) -> f32 {
        self[i]
    }
    #[inline(always)]
    fn put(&mut self, i: usize, value: f32, _: u16) {
        self[i] = value;
    }
    #[inline(always)]
    fn load<L: Lanes, const PAIRED: bool>(&self, l: L, i: usize) -> Item<L> {
        f32::prefetch(l, &self[i..]);
        f32::load::<L, PAIRED>(l, &self[i..i + L::ITEM])
    }
    #[inline(always)]
    fn pack<L: Lanes, const PAIRED: bool>(_: L, x: Item<L>, _: Option<L::U>) -> Item<L> {
        x
    }
    #[inline(always)]
    fn store<L: Lanes>(&mut self, l: L, i: usize, x: Item<L>) {
        f32::store(l, &mut self[i..i + L::ITEM], x);
    }
    #[inline(always)]
    fn halves<L: Lanes>(l: L, _: Item<L>) -> L::U {
        l.u(0)
    }
}

/// `f32` master weights and their `bf16` copy, which is only written.
pub(crate) struct Master<'a> {
    pub(crate) master: &'a mut [f32],
    pub(crate) weight: &'a mut [bf16],
}

impl Weights for Master<'_> {
    const NARROW: bool = false;
    type Packed<L: Lanes> = (Item<L>, L::U);

    fn split_at(self, mid: usize) -> (Self, Self) {
        let (master, weight) = (self.master.split_at_mut(mid), self.weight.split_at_mut(mid));
        let half = |master, weight| Self { master, weight };
        (half(master.0, weight.0), half(master.1, weight.1))
    }
    #[inline(always)]
    fn get(&self, i: usize) -> f32 {
        self.master[i]
    }
    #[inline(always)]
    fn put(&mut self, i: usize, value: f32, _: u16) {
        self.master[i] = value;
        self.weight[i] = <bf16 as Float>::from_f32(value);
    }
    #[inline(always)]
    fn load<L: Lanes, const PAIRED: bool>(&self, l: L, i: usize) -> Item<L> {
        f32::prefetch(l, &self.master[i..]);
        bf16::prefetch(l, &self.weight[i..]);
        f32::load::<L, PAIRED>(l, &self.master[i..i + L::ITEM])
    }
    #[inline(always)]
    fn pack<L: Lanes, const PAIRED: bool>(l: L, x: Item<L>, _: Option<L::U>) -> (Item<L>, L::U) {
        (x, bf16::pack::<L, PAIRED>(l, x, None))
    }
    #[inline(always)]
    fn store<L: Lanes>(&mut self, l: L, i: usize, (wide, narrow): (Item<L>, L::U)) {
        f32::store(l, &mut self.master[i..i + L::ITEM], wide);
        l.store_halves(&mut self.weight[i..i + L::ITEM], narrow);
    }
    #[inline(always)]
    fn halves<L: Lanes>(_: L, (_, narrow): (Item<L>, L::U)) -> L::U {
        narrow
    }
}

/// `bf16` weights alone, rounded stochastically. With `NEAREST`, weights and moments are rounded to nearest.
pub(crate) struct Narrow<'a, const NEAREST: bool>(pub(crate) &'a mut [bf16]);

impl<const NEAREST: bool> Weights for Narrow<'_, NEAREST> {
    const NARROW: bool = true;
    const MODE: Mode = if NEAREST {
        Mode::Nearest
    } else {
        Mode::Stochastic
    };
    const MOMENTS: Mode = Self::MODE;
    const ROUNDS_BETWEEN: bool = NEAREST;
    type Packed<L: Lanes> = L::U;

    fn split_at(self, mid: usize) -> (Self, Self) {
        let (a, b) = self.0.split_at_mut(mid);
        (Self(a), Self(b))
    }
    #[inline(always)]
    fn get(&self, i: usize) -> f32 {
        self.0[i].get()
    }
    #[inline(always)]
    fn put(&mut self, i: usize, value: f32, random: u16) {
        self.0[i].put(value, Self::MODE, random);
    }
    #[inline(always)]
    fn load<L: Lanes, const PAIRED: bool>(&self, l: L, i: usize) -> Item<L> {
        bf16::prefetch(l, &self.0[i..]);
        bf16::load::<L, PAIRED>(l, &self.0[i..i + L::ITEM])
    }
    #[inline(always)]
    fn pack<L: Lanes, const PAIRED: bool>(l: L, x: Item<L>, random: Option<L::U>) -> L::U {
        bf16::pack::<L, PAIRED>(l, x, random)
    }
    #[inline(always)]
    fn store<L: Lanes>(&mut self, l: L, i: usize, x: L::U) {
        l.store_halves(&mut self.0[i..i + L::ITEM], x);
    }
    #[inline(always)]
    fn halves<L: Lanes>(_: L, x: L::U) -> L::U {
        x
    }
}

/// `bf16` weights rounded to nearest, plus the rounding error in `bf16`. The update reads their sum (Kahan
/// compensation).
pub(crate) struct Compensated<'a> {
    pub(crate) weight: &'a mut [bf16],
    pub(crate) error: &'a mut [bf16],
}

impl Weights for Compensated<'_> {
    const NARROW: bool = true;
    type Packed<L: Lanes> = [L::U; 2];

    fn split_at(self, mid: usize) -> (Self, Self) {
        let (weight, error) = (self.weight.split_at_mut(mid), self.error.split_at_mut(mid));
        let half = |weight, error| Self { weight, error };
        (half(weight.0, error.0), half(weight.1, error.1))
    }
    #[inline(always)]
    fn get(&self, i: usize) -> f32 {
        self.weight[i].get() + self.error[i].get()
    }
    #[inline(always)]
    fn put(&mut self, i: usize, value: f32, _: u16) {
        self.weight[i] = <bf16 as Float>::from_f32(value);
        self.error[i] = <bf16 as Float>::from_f32(value - self.weight[i].get());
    }
    #[inline(always)]
    fn load<L: Lanes, const PAIRED: bool>(&self, l: L, i: usize) -> Item<L> {
        bf16::prefetch(l, &self.weight[i..]);
        bf16::prefetch(l, &self.error[i..]);
        let [a, b] = bf16::load::<L, PAIRED>(l, &self.weight[i..i + L::ITEM]);
        let [c, d] = bf16::load::<L, PAIRED>(l, &self.error[i..i + L::ITEM]);
        [l.add(a, c), l.add(b, d)]
    }
    #[inline(always)]
    fn pack<L: Lanes, const PAIRED: bool>(l: L, x: Item<L>, _: Option<L::U>) -> [L::U; 2] {
        let weight = bf16::pack::<L, PAIRED>(l, x, None);
        let [a, b] = split_high::<L, PAIRED>(l, weight);
        let error = [l.sub(x[0], l.float(a)), l.sub(x[1], l.float(b))];
        [weight, bf16::pack::<L, PAIRED>(l, error, None)]
    }
    #[inline(always)]
    fn store<L: Lanes>(&mut self, l: L, i: usize, [weight, error]: [L::U; 2]) {
        l.store_halves(&mut self.weight[i..i + L::ITEM], weight);
        l.store_halves(&mut self.error[i..i + L::ITEM], error);
    }
    #[inline(always)]
    fn halves<L: Lanes>(_: L, [weight, _]: [L::U; 2]) -> L::U {
        weight
    }
}

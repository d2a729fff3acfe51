//! The AdamW update as one pass over memory. The code is generic over the data layouts of [`super::windows`] and the
//! instruction sets of [`crate::lanes`].

use super::Coefficients;
use super::windows::{Item, LARGE, LARGE_HALF, Mode, Number, Weights};
use crate::lanes::{Lanes, Loop, Simd};
use crate::rng::RandomStream;
use crate::rounding::PageKey;

/// Elements per task. Longer chunks are spread over the rayon pool.
pub(super) const CHUNK_ELEMS: usize = 1 << 16;
/// Elements of the longest item: two AVX-512 vectors.
pub(super) const MOST_ITEM: usize = 32;

impl Coefficients {
    /// New weight, first and second moment of one element, in scalar arithmetic.
    #[inline(always)]
    fn element(&self, grad: f32, weight: f32, m: f32, v: f32) -> (f32, f32, f32) {
        let grad = grad * self.grad_scale;
        let m = m + (grad - m) * self.one_minus_beta1;
        let v = v * self.beta2 + grad * grad * self.one_minus_beta2;
        let weight = weight * self.decay - self.step_size * m / (v.sqrt() + self.eps);
        (weight, m, v)
    }

    /// The update's constants, each copied to all lanes of a vector.
    #[inline(always)]
    fn vectors<L: Lanes>(&self, l: L) -> Vectors<L> {
        Vectors {
            grad_scale: l.f(self.grad_scale),
            one_minus_beta1: l.f(self.one_minus_beta1),
            beta2: l.f(self.beta2),
            one_minus_beta2: l.f(self.one_minus_beta2),
            eps: l.f(self.eps),
            step_size: l.f(self.step_size),
            decay: l.f(self.decay),
        }
    }
}

/// [`Coefficients`] as vectors, with the arithmetic of [`Coefficients::element`].
#[derive(Clone, Copy)]
struct Vectors<L: Lanes> {
    grad_scale: L::F,
    one_minus_beta1: L::F,
    beta2: L::F,
    one_minus_beta2: L::F,
    eps: L::F,
    step_size: L::F,
    decay: L::F,
}

impl<L: Lanes> Vectors<L> {
    /// New values of the first and second moment, in this order.
    #[inline(always)]
    fn moments(&self, l: L, grad: L::F, m: L::F, v: L::F) -> (L::F, L::F) {
        let grad = l.mul(grad, self.grad_scale);
        let m = l.add(m, l.mul(l.sub(grad, m), self.one_minus_beta1));
        let square = l.mul(l.mul(grad, grad), self.one_minus_beta2);
        (m, l.add(l.mul(v, self.beta2), square))
    }

    /// New weights from the first moments and the square roots of the second moments.
    #[inline(always)]
    fn weight(&self, l: L, weight: L::F, m: L::F, root: L::F) -> L::F {
        let change = l.div(l.mul(self.step_size, m), l.add(root, self.eps));
        l.sub(l.mul(weight, self.decay), change)
    }
}

/// State between the two halves of an item's update.
struct Begun<L: Lanes> {
    m: Item<L>,
    /// Square root of the second moment.
    root: Item<L>,
    /// Random words that round the weights, if rounding is stochastic.
    random: Option<L::U>,
}

/// Numbers of an item in memory order.
#[inline(always)]
fn in_order<L: Lanes, const PAIRED: bool>(l: L, [a, b]: Item<L>) -> [f32; MOST_ITEM] {
    let (mut halves, mut numbers) = ([0.0; MOST_ITEM], [0.0; MOST_ITEM]);
    l.store(&mut halves, a);
    l.store(&mut halves[L::N..], b);
    for i in 0..L::ITEM {
        numbers[i] = halves[if PAIRED { i % 2 * L::N + i / 2 } else { i }];
    }
    numbers
}

/// Stores moments one by one, with scalar rounding. For values near infinity and NaN, which the vector rounding
/// cannot handle.
#[cold]
#[inline(never)]
fn put_each<M: Number>(to: &mut [M], numbers: &[f32], mode: Mode, random: impl Fn(usize) -> u16) {
    for (i, (to, x)) in to.iter_mut().zip(numbers).enumerate() {
        to.put(*x, mode, random(i));
    }
}

/// Stores weights one by one, as [`put_each`] does moments.
#[cold]
#[inline(never)]
pub(super) fn put_each_weight<W: Weights>(
    mut to: W,
    numbers: &[f32],
    random: impl Fn(usize) -> u16,
) {
    for (i, x) in numbers.iter().enumerate() {
        to.put(i, *x, random(i));
    }
}

/// Elementwise maximum of `largest` and the magnitudes of an item, as `f32` bits.
#[inline(always)]
pub(super) fn larger<L: Lanes>(l: L, largest: L::U, [a, b]: Item<L>) -> L::U {
    let magnitude = l.u(0x7fff_ffff);
    let largest = l.max_u(largest, l.and(l.bits(a), magnitude));
    l.max_u(largest, l.and(l.bits(b), magnitude))
}

/// Position of a chunk in the random stream of rounding. Word 0 of a pair rounds the weight, word 1 the first moment,
/// word 2 the second. Words of states in `f32` are unused.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rounding {
    pub(super) stream: RandomStream,
    pub(super) step: u64,
    pub(super) first_element: u64,
}

impl Rounding {
    /// Position `skipped` elements later.
    pub(super) fn after(self, skipped: usize) -> Self {
        Self {
            first_element: self.first_element + skipped as u64,
            ..self
        }
    }
}

/// One AdamW update of one chunk. Gradient, weights and both moments have the same number of elements.
pub(super) struct Update<'a, G, W, M> {
    pub(super) coefficients: Coefficients,
    pub(super) rounding: Rounding,
    pub(super) grad: &'a [G],
    pub(super) weights: W,
    pub(super) m: &'a mut [M],
    pub(super) v: &'a mut [M],
}

impl<G: Number, W: Weights, M: Number> Update<'_, G, W, M> {
    /// Updates all elements, spread over the rayon pool.
    pub(super) fn spread(self, simd: Simd) {
        let n = self.grad.len();
        let page = PageKey::elems_left(self.rounding.first_element);
        if n as u64 > page {
            let (a, b) = self.split_at(page as usize);
            a.spread(simd);
            b.spread(simd);
        } else if n > CHUNK_ELEMS {
            let (a, b) = self.split_at((n / 2).next_multiple_of(CHUNK_ELEMS));
            rayon::join(|| a.spread(simd), || b.spread(simd));
        } else {
            simd.run(self);
        }
    }

    fn split_at(self, mid: usize) -> (Self, Self) {
        let (grad, weights) = (self.grad.split_at(mid), self.weights.split_at(mid));
        let (m, v) = (self.m.split_at_mut(mid), self.v.split_at_mut(mid));
        let part = |skipped: usize, grad, weights, m, v| Self {
            coefficients: self.coefficients,
            rounding: self.rounding.after(skipped),
            grad,
            weights,
            m,
            v,
        };
        (
            part(0, grad.0, weights.0, m.0, v.0),
            part(mid, grad.1, weights.1, m.1, v.1),
        )
    }

    /// Updates element by element: those before and after the whole items.
    fn scalar(&mut self, key: PageKey) {
        for i in 0..self.grad.len() {
            let random = key.halves(self.rounding.first_element + i as u64);
            let (weight, m, v) = self.coefficients.element(
                self.grad[i].get(),
                self.weights.get(i),
                self.m[i].get(),
                self.v[i].get(),
            );
            self.weights.put(i, weight, random[0]);
            self.m[i].put(m, W::MOMENTS, random[1]);
            self.v[i].put(v, W::MOMENTS, random[2]);
        }
    }

    /// First half of an item's update: computes and writes the moments. `pairs` is the part of the random hash that
    /// the words of a pair share, see [`Lanes::pairs`].
    #[inline(always)]
    fn begin<L: Lanes, const PAIRED: bool>(
        l: L,
        c: &Vectors<L>,
        key: PageKey,
        element: u64,
        pairs: L::U,
        (grad, m, v): (&[G], &mut [M], &mut [M]),
    ) -> Begun<L> {
        G::prefetch(l, grad);
        M::prefetch(l, m);
        M::prefetch(l, v);
        let grad: Item<L> = G::load::<L, PAIRED>(l, grad);
        let old_m: Item<L> = M::load::<L, PAIRED>(l, m);
        let old_v: Item<L> = M::load::<L, PAIRED>(l, v);
        let (m_a, v_a) = c.moments(l, grad[0], old_m[0], old_v[0]);
        let (m_b, v_b) = c.moments(l, grad[1], old_m[1], old_v[1]);
        let (new_m, new_v) = ([m_a, m_b], [v_a, v_b]);

        let draw = [
            (W::MODE == Mode::Stochastic).then_some(l.word(key, 0, pairs)),
            (W::MOMENTS == Mode::Stochastic).then_some(l.word(key, 1, pairs)),
            (W::MOMENTS == Mode::Stochastic).then_some(l.word(key, 2, pairs)),
        ];
        let packed_m = M::pack::<L, PAIRED>(l, new_m, draw[1]);
        let packed_v = M::pack::<L, PAIRED>(l, new_v, draw[2]);
        let fits = if PAIRED {
            let magnitude = l.u(0x7fff_7fff);
            let m = l.and(M::halves(l, packed_m), magnitude);
            let v = l.and(M::halves(l, packed_v), magnitude);
            l.all_halves_below(l.max_halves(m, v), LARGE_HALF)
                && (G::NARROW || l.all_below(larger(l, l.u(0), grad), LARGE))
        } else {
            !M::NARROW || l.all_below(larger(l, larger(l, l.u(0), new_m), new_v), LARGE)
        };
        if fits {
            M::store(l, m, packed_m);
            M::store(l, v, packed_v);
        } else {
            let random = |word: usize| move |i: usize| key.halves(element + i as u64)[word];
            let numbers = in_order::<L, PAIRED>(l, new_m);
            put_each(m, &numbers, W::MOMENTS, random(1));
            let numbers = in_order::<L, PAIRED>(l, new_v);
            put_each(v, &numbers, W::MOMENTS, random(2));
        }
        Begun {
            m: new_m,
            root: [l.sqrt(v_a), l.sqrt(v_b)],
            random: draw[0],
        }
    }

    /// Second half of an item's update: writes the weights.
    #[inline(always)]
    fn finish<L: Lanes, const PAIRED: bool>(
        l: L,
        c: &Vectors<L>,
        key: PageKey,
        element: u64,
        begun: &Begun<L>,
        mut weights: W,
    ) {
        let Begun { m, root, random } = begun;
        let old: Item<L> = weights.load::<L, PAIRED>(l, 0);
        let new = [
            c.weight(l, old[0], m[0], root[0]),
            c.weight(l, old[1], m[1], root[1]),
        ];
        let packed = W::pack::<L, PAIRED>(l, new, *random);
        let fits = if PAIRED && G::NARROW {
            let magnitude = l.and(W::halves(l, packed), l.u(0x7fff_7fff));
            l.all_halves_below(magnitude, LARGE_HALF)
        } else {
            !W::ROUNDS || l.all_below(larger(l, l.u(0), new), LARGE)
        };
        if fits {
            weights.store(l, 0, packed);
        } else {
            let random = move |i: usize| key.halves(element + i as u64)[0];
            put_each_weight(weights, &in_order::<L, PAIRED>(l, new)[..L::ITEM], random);
        }
    }

    /// Updates whole items; the first one begins at an even element of the run.
    ///
    /// The square root, the quotient and the random words are long dependency chains, which a short reorder window
    /// would execute one after another. So every iteration finishes one item, begins the next one, and prepares the
    /// random words of the one after it. These three do not depend on each other.
    #[inline(always)]
    fn items<L: Lanes, const PAIRED: bool>(self, l: L, key: PageKey) {
        // Local variables, because fields behind a reference would be reloaded after every store.
        let Self {
            coefficients,
            rounding,
            grad,
            mut weights,
            m,
            v,
        } = self;
        let c = coefficients.vectors(l);
        let grad = grad.chunks_exact(L::ITEM);
        let (m, v) = (m.chunks_exact_mut(L::ITEM), v.chunks_exact_mut(L::ITEM));
        let mut items = grad.zip(m).zip(v);
        let Some(((grad, m), v)) = items.next() else {
            return;
        };
        let (mut element, item) = (rounding.first_element, L::ITEM as u64);
        let pair = |element: u64| (element / 2) as u32;
        let pairs = l.pairs(key, pair(element));
        let mut begun = Self::begin::<L, PAIRED>(l, &c, key, element, pairs, (grad, m, v));
        let mut pairs = l.pairs(key, pair(element + item));
        for ((grad, m), v) in items {
            let ahead = l.pairs(key, pair(element + 2 * item));
            let next = Self::begin::<L, PAIRED>(l, &c, key, element + item, pairs, (grad, m, v));
            let (own, rest) = weights.split_at(L::ITEM);
            Self::finish::<L, PAIRED>(l, &c, key, element, &begun, own);
            (begun, pairs, weights) = (next, ahead, rest);
            element += item;
        }
        Self::finish::<L, PAIRED>(l, &c, key, element, &begun, weights);
    }
}

impl<G: Number, W: Weights, M: Number> Loop for Update<'_, G, W, M> {
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let first = self.rounding.first_element;
        let key = PageKey::new(self.rounding.stream, self.rounding.step, first);
        let n = self.grad.len();
        // An item begins at an even element, because a pair of random words covers elements `2k` and `2k + 1`.
        let (mut head, rest) = self.split_at(n.min((first % 2) as usize));
        head.scalar(key);
        let left = rest.grad.len();
        let (items, mut tail) = rest.split_at(left - left % L::ITEM);
        if W::NARROW && M::NARROW {
            items.items::<L, true>(l, key);
        } else {
            items.items::<L, false>(l, key);
        }
        tail.scalar(key);
    }
}

//! The update itself: one pass over memory, written once over the forms of [`super::windows`] and the instruction
//! sets of [`crate::lanes`].

use super::Coefficients;
use super::windows::{Item, LARGE, LARGE_HALF, Mode, Number, Weights};
use crate::lanes::{Lanes, Loop, Simd};
use crate::rng::RandomStream;
use crate::rounding::PageKey;

/// Elements per task: longer windows are spread over the rayon pool.
pub(super) const CHUNK_ELEMS: usize = 1 << 16;

impl Coefficients {
    /// New weight, first and second moment of one element.
    #[inline(always)]
    fn element(&self, grad: f32, weight: f32, m: f32, v: f32) -> (f32, f32, f32) {
        let grad = grad * self.grad_scale;
        let m = m + (grad - m) * self.one_minus_beta1;
        let v = v * self.beta2 + grad * grad * self.one_minus_beta2;
        let weight = weight * self.decay - self.step_size * m / (v.sqrt() + self.eps);
        (weight, m, v)
    }

    /// The same for a vector.
    #[inline(always)]
    fn vector<L: Lanes>(
        &self,
        l: L,
        grad: L::F,
        weight: L::F,
        m: L::F,
        v: L::F,
    ) -> (L::F, L::F, L::F) {
        let grad = l.mul(grad, l.f(self.grad_scale));
        let m = l.add(m, l.mul(l.sub(grad, m), l.f(self.one_minus_beta1)));
        let square = l.mul(l.mul(grad, grad), l.f(self.one_minus_beta2));
        let v = l.add(l.mul(v, l.f(self.beta2)), square);
        let denominator = l.add(l.sqrt(v), l.f(self.eps));
        let change = l.div(l.mul(l.f(self.step_size), m), denominator);
        let weight = l.sub(l.mul(weight, l.f(self.decay)), change);
        (weight, m, v)
    }
}

/// The larger magnitudes, as bits.
#[inline(always)]
fn larger<L: Lanes>(l: L, largest: L::U, [a, b]: Item<L>) -> L::U {
    let magnitude = l.u(0x7fff_ffff);
    let largest = l.max_u(largest, l.and(l.bits(a), magnitude));
    l.max_u(largest, l.and(l.bits(b), magnitude))
}

/// Where a window stands in the rounding stream: word 0 of a pair rounds the weight, word 1 the first moment, word 2
/// the second. What is kept in `f32` leaves its words unused.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rounding {
    pub(super) stream: RandomStream,
    pub(super) step: u64,
    pub(super) first_element: u64,
}

/// One update of windows of equal length.
pub(super) struct Update<'a, G, W, M> {
    pub(super) coefficients: Coefficients,
    pub(super) rounding: Rounding,
    pub(super) grad: &'a [G],
    pub(super) weights: W,
    pub(super) m: &'a mut [M],
    pub(super) v: &'a mut [M],
}

impl<G: Number, W: Weights, M: Number> Update<'_, G, W, M> {
    /// Steps all elements, spread over the rayon pool.
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
            rounding: Rounding {
                first_element: self.rounding.first_element + skipped as u64,
                ..self.rounding
            },
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

    /// One by one: the ends of a window, and items with numbers that the vectors' rounding cannot handle.
    fn scalar(&mut self, key: PageKey, range: std::ops::Range<usize>) {
        for i in range {
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

    /// Steps the elements from `i` on, an even one of the run. Returns false, with nothing written, when one of the
    /// new numbers is too large for the vectors' rounding.
    #[inline(always)]
    fn item<L: Lanes, const PAIRED: bool>(&mut self, l: L, key: PageKey, i: usize) -> bool {
        let own = i..i + L::ITEM;
        G::prefetch(l, &self.grad[i..]);
        M::prefetch(l, &self.m[i..]);
        M::prefetch(l, &self.v[i..]);
        let grad: Item<L> = G::load::<L, PAIRED>(l, &self.grad[own.clone()]);
        let weight: Item<L> = self.weights.load::<L, PAIRED>(l, i);
        let m: Item<L> = M::load::<L, PAIRED>(l, &self.m[own.clone()]);
        let v: Item<L> = M::load::<L, PAIRED>(l, &self.v[own.clone()]);
        let c = &self.coefficients;
        let (weight_a, m_a, v_a) = c.vector(l, grad[0], weight[0], m[0], v[0]);
        let (weight_b, m_b, v_b) = c.vector(l, grad[1], weight[1], m[1], v[1]);
        let (weight, m, v) = ([weight_a, weight_b], [m_a, m_b], [v_a, v_b]);

        let pair = ((self.rounding.first_element + i as u64) / 2) as u32;
        let pairs = l.pairs(key, pair);
        let draw = [
            (W::MODE == Mode::Stochastic).then_some(l.word(key, 0, pairs)),
            (W::MOMENTS == Mode::Stochastic).then_some(l.word(key, 1, pairs)),
            (W::MOMENTS == Mode::Stochastic).then_some(l.word(key, 2, pairs)),
        ];
        let new_weight = W::pack::<L, PAIRED>(l, weight, draw[0]);
        let new_m = M::pack::<L, PAIRED>(l, m, draw[1]);
        let new_v = M::pack::<L, PAIRED>(l, v, draw[2]);
        let fits = if PAIRED {
            let magnitude = l.u(0x7fff_7fff);
            let weight = l.and(W::halves(l, new_weight), magnitude);
            let m = l.and(M::halves(l, new_m), magnitude);
            let v = l.and(M::halves(l, new_v), magnitude);
            l.all_halves_below(l.max_halves(l.max_halves(weight, m), v), LARGE_HALF)
        } else if M::NARROW {
            let largest = larger(l, larger(l, larger(l, l.u(0), weight), m), v);
            l.all_below(largest, LARGE)
        } else {
            !W::ROUNDS || l.all_below(larger(l, l.u(0), weight), LARGE)
        };
        if !fits {
            return false;
        }
        self.weights.store(l, i, new_weight);
        M::store(l, &mut self.m[own.clone()], new_m);
        M::store(l, &mut self.v[own], new_v);
        true
    }

    #[inline(always)]
    fn items<L: Lanes, const PAIRED: bool>(mut self, l: L) {
        let first = self.rounding.first_element;
        let key = PageKey::new(self.rounding.stream, self.rounding.step, first);
        let n = self.grad.len();
        // Items begin at even elements, which begin a pair.
        let mut i = n.min((first % 2) as usize);
        self.scalar(key, 0..i);
        while i + L::ITEM <= n {
            if !self.item::<L, PAIRED>(l, key, i) {
                self.scalar(key, i..i + L::ITEM);
            }
            i += L::ITEM;
        }
        self.scalar(key, i..n);
    }
}

impl<G: Number, W: Weights, M: Number> Loop for Update<'_, G, W, M> {
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        if G::NARROW && W::NARROW && M::NARROW {
            self.items::<L, true>(lanes);
        } else {
            self.items::<L, false>(lanes);
        }
    }
}

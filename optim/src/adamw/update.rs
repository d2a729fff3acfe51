//! The update itself, written as plain loops that the compiler turns into vector code.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use kernels::Float;

use super::{Bf16Storage, Coefficients};
use crate::optimizer::StateWindow;
use crate::rng::{RandomStream, philox4x32_lanes, stochastic_round_bf16};

/// Elements that share one round of random numbers; also the size of the stack buffers.
const ROUNDING_ELEMS: usize = 64;
const PAIRS: usize = ROUNDING_ELEMS / 2;
/// Elements converted to `f16` while they are in the first-level cache.
const CAST_ELEMS: usize = 1024;

impl Coefficients {
    /// New weight, first and second moment of one element.
    #[inline(always)]
    fn element(&self, grad: f32, weight: f32, m: f32, v: f32) -> (f32, f32, f32) {
        let grad = grad * self.grad_scale;
        let m = m + (grad - m) * self.one_minus_beta1;
        let v = v * self.beta2 + grad * grad * self.one_minus_beta2;
        let denominator = v.sqrt() / self.sqrt_bias_correction2 + self.eps;
        let weight = weight * self.decay - self.step_size * m / denominator;
        (weight, m, v)
    }
}

#[inline(always)]
pub(super) fn f32(
    c: &Coefficients,
    grad: &[f32],
    weight: &mut [f32],
    m: &mut [f32],
    v: &mut [f32],
) {
    let n = grad.len();
    let (weight, m, v) = (&mut weight[..n], &mut m[..n], &mut v[..n]);
    for i in 0..n {
        (weight[i], m[i], v[i]) = c.element(grad[i], weight[i], m[i], v[i]);
    }
}

#[inline(always)]
pub(super) fn mixed_bf16(
    c: &Coefficients,
    grad: &[f32],
    master: &mut [f32],
    weight: &mut [bf16],
    m: &mut [f32],
    v: &mut [f32],
) {
    let n = grad.len();
    let (master, weight, m, v) = (&mut master[..n], &mut weight[..n], &mut m[..n], &mut v[..n]);
    for i in 0..n {
        (master[i], m[i], v[i]) = c.element(grad[i], master[i], m[i], v[i]);
        weight[i] = <bf16 as Float>::from_f32(master[i]);
    }
}

#[inline(always)]
pub(super) fn mixed_f16(
    c: &Coefficients,
    grad: &[f32],
    master: &mut [f32],
    weight: &mut [f16],
    m: &mut [f32],
    v: &mut [f32],
) {
    for start in (0..grad.len()).step_by(CAST_ELEMS) {
        let range = start..grad.len().min(start + CAST_ELEMS);
        let master = &mut master[range.clone()];
        f32(
            c,
            &grad[range.clone()],
            master,
            &mut m[range.clone()],
            &mut v[range.clone()],
        );
        weight[range].convert_from_f32_slice(master);
    }
}

/// Where a window stands in the rounding stream. Elements `2k` and `2k + 1` share the block at (step, k): the low
/// and high half of word 0 round the weight, of word 1 the first moment, of word 2 the second. Moments in `f32` leave
/// their words unused.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rounding {
    pub(super) stream: RandomStream,
    pub(super) step: u64,
    pub(super) first_element: u64,
}

impl Rounding {
    pub(super) fn advanced(self, elems: u64) -> Self {
        Self {
            first_element: self.first_element + elems,
            ..self
        }
    }

    /// Random halves of [`ROUNDING_ELEMS`] elements from the even element `2 * first_pair`, one row per slot.
    #[inline(always)]
    fn halves(&self, first_pair: u64) -> [[u16; ROUNDING_ELEMS]; 3] {
        let mut counter = [[0u32; PAIRS]; 4];
        for l in 0..PAIRS {
            let pair = first_pair.wrapping_add(l as u64);
            counter[0][l] = pair as u32;
            counter[1][l] = (pair >> 32) as u32;
            counter[2][l] = self.step as u32;
            counter[3][l] = (self.step >> 32) as u32;
        }
        let words = philox4x32_lanes(counter, self.stream.key());
        let mut halves = [[0u16; ROUNDING_ELEMS]; 3];
        for slot in 0..3 {
            for l in 0..PAIRS {
                halves[slot][2 * l] = words[slot][l] as u16;
                halves[slot][2 * l + 1] = (words[slot][l] >> 16) as u16;
            }
        }
        halves
    }
}

#[inline(always)]
pub(super) fn pure_bf16(
    c: &Coefficients,
    rounding: Rounding,
    grad: &[f32],
    weight: &mut [bf16],
    m: &mut [bf16],
    v: &mut [bf16],
) {
    let mut start = 0;
    while start < grad.len() {
        let element = rounding.first_element + start as u64;
        // The first block may begin inside an aligned run of elements; all others are aligned.
        let skip = (element % ROUNDING_ELEMS as u64) as usize;
        let n = (ROUNDING_ELEMS - skip).min(grad.len() - start);
        let random = rounding.halves((element - skip as u64) / 2);
        let range = start..start + n;
        let window = [
            &mut weight[range.clone()],
            &mut m[range.clone()],
            &mut v[range.clone()],
        ];
        pure_bf16_run(c, &random, skip, &grad[range], window);
        start += n;
    }
}

/// `bf16` weights stored with stochastic rounding, moments in `f32`.
#[inline(always)]
pub(super) fn rounded_bf16(
    c: &Coefficients,
    rounding: Rounding,
    grad: &[f32],
    weight: &mut [bf16],
    m: &mut [f32],
    v: &mut [f32],
) {
    let mut start = 0;
    while start < grad.len() {
        let element = rounding.first_element + start as u64;
        let skip = (element % ROUNDING_ELEMS as u64) as usize;
        let n = (ROUNDING_ELEMS - skip).min(grad.len() - start);
        let random = rounding.halves((element - skip as u64) / 2)[0];
        let range = start..start + n;
        let mut wide = [0f32; ROUNDING_ELEMS];
        let wide = &mut wide[..n];
        for (wide, narrow) in wide.iter_mut().zip(&weight[range.clone()]) {
            *wide = <bf16 as Float>::to_f32(*narrow);
        }
        let (m, v) = (&mut m[range.clone()], &mut v[range.clone()]);
        f32(c, &grad[range.clone()], wide, m, v);
        let random = &random[skip..skip + n];
        for ((narrow, wide), random) in weight[range].iter_mut().zip(wide).zip(random) {
            *narrow = stochastic_round_bf16(*wide, *random);
        }
        start += n;
    }
}

/// Steps the elements `skip..skip + grad.len()` of an aligned run, through a padded copy: one loop of known length
/// vectorises where a loop over the slices falls back to scalar code; whole runs copy with a known length too.
#[inline(always)]
fn pure_bf16_run(
    c: &Coefficients,
    random: &[[u16; ROUNDING_ELEMS]; 3],
    skip: usize,
    grad: &[f32],
    window: [&mut [bf16]; 3],
) {
    let n = grad.len();
    let mut wide_grad = [0f32; ROUNDING_ELEMS];
    let mut wide = [[bf16::ZERO; ROUNDING_ELEMS]; 3];
    if n == ROUNDING_ELEMS {
        wide_grad.copy_from_slice(grad);
        for (wide, narrow) in wide.iter_mut().zip(&window) {
            wide.copy_from_slice(narrow);
        }
    } else {
        wide_grad[skip..skip + n].copy_from_slice(grad);
        for (wide, narrow) in wide.iter_mut().zip(&window) {
            wide[skip..skip + n].copy_from_slice(narrow);
        }
    }
    let [weight, m, v] = &mut wide;
    for i in 0..ROUNDING_ELEMS {
        let old = [weight[i], m[i], v[i]].map(<bf16 as Float>::to_f32);
        let (new_weight, new_m, new_v) = c.element(wide_grad[i], old[0], old[1], old[2]);
        weight[i] = stochastic_round_bf16(new_weight, random[0][i]);
        m[i] = stochastic_round_bf16(new_m, random[1][i]);
        v[i] = stochastic_round_bf16(new_v, random[2][i]);
    }
    for (wide, narrow) in wide.iter().zip(window) {
        if n == ROUNDING_ELEMS {
            narrow.copy_from_slice(wide);
        } else {
            narrow.copy_from_slice(&wide[skip..skip + n]);
        }
    }
}

/// The other ways of storing `bf16` weights, element by element: plain and compensated rounding to the nearest.
pub(super) fn elementwise(
    c: &Coefficients,
    rounding: Rounding,
    storage: Bf16Storage,
    grad: &[f32],
    weight: &mut [bf16],
    state: &mut [StateWindow<'_>],
) {
    let nearest = |value: f32| <bf16 as Float>::from_f32(value);
    let wide = |value: bf16| <bf16 as Float>::to_f32(value);
    let get = |window: &StateWindow<'_>, i: usize| match window {
        StateWindow::F32(values) => values[i],
        StateWindow::Bf16(values) => wide(values[i]),
    };
    let put = |window: &mut StateWindow<'_>, i: usize, value: f32, random: u16| match window {
        StateWindow::F32(values) => values[i] = value,
        StateWindow::Bf16(values) if storage == Bf16Storage::Nearest => values[i] = nearest(value),
        StateWindow::Bf16(values) => values[i] = stochastic_round_bf16(value, random),
    };
    for i in 0..grad.len() {
        let element = rounding.first_element + i as u64;
        let words = rounding.stream.block(rounding.step, element / 2);
        let half = |word: usize| (words[word] >> (16 * (element % 2))) as u16;
        let error = state.get(2).map_or(0.0, |window| get(window, i));
        let old = wide(weight[i]) + error;
        let (new, m, v) = c.element(grad[i], old, get(&state[0], i), get(&state[1], i));
        weight[i] = nearest(new);
        put(&mut state[0], i, m, half(1));
        put(&mut state[1], i, v, half(2));
        if let Some(StateWindow::Bf16(errors)) = state.get_mut(2) {
            errors[i] = nearest(new - wide(weight[i]));
        }
    }
}

//! Reductions in a fixed order that vectorizes: independent lanes, then a tree over them.

use crate::Float;

const LANES: usize = 32;

/// Combines the upper half of `lanes` with the lower half.
#[inline(always)]
fn halve<const N: usize, const HALF: usize>(
    lanes: &[f32; N],
    f: impl Fn(f32, f32) -> f32,
) -> [f32; HALF] {
    std::array::from_fn(|i| f(lanes[i], lanes[i + HALF]))
}

/// Combines lanes in a tree, with whole vectors at its upper levels.
#[inline(always)]
fn tree(lanes: &[f32; LANES], f: impl Fn(f32, f32) -> f32 + Copy) -> f32 {
    let sixteen: [f32; 16] = halve(lanes, f);
    let eight: [f32; 8] = halve(&sixteen, f);
    let four: [f32; 4] = halve(&eight, f);
    f(f(four[0], four[2]), f(four[1], four[3]))
}

#[inline(always)]
fn plus(a: f32, b: f32) -> f32 {
    a + b
}

/// Sum of `f(x[i])` over all elements `i`, in f32. The order of additions depends only on the length.
#[inline(always)]
pub(crate) fn sum<T: Float>(x: &[T], f: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let chunks = x.chunks_exact(LANES);
    let rest = chunks.remainder();
    for x in chunks {
        for i in 0..LANES {
            lanes[i] += f(x[i].to_f32());
        }
    }
    for (i, x) in rest.iter().enumerate() {
        lanes[i] += f(x.to_f32());
    }
    tree(&lanes, plus)
}

/// Sum of `f(x[i], y[i])` over all elements `i`, in f32. The slices have equal lengths.
#[inline(always)]
pub(crate) fn sum2<T: Float, U: Float>(x: &[T], y: &[U], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let (xs, ys) = (x.chunks_exact(LANES), y.chunks_exact(LANES));
    let rest = xs.remainder().iter().zip(ys.remainder());
    for (i, (x, y)) in rest.enumerate() {
        lanes[i] += f(x.to_f32(), y.to_f32());
    }
    for (x, y) in xs.zip(ys) {
        for i in 0..LANES {
            lanes[i] += f(x[i].to_f32(), y[i].to_f32());
        }
    }
    tree(&lanes, plus)
}

/// Sum of `f(x[i], y[i], z[i])` over all elements `i`, in f32. The slices have equal lengths.
#[inline(always)]
pub(crate) fn sum3<T: Float, U: Float>(
    x: &[T],
    y: &[U],
    z: &[T],
    f: impl Fn(f32, f32, f32) -> f32,
) -> f32 {
    let mut lanes = [0.0; LANES];
    let (xs, ys, zs) = (
        x.chunks_exact(LANES),
        y.chunks_exact(LANES),
        z.chunks_exact(LANES),
    );
    let rest = xs
        .remainder()
        .iter()
        .zip(ys.remainder())
        .zip(zs.remainder());
    for (i, ((x, y), z)) in rest.enumerate() {
        lanes[i] += f(x.to_f32(), y.to_f32(), z.to_f32());
    }
    for ((x, y), z) in xs.zip(ys).zip(zs) {
        for i in 0..LANES {
            lanes[i] += f(x[i].to_f32(), y[i].to_f32(), z[i].to_f32());
        }
    }
    tree(&lanes, plus)
}

/// Largest element, ignoring NaN. Negative infinity for an empty slice.
#[inline(always)]
pub(crate) fn max(x: &[f32]) -> f32 {
    let greater = |a: f32, b: f32| if a > b { a } else { b };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let chunks = x.chunks_exact(LANES);
    let rest = chunks.remainder();
    for x in chunks {
        for i in 0..LANES {
            lanes[i] = greater(x[i], lanes[i]);
        }
    }
    for (i, x) in rest.iter().enumerate() {
        lanes[i] = greater(*x, lanes[i]);
    }
    tree(&lanes, greater)
}

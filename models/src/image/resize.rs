//! Bicubic resize with anti-aliasing in 8-bit fixed point, equal to Pillow (up to 12) byte for byte.
//!
//! One pass per axis, horizontal first; its rows are rounded to bytes. Only the rows that the vertical pass needs next
//! are in memory. A pass whose size does not change is skipped, so resizing to the same size is a copy.

use std::borrow::Cow;
use std::collections::VecDeque;

use super::RgbImage;

/// Fraction bits of an integer tap: 32 minus 8 for the byte minus 2 for sign and overshoot.
const PRECISION_BITS: u32 = 22;
/// Half of one output unit, for rounding.
const HALF: i32 = 1 << (PRECISION_BITS - 1);
/// Radius of the cubic kernel in input pixels, without shrinking.
const CUBIC_SUPPORT: f64 = 2.0;

/// Resizes `image` to `width` x `height` pixels by bicubic interpolation with anti-aliasing, byte for byte as
/// Pillow.
///
/// # Panics
/// If `width` or `height` is zero.
pub fn resize(image: &RgbImage, width: usize, height: usize) -> RgbImage {
    assert!(width > 0 && height > 0, "a picture has at least one pixel");
    let columns = (width != image.width()).then(|| windows(image.width(), width));
    let row = |y: usize| match &columns {
        Some(columns) => Cow::Owned(horizontal(image.row(y), columns)),
        None => Cow::Borrowed(image.row(y)),
    };
    if height == image.height() {
        let mut pixels = Vec::with_capacity(width * 3 * height);
        (0..height).for_each(|y| pixels.extend_from_slice(&row(y)));
        return RgbImage::new(width, height, pixels);
    }
    vertical(&row, image.height(), width, height)
}

/// Integer weights of the input pixels `first .. first + taps.len()` for one output pixel.
struct FilterWindow {
    first: usize,
    taps: Vec<i32>,
}

fn cubic(x: f64) -> f64 {
    const A: f64 = -0.5;
    let x = x.abs();
    if x < 1.0 {
        ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        (((x - 5.0) * x + 8.0) * x - 4.0) * A
    } else {
        0.0
    }
}

fn windows(in_size: usize, out_size: usize) -> Vec<FilterWindow> {
    let scale = in_size as f64 / out_size as f64;
    let filter_scale = scale.max(1.0);
    let support = CUBIC_SUPPORT * filter_scale;
    let inverse = 1.0 / filter_scale;
    (0..out_size)
        .map(|out| {
            let center = (out as f64 + 0.5) * scale;
            // casts truncate toward zero and saturate at zero, as the reference clamps
            let first = (center - support + 0.5) as usize;
            let end = ((center + support + 0.5) as usize).min(in_size);
            let weights: Vec<f64> = (first..end)
                .map(|i| cubic((i as f64 - center + 0.5) * inverse))
                .collect();
            let sum: f64 = weights.iter().sum();
            let taps = weights.iter().map(|&w| fixed_point(w / sum)).collect();
            FilterWindow { first, taps }
        })
        .collect()
}

/// Rounds half away from zero to `PRECISION_BITS` fraction bits.
fn fixed_point(weight: f64) -> i32 {
    let scaled = weight * f64::from(1u32 << PRECISION_BITS);
    if weight < 0.0 {
        (scaled - 0.5) as i32
    } else {
        (scaled + 0.5) as i32
    }
}

fn to_byte(sum: i32) -> u8 {
    (sum >> PRECISION_BITS).clamp(0, 255) as u8
}

/// A row, resized to one pixel for each of `windows`.
fn horizontal(row: &[u8], windows: &[FilterWindow]) -> Vec<u8> {
    let mut pixels = Vec::with_capacity(windows.len() * 3);
    for window in windows {
        let mut sums = [HALF; 3];
        let span = &row[window.first * 3..][..window.taps.len() * 3];
        for (pixel, &tap) in span.as_chunks::<3>().0.iter().zip(&window.taps) {
            for c in 0..3 {
                sums[c] += i32::from(pixel[c]) * tap;
            }
        }
        pixels.extend(sums.map(to_byte));
    }
    pixels
}

/// Resizes `in_height` rows of `width` pixels, which `row` gives by their numbers, to `height` rows.
fn vertical<'a>(
    row: &dyn Fn(usize) -> Cow<'a, [u8]>,
    in_height: usize,
    width: usize,
    height: usize,
) -> RgbImage {
    let mut pixels = Vec::with_capacity(width * 3 * height);
    let mut sums = vec![HALF; width * 3];
    // Rows of the current window, from the number `first` on. Windows only move on.
    let (mut first, mut rows) = (0, VecDeque::new());
    for window in windows(in_height, height) {
        while first < window.first {
            // A window may skip rows that no other needs.
            rows.pop_front();
            first += 1;
        }
        while rows.len() < window.taps.len() {
            rows.push_back(row(first + rows.len()));
        }
        sums.fill(HALF);
        for (row, &tap) in rows.iter().zip(&window.taps) {
            for (sum, &byte) in sums.iter_mut().zip(row.iter()) {
                *sum += i32::from(byte) * tap;
            }
        }
        pixels.extend(sums.iter().map(|&sum| to_byte(sum)));
    }
    RgbImage::new(width, height, pixels)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn noise(width: usize, height: usize, seed: u32) -> RgbImage {
        let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        };
        let pixels = (0..width * height * 3).map(|_| next()).collect();
        RgbImage::new(width, height, pixels)
    }

    #[test]
    fn resizing_to_the_same_size_is_a_copy() {
        let image = noise(13, 7, 1);
        assert_eq!(resize(&image, 13, 7), image);
    }

    #[test]
    fn resizing_one_axis_leaves_the_other_unchanged() {
        // rows are constant, so a skipped horizontal pass must keep every row constant
        let pixels = (0..6u8).flat_map(|y| [y * 40; 12]).collect();
        let out = resize(&RgbImage::new(4, 6, pixels), 4, 3);
        assert!((0..3).all(|y| out.row(y).iter().all(|&b| b == out.row(y)[0])));
        // columns untouched by the vertical pass when only the width changes
        let tall = noise(9, 5, 3);
        let out = resize(&tall, 4, 5);
        for y in 0..5 {
            let row = RgbImage::new(9, 1, tall.row(y).to_vec());
            assert_eq!(out.row(y), resize(&row, 4, 1).pixels());
        }
    }

    #[test]
    fn halving_averages_pairs_of_pixels() {
        let image = RgbImage::new(2, 1, vec![0, 10, 255, 100, 20, 255]);
        assert_eq!(resize(&image, 1, 1).pixels(), [50, 15, 255]);
    }

    #[test]
    fn doubling_matches_hand_computed_taps() {
        // centre 0.75: inputs at distances 0.25 and 0.75 weigh 0.8671875 and 0.2265625, over their
        // sum; at centre 0.25 the second input's weight is negative and the result is clipped
        let image = RgbImage::new(2, 1, vec![0, 0, 0, 255, 255, 255]);
        let low = f64::round(255.0 * 0.226_562_5 / (0.867_187_5 + 0.226_562_5)) as u8;
        let columns: Vec<u8> = resize(&image, 4, 1)
            .pixels()
            .iter()
            .step_by(3)
            .copied()
            .collect();
        assert_eq!(columns, [0, low, 255 - low, 255]);
    }

    proptest! {
        #[test]
        fn a_uniform_image_stays_uniform(
            w in 1usize..40, h in 1usize..40, ow in 1usize..60, oh in 1usize..60, byte: u8,
        ) {
            let image = RgbImage::new(w, h, vec![byte; w * h * 3]);
            let out = resize(&image, ow, oh);
            prop_assert!(out.pixels().iter().all(|&b| b == byte));
        }

        #[test]
        fn mirrored_input_gives_mirrored_output(w in 1usize..30, ow in 1usize..40, seed: u32) {
            let image = noise(w, 1, seed);
            let mirror = |image: &RgbImage| {
                let pixels = image.pixels().chunks(3).rev().flatten().copied().collect();
                RgbImage::new(image.width(), 1, pixels)
            };
            let a = mirror(&resize(&image, ow, 1));
            let b = resize(&mirror(&image), ow, 1);
            // window edges round differently on exact ties, one grey level at most on noise this small
            let worst = a.pixels().iter().zip(b.pixels()).map(|(a, b)| a.abs_diff(*b)).max();
            prop_assert!(worst <= Some(1));
        }
    }
}

//! Elementary functions in f32 without branches, so loops over them vectorize.
//!
//! They use no fused multiply-add, so the results are the same on every processor.

const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// ln 2 in two parts: the product of the first with a small integer is exact.
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;
/// Adding and subtracting 1.5 * 2^23 rounds to the nearest integer.
const ROUND: f32 = 12_582_912.0;

/// Exponential in two parts: returns `(p, n)` with `e^x = p * 2^n`.
#[inline(always)]
fn scaled_exp(x: f32) -> (f32, i32) {
    let shifted = x * LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = x - n * LN2_HIGH - n * LN2_LOW;
    // Taylor terms 2 to 7, the last two fitted to the interval |r| <= ln(2) / 2.
    let mut p = 1.987_569_2e-4;
    p = p * r + 1.398_2e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 0.5;
    p = p * (r * r) + r + 1.0;
    (
        p,
        (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32),
    )
}

/// `e^x` within 2 units in the last place; 0 below -104, infinity above 88.8, NaN for NaN.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // NaN passes both comparisons unchanged.
    let x = if x < -104.0 { -104.0 } else { x };
    let x = if x > 89.0 { 89.0 } else { x };
    let (p, n) = scaled_exp(x);
    // Two factors, because 2^n alone overflows the exponent at either end.
    let half = n >> 1;
    p * power_of_two(half) * power_of_two(n.wrapping_sub(half))
}

/// Softmax weight `e^x` for `x` up to about 1. It is 0 below 1e-30, which is negligible beside the largest weight. So
/// no product with a weight is subnormal, which would be slow.
#[inline(always)]
pub(crate) fn weight(x: f32) -> f32 {
    let clamped = if x < -69.0 { -69.0 } else { x };
    let (p, n) = scaled_exp(clamped);
    let value = p * power_of_two(n);
    if x < -69.0 { 0.0 } else { value }
}

#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// Sigmoid: `1 / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// Distribution function (error below 2.4e-7) and density of the standard normal distribution at `x`. The smaller
/// tail keeps its relative accuracy.
#[inline(always)]
pub(crate) fn normal(x: f32) -> (f32, f32) {
    let e = exp(-0.5 * x * x);
    let z = x.abs() * std::f32::consts::FRAC_1_SQRT_2;
    // erfc(z) e^(z^2) = t p(t) with t = 1 / (1 + 0.4 z): a minimax polynomial for z <= 10 with error 4e-8.
    let t = 1.0 / (1.0 + 0.4 * z);
    let mut p = 0.038_508_51;
    p = p * t - 0.127_446_44;
    p = p * t + 0.058_450_89;
    p = p * t + 0.115_858_61;
    p = p * t + 0.061_465_688;
    p = p * t + 0.200_742_55;
    p = p * t + 0.200_125_26;
    p = p * t + 0.226_673_27;
    p = p * t + 0.225_621_7;
    let tail = 0.5 * e * t * p;
    let cdf = if x > 0.0 { 1.0 - tail } else { tail };
    (cdf, e * 0.398_942_3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_ulp_and_keeps_the_special_values() {
        let mut x = -87.0f32;
        while x < 88.7 {
            let want = f64::from(x).exp();
            let got = f64::from(exp(x));
            assert!((got - want).abs() <= 2.4e-7 * want, "{x}: {got} {want}");
            x += 0.013;
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
        for x in [0.0, -1.0, -20.3, -68.9, 0.7] {
            assert_eq!(weight(x), exp(x));
        }
        assert_eq!((weight(-69.1), weight(f32::NEG_INFINITY)), (0.0, 0.0));
        assert!(weight(f32::NAN).is_nan());
    }

    #[test]
    fn normal_distribution_matches_its_integral() {
        // Simpson's rule for the integral of the density, in f64.
        let density = |x: f64| (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt();
        let (mut integral, step) = (0.5, 1e-3);
        for i in 0..8000 {
            let x = f64::from(i) * step;
            let (cdf, pdf) = normal(x as f32);
            assert!(
                (f64::from(cdf) - integral).abs() < 2.4e-7,
                "{x}: {cdf} {integral}"
            );
            assert!((f64::from(pdf) - density(x)).abs() < 1e-7);
            let (below, _) = normal(-x as f32);
            assert!((f64::from(below) - (1.0 - integral)).abs() < 2.4e-7, "-{x}");
            integral +=
                step / 6.0 * (density(x) + 4.0 * density(x + step / 2.0) + density(x + step));
        }
    }
}

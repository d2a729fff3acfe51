//! Tests of layer norm and RMS norm, values and gradients, against f64.

mod common;

use common::{Case, assert_close, config, dtypes, largest, reference as naive, tolerance};
use kernels::{Backend, DType};
use proptest::prelude::*;

/// Largest ratio of root mean square to standard deviation over the rows.
fn cancellation(x: &[f64], c: usize) -> f64 {
    let ratio = |row: &[f64]| {
        let (_, about_zero) = naive::statistics(row, 1e-6, false);
        naive::statistics(row, 1e-6, true).1 / about_zero
    };
    x.chunks_exact(c).map(ratio).fold(1.0, f64::max)
}

proptest! {
    #![proptest_config(config(48))]

    #[test]
    fn norms_match_f64(
        rows in 1..150usize,
        c in prop_oneof![2..6usize, 6..200usize],
        dtype in dtypes(),
        weight_dtype in dtypes(),
        layer: bool,
        seed: u64,
    ) {
        let mut case = Case::new(seed);
        let x = case.operand(&[rows, c], dtype, 2.0);
        let w = case.operand(&[c], weight_dtype, 1.5);
        let b = case.operand(&[c], weight_dtype, 1.5);
        let dy = case.operand(&[rows, c], dtype, 1.0);
        let eps = 1e-6f32;
        let cpu = &case.cpu;
        let (y, grads) = if layer {
            (
                cpu.layer_norm(&x.tensor, &w.tensor, &b.tensor, eps).unwrap(),
                cpu.layer_norm_backward(&x.tensor, &w.tensor, &dy.tensor, eps).unwrap(),
            )
        } else {
            (
                cpu.rms_norm(&x.tensor, &w.tensor, eps).unwrap(),
                cpu.rms_norm_backward(&x.tensor, &w.tensor, &dy.tensor, eps).unwrap(),
            )
        };
        let eps = f64::from(eps);
        let bias = layer.then_some(&b.values[..]);
        let want = naive::norm(&x.values, &w.values, bias, eps);
        let (dx, dw, db) = naive::norm_backward(&x.values, &w.values, &dy.values, eps, layer);
        // A normalized element is below sqrt(c). RMS norm rounds it before it is multiplied with the weight.
        let normal = (c as f64).sqrt();
        let extra = if layer { 0.0 } else { tolerance::unit(dtype) * 1.001 };
        let cancel = if layer { cancellation(&x.values, c) } else { 1.0 };
        assert_close("y", &y, &want, |i| {
            tolerance::norm(dtype, c, want[i], 1.5 * normal, cancel) + extra * want[i].abs()
        });
        let steepest = x
            .values
            .chunks_exact(c)
            .map(|row| naive::statistics(row, eps, layer).1)
            .fold(0.0, f64::max);
        let size = steepest * 1.5 * (1.0 + normal);
        assert_close("dx", &grads.dx, &dx, |i| tolerance::norm(dtype, c, dx[i], size, cancel));
        // Sums of `dy * normal` over rows.
        let total = rows as f64 * normal;
        let sums = |want: f64| {
            tolerance::sum(DType::F32, rows, want, total)
                + tolerance::norm(DType::F32, c, want, total, cancel)
                + extra * total
        };
        assert_close("d_weight", &grads.d_weight, &dw, |i| sums(dw[i]));
        prop_assert_eq!(grads.d_bias.is_some(), layer);
        if let Some(got) = &grads.d_bias {
            assert_close("d_bias", got, &db, |i| sums(db[i]));
        }
    }
}

#[test]
fn the_reference_gradient_is_the_slope_of_the_reference() {
    let (rows, c) = (3, 5);
    let mut random = common::Random::new(1);
    let mut draw = |n: usize| -> Vec<f64> { (0..n).map(|_| random.unit()).collect() };
    let (x, w, b, dy) = (draw(rows * c), draw(c), draw(c), draw(rows * c));
    for layer in [true, false] {
        let f = |x: &[f64], w: &[f64], b: &[f64]| -> f64 {
            let y = naive::norm(x, w, layer.then_some(b), 1e-5);
            y.iter().zip(&dy).map(|(y, d)| y * d).sum()
        };
        let (dx, dw, db) = naive::norm_backward(&x, &w, &dy, 1e-5, layer);
        common::assert_slope(|x| f(x, &w, &b), &x, &dx);
        common::assert_slope(|w| f(&x, w, &b), &w, &dw);
        if layer {
            common::assert_slope(|b| f(&x, &w, b), &b, &db);
        }
    }
}

#[test]
fn a_row_of_equal_elements_gives_the_bias() {
    let mut case = Case::new(1);
    let x = common::operand(&case.cpu, &[1, 64], DType::F32, &[3.0; 64]);
    let w = case.operand(&[64], DType::F32, 1.0);
    let b = case.operand(&[64], DType::F32, 1.0);
    let y = case
        .cpu
        .layer_norm(&x.tensor, &w.tensor, &b.tensor, 1e-6)
        .unwrap();
    assert!(largest(&naive::add(&common::values_of(&y), &b.values, -1.0)) == 0.0);
}

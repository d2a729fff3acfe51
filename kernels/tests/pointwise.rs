//! Tests of elementwise operations and rotary position embedding against f64.

mod common;

use common::{Case, assert_close, config, dtypes, reference as naive, tolerance};
use kernels::{Backend, DType, Direction, DropoutArgs, Gelu, RopeLayout};
use proptest::prelude::*;

proptest! {
    #![proptest_config(config(48))]

    #[test]
    fn sums_factors_and_casts_match_f64(n in 0..300usize, a in dtypes(), b in dtypes(), seed: u64) {
        let mut case = Case::new(seed);
        let x = case.operand(&[n], a, 10.0);
        let y = case.operand(&[n], a, 10.0);
        let sum = case.cpu.add(&x.tensor, &y.tensor).unwrap();
        let want = naive::add(&x.values, &y.values, 1.0);
        assert_close("add", &sum, &want, |i| tolerance::pointwise(a, 1, want[i], 20.0));
        let scaled = case.cpu.scale(&x.tensor, 0.3).unwrap();
        let want: Vec<f64> = x.values.iter().map(|x| x * f64::from(0.3f32)).collect();
        assert_close("scale", &scaled, &want, |i| tolerance::pointwise(a, 1, want[i], 3.0));
        let cast = case.cpu.cast(&x.tensor, b).unwrap();
        prop_assert_eq!(cast.dtype(), b);
        assert_close("cast", &cast, &x.values, |i| tolerance::store(b, x.values[i]));
    }

    #[test]
    fn dropout_keeps_its_share_and_depends_only_on_the_row(
        k in 1..70usize, dtype in dtypes(), p in 0.0f32..0.9, seed: u64,
    ) {
        let mut case = Case::new(seed);
        let t = 40;
        let x = case.operand(&[t, k], dtype, 3.0);
        let words = |from: usize, t: usize| -> Vec<i32> {
            (from..from + t).flat_map(|r| [(r / 7) as i32, (r % 7) as i32 - 3]).collect()
        };
        let key = [seed as u32, 5];
        let run = |x: &kernels::Tensor, from: usize| {
            let t = x.shape().rows();
            let bytes = words(from, t);
            let rows = case.cpu.upload(bytemuck::cast_slice(&bytes), [t, 2].into(), DType::I32, kernels::Tag::Activations);
            case.cpu.dropout(DropoutArgs { x, rows: &rows.unwrap(), key, p }).unwrap().to_f32_vec().unwrap()
        };
        let y = run(&x.tensor, 0);
        let factor = 1.0 / (1.0 - f64::from(p));
        let mut dropped = 0usize;
        for (i, y) in y.iter().enumerate() {
            if *y == 0.0 && x.values[i] != 0.0 {
                dropped += 1;
            } else {
                let want = x.values[i] * factor;
                prop_assert!((f64::from(*y) - want).abs() <= tolerance::pointwise(dtype, 1, want, 30.0));
            }
        }
        // Five standard deviations of a binomial distribution.
        let (n, p) = ((t * k) as f64, f64::from(p));
        let slack = 5.0 * (n * p * (1.0 - p)).sqrt() + 1.0;
        prop_assert!((dropped as f64 - n * p).abs() <= slack, "{dropped} of {n} at {p}");
        let tail = x.tensor.narrow(10, 20).unwrap();
        prop_assert_eq!(&run(&tail, 10)[..], &y[10 * k..30 * k]);
    }

    #[test]
    fn gates_match_f64(n in 0..300usize, dtype in dtypes(), tanh: bool, seed: u64) {
        let mut case = Case::new(seed);
        let kind = if tanh { Gelu::Tanh } else { Gelu::Erf };
        let [x, up, dy] = [(); 3].map(|()| case.operand(&[n], dtype, 4.0));
        let zip = |f: &dyn Fn(usize) -> f64| (0..n).map(f).collect::<Vec<f64>>();
        // |x|, |up|, |dy| <= 4 bound the products.
        let check = |name: &str, got: &kernels::Tensor, want: Vec<f64>, size: f64| {
            assert_close(name, got, &want, |i| tolerance::gate(dtype, want[i], size));
        };
        let y = case.cpu.gelu(&x.tensor, kind).unwrap();
        check("gelu", &y, zip(&|i| naive::gelu(x.values[i], kind)), 4.0);
        let dx = case.cpu.gelu_backward(&x.tensor, &dy.tensor, kind).unwrap();
        let want = zip(&|i| dy.values[i] * naive::gelu_slope(x.values[i], kind));
        check("gelu_backward", &dx, want, 4.0 * 4.0);
        let y = case.cpu.swiglu(&x.tensor, &up.tensor).unwrap();
        check("swiglu", &y, zip(&|i| naive::swiglu(x.values[i], up.values[i])), 16.0);
        let (dg, du) = case.cpu.swiglu_backward(&x.tensor, &up.tensor, &dy.tensor).unwrap();
        let slopes = |i: usize| naive::swiglu_slopes(x.values[i], up.values[i]);
        check("d_gate", &dg, zip(&|i| dy.values[i] * slopes(i).0), 64.0);
        check("d_up", &du, zip(&|i| dy.values[i] * slopes(i).1), 16.0);
    }

    #[test]
    fn rope_matches_f64_and_its_inverse_undoes_it(
        (t, h, w, pass) in (0..40usize, 1..5usize, 0..20usize, 0..5usize),
        dtype in dtypes(),
        half: bool,
        seed: u64,
    ) {
        let mut case = Case::new(seed);
        let d = 2 * w + pass;
        let layout = if half { RopeLayout::HalfSplit } else { RopeLayout::Interleaved };
        let x = case.operand(&[t, h, d], dtype, 2.0);
        let angles: Vec<f32> = (0..t * w).map(|_| case.random.unit() as f32 * 3.0).collect();
        let table = |f: fn(f32) -> f32| {
            let values: Vec<f32> = angles.iter().map(|a| f(*a)).collect();
            common::operand(&case.cpu, &[t, w], DType::F32, &values)
        };
        let (cos, sin) = (table(f32::cos), table(f32::sin));
        let run = |x: &kernels::Tensor, direction| {
            case.cpu.rope(x, &cos.tensor, &sin.tensor, layout, direction).unwrap()
        };
        let y = run(&x.tensor, Direction::Forward);
        if d == 0 { return Ok(()); }
        let tables = (&cos.values[..], &sin.values[..]);
        let want = naive::rope(&x.values, tables, (h, d, w), layout, 1.0);
        assert_close("rope", &y, &want, |i| tolerance::pointwise(dtype, 3, want[i], 4.0));
        let back = run(&y, Direction::Inverse);
        // Two stores. The first error is rotated by the second rotation: up to sqrt 2 times larger.
        let twice = |i: usize| {
            3.0 * tolerance::unit(dtype) * 3.0 + tolerance::pointwise(dtype, 8, x.values[i], 4.0)
        };
        assert_close("inverse", &back, &x.values, twice);
    }
}

#[test]
fn the_reference_slopes_match_finite_differences() {
    for i in -40..40 {
        let x = f64::from(i) * 0.1 + 0.01;
        for kind in [Gelu::Tanh, Gelu::Erf] {
            common::assert_slope(
                |x| naive::gelu(x[0], kind),
                &[x],
                &[naive::gelu_slope(x, kind)],
            );
        }
        let (dg, du) = naive::swiglu_slopes(x, 1.7);
        common::assert_slope(|x| naive::swiglu(x[0], x[1]), &[x, 1.7], &[dg, du]);
    }
}

#[test]
fn gates_keep_their_limits_and_propagate_nan() {
    let case = Case::new(0);
    let values = [-1e4, -50.0, 50.0, 1e4, f32::NAN, f32::INFINITY];
    let x = common::operand(&case.cpu, &[6], DType::F32, &values).tensor;
    for kind in [Gelu::Tanh, Gelu::Erf] {
        let y = case.cpu.gelu(&x, kind).unwrap();
        let y = y.as_slice::<f32>();
        assert_eq!((y[0], y[1], y[2], y[3]), (0.0, 0.0, 50.0, 1e4), "{kind:?}");
        assert!(y[4].is_nan() && y[5] == f32::INFINITY, "{kind:?}: {y:?}");
    }
}

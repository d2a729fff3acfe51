//! Tests of matrix products, bias gradients and LoRA layers against f64.
#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]

mod common;

use common::{Case, Operand, assert_close, config, dtypes, reference as naive, tolerance};
use kernels::{
    AdaptedLayer, AdaptedLinearArgs, AdaptedLinearGradArgs, AdapterArgs, Backend, DType,
    MatmulArgs, Shape, Transpose,
};
use proptest::prelude::*;

fn stored(x: &Operand, rows: usize, cols: usize, transpose: Transpose) -> Vec<f64> {
    match transpose {
        Transpose::No => x.values.clone(),
        Transpose::Yes => naive::transpose(&x.values, cols, rows),
    }
}

fn extent() -> impl Strategy<Value = usize> {
    prop_oneof![0..4usize, 4..40usize, 40..140usize]
}

fn transposes() -> impl Strategy<Value = Transpose> {
    prop_oneof![Just(Transpose::No), Just(Transpose::Yes)]
}

proptest! {
    #![proptest_config(config(64))]

    #[test]
    fn matmul_matches_f64(
        (m, n, k) in (extent(), extent(), extent()),
        (ta, tb) in (transposes(), transposes()),
        (da, db, out) in (dtypes(), dtypes(), dtypes()),
        with_bias: bool,
        seed: u64,
    ) {
        let mut case = Case::new(seed);
        let shape = |rows, cols, t| if t == Transpose::No { [rows, cols] } else { [cols, rows] };
        let a = case.operand(&shape(m, k, ta), da, 2.0);
        let b = case.operand(&shape(k, n, tb), db, 2.0);
        let bias = case.operand(&[n], db, 2.0);
        let got = case.cpu.matmul(MatmulArgs {
            a: &a.tensor,
            transpose_a: ta,
            b: &b.tensor,
            transpose_b: tb,
            bias: with_bias.then_some(&bias.tensor),
            out,
        }).unwrap();
        prop_assert_eq!((got.shape(), got.dtype()), (Shape::from([m, n]), out));
        let (a, b) = (stored(&a, m, k, ta), stored(&b, k, n, tb));
        let mut want = naive::matmul(&a, &b, m, n, k);
        let mut size = naive::matmul(&naive::absolute(&a), &naive::absolute(&b), m, n, k);
        if with_bias && n > 0 {
            naive::add_bias(&mut want, &bias.values);
            naive::add_bias(&mut size, &naive::absolute(&bias.values));
        }
        assert_close("y", &got, &want, |i| tolerance::sum(out, k, want[i], size[i]));
    }

    #[test]
    fn column_sum_matches_f64(m in 0..700usize, n in 0..70usize, dtype in dtypes(), seed: u64) {
        let mut case = Case::new(seed);
        let x = case.operand(&[m, n], dtype, 2.0);
        let got = case.cpu.column_sum(&x.tensor).unwrap();
        prop_assert_eq!(got.dtype(), DType::F32);
        let want = if n == 0 { vec![] } else { naive::column_sum(&x.values, n) };
        let size = if n == 0 { vec![] } else { naive::column_sum(&naive::absolute(&x.values), n) };
        assert_close("sum", &got, &want, |i| tolerance::sum(DType::F32, m, want[i], size[i]));
    }

    #[test]
    fn lora_matches_f64(
        (t, n, k, r) in (1..70usize, 1..70usize, 1..70usize, 1..9usize),
        dtype in dtypes(),
        adapter in dtypes(),
        with_bias: bool,
        seed: u64,
    ) {
        let mut case = Case::new(seed);
        let x = case.operand(&[t, k], dtype, 1.0);
        let weight = case.operand(&[n, k], dtype, 1.0);
        let bias = case.operand(&[n], dtype, 1.0);
        let a = case.operand(&[r, k], adapter, 1.0);
        let b = case.operand(&[n, r], adapter, 1.0);
        let dy = case.operand(&[t, n], dtype, 1.0);
        let scale = 0.75f64;
        let layer = AdaptedLayer {
            weight: &weight.tensor,
            bias: with_bias.then_some(&bias.tensor),
            adapter: Some(AdapterArgs {
                lora_a: &a.tensor,
                lora_b: &b.tensor,
                scale: scale as f32,
                dropout: None,
            }),
        };
        let args = AdaptedLinearArgs {
            x: &x.tensor,
            row_groups: None,
            projections: &[vec![layer]],
        };
        let y = case.cpu.adapted_linear(args).unwrap().y.remove(0);
        let backward = |need_dx| {
            let args = AdaptedLinearGradArgs { forward: args, dy: &[&dy.tensor], inner: &[], need_dx };
            case.cpu.adapted_linear_backward(args).unwrap()
        };
        let grads = backward(true);
        let [d_lora_a, d_lora_b] = grads.adapters[0][0].as_ref().unwrap();

        // The same formulas, over values and over magnitudes (for the tolerance).
        let run = |f: fn(&[f64]) -> Vec<f64>| {
            let lora = naive::Lora {
                x: f(&x.values),
                weight: f(&weight.values),
                bias: with_bias.then(|| f(&bias.values)),
                a: f(&a.values),
                b: f(&b.values),
                scale,
                sizes: [t, n, k, r],
            };
            let [dx, da, db] = lora.backward(&f(&dy.values));
            [lora.forward(), dx, da, db]
        };
        let want = run(<[f64]>::to_vec);
        let size = run(naive::absolute);
        let got = [&y, grads.dx.as_ref().unwrap(), d_lora_a, d_lora_b];
        let depth = [k + r, n + r, n + t, k + t];
        for (i, name) in ["y", "dx", "d_lora_a", "d_lora_b"].into_iter().enumerate() {
            let out = got[i].dtype();
            assert_close(name, got[i], &want[i], |j| {
                tolerance::sum(out, depth[i], want[i][j], size[i][j])
            });
        }
        prop_assert!(backward(false).dx.is_none());
    }
}

#[test]
fn the_reference_gradient_is_the_slope_of_the_reference() {
    let sizes @ [t, n, k, r] = [3, 4, 5, 2];
    let mut random = common::Random::new(3);
    let mut draw = |n: usize| -> Vec<f64> { (0..n).map(|_| random.unit()).collect() };
    let lora = naive::Lora {
        x: draw(t * k),
        weight: draw(n * k),
        bias: Some(draw(n)),
        a: draw(r * k),
        b: draw(n * r),
        scale: 0.6,
        sizes,
    };
    let dy = draw(t * n);
    let value =
        |lora: &naive::Lora| -> f64 { lora.forward().iter().zip(&dy).map(|(y, d)| y * d).sum() };
    let with = |set: fn(&mut naive::Lora, Vec<f64>), v: &[f64]| {
        let mut lora = lora.clone();
        set(&mut lora, v.to_vec());
        value(&lora)
    };
    let [dx, da, db] = lora.backward(&dy);
    common::assert_slope(|v| with(|l, v| l.x = v, v), &lora.x, &dx);
    common::assert_slope(|v| with(|l, v| l.a = v, v), &lora.a, &da);
    common::assert_slope(|v| with(|l, v| l.b = v, v), &lora.b, &db);
    // Linear layers and biases: the same formulas without an adapter.
    let bias = naive::column_sum(&dy, n);
    common::assert_slope(
        |v| with(|l, v| l.bias = Some(v), v),
        lora.bias.as_ref().unwrap(),
        &bias,
    );
}

/// Operands are converted and packed in parts of at most 2 MiB and 4 MiB, whatever their size.
#[test]
fn the_workspace_of_a_large_product_is_bounded() {
    let (m, n, k) = (700, 650, 16_384);
    let mut case = Case::new(5);
    let a = case.operand(&[m, k], DType::BF16, 1.0);
    let b = case.operand(&[n, k], DType::BF16, 1.0);
    let product = |a: &kernels::Tensor, b: &kernels::Tensor| {
        let args = MatmulArgs {
            a,
            transpose_a: Transpose::No,
            b,
            transpose_b: Transpose::Yes,
            bias: None,
            out: DType::F32,
        };
        case.cpu.matmul(args).unwrap()
    };
    let narrow = product(&a.tensor, &b.tensor);
    let wide = |x: &Operand| case.cpu.cast(&x.tensor, DType::F32).unwrap();
    let want = product(&wide(&a), &wide(&b));
    assert_eq!(narrow.as_slice::<f32>(), want.as_slice::<f32>());
    let peak = common::pool(&case.cpu)
        .stats()
        .tag(kernels::Tag::Workspace)
        .peak;
    assert!(peak <= 6 << 20, "{peak}");
}

/// One row alone, a few rows, and many rows give the same bits.
#[test]
fn the_bits_of_a_row_do_not_depend_on_other_rows() {
    for (n, k) in [
        (96, 96),
        (8, 300),
        (130, 1100),
        (512, 64),
        (33, 3),
        (5, 700),
    ] {
        for dtype in [DType::F32, DType::BF16] {
            let mut case = Case::new(n as u64);
            let x = case.operand(&[1300, k], dtype, 1.0);
            let w = case.operand(&[n, k], dtype, 1.0);
            let bias = case.operand(&[n], dtype, 1.0);
            let run = |x: &kernels::Tensor| {
                let args = MatmulArgs {
                    a: x,
                    transpose_a: Transpose::No,
                    b: &w.tensor,
                    transpose_b: Transpose::Yes,
                    bias: Some(&bias.tensor),
                    out: DType::F32,
                };
                case.cpu.matmul(args).unwrap()
            };
            let all = run(&x.tensor);
            for (start, rows) in [
                (0, 1),
                (7, 1),
                (1299, 1),
                (40, 2),
                (40, 3),
                (5, 17),
                (600, 257),
            ] {
                let few = run(&x.tensor.narrow(start, rows).unwrap());
                let want = all.narrow(start, rows).unwrap();
                assert_eq!(
                    few.as_slice::<f32>(),
                    want.as_slice::<f32>(),
                    "n {n}, k {k}, {dtype}, rows {start}+{rows}"
                );
            }
        }
    }
}

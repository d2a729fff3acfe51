//! Tests of attention, values and gradients, against f64.
#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]

mod common;

use common::reference::Attention;
use common::{Case, Operand, assert_close, config, dtypes, largest, tolerance};
use kernels::{AttentionArgs, Backend, DType, Tag};
use proptest::prelude::*;

fn starts(lengths: &[usize]) -> Vec<usize> {
    let mut all = vec![0];
    for n in lengths {
        all.push(all[all.len() - 1] + n);
    }
    all
}

fn args<'a>(
    shape: &'a Attention,
    q: &'a Operand,
    k: &'a Operand,
    v: &'a Operand,
) -> AttentionArgs<'a> {
    AttentionArgs {
        q: &q.tensor,
        k: &k.tensor,
        v: &v.tensor,
        q_starts: &shape.q_starts,
        k_starts: &shape.k_starts,
        causal: shape.causal,
        scale: shape.scale as f32,
    }
}

/// Compares one call and its gradients with f64.
fn check(shape: &Attention, dtype: DType, seed: u64) {
    let mut case = Case::new(seed);
    let (t, s) = (shape.queries(), shape.keys());
    let Attention { h, g, d, .. } = *shape;
    let q = case.operand(&[t, h, d], dtype, 2.0);
    let k = case.operand(&[s, g, d], dtype, 2.0);
    let v = case.operand(&[s, g, d], dtype, 2.0);
    let dout = case.operand(&[t, h, d], dtype, 1.0);
    let args = args(shape, &q, &k, &v);
    let got = case.cpu.attention(args).unwrap();
    let grads = case
        .cpu
        .attention_backward(args, &got, &dout.tensor)
        .unwrap();

    let (out, lse) = shape.forward(&q.values, &k.values, &v.values);
    // The products of one score sum to at most scale * d * 2 * 2.
    let score = shape.scale * d as f64 * 4.0;
    let keys = shape
        .k_starts
        .windows(2)
        .map(|k| k[1] - k[0])
        .max()
        .unwrap_or(0);
    let near = |dtype, want, size| tolerance::attention(dtype, (keys, d), want, score, size);
    assert_close("out", &got.out, &out, |i| near(dtype, out[i], 2.0));
    let got_lse = common::values_of(&got.lse);
    for (g, w) in got_lse.iter().zip(&lse) {
        assert!(
            g == w || (g - w).abs() <= near(DType::F32, *w, 1.0),
            "lse {g} {w}"
        );
    }
    let (dq, dk, dv) = shape.backward((&q.values, &k.values, &v.values), &dout.values);
    // ds = p (dp - delta). dp and delta are sums of d products up to 2, and delta reads the stored output. A gradient
    // sums ds (total weight 2 per query) times values up to 2.
    let ds = 2.0 * 2.0 * d as f64;
    let stored = tolerance::unit(dtype) * ds;
    let loads = (h / g * t) as f64;
    let grad = |want: f64, queries: f64| {
        near(dtype, want, ds * queries) + 2.0 * shape.scale * queries * stored
    };
    assert_close("dq", &grads.dq, &dq, |i| grad(dq[i], 2.0 * shape.scale));
    let sizes = (largest(&dk).max(1.0), largest(&dv).max(1.0));
    assert_close("dk", &grads.dk, &dk, |i| grad(dk[i], sizes.0.min(loads)));
    assert_close("dv", &grads.dv, &dv, |i| {
        near(dtype, dv[i], sizes.1.min(loads) * 4.0)
    });
}

proptest! {
    #![proptest_config(config(40))]

    #[test]
    fn attention_matches_f64(
        lengths in proptest::collection::vec((0..40usize, 0..40usize), 1..4),
        (g, group) in (1..4usize, 1..4usize),
        d in prop_oneof![1..5usize, 5..40usize, Just(128usize)],
        causal: bool,
        dtype in dtypes(),
        seed: u64,
    ) {
        let (q, k): (Vec<usize>, Vec<usize>) = lengths.into_iter().unzip();
        let shape = Attention {
            q_starts: starts(&q),
            k_starts: starts(&k),
            h: g * group,
            g,
            d,
            causal,
            scale: 1.0 / (d as f64).sqrt(),
        };
        check(&shape, dtype, seed);
    }

    #[test]
    fn attention_over_many_tiles_matches_f64(
        (queries, keys) in (1..300usize, 250..600usize),
        causal: bool,
        dtype in dtypes(),
        seed: u64,
    ) {
        let shape = Attention {
            q_starts: vec![0, queries, queries + 3],
            k_starts: vec![0, keys, keys + 5],
            h: 2,
            g: 1,
            d: 8,
            causal,
            scale: 0.5,
        };
        check(&shape, dtype, seed);
    }
}

#[test]
fn the_reference_gradient_is_the_slope_of_the_reference() {
    let shape = Attention {
        q_starts: vec![0, 3, 5],
        k_starts: vec![0, 4, 6],
        h: 4,
        g: 2,
        d: 3,
        causal: true,
        scale: 0.7,
    };
    let mut random = common::Random::new(3);
    let mut draw = |n: usize| -> Vec<f64> { (0..n).map(|_| random.unit()).collect() };
    let (q, k, v, go) = (draw(60), draw(36), draw(36), draw(60));
    let f = |q: &[f64], k: &[f64], v: &[f64]| -> f64 {
        let (out, _) = shape.forward(q, k, v);
        out.iter().zip(&go).map(|(o, g)| o * g).sum()
    };
    let (dq, dk, dv) = shape.backward((&q, &k, &v), &go);
    common::assert_slope(|q| f(q, &k, &v), &q, &dq);
    common::assert_slope(|k| f(&q, k, &v), &k, &dk);
    common::assert_slope(|v| f(&q, &k, v), &v, &dv);
}

#[test]
fn queries_without_a_visible_key_give_zeros() {
    let shape = Attention {
        q_starts: vec![0, 5],
        k_starts: vec![0, 2],
        h: 1,
        g: 1,
        d: 4,
        causal: true,
        scale: 0.5,
    };
    let mut case = Case::new(0);
    let [q, dout] = [(); 2].map(|()| case.operand(&[5, 1, 4], DType::F32, 1.0));
    let [k, v] = [(); 2].map(|()| case.operand(&[2, 1, 4], DType::F32, 1.0));
    let args = args(&shape, &q, &k, &v);
    let out = case.cpu.attention(args).unwrap();
    assert_eq!(out.out.as_slice::<f32>()[..12], [0.0; 12]);
    assert_eq!(out.lse.as_slice::<f32>()[..3], [f32::NEG_INFINITY; 3]);
    let grads = case
        .cpu
        .attention_backward(args, &out, &dout.tensor)
        .unwrap();
    assert_eq!(grads.dq.as_slice::<f32>()[..12], [0.0; 12]);
    for x in [&grads.dq, &grads.dk, &grads.dv] {
        assert!(x.as_slice::<f32>().iter().all(|x| x.is_finite()));
    }
}

#[test]
fn a_sequence_has_the_same_bits_alone_and_packed_with_others() {
    let shape = |q: &[usize], k: &[usize]| Attention {
        q_starts: starts(q),
        k_starts: starts(k),
        h: 4,
        g: 2,
        d: 16,
        causal: true,
        scale: 0.25,
    };
    let mut case = Case::new(9);
    let (before, n) = (37, 150);
    let all = shape(&[before, n, 1], &[before, n, 1]);
    let [q, dout] = [(); 2].map(|()| case.operand(&[188, 4, 16], DType::F32, 1.0));
    let [k, v] = [(); 2].map(|()| case.operand(&[188, 2, 16], DType::F32, 1.0));
    let args_all = args(&all, &q, &k, &v);
    let out = case.cpu.attention(args_all).unwrap();
    let grads = case
        .cpu
        .attention_backward(args_all, &out, &dout.tensor)
        .unwrap();
    let one = shape(&[n], &[n]);
    let cut = |x: &Operand| Operand {
        tensor: x.tensor.narrow(before, n).unwrap(),
        values: vec![],
    };
    let (q, k, v) = (cut(&q), cut(&k), cut(&v));
    let args_one = args(&one, &q, &k, &v);
    let alone = case.cpu.attention(args_one).unwrap();
    let alone_grads = case
        .cpu
        .attention_backward(args_one, &alone, &cut(&dout).tensor)
        .unwrap();
    for (name, all, one) in [
        ("out", &out.out, &alone.out),
        ("dq", &grads.dq, &alone_grads.dq),
        ("dk", &grads.dk, &alone_grads.dk),
        ("dv", &grads.dv, &alone_grads.dv),
    ] {
        let all = all.narrow(before, n).unwrap();
        assert_eq!(all.as_slice::<f32>(), one.as_slice::<f32>(), "{name}");
    }
}

#[test]
fn long_sequences_need_at_most_64_mib_beside_their_output() {
    let (t, h, d) = (6401, 16, 112);
    let mut case = Case::new(4);
    let x = case.operand(&[t, h, d], DType::F32, 1.0);
    let pool = common::pool(&case.cpu).clone();
    pool.reset_peaks();
    let before = pool.stats().in_use;
    let out = case
        .cpu
        .attention(AttentionArgs {
            q: &x.tensor,
            k: &x.tensor,
            v: &x.tensor,
            q_starts: &[0, t],
            k_starts: &[0, t],
            causal: false,
            scale: 0.1,
        })
        .unwrap();
    let stats = pool.stats();
    let outputs = (out.out.size_bytes() + out.lse.size_bytes()) as u64;
    let workspace = stats.tag(Tag::Workspace).peak;
    assert!(workspace > 0 && workspace <= 64 << 20, "{workspace}");
    // Blocks are rounded to size classes: up to an eighth of the output.
    let extra = stats.peak - before - outputs;
    assert!(extra <= workspace + outputs / 8, "{extra} {workspace}");
}

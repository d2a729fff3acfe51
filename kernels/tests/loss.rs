//! Tests of the fused output projection and cross entropy: values and gradients against f64, and memory.
#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]

mod common;

use common::{Case, assert_close, config, dtypes, largest, reference as naive, tolerance};
use kernels::{Backend, DType, IGNORED_LABEL, KernelError, LossNeeds, Tag};
use proptest::prelude::*;

const BOTH: LossNeeds = LossNeeds {
    hidden: true,
    weight: true,
};

fn check(t: usize, c: usize, v: usize, dtypes: (DType, DType), supervised: f64, seed: u64) {
    let mut case = Case::new(seed);
    let hidden = case.operand(&[t, c], dtypes.0, 1.0);
    let weight = case.operand(&[v, c], dtypes.1, 1.0);
    let labels: Vec<i32> = (0..t)
        .map(|_| match case.random.unit() < 2.0 * supervised - 1.0 {
            true => case.random.below(v) as i32,
            false => IGNORED_LABEL,
        })
        .collect();
    let ids = common::ints_tensor(&case.cpu, &labels);
    let factor = 0.3f32;
    let (h, w) = (&hidden.tensor, &weight.tensor);
    let losses = case.cpu.linear_cross_entropy(h, w, &ids).unwrap();
    let grads = case
        .cpu
        .linear_cross_entropy_backward(h, w, &ids, factor, BOTH)
        .unwrap();
    assert_eq!(grads.losses.as_bytes(), losses.as_bytes());
    let want = naive::cross_entropy(
        &hidden.values,
        &weight.values,
        &labels,
        c,
        f64::from(factor),
    );
    let logit = c as f64;
    assert_close("loss", &losses, &want.losses, |i| {
        tolerance::loss(c, logit, want.losses[i])
    });
    // A probability has the relative error of its logit and of the log-sum-exp. A gradient sums probabilities (total
    // 2 with the label) times values up to 1.
    let relative = tolerance::loss(c, logit, largest(&want.losses)) + 8.0 * tolerance::U32;
    let f = f64::from(factor);
    assert_close(
        "d_hidden",
        grads.d_hidden.as_ref().unwrap(),
        &want.d_hidden,
        |i| tolerance::sum(dtypes.0, v, want.d_hidden[i], 2.0 * f) + 2.0 * f * relative,
    );
    let rows = t as f64;
    assert_close(
        "d_weight",
        grads.d_weight.as_ref().unwrap(),
        &want.d_weight,
        |i| tolerance::sum(DType::F32, t, want.d_weight[i], f * rows) + f * rows * relative,
    );
}

proptest! {
    #![proptest_config(config(32))]

    #[test]
    fn loss_matches_f64(
        (t, c, v) in (0..60usize, 1..50usize, 1..200usize),
        types in (dtypes(), dtypes()),
        supervised in 0.0..1.0f64,
        seed: u64,
    ) {
        check(t, c, v, types, supervised, seed);
    }
}

#[test]
fn a_vocabulary_streamed_in_chunks_matches_f64() {
    // A vocabulary above 32 768 entries is split into tiles of 8192.
    check(5, 6, 40_000, (DType::F32, DType::BF16), 1.0, 1);
    check(7, 3, 33_000, (DType::BF16, DType::F32), 0.5, 2);
}

#[test]
fn a_loss_over_many_chunks_matches_f64() {
    check(2300, 3, 11, (DType::F32, DType::F32), 0.9, 3);
}

#[test]
fn the_reference_gradient_is_the_slope_of_the_reference() {
    let (c, v) = (3, 5);
    let labels = [2, IGNORED_LABEL, 0, 4];
    let mut random = common::Random::new(3);
    let mut draw = |n: usize| -> Vec<f64> { (0..n).map(|_| random.unit()).collect() };
    let (h, w) = (draw(4 * c), draw(v * c));
    let f = |h: &[f64], w: &[f64]| -> f64 {
        let losses = naive::cross_entropy(h, w, &labels, c, 1.0).losses;
        0.7 * losses.iter().sum::<f64>()
    };
    let want = naive::cross_entropy(&h, &w, &labels, c, 0.7);
    common::assert_slope(|h| f(h, &w), &h, &want.d_hidden);
    common::assert_slope(|w| f(&h, w), &w, &want.d_weight);
}

#[test]
fn the_loss_of_a_row_does_not_depend_on_other_rows() {
    let mut case = Case::new(8);
    for v in [300, 33_000] {
        let hidden = case.operand(&[40, 24], DType::F32, 1.0);
        let weight = case.operand(&[v, 24], DType::F32, 1.0);
        let labels: Vec<i32> = (0..40).collect();
        let ids = common::ints_tensor(&case.cpu, &labels);
        let all = case
            .cpu
            .linear_cross_entropy(&hidden.tensor, &weight.tensor, &ids)
            .unwrap();
        for (start, rows) in [(0, 1), (17, 2), (30, 10)] {
            let h = hidden.tensor.narrow(start, rows).unwrap();
            let l = ids.narrow(start, rows).unwrap();
            let few = case
                .cpu
                .linear_cross_entropy(&h, &weight.tensor, &l)
                .unwrap();
            let want = all.narrow(start, rows).unwrap();
            assert_eq!(few.as_slice::<f32>(), want.as_slice::<f32>());
        }
    }
}

#[test]
fn logits_never_exist_as_a_whole() {
    // 3000 x 20000 f32 logits would be 229 MiB.
    let (t, c, v) = (3000, 8, 20_000);
    let mut case = Case::new(1);
    let hidden = case.operand(&[t, c], DType::F32, 1.0);
    let weight = case.operand(&[v, c], DType::F32, 1.0);
    let ids = common::ints_tensor(&case.cpu, &vec![7; t]);
    let pool = common::pool(&case.cpu).clone();
    pool.reset_peaks();
    let (h, w) = (&hidden.tensor, &weight.tensor);
    drop(case.cpu.linear_cross_entropy(h, w, &ids).unwrap());
    drop(
        case.cpu
            .linear_cross_entropy_backward(h, w, &ids, 1.0, BOTH)
            .unwrap(),
    );
    let peak = pool.stats().tag(Tag::Workspace).peak;
    assert!(peak > 16 << 20 && peak <= 40 << 20, "{peak}");
}

#[test]
fn labels_outside_the_vocabulary_are_errors() {
    let mut case = Case::new(1);
    let hidden = case.operand(&[2, 4], DType::F32, 1.0);
    let weight = case.operand(&[3, 4], DType::F32, 1.0);
    for bad in [3, -1] {
        let ids = common::ints_tensor(&case.cpu, &[0, bad]);
        let error = case
            .cpu
            .linear_cross_entropy(&hidden.tensor, &weight.tensor, &ids);
        match error.unwrap_err() {
            KernelError::Index { index, rows: 3, .. } => assert_eq!(index, i64::from(bad)),
            other => panic!("{other}"),
        }
    }
}

//! Test support: one-unit models, and gradients against central differences.

use super::{Dropout, Loss, ResidentParams, Scope, Tape, Var};
use crate::error::Result;
use engine::{ModelSpec, ParamId, ParamSpec, UnitId, UnitSpec};
use kernels::{Backend, CpuBackend, DType, Shape, Tag, Tensor};
use std::sync::Arc;

/// Step of the differences: large enough for f32 rounding, small enough for curvature.
const STEP: f32 = 1e-2;
/// Tolerance as a share of the largest gradient: f32 rounding of the sums over `STEP`, plus its square.
const TOLERANCE: f32 = 4e-3;

/// `count` pseudorandom test values between -1 and 1, the same for each call with this `seed`.
pub(crate) fn values(seed: usize, count: usize) -> Vec<f32> {
    let stream = optim::rng::RandomStream::new(seed as u64, "test");
    (0..count as u64)
        .map(|i| 2.0 * stream.uniform(i) - 1.0)
        .collect()
}

pub(crate) fn backend() -> Arc<dyn Backend> {
    Arc::new(CpuBackend::unlimited())
}

pub(crate) fn tensor(backend: &dyn Backend, shape: &[usize], values: &[f32]) -> Tensor {
    let bytes = bytemuck::cast_slice(values);
    backend
        .upload(bytes, Shape::new(shape), DType::F32, Tag::Activations)
        .unwrap()
}

pub(crate) fn index(backend: &dyn Backend, values: &[i32]) -> Tensor {
    let shape = Shape::new(&[values.len()]);
    backend
        .upload(
            bytemuck::cast_slice(values),
            shape,
            DType::I32,
            Tag::Activations,
        )
        .unwrap()
}

/// A description with the parameters `(unit, shape, trainable)`, called `p0`, `p1`, ...
pub(crate) fn spec(params: &[(u32, &[usize], bool)]) -> ModelSpec {
    let units = params.iter().map(|p| p.0 + 1).max().unwrap_or(1);
    ModelSpec {
        units: (0..units)
            .map(|u| UnitSpec {
                name: format!("u{u}"),
            })
            .collect(),
        params: params
            .iter()
            .enumerate()
            .map(|(i, (unit, shape, trainable))| ParamSpec {
                name: format!("p{i}"),
                shape: Shape::new(shape),
                unit: UnitId(*unit),
                trainable: *trainable,
                quantization: None,
            })
            .collect(),
    }
}

/// Random weights of `spec` on the processor.
pub(crate) fn resident(spec: &ModelSpec) -> ResidentParams {
    let backend = backend();
    let weights = spec
        .params
        .iter()
        .enumerate()
        .map(|(i, p)| tensor(&*backend, p.shape.dims(), &values(100 + i, p.shape.elems())))
        .collect();
    ResidentParams::new(backend, spec.clone(), weights).unwrap()
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    let products = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b));
    products.sum()
}

/// The gradients of `sum(r * body(inputs))` for a fixed random `r`, of every input and parameter,
/// against central differences.
pub(crate) fn gradcheck<const I: usize>(
    inputs: [&[usize]; I],
    params: &[&[usize]],
    body: impl Fn(&Scope<'_>, [&Var; I]) -> Result<Var>,
) {
    check(None, inputs, params, body);
}

/// As [`gradcheck`], while the inputs of adapters pass through dropout with the masks of `state`.
pub(crate) fn gradcheck_dropped<const I: usize>(
    state: &Dropout,
    inputs: [&[usize]; I],
    params: &[&[usize]],
    body: impl Fn(&Scope<'_>, [&Var; I]) -> Result<Var>,
) {
    check(Some(state), inputs, params, body);
}

fn check<const I: usize>(
    state: Option<&Dropout>,
    inputs: [&[usize]; I],
    params: &[&[usize]],
    body: impl Fn(&Scope<'_>, [&Var; I]) -> Result<Var>,
) {
    let mut declared: Vec<(u32, &[usize], bool)> = params.iter().map(|s| (0, *s, true)).collect();
    declared.push((0, &[1], true));
    let access = resident(&spec(&declared));
    let backend = access_backend(&access);
    let mut points: Vec<Vec<f32>> = inputs
        .iter()
        .enumerate()
        .map(|(i, shape)| values(i, shape.iter().product()))
        .collect();
    let run = |points: &[Vec<f32>]| -> Vec<f32> {
        // An inference drops nothing.
        let tape = match state {
            Some(state) => Tape::training(&access).with_dropout(state.clone()),
            None => Tape::inference(&access),
        };
        let leaves: [Var; I] =
            std::array::from_fn(|i| tape.input(tensor(&*backend, inputs[i], &points[i])));
        let vars = std::array::from_fn(|i| &leaves[i]);
        let [y] = tape
            .segment(UnitId(0), vars, |s, v| Ok([body(s, v)?]))
            .unwrap();
        y.value().to_f32_vec().unwrap()
    };
    let (leaf_grads, r) = {
        let mut tape = Tape::training(&access).with_recompute_check(true);
        if let Some(state) = state {
            tape = tape.with_dropout(state.clone());
        }
        let leaves: [Var; I] =
            std::array::from_fn(|i| tape.leaf(tensor(&*backend, inputs[i], &points[i])));
        let vars = std::array::from_fn(|i| &leaves[i]);
        let [y] = tape
            .segment(UnitId(0), vars, |s, v| Ok([body(s, v)?]))
            .unwrap();
        let r = values(999, y.value().elems());
        let seed = tensor(&*backend, y.shape().dims(), &r);
        let grads = tape.backward_from(&[(&y, seed)]).unwrap();
        let grads: Vec<Vec<f32>> = leaves
            .iter()
            .map(|l| grads.get(l).expect("a gradient").to_f32_vec().unwrap())
            .collect();
        (grads, r)
    };
    for i in 0..I {
        let numeric = differences(&points[i].clone(), |x| {
            points[i] = x;
            dot(&run(&points), &r)
        });
        points[i] = values(i, numeric.len());
        compare(&format!("input {i}"), &leaf_grads[i], &numeric);
    }
    for (i, shape) in params.iter().enumerate() {
        let id = ParamId(i as u32);
        let grad = access.grad(id).expect("a gradient").to_f32_vec().unwrap();
        let weight = access.weight(id);
        let numeric = differences(&weight.to_f32_vec().unwrap(), |w| {
            access.set_weight(id, tensor(&*backend, shape, &w));
            dot(&run(&points), &r)
        });
        access.set_weight(id, weight);
        compare(&format!("parameter {i}"), &grad, &numeric);
    }
}

/// Compares the gradients of `factor * sum(losses)`, with respect to the hidden states and the head's weights, with central
/// differences. The hidden states are a parameter of their own unit, so that they get a gradient as weights do.
pub(crate) fn gradcheck_loss(
    hidden: &[usize],
    head: &[usize],
    factor: f32,
    body: impl Fn(&Scope<'_>, &Var, ParamId) -> Result<Var>,
) {
    let access = resident(&spec(&[(0, hidden, true), (1, head, true)]));
    let backend = access_backend(&access);
    let tape = Tape::training(&access);
    let loss = run_on(&tape, &body);
    tape.backward(&loss, factor).unwrap();
    for (i, shape) in [hidden, head].into_iter().enumerate() {
        let id = ParamId(i as u32);
        let grad = access.grad(id).expect("a gradient").to_f32_vec().unwrap();
        let weight = access.weight(id);
        let numeric = differences(&weight.to_f32_vec().unwrap(), |w| {
            access.set_weight(id, tensor(&*backend, shape, &w));
            let loss = run_on(&Tape::inference(&access), &body);
            f64::from(factor) * loss.sum().unwrap()
        });
        access.set_weight(id, weight);
        compare(&format!("parameter {i}"), &grad, &numeric);
    }
}

fn run_on<'m>(
    tape: &Tape<'_, 'm>,
    body: &'m impl Fn(&Scope<'_>, &Var, ParamId) -> Result<Var>,
) -> Loss {
    let [x] = tape
        .segment(UnitId(0), [], |s, []| {
            // A copy, so that no weight leaves its segment.
            Ok([s.scale(&s.parameter(ParamId(0))?, 1.0)?])
        })
        .unwrap();
    let [rows] = tape
        .segment(UnitId(1), [&x], |s, [x]| Ok([body(s, x, ParamId(1))?]))
        .unwrap();
    let supervised = 1;
    Loss { rows, supervised }
}

fn access_backend(access: &ResidentParams) -> Arc<dyn Backend> {
    engine::ParamAccess::backend(access).clone()
}

fn differences(point: &[f32], mut f: impl FnMut(Vec<f32>) -> f64) -> Vec<f32> {
    (0..point.len())
        .map(|i| {
            let mut at = |step: f32| {
                let mut x = point.to_vec();
                x[i] += step;
                f(x)
            };
            ((at(STEP) - at(-STEP)) / f64::from(2.0 * STEP)) as f32
        })
        .collect()
}

fn compare(what: &str, grad: &[f32], numeric: &[f32]) {
    assert_eq!(grad.len(), numeric.len(), "{what}");
    let largest = numeric.iter().fold(1e-2f32, |m, x| m.max(x.abs()));
    for (i, (a, b)) in grad.iter().zip(numeric).enumerate() {
        let difference = (a - b).abs();
        assert!(
            difference <= TOLERANCE * largest,
            "{what}[{i}]: {a} against {b} (largest {largest})"
        );
    }
}

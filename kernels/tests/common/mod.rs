//! Random operands, the f64 reference and tolerances, shared by several test binaries.
#![allow(
    dead_code,
    clippy::unwrap_used,
    clippy::cast_ptr_alignment,
    reason = "each test binary uses a part; helpers may panic"
)]

pub(crate) mod reference;
pub(crate) mod tolerance;

use half::{bf16, f16};
use kernels::{CpuBackend, DType, Float, Pool, Tag, Tensor};
use proptest::prelude::*;

/// Counter-based random numbers (splitmix64).
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform number in `-1..1`.
    pub(crate) fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }
}

/// Tensor and the exact values of its elements.
#[derive(Clone, Debug)]
pub(crate) struct Operand {
    pub(crate) tensor: Tensor,
    pub(crate) values: Vec<f64>,
}

/// Random generator and device of one test case.
pub(crate) struct Case {
    pub(crate) cpu: CpuBackend,
    pub(crate) random: Random,
}

impl Case {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            cpu: CpuBackend::unlimited(),
            random: Random::new(seed),
        }
    }

    /// Tensor of values uniform in `-scale..scale`, rounded to `dtype`.
    pub(crate) fn operand(&mut self, shape: &[usize], dtype: DType, scale: f64) -> Operand {
        let n: usize = shape.iter().product();
        let values: Vec<f32> = (0..n)
            .map(|_| (self.random.unit() * scale) as f32)
            .collect();
        operand(&self.cpu, shape, dtype, &values)
    }

    pub(crate) fn index(&mut self, n: usize, rows: usize) -> (Tensor, Vec<usize>) {
        let index: Vec<usize> = (0..n).map(|_| self.random.below(rows)).collect();
        let ints: Vec<i32> = index.iter().map(|i| *i as i32).collect();
        (ints_tensor(&self.cpu, &ints), index)
    }
}

pub(crate) fn ints_tensor(cpu: &CpuBackend, values: &[i32]) -> Tensor {
    Tensor::from_slice(pool(cpu), Tag::Activations, [values.len()], values).unwrap()
}

pub(crate) fn pool(cpu: &CpuBackend) -> &Pool {
    kernels::Backend::pool(cpu)
}

pub(crate) fn operand(cpu: &CpuBackend, shape: &[usize], dtype: DType, values: &[f32]) -> Operand {
    fn of<T: Float>(cpu: &CpuBackend, shape: &[usize], values: &[f32]) -> Tensor {
        let values: Vec<T> = values.iter().map(|x| T::from_f32(*x)).collect();
        Tensor::from_slice(pool(cpu), Tag::Activations, shape, &values).unwrap()
    }
    let tensor = match dtype {
        DType::BF16 => of::<bf16>(cpu, shape, values),
        DType::F16 => of::<f16>(cpu, shape, values),
        _ => of::<f32>(cpu, shape, values),
    };
    let values = values_of(&tensor);
    Operand { tensor, values }
}

pub(crate) fn values_of(x: &Tensor) -> Vec<f64> {
    x.to_f32_vec().unwrap().into_iter().map(f64::from).collect()
}

pub(crate) fn dtypes() -> impl Strategy<Value = DType> {
    prop_oneof![Just(DType::F32), Just(DType::BF16), Just(DType::F16)]
}

/// Asserts that every element of `got` is within the tolerance of its reference.
pub(crate) fn assert_close(
    what: &str,
    got: &Tensor,
    want: &[f64],
    tolerance: impl Fn(usize) -> f64,
) {
    let got = values_of(got);
    assert_eq!(got.len(), want.len(), "{what}: elements");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let allowed = tolerance(i);
        let error = (g - w).abs();
        assert!(
            error <= allowed,
            "{what}[{i}]: {g} instead of {w}, off by {error:e}, allowed {allowed:e}"
        );
    }
}

/// Asserts that `gradient` is the gradient of `f` at `x`, by central differences.
pub(crate) fn assert_slope(f: impl Fn(&[f64]) -> f64, x: &[f64], gradient: &[f64]) {
    let (h, value) = (1e-5, f(x));
    let mut x = x.to_vec();
    for i in 0..x.len() {
        let here = x[i];
        x[i] = here + h;
        let above = f(&x);
        x[i] = here - h;
        let below = f(&x);
        x[i] = here;
        let slope = (above - below) / (2.0 * h);
        let allowed = tolerance::finite_difference(h, value, slope);
        let error = (slope - gradient[i]).abs();
        assert!(
            error <= allowed,
            "[{i}]: {} instead of {slope}, allowed {allowed:e}",
            gradient[i]
        );
    }
}

pub(crate) fn largest(x: &[f64]) -> f64 {
    x.iter().fold(0.0, |m, x| x.abs().max(m))
}

pub(crate) fn config(cases: u32) -> ProptestConfig {
    ProptestConfig {
        cases,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

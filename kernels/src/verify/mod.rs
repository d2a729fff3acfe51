//! Verification of a device: its operations compared with those of the CPU, on whole tensors and on parts of larger
//! ones.
//!
//! Results are equal bit for bit where the definition fixes every bit. Elsewhere the tolerance is smaller than the
//! effect of a wrong operand, extent or stride. Tests, the GPU check and every program that meets a GPU run these
//! checks.

mod numbers;
mod operations;

pub use numbers::{U32, bytes, first_difference, store, trained, wiring};
pub use operations::all;

use crate::cuda::CudaBackend;
use crate::cuda::device_kind::DeviceKind;
use crate::cuda::module::{Family, Module, PRELUDE, PRIMITIVES};
use crate::{Backend, CpuBackend, DType, KernelError, KernelList, Shape, Tag, Tensor};
use std::collections::BTreeSet;

/// Why a check did not pass.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckError {
    /// The operation failed.
    #[error("{check}: {error}")]
    Failed {
        /// Name of the check.
        check: String,
        /// Failure of the CPU or of the device.
        error: KernelError,
    },
    /// The program has no kernel for the operation on this machine: none is built in, and NVRTC was not found.
    #[error("{check}: no kernel {module}")]
    NoKernel {
        /// Name of the check.
        check: String,
        /// Name of the kernel module.
        module: String,
    },
    /// A result differs from the CPU's.
    #[error("{check}: result {result}: {what}")]
    Different {
        /// Name of the check.
        check: String,
        /// Number of the result, from 0.
        result: usize,
        /// First difference.
        what: String,
    },
}

/// An operand of a check.
#[derive(Clone, Debug)]
enum Input {
    /// Normally distributed numbers.
    Float(DType, Vec<usize>),
    /// Row numbers or labels.
    Index(Vec<usize>, Vec<i32>),
}

/// How results are compared.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Compare {
    Bits,
    /// Sums in another order, on numbers rounded to this dtype.
    Close(DType),
}

type Run = Box<dyn Fn(&dyn Backend, &[Tensor]) -> crate::Result<Vec<Tensor>> + Send + Sync>;

/// One operation with its operands.
pub struct Check {
    /// The operation and its dtypes.
    pub name: String,
    inputs: Vec<Input>,
    compare: Compare,
    run: Run,
}

impl std::fmt::Debug for Check {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Check").field(&self.name).finish()
    }
}

impl Check {
    fn new(
        name: impl Into<String>,
        inputs: impl Into<Vec<Input>>,
        compare: Compare,
        run: impl Fn(&dyn Backend, &[Tensor]) -> crate::Result<Vec<Tensor>> + Send + Sync + 'static,
    ) -> Self {
        Self {
            name: name.into(),
            inputs: inputs.into(),
            compare,
            run: Box::new(run),
        }
    }

    /// Runs the operation on the CPU and on `device`.
    ///
    /// # Errors
    /// The first difference, a failed operation, or a missing kernel.
    pub fn run(&self, device: &dyn Backend) -> Result<(), CheckError> {
        for part in [false, true] {
            let check = format!("{}{}", self.name, if part { ", parts" } else { "" });
            let failed = |error: KernelError| {
                let check = check.clone();
                match error.missing_kernel().map(str::to_owned) {
                    Some(module) => CheckError::NoKernel { check, module },
                    None => CheckError::Failed { check, error },
                }
            };
            let cpu = CpuBackend::unlimited();
            let want = self.results(&cpu, part).map_err(failed)?;
            let got = self.results(device, part).map_err(failed)?;
            for (result, (got, want)) in got.iter().zip(&want).enumerate() {
                if let Some(what) = self.difference(got, want).map_err(failed)? {
                    return Err(CheckError::Different {
                        check,
                        result,
                        what,
                    });
                }
            }
        }
        Ok(())
    }

    fn results(&self, backend: &dyn Backend, part: bool) -> crate::Result<Vec<Tensor>> {
        (self.run)(backend, &self.operands(backend, part, &numbers::normal)?)
    }

    /// The inputs, with numbers by `draw`. With `part` they are the rows after the first one of a longer tensor.
    fn operands(
        &self,
        backend: &dyn Backend,
        part: bool,
        draw: &dyn Fn(u32, usize) -> Vec<f32>,
    ) -> crate::Result<Vec<Tensor>> {
        let operand = |(i, input): (usize, &Input)| {
            let (dtype, dims, own) = match input {
                Input::Float(dtype, dims) => {
                    let n = dims.iter().product();
                    (*dtype, dims, bytes(*dtype, &draw(i as u32, n)))
                }
                Input::Index(dims, own) => (DType::I32, dims, bytemuck::cast_slice(own).to_vec()),
            };
            if !part {
                return backend.upload(&own, Shape::new(dims), dtype, Tag::Activations);
            }
            let mut longer = dims.clone();
            longer[0] += 1;
            let row = dims[1..].iter().product::<usize>() * dtype.size_bytes();
            let mut all = vec![0; row];
            all.extend(own);
            let whole = backend.upload(&all, Shape::new(&longer), dtype, Tag::Activations)?;
            whole.narrow(1, dims[0])
        };
        self.inputs.iter().enumerate().map(operand).collect()
    }

    /// The first difference of a result, if any.
    fn difference(&self, got: &Tensor, want: &Tensor) -> crate::Result<Option<String>> {
        if (got.shape(), got.dtype()) != (want.shape(), want.dtype()) {
            return Ok(Some(format!("{got:?} instead of {want:?}")));
        }
        if !want.dtype().is_float() {
            let differs = got.to_bytes()? != want.to_bytes()?;
            return Ok(differs.then(|| "other bytes".to_owned()));
        }
        let (got, want) = (got.to_f32_vec()?, want.to_f32_vec()?);
        let wrong = match self.compare {
            Compare::Bits => first_difference(&got, &want),
            Compare::Close(dtype) => {
                let size = want.iter().fold(0.0f32, |size, x| size.max(x.abs()));
                let allowed = wiring(dtype, f64::from(size));
                let off = |(g, w): (&f32, &f32)| f64::from((g - w).abs()) > allowed || g.is_nan();
                got.iter().zip(&want).position(off)
            }
        };
        Ok(wrong.map(|i| format!("[{i}] is {:e} instead of {:e}", got[i], want[i])))
    }

    /// Compilation units that the check launches on a GPU of this kind.
    fn launches(&self, kind: DeviceKind) -> BTreeSet<Module> {
        let counting = CudaBackend::counting(kind);
        let operands = self.operands(&counting, false, &|_, n| vec![0.0; n]);
        // Launches before a failure count.
        let _values_do_not_exist = operands.and_then(|x| (self.run)(&counting, &x));
        counting.launched().modules.into_iter().collect()
    }
}

/// Checks that together launch the kernels of a run.
#[derive(Debug, Default)]
pub struct Cover {
    /// As few checks as found, in a fixed order.
    pub checks: Vec<Check>,
    /// Kernels of the run that no check launches. A training step launches them.
    pub uncovered: Vec<String>,
}

/// Kernels that these checks launch.
#[must_use]
pub fn kernels(checks: &[Check], kind: DeviceKind) -> KernelList {
    let launched = checks.iter().flat_map(|check| check.launches(kind));
    let modules: BTreeSet<Module> = launched.collect();
    KernelList {
        modules: modules.into_iter().collect(),
    }
}

/// Checks with these names, in a fixed order.
#[must_use]
pub fn named(names: &[String]) -> Vec<Check> {
    let every = all().into_iter().chain(operations::of_models());
    every.filter(|check| names.contains(&check.name)).collect()
}

/// Hash of the source texts of all kernels.
#[must_use]
pub fn sources() -> String {
    let mut hasher = blake3::Hasher::new();
    for text in [PRIMITIVES, PRELUDE]
        .into_iter()
        .chain(Family::ALL.map(Family::text))
    {
        hasher.update(text.as_bytes());
    }
    hasher.finalize().to_hex()[..32].to_owned()
}

/// Selects checks that launch the kernels `of` a run, on a GPU of this kind.
#[must_use]
pub fn cover(of: &KernelList, kind: DeviceKind) -> Cover {
    let mut wanted: BTreeSet<Module> = of.modules.iter().cloned().collect();
    let mut checks = Vec::new();
    for check in all().into_iter().chain(operations::of_models()) {
        let launched = check.launches(kind);
        if launched.iter().any(|module| wanted.contains(module)) {
            wanted.retain(|module| !launched.contains(module));
            checks.push(check);
        }
    }
    let uncovered = wanted.iter().map(Module::name).collect();
    Cover { checks, uncovered }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::device_kind::AttentionBackward;
    use std::sync::atomic::{AtomicU32, Ordering};

    /// A small GPU without a library.
    const SMALL: DeviceKind = DeviceKind {
        multiprocessors: 8,
        compute_capability: None,
        has_library: false,
        attention_backward: AttentionBackward::Split,
    };

    /// Modules of operations that a run in bf16 with adapters has.
    fn of_a_run() -> KernelList {
        let counting = CudaBackend::counting(SMALL);
        for check in all().iter().filter(|check| {
            check.name.starts_with("attention bf16") || check.name.starts_with("norms of bf16")
        }) {
            check.results(&counting, false).expect("counted");
        }
        counting.launched()
    }

    #[test]
    fn few_checks_launch_all_kernels_of_a_run() {
        let run = of_a_run();
        let cover = cover(&run, SMALL);
        assert_eq!(cover.uncovered, Vec::<String>::new());
        let count = cover.checks.len();
        assert!((2..=run.modules.len()).contains(&count), "{cover:?}");
        let f16 = |check: &Check| check.name.contains("f16") && !check.name.contains("bf16");
        assert!(!cover.checks.iter().any(f16), "{cover:?}");
    }

    #[test]
    fn a_wrong_result_is_a_difference() {
        let scales = |later: f32| {
            let calls = AtomicU32::new(0);
            let run = move |b: &dyn Backend, x: &[Tensor]| {
                let is_first = calls.fetch_add(1, Ordering::Relaxed) == 0;
                Ok(vec![b.scale(&x[0], if is_first { 1.0 } else { later })?])
            };
            let inputs = [Input::Float(DType::F32, vec![2, 2])];
            Check::new("scale", inputs, Compare::Close(DType::F32), run)
        };
        let cpu = CpuBackend::unlimited();
        scales(1.0).run(&cpu).expect("both alike");
        let error = scales(1.1).run(&cpu).expect_err("differs");
        let is_first = matches!(error, CheckError::Different { result: 0, .. });
        assert!(is_first, "{error}");
    }
}

//! Checks of a GPU's operations against the CPU, by name.

use crate::config::RunGpu;
use kernels::{Backend, KernelList};

/// What became of a check.
#[derive(Debug)]
pub(crate) enum Outcome {
    Begins,
    /// The operation differs or failed, with the evidence.
    Wrong(String),
    /// The program has no kernel for it on this machine.
    NoKernel,
}

/// Names of the checks that launch a run's kernels, and of the kernels that none launches.
#[derive(Debug, Default)]
pub(crate) struct Cover {
    pub(crate) checks: Vec<String>,
    pub(crate) uncovered: Vec<String>,
}

#[cfg(feature = "cuda")]
mod of_cuda {
    use super::{Backend, Cover, KernelList, Outcome, RunGpu};
    use kernels::verify;

    pub(crate) fn cover(of: &KernelList, gpu: &RunGpu) -> Cover {
        let cover = verify::cover(of, gpu.kind());
        Cover {
            checks: cover.checks.into_iter().map(|check| check.name).collect(),
            uncovered: cover.uncovered,
        }
    }

    pub(crate) fn every() -> Cover {
        Cover {
            checks: verify::all().into_iter().map(|check| check.name).collect(),
            uncovered: Vec::new(),
        }
    }

    pub(crate) fn compile(names: &[String], gpu: &RunGpu, device: &dyn Backend) {
        let checks = verify::named(names);
        device.compile_ahead(&verify::kernels(&checks, gpu.kind()));
    }

    pub(crate) fn run(names: &[String], device: &dyn Backend, told: &mut dyn FnMut(&str, Outcome)) {
        for check in verify::named(names) {
            told(&check.name, Outcome::Begins);
            let Err(error) = check.run(device) else {
                continue;
            };
            if let verify::CheckError::NoKernel { .. } = error {
                told(&check.name, Outcome::NoKernel);
                continue;
            }
            told(&check.name, Outcome::Wrong(error.to_string()));
            // After a failed call the driver may refuse all later ones.
            if let verify::CheckError::Failed { .. } = error {
                return;
            }
        }
    }

    pub(crate) fn sources() -> String {
        verify::sources()
    }

    pub(crate) fn allowed(dtype: kernels::DType, size: f64) -> f64 {
        verify::trained(dtype, size)
    }
}

/// A build without CUDA has no GPU to check.
#[cfg(not(feature = "cuda"))]
mod of_cuda {
    use super::{Backend, Cover, KernelList, Outcome, RunGpu};

    pub(crate) fn cover(_of: &KernelList, _gpu: &RunGpu) -> Cover {
        Cover::default()
    }

    pub(crate) fn every() -> Cover {
        Cover::default()
    }

    pub(crate) fn compile(_names: &[String], _gpu: &RunGpu, _device: &dyn Backend) {}

    pub(crate) fn run(
        _names: &[String],
        _device: &dyn Backend,
        _told: &mut dyn FnMut(&str, Outcome),
    ) {
    }

    pub(crate) fn sources() -> String {
        String::new()
    }

    pub(crate) fn allowed(_dtype: kernels::DType, _size: f64) -> f64 {
        0.0
    }
}

/// Distance that a loss or a gradient norm of this size may have on two devices.
pub(crate) use of_cuda::allowed;
/// Compiles the kernels of these checks for a device.
pub(crate) use of_cuda::compile;
/// Checks that launch the kernels of a run on this GPU.
pub(crate) use of_cuda::cover;
/// The checks of every operation.
pub(crate) use of_cuda::every;
/// Runs checks on a device. Tells each name before the check, and again if it does not pass.
pub(crate) use of_cuda::run;
/// Hash of the source texts of all kernels.
pub(crate) use of_cuda::sources;

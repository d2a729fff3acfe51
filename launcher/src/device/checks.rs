//! Checks of a GPU's operations against the CPU, by name, and of the kernels that a run needs.

use crate::config::RunGpu;
use crate::error::Failure;
use crate::rank_env::Variables;
use kernels::{Backend, KernelList};

/// What became of a check.
#[derive(Debug)]
#[cfg_attr(
    not(feature = "cuda"),
    expect(dead_code, reason = "only checks of a GPU have outcomes")
)]
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
    use super::{Backend, Cover, Failure, KernelList, Outcome, RunGpu, Variables};
    use crate::device::survey::search;
    use crate::error::failures;
    use crate::lang::{both, text};
    use kernels::cuda::CudaError;
    use kernels::cuda::image::BuiltInOnly;
    use kernels::cuda::ops::attention::HEAD_DIMS;
    use kernels::verify;

    pub(crate) fn have_code(
        mut lists: impl Iterator<Item = Result<KernelList, Failure>>,
        variables: &Variables,
    ) -> Result<(), Failure> {
        let Some(only) = BuiltInOnly::here(&search(variables)) else {
            return Ok(());
        };
        lists.try_for_each(|list| refused(&only.lacks(&list?)))
    }

    fn refused(missing: &[CudaError]) -> Result<(), Failure> {
        let Some((first, others)) = missing.split_first() else {
            return Ok(());
        };
        let failure = failures::without_kernel(both("start the run", "启动运行"), first);
        let dims = HEAD_DIMS.map(|dim| dim.to_string()).join(", ");
        let failure = failure.evidence(text!(
            "attention in 16 bits is built in for head dims {dims}",
            "16 位注意力内核内置支持的头维度：{dims}"
        ));
        let failure = match others.len() {
            0 => failure,
            count => failure.evidence(text!(
                "{count} more modules are missing",
                "另缺少 {count} 个模块"
            )),
        };
        Err(failure
            .next(both(
                "--precision f32 runs attention of any head dim without NVRTC",
                "--precision f32 时，任意头维度的注意力都不需要 NVRTC",
            ))
            .next(both(
                "--device cpu needs no kernel",
                "--device cpu 不需要内核",
            )))
    }

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
    use super::{Backend, Cover, Failure, KernelList, Outcome, RunGpu, Variables};

    pub(crate) fn have_code(
        _lists: impl Iterator<Item = Result<KernelList, Failure>>,
        _variables: &Variables,
    ) -> Result<(), Failure> {
        Ok(())
    }

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
/// Refuses kernels that are neither built in nor can be compiled (exit 13). The lists are not counted where NVRTC is found.
pub(crate) use of_cuda::have_code;
/// Runs checks on a device. Tells each name before the check, and again if it does not pass.
pub(crate) use of_cuda::run;
/// Hash of the source texts of all kernels.
pub(crate) use of_cuda::sources;

//! Stages `conformance`, `native`, `backend` and `calibration`.
//!
//! `conformance` compares every kernel on the GPU with its reference. `native` repeats that with machine code for this
//! GPU, while `conformance` used the code of sm_80. `backend` compares every backend operation with the CPU.
//! `calibration` compares the emulator with the GPU, so that its results also hold for tests without a GPU.

use std::sync::Arc;

use anyhow::{Context, Result};
use kernels::Backend;
use kernels::cuda::gpu::Gpu;
use kernels::cuda::module::Family;
use kernels::cuda::{CudaBackend, CudaError};
use kernels::verify::CheckError;

use super::{Report, Setting, show};
use crate::cases::{self, Effort};
use crate::emulator::{Emulator, Order};
use crate::gpu::GpuMachine;
use crate::paired::Paired;

/// Runs all cases of all families, small and large.
#[must_use]
pub fn run(setting: &Setting, name: &'static str) -> Report {
    let mut report = setting.report(name);
    let gpu = match setting.gpu() {
        Ok(gpu) => gpu,
        Err(error) => {
            report.failure(format!("{error:#}"));
            return report;
        }
    };
    let mut machine = GpuMachine::new(&gpu);
    for family in Family::ALL {
        for (effort, sizes) in [
            (Effort::Emulated, "small sizes"),
            (Effort::Gpu, "sizes of models"),
        ] {
            if setting.small && effort == Effort::Gpu {
                continue;
            }
            let all = cases::of(family, effort);
            let (mut passed, mut missing) = (0, 0);
            for case in &all {
                if setting.expired() {
                    report.failure(format!(
                        "{}: the time was used up before {}",
                        family.name(),
                        case.name
                    ));
                    break;
                }
                match case.run(&mut machine) {
                    Ok(()) => passed += 1,
                    Err(error) if setting.lacks_kernel(&error) => missing += 1,
                    Err(error) => {
                        report.failure(format!("{}: {error:#}", family.name()));
                        // An access outside memory ends the context, and nothing more runs in this process.
                        if let Err(lost) = gpu.synchronize() {
                            report.failure(format!("nothing behind that was run: {lost}"));
                            return report;
                        }
                    }
                }
            }
            let figure = format!("{passed} of {} passed", all.len());
            report.row(
                format!("{}, {sizes}", family.name()),
                figure,
                without_compiler(missing),
            );
        }
    }
    report.part("library", |report| library(setting, report));
    let arch = gpu.images().arch();
    report.row("machine code", arch, "");
    show(&format!("{name} done"));
    report
}

/// Remark on the checks that no kernel of this machine computes.
fn without_compiler(missing: usize) -> String {
    match missing {
        0 => String::new(),
        _ => format!("{missing} need NVRTC, which is missing"),
    }
}

/// Checks products by cuBLASLt, if installed: every epilogue, and every product that the backend requests.
fn library(setting: &Setting, report: &mut Report) -> Result<()> {
    let Some(gpu) = with_library(setting, report)? else {
        return Ok(());
    };
    let mut machine = GpuMachine::new(&gpu);
    let all = cases::multiply::cases(match setting.small {
        true => Effort::Emulated,
        false => Effort::Gpu,
    });
    let mut passed = 0;
    for case in &all {
        match case.run(&mut machine) {
            Ok(()) => passed += 1,
            Err(error) => report.failure(format!("{error:#}")),
        }
    }
    let figure = format!("{passed} of {} passed", all.len());
    report.row("products by cuBLASLt", figure, "our kernel and f64");
    Ok(())
}

/// The first GPU with cuBLASLt; `None` and a row if it is not installed.
fn with_library(setting: &Setting, report: &mut Report) -> Result<Option<Gpu>> {
    match setting.gpu()?.with_cublaslt(&setting.search) {
        Ok(gpu) => Ok(Some(gpu)),
        Err(CudaError::LibraryMissing { .. }) => {
            report.row("products by cuBLASLt", "not found", "");
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}

/// Compares every backend operation with the CPU, on the memory and the stream of a real GPU.
#[must_use]
pub fn backend(setting: &Setting) -> Report {
    let mut report = setting.report("backend");
    report.part("our products", |report| {
        operations(setting, setting.gpu()?, "operations", report)
    });
    report.part("products by cuBLASLt", |report| {
        match with_library(setting, report)? {
            Some(gpu) => {
                let what = "operations, products by cuBLASLt";
                operations(setting, gpu, what, report)
            }
            None => Ok(()),
        }
    });
    report
}

fn operations(setting: &Setting, gpu: Gpu, what: &str, report: &mut Report) -> Result<()> {
    /// Memory for the small tensors of the checks.
    const ARENA_BYTES: u64 = 256 << 20;
    let device = CudaBackend::new(Arc::new(gpu), ARENA_BYTES)?;
    let checks = kernels::verify::all();
    let (mut passed, mut missing) = (0, 0);
    for check in &checks {
        match check.run(&device) {
            Ok(()) => passed += 1,
            Err(CheckError::NoKernel { .. }) if setting.small => missing += 1,
            Err(error) => report.failure(format!("{what}: {error:#}")),
        }
    }
    let left = device.pool().stats().in_use;
    let figure = format!("{passed} of {} passed", checks.len());
    report.row(what, figure, without_compiler(missing));
    report.row(
        "bytes left in the arena",
        left.to_string(),
        "the last attention's table",
    );
    Ok(())
}

/// An emulated device runs each case on the emulator twice. Every so many-th case suffices to try the stage.
const SMALL_STEP: usize = 8;

/// Runs the small cases of every family on the GPU and on the emulator. Both must pass, and equal bytes are counted.
#[must_use]
pub fn calibrate(setting: &Setting) -> Report {
    let mut report = setting.report("calibration");
    report.part("emulator against GPU", |report| {
        let directory = setting.emulated.as_deref();
        let directory =
            directory.context("--emulated names the folder of the compiled emulator")?;
        let gpu = setting.gpu()?;
        let emulator = Emulator::prebuilt(directory, Order::Ascending);
        let mut machine = Paired::new(GpuMachine::new(&gpu), emulator);
        for family in Family::ALL {
            let step = if setting.small { SMALL_STEP } else { 1 };
            for case in cases::of(family, Effort::Emulated).iter().step_by(step) {
                if setting.expired() {
                    report.failure(format!("the time was used up before {}", case.name));
                    return Ok(());
                }
                let ended = case.run(&mut machine);
                if let Err(error) = ended.or_else(|error| match setting.lacks_kernel(&error) {
                    true => Ok(()),
                    false => Err(error),
                }) {
                    report.failure(format!("{}: {error:#}", family.name()));
                }
            }
            let compared = machine.take_comparison();
            let equal = compared.bytes - compared.different;
            let share = equal as f64 / compared.bytes.max(1) as f64;
            let figure = format!("{:.4} %", share * 100.0);
            report.row(
                format!("{}, equal bytes", family.name()),
                figure,
                format!("of {}", compared.bytes),
            );
        }
        Ok(())
    });
    report
}

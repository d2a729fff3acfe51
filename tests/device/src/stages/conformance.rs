//! Stage `conformance`: every kernel on the GPU against its reference. Stage `calibration`: the emulator against the
//! GPU, so that what the emulator proves in a test without a GPU holds.

use std::sync::Arc;

use anyhow::Context;
use kernels::Backend;
use kernels::cuda::CudaBackend;
use kernels::cuda::module::Family;

use super::{Report, Setting, show};
use crate::backend_checks;
use crate::cases::{self, Effort};
use crate::emulator::{Emulator, Order};
use crate::gpu::GpuMachine;
use crate::paired::Paired;

/// All cases of all families, small and large.
#[must_use]
pub fn run(setting: &Setting) -> Report {
    let mut report = Report::new("conformance");
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
            let all = cases::of(family, effort);
            let mut passed = 0;
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
                    Err(error) => report.failure(format!("{}: {error:#}", family.name())),
                }
            }
            let figure = format!("{passed} of {} passed", all.len());
            report.row(format!("{}, {sizes}", family.name()), figure, "");
        }
    }
    show("conformance done");
    report
}

/// Every operation of the backend beside the CPU, on the memory and the stream of a real GPU.
#[must_use]
pub fn backend(setting: &Setting) -> Report {
    /// Room for the small tensors of the checks.
    const ARENA_BYTES: u64 = 256 << 20;
    let mut report = Report::new("backend");
    report.part("backend", |report| {
        let gpu = Arc::new(setting.gpu()?);
        let device = CudaBackend::new(gpu, ARENA_BYTES)?;
        let checks = backend_checks::all();
        let mut passed = 0;
        for check in &checks {
            match check.run(&device) {
                Ok(()) => passed += 1,
                Err(error) => report.failure(format!("{error:#}")),
            }
        }
        let left = device.pool().stats().in_use;
        report.row(
            "operations",
            format!("{passed} of {} passed", checks.len()),
            "",
        );
        report.row(
            "bytes left in the arena",
            left.to_string(),
            "the last attention's table",
        );
        Ok(())
    });
    report
}

/// The small cases of every family on the GPU and on the emulator: both must pass, and equal bytes are counted.
#[must_use]
pub fn calibrate(setting: &Setting) -> Report {
    let mut report = Report::new("calibration");
    report.part("emulator against GPU", |report| {
        let folder = setting.emulated.as_deref();
        let folder = folder.context("--emulated names the folder of the compiled emulator")?;
        let gpu = setting.gpu()?;
        let emulator = Emulator::prebuilt(folder, Order::Ascending);
        let mut machine = Paired::new(GpuMachine::new(&gpu), emulator);
        for family in Family::ALL {
            for case in cases::of(family, Effort::Emulated) {
                if setting.expired() {
                    report.failure(format!("the time was used up before {}", case.name));
                    return Ok(());
                }
                if let Err(error) = case.run(&mut machine) {
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

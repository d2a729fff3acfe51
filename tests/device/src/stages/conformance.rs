//! Stage `conformance`: every kernel on the GPU against its reference. Stage `calibration`: the emulator against the
//! GPU, so that what the emulator proves in a test without a GPU holds.

use kernels::cuda::module::Family;

use super::{Report, Setting, show};
use crate::cases::{self, Effort};
use crate::gpu::GpuMachine;

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

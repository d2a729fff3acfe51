//! Directories of spill files: creation, removal of those of killed jobs, and locks while a job runs.

use crate::config::RunConfig;
use crate::error::{ErrorCode, Failure, failures};
use crate::ui::Event;
use engine::spill::{SpillDirectory, SpillError};

/// Locks on the directories of a job's spill files. The last process to release a lock removes the directory.
#[derive(Debug)]
pub(crate) struct HeldDirectories {
    _directories: Vec<SpillDirectory>,
}

/// Creates missing directories of `--offload nvme:DIR`, and removes files that killed jobs left in them.
pub(crate) fn sweep(config: &RunConfig, show: &mut dyn FnMut(Event)) -> Result<(), Failure> {
    for parent in config.offload.directories() {
        let unusable = |e: std::io::Error| {
            Failure::io(ErrorCode::Disk, "create", parent, &e)
                .next("use a writable directory on a local disk for --offload nvme:DIR")
        };
        std::fs::create_dir_all(parent).map_err(unusable)?;
        let swept = SpillDirectory::sweep(parent).map_err(|e| failed(&e))?;
        for (path, bytes) in swept {
            show(Event::Info {
                label: "nvme".into(),
                text: format!(
                    "removed {} ({}), which a killed job left",
                    path.display(),
                    crate::units::bytes(bytes)
                ),
            });
        }
    }
    Ok(())
}

/// Creates and locks the job's own directories under those of `--offload`.
pub(crate) fn hold(config: &RunConfig, job: &str) -> Result<HeldDirectories, Failure> {
    let directories = config.offload.directories().into_iter();
    let held = directories.map(|parent| SpillDirectory::join(parent, job));
    let held = held.collect::<Result<_, _>>().map_err(|e| failed(&e))?;
    Ok(HeldDirectories { _directories: held })
}

fn failed(error: &SpillError) -> Failure {
    failures::spill("set up spill files", error)
}

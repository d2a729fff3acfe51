//! Directories of spill files: creation, removal of files that killed jobs left, and locks while a job runs.

use crate::config::RunConfig;
use crate::error::{ErrorCode, Failure, failures};
use crate::ui::Event;
use engine::spill::{SpillError, SpillFolder};

/// Locks on a job's spill directories.
#[derive(Debug)]
pub(crate) struct HeldFolders {
    _folders: Vec<SpillFolder>,
}

/// Creates the directories of `--offload nvme:DIR` if they are missing, and removes what killed jobs left in them.
pub(crate) fn sweep_folders(
    config: &RunConfig,
    show: &mut dyn FnMut(Event),
) -> Result<(), Failure> {
    for parent in config.offload.folders() {
        let unusable = |e: std::io::Error| {
            Failure::io(ErrorCode::Disk, "create", parent, &e)
                .next("use a writable directory on a local disk for --offload nvme:DIR")
        };
        std::fs::create_dir_all(parent).map_err(unusable)?;
        let swept = SpillFolder::sweep(parent).map_err(|e| failed(&e))?;
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

/// Locks a job's spill directories until the result is dropped.
pub(crate) fn hold_folders(config: &RunConfig, job: &str) -> Result<HeldFolders, Failure> {
    let folders = config.offload.folders().into_iter();
    let held = folders.map(|parent| SpillFolder::join(parent, job));
    let held = held.collect::<Result<_, _>>().map_err(|e| failed(&e))?;
    Ok(HeldFolders { _folders: held })
}

fn failed(error: &SpillError) -> Failure {
    failures::spill("set up spill files", error)
}

//! Directories of spill files: creation, removal of those of killed jobs, and locks while a job runs.

use crate::config::RunConfig;
use crate::error::{ErrorCode, Failure, failures};
use crate::lang::{both, text};
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
            Failure::io(ErrorCode::Disk, both("create", "创建"), parent, &e).next(both(
                "use a writable directory on a local disk for --offload nvme:DIR",
                "请为 --offload nvme:DIR 使用本地磁盘上的可写目录",
            ))
        };
        std::fs::create_dir_all(parent).map_err(unusable)?;
        let swept = SpillDirectory::sweep(parent).map_err(|e| failed(&e))?;
        for (path, bytes) in swept {
            show(Event::Info {
                label: both("nvme", "nvme").into(),
                text: text!(
                    "removed {} ({}), which a killed job left",
                    "已删除被杀死的作业留下的 {}（{}）",
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
    failures::spill(both("set up spill files", "创建溢出文件"), error)
}

//! Checkpoints in a run's directory: the newest one that is whole.

use crate::error::{ErrorCode, Failure, continue_run, failures, file_name};
use crate::lang::{both, text};
use engine::checkpoint;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Key of a manifest under which the parameters stand that shared a flat buffer, buffer by buffer.
pub(crate) const UNITS: &str = "units";

/// Step and path of the checkpoints of the run in `output`, by ascending step. Those after its latest are not among them:
/// the run left them behind when it went back.
pub(crate) fn of_run(output: &Path) -> Vec<(u64, PathBuf)> {
    let mut all = checkpoint::list(output).unwrap_or_default();
    let latest = checkpoint::find_latest(output).ok().flatten();
    let is_latest = |(_, directory): &(u64, PathBuf)| Some(directory) == latest.as_ref();
    if let Some(last) = all.iter().position(is_latest) {
        all.truncate(last + 1);
    }
    all
}

/// The newest checkpoint of the run in `output` that is whole, byte for byte, `except` aside.
pub(crate) fn newest_intact(output: &Path, except: Option<&Path>) -> Option<PathBuf> {
    let mut all = of_run(output);
    let except = except.and_then(|path| path.canonicalize().ok());
    all.retain(|(_, directory)| directory.canonicalize().ok() != except || except.is_none());
    let mut newest_first = all.into_iter().rev().map(|(_, directory)| directory);
    newest_first.find(|directory| checkpoint::audit(directory).is_ok_and(|found| found.is_whole()))
}

/// The checkpoint that a directory stands for: the latest of a run, else the directory itself.
pub(crate) fn latest_of(directory: &Path) -> PathBuf {
    let is_own = ["MANIFEST.json", "config.json"]
        .into_iter()
        .any(|name| directory.join(name).exists());
    let latest = checkpoint::find_latest(directory).ok().flatten();
    latest
        .filter(|_| !is_own)
        .unwrap_or_else(|| directory.to_owned())
}

/// File of a run directory with the name of its best checkpoint.
const BEST: &str = "best";

/// The checkpoint that stands for a run: the best if the run chose one, else the latest. Any other directory itself.
pub(crate) fn best_of(directory: &Path) -> PathBuf {
    let name = std::fs::read_to_string(directory.join(BEST));
    let best = name.ok().map(|name| directory.join(name.trim()));
    best.filter(|best| best.join("MANIFEST.json").is_file())
        .unwrap_or_else(|| latest_of(directory))
}

/// Makes `checkpoint` the latest of the run in `output`, and removes the name of its best one. A run calls it before its
/// first step; without a checkpoint it starts anew.
///
/// # Errors
/// A file cannot be written or removed (exit 16).
pub(crate) fn go_on_from(output: &Path, checkpoint: Option<&Path>) -> Result<(), Failure> {
    let best = output.join(BEST);
    match std::fs::remove_file(&best) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Err(Failure::io(
                ErrorCode::Disk,
                both("remove", "删除"),
                &best,
                &error,
            ));
        }
        _ => {}
    }
    let real = |path: &Path| path.canonicalize().ok();
    let Some(from) = checkpoint.and_then(real) else {
        return Ok(());
    };
    let all = checkpoint::list(output).unwrap_or_default();
    let own = all
        .iter()
        .find(|(_, path)| real(path).as_ref() == Some(&from));
    match own {
        Some((step, _)) => checkpoint::set_latest(output, *step).map_err(|error| {
            failures::checkpoint(text!("go on from {}", "从 {} 继续", from.display()), &error)
        }),
        None => Ok(()),
    }
}

/// Writes the name of the best checkpoint of the run in `output`.
///
/// # Errors
/// The file cannot be written (exit 16).
pub(crate) fn write_best(output: &Path, name: &str) -> Result<(), Failure> {
    let path = output.join(BEST);
    std::fs::write(&path, format!("{name}\n"))
        .map_err(|error| Failure::io(ErrorCode::Disk, both("write", "写入"), &path, &error))
}

/// The next step where a checkpoint cannot be used: the newest of its run that can.
pub(crate) fn advise_intact(failure: Failure, checkpoint: &Path) -> Failure {
    let parent = checkpoint.parent().filter(|p| !p.as_os_str().is_empty());
    match newest_intact(parent.unwrap_or(Path::new(".")), Some(checkpoint)) {
        Some(directory) => failure.next(text!(
            "{}   # {} is the newest intact checkpoint of this run",
            "{}   # {} 是本次运行最近的完好检查点",
            continue_run(&directory),
            file_name(&directory)
        )),
        None => failure.next(both(
            "no other checkpoint of this run is intact: start again without --resume",
            "本次运行没有其他完好的检查点：请去掉 --resume 重新开始",
        )),
    }
}

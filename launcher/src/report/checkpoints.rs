//! Checkpoints in a run's directory: the newest one that is whole.

use crate::error::{Failure, file_name};
use engine::checkpoint;
use std::path::{Path, PathBuf};

/// Key of a manifest under which the parameters stand that shared a flat buffer, buffer by buffer.
pub(crate) const UNITS: &str = "units";

/// The newest checkpoint of the run in `output` that is whole, byte for byte, `except` aside.
pub(crate) fn newest_intact(output: &Path, except: Option<&Path>) -> Option<PathBuf> {
    let mut all = checkpoint::list(output).ok()?;
    let except = except.and_then(|path| path.canonicalize().ok());
    all.retain(|(_, directory)| directory.canonicalize().ok() != except || except.is_none());
    let mut newest_first = all.into_iter().rev().map(|(_, directory)| directory);
    newest_first.find(|directory| checkpoint::audit(directory).is_ok_and(|found| found.is_whole()))
}

/// The next step where a checkpoint cannot be used: the newest of its run that can.
pub(crate) fn advise_intact(failure: Failure, checkpoint: &Path) -> Failure {
    let parent = checkpoint.parent().filter(|p| !p.as_os_str().is_empty());
    match newest_intact(parent.unwrap_or(Path::new(".")), Some(checkpoint)) {
        Some(directory) => failure.next(format!(
            "{} is the newest intact checkpoint of this run: --resume {}",
            file_name(&directory),
            directory.display()
        )),
        None => {
            failure.next("no other checkpoint of this run is intact: start again without --resume")
        }
    }
}

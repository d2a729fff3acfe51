//! The output directory: its checkpoints, the latest one, and leftovers of a crash.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use super::CheckpointError;
use super::fs::{Disk, FileSystem};
use super::manifest::{MANIFEST, Manifest};

/// Name of the file that names the latest checkpoint.
pub(super) const LATEST: &str = "latest";
/// Largest number of bytes that are read from that file, larger than any name in it.
const LATEST_BYTES: u64 = 256;
/// Temporary name of `latest` before the rename.
pub(super) const LATEST_TMP: &str = "latest.tmp";

const PREFIX: &str = "checkpoint-";
const TMP: &str = ".tmp";
const ASIDE: &str = ".old";
const DELETED: &str = ".deleted.tmp";

/// Path of the finished checkpoint of `step` below the directory `output`.
pub(super) fn final_directory(output: &Path, step: u64) -> PathBuf {
    output.join(format!("{PREFIX}{step}"))
}

/// Path below the directory `output` where the checkpoint of `step` is written until it is finished.
pub(super) fn tmp_directory(output: &Path, step: u64) -> PathBuf {
    output.join(format!("{PREFIX}{step}{TMP}"))
}

/// Temporary directory of a checkpoint while a new one of the same step replaces it.
pub(super) fn aside_directory(output: &Path, step: u64) -> PathBuf {
    output.join(format!("{PREFIX}{step}{ASIDE}"))
}

/// The step in the name of a finished checkpoint's directory.
pub(super) fn parse_step(name: &str) -> Option<u64> {
    let digits = name.strip_prefix(PREFIX)?;
    let step: u64 = digits.parse().ok()?;
    // Refuses `+5` and `005`, which name other directories.
    (step.to_string() == digits).then_some(step)
}

/// Opens a file to read. It refuses a FIFO or a device at once, where a plain open could wait forever for a writer.
pub(super) fn open_regular(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
        .open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::other("it is not a regular file")),
    }
}

/// Whether a directory contains a manifest of this program, intact or not.
pub(super) fn holds_manifest(directory: &Path) -> bool {
    let is_directory = fs::symlink_metadata(directory).is_ok_and(|metadata| metadata.is_dir());
    let mut head = Vec::new();
    is_directory
        && open_regular(&directory.join(MANIFEST))
            .and_then(|file| file.take(Manifest::HEAD_BYTES).read_to_end(&mut head))
            .is_ok()
        && Manifest::is_head(&head)
}

fn names(output: &Path) -> Result<Vec<String>, CheckpointError> {
    let entries = match fs::read_dir(output) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(CheckpointError::reading(output)(error)),
    };
    let names = entries
        .map(|entry| entry.map(|entry| entry.file_name()))
        .collect::<Result<Vec<_>, _>>()
        .map_err(CheckpointError::reading(output))?;
    Ok(names
        .into_iter()
        .filter_map(|name| name.into_string().ok())
        .collect())
}

/// Step and path of every complete checkpoint in the directory `output`, by ascending step. The step is the
/// number in the name `checkpoint-<step>`. The content of the checkpoints is not verified.
///
/// # Errors
/// [`CheckpointError::Io`] when the directory exists and cannot be listed.
pub fn list(output: &Path) -> Result<Vec<(u64, PathBuf)>, CheckpointError> {
    let mut found = BTreeMap::new();
    for name in names(output)? {
        let plain = name.strip_suffix(ASIDE).unwrap_or(&name);
        let Some(step) = parse_step(plain) else {
            continue;
        };
        // A checkpoint that was moved aside counts until another one has its name.
        if plain == name || !holds_manifest(&output.join(plain)) {
            let directory = output.join(&name);
            if holds_manifest(&directory) {
                found.insert(step, directory);
            }
        }
    }
    Ok(found.into_iter().collect())
}

/// Path of the newest complete checkpoint in the directory `output`: the one that the file `latest` names,
/// otherwise the one with the highest step. `None` if the directory has no checkpoint.
///
/// # Errors
/// [`CheckpointError::Io`] when the directory exists and cannot be listed.
pub fn find_latest(output: &Path) -> Result<Option<PathBuf>, CheckpointError> {
    let mut checkpoints = list(output)?;
    let named = open_regular(&output.join(LATEST))
        .and_then(|file| io::read_to_string(file.take(LATEST_BYTES)))
        .ok()
        .and_then(|text| parse_step(text.trim()))
        .and_then(|step| checkpoints.iter().position(|(other, _)| *other == step));
    Ok(match named {
        Some(i) => Some(checkpoints.swap_remove(i).1),
        None => checkpoints.pop().map(|(_, directory)| directory),
    })
}

/// Removes leftovers of interrupted saves from the directory `output`, and returns the removed paths. If a
/// save moved an old checkpoint of the same step aside and never published the new one, it restores the old
/// one. It must not run during a save.
///
/// # Errors
/// [`CheckpointError::Io`] when the directory cannot be listed or a path cannot be removed or renamed.
pub fn sweep(output: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
    let mut removed = Vec::new();
    for name in names(output)? {
        let path = output.join(&name);
        let stem = |suffix| name.strip_suffix(suffix).and_then(parse_step);
        if name == LATEST_TMP {
            Disk.remove_file(&path)
                .map_err(CheckpointError::io("remove", &path, 0))?;
        } else if stem(TMP).or_else(|| stem(DELETED)).is_some() {
            Disk.remove_dir_all(&path)
                .map_err(CheckpointError::io("remove", &path, 0))?;
        } else if let Some(step) = stem(ASIDE) {
            let target = final_directory(output, step);
            if !target.exists() && holds_manifest(&path) {
                Disk.rename(&path, &target)
                    .map_err(CheckpointError::io("rename", &path, 0))?;
                continue;
            }
            Disk.remove_dir_all(&path)
                .map_err(CheckpointError::io("remove", &path, 0))?;
        } else {
            continue;
        }
        removed.push(path);
    }
    Ok(removed)
}

/// Removes checkpoints from the directory `output`, until `save_total_limit` are left (0: removes none): first those
/// of steps after the latest, which a run left behind when it went back, then those of the lowest steps. It never
/// removes the latest one or a directory that this program did not write. Returns the removed directories.
///
/// # Errors
/// [`CheckpointError::Io`] when the directory cannot be listed or a checkpoint cannot be removed.
pub fn prune(output: &Path, save_total_limit: usize) -> Result<Vec<PathBuf>, CheckpointError> {
    prune_on(&Disk, output, save_total_limit, None)
}

pub(super) fn prune_on(
    fs: &dyn FileSystem,
    output: &Path,
    save_total_limit: usize,
    kept: Option<u64>,
) -> Result<Vec<PathBuf>, CheckpointError> {
    let latest = find_latest(output)?;
    if save_total_limit == 0 || latest.is_none() {
        return Ok(Vec::new());
    }
    let all = list(output)?;
    let is_latest = |(_, directory): &&(u64, PathBuf)| Some(directory) == latest.as_ref();
    let last = all
        .iter()
        .find(is_latest)
        .map_or(u64::MAX, |(step, _)| *step);
    let others = all.into_iter().filter(|(step, _)| *step != last);
    let (before, after): (Vec<_>, Vec<_>) = others.partition(|(step, _)| *step < last);
    let others: Vec<(u64, PathBuf)> = after.into_iter().chain(before).collect();
    let all = others.len();
    let others: Vec<(u64, PathBuf)> = others
        .into_iter()
        .filter(|(step, _)| Some(*step) != kept)
        .collect();
    // The latest and the kept one stay, also with a limit of one.
    let room = (save_total_limit - 1).saturating_sub(all - others.len());
    let surplus = others.len().saturating_sub(room);
    let mut removed = Vec::new();
    for (step, directory) in others.into_iter().take(surplus) {
        // Renamed first, so that a half-removed directory never looks like a checkpoint.
        let doomed = output.join(format!("{PREFIX}{step}{DELETED}"));
        remove_directory(fs, &doomed)?;
        fs.rename(&directory, &doomed)
            .map_err(CheckpointError::io("rename", &directory, 0))?;
        remove_directory(fs, &doomed)?;
        removed.push(directory);
    }
    Ok(removed)
}

/// Removes a directory if it exists.
pub(super) fn remove_directory(
    fs: &dyn FileSystem,
    directory: &Path,
) -> Result<(), CheckpointError> {
    if fs::symlink_metadata(directory).is_err() {
        return Ok(());
    }
    fs.remove_dir_all(directory)
        .map_err(CheckpointError::io("remove", directory, 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fifo_named_as_the_manifest_is_no_checkpoint_and_does_not_block() {
        let output = tempfile::tempdir().unwrap();
        let directory = output.path().join("checkpoint-4");
        fs::create_dir(&directory).unwrap();
        let made = std::process::Command::new("mkfifo")
            .arg(directory.join(MANIFEST))
            .status();
        assert!(made.unwrap().success());
        let (sender, receiver) = std::sync::mpsc::channel();
        let path = output.path().to_owned();
        std::thread::spawn(move || {
            let listed = list(&path).unwrap();
            let error = super::super::read::read_manifest(&directory).unwrap_err();
            sender.send((listed, error.to_string())).unwrap();
        });
        let wait = std::time::Duration::from_secs(20);
        let (listed, error) = receiver.recv_timeout(wait).expect("it does not hang");
        assert!(listed.is_empty());
        assert!(error.contains(MANIFEST), "{error}");
    }

    #[test]
    fn only_plain_numbers_name_checkpoints() {
        assert_eq!(parse_step("checkpoint-400"), Some(400));
        for other in [
            "checkpoint-",
            "checkpoint-+4",
            "checkpoint-04",
            "checkpoint-4x",
            "ckpt-4",
        ] {
            assert_eq!(parse_step(other), None, "{other}");
        }
    }

    #[test]
    fn a_missing_output_directory_has_no_checkpoints() {
        let directory = tempfile::tempdir().unwrap();
        let output = directory.path().join("none");
        assert!(find_latest(&output).unwrap().is_none());
        assert!(sweep(&output).unwrap().is_empty());
        assert!(prune(&output, 1).unwrap().is_empty());
    }
}

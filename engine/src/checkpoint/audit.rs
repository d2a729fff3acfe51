//! A check of a checkpoint that reports every problem, not only the first.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use super::CheckpointError;
use super::manifest::Manifest;
use super::read::{check_file, compare, hash_file, open_state_file, read_manifest};

/// Result of [`audit`]: size of a checkpoint, and its damaged files and tensors.
#[derive(Debug)]
pub struct Audit {
    /// Number of files that the manifest lists.
    pub files: usize,
    /// Total bytes of all files that the manifest lists, according to the manifest.
    pub bytes: u64,
    /// Number of tensors that the manifest lists. Weight, master weight and optimizer states of one parameter
    /// count separately.
    pub tensors: usize,
    /// One error per damaged file.
    pub problems: Vec<CheckpointError>,
    /// Kind (e.g. `exp_avg`) and parameter name of every tensor that has data in a damaged file.
    pub lost: Vec<(String, String)>,
}

impl Audit {
    /// Whether the checkpoint is intact: no file is damaged.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.problems.is_empty()
    }
}

/// Checks all files of a checkpoint and reports every damaged one. It compares each file with its length and
/// hash in the manifest, and each tensor's pieces with the headers of their files. Unlike
/// [`Checkpoint::open`](super::Checkpoint::open) it continues after the first damaged file.
///
/// # Errors
/// When the manifest is missing, unreadable or damaged, since nothing else can be checked then.
pub fn audit(directory: &Path) -> Result<Audit, CheckpointError> {
    let manifest = read_manifest(directory)?;
    let root = fs::canonicalize(directory).map_err(CheckpointError::reading(directory))?;
    let mut audit = Audit {
        files: manifest.files.len(),
        bytes: manifest.files.iter().map(|file| file.bytes).sum(),
        tensors: manifest.tensors.len(),
        problems: Vec::new(),
        lost: Vec::new(),
    };
    let mut bad = BTreeSet::new();
    for file in &manifest.files {
        let path = directory.join(&file.path);
        let found = check_file(&root, directory, file)
            .and_then(|()| hash_file(&path))
            .and_then(|digest| compare(&path, file, &digest));
        if let Err(problem) = found {
            audit.problems.push(problem);
            bad.insert(file.path.as_str());
        }
    }
    let contradicting = contradicting_files(directory, &manifest, &bad, &mut audit.problems);
    bad.extend(contradicting);
    for tensor in &manifest.tensors {
        let mut pieces = tensor.pieces.iter();
        if pieces.any(|piece| bad.contains(piece.file.as_str())) {
            audit.lost.push((tensor.kind.clone(), tensor.name.clone()));
        }
    }
    Ok(audit)
}

/// Files, not yet known as bad, whose pieces contradict the manifest.
fn contradicting_files<'m>(
    directory: &Path,
    manifest: &'m Manifest,
    bad: &BTreeSet<&str>,
    problems: &mut Vec<CheckpointError>,
) -> BTreeSet<&'m str> {
    let mut headers = BTreeMap::new();
    let mut found = BTreeSet::new();
    let pieces = manifest
        .tensors
        .iter()
        .flat_map(|tensor| tensor.pieces.iter().map(move |piece| (tensor, piece)));
    for (tensor, piece) in pieces {
        let file = piece.file.as_str();
        if bad.contains(file) || found.contains(file) {
            continue;
        }
        let header = headers
            .entry(file)
            .or_insert_with(|| open_state_file(directory.join(file)).map(|(_, header)| header));
        let located = header
            .as_ref()
            .is_ok_and(|header| header.locate(tensor, &piece.key, piece.elems).is_some());
        if !located {
            found.insert(file);
            problems.push(CheckpointError::Malformed {
                path: directory.join(file),
                what: "its header contradicts the manifest",
            });
        }
    }
    found
}

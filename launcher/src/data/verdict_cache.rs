//! Verdicts about image files, remembered between runs.
//!
//! One file in the cache directory holds the verdicts of one data file: the headers of its images, and which of them
//! were decoded. A verdict counts while path, size and modification time of the image and the version of this program
//! are the same. Only usable images are remembered. A file that cannot be read is ignored and written again. A new
//! file replaces the old one in one step, so jobs at the same time cannot damage it; the last one wins.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use models::image::Header;
use serde::{Deserialize, Serialize};

/// Raised when verdicts of the same version of the program change their meaning.
const CHECK: &str = concat!(env!("CARGO_PKG_VERSION"), " 1");
/// A file that was changed this shortly before the check may change again without another time.
const CLOCK: Duration = Duration::from_secs(2);

/// Size and modification time of a file, which change when its content does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Stamp {
    bytes: u64,
    modified: SystemTime,
}

/// What the check found about an image file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Verdict {
    pub(super) stamp: Stamp,
    pub(super) header: Header,
    /// Whether it was decoded without an error.
    pub(super) decoded: bool,
}

/// Verdicts about the images of one data file.
#[derive(Debug, Default)]
pub(super) struct Verdicts {
    /// Where they are stored, if they are.
    file: Option<PathBuf>,
    images: HashMap<PathBuf, Verdict>,
    changed: bool,
}

#[derive(Serialize, Deserialize)]
struct Stored {
    check: String,
    images: HashMap<PathBuf, Verdict>,
}

impl Stamp {
    /// The stamp of the file at `path`; `None` if the system does not tell.
    pub(super) fn of(path: &Path) -> Option<Self> {
        let meta = fs::metadata(path).ok()?;
        Some(Self {
            bytes: meta.len(),
            modified: meta.modified().ok()?,
        })
    }
}

impl Verdicts {
    /// The verdicts about the images of `data` in the directory `cache`; none if they cannot be read.
    pub(super) fn of(cache: Option<&Path>, data: &Path) -> Self {
        let file = cache.map(|cache| {
            let data = std::path::absolute(data).unwrap_or_else(|_| data.to_owned());
            let name = blake3::hash(data.as_os_str().as_encoded_bytes()).to_hex();
            cache.join(format!("{}.json", &name[..32]))
        });
        let read = |file: &Path| -> Option<Stored> {
            let stored: Stored = serde_json::from_slice(&fs::read(file).ok()?).ok()?;
            (stored.check == CHECK).then_some(stored)
        };
        let images = file.as_deref().and_then(read);
        Self {
            images: images.map(|stored| stored.images).unwrap_or_default(),
            file,
            changed: false,
        }
    }

    /// The verdict about `file`, if its stamp is still the same.
    pub(super) fn of_file(&self, file: &Path, stamp: Stamp) -> Option<&Verdict> {
        self.images
            .get(file)
            .filter(|verdict| verdict.stamp == stamp)
    }

    /// Adds the verdict about `file`, which a check that began at `started` found.
    pub(super) fn remember(&mut self, file: PathBuf, verdict: Verdict, started: SystemTime) {
        let settled = verdict.stamp.modified.checked_add(CLOCK);
        if self.file.is_some() && settled.is_some_and(|time| time < started) {
            self.images.insert(file, verdict);
            self.changed = true;
        }
    }

    /// Stores the verdicts if there are new ones. A directory that cannot be written costs time in the next check only.
    pub(super) fn save(self) {
        let Some(file) = self.file.filter(|_| self.changed) else {
            return;
        };
        let stored = Stored {
            check: CHECK.to_owned(),
            images: self.images,
        };
        let new = file.with_extension(format!("{}.new", std::process::id()));
        let written = serde_json::to_vec(&stored).is_ok_and(|text| {
            let directory = file
                .parent()
                .is_some_and(|dir| fs::create_dir_all(dir).is_ok());
            directory && fs::write(&new, text).is_ok() && fs::rename(&new, &file).is_ok()
        });
        if !written {
            drop(fs::remove_file(&new));
        }
    }
}

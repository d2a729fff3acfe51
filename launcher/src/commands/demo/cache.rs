//! The demo's files in a cache directory: generated once, verified at every use.

use crate::lang::{both, text};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde_json::json;

use super::{TRAIN_SAMPLES, dataset, held_out, model_files};
use crate::commands::synth::writer::{FileWriter, WriteError};
use crate::config::demo::{HELD_OUT_FILE, MODEL_DIR, TRAIN_FILE};
use crate::error::{ErrorCode, Failure};
use crate::ui::Event;
use crate::units::{grouped, seconds};

const MANIFEST: &str = "MANIFEST.json";
const TRAIN_DIR: &str = "train";
const HELD_OUT_DIR: &str = "heldout";

/// Map from path in the directory to BLAKE3 hash of the contents.
type Manifest = BTreeMap<String, String>;

/// Makes sure that `directory` contains the complete demo. If it does not, generates the demo in a temporary directory
/// and renames it.
///
/// # Errors
/// When the directory cannot be written.
pub(super) fn ensure(directory: &Path, show: &mut dyn FnMut(Event)) -> Result<(), Failure> {
    if is_whole(directory) {
        return Ok(());
    }
    let started = Instant::now();
    let fail = |error: io::Error| {
        Failure::io(
            ErrorCode::Disk,
            both("draw the demo into", "绘制演示数据到"),
            directory,
            &error,
        )
    };
    let work = beside(directory, "drawing");
    remove_abandoned(directory);
    fs::create_dir_all(&work).map_err(fail)?;
    let drawn = draw(&work).map_err(|failed| failed.error);
    let drawn = drawn.and_then(|()| put_in_place(&work, directory));
    // After a failure this removes all files. After a rename the directory no longer exists.
    drop(fs::remove_dir_all(&work));
    drawn.map_err(fail)?;
    show(Event::Info {
        label: both("demo", "演示").into(),
        text: text!(
            "drew {} training images into {} in {}",
            "绘制了 {} 张训练图片到 {}，用时 {}",
            grouped(TRAIN_SAMPLES as u64),
            directory.display(),
            seconds(started.elapsed().as_secs_f64())
        ),
    });
    Ok(())
}

fn put_in_place(work: &Path, directory: &Path) -> io::Result<()> {
    // Two attempts: an incomplete directory is moved aside, and another process may do the same at the same time.
    for _ in 0..2 {
        match fs::rename(work, directory) {
            Ok(()) => return Ok(()),
            Err(_) if is_whole(directory) => return Ok(()),
            Err(error) if directory.exists() => {
                let aside = beside(directory, "old");
                fs::rename(directory, &aside).map_err(|_| error)?;
                drop(fs::remove_dir_all(&aside));
            }
            Err(error) => return Err(error),
        }
    }
    fs::rename(work, directory)
}

/// Removes what processes left that were killed while generating the demo.
fn remove_abandoned(directory: &Path) {
    let Some(entries) = directory
        .parent()
        .and_then(|parent| fs::read_dir(parent).ok())
    else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let process = name
            .strip_prefix(".demo-")
            .and_then(|rest| rest.rsplit('.').next());
        if process.is_some_and(|process| !Path::new("/proc").join(process).exists()) {
            // Another process may remove it at the same time.
            drop(fs::remove_dir_all(entry.path()));
        }
    }
}

/// Path next to `directory` that only this process uses.
fn beside(directory: &Path, what: &str) -> PathBuf {
    let name = directory.file_name().unwrap_or_default().to_string_lossy();
    directory.with_file_name(format!(".{name}.{what}.{}", std::process::id()))
}

fn draw(directory: &Path) -> Result<(), WriteError> {
    let mut writer = FileWriter::new(directory, "");
    writer.create_directory(MODEL_DIR)?;
    for (name, contents) in model_files::files() {
        writer.put_json(&format!("{MODEL_DIR}/{name}"), &contents)?;
    }
    writer.put_images(TRAIN_DIR, dataset::train().map(|sample| sample.png()))?;
    writer.put_images(HELD_OUT_DIR, held_out::IMAGES.map(|(_, bytes)| bytes))?;
    let train = dataset::train().map(|sample| sample.to_json(TRAIN_DIR));
    writer.put_json(TRAIN_FILE, &train.collect())?;
    let held_out = dataset::held_out().map(|sample| sample.to_json(HELD_OUT_DIR));
    writer.put_json(HELD_OUT_FILE, &held_out.collect())?;
    // The manifest does not list itself.
    let manifest = json!(writer.hashes);
    writer.put_json(MANIFEST, &manifest)
}

/// Whether every file of the manifest exists unchanged, and the manifest is of this version.
fn is_whole(directory: &Path) -> bool {
    let manifest: Option<Manifest> = fs::read(directory.join(MANIFEST))
        .ok()
        .and_then(|bytes| serde_json::from_slice(&bytes).ok());
    let Some(manifest) = manifest else {
        return false;
    };
    // The model files are cheap to generate. Comparing them detects a directory of an older generator.
    let current = model_files::files().into_iter().all(|(name, contents)| {
        let hash = blake3::hash(format!("{contents:#}").as_bytes()).to_string();
        manifest.get(&format!("{MODEL_DIR}/{name}")) == Some(&hash)
    });
    current
        && manifest.len() > TRAIN_SAMPLES
        && manifest.iter().all(|(name, hash)| {
            fs::read(directory.join(name))
                .is_ok_and(|bytes| blake3::hash(&bytes).to_string() == *hash)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ensure_quietly(directory: &Path) -> usize {
        let mut shown = 0;
        ensure(directory, &mut |_| shown += 1).expect("drawn");
        shown
    }

    #[test]
    fn demo_files_are_made_once_and_repaired_when_damaged() {
        let temp = tempfile::tempdir().expect("temp dir");
        let directory = temp.path().join("cache/demo-1");
        fs::create_dir_all(temp.path().join("cache/.demo-1.drawing.4194999")).expect("made");
        assert_eq!(ensure_quietly(&directory), 1);
        assert_eq!(ensure_quietly(&directory), 0);
        let image = directory.join("train/0007.png");
        let good = fs::read(&image).expect("read");
        for damage in ["change", "remove"] {
            if damage == "change" {
                fs::write(&image, "x").expect("written");
            } else {
                fs::remove_file(&image).expect("removed");
            }
            assert_eq!(ensure_quietly(&directory), 1, "{damage}");
            assert_eq!(fs::read(&image).expect("read"), good);
        }
        let left: Vec<_> = fs::read_dir(temp.path().join("cache"))
            .expect("listed")
            .flatten()
            .map(|e| e.file_name())
            .collect();
        assert_eq!(left, ["demo-1"]);
    }

    #[test]
    fn a_directory_that_cannot_be_written_is_an_error() {
        let temp = tempfile::tempdir().expect("temp dir");
        let file = temp.path().join("file");
        fs::write(&file, "x").expect("written");
        let failure = ensure(&file.join("demo"), &mut |_| ()).expect_err("refused");
        assert_eq!(failure.code.status(), 16);
    }
}

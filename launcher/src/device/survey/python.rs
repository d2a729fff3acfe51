//! Directories of Python packages that contain NVIDIA's libraries, as installed by `pip install nvidia-cuda-nvrtc`
//! and by PyTorch.

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::Builder;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};

use crate::rank_env::CudaSearchPaths;

/// Time limit of the interpreter, which is started only to print its directories.
const LIMIT: Duration = Duration::from_secs(5);
const SYSTEM: [&str; 2] = ["/usr/local", "/usr"];

/// Directories that contain an `nvidia` directory, each once: those of the environment, those of the system, and
/// those that `python3` prints.
pub(super) fn packages(search_paths: &CudaSearchPaths) -> Vec<PathBuf> {
    let mut directories = search_paths.python_path.clone();
    let roots = search_paths
        .python_environments
        .iter()
        .map(PathBuf::as_path);
    for root in roots.chain(SYSTEM.map(Path::new)) {
        directories.extend(directories_in(root));
    }
    directories.extend(ask("python3", LIMIT));
    let mut found: Vec<PathBuf> = Vec::new();
    for directory in directories {
        let directory = directory.canonicalize().unwrap_or(directory);
        if directory.join("nvidia").is_dir() && !found.contains(&directory) {
            found.push(directory);
        }
    }
    found
}

/// `lib/python3*/site-packages` and `dist-packages` below `root`, sorted.
fn directories_in(root: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(root.join("lib")).into_iter().flatten();
    let mut versions: Vec<PathBuf> = entries
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("python3"))
        .map(|entry| entry.path())
        .collect();
    versions.sort();
    versions
        .iter()
        .flat_map(|version| ["site-packages", "dist-packages"].map(|name| version.join(name)))
        .collect()
}

/// Directories in which an interpreter searches for packages. Empty if it fails or takes too long.
fn ask(program: &str, limit: Duration) -> Vec<PathBuf> {
    let child = Command::new(program)
        .args(["-c", "import sys; print(*sys.path, sep='\\n')"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        // Version managers replace interpreters by scripts; the process group allows ending all their processes.
        .process_group(0)
        .spawn();
    let Ok(mut child) = child else {
        return Vec::new();
    };
    let (sender, answer) = crossbeam::channel::bounded(1);
    if let Some(mut stdout) = child.stdout.take() {
        // Without a thread there is no answer.
        let reading = Builder::new().spawn(move || {
            let mut text = String::new();
            if stdout.read_to_string(&mut text).is_ok() {
                sender.send(text).ok();
            }
        });
        drop(reading);
    }
    let text = answer.recv_timeout(limit).unwrap_or_default();
    // It has exited, or its remaining output is not needed.
    kill_process_group(Pid::from_child(&child), Signal::KILL).ok();
    child.wait().ok();
    text.lines()
        .map(PathBuf::from)
        .filter(|directory| directory.is_absolute())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::time::Instant;

    fn memory_plan(directory: &Path, text: &str) -> String {
        let path = directory.join("python3");
        fs::write(&path, format!("#!/bin/sh\n{text}\n")).expect("written");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("made executable");
        path.to_string_lossy().into_owned()
    }

    #[test]
    fn only_absolute_paths_of_a_successful_interpreter_are_used() {
        let directory = tempfile::tempdir().expect("temp dir");
        let program = memory_plan(directory.path(), "printf '\\n/a\\nrelative\\n/b c\\n'");
        let paths = ["/a", "/b c"].map(PathBuf::from);
        assert_eq!(ask(&program, LIMIT), paths);
        assert!(ask(&memory_plan(directory.path(), "exit 3"), LIMIT).is_empty());
        assert!(ask("/no/such/interpreter", LIMIT).is_empty());
    }

    #[test]
    fn a_hanging_interpreter_is_killed_with_its_children() {
        let directory = tempfile::tempdir().expect("temp dir");
        let program = memory_plan(directory.path(), "echo /a\nsleep 600 &\nsleep 600");
        let started = Instant::now();
        assert!(ask(&program, Duration::from_millis(50)).is_empty());
        assert!(started.elapsed() < Duration::from_secs(60));
    }

    #[test]
    fn packages_of_an_environment_are_found_in_versioned_directories() {
        let root = tempfile::tempdir().expect("temp dir");
        let site = root.path().join("lib/python3.12/site-packages");
        fs::create_dir_all(site.join("nvidia/cuda_nvrtc/lib")).expect("made");
        fs::create_dir_all(root.path().join("lib/python3.11/site-packages")).expect("made");
        let search_paths = CudaSearchPaths {
            python_environments: vec![root.path().into(), root.path().into()],
            python_path: vec!["/no/such".into()],
            ..CudaSearchPaths::default()
        };
        let site = site.canonicalize().expect("exists");
        let found = packages(&search_paths);
        assert_eq!(
            found.iter().filter(|directory| **directory == site).count(),
            1
        );
        assert!(
            !found
                .iter()
                .any(|directory| directory.ends_with("python3.11/site-packages"))
        );
    }
}

//! Tests that the library that was found is the one that is called, with stand-ins that the system's C compiler
//! builds. `tests/suites/launcher/doctor.rs` puts other files in the dynamic linker's way.
#![cfg(feature = "cuda")]
#![allow(
    clippy::unwrap_used,
    reason = "a test binary: a broken expectation should end the test where it stands"
)]

use std::path::Path;
use std::process::Command;

use kernels::cuda::gpu::Gpu;
use kernels::cuda::library::{Library, Search};
use kernels::cuda::nvrtc::Compiler;
use kernels::cuda::probe::probe;
use tempfile::TempDir;

/// A directory with the stand-ins that `library.c` builds with these definitions.
fn directory(defines: &[&str]) -> (TempDir, Search) {
    let directory = tempfile::tempdir().unwrap();
    let built = directory.path().join("library.so");
    let status = Command::new("cc")
        .args(["-shared", "-fPIC", "-w", "-o"])
        .arg(&built)
        .args(defines.iter().map(|define| format!("-D{define}")))
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/found/library.c"))
        .status();
    assert!(status.unwrap().success());
    for library in [Library::Driver, Library::Nvrtc, Library::CublasLt] {
        std::fs::copy(&built, directory.path().join(library.files()[0])).unwrap();
    }
    let search = Search {
        directories: vec![directory.path().into()],
        ..Search::default()
    };
    (directory, search)
}

#[test]
fn versions_are_those_of_the_files_that_are_reported() {
    let (directory, search) = directory(&[]);
    let answer = probe(&search);
    for (library, version) in [
        (Library::Driver, "CUDA 13.7"),
        (Library::Nvrtc, "13.77"),
        (Library::CublasLt, "13.9.77"),
    ] {
        let found = answer.library(library).unwrap();
        let path = directory.path().join(library.files()[0]);
        assert_eq!(found.path, Some(path));
        assert_eq!(found.version.as_deref(), Some(version));
    }
    assert_eq!(answer.problem, None);
    assert_eq!(answer.devices[0].name, "Decoy 40");
    let compiler = Compiler::find(&search).unwrap();
    assert_eq!(compiler.architectures(), [80, 86]);
    let compiled = compiler.compile_text("any", "source", "sm_86").unwrap();
    assert_eq!(compiled.ptx, "--gpu-architecture=sm_86");
    let error = Gpu::open(0, &search, None).unwrap_err();
    assert_eq!(error.to_string(), "opening the GPU failed: DECOY_ERROR");
}

#[test]
fn a_missing_function_is_named() {
    let (directory, search) = directory(&["LACKING"]);
    let path = directory.path().join(Library::Driver.files()[0]);
    let answer = probe(&search);
    assert_eq!(answer.driver_version, Some((13, 7)));
    let lack = format!(
        "NVIDIA driver in {} lacks the function cuIpcOpenEventHandle",
        path.display()
    );
    let problem = answer.problem.unwrap();
    assert!(problem.starts_with(&lack), "{problem}");
    let error = Gpu::open(0, &search, None).unwrap_err().to_string();
    assert!(error.contains(&lack), "{error}");
}

//! The fake driver of `tests/fake_driver`, built for a process that takes it through `TESSERA_CUDA_LIBS`.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::emulator::{object_name, write_objects};

/// The file that the links of all libraries name.
const LIBRARY: &str = "libfake-driver.so";
/// Libraries that it stands for.
const LINKS: [&str; 4] = [
    "libcuda.so.1",
    "libcublasLt.so.13",
    "libnccl.so.2",
    "libnvidia-ml.so.1",
];

/// Builds library, device process and objects in `directory`.
///
/// # Errors
/// When the C++ compiler fails or a file cannot be written.
pub fn build(directory: &Path) -> Result<()> {
    fs::create_dir_all(directory).with_context(|| format!("create {}", directory.display()))?;
    let library: &[&str] = &["-shared", "-fPIC", "-fvisibility=hidden"];
    let sources: &[&str] = &[
        "driver.cpp",
        "memory.cpp",
        "streams.cpp",
        "launches.cpp",
        "sharing.cpp",
        "management.cpp",
        "products.cpp",
        "collectives.cpp",
    ];
    compile(library, sources, &directory.join(LIBRARY))?;
    compile(
        &[],
        &["device.cpp", "multiply.cpp"],
        &directory.join("fake-device"),
    )?;
    for link in LINKS {
        let path = directory.join(link);
        if !path.exists() {
            symlink(LIBRARY, &path).with_context(|| format!("link {}", path.display()))?;
        }
    }
    write_objects(directory)
}

/// Builds a stand-in for NVRTC in `directory`. The driver takes none of its code.
///
/// # Errors
/// As [`build`].
pub fn build_compiler(directory: &Path) -> Result<()> {
    fs::create_dir_all(directory).with_context(|| format!("create {}", directory.display()))?;
    let library = directory.join("libnvrtc.so.13");
    compile(
        &["-shared", "-fPIC", "-fvisibility=hidden"],
        &["compiler.cpp"],
        &library,
    )
}

/// Builds the program of the driver's own tests in `directory`, and the module that it loads. Returns its path.
///
/// # Errors
/// As [`build`].
pub fn build_contract(directory: &Path) -> Result<PathBuf> {
    let module = directory.join("objects").join(object_name("contract"));
    compile(
        &["-shared", "-fPIC"],
        &["contract_kernels.cpp"],
        &module.with_extension("so"),
    )?;
    let path = directory.join("contract");
    let library = directory.join(LINKS[0]).display().to_string();
    let run_path = format!("-Wl,-rpath,{}", directory.display());
    compile(&[&run_path, &library], &["contract.cpp"], &path)?;
    Ok(path)
}

fn compile(flags: &[&str], sources: &[&str], to: &Path) -> Result<()> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fake_driver");
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    let sources: Vec<PathBuf> = sources.iter().map(|name| directory.join(name)).collect();
    let partial = to.with_extension("partial");
    let mut command = Command::new(compiler);
    command.args(["-std=c++17", "-O2", "-g1", "-Wall", "-Wextra", "-Werror"]);
    command.arg("-o").arg(&partial).args(sources).args(flags);
    let output = command.args(["-ldl", "-lpthread"]).output();
    let output = output.context("start the C++ compiler")?;
    let messages = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "the fake driver does not compile:\n{messages}"
    );
    // A process that has the old file open keeps it.
    fs::rename(&partial, to).with_context(|| format!("rename to {}", to.display()))
}

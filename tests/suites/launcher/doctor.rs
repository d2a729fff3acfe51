//! `launcher doctor` in several environments. It must report in each of them.

use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use tempfile::TempDir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_tessera_test_launcher");
/// Hides the GPUs of the machine.
const NO_GPUS: (&str, &str) = ("CUDA_VISIBLE_DEVICES", "");

/// The subcommand with these words and with no other variables.
fn command(words: &str, variables: &[(&str, &str)]) -> Command {
    let mut command = Command::new(PROGRAM);
    command
        .arg("doctor")
        .args(words.split_whitespace())
        .env_clear()
        .envs(variables.iter().copied())
        .stdin(Stdio::null());
    command
}

/// Its standard output. It must succeed and print nothing else.
fn printed(mut command: Command) -> String {
    let Output {
        status,
        stdout,
        stderr,
    } = command.output().unwrap();
    let errors = String::from_utf8(stderr).unwrap();
    assert_eq!((status.code(), errors.as_str()), (Some(0), ""));
    String::from_utf8(stdout).unwrap()
}

fn report(variables: &[(&str, &str)]) -> Value {
    serde_json::from_str(&printed(command("--json", variables))).unwrap()
}

fn findings(report: &Value) -> Vec<&str> {
    let findings = report["findings"].as_array().unwrap();
    findings
        .iter()
        .map(|finding| finding["id"].as_str().unwrap())
        .collect()
}

#[test]
fn doctor_works_in_an_empty_environment() {
    let text = printed(command("", &[]));
    for words in [
        " program  launcher ",
        " memory   ",
        " storage  /dev/shm",
        " env      variables that this program reads\n",
        " verdict  runs use ",
    ] {
        assert!(text.contains(words), "no {words:?} in\n{text}");
    }
    assert!(!text.contains('\u{1b}'), "{text}");
    let report = report(&[]);
    assert_eq!(report["schema"], 1);
    assert!(report["memory"]["total_bytes"].as_u64() > Some(0));
    assert!(report["cpu"]["usable_cores"].as_u64() > Some(0));
}

#[test]
fn doctor_without_gpus_reports_runs_on_the_cpu() {
    let report = report(&[NO_GPUS]);
    assert_eq!(report["verdict"]["device"], "cpu");
    assert_eq!(report["verdict"]["gpus"], serde_json::json!([]));
    for gpu in report["gpus"].as_array().unwrap() {
        assert_eq!(gpu["ordinal"], Value::Null);
    }
    // Every library is found, or the paths tried are listed.
    let libraries = report["cuda"]["libraries"].as_array().unwrap();
    assert_eq!(libraries.len(), 5);
    for library in libraries {
        let attempts = library["attempts"].as_array().unwrap();
        assert!(
            !library["path"].is_null() || !attempts.is_empty(),
            "{library}"
        );
    }
}

#[test]
fn variables_are_explained_and_secrets_hidden() {
    let variables = [
        NO_GPUS,
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128"),
        ("MP_SIZE", "4"),
        ("NUM_GPUS_PER_WORKER", "4"),
        ("HF_TOKEN", "hf_opensesame"),
        ("SOME_PASSWORD", "opensesame"),
        ("TESSERA_CUDA_LIBS", "/no/such/folder"),
    ];
    let text = printed(command("", &variables));
    for words in [
        "PYTORCH_CUDA_ALLOC_CONF",
        "max_split_size_mb:128",
        "instead: --device-memory-limit",
        "pipeline stages that divide the layers, as --mp-size",
        "ranks on each machine, as --nproc",
        "these variables are set but have no effect here: PYTORCH_CUDA_ALLOC_CONF",
    ] {
        assert!(text.contains(words), "no {words:?} in\n{text}");
    }
    assert!(!text.contains("opensesame"), "{text}");
    let report = report(&variables);
    assert!(!report.to_string().contains("opensesame"));
    let found = findings(&report);
    assert!(found.contains(&"variables-without-effect"), "{found:?}");
    assert!(found.contains(&"library-folder-missing"), "{found:?}");
}

#[test]
fn an_environment_that_training_refuses_is_reported() {
    let broken = report(&[("LOCAL_RANK", "0")]);
    let problem = broken["launch"]["problem"].as_str().unwrap();
    assert!(problem.contains("RANK"), "{problem}");
    assert!(findings(&broken).contains(&"rank-variables"));

    let rank = [("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "2")];
    let report = report(&rank);
    assert_eq!(report["launch"]["rank"], 1);
    assert!(findings(&report).contains(&"is-a-rank"));
}

#[test]
fn missing_directories_are_reported() {
    let without = report(&[("TMPDIR", "/no/such/folder")]);
    assert!(findings(&without).contains(&"temporary-not-writable"));

    let parent = tempfile::tempdir().unwrap();
    let mut shell = Command::new("sh");
    shell
        .args([
            "-c",
            "mkdir gone && cd gone && rmdir ../gone && exec \"$0\" doctor --json",
        ])
        .arg(PROGRAM)
        .current_dir(parent.path())
        .env_clear();
    let report: Value = serde_json::from_str(&printed(shell)).unwrap();
    assert!(findings(&report).contains(&"runs-not-writable"), "{report}");
}

#[test]
fn doctor_leaves_no_files() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_str().unwrap();
    let mut command = command("", &[("TMPDIR", path), ("HOME", path)]);
    command.current_dir(directory.path());
    printed(command);
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[test]
fn output_into_a_closed_pipe_is_no_failure() {
    for words in ["", "--json"] {
        let mut child = command(words, &[])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        let errors = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), errors.as_str()), (Some(0), ""));
    }
    let mut shell = Command::new("sh");
    shell.args(["-c", "exec \"$0\" doctor >&-"]).arg(PROGRAM);
    assert_eq!(printed(shell), "");
}

#[test]
fn output_that_cannot_be_written_is_a_failure() {
    let full = fs::OpenOptions::new().write(true).open("/dev/full");
    let output = command("", &[]).stdout(full.unwrap()).output().unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(16), "{errors}");
    for words in ["error[E13] ", "standard output", "  next      "] {
        assert!(errors.contains(words), "no {words:?} in\n{errors}");
    }
}

#[test]
fn flags_of_other_subcommands_are_refused() {
    for (words, next) in [
        ("--zero 3", "launcher doctor --help"),
        ("--jason", "did you mean --json?"),
        ("please", "launcher doctor --help"),
    ] {
        let output = command(words, &[]).output().unwrap();
        let errors = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{words}\n{errors}");
        assert!(errors.contains(next), "{words}\n{errors}");
        assert!(output.stdout.is_empty());
    }
    let help = printed(command("--help", &[]));
    assert!(help.contains("--json"), "{help}");
}

/// Builds a stand-in from `kernels/tests` under these names, with one definition.
fn stand_in(source: &str, definition: &str, directory: &TempDir, names: &[&str]) {
    for name in names {
        let status = Command::new("cc")
            .args(["-shared", "-fPIC", "-w", definition])
            .arg(format!("-Wl,-soname,{name}"))
            .arg("-o")
            .arg(directory.path().join(name))
            .arg(
                Path::new(env!("CARGO_MANIFEST_DIR"))
                    .join("../kernels/tests")
                    .join(source),
            )
            .status();
        assert!(status.unwrap().success());
    }
}

/// A directory with a stand-in for NVML that reports two GPUs with known values.
fn management_library() -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    stand_in(
        "nvml/library.c",
        "-DGPUS=2",
        &directory,
        &["libnvidia-ml.so.1"],
    );
    directory
}

/// The directory that the user names has the versions that are reported. The dynamic linker would find others, whose
/// functions end the process.
#[test]
fn the_libraries_that_were_found_are_the_ones_that_are_called() {
    let directory = management_library();
    let names = ["libcuda.so.1", "libnvrtc.so.13", "libcublasLt.so.13"];
    stand_in("found/library.c", "-DFOUND", &directory, &names);
    let other = tempfile::tempdir().unwrap();
    let older = [
        "libcuda.so",
        "libcuda.so.1",
        "libnvrtc.so",
        "libnvrtc.so.12",
        "libcublasLt.so",
    ];
    stand_in("found/library.c", "-DUNTOUCHED", &other, &older);
    let report = report(&[
        ("TESSERA_CUDA_LIBS", directory.path().to_str().unwrap()),
        ("LD_LIBRARY_PATH", other.path().to_str().unwrap()),
    ]);
    let libraries = report["cuda"]["libraries"].as_array().unwrap();
    for (name, version) in [
        (names[0], "CUDA 13.7"),
        (names[1], "13.77"),
        (names[2], "13.9.77"),
        ("libnvidia-ml.so.1", "580.65.06"),
    ] {
        let path = directory.path().join(name);
        let mut found = libraries.iter();
        let found = found.find(|library| library["path"] == path.to_str().unwrap());
        assert_eq!(
            found.map(|library| &library["version"]),
            Some(&version.into()),
            "{libraries:#?}"
        );
    }
    assert_eq!(report["gpus"][0]["name"], "Decoy 40");
}

#[test]
fn gpus_that_only_nvml_sees_are_shown() {
    let library = management_library();
    let variables = [
        NO_GPUS,
        ("TESSERA_CUDA_LIBS", library.path().to_str().unwrap()),
    ];
    let report = report(&variables);
    assert_eq!(report["cuda"]["driver"], "580.65.06");
    let gpus = report["gpus"].as_array().unwrap();
    assert_eq!(gpus.len(), 2, "{gpus:#?}");
    let gpu = &gpus[1];
    assert_eq!(gpu["name"], "Imaginary 101");
    assert_eq!((&gpu["ordinal"], &gpu["index"]), (&Value::Null, &1.into()));
    assert_eq!(gpu["compute_capability"], "9.0");
    assert_eq!(gpu["free_bytes"], 19u64 << 30);
    assert_eq!(gpu["processes"][0]["used_bytes"], 4u64 << 30);
    assert_eq!(gpu["processes"][1]["used_bytes"], Value::Null);
    assert_eq!(
        (&gpu["nvlinks"], &gpu["pcie"]["width"]),
        (&5.into(), &8.into())
    );
    assert_eq!(report["verdict"]["device"], "cpu");
    let found = findings(&report);
    // The finding depends on whether the machine has the CUDA driver.
    let absent = ["driver-library-missing", "gpus-hidden"];
    assert!(absent.iter().any(|id| found.contains(id)), "{found:?}");
    assert!(found.contains(&"gpu-row-remap-pending"), "{found:?}");
    let text = printed(command("", &variables));
    for words in [
        " (gpu 0)  Imaginary 100 · compute capability 9.0 · 19.0G of 24.0G free\n",
        "process 1000000000 uses 4.0G",
        "hidden from CUDA",
    ] {
        assert!(text.contains(words), "no {words:?} in\n{text}");
    }
}

#[test]
fn python_package_directories_are_found() {
    let directory = tempfile::tempdir().unwrap();
    let site = directory.path().join("site");
    fs::create_dir_all(site.join("nvidia/cuda_nvrtc/lib")).unwrap();
    let python = directory.path().join("python3");
    let script = format!("#!/bin/sh\necho\necho '{}'\n", site.display());
    fs::write(&python, script).unwrap();
    fs::set_permissions(&python, fs::Permissions::from_mode(0o755)).unwrap();
    let report = report(&[NO_GPUS, ("PATH", directory.path().to_str().unwrap())]);
    let packages = report["cuda"]["search"]["python_packages"].to_string();
    assert!(packages.contains("/site\""), "{packages}");
}

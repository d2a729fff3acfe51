//! Tests of reading a substitute for NVML with known answers, built by the system's C compiler.
#![cfg(feature = "cuda")]
#![allow(
    clippy::unwrap_used,
    reason = "a test binary: a broken expectation should end the test where it stands"
)]

use std::path::Path;
use std::process::Command;

use kernels::cuda::nvml::{
    FILE_NAME, GpuMemory, GpuProcess, NvmlError, NvmlReport, RemappedRows, read,
};
use tempfile::TempDir;

/// Directory with the substitute library, built with these definitions.
fn directory(defines: &[&str]) -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    let status = Command::new("cc")
        .args(["-shared", "-fPIC", "-w", "-o"])
        .arg(directory.path().join(FILE_NAME))
        .args(defines.iter().map(|define| format!("-D{define}")))
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/nvml/library.c"))
        .status();
    assert!(status.unwrap().success());
    directory
}

fn read_from(directory: &TempDir) -> NvmlReport {
    read(&["/no/such/folder".into(), directory.path().into()])
}

#[test]
fn every_property_of_a_gpu_is_read() {
    let directory = directory(&[]);
    let report = read_from(&directory);
    assert_eq!(report.path, Some(directory.path().join(FILE_NAME)));
    let outcomes: Vec<_> = report.attempts.iter().map(|a| a.outcome.as_str()).collect();
    assert_eq!(outcomes, ["no such file", "opened"]);
    assert_eq!(report.driver_version.unwrap(), "580.65.06");
    let gpus = report.gpus.unwrap();
    assert_eq!(gpus.len(), 2);
    for (index, gpu) in gpus.iter().enumerate() {
        assert_eq!(gpu.index as usize, index);
        assert_eq!(gpu.name, Ok(format!("Imaginary {}", 100 + index)));
        assert_eq!(gpu.uuid, Ok(format!("GPU-{index}")));
        assert_eq!(gpu.pci_bus_id, Ok(format!("00000000:0{}:00.0", 1 + index)));
        assert_eq!(gpu.compute_capability, Ok((9, 0)));
        let memory = GpuMemory {
            total_bytes: 24 << 30,
            used_bytes: 5 << 30,
            free_bytes: 19 << 30,
        };
        assert_eq!(gpu.memory, Ok(memory));
        let process = |pid, used_bytes| GpuProcess { pid, used_bytes };
        let processes = vec![
            process(1_000_000_000, Some(4 << 30)),
            process(1_000_000_001, None),
        ];
        assert_eq!(gpu.processes, Ok(processes));
        let link = &gpu.pcie;
        assert_eq!((&link.generation, &link.max_generation), (&Ok(1), &Ok(4)));
        assert_eq!((&link.width, &link.max_width), (&Ok(8), &Ok(16)));
        assert_eq!(gpu.active_nvlinks, Ok(5));
        assert_eq!(gpu.utilization_percent, Ok(37));
        assert_eq!(gpu.uncorrected_ecc_errors, Ok(3));
        let rows = RemappedRows {
            uncorrected: 2,
            is_pending: index == 1,
            has_failed: false,
        };
        assert_eq!(gpu.remapped_rows, Ok(rows));
    }
}

#[test]
fn a_long_list_of_processes_is_read_completely() {
    let report = read_from(&directory(&["PROCESSES=500", "GPUS=1"]));
    let gpus = report.gpus.unwrap();
    assert_eq!(gpus.len(), 1);
    assert_eq!(gpus[0].processes.as_ref().unwrap().len(), 500);
}

#[test]
fn an_older_library_lacks_only_the_newer_figures() {
    let report = read_from(&directory(&["OLD", "UNLINKED"]));
    let gpus = report.gpus.unwrap();
    let missing = |function| Err(NvmlError::Missing { function });
    assert_eq!(
        gpus[0].processes,
        missing("nvmlDeviceGetComputeRunningProcesses_v3")
    );
    assert_eq!(
        gpus[0].remapped_rows.clone().map(|_| Vec::new()),
        missing("nvmlDeviceGetRemappedRows")
    );
    let unlinked = NvmlError::Failed {
        function: "nvmlDeviceGetNvLinkState",
        code: 3,
        text: "Not Supported".into(),
    };
    assert_eq!(gpus[0].active_nvlinks, Err(unlinked));
    assert_eq!(gpus[0].name.as_deref(), Ok("Imaginary 100"));
}

#[test]
fn a_lost_gpu_is_an_error_in_each_of_its_figures() {
    let report = read_from(&directory(&["BROKEN"]));
    let gpu = &report.gpus.unwrap()[0];
    let error = gpu.memory.as_ref().unwrap_err();
    assert_eq!(
        error.to_string(),
        "nvmlDeviceGetMemoryInfo failed with 15: GPU is lost"
    );
    assert!(gpu.name.is_err() && gpu.uuid.is_err() && gpu.pci_bus_id.is_err());
    assert!(gpu.processes.is_err() && gpu.pcie.width.is_err() && gpu.active_nvlinks.is_err());
    assert!(gpu.utilization_percent.is_err() && gpu.uncorrected_ecc_errors.is_err());
    assert!(gpu.remapped_rows.is_err() && gpu.compute_capability.is_err());
}

#[test]
fn a_library_that_does_not_start_says_why() {
    let report = read_from(&directory(&["INIT=18"]));
    let error = report.gpus.unwrap_err();
    assert!(error.is_version_mismatch(), "{error}");
    assert_eq!(report.driver_version.unwrap_err(), error);
    let report = read_from(&directory(&["INIT=999"]));
    let error = report.gpus.unwrap_err();
    assert_eq!(
        error.to_string(),
        "nvmlInit_v2 failed with 999: unknown error"
    );
}

#[test]
fn files_that_are_not_the_library_are_skipped_or_reported() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join(FILE_NAME), "no library").unwrap();
    let report = read_from(&directory);
    let outcome = &report.attempts[1].outcome;
    assert!(
        outcome != "opened" && outcome != "no such file",
        "{outcome}"
    );
    // The search continued with the next place.
    assert!(report.attempts[2].place.contains("dynamic linker"));

    let source = directory.path().join("other.c");
    std::fs::write(&source, "int other(void) { return 1; }").unwrap();
    let status = Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .arg(directory.path().join(FILE_NAME))
        .arg(&source)
        .status();
    assert!(status.unwrap().success());
    let error = read_from(&directory).gpus.unwrap_err();
    assert_eq!(error.to_string(), "nvmlInit_v2 is not in this library");
}

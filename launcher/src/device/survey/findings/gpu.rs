//! Findings about driver, GPUs and libraries.

use super::{Findings, MINIMUM_CAPABILITY, is_usable};
use crate::device::survey::facts::{Facts, Gpu, LibraryKind, version_text};
use crate::units::bytes;

/// Used bytes of a GPU above which a finding is reported although no process is visible. The driver itself uses less.
const UNSEEN_BYTES: u64 = 2 << 30;

const INSTALL: &str = "install NVIDIA's driver; the CUDA toolkit is not needed";
const CONTAINER: &str =
    "in a container: start it with --gpus all and NVIDIA_DRIVER_CAPABILITIES=compute,utility";
const NAME_DIRECTORY: &str = "or give its directory: TESSERA_CUDA_LIBS=/path/to/directory";
const CHOOSE: &str = "or choose GPUs with CUDA_VISIBLE_DEVICES";

/// Adds findings on the NVIDIA driver and on why CUDA shows no GPU.
pub(super) fn driver(facts: &Facts, findings: &mut Findings) {
    let cuda = &facts.cuda;
    let is_there = cuda.pci_devices > 0 || cuda.kernel_module.is_some() || !facts.gpus.is_empty();
    if !facts.program.has_cuda {
        let title = "this build has no CUDA support: runs use the CPU";
        let next = ["build without --no-default-features"];
        if is_there {
            findings.warning("cuda-left-out", title, &next);
        } else {
            findings.note("cuda-left-out", title, &next);
        }
        return;
    }
    if cuda.is_mismatched {
        findings.problem(
            "driver-mismatch",
            "the driver's kernel module and its libraries have different versions",
            &["restart the machine; the driver was probably updated since its last start"],
        );
    }
    if let (Some(version), Some(minimum)) = (cuda.cuda_version, cuda.minimum_cuda_version)
        && version < minimum
    {
        let (version, minimum) = (version_text(version), version_text(minimum));
        findings.problem(
            "driver-too-old",
            format!("the driver supports CUDA {version}; {minimum} is needed"),
            &[&format!("install a driver for CUDA {minimum} or newer")],
        );
    }
    if facts.gpus.iter().any(|gpu| gpu.ordinal.is_some()) || cuda.is_mismatched {
        return;
    }
    let problem = cuda.problem.as_deref().unwrap_or("CUDA reports no GPU");
    let mask = variable(facts, "CUDA_VISIBLE_DEVICES");
    if !is_there {
        findings.note(
            "no-gpu",
            "no NVIDIA GPU was found: runs use the CPU",
            &["if the machine has one: install NVIDIA's driver", CONTAINER],
        );
    } else if !is_found(facts, LibraryKind::Driver) {
        findings.problem(
            "driver-library-missing",
            "an NVIDIA GPU is present, but the CUDA driver library is missing: runs use the CPU",
            &[INSTALL, CONTAINER, NAME_DIRECTORY],
        );
    } else if let (Some(mask), false) = (mask, facts.gpus.is_empty()) {
        findings.warning(
            "gpus-hidden",
            format!("CUDA_VISIBLE_DEVICES={mask} hides every GPU: runs use the CPU"),
            &["unset it, or name GPUs by their numbers: CUDA_VISIBLE_DEVICES=0"],
        );
    } else {
        findings.problem(
            "driver-fails",
            format!("an NVIDIA GPU is present, but CUDA does not work: {problem}"),
            &["check whether nvidia-smi works", INSTALL, CONTAINER],
        );
    }
}

/// Adds findings on each GPU by itself: lost, unhealthy, too old, in use by others, or on a narrow PCI Express link.
pub(super) fn devices(facts: &Facts, findings: &mut Findings) {
    for gpu in &facts.gpus {
        let label = gpu.label();
        if gpu.ordinal.is_none() && gpu.name.is_none() {
            let reason = gpu.unread.first().map_or("no reason given", String::as_str);
            findings.problem(
                "gpu-lost",
                format!("{label} does not respond: {reason}"),
                &["restart the machine; look for Xid messages in its log (dmesg)"],
            );
            continue;
        }
        health(gpu, &label, findings);
        if gpu.ordinal.is_none() {
            continue;
        }
        if let Some(capability) = gpu.compute_capability.filter(|_| !is_usable(gpu)) {
            let (has, needs) = (version_text(capability), version_text(MINIMUM_CAPABILITY));
            let name = gpu.name.as_deref().unwrap_or("unnamed");
            findings.warning(
                "gpu-too-old",
                format!("{label} ({name}) has compute capability {has}; kernels need {needs}"),
                &["choose other GPUs with CUDA_VISIBLE_DEVICES, or --device cpu"],
            );
        }
        foreign_use(gpu, &label, findings);
        if let (Some(width), Some(most)) = (gpu.pcie.width, gpu.pcie.max_width)
            && width < most
        {
            findings.note(
                "pcie-narrow",
                format!("{label} uses {width} of {most} PCI Express lanes"),
                &["offload to host memory is slower; check the slot, the riser and the firmware settings"],
            );
        }
    }
    let hidden = facts.gpus.iter().filter(|gpu| gpu.ordinal.is_none());
    let (hidden, all) = (hidden.count(), facts.gpus.len());
    if let (Some(mask), true) = (
        variable(facts, "CUDA_VISIBLE_DEVICES"),
        hidden > 0 && hidden < all,
    ) {
        findings.note(
            "some-gpus-hidden",
            format!("CUDA_VISIBLE_DEVICES={mask} hides {hidden} of {all} GPUs"),
            &["unset it to use all of them"],
        );
    }
}

fn health(gpu: &Gpu, label: &str, findings: &mut Findings) {
    if gpu.has_row_remap_failed == Some(true) {
        findings.problem(
            "gpu-memory-defect",
            format!("{label} has a memory row that could not be remapped"),
            &["do not train on this GPU; have it replaced"],
        );
    }
    if gpu.is_row_remap_pending == Some(true) {
        findings.warning(
            "gpu-row-remap-pending",
            format!("{label} has a memory row that will be remapped at the next reset"),
            &["reset the GPU or restart the machine before a long run"],
        );
    }
    if let Some(errors) = gpu.uncorrected_ecc_errors.filter(|errors| *errors > 0) {
        findings.warning(
            "gpu-ecc-errors",
            format!("{label} had {errors} uncorrected memory errors since the driver was loaded"),
            &["restart the machine; have the GPU replaced if the errors return"],
        );
    }
}

/// Adds a finding if other processes use memory of the GPU.
fn foreign_use(gpu: &Gpu, label: &str, findings: &mut Findings) {
    let processes = gpu.processes.as_deref().unwrap_or_default();
    let all = gpu.memory_bytes.unwrap_or(0);
    let next = ["end these processes, or set --device-memory-limit", CHOOSE];
    if !processes.is_empty() {
        let held: u64 = processes
            .iter()
            .filter_map(|process| process.used_bytes)
            .sum();
        let held = match held {
            0 => gpu.used_bytes.unwrap_or(0),
            held => held,
        };
        let numbers: Vec<String> = processes.iter().map(|p| p.pid.to_string()).collect();
        findings.warning(
            "gpu-in-use",
            format!(
                "{label}: other processes hold {} of {} (process {})",
                bytes(held),
                bytes(all),
                numbers.join(", ")
            ),
            &next,
        );
    } else if let Some(used) = gpu.used_bytes.filter(|used| *used > UNSEEN_BYTES) {
        findings.warning(
            "gpu-in-use",
            format!(
                "{label}: {} of {} are in use by processes that are not visible here",
                bytes(used),
                bytes(all)
            ),
            &["run nvidia-smi outside the container", CHOOSE],
        );
    }
}

/// Whether two GPUs count as equal: same name, compute capability and multiprocessors, and memory within 1 %.
pub(super) fn is_alike(one: &Gpu, other: &Gpu) -> bool {
    let kind = |gpu: &Gpu| {
        (
            gpu.name.clone(),
            gpu.compute_capability,
            gpu.multiprocessors,
        )
    };
    // Firmware uses slightly different amounts of memory on different cards.
    let (a, b) = (
        one.memory_bytes.unwrap_or(0),
        other.memory_bytes.unwrap_or(0),
    );
    kind(one) == kind(other) && a.abs_diff(b) <= a.max(b) / 100
}

/// Adds findings on how the usable GPUs go together: different kinds, or no peer access.
pub(super) fn together(facts: &Facts, findings: &mut Findings) {
    let gpus: Vec<&Gpu> = facts.gpus.iter().filter(|gpu| is_usable(gpu)).collect();
    if super::are_equal(facts) == Some(false) {
        let kinds: Vec<String> = gpus
            .iter()
            .map(|gpu| {
                let name = gpu.name.as_deref().unwrap_or("unnamed");
                format!(
                    "{} {name} {}",
                    gpu.label(),
                    bytes(gpu.memory_bytes.unwrap_or(0))
                )
            })
            .collect();
        findings.warning(
            "gpus-differ",
            format!("the GPUs differ: {}", kinds.join(", ")),
            &[
                "ranks get equal shares: the smallest memory and the slowest GPU limit the run",
                "choose equal GPUs with CUDA_VISIBLE_DEVICES",
            ],
        );
    }
    let mut apart = Vec::new();
    for (place, gpu) in gpus.iter().enumerate() {
        for other in &gpus[place + 1..] {
            if let (Some(peers), Some(one), Some(two)) = (&gpu.peers, gpu.ordinal, other.ordinal)
                && !peers.contains(&two)
            {
                apart.push(format!("{one}–{two}"));
            }
        }
    }
    if !apart.is_empty() {
        findings.note(
            "no-peer-access",
            format!(
                "GPUs without peer access to each other: {}",
                apart.join(", ")
            ),
            &["ranks on them exchange through host memory; most consumer GPUs have no peer access"],
        );
    }
}

/// Adds findings on NVIDIA libraries that are missing, if a GPU could use them, and on search directories that do not
/// exist.
pub(super) fn libraries(facts: &Facts, findings: &mut Findings) {
    let shown = facts.gpus.iter().filter(|gpu| gpu.ordinal.is_some());
    let shown = shown.count();
    for directory in &facts.cuda.search.directories {
        if !directory.is_dir() {
            findings.warning(
                "library-folder-missing",
                format!(
                    "TESSERA_CUDA_LIBS names {}, which is not a directory",
                    directory.display()
                ),
                &["give directories that contain libraries, separated by colons"],
            );
        }
    }
    if shown == 0 {
        return;
    }
    // Packages for CUDA 13 and later have no version in their names.
    let suffix = match facts.cuda.cuda_version {
        Some((major, _)) if major < 13 => "-cu12",
        _ => "",
    };
    let install = |package: &str| format!("pip install {package}{suffix}; no toolkit is needed");
    if !is_found(facts, LibraryKind::Nvrtc) {
        findings.warning(
            "nvrtc-missing",
            "NVRTC was not found: runs use the built-in PTX kernels and none compiled for this GPU",
            &[&install("nvidia-cuda-nvrtc"), NAME_DIRECTORY],
        );
    }
    if !is_found(facts, LibraryKind::CublasLt) {
        findings.note(
            "cublaslt-missing",
            "cuBLASLt was not found: matrix products use this program's kernels",
            &[&install("nvidia-cublas"), NAME_DIRECTORY],
        );
    }
    if shown > 1 && !is_found(facts, LibraryKind::Nccl) {
        findings.note(
            "nccl-missing",
            "NCCL was not found: ranks exchange through shared memory",
            &[&install("nvidia-nccl"), NAME_DIRECTORY],
        );
    }
    if let Some(problem) = &facts.cuda.management_problem {
        findings.note(
            "nvml-fails",
            format!("the use of the GPUs by other processes is unknown: {problem}"),
            &[CONTAINER],
        );
    }
}

fn is_found(facts: &Facts, kind: LibraryKind) -> bool {
    let libraries = &facts.cuda.libraries;
    libraries
        .iter()
        .any(|library| library.kind == kind && library.path.is_some())
}

/// Value of the environment variable `name`, if it is set.
fn variable<'a>(facts: &'a Facts, name: &str) -> Option<&'a str> {
    let row = facts.environment.iter().find(|row| row.name == name)?;
    row.value.as_deref()
}

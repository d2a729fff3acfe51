//! Facts about GPUs, driver and libraries, from the kernel, CUDA and NVML.

use std::fs;
use std::path::Path;

use super::facts::{Cuda, Gpu, SearchFacts};
use crate::rank_env::CudaSearchPaths;

/// NVIDIA's vendor id on the PCI bus.
const VENDOR: &str = "0x10de";
/// PCI classes of graphics devices: VGA controllers and 3D controllers.
const CLASSES: [&str; 2] = ["0x0300", "0x0302"];

/// Libraries to search for. The search maps what it finds into this process.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Libraries {
    All,
    /// All but NCCL.
    OfRuns,
}

/// Gathers facts from the kernel and, if CUDA support is built in, from driver and libraries.
pub(super) fn gather(search_paths: &CudaSearchPaths, which: Libraries) -> (Cuda, Vec<Gpu>) {
    let (mut cuda, gpus) = ask(directories(search_paths), which);
    cuda.pci_devices = pci_devices(Path::new("/sys/bus/pci/devices"));
    cuda.kernel_module = fs::read_to_string("/proc/driver/nvidia/version")
        .ok()
        .and_then(|text| module_version(&text));
    (cuda, gpus)
}

fn directories(search_paths: &CudaSearchPaths) -> SearchFacts {
    let python_packages = if cfg!(feature = "cuda") {
        super::python::packages(search_paths)
    } else {
        Vec::new()
    };
    SearchFacts {
        directories: search_paths.directories.clone(),
        cuda_home: search_paths.cuda_home.clone(),
        python_packages,
    }
}

/// Search path for libraries in these places.
#[cfg(feature = "cuda")]
pub(super) fn search(search_paths: &CudaSearchPaths) -> kernels::cuda::library::Search {
    built_in::search(&directories(search_paths))
}

/// Number of NVIDIA graphics devices on the PCI bus.
fn pci_devices(bus: &Path) -> usize {
    let is_gpu = |device: &Path| {
        let file = |name: &str| fs::read_to_string(device.join(name)).unwrap_or_default();
        file("vendor").trim() == VENDOR
            && CLASSES.iter().any(|class| file("class").starts_with(class))
    };
    fs::read_dir(bus)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| is_gpu(&entry.path()))
        .count()
}

/// Version in the first line of the kernel module's file.
fn module_version(text: &str) -> Option<String> {
    let is_version = |word: &&str| {
        word.contains('.')
            && word
                .split('.')
                .all(|part| !part.is_empty() && part.bytes().all(|digit| digit.is_ascii_digit()))
    };
    text.lines()
        .next()?
        .split_whitespace()
        .find(is_version)
        .map(str::to_string)
}

/// Merges two lists: the GPUs visible to CUDA, completed with facts from NVML, then the GPUs visible to NVML only.
fn merged(mut shown: Vec<Gpu>, mut managed: Vec<Gpu>) -> Vec<Gpu> {
    for gpu in &mut shown {
        // NVML lists the GPU of a MIG instance, whose memory is not the instance's.
        let is_whole = |other: &Gpu| is_unknown_or_same(&gpu.uuid, &other.uuid);
        let place = managed.iter().position(|other| is_same(gpu, other));
        let Some(mut other) = place.map(|place| managed.remove(place)) else {
            continue;
        };
        if !is_whole(&other) {
            other.used_bytes = None;
            other.free_bytes = None;
            other.processes = None;
        }
        *gpu = Gpu {
            ordinal: gpu.ordinal,
            name: gpu.name.take().or(other.name),
            uuid: gpu.uuid.take().or(other.uuid),
            pci_bus_id: gpu.pci_bus_id.take().or(other.pci_bus_id),
            compute_capability: gpu.compute_capability.or(other.compute_capability),
            multiprocessors: gpu.multiprocessors,
            memory_bytes: gpu.memory_bytes.or(other.memory_bytes),
            peers: gpu.peers.take(),
            index: other.index,
            used_bytes: other.used_bytes,
            free_bytes: other.free_bytes,
            processes: other.processes,
            utilization_percent: other.utilization_percent,
            pcie: other.pcie,
            nvlinks: other.nvlinks,
            uncorrected_ecc_errors: other.uncorrected_ecc_errors,
            is_row_remap_pending: other.is_row_remap_pending,
            has_row_remap_failed: other.has_row_remap_failed,
            unread: other.unread,
        };
    }
    shown.sort_by_key(|gpu| gpu.ordinal);
    managed.sort_by_key(|gpu| gpu.index);
    shown.append(&mut managed);
    shown
}

/// A UUID without the prefix in which CUDA and NVML differ.
fn plain(uuid: &str) -> String {
    let text = uuid.to_ascii_lowercase();
    text.trim_start_matches("gpu-").to_string()
}

/// Whether two UUIDs are equal, as far as both are known.
fn is_unknown_or_same(one: &Option<String>, other: &Option<String>) -> bool {
    match (one, other) {
        (Some(one), Some(other)) => plain(one) == plain(other),
        _ => true,
    }
}

/// Whether two entries are the same GPU, or one is a part of the other. CUDA and NVML write bus ids with different
/// prefixes.
fn is_same(one: &Gpu, other: &Gpu) -> bool {
    let uuid = |gpu: &Gpu| gpu.uuid.as_deref().map(plain);
    let bus = |gpu: &Gpu| {
        let text = gpu.pci_bus_id.as_ref()?.to_ascii_lowercase();
        Some(text.trim_start_matches('0').to_string())
    };
    let same = |one: Option<String>, other: Option<String>| one.is_some() && one == other;
    same(uuid(one), uuid(other)) || same(bus(one), bus(other))
}

#[cfg(not(feature = "cuda"))]
fn ask(search: SearchFacts, _which: Libraries) -> (Cuda, Vec<Gpu>) {
    let cuda = Cuda {
        problem: Some("this build has no CUDA support".to_string()),
        search,
        ..Cuda::default()
    };
    (cuda, merged(Vec::new(), Vec::new()))
}

#[cfg(feature = "cuda")]
fn ask(search: SearchFacts, which: Libraries) -> (Cuda, Vec<Gpu>) {
    use kernels::cuda::library::Library;
    use kernels::cuda::{nvml, probe};

    let mut libraries = Library::ALL.to_vec();
    libraries.retain(|library| which == Libraries::All || *library != Library::Nccl);
    let places = built_in::search(&search);
    let probed = probe::probe_for(&libraries, &places);
    let managed = nvml::read(&search.directories);
    let mut libraries: Vec<_> = probed.libraries.iter().map(built_in::library).collect();
    libraries.insert(libraries.len().min(1), built_in::management(&managed));
    let failure = managed.gpus.as_ref().err();
    let cuda = Cuda {
        driver: managed.driver_version.as_ref().ok().cloned(),
        cuda_version: probed.driver_version,
        minimum_cuda_version: Some(probe::MINIMUM_DRIVER),
        problem: probed.problem,
        management_problem: failure.map(ToString::to_string),
        is_mismatched: failure.is_some_and(nvml::NvmlError::is_version_mismatch),
        search,
        libraries,
        ..Cuda::default()
    };
    let shown = probed.devices.iter().map(built_in::shown).collect();
    let all = managed.gpus.iter().flatten().map(built_in::managed);
    let mut gpus = merged(shown, all.collect());
    if managed.gpus.is_ok() {
        // NVML knows the memory of whole GPUs only.
        for gpu in gpus.iter_mut().filter(|gpu| gpu.free_bytes.is_none()) {
            let free = |ordinal| probe::free_bytes(ordinal, &places);
            gpu.free_bytes = gpu.ordinal.and_then(free);
        }
    }
    (cuda, gpus)
}

/// Conversion of the results of crate `kernels` to facts.
#[cfg(feature = "cuda")]
mod built_in {
    use kernels::cuda::library::{Attempt, Found, Library, Search};
    use kernels::cuda::nvml::{NvmlGpu, NvmlReport, Reading};
    use kernels::cuda::probe::DeviceFacts;

    use crate::device::survey::facts::{
        AttemptFacts, Gpu, GpuProcess, LibraryFacts, LibraryKind, Pcie, SearchFacts,
    };

    pub(super) fn search(directories: &SearchFacts) -> Search {
        Search {
            directories: directories.directories.clone(),
            cuda_home: directories.cuda_home.clone(),
            python_packages: directories.python_packages.clone(),
        }
    }

    pub(super) fn library(found: &Found) -> LibraryFacts {
        let kind = match found.library {
            Library::Driver => LibraryKind::Driver,
            Library::Nvrtc => LibraryKind::Nvrtc,
            Library::CublasLt => LibraryKind::CublasLt,
            Library::Nccl => LibraryKind::Nccl,
        };
        LibraryFacts {
            kind,
            name: found.library.name().to_string(),
            path: found.path.clone(),
            version: found.version.clone(),
            attempts: found.attempts.iter().map(attempt).collect(),
        }
    }

    pub(super) fn management(report: &NvmlReport) -> LibraryFacts {
        LibraryFacts {
            kind: LibraryKind::Nvml,
            name: kernels::cuda::nvml::FILE_NAME.to_string(),
            path: report.path.clone(),
            version: report.driver_version.as_ref().ok().cloned(),
            attempts: report.attempts.iter().map(attempt).collect(),
        }
    }

    fn attempt(attempt: &Attempt) -> AttemptFacts {
        AttemptFacts {
            place: attempt.place.clone(),
            outcome: attempt.outcome.clone(),
        }
    }

    pub(super) fn shown(device: &DeviceFacts) -> Gpu {
        Gpu {
            ordinal: Some(device.ordinal),
            name: Some(device.name.clone()),
            uuid: Some(device.uuid.clone()),
            pci_bus_id: Some(device.pci_bus_id.clone()),
            compute_capability: Some(device.compute_capability),
            multiprocessors: Some(device.multiprocessors),
            memory_bytes: Some(device.memory_bytes),
            peers: Some(device.peers.clone()),
            ..Gpu::default()
        }
    }

    pub(super) fn managed(gpu: &NvmlGpu) -> Gpu {
        let mut unread = Vec::new();
        let mut facts = Gpu {
            index: Some(gpu.index),
            name: value(&gpu.name, &mut unread),
            uuid: value(&gpu.uuid, &mut unread),
            pci_bus_id: value(&gpu.pci_bus_id, &mut unread),
            compute_capability: value(&gpu.compute_capability, &mut unread),
            utilization_percent: value(&gpu.utilization_percent, &mut unread),
            pcie: Pcie {
                generation: value(&gpu.pcie.generation, &mut unread),
                max_generation: value(&gpu.pcie.max_generation, &mut unread),
                width: value(&gpu.pcie.width, &mut unread),
                max_width: value(&gpu.pcie.max_width, &mut unread),
            },
            nvlinks: value(&gpu.active_nvlinks, &mut unread),
            uncorrected_ecc_errors: value(&gpu.uncorrected_ecc_errors, &mut unread),
            ..Gpu::default()
        };
        if let Some(memory) = value(&gpu.memory, &mut unread) {
            facts.memory_bytes = Some(memory.total_bytes);
            facts.used_bytes = Some(memory.used_bytes);
            facts.free_bytes = Some(memory.free_bytes);
        }
        if let Some(rows) = value(&gpu.remapped_rows, &mut unread) {
            facts.is_row_remap_pending = Some(rows.is_pending);
            facts.has_row_remap_failed = Some(rows.has_failed);
        }
        facts.processes = value(&gpu.processes, &mut unread).map(|processes| {
            processes
                .iter()
                .filter(|process| process.pid != std::process::id())
                .map(|process| GpuProcess {
                    pid: process.pid,
                    used_bytes: process.used_bytes,
                })
                .collect()
        });
        facts.unread = unread;
        facts
    }

    fn value<T: Clone>(reading: &Reading<T>, unread: &mut Vec<String>) -> Option<T> {
        reading
            .as_ref()
            .inspect_err(|error| unread.push(error.to_string()))
            .ok()
            .cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn display_controllers_of_one_vendor_are_counted() {
        let bus = tempfile::tempdir().expect("temp dir");
        for (name, vendor, class) in [
            ("0", "0x10de\n", "0x030200\n"),
            ("1", "0x10de\n", "0x030000\n"),
            ("audio", "0x10de\n", "0x040300\n"),
            ("other", "0x8086\n", "0x030000\n"),
        ] {
            let device = bus.path().join(name);
            fs::create_dir(&device).expect("made");
            fs::write(device.join("vendor"), vendor).expect("written");
            fs::write(device.join("class"), class).expect("written");
        }
        assert_eq!(pci_devices(bus.path()), 2);
        assert_eq!(pci_devices(Path::new("/no/such/bus")), 0);
    }

    #[test]
    fn the_driver_version_is_read_from_both_formats() {
        for text in [
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:10:58 UTC\nGCC version: gcc 12.3.0\n",
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n",
        ] {
            assert_eq!(module_version(text).as_deref(), Some("580.65.06"));
        }
        assert_eq!(module_version("NVRM version: none.\n"), None);
    }

    fn gpu(ordinal: Option<u32>, index: Option<u32>, uuid: Option<&str>, bus: Option<&str>) -> Gpu {
        Gpu {
            ordinal,
            index,
            uuid: uuid.map(str::to_string),
            pci_bus_id: bus.map(str::to_string),
            ..Gpu::default()
        }
    }

    #[test]
    fn gpus_are_matched_by_identity_or_bus() {
        // CUDA numbers them in another order, and hides one.
        let shown = vec![
            gpu(Some(1), None, Some("GPU-aa"), Some("0000:01:00.0")),
            gpu(Some(0), None, None, Some("0000:C1:00.0")),
        ];
        let managed = vec![
            gpu(None, Some(0), Some("GPU-AA"), None),
            gpu(None, Some(1), Some("GPU-hidden"), Some("00000000:41:00.0")),
            Gpu {
                free_bytes: Some(7),
                ..gpu(None, Some(2), Some("GPU-cc"), Some("00000000:c1:00.0"))
            },
        ];
        let all = merged(shown, managed);
        let numbers: Vec<_> = all.iter().map(|gpu| (gpu.ordinal, gpu.index)).collect();
        assert_eq!(
            numbers,
            [(Some(0), Some(2)), (Some(1), Some(0)), (None, Some(1))]
        );
        assert_eq!(
            (all[0].free_bytes, all[0].uuid.as_deref()),
            (Some(7), Some("GPU-cc"))
        );
    }

    #[test]
    fn an_instance_of_a_gpu_does_not_have_the_memory_of_the_whole() {
        let instance = Gpu {
            memory_bytes: Some(10),
            ..gpu(Some(0), None, Some("GPU-part"), Some("0000:01:00.0"))
        };
        let whole = Gpu {
            memory_bytes: Some(80),
            free_bytes: Some(70),
            used_bytes: Some(10),
            processes: Some(Vec::new()),
            ..gpu(None, Some(3), Some("GPU-whole"), Some("00000000:01:00.0"))
        };
        let all = merged(vec![instance], vec![whole]);
        assert_eq!(all.len(), 1);
        assert_eq!((all[0].index, all[0].memory_bytes), (Some(3), Some(10)));
        assert_eq!((all[0].free_bytes, all[0].used_bytes), (None, None));
        assert_eq!(all[0].processes, None);
    }

    #[test]
    fn gpus_without_uuid_or_bus_id_do_not_match() {
        let all = merged(
            vec![gpu(Some(0), None, None, None)],
            vec![gpu(None, Some(0), None, None)],
        );
        assert_eq!(all.len(), 2);
    }
}

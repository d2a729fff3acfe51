//! Tests of reports on invented machines: findings, texts and keys.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::PathBuf;

use crate::commands::doctor::*;
use crate::device::survey::environment::table;
use crate::device::survey::facts::{
    AttemptFacts, CgroupFacts, Cpu, Cuda, Gpu, GpuProcess, Launch, LibraryFacts, LibraryKind,
    Limit, Limits, Memory, Pcie, Program, Role, SchedulerTasks, SearchFacts, Storage, System,
};
use crate::device::survey::findings::Severity;

const GIB: u64 = 1 << 30;

fn variables(pairs: &[(&str, &str)]) -> Variables {
    let pairs = pairs.iter();
    pairs
        .map(|(name, value)| (name.to_string(), OsString::from(value)))
        .collect()
}

fn library(kind: LibraryKind, name: &str) -> LibraryFacts {
    LibraryFacts {
        kind,
        name: name.into(),
        path: Some(PathBuf::from("/usr/lib").join(name)),
        version: Some("13.0".into()),
        attempts: vec![AttemptFacts {
            place: format!("dynamic linker: {name}"),
            outcome: "opened".into(),
        }],
    }
}

fn directory(role: Role, path: &str) -> Storage {
    Storage {
        role,
        path: path.into(),
        file_system: Some("ext4".into()),
        total_bytes: Some(500 * GIB),
        free_bytes: Some(400 * GIB),
        is_writable: true,
    }
}

fn gpu(number: u32) -> Gpu {
    Gpu {
        ordinal: Some(number),
        index: Some(number),
        name: Some("NVIDIA RTX A6000".into()),
        uuid: Some(format!("GPU-{number}")),
        pci_bus_id: Some(format!("0000:0{number}:00.0")),
        compute_capability: Some((8, 6)),
        multiprocessors: Some(84),
        memory_bytes: Some(48 * GIB),
        used_bytes: Some(GIB / 2),
        free_bytes: Some(47 * GIB),
        processes: Some(Vec::new()),
        utilization_percent: Some(0),
        pcie: Pcie {
            generation: Some(1),
            max_generation: Some(4),
            width: Some(16),
            max_width: Some(16),
        },
        nvlinks: Some(4),
        peers: Some(vec![1 - number]),
        uncorrected_ecc_errors: Some(0),
        is_row_remap_pending: Some(false),
        has_row_remap_failed: Some(false),
        unread: Vec::new(),
    }
}

/// Machine without problems, with two GPUs.
fn workstation() -> Facts {
    let limit = Limit {
        soft: None,
        hard: None,
    };
    Facts {
        program: Program {
            version: "1.2.3",
            is_release: true,
            has_cuda: true,
        },
        system: System {
            name: Some("Debian".into()),
            kernel: Some("6.1".into()),
            architecture: "x86_64",
            libc: Some("glibc 2.36".into()),
            container: None,
        },
        cpu: Cpu {
            model: Some("A Processor".into()),
            cores: 32,
            usable_cores: 16,
            instruction_sets: vec!["avx2", "fma"],
        },
        memory: Memory {
            total_bytes: 256 * GIB,
            available_bytes: 250 * GIB,
            swap_bytes: 0,
            cgroup: None,
            usable_bytes: 250 * GIB,
        },
        limits: Limits {
            locked_memory_bytes: limit,
            open_files: Limit {
                soft: Some(1024),
                hard: Some(1 << 20),
            },
            processes: Limit {
                soft: Some(4096),
                hard: None,
            },
        },
        storage: vec![
            directory(Role::SharedMemory, "/dev/shm"),
            directory(Role::Runs, "/home/somebody/work"),
            directory(Role::Temporary, "/tmp"),
        ],
        launch: Launch::default(),
        cuda: Cuda {
            pci_devices: 2,
            kernel_module: Some("580.65.06".into()),
            driver: Some("580.65.06".into()),
            cuda_version: Some((13, 0)),
            minimum_cuda_version: Some((12, 8)),
            problem: None,
            management_problem: None,
            is_mismatched: false,
            search: SearchFacts::default(),
            libraries: vec![
                library(LibraryKind::Driver, "libcuda.so.1"),
                library(LibraryKind::Nvml, "libnvidia-ml.so.1"),
                library(LibraryKind::Nvrtc, "libnvrtc.so.13"),
                library(LibraryKind::CublasLt, "libcublasLt.so.13"),
                library(LibraryKind::Nccl, "libnccl.so.2"),
            ],
        },
        gpus: vec![gpu(0), gpu(1)],
        environment: table(&variables(&[])),
    }
}

/// The same machine without any trace of NVIDIA.
fn without_gpus() -> Facts {
    let mut facts = workstation();
    facts.gpus.clear();
    facts.cuda.pci_devices = 0;
    facts.cuda.kernel_module = None;
    facts.cuda.driver = None;
    facts.cuda.cuda_version = None;
    facts.cuda.problem = Some("the CUDA driver library was not found".into());
    facts.cuda.management_problem = Some("libnvidia-ml.so.1 was not found".into());
    for library in &mut facts.cuda.libraries {
        library.path = None;
        library.version = None;
        library.attempts[0].outcome = "no such file".into();
    }
    facts
}

fn findings(facts: &Facts) -> Vec<(Severity, &'static str)> {
    let (_, findings) = findings::judge(facts);
    for finding in &findings {
        assert!(!finding.next.is_empty(), "{}", finding.id);
    }
    findings.iter().map(|f| (f.severity, f.id)).collect()
}

/// Findings after a change to the machine without problems.
fn found(change: impl FnOnce(&mut Facts)) -> Vec<(Severity, &'static str)> {
    let mut facts = workstation();
    change(&mut facts);
    findings(&facts)
}

#[test]
fn a_good_machine_has_no_findings() {
    assert_eq!(found(|_| ()), []);
    let report = Report::new(workstation());
    assert_eq!(report.gpus_are_equal, Some(true));
    assert!(report.to_text().contains("no problems found"));
    let verdict = report.verdict;
    assert_eq!((verdict.device, verdict.gpus), ("cuda", vec![0, 1]));
    let params = verdict.frozen_params.expect("GPUs");
    assert_eq!(
        params.in_16_bits,
        report.facts.gpus[0].memory_bytes.expect("its memory") / 2
    );
    // 0.516 bytes in place of 2.
    let share = params.in_4_bits as f64 / params.in_16_bits as f64;
    assert!((3.87..3.88).contains(&share), "{share}");
}

#[test]
fn a_machine_without_gpus_uses_the_cpu() {
    let facts = without_gpus();
    assert_eq!(findings(&facts), [(Severity::Note, "no-gpu")]);
    let report = Report::new(facts);
    assert_eq!(report.verdict.device, "cpu");
    assert!(report.verdict.gpus.is_empty());
    assert_eq!(report.gpus_are_equal, None);
    let text = report.to_text();
    for words in [
        "libcuda.so.1 not found; tried",
        "dynamic linker: libcuda.so.1",
        "no such file",
        "runs use the CPU: 16 cores, 250G of host memory",
    ] {
        assert!(text.contains(words), "no {words:?} in\n{text}");
    }
}

#[test]
fn causes_of_a_driver_that_does_not_work_are_told_apart() {
    use Severity::{Problem, Warning};
    let hidden = |facts: &mut Facts| {
        for gpu in &mut facts.gpus {
            (gpu.ordinal, gpu.peers) = (None, None);
        }
    };
    let library_missing = found(|facts| {
        *facts = without_gpus();
        facts.cuda.pci_devices = 1;
    });
    assert_eq!(library_missing, [(Problem, "driver-library-missing")]);
    let fails = found(|facts| {
        hidden(facts);
        facts.cuda.problem = Some("error 999".into());
    });
    assert_eq!(fails, [(Problem, "driver-fails")]);
    let masked = found(|facts| {
        hidden(facts);
        facts.environment = table(&variables(&[("CUDA_VISIBLE_DEVICES", "")]));
    });
    assert_eq!(masked, [(Warning, "gpus-hidden")]);
    let mismatched = found(|facts| {
        facts.gpus.clear();
        facts.cuda.is_mismatched = true;
        facts.cuda.problem = Some("error 803".into());
    });
    assert_eq!(mismatched, [(Problem, "driver-mismatch")]);
    let old = found(|facts| facts.cuda.cuda_version = Some((12, 2)));
    assert_eq!(old, [(Problem, "driver-too-old")]);
    let mut facts = workstation();
    facts.cuda.cuda_version = Some((12, 2));
    assert_eq!(Report::new(facts).verdict.device, "cpu");
}

#[test]
fn a_build_without_cuda_says_so() {
    let left_out = |facts: &mut Facts| {
        facts.gpus.clear();
        facts.program.has_cuda = false;
    };
    assert_eq!(found(left_out), [(Severity::Warning, "cuda-left-out")]);
    let note = found(|facts| {
        *facts = without_gpus();
        left_out(facts);
    });
    assert_eq!(note, [(Severity::Note, "cuda-left-out")]);
}

#[test]
fn problems_of_single_gpus_are_found() {
    use Severity::{Note, Problem, Warning};
    type Change = fn(&mut Gpu);
    let process = |used_bytes| GpuProcess { pid: 7, used_bytes };
    let with_processes = found(|facts| facts.gpus[1].processes = Some(vec![process(Some(GIB))]));
    assert_eq!(with_processes, [(Warning, "gpu-in-use")]);
    let cases: [(Change, &[(Severity, &str)]); 7] = [
        (
            |gpu| gpu.used_bytes = Some(9 << 30),
            &[(Warning, "gpu-in-use")],
        ),
        (
            |gpu| gpu.uncorrected_ecc_errors = Some(2),
            &[(Warning, "gpu-ecc-errors")],
        ),
        (
            |gpu| gpu.is_row_remap_pending = Some(true),
            &[(Warning, "gpu-row-remap-pending")],
        ),
        (
            |gpu| gpu.has_row_remap_failed = Some(true),
            &[(Problem, "gpu-memory-defect")],
        ),
        (|gpu| gpu.pcie.width = Some(4), &[(Note, "pcie-narrow")]),
        (
            |gpu| gpu.compute_capability = Some((7, 5)),
            &[(Warning, "gpu-too-old")],
        ),
        (
            |gpu| (gpu.ordinal, gpu.name) = (None, None),
            &[(Problem, "gpu-lost")],
        ),
    ];
    for (change, expected) in cases {
        assert_eq!(found(|facts| change(&mut facts.gpus[1])), expected);
    }
    let partly_hidden = found(|facts| {
        facts.gpus[1].ordinal = None;
        facts.environment = table(&variables(&[("CUDA_VISIBLE_DEVICES", "0")]));
    });
    assert_eq!(partly_hidden, [(Note, "some-gpus-hidden")]);
}

#[test]
fn unequal_gpus_and_missing_peer_access_are_found() {
    let unequal = |change: fn(&mut Gpu)| {
        let mut facts = workstation();
        change(&mut facts.gpus[1]);
        let equal = Report::new(facts.clone()).gpus_are_equal;
        (
            equal,
            findings(&facts).contains(&(Severity::Warning, "gpus-differ")),
        )
    };
    assert_eq!(
        unequal(|gpu| gpu.memory_bytes = Some(24 * GIB)),
        (Some(false), true)
    );
    assert_eq!(
        unequal(|gpu| gpu.name = Some("NVIDIA A40".into())),
        (Some(false), true)
    );
    assert_eq!(
        unequal(|gpu| gpu.multiprocessors = Some(80)),
        (Some(false), true)
    );
    assert_eq!(
        unequal(|gpu| gpu.memory_bytes = Some(48 * GIB - (64 << 20))),
        (Some(true), false)
    );
    let apart = found(|facts| facts.gpus[0].peers = Some(Vec::new()));
    assert_eq!(apart, [(Severity::Note, "no-peer-access")]);
}

#[test]
fn missing_libraries_are_findings_only_with_a_gpu() {
    use Severity::{Note, Warning};
    for (place, expected) in [
        (2, (Warning, "nvrtc-missing")),
        (3, (Note, "cublaslt-missing")),
        (4, (Note, "nccl-missing")),
    ] {
        let missing = found(|facts| facts.cuda.libraries[place].path = None);
        assert_eq!(missing, [expected]);
    }
    let alone = found(|facts| {
        facts.gpus.truncate(1);
        facts.cuda.libraries[4].path = None;
        facts.cuda.management_problem = Some("not found".into());
    });
    assert_eq!(alone, [(Note, "nvml-fails")]);
    let mut facts = workstation();
    facts.cuda.libraries[2].path = None;
    for (version, package) in [
        ((13, 0), "pip install nvidia-cuda-nvrtc;"),
        ((12, 9), "pip install nvidia-cuda-nvrtc-cu12;"),
    ] {
        facts.cuda.cuda_version = Some(version);
        let text = Report::new(facts.clone()).to_text();
        assert!(text.contains(package), "{text}");
    }
    let no_directory = found(|facts| {
        facts.cuda.search.directories = vec!["/no/such/folder".into()];
    });
    assert_eq!(no_directory, [(Warning, "library-folder-missing")]);
}

#[test]
fn problems_of_the_host_are_found() {
    use Severity::{Note, Problem, Warning};
    type Change = fn(&mut Facts);
    let cases: [(Change, (Severity, &str)); 16] = [
        (|f| f.memory.usable_bytes = GIB, (Warning, "memory-low")),
        (
            |f| {
                f.memory.cgroup = Some(CgroupFacts {
                    version: 2,
                    limit_bytes: Some(64 * GIB),
                    used_bytes: 0,
                });
            },
            (Note, "memory-limited"),
        ),
        (
            |f| f.limits.locked_memory_bytes.soft = Some(8 << 20),
            (Note, "locked-memory-low"),
        ),
        (
            |f| f.limits.open_files.soft = Some(256),
            (Note, "open-files-low"),
        ),
        (
            |f| f.limits.processes.soft = Some(100),
            (Note, "processes-low"),
        ),
        (
            |f| f.storage[0].free_bytes = Some(64 << 20),
            (Warning, "shared-memory-small"),
        ),
        (
            |f| f.storage[0].is_writable = false,
            (Warning, "shared-memory-missing"),
        ),
        (
            |f| f.storage[1].is_writable = false,
            (Warning, "runs-not-writable"),
        ),
        (
            |f| f.storage[1].free_bytes = Some(GIB),
            (Note, "disk-small"),
        ),
        (
            |f| f.storage[2].is_writable = false,
            (Problem, "temporary-not-writable"),
        ),
        (|f| f.program.is_release = false, (Note, "debug-build")),
        (|f| f.cpu.instruction_sets.clear(), (Note, "no-avx2")),
        (
            |f| f.launch.problem = Some("RANK is missing".into()),
            (Problem, "rank-variables"),
        ),
        (
            |f| (f.launch.rank, f.launch.world_size) = (Some(0), Some(2)),
            (Note, "is-a-rank"),
        ),
        (
            |f| {
                let variable = "SLURM_NTASKS";
                f.launch.scheduler_tasks = Some(SchedulerTasks { variable, tasks: 8 });
            },
            (Warning, "scheduler-tasks"),
        ),
        (
            |f| f.environment = table(&variables(&[("NUM_WORKERS", "4"), ("SLURM_X", "1")])),
            (Note, "variables-without-effect"),
        ),
    ];
    for (change, expected) in cases {
        assert_eq!(found(change), [expected]);
    }
    // No memory is pinned without a GPU.
    let mut facts = without_gpus();
    facts.limits.locked_memory_bytes.soft = Some(0);
    assert_eq!(findings(&facts), [(Note, "no-gpu")]);
}

#[test]
fn the_most_important_findings_come_first() {
    let mut facts = without_gpus();
    facts.storage[2].is_writable = false;
    facts.storage[0].free_bytes = Some(0);
    let ids: Vec<_> = findings(&facts).iter().map(|(_, id)| *id).collect();
    assert_eq!(
        ids,
        ["temporary-not-writable", "shared-memory-small", "no-gpu"]
    );
    let text = Report::new(facts).to_text();
    assert!(text.contains("1 problem, 1 warning, 1 note\n"), "{text}");
    let place = |words| text.find(words).expect(words);
    assert!(place(" 1.       problem ") < place(" 2.       warning "));
}

#[test]
fn the_report_is_plain_aligned_and_hides_the_home_directory() {
    let mut facts = workstation();
    facts.gpus[0].processes = Some(vec![GpuProcess {
        pid: 4711,
        used_bytes: Some(5 * GIB),
    }]);
    facts.environment = table(&variables(&[
        ("NUM_WORKERS", "4"),
        ("CUDA_HOME", "/opt/a/very/long/path/to/cuda"),
        ("HF_TOKEN", "hf_abcdef"),
    ]));
    let text = Report::new(facts).to_text();
    for line in text.lines() {
        assert!(line.is_empty() || line.starts_with(' '), "{line:?}");
        assert!(
            !line.ends_with(' ') && !line.contains(['\u{1b}', '\t', '\r']),
            "{line:?}"
        );
    }
    for words in [
        " gpu 0    NVIDIA RTX A6000 · compute capability 8.6 · 84 multiprocessors · 47.0G of 48.0G free\n",
        "          0000:00:00.0 · PCIe 1 x16 (at most 4 x16) · 4 NVLinks · peer access to 1\n",
        "          process 4711 uses 5.0G · 0 % busy · 0 uncorrected memory errors\n",
        "          all equal\n",
        "          NUM_WORKERS                  4             this program starts the ranks",
        "instead: --nproc N",
        "not shown",
        "/opt/a/very/long/path/to/cuda\n",
        " library  libnvrtc.so.13 13.0 /usr/lib/libnvrtc.so.13\n",
        "GPU 0: other processes hold 5.0G of 48.0G (process 4711)",
    ] {
        assert!(text.contains(words), "no {words:?} in\n{text}");
    }
    assert!(
        !text.contains("somebody") && !text.contains("hf_abcdef"),
        "{text}"
    );
}

/// Collects all key paths of a report, with `[]` for lists.
fn keys(value: &serde_json::Value, path: &str, found: &mut BTreeSet<String>) {
    match value {
        serde_json::Value::Object(fields) => {
            for (name, value) in fields {
                keys(value, &format!("{path}.{name}"), found);
            }
        }
        serde_json::Value::Array(items) if items.iter().any(serde_json::Value::is_object) => {
            for item in items {
                keys(item, &format!("{path}[]"), found);
            }
        }
        _ => {
            found.insert(path.trim_start_matches('.').to_string());
        }
    }
}

/// Scripts rely on the keys. Change them only together with `SCHEMA` and CHANGELOG.md.
#[test]
fn the_keys_of_the_json_report_are_frozen() {
    let mut facts = workstation();
    facts.memory.cgroup = Some(CgroupFacts {
        version: 2,
        limit_bytes: Some(GIB),
        used_bytes: 0,
    });
    facts.launch.scheduler_tasks = Some(SchedulerTasks {
        variable: "SLURM_NTASKS",
        tasks: 2,
    });
    for gpu in &mut facts.gpus {
        gpu.processes = Some(vec![GpuProcess {
            pid: 1,
            used_bytes: None,
        }]);
    }
    let report = serde_json::to_value(Report::new(facts)).expect("serialises");
    let mut found = BTreeSet::new();
    keys(&report, "", &mut found);
    let found: Vec<_> = found.into_iter().collect();
    let frozen: Vec<_> = include_str!("json_keys.txt").lines().collect();
    assert_eq!(found, frozen, "\n{}\n", found.join("\n"));
    assert_eq!(report["schema"], SCHEMA);
    assert_eq!(report["cuda"]["cuda_version"], "13.0");
    assert_eq!(report["gpus"][0]["compute_capability"], "8.6");
    assert_eq!(report["cuda"]["libraries"][3]["kind"], "cublas-lt");
    assert_eq!(report["findings"][0]["severity"], "warning");
}

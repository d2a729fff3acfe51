//! Facts about operating system, processor, memory, limits and directories. Parsers are functions of text.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::threads::TaskLimits;
use rustix::fs::Access;
use rustix::process::{Resource, getrlimit};

use super::facts::{
    CgroupFacts, Cpu, Launch, Limit, Limits, Memory, Program, Role, SchedulerTasks, Storage, System,
};
use crate::memory::{self, kib_field};
use crate::rank_env::{Env, Variables};

/// Variables in which schedulers store the number of tasks. They are also set for a process that is not a task.
const TASK_COUNTS: [&str; 4] = [
    "SLURM_NTASKS",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
];

pub(super) fn program() -> Program {
    Program {
        version: env!("CARGO_PKG_VERSION"),
        is_release: !cfg!(debug_assertions),
        has_cuda: cfg!(feature = "cuda"),
    }
}

pub(super) fn system() -> System {
    let release = read("/etc/os-release").or_else(|| read("/usr/lib/os-release"));
    let kernel = read("/proc/sys/kernel/osrelease").map(|text| text.trim().to_string());
    System {
        name: release.and_then(|text| os_name(&text)),
        kernel,
        architecture: std::env::consts::ARCH,
        libc: libc(),
        container: [("/.dockerenv", "docker"), ("/run/.containerenv", "podman")]
            .into_iter()
            .find_map(|(mark, name)| Path::new(mark).exists().then_some(name)),
    }
}

fn read(path: &str) -> Option<String> {
    fs::read_to_string(path).ok()
}

fn os_name(release: &str) -> Option<String> {
    let value = release
        .lines()
        .find_map(|line| line.strip_prefix("PRETTY_NAME="))?;
    let name = value.trim().trim_matches(['"', '\'']);
    (!name.is_empty()).then(|| name.to_string())
}

/// Name and version of the C library that this process is linked to, from a text in the library's file.
pub(crate) fn libc() -> Option<String> {
    let path = libc_path(&read("/proc/self/maps")?)?;
    if path.contains("musl") {
        return Some("musl".to_string());
    }
    glibc_version(&fs::read(path).ok()?)
}

/// Path of the C library in the process's memory map.
fn libc_path(maps: &str) -> Option<String> {
    maps.lines()
        .filter_map(|line| line.find('/').map(|start| &line[start..]))
        .find(|path| {
            let name = path.rsplit('/').next().unwrap_or_default();
            name.starts_with("libc.so") || name.starts_with("libc-") || name.contains("ld-musl")
        })
        .map(str::to_string)
}

fn glibc_version(bytes: &[u8]) -> Option<String> {
    let mark = b"GNU C Library ";
    let start = bytes
        .windows(mark.len())
        .position(|window| window == mark)?;
    let banner: Vec<u8> = bytes[start..]
        .iter()
        .copied()
        .take(200)
        .take_while(|byte| !matches!(byte, 0 | b'\n'))
        .collect();
    let text = String::from_utf8_lossy(&banner);
    let version = text.split_once(" version ")?.1;
    Some(format!("glibc {}", version.trim_end_matches('.')))
}

pub(super) fn cpu() -> Cpu {
    let usable_cores = std::thread::available_parallelism().map_or(1, usize::from);
    let online = crate::device::cores::online();
    Cpu {
        model: read("/proc/cpuinfo").and_then(|text| cpu_model(&text)),
        cores: online.unwrap_or(usable_cores),
        usable_cores,
        instruction_sets: instruction_sets(),
    }
}

fn cpu_model(cpuinfo: &str) -> Option<String> {
    let field = |name: &str| {
        cpuinfo.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            (key.trim() == name).then(|| value.split_whitespace().collect::<Vec<_>>().join(" "))
        })
    };
    // Arm processors report the implementer and a part number.
    let arm = || {
        let maker = field("CPU implementer")?;
        Some(format!("implementer {maker} part {}", field("CPU part")?))
    };
    field("model name")
        .or_else(|| field("Model"))
        .or_else(arm)
        .filter(|model| !model.is_empty())
}

/// Supported instruction sets that this program can use.
pub(crate) fn instruction_sets() -> Vec<&'static str> {
    let mut sets = Vec::new();
    macro_rules! ask {
        ($detected:ident: $($name:tt)*) => { $(if std::arch::$detected!($name) { sets.push($name); })* };
    }
    #[cfg(target_arch = "x86_64")]
    ask!(is_x86_feature_detected: "avx2" "fma" "f16c" "avx512f" "avx512bw" "avx512dq" "avx512vl" "avx512bf16");
    if kernels::CpuMath::native() == kernels::CpuMath::Amx {
        sets.push("amx");
    }
    #[cfg(target_arch = "aarch64")]
    ask!(is_aarch64_feature_detected: "neon" "fp16" "bf16" "sve" "sve2");
    sets
}

pub(super) fn memory() -> Memory {
    let meminfo = read("/proc/meminfo").unwrap_or_default();
    Memory {
        total_bytes: kib_field(&meminfo, "MemTotal:").unwrap_or(0),
        available_bytes: kib_field(&meminfo, "MemAvailable:").unwrap_or(0),
        swap_bytes: kib_field(&meminfo, "SwapTotal:").unwrap_or(0),
        cgroup: memory::cgroup().map(|group| CgroupFacts {
            version: group.version,
            limit_bytes: group.limit_bytes,
            used_bytes: group.used_bytes,
        }),
        usable_bytes: memory::host().free_bytes,
    }
}

pub(super) fn limits() -> Limits {
    let limit = |resource| {
        let limit = getrlimit(resource);
        Limit {
            soft: limit.current,
            hard: limit.maximum,
        }
    };
    Limits {
        locked_memory_bytes: limit(Resource::Memlock),
        open_files: limit(Resource::Nofile),
        processes: processes(TaskLimits::read()),
    }
}

fn processes(limits: TaskLimits) -> Limit {
    let least = |user: Option<u64>| user.into_iter().chain(limits.cgroup).min();
    Limit {
        soft: least(limits.user),
        hard: least(limits.user_hard),
    }
}

pub(super) fn storage(variables: &Variables) -> Vec<Storage> {
    let temporary = variables
        .get("TMPDIR")
        .filter(|value| !value.is_empty())
        .map_or_else(|| PathBuf::from("/tmp"), PathBuf::from);
    let mounts = read("/proc/self/mounts").unwrap_or_default();
    [
        (Role::SharedMemory, PathBuf::from("/dev/shm")),
        (Role::Runs, PathBuf::from(".")),
        (Role::Temporary, temporary),
    ]
    .into_iter()
    .map(|(role, path)| directory(role, path, &mounts))
    .collect()
}

fn directory(role: Role, path: PathBuf, mounts: &str) -> Storage {
    // A current directory that was removed still looks like a directory, but has no path.
    let absolute = path.canonicalize().ok();
    let stat = rustix::fs::statvfs(&path).ok();
    let bytes = |blocks: fn(&rustix::fs::StatVfs) -> u64| {
        stat.as_ref()
            .map(|stat| blocks(stat).saturating_mul(stat.f_frsize))
    };
    Storage {
        role,
        file_system: absolute
            .as_ref()
            .and_then(|path| file_system_of(mounts, path)),
        total_bytes: bytes(|stat| stat.f_blocks),
        free_bytes: bytes(|stat| stat.f_bavail),
        is_writable: absolute.as_ref().is_some_and(|path| {
            path.is_dir() && rustix::fs::access(path, Access::WRITE_OK | Access::EXEC_OK).is_ok()
        }),
        path: absolute.unwrap_or(path),
    }
}

/// Type of the file system of `path`. It is that of the longest mount point above `path`; of equal ones the last,
/// which hides the others.
fn file_system_of(mounts: &str, path: &Path) -> Option<String> {
    mounts
        .lines()
        .filter_map(|line| {
            let mut words = line.split(' ').skip(1);
            let point = PathBuf::from(unescaped(words.next()?));
            let kind = words.next()?;
            path.starts_with(&point)
                .then(|| (point.components().count(), kind.to_string()))
        })
        .max_by_key(|(depth, _)| *depth)
        .map(|(_, kind)| kind)
}

/// Decodes a path: the kernel writes blanks and backslashes as three octal digits.
fn unescaped(word: &str) -> String {
    let mut parts = word.split('\\');
    let mut text = parts.next().unwrap_or_default().to_string();
    for part in parts {
        let letter = part
            .get(..3)
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match letter {
            Some(letter) => {
                text.push(char::from(letter));
                text.push_str(&part[3..]);
            }
            None => {
                text.push('\\');
                text.push_str(part);
            }
        }
    }
    text
}

pub(super) fn launch(variables: &Variables) -> Launch {
    let lookup = |name: &str| variables.get(name).map(ToOwned::to_owned);
    let mut launch = Launch::default();
    match Env::from_lookup(&lookup) {
        Ok(env) => {
            if let Some(rank) = env.rank {
                launch.rank = Some(rank.rank);
                launch.world_size = Some(rank.world_size);
            }
        }
        Err(failure) => {
            launch.problem = Some(failure.summary());
            launch.next = failure.next;
        }
    }
    launch.scheduler_tasks = TASK_COUNTS.into_iter().find_map(|variable| {
        let tasks = variables.get(variable)?.to_str()?.trim().parse().ok()?;
        (tasks > 1 && launch.rank.is_none()).then_some(SchedulerTasks { variable, tasks })
    });
    launch
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsString;

    #[test]
    fn the_name_of_the_system_is_read_with_or_without_quotes() {
        let text = "ID=debian\nPRETTY_NAME=\"Debian GNU/Linux 12 (bookworm)\"\n";
        assert_eq!(
            os_name(text).as_deref(),
            Some("Debian GNU/Linux 12 (bookworm)")
        );
        assert_eq!(os_name("PRETTY_NAME=Plain\n").as_deref(), Some("Plain"));
        assert_eq!(os_name("PRETTY_NAME=\"\"\nNAME=x\n"), None);
    }

    #[test]
    fn the_version_of_the_c_library_is_read() {
        let maps = "7f00-7f01 r-xp 00000000 fe:00 32 /usr/lib/libcrypto.so.3\n\
                    7f02-7f03 r-xp 00000000 fe:00 33                 /usr/lib/x86_64-linux-gnu/libc.so.6\n";
        assert_eq!(
            libc_path(maps).as_deref(),
            Some("/usr/lib/x86_64-linux-gnu/libc.so.6")
        );
        assert_eq!(libc_path("7f00-7f01 rw-p 0 00:00 0 [heap]\n"), None);
        let bytes =
            b"\0\x7fGNU C Library (Debian GLIBC 2.36-9) stable release version 2.36.\nCopyright";
        assert_eq!(glibc_version(bytes).as_deref(), Some("glibc 2.36"));
        assert_eq!(glibc_version(b"GNU C Library \0 version 2"), None);
        assert_eq!(glibc_version(b"nothing"), None);
    }

    #[test]
    fn processor_names_are_read_from_every_known_field() {
        let intel = "processor\t: 0\nmodel\t\t: 85\nmodel name\t: Intel(R)  Xeon(R) @ 2.50GHz\n";
        assert_eq!(
            cpu_model(intel).as_deref(),
            Some("Intel(R) Xeon(R) @ 2.50GHz")
        );
        let arm = "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n";
        assert_eq!(
            cpu_model(arm).as_deref(),
            Some("implementer 0x41 part 0xd40")
        );
        assert_eq!(cpu_model("processor\t: 0\n"), None);
    }

    #[test]
    fn a_path_belongs_to_the_deepest_and_latest_mount() {
        let mounts = "/dev/vda / ext4 rw 0 0\n\
                      none /data xfs rw 0 0\n\
                      none /data/a\\040b nfs4 rw 0 0\n\
                      none /data overlay rw 0 0\n";
        let kind = |path: &str| file_system_of(mounts, Path::new(path));
        assert_eq!(kind("/home/u").as_deref(), Some("ext4"));
        assert_eq!(kind("/data/x").as_deref(), Some("overlay"));
        assert_eq!(kind("/data/a b/c").as_deref(), Some("nfs4"));
        assert_eq!(kind("/database").as_deref(), Some("ext4"));
        assert_eq!(file_system_of("", Path::new("/")), None);
        assert_eq!(unescaped("a\\134b\\x\\040"), "a\\b\\x ");
        assert_eq!(unescaped("a\\é"), "a\\é");
    }

    #[test]
    fn missing_directories_are_not_writable() {
        let missing = directory(Role::Temporary, "/no/such/folder".into(), "");
        assert!(!missing.is_writable && missing.free_bytes.is_none());
        let here = tempfile::tempdir().expect("temp dir");
        let here = directory(Role::Runs, here.path().into(), "none / ext4 rw 0 0\n");
        assert!(here.is_writable && here.free_bytes <= here.total_bytes);
        assert_eq!(here.file_system.as_deref(), Some("ext4"));
    }

    #[test]
    fn facts_of_this_machine_are_read() {
        let cpu = cpu();
        assert!(cpu.cores >= 1 && cpu.usable_cores >= 1);
        let memory = memory();
        assert!(memory.total_bytes > 0 && memory.usable_bytes <= memory.total_bytes);
        assert!(system().kernel.is_some_and(|kernel| !kernel.contains('\n')));
    }

    #[test]
    fn scheduler_tasks_are_reported_only_without_rank_variables() {
        let launched = |pairs: &[(&str, &str)]| {
            let pairs = pairs.iter();
            launch(
                &pairs
                    .map(|(name, value)| (name.to_string(), OsString::from(value)))
                    .collect(),
            )
        };
        let expected = SchedulerTasks {
            variable: "SLURM_NTASKS",
            tasks: 4,
        };
        let tasks = launched(&[("SLURM_NTASKS", "4")]).scheduler_tasks;
        assert_eq!(tasks, Some(expected));
        assert_eq!(launched(&[("SLURM_NTASKS", "1")]).scheduler_tasks, None);
        let rank = [("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "2")];
        let started = launched(&[&rank[..], &[("PMI_SIZE", "2")]].concat());
        assert_eq!(
            (started.rank, started.world_size, started.scheduler_tasks),
            (Some(1), Some(2), None)
        );
        let refused = launched(&[("LOCAL_RANK", "0")]);
        assert!(
            refused.problem.is_some_and(|text| text.contains("RANK")) && !refused.next.is_empty()
        );
    }
}

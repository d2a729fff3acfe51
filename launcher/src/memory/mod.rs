//! Memory and disk space of this machine and process: `/proc`, cgroup limits, free disk space. Also the memory of a
//! rank by phase.
//!
//! Parsers are pure functions over the text of `/proc` and `/sys/fs/cgroup`, so they are tested without a particular
//! machine.

mod phase;
mod rank;

use crate::lang::Text;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

pub use phase::{Kinds, Phase};
pub(crate) use rank::Footprint;
pub use rank::{PhaseBytes, RankMemory, RankPeak};

/// Part of a rank's memory, and the kinds of memory that count as it on each tier.
#[derive(Debug)]
pub(crate) struct Part {
    /// Name in the line of the plan, in reports and in files.
    pub(crate) name: &'static str,
    /// Its kinds in device memory.
    pub(crate) device: &'static [&'static str],
    /// Its kinds in host memory and in spill files.
    pub(crate) host: &'static [&'static str],
}

impl Part {
    /// A part that counts the same kinds on every tier.
    pub(crate) const fn of(name: &'static str, kinds: &'static [&'static str]) -> Self {
        Self {
            name,
            device: kinds,
            host: kinds,
        }
    }
}

/// Parts of a rank's memory that plans, refusals and reports show.
pub(crate) const PARTS: [Part; 6] = [
    Part::of("params", &["parameters"]),
    Part::of("grads", &["gradients"]),
    Part::of("optimizer", &["optimizer"]),
    Part::of("gathered", &["gathered"]),
    Part::of("communication", &["communication"]),
    Part {
        name: "activations",
        device: &["activations", "workspace", "cache", "margin"],
        // Scratch memory on the host belongs to the process, not to the passes.
        host: &["activations"],
    },
];

/// Sizes of the host memory within this process's cgroup limits, in bytes: total, free now, and the smallest
/// of the limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostMemory {
    /// Total host memory in bytes: that of the machine, or the smallest limit of this process's cgroups if
    /// that is less.
    pub total_bytes: u64,
    /// Bytes of host memory that can be allocated now without swapping or an OOM kill.
    pub free_bytes: u64,
    /// Smallest memory limit of this process's cgroups in bytes; `None` without a limit.
    pub cgroup_limit_bytes: Option<u64>,
}

/// Reads how much host memory there is for this process, in total and free now, within the limits of its
/// cgroups. Without `/proc`, both are zero.
pub fn host() -> HostMemory {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let mut total_bytes = kib_field(&meminfo, "MemTotal:").unwrap_or(0);
    let mut free_bytes = kib_field(&meminfo, "MemAvailable:").unwrap_or(0);
    let mut limit: Option<u64> = None;
    for group in cgroups() {
        let Some(max_bytes) = group.limit_bytes() else {
            continue;
        };
        let room_bytes = max_bytes.saturating_sub(group.used_bytes());
        total_bytes = total_bytes.min(max_bytes);
        free_bytes = free_bytes.min(room_bytes);
        limit = Some(limit.map_or(max_bytes, |known| known.min(max_bytes)));
    }
    HostMemory {
        total_bytes,
        free_bytes,
        cgroup_limit_bytes: limit,
    }
}

/// Limit and use, in bytes, of the memory cgroup that has the smallest limit for this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CgroupMemory {
    /// Version of the cgroup hierarchy, 1 or 2.
    pub version: u32,
    /// Memory limit of the cgroup in bytes; `None` means unlimited.
    pub limit_bytes: Option<u64>,
    /// Bytes in use by the cgroup's processes, without reclaimable page cache.
    pub used_bytes: u64,
}

/// Reads the memory cgroup of this process with the smallest limit; without any limit, the innermost one.
/// `None` if no cgroup reports its use.
pub fn cgroup() -> Option<CgroupMemory> {
    tightest(&cgroups())
}

fn tightest(groups: &[Cgroup]) -> Option<CgroupMemory> {
    groups
        .iter()
        .filter(|group| group.usage().is_some())
        .min_by_key(|group| group.limit_bytes().unwrap_or(u64::MAX))
        .map(|group| CgroupMemory {
            version: match group.version {
                Version::One => 1,
                Version::Two => 2,
            },
            limit_bytes: group.limit_bytes(),
            used_bytes: group.used_bytes(),
        })
}

/// Maximum bytes of memory that this process may hold locked at one time (`ulimit -l`, soft limit). `None`
/// without a limit.
pub fn lockable_bytes() -> Option<u64> {
    rustix::process::getrlimit(rustix::process::Resource::Memlock).current
}

/// Number of OOM kills so far in this process's memory cgroup or one of its parents, whichever counts most; 0
/// if unknown.
pub fn oom_kills() -> u64 {
    cgroups()
        .iter()
        .filter_map(|group| match group.version {
            Version::One => field_in(&group.directory.join("memory.oom_control"), "oom_kill "),
            Version::Two => field_in(&group.directory.join("memory.events"), "oom_kill "),
        })
        .max()
        .unwrap_or(0)
}

/// Number of OOM kills on this machine since it booted; 0 if unknown.
pub fn machine_oom_kills() -> u64 {
    field_in(Path::new("/proc/vmstat"), "oom_kill ").unwrap_or(0)
}

/// State letter of process `pid` in `/proc`: `R` running, `S` sleeping, `D` waiting for a device, `T` stopped by a
/// signal, `t` by a debugger, `Z` ended. `None` once it is gone.
pub fn process_state(pid: u32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The process name precedes the state in brackets and may contain any character.
    stat.rsplit_once(") ")?.1.chars().next()
}

/// Resident set size (RSS) of a process in bytes: at the time of reading, and at its peak.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ProcessMemory {
    /// Resident bytes of the process at the time of reading.
    pub rss_bytes: u64,
    /// Highest resident bytes of the process so far (`VmHWM`).
    pub peak_rss_bytes: u64,
}

/// Reads the resident set of this process, now and at its peak; zeros without `/proc`.
pub fn process() -> ProcessMemory {
    process_from(&fs::read_to_string("/proc/self/status").unwrap_or_default())
}

/// Reads the resident set of process `pid`, now and at its peak; `None` once the process is gone.
pub fn process_of(pid: u32) -> Option<ProcessMemory> {
    fs::read_to_string(format!("/proc/{pid}/status"))
        .ok()
        .map(|status| process_from(&status))
}

/// Resident bytes of this process now, read from `/proc/self/statm`; 0 without `/proc`.
pub fn resident_bytes() -> u64 {
    let text = fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = text
        .split_whitespace()
        .nth(1)
        .and_then(|word| word.parse::<u64>().ok());
    pages.unwrap_or(0) * rustix::param::page_size() as u64
}

fn process_from(status: &str) -> ProcessMemory {
    ProcessMemory {
        rss_bytes: kib_field(status, "VmRSS:").unwrap_or(0),
        peak_rss_bytes: kib_field(status, "VmHWM:").unwrap_or(0),
    }
}

/// Bytes an unprivileged process may still write in the file system of `path`, which need not
/// exist yet: its nearest existing ancestor counts.
///
/// # Errors
/// The file system cannot be asked.
pub fn disk_free_bytes(path: &Path) -> std::io::Result<u64> {
    let stat = rustix::fs::statvfs(existing(path))?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Whether two directories are on the same file system. They need not exist yet. False if that is unknown.
pub fn on_one_disk(one: &Path, other: &Path) -> bool {
    let device = |path| existing(path).metadata().map(|meta| meta.dev());
    match (device(one), device(other)) {
        (Ok(one), Ok(other)) => one == other,
        _ => false,
    }
}

/// The directory, or its nearest ancestor that exists.
fn existing(path: &Path) -> &Path {
    let mut directory = path;
    while !directory.exists() {
        directory = match directory.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
    }
    directory
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

#[derive(Debug, PartialEq, Eq)]
struct Cgroup {
    directory: PathBuf,
    version: Version,
}

impl Cgroup {
    fn limit_bytes(&self) -> Option<u64> {
        let file = match self.version {
            Version::One => "memory.limit_in_bytes",
            Version::Two => "memory.max",
        };
        limit_from(&fs::read_to_string(self.directory.join(file)).ok()?)
    }

    /// Bytes in use, page cache included. `None` if the cgroup has no such counter.
    fn usage(&self) -> Option<u64> {
        let file = match self.version {
            Version::One => "memory.usage_in_bytes",
            Version::Two => "memory.current",
        };
        let text = fs::read_to_string(self.directory.join(file)).ok()?;
        text.trim().parse().ok()
    }

    /// Bytes in use that cannot be reclaimed. Inactive page cache does not count.
    fn used_bytes(&self) -> u64 {
        let cache = match self.version {
            Version::One => "total_inactive_file ",
            Version::Two => "inactive_file ",
        };
        let cache = field_in(&self.directory.join("memory.stat"), cache).unwrap_or(0);
        self.usage().unwrap_or(0).saturating_sub(cache)
    }
}

fn cgroups() -> Vec<Cgroup> {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    cgroups_from(&own, Path::new("/sys/fs/cgroup"))
}

/// The memory cgroups of this process, innermost first, up to the mount point.
fn cgroups_from(own: &str, mount: &Path) -> Vec<Cgroup> {
    let mut found = Vec::new();
    for line in own.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(id), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next())
        else {
            continue;
        };
        let (version, root) = if id == "0" && controllers.is_empty() {
            (Version::Two, mount.to_path_buf())
        } else if controllers.split(',').any(|name| name == "memory") {
            (Version::One, mount.join("memory"))
        } else {
            continue;
        };
        // Inside a container the path may name a directory of the host. The mount point then has the container's own
        // group.
        let mut directory = root.join(path.trim_start_matches('/'));
        loop {
            found.push(Cgroup {
                directory: directory.clone(),
                version,
            });
            if directory == root || !directory.pop() || !directory.starts_with(&root) {
                break;
            }
        }
    }
    found
}

/// Parses a cgroup limit. "max" and the huge default of version 1 mean no limit.
fn limit_from(text: &str) -> Option<u64> {
    text.trim()
        .parse::<u64>()
        .ok()
        .filter(|&bytes| bytes < 1 << 60)
}

fn field_in(file: &Path, name: &str) -> Option<u64> {
    let text = fs::read_to_string(file).ok()?;
    text.lines()
        .find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
}

/// A field of `/proc/meminfo` or of a process status, in bytes.
pub(crate) fn kib_field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().trim_end_matches("kB").trim().parse().ok()?;
    Some(kib * 1024)
}

/// A kind of memory as messages name it; `name` is that of a [`Tag`](kernels::Tag), or of a part of the plan.
pub(crate) fn kind_name(name: &str) -> Text {
    let zh = match name {
        "parameters" | "params" => "参数",
        "gathered" => "汇集的参数",
        "gradients" | "grads" => "梯度",
        "optimizer" => "优化器状态",
        "activations" => "激活",
        "workspace" => "工作区",
        "communication" => "通信",
        "cache" => "缓存",
        "margin" => "余量",
        "process" => "进程",
        "samples" => "样本",
        "driver" => "驱动",
        "loader" => "数据加载",
        "image decoding" => "图片解码",
        other => other,
    };
    Text::new(name, zh)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kib_fields_are_converted_to_bytes() {
        let text = "MemTotal:       100 kB\nMemAvailable:    64 kB\n";
        assert_eq!(kib_field(text, "MemAvailable:"), Some(65536));
        assert_eq!(kib_field(text, "SwapFree:"), None);
        let status = "VmHWM:\t    8 kB\nVmRSS:\t    4 kB\n";
        assert_eq!(
            process_from(status),
            ProcessMemory {
                rss_bytes: 4096,
                peak_rss_bytes: 8192
            }
        );
    }

    #[test]
    fn absent_limits_are_none() {
        assert_eq!(limit_from("max\n"), None);
        assert_eq!(limit_from("9223372036854771712\n"), None);
        assert_eq!(limit_from("1073741824\n"), Some(1 << 30));
    }

    #[test]
    fn cgroup_paths_include_every_parent_up_to_the_mount() {
        let groups = cgroups_from("0::/a/b\n", Path::new("/m"));
        let directories: Vec<_> = groups.iter().map(|group| group.directory.clone()).collect();
        assert_eq!(directories, ["/m/a/b", "/m/a", "/m/"].map(PathBuf::from));
        let groups = cgroups_from("5:cpu,memory:/x\n1:name=systemd:/y\n", Path::new("/m"));
        assert_eq!(groups.len(), 2);
        assert_eq!(
            groups[0],
            Cgroup {
                directory: "/m/memory/x".into(),
                version: Version::One
            }
        );
    }

    #[test]
    fn memory_of_this_machine_is_read() {
        let memory = host();
        assert!(memory.total_bytes > 0 && memory.free_bytes <= memory.total_bytes);
        let own = process();
        assert!(own.rss_bytes > 0 && own.peak_rss_bytes >= own.rss_bytes);
        let resident = resident_bytes() as f64 / own.rss_bytes as f64;
        assert!((0.5..2.0).contains(&resident), "{resident} of VmRSS");
        assert!(process_of(u32::MAX).is_none());
        // The main thread of the tests may run or wait.
        assert!(process_state(std::process::id()).is_some_and(|s| "RS".contains(s)));
        assert_eq!(process_state(u32::MAX), None);
        assert!(disk_free_bytes(Path::new("no/such/folder/yet")).expect("asked") > 0);
    }

    #[test]
    fn a_cgroup_limit_bounds_free_memory() {
        let mount = tempfile::tempdir().expect("temp dir");
        fs::write(mount.path().join("memory.max"), "1000\n").expect("written");
        fs::write(mount.path().join("memory.current"), "900\n").expect("written");
        fs::write(
            mount.path().join("memory.stat"),
            "anon 1\ninactive_file 300\n",
        )
        .expect("written");
        let groups = cgroups_from("0::/\n", mount.path());
        assert_eq!(groups[0].limit_bytes(), Some(1000));
        assert_eq!(groups[0].used_bytes(), 600);
    }

    #[test]
    fn the_smallest_limit_of_all_parent_cgroups_counts() {
        let mount = tempfile::tempdir().expect("temp dir");
        for (directory, limit, used) in
            [("", "max", "50"), ("a", "1000", "40"), ("a/b", "max", "30")]
        {
            let directory = mount.path().join(directory);
            fs::create_dir_all(&directory).expect("made");
            fs::write(directory.join("memory.max"), limit).expect("written");
            fs::write(directory.join("memory.current"), used).expect("written");
        }
        let group = |own| tightest(&cgroups_from(own, mount.path())).expect("a group");
        assert_eq!(
            group("0::/a/b\n"),
            CgroupMemory {
                version: 2,
                limit_bytes: Some(1000),
                used_bytes: 40
            }
        );
        // The innermost one that exists.
        assert_eq!(group("0::/\n").limit_bytes, None);
        assert_eq!(group("0::/not/here\n").used_bytes, 50);
        assert_eq!(tightest(&cgroups_from("", mount.path())), None);
    }
}

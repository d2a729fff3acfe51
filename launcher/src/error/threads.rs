//! Threads and processes: their limits, and the failure when the system has no more.

use crate::lang::{Text, both, text};
use std::fs;
use std::io;

use rustix::process::{Resource, getrlimit};

use super::{ErrorCode, Failure};

/// Limits on the number of threads and processes, which Linux counts together. `None` means unlimited or unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TaskLimits {
    /// Soft limit of this user (`ulimit -u`).
    pub(crate) user: Option<u64>,
    /// Hard limit of this user, up to which the soft limit can be raised.
    pub(crate) user_hard: Option<u64>,
    /// Limit of this process's cgroup (`pids.max`; Docker's `--pids-limit`).
    pub(crate) cgroup: Option<u64>,
}

impl TaskLimits {
    /// The limits of this process.
    pub(crate) fn read() -> Self {
        let user = getrlimit(Resource::Nproc);
        Self {
            user: user.current,
            user_hard: user.maximum,
            cgroup: pids_max(),
        }
    }
}

/// `pids.max` of this process's cgroup, of version 2 or 1.
fn pids_max() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let inside = |line: &str| {
        let mounts = [("::", "/sys/fs/cgroup"), (":pids:", "/sys/fs/cgroup/pids")];
        mounts.into_iter().find_map(|(mark, mount)| {
            let (_, path) = line.split_once(mark)?;
            // A container may see the path of the host. Its own group is then at the mount.
            Some([
                format!("{mount}{path}/pids.max"),
                format!("{mount}/pids.max"),
            ])
        })
    };
    let mut files = groups.lines().filter_map(inside).flatten();
    let text = files.find_map(|file| fs::read_to_string(file).ok())?;
    text.trim().parse().ok()
}

/// Failure of starting a thread or process for `purpose`, such as "read samples".
pub(crate) fn no_thread(purpose: impl Into<Text>, error: &io::Error) -> Failure {
    let purpose = purpose.into();
    let limits = TaskLimits::read();
    let text = |limit: Option<u64>| -> Text {
        limit.map_or_else(|| both("unlimited", "无限制").into(), Text::literal)
    };
    Failure::new(
        ErrorCode::Rendezvous,
        both(
            "the system has no more threads or processes for this run",
            "系统没有更多线程或进程可供本次运行使用",
        ),
        text!(
            "a thread to {purpose} cannot start: {error}",
            "无法启动用于{purpose}的线程：{error}"
        ),
    )
    .evidence(text!(
        "limit of this user (ulimit -u): {}; limit of the cgroup (pids.max): {}",
        "当前用户的上限（ulimit -u）：{}；cgroup 的上限（pids.max）：{}",
        text(limits.user),
        text(limits.cgroup)
    ))
    .next(both(
        "raise the limit that is low: ulimit -u 65536, or Docker's --pids-limit -1",
        "请提高过低的上限：ulimit -u 65536，或 Docker 的 --pids-limit -1",
    ))
    .next(both(
        "or use fewer threads: --data-workers 0, --nproc 1",
        "或减少线程：--data-workers 0、--nproc 1",
    ))
}

/// Starts the pool of threads that compute. `threads` is their number; `None` means one per core. A second call does
/// nothing.
///
/// # Errors
/// The system has no more threads (exit 13).
pub(crate) fn start_pool(threads: Option<usize>) -> Result<(), Failure> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads.unwrap_or(0));
    match pool.build_global() {
        Ok(()) => Ok(()),
        Err(error) => {
            // Only an error of the system has a source. Otherwise the pool exists.
            let source = std::error::Error::source(&error).and_then(|e| e.downcast_ref());
            source.map_or(Ok(()), |source| {
                Err(no_thread(both("compute", "计算"), source))
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_failure_names_both_limits_and_what_raises_them() {
        let error = io::Error::from(io::ErrorKind::WouldBlock);
        let failure = no_thread("read samples", &error);
        assert_eq!(failure.code.status(), 13);
        assert!(failure.cause.contains("read samples"), "{failure}");
        let limits = TaskLimits::read();
        for limit in [limits.user, limits.cgroup].into_iter().flatten() {
            assert!(
                failure.evidence[0].contains(&limit.to_string()),
                "{failure}"
            );
        }
        assert!(failure.next[0].contains("ulimit -u"), "{failure}");
        start_pool(None).expect("a pool");
        start_pool(Some(1)).expect("the same pool");
    }
}

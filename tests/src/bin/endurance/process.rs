//! The launcher as a child process, and its ranks as `/proc` shows them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

/// Longest time that any process of this program may run.
pub(crate) const LIMIT: Duration = Duration::from_secs(600);
/// Time between two polls.
pub(crate) const TICK: Duration = Duration::from_millis(1);

/// A started launcher, killed when it is dropped.
pub(crate) struct Launcher {
    pub(crate) child: Child,
    log: PathBuf,
}

impl Launcher {
    /// Starts the launcher that was built beside this program.
    pub(crate) fn start(directory: &Path, flags: &[String]) -> Result<Self> {
        let own = std::env::current_exe()?;
        let program = own.with_file_name("tessera_test_launcher");
        ensure!(program.is_file(), "{} is not built", program.display());
        let log = directory.join("screen.log");
        let child = Command::new(program)
            .args(flags)
            .env("TMPDIR", directory)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(fs::File::create(&log)?)
            .spawn()?;
        Ok(Self { child, log })
    }

    pub(crate) fn screen(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Waits for the end of the launcher, which must succeed.
    pub(crate) fn finish(mut self) -> Result<()> {
        let began = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait()? {
                break status;
            }
            ensure!(began.elapsed() < LIMIT, "no end:\n{}", self.screen());
            std::thread::sleep(TICK);
        };
        if !status.success() {
            bail!("{status}:\n{}", self.screen());
        }
        Ok(())
    }

    /// Process ids of the ranks.
    pub(crate) fn ranks(&self) -> Vec<u32> {
        children(self.child.id())
    }
}

impl Drop for Launcher {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Children of a process that run its program. Others, such as a Python that is asked for its directories, are no ranks.
fn children(parent: u32) -> Vec<u32> {
    let program = |pid: u32| fs::read_link(format!("/proc/{pid}/exe")).ok();
    let own = program(parent);
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut found: Vec<u32> = entries
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|pid| parent_of(*pid) == Some(parent) && program(*pid) == own)
        .collect();
    found.sort_unstable();
    found
}

fn parent_of(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may contain any character.
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(1)?.parse().ok()
}

/// Sends SIGKILL to a process that is not a child of this one.
pub(crate) fn kill(pid: u32) -> Result<()> {
    let status = Command::new("kill")
        .args(["-s", "KILL", &pid.to_string()])
        .stderr(Stdio::null())
        .status();
    status.context("kill cannot be run").map(drop)
}

/// Waits until none of these processes is alive.
pub(crate) fn wait_for_end(pids: &[u32]) -> Result<()> {
    let began = Instant::now();
    let alive = |pid: &u32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let state = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
        !state.is_empty() && !state.starts_with('Z')
    };
    while pids.iter().any(alive) {
        ensure!(began.elapsed() < LIMIT, "processes {pids:?} do not end");
        std::thread::sleep(TICK);
    }
    Ok(())
}

/// One line of `/proc/PID/status`, in the unit of that line.
pub(crate) fn status(pid: u32, key: &str) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    line.trim_start_matches(':')
        .split_whitespace()
        .next()?
        .parse()
        .ok()
}

/// Number of open files of a process.
pub(crate) fn descriptors(pid: u32) -> Option<u64> {
    Some(fs::read_dir(format!("/proc/{pid}/fd")).ok()?.count() as u64)
}

/// Bytes of all files below a directory. Files that vanish meanwhile are skipped.
pub(crate) fn disk_bytes(directory: &Path) -> u64 {
    let mut bytes = 0;
    let mut directories = vec![directory.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
            match entry.metadata() {
                Ok(metadata) if metadata.is_dir() => directories.push(entry.path()),
                Ok(metadata) => bytes += metadata.len(),
                Err(_) => {}
            }
        }
    }
    bytes
}

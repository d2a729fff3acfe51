//! Process that verifies one GPU, so that a fault of the driver ends no other process.
//!
//! It writes lines on standard output: `compiled`, `check NAME`, `no-kernel NAME`, `wrong TEXT`, `memory BYTES`, `done`.

use crate::commands::Hooks;
use crate::config::{CudaGraph, RunGpu};
use crate::device::checks::{self, Outcome};
use crate::error::{ErrorCode, Failure};
use crate::lang::both;
use crate::rank_env::Variables;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

/// Device memory for the operands of the checks.
const ARENA_BYTES: u64 = 256 << 20;
/// Longest time of a check after the kernels were compiled. All take a few seconds.
pub(super) const DEADLINE: Duration = Duration::from_secs(60);
/// Longest time until the kernels are compiled.
pub(super) const COMPILING: Duration = Duration::from_secs(600);

/// What the process does.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Request {
    pub(super) gpu: RunGpu,
    pub(super) checks: Vec<String>,
}

/// What the process found.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Found {
    /// Number of checks that began and had kernels.
    pub(super) checks: usize,
    /// Checks that need kernels which this machine lacks.
    pub(super) no_kernel: Vec<String>,
    /// Differences and failures.
    pub(super) wrong: Vec<String>,
    /// Memory of the GPU that opening it took beside the arena, in bytes, if the driver tells.
    pub(super) taken_bytes: Option<u64>,
}

/// Runs the request in the file `path`.
///
/// # Errors
/// The file cannot be read, or the GPU cannot be opened.
pub(in crate::commands) fn serve(hooks: &Hooks, path: &Path) -> Result<ExitCode, Failure> {
    let read = || -> std::io::Result<Request> {
        Ok(serde_json::from_str(&std::fs::read_to_string(path)?)?)
    };
    let request = read()
        .map_err(|error| Failure::io(ErrorCode::Usage, both("read", "读取"), path, &error))?;
    let Request { gpu, checks } = &request;
    let variables = Variables::read();
    let free = || hooks.devices.free_bytes(gpu, &variables);
    let before = free();
    let device = hooks
        .devices
        .open(gpu, ARENA_BYTES, CudaGraph::Off, &variables)?;
    say("opened", "");
    checks::compile(checks, gpu, &*device);
    say("compiled", "");
    checks::run(checks, &*device, &mut |name, outcome| match outcome {
        Outcome::Begins => say("check", name),
        Outcome::Wrong(wrong) => say("wrong", &wrong),
        Outcome::NoKernel => say("no-kernel", name),
    });
    if let (Some(before), Some(after)) = (before, free()) {
        let taken = before.saturating_sub(after).saturating_sub(ARENA_BYTES);
        say("memory", &taken.to_string());
    }
    say("done", "");
    Ok(ExitCode::SUCCESS)
}

fn say(word: &str, rest: &str) {
    let rest = rest.replace('\n', " ");
    let mut out = std::io::stdout().lock();
    // Without a reader the process ends by itself.
    drop(writeln!(out, "{word} {rest}").and_then(|()| out.flush()));
}

/// Starts a process with `command` and collects what it finds, within these times: until `compiled`, and for
/// each check.
pub(super) fn collect(mut command: Command, compiling: Duration, deadline: Duration) -> Found {
    let mut found = Found::default();
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = match child {
        Ok(child) => child,
        Err(error) => {
            found
                .wrong
                .push(format!("the process did not start: {error}"));
            return found;
        }
    };
    let (sender, lines) = channel();
    let output = child.stdout.take();
    let reader = thread::spawn(move || {
        for line in output
            .into_iter()
            .flat_map(|out| BufReader::new(out).lines())
        {
            let Ok(line) = line else { break };
            if sender.send(line).is_err() {
                break;
            }
        }
    });
    let complaints = child.stderr.take();
    let errors = thread::spawn(move || {
        let lines = complaints
            .into_iter()
            .flat_map(|err| BufReader::new(err).lines());
        lines.map_while(Result::ok).collect::<Vec<_>>()
    });
    let mut end = Instant::now() + compiling;
    let mut last = "the GPU was opened".to_owned();
    let is_done = loop {
        match lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
            Ok(line) => {
                let (word, rest) = line.split_once(' ').unwrap_or((&line, ""));
                match word {
                    "compiled" => end = Instant::now() + deadline,
                    "check" => {
                        end = Instant::now() + deadline;
                        found.checks += 1;
                        last = rest.to_owned();
                    }
                    "no-kernel" => {
                        found.checks = found.checks.saturating_sub(1);
                        found.no_kernel.push(rest.to_owned());
                    }
                    "wrong" => found.wrong.push(rest.to_owned()),
                    "memory" => found.taken_bytes = rest.parse().ok(),
                    "done" => break true,
                    _ => {}
                }
            }
            Err(RecvTimeoutError::Timeout) => {
                found.wrong.push(format!("{last}: no end in time"));
                break false;
            }
            Err(RecvTimeoutError::Disconnected) => break false,
        }
    };
    if !is_done {
        // It may have ended already.
        drop(child.kill());
    }
    let ended = child.wait();
    drop(reader.join());
    let errors = errors.join().unwrap_or_default();
    if !is_done && found.wrong.is_empty() {
        let status = ended.map_or_else(|error| error.to_string(), |status| status.to_string());
        let cause = errors.iter().rev().take(6).rev().cloned();
        let cause = cause.collect::<Vec<_>>().join(" ");
        found.wrong.push(format!("{last}: {status} {cause}"));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ran(script: &str, deadline: Duration) -> Found {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        collect(command, Duration::from_secs(60), deadline)
    }

    #[test]
    fn a_process_that_hangs_or_dies_is_a_finding() {
        let long = Duration::from_secs(60);
        let good = ran(
            "echo compiled; echo check add; echo check sub; echo no-kernel sub; echo memory 7; echo done",
            long,
        );
        let expected = Found {
            checks: 1,
            no_kernel: vec!["sub".to_owned()],
            wrong: Vec::new(),
            taken_bytes: Some(7),
        };
        assert_eq!(good, expected);
        let hangs = ran(
            "echo compiled; echo check add; exec tail -f /dev/null",
            Duration::ZERO,
        );
        assert!(hangs.wrong[0].ends_with("no end in time"), "{hangs:?}");
        // Each check has the whole time.
        let slow = ran(
            "echo compiled; for i in 1 2 3; do echo check $i; sleep 1.2; done; echo done",
            Duration::from_secs(3),
        );
        assert_eq!((slow.checks, slow.wrong), (3, Vec::new()));
        let dies = ran(
            "echo compiled; echo check add; echo gone >&2; kill -9 $$",
            long,
        );
        assert!(dies.wrong[0].starts_with("add: signal: 9"), "{dies:?}");
        assert!(dies.wrong[0].contains("gone"), "{dies:?}");
        let wrong = ran(
            "echo compiled; echo check add; echo wrong add: 1; echo done",
            long,
        );
        assert_eq!(wrong.wrong, ["add: 1"]);
    }
}

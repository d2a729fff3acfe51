//! One rank process: start, watch, output and end.

use crate::lang::both;
use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::Builder;

use crossbeam::channel::Sender;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};

use crate::error::threads::no_thread;
use crate::error::{ErrorCode, Failure};
use crate::ui::{self, Event};

/// Lines at the end of a rank's log that a report may quote.
const TAIL_LINES: usize = 40;

/// Message of a rank's threads to the supervisor.
#[derive(Debug)]
pub(super) enum Message {
    /// The process of this rank ended and can be reaped.
    Exited(usize),
    /// Standard output or standard error of a rank is closed.
    Drained,
    /// Rank 0 sent an event for the screen.
    Event(Box<Event>),
    /// Rank 0 wrote a line of text, without its line break.
    Line(String),
}

/// How to start one rank: executable and its words, rank number, environment variables to set, and log file.
#[derive(Debug)]
pub(super) struct Launch<'a> {
    pub(super) program: &'a Path,
    pub(super) words: &'a [String],
    pub(super) rank: usize,
    pub(super) env: &'a [(&'static str, OsString)],
    pub(super) log: &'a Path,
}

/// A running or ended rank process.
#[derive(Debug)]
pub(super) struct RankChild {
    child: Child,
    stdin: Option<ChildStdin>,
    tail: Arc<Mutex<VecDeque<String>>>,
    status: Option<ExitStatus>,
}

impl RankChild {
    pub(super) fn spawn(launch: &Launch<'_>, messages: &Sender<Message>) -> Result<Self, Failure> {
        let log = OpenOptions::new()
            .create(true)
            .append(true)
            .open(launch.log)
            .map_err(|error| {
                Failure::io(ErrorCode::Disk, both("write", "写入"), launch.log, &error)
            })?;
        let mut child = Command::new(launch.program)
            .args(launch.words)
            .envs(launch.env.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // In its own process group: Ctrl-C reaches the supervisor only, which decides.
            .process_group(0)
            .spawn()
            .map_err(|error| match error.kind() {
                io::ErrorKind::WouldBlock => no_thread(both("run a rank", "运行 rank "), &error),
                _ => Failure::io(
                    ErrorCode::Rendezvous,
                    both("start", "启动"),
                    launch.program,
                    &error,
                ),
            })?;
        let stdin = child.stdin.take();
        let tail = Arc::new(Mutex::new(VecDeque::new()));
        let log = Arc::new(Mutex::new(log));
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let rank = launch.rank;
        for stream in [
            stdout.map(|stream| Box::new(stream) as Box<dyn Read + Send>),
            stderr.map(|stream| Box::new(stream) as Box<dyn Read + Send>),
        ]
        .into_iter()
        .flatten()
        {
            let listener = Listener {
                rank,
                log: Arc::clone(&log),
                tail: Arc::clone(&tail),
                messages: messages.clone(),
            };
            let thread = Builder::new().name(format!("output of rank {rank}"));
            let started = thread.spawn(move || listener.listen(stream));
            started.map_err(|error| {
                no_thread(
                    both("read the output of a rank", "读取 rank 的输出"),
                    &error,
                )
            })?;
        }
        let (pid, messages) = (Pid::from_child(&child), messages.clone());
        let waiter = Builder::new().name(format!("end of rank {rank}"));
        let waiting = waiter.spawn(move || {
            // Not reaped here: until the supervisor reaps it, no other process can have its id.
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
            while matches!(
                waitid(WaitId::Pid(pid), options),
                Err(rustix::io::Errno::INTR)
            ) {}
            drop(messages.send(Message::Exited(rank)));
        });
        // Without its standard input the rank ends.
        waiting.map_err(|error| no_thread(both("wait for a rank", "等待 rank "), &error))?;
        Ok(Self {
            child,
            stdin,
            tail,
            status: None,
        })
    }

    pub(super) fn is_running(&self) -> bool {
        self.status.is_none()
    }

    pub(super) fn process_id(&self) -> u32 {
        self.child.id()
    }

    /// Reaps an ended process and returns its exit status.
    pub(super) fn reap(&mut self) -> Option<ExitStatus> {
        if self.status.is_none() {
            self.status = self.child.wait().ok();
        }
        self.status
    }

    pub(super) fn signal(&self, signal: Signal) {
        if self.is_running() {
            // An error means that the process is already gone.
            kill_process(Pid::from_child(&self.child), signal).ok();
        }
    }

    /// Tells the rank to end at once, by closing the pipe that it watches.
    pub(super) fn close_pipe(&mut self) {
        self.stdin = None;
    }

    pub(super) fn tail(&self) -> Vec<String> {
        self.tail
            .lock()
            .map_or_else(|_| Vec::new(), |tail| tail.iter().cloned().collect())
    }
}

impl Drop for RankChild {
    fn drop(&mut self) {
        if self.is_running() {
            self.signal(Signal::KILL);
            self.reap();
        }
    }
}

/// Copies one output stream of a rank to its log, and rank 0's also to the screen.
struct Listener {
    rank: usize,
    log: Arc<Mutex<File>>,
    tail: Arc<Mutex<VecDeque<String>>>,
    messages: Sender<Message>,
}

impl Listener {
    fn listen(self, stream: Box<dyn Read + Send>) {
        let mut reader = BufReader::new(stream);
        let mut bytes = Vec::new();
        while matches!(reader.read_until(b'\n', &mut bytes), Ok(read) if read > 0) {
            let text = String::from_utf8_lossy(&bytes);
            let line = text.trim_end_matches(['\n', '\r']);
            match ui::decode(line) {
                Some(event) => {
                    for line in ui::lines(&event) {
                        self.write(&line);
                    }
                    drop(self.messages.send(Message::Event(Box::new(event))));
                }
                None => {
                    self.write(line);
                    if self.rank == 0 {
                        drop(self.messages.send(Message::Line(line.to_string())));
                    }
                }
            }
            bytes.clear();
        }
        drop(self.messages.send(Message::Drained));
    }

    fn write(&self, line: &str) {
        if let Ok(mut log) = self.log.lock() {
            // If the disk is full, reading must continue: the rank would block on a full pipe.
            drop(writeln!(log, "{line}"));
        }
        if let Ok(mut tail) = self.tail.lock() {
            if tail.len() == TAIL_LINES {
                tail.pop_front();
            }
            tail.push_back(line.to_string());
        }
    }
}

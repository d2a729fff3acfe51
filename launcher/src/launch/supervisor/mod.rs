//! Supervisor: the parent process that starts the ranks, watches them, and ends them together.
//!
//! States of a run:
//! - Running.
//! - Stopping: a signal came. Ranks save and stop; there is no deadline.
//! - Aborting: a rank failed, or a second signal came. The supervisor closes the pipes, sends SIGTERM, and sends
//!   SIGKILL after a grace of 4 s.
//!
//! One thread per rank waits for its exit, and two read its output streams. The main loop waits on their channel, on
//! the next deadline, and on a timer. At each tick of the timer it records the memory of each rank, for the report
//! about a killed one.

mod child;
pub mod job;
mod report;
mod vitals;

use crate::lang::{Text, both, text};
use std::ffi::OsString;
use std::net::TcpListener;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::thread::Builder;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, at, never, tick, unbounded};
use crossbeam::select;
use rustix::process::Signal;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::error::threads::no_thread;
use crate::error::{ErrorCode, Failure, continue_run};
use crate::launch::rank::RunSummary;
use crate::launch::signals;
use crate::rank_env;
use crate::rank_env::identity::Master;
use crate::ui::{Event, Screen};

use child::{Launch, Message, RankChild};
use job::Job;
use report::Ending;
use vitals::{Machine, OomKills, Vitals};

/// Time from SIGTERM to SIGKILL when ranks are ended.
const GRACE: Duration = Duration::from_secs(4);
/// Time that a failure which looks like a consequence waits for its cause to appear.
const CAUSE_WINDOW: Duration = Duration::from_millis(500);
/// Interval between observations of the ranks' memory.
const VITALS: Duration = Duration::from_secs(1);
/// Maximum wait for the last output lines of ended ranks.
const DRAIN: Duration = Duration::from_secs(1);

/// Receiver of the signals sent to this process, as signal numbers.
#[derive(Debug)]
pub struct SignalSource {
    receiver: Receiver<i32>,
    handle: signal_hook::iterator::Handle,
}

impl SignalSource {
    /// Installs handlers for SIGINT, SIGTERM, SIGHUP and SIGUSR1, except those that are ignored.
    ///
    /// # Errors
    /// A handler cannot be installed.
    pub fn new() -> Result<Self, Failure> {
        let mut signals = Signals::new(signals::handled()).map_err(|error| {
            Failure::new(
                ErrorCode::Rendezvous,
                both("signals cannot be handled", "无法处理信号"),
                Text::literal(&error),
            )
        })?;
        let handle = signals.handle();
        let (sender, receiver) = unbounded();
        let thread = Builder::new().name("signals".to_owned());
        let started = thread.spawn(move || {
            for signal in signals.forever() {
                if sender.send(signal).is_err() {
                    break;
                }
            }
        });
        started.map_err(|error| no_thread(both("handle signals", "处理信号"), &error))?;
        Ok(Self { receiver, handle })
    }
}

impl Drop for SignalSource {
    fn drop(&mut self) {
        self.handle.close();
    }
}

/// Failure that ended a run early.
#[derive(Debug)]
pub struct RunFailure {
    /// The failure that is reported to the user.
    pub failure: Box<Failure>,
    /// Whether a rank process died or hung: a signal, a panic, a failed collective. If so, a restart of the
    /// same run may succeed.
    pub died: bool,
}

impl From<Failure> for RunFailure {
    /// A failure that a restart would repeat.
    fn from(failure: Failure) -> Self {
        Self {
            failure: Box::new(failure),
            died: false,
        }
    }
}

impl From<RunFailure> for Failure {
    fn from(ended: RunFailure) -> Self {
        *ended.failure
    }
}

/// Parameters of a run whose ranks are child processes of this process.
pub struct Supervisor<'a> {
    /// Executable that each rank runs.
    pub program: &'a Path,
    /// Words of its command line: those of a subcommand. Without any, the ranks train, and a later run can continue.
    pub words: &'a [String],
    /// Number of ranks to start on this machine.
    pub processes: usize,
    /// Position of this machine's ranks among those of all machines. `None` on a single machine.
    pub share: Option<Share>,
    /// Directory of the run, with `logs/` and `errors/`.
    pub output: &'a Path,
    /// Token and private directory of the job. The configuration for the ranks is already written there.
    pub job: &'a Job,
    /// Whether each rank sets its own `NCCL_HOSTID`. NCCL accepts several ranks on one GPU only if they claim
    /// different hosts.
    pub claims_hosts: bool,
    /// Function that adds suggestions to a rank's failure before the failure is stored and shown.
    pub suggestions: &'a dyn Fn(&mut Failure),
}

/// Position of one machine's ranks among those of all machines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Share {
    /// Number of the first rank on this machine, counted over all machines.
    pub first_rank: usize,
    /// Number of ranks on all machines.
    pub world_size: usize,
    /// Address at which the ranks of all machines meet: host and port of rank 0.
    pub master: Master,
}

impl std::fmt::Debug for Supervisor<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Supervisor")
            .field("program", &self.program)
            .field("processes", &self.processes)
            .field("output", &self.output)
            .finish_non_exhaustive()
    }
}

impl Supervisor<'_> {
    /// Starts the ranks of this machine, waits until all have ended, and returns the summary of the rank with
    /// the lowest number. No rank process remains afterwards.
    ///
    /// # Errors
    /// The failure of the first failing rank, or the reason why ranks could not be started.
    pub fn run(
        &self,
        signals: &SignalSource,
        screen: &mut Screen,
    ) -> Result<RunSummary, RunFailure> {
        let (sender, receiver) = unbounded();
        let environment = self.common_environment()?;
        let mut watch = Watch {
            output: self.output,
            first_rank: self.first_rank(),
            ranks: Vec::with_capacity(self.processes),
            endings: Vec::new(),
            undrained: 2 * self.processes,
            phase: SupervisorPhase::Running,
            asked_to_stop: false,
            oom_kills_before: OomKills::now(),
            vitals: Vitals::new(self.processes),
            machine: None,
            suggestions: self.suggestions,
            trains: self.words.is_empty(),
            screen,
        };
        for rank in 0..self.processes {
            let mut env = environment.clone();
            let number = self.first_rank() + rank;
            env.push((rank_env::RANK, number.to_string().into()));
            env.push((rank_env::LOCAL_RANK, rank.to_string().into()));
            if self.claims_hosts {
                let host = format!("{}-{number}", self.job.token());
                env.push((rank_env::NCCL_HOSTID, host.into()));
            }
            let log = self
                .output
                .join("logs")
                .join(format!("rank-{number:04}.log"));
            let launch = Launch {
                program: self.program,
                words: self.words,
                rank,
                env: &env,
                log: &log,
            };
            watch.ranks.push(RankChild::spawn(&launch, &sender)?);
        }
        drop(sender);
        watch.until_all_ended(&receiver, &signals.receiver);
        watch.drain(&receiver);
        // Removes the files of an unfinished save, which may be gigabytes on a full disk. Its errors are ignored,
        // since the run's own failure matters more. On other machines rank 0 may still be writing.
        if self.first_rank() == 0 {
            engine::checkpoint::sweep(self.output).ok();
        }
        watch.outcome(self.job.directory())
    }

    fn first_rank(&self) -> usize {
        self.share.as_ref().map_or(0, |share| share.first_rank)
    }

    fn common_environment(&self) -> Result<Vec<(&'static str, OsString)>, Failure> {
        // The port is released at once. Its number only has to differ from those of other jobs.
        let port = TcpListener::bind(("127.0.0.1", 0))
            .and_then(|listener| listener.local_addr())
            .map_err(|error| {
                Failure::new(
                    ErrorCode::Rendezvous,
                    both("no free port on 127.0.0.1", "127.0.0.1 上没有空闲端口"),
                    Text::literal(&error),
                )
            })?
            .port();
        let (world, addr, port) = match &self.share {
            Some(share) => (
                share.world_size,
                share.master.addr.clone().unwrap_or_default(),
                share.master.port.unwrap_or(rank_env::DEFAULT_PORT),
            ),
            None => (self.processes, "127.0.0.1".to_string(), port),
        };
        Ok(vec![
            (rank_env::WORLD_SIZE, world.to_string().into()),
            (
                rank_env::LOCAL_WORLD_SIZE,
                self.processes.to_string().into(),
            ),
            (rank_env::MASTER_ADDR, addr.into()),
            (rank_env::MASTER_PORT, port.to_string().into()),
            (rank_env::RUN_TOKEN, self.job.token().into()),
            (
                rank_env::JOB_DIR,
                self.job.directory().as_os_str().to_os_string(),
            ),
        ])
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SupervisorPhase {
    Running,
    /// A signal asked the ranks to save a checkpoint and stop.
    Stopping,
    /// A failure may be a consequence. Abort at this time unless its cause appears before.
    Doubting {
        until: Instant,
    },
    /// All ranks are ending. SIGKILL follows at this time.
    Aborting {
        kill_at: Instant,
    },
    /// SIGKILL was sent to the ranks.
    Killed,
}

struct Watch<'a> {
    output: &'a Path,
    first_rank: usize,
    ranks: Vec<RankChild>,
    endings: Vec<Ending>,
    undrained: usize,
    phase: SupervisorPhase,
    asked_to_stop: bool,
    oom_kills_before: OomKills,
    vitals: Vitals,
    machine: Option<Machine>,
    suggestions: &'a dyn Fn(&mut Failure),
    /// Whether the ranks train. Others save nothing when they are stopped.
    trains: bool,
    screen: &'a mut Screen,
}

impl Watch<'_> {
    fn until_all_ended(&mut self, messages: &Receiver<Message>, signals: &Receiver<i32>) {
        let clock = tick(VITALS);
        while self.ranks.iter().any(RankChild::is_running) {
            let timer = match self.phase {
                SupervisorPhase::Doubting { until } => at(until),
                SupervisorPhase::Aborting { kill_at } => at(kill_at),
                SupervisorPhase::Running | SupervisorPhase::Stopping | SupervisorPhase::Killed => {
                    never()
                }
            };
            select! {
                recv(messages) -> message => match message {
                    Ok(message) => self.take(message),
                    // The channel closes when every thread of every rank has ended, so every rank has ended.
                    Err(_) => break,
                },
                recv(signals) -> signal => if let Ok(signal) = signal { self.signalled(signal) },
                recv(timer) -> _ => self.deadline(),
                recv(clock) -> _ => self.vitals.look(alive(&self.ranks)),
            }
        }
    }

    fn take(&mut self, message: Message) {
        match message {
            Message::Exited(rank) => self.ended(rank),
            Message::Drained => self.undrained -= 1,
            Message::Event(event) => self.screen.show(&event),
            Message::Line(line) => self.screen.line(&line),
        }
    }

    fn ended(&mut self, rank: usize) {
        let Some(status) = self.ranks[rank].reap() else {
            return;
        };
        // A rank that gets SIGTERM before its handler is installed ends by that signal.
        let was_stopped = self.asked_to_stop && status.signal() == Some(SIGTERM);
        let was_aborted = was_stopped
            || matches!(
                self.phase,
                SupervisorPhase::Aborting { .. } | SupervisorPhase::Killed
            );
        let ending = Ending {
            rank: self.first_rank + rank,
            status,
            was_aborted,
            tail: Vec::new(),
        };
        let failed = !ending.is_good() && !was_aborted;
        self.endings.push(ending);
        if was_stopped
            && !matches!(
                self.phase,
                SupervisorPhase::Aborting { .. } | SupervisorPhase::Killed
            )
        {
            // The other ranks would wait for this one.
            self.abort();
        }
        if !failed {
            return;
        }
        if self.machine.is_none() {
            self.vitals.look(alive(&self.ranks));
            self.machine = Some(self.seen());
        }
        let own = Failure::load(self.output, self.first_rank + rank).map(|own| own.code);
        let code = own.or_else(|| status.code().and_then(ErrorCode::from_status));
        match self.phase {
            SupervisorPhase::Running | SupervisorPhase::Stopping
                if code.is_some_and(ErrorCode::is_consequence) =>
            {
                self.phase = SupervisorPhase::Doubting {
                    until: Instant::now() + CAUSE_WINDOW,
                };
            }
            _ => self.abort(),
        }
    }

    /// Observations of the machine, with ranks numbered across all machines.
    fn seen(&self) -> Machine {
        let mut machine = self.vitals.machine(self.oom_kills_before);
        for seen in &mut machine.ranks {
            seen.rank += self.first_rank;
        }
        machine
    }

    fn signalled(&mut self, signal: i32) {
        let name = report::signal_name(signal);
        match self.phase {
            SupervisorPhase::Running if !self.trains => {
                self.asked_to_stop = true;
                self.abort();
            }
            SupervisorPhase::Running => {
                self.phase = SupervisorPhase::Stopping;
                self.asked_to_stop = true;
                let text = text!(
                    "{name}: saving and stopping; another SIGINT (Ctrl-C) stops at once",
                    "{name}：正在保存并停止；再次收到 SIGINT（Ctrl-C）会立即停止"
                );
                self.screen.show(&Event::Info {
                    label: both("stop", "停止").into(),
                    text,
                });
                for rank in &self.ranks {
                    rank.signal(Signal::TERM);
                }
            }
            // Job schedulers may repeat SIGUSR1 and SIGTERM. Only a repeated signal from a user means an immediate
            // end.
            SupervisorPhase::Stopping | SupervisorPhase::Doubting { .. }
                if matches!(signal, SIGINT | SIGHUP) =>
            {
                let text = text!(
                    "{name} again: stopping at once, nothing more is saved",
                    "再次收到 {name}：立即停止，不再保存任何内容"
                );
                self.screen.show(&Event::Info {
                    label: both("stop", "停止").into(),
                    text,
                });
                self.abort();
            }
            _ => {}
        }
    }

    fn deadline(&mut self) {
        match self.phase {
            SupervisorPhase::Doubting { .. } => self.abort(),
            SupervisorPhase::Aborting { .. } => {
                self.phase = SupervisorPhase::Killed;
                for rank in &self.ranks {
                    rank.signal(Signal::KILL);
                }
            }
            SupervisorPhase::Running | SupervisorPhase::Stopping | SupervisorPhase::Killed => {}
        }
    }

    fn abort(&mut self) {
        self.phase = SupervisorPhase::Aborting {
            kill_at: Instant::now() + GRACE,
        };
        for rank in &mut self.ranks {
            rank.signal(Signal::TERM);
            rank.close_pipe();
        }
    }

    /// Shows output that remains in the pipes of ended ranks.
    fn drain(&mut self, messages: &Receiver<Message>) {
        let until = Instant::now() + DRAIN;
        while self.undrained > 0 {
            match messages.recv_deadline(until) {
                Ok(message) => self.take(message),
                Err(_) => break,
            }
        }
        for ending in &mut self.endings {
            ending.tail = self.ranks[ending.rank - self.first_rank].tail();
        }
    }

    fn outcome(self, job_dir: &Path) -> Result<RunSummary, RunFailure> {
        self.screen.finish_bar();
        let first = report::first_failure(&self.endings, self.output);
        // After a second signal, a rank's exit status is not a failure of its own.
        let asked = self.asked_to_stop;
        if let Some(first) = first.filter(|first| !(asked && first.was_aborted)) {
            let machine = match &self.machine {
                Some(machine) => machine.clone(),
                None => self.seen(),
            };
            let failure = match self.trains {
                true => report::explain(first, &machine, self.output, self.suggestions),
                // The job's directory, with all files of its ranks, is removed.
                false => report::of_rank(first, &machine, self.output, false).0,
            };
            return Err(RunFailure {
                failure: Box::new(failure),
                died: !asked && first.died(),
            });
        }
        let missing = || {
            if asked && !self.trains {
                let cause = both("nothing was saved", "没有保存任何内容");
                let title = both("stopped by a signal", "被信号停止");
                return Failure::new(ErrorCode::Interrupted, title, cause);
            }
            if asked {
                return stopped_at_once(self.output);
            }
            Failure::new(
                ErrorCode::RankDied,
                text!(
                    "rank {} ended without a result",
                    "rank {} 结束时没有给出结果",
                    self.first_rank
                ),
                both(
                    "the process exited with status 0 but left no summary",
                    "进程以状态 0 退出，但没有留下摘要",
                ),
            )
        };
        let summary = RunSummary::load(job_dir, self.first_rank).ok_or_else(missing)?;
        // The user stopped a run that would have been planned again.
        if asked && summary.ipc_refused.is_some() {
            return Err(stopped_at_once(self.output).into());
        }
        Ok(summary)
    }
}

/// Rank numbers and process ids of the ranks that have not ended.
fn alive(ranks: &[RankChild]) -> impl Iterator<Item = (usize, u32)> {
    let running = ranks
        .iter()
        .enumerate()
        .filter(|(_, rank)| rank.is_running());
    running.map(|(rank, child)| (rank, child.process_id()))
}

fn stopped_at_once(output: &Path) -> Failure {
    Failure::new(
        ErrorCode::Interrupted,
        both(
            "stopped by a signal before the state was saved",
            "在状态保存之前被信号停止",
        ),
        both(
            "a second signal arrived, or the first one arrived during start-up",
            "收到了第二个信号，或第一个信号在启动期间到达",
        ),
    )
    .next(Text::literal(continue_run(output)))
}

/// Path of this executable, from which ranks are started.
///
/// # Errors
/// The operating system does not report it.
pub fn own_program() -> Result<PathBuf, Failure> {
    std::env::current_exe().map_err(|error| {
        Failure::new(
            ErrorCode::Rendezvous,
            both(
                "the path of this executable is unknown",
                "无法得知本程序可执行文件的路径",
            ),
            Text::literal(&error),
        )
    })
}

//! Injection of the faults of `--inject` into one rank. They hit the communicator, the file system of a save, or the
//! factor on the loss. Without faults this module changes nothing.

use crate::lang::both;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use engine::checkpoint::{CheckpointError, DiskFault, Writer};
use engine::comm::{
    Buffer, Collective, CommError, Communicator, OpInfo, RankStatus, Ticket, WindowUsage, World,
};
use rustix::process::{Signal, getpid, kill_process};

use crate::config::{Fault, FaultKind, FaultPhase, RunConfig};
use crate::error::{ErrorCode, Failure};

/// Bound of a randomly drawn file-system call, exclusive. Even the smallest save makes more calls.
const CALLS: u64 = 16;

/// Faults that `--inject` asks of one rank, for tests of error handling.
#[derive(Debug, Clone, Default)]
pub(crate) struct Faults {
    own: Vec<Fault>,
    seed: u64,
    /// Current training step, counted from 1; 0 before the first.
    step: Arc<AtomicU64>,
    /// Step of the last saved checkpoint; 0 before the first.
    saved: u64,
}

impl Faults {
    pub(crate) fn of(config: &RunConfig, rank: usize) -> Self {
        let own = config.inject.iter().filter(|fault| fault.rank == rank);
        Self {
            own: own.cloned().collect(),
            seed: config.seed,
            ..Self::default()
        }
    }

    /// Notes that step `step`, counted from 1, begins.
    pub(crate) fn begin_step(&self, step: u64) {
        self.step.store(step, Ordering::Relaxed);
    }

    /// Triggers faults at the start of a forward pass.
    pub(crate) fn forward(&self) {
        let step = self.step.load(Ordering::Relaxed);
        for fault in self.own.iter().filter(|fault| fault.step == step) {
            if fault.phase == FaultPhase::Forward {
                end(fault.kind);
            }
        }
    }

    /// Factor on the step's losses: `factor`, or a non-finite value if a fault asks for it.
    pub(crate) fn loss_factor(&self, factor: f32) -> f32 {
        let step = self.step.load(Ordering::Relaxed);
        let mut bad = self.own.iter();
        let bad = bad.find(|fault| fault.kind == FaultKind::Nan && fault.step == step);
        bad.map_or(factor, |fault| factor * fault.value.value())
    }

    /// Begins a checkpoint like [`Writer::begin`]. If a fault of this rank hits the save after `step`, it happens at
    /// one of the save's file-system calls.
    pub(crate) fn writer(
        &self,
        output: &Path,
        step: u64,
        world: World,
    ) -> Result<Writer, CheckpointError> {
        let (rank, size) = (world.rank as u32, world.size as u32);
        let of_save = self.own.iter().find_map(|fault| {
            let kind = match fault.kind {
                FaultKind::DiskFull => DiskFault::NoSpace,
                FaultKind::ShortWrite => DiskFault::ShortWrite,
                _ if fault.phase != FaultPhase::Save => return None,
                FaultKind::Kill => DiskFault::Act(kill),
                FaultKind::Stop => DiskFault::Act(stop),
                _ => DiskFault::Act(panic),
            };
            self.meets(fault, step).then_some((fault, kind))
        });
        match of_save {
            Some((fault, kind)) => {
                let drawn = || fault.draw(self.seed, CALLS);
                let call = fault.call.unwrap_or_else(drawn);
                tracing::warn!("{fault} hits call {call} of the save after step {step}");
                Writer::begin_faulty(output, step, rank, size, kind, call)
            }
            None => Writer::begin(output, step, rank, size),
        }
    }

    /// Notes that a checkpoint was published, and flips bits in it if a fault asks for it.
    pub(crate) fn saved(
        &mut self,
        directory: &Path,
        step: u64,
        world: World,
    ) -> Result<(), Failure> {
        let flips = self
            .own
            .iter()
            .filter(|fault| fault.kind == FaultKind::FlipBit);
        for fault in flips.filter(|fault| self.meets(fault, step)) {
            let path = directory.join(format!("state/rank-{:04}.safetensors", world.rank));
            let flip = || -> std::io::Result<u64> {
                let mut bytes = std::fs::read(&path)?;
                let bit = fault.draw(self.seed, 8 * bytes.len() as u64);
                bytes[(bit / 8) as usize] ^= 1 << (bit % 8);
                std::fs::write(&path, bytes)?;
                Ok(bit)
            };
            let bit = flip()
                .map_err(|e| Failure::io(ErrorCode::Disk, both("write", "写入"), &path, &e))?;
            tracing::warn!("{fault} flipped bit {bit} of {}", path.display());
        }
        self.saved = step;
        Ok(())
    }

    /// Whether the save after `step` is the first one at or after the fault's step.
    fn meets(&self, fault: &Fault, step: u64) -> bool {
        fault.step <= step && self.saved < fault.step
    }

    /// Wraps the communicator if a fault hits this rank's link or collectives. `deadline` is the communication
    /// timeout.
    pub(crate) fn link(
        &self,
        inner: Arc<dyn Communicator>,
        deadline: Duration,
    ) -> Arc<dyn Communicator> {
        let touches = |fault: &&Fault| {
            fault.phase == FaultPhase::Collective
                || matches!(fault.kind, FaultKind::SlowLink | FaultKind::CutLink)
        };
        let faults: Vec<Fault> = self.own.iter().filter(touches).cloned().collect();
        if faults.is_empty() {
            return inner;
        }
        let step = self.step.clone();
        Arc::new(FaultyLink {
            inner,
            faults,
            step,
            deadline,
            waited: Mutex::default(),
        })
    }
}

/// Communicator with injected faults.
#[derive(Debug)]
struct FaultyLink {
    inner: Arc<dyn Communicator>,
    faults: Vec<Fault>,
    step: Arc<AtomicU64>,
    deadline: Duration,
    /// Collective in which the cut link timed out, if any.
    waited: Mutex<Option<OpInfo>>,
}

impl FaultyLink {
    /// Timeout of a collective on a cut link. The link is cut in both directions, so this rank times out as well.
    fn wait_in_vain(&self, op: &Collective, bytes: usize) -> CommError {
        std::thread::sleep(self.deadline);
        let op = op.info(bytes);
        let mut waited = self.waited.lock().unwrap_or_else(PoisonError::into_inner);
        self.timeout(waited.insert(op).clone())
    }

    fn timeout(&self, op: OpInfo) -> CommError {
        let unheard = self.world().peers().map(|rank| RankStatus {
            rank,
            started: 0,
            last: None,
        });
        CommError::Timeout {
            noticed_by: self.world().rank,
            sequence: 0,
            op: Box::new(op),
            elapsed: self.deadline,
            ranks: unheard.collect(),
        }
    }

    fn is_cut(&self) -> bool {
        let step = self.step.load(Ordering::Relaxed);
        let mut cuts = self.faults.iter();
        cuts.any(|fault| fault.kind == FaultKind::CutLink && fault.step <= step)
    }
}

impl Communicator for FaultyLink {
    fn world(&self) -> World {
        self.inner.world()
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer, CommError> {
        self.inner.alloc(bytes)
    }

    fn start(&self, op: Collective, buffer: Buffer) -> Result<Ticket, CommError> {
        let step = self.step.load(Ordering::Relaxed);
        if self.is_cut() {
            return Err(self.wait_in_vain(&op, buffer.len()));
        }
        let slow = self.faults.iter().filter(|fault| fault.step <= step);
        let slow = slow.filter(|fault| fault.kind == FaultKind::SlowLink);
        std::thread::sleep(Duration::from_millis(slow.map(|fault| fault.ms).sum()));
        let ticket = self.inner.start(op, buffer)?;
        for fault in self.faults.iter().filter(|fault| fault.step == step) {
            if fault.phase == FaultPhase::Collective {
                end(fault.kind);
            }
        }
        Ok(ticket)
    }

    fn abort(&self, reason: &str) {
        if !self.is_cut() {
            self.inner.abort(reason);
        }
    }

    fn failure(&self) -> Option<CommError> {
        let waited = self.waited.lock().unwrap_or_else(PoisonError::into_inner);
        match &*waited {
            Some(op) => Some(self.timeout(op.clone())),
            None => self.inner.failure(),
        }
    }

    fn memory(&self) -> WindowUsage {
        self.inner.memory()
    }

    fn deadline(&self) -> Duration {
        self.inner.deadline()
    }

    fn time_spent(&self) -> Duration {
        self.inner.time_spent()
    }
}

/// Ends or suspends this process if the fault is of such a kind.
fn end(kind: FaultKind) {
    match kind {
        FaultKind::Kill => kill(),
        FaultKind::Stop => stop(),
        FaultKind::Panic => panic(),
        _ => {}
    }
}

fn kill() {
    // SIGKILL cannot be caught, so this call does not return.
    kill_process(getpid(), Signal::KILL).ok();
}

fn stop() {
    kill_process(getpid(), Signal::STOP).ok();
}

#[expect(clippy::panic, reason = "--inject panic asked for it")]
fn panic() {
    panic!("--inject panic");
}

//! The faults of `--inject` that meet one rank, and the seams where they do: the communicator, the disk of a save, the
//! factor on the loss. Where none is asked for, nothing here does anything.

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

/// Calls of a save among which one is drawn: fewer than the smallest save makes.
const CALLS: u64 = 16;

/// The faults of one rank.
#[derive(Debug, Clone, Default)]
pub(crate) struct Faults {
    own: Vec<Fault>,
    seed: u64,
    /// The step at work, from 1; 0 before the first.
    step: Arc<AtomicU64>,
    /// The last step after which a checkpoint was saved.
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

    /// Step `step`, from 1, begins.
    pub(crate) fn begin_step(&self, step: u64) {
        self.step.store(step, Ordering::Relaxed);
    }

    /// A forward pass begins.
    pub(crate) fn forward(&self) {
        let step = self.step.load(Ordering::Relaxed);
        for fault in self.own.iter().filter(|fault| fault.step == step) {
            if fault.phase == FaultPhase::Forward {
                end(fault.kind);
            }
        }
    }

    /// The factor on the losses of the step.
    pub(crate) fn loss_factor(&self, factor: f32) -> f32 {
        let step = self.step.load(Ordering::Relaxed);
        let mut bad = self.own.iter();
        let bad = bad.find(|fault| fault.kind == FaultKind::Nan && fault.step == step);
        bad.map_or(factor, |fault| factor * fault.value.value())
    }

    /// As [`Writer::begin`], on the disk that this save is to meet.
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

    /// A checkpoint was published: flips bits in it where that is asked for.
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
            let bit = flip().map_err(|e| Failure::io(ErrorCode::Disk, "write", &path, &e))?;
            tracing::warn!("{fault} flipped bit {bit} of {}", path.display());
        }
        self.saved = step;
        Ok(())
    }

    /// Whether the save after `step` is the first at or behind the fault's step.
    fn meets(&self, fault: &Fault, step: u64) -> bool {
        fault.step <= step && self.saved < fault.step
    }

    /// The communicator with what happens to this rank's link, or in its collectives.
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

/// A communicator to which faults happen.
#[derive(Debug)]
struct FaultyLink {
    inner: Arc<dyn Communicator>,
    faults: Vec<Fault>,
    step: Arc<AtomicU64>,
    deadline: Duration,
    /// The collective in which the cut was noticed.
    waited: Mutex<Option<OpInfo>>,
}

impl FaultyLink {
    /// Nothing arrives in either direction: this rank, too, learns of the cut by waiting in vain.
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

/// Ends or suspends this process where the fault is of that kind.
fn end(kind: FaultKind) {
    match kind {
        FaultKind::Kill => kill(),
        FaultKind::Stop => stop(),
        FaultKind::Panic => panic(),
        _ => {}
    }
}

fn kill() {
    // Not to be caught: nothing follows.
    kill_process(getpid(), Signal::KILL).ok();
}

fn stop() {
    kill_process(getpid(), Signal::STOP).ok();
}

#[expect(clippy::panic, reason = "--inject panic asked for it")]
fn panic() {
    panic!("--inject panic");
}

//! The last collectives of a rank, kept so that an exchange that breaks can be traced: which ones began, and when.

use std::collections::VecDeque;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use engine::Plan;
use engine::comm::{
    Buffer, Collective, CommError, Communicator, OpInfo, Ticket, WindowUsage, World,
};

use super::stall;
use crate::report::run_directory::ERRORS;

/// Collectives that are kept: some micro-batches of a small model, one layer or two of a large one.
const KEPT: usize = 64;

/// What a rank began, the last [`KEPT`] of it.
#[derive(Debug)]
pub(crate) struct Collectives {
    began: Instant,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    /// Collectives begun so far, of which `last` are the last.
    begun: u64,
    last: VecDeque<(Duration, OpInfo)>,
}

impl Collectives {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            began: Instant::now(),
            kept: Mutex::default(),
        })
    }

    /// The communicator, whose collectives are noted from now on.
    pub(crate) fn of(self: &Arc<Self>, inner: Arc<dyn Communicator>) -> Arc<dyn Communicator> {
        let notes = self.clone();
        Arc::new(Noted { inner, notes })
    }

    fn note(&self, op: &Collective, bytes: usize) {
        let op = op.info(bytes);
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.begun += 1;
        if kept.last.len() == KEPT {
            kept.last.pop_front();
        }
        kept.last.push_back((self.began.elapsed(), op));
    }

    /// One line each: seconds since the ranks met, number, kind, what of, bytes.
    fn text(&self, plan: &Plan) -> String {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let first = kept.begun - kept.last.len() as u64;
        let mut text = String::new();
        for (sequence, (at, op)) in (first..).zip(&kept.last) {
            let name = stall::name(sequence, op, plan);
            let line = writeln!(text, "{:12.6} s  {name}", at.as_secs_f64());
            line.expect("writing into a string cannot fail");
        }
        let now = self.began.elapsed().as_secs_f64();
        let line = writeln!(text, "{now:12.6} s  this file was written");
        line.expect("writing into a string cannot fail");
        text
    }

    /// Leaves the list of rank `rank` among the failures of the run in `output`; returns its path there.
    ///
    /// # Errors
    /// The directory cannot be written.
    pub(crate) fn save(&self, plan: &Plan, output: &Path, rank: usize) -> std::io::Result<PathBuf> {
        let name = PathBuf::from(format!("{ERRORS}/collectives-{rank:04}.txt"));
        std::fs::create_dir_all(output.join(ERRORS))?;
        std::fs::write(output.join(&name), self.text(plan))?;
        Ok(name)
    }
}

/// A communicator whose collectives are noted.
#[derive(Debug)]
struct Noted {
    inner: Arc<dyn Communicator>,
    notes: Arc<Collectives>,
}

impl Communicator for Noted {
    fn world(&self) -> World {
        self.inner.world()
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer, CommError> {
        self.inner.alloc(bytes)
    }

    fn start(&self, op: Collective, buffer: Buffer) -> Result<Ticket, CommError> {
        self.notes.note(&op, buffer.len());
        self.inner.start(op, buffer)
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }

    fn failure(&self) -> Option<CommError> {
        self.inner.failure()
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

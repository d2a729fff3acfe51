//! Log of a rank's last collectives, written to a file when an exchange breaks.

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

/// Number of logged collectives: some micro-batches of a small model, one or two layers of a large one.
const KEPT: usize = 64;

/// Log of the last [`KEPT`] collectives that a rank started.
#[derive(Debug)]
pub(crate) struct Collectives {
    began: Instant,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    /// Number of collectives started so far, including those that `last` no longer has.
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

    /// Wraps a communicator so that its collectives are logged.
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

    /// The log as text, one line per collective: seconds since start, sequence number, kind, subject, bytes.
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

    /// Writes the log of rank `rank` to the errors directory of the run in `output`. Returns the path relative to
    /// `output`.
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

/// Communicator that passes every call on and logs its collectives.
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

//! Worker thread that borrows data by move, so that nothing is shared between threads. `tests/loom` checks all
//! interleavings.

use crate::sync::channel::{Receiver, Sender, unbounded};
use crate::sync::thread::{Builder, JoinHandle};

/// Error: the thread has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gone;

/// A thread that processes jobs `J` in order, each with a borrowed value `B` that it does not keep.
#[derive(Debug)]
pub(crate) struct Worker<J, B> {
    jobs: Option<Jobs<J, B>>,
    done: Receiver<J>,
    thread: Option<JoinHandle<()>>,
    open: usize,
}

/// Where a worker sends its jobs.
#[derive(Debug)]
enum Jobs<J, B> {
    ToThread(Sender<(J, B)>),
    /// No worker: each job is returned at once (dry run).
    Done(Sender<J>),
}

impl<J: Send + 'static, B: Send + 'static> Worker<J, B> {
    /// Starts the thread. `work` must release what it borrows before the job is returned, because the receiver of the
    /// job then owns everything again.
    pub(crate) fn start(
        name: &str,
        mut work: impl FnMut(&mut J, B) + Send + 'static,
    ) -> std::io::Result<Self> {
        let (jobs, queue) = unbounded::<(J, B)>();
        let (reply, done) = unbounded();
        let run = move || {
            while let Ok((mut job, borrowed)) = queue.recv() {
                work(&mut job, borrowed);
                // The receiver is gone.
                if reply.send(job).is_err() {
                    return;
                }
            }
        };
        let builder = Builder::new().name(name.to_owned());
        let thread = builder.spawn(run)?;
        Ok(Self {
            jobs: Some(Jobs::ToThread(jobs)),
            done,
            thread: Some(thread),
            open: 0,
        })
    }

    /// A worker without a thread: every job is returned unchanged.
    pub(crate) fn idle() -> Self {
        let (reply, done) = unbounded();
        Self {
            jobs: Some(Jobs::Done(reply)),
            done,
            thread: None,
            open: 0,
        }
    }

    /// Number of jobs sent to the worker whose results the owner has not received.
    pub(crate) fn open(&self) -> usize {
        self.open
    }

    /// Sends a job, and the data that it borrows, to the thread. Fails if the thread is gone.
    pub(crate) fn send(&mut self, job: J, borrowed: B) -> Result<(), Gone> {
        match self.jobs.as_ref().ok_or(Gone)? {
            Jobs::ToThread(jobs) => jobs.send((job, borrowed)).map_err(|_| Gone)?,
            Jobs::Done(reply) => reply.send(job).map_err(|_| Gone)?,
        }
        self.open += 1;
        Ok(())
    }

    /// Waits for the oldest job that was sent and not received.
    pub(crate) fn receive(&mut self) -> Result<J, Gone> {
        let job = self.done.recv().map_err(|_| Gone)?;
        self.open -= 1;
        Ok(job)
    }
}

impl<J, B> Drop for Worker<J, B> {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was already reported as a missing job.
            thread.join().ok();
        }
    }
}

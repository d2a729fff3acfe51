//! A thread that is lent things: they move there and back, so that nothing is shared. `tests/loom` runs it in every
//! order.

use crate::sync::channel::{Receiver, Sender, unbounded};
use crate::sync::thread::{Builder, JoinHandle};

/// The thread has ended, or could not begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gone;

/// A thread that works on each `J`, in the order in which they come, with a `B` that it does not keep.
#[derive(Debug)]
pub(crate) struct Worker<J, B> {
    jobs: Option<Jobs<J, B>>,
    done: Receiver<J>,
    thread: Option<JoinHandle<()>>,
    open: usize,
}

/// What runs the jobs.
#[derive(Debug)]
enum Jobs<J, B> {
    ToThread(Sender<(J, B)>),
    /// No worker: each job is returned at once (dry run).
    Done(Sender<J>),
}

impl<J: Send + 'static, B: Send + 'static> Worker<J, B> {
    /// Starts the thread. `work` gives up what it only borrows before the answer is sent: whoever has the answer owns
    /// everything again.
    pub(crate) fn start(
        name: &str,
        mut work: impl FnMut(&mut J, B) + Send + 'static,
    ) -> Result<Self, Gone> {
        let (jobs, queue) = unbounded::<(J, B)>();
        let (reply, done) = unbounded();
        let run = move || {
            while let Ok((mut job, borrowed)) = queue.recv() {
                work(&mut job, borrowed);
                // Who does not wait for the answer has given up.
                if reply.send(job).is_err() {
                    return;
                }
            }
        };
        let builder = Builder::new().name(name.to_owned());
        let thread = builder.spawn(run).map_err(|_| Gone)?;
        Ok(Self {
            jobs: Some(Jobs::ToThread(jobs)),
            done,
            thread: Some(thread),
            open: 0,
        })
    }

    /// Without a thread: every job comes back as it is.
    pub(crate) fn idle() -> Self {
        let (reply, done) = unbounded();
        Self {
            jobs: Some(Jobs::Done(reply)),
            done,
            thread: None,
            open: 0,
        }
    }

    /// How many are at the thread.
    pub(crate) fn open(&self) -> usize {
        self.open
    }

    /// Hands one over.
    pub(crate) fn send(&mut self, job: J, borrowed: B) -> Result<(), Gone> {
        match self.jobs.as_ref().ok_or(Gone)? {
            Jobs::ToThread(jobs) => jobs.send((job, borrowed)).map_err(|_| Gone)?,
            Jobs::Done(reply) => reply.send(job).map_err(|_| Gone)?,
        }
        self.open += 1;
        Ok(())
    }

    /// Waits for the one that was handed over first of those still there.
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
            // A panic there has shown as a missing answer.
            thread.join().ok();
        }
    }
}

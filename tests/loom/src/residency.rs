//! Loom models of the optimizer in backward. A worker thread reads one copy of a unit's state and writes the other,
//! while the computation reads the weights. Then the copies are swapped, or the plain update runs. Either way all of
//! a unit's state has the same version.

use crate::guarded::Guarded;
use crate::worker::Worker;
use loom::sync::Arc;

/// State of a unit twice, as `engine/src/step/state.rs` has it.
struct State {
    kept: Guarded,
    spare: Guarded,
}

impl State {
    fn new() -> Self {
        Self {
            kept: Guarded::new(0),
            spare: Guarded::new(99),
        }
    }

    fn commit(&mut self) {
        std::mem::swap(&mut self.kept, &mut self.spare);
    }
}

struct WorkerJob {
    unit: usize,
    state: State,
    /// Sequence number of the thread's answer.
    outcome: Option<usize>,
}

type Thread = Worker<WorkerJob, Arc<Guarded>>;

fn start() -> Thread {
    let mut answers = 0;
    let work = move |job: &mut WorkerJob, weights: Arc<Guarded>| {
        // One update adds one to the state and to the weights.
        assert_eq!(job.state.kept.get(), weights.get());
        job.state.spare.set(job.state.kept.get() + 1);
        job.outcome = Some(answers);
        answers += 1;
    };
    Worker::start("early", work).expect("a thread")
}

/// Two units. Clipping in the second update discards the thread's results.
///
/// Fails with: an answer that is sent before the thread gave up the weights (`Worker::start`), a state that is read
/// while it is away (`WorkerJob.state` behind an `Arc`), a commit that is not followed by the weights.
#[test]
fn an_update_in_backward_is_committed_or_redone_after_the_pass() {
    crate::check(3, || {
        let mut weights = [0, 1].map(|_| Arc::new(Guarded::new(0)));
        let mut states = [0, 1].map(|_| Some(State::new()));
        for update in 0..2u64 {
            let mut thread = start();
            for unit in 0..2 {
                let state = states[unit].take().expect("it is here");
                let job = WorkerJob {
                    unit,
                    state,
                    outcome: None,
                };
                thread.send(job, weights[unit].clone()).expect("it lives");
                // Backward continues with the weights from before the update.
                assert_eq!(weights[unit].get(), update);
            }
            for expected in 0..2 {
                let job = thread.receive().expect("an answer");
                assert_eq!((job.unit, job.outcome), (expected, Some(expected)));
                states[job.unit] = Some(job.state);
            }
            assert_eq!(thread.open(), 0);
            let is_kept = update == 0;
            for (state, weights) in states.iter_mut().zip(&mut weights) {
                let state = state.as_mut().expect("it came back");
                match is_kept {
                    true => state.commit(),
                    false => state.kept.set(state.kept.get() + 1),
                }
                // As `Store::commit_in_backward`: neither a lease nor the thread may still hold the weights.
                let weights = Arc::get_mut(weights).expect("nobody else has the weights");
                weights.set(state.kept.get());
                assert_eq!(state.kept.get(), update + 1);
            }
        }
    });
}

/// Fails with: a drop that does not wait for the thread.
#[test]
fn an_abandoned_pass_leaves_no_running_update() {
    crate::check(3, || {
        let mut weights = Arc::new(Guarded::new(0));
        let mut thread = start();
        for unit in 0..2 {
            let job = WorkerJob {
                unit,
                state: State::new(),
                outcome: None,
            };
            thread.send(job, weights.clone()).expect("it lives");
        }
        drop(thread);
        assert!(Arc::get_mut(&mut weights).is_some());
    });
}

//! Loom models of collectives between two ranks over one window. Data is not read before it is published, and not
//! overwritten while it is read. No rank sleeps through the last change.
//!
//! The buffers are loom's cells, which report every access that may overlap with another one. Every collective reuses
//! the same buffers, and the ring has two records, so its records are reused too.

use crate::bell::Bell;
use crate::guarded::Guarded;
use crate::ring::{Record, Ring, RingPhase};
use crate::sync::atomic::{AtomicU32, AtomicU64};
use loom::sync::Arc;
use std::time::Duration;

const RANKS: usize = 2;
const RECORDS: usize = 2;
const FOREVER: Duration = Duration::from_secs(3600);

struct Window {
    bell: Bell,
    rings: [Ring<RECORDS, 1>; RANKS],
    /// Parts of the buffer of each rank.
    parts: [[Guarded; RANKS]; RANKS],
}

impl Window {
    fn new() -> Arc<Self> {
        let zero = || AtomicU64::new(0);
        let record = |_| Record {
            progress: zero(),
            offset: zero(),
            words: [zero()],
        };
        let ring = |_| Ring {
            published: zero(),
            records: std::array::from_fn(record),
        };
        Arc::new(Self {
            bell: Bell {
                events: AtomicU32::new(0),
                sleepers: AtomicU32::new(0),
            },
            rings: std::array::from_fn(ring),
            parts: std::array::from_fn(|_| std::array::from_fn(|_| Guarded::new(0))),
        })
    }

    fn read(&self, rank: usize, part: usize) -> u64 {
        self.parts[rank][part].get()
    }

    fn write(&self, rank: usize, part: usize, value: u64) {
        self.parts[rank][part].set(value);
    }

    fn publish(&self, rank: usize, sequence: u64, words: u64) {
        self.rings[rank].publish(sequence, &[words], rank as u64);
        self.bell.ring();
    }

    fn reach(&self, rank: usize, sequence: u64, phase: RingPhase) {
        self.rings[rank].set_phase(sequence, phase);
        self.bell.ring();
    }

    /// Same wait as `Endpoint::wait_until`.
    fn wait(&self, ready: impl Fn() -> bool) {
        let look = || if ready() { Ok(()) } else { Err(FOREVER) };
        self.bell.until(false, look);
    }

    /// Waits until a record may be reused, as `Endpoint::publish` does.
    fn wait_for_record(&self, sequence: u64) {
        if let Some(reused) = sequence.checked_sub(RECORDS as u64) {
            self.wait(|| {
                self.rings
                    .iter()
                    .all(|ring| ring.reached(reused, RingPhase::Done))
            });
        }
    }
}

/// Runs `rank` as both ranks and waits for both.
fn on_both(window: &Arc<Window>, rank: impl Fn(&Window, usize) + Send + Sync + Clone + 'static) {
    let (there, run) = (window.clone(), rank.clone());
    let other = loom::thread::spawn(move || run(&there, 1));
    rank(window, 0);
    other.join().expect("no rank panics");
}

/// Fails with: `Relaxed` on `published`, `Relaxed` in `Ring::set_phase` or `Ring::reached`, a buffer that is
/// rewritten without waiting for its readers, a `Bell::ring` before the change.
#[test]
fn gathers_read_published_data_and_overwrite_only_data_nobody_reads() {
    crate::check(2, || {
        on_both(&Window::new(), |window, rank| {
            let peer = 1 - rank;
            for sequence in 0..3 {
                window.wait_for_record(sequence);
                window.write(rank, rank, 10 * sequence + rank as u64);
                window.publish(rank, sequence, sequence);
                window.wait(|| window.rings[peer].published(sequence).is_some());
                let (words, offset) = window.rings[peer].published(sequence).expect("published");
                assert_eq!((words, offset), ([sequence], peer as u64));
                assert_eq!(window.read(peer, peer), 10 * sequence + peer as u64);
                window.reach(rank, sequence, RingPhase::Done);
                // The buffer may be reused now.
                window.wait(|| window.rings[peer].reached(sequence, RingPhase::Done));
            }
        });
    });
}

/// Fails with: `Relaxed` in `Ring::reached`, or *reduced* set before the sum.
#[test]
fn sums_are_copied_only_when_complete() {
    crate::check(2, || {
        on_both(&Window::new(), |window, rank| {
            let peer = 1 - rank;
            for sequence in 0..2 {
                window.wait_for_record(sequence);
                for part in 0..RANKS {
                    window.write(rank, part, 1 + rank as u64 + sequence);
                }
                window.publish(rank, sequence, 0);
                window.wait(|| window.rings[peer].published(sequence).is_some());
                let sum = window.read(rank, rank) + window.read(peer, rank);
                window.write(rank, rank, sum);
                window.reach(rank, sequence, RingPhase::Reduced);
                window.wait(|| window.rings[peer].reached(sequence, RingPhase::Reduced));
                // The peer was the only reader of that part of this rank's buffer.
                window.write(rank, peer, window.read(peer, peer));
                window.reach(rank, sequence, RingPhase::Done);
                window.wait(|| window.rings[peer].reached(sequence, RingPhase::Done));
                for part in 0..RANKS {
                    assert_eq!(window.read(rank, part), 3 + 2 * sequence);
                }
            }
        });
    });
}

/// Models the stores and loads without the bell, which would order them as well.
///
/// Fails with: `Release` and `Acquire` in place of `SeqCst` on `published`.
#[test]
fn at_least_one_of_two_differing_ranks_notices() {
    crate::check(3, || {
        let window = Window::new();
        let differs = |window: &Window, rank: usize| {
            window.rings[rank].publish(0, &[7 + rank as u64], 0);
            let peer = window.rings[1 - rank].published(0);
            peer.is_some_and(|(words, _)| words != [7 + rank as u64])
        };
        let there = window.clone();
        let other = loom::thread::spawn(move || differs(&there, 1));
        let here = differs(&window, 0);
        assert!(other.join().expect("no rank panics") || here);
    });
}

/// Fails with: a sleeper that does not look again (`Bell::wait`), an event counter read after the look
/// (`Bell::until`), `AcqRel` and `Acquire` in place of `SeqCst` in `Bell::ring`.
#[test]
fn no_wake_up_of_the_bell_is_lost() {
    crate::check(4, || {
        let window = Window::new();
        let there = window.clone();
        let other = loom::thread::spawn(move || {
            there.reach(1, 0, RingPhase::Published);
            there.reach(1, 0, RingPhase::Done);
        });
        window.wait(|| window.rings[1].reached(0, RingPhase::Published));
        window.wait(|| window.rings[1].reached(0, RingPhase::Done));
        other.join().expect("no rank panics");
    });
}

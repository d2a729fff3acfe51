//! Progress of one rank's collectives, as its peers read it: the number started, and the phases of the last ones.
//! `README.md` has the argument for phases and memory ordering, and `tests/loom` runs them in every order of threads.

use crate::sync::atomic::{
    AtomicU64,
    Ordering::{Acquire, Relaxed, Release, SeqCst},
};

/// How far a rank has come in one collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RingPhase {
    Published = 0,
    /// All-reduce: the own part holds the sum.
    Reduced = 1,
    /// This rank has finished reading other ranks' buffers.
    Done = 2,
}

/// A counter that grows with the sequence first and the phase second. So a record reused for a later collective
/// compares as done.
fn progress_word(sequence: u64, phase: RingPhase) -> u64 {
    (sequence + 1) << 2 | phase as u64
}

/// Shared record of one collective of a rank: progress, buffer offset, and a fingerprint of `WORDS` words.
#[repr(C, align(64))]
pub(super) struct Record<const WORDS: usize> {
    pub(super) progress: AtomicU64,
    pub(super) offset: AtomicU64,
    pub(super) words: [AtomicU64; WORDS],
}

/// Records of the last `RING` collectives of a rank. All zero is the initial state. Only that rank writes them.
#[repr(C, align(128))]
pub(super) struct Ring<const RING: usize, const WORDS: usize> {
    pub(super) published: AtomicU64,
    pub(super) records: [Record<WORDS>; RING],
}

impl<const RING: usize, const WORDS: usize> Ring<RING, WORDS> {
    fn record(&self, sequence: u64) -> &Record<WORDS> {
        &self.records[(sequence % RING as u64) as usize]
    }

    /// Publishes a collective, and with it everything the rank wrote before.
    pub(super) fn publish(&self, sequence: u64, words: &[u64; WORDS], offset: u64) {
        let record = self.record(sequence);
        record.offset.store(offset, Relaxed);
        store_words(&record.words, words);
        record
            .progress
            .store(progress_word(sequence, RingPhase::Published), Release);
        self.published.store(sequence + 1, SeqCst);
    }

    /// Fingerprint and buffer offset of a collective after its publication. The values are valid until the caller marks
    /// that collective as done.
    pub(super) fn published(&self, sequence: u64) -> Option<([u64; WORDS], u64)> {
        if self.started() <= sequence {
            return None;
        }
        let record = self.record(sequence);
        Some((load_words(&record.words), record.offset.load(Relaxed)))
    }

    /// Fingerprint in the record of a collective, whichever collective the record has now.
    pub(super) fn words(&self, sequence: u64) -> [u64; WORDS] {
        load_words(&self.record(sequence).words)
    }

    pub(super) fn set_phase(&self, sequence: u64, phase: RingPhase) {
        self.record(sequence)
            .progress
            .store(progress_word(sequence, phase), Release);
    }

    pub(super) fn reached(&self, sequence: u64, phase: RingPhase) -> bool {
        self.record(sequence).progress.load(Acquire) >= progress_word(sequence, phase)
    }

    /// Number of collectives that this rank has published so far.
    pub(super) fn started(&self) -> u64 {
        self.published.load(SeqCst)
    }
}

pub(super) fn store_words<const N: usize>(to: &[AtomicU64; N], from: &[u64; N]) {
    to.iter()
        .zip(from)
        .for_each(|(word, &value)| word.store(value, Relaxed));
}

pub(super) fn load_words<const N: usize>(from: &[AtomicU64; N]) -> [u64; N] {
    std::array::from_fn(|i| from[i].load(Relaxed))
}

//! State that callers and threads of a disk queue share: free buffers, the order of writes, and counts of requests.
//! `tests/loom` checks all interleavings.

use crate::sync::channel::{Receiver, Sender, unbounded};
use crate::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::ops::Range;
use std::time::{Duration, Instant};

/// Locks even after a panic of another thread, since lists and counts stay valid.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn wait<'a, T>(condition: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condition
        .wait(guard)
        .unwrap_or_else(PoisonError::into_inner)
}

/// Indices of free buffers; the buffer released last is taken first.
#[derive(Debug)]
pub(super) struct Free {
    numbers: Mutex<Vec<usize>>,
    returned: Condvar,
}

impl Free {
    /// Creates the list of `buffers` buffers, all of them free.
    pub(super) fn new(buffers: usize) -> Self {
        Self {
            numbers: Mutex::new((0..buffers).rev().collect()),
            returned: Condvar::new(),
        }
    }

    /// Takes a free buffer and returns its index; waits until there is one.
    pub(super) fn take(&self) -> usize {
        let mut numbers = lock(&self.numbers);
        loop {
            if let Some(number) = numbers.pop() {
                return number;
            }
            numbers = wait(&self.returned, numbers);
        }
    }

    /// Takes a buffer if more than `reserve` are free.
    pub(super) fn try_take(&self, reserve: usize) -> Option<usize> {
        let mut numbers = lock(&self.numbers);
        if numbers.len() <= reserve {
            return None;
        }
        numbers.pop()
    }

    pub(super) fn give_back(&self, number: usize) {
        lock(&self.numbers).push(number);
        self.returned.notify_one();
    }
}

/// Queue of requests to the threads that serve them.
pub(super) struct Requests<J>(Mutex<Option<Sender<J>>>);

impl<J> std::fmt::Debug for Requests<J> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Requests").finish_non_exhaustive()
    }
}

impl<J> Requests<J> {
    /// Creates the queue of requests, and the receiver for its threads.
    pub(super) fn new() -> (Self, Receiver<J>) {
        let (jobs, queue) = unbounded();
        (Self(Mutex::new(Some(jobs))), queue)
    }

    /// Submits the request that `numbered` makes; false after [`Requests::close`]. Numbering and queueing are one
    /// atomic step. A thread that waits for an earlier write therefore knows that another thread already serves it.
    pub(super) fn submit(&self, numbered: impl FnOnce() -> J) -> bool {
        match &*lock(&self.0) {
            Some(jobs) => jobs.send(numbered()).is_ok(),
            None => false,
        }
    }

    /// Closes the queue: the threads end after they have served all submitted requests.
    pub(super) fn close(&self) {
        drop(lock(&self.0).take());
    }
}

/// Writes of an extent that are submitted and not finished, in the order of submission.
#[derive(Debug)]
pub(super) struct Writes {
    open: Mutex<(u64, Vec<(u64, Range<u64>)>)>,
    ended: Condvar,
}

impl Writes {
    pub(super) fn new() -> Self {
        Self {
            open: Mutex::new((0, Vec::new())),
            ended: Condvar::new(),
        }
    }

    /// Adds a write of `blocks`; returns its number in the order.
    pub(super) fn note(&self, blocks: Range<u64>) -> u64 {
        let mut open = lock(&self.open);
        open.0 += 1;
        let id = open.0;
        open.1.push((id, blocks));
        id
    }

    /// Number in the order for a read that is submitted now.
    pub(super) fn order(&self) -> u64 {
        lock(&self.open).0 + 1
    }

    /// Waits for writes before `order` that overlap `blocks`.
    pub(super) fn wait_for(&self, order: u64, blocks: &Range<u64>) {
        let mut open = lock(&self.open);
        let overlaps = |(id, other): &(u64, Range<u64>)| {
            *id < order && other.start < blocks.end && blocks.start < other.end
        };
        while open.1.iter().any(overlaps) {
            open = wait(&self.ended, open);
        }
    }

    pub(super) fn end(&self, id: u64) {
        lock(&self.open).1.retain(|(other, _)| *other != id);
        self.ended.notify_all();
    }
}

/// Traffic of a rank's spill files since their queue was created. [`SpillStats::since`] gives the difference
/// of two readings.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SpillStats {
    /// Bytes read from the spill files.
    pub read_bytes: u64,
    /// Bytes written to the spill files.
    pub written_bytes: u64,
    /// Total time during which at least one disk request was in flight.
    pub busy: Duration,
}

impl SpillStats {
    /// Traffic between the reading `earlier` and this one: the difference of every field, 0 where `earlier` is larger.
    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        Self {
            read_bytes: self.read_bytes.saturating_sub(earlier.read_bytes),
            written_bytes: self.written_bytes.saturating_sub(earlier.written_bytes),
            busy: self.busy.saturating_sub(earlier.busy),
        }
    }

    /// Mean rate in bytes per second of busy time, reads and writes together; 0 without traffic.
    #[must_use]
    pub fn bytes_per_second(self) -> f64 {
        let seconds = self.busy.as_secs_f64();
        if seconds > 0.0 {
            (self.read_bytes + self.written_bytes) as f64 / seconds
        } else {
            0.0
        }
    }
}

#[derive(Debug)]
struct Entries<E> {
    stats: SpillStats,
    under_way: usize,
    busy_since: Option<Instant>,
    open_writes: usize,
    failure: Option<E>,
}

/// Counts of requests, and the first failure of a write.
#[derive(Debug)]
pub(super) struct Book<E> {
    entries: Mutex<Entries<E>>,
    ended: Condvar,
}

impl<E> Book<E> {
    pub(super) fn new() -> Self {
        Self {
            entries: Mutex::new(Entries {
                stats: SpillStats::default(),
                under_way: 0,
                busy_since: None,
                open_writes: 0,
                failure: None,
            }),
            ended: Condvar::new(),
        }
    }

    /// Counts a request that begins; `writes` is 1 for a write, otherwise 0.
    pub(super) fn begin(&self, writes: usize) {
        let mut book = lock(&self.entries);
        book.under_way += 1;
        book.open_writes += writes;
        if book.busy_since.is_none() {
            book.busy_since = Some(Instant::now());
        }
    }

    /// Counts a request that ends, with the bytes it read or wrote.
    pub(super) fn end(&self, read: u64, written: u64, failure: Option<E>) {
        let mut book = lock(&self.entries);
        book.stats.read_bytes += read;
        book.stats.written_bytes += written;
        book.under_way -= 1;
        if written > 0 {
            book.open_writes -= 1;
        }
        if book.under_way == 0
            && let Some(since) = book.busy_since.take()
        {
            book.stats.busy += since.elapsed();
        }
        if book.failure.is_none() {
            book.failure = failure;
        }
        drop(book);
        self.ended.notify_all();
    }

    /// Bytes and busy time so far; a busy interval that has not ended counts up to now.
    pub(super) fn stats(&self) -> SpillStats {
        let book = lock(&self.entries);
        let running = book.busy_since.map_or(Duration::ZERO, |s| s.elapsed());
        SpillStats {
            busy: book.stats.busy + running,
            ..book.stats
        }
    }

    /// Waits until no write is in flight.
    pub(super) fn wait_for_writes(&self) {
        let mut book = lock(&self.entries);
        while book.open_writes > 0 {
            book = wait(&self.ended, book);
        }
    }

    /// Returns the first failure of a write, once.
    pub(super) fn take_failure(&self) -> Option<E> {
        lock(&self.entries).failure.take()
    }
}

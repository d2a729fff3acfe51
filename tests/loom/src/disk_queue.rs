//! Loom models of the disk queue. Every request is served once. A read sees the writes submitted before it. No buffer
//! has two owners. Closing ends the threads. The first failure of a write is reported once.

use crate::guarded::Guarded;
use crate::queue::{Book, Free, Requests, Writes};
use crate::sync::channel::{Receiver, Sender, unbounded};
use loom::sync::Arc;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread::JoinHandle;

enum DiskRequest {
    Read {
        order: u64,
        buffer: usize,
        reply: Sender<u64>,
    },
    Write {
        id: u64,
        buffer: usize,
        fails: Option<&'static str>,
    },
}

/// One block of a disk, and what the queue of `engine/src/offload/spill/io.rs` shares.
struct Disk {
    block: Guarded,
    buffers: Vec<Guarded>,
    free: Free,
    writes: Writes,
    book: Book<&'static str>,
    requests: Requests<DiskRequest>,
    served: AtomicUsize,
}

const BLOCK: std::ops::Range<u64> = 0..1;

impl Disk {
    fn new(buffers: usize, threads: usize) -> (Arc<Self>, Vec<JoinHandle<()>>) {
        let (requests, queue) = Requests::new();
        let disk = Arc::new(Self {
            block: Guarded::new(0),
            buffers: (0..buffers).map(|_| Guarded::new(0)).collect(),
            free: Free::new(buffers),
            writes: Writes::new(),
            book: Book::new(),
            requests,
            served: AtomicUsize::new(0),
        });
        let threads = (0..threads).map(|_| {
            let (disk, queue): (_, Receiver<DiskRequest>) = (disk.clone(), queue.clone());
            loom::thread::spawn(move || {
                while let Ok(job) = queue.recv() {
                    disk.run(job);
                }
            })
        });
        let threads = threads.collect();
        (disk, threads)
    }

    /// Takes a free buffer and fills it with `value`.
    fn buffer(&self, value: u64) -> usize {
        let buffer = self.free.take();
        self.buffers[buffer].set(value);
        buffer
    }

    /// Submits a write as `SpillIo::write` does.
    fn write(&self, value: u64, fails: Option<&'static str>) {
        let buffer = self.buffer(value);
        self.book.begin(1);
        let id = || self.writes.note(BLOCK);
        let submitted = self.requests.submit(|| DiskRequest::Write {
            id: id(),
            buffer,
            fails,
        });
        assert!(submitted);
    }

    /// Submits a read as `SpillIo::read` does.
    fn read(&self) -> Receiver<u64> {
        let buffer = self.buffer(0);
        let (reply, result) = unbounded();
        self.book.begin(0);
        let submitted = self.requests.submit(|| DiskRequest::Read {
            order: self.writes.order(),
            buffer,
            reply,
        });
        assert!(submitted);
        result
    }

    /// As `run` in `engine/src/offload/spill/io.rs`.
    fn run(&self, job: DiskRequest) {
        match job {
            DiskRequest::Read {
                order,
                buffer,
                reply,
            } => {
                self.writes.wait_for(order, &BLOCK);
                let value = self.block.get();
                self.book.end(1, 0, None);
                self.free.give_back(buffer);
                reply.send(value).ok();
            }
            DiskRequest::Write { id, buffer, fails } => {
                self.writes.wait_for(id, &BLOCK);
                let value = self.buffers[buffer].get();
                if fails.is_none() {
                    self.block.set(value);
                }
                self.free.give_back(buffer);
                self.writes.end(id);
                self.book.end(0, 1, fails);
            }
        }
        self.served.fetch_add(1, Ordering::Relaxed);
    }

    /// Ends the threads as dropping `SpillIo` does.
    fn close(&self, threads: Vec<JoinHandle<()>>, expected: usize) {
        self.requests.close();
        for thread in threads {
            thread.join().expect("no thread panics");
        }
        assert_eq!(self.served.load(Ordering::Relaxed), expected);
        assert!(!self.requests.submit(|| unreachable!("it is closed")));
    }
}

/// Fails with: a `Writes::order` or `Writes::wait_for` that ignores the last write, a `Writes::end` before the write.
#[test]
fn a_read_sees_the_writes_before_it_whichever_thread_serves_it() {
    crate::check(2, || {
        let (disk, threads) = Disk::new(3, 2);
        disk.write(1, None);
        disk.write(2, None);
        assert_eq!(disk.read().recv().expect("served"), 2);
        disk.close(threads, 3);
    });
}

/// Fails with: requests that are numbered before `submit` instead of inside it. The only thread then waits for a
/// write that is queued after its own request.
#[test]
fn two_callers_and_one_thread_do_not_wait_for_each_other() {
    crate::check(2, || {
        let (disk, threads) = Disk::new(2, 1);
        let other = disk.clone();
        let other = loom::thread::spawn(move || {
            other.write(1, None);
        });
        let seen = disk.read().recv().expect("served");
        assert!(seen <= 1);
        other.join().expect("no caller panics");
        disk.book.wait_for_writes();
        assert_eq!(disk.read().recv().expect("served"), 1);
        disk.close(threads, 3);
    });
}

/// Fails with: `Free::give_back` without a wake-up, a buffer that is freed before its content is written.
#[test]
fn two_callers_share_one_buffer() {
    crate::check(2, || {
        let (disk, threads) = Disk::new(1, 1);
        let there = disk.clone();
        let other = loom::thread::spawn(move || there.write(1, None));
        disk.write(2, None);
        other.join().expect("no caller panics");
        disk.close(threads, 2);
    });
}

/// Fails with: `Book::end` without a wake-up, or a `Book` that reports the last failure instead of the first.
#[test]
fn the_first_failure_is_reported_once() {
    crate::check(2, || {
        let (disk, threads) = Disk::new(2, 1);
        disk.write(1, Some("first"));
        disk.write(2, Some("second"));
        disk.book.wait_for_writes();
        assert_eq!(disk.book.take_failure(), Some("first"));
        assert_eq!(disk.book.take_failure(), None);
        disk.close(threads, 2);
    });
}

//! The shared byte window: a control block of atomics and one data region per rank.
//!
//! A zero-filled window is a valid initial state, so a new file needs no initialization. `README.md` has the states and
//! the argument for memory ordering.
#![expect(
    unsafe_code,
    reason = "memory shared between processes has no safe representation"
)]

use super::arena::SMALL_BYTES;
use super::bell::Bell;
use super::fingerprint::{Fingerprint, WORDS};
use super::mirror::Remote;
use super::ring::{Ring, load_words, store_words};
use super::{CommError, MAX_RANKS, OpInfo, RankOp, RankStatus};
use memmap2::MmapRaw;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;
use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::time::Duration;

pub(super) use super::ring::RingPhase;

/// Number of records per rank: the largest number of unfinished collectives.
pub(super) const RING: u64 = 64;

/// "TESSERA", layout version 1.
const MAGIC: u64 = u64::from_be_bytes(*b"TESSERA\x01");
const PAGE: usize = 4096;
const REASON_WORDS: usize = 32;

#[repr(C, align(128))]
struct Header {
    magic: AtomicU64,
    world_size: AtomicU64,
    region_bytes: AtomicU64,
    /// Bit mask of the ranks that have joined.
    arrived: AtomicU64,
}

type RankBlock = Ring<{ RING as usize }, WORDS>;

#[repr(C, align(128))]
struct FailureBlock {
    state: AtomicU32,
    cause: AtomicU32,
    rank: AtomicU32,
    other_rank: AtomicU32,
    sequence: AtomicU64,
    elapsed_ns: AtomicU64,
    words: [[AtomicU64; WORDS]; 2],
    reason_bytes: AtomicU64,
    reason: [AtomicU64; REASON_WORDS],
}

#[repr(C)]
struct Control {
    header: Header,
    bell: Bell,
    failure: FailureBlock,
    ranks: [RankBlock; MAX_RANKS],
}

/// Cause of a dead world, which every later collective reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    Abort {
        by_rank: usize,
        reason: String,
    },
    Mismatch {
        sequence: u64,
        ranks: [usize; 2],
        prints: [Fingerprint; 2],
    },
    Timeout {
        by_rank: usize,
        sequence: u64,
        print: Fingerprint,
        elapsed: Duration,
    },
    /// A frame that the first of `ranks` received from the second was changed on the way.
    Altered {
        ranks: [usize; 2],
        sequence: u64,
        /// The collective at `sequence`, where the first rank had started it.
        print: Option<Fingerprint>,
    },
    Rendezvous {
        by_rank: usize,
        arrived: u64,
        elapsed: Duration,
    },
}

/// Number of ranks of a window, and bytes of each rank's part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) ranks: usize,
    pub(super) region_bytes: usize,
}

impl Layout {
    /// A layout with `region_bytes` per rank after the slots for small messages, rounded up to whole pages.
    pub(super) fn new(ranks: usize, region_bytes: usize) -> Self {
        let region_bytes = region_bytes
            .checked_add(SMALL_BYTES)
            .and_then(|bytes| bytes.checked_next_multiple_of(PAGE))
            .unwrap_or(usize::MAX - PAGE + 1);
        Self {
            ranks,
            region_bytes,
        }
    }

    pub(super) fn control_bytes() -> usize {
        size_of::<Control>().next_multiple_of(PAGE)
    }

    /// Saturates if no machine could map the window.
    pub(super) fn total_bytes(self) -> usize {
        self.ranks
            .saturating_mul(self.region_bytes)
            .saturating_add(Self::control_bytes())
    }

    pub(super) fn region(self, rank: usize) -> Range<usize> {
        let start = Self::control_bytes() + rank * self.region_bytes;
        start..start + self.region_bytes
    }
}

/// A window that is mapped in this process: control blocks, and one region of bytes per rank.
pub(super) struct Window {
    map: MmapRaw,
    layout: Layout,
    /// Sender to ranks that do not share this memory.
    remote: OnceLock<Remote>,
    /// Bit mask of the ranks that have ended, if ranks do not share this memory.
    gone: AtomicU64,
}

impl std::fmt::Debug for Window {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Window")
            .field("layout", &self.layout)
            .finish_non_exhaustive()
    }
}

impl Window {
    /// `map` must be zero-filled or already in use as a window, and at least `layout.total_bytes()` long.
    pub(super) fn new(map: MmapRaw, layout: Layout) -> Self {
        assert!(map.len() >= layout.total_bytes() && (1..=MAX_RANKS).contains(&layout.ranks));
        assert_eq!(
            map.as_ptr().align_offset(align_of::<Control>()),
            0,
            "maps are page-aligned"
        );
        Self {
            map,
            layout,
            remote: OnceLock::new(),
            gone: AtomicU64::new(0),
        }
    }

    pub(super) fn layout(&self) -> Layout {
        self.layout
    }

    /// Makes this memory one rank's copy. It is set once, before the first collective.
    pub(super) fn set_remote(&self, remote: Remote) -> &Remote {
        self.remote.get_or_init(|| remote)
    }

    pub(super) fn remote(&self) -> Option<&Remote> {
        self.remote.get()
    }

    #[expect(
        clippy::cast_ptr_alignment,
        reason = "maps are page-aligned, as `new` checks"
    )]
    fn control(&self) -> &Control {
        // SAFETY: `new` checked length and alignment. `Control` consists of atomics only: every bit pattern is valid,
        // and concurrent access from other processes is defined. All references into the control block are to atomics.
        unsafe { &*self.map.as_ptr().cast::<Control>() }
    }

    /// Writes the header of a new window, or compares that of an existing one. `Err` names the field that differs, the
    /// value found and the expected one.
    pub(super) fn check_header(&self) -> Result<(), (&'static str, u64, u64)> {
        let header = &self.control().header;
        let fields = [
            ("magic number", &header.magic, MAGIC),
            ("world size", &header.world_size, self.layout.ranks as u64),
            (
                "region size",
                &header.region_bytes,
                self.layout.region_bytes as u64,
            ),
        ];
        for (what, word, expected) in fields {
            match word.compare_exchange(0, expected, SeqCst, SeqCst) {
                Err(found) if found != expected => return Err((what, found, expected)),
                _ => {}
            }
        }
        Ok(())
    }

    /// Ranks that have arrived, as a bit mask.
    pub(super) fn arrived(&self) -> u64 {
        self.control().header.arrived.load(SeqCst)
    }

    /// Marks `rank` as arrived and returns the previous mask.
    pub(super) fn arrive(&self, rank: usize) -> u64 {
        let before = self.control().header.arrived.fetch_or(1 << rank, SeqCst);
        self.bell().ring();
        before
    }

    /// Takes back the arrival of a rank that died before all had arrived.
    pub(super) fn forget(&self, rank: usize) {
        self.control()
            .header
            .arrived
            .fetch_and(!(1 << rank), SeqCst);
    }

    /// Whether a file starts as a window does. A rank may have died after it sized the file and before it wrote the magic
    /// number.
    pub(super) fn is_in(file: &File) -> io::Result<bool> {
        let mut magic = [0; 8];
        match file.read_exact_at(&mut magic, 0) {
            Ok(()) => Ok([0, MAGIC].contains(&u64::from_ne_bytes(magic))),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
            Err(error) => Err(error),
        }
    }

    pub(super) fn bell(&self) -> &Bell {
        &self.control().bell
    }

    fn ring(&self, rank: usize) -> &RankBlock {
        &self.control().ranks[rank]
    }

    /// Publishes a collective of `rank`, and with it everything the rank wrote before.
    pub(super) fn publish(&self, rank: usize, sequence: u64, print: Fingerprint, offset: usize) {
        self.ring(rank).publish(sequence, &print.0, offset as u64);
        self.bell().ring();
    }

    /// The fingerprint and buffer offset of `rank` at `sequence` after its publication. The values are valid until the
    /// caller marks that sequence as done.
    pub(super) fn published(&self, rank: usize, sequence: u64) -> Option<(Fingerprint, usize)> {
        let (words, offset) = self.ring(rank).published(sequence)?;
        Some((Fingerprint(words), offset as usize))
    }

    pub(super) fn set_phase(&self, rank: usize, sequence: u64, phase: RingPhase) {
        self.ring(rank).set_phase(sequence, phase);
        self.bell().ring();
    }

    pub(super) fn reached(&self, rank: usize, sequence: u64, phase: RingPhase) -> bool {
        self.ring(rank).reached(sequence, phase)
    }

    /// Marks that `rank` has ended and publishes nothing more.
    pub(super) fn set_gone(&self, rank: usize) {
        self.gone.fetch_or(1 << rank, SeqCst);
        self.bell().ring();
    }

    /// Ranks that have ended, as a bit mask.
    pub(super) fn gone(&self) -> u64 {
        self.gone.load(SeqCst)
    }

    /// Number of collectives that `rank` has published.
    pub(super) fn started(&self, rank: usize) -> u64 {
        self.ring(rank).started()
    }

    /// Whether none of the ranks in the bit mask still reads buffers of `sequence`.
    pub(super) fn all_done(&self, ranks: u64, sequence: u64) -> bool {
        (0..self.layout.ranks)
            .all(|rank| ranks >> rank & 1 == 0 || self.reached(rank, sequence, RingPhase::Done))
    }

    /// Last collective of every rank. For a running rank it may mix two collectives.
    pub(super) fn statuses(&self) -> Vec<RankStatus> {
        let status = |rank: usize| {
            let started = self.started(rank);
            let last = started
                .checked_sub(1)
                .and_then(|sequence| Fingerprint(self.ring(rank).words(sequence)).describe());
            RankStatus {
                rank,
                started,
                last,
            }
        };
        (0..self.layout.ranks).map(status).collect()
    }

    /// Declares the world dead and returns the cause. The first cause is stored.
    pub(super) fn fail(&self, failure: Failure) -> Failure {
        let winner = self.fail_silently(failure);
        if let Some(remote) = self.remote() {
            remote.failed(&winner);
        }
        winner
    }

    /// As [`Window::fail`], without a message to ranks that do not share this memory.
    pub(super) fn fail_silently(&self, failure: Failure) -> Failure {
        let block = &self.control().failure;
        let is_first = block.state.compare_exchange(0, 1, SeqCst, SeqCst).is_ok();
        if is_first {
            block.write(&failure);
            block.state.store(2, SeqCst);
        }
        self.bell().ring();
        // Another rank may be writing its cause now, or may have died while writing it.
        let winner = (0..1000).find_map(|_| {
            std::thread::yield_now();
            self.failure()
        });
        winner.unwrap_or(failure)
    }

    /// Cause of death, if the world is dead.
    pub(super) fn failure(&self) -> Option<Failure> {
        let block = &self.control().failure;
        (block.state.load(Acquire) == 2).then(|| block.read())
    }

    fn checked_offset(&self, rank: usize, offset: usize, range: &Range<usize>) -> usize {
        let end = offset
            .checked_add(range.end)
            .expect("offsets are far below the address space");
        assert!(
            rank < self.layout.ranks && range.start <= range.end && end <= self.layout.region_bytes,
            "bytes {range:?} at {offset} lie outside the region of rank {rank}"
        );
        self.layout.region(rank).start + offset + range.start
    }

    /// Bytes `range` of the buffer at `offset` in the region of `rank`.
    ///
    /// # Safety
    /// Nobody writes these bytes while the slice lives.
    pub(super) unsafe fn bytes(&self, rank: usize, offset: usize, range: Range<usize>) -> &[u8] {
        let start = self.checked_offset(rank, offset, &range);
        // SAFETY: the range is inside the map, which is initialized (zero-filled) memory and lives as long as `self`.
        // The caller excludes writers.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().add(start), range.len()) }
    }

    /// As [`Window::bytes`], for writing.
    ///
    /// # Safety
    /// Nobody else reads or writes these bytes while the slice lives.
    #[expect(
        clippy::mut_from_ref,
        reason = "exclusive access is the caller's promise"
    )]
    pub(super) unsafe fn bytes_mut(
        &self,
        rank: usize,
        offset: usize,
        range: Range<usize>,
    ) -> &mut [u8] {
        let start = self.checked_offset(rank, offset, &range);
        // SAFETY: as in `bytes`. The map is writable, and the caller excludes every other access.
        unsafe { std::slice::from_raw_parts_mut(self.map.as_mut_ptr().add(start), range.len()) }
    }
}

const ABORT: u32 = 1;
const MISMATCH: u32 = 2;
const TIMEOUT: u32 = 3;
const RENDEZVOUS: u32 = 4;
const ALTERED: u32 = 5;

impl FailureBlock {
    fn write(&self, failure: &Failure) {
        let set = |cause: u32, rank: usize, sequence: u64, elapsed: Duration| {
            self.cause.store(cause, Relaxed);
            self.rank.store(rank as u32, Relaxed);
            self.sequence.store(sequence, Relaxed);
            self.elapsed_ns.store(elapsed.as_nanos() as u64, Relaxed);
        };
        match failure {
            Failure::Abort { by_rank, reason } => {
                set(ABORT, *by_rank, 0, Duration::ZERO);
                self.write_reason(reason);
            }
            Failure::Mismatch {
                sequence,
                ranks,
                prints,
            } => {
                set(MISMATCH, ranks[0], *sequence, Duration::ZERO);
                self.other_rank.store(ranks[1] as u32, Relaxed);
                store_words(&self.words[0], &prints[0].0);
                store_words(&self.words[1], &prints[1].0);
            }
            Failure::Timeout {
                by_rank,
                sequence,
                print,
                elapsed,
            } => {
                set(TIMEOUT, *by_rank, *sequence, *elapsed);
                store_words(&self.words[0], &print.0);
            }
            Failure::Altered {
                ranks,
                sequence,
                print,
            } => {
                set(ALTERED, ranks[0], *sequence, Duration::ZERO);
                self.other_rank.store(ranks[1] as u32, Relaxed);
                // A fingerprint is never 0.
                store_words(&self.words[0], &print.map_or([0; WORDS], |print| print.0));
            }
            Failure::Rendezvous {
                by_rank,
                arrived,
                elapsed,
            } => {
                set(RENDEZVOUS, *by_rank, *arrived, *elapsed);
            }
        }
    }

    fn read(&self) -> Failure {
        let by_rank = self.rank.load(Relaxed) as usize;
        let sequence = self.sequence.load(Relaxed);
        let elapsed = Duration::from_nanos(self.elapsed_ns.load(Relaxed));
        let print = |i: usize| Fingerprint(load_words(&self.words[i]));
        match self.cause.load(Relaxed) {
            MISMATCH => {
                let ranks = [by_rank, self.other_rank.load(Relaxed) as usize];
                Failure::Mismatch {
                    sequence,
                    ranks,
                    prints: [print(0), print(1)],
                }
            }
            TIMEOUT => Failure::Timeout {
                by_rank,
                sequence,
                print: print(0),
                elapsed,
            },
            ALTERED => Failure::Altered {
                ranks: [by_rank, self.other_rank.load(Relaxed) as usize],
                sequence,
                print: Some(print(0)).filter(|print| print.0 != [0; WORDS]),
            },
            RENDEZVOUS => Failure::Rendezvous {
                by_rank,
                arrived: sequence,
                elapsed,
            },
            _ => Failure::Abort {
                by_rank,
                reason: self.read_reason(),
            },
        }
    }

    fn write_reason(&self, reason: &str) {
        let limit = reason.len().min(REASON_WORDS * 8);
        let end = (0..=limit)
            .rev()
            .find(|&end| reason.is_char_boundary(end))
            .unwrap_or(0);
        let bytes = &reason.as_bytes()[..end];
        for (word, chunk) in self.reason.iter().zip(bytes.chunks(8)) {
            let mut padded = [0; 8];
            padded[..chunk.len()].copy_from_slice(chunk);
            word.store(u64::from_le_bytes(padded), Relaxed);
        }
        self.reason_bytes.store(bytes.len() as u64, Relaxed);
    }

    fn read_reason(&self) -> String {
        let mut bytes = load_words(&self.reason).map(u64::to_le_bytes).concat();
        bytes.truncate(self.reason_bytes.load(Relaxed) as usize);
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

impl Failure {
    /// The error that every rank reports.
    pub(super) fn error(&self, window: &Window) -> CommError {
        match self {
            Self::Abort { by_rank, reason } => CommError::Aborted {
                by_rank: *by_rank,
                reason: reason.clone(),
            },
            Self::Mismatch {
                sequence,
                ranks,
                prints,
            } => {
                let side = |i: usize| {
                    Box::new(RankOp {
                        rank: ranks[i],
                        op: describe(&prints[i]),
                    })
                };
                CommError::Mismatch {
                    sequence: *sequence,
                    first: side(0),
                    second: side(1),
                }
            }
            Self::Timeout {
                by_rank,
                sequence,
                print,
                elapsed,
            } => CommError::Timeout {
                noticed_by: *by_rank,
                sequence: *sequence,
                op: Box::new(describe(print)),
                elapsed: *elapsed,
                ranks: window.statuses(),
            },
            Self::Altered {
                ranks,
                sequence,
                print,
            } => CommError::Altered {
                noticed_by: ranks[0],
                from: ranks[1],
                sequence: *sequence,
                op: print.as_ref().map(|print| Box::new(describe(print))),
            },
            Self::Rendezvous {
                arrived, elapsed, ..
            } => {
                let (arrived, missing) =
                    (0..window.layout.ranks).partition(|rank| arrived >> rank & 1 == 1);
                CommError::Rendezvous {
                    arrived,
                    missing,
                    elapsed: *elapsed,
                }
            }
        }
    }
}

fn describe(print: &Fingerprint) -> OpInfo {
    print
        .describe()
        .expect("ranks with the same magic number write fingerprints alike")
}

#[cfg(test)]
mod tests {
    use super::super::{Collective, CollectiveKind, Tag};
    use super::*;
    use kernels::DType;
    use memmap2::MmapMut;
    use std::time::Instant;

    fn window(ranks: usize) -> Window {
        let layout = Layout::new(ranks, 1);
        Window::new(
            MmapMut::map_anon(layout.total_bytes()).unwrap().into(),
            layout,
        )
    }

    fn print(bytes: usize) -> Fingerprint {
        let tag = Tag::new("test", 0);
        let op = Collective::new(CollectiveKind::AllGather, DType::F32, tag);
        Fingerprint::new(&op, bytes).unwrap()
    }

    #[test]
    fn a_reused_record_counts_as_done_for_the_earlier_collective() {
        let window = window(1);
        window.publish(0, 5, print(1), 0);
        assert!(!window.reached(0, 5, RingPhase::Done));
        window.set_phase(0, 5, RingPhase::Done);
        assert!(window.reached(0, 5, RingPhase::Done));
        window.publish(0, 5 + RING, print(2), 0);
        assert!(window.reached(0, 5, RingPhase::Done));
        assert!(!window.reached(0, 5 + RING, RingPhase::Reduced));
    }

    #[test]
    fn the_first_failure_wins_and_survives_the_round_trip() {
        let failures = [
            Failure::Abort {
                by_rank: 2,
                reason: "é".repeat(200),
            },
            Failure::Mismatch {
                sequence: 9,
                ranks: [0, 3],
                prints: [print(1), print(2)],
            },
            Failure::Timeout {
                by_rank: 1,
                sequence: 4,
                print: print(3),
                elapsed: Duration::from_millis(1500),
            },
            Failure::Altered {
                ranks: [1, 0],
                sequence: 7,
                print: Some(print(4)),
            },
            Failure::Altered {
                ranks: [0, 1],
                sequence: 0,
                print: None,
            },
            Failure::Rendezvous {
                by_rank: 1,
                arrived: 2,
                elapsed: Duration::from_secs(1),
            },
        ];
        for failure in failures {
            let window = window(2);
            assert_eq!(window.failure(), None);
            window.fail(failure.clone());
            let mut expected = failure;
            if let Failure::Abort { reason, .. } = &mut expected {
                reason.truncate(256);
            }
            let later = Failure::Abort {
                by_rank: 1,
                reason: "later".to_owned(),
            };
            assert_eq!(window.fail(later), expected);
            assert_eq!(window.failure(), Some(expected));
        }
    }

    #[test]
    fn headers_of_different_layouts_conflict() {
        let mut window = window(2);
        assert_eq!(window.check_header(), Ok(()));
        assert_eq!(window.check_header(), Ok(()));
        window.layout.ranks = 1;
        assert_eq!(window.check_header(), Err(("world size", 2, 1)));
    }

    #[test]
    fn a_wait_returns_when_the_bell_rang_before_it() {
        let window = window(1);
        let seen = window.bell().events();
        window.bell().ring();
        let started = Instant::now();
        window.bell().wait(seen, Duration::from_secs(60), false);
        assert!(started.elapsed() < Duration::from_secs(30));
    }

    #[test]
    #[should_panic(expected = "outside the region")]
    fn offsets_beyond_a_region_are_refused() {
        let window = window(2);
        // SAFETY: nobody else uses this window; the call panics before it forms a slice.
        let _bytes = unsafe { window.bytes(0, SMALL_BYTES + 4096, 0..1) };
    }
}

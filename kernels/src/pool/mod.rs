//! Accounted memory: every byte of a tensor is counted under a tag, against a capacity.
//!
//! The pool keeps freed memory and reuses it, so no page is faulted in after warm-up. (The first touch of a page
//! costs two to four times an Adam step on the same bytes.) The address of a block depends only on the order in
//! which blocks come and go. So a pool of the meta device gets the same addresses as a pool with memory.

mod allocator;
mod mapping;
mod memory_plan;

use crate::error::{KernelError, Result};
use allocator::{Allocation, Allocator};
use mapping::{LINE_BYTES, Mapping};
pub use memory_plan::MemoryPlan;
use memory_plan::Recorder;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Purpose of a block of memory. The pool counts bytes per tag.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub enum Tag {
    /// Shards of weights that a rank owns.
    Parameters,
    /// Weights gathered for use (FSDP's unsharded parameters).
    Gathered,
    /// Gradients, in buckets or accumulated.
    Gradients,
    /// Master weights and optimizer state.
    Optimizer,
    /// Inputs and outputs of operations.
    Activations,
    /// Temporary buffers inside one operation.
    Workspace,
    /// Shared segments of communicators.
    Communication,
    /// Key/value cache of generation.
    Cache,
    /// In plans only: margin for batches whose blocks pack less densely than those of the planned batch.
    Margin,
}

impl Tag {
    /// Every tag, in display order.
    pub const ALL: [Self; 9] = [
        Self::Parameters,
        Self::Gathered,
        Self::Gradients,
        Self::Optimizer,
        Self::Activations,
        Self::Workspace,
        Self::Communication,
        Self::Cache,
        Self::Margin,
    ];

    /// Name of the tag in lower case, e.g. `parameters`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Parameters => "parameters",
            Self::Gathered => "gathered",
            Self::Gradients => "gradients",
            Self::Optimizer => "optimizer",
            Self::Activations => "activations",
            Self::Workspace => "workspace",
            Self::Communication => "communication",
            Self::Cache => "cache",
            Self::Margin => "margin",
        }
    }
}

impl std::fmt::Display for Tag {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Memory statistics of one tag of a pool: bytes in use now, and maxima.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TagBytes {
    /// Bytes in use now under the tag.
    pub in_use: u64,
    /// Maximum number of bytes in use under the tag at one time, since the last [`Pool::reset_peaks`].
    pub peak: u64,
    /// Bytes in use under the tag when the total over all tags was at its maximum: the tag's share of
    /// [`PoolStats::peak`].
    pub at_peak: u64,
}

/// Memory statistics of one pool at the time of [`Pool::stats`]: bytes in use, maxima, and abandoned plans.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PoolStats {
    /// Statistics of each tag, in the order of [`Tag::ALL`].
    pub by_tag: [TagBytes; 9],
    /// Bytes of the pool in use now, over all tags.
    pub in_use: u64,
    /// Maximum of [`PoolStats::in_use`] since the last [`Pool::reset_peaks`].
    pub peak: u64,
    /// High-water mark in bytes of the range that the pool's blocks occupy, since the pool was created. Freed
    /// memory counts, because the pool keeps it. Bytes reserved with [`Pool::reserve`] do not count.
    pub touched: u64,
    /// Maximum, since the pool was created, of [`PoolStats::touched`] plus the bytes reserved with
    /// [`Pool::reserve`] at that time. The capacity of the pool bounds this number.
    pub held: u64,
    /// Number of memory plans, since the pool was created, that were abandoned because a block differed from
    /// the planned one.
    pub strays: u64,
}

impl PoolStats {
    /// Statistics of the tag `tag`: the entry of [`PoolStats::by_tag`] for it.
    #[must_use]
    pub fn tag(&self, tag: Tag) -> TagBytes {
        self.by_tag[tag as usize]
    }

    /// Counts bytes taken. A new maximum of the total also records each tag's share.
    fn add(&mut self, tag: Tag, bytes: u64) {
        self.in_use += bytes;
        let of_tag = &mut self.by_tag[tag as usize];
        of_tag.in_use += bytes;
        of_tag.peak = of_tag.peak.max(of_tag.in_use);
        if self.in_use > self.peak {
            self.peak = self.in_use;
            for tag in &mut self.by_tag {
                tag.at_peak = tag.in_use;
            }
        }
    }
}

/// Entry of a pool's event log: bytes that were allocated or freed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PoolEvent {
    /// Tag of the bytes that were allocated or freed.
    pub tag: Tag,
    /// Number of bytes: positive when allocated, negative when freed.
    pub bytes: i64,
    /// Bytes of the pool in use after the event, over all tags.
    pub in_use: u64,
}

const EVENT_LOG: usize = 4096;

#[derive(Default)]
struct Inner {
    stats: PoolStats,
    allocator: Allocator,
    /// Bytes of the pool's own blocks; the rest of `in_use` is reserved elsewhere.
    placed: u64,
    /// Mapped memory per segment. Empty on the meta device.
    memory: Vec<Option<Arc<Mapping>>>,
    events: VecDeque<PoolEvent>,
    recorder: Option<Recorder>,
    following: Option<Following>,
}

/// Memory plan that the pool is following, where it starts, and the number of the next block.
struct Following {
    memory_plan: Arc<MemoryPlan>,
    base: usize,
    next: usize,
}

impl Inner {
    /// Offset that the memory plan gives the next block, if the block has the planned size. A block that differs ends
    /// the plan; later blocks are placed by best fit.
    fn scripted(&mut self, lines: usize) -> Option<usize> {
        let following = self.following.as_mut()?;
        let next = following.memory_plan.block(following.next);
        following.next += 1;
        let start = next
            .filter(|(planned, _)| *planned == lines)
            .map(|(_, start)| following.base + start)
            .filter(|start| self.allocator.is_free(*start, lines));
        if start.is_none() {
            self.following = None;
            self.stats.strays += 1;
        }
        start
    }

    /// Bytes that exist for this pool: high-water mark of its blocks plus bytes reserved elsewhere.
    fn held(&self) -> u64 {
        self.stats.touched + self.stats.in_use - self.placed
    }
}

struct Shared {
    name: &'static str,
    capacity: Option<u64>,
    /// Whether blocks are offsets in an arena that another object owns, e.g. GPU memory.
    arena: bool,
    inner: Mutex<Inner>,
}

/// Memory pool that allocates blocks, counts their bytes by tag, and limits them. Clones share one pool.
#[derive(Clone)]
pub struct Pool(Arc<Shared>);

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool")
            .field("name", &self.0.name)
            .field("stats", &self.stats())
            .finish()
    }
}

impl Pool {
    /// Pool that is called `name` in messages. Its blocks and reservations may take at most `capacity` bytes
    /// together; `None` for no limit.
    #[must_use]
    pub fn new(name: &'static str, capacity: Option<u64>) -> Self {
        Self(Arc::new(Shared {
            name,
            capacity,
            arena: false,
            inner: Mutex::default(),
        }))
    }

    /// Pool of offsets in an arena of `bytes` bytes, which another object owns.
    #[cfg(feature = "cuda")]
    pub(crate) fn arena(name: &'static str, bytes: u64) -> Self {
        let lines = bytes as usize / LINE_BYTES;
        Self(Arc::new(Shared {
            name,
            capacity: Some(bytes),
            arena: true,
            inner: Mutex::new(Inner {
                allocator: Allocator::within(lines),
                ..Inner::default()
            }),
        }))
    }

    /// Name of the pool in error messages, e.g. `GPU`.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.0.name
    }

    /// Limit in bytes on the pool's blocks and reservations together. `None` if there is no limit.
    #[must_use]
    pub fn capacity(&self) -> Option<u64> {
        self.0.capacity
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // A panic in another thread leaves only counters behind, which stay usable.
        self.0.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts `bytes` bytes as in use that are not the pool's own blocks, such as memory maps and shared
    /// segments, until the reservation is dropped.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`] when the capacity would be exceeded.
    pub fn reserve(&self, bytes: u64, tag: Tag) -> Result<Reservation> {
        let mut inner = self.lock();
        self.check(&inner, bytes, bytes, tag)?;
        inner.stats.add(tag, bytes);
        inner.stats.held = inner.stats.held.max(inner.held());
        log(&mut inner, tag, bytes as i64);
        drop(inner);
        Ok(Reservation {
            pool: self.clone(),
            bytes,
            tag,
        })
    }

    /// Checks that `growth` more bytes stay within the capacity. `asked` is the size in the error.
    fn check(&self, inner: &Inner, asked: u64, growth: u64, tag: Tag) -> Result<()> {
        let capacity = self.0.capacity.unwrap_or(u64::MAX);
        if inner.held().saturating_add(growth) <= capacity {
            return Ok(());
        }
        Err(KernelError::OutOfMemory {
            pool: self.0.name,
            tag,
            asked_bytes: asked,
            in_use_bytes: inner.held(),
            capacity_bytes: capacity,
            breakdown: breakdown(&inner.stats),
        })
    }

    /// Allocates an offset for a block of at least `bytes` bytes, without memory.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`] when the capacity would be exceeded.
    pub(crate) fn place(&self, bytes: usize, tag: Tag) -> Result<Allocated> {
        let mut inner = self.lock();
        let lines = bytes.div_ceil(LINE_BYTES).max(1);
        let counted = (lines * LINE_BYTES) as u64;
        let scripted = inner.scripted(lines);
        let growth = match scripted {
            Some(start) => Some(inner.allocator.growth_from(start, lines)),
            None => inner.allocator.growth(lines),
        };
        // No free range that is long enough counts as exceeding the capacity.
        let growth = growth.map_or(u64::MAX, |lines| (lines * LINE_BYTES) as u64);
        self.check(&inner, counted, growth, tag)?;
        let place = match scripted {
            Some(start) => inner.allocator.take_at(start, lines),
            None => inner.allocator.take(lines),
        };
        if let Some(recorder) = &mut inner.recorder {
            recorder.took(place.start, lines);
        }
        Ok(self.placed(inner, place, tag))
    }

    /// Allocates an offset at the upper end of the arena, away from the blocks of a pass. For blocks that outlive a
    /// pass and may grow.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`] when the capacity would be exceeded.
    #[cfg(feature = "cuda")]
    pub(crate) fn place_apart(&self, bytes: usize, tag: Tag) -> Result<Allocated> {
        let mut inner = self.lock();
        let lines = bytes.div_ceil(LINE_BYTES).max(1);
        let growth = inner.allocator.upper_growth(lines);
        let growth = growth.map_or(u64::MAX, |lines| (lines * LINE_BYTES) as u64);
        self.check(&inner, (lines * LINE_BYTES) as u64, growth, tag)?;
        let place = inner.allocator.take_upper(lines);
        Ok(self.placed(inner, place, tag))
    }

    fn placed(&self, mut inner: MutexGuard<'_, Inner>, place: Allocation, tag: Tag) -> Allocated {
        let counted = (place.lines * LINE_BYTES) as u64;
        inner.stats.touched = (inner.allocator.touched() * LINE_BYTES) as u64;
        inner.placed += counted;
        inner.stats.add(tag, counted);
        inner.stats.held = inner.stats.held.max(inner.held());
        log(&mut inner, tag, counted as i64);
        drop(inner);
        Allocated {
            place,
            counted: Reservation {
                pool: self.clone(),
                bytes: counted,
                tag,
            },
        }
    }

    /// Starts recording which blocks are allocated and freed, until [`Pool::recorded`]. Pools of host memory
    /// do not record.
    pub fn record(&self) {
        let mut inner = self.lock();
        let base = inner.allocator.end();
        inner.recorder = self.0.arena.then(|| Recorder::new(base));
    }

    /// Stops recording and returns a static memory plan for the recorded blocks, packed by their lifetimes.
    /// Empty without a preceding [`Pool::record`].
    pub fn recorded(&self) -> MemoryPlan {
        let recorder = self.lock().recorder.take();
        recorder.map(Recorder::memory_plan).unwrap_or_default()
    }

    /// Places the next blocks at the offsets of the memory plan `memory_plan`, counted from the current end
    /// of the used range. `None` returns to best fit. A block that differs from the plan ends it (see
    /// [`PoolStats::strays`]); that block and later ones are placed by best fit. Pools of host memory ignore
    /// the plan.
    pub fn follow(&self, memory_plan: Option<Arc<MemoryPlan>>) {
        let mut inner = self.lock();
        let base = inner.allocator.end();
        let memory_plan = memory_plan.filter(|_| self.0.arena);
        inner.following = memory_plan.map(|memory_plan| Following {
            memory_plan,
            base,
            next: 0,
        });
    }

    /// Allocates a block of host memory of at least `bytes` bytes with unspecified contents.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`] when the capacity would be exceeded or the operating system refuses memory.
    /// [`KernelError::Elsewhere`] for a pool of device memory, which the host cannot write.
    pub fn take(&self, bytes: usize, tag: Tag) -> Result<Block> {
        if self.0.arena {
            return Err(KernelError::Elsewhere {
                op: "take a block",
                shape: [bytes].into(),
            });
        }
        let placed = self.place(bytes, tag)?;
        let memory = self.memory(placed.place.segment, &placed.counted)?;
        Ok(Block {
            memory,
            len: bytes,
            placed,
        })
    }

    /// Memory of a segment, mapped on first use.
    fn memory(&self, segment: usize, asked: &Reservation) -> Result<Arc<Mapping>> {
        let mut inner = self.lock();
        if inner.memory.len() <= segment {
            inner.memory.resize(segment + 1, None);
        }
        if let Some(memory) = &inner.memory[segment] {
            return Ok(memory.clone());
        }
        let lines = inner.allocator.segment_lines(segment);
        let Ok(memory) = Mapping::map(lines) else {
            return Err(KernelError::OutOfMemory {
                pool: self.0.name,
                tag: asked.tag,
                asked_bytes: (lines * LINE_BYTES) as u64,
                in_use_bytes: inner.held(),
                capacity_bytes: self.0.capacity.unwrap_or(u64::MAX),
                breakdown: breakdown(&inner.stats),
            });
        };
        let memory = Arc::new(memory);
        inner.memory[segment] = Some(memory.clone());
        Ok(memory)
    }

    /// Bytes in use now and their maxima, in total and by tag.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        self.lock().stats.clone()
    }

    /// Sets [`PoolStats::peak`] and the maxima of each tag to the bytes in use now.
    pub fn reset_peaks(&self) {
        let stats = &mut self.lock().stats;
        stats.peak = stats.in_use;
        for tag in &mut stats.by_tag {
            tag.peak = tag.in_use;
            tag.at_peak = tag.in_use;
        }
    }

    /// Log of the last 4096 allocations and frees, oldest first, reservations included.
    #[must_use]
    pub fn events(&self) -> Vec<PoolEvent> {
        self.lock().events.iter().copied().collect()
    }
}

fn log(inner: &mut Inner, tag: Tag, bytes: i64) {
    if inner.events.len() == EVENT_LOG {
        inner.events.pop_front();
    }
    let in_use = inner.stats.in_use;
    inner.events.push_back(PoolEvent { tag, bytes, in_use });
}

fn breakdown(stats: &PoolStats) -> Vec<(Tag, u64)> {
    let tags = Tag::ALL.into_iter();
    tags.map(|tag| (tag, stats.tag(tag).in_use))
        .filter(|(_, bytes)| *bytes > 0)
        .collect()
}

/// Reservation of bytes in a pool without a block, e.g. for a memory map: the pool counts them as in use
/// until the reservation is dropped.
#[derive(Debug)]
pub struct Reservation {
    pool: Pool,
    bytes: u64,
    tag: Tag,
}

impl Reservation {
    /// Number of bytes that this reservation counts as in use.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut inner = self.pool.lock();
        inner.stats.in_use -= self.bytes;
        inner.stats.by_tag[self.tag as usize].in_use -= self.bytes;
        log(&mut inner, self.tag, -(self.bytes as i64));
    }
}

/// Allocated range of a pool. Dropping it frees the range.
#[derive(Debug)]
pub(crate) struct Allocated {
    place: Allocation,
    counted: Reservation,
}

#[cfg(feature = "cuda")]
impl Allocated {
    /// Offset of the range from the start of the arena, in bytes.
    pub(crate) fn offset(&self) -> u64 {
        (self.place.start * LINE_BYTES) as u64
    }

    /// Size in bytes, a multiple of the line size.
    pub(crate) fn bytes(&self) -> u64 {
        self.counted.bytes
    }
}

impl Drop for Allocated {
    fn drop(&mut self) {
        let mut inner = self.counted.pool.lock();
        inner.placed -= self.counted.bytes;
        if let Some(recorder) = &mut inner.recorder {
            recorder.gave_back(self.place.start);
        }
        inner.allocator.give_back(self.place);
    }
}

/// Block of host memory that a [`Pool`] allocated, aligned to 64 bytes. Dropping it frees the memory.
#[derive(Debug)]
pub struct Block {
    memory: Arc<Mapping>,
    len: usize,
    placed: Allocated,
}

#[expect(
    unsafe_code,
    reason = "blocks are disjoint parts of one map, which the borrow checker cannot see"
)]
impl Block {
    /// Content of the block, for reading: as many bytes as were asked for.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        // SAFETY: no other block has this range until `placed` is dropped, and writing needs `&mut self`.
        unsafe { self.memory.bytes(self.placed.place, self.len) }
    }

    /// Content of the block, for writing: as many bytes as were asked for.
    #[must_use]
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_bytes`; `&mut self` excludes every other slice of this block.
        unsafe { self.memory.bytes_mut(self.placed.place, self.len) }
    }
}

impl AsRef<[u8]> for Block {
    fn as_ref(&self) -> &[u8] {
        self.as_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pool_counts_by_tag_and_remembers_the_peak() {
        let pool = Pool::new("device", None);
        let a = pool.take(1000, Tag::Activations).unwrap();
        let b = pool.reserve(500, Tag::Gathered).unwrap();
        assert_eq!(a.as_bytes().len(), 1000);
        assert_eq!(pool.stats().in_use, 1024 + 500);
        drop(a);
        drop(b);
        let stats = pool.stats();
        assert_eq!((stats.in_use, stats.peak, stats.touched), (0, 1524, 1024));
        assert_eq!(
            stats.tag(Tag::Activations),
            TagBytes {
                in_use: 0,
                peak: 1024,
                at_peak: 1024
            }
        );
        assert_eq!(pool.events().len(), 4);
    }

    #[test]
    fn the_peak_is_broken_down_by_tag() {
        let pool = Pool::new("device", None);
        let shares = || {
            let stats = pool.stats();
            let of = |tag| stats.tag(tag).at_peak;
            assert_eq!(
                stats.by_tag.iter().map(|t| t.at_peak).sum::<u64>(),
                stats.peak
            );
            [Tag::Activations, Tag::Gathered, Tag::Workspace].map(of)
        };
        let kept = pool.reserve(100, Tag::Gathered).unwrap();
        drop(pool.reserve(1000, Tag::Activations).unwrap());
        // More workspace than at the peak, but a lower total.
        drop(pool.reserve(900, Tag::Workspace).unwrap());
        assert_eq!(shares(), [1000, 100, 0]);
        pool.reset_peaks();
        assert_eq!(shares(), [0, 100, 0]);
        drop(pool.reserve(10, Tag::Workspace).unwrap());
        assert_eq!(shares(), [0, 100, 10]);
        drop(kept);
    }

    #[test]
    fn the_pool_refuses_to_exceed_its_capacity_and_names_its_users() {
        let pool = Pool::new("device", Some(4096));
        let held = pool.take(4000, Tag::Optimizer).unwrap();
        let error = pool.take(4096, Tag::Workspace).unwrap_err().to_string();
        assert!(error.contains("optimizer 4032"), "{error}");
        drop(held);
        pool.take(4096, Tag::Workspace).unwrap();
    }

    #[test]
    fn the_bytes_of_the_pool_never_exceed_its_capacity() {
        let pool = Pool::new("device", Some(8192));
        for bytes in [4096, 2048, 8192, 1024, 6000] {
            drop(pool.take(bytes, Tag::Workspace).unwrap());
        }
        assert_eq!(pool.stats().touched, 8192);
        // The pool keeps the memory that its blocks have touched.
        assert!(pool.reserve(1, Tag::Communication).is_err());
        assert!(pool.take(8193, Tag::Workspace).is_err());
    }

    #[test]
    fn a_pool_that_only_counts_assigns_the_same_offsets() {
        let sizes = [900_000usize, 4096, 70_000, 33, 900_000, 512];
        let run = |pool: &Pool, real: bool| {
            let mut kept: Vec<Box<dyn std::any::Any>> = Vec::new();
            for (i, bytes) in sizes.iter().cycle().take(60).enumerate() {
                kept.push(if real {
                    Box::new(pool.take(*bytes + i, Tag::Activations).unwrap())
                } else {
                    Box::new(pool.place(*bytes + i, Tag::Activations).unwrap())
                });
                if i % 3 == 2 {
                    kept.swap_remove(i % kept.len());
                }
            }
            pool.stats()
        };
        let (real, null) = (Pool::new("device", None), Pool::new("null", None));
        assert_eq!(run(&real, true), run(&null, false));
    }

    /// Sizes of blocks, and after how many later blocks each is freed.
    #[cfg(feature = "cuda")]
    const RUN: [(usize, usize); 7] = [
        (640, 2),
        (6400, 6),
        (3200, 4),
        (64, 1),
        (9600, 2),
        (1280, 3),
        (6400, 1),
    ];

    #[cfg(feature = "cuda")]
    fn run(pool: &Pool, sizes: &[(usize, usize)]) -> Result<Vec<usize>> {
        let mut live: Vec<(usize, Allocated)> = Vec::new();
        let mut starts = Vec::new();
        for (now, (bytes, later)) in sizes.iter().enumerate() {
            let placed = pool.place(*bytes, Tag::Activations)?;
            starts.push(placed.place.start);
            live.push((now + later, placed));
            live.retain(|(until, _)| *until > now);
        }
        Ok(starts)
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn a_recorded_run_needs_no_more_than_its_memory_plan() {
        let pool = Pool::arena("GPU", 1 << 30);
        let rests = pool.place(1000, Tag::Parameters).unwrap();
        pool.record();
        run(&pool, &RUN).unwrap();
        let memory_plan = Arc::new(pool.recorded());
        drop(rests);
        let exact = Pool::arena("GPU", 1024 + memory_plan.bytes());
        let _rests = exact.place(1000, Tag::Parameters).unwrap();
        let follow = || {
            exact.follow(Some(memory_plan.clone()));
            let starts = run(&exact, &RUN);
            exact.follow(None);
            starts.unwrap()
        };
        let first = follow();
        // Other blocks in between, placed without a memory plan.
        run(&exact, &RUN[..4]).unwrap();
        assert_eq!(follow(), first);
        let stats = exact.stats();
        assert_eq!(
            (stats.touched, stats.strays),
            (1024 + memory_plan.bytes(), 0)
        );
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn blocks_that_differ_from_the_memory_plan_end_it() {
        let pool = Pool::arena("GPU", 1 << 20);
        pool.record();
        run(&pool, &RUN).unwrap();
        let memory_plan = Arc::new(pool.recorded());
        pool.follow(Some(memory_plan.clone()));
        let mut other = RUN;
        other[2].0 += 64;
        run(&pool, &other).unwrap();
        assert_eq!(pool.stats().strays, 1);
        // A memory plan starts after the blocks that exist. Blocks after its end are placed without one.
        pool.follow(Some(memory_plan));
        run(&pool, &RUN).unwrap();
        assert_eq!(pool.stats().strays, 1);
        run(&pool, &RUN[..1]).unwrap();
        assert_eq!(pool.stats().strays, 2);
    }

    #[test]
    fn adjacent_blocks_do_not_share_bytes() {
        let pool = Pool::new("device", None);
        let mut a = pool.take(100, Tag::Workspace).unwrap();
        let mut b = pool.take(100, Tag::Workspace).unwrap();
        a.as_bytes_mut().fill(1);
        b.as_bytes_mut().fill(2);
        assert!(a.as_bytes().iter().all(|x| *x == 1));
        assert_eq!(
            (a.as_bytes().len(), a.as_bytes().as_ptr() as usize % 64),
            (100, 0)
        );
    }
}

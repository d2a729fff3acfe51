//! Accounted memory: every byte a tensor occupies is counted under a tag, against a capacity.
//!
//! Freed blocks are kept by size class and reused, so that after warm-up no page is faulted in
//! (a first touch costs two to four times an Adam step on the same bytes).

use crate::error::{KernelError, Result};
use bytemuck::{Pod, Zeroable};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What bytes are used for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub enum Tag {
    /// Weights a rank owns.
    Parameters,
    /// Weights gathered for use.
    Gathered,
    /// Gradients, in flight or accumulated.
    Gradients,
    /// Master weights and moments.
    Optimizer,
    /// Inputs and outputs of operations.
    Activations,
    /// Temporary buffers inside one operation.
    Workspace,
    /// Communication windows.
    Communication,
    /// Keys and values of tokens that generation has seen.
    Cache,
}

impl Tag {
    /// Every tag, in display order.
    pub const ALL: [Self; 8] = [
        Self::Parameters,
        Self::Gathered,
        Self::Gradients,
        Self::Optimizer,
        Self::Activations,
        Self::Workspace,
        Self::Communication,
        Self::Cache,
    ];

    /// Lower-case name.
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
        }
    }
}

impl std::fmt::Display for Tag {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Bytes of one tag.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TagBytes {
    /// In use now.
    pub in_use: u64,
    /// Highest ever in use at once.
    pub peak: u64,
    /// In use when the total of all tags was highest: its share of [`PoolStats::peak`].
    pub at_peak: u64,
}

/// A snapshot of a pool.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PoolStats {
    /// Bytes by tag, in the order of [`Tag::ALL`].
    pub by_tag: [TagBytes; 8],
    /// Bytes in use over all tags.
    pub in_use: u64,
    /// Highest total ever in use at once.
    pub peak: u64,
    /// Freed blocks kept for reuse.
    pub cached: u64,
}

impl PoolStats {
    /// Bytes of one tag.
    #[must_use]
    pub fn tag(&self, tag: Tag) -> TagBytes {
        self.by_tag[tag as usize]
    }

    /// Counts bytes taken; a new highest total remembers what it consists of.
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

/// One entry of the event log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PoolEvent {
    /// Tag of the block.
    pub tag: Tag,
    /// Positive when taken, negative when given back.
    pub bytes: i64,
    /// Total in use after the event.
    pub in_use: u64,
}

/// A cache line; blocks are vectors of them, so every tensor starts 64-byte aligned.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

const EVENT_LOG: usize = 4096;

#[derive(Default)]
struct Inner {
    stats: PoolStats,
    free: BTreeMap<usize, Vec<Vec<Line>>>,
    events: VecDeque<PoolEvent>,
}

struct Shared {
    name: &'static str,
    capacity: Option<u64>,
    inner: Mutex<Inner>,
}

/// An accounted pool of memory; clones share it.
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
    /// A pool called `name` in messages, refusing to exceed `capacity` bytes.
    #[must_use]
    pub fn new(name: &'static str, capacity: Option<u64>) -> Self {
        Self(Arc::new(Shared {
            name,
            capacity,
            inner: Mutex::default(),
        }))
    }

    /// The pool's name.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.0.name
    }

    /// The most bytes it gives out, if limited.
    #[must_use]
    pub fn capacity(&self) -> Option<u64> {
        self.0.capacity
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // A panic elsewhere leaves only counters behind, which stay usable.
        self.0.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts `bytes` that live outside the pool's own blocks (memory maps, communication windows).
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`] when the capacity would be exceeded.
    pub fn reserve(&self, bytes: u64, tag: Tag) -> Result<Reservation> {
        let mut inner = self.lock();
        let stats = &mut inner.stats;
        let capacity = self.0.capacity.unwrap_or(u64::MAX);
        if stats.in_use.saturating_add(bytes) > capacity {
            return Err(KernelError::OutOfMemory {
                pool: self.0.name,
                tag,
                asked_bytes: bytes,
                in_use_bytes: stats.in_use,
                capacity_bytes: capacity,
                breakdown: breakdown(stats),
            });
        }
        stats.add(tag, bytes);
        log(&mut inner, tag, bytes as i64);
        drop(inner);
        Ok(Reservation {
            pool: self.clone(),
            bytes,
            tag,
        })
    }

    /// Takes a block of at least `bytes` bytes with unspecified contents.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`] when the capacity would be exceeded.
    pub fn take(&self, bytes: usize, tag: Tag) -> Result<Block> {
        let lines = size_class(bytes.div_ceil(64));
        let reservation = self.reserve(lines as u64 * 64, tag)?;
        let cached = {
            let mut inner = self.lock();
            let found = inner.free.get_mut(&lines).and_then(Vec::pop);
            if found.is_some() {
                inner.stats.cached -= lines as u64 * 64;
            } else if let Some(capacity) = self.0.capacity {
                trim(&mut inner, capacity);
            }
            found
        };
        let lines = cached.unwrap_or_else(|| vec![Line::zeroed(); lines]);
        Ok(Block {
            lines,
            len: bytes,
            reservation,
        })
    }

    /// Current counters.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        self.lock().stats.clone()
    }

    /// Starts new high-water marks at the present use.
    pub fn reset_peaks(&self) {
        let stats = &mut self.lock().stats;
        stats.peak = stats.in_use;
        for tag in &mut stats.by_tag {
            tag.peak = tag.in_use;
            tag.at_peak = tag.in_use;
        }
    }

    /// The last events, oldest first.
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

/// Rounds up so that at most an eighth is wasted and few classes exist.
fn size_class(lines: usize) -> usize {
    let lines = lines.max(1);
    let step = (lines.next_power_of_two() / 16).max(1);
    lines.next_multiple_of(step)
}

/// Bytes that a block for `bytes` bytes counts as.
pub(crate) fn counted_bytes(bytes: usize) -> u64 {
    size_class(bytes.div_ceil(64)) as u64 * 64
}

/// Drops cached blocks until use and cache together fit the capacity.
fn trim(inner: &mut Inner, capacity: u64) {
    while inner.stats.in_use + inner.stats.cached > capacity {
        let Some(mut entry) = inner.free.last_entry() else {
            break;
        };
        let lines = *entry.key() as u64;
        if entry.get_mut().pop().is_some() {
            inner.stats.cached -= lines * 64;
        } else {
            entry.remove();
        }
    }
}

/// Counted bytes; dropping it gives them back.
#[derive(Debug)]
pub struct Reservation {
    pool: Pool,
    bytes: u64,
    tag: Tag,
}

impl Reservation {
    /// The bytes counted.
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

/// Owned memory of a pool, 64-byte aligned.
#[derive(Debug)]
pub struct Block {
    lines: Vec<Line>,
    len: usize,
    reservation: Reservation,
}

impl std::fmt::Debug for Line {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Line")
    }
}

impl Block {
    /// The bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.lines)[..self.len]
    }

    /// The bytes, writable.
    #[must_use]
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..self.len]
    }
}

impl AsRef<[u8]> for Block {
    fn as_ref(&self) -> &[u8] {
        self.as_bytes()
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let lines = std::mem::take(&mut self.lines);
        let mut inner = self.reservation.pool.lock();
        inner.stats.cached += lines.len() as u64 * 64;
        inner.free.entry(lines.len()).or_default().push(lines);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_by_tag_and_remembers_the_peak() {
        let pool = Pool::new("device", None);
        let a = pool.take(1000, Tag::Activations).unwrap();
        let b = pool.reserve(500, Tag::Gathered).unwrap();
        assert_eq!(a.as_bytes().len(), 1000);
        assert_eq!(pool.stats().in_use, 1024 + 500);
        drop(a);
        drop(b);
        let stats = pool.stats();
        assert_eq!((stats.in_use, stats.peak, stats.cached), (0, 1524, 1024));
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
    fn the_peak_knows_what_it_was_made_of() {
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
        // More workspace than there was at the peak, but a lower total.
        drop(pool.reserve(900, Tag::Workspace).unwrap());
        assert_eq!(shares(), [1000, 100, 0]);
        pool.reset_peaks();
        assert_eq!(shares(), [0, 100, 0]);
        drop(pool.reserve(10, Tag::Workspace).unwrap());
        assert_eq!(shares(), [0, 100, 10]);
        drop(kept);
    }

    #[test]
    fn refuses_to_exceed_the_capacity_and_names_the_users() {
        let pool = Pool::new("device", Some(4096));
        let held = pool.take(4000, Tag::Optimizer).unwrap();
        let error = pool.take(4096, Tag::Workspace).unwrap_err().to_string();
        assert!(error.contains("optimizer 4096"), "{error}");
        drop(held);
        pool.take(4096, Tag::Workspace).unwrap();
    }

    #[test]
    fn cached_blocks_never_push_the_total_over_the_capacity() {
        let pool = Pool::new("device", Some(8192));
        for bytes in [4096, 2048, 8192, 1024, 6000] {
            drop(pool.take(bytes, Tag::Workspace).unwrap());
            let stats = pool.stats();
            assert!(stats.in_use + stats.cached <= 8192, "{stats:?}");
        }
    }

    #[test]
    fn size_classes_waste_at_most_an_eighth() {
        for lines in 1..5000 {
            let class = size_class(lines);
            assert!(
                class >= lines && (class - lines) * 8 <= lines.max(8),
                "{lines} -> {class}"
            );
        }
    }
}

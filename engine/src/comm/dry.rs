//! The communicator of a dry run. It counts the bytes that one rank uses of its window and the pages that it
//! touches of all windows.
//!
//! The allocator is the real one, over a window without memory. All ranks issue the same collectives, so a
//! buffer has the same offset in every rank's part. Small messages are not counted. Every other rank is assumed
//! to send what this one sends.

use super::arena::{Arena, Region, SMALL_BYTES};
use super::endpoint::lock;
use super::window::Layout;
use super::{
    Buffer, Collective, CollectiveKind, CommError, Communicator, Tag, Ticket, WindowUsage, World,
};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const PAGE: usize = 4096;
/// Granularity of reads: reading a page of a file also maps its neighbors. A window always has them.
const READ_AROUND: usize = 16 * PAGE;

/// Disjoint ranges, as end by start.
#[derive(Debug, Default, Clone)]
struct Touched(BTreeMap<usize, usize>);

impl Touched {
    fn add(&mut self, range: &Range<usize>, unit: usize) {
        if range.is_empty() {
            return;
        }
        let mut start = range.start / unit * unit;
        let mut end = range.end.next_multiple_of(unit);
        while let Some((&s, &e)) = self.0.range(..=end).next_back()
            && e >= start
        {
            start = start.min(s);
            end = end.max(e);
            self.0.remove(&s);
        }
        self.0.insert(start, end);
    }

    fn bytes(&self) -> u64 {
        self.0.iter().map(|(s, e)| (e - s) as u64).sum()
    }
}

#[derive(Debug)]
struct Inner {
    world: World,
    arena: Arena,
    own: Touched,
    /// Number of ranks that hold one copy (a shard group).
    group: usize,
    /// Per rank, the ranges that it gathers for the other ranks of its shard group.
    gathered: Vec<Touched>,
    /// Per rank, the ranges that it sums for the ranks with the same shard, and for all ranks.
    replicated: Vec<Touched>,
    shared: Vec<Touched>,
    /// Per rank, the ranges that it sums. It reads them in every peer's region.
    reduced: Vec<Touched>,
    in_use: u64,
    peak: u64,
}

/// Byte counts of a dry run for the communicator's window: shared memory in which each rank has one region.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct WindowBytes {
    /// Size in bytes that a run must request for each rank's region. Slots for small messages come in
    /// addition.
    pub region: u64,
    /// Bytes that the rank touches in its own region, in whole pages.
    pub own: u64,
    /// Bytes that each rank, by index, reads in the regions of all other ranks together, counted in blocks of
    /// 64 KiB.
    pub peers: Vec<u64>,
}

/// The window of a dry run: it counts bytes and pages and has no memory.
#[derive(Clone, Debug)]
pub(crate) struct DryWindow(Arc<Mutex<Inner>>);

impl DryWindow {
    /// The window of a world in which `group` ranks hold one copy.
    pub(crate) fn new(world: World, group: usize) -> Self {
        Self(Arc::new(Mutex::new(Inner {
            world,
            group,
            arena: Arena::new(usize::MAX - SMALL_BYTES),
            own: Touched::default(),
            gathered: vec![Touched::default(); world.size],
            replicated: vec![Touched::default(); world.size],
            shared: vec![Touched::default(); world.size],
            reduced: vec![Touched::default(); world.size],
            in_use: 0,
            peak: 0,
        })))
    }

    /// A buffer of `bytes` bytes that this rank fills.
    pub(super) fn take(&self, bytes: usize) -> DryBuffer {
        let mut inner = lock(&self.0);
        let region = inner.arena.alloc(bytes).unwrap_or(Region::EMPTY);
        inner.own.add(&(region.offset..region.offset + bytes), PAGE);
        inner.in_use += region.bytes as u64;
        inner.peak = inner.peak.max(inner.in_use);
        DryBuffer {
            window: self.clone(),
            region,
            bytes,
        }
    }

    pub(crate) fn bytes(&self) -> WindowBytes {
        let inner = lock(&self.0);
        WindowBytes {
            region: inner.arena.peak() as u64,
            own: inner.own.bytes(),
            peers: inner.peers(),
        }
    }

    /// Peak of the bytes in use since the last call.
    pub(crate) fn take_peak(&self) -> u64 {
        let mut inner = lock(&self.0);
        let in_use = inner.in_use;
        std::mem::replace(&mut inner.peak, in_use)
    }
}

impl Communicator for DryWindow {
    fn world(&self) -> World {
        lock(&self.0).world
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer, CommError> {
        Ok(Buffer::counted(self.take(bytes), bytes))
    }

    fn start(&self, op: Collective, buffer: Buffer) -> Result<Ticket, CommError> {
        buffer.count(op.kind);
        Ok(Ticket::done(buffer))
    }

    fn abort(&self, _reason: &str) {}

    fn failure(&self) -> Option<CommError> {
        None
    }

    fn memory(&self) -> WindowUsage {
        let inner = lock(&self.0);
        WindowUsage {
            in_use_bytes: inner.in_use as usize,
            peak_bytes: inner.arena.peak(),
            capacity_bytes: inner.arena.capacity(),
        }
    }

    fn time_spent(&self) -> Duration {
        Duration::ZERO
    }

    fn all_gather_f64(&self, value: &[f64], _tag: Tag) -> Result<Vec<Vec<f64>>, CommError> {
        Ok(vec![value.to_vec(); self.world().size])
    }

    fn all_gather_bytes(&self, message: &[u8], _tag: Tag) -> Result<Vec<Vec<u8>>, CommError> {
        Ok(vec![message.to_vec(); self.world().size])
    }
}

/// A buffer without memory. Dropping it frees its region.
#[derive(Debug)]
pub(super) struct DryBuffer {
    window: DryWindow,
    region: Region,
    bytes: usize,
}

impl DryBuffer {
    /// Counts the ranges of each other's buffers that ranks read in a collective.
    pub(super) fn run(&self, kind: CollectiveKind) {
        let mut inner = lock(&self.window.0);
        let inner = &mut *inner;
        let (size, group) = (inner.world.size, inner.group);
        if size == 1 {
            return;
        }
        let shard = self.bytes / group;
        for rank in 0..size {
            let gathered = self.region.offset + rank % group * shard;
            let summed = match kind {
                CollectiveKind::ReduceScatter => gathered + rank / group * shard * group / size,
                _ => self.region.offset + rank * self.bytes / size,
            };
            let (gathered, summed) = (
                gathered..gathered + shard,
                summed..summed + self.bytes / size,
            );
            match kind {
                CollectiveKind::AllGather => inner.gathered[rank].add(&gathered, READ_AROUND),
                CollectiveKind::ReduceScatter => {
                    inner.reduced[rank].add(&summed, READ_AROUND);
                    inner.replicated[rank].add(&summed, READ_AROUND);
                }
                CollectiveKind::AllReduce => {
                    inner.reduced[rank].add(&summed, READ_AROUND);
                    inner.shared[rank].add(&summed, READ_AROUND);
                }
                CollectiveKind::Broadcast { .. } | CollectiveKind::Barrier => {}
            }
        }
    }
}

impl Inner {
    fn peers(&self) -> Vec<u64> {
        let pages = |reader: usize, owner: usize| {
            let mut all = self.shared[owner].clone();
            let mut join = |more: &Touched| {
                let ranges = more.0.iter();
                ranges.for_each(|(&start, &end)| all.add(&(start..end), READ_AROUND));
            };
            join(&self.reduced[reader]);
            if reader / self.group == owner / self.group {
                join(&self.gathered[owner]);
            }
            if reader % self.group == owner % self.group {
                join(&self.replicated[owner]);
            }
            all.bytes()
        };
        let size = self.world.size;
        let of = |reader: usize| -> u64 {
            let owners = (0..size).filter(|owner| *owner != reader);
            owners.map(|owner| pages(reader, owner)).sum()
        };
        (0..size).map(of).collect()
    }
}

impl Drop for DryBuffer {
    fn drop(&mut self) {
        let mut inner = lock(&self.window.0);
        inner.in_use -= self.region.bytes as u64;
        inner.arena.free(self.region);
    }
}

/// Bytes of a window of `ranks` ranks in addition to the regions that the ranks requested: its control block
/// and the slots for small messages.
#[must_use]
pub fn control_bytes(ranks: usize) -> u64 {
    (Layout::control_bytes() + ranks * SMALL_BYTES) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn touched_pages_are_counted_once() {
        let mut touched = Touched::default();
        touched.add(&(100..5000), PAGE);
        touched.add(&(20_000..20_001), PAGE);
        assert_eq!(touched.bytes(), 3 * 4096);
        // Pages 0, 1 and 4; then those between them.
        touched.add(&(4096..20_000), PAGE);
        assert_eq!(touched.bytes(), 5 * 4096);
        touched.add(&(0..1), PAGE);
        assert_eq!(touched.bytes(), 5 * 4096);
    }

    #[test]
    fn a_region_is_reused_and_peers_are_read_in_parts() {
        let window = DryWindow::new(World { rank: 0, size: 2 }, 2);
        let part = 1 << 20;
        for _ in 0..3 {
            window.take(2 * part).run(CollectiveKind::AllGather);
        }
        let one = WindowBytes {
            region: 2 * part as u64,
            own: 2 * part as u64,
            peers: vec![part as u64; 2],
        };
        assert_eq!(window.bytes(), one);
        window.take(2 * part).run(CollectiveKind::ReduceScatter);
        assert_eq!(window.bytes().peers, [2 * part as u64; 2]);
        let two = (window.take(part), window.take(2 * part));
        assert_eq!(window.take_peak(), 3 * part as u64);
        drop(two);
        assert_eq!(window.bytes().region, 3 * part as u64);
    }
}

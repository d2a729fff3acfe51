//! Prefetch of weights from disk.

use crate::error::EngineError;
use crate::offload::spill::PendingRead;
use crate::offload::tier::Region;
use crate::plan::GroupKind;
use crate::plan::blocks::{BLOCK_BYTES, SEGMENT_BYTES};
use crate::spec::UnitId;
use std::collections::{HashMap, VecDeque};

type Result<T, E = EngineError> = std::result::Result<T, E>;
type Key = (UnitId, GroupKind);

/// Reads of one parameter group: consecutive pieces from the start of its region.
#[derive(Debug, Default)]
struct Reads {
    pending: VecDeque<(usize, PendingRead)>,
    /// Number of bytes of the region that were requested so far.
    asked: usize,
}

/// Reads in flight or done, of parameter groups that have not been fetched.
#[derive(Debug, Default)]
pub(crate) struct WeightReads(HashMap<Key, Reads>);

impl WeightReads {
    /// Requests the rest of a region; false if buffers ran out.
    pub(crate) fn advance(&mut self, key: Key, region: &Region) -> Result<bool> {
        let reads = self.0.entry(key).or_default();
        while reads.asked < region.len() {
            let end = next_end(reads.asked, region.len());
            let Some(read) = region.read_ahead(reads.asked..end)? else {
                return Ok(false);
            };
            reads.pending.push_back((end - reads.asked, read));
            reads.asked = end;
        }
        Ok(true)
    }

    /// Copies a region to `out`: first the prefetched bytes, then the rest.
    pub(crate) fn fetch(&mut self, key: Key, region: &Region, out: &mut [u8]) -> Result<()> {
        let mut at = 0;
        for (len, read) in self.0.remove(&key).unwrap_or_default().pending {
            let segment = read.wait()?;
            out[at..at + len].copy_from_slice(segment.as_bytes());
            at += len;
        }
        region.read(at, &mut out[at..])
    }

    /// Drops the reads of all units for which `wanted` is false.
    pub(crate) fn forget_unless(&mut self, wanted: impl Fn(UnitId) -> bool) {
        self.0.retain(|(unit, _), _| wanted(*unit));
    }

    /// Drops the reads of all parameter groups.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }
}

/// End of the next piece. A piece is one block shorter than a segment, since a region may begin inside a block.
fn next_end(start: usize, len: usize) -> usize {
    const MOST: usize = SEGMENT_BYTES - BLOCK_BYTES as usize;
    len.min(start + MOST)
}

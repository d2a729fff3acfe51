//! Weights read from a disk before they are needed.

use crate::error::EngineError;
use crate::offload::spill::PendingRead;
use crate::offload::tier::Region;
use crate::plan::GroupKind;
use crate::plan::blocks::{BLOCK_BYTES, SEGMENT_BYTES};
use crate::spec::UnitId;
use std::collections::{HashMap, VecDeque};

type Result<T, E = EngineError> = std::result::Result<T, E>;
type Key = (UnitId, GroupKind);

/// The reads of one group: the first bytes of its region, in order.
#[derive(Debug, Default)]
struct Reads {
    pending: VecDeque<(usize, PendingRead)>,
    /// Bytes asked for so far.
    asked: usize,
}

/// Reads under way or done, of groups that have not been fetched.
#[derive(Debug, Default)]
pub(crate) struct WeightReads(HashMap<Key, Reads>);

impl WeightReads {
    /// Asks for more of a region; false once buffers are short.
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

    /// Copies a region to `out`, beginning with what was read ahead.
    pub(crate) fn fetch(&mut self, key: Key, region: &Region, out: &mut [u8]) -> Result<()> {
        let mut at = 0;
        for (len, read) in self.0.remove(&key).unwrap_or_default().pending {
            let segment = read.wait()?;
            out[at..at + len].copy_from_slice(segment.as_bytes());
            at += len;
        }
        region.read(at, &mut out[at..])
    }

    /// Drops the reads of units that `wanted` does not name.
    pub(crate) fn forget_unless(&mut self, wanted: impl Fn(UnitId) -> bool) {
        self.0.retain(|(unit, _), _| wanted(*unit));
    }

    /// Drops all reads.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }
}

/// Pieces leave room for the block in which a region may begin.
fn next_end(start: usize, len: usize) -> usize {
    const MOST: usize = SEGMENT_BYTES - BLOCK_BYTES as usize;
    len.min(start + MOST)
}

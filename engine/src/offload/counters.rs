//! Counters of a dry run: the bytes that its states would occupy, by tier.

use crate::error::EngineError;
use crate::plan::Tier;
use crate::plan::blocks::extent_bytes;
use kernels::{DType, Pool, Reservation, Shape, Tag, Tensor};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

type Result<T, E = EngineError> = std::result::Result<T, E>;

const PAGE: u64 = 4096;

/// Counts the bytes of one rank by tier.
#[derive(Clone, Debug)]
pub(crate) struct Counters {
    pub(crate) device: Pool,
    pub(crate) host: Pool,
    /// Pool that counts the bytes of spill files.
    pub(crate) nvme: Pool,
    /// Leased weights. They are views of buffers that are counted elsewhere.
    leased: Pool,
    /// Bytes of memory maps, in whole pages.
    mapped: Arc<AtomicU64>,
    /// Bytes of memory that all ranks map, in whole pages.
    shared: Arc<AtomicU64>,
}

impl Counters {
    pub(crate) fn new(device: Pool, host: Pool) -> Self {
        let [nvme, leased] = ["nvme", "leased"].map(|name| Pool::new(name, None));
        Self {
            device,
            host,
            nvme,
            leased,
            mapped: Arc::default(),
            shared: Arc::default(),
        }
    }

    /// Counts `len` bytes of a region. On disk its first byte is `phase` bytes after a block boundary.
    pub(crate) fn count(&self, tier: Tier, len: usize, phase: u64, tag: Tag) -> Result<Count> {
        let bytes = len as u64;
        Ok(match tier {
            Tier::Device => Count::Placed(Tensor::null(&self.device, tag, [len], DType::U8)?),
            Tier::Host => {
                let pages = bytes.next_multiple_of(PAGE);
                self.mapped.fetch_add(pages, Ordering::Relaxed);
                Count::Reserved(self.host.reserve(bytes, tag)?)
            }
            Tier::Nvme => {
                let extent = extent_bytes(bytes, phase);
                Count::Reserved(self.nvme.reserve(extent, tag)?)
            }
        })
    }

    /// Counts `own` bytes of this rank in memory of `whole` bytes that all ranks map.
    pub(crate) fn count_shared(&self, own: usize, whole: usize, tag: Tag) -> Result<Count> {
        let pages = (whole as u64).next_multiple_of(PAGE);
        self.shared.fetch_add(pages, Ordering::Relaxed);
        Ok(Count::Reserved(self.host.reserve(own as u64, tag)?))
    }

    /// Bytes of memory that all ranks map.
    pub(crate) fn shared_bytes(&self) -> u64 {
        self.shared.load(Ordering::Relaxed)
    }

    /// A leased weight of a dry run: a tensor without values.
    pub(crate) fn leased(&self, shape: Shape, dtype: DType) -> Result<Tensor> {
        Ok(Tensor::null(&self.leased, Tag::Gathered, shape, dtype)?)
    }

    /// Bytes of the host tier: private memory maps in whole pages, and the blocks of its pool.
    pub(crate) fn host_bytes(&self) -> u64 {
        self.mapped.load(Ordering::Relaxed) + self.host.stats().touched
    }
}

/// Bytes that a dry run counts in a memory pool for one region (the storage of one state).
#[derive(Debug)]
pub enum Count {
    /// Bytes in a block of the device pool.
    Placed(Tensor),
    /// Bytes of a memory map in host memory, or of a spill file.
    Reserved(Reservation),
}

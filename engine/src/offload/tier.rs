//! Tiers and regions: memory for states that outlive a pass.
//!
//! Device memory is a block of the device's pool, or resident memory of a discrete device. The host reads and
//! writes resident memory through copies; the device computes with it directly. Host memory is a private
//! anonymous memory map, or a range of memory that all ranks map; it is counted in the host pool. Spilled memory is an
//! extent of a spill file, accessed in chunks that are prefetched and written asynchronously.

use super::counters::{Count, Counters};
use super::parallel;
use super::spill::{Extent, IoBuffer, PendingRead, SpillFile, SpillIo, SpillStats};
use super::worker::{Gone, Worker};
use crate::comm::shared::SharedMap;
use crate::error::EngineError;
use crate::plan::blocks::{SEGMENT_BYTES, extent_bytes};
use crate::plan::{StateKind, Tier, disk_phase};
use crate::trace::Trace;
use bytemuck::Pod;
use half::{bf16, f16};
use kernels::{
    Backend, Block, DType, Float, ForeignBytes, KernelError, Pool, Reservation, Resident,
    ResidentAccess, Shape, Tag, Tensor,
};
use memmap2::{Advice, MmapMut};
use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

type Result<T, E = EngineError> = std::result::Result<T, E>;

/// Number of elements of a chunk on disk: one segment of f32.
pub(crate) const REGION_CHUNK_ELEMS: usize = SEGMENT_BYTES / 4;
/// Maximal number of elements copied at once between a discrete device and the host.
pub(crate) const COPY_ELEMS: usize = 1 << 22;
/// Minimal size in bytes of a memory map that asks for huge pages.
const HUGE_BYTES: usize = 4 << 20;

impl From<Gone> for EngineError {
    fn from(_: Gone) -> Self {
        Self::BackwardThread
    }
}

/// Memory tiers of one rank: pools that count its device and host memory, and its spill files on disk.
#[derive(Clone, Debug)]
pub struct Tiers {
    /// Pool that counts device memory.
    pub device: Pool,
    /// Pool that counts host memory.
    pub host: Pool,
    spill: Option<Arc<Spill>>,
    /// The discrete device that stores states of the device tier; `None` if the host can address device memory.
    discrete: Option<Arc<dyn Backend>>,
    /// Counters of a dry run, whose regions have no bytes.
    counters: Option<Counters>,
    trace: Trace,
}

impl Tiers {
    /// Creates tiers of device and host memory, without spill files on disk.
    #[must_use]
    pub fn new(device: Pool, host: Pool) -> Self {
        Self {
            device,
            host,
            spill: None,
            discrete: None,
            counters: None,
            trace: Trace::default(),
        }
    }

    /// Sets the device that computes. If it is discrete, its memory stores the states of the device tier.
    pub(crate) fn on(mut self, backend: &Arc<dyn Backend>) -> Self {
        self.discrete = backend.residents().map(|_| backend.clone());
        self
    }

    /// Whether states of the device tier are stored in memory of a discrete device.
    pub(crate) fn are_resident(&self) -> bool {
        self.discrete.is_some()
    }

    /// Tiers of a dry run, which count bytes in `counters` and allocate no memory.
    pub(crate) fn in_dry_run(counters: Counters) -> Self {
        Self {
            counters: Some(counters.clone()),
            ..Self::new(counters.device, counters.host)
        }
    }

    /// Counters of a dry run; `None` in a run.
    pub(crate) fn counters(&self) -> Option<&Counters> {
        self.counters.as_ref()
    }

    /// Starts a worker thread for `work`. A dry run has no thread; its jobs return unchanged.
    pub(crate) fn worker<J: Send + 'static, B: Send + 'static>(
        &self,
        name: &str,
        work: impl FnMut(&mut J, B) + Send + 'static,
    ) -> Result<Worker<J, B>> {
        match self.counters {
            Some(_) => Ok(Worker::idle()),
            None => Worker::start(name, work).map_err(EngineError::Thread),
        }
    }

    /// Values of a gradient in host memory; empty in a dry run.
    pub(crate) fn values<'g>(&self, gradient: &'g Tensor) -> Result<Cow<'g, [f32]>> {
        match self.counters {
            Some(_) => Ok(Cow::default()),
            None => Ok(gradient.host_f32()?),
        }
    }

    /// Adds the spill files, which store the states of the disk tier.
    #[must_use]
    pub fn with_spill(mut self, spill: Spill) -> Self {
        spill.io.record(&self.trace);
        self.spill = Some(Arc::new(spill));
        self
    }

    /// Spill files of this rank; `None` if no state is on disk.
    #[must_use]
    pub fn spill(&self) -> Option<&Arc<Spill>> {
        self.spill.as_ref()
    }

    /// Pool that counts the bytes in spill files.
    pub(crate) fn disk_pool(&self) -> Pool {
        match (&self.spill, &self.counters) {
            (Some(spill), _) => spill.pool.clone(),
            (None, Some(counters)) => counters.nvme.clone(),
            (None, None) => Pool::new("nvme", None),
        }
    }

    /// Trace recorder of this rank.
    #[must_use]
    pub fn trace(&self) -> &Trace {
        &self.trace
    }

    /// Allocates zeroed memory for the elements `range` of a parameter group.
    ///
    /// # Errors
    /// When the tier's pool or disk is full, or the system refuses the map.
    pub(crate) fn allocate(
        &self,
        (kind, tier): (StateKind, Tier),
        range: Range<usize>,
        dtype: DType,
        tag: Tag,
    ) -> Result<Region> {
        if let (Tier::Device, Some(backend)) = (tier, &self.discrete) {
            return resident(backend, range.len(), dtype, tag);
        }
        let bytes = range.len() * dtype.size_bytes();
        let phase = disk_phase(&range, dtype);
        self.allocate_bytes((kind, tier), bytes, phase, tag)
    }

    /// Allocates zeroed bytes. On disk, the first byte is `phase` bytes after a block boundary.
    ///
    /// # Errors
    /// When the tier's pool or disk is full, or the system refuses the map.
    pub(crate) fn allocate_bytes(
        &self,
        (kind, tier): (StateKind, Tier),
        bytes: usize,
        phase: u64,
        tag: Tag,
    ) -> Result<Region> {
        if let Some(counters) = &self.counters {
            let count = counters.count(tier, bytes, phase, tag)?;
            return Ok(Region::Counted {
                tier,
                len: bytes,
                count,
            });
        }
        Ok(match tier {
            Tier::Device => {
                let mut block = self.device.take(bytes, tag)?;
                block.as_bytes_mut().fill(0);
                Region::Device(block)
            }
            Tier::Host => {
                let counted = self.host.reserve(bytes as u64, tag)?;
                let map = MmapMut::map_anon(bytes.max(1))
                    .map_err(|source| EngineError::Map { bytes, source })?;
                if bytes >= HUGE_BYTES {
                    // Only a hint: the map also works without huge pages.
                    map.advise(Advice::HugePage).ok();
                }
                Region::Mapped {
                    map,
                    len: bytes,
                    counted,
                }
            }
            Tier::Nvme => {
                let missing = EngineError::NoSpillDirectory { kind: kind.name() };
                let spill = self.spill.as_ref().ok_or(missing)?;
                let (extent, counted) = spill.allocate(kind, bytes, phase, tag)?;
                Region::Spilled {
                    extent,
                    spill: spill.clone(),
                    counted,
                }
            }
        })
    }

    /// Counts this rank's part of memory that all ranks map. `map` makes the map; a dry run has none.
    ///
    /// # Errors
    /// When the host pool is full, or `map` fails.
    pub(crate) fn shared(
        &self,
        (own, whole): (usize, usize),
        tag: Tag,
        map: impl FnOnce() -> Result<SharedMap>,
    ) -> Result<Region> {
        if let Some(counters) = &self.counters {
            return Ok(Region::Counted {
                tier: Tier::Host,
                len: own,
                count: counters.count_shared(own, whole, tag)?,
            });
        }
        let counted = self.host.reserve(own as u64, tag)?;
        Ok(Region::Shared {
            map: map()?,
            counted,
        })
    }

    /// Counts this rank's part of weights that leases read in the maps of their files: `own` bytes of `whole`. `all_ranks`
    /// tells whether all ranks of the machine read the same ones.
    ///
    /// # Errors
    /// When the host pool is full.
    pub(crate) fn in_files(
        &self,
        (own, whole): (usize, usize),
        all_ranks: bool,
        tag: Tag,
    ) -> Result<Region> {
        if let Some(counters) = &self.counters {
            let count = match all_ranks {
                true => counters.count_shared(own, whole, tag)?,
                false => counters.count(Tier::Host, own, 0, tag)?,
            };
            return Ok(Region::Counted {
                tier: Tier::Host,
                len: own,
                count,
            });
        }
        Ok(Region::Files {
            maps: BTreeMap::new(),
            len: own,
            counted: self.host.reserve(own as u64, tag)?,
        })
    }

    /// Allocates host-addressable memory of the device pool for a copy of weights; its contents are unspecified.
    pub(crate) fn copy(&self, bytes: usize) -> Result<Region> {
        let (tier, tag) = (Tier::Device, Tag::Gathered);
        Ok(match &self.counters {
            Some(counters) => Region::Counted {
                tier,
                len: bytes,
                count: counters.count(tier, bytes, 0, tag)?,
            },
            None => Region::Device(self.device.take(bytes, tag)?),
        })
    }

    /// Records an event after the last write to the regions that a discrete device stores.
    ///
    /// # Errors
    /// When the device fails.
    pub(crate) fn record_write<'r>(
        &self,
        regions: impl Iterator<Item = &'r mut Region>,
    ) -> Result<()> {
        let Some(backend) = &self.discrete else {
            return Ok(());
        };
        let mut states: Vec<&mut Resident> = regions.filter_map(Region::resident_mut).collect();
        Ok(access(backend)?.record_write(&mut states)?)
    }

    /// Lets another thread borrow the regions that a discrete device stores ([`ResidentAccess::lend`]).
    pub(crate) fn lend<'r>(&self, regions: impl Iterator<Item = &'r mut Region>) -> Result<()> {
        let Some(backend) = &self.discrete else {
            return Ok(());
        };
        let mut states: Vec<&mut Resident> = regions.filter_map(Region::resident_mut).collect();
        Ok(access(backend)?.lend(&mut states)?)
    }

    /// Ends [`Tiers::lend`]: this thread may use the regions again after the other thread's last use of them
    /// ([`ResidentAccess::give_back`]).
    pub(crate) fn take_back<'r>(
        &self,
        regions: impl Iterator<Item = &'r mut Region>,
    ) -> Result<()> {
        let Some(backend) = &self.discrete else {
            return Ok(());
        };
        let mut states: Vec<&mut Resident> = regions.filter_map(Region::resident_mut).collect();
        Ok(access(backend)?.give_back(&mut states)?)
    }

    /// Waits until all writes to spill files are complete.
    ///
    /// # Errors
    /// When a write failed.
    pub(crate) fn flush(&self) -> Result<()> {
        match &self.spill {
            Some(spill) => Ok(spill.io.flush()?),
            None => Ok(()),
        }
    }
}

/// Allocates zeros in the memory of a discrete device.
fn resident(backend: &Arc<dyn Backend>, elems: usize, dtype: DType, tag: Tag) -> Result<Region> {
    Ok(Region::Resident {
        states: access(backend)?.zeros(elems, dtype, tag)?,
        backend: backend.clone(),
    })
}

/// Access to states that a discrete device stores.
pub(crate) fn access(backend: &Arc<dyn Backend>) -> Result<&dyn ResidentAccess> {
    let missing = || KernelError::Device {
        op: "keep states",
        cause: "the device keeps none".into(),
    };
    Ok(backend.residents().ok_or_else(missing)?)
}

/// Spill files (states on disk) of one rank: one file per kind of state, and the queue that reads and writes
/// them.
#[derive(Debug)]
pub struct Spill {
    io: SpillIo,
    pool: Pool,
    files: Mutex<HashMap<StateKind, SpillFile>>,
}

impl Spill {
    /// Combines spill files, one per kind of state, with the disk queue that reads and writes them.
    #[must_use]
    pub fn new(io: SpillIo, files: impl IntoIterator<Item = (StateKind, SpillFile)>) -> Self {
        Self {
            io,
            pool: Pool::new("nvme", None),
            files: Mutex::new(files.into_iter().collect()),
        }
    }

    /// Bytes and busy time of the spill files' disk requests since the queue was created.
    #[must_use]
    pub fn stats(&self) -> SpillStats {
        self.io.stats()
    }

    /// Memory pool that counts the bytes allocated in the spill files, by tag.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Total size of this rank's spill files in bytes.
    #[must_use]
    pub fn file_bytes(&self) -> u64 {
        let files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        files.values().map(SpillFile::bytes).sum()
    }

    fn allocate(
        &self,
        kind: StateKind,
        bytes: usize,
        phase: u64,
        tag: Tag,
    ) -> Result<(Extent, Reservation)> {
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        let missing = EngineError::NoSpillDirectory { kind: kind.name() };
        let file = files.get_mut(&kind).ok_or(missing)?;
        let extent = file.allocate(bytes as u64, phase)?;
        let taken = extent_bytes(bytes as u64, phase);
        Ok((extent, self.pool.reserve(taken, tag)?))
    }
}

/// Storage of one model state, e.g. a unit's weights on one rank: a number of bytes in device memory, in host
/// memory or on disk.
pub enum Region {
    /// Bytes in a block of the device pool.
    Device(Block),
    /// Elements in the memory of a discrete device.
    Resident {
        /// The region's elements in device memory.
        states: Resident,
        /// The discrete device.
        backend: Arc<dyn Backend>,
    },
    /// Bytes in a memory map of host memory.
    Mapped {
        /// The map, page aligned, at least `len` bytes.
        map: MmapMut,
        /// Length of the region in bytes.
        len: usize,
        /// Reservation of these bytes in the host pool.
        counted: Reservation,
    },
    /// This rank's part of a parameter group in memory that all ranks map.
    Shared {
        /// The map of the whole group.
        map: SharedMap,
        /// Reservation of this rank's part in the host pool.
        counted: Reservation,
    },
    /// Weights in the maps of their files.
    Files {
        /// The map of each parameter, by its first element in the parameter group. Empty until weights are loaded.
        maps: BTreeMap<usize, ForeignBytes>,
        /// Length of the region in bytes: this rank's part, by which it counts.
        len: usize,
        /// Reservation of these bytes in the host pool: the files' pages are memory, too.
        counted: Reservation,
    },
    /// Bytes in an extent (a byte range) of a spill file.
    Spilled {
        /// The extent that stores the region.
        extent: Extent,
        /// The spill files and their disk queue.
        spill: Arc<Spill>,
        /// Reservation of these bytes in the pool that counts spill files.
        counted: Reservation,
    },
    /// A region of a dry run: it has no bytes. Reads and writes do nothing, and its chunks are empty.
    Counted {
        /// The tier the bytes would be on.
        tier: Tier,
        /// Length of the region in bytes.
        len: usize,
        /// The bytes that the counters count for it.
        count: Count,
    },
}

/// Copies values to device memory; without values (dry run) it only allocates.
pub(crate) fn upload(
    device: &dyn Backend,
    values: &[u8],
    shape: Shape,
    dtype: DType,
) -> Result<Tensor> {
    let tag = Tag::Communication;
    Ok(match values.is_empty() {
        true => device.zeros(shape, dtype, tag)?,
        false => device.upload(values, shape, dtype, tag)?,
    })
}

impl std::fmt::Debug for Region {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Region({} bytes, {:?})", self.len(), self.tier())
    }
}

impl Region {
    /// Memory tier (device, host or disk) that stores the region's bytes.
    #[must_use]
    pub fn tier(&self) -> Tier {
        match self {
            Self::Device(_) | Self::Resident { .. } => Tier::Device,
            Self::Mapped { .. } | Self::Shared { .. } | Self::Files { .. } => Tier::Host,
            Self::Spilled { .. } => Tier::Nvme,
            Self::Counted { tier, .. } => *tier,
        }
    }

    /// Whether the values exist; false in a dry run.
    pub(crate) fn has_values(&self) -> bool {
        match self {
            Self::Counted { .. } => false,
            Self::Resident { states, .. } => !states.is_meta(),
            Self::Device(_)
            | Self::Mapped { .. }
            | Self::Shared { .. }
            | Self::Files { .. }
            | Self::Spilled { .. } => true,
        }
    }

    /// Length of the region in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Device(block) => block.as_bytes().len(),
            Self::Resident { states, .. } => states.size_bytes(),
            Self::Mapped { len, .. } | Self::Files { len, .. } | Self::Counted { len, .. } => *len,
            Self::Shared { map, .. } => map.own_len(),
            Self::Spilled { extent, .. } => extent.len() as usize,
        }
    }

    /// Whether the region has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Elements of the region in the memory of a discrete device; `None` if they are stored elsewhere.
    #[must_use]
    pub fn resident(&self) -> Option<&Resident> {
        match self {
            Self::Resident { states, .. } => Some(states),
            _ => None,
        }
    }

    /// Elements of the region in the memory of a discrete device, writable; `None` if they are stored
    /// elsewhere.
    #[must_use]
    pub fn resident_mut(&mut self) -> Option<&mut Resident> {
        match self {
            Self::Resident { states, .. } => Some(states),
            _ => None,
        }
    }

    /// Bytes of the region; `None` if the host cannot address them: on disk, on a discrete device, and in a
    /// dry run.
    #[must_use]
    pub fn in_memory(&self) -> Option<&[u8]> {
        match self {
            Self::Device(block) => Some(block.as_bytes()),
            Self::Mapped { map, len, .. } => Some(&map[..*len]),
            Self::Shared { map, .. } => Some(map.own()),
            Self::Files { .. }
            | Self::Spilled { .. }
            | Self::Resident { .. }
            | Self::Counted { .. } => None,
        }
    }

    /// Maps of the files that have the region's weights, by the first element of each in the parameter group; `None` if the
    /// weights are stored elsewhere.
    pub(crate) fn files(&self) -> Option<&BTreeMap<usize, ForeignBytes>> {
        match self {
            Self::Files { maps, .. } => Some(maps),
            _ => None,
        }
    }

    /// As [`Region::files`], for the maps to be entered.
    pub(crate) fn files_mut(&mut self) -> Option<&mut BTreeMap<usize, ForeignBytes>> {
        match self {
            Self::Files { maps, .. } => Some(maps),
            _ => None,
        }
    }

    /// Bytes that a lease in place reads: those of the region, or of all ranks if they map the same memory. `None` if the
    /// host cannot address them, and while ranks write them.
    pub(crate) fn leased(&self) -> Option<&[u8]> {
        match self {
            Self::Shared { map, .. } => map.whole(),
            _ => self.in_memory(),
        }
    }

    /// The map, if all ranks map the memory of the region.
    pub(crate) fn shared_mut(&mut self) -> Option<&mut SharedMap> {
        match self {
            Self::Shared { map, .. } => Some(map),
            _ => None,
        }
    }

    /// The bytes, writable; empty if the host cannot address them.
    pub(crate) fn in_memory_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Device(block) => block.as_bytes_mut(),
            Self::Mapped { map, len, .. } => &mut map[..*len],
            Self::Shared { map, .. } => map.own_mut(),
            Self::Files { .. }
            | Self::Spilled { .. }
            | Self::Resident { .. }
            | Self::Counted { .. } => &mut [],
        }
    }

    /// Copies bytes of the region, from byte `offset` on, to `out` until it is full. The copied range must be
    /// inside the region. Does nothing in a dry run.
    ///
    /// # Errors
    /// When the disk or the device fails.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        match self {
            Self::Spilled { extent, spill, .. } => {
                Ok(spill.io.copy_out(extent, offset as u64, out)?)
            }
            _ if !self.has_values() => Ok(()),
            Self::Resident { states, backend } => Ok(access(backend)?.read(states, offset, out)?),
            _ => {
                let all = self.in_memory().unwrap_or_default();
                parallel::copy(&all[offset..offset + out.len()], out);
                Ok(())
            }
        }
    }

    /// Copies `bytes` to the region, from byte `offset` on. They must fit in the region. Does nothing in a
    /// dry run.
    ///
    /// # Errors
    /// When the disk or the device fails.
    pub fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<()> {
        match self {
            Self::Spilled { extent, spill, .. } => {
                Ok(spill.io.copy_in(extent, offset as u64, bytes)?)
            }
            _ if !self.has_values() => Ok(()),
            Self::Resident { states, backend } => {
                Ok(access(backend)?.write(states, offset, bytes)?)
            }
            _ => {
                let place = &mut self.in_memory_mut()[offset..offset + bytes.len()];
                parallel::copy(bytes, place);
                Ok(())
            }
        }
    }

    /// Starts to read a chunk, if it is on disk and a buffer is free.
    pub(crate) fn read_ahead(&self, bytes: Range<usize>) -> Result<Option<PendingRead>> {
        match self {
            Self::Spilled { extent, spill, .. } => Ok(spill.io.read_ahead(extent, wide(&bytes))?),
            _ => Ok(None),
        }
    }

    /// Opens the chunk `bytes` of the region. `ahead` is its prefetch, if any.
    pub(crate) fn window(
        &mut self,
        bytes: Range<usize>,
        access: Access,
        ahead: Option<PendingRead>,
    ) -> Result<RegionChunk<'_>> {
        Ok(match self {
            Self::Device(_) | Self::Mapped { .. } | Self::Shared { .. } => {
                RegionChunk::Memory(&mut self.in_memory_mut()[bytes])
            }
            Self::Files { .. } | Self::Counted { .. } => RegionChunk::Memory(&mut []),
            Self::Resident { states, backend } => {
                let mut copy = Copied::of(states, backend, bytes);
                match access {
                    Access::Write => copy.words.fill(0),
                    _ => copy.fetch()?,
                }
                copy.written = access != Access::Read;
                RegionChunk::Copied(copy)
            }
            Self::Spilled { extent, spill, .. } => {
                let io_buffer = match (access, ahead) {
                    (_, Some(ahead)) => ahead.wait()?,
                    (Access::Write, None) => {
                        let mut io_buffer = spill.io.fresh(extent, wide(&bytes))?;
                        io_buffer.as_bytes_mut().fill(0);
                        io_buffer
                    }
                    (_, None) => spill.io.read(extent, wide(&bytes))?.wait()?,
                };
                RegionChunk::IoBuffer {
                    io_buffer,
                    extent,
                    io: &spill.io,
                    written: access != Access::Read,
                }
            }
        })
    }

    /// Opens the chunk `bytes` of the region with the contents `from` of `source`, which must be on the same tier.
    /// Writes go to this region.
    pub(crate) fn chunk_from(
        &mut self,
        bytes: Range<usize>,
        source: &Self,
        from: Range<usize>,
        ahead: Option<PendingRead>,
    ) -> Result<RegionChunk<'_>> {
        let target = match self {
            Self::Spilled { extent, spill, .. } => {
                let read = match (ahead, source) {
                    (Some(ahead), _) => ahead,
                    (None, Self::Spilled { extent, .. }) => spill.io.read(extent, wide(&from))?,
                    (None, _) => return Err(EngineError::TiersDiffer),
                };
                return Ok(RegionChunk::IoBuffer {
                    io_buffer: spill.io.moved(read.wait()?, extent, wide(&bytes))?,
                    extent,
                    io: &spill.io,
                    written: true,
                });
            }
            Self::Resident { states, backend } => {
                let mut copy = Copied::of(states, backend, bytes);
                source.read(from.start, copy.as_bytes_mut())?;
                copy.written = true;
                return Ok(RegionChunk::Copied(copy));
            }
            Self::Files { .. } | Self::Counted { .. } => return Ok(RegionChunk::Memory(&mut [])),
            Self::Device(_) | Self::Mapped { .. } | Self::Shared { .. } => self.in_memory_mut(),
        };
        let source = source.in_memory().ok_or(EngineError::TiersDiffer)?;
        let target = &mut target[bytes];
        parallel::copy(&source[from], target);
        Ok(RegionChunk::Memory(target))
    }

    /// Calls `body` for the elements `range`, chunk by chunk in ascending order; memory the host can address is one
    /// chunk. The region begins at the element `start` of the parameter group.
    pub(crate) fn for_each_chunk<T: Pod>(
        &mut self,
        start: usize,
        range: Range<usize>,
        access: Access,
        mut body: impl FnMut(Range<usize>, &mut [T]) -> Result<()>,
    ) -> Result<()> {
        if !self.has_values() {
            return Ok(());
        }
        let size = size_of::<T>();
        let bytes = |part: &Range<usize>| (part.start - start) * size..(part.end - start) * size;
        let most = match self {
            Self::Spilled { .. } => REGION_CHUNK_ELEMS,
            Self::Resident { .. } => COPY_ELEMS,
            _ => usize::MAX,
        };
        let parts: Vec<_> = region_chunks(range, most).collect();
        let mut reads = VecDeque::new();
        for (i, part) in parts.iter().enumerate() {
            while access != Access::Write && i + reads.len() < parts.len() {
                match self.read_ahead(bytes(&parts[i + reads.len()]))? {
                    Some(read) => reads.push_back(read),
                    None => break,
                }
            }
            let mut window = self.window(bytes(part), access, reads.pop_front())?;
            body(part.clone(), window.as_mut_slice())?;
            window.commit()?;
        }
        Ok(())
    }

    /// Stores `values` as elements `target`, rounded to nearest even in `dtype`. The region begins at the element
    /// `start` of the parameter group.
    pub(crate) fn write_rounded(
        &mut self,
        dtype: DType,
        start: usize,
        target: Range<usize>,
        values: &[f32],
    ) -> Result<()> {
        let first = target.start;
        match dtype {
            DType::F32 => self.for_each_chunk(start, target, Access::Write, |part, out| {
                out.copy_from_slice(&values[part.start - first..part.end - first]);
                Ok(())
            }),
            DType::F16 => self.for_each_chunk(start, target, Access::Write, |part, out| {
                round::<f16>(out, &values[part.start - first..part.end - first]);
                Ok(())
            }),
            _ => self.for_each_chunk(start, target, Access::Write, |part, out| {
                round::<bf16>(out, &values[part.start - first..part.end - first]);
                Ok(())
            }),
        }
    }
}

fn round<T: Float>(out: &mut [T], values: &[f32]) {
    for (o, v) in out.iter_mut().zip(values) {
        *o = T::from_f32(*v);
    }
}

fn wide(bytes: &Range<usize>) -> Range<u64> {
    bytes.start as u64..bytes.end as u64
}

/// How a chunk of a region is accessed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Access {
    /// The chunk's values are read and not changed.
    Read,
    /// The contents are overwritten. On disk and on a discrete device, bytes that are not written become zero.
    Write,
    /// The chunk's values are read and overwritten.
    Update,
}

/// Bytes of a region, in memory the host can address while the chunk is open.
#[derive(Debug)]
pub(crate) enum RegionChunk<'r> {
    /// Memory of the region itself.
    Memory(&'r mut [u8]),
    /// A copy of memory of a discrete device.
    Copied(Copied<'r>),
    /// A buffer of the disk queue.
    IoBuffer {
        io_buffer: IoBuffer,
        extent: &'r Extent,
        io: &'r SpillIo,
        written: bool,
    },
}

impl RegionChunk<'_> {
    pub(crate) fn as_mut_bytes(&mut self) -> &mut [u8] {
        match self {
            Self::Memory(bytes) => bytes,
            Self::Copied(copy) => copy.as_bytes_mut(),
            Self::IoBuffer { io_buffer, .. } => io_buffer.as_bytes_mut(),
        }
    }

    pub(crate) fn as_mut_slice<T: Pod>(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(self.as_mut_bytes())
    }

    /// Closes the chunk; changed bytes are written to the region.
    pub(crate) fn commit(self) -> Result<()> {
        match self {
            Self::IoBuffer {
                io_buffer,
                extent,
                io,
                written: true,
            } => Ok(io.write(extent, io_buffer)?),
            Self::Copied(copy) => copy.commit(),
            Self::Memory(_) | Self::IoBuffer { .. } => Ok(()),
        }
    }
}

thread_local! {
    /// Memory of the last copy, reused by the next one. Clearing new memory takes longer than the copy over the bus.
    static COPY: RefCell<Vec<u32>> = const { RefCell::new(Vec::new()) };
}

/// Copy in host memory of some bytes of a discrete device.
#[derive(Debug)]
pub(crate) struct Copied<'r> {
    states: &'r mut Resident,
    backend: &'r Arc<dyn Backend>,
    at: usize,
    /// The bytes in words, so that elements of every dtype are aligned.
    words: Vec<u32>,
    len: usize,
    written: bool,
}

impl<'r> Copied<'r> {
    fn of(states: &'r mut Resident, backend: &'r Arc<dyn Backend>, bytes: Range<usize>) -> Self {
        let mut words = COPY.take();
        words.resize(bytes.len().div_ceil(4), 0);
        Self {
            states,
            backend,
            at: bytes.start,
            words,
            len: bytes.len(),
            written: false,
        }
    }

    fn as_bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.len]
    }

    fn fetch(&mut self) -> Result<()> {
        let out = &mut bytemuck::cast_slice_mut(&mut self.words)[..self.len];
        Ok(access(self.backend)?.read(self.states, self.at, out)?)
    }

    fn commit(self) -> Result<()> {
        if !self.written {
            return Ok(());
        }
        let bytes = &bytemuck::cast_slice(&self.words)[..self.len];
        Ok(access(self.backend)?.write(self.states, self.at, bytes)?)
    }
}

impl Drop for Copied<'_> {
    fn drop(&mut self) {
        if self.words.len() <= COPY_ELEMS {
            COPY.set(std::mem::take(&mut self.words));
        }
    }
}

/// Divides `range` into chunks of at most `most` elements that end at multiples of `most`. `most` must be a
/// multiple of [`WINDOW_ALIGN`](crate::plan::blocks::WINDOW_ALIGN).
pub(crate) fn region_chunks(
    range: Range<usize>,
    most: usize,
) -> impl Iterator<Item = Range<usize>> {
    let mut start = range.start;
    std::iter::from_fn(move || {
        if start >= range.end {
            return None;
        }
        let end = (start / most)
            .checked_add(1)
            .and_then(|next| next.checked_mul(most))
            .map_or(range.end, |end| end.min(range.end));
        let piece = start..end;
        start = end;
        Some(piece)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::offload::spill::{IoPath, SpillDirectory};

    pub(crate) fn on_disk(io: IoPath) -> (tempfile::TempDir, Tiers) {
        let exe = std::env::current_exe().unwrap();
        let parent = tempfile::tempdir_in(exe.parent().unwrap()).unwrap();
        let directory = Arc::new(SpillDirectory::join(parent.path(), "tier").unwrap());
        let host = Pool::new("host", None);
        let file = SpillFile::create(&directory, 0, "optimizer", io).unwrap();
        let spill = Spill::new(
            SpillIo::new(0, &host).unwrap(),
            [(StateKind::Optimizer, file)],
        );
        (
            parent,
            Tiers::new(Pool::new("device", None), host).with_spill(spill),
        )
    }

    #[test]
    fn chunks_cover_a_range_once_and_end_at_block_boundaries() {
        for (range, most) in [(5..5, 8), (3..100, 8), (8..16, 8), (1..9, usize::MAX)] {
            let pieces: Vec<_> = region_chunks(range.clone(), most).collect();
            let covered: usize = pieces.iter().map(ExactSizeIterator::len).sum();
            assert_eq!(covered, range.len());
            for pair in pieces.windows(2) {
                assert_eq!(pair[0].end, pair[1].start);
                assert_eq!(pair[0].end % most, 0);
            }
        }
    }

    #[test]
    fn every_tier_reads_back_what_chunks_of_any_start_wrote() {
        let (_parent, tiers) = on_disk(IoPath::Mapped);
        // Three chunks: the first and the last are not whole, and the range starts inside a block.
        let range = 4_128..2 * REGION_CHUNK_ELEMS + 9_600;
        let values: Vec<f32> = range.clone().map(|i| i as f32).collect();
        for tier in [Tier::Device, Tier::Host, Tier::Nvme] {
            let place = (StateKind::Optimizer, tier);
            let mut wide = tiers
                .allocate(place, range.clone(), DType::F32, Tag::Optimizer)
                .unwrap();
            let mut narrow = tiers
                .allocate(place, range.clone(), DType::BF16, Tag::Optimizer)
                .unwrap();
            for (region, dtype) in [(&mut wide, DType::F32), (&mut narrow, DType::BF16)] {
                region
                    .write_rounded(dtype, range.start, range.clone(), &values)
                    .unwrap();
            }
            let inner = range.start + 10..range.end - 32;
            wide.for_each_chunk::<f32>(range.start, inner.clone(), Access::Update, |part, out| {
                assert!(out.iter().zip(part).all(|(v, i)| *v == i as f32));
                out.iter_mut().for_each(|v| *v += 1.0);
                Ok(())
            })
            .unwrap();
            let mut bytes = vec![0; wide.len()];
            wide.read(0, &mut bytes).unwrap();
            for (i, v) in range.clone().zip(bytemuck::cast_slice::<u8, f32>(&bytes)) {
                assert_eq!(*v, i as f32 + f32::from(u8::from(inner.contains(&i))));
            }
            bytes.truncate(narrow.len());
            narrow.read(0, &mut bytes).unwrap();
            for (v, kept) in values.iter().zip(bytemuck::cast_slice::<u8, bf16>(&bytes)) {
                assert_eq!(bf16::from_f32(*v), *kept);
            }
        }
        let spilled = tiers.spill().unwrap();
        assert_eq!(spilled.pool().stats().in_use, 0);
        assert!(spilled.file_bytes() >= 4096 + range.len() as u64 * 6);
    }

    #[test]
    fn a_state_kind_without_a_spill_file_is_refused_by_name() {
        let (_parent, tiers) = on_disk(IoPath::Mapped);
        let place = (StateKind::Param, Tier::Nvme);
        let error = tiers
            .allocate(place, 0..32, DType::F32, Tag::Parameters)
            .unwrap_err();
        assert!(error.to_string().contains("param"), "{error}");
    }
}

//! Saved activations: tensors that backward starts from, stored off the device between forward and backward.
//!
//! 1. A save never waits for a discrete device. The copy runs during the device's next work and ends at the
//!    next save.
//! 2. Memory for the next tensor that backward needs is reserved before the previous segment's work is queued.
//! 3. Its values are therefore copied back during that work.

use super::spill::PendingRead;
use super::tier::{Region, Tiers};
use crate::error::EngineError;
use crate::plan::blocks::{SEGMENT_BYTES, extent_bytes};
use crate::plan::{StateKind, Tier};
use crate::timing::CopyClock;
use kernels::{Backend, Block, DType, Fetch, Pool, ReservedUpload, Shape, Tag, Tensor, TensorMut};
use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::ops::Range;
use std::rc::{Rc, Weak};
use std::time::Duration;

type Result<T, E = EngineError> = std::result::Result<T, E>;

/// Storage of saved activations (inputs of checkpointed segments) in host memory or on disk, between forward
/// and backward. Memory of released tensors is reused, so equal steps allocate nothing new.
#[derive(Debug)]
pub struct Activations {
    tier: Tier,
    tiers: Tiers,
    /// Pool that counts the saved tensors: the host's, or the disk's.
    books: Pool,
    arena: Rc<RefCell<Arena>>,
    clock: RefCell<CopyClock>,
    /// Whether tensors come from a discrete device.
    discrete: bool,
    /// The tensor saved last, whose copy from the discrete device may still run.
    leaving: RefCell<Weak<RefCell<Stored>>>,
}

#[derive(Debug)]
enum Stored {
    /// A copy from a discrete device that still runs.
    Leaving(Fetch),
    /// A tensor of the meta device, which has no values and is only counted.
    Null {
        _placed: Tensor,
    },
    Host(Block),
    Spilled {
        place: DiskRange,
        arena: Rc<RefCell<Arena>>,
        ahead: RefCell<VecDeque<PendingRead>>,
    },
}

/// Source of a tensor's values: host-addressable memory, or a copy from a discrete device.
enum Source<'a> {
    Here(&'a Tensor),
    Leaving(&'a Fetch),
}

impl Source<'_> {
    fn bytes(&self) -> Result<Cow<'_, [u8]>> {
        match self {
            Self::Here(value) => Ok(value.host_bytes()?),
            Self::Leaving(fetch) => {
                let mut bytes = vec![0; fetch.tensor().size_bytes()];
                fetch.bytes_into(&mut bytes)?;
                Ok(Cow::Owned(bytes))
            }
        }
    }

    fn copy_into(&self, out: &mut [u8]) -> Result<()> {
        match self {
            Self::Here(value) => out.copy_from_slice(&value.host_bytes()?),
            Self::Leaving(fetch) => fetch.bytes_into(out)?,
        }
        Ok(())
    }
}

/// Disk regions, each with its free byte ranges in ascending order.
#[derive(Debug, Default)]
struct Arena(Vec<(Region, Vec<Range<usize>>)>);

/// Byte range in a region of the arena.
#[derive(Clone, Debug)]
struct DiskRange {
    region: usize,
    bytes: Range<usize>,
}

impl Arena {
    fn add(&mut self, region: Region) {
        let all = 0..region.len();
        self.0.push((region, vec![all]));
    }

    fn bytes(&self) -> usize {
        self.0.iter().map(|(region, _)| region.len()).sum()
    }

    /// Takes the first free range that is large enough.
    fn take(&mut self, bytes: usize) -> Option<DiskRange> {
        for (region, (_, free)) in self.0.iter_mut().enumerate() {
            let Some(at) = free.iter().position(|range| range.len() >= bytes) else {
                continue;
            };
            let start = free[at].start;
            free[at].start += bytes;
            if free[at].is_empty() {
                free.remove(at);
            }
            return Some(DiskRange {
                region,
                bytes: start..start + bytes,
            });
        }
        None
    }

    fn give_back(&mut self, place: &DiskRange) {
        let free = &mut self.0[place.region].1;
        let at = free.partition_point(|range| range.start < place.bytes.start);
        free.insert(at, place.bytes.clone());
        // Merges the range with free neighbors.
        free.dedup_by(|next, range| {
            let touches = range.end == next.start;
            if touches {
                range.end = next.end;
            }
            touches
        });
    }

    fn region(&self, place: &DiskRange) -> &Region {
        &self.0[place.region].0
    }
}

/// Handle of a tensor that [`Activations`] has saved. The tensor's memory is reused after the last handle is
/// dropped.
#[derive(Debug)]
pub struct Saved {
    shape: Shape,
    dtype: DType,
    kept: Rc<RefCell<Stored>>,
    /// Reserved memory on a discrete device, one for each segment that loads the tensor.
    reserved_uploads: RefCell<VecDeque<ReservedUpload>>,
}

impl Drop for Stored {
    fn drop(&mut self) {
        if let Self::Spilled { place, arena, .. } = self {
            arena.borrow_mut().give_back(place);
        }
    }
}

impl Activations {
    /// Creates storage of saved activations on `tier`. `None` for [`Tier::Device`], where tensors stay on the
    /// device.
    #[must_use]
    pub fn new(tier: Tier, tiers: Tiers) -> Option<Self> {
        (tier != Tier::Device).then(|| Self {
            tier,
            books: match tier {
                Tier::Nvme => tiers.disk_pool(),
                Tier::Device | Tier::Host => tiers.host.clone(),
            },
            tiers,
            arena: Rc::default(),
            clock: RefCell::default(),
            discrete: false,
            leaving: RefCell::default(),
        })
    }

    /// Prepares the storage for tensors of `device`. Tensors of a discrete device are copied while it
    /// continues to compute.
    #[must_use]
    pub fn of(mut self, device: &dyn Backend) -> Self {
        self.discrete = !device.device().is_host_addressable();
        self
    }

    /// Memory pool that counts the bytes of saved tensors: that of host memory, or that of spill files.
    #[must_use]
    pub fn books(&self) -> &Pool {
        &self.books
    }

    /// Total time of copies of saved tensors so far.
    pub(crate) fn copy_time(&self) -> Duration {
        self.clock.borrow().total()
    }

    /// Makes sure that at least `bytes` in total are reserved on disk for saved tensors, so that a disk that
    /// is too small is detected now. Does nothing on other tiers. Saves beyond `bytes` allocate more.
    ///
    /// # Errors
    /// When the disk is full.
    pub fn reserve(&self, bytes: u64) -> Result<()> {
        let held = self.arena.borrow().bytes();
        let missing = (bytes as usize).saturating_sub(held);
        if self.tier == Tier::Nvme && missing > 0 {
            let region = self.allocate(missing)?;
            self.arena.borrow_mut().add(region);
        }
        Ok(())
    }

    fn allocate(&self, bytes: usize) -> Result<Region> {
        let place = (StateKind::Activation, self.tier);
        self.tiers.allocate_bytes(place, bytes, 0, Tag::Activations)
    }

    /// Copies a tensor to the storage and returns its handle. The copy from a discrete device is
    /// asynchronous: the handle keeps the original in device memory until the next call of this function,
    /// which completes the copy.
    ///
    /// # Errors
    /// When the tier is full.
    pub fn save(&self, value: &Tensor) -> Result<Saved> {
        let save = || -> Result<Stored> {
            if self.discrete {
                self.finish()?;
                return Ok(Stored::Leaving(value.fetch()?));
            }
            self.keep(value, &Source::Here(value))
        };
        let kept = self.clock.borrow_mut().time(self.tier, save)?;
        let kept = Rc::new(RefCell::new(kept));
        if self.discrete {
            *self.leaving.borrow_mut() = Rc::downgrade(&kept);
        }
        Ok(Saved {
            shape: value.shape(),
            dtype: value.dtype(),
            kept,
            reserved_uploads: RefCell::default(),
        })
    }

    /// Completes the copy of the tensor saved last, unless its handle was dropped.
    fn finish(&self) -> Result<()> {
        let Some(last) = self.leaving.take().upgrade() else {
            return Ok(());
        };
        let mut kept = last.borrow_mut();
        if let Stored::Leaving(fetch) = &*kept {
            let arrived = self.keep(fetch.tensor(), &Source::Leaving(fetch))?;
            *kept = arrived;
        }
        Ok(())
    }

    /// Writes the values of `value`, read from `source`, to the tier.
    fn keep(&self, value: &Tensor, source: &Source<'_>) -> Result<Stored> {
        let bytes = value.size_bytes();
        if value.is_meta() {
            let taken = match self.tier {
                Tier::Nvme => disk_bytes(bytes),
                Tier::Device | Tier::Host => bytes,
            };
            let placed = Tensor::null(&self.books, Tag::Activations, [taken], DType::U8)?;
            return Ok(Stored::Null { _placed: placed });
        }
        if self.tier == Tier::Host {
            let mut block = self.tiers.host.take(bytes, Tag::Activations)?;
            source.copy_into(block.as_bytes_mut())?;
            return Ok(Stored::Host(block));
        }
        let bytes = disk_bytes(bytes);
        let mut place = self.arena.borrow_mut().take(bytes);
        if place.is_none() {
            let region = self.allocate(bytes)?;
            let mut arena = self.arena.borrow_mut();
            arena.add(region);
            place = arena.take(bytes);
        }
        let place = place.expect("room in a region made for it");
        // Dropping this value returns the range to the arena, also if the write fails.
        let kept = Stored::Spilled {
            place: place.clone(),
            arena: self.arena.clone(),
            ahead: RefCell::default(),
        };
        let region = &mut self.arena.borrow_mut().0[place.region].0;
        region.write(place.bytes.start, &source.bytes()?)?;
        Ok(kept)
    }

    /// Prepares [`Activations::load`] of a tensor: reserves its memory on a discrete device, and starts to
    /// read it from disk while buffers last.
    ///
    /// # Errors
    /// When the device is out of memory or the disk fails.
    pub fn prefetch(&self, saved: &Saved, device: &dyn Backend) -> Result<()> {
        let kept = saved.kept.borrow();
        if matches!(*kept, Stored::Leaving(_)) {
            return Ok(());
        }
        if self.discrete {
            let arrival = device.reserve_upload(saved.shape, saved.dtype, Tag::Activations)?;
            saved.reserved_uploads.borrow_mut().push_back(arrival);
        }
        let Stored::Spilled {
            place,
            arena,
            ahead,
        } = &*kept
        else {
            return Ok(());
        };
        let (arena, first) = (arena.borrow(), place.bytes.start);
        let region = arena.region(place);
        let mut ahead = ahead.borrow_mut();
        let len = saved.size_bytes();
        let mut at = ahead.len() * SEGMENT_BYTES;
        while at < len {
            let end = len.min(at + SEGMENT_BYTES);
            match region.read_ahead(first + at..first + end)? {
                Some(read) => ahead.push_back(read),
                None => break,
            }
            at = end;
        }
        Ok(())
    }

    /// Loads a saved tensor back to the device. If the copy from a discrete device has not ended yet, the
    /// original is returned.
    ///
    /// # Errors
    /// When the device is out of memory or the disk fails.
    pub fn load(&self, saved: &Saved, device: &dyn Backend) -> Result<Tensor> {
        let load = || self.bring_back(saved, device);
        self.clock.borrow_mut().time(self.tier, load)
    }

    fn bring_back(&self, saved: &Saved, device: &dyn Backend) -> Result<Tensor> {
        let (shape, dtype) = (saved.shape, saved.dtype);
        let kept = saved.kept.borrow();
        if let Stored::Leaving(fetch) = &*kept {
            return Ok(fetch.tensor().clone());
        }
        if self.discrete {
            let arrival = match saved.reserved_uploads.borrow_mut().pop_front() {
                Some(arrival) => arrival,
                None => device.reserve_upload(shape, dtype, Tag::Activations)?,
            };
            return match &*kept {
                Stored::Null { .. } => {
                    placed(device, Some(arrival), shape, dtype, Tag::Activations)
                }
                Stored::Host(block) => Ok(device.upload_into(arrival, block.as_bytes())?),
                Stored::Leaving(_) | Stored::Spilled { .. } => {
                    let mut bytes = vec![0; saved.size_bytes()];
                    kept.read(&mut bytes)?;
                    Ok(device.upload_into(arrival, &bytes)?)
                }
            };
        }
        if let Stored::Null { .. } = *kept {
            return Ok(device.zeros(shape, dtype, Tag::Activations)?);
        }
        let mut value = TensorMut::new(device.pool(), Tag::Activations, shape, dtype)?;
        kept.read(value.as_bytes_mut())?;
        Ok(value.freeze())
    }
}

impl Stored {
    /// Copies the values to `out`; a tensor of the meta device has none.
    fn read(&self, out: &mut [u8]) -> Result<()> {
        match self {
            Self::Null { .. } => {}
            Self::Leaving(fetch) => fetch.bytes_into(out)?,
            Self::Host(block) => out.copy_from_slice(block.as_bytes()),
            Self::Spilled {
                place,
                arena,
                ahead,
            } => {
                let mut at = 0;
                for read in ahead.borrow_mut().drain(..) {
                    let io_buffer = read.wait()?;
                    let bytes = io_buffer.as_bytes();
                    out[at..at + bytes.len()].copy_from_slice(bytes);
                    at += bytes.len();
                }
                let arena = arena.borrow();
                let region = arena.region(place);
                region.read(place.bytes.start + at, &mut out[at..])?;
            }
        }
        Ok(())
    }
}

/// A tensor without values for a dry run, in the reserved memory `place` or in new memory.
pub(crate) fn placed(
    device: &dyn Backend,
    place: Option<ReservedUpload>,
    shape: Shape,
    dtype: DType,
    tag: Tag,
) -> Result<Tensor> {
    Ok(match place.and_then(ReservedUpload::into_tensor) {
        Some(place) => place,
        None => device.zeros(shape, dtype, tag)?,
    })
}

/// Number of bytes in whole blocks, since two tensors must not share a block.
fn disk_bytes(bytes: usize) -> usize {
    extent_bytes(bytes as u64, 0) as usize
}

impl Saved {
    fn size_bytes(&self) -> usize {
        self.shape.elems() * self.dtype.size_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::offload::spill::{IoPath, SpillDirectory, SpillFile, SpillIo};
    use crate::offload::tier::Spill;
    use kernels::{CpuBackend, MetaBackend};
    use std::sync::Arc;

    fn keepers() -> (tempfile::TempDir, Vec<Activations>) {
        let exe = std::env::current_exe().unwrap();
        let parent = tempfile::tempdir_in(exe.parent().unwrap()).unwrap();
        let directory = Arc::new(SpillDirectory::join(parent.path(), "kept").unwrap());
        let host = Pool::new("host", None);
        let file = SpillFile::create(&directory, 0, "activation", IoPath::Mapped).unwrap();
        let spill = Spill::new(
            SpillIo::new(0, &host).unwrap(),
            [(StateKind::Activation, file)],
        );
        let tiers = Tiers::new(Pool::new("device", None), host).with_spill(spill);
        let keep = |tier| Activations::new(tier, tiers.clone());
        assert!(keep(Tier::Device).is_none());
        let kept = [Tier::Host, Tier::Nvme].into_iter().filter_map(keep);
        (parent, kept.collect())
    }

    #[test]
    fn saved_tensors_load_unchanged_and_their_memory_is_reused() {
        let (_parent, keepers) = keepers();
        let device = Pool::new("device", None);
        let values: Vec<f32> = (0..700_000).map(|i| i as f32).collect();
        for keeper in keepers {
            let mut files = Vec::new();
            for round in 0..3 {
                let large =
                    Tensor::from_slice(&device, Tag::Activations, [700, 1000], &values).unwrap();
                let small =
                    Tensor::from_slice(&device, Tag::Activations, [10], &values[..10]).unwrap();
                let kept = [keeper.save(&large).unwrap(), keeper.save(&small).unwrap()];
                drop((large, small));
                assert_eq!(device.stats().in_use, 0, "nothing stays on the device");
                if round > 0 {
                    let cpu = CpuBackend::new(device.clone());
                    keeper.prefetch(&kept[0], &cpu).unwrap();
                }
                for (saved, len) in kept.iter().zip([700_000, 10]) {
                    // More than one segment may load the same tensor.
                    for _ in 0..2 {
                        let back = keeper
                            .load(saved, &CpuBackend::new(device.clone()))
                            .unwrap();
                        assert_eq!(back.as_slice::<f32>(), &values[..len]);
                    }
                }
                files.push(keeper.tiers.spill().unwrap().file_bytes());
            }
            assert_eq!(files[0], files[2], "released regions are used again");
            assert!(keeper.copy_time() > Duration::ZERO);
        }
    }

    #[test]
    fn on_a_meta_device_only_bytes_are_counted() {
        let (_parent, keepers) = keepers();
        let device = Pool::new("null", None);
        for keeper in keepers {
            let value = Tensor::null(&device, Tag::Activations, [16, 16], DType::F32).unwrap();
            let before = keeper.books().stats().in_use;
            let saved = keeper.save(&value).unwrap();
            // On disk, whole blocks are counted.
            let bytes = if keeper.tier == Tier::Nvme {
                4096
            } else {
                1024
            };
            assert_eq!(keeper.books().stats().in_use - before, bytes);
            let back = keeper
                .load(&saved, &MetaBackend::new(device.clone()))
                .unwrap();
            assert!(back.is_meta());
            drop(saved);
            assert_eq!(keeper.books().stats().in_use, before);
        }
    }

    #[test]
    fn a_spill_file_stays_within_its_reserved_bytes_as_sizes_change() {
        let (_parent, keepers) = keepers();
        let device = Pool::new("device", None);
        let keeper = &keepers[1];
        let file_bytes = || keeper.tiers.spill().unwrap().file_bytes();
        keeper.reserve(5 * 4096).unwrap();
        let reserved = file_bytes();
        assert!(reserved >= 5 * 4096);
        let values: Vec<f32> = (0..5000).map(|i| i as f32).collect();
        let save = |len: usize| {
            let tensor = Tensor::from_slice(&device, Tag::Activations, [len], &values[..len]);
            (len, keeper.save(&tensor.unwrap()).unwrap())
        };
        // Each list fills the reserved blocks. Free ranges of one list must be merged to serve the next.
        for lens in [vec![1000; 5], vec![2048, 3000], vec![5000], vec![1, 4000]] {
            let mut kept: Vec<_> = lens.into_iter().map(save).collect();
            kept.reverse();
            for (len, saved) in kept {
                let back = keeper
                    .load(&saved, &CpuBackend::new(device.clone()))
                    .unwrap();
                assert_eq!(back.as_slice::<f32>(), &values[..len]);
            }
            assert_eq!(file_bytes(), reserved);
        }
        // Saves beyond the reservation allocate more. A second reservation counts what exists.
        let more = [save(5000), save(5000)];
        assert!(file_bytes() > reserved);
        let grown = file_bytes();
        drop(more);
        keeper.reserve(6 * 4096).unwrap();
        assert_eq!(file_bytes(), grown);
        let error = keeper.reserve(1 << 50).unwrap_err();
        assert!(matches!(error, EngineError::Spill(_)), "{error}");
    }
}

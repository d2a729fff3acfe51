//! What backward starts from, kept off the device between forward and backward.

use crate::error::EngineError;
use crate::plan::{StateKind, Tier};
use crate::spill::PendingRead;
use crate::tier::{Region, Tiers};
use crate::timing::CopyClock;
use kernels::{Block, DType, Pool, Shape, Tag, Tensor, TensorMut};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

type Result<T, E = EngineError> = std::result::Result<T, E>;

/// Keeps tensors on the host or on a disk. Memory of released tensors is used again, so that a step like the one
/// before takes nothing from the system.
#[derive(Debug)]
pub struct Activations {
    tier: Tier,
    tiers: Tiers,
    /// Where tensors without values are counted.
    books: Pool,
    spare: Rc<RefCell<Vec<Region>>>,
    clock: RefCell<CopyClock>,
}

#[derive(Debug)]
enum Kept {
    /// A place without memory: on a device without values.
    Null {
        _placed: Tensor,
    },
    Host(Block),
    Spilled {
        region: Option<Region>,
        spare: Rc<RefCell<Vec<Region>>>,
        ahead: RefCell<VecDeque<PendingRead>>,
    },
}

/// A tensor that is kept elsewhere.
#[derive(Debug)]
pub struct Saved {
    shape: Shape,
    dtype: DType,
    kept: Kept,
}

impl Drop for Kept {
    fn drop(&mut self) {
        if let Self::Spilled { region, spare, .. } = self {
            spare.borrow_mut().extend(region.take());
        }
    }
}

impl Activations {
    /// A keeper on `tier`; `None` where tensors simply stay on the device.
    #[must_use]
    pub fn new(tier: Tier, tiers: Tiers) -> Option<Self> {
        (tier != Tier::Device).then(|| Self {
            tier,
            books: match (tier, tiers.spill()) {
                (Tier::Nvme, Some(spill)) => spill.pool().clone(),
                (Tier::Nvme, None) => Pool::new("nvme", None),
                _ => tiers.host.clone(),
            },
            tiers,
            spare: Rc::default(),
            clock: RefCell::default(),
        })
    }

    /// Where tensors are counted: the host pool, or the disk's.
    #[must_use]
    pub fn books(&self) -> &Pool {
        &self.books
    }

    /// Time spent copying so far.
    pub(crate) fn copy_time(&self) -> Duration {
        self.clock.borrow().total()
    }

    /// Copies a tensor to the tier.
    ///
    /// # Errors
    /// When the tier is full.
    pub fn save(&self, value: &Tensor) -> Result<Saved> {
        let save = || self.keep(value);
        Ok(Saved {
            shape: value.shape(),
            dtype: value.dtype(),
            kept: self.clock.borrow_mut().time(self.tier, save)?,
        })
    }

    fn keep(&self, value: &Tensor) -> Result<Kept> {
        let bytes = value.size_bytes();
        if value.is_null() {
            let (shape, dtype) = (value.shape(), value.dtype());
            let placed = Tensor::null(&self.books, Tag::Activations, shape, dtype)?;
            return Ok(Kept::Null { _placed: placed });
        }
        if self.tier == Tier::Host {
            let mut block = self.tiers.host.take(bytes, Tag::Activations)?;
            block.as_bytes_mut().copy_from_slice(value.as_bytes());
            return Ok(Kept::Host(block));
        }
        let mut region = match self.take_spare(bytes) {
            Some(region) => region,
            None => {
                let place = (StateKind::Activation, self.tier);
                self.tiers
                    .allocate_bytes(place, bytes, 0, Tag::Activations)?
            }
        };
        region.write(0, value.as_bytes())?;
        Ok(Kept::Spilled {
            region: Some(region),
            spare: self.spare.clone(),
            ahead: RefCell::default(),
        })
    }

    /// The smallest released region that is large enough.
    fn take_spare(&self, bytes: usize) -> Option<Region> {
        let mut spare = self.spare.borrow_mut();
        let fitting = spare.iter().enumerate().filter(|(_, r)| r.len() >= bytes);
        let best = fitting.min_by_key(|(_, region)| region.len())?.0;
        Some(spare.swap_remove(best))
    }

    /// Starts to read a tensor that is needed soon, as far as buffers go.
    ///
    /// # Errors
    /// When the disk fails.
    pub fn prefetch(&self, saved: &Saved) -> Result<()> {
        let Kept::Spilled {
            region: Some(region),
            ahead,
            ..
        } = &saved.kept
        else {
            return Ok(());
        };
        let mut ahead = ahead.borrow_mut();
        let len = saved.size_bytes();
        let mut at = ahead.len() * crate::spill::SEGMENT_BYTES;
        while at < len {
            let end = len.min(at + crate::spill::SEGMENT_BYTES);
            match region.read_ahead(at..end)? {
                Some(read) => ahead.push_back(read),
                None => break,
            }
            at = end;
        }
        Ok(())
    }

    /// The tensor, on the device again.
    ///
    /// # Errors
    /// When the device or the disk refuses.
    pub fn load(&self, saved: &Saved, device: &Pool) -> Result<Tensor> {
        let Saved { shape, dtype, kept } = saved;
        let load = || -> Result<Tensor> {
            if let Kept::Null { .. } = kept {
                return Ok(Tensor::null(device, Tag::Activations, *shape, *dtype)?);
            }
            let mut value = TensorMut::new(device, Tag::Activations, *shape, *dtype)?;
            let out = value.as_bytes_mut();
            match kept {
                Kept::Null { .. } => {}
                Kept::Host(block) => out.copy_from_slice(block.as_bytes()),
                Kept::Spilled { region, ahead, .. } => {
                    let mut at = 0;
                    for read in ahead.borrow_mut().drain(..) {
                        let segment = read.wait()?;
                        let bytes = segment.as_bytes();
                        out[at..at + bytes.len()].copy_from_slice(bytes);
                        at += bytes.len();
                    }
                    if let Some(region) = region {
                        region.read(at, &mut out[at..])?;
                    }
                }
            }
            Ok(value.freeze())
        };
        self.clock.borrow_mut().time(self.tier, load)
    }
}

impl Saved {
    fn size_bytes(&self) -> usize {
        self.shape.elems() * self.dtype.size_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spill::{IoPath, SpillFile, SpillFolder, SpillIo};
    use crate::tier::Spill;
    use std::sync::Arc;

    fn keepers() -> (tempfile::TempDir, Vec<Activations>) {
        let exe = std::env::current_exe().unwrap();
        let parent = tempfile::tempdir_in(exe.parent().unwrap()).unwrap();
        let folder = Arc::new(SpillFolder::join(parent.path(), "kept").unwrap());
        let host = Pool::new("host", None);
        let file = SpillFile::create(&folder, 0, "activation", IoPath::Mapped).unwrap();
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
    fn tensors_come_back_as_they_were_and_their_memory_is_used_again() {
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
                    keeper.prefetch(&kept[0]).unwrap();
                }
                for (saved, len) in kept.iter().zip([700_000, 10]) {
                    // More than one segment may want the same value.
                    for _ in 0..2 {
                        let back = keeper.load(saved, &device).unwrap();
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
    fn on_a_device_without_values_only_bytes_are_counted() {
        let (_parent, keepers) = keepers();
        let device = Pool::new("null", None);
        for keeper in keepers {
            let value = Tensor::null(&device, Tag::Activations, [16, 16], DType::F32).unwrap();
            let before = keeper.books().stats().in_use;
            let saved = keeper.save(&value).unwrap();
            assert_eq!(keeper.books().stats().in_use - before, 1024);
            let back = keeper.load(&saved, &device).unwrap();
            assert!(back.is_null());
            drop(saved);
            assert_eq!(keeper.books().stats().in_use, before);
        }
    }
}

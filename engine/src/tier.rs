//! Memory that outlives a pass, on the tier the plan puts it.
//!
//! Device memory comes from the device's pool. Host memory is a private anonymous memory map,
//! counted against the host pool; a spill file on NVMe is the same map over a file.

use crate::error::EngineError;
use crate::plan::Tier;
use bytemuck::Pod;
use half::{bf16, f16};
use kernels::{Block, DType, Float, Pool, Reservation, Tag};
use memmap2::MmapMut;
use std::ops::Range;

/// The pools of one rank.
#[derive(Clone, Debug)]
pub struct Tiers {
    /// Device memory.
    pub device: Pool,
    /// Host memory.
    pub host: Pool,
}

impl Tiers {
    /// Allocates zeroed memory.
    ///
    /// # Errors
    /// When the tier's pool is full or the system refuses the map.
    pub fn allocate(&self, tier: Tier, bytes: usize, tag: Tag) -> Result<Region, EngineError> {
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
                Region::Mapped {
                    map,
                    len: bytes,
                    counted,
                }
            }
        })
    }
}

/// Bytes on one tier.
#[derive(Debug)]
pub enum Region {
    /// A block of the device pool.
    Device(Block),
    /// A memory map.
    Mapped {
        /// The map, page aligned, at least `len` bytes.
        map: MmapMut,
        /// Bytes in use.
        len: usize,
        /// Its place in the host pool's books.
        counted: Reservation,
    },
}

impl Region {
    /// Where the bytes are.
    #[must_use]
    pub fn tier(&self) -> Tier {
        match self {
            Self::Device(_) => Tier::Device,
            Self::Mapped { .. } => Tier::Host,
        }
    }

    /// The elements.
    #[must_use]
    pub fn as_slice<T: Pod>(&self) -> &[T] {
        bytemuck::cast_slice(self.as_ref())
    }

    /// The elements, writable.
    #[must_use]
    pub fn as_mut_slice<T: Pod>(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(match self {
            Self::Device(block) => block.as_bytes_mut(),
            Self::Mapped { map, len, .. } => &mut map[..*len],
        })
    }
}

impl Region {
    /// Stores `values` as elements `target` of type `dtype`, rounded to nearest even.
    pub(crate) fn write_rounded(&mut self, dtype: DType, target: Range<usize>, values: &[f32]) {
        fn store<T: Float>(out: &mut [T], values: &[f32]) {
            for (o, v) in out.iter_mut().zip(values) {
                *o = T::from_f32(*v);
            }
        }
        match dtype {
            DType::F32 => self.as_mut_slice::<f32>()[target].copy_from_slice(values),
            DType::F16 => store(&mut self.as_mut_slice::<f16>()[target], values),
            _ => store(&mut self.as_mut_slice::<bf16>()[target], values),
        }
    }
}

impl AsRef<[u8]> for Region {
    fn as_ref(&self) -> &[u8] {
        match self {
            Self::Device(block) => block.as_bytes(),
            Self::Mapped { map, len, .. } => &map[..*len],
        }
    }
}

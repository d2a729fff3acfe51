//! Memory of a communicator, owned by its user.
#![expect(unsafe_code, reason = "a buffer is a slice of the window")]

use super::arena::Region;
use super::dry::DryBuffer;
use super::endpoint::{Endpoint, Readers};
use super::{CollectiveKind, CommError};
use std::ops::Range;
use std::sync::Arc;

/// Buffer for a collective: bytes of this rank's part of the window (the memory that all ranks share),
/// 64-byte aligned. Dropping it frees them.
#[derive(Debug)]
pub struct Buffer {
    place: Backing,
    bytes: usize,
}

#[derive(Debug)]
enum Backing {
    Window(InWindow),
    /// A buffer of a dry run, whose slices are empty.
    Nowhere(DryBuffer),
}

#[derive(Debug)]
struct InWindow {
    endpoint: Arc<Endpoint>,
    region: Region,
    /// Set while the buffer is in a ticket or a [`ReadBuffer`], when nobody can write it.
    readers: Option<Readers>,
}

impl Buffer {
    pub(super) fn new(endpoint: Arc<Endpoint>, region: Region, bytes: usize) -> Self {
        let readers = None;
        let place = Backing::Window(InWindow {
            endpoint,
            region,
            readers,
        });
        Self { place, bytes }
    }

    pub(super) fn counted(place: DryBuffer, bytes: usize) -> Self {
        let place = Backing::Nowhere(place);
        Self { place, bytes }
    }

    /// Counts a collective over this buffer in a dry run.
    pub(super) fn count(&self, kind: CollectiveKind) {
        if let Backing::Nowhere(place) = &self.place {
            place.run(kind);
        }
    }

    /// Offset in this rank's region, if the buffer belongs to the window of `endpoint`.
    pub(super) fn offset_in(&self, endpoint: &Arc<Endpoint>) -> Option<usize> {
        match &self.place {
            Backing::Window(place) if Arc::ptr_eq(&place.endpoint, endpoint) => {
                Some(place.region.offset)
            }
            _ => None,
        }
    }

    pub(super) fn set_readers(&mut self, of: Option<Readers>) {
        if let Backing::Window(InWindow { readers, .. }) = &mut self.place {
            *readers = of;
        }
    }

    /// Length of the buffer in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether the buffer has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Bytes of the buffer; empty in a dry run.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        let Backing::Window(place) = &self.place else {
            return &[];
        };
        let Endpoint { window, world, .. } = &*place.endpoint;
        // SAFETY: the region belongs to this buffer alone (arena). A buffer that its user can reach is in no
        // collective that writes it, since a ticket owns it until then. Peers only read.
        unsafe { window.bytes(world.rank, place.region.offset, 0..self.bytes) }
    }

    /// Bytes of the buffer, writable; empty in a dry run.
    #[must_use]
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        let Backing::Window(place) = &self.place else {
            return &mut [];
        };
        debug_assert!(
            place.readers.is_none(),
            "a buffer with readers is not handed out for writing"
        );
        let Endpoint { window, world, .. } = &*place.endpoint;
        // SAFETY: as in `as_bytes`. A `Buffer` also reaches its user only after its last reader, and `&mut self`
        // excludes other access on this rank.
        unsafe { window.bytes_mut(world.rank, place.region.offset, 0..self.bytes) }
    }

    /// Bytes of the buffer as elements of type `T`; empty in a dry run.
    ///
    /// # Panics
    /// If the length is not a whole number of elements.
    #[must_use]
    pub fn as_slice<T: bytemuck::Pod>(&self) -> &[T] {
        bytemuck::cast_slice(self.as_bytes())
    }

    /// Bytes of the buffer as elements of type `T`, writable; empty in a dry run.
    ///
    /// # Panics
    /// If the length is not a whole number of elements.
    #[must_use]
    pub fn as_mut_slice<T: bytemuck::Pod>(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(self.as_bytes_mut())
    }

    /// The elements `elems` of the buffer; empty in a dry run.
    pub(crate) fn part<T: bytemuck::Pod>(&self, elems: Range<usize>) -> &[T] {
        match self.place {
            Backing::Window(_) => &self.as_slice()[elems],
            Backing::Nowhere(_) => &[],
        }
    }

    /// As [`Buffer::part`], for writing: the elements `elems`; none in a dry run.
    pub(crate) fn part_mut<T: bytemuck::Pod>(&mut self, elems: Range<usize>) -> &mut [T] {
        match self.place {
            Backing::Window(_) => &mut self.as_mut_slice()[elems],
            Backing::Nowhere(_) => &mut [],
        }
    }
}

impl Drop for InWindow {
    fn drop(&mut self) {
        self.endpoint.release(self.region, self.readers);
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        self.as_bytes()
    }
}

/// Read-only buffer with the result of a collective, which peers may still be reading.
///
/// Dropping it never waits. Its memory is reused after the last peer has finished.
#[derive(Debug)]
pub struct ReadBuffer(Buffer);

impl ReadBuffer {
    pub(super) fn new(buffer: Buffer) -> Self {
        Self(buffer)
    }

    /// Length of the buffer in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether the buffer has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Bytes of the buffer; empty in a dry run.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }

    /// Bytes of the buffer as elements of type `T`; empty in a dry run.
    ///
    /// # Panics
    /// If the length is not a whole number of elements.
    #[must_use]
    pub fn as_slice<T: bytemuck::Pod>(&self) -> &[T] {
        self.0.as_slice()
    }

    /// The elements `elems` of the buffer; empty in a dry run.
    pub(crate) fn part<T: bytemuck::Pod>(&self, elems: Range<usize>) -> &[T] {
        self.0.part(elems)
    }

    /// Waits until every peer has finished reading, and returns the buffer for writing.
    ///
    /// # Errors
    /// [`CommError::Timeout`], [`CommError::Mismatch`] or [`CommError::Aborted`].
    pub fn reclaim(self) -> Result<Buffer, CommError> {
        let mut buffer = self.0;
        if let Backing::Window(place) = &mut buffer.place
            && let Some(readers) = place.readers
        {
            place.endpoint.reclaim(readers)?;
            place.readers = None;
        }
        Ok(buffer)
    }
}

impl AsRef<[u8]> for ReadBuffer {
    fn as_ref(&self) -> &[u8] {
        self.as_bytes()
    }
}

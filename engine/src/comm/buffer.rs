//! Owned memory of a communicator.
#![expect(unsafe_code, reason = "a buffer is a slice of the window")]

use super::CommError;
use super::arena::Region;
use super::endpoint::{Endpoint, Readers};
use std::sync::Arc;

/// Bytes of this rank's part of the window, 64-byte aligned; given back when dropped.
#[derive(Debug)]
pub struct Buffer {
    endpoint: Arc<Endpoint>,
    region: Region,
    bytes: usize,
    /// Set while the buffer is in a ticket or a [`ReadBuffer`]: nobody can write it then.
    readers: Option<Readers>,
}

impl Buffer {
    pub(super) fn new(endpoint: Arc<Endpoint>, region: Region, bytes: usize) -> Self {
        Self {
            endpoint,
            region,
            bytes,
            readers: None,
        }
    }

    pub(super) fn belongs_to(&self, endpoint: &Arc<Endpoint>) -> bool {
        Arc::ptr_eq(&self.endpoint, endpoint)
    }

    pub(super) fn offset(&self) -> usize {
        self.region.offset
    }

    pub(super) fn set_readers(&mut self, readers: Option<Readers>) {
        self.readers = readers;
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether the length is 0.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// The bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        let Endpoint { window, world, .. } = &*self.endpoint;
        // SAFETY: the region is this buffer's alone (arena), and a buffer that is reachable by its
        // user is in no collective that writes it (a ticket owns it until then); peers only read.
        unsafe { window.bytes(world.rank, self.region.offset, 0..self.bytes) }
    }

    /// The bytes, for writing.
    #[must_use]
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        debug_assert!(
            self.readers.is_none(),
            "a buffer with readers is not handed out for writing"
        );
        let Endpoint { window, world, .. } = &*self.endpoint;
        // SAFETY: as in `as_bytes`; moreover a `Buffer` reaches its user only when no peer reads it
        // any more, and `&mut self` excludes other access on this rank.
        unsafe { window.bytes_mut(world.rank, self.region.offset, 0..self.bytes) }
    }

    /// The elements.
    ///
    /// # Panics
    /// If the length is not a whole number of elements.
    #[must_use]
    pub fn as_slice<T: bytemuck::Pod>(&self) -> &[T] {
        bytemuck::cast_slice(self.as_bytes())
    }

    /// The elements, for writing.
    ///
    /// # Panics
    /// If the length is not a whole number of elements.
    #[must_use]
    pub fn as_mut_slice<T: bytemuck::Pod>(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(self.as_bytes_mut())
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.endpoint.release(self.region, self.readers);
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        self.as_bytes()
    }
}

/// The result of a collective that peers may still be reading, too: read-only.
///
/// Dropping it never waits; its memory is reused when the last peer has finished.
#[derive(Debug)]
pub struct ReadBuffer(Buffer);

impl ReadBuffer {
    pub(super) fn new(buffer: Buffer) -> Self {
        Self(buffer)
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether the length is 0.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }

    /// The elements.
    ///
    /// # Panics
    /// If the length is not a whole number of elements.
    #[must_use]
    pub fn as_slice<T: bytemuck::Pod>(&self) -> &[T] {
        self.0.as_slice()
    }

    /// Waits until every peer has finished reading, and makes the buffer writable again.
    ///
    /// # Errors
    /// [`CommError::Timeout`], [`CommError::Mismatch`] or [`CommError::Aborted`].
    pub fn reclaim(self) -> Result<Buffer, CommError> {
        let mut buffer = self.0;
        if let Some(readers) = buffer.readers {
            buffer.endpoint.reclaim(readers)?;
            buffer.readers = None;
        }
        Ok(buffer)
    }
}

impl AsRef<[u8]> for ReadBuffer {
    fn as_ref(&self) -> &[u8] {
        self.as_bytes()
    }
}

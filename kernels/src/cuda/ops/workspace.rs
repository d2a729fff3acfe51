//! Scratch memory shared by the launches of one operation.

use crate::cuda::launch::Address;

/// Alignment of every piece in bytes.
const ALIGNMENT: u64 = 256;

/// Stack allocator of device scratch memory for the launches of one operation. It computes addresses and does
/// not check a limit. With [`Address::NULL`] as its start it only counts the bytes that are needed.
#[derive(Clone, Debug)]
pub struct Workspace {
    start: u64,
    used: u64,
    peak: u64,
}

impl Workspace {
    /// Workspace whose scratch memory begins at the device address `start`, a multiple of 256.
    #[must_use]
    pub const fn new(start: Address) -> Self {
        Self {
            start: start.0,
            used: 0,
            peak: 0,
        }
    }

    /// Allocates `bytes` bytes on top of those in use and returns their address, a multiple of 256.
    pub fn take(&mut self, bytes: u64) -> Address {
        let address = Address(self.start + self.used);
        self.used += bytes.next_multiple_of(ALIGNMENT);
        self.peak = self.peak.max(self.used);
        address
    }

    /// Number of bytes in use. A later [`Workspace::release`] with it frees everything allocated since.
    #[must_use]
    pub const fn mark(&self) -> u64 {
        self.used
    }

    /// Frees everything allocated since [`Workspace::mark`] returned `mark`. Launches run one after the
    /// other, so later launches may overwrite it.
    pub fn release(&mut self, mark: u64) {
        self.used = mark;
    }

    /// Maximum number of bytes that were in use at one time: the size that the scratch memory needs.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.peak
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn released_workspace_is_reused_and_the_peak_is_kept() {
        let mut space = Workspace::new(Address(1024));
        assert_eq!(space.take(1), Address(1024));
        let mark = space.mark();
        assert_eq!(space.take(300), Address(1280));
        space.release(mark);
        assert_eq!(space.take(8), Address(1280));
        assert_eq!(space.bytes(), 256 + 512);
    }
}

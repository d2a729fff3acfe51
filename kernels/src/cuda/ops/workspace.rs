//! Scratch memory that the launches of one operation share.

use crate::cuda::launch::Address;

/// Every piece starts at a multiple of this.
const ALIGNMENT: u64 = 256;

/// Hands out pieces of scratch memory front to back. With [`Address::NULL`] as its start it only counts.
#[derive(Clone, Debug)]
pub struct Workspace {
    start: u64,
    used: u64,
    peak: u64,
}

impl Workspace {
    /// Scratch memory that begins at `start`, a multiple of 256.
    #[must_use]
    pub const fn new(start: Address) -> Self {
        Self {
            start: start.0,
            used: 0,
            peak: 0,
        }
    }

    /// The next `bytes` bytes.
    pub fn take(&mut self, bytes: u64) -> Address {
        let address = Address(self.start + self.used);
        self.used += bytes.next_multiple_of(ALIGNMENT);
        self.peak = self.peak.max(self.used);
        address
    }

    /// What is in use, for [`Workspace::release`].
    #[must_use]
    pub const fn mark(&self) -> u64 {
        self.used
    }

    /// Gives back what was taken since `mark`: launches run one after the other, so later ones may overwrite it.
    pub fn release(&mut self, mark: u64) {
        self.used = mark;
    }

    /// The most that was in use at a time, in bytes.
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

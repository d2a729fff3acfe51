//! Moments drawn from a seed.

use optim::rng::RandomStream;

/// Devices make a stretch of their way after 2, 4, … 256 works.
const PACES: u64 = 8;

/// How far a device is when the host does something: one that is quick, or far behind.
#[derive(Debug)]
pub(crate) struct Draws {
    stream: RandomStream,
    drawn: u64,
    /// Works queued between two stretches of the device's way.
    pace: u64,
}

impl Draws {
    pub(crate) fn new(seed: u64, name: &str) -> Self {
        let stream = RandomStream::new(seed, name);
        Self {
            pace: 2 << (stream.bits(0, 0) % PACES),
            stream,
            drawn: 0,
        }
    }

    /// A number of `from..=to`.
    pub(crate) fn between(&mut self, from: u64, to: u64) -> u64 {
        self.drawn += 1;
        from + self.stream.bits(0, self.drawn) % (to.saturating_sub(from) + 1)
    }

    /// Whether the device makes a stretch of its way now.
    pub(crate) fn moves(&mut self) -> bool {
        self.between(1, self.pace) == 1
    }
}

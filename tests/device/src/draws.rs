//! Random progress of an emulated device, drawn from a seed.

use optim::rng::RandomStream;

/// Number of paces: a device proceeds after 2, 4, … or 256 commands on average.
const PACES: u64 = 8;

/// Random numbers that decide how far a device is when the host acts. Some devices are fast, others far behind.
#[derive(Debug)]
pub(crate) struct Draws {
    stream: RandomStream,
    drawn: u64,
    /// Commands queued between two advances of the device, on average.
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

    /// A random number in `from..=to`.
    pub(crate) fn between(&mut self, from: u64, to: u64) -> u64 {
        self.drawn += 1;
        from + self.stream.bits(0, self.drawn) % (to.saturating_sub(from) + 1)
    }

    /// Whether the device proceeds now.
    pub(crate) fn moves(&mut self) -> bool {
        self.between(1, self.pace) == 1
    }
}

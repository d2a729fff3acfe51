//! A machine that records threads and shared memory of every launch, and a digest of the results.

use std::collections::BTreeMap;

use anyhow::Result;
use kernels::cuda::launch::{Address, Launch};
use kernels::cuda::matmul::Multiply;

use crate::machine::{Buffer, Machine};

/// Largest numbers of threads and shared bytes in a kernel's launches, by module and kernel.
pub type Seen = BTreeMap<(String, String), (u32, u32)>;

/// Forwards everything and records it.
#[derive(Debug)]
pub struct Recording<M> {
    machine: M,
    seen: Seen,
    left: blake3::Hasher,
}

impl<M: Machine> Recording<M> {
    /// Records the launches of `machine`.
    #[must_use]
    pub fn new(machine: M) -> Self {
        Self {
            machine,
            seen: Seen::new(),
            left: blake3::Hasher::new(),
        }
    }

    /// Digest of all bytes read back.
    #[must_use]
    pub fn digest(&self) -> blake3::Hash {
        self.left.finalize()
    }

    /// The recorded launches.
    #[must_use]
    pub fn into_seen(self) -> Seen {
        self.seen
    }
}

impl<M: Machine> Machine for Recording<M> {
    fn name(&self) -> String {
        self.machine.name()
    }

    fn shared_limit(&self) -> u32 {
        self.machine.shared_limit()
    }

    fn allocate(&mut self, len: usize) -> Result<Buffer> {
        self.machine.allocate(len)
    }

    fn write(&mut self, buffer: Buffer, bytes: &[u8]) -> Result<()> {
        self.machine.write(buffer, bytes)
    }

    fn read(&mut self, buffer: Buffer, start: isize, len: usize) -> Result<Vec<u8>> {
        let bytes = self.machine.read(buffer, start, len)?;
        self.left.update(&bytes);
        Ok(bytes)
    }

    fn launch(&mut self, launch: &Launch) -> Result<()> {
        let key = (launch.module.name(), launch.kernel.to_owned());
        let most = self.seen.entry(key).or_default();
        *most = (most.0.max(launch.threads), most.1.max(launch.shared_bytes));
        self.machine.launch(launch)
    }

    fn multiply(
        &mut self,
        product: &Multiply,
        workspace: Address,
        workspace_bytes: u64,
    ) -> Result<bool> {
        self.machine.multiply(product, workspace, workspace_bytes)
    }

    fn reset(&mut self) -> Result<()> {
        self.machine.reset()
    }
}

//! A real GPU as a machine.
#![expect(unsafe_code, reason = "launches kernels")]

use anyhow::{Result, anyhow, ensure};
use kernels::cuda::gpu::{Gpu, Memory};
use kernels::cuda::launch::{Address, Launch};
use kernels::cuda::matmul::Multiply;

use crate::machine::{Buffer, GUARD_BYTES, Machine, POISON};

/// Buffers with guards in the memory of a GPU.
#[derive(Debug)]
pub struct GpuMachine<'g> {
    gpu: &'g Gpu,
    allocations: Vec<(Buffer, Memory)>,
}

impl<'g> GpuMachine<'g> {
    /// A machine on this GPU.
    #[must_use]
    pub const fn new(gpu: &'g Gpu) -> Self {
        Self {
            gpu,
            allocations: Vec::new(),
        }
    }

    /// The allocation of a buffer and the offset of its first byte.
    fn find(&self, buffer: Buffer) -> Result<&Memory> {
        let mut known = self.allocations.iter();
        let found = known.find(|(known, _)| *known == buffer);
        found
            .map(|(_, memory)| memory)
            .ok_or_else(|| anyhow!("the buffer was freed"))
    }
}

impl Machine for GpuMachine<'_> {
    fn name(&self) -> String {
        self.gpu.facts().name.clone()
    }

    fn shared_limit(&self) -> u32 {
        self.gpu.shared_limit()
    }

    fn allocate(&mut self, len: usize) -> Result<Buffer> {
        // The rear guard starts at the next aligned address after the buffer's last byte, without a gap.
        let memory = self.gpu.allocate(len + 2 * GUARD_BYTES + GUARD_BYTES)?;
        self.gpu.fill(&memory, POISON)?;
        let first = memory.address().0 + GUARD_BYTES as u64;
        let address = Address(first.next_multiple_of(GUARD_BYTES as u64));
        let buffer = Buffer { address, len };
        self.allocations.push((buffer, memory));
        Ok(buffer)
    }

    fn write(&mut self, buffer: Buffer, bytes: &[u8]) -> Result<()> {
        ensure!(bytes.len() <= buffer.len, "more bytes than the buffer has");
        let memory = self.find(buffer)?;
        let offset = (buffer.address.0 - memory.address().0) as usize;
        Ok(self.gpu.write(memory, offset, bytes)?)
    }

    fn read(&mut self, buffer: Buffer, start: isize, len: usize) -> Result<Vec<u8>> {
        let memory = self.find(buffer)?;
        let first = (buffer.address.0 - memory.address().0) as usize;
        let inside = |offset: &usize| offset + len <= memory.bytes();
        let offset = first.checked_add_signed(start).filter(inside);
        let offset = offset.ok_or_else(|| anyhow!("a read outside buffer and guards"))?;
        let mut bytes = vec![0; len];
        self.gpu.read(memory, offset, &mut bytes)?;
        Ok(bytes)
    }

    fn launch(&mut self, launch: &Launch) -> Result<()> {
        // SAFETY: cases pass addresses of buffers that live until the reset. Whether kernels stay inside them is under
        // test; the device's memory protection limits the damage to this process.
        unsafe { self.gpu.launch(launch) }?;
        Ok(self.gpu.synchronize()?)
    }

    fn multiply(
        &mut self,
        product: &Multiply,
        workspace: Address,
        workspace_bytes: u64,
    ) -> Result<bool> {
        let library = self.gpu.products();
        let library = library.ok_or_else(|| anyhow!("the GPU was opened without cuBLASLt"))?;
        // SAFETY: as of a launch.
        let done = unsafe { library.multiply(self.gpu, product, workspace, workspace_bytes) }?;
        self.gpu.synchronize()?;
        Ok(done)
    }

    fn reset(&mut self) -> Result<()> {
        let buffers: Vec<Buffer> = self.allocations.iter().map(|(buffer, _)| *buffer).collect();
        let checked = buffers.into_iter().try_for_each(|buffer| {
            let machine: &mut dyn Machine = self;
            machine.check_guards(buffer)
        });
        self.allocations.clear();
        checked
    }
}

//! The emulator as what a [`CudaBackend`] works on.

use std::sync::{Mutex, MutexGuard, PoisonError};

use kernels::cuda::CudaBackend;
use kernels::cuda::backend::{Cause, Executor};
use kernels::cuda::launch::{Address, Launch};

use crate::emulator::{Emulator, Order};
use crate::machine::{Buffer, Machine};

/// Multiprocessors that launches are cut for: few, so that small work makes several rounds.
pub const MULTIPROCESSORS: u32 = 4;

/// A backend on an emulated GPU with `bytes` of memory.
///
/// # Errors
/// When there is no such room.
pub fn emulated_backend(bytes: u64, order: Order) -> kernels::Result<CudaBackend> {
    CudaBackend::new(std::sync::Arc::new(EmulatedGpu::new(order)), bytes)
}

/// One machine whose buffers belong to one backend.
#[derive(Debug)]
pub struct EmulatedGpu {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    machine: Emulator,
    buffers: Vec<Buffer>,
}

impl State {
    /// The buffer that holds a range, and where in it the range begins.
    fn place(&self, at: Address, bytes: usize) -> Result<(Buffer, usize), Cause> {
        let inside = |buffer: &&Buffer| {
            let end = buffer.address.0 + buffer.len as u64;
            at.0 >= buffer.address.0 && at.0 + bytes as u64 <= end
        };
        let found = self.buffers.iter().find(inside);
        let buffer = found.ok_or_else(|| format!("{at:?} + {bytes} lies in no memory"))?;
        Ok((*buffer, (at.0 - buffer.address.0) as usize))
    }

    fn read(&mut self, at: Address, bytes: usize) -> Result<Vec<u8>, Cause> {
        let (buffer, start) = self.place(at, bytes)?;
        Ok(self.machine.read(buffer, start as isize, bytes)?)
    }

    fn write(&mut self, at: Address, bytes: &[u8]) -> Result<(), Cause> {
        let (buffer, start) = self.place(at, bytes.len())?;
        Ok(self.machine.write_at(buffer, start, bytes)?)
    }
}

impl EmulatedGpu {
    /// A machine without memory.
    #[must_use]
    pub fn new(order: Order) -> Self {
        let state = State {
            machine: Emulator::new(order),
            buffers: Vec::new(),
        };
        Self {
            state: Mutex::new(state),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// SAFETY: buffers live as long as the machine, which runs every call to its end before the next.
unsafe impl Executor for EmulatedGpu {
    fn multiprocessors(&self) -> u32 {
        MULTIPROCESSORS
    }

    fn allocate(&self, bytes: u64) -> Result<Address, Cause> {
        let mut state = self.lock();
        let buffer = state.machine.allocate(bytes as usize)?;
        state.buffers.push(buffer);
        Ok(buffer.address)
    }

    fn free(&self, memory: Address) {
        // The machine keeps its memory; nothing may use it any more.
        self.lock().buffers.retain(|b| b.address != memory);
    }

    unsafe fn write(&self, to: Address, bytes: &[u8]) -> Result<(), Cause> {
        self.lock().write(to, bytes)
    }

    unsafe fn read(&self, from: Address, bytes: &mut [u8]) -> Result<(), Cause> {
        bytes.copy_from_slice(&self.lock().read(from, bytes.len())?);
        Ok(())
    }

    unsafe fn zero(&self, at: Address, bytes: u64) -> Result<(), Cause> {
        self.lock().write(at, &vec![0; bytes as usize])
    }

    unsafe fn copy(&self, from: Address, to: Address, bytes: u64) -> Result<(), Cause> {
        let mut state = self.lock();
        let bytes = state.read(from, bytes as usize)?;
        state.write(to, &bytes)
    }

    unsafe fn launch(&self, launch: &Launch) -> Result<(), Cause> {
        Ok(self.lock().machine.launch(launch)?)
    }
}

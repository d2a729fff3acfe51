//! The trait of an executor of launches, with its memory.

use anyhow::{Result, bail};
use bytemuck::Pod;
use kernels::cuda::launch::{Address, Launch};
use kernels::cuda::matmul::Multiply;

/// Bytes on either side of a buffer that no kernel may change: more than one row of the widest tile.
pub const GUARD_BYTES: usize = 1024;
/// Fills new memory and guards: NaN in every float dtype, -1 in every integer type.
pub const POISON: u8 = 0xff;

/// Memory of a machine: `len` bytes between two guards.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Buffer {
    /// The first byte, aligned to [`GUARD_BYTES`].
    pub address: Address,
    /// Bytes between the guards.
    pub len: usize,
}

/// A device that executes launches in order.
pub trait Machine {
    /// Name for reports.
    fn name(&self) -> String;

    /// Shared memory that a block may have, in bytes.
    fn shared_limit(&self) -> u32;

    /// Allocates poisoned memory that lives as long as the machine or until [`Machine::reset`].
    ///
    /// # Errors
    /// When the device lacks memory.
    fn allocate(&mut self, len: usize) -> Result<Buffer>;

    /// Copies bytes to the front of a buffer.
    ///
    /// # Errors
    /// When the bytes do not fit or the device fails.
    fn write(&mut self, buffer: Buffer, bytes: &[u8]) -> Result<()>;

    /// Bytes from `start` on. A negative `start` reads the guard.
    ///
    /// # Errors
    /// When the range is outside the buffer and its guards, or the device fails.
    fn read(&mut self, buffer: Buffer, start: isize, len: usize) -> Result<Vec<u8>>;

    /// Executes a launch and waits for its end.
    ///
    /// # Errors
    /// When the module does not compile or the device reports a fault.
    fn launch(&mut self, launch: &Launch) -> Result<()>;

    /// Executes a library product and waits for its end; `false` if the library has no algorithm for it.
    ///
    /// # Errors
    /// When the machine has no library, or the library reports a fault.
    fn multiply(
        &mut self,
        product: &Multiply,
        _workspace: Address,
        _workspace_bytes: u64,
    ) -> Result<bool> {
        bail!("{} has no library for {product:?}", self.name())
    }

    /// Checks that every guard is intact, then frees all buffers.
    ///
    /// # Errors
    /// When a kernel wrote outside a buffer.
    fn reset(&mut self) -> Result<()>;
}

/// Typed access on top of bytes.
impl dyn Machine + '_ {
    /// A buffer with these values.
    ///
    /// # Errors
    /// As [`Machine::allocate`] and [`Machine::write`].
    pub fn upload<T: Pod>(&mut self, values: &[T]) -> Result<Buffer> {
        let bytes = bytemuck::cast_slice(values);
        let buffer = self.allocate(bytes.len())?;
        self.write(buffer, bytes)?;
        Ok(buffer)
    }

    /// A poisoned buffer for `n` values.
    ///
    /// # Errors
    /// As [`Machine::allocate`].
    pub fn output<T: Pod>(&mut self, n: usize) -> Result<Buffer> {
        self.allocate(n * size_of::<T>())
    }

    /// All values of a buffer.
    ///
    /// # Errors
    /// As [`Machine::read`].
    pub fn download<T: Pod>(&mut self, buffer: Buffer) -> Result<Vec<T>> {
        let bytes = self.read(buffer, 0, buffer.len)?;
        Ok(bytemuck::pod_collect_to_vec(&bytes))
    }

    /// Fails if a guard of the buffer was overwritten.
    ///
    /// # Errors
    /// The first changed byte.
    pub fn check_guards(&mut self, buffer: Buffer) -> Result<()> {
        let sides = [
            (-(GUARD_BYTES as isize), "before"),
            (buffer.len as isize, "after"),
        ];
        for (start, side) in sides {
            let guard = self.read(buffer, start, GUARD_BYTES)?;
            if let Some(at) = guard.iter().position(|b| *b != POISON) {
                bail!(
                    "a kernel wrote {side} a buffer of {} bytes, at {}",
                    buffer.len,
                    start + at as isize
                );
            }
        }
        Ok(())
    }
}

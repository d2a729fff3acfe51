//! The CPU as reference for operations whose definition fixes every bit.

use anyhow::{Result, ensure};
use kernels::cuda::launch::Address;
use kernels::{Backend, CpuBackend, DType, Shape, Tag, Tensor};

use crate::machine::{Buffer, Machine};
use crate::numbers::{bytes, first_difference, values};

/// The same numbers on the CPU and on a machine.
pub(super) struct Twin {
    pub(super) host: Tensor,
    pub(super) address: Address,
}

impl Twin {
    /// Rounds `numbers` to `dtype`. On the machine they begin `offset` elements after a 1024-byte boundary.
    pub(super) fn new(
        machine: &mut dyn Machine,
        dtype: DType,
        dims: &[usize],
        numbers: &[f32],
        offset: usize,
    ) -> Result<Self> {
        let own = match dtype {
            // The lowest byte of the bits, which varies most.
            DType::U8 => numbers.iter().map(|x| x.to_bits() as u8).collect(),
            _ => bytes(dtype, numbers),
        };
        Self::of_bytes(machine, dtype, dims, &own, offset)
    }

    /// Integers, such as row numbers.
    pub(super) fn integers(
        machine: &mut dyn Machine,
        dims: &[usize],
        numbers: &[i32],
    ) -> Result<Self> {
        Self::of_bytes(machine, DType::I32, dims, bytemuck::cast_slice(numbers), 0)
    }

    fn of_bytes(
        machine: &mut dyn Machine,
        dtype: DType,
        dims: &[usize],
        own: &[u8],
        offset: usize,
    ) -> Result<Self> {
        let lead = offset * dtype.size_bytes();
        let mut all = vec![0; lead];
        all.extend(own);
        let buffer = machine.upload(&all)?;
        let host = cpu().upload(own, Shape::new(dims), dtype, Tag::Activations)?;
        Ok(Self {
            host,
            address: Address(buffer.address.0 + lead as u64),
        })
    }
}

/// The CPU.
pub(super) fn cpu() -> CpuBackend {
    CpuBackend::unlimited()
}

/// Memory for a result of `n` elements that begins `offset` elements after a boundary.
pub(super) fn result(
    machine: &mut dyn Machine,
    dtype: DType,
    n: usize,
    offset: usize,
) -> Result<(Buffer, Address)> {
    let lead = offset * dtype.size_bytes();
    let buffer = machine.output::<u8>(lead + n * dtype.size_bytes())?;
    Ok((buffer, Address(buffer.address.0 + lead as u64)))
}

/// Checks that the end of `buffer` equals the CPU's result bit for bit. Any NaN equals any NaN.
pub(super) fn same(
    machine: &mut dyn Machine,
    what: &str,
    buffer: Buffer,
    want: &Tensor,
) -> Result<()> {
    let got = machine.download::<u8>(buffer)?;
    let got = &got[got.len() - want.size_bytes()..];
    if !want.dtype().is_float() {
        ensure!(got == want.as_bytes(), "{what} differs");
        return Ok(());
    }
    let (got, want) = (
        values(want.dtype(), got),
        values(want.dtype(), want.as_bytes()),
    );
    if let Some(at) = first_difference(&got, &want) {
        anyhow::bail!("{what}[{at}] is {:e} instead of {:e}", got[at], want[at]);
    }
    Ok(())
}

//! Operands in a dtype: bytes on a machine and values in f64.

use anyhow::Result;
use half::{bf16, f16};
use kernels::DType;
use kernels::cuda::launch::{Address, Launch};

use crate::machine::{Buffer, Machine};
use crate::random::Operands;

/// Random numbers in a dtype.
pub(super) struct Operand {
    buffer: Option<Buffer>,
    /// After rounding.
    pub(super) values: Vec<f64>,
}

impl Operand {
    /// `n` normally distributed numbers with this deviation; no memory for `n = 0`.
    pub(super) fn draw(
        machine: &mut dyn Machine,
        dtype: DType,
        name: &str,
        n: usize,
        deviation: f32,
    ) -> Result<Self> {
        let bytes = encode(dtype, &Operands::new(11).normal(name, n, deviation));
        let buffer = if n > 0 {
            Some(machine.upload(&bytes)?)
        } else {
            None
        };
        Ok(Self {
            buffer,
            values: decode(dtype, &bytes),
        })
    }

    /// Its address.
    pub(super) fn address(&self) -> Address {
        self.buffer.map_or(Address::NULL, |buffer| buffer.address)
    }
}

/// Bytes of values rounded to a dtype.
pub(super) fn encode(dtype: DType, values: &[f32]) -> Vec<u8> {
    let words = |narrow: fn(f32) -> u16| -> Vec<u8> {
        values
            .iter()
            .flat_map(|x| narrow(*x).to_le_bytes())
            .collect()
    };
    match dtype {
        DType::BF16 => words(|x| bf16::from_f32(x).to_bits()),
        DType::F16 => words(|x| f16::from_f32(x).to_bits()),
        _ => bytemuck::cast_slice(values).to_vec(),
    }
}

/// Values of the elements.
pub(super) fn decode(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    let words = |widen: fn(u16) -> f64| -> Vec<f64> {
        bytes
            .chunks_exact(2)
            .map(|x| widen(u16::from_le_bytes([x[0], x[1]])))
            .collect()
    };
    match dtype {
        DType::BF16 => words(|x| bf16::from_bits(x).to_f64()),
        DType::F16 => words(|x| f16::from_bits(x).to_f64()),
        _ => bytemuck::pod_collect_to_vec::<u8, f32>(bytes)
            .into_iter()
            .map(f64::from)
            .collect(),
    }
}

/// Executes the launches in order.
pub(super) fn launch_all(machine: &mut dyn Machine, launches: &[Launch]) -> Result<()> {
    launches
        .iter()
        .try_for_each(|launch| machine.launch(launch))
}

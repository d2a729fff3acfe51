//! Dequantization of weights: the bits of the CPU.

use anyhow::{Result, ensure};
use kernels::cuda::ops::unpack;
use kernels::{Codebook, DType, Quantization, Shape};

use super::{Case, Effort};
use crate::machine::Machine;
use crate::numbers::bytes;
use crate::random::Operands;

const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// All quantizations and dtypes, with sizes around the width of a thread, a block and a group of magnitudes.
#[must_use]
pub fn cases(effort: Effort) -> Vec<Case> {
    let shapes: &[[usize; 2]] = match effort {
        Effort::Emulated => &[[1, 1], [3, 21], [9, 64], [260, 72]],
        Effort::Gpu => &[[1, 1], [3, 21], [260, 72], [4096, 11_008]],
    };
    let coarse = Quantization::FourBit {
        codebook: Codebook::Nf4,
        block_elems: 128,
        double: true,
    };
    let quantizations = [
        Quantization::four_bit(Codebook::Nf4, false),
        Quantization::four_bit(Codebook::Nf4, true),
        Quantization::four_bit(Codebook::Fp4, false),
        Quantization::four_bit(Codebook::Fp4, true),
        coarse,
        Quantization::Int8,
    ];
    let mut cases = Vec::new();
    for quantization in quantizations {
        for to in DTYPES {
            for &dims in shapes {
                let name = format!("unpack {quantization} to {to}, {dims:?}");
                cases.push(Case::new(name, move |machine| {
                    check(machine, quantization, to, dims)
                }));
            }
        }
    }
    cases
}

fn check(
    machine: &mut dyn Machine,
    quantization: Quantization,
    to: DType,
    dims: [usize; 2],
) -> Result<()> {
    let shape = Shape::new(&dims);
    let values = Operands::new(17).normal("weight", shape.elems(), 0.02);
    let mut quantized = vec![0; quantization.bytes(shape)];
    quantization.quantize(&values, shape, &mut quantized);
    let parts = quantization.parts(shape);
    if parts.magnitudes.len() >= 256 && !parts.nested.is_empty() {
        // Every value of the map of quantized magnitudes.
        for (i, code) in quantized[parts.magnitudes].iter_mut().enumerate() {
            *code = i as u8;
        }
    }
    let mut wanted = vec![0.0f32; shape.elems()];
    quantization.dequantize(&quantized, shape, &mut wanted);
    let x = machine.upload(&quantized)?;
    let y = machine.output::<u8>(shape.elems() * to.size_bytes())?;
    let launch = unpack::launch(quantization, x.address, shape, to, y.address);
    machine.launch(&launch.expect("float dtypes"))?;
    let got = machine.download::<u8>(y)?;
    let want = bytes(to, &wanted);
    let at = got.iter().zip(&want).position(|(g, w)| g != w);
    ensure!(at.is_none(), "byte {at:?} differs");
    Ok(())
}

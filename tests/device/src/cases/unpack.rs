//! Unpacking of weights: the bits of the CPU.

use anyhow::{Result, ensure};
use kernels::cuda::ops::unpack;
use kernels::{Codebook, DType, Packing, Shape};

use super::{Case, Effort};
use crate::machine::Machine;
use crate::numbers::bytes;
use crate::random::Operands;

const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// All packings and dtypes, with sizes around the width of a thread, a block and a group of magnitudes.
#[must_use]
pub fn cases(effort: Effort) -> Vec<Case> {
    let shapes: &[[usize; 2]] = match effort {
        Effort::Emulated => &[[1, 1], [3, 21], [9, 64], [260, 72]],
        Effort::Gpu => &[[1, 1], [3, 21], [260, 72], [4096, 11_008]],
    };
    let coarse = Packing::FourBit {
        codebook: Codebook::Nf4,
        block_elems: 128,
        double: true,
    };
    let packings = [
        Packing::four_bit(Codebook::Nf4, false),
        Packing::four_bit(Codebook::Nf4, true),
        Packing::four_bit(Codebook::Fp4, false),
        Packing::four_bit(Codebook::Fp4, true),
        coarse,
        Packing::Int8,
    ];
    let mut cases = Vec::new();
    for packing in packings {
        for to in DTYPES {
            for &dims in shapes {
                let name = format!("unpack {packing} to {to}, {dims:?}");
                cases.push(Case::new(name, move |machine| {
                    check(machine, packing, to, dims)
                }));
            }
        }
    }
    cases
}

fn check(machine: &mut dyn Machine, packing: Packing, to: DType, dims: [usize; 2]) -> Result<()> {
    let shape = Shape::new(&dims);
    let values = Operands::new(17).normal("weight", shape.elems(), 0.02);
    let mut packed = vec![0; packing.bytes(shape)];
    packing.pack(&values, shape, &mut packed);
    let parts = packing.parts(shape);
    if parts.magnitudes.len() >= 256 && !parts.nested.is_empty() {
        // Every value of the map of packed magnitudes.
        for (i, code) in packed[parts.magnitudes].iter_mut().enumerate() {
            *code = i as u8;
        }
    }
    let mut wanted = vec![0.0f32; shape.elems()];
    packing.unpack(&packed, shape, &mut wanted);
    let x = machine.upload(&packed)?;
    let y = machine.output::<u8>(shape.elems() * to.size_bytes())?;
    let launch = unpack::launch(packing, x.address, shape, to, y.address);
    machine.launch(&launch.expect("float dtypes"))?;
    let got = machine.download::<u8>(y)?;
    let want = bytes(to, &wanted);
    let at = got.iter().zip(&want).position(|(g, w)| g != w);
    ensure!(at.is_none(), "byte {at:?} differs");
    Ok(())
}

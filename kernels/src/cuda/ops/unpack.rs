//! Unpacking of weights of 4 or 8 bits.

use crate::cuda::launch::{Address, Arg, Launch};
use crate::cuda::module::{Family, Module, element_type};
use crate::quantized::Quantization;
use crate::{Codebook, DType, Shape};

const THREADS: u32 = 256;
/// Elements per thread and iteration.
const WIDTH: u64 = 8;
/// Maximum blocks of the grid: enough for several waves on any GPU.
const MAX_BLOCKS: u64 = 132 * 16;
/// Tables in shared memory: 16 values of codes and 256 of quantized magnitudes, f32.
const TABLE_BYTES: u32 = 4 * (16 + 256);

const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];
/// The quantizations that a module exists for; the size of a block is an argument.
pub(crate) const QUANTIZATIONS: [Quantization; 5] = [
    Quantization::four_bit(Codebook::Nf4, false),
    Quantization::four_bit(Codebook::Nf4, true),
    Quantization::four_bit(Codebook::Fp4, false),
    Quantization::four_bit(Codebook::Fp4, true),
    Quantization::Int8,
];

fn module(quantization: Quantization, to: DType) -> Option<Module> {
    let (form, codebook) = match quantization {
        Quantization::FourBit {
            codebook, double, ..
        } => (u32::from(double), u32::from(codebook == Codebook::Fp4)),
        Quantization::Int8 => (2, 0),
    };
    let defines = [
        ("TO", element_type(to)?),
        ("FORM", form),
        ("CODEBOOK", codebook),
    ];
    Some(Module::new(Family::Unpack, defines, &["unpack"]))
}

/// Kernel modules that unpack weights, for every quantization and float dtype.
#[must_use]
pub fn modules() -> Vec<Module> {
    let all = QUANTIZATIONS.iter();
    let all = all.flat_map(|quantization| DTYPES.map(|to| module(*quantization, to)));
    all.flatten().collect()
}

/// Launch that unpacks the weight of `shape` at `quantized` to `to` and writes it to `y`. Both addresses are aligned to 16
/// bytes. `None` when the dtype is not a float.
#[must_use]
pub fn launch(
    quantization: Quantization,
    quantized: Address,
    shape: Shape,
    to: DType,
    y: Address,
) -> Option<Launch> {
    let parts = quantization.parts(shape);
    let n = shape.elems() as u64;
    let (block, shared_bytes) = match quantization {
        Quantization::FourBit { block_elems, .. } => (u64::from(block_elems), TABLE_BYTES),
        Quantization::Int8 => (shape.last().max(1) as u64, 0),
    };
    let rounds = n.div_ceil(WIDTH * u64::from(THREADS));
    let offset = |part: &std::ops::Range<usize>| Arg::U64(part.start as u64);
    Some(Launch {
        module: module(quantization, to)?,
        kernel: "unpack",
        grid: [rounds.clamp(1, MAX_BLOCKS) as u32, 1, 1],
        threads: THREADS,
        shared_bytes,
        args: vec![
            Arg::Address(quantized),
            offset(&parts.magnitudes),
            offset(&parts.nested),
            offset(&parts.offset),
            Arg::Address(y),
            Arg::U64(n),
            Arg::U64(block),
        ],
    })
}

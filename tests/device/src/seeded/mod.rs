//! Small correct kernels, and faulty ones by replaced text, which the emulator must report.

use anyhow::{Result, bail, ensure};
use half::bf16;
use kernels::cuda::launch::{Arg, Launch};
use kernels::cuda::module::Module;

use crate::machine::Machine;
use crate::random::Operands;

/// The text of the kernel `gemm`.
pub const GEMM: &str = include_str!("gemm.cu");
/// Bytes of three stages of 64 rows of A and of B, 32 elements each.
const GEMM_SHARED_BYTES: u32 = 3 * 2 * 64 * 32 * 2;

/// The text of the kernel `sum`.
pub const SUM: &str = include_str!("sum.cu");

/// Checks the sum of `n` numbers by a text of [`SUM`] in several blocks. The numbers are small integers, so any order
/// gives the same sum.
///
/// # Errors
/// A report of the machine, or a wrong sum.
pub fn check_sum(machine: &mut dyn Machine, text: &str, n: usize) -> Result<()> {
    const BLOCKS: u32 = 5;
    let numbers = Operands::new(1).below("x", n, 100);
    let x: Vec<f32> = numbers.iter().map(|x| *x as f32).collect();
    let buffers = [
        machine.upload(&x)?,
        machine.output::<f32>(BLOCKS as usize)?,
        machine.upload(&[0_u32])?,
        machine.output::<f32>(1)?,
    ];
    let mut args: Vec<Arg> = buffers.iter().map(|b| Arg::Address(b.address)).collect();
    args.push(Arg::I32(n as i32));
    machine.launch(&Launch {
        module: Module::foreign("sum", text, &["sum"]),
        kernel: "sum",
        grid: [BLOCKS, 1, 1],
        threads: 64,
        shared_bytes: 8,
        args,
    })?;
    let [got] = machine.download::<f32>(buffers[3])?[..] else {
        bail!("one sum")
    };
    let want: f32 = x.iter().sum();
    ensure!(got == want, "the sum is {got} instead of {want}");
    machine.reset()
}

/// Checks `C[m,n] = A[m,k] B[n,k]^T` by a text of [`GEMM`] against an f64 product.
///
/// # Errors
/// A report of the machine, or the first wrong element.
pub fn check_gemm(machine: &mut dyn Machine, text: &str, [m, n, k]: [usize; 3]) -> Result<()> {
    let draw = |name, len| -> Vec<bf16> {
        let values = Operands::new(1).normal(name, len, 1.0);
        values.into_iter().map(bf16::from_f32).collect()
    };
    let (a, b) = (draw("a", m * k), draw("b", n * k));
    let [a_buffer, b_buffer] = [machine.upload(&a)?, machine.upload(&b)?];
    let c_buffer = machine.output::<bf16>(m * n)?;
    machine.launch(&Launch {
        module: Module::foreign("gemm", text, &["gemm"]),
        kernel: "gemm",
        grid: [n.div_ceil(64) as u32, m.div_ceil(64) as u32, 1],
        threads: 128,
        shared_bytes: GEMM_SHARED_BYTES,
        args: vec![
            Arg::Address(a_buffer.address),
            Arg::Address(b_buffer.address),
            Arg::Address(c_buffer.address),
            Arg::I32(m as i32),
            Arg::I32(n as i32),
            Arg::I32(k as i32),
        ],
    })?;
    let c = machine.download::<bf16>(c_buffer)?;
    for (at, c) in c.iter().enumerate() {
        let (row, column) = (at / n * k, at % n * k);
        let products = (0..k).map(|i| a[row + i].to_f64() * b[column + i].to_f64());
        let (sum, size) = products.fold((0.0, 0.0), |(sum, size): (f64, f64), p| {
            (sum + p, size + p.abs())
        });
        // One rounding to bf16, and k additions in f32.
        let tolerance = sum.abs() / 256.0 + k as f64 * size * f64::from(f32::EPSILON);
        let error = (c.to_f64() - sum).abs();
        ensure!(
            error <= tolerance,
            "element {at} is {c} instead of {sum:.5}"
        );
    }
    machine.reset()
}

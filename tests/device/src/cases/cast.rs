//! Casts: bit-equal to the conversions of the `half` crate.

use anyhow::{Result, ensure};
use kernels::DType;
use kernels::cuda::ops::cast;

use super::{Case, Effort};
use crate::machine::Machine;
use crate::numbers::{bytes, widened};
use crate::random::Operands;

const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// All pairs of dtypes, with sizes around the width of a thread.
#[must_use]
pub fn cases(effort: Effort) -> Vec<Case> {
    let sizes: &[usize] = match effort {
        Effort::Emulated => &[1, 7, 8, 9, 2048, 5003],
        Effort::Gpu => &[1, 7, 9, 2048, 5003, 40_000_003],
    };
    let mut cases = Vec::new();
    for from in DTYPES {
        for to in DTYPES.into_iter().filter(|to| *to != from) {
            for &n in sizes {
                let name = format!("cast {from} to {to}, {n} elements");
                cases.push(Case::new(name, move |machine| check(machine, from, to, n)));
            }
        }
    }
    cases
}

fn check(machine: &mut dyn Machine, from: DType, to: DType, n: usize) -> Result<()> {
    let mut values = Operands::new(3).normal("cast", n, 100.0);
    let special = [
        0.0,
        -0.0,
        f32::INFINITY,
        f32::NEG_INFINITY,
        1e-40,
        65520.0,
        3.0e-8,
        f32::MAX,
    ];
    for (value, special) in values.iter_mut().step_by(3).zip(special) {
        *value = special;
    }
    let x = machine.upload(&bytes(from, &values))?;
    let y = machine.output::<u8>(n * to.size_bytes())?;
    let launch = cast::launch(from, x.address, to, y.address, n as u64);
    machine.launch(&launch.expect("float dtypes"))?;
    let got = machine.download::<u8>(y)?;
    let want = bytes(to, &widened(from, &values));
    let at = got.iter().zip(&want).position(|(g, w)| g != w);
    ensure!(at.is_none(), "byte {at:?} differs");
    Ok(())
}

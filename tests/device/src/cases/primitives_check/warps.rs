//! Exchange of values between threads.

use anyhow::Result;

use super::{Case, case, equal, launch};
use crate::machine::Machine;
use crate::random::Operands;

pub(super) fn cases() -> Vec<Case> {
    vec![
        case("shuffles and votes", exchanges),
        case("barriers", reversals),
        case("the last block", last_block),
    ]
}

fn exchanges(machine: &mut dyn Machine) -> Result<()> {
    const N: usize = 128;
    let draw = |name, limit| Operands::new(21).below(name, N, limit);
    let mut x: Vec<u32> = draw("x", 1 << 30).iter().map(|x| *x as u32).collect();
    // The first warp has no odd number; the second and the last have one.
    x[..64].iter_mut().for_each(|x| *x &= !1);
    x[96..].iter_mut().for_each(|x| *x &= !1);
    x[40] |= 1;
    x[96] |= 1;
    x[70] = u32::MAX;
    let d: Vec<f64> = draw("d", 1 << 52).iter().map(|d| *d as f64 + 0.5).collect();
    let lanes: Vec<i32> = draw("lanes", 32).iter().map(|lane| *lane as i32).collect();
    let buffers = [
        machine.upload(&x)?,
        machine.upload(&d)?,
        machine.upload(&lanes)?,
        machine.output::<u32>(36 * N)?,
        machine.output::<f64>(32 * N)?,
    ];
    launch(machine, "exchanges", [1, N as u32, 0], &buffers, None)?;
    let masks = 0..32;
    let other = |mask: usize| (0..N).map(move |i| i ^ mask);
    let mut want: Vec<u32> = masks.clone().flat_map(|m| other(m).map(|i| x[i])).collect();
    for _ in 0..2 {
        want.extend((0..N).map(|i| x[i / 32 * 32 + lanes[i] as usize]));
    }
    let warp = |i: usize| &x[i / 32 * 32..][..32];
    want.extend((0..N).map(|i| u32::from(warp(i).iter().any(|x| x % 2 == 1))));
    want.extend((0..N).map(|i| u32::from(warp(i).contains(&u32::MAX))));
    equal("words", &machine.download::<u32>(buffers[3])?, &want)?;
    let want: Vec<f64> = masks.flat_map(|m| other(m).map(|i| d[i])).collect();
    equal("doubles", &machine.download::<f64>(buffers[4])?, &want)
}

fn reversals(machine: &mut dyn Machine) -> Result<()> {
    const N: usize = 256;
    let x: Vec<u32> = (0..N as u32).map(|i| i * 7 + 1).collect();
    let buffers = [machine.upload(&x)?, machine.output::<u32>(N)?];
    let size = [1, N as u32, 4 * N as u32];
    launch(machine, "reversals", size, &buffers, None)?;
    let want: Vec<u32> = (0..N).map(|i| x[N - 1 - (i ^ 31)]).collect();
    equal("words", &machine.download::<u32>(buffers[1])?, &want)
}

fn last_block(machine: &mut dyn Machine) -> Result<()> {
    const BLOCKS: usize = 40;
    let x = Operands::new(22).below("x", 5000, 1000);
    let x: Vec<u32> = x.iter().map(|x| *x as u32).collect();
    let buffers = [
        machine.upload(&x)?,
        machine.output::<u32>(BLOCKS)?,
        machine.upload(&[0_u32])?,
        machine.output::<u32>(2)?,
    ];
    let size = [BLOCKS as u32, 128, 128];
    launch(machine, "last_block", size, &buffers, Some(x.len()))?;
    let want = [x.iter().sum(), BLOCKS as u32];
    equal(
        "the sum and the counter",
        &machine.download::<u32>(buffers[3])?,
        &want,
    )
}

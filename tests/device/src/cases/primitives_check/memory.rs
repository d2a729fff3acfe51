//! Streaming loads and stores, and asynchronous copies.

use anyhow::Result;

use super::{Case, case, elementwise, equal, launch};
use crate::machine::Machine;
use crate::random::Operands;

pub(super) fn cases() -> Vec<Case> {
    vec![
        case("streaming loads and stores", streams),
        case("asynchronous copies", copies),
    ]
}

/// The 16 bytes of a `uint4`.
type Word = [u32; 4];

fn words(n: usize) -> Vec<Word> {
    let draw = Operands::new(31).below("words", n, 1 << 31);
    let word = |x: usize| [x as u32, x as u32 ^ 1, x as u32 ^ 2, x as u32 ^ 3];
    draw.into_iter().map(word).collect()
}

fn streams(machine: &mut dyn Machine) -> Result<()> {
    const N: usize = 1001;
    let x = words(N);
    let buffers = [machine.upload(&x)?, machine.output::<Word>(N)?];
    launch(machine, "streams", elementwise(N), &buffers, Some(N))?;
    equal("words", &machine.download::<Word>(buffers[1])?, &x)
}

fn copies(machine: &mut dyn Machine) -> Result<()> {
    const N: usize = 512;
    let x = words(100);
    let mut from: Vec<i32> = Operands::new(32)
        .below("from", N, x.len())
        .iter()
        .map(|from| *from as i32)
        .collect();
    let valid = Operands::new(33).below("valid", N, 4);
    let valid: Vec<i32> = valid.iter().map(|valid| i32::from(*valid != 0)).collect();
    // Invalid parts are not read, since they may be outside the buffer.
    for (from, _) in from
        .iter_mut()
        .zip(&valid)
        .filter(|(_, valid)| **valid == 0)
    {
        *from = 1 << 20;
    }
    let buffers = [
        machine.upload(&x)?,
        machine.upload(&from)?,
        machine.upload(&valid)?,
        machine.output::<Word>(N)?,
    ];
    launch(machine, "copies", [1, 128, 16 * N as u32], &buffers, None)?;
    let one = |(from, valid): (&i32, &i32)| {
        if *valid == 0 {
            [0; 4]
        } else {
            x[*from as usize]
        }
    };
    let want: Vec<Word> = from.iter().zip(&valid).map(one).collect();
    equal("words", &machine.download::<Word>(buffers[3])?, &want)
}

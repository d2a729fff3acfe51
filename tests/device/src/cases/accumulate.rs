//! Gradient sums in `bf16`: bit-equal to `optim::accumulate` over several successive additions.

use anyhow::{Result, ensure};
use half::bf16;
use kernels::DType;
use kernels::cuda::launch::Address;
use kernels::cuda::ops::accumulate;
use optim::accumulate::{RoundingPosition, add_rounded};
use optim::rng::RandomStream;

use super::{Case, Effort};
use crate::machine::Machine;
use crate::numbers::{bytes, first_difference, values};
use crate::random::Operands;

/// Elements after the sums, which must not change.
const MARGIN: usize = 9;
/// Times in the rounding key. The last one exceeds 32 bits.
const TIMES: [u64; 3] = [0, 1 << 20, (1 << 40) + 3];

/// Sizes around the width of a thread, starts off vector and pair boundaries, and a key page that ends inside.
#[must_use]
pub fn cases(effort: Effort) -> Vec<Case> {
    let mut windows = vec![
        (1, [0, 0], 0),
        (7, [3, 3], 3),
        (29, [0, 0], 11),
        (2051, [5, 5], 1000),
        (300, [0, 1], 64),
        (600, [0, 0], (1 << 33) - 299),
    ];
    windows.push(match effort {
        Effort::Emulated => (4100, [0, 0], (1 << 33) + 1),
        Effort::Gpu => (5_000_003, [3, 3], (1 << 33) + 1),
    });
    let case = |(n, shifts, first_element)| {
        let name = format!("accumulate {n} elements from {first_element} at {shifts:?}");
        Case::new(name, move |machine| {
            check(machine, n, shifts, first_element)
        })
    };
    windows.into_iter().map(case).collect()
}

/// Checks one size. `shifts` are the elements before the sums and before the values.
fn check(
    machine: &mut dyn Machine,
    n: usize,
    shifts: [usize; 2],
    first_element: u64,
) -> Result<()> {
    let len = shifts[0] + n + MARGIN;
    let old = Operands::new(12).normal("sums", len, 1.0);
    let mut sums: Vec<bf16> = old.iter().map(|x| bf16::from_f32(*x)).collect();
    let own = shifts[0]..shifts[0] + n;
    // A new sum must not read these.
    sums[own.clone()].fill(bf16::NAN);
    let device = machine.upload(&sums)?;
    let stream = RandomStream::new(31, "accumulate");
    for (addition, time) in TIMES.into_iter().enumerate() {
        let mut added = Operands::new(40 + time).normal("values", shifts[1] + n, 0.7);
        // Values beyond the reach of a carry, and non-finite ones.
        let special = [f32::MAX, -f32::MAX, f32::INFINITY, f32::NAN, -0.0, 1e-40];
        let places = added.iter_mut().skip(shifts[1] + 5).step_by(31);
        places.zip(special).for_each(|(x, special)| *x = special);
        let uploaded = machine.upload(&bytes(DType::F32, &added))?;
        let at = |start: Address, elems: usize, size| Address(start.0 + (elems * size) as u64);
        let place = RoundingPosition {
            stream,
            time,
            first_element,
        };
        let fresh = addition == 0;
        let when = machine.upload(&accumulate::when(place.on_device()))?;
        machine.launch(&accumulate::launch(
            at(device.address, shifts[0], 2),
            at(uploaded.address, shifts[1], 4),
            n as u64,
            (first_element, when.address),
            fresh,
        ))?;
        let own = &mut sums[own.clone()];
        if fresh {
            own.fill(bf16::ZERO);
        }
        add_rounded(place, own, &added[shifts[1]..]);
        let got = values(DType::BF16, &machine.download::<u8>(device)?);
        let want: Vec<f32> = sums.iter().map(|x| x.to_f32()).collect();
        let at = first_difference(&got, &want);
        ensure!(
            at.is_none(),
            "addition {addition}: sum {at:?} is {:?} instead of {:?}",
            at.map(|at| got[at]),
            at.map(|at| want[at])
        );
    }
    Ok(())
}

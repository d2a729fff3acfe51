//! The gradient norm: bit-equal to the CPU's definition.

use anyhow::{Result, ensure};
use kernels::DType;
use kernels::cuda::launch::Address;
use kernels::cuda::ops::grad_norm::{self, Clip, SquareSums};
use optim::clip::{GradientScale, NORM_BLOCK_ELEMS, sum_of_squares};

use super::{Case, Effort};
use crate::machine::{Buffer, Machine};
use crate::numbers::{bytes, widened};
use crate::random::Operands;

const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// Sizes around runs and blocks, unaligned starts, non-finite numbers; the clip factor.
#[must_use]
pub fn cases(effort: Effort) -> Vec<Case> {
    let mut windows = vec![(1, 0), (255, 0), (256, 1), (4096, 0), (9001, 0), (9001, 3)];
    windows.push(match effort {
        Effort::Emulated => (10 * NORM_BLOCK_ELEMS + 7, 8),
        // More blocks than `total` has lanes, several times over.
        Effort::Gpu => (9_000 * NORM_BLOCK_ELEMS + 77, 8),
    });
    let mut cases = Vec::new();
    for dtype in DTYPES {
        for &(n, shift) in &windows {
            let name = format!("grad_norm {dtype}, {n} elements from {shift}");
            let run = move |machine: &mut dyn Machine| check_sum(machine, dtype, n, shift);
            cases.push(Case::new(name, run));
        }
        for shift in [0, 3] {
            let name = format!("grad_norm {dtype}, blocks of all magnitudes from {shift}");
            let run = move |machine: &mut dyn Machine| check_magnitudes(machine, dtype, shift);
            cases.push(Case::new(name, run));
        }
        let name = format!("grad_norm {dtype}, numbers that are not finite");
        cases.push(Case::new(name, move |machine| {
            check_not_finite(machine, dtype)
        }));
    }
    let blocks = match effort {
        Effort::Emulated => 9_001,
        Effort::Gpu => 200_003,
    };
    cases.push(Case::new(
        format!("grad_norm, total of {blocks} blocks"),
        move |machine| check_total(machine, blocks),
    ));
    cases.push(Case::new("grad_norm, clip factor", check_clip));
    cases
}

/// Adds two successive windows to one number.
fn check_sum(machine: &mut dyn Machine, dtype: DType, n: usize, shift: usize) -> Result<()> {
    let sum = machine.output::<f64>(1)?;
    let mut want = 0.0;
    for name in ["first", "second"] {
        let values = widened(dtype, &Operands::new(8).normal(name, shift + n, 3.0));
        add_sum(machine, dtype, &values, shift, (sum, name == "second"))?;
        want += sum_of_squares(&values[shift..]);
        let got = machine.download::<f64>(sum)?[0];
        ensure!(
            got.to_bits() == want.to_bits(),
            "{name} window: {got:e} instead of {want:e}"
        );
    }
    Ok(())
}

/// One whole block per magnitude, and a part of one: those with subnormal or infinite squares, and either side of the
/// limits beyond which a block is scaled.
fn check_magnitudes(machine: &mut dyn Machine, dtype: DType, shift: usize) -> Result<()> {
    let two_to = |exponent: i32| 2f32.powi(exponent);
    let largest = [
        0.0,
        f32::from_bits(1),
        f32::MIN_POSITIVE,
        1e-30,
        1e-20,
        two_to(-40).next_down(),
        two_to(-40),
        1e-5,
        1.0,
        two_to(50).next_down(),
        two_to(50),
        1e20,
        f32::MAX,
    ];
    for largest in largest {
        let n = shift + NORM_BLOCK_ELEMS + 300;
        let shares = Operands::new(10).normal("magnitudes", n, 0.3);
        let mut values: Vec<f32> = shares
            .iter()
            .map(|x| x.clamp(-1.0, 1.0) * largest)
            .collect();
        // The largest magnitude itself, in each block.
        values[shift + 77] = largest;
        values[n - 1] = -largest;
        let values = widened(dtype, &values);
        if values.iter().any(|v| !v.is_finite()) {
            continue; // outside the range of the dtype
        }
        let sum = machine.output::<f64>(1)?;
        add_sum(machine, dtype, &values, shift, (sum, false))?;
        let (got, want) = (
            machine.download::<f64>(sum)?[0],
            sum_of_squares(&values[shift..]),
        );
        ensure!(
            got.to_bits() == want.to_bits(),
            "up to {largest:e}: {got:e} instead of {want:e}"
        );
    }
    Ok(())
}

/// Launches the sum of the elements from `shift` on into `sum`, added to the old value on request.
fn add_sum(
    machine: &mut dyn Machine,
    dtype: DType,
    values: &[f32],
    shift: usize,
    (sum, accumulate): (Buffer, bool),
) -> Result<()> {
    let n = (values.len() - shift) as u64;
    let x = machine.upload(&bytes(dtype, values))?;
    let start = Address(x.address.0 + (shift * dtype.size_bytes()) as u64);
    let workspace = machine.output::<u8>(grad_norm::workspace_bytes(n) as usize)?;
    let launches =
        grad_norm::square_sum(dtype, start, n, workspace.address, sum.address, accumulate);
    for launch in launches.expect("float dtypes") {
        machine.launch(&launch)?;
    }
    Ok(())
}

fn check_not_finite(machine: &mut dyn Machine, dtype: DType) -> Result<()> {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for at in [0, 4095, 4096, 6000] {
            let mut values = vec![0.5; 6001];
            values[at] = bad;
            let x = machine.upload(&bytes(dtype, &values))?;
            let workspace = machine.output::<f64>(2)?;
            let sum = machine.output::<f64>(1)?;
            let n = values.len() as u64;
            let launches =
                grad_norm::square_sum(dtype, x.address, n, workspace.address, sum.address, false);
            for launch in launches.expect("float dtypes") {
                machine.launch(&launch)?;
            }
            let got = machine.download::<f64>(sum)?[0];
            ensure!(!got.is_finite(), "{bad} at {at} gives {got}");
        }
    }
    Ok(())
}

/// Checks `total` alone, with more blocks than an emulated sum of squares can have. A block's sum is the square of its
/// only non-zero element.
fn check_total(machine: &mut dyn Machine, blocks: usize) -> Result<()> {
    let values = Operands::new(9).normal("blocks", blocks, 1.0);
    let squares: Vec<f64> = values.iter().map(|v| f64::from(*v).powi(2)).collect();
    let sums = machine.upload(&squares)?;
    let sum = machine.output::<f64>(1)?;
    let n = (blocks * NORM_BLOCK_ELEMS) as u64;
    let launches = grad_norm::square_sum(
        DType::F32,
        sums.address,
        n,
        sums.address,
        sum.address,
        false,
    );
    let [_, total] = launches.expect("a float dtype");
    machine.launch(&total)?;
    let mut want = optim::clip::SquareSum::default();
    for value in values {
        want.add_block(&[value]);
    }
    let (got, want) = (machine.download::<f64>(sum)?[0], want.total());
    ensure!(
        got.to_bits() == want.to_bits(),
        "{got:e} instead of {want:e}"
    );
    Ok(())
}

fn check_clip(machine: &mut dyn Machine) -> Result<()> {
    let row = |squares, loss, tokens| SquareSums {
        squares,
        loss,
        tokens,
    };
    let uneven = [
        row(0.1, 3.0, 7.0),
        row(123.456, 5.5, 0.0),
        row(1e-9, 0.25, 100.0),
        row(77.7, 9.0, 13.0),
    ];
    let tables: [&[SquareSums]; 5] = [
        &uneven,
        &uneven[..1],
        &[row(4.0, 1.0, 0.0)],
        &[row(f64::INFINITY, 1.0, 5.0), row(1.0, 1.0, 5.0)],
        &[row(1.0, f64::NAN, 5.0)],
    ];
    for table in tables {
        for max_norm in [None, Some(1e-3f32), Some(1.0), Some(1e6)] {
            let sums = machine.upload(table)?;
            let out = machine.output::<Clip>(1)?;
            let launch = grad_norm::clip(sums.address, table.len(), max_norm, out.address);
            machine.launch(&launch.expect("few ranks"))?;
            let got = machine.download::<Clip>(out)?[0];
            let total = |of: fn(&SquareSums) -> f64| table.iter().map(of).fold(0.0, |a, b| a + b);
            let tokens = total(|r| r.tokens).max(1.0);
            let scale = GradientScale::new(total(|r| r.squares), tokens, max_norm);
            let loss = total(|r| r.loss) / tokens;
            let skip = !(scale.norm.is_finite() && loss.is_finite());
            let factor = if skip { 0.0 } else { scale.factor };
            let same = |a: f64, b: f64| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
            ensure!(
                same(got.norm, scale.norm)
                    && same(got.loss, loss)
                    && got.factor.to_bits() == factor.to_bits()
                    && got.skip == u32::from(skip),
                "{table:?} with {max_norm:?}: {got:?} instead of {scale:?}, loss {loss}, {skip}"
            );
        }
    }
    Ok(())
}

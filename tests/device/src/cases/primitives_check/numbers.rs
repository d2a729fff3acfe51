//! Conversions, approximations and single operations.

use anyhow::{Result, ensure};

use super::format::{BF16, F16, Format};
use super::{Case, case, elementwise, launch};
use crate::machine::Machine;
use crate::random::Operands;
use crate::tolerance;

pub(super) fn cases() -> Vec<Case> {
    vec![
        case("narrowing", narrowings),
        case("widening", widenings),
        case("exp2 and log2", approximations),
        case("f32 arithmetic", arithmetic),
        case("f64 arithmetic", double_arithmetic),
        case("high half of a product", high_products),
    ]
}

fn words(name: &str, n: usize) -> Vec<u32> {
    let words = Operands::new(11).below(name, n, 1 << 32);
    words.into_iter().map(|word| word as u32).collect()
}

/// Floats of all magnitudes and kinds; NaN is the canonical one.
fn floats(name: &str, n: usize) -> Vec<f32> {
    let special = [
        0.0,
        -0.0,
        1.0,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        f32::MAX,
        f32::MIN_POSITIVE,
        1e-45,
    ];
    let all = words(name, n).into_iter().map(f32::from_bits);
    let mut all: Vec<f32> = all.map(|x| if x.is_nan() { f32::NAN } else { x }).collect();
    // Every pair and triple of special values occurs in operands with different periods.
    let period = name.len();
    for (at, x) in all.iter_mut().take(1000).enumerate() {
        *x = special[at / special.len().pow(period as u32 - 1) % special.len()];
    }
    all
}

fn narrowings(machine: &mut dyn Machine) -> Result<()> {
    // Every upper half, with lower halves at, just below and just above the ties of both formats.
    let lower = [
        0, 1, 0x0fff, 0x1000, 0x1001, 0x2fff, 0x3000, 0x3001, 0x7fff, 0x8000, 0x8001, 0xffff,
    ];
    let upper = 0..=0xffff_u32;
    let all = upper.flat_map(|upper| lower.map(|lower| f32::from_bits(upper << 16 | lower)));
    let x: Vec<f32> = all.collect();
    let n = x.len();
    let x_buffer = machine.upload(&x)?;
    let [bf16, f16, bf16_pairs, f16_pairs] = [(); 4].map(|()| machine.output::<u16>(n));
    let outputs = [bf16?, f16?, bf16_pairs?, f16_pairs?];
    let buffers = [x_buffer, outputs[0], outputs[1], outputs[2], outputs[3]];
    launch(machine, "narrowings", elementwise(n / 2), &buffers, Some(n))?;
    for (format, output, what) in [
        (BF16, 0, "bf16"),
        (F16, 1, "f16"),
        (BF16, 2, "bf16 pairs"),
        (F16, 3, "f16 pairs"),
    ] {
        // A pair's first element is in the low half, which comes first in memory.
        let got = machine.download::<u16>(outputs[output])?;
        let wrong = (0..n).find(|&i| !format.same(got[i], format.encode(x[i])));
        if let Some(i) = wrong {
            let (x, want) = (x[i].to_bits(), format.encode(x[i]));
            anyhow::bail!("{what} of {x:#x} is {:#x} instead of {want:x?}", got[i]);
        }
    }
    Ok(())
}

fn widenings(machine: &mut dyn Machine) -> Result<()> {
    let codes: Vec<u16> = (0..=u16::MAX).collect();
    let n = codes.len();
    let x = machine.upload(&codes)?;
    let (from_bf16, from_f16) = (machine.output::<f32>(n)?, machine.output::<f32>(n)?);
    let buffers = [x, from_bf16, from_f16];
    launch(machine, "widenings", elementwise(n), &buffers, Some(n))?;
    let mut check = |format: Format, buffer| -> Result<()> {
        let got = machine.download::<f32>(buffer)?;
        for (code, got) in codes.iter().zip(got) {
            let want = format.decode(*code);
            let same = f64::from(got).to_bits() == want.to_bits();
            let both_nan = got.is_nan() && want.is_nan();
            ensure!(same || both_nan, "{code:#x} is {got:e} instead of {want:e}");
        }
        Ok(())
    };
    check(BF16, from_bf16)?;
    check(F16, from_f16)
}

/// Zero with the same sign for a subnormal number.
fn flushed(x: f32) -> f32 {
    if x.is_subnormal() {
        0.0_f32.copysign(x)
    } else {
        x
    }
}

fn approximations(machine: &mut dyn Machine) -> Result<()> {
    let mut x = floats("x", 5000);
    let normal = Operands::new(12).normal("normal", 20_000, 30.0);
    x.extend(normal.iter().flat_map(|x| [*x, 1.0 + x / 1000.0, x.abs()]));
    x.extend((-150..=130).map(|x| x as f32));
    let n = x.len();
    let buffers = [
        machine.upload(&x)?,
        machine.output::<f32>(n)?,
        machine.output::<f32>(n)?,
    ];
    launch(machine, "approximations", elementwise(n), &buffers, Some(n))?;
    let exp2 = machine.download::<f32>(buffers[1])?;
    let log2 = machine.download::<f32>(buffers[2])?;
    for (i, x) in x.iter().map(|x| f64::from(flushed(*x))).enumerate() {
        let (want, got) = (x.exp2(), exp2[i]);
        // The border itself may round to either side.
        let near_subnormal = want < f64::from(f32::MIN_POSITIVE) * (1.0 + 1e-6);
        let zero = near_subnormal && got == 0.0 && got.is_sign_positive();
        let close = (f64::from(got) - want).abs() <= tolerance::exp2_approx(want);
        let huge = want > f64::from(f32::MAX) * (1.0 - 1e-6) && got == f32::INFINITY;
        let close = close && !got.is_subnormal();
        let fine = close || zero || huge || (got.is_nan() && want.is_nan());
        ensure!(fine, "exp2 {x:e} is {got:e} instead of {want:e}");
        let (want, got) = (x.log2(), log2[i]);
        let close = (f64::from(got) - want).abs() <= tolerance::log2_approx(x);
        let same = f64::from(got) == want || (got.is_nan() && want.is_nan());
        ensure!(close || same, "log2 {x:e} is {got:e} instead of {want:e}");
    }
    Ok(())
}

fn arithmetic(machine: &mut dyn Machine) -> Result<()> {
    const N: usize = 40_000;
    let [a, b, c] = ["a", "bb", "ccc"].map(|name| floats(name, N));
    let operations: [(&str, fn(f32, f32, f32) -> f32); 9] = [
        ("a + b", |a, b, _| a + b),
        ("a - b", |a, b, _| a - b),
        ("a * b", |a, b, _| a * b),
        ("a / b", |a, b, _| a / b),
        ("sqrt a", |a, _, _| a.sqrt()),
        ("fma", f32::mul_add),
        ("a * b + c", |a, b, c| a * b + c),
        ("max", |a, b, _| a.max(b)),
        ("min", |a, b, _| a.min(b)),
    ];
    // Numbers of similar magnitude are included, so their sums round.
    let operands = [(&a, "a"), (&b, "bb"), (&c, "ccc")];
    let close = operands.map(|(_, name)| Operands::new(13).normal(name, N, 1.0));
    for [a, b, c] in [[a, b, c], close] {
        let y = machine.output::<f32>(operations.len() * N)?;
        let buffers = [
            machine.upload(&a)?,
            machine.upload(&b)?,
            machine.upload(&c)?,
            y,
        ];
        launch(machine, "arithmetic", elementwise(N), &buffers, Some(N))?;
        let y = machine.download::<f32>(y)?;
        for (got, (name, operation)) in y.chunks(N).zip(operations) {
            for i in 0..N {
                let (got, want) = (got[i], operation(a[i], b[i], c[i]));
                // Either of two zeros may be the larger one.
                let zeros = matches!(name, "max" | "min") && got == 0.0 && want == 0.0;
                let same = got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
                let (a, b, c) = (a[i], b[i], c[i]);
                ensure!(
                    same || zeros,
                    "{name} of {a:e} {b:e} {c:e}: {got:e}, not {want:e}"
                );
            }
        }
    }
    Ok(())
}

fn double_arithmetic(machine: &mut dyn Machine) -> Result<()> {
    const N: usize = 10_000;
    let doubles = |name: &str| -> Vec<f64> {
        let high = Operands::new(14).normal(name, N, 1.0);
        let low = Operands::new(15).normal(name, N, 1e-8);
        let pairs = high.iter().zip(&low);
        pairs
            .map(|(high, low)| f64::from(*high) + f64::from(*low))
            .collect()
    };
    let [a, b, c] = ["a", "b", "c"].map(doubles);
    let y = machine.output::<f64>(3 * N)?;
    let buffers = [
        machine.upload(&a)?,
        machine.upload(&b)?,
        machine.upload(&c)?,
        y,
    ];
    launch(
        machine,
        "double_arithmetic",
        elementwise(N),
        &buffers,
        Some(N),
    )?;
    let twice_rounded = (0..N).map(|i| a[i] * b[i] + c[i]);
    let want: Vec<f64> = twice_rounded.chain((0..N).map(|i| a[i] + b[i])).collect();
    let got = machine.download::<f64>(y)?;
    super::equal("doubles", &got[..2 * N], &want)?;
    for (got, a) in got[2 * N..].iter().zip(&a) {
        let want = a.abs().ln();
        // One unit in the last place for each of the two logarithms.
        let allowed = 2.0 * f64::EPSILON * want.abs();
        ensure!(
            (got - want).abs() <= allowed,
            "ln {a:e}: {got:e} instead of {want:e}"
        );
    }
    Ok(())
}

fn high_products(machine: &mut dyn Machine) -> Result<()> {
    const N: usize = 10_000;
    let (a, b) = (words("a", N), words("b", N));
    let y = machine.output::<u32>(N)?;
    let buffers = [machine.upload(&a)?, machine.upload(&b)?, y];
    launch(machine, "high_products", elementwise(N), &buffers, Some(N))?;
    let products = a.iter().zip(&b).map(|(a, b)| u64::from(*a) * u64::from(*b));
    let want: Vec<u32> = products.map(|product| (product >> 32) as u32).collect();
    super::equal("high halves", &machine.download::<u32>(y)?, &want)
}

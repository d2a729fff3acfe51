//! Elementwise operations, dropout and rotary positions: bit-equal to the CPU.

use anyhow::Result;
use kernels::cuda::launch::{Address, Launch};
use kernels::cuda::ops::pointwise::{self, Dropped, RopeShape};
use kernels::{Backend, DType, Direction, DropoutArgs, Gelu, RopeLayout};

use super::host::{Twin, cpu, result, same};
use super::{Case, Effort};
use crate::machine::Machine;
use crate::random::Operands;

const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];
const KEY: [u32; 2] = [0x1234_5678, 0x9abc_def0];

/// An elementwise operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Op {
    Add,
    Scale,
    Gelu(Gelu),
    GeluBackward(Gelu),
    Swiglu,
    SwigluBackward,
}

const OPS: [Op; 8] = [
    Op::Add,
    Op::Scale,
    Op::Gelu(Gelu::Tanh),
    Op::Gelu(Gelu::Erf),
    Op::GeluBackward(Gelu::Tanh),
    Op::GeluBackward(Gelu::Erf),
    Op::Swiglu,
    Op::SwigluBackward,
];

/// Every operation in every dtype, with sizes around the width of a thread, aligned and unaligned.
#[must_use]
pub fn cases(effort: Effort) -> Vec<Case> {
    let (sizes, rows): (&[usize], usize) = match effort {
        Effort::Emulated => (&[1, 8, 9, 5003], 37),
        Effort::Gpu => (&[1, 9, 5003, 5_000_003], 4001),
    };
    let mut cases = Vec::new();
    for dtype in DTYPES {
        for op in OPS {
            for (i, &n) in sizes.iter().enumerate() {
                let offset = i % 2;
                let name = format!("{op:?} {dtype}, {n} elements, {offset} off");
                cases.push(Case::new(name, move |machine| {
                    elements(machine, op, dtype, n, offset)
                }));
            }
        }
        for (k, p) in [(64, 0.1), (61, 0.5), (3, 0.0)] {
            let name = format!("dropout {dtype} [{rows}, {k}], p {p}");
            cases.push(Case::new(name, move |machine| {
                dropout(machine, dtype, [rows, k], p)
            }));
            let name = format!("dropout {dtype} added in some rows of [{rows}, {k}], p {p}");
            cases.push(Case::new(name, move |machine| {
                dropout_of_rows(machine, dtype, [rows, k], p)
            }));
        }
        for layout in [RopeLayout::HalfSplit, RopeLayout::Interleaved] {
            for (i, [heads, d, w]) in [[3, 64, 32], [2, 32, 8], [1, 12, 5], [4, 128, 32]]
                .into_iter()
                .enumerate()
            {
                let direction = [Direction::Forward, Direction::Inverse][i % 2];
                let name =
                    format!("rope {layout:?} {direction:?} {dtype} [{rows}, {heads}, {d}], w {w}");
                cases.push(Case::new(name, move |machine| {
                    rope(
                        machine,
                        dtype,
                        [rows, heads, d, w],
                        (layout, direction),
                        i / 3,
                    )
                }));
            }
        }
    }
    cases
}

/// Normal numbers of deviation 4, mixed with the special ones.
fn numbers(name: &str, n: usize) -> Vec<f32> {
    let special = [
        0.0,
        -0.0,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        f32::MAX,
        1e-40,
        -104.5,
        89.5,
        -20.0,
        60.0,
    ];
    let mut all = Operands::new(31).normal(name, n, 4.0);
    // Operands have different strides, so special values meet.
    let stride = 2 + name.len();
    for (i, x) in all.iter_mut().step_by(stride).enumerate().take(400) {
        *x = special[(i / name.len()) % special.len()];
    }
    all
}

fn elements(
    machine: &mut dyn Machine,
    op: Op,
    dtype: DType,
    n: usize,
    offset: usize,
) -> Result<()> {
    let mut twin = |name| Twin::new(machine, dtype, &[n], &numbers(name, n), offset);
    let [a, b, c] = [twin("a")?, twin("bb")?, twin("ccc")?];
    let count = n as u64;
    let (first, y) = result(machine, dtype, n, offset)?;
    let (second, z) = result(machine, dtype, n, offset)?;
    let cpu = cpu();
    let (launch, want) = match op {
        Op::Add => (
            pointwise::add(dtype, a.address, b.address, y, count),
            vec![cpu.add(&a.host, &b.host)?],
        ),
        Op::Scale => (
            pointwise::scale(dtype, a.address, 0.3, y, count),
            vec![cpu.scale(&a.host, 0.3)?],
        ),
        Op::Gelu(kind) => (
            pointwise::gelu(dtype, kind, a.address, y, count),
            vec![cpu.gelu(&a.host, kind)?],
        ),
        Op::GeluBackward(kind) => (
            pointwise::gelu_backward(dtype, kind, [a.address, b.address], y, count),
            vec![cpu.gelu_backward(&a.host, &b.host, kind)?],
        ),
        Op::Swiglu => (
            pointwise::swiglu(dtype, a.address, b.address, y, count),
            vec![cpu.swiglu(&a.host, &b.host)?],
        ),
        Op::SwigluBackward => {
            let operands = [a.address, b.address, c.address];
            let (d_gate, d_up) = cpu.swiglu_backward(&a.host, &b.host, &c.host)?;
            (
                pointwise::swiglu_backward(dtype, operands, [y, z], count),
                vec![d_gate, d_up],
            )
        }
    };
    run(machine, launch)?;
    for (buffer, want) in [first, second].into_iter().zip(&want) {
        same(machine, &format!("{op:?}"), buffer, want)?;
    }
    Ok(())
}

fn run(machine: &mut dyn Machine, launch: Option<Launch>) -> Result<()> {
    machine.launch(&launch.expect("float dtypes and extents of a grid"))
}

fn dropout(machine: &mut dyn Machine, dtype: DType, [t, k]: [usize; 2], p: f32) -> Result<()> {
    let x = Twin::new(machine, dtype, &[t, k], &numbers("x", t * k), 0)?;
    let words: Vec<i32> = (0..2 * t as i32)
        .map(|i| i.wrapping_mul(-7_654_321))
        .collect();
    let rows = Twin::integers(machine, &[t, 2], &words)?;
    let (buffer, y) = result(machine, dtype, t * k, 0)?;
    let sizes = [t as u64, k as u64];
    let addresses = [x.address, rows.address, y];
    run(machine, pointwise::dropout(dtype, addresses, sizes, KEY, p))?;
    let want = cpu().dropout(DropoutArgs {
        x: &x.host,
        rows: &rows.host,
        key: KEY,
        p,
    })?;
    same(machine, "dropout", buffer, &want)
}

/// Dropout of every third row, added to the existing values as for an adapter's input gradient. The other rows stay.
fn dropout_of_rows(
    machine: &mut dyn Machine,
    dtype: DType,
    [t, k]: [usize; 2],
    p: f32,
) -> Result<()> {
    let x = Twin::new(machine, dtype, &[t, k], &numbers("x", t * k), 0)?;
    let sum = Twin::new(machine, dtype, &[t, k], &numbers("sum", t * k), 0)?;
    let words: Vec<i32> = (0..2 * t as i32)
        .map(|i| i.wrapping_mul(-7_654_321))
        .collect();
    let rows = Twin::integers(machine, &[t, 2], &words)?;
    let named: Vec<i32> = (0..t as i32).rev().step_by(3).collect();
    let at = Twin::integers(machine, &[named.len()], &named)?;
    let (buffer, y) = result(machine, dtype, t * k, 0)?;
    let dropped = Dropped {
        rows: rows.address,
        key: KEY,
        p,
    };
    let all = [t as u64, k as u64];
    // First a copy of the sum (dropout with `p = 0`), then in place.
    let whole = Dropped { p: 0.0, ..dropped };
    let operands = [sum.address, Address::NULL, y];
    run(machine, whole.launch(dtype, operands, Address::NULL, all))?;
    let some = [named.len() as u64, k as u64];
    run(
        machine,
        dropped.launch(dtype, [x.address, y, y], at.address, some),
    )?;
    let cpu = cpu();
    let own = cpu.dropout(DropoutArgs {
        x: &x.host,
        rows: &rows.host,
        key: KEY,
        p,
    })?;
    let added = cpu.gather_rows(&cpu.add(&sum.host, &own)?, &at.host)?;
    let want = cpu.write_rows(cpu.scale(&sum.host, 1.0)?, &at.host, &added)?;
    same(machine, "dropout of rows", buffer, &want)
}

fn rope(
    machine: &mut dyn Machine,
    dtype: DType,
    [t, heads, d, w]: [usize; 4],
    (layout, direction): (RopeLayout, Direction),
    offset: usize,
) -> Result<()> {
    let x = Operands::new(32).normal("x", t * heads * d, 1.0);
    let x = Twin::new(machine, dtype, &[t, heads, d], &x, offset)?;
    let angles: Vec<f32> = (0..t * w).map(|i| i as f32 * 0.37).collect();
    let of = |f: fn(f32) -> f32| angles.iter().copied().map(f).collect::<Vec<f32>>();
    let cos = Twin::new(machine, DType::F32, &[t, w], &of(f32::cos), 0)?;
    let sin = Twin::new(machine, DType::F32, &[t, w], &of(f32::sin), 0)?;
    let (buffer, y) = result(machine, dtype, t * heads * d, offset)?;
    let shape = RopeShape {
        tokens: t as u64,
        heads: heads as u32,
        d: d as u32,
        w: w as u32,
    };
    let addresses = [x.address, cos.address, sin.address, y];
    run(
        machine,
        pointwise::rope(dtype, addresses, shape, layout, direction),
    )?;
    let want = cpu().rope(&x.host, &cos.host, &sin.host, layout, direction)?;
    same(machine, "rope", buffer, &want)
}

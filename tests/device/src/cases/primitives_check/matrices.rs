//! Matrix fragments: the lane and register of each element.

use anyhow::{Result, ensure};

use super::format::{BF16, F16, Format};
use super::{Case, case, equal, launch};
use crate::machine::Machine;
use crate::random::Operands;
use crate::tolerance;

pub(super) fn cases() -> Vec<Case> {
    vec![
        case("load_matrix", loads),
        case("mma with small integers", integers),
        case("mma with numbers of all sizes", single_products),
        case("mma with infinities", infinities),
        case("mma with normal numbers", normals),
    ]
}

fn loads(machine: &mut dyn Machine) -> Result<()> {
    let memory: Vec<u16> = (0..2048).collect();
    let rows = Operands::new(41).below("rows", 32, 256);
    let rows: Vec<u32> = rows.iter().map(|row| 16 * *row as u32).collect();
    let registers = [4, 4, 2, 2];
    let mut buffers = vec![machine.upload(&memory)?, machine.upload(&rows)?];
    for count in registers {
        buffers.push(machine.output::<u32>(32 * count)?);
    }
    launch(machine, "matrix_loads", [1, 32, 4096], &buffers, None)?;
    for (form, count) in registers.into_iter().enumerate() {
        let transposed = form % 2 == 1;
        let element = |matrix: usize, row: usize, column: usize| {
            let (row, column) = if transposed {
                (column, row)
            } else {
                (row, column)
            };
            memory[rows[8 * matrix + row] as usize / 2 + column]
        };
        // Register m of lane l: row l / 4 of matrix m, columns 2 (l % 4) and the next.
        let one = |lane: usize, matrix: usize| {
            let column = lane % 4 * 2;
            let pair = [0, 1].map(|e| u32::from(element(matrix, lane / 4, column + e)));
            pair[0] | pair[1] << 16
        };
        let lanes = (0..32).flat_map(|lane| (0..count).map(move |matrix| (lane, matrix)));
        let want: Vec<u32> = lanes.map(|(lane, matrix)| one(lane, matrix)).collect();
        let got = machine.download::<u32>(buffers[2 + form])?;
        equal(&format!("x{count}, transposed: {transposed}"), &got, &want)?;
    }
    Ok(())
}

/// `A[16][16]`, `B[16][8]` as codes of a format, `C[16][8]`.
struct Product {
    format: Format,
    kernel: &'static str,
    a: Vec<u16>,
    b: Vec<u16>,
    c: Vec<f32>,
}

/// Row and column of element `i` in a lane's part of A (8 elements), B (4), and C and D (4).
fn place_a(lane: usize, i: usize) -> (usize, usize) {
    let row = if matches!(i, 0 | 1 | 4 | 5) {
        lane / 4
    } else {
        lane / 4 + 8
    };
    let column = lane % 4 * 2 + (i & 1) + if i < 4 { 0 } else { 8 };
    (row, column)
}
fn place_b(lane: usize, i: usize) -> (usize, usize) {
    let row = lane % 4 * 2 + (i & 1) + if i < 2 { 0 } else { 8 };
    (row, lane / 4)
}
fn place_c(lane: usize, i: usize) -> (usize, usize) {
    let row = if i < 2 { lane / 4 } else { lane / 4 + 8 };
    (row, lane % 4 * 2 + (i & 1))
}

/// The elements in lane order, `count` per lane.
fn by_lane<T: Copy>(
    matrix: &[T],
    columns: usize,
    count: usize,
    place: fn(usize, usize) -> (usize, usize),
) -> Vec<T> {
    let all = (0..32).flat_map(|lane| (0..count).map(move |i| place(lane, i)));
    all.map(|(row, column)| matrix[row * columns + column])
        .collect()
}

/// Products in both formats, with operands from `draw`, which takes the format, the matrix and the element.
fn products(draw: impl Fn(Format, &str, usize) -> u16, c: &[f32]) -> [Product; 2] {
    [("bf16_products", BF16), ("f16_products", F16)].map(|(kernel, format)| Product {
        format,
        kernel,
        a: (0..256).map(|i| draw(format, "a", i)).collect(),
        b: (0..128).map(|i| draw(format, "b", i)).collect(),
        c: c.to_vec(),
    })
}

impl Product {
    /// Executes k = 16 and k = 8. Passes every element with the f64 sum and the sum of magnitudes.
    fn check(&self, machine: &mut dyn Machine, fine: impl Fn(f32, f64, f64) -> bool) -> Result<()> {
        let buffers = [
            machine.upload(&by_lane(&self.a, 16, 8, place_a))?,
            machine.upload(&by_lane(&self.b, 8, 4, place_b))?,
            machine.upload(&by_lane(&self.c, 8, 4, place_c))?,
            machine.output::<f32>(128)?,
            machine.output::<f32>(128)?,
        ];
        launch(machine, self.kernel, [1, 32, 0], &buffers, None)?;
        for (buffer, k) in [(buffers[3], 16), (buffers[4], 8)] {
            let got = machine.download::<f32>(buffer)?;
            for (at, got) in got.into_iter().enumerate() {
                let (row, column) = place_c(at / 4, at % 4);
                let c = f64::from(self.c[row * 8 + column]);
                let (mut sum, mut size) = (c, c.abs());
                for i in 0..k {
                    let a = self.format.decode(self.a[row * 16 + i]);
                    let product = a * self.format.decode(self.b[i * 8 + column]);
                    sum += product;
                    size += product.abs();
                }
                let kernel = self.kernel;
                ensure!(
                    fine(got, sum, size),
                    "{kernel}, k {k}, row {row}, column {column}: {got:e} instead of {sum:e}"
                );
            }
        }
        Ok(())
    }
}

fn exact(got: f32, sum: f64, _size: f64) -> bool {
    f64::from(got) == sum || (got.is_nan() && sum.is_nan())
}

fn code(format: Format, x: f32) -> u16 {
    format.encode(x).expect("a number")
}

/// Every sum is exact in any order.
fn integers(machine: &mut dyn Machine) -> Result<()> {
    let draw = |name: &str, n| -> Vec<f32> {
        let draw = Operands::new(42).below(name, n, 33);
        draw.into_iter().map(|x| x as f32 - 16.0).collect()
    };
    let (a, b, c) = (draw("a", 256), draw("b", 128), draw("c", 128));
    let one = |format, name: &str, i: usize| code(format, if name == "a" { a[i] } else { b[i] });
    let products = products(one, &c);
    products.iter().try_for_each(|p| p.check(machine, exact))
}

/// One non-zero product per element: exact. Operands have all magnitudes, subnormal ones included.
fn single_products(machine: &mut dyn Machine) -> Result<()> {
    for k in [0, 3, 7, 8, 15] {
        let draw = |format: Format, name: &str, i: usize| {
            let used = if name == "a" { i % 16 == k } else { i / 8 == k };
            let random = Operands::new(43 + k as u64).below(name, 256, 1 << 16)[i] as u16;
            // Products of bf16 leave the range of f32 unless one factor has a middle exponent.
            let middle = (random & 0x8fff) | 0x3000;
            let random = if name == "b" { middle } else { random };
            let product = format.decode(random);
            let small = product.abs() < if name == "a" { 1e30 } else { f64::MAX };
            if used && small && product.is_finite() {
                random
            } else {
                0
            }
        };
        let products = products(draw, &[0.0; 128]);
        let normal = |got: f32, sum: f64, size: f64| {
            // A machine may flush results below the normal numbers.
            exact(got, sum, size)
                || (sum.abs() < f64::from(f32::MIN_POSITIVE) && got.abs() < f32::MIN_POSITIVE)
        };
        products.iter().try_for_each(|p| p.check(machine, normal))?;
    }
    Ok(())
}

/// Infinity times zero and the sum of opposite infinities are NaN. Other sums with an infinity are infinite.
fn infinities(machine: &mut dyn Machine) -> Result<()> {
    let draw = |format: Format, name: &str, i: usize| match (name, i) {
        ("a", 0) => code(format, f32::INFINITY),
        ("a", 17) => code(format, f32::NEG_INFINITY),
        ("a", 34) => format
            .encode(f32::INFINITY)
            .map_or(0, |infinity| infinity + 1),
        ("b", i) if i < 8 => code(format, i as f32 - 3.0),
        _ => code(format, 1.0),
    };
    let mut c = [1.0; 128];
    c[8] = f32::INFINITY;
    let products = products(draw, &c);
    products.iter().try_for_each(|p| p.check(machine, exact))
}

fn normals(machine: &mut dyn Machine) -> Result<()> {
    let draw = |name, n| Operands::new(44).normal(name, n, 1.0);
    let (a, b, c) = (draw("a", 256), draw("b", 128), draw("c", 128));
    let one = |format, name: &str, i: usize| code(format, if name == "a" { a[i] } else { b[i] });
    let close = |got: f32, sum: f64, size| (f64::from(got) - sum).abs() <= tolerance::mma(16, size);
    let products = products(one, &c);
    products.iter().try_for_each(|p| p.check(machine, close))
}

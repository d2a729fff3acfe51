//! Matrix products: every tile in every orientation, compared with f64 sums.

use anyhow::{Context, Result, ensure};
use kernels::DType;
use kernels::cuda::launch::Address;
use kernels::cuda::ops::product::{Choice, Product, Term, Variant};
use kernels::cuda::ops::tile::Tile;
use kernels::cuda::ops::workspace::Workspace;

use super::Case;
use super::operand::{Operand, decode, launch_all};
use crate::machine::Machine;
use crate::reference::{absolute, add, add_bias, matmul, transpose};
use crate::tolerance;

/// Shape of a product.
#[derive(Clone, Copy, Debug)]
struct Shape {
    dtype: DType,
    out: DType,
    transpose: [bool; 2],
    m: usize,
    n: usize,
    /// Number of columns that `b` has.
    b_rows: usize,
    k: [usize; 2],
    bias: bool,
}

/// Operands on a machine, and the expected result.
struct Drawn {
    product: Product,
    want: Vec<f64>,
    magnitude: Vec<f64>,
}

/// Every variant with sizes around its tile; sums in parts; tiles that must give equal bits.
pub(super) fn cases(variants: &[Variant]) -> Vec<Case> {
    let mut cases = Vec::new();
    for (i, &(dtype, out, transpose, tile)) in variants.iter().enumerate() {
        let n = if i % 2 == 0 {
            tile.n as usize - 3
        } else {
            tile.n as usize + 8
        };
        let shape = Shape {
            dtype,
            out,
            transpose,
            m: tile.m as usize + [1, 9, 72, 127][i % 4],
            n,
            b_rows: n - i % 3,
            k: [[200, 40], [72, 16], [136, 0], [129, 7]][i % 4],
            bias: i % 5 < 3,
        };
        cases.push(Case::new(
            format!("product {shape:?}, {tile:?}"),
            move |machine| check(machine, shape, tile, 1),
        ));
    }
    cases.extend(cut_sums(variants));
    for warps_k in [1, 4] {
        let alike = |&&(dtype, out, transpose, tile): &&Variant| {
            let forward = transpose == [false, false] && dtype != DType::F16;
            forward && dtype == out && tile.warps[2] == warps_k
        };
        let tiles: Vec<Tile> = variants
            .iter()
            .filter(alike)
            .map(|variant| variant.3)
            .collect();
        if tiles.len() > 1 {
            cases.push(equal_tiles(variants[0].0, tiles));
        }
    }
    cases
}

/// Sums cut into parts, with bias and factor applied after the addition of the parts.
fn cut_sums(variants: &[Variant]) -> impl Iterator<Item = Case> {
    let wanted = |(_, out, _, tile): &&Variant| *out == DType::F32 && tile.m < 128;
    let variants = variants
        .iter()
        .filter(wanted)
        .zip([2, 3, 16].into_iter().cycle());
    variants.map(|(&(dtype, _, transpose, tile), parts)| {
        let shape = Shape {
            dtype,
            out: if transpose[0] { DType::F32 } else { dtype },
            transpose,
            m: 33,
            n: 65,
            b_rows: 65,
            k: if transpose[0] { [700, 0] } else { [200, 40] },
            bias: true,
        };
        let name = format!("product {shape:?} in {parts} parts, {tile:?}");
        Case::new(name, move |machine| check(machine, shape, tile, parts))
    })
}

/// Tiles with the same order of sums give the same bits.
fn equal_tiles(dtype: DType, tiles: Vec<Tile>) -> Case {
    let shape = Shape {
        dtype,
        out: dtype,
        transpose: [false, false],
        m: 130,
        n: 72,
        b_rows: 72,
        k: [328, 24],
        bias: false,
    };
    let name = format!("product {shape:?}: equal bits by {tiles:?}");
    Case::new(name, move |machine| {
        let mut drawn = draw(machine, shape)?;
        let mut first = None;
        for &tile in &tiles {
            let bytes = run(machine, &mut drawn.product, Choice { tile, parts: 1 }, 132)?;
            let first = first.get_or_insert_with(|| bytes.clone());
            ensure!(*first == bytes, "{tile:?} gives other bits");
        }
        Ok(())
    })
}

fn draw(machine: &mut dyn Machine, shape: Shape) -> Result<Drawn> {
    let Shape { m, n, b_rows, .. } = shape;
    let scale = 0.75f32;
    let mut product = Product {
        dtype: shape.dtype,
        out: shape.out,
        transpose_a: shape.transpose[0],
        transpose_b: shape.transpose[1],
        m,
        n,
        b_rows,
        terms: [None; 2],
        bias: Address::NULL,
        scale,
        y: Address::NULL,
        y_line: n,
    };
    let (mut want, mut magnitude) = (vec![0.0; m * n], vec![0.0; m * n]);
    for (term, k) in shape.k.into_iter().enumerate().filter(|(_, k)| *k > 0) {
        let a = Operand::draw(machine, shape.dtype, &format!("a{term}"), m * k, 1.0)?;
        let b = Operand::draw(machine, shape.dtype, &format!("b{term}"), b_rows * k, 1.0)?;
        let (a_line, b_line) = (
            if shape.transpose[0] { m } else { k },
            if shape.transpose[1] { b_rows } else { k },
        );
        product.terms[term] = Some(Term {
            a: a.address(),
            a_line,
            b: b.address(),
            b_line,
            k,
        });
        let rows = if shape.transpose[0] {
            transpose(&a.values, k, m)
        } else {
            a.values
        };
        let columns = if shape.transpose[1] {
            b.values
        } else {
            transpose(&b.values, b_rows, k)
        };
        // Columns that `b` lacks are zero.
        let columns: Vec<f64> = columns
            .chunks_exact(b_rows)
            .flat_map(|row| {
                row.iter()
                    .copied()
                    .chain(std::iter::repeat_n(0.0, n - b_rows))
            })
            .collect();
        let factor = f64::from(scale);
        want = add(&want, &matmul(&rows, &columns, m, n, k), factor);
        let sizes = matmul(&absolute(&rows), &absolute(&columns), m, n, k);
        magnitude = add(&magnitude, &sizes, factor);
    }
    if shape.bias {
        let bias = Operand::draw(machine, shape.dtype, "bias", n, 1.0)?;
        product.bias = bias.address();
        add_bias(&mut want, &bias.values);
        add_bias(&mut magnitude, &absolute(&bias.values));
    }
    Ok(Drawn {
        product,
        want,
        magnitude,
    })
}

/// The bytes of `y`, from two runs that must agree.
fn run(
    machine: &mut dyn Machine,
    product: &mut Product,
    choice: Choice,
    sms: u32,
) -> Result<Vec<u8>> {
    let mut all = Vec::new();
    for _ in 0..2 {
        let y = machine.output::<u8>(product.m * product.n * product.out.size_bytes())?;
        product.y = y.address;
        let space = machine.allocate(product.workspace_bytes(choice) as usize)?;
        let launches = product.launches(choice, sms, &mut Workspace::new(space.address));
        launch_all(machine, &launches.context("no kernel")?)?;
        all.push(machine.download::<u8>(y)?);
    }
    ensure!(all[0] == all[1], "two runs differ");
    Ok(all.swap_remove(0))
}

fn check(machine: &mut dyn Machine, shape: Shape, tile: Tile, parts: u32) -> Result<()> {
    let mut drawn = draw(machine, shape)?;
    // With few multiprocessors a block walks the tiles in several groups.
    let bytes = run(machine, &mut drawn.product, Choice { tile, parts }, 1)?;
    let depth = shape.k.iter().sum();
    for (i, got) in decode(shape.out, &bytes).into_iter().enumerate() {
        let (want, magnitude) = (drawn.want[i], drawn.magnitude[i]);
        let allowed = tolerance::tensor_product(shape.out, depth, want, magnitude);
        ensure!(
            (got - want).abs() <= allowed,
            "row {}, column {}: {got} instead of {want}, allowed {allowed:e}",
            i / shape.n,
            i % shape.n
        );
    }
    Ok(())
}

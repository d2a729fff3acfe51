//! Library products, compared with f64 sums and with our own kernels. Cases: every dtype and orientation, row strides,
//! factors, sums added to existing values, and every epilogue.

use anyhow::{Context, Result, ensure};
use kernels::cuda::launch::Address;
use kernels::cuda::matmul::{Epilogue, Multiply, Shape, WORKSPACE_BYTES};
use kernels::cuda::ops::product::{Product, Term};
use kernels::cuda::ops::workspace::Workspace;
use kernels::{DType, Gelu};

use super::operand::{Operand, decode, encode, launch_all};
use super::{Case, Effort};
use crate::machine::{Machine, POISON};
use crate::random::Operands;
use crate::reference::{absolute, gelu, matmul, transpose};
use crate::tolerance;

const EPILOGUES: [Epilogue; 6] = [
    Epilogue::None,
    Epilogue::Bias,
    Epilogue::Gelu { aux: false },
    Epilogue::Gelu { aux: true },
    Epilogue::GeluBias { aux: false },
    Epilogue::GeluBias { aux: true },
];

const DTYPES: [(DType, DType); 5] = [
    (DType::BF16, DType::BF16),
    (DType::BF16, DType::F32),
    (DType::F16, DType::F16),
    (DType::F16, DType::F32),
    (DType::F32, DType::F32),
];

/// A product to check.
#[derive(Clone, Copy, Debug)]
struct Wanted {
    shape: Shape,
    alpha: f32,
    beta: f32,
}

impl Wanted {
    /// A product without further terms.
    const fn new(
        (dtype, out): (DType, DType),
        [transpose_a, transpose_b]: [bool; 2],
        [m, n, k]: [usize; 3],
    ) -> Self {
        let shape = Shape {
            dtype,
            out,
            transpose_a,
            transpose_b,
            m,
            n,
            k,
            a_line: if transpose_a { m } else { k },
            b_line: if transpose_b { n } else { k },
            y_line: n,
            epilogue: Epilogue::None,
        };
        Self {
            shape,
            alpha: 1.0,
            beta: 0.0,
        }
    }
}

/// All products. A library may refuse those that no backend requests; the check then says so.
#[must_use]
pub fn cases(effort: Effort) -> Vec<Case> {
    let mut all = Vec::new();
    for (i, dtypes) in DTYPES.into_iter().enumerate() {
        let orientations = [[false, false], [false, true], [true, false], [true, true]];
        for (j, orientation) in orientations.into_iter().enumerate() {
            let mut wanted = Wanted::new(dtypes, orientation, [40, 24, 72]);
            wanted.alpha = [1.0, 0.75][(i + j) % 2];
            // Operands that are columns of larger matrices.
            wanted.shape.a_line += [0, 8][j % 2];
            wanted.shape.b_line += [16, 0][j % 2];
            all.push(wanted);
        }
        let mut added = Wanted::new(dtypes, [true, true], [16, 32, 200]);
        (added.beta, added.shape.y_line) = (1.0, 40);
        all.push(added);
        // A single row, and columns whose rows are not whole words.
        all.push(Wanted::new(dtypes, [false, false], [1, 64, 48]));
        all.push(Wanted::new(dtypes, [false, false], [17, 13, 48]));
    }
    for dtypes in [(DType::BF16, DType::BF16), (DType::F16, DType::F16)] {
        for epilogue in EPILOGUES {
            let mut wanted = Wanted::new(dtypes, [false, false], [48, 64, 80]);
            wanted.shape.epilogue = epilogue;
            all.push(wanted);
        }
    }
    let mut biased = Wanted::new((DType::F32, DType::F32), [false, false], [19, 24, 40]);
    biased.shape.epilogue = Epilogue::Bias;
    all.push(biased);
    if effort == Effort::Gpu {
        for dtypes in DTYPES {
            all.push(Wanted::new(dtypes, [false, false], [777, 1152, 1024]));
            all.push(Wanted::new(dtypes, [false, true], [512, 640, 1792]));
            all.push(Wanted::new(dtypes, [true, true], [256, 520, 4096]));
        }
    }
    let case = |wanted: Wanted| {
        Case::new(format!("library {wanted:?}"), move |machine| {
            check(machine, wanted)
        })
    };
    all.into_iter().map(case).collect()
}

/// `lines` rows of `along` elements, `line` apart, on the machine and as a matrix.
fn lines(
    machine: &mut dyn Machine,
    dtype: DType,
    name: &str,
    [lines, along, line]: [usize; 3],
) -> Result<(Address, Vec<f64>)> {
    let operand = Operand::draw(machine, dtype, name, lines * line, 1.0)?;
    let rows = operand.values.chunks_exact(line);
    let dense = rows.flat_map(|row| row[..along].to_vec()).collect();
    Ok((operand.address(), dense))
}

fn check(machine: &mut dyn Machine, wanted: Wanted) -> Result<()> {
    let Wanted { shape, alpha, beta } = wanted;
    let Shape { m, n, k, .. } = shape;
    let stored = |transposed, extent, line| match transposed {
        true => [k, extent, line],
        false => [extent, k, line],
    };
    let a_lines = stored(shape.transpose_a, m, shape.a_line);
    let b_lines = stored(shape.transpose_b, n, shape.b_line);
    let (a, rows) = lines(machine, shape.dtype, "a", a_lines)?;
    let (b, columns) = lines(machine, shape.dtype, "b", b_lines)?;
    let rows = match shape.transpose_a {
        true => transpose(&rows, k, m),
        false => rows,
    };
    let columns = match shape.transpose_b {
        true => columns,
        false => transpose(&columns, n, k),
    };
    let bias = Operand::draw(machine, shape.out, "bias", n, 1.0)?;
    let held = Operands::new(11).normal("held", m * shape.y_line, 1.0);
    let held = encode(shape.out, &held);
    let size = shape.out.size_bytes();
    // The last row ends with its last element.
    let held = &held[..((m - 1) * shape.y_line + n) * size];

    let y = machine.upload(held)?;
    let aux = machine.output::<u8>(m * n * size)?;
    let workspace = machine.output::<u8>(WORKSPACE_BYTES as usize)?;
    let none_unless = |wanted: bool, at: Address| if wanted { at } else { Address::NULL };
    let multiply = Multiply {
        shape,
        a,
        b,
        y: y.address,
        bias: none_unless(shape.epilogue.has_bias(), bias.address()),
        aux: none_unless(shape.epilogue.has_aux(), aux.address),
        alpha,
        beta,
    };
    let done = machine.multiply(&multiply, workspace.address, WORKSPACE_BYTES)?;
    ensure!(done, "the library has no algorithm");
    let got = machine.download::<u8>(y)?;
    let entering = machine.download::<u8>(aux)?;

    let sums = matmul(&rows, &columns, m, n, k);
    let sizes = matmul(&absolute(&rows), &absolute(&columns), m, n, k);
    let before = decode(shape.out, held);
    let (got, entering) = (decode(shape.out, &got), decode(shape.out, &entering));
    let own = own_kernel(machine, &multiply)?;
    for i in 0..m * n {
        let (row, column) = (i / n, i % n);
        let place = row * shape.y_line + column;
        let added = f64::from(beta) * before[place]
            + match shape.epilogue.has_bias() {
                true => bias.values[column],
                false => 0.0,
            };
        let x = f64::from(alpha) * sums[i] + added;
        let magnitude = f64::from(alpha) * sizes[i] + added.abs();
        let error = tolerance::tensor_sum(k, magnitude);
        let near = |what: &str, got: f64, want: f64, allowed: f64| -> Result<()> {
            ensure!(
                (got - want).abs() <= allowed,
                "{what}, row {row}, column {column}: {got} instead of {want}, allowed {allowed:e}"
            );
            Ok(())
        };
        if shape.epilogue.has_gelu() {
            let want = gelu(x, Gelu::Tanh);
            let allowed = tolerance::library_gelu(shape.out, x, want, error);
            near("GELU", got[place], want, allowed)?;
        } else {
            let allowed = tolerance::tensor_product(shape.out, k, x, magnitude);
            near("y", got[place], x, allowed)?;
            if let Some(own) = &own {
                near("our kernel's y", own[i], x, allowed)?;
                near("beside our kernel", got[place], own[i], 2.0 * allowed)?;
            }
        }
        if shape.epilogue.has_aux() {
            let allowed = tolerance::tensor_product(shape.out, k, x, magnitude);
            near("aux", entering[i], x, allowed)?;
        }
    }
    // Elements between the rows are unchanged.
    let between = (0..got.len()).filter(|place| place % shape.y_line >= n);
    for place in between {
        ensure!(
            got[place].to_bits() == before[place].to_bits(),
            "[{place}] between rows was written"
        );
    }
    let unused = shape.epilogue.has_aux() || entering.iter().all(|x| x.is_nan());
    ensure!(unused && POISON == 0xff, "aux was written");
    Ok(())
}

/// The same product by our own kernel, if it has one.
fn own_kernel(machine: &mut dyn Machine, multiply: &Multiply) -> Result<Option<Vec<f64>>> {
    let shape = multiply.shape;
    if shape.epilogue.has_gelu() || multiply.beta != 0.0 {
        return Ok(None);
    }
    let y = machine.output::<u8>(shape.m * shape.n * shape.out.size_bytes())?;
    let product = Product {
        dtype: shape.dtype,
        out: shape.out,
        transpose_a: shape.transpose_a,
        transpose_b: shape.transpose_b,
        m: shape.m,
        n: shape.n,
        b_rows: shape.n,
        terms: [
            Some(Term {
                a: multiply.a,
                a_line: shape.a_line,
                b: multiply.b,
                b_line: shape.b_line,
                k: shape.k,
            }),
            None,
        ],
        bias: multiply.bias,
        scale: multiply.alpha,
        y: y.address,
        y_line: shape.n,
    };
    let choice = product.choose(132);
    let space = machine.allocate(product.workspace_bytes(choice) as usize)?;
    let launches = product.launches(choice, 132, &mut Workspace::new(space.address));
    launch_all(machine, &launches.context("no kernel")?)?;
    Ok(Some(decode(shape.out, &machine.download::<u8>(y)?)))
}

//! Library products on the emulator: one chain of f32 additions per element, rounded once.

use anyhow::{Result, ensure};
use kernels::cuda::launch::Address;
use kernels::cuda::matmul::{ALIGNMENT, Multiply, Shape, WORKSPACE_BYTES};

use crate::machine::POISON;
use crate::numbers::{bytes, values};

/// Bytes at either end of the workspace that are overwritten, since a library may overwrite all of it.
const USED_BYTES: usize = 4096;

/// The memory of the executing machine.
pub(super) trait Memory {
    /// The bytes of a range that must be in one buffer.
    fn load(&self, at: Address, bytes: usize) -> Result<Vec<u8>>;

    /// Writes bytes to a range that must be in one buffer.
    fn store(&mut self, at: Address, bytes: &[u8]) -> Result<()>;
}

/// Executes a product.
pub(super) fn run(
    memory: &mut dyn Memory,
    product: &Multiply,
    workspace: Address,
    workspace_bytes: u64,
) -> Result<()> {
    let shape = &product.shape;
    let Shape { m, n, k, .. } = *shape;
    ensure!(workspace_bytes >= WORKSPACE_BYTES, "a small workspace");
    let places = [product.a, product.b, product.y, product.bias, product.aux];
    let aligned = places.iter().all(|at| at.0.is_multiple_of(ALIGNMENT));
    ensure!(
        aligned,
        "an address that is no multiple of {ALIGNMENT}: {product:?}"
    );
    let used = workspace.0..workspace.0 + workspace_bytes;
    ensure!(
        !places.iter().any(|at| used.contains(&at.0)),
        "an operand in the workspace"
    );
    for at in [used.start, used.end - USED_BYTES as u64] {
        memory.store(Address(at), &[POISON; USED_BYTES])?;
    }

    let lines = |at, transposed, extent, line| -> Result<Vec<f32>> {
        let [lines, along] = if transposed { [k, extent] } else { [extent, k] };
        matrix(memory, shape.dtype, at, [lines, along, line])
    };
    let a = lines(product.a, shape.transpose_a, m, shape.a_line)?;
    let b = lines(product.b, shape.transpose_b, n, shape.b_line)?;
    // Both with k first, so one element of `a` meets a whole row of `b`.
    let a = if shape.transpose_a {
        a
    } else {
        turned(&a, m, k)
    };
    let b = if shape.transpose_b {
        b
    } else {
        turned(&b, n, k)
    };
    let held = match product.beta {
        0.0 => vec![0.0; m * n],
        _ => matrix(memory, shape.out, product.y, [m, n, shape.y_line])?,
    };
    let bias = match shape.epilogue.has_bias() {
        true => matrix(memory, shape.out, product.bias, [1, n, n])?,
        false => vec![0.0; n],
    };
    for row in 0..m {
        let mut sums = vec![0f32; n];
        for step in 0..k {
            let factor = a[step * m + row];
            let other = &b[step * n..(step + 1) * n];
            sums.iter_mut()
                .zip(other)
                .for_each(|(sum, x)| *sum += factor * x);
        }
        for (column, sum) in sums.iter_mut().enumerate() {
            *sum = product.alpha * *sum + product.beta * held[row * n + column] + bias[column];
        }
        let size = shape.out.size_bytes();
        if shape.epilogue.has_aux() {
            let at = Address(product.aux.0 + (row * n * size) as u64);
            memory.store(at, &bytes(shape.out, &sums))?;
        }
        if shape.epilogue.has_gelu() {
            sums.iter_mut().for_each(|x| *x = gelu(*x));
        }
        let at = Address(product.y.0 + (row * shape.y_line * size) as u64);
        memory.store(at, &bytes(shape.out, &sums))?;
    }
    Ok(())
}

/// The elements of `lines` rows of `along` elements that are `line` elements apart.
fn matrix(
    memory: &dyn Memory,
    dtype: kernels::DType,
    at: Address,
    [lines, along, line]: [usize; 3],
) -> Result<Vec<f32>> {
    ensure!(line >= along, "lines of {along} elements overlap at {line}");
    let size = dtype.size_bytes();
    // The last row ends with its last element.
    let all = memory.load(at, ((lines - 1) * line + along) * size)?;
    let rows = all.chunks(line * size).take(lines);
    Ok(rows
        .flat_map(|row| values(dtype, &row[..along * size]))
        .collect())
}

/// Transposes `[rows, columns]`.
fn turned(x: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    let at = |i: usize| x[i % rows * columns + i / rows];
    (0..rows * columns).map(at).collect()
}

fn gelu(x: f32) -> f32 {
    let inner = (2.0 / std::f32::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
    0.5 * x * (1.0 + inner.tanh())
}

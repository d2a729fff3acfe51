//! Cross entropy of a linear head: one chunk of supervised rows, as the backend cuts them.

use anyhow::{Context, Result};
use kernels::DType;
use kernels::cuda::backend::LossCuts;
use kernels::cuda::launch::{Address, Launch};
use kernels::cuda::ops::loss::{self, RUNNING_BYTES, Tile};
use kernels::cuda::ops::product::{Product, Term};
use kernels::cuda::ops::{cast, rows as tables};

use super::{Amount, Prepared, Rows, Targets};
use crate::stages::table::bench::Operands;

const DTYPE: DType = DType::BF16;
const VOCABULARY: usize = 150_528;
const WIDTH: usize = 4096;
/// Tokens among which the supervised rows are.
const TOKENS: usize = 8192;
const FACTOR: f32 = 1.0;

/// The last step of a chunk.
#[derive(Clone, Copy, PartialEq, PartialOrd)]
enum Until {
    /// Losses.
    Losses,
    /// Gradients of hidden states, with a frozen head.
    Hidden,
    /// Gradients of the head too.
    Weight,
}

/// Adds the rows without targets. PyTorch has no single kernel for a chunk, and a chunk's time is mostly that of its
/// products.
pub(super) fn add(rows: &mut Rows) {
    let n = chunk();
    let name = format!("losses f32 {n}x{VOCABULARY}");
    rows.add(name, Targets::NONE, losses_row);
    for dtype in [DTYPE, DType::F32] {
        let name = format!("gradients of logits {dtype} {n}x{VOCABULARY}");
        rows.add(name, Targets::NONE, move |on| gradients_row(on, dtype));
    }
    for (until, which) in [
        (Until::Losses, "forward"),
        (Until::Hidden, "with gradients of hidden states"),
        (Until::Weight, "with all gradients"),
    ] {
        let name = format!("linear cross entropy bf16 {n}x{WIDTH}x{VOCABULARY} {which}");
        rows.add(name, Targets::NONE, move |on| chunk_row(on, until));
    }
}

/// Number of rows in a chunk.
fn chunk() -> usize {
    LossCuts::default().logits / VOCABULARY
}

/// A chunk's logits, labels and statistics, and the address of its losses.
struct Chunk {
    tile: Tile,
    numbers: Address,
    losses: Address,
}

impl Chunk {
    fn new(on: &mut Operands<'_>) -> Result<Self> {
        let (n, v, t) = (on.of(chunk()), on.of(VOCABULARY), on.of(TOKENS));
        // Every other token from the middle on, like the answer after a question.
        let numbers: Vec<i32> = (0..n).map(|i| ((t / 2 + 2 * i) % t) as i32).collect();
        let labels: Vec<i32> = (0..n).map(|i| (i * 37 % v) as i32).collect();
        Ok(Self {
            tile: Tile {
                logits: on.normal(DType::F32, n * v, 3.0)?,
                labels: on.values(&labels)?,
                running: on.zeros(n * RUNNING_BYTES as usize)?,
                rows: n as u32,
                cols: v as u32,
                first: 0,
            },
            numbers: on.values(&numbers)?,
            losses: on.zeros(4 * t)?,
        })
    }

    fn elements(&self) -> usize {
        self.tile.rows as usize * self.tile.cols as usize
    }

    fn losses(&self) -> Result<[Launch; 2]> {
        let Self {
            tile,
            numbers,
            losses,
        } = self;
        let statistics = loss::statistics(tile).context("extents")?;
        let losses = loss::losses(tile.running, *numbers, *losses, tile.rows);
        Ok([statistics, losses.context("extents")?])
    }
}

fn losses_row(on: &mut Operands<'_>) -> Result<Prepared> {
    let chunk = Chunk::new(on)?;
    let bytes = 4 * chunk.elements();
    Ok((Amount::Bytes(bytes as f64), vec![chunk.losses()?.into()]))
}

fn gradients_row(on: &mut Operands<'_>, dtype: DType) -> Result<Prepared> {
    let chunk = Chunk::new(on)?;
    for launch in &chunk.losses()? {
        on.bench.launch(launch)?;
    }
    let (tile, size) = (&chunk.tile, dtype.size_bytes());
    let out = on.output(chunk.elements() * size)?;
    let launch = loss::gradients(tile, dtype, out, tile.cols, FACTOR).context("floats")?;
    let bytes = chunk.elements() * (4 + size);
    Ok((Amount::Bytes(bytes as f64), vec![vec![launch]]))
}

/// Launches of a chunk as in `CudaBackend`: gathered rows, logits, losses, gradients of logits, and the products after
/// them.
fn chunk_row(on: &mut Operands<'_>, until: Until) -> Result<Prepared> {
    let chunk = Chunk::new(on)?;
    let (c, t) = (on.of(WIDTH), on.of(TOKENS));
    let (n, v) = (chunk.tile.rows as usize, chunk.tile.cols as usize);
    let line = (c * DTYPE.size_bytes()) as u64;
    let hidden = on.normal(DTYPE, t * c, 1.0)?;
    let weight = on.normal(DTYPE, v * c, 0.02)?;
    let gathered = on.output(n * c * DTYPE.size_bytes())?;
    let mut launches = vec![tables::gather_rows(
        hidden,
        chunk.numbers,
        gathered,
        n as u64,
        line,
    )];
    let term = |a, a_line, b, k| Term {
        a,
        a_line,
        b,
        b_line: c,
        k,
    };
    let logits = product(
        [n, v],
        [false; 2],
        term(gathered, c, weight, c),
        chunk.tile.logits,
    );
    launches.extend(on.with_scratch(|sms, space| logits.launches(logits.choose(sms), sms, space))?);
    launches.extend(chunk.losses()?);
    let mut products = 1.0;
    if until >= Until::Hidden {
        let out = on.output(n * v * DTYPE.size_bytes())?;
        let gradients = loss::gradients(&chunk.tile, DTYPE, out, v as u32, FACTOR);
        launches.push(gradients.context("floats")?);
        let [sums, rounded] = [
            on.output(4 * n * c)?,
            on.output(n * c * DTYPE.size_bytes())?,
        ];
        let d_hidden = product([n, c], [false, true], term(out, v, weight, v), sums);
        launches.extend(
            on.with_scratch(|sms, space| d_hidden.launches(d_hidden.choose(sms), sms, space))?,
        );
        let narrowed = cast::launch(DType::F32, sums, DTYPE, rounded, (n * c) as u64);
        launches.push(narrowed.context("floats")?);
        let order: Vec<i32> = (0..n as i32).collect();
        let (order, d_hidden) = (on.values(&order)?, on.zeros(t * c * DTYPE.size_bytes())?);
        let put = tables::put_rows(rounded, order, chunk.numbers, d_hidden, n as u64, line);
        launches.push(put);
        products += 1.0;
        if until >= Until::Weight {
            let d_weight = on.output(4 * v * c)?;
            let product = product([v, c], [true; 2], term(out, v, gathered, n), d_weight);
            launches.extend(
                on.with_scratch(|sms, space| product.launches(product.choose(sms), sms, space))?,
            );
            products += 1.0;
        }
    }
    let flops = products * 2.0 * n as f64 * v as f64 * c as f64;
    Ok((Amount::Flops(flops), vec![launches]))
}

/// The launches of `y [m, n]` in f32.
fn product(
    [m, n]: [usize; 2],
    [transpose_a, transpose_b]: [bool; 2],
    term: Term,
    y: Address,
) -> Product {
    Product {
        dtype: DTYPE,
        out: DType::F32,
        transpose_a,
        transpose_b,
        m,
        n,
        b_rows: n,
        terms: [Some(term), None],
        bias: Address::NULL,
        scale: 1.0,
        y,
        y_line: n,
    }
}

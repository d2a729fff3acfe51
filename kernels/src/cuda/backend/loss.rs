//! Fused output projection and cross entropy over chunks of supervised rows.

use super::CudaBackend;
use crate::backend::{IGNORED_LABEL, LossGrads, LossNeeds};
use crate::check::LossSizes;
use crate::cuda::launch::Address;
use crate::cuda::ops::loss::{self, RUNNING_BYTES, Tile};
use crate::cuda::ops::pointwise;
use crate::cuda::ops::product::{Product, Term};
use crate::cuda::ops::rows;
use crate::error::{KernelError, Result};
use crate::pool::Tag;
use crate::{Backend, DType, Tensor};

/// Sizes of the chunks in which the fused output projection and cross entropy are computed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LossCuts {
    /// Maximum number of logits per chunk, which is rows (tokens) times vocabulary size. A chunk has at least
    /// one row.
    pub logits: usize,
    /// Number of rows (vocabulary entries) of the weight's gradient that the second and later chunks add to
    /// at a time; a multiple of 8.
    pub weight_rows: usize,
}

impl Default for LossCuts {
    /// Chunks with 128 MiB of f32 logits, and 8192 rows of the weight's gradient at a time.
    fn default() -> Self {
        Self {
            logits: 32 << 20,
            weight_rows: 8192,
        }
    }
}

/// Number and label of each row whose label is not ignored. Fails for a label outside the vocabulary of size `v`.
fn supervised(labels: &Tensor, v: usize) -> Result<Vec<(i32, i32)>> {
    let bytes = labels.to_bytes()?;
    let labels = bytes
        .chunks_exact(4)
        .map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    let mut rows = Vec::new();
    for (row, label) in (0..).zip(labels) {
        if label == IGNORED_LABEL {
            continue;
        }
        if usize::try_from(label).map_or(true, |l| l >= v) {
            return Err(KernelError::Index {
                op: OP,
                index: i64::from(label),
                rows: v,
            });
        }
        rows.push((row, label));
    }
    Ok(rows)
}

const OP: &str = "linear_cross_entropy";

/// Operands that all chunks of rows share.
struct Head {
    sizes: LossSizes,
    /// Dtype of hidden states, weight and the gradients of logits.
    dtype: DType,
    hidden: Tensor,
    weight: Address,
}

/// Supervised rows that are processed together, gathered on the device.
struct Chunk {
    rows: usize,
    /// Numbers of its rows in the batch, followed by `0..rows`.
    numbers: Tensor,
    /// Hidden states of these rows, `[rows, c]`.
    hidden: Tensor,
}

/// Address and row length (in elements) of the gradients of a chunk's logits, `[rows, line]`.
#[derive(Clone, Copy)]
struct Gradients {
    at: Address,
    line: usize,
}

impl CudaBackend {
    /// Losses and, if requested, gradients of `factor * sum(losses)`.
    pub(super) fn loss_op(
        &self,
        [hidden, weight, labels]: [&Tensor; 3],
        sizes: LossSizes,
        backward: Option<(f32, LossNeeds)>,
    ) -> Result<LossGrads> {
        let LossSizes { t, c, v } = sizes;
        let all = supervised(labels, v)?;
        let need = backward.map_or(
            LossNeeds {
                hidden: false,
                weight: false,
            },
            |(_, need)| need,
        );
        let losses = self.zeros([t].into(), DType::F32, Tag::Activations)?;
        let d_hidden = match need.hidden {
            true => Some(self.zeros(hidden.shape(), hidden.dtype(), Tag::Activations)?),
            false => None,
        };
        let d_weight = match need.weight {
            true if all.is_empty() => {
                Some(self.zeros([v, c].into(), DType::F32, Tag::Gradients)?)
            }
            true => Some(self.gradient([v, c])?),
            false => None,
        };
        let dtype = if hidden.dtype() == weight.dtype() {
            hidden.dtype()
        } else {
            DType::F32
        };
        let weight = self.operand(OP, weight, dtype)?;
        let head = Head {
            sizes,
            dtype,
            hidden: self.operand(OP, hidden, dtype)?.reshape([t, c])?,
            weight: self.address(OP, &weight)?,
        };
        let most = (self.cuts.logits / v.max(1)).max(1);
        for (number, chunk) in all.chunks(most).enumerate() {
            let (rows, labels): (Vec<i32>, Vec<i32>) = chunk.iter().copied().unzip();
            let n = rows.len();
            let numbers = self.integers(OP, &rows)?;
            let gathered = self.gather_rows_op(&head.hidden, &numbers, [n, c].into())?;
            let chunk = Chunk {
                rows: n,
                numbers,
                hidden: gathered,
            };
            let labels = self.integers(OP, &labels)?;
            let logits = self.uninit([n, v], DType::F32, Tag::Workspace)?;
            self.head_product(&head, &chunk, &logits)?;
            let running = self.scratch(n as u64 * RUNNING_BYTES)?;
            let tile = Tile {
                logits: self.address(OP, &logits)?,
                labels: self.address(OP, &labels)?,
                running: self.address(OP, &running)?,
                rows: n as u32,
                cols: v as u32,
                first: 0,
            };
            self.run_some(OP, loss::statistics(&tile).map(|l| [l]))?;
            let at = self.address(OP, &losses)?;
            let numbers = self.address(OP, &chunk.numbers)?;
            let launch = loss::losses(tile.running, numbers, at, n as u32);
            self.run_some(OP, launch.map(|l| [l]))?;
            let Some((factor, _)) = backward else {
                continue;
            };
            // In f32, gradients overwrite the logits. In 16 bits, the products need lines of whole 16-byte words.
            let grads = match dtype {
                DType::F32 => logits.clone(),
                _ => self.uninit([n, v.next_multiple_of(8)], dtype, Tag::Workspace)?,
            };
            let (at, line) = (self.address(OP, &grads)?, grads.dim(1));
            let launch = loss::gradients(&tile, dtype, at, line as u32, factor);
            self.run_some(OP, launch.map(|l| [l]))?;
            let grads = Gradients { at, line };
            if let Some(d_hidden) = &d_hidden {
                self.hidden_gradient(&head, &chunk, grads, d_hidden)?;
            }
            if let Some(d_weight) = &d_weight {
                self.weight_gradient(&head, &chunk, grads, d_weight, number > 0)?;
            }
        }
        Ok(LossGrads {
            losses,
            d_hidden,
            d_weight,
        })
    }

    /// `logits = hidden weight^T`.
    fn head_product(&self, head: &Head, chunk: &Chunk, logits: &Tensor) -> Result<()> {
        let LossSizes { c, v, .. } = head.sizes;
        let term = Term {
            a: self.address(OP, &chunk.hidden)?,
            a_line: c,
            b: head.weight,
            b_line: c,
            k: c,
        };
        let y = self.address(OP, logits)?;
        self.product(
            OP,
            &product(head.dtype, [chunk.rows, v], [false; 2], term, y),
        )
    }

    /// `d_hidden[rows] = gradients weight`. Other rows stay zero.
    fn hidden_gradient(
        &self,
        head: &Head,
        chunk: &Chunk,
        gradients: Gradients,
        d_hidden: &Tensor,
    ) -> Result<()> {
        let LossSizes { c, v, .. } = head.sizes;
        let n = chunk.rows;
        let sums = self.uninit([n, c], DType::F32, Tag::Workspace)?;
        let term = Term {
            a: gradients.at,
            a_line: gradients.line,
            b: head.weight,
            b_line: c,
            k: v,
        };
        let y = self.address(OP, &sums)?;
        self.product(OP, &product(head.dtype, [n, c], [false, true], term, y))?;
        let rounded = self.cast(&sums, d_hidden.dtype())?;
        let order: Vec<i32> = (0..n as i32).collect();
        let order = self.integers(OP, &order)?;
        let launch = rows::put_rows(
            self.address(OP, &rounded)?,
            self.address(OP, &order)?,
            self.address(OP, &chunk.numbers)?,
            self.address(OP, d_hidden)?,
            n as u64,
            (c * d_hidden.dtype().size_bytes()) as u64,
        );
        self.run(OP, [launch])
    }

    /// `d_weight (+)= gradients^T hidden`. The first chunk writes, later chunks add, some rows of the vocabulary at a
    /// time.
    fn weight_gradient(
        &self,
        head: &Head,
        chunk: &Chunk,
        gradients: Gradients,
        d_weight: &Tensor,
        adds: bool,
    ) -> Result<()> {
        let LossSizes { c, v, .. } = head.sizes;
        let hidden = self.address(OP, &chunk.hidden)?;
        let size = head.dtype.size_bytes();
        let term = |first: usize| Term {
            a: Address(gradients.at.0 + (first * size) as u64),
            a_line: gradients.line,
            b: hidden,
            b_line: c,
            k: chunk.rows,
        };
        let whole = self.address(OP, d_weight)?;
        if !adds {
            return self.product(OP, &product(head.dtype, [v, c], [true; 2], term(0), whole));
        }
        let rows = self.cuts.weight_rows;
        for first in (0..v).step_by(rows) {
            let n = rows.min(v - first);
            let part = self.uninit([n, c], DType::F32, Tag::Workspace)?;
            let y = self.address(OP, &part)?;
            let sum = Address(whole.0 + (first * c * 4) as u64);
            let added = product(head.dtype, [n, c], [true; 2], term(first), y);
            if self.product_added_to(OP, &added, sum)? {
                continue;
            }
            let launch = pointwise::add(DType::F32, sum, y, sum, (n * c) as u64);
            self.run_some(OP, launch.map(|l| [l]))?;
        }
        Ok(())
    }
}

/// Product `y [m, n]` with an f32 result.
fn product(
    dtype: DType,
    [m, n]: [usize; 2],
    [transpose_a, transpose_b]: [bool; 2],
    term: Term,
    y: Address,
) -> Product {
    Product {
        dtype,
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

//! Checks of operands and shapes of results, shared by all devices so that they cannot disagree.

use crate::adapted::{AdaptedLayer, LoraArgs};
use crate::backend::{AttentionArgs, DropoutArgs, MatmulArgs, SumPart, Transpose};
use crate::error::{KernelError, Result, shape_error};
use crate::grouped::GroupedMatmulArgs;
use crate::quantized::Quantization;
use crate::{DType, Shape, Tensor};

/// Checks that `x` has a float dtype that operations support.
pub(crate) fn float(op: &'static str, x: &Tensor) -> Result<()> {
    float_dtype(op, x.dtype())
}

/// Checks that a dtype is a float that operations support.
pub(crate) fn float_dtype(op: &'static str, got: DType) -> Result<()> {
    match got {
        DType::F32 | DType::BF16 | DType::F16 => Ok(()),
        _ => Err(KernelError::DType {
            op,
            got,
            expected: "f32, bf16 or f16",
        }),
    }
}

fn dtype(op: &'static str, x: &Tensor, want: DType, expected: &'static str) -> Result<()> {
    if x.dtype() == want {
        return Ok(());
    }
    Err(KernelError::DType {
        op,
        got: x.dtype(),
        expected,
    })
}

fn f32(op: &'static str, x: &Tensor) -> Result<()> {
    dtype(op, x, DType::F32, "f32")
}

fn index(op: &'static str, x: &Tensor) -> Result<()> {
    dtype(op, x, DType::I32, "i32")
}

/// Checks that `quantized` has the bytes of a weight of `shape`, and that it may be dequantized to `to`.
pub(crate) fn dequantize(
    quantized: &Tensor,
    quantization: Quantization,
    shape: Shape,
    to: DType,
) -> Result<()> {
    const OP: &str = "dequantize";
    dtype(OP, quantized, DType::U8, "u8")?;
    float_dtype(OP, to)?;
    let want = quantization.bytes(shape);
    match quantized.elems() == want {
        true => Ok(()),
        false => shape_error(
            OP,
            format!(
                "{} bytes for {shape} quantized as {quantization}, which takes {want}",
                quantized.elems()
            ),
        ),
    }
}

pub(crate) fn dropout(args: &DropoutArgs<'_>) -> Result<()> {
    const OP: &str = "dropout";
    float(OP, args.x)?;
    rank(OP, "x", args.x, 2)?;
    index(OP, args.rows)?;
    if args.rows.shape() != Shape::new(&[args.x.shape().rows(), 2]) {
        return shape_error(
            OP,
            format!("rows {} for x {}", args.rows.shape(), args.x.shape()),
        );
    }
    if (0.0..1.0).contains(&args.p) {
        Ok(())
    } else {
        shape_error(OP, format!("p = {}", args.p))
    }
}

fn same_shape(op: &'static str, a: &Tensor, b: &Tensor) -> Result<()> {
    if a.shape() == b.shape() {
        return Ok(());
    }
    shape_error(op, format!("{} and {}", a.shape(), b.shape()))
}

fn rank(op: &'static str, name: &str, x: &Tensor, rank: usize) -> Result<()> {
    if x.shape().rank() == rank {
        return Ok(());
    }
    shape_error(op, format!("{name} {} should have {rank} axes", x.shape()))
}

fn length(op: &'static str, name: &str, x: &Tensor, want: usize) -> Result<()> {
    if x.elems() == want {
        return Ok(());
    }
    shape_error(
        op,
        format!("{name} {} should have {want} elements", x.shape()),
    )
}

/// Checks that `bytes` has the length of a tensor of `shape` and `dtype`.
pub(crate) fn upload(bytes: &[u8], shape: Shape, dtype: DType) -> Result<()> {
    if bytes.len() == shape.elems() * dtype.size_bytes() {
        return Ok(());
    }
    shape_error(
        "upload",
        format!("{shape} of {dtype} <- {} bytes", bytes.len()),
    )
}

/// Checks that both operands are floats of the same shape and dtype.
pub(crate) fn same(op: &'static str, a: &Tensor, b: &Tensor) -> Result<()> {
    float(op, a)?;
    float(op, b)?;
    same_shape(op, a, b)?;
    if a.dtype() == b.dtype() {
        return Ok(());
    }
    Err(KernelError::DType {
        op,
        got: b.dtype(),
        expected: a.dtype().name(),
    })
}

/// Sizes of `[m, k] @ [k, n]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Sizes {
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
}

/// Rows and columns of `op(x)`, leading axes folded into the rows of `x`.
fn folded(x: &Tensor, transpose: Transpose) -> (usize, usize) {
    let (rows, cols) = (x.shape().rows(), x.shape().last());
    match transpose {
        Transpose::No => (rows, cols),
        Transpose::Yes => (cols, rows),
    }
}

/// Checks that a part of `rows` rows is inside the whole sum, and that `sum` exists exactly after the first part.
pub(crate) fn part(
    op: &'static str,
    SumPart { first, total }: SumPart,
    rows: usize,
    step: usize,
    has_sum: bool,
) -> Result<()> {
    let end = first + rows;
    let whole = first.is_multiple_of(step) && (end == total || rows.is_multiple_of(step));
    match whole && end <= total && has_sum == (first > 0) {
        true => Ok(()),
        false => shape_error(
            op,
            format!("rows {first}..{end} of {total} in steps of {step}, sum: {has_sum}"),
        ),
    }
}

pub(crate) fn matmul(args: &MatmulArgs<'_>) -> Result<Sizes> {
    const OP: &str = "matmul";
    float(OP, args.a)?;
    float(OP, args.b)?;
    float_dtype(OP, args.out)?;
    let (m, k) = folded(args.a, args.transpose_a);
    let (inner, n) = folded(args.b, args.transpose_b);
    if k != inner {
        return shape_error(OP, format!("[{m}, {k}] @ [{inner}, {n}]"));
    }
    if let Some(bias) = args.bias {
        float(OP, bias)?;
        length(OP, "bias", bias, n)?;
    }
    Ok(Sizes { m, n, k })
}

/// The shape `[t, n]` of two layers over a partition of rows.
pub(crate) fn grouped(args: &GroupedMatmulArgs<'_>) -> Result<Shape> {
    const OP: &str = "grouped_matmul";
    float(OP, args.a)?;
    groups(OP, args.a, args.groups.map(|group| group.rows))?;
    let [t, k] = [args.a.dim(0), args.a.dim(1)];
    let columns = args.groups.map(|group| folded(group.b, args.transpose_b));
    let n = columns[0].1;
    for (group, (inner, columns)) in args.groups.iter().zip(columns) {
        float(OP, group.b)?;
        if (inner, columns) != (k, n) {
            return shape_error(
                OP,
                format!("[{t}, {k}] @ [{inner}, {columns}] to {n} columns"),
            );
        }
        if let Some(bias) = group.bias {
            float(OP, bias)?;
            length(OP, "bias", bias, n)?;
        }
    }
    Ok(Shape::new(&[t, n]))
}

/// `x` is a matrix, and two lists (i32) have as many row numbers as it has rows.
pub(crate) fn groups(op: &'static str, x: &Tensor, rows: [&Tensor; 2]) -> Result<()> {
    rank(op, "the input", x, 2)?;
    let t = x.dim(0);
    for rows in rows {
        index(op, rows)?;
    }
    let [first, second] = rows.map(Tensor::elems);
    if first + second != t {
        return shape_error(op, format!("groups of {first} and {second} rows of {t}"));
    }
    Ok(())
}

/// Sizes of a product of selected rows, where `k` is the number of rows.
pub(crate) fn matmul_of_rows(a: &Tensor, b: &Tensor, rows: &Tensor) -> Result<Sizes> {
    const OP: &str = "matmul_of_rows";
    index(OP, rows)?;
    for x in [a, b] {
        float(OP, x)?;
        rank(OP, "an operand", x, 2)?;
    }
    if a.dim(0) != b.dim(0) {
        return shape_error(OP, format!("rows of {} and {}", a.shape(), b.shape()));
    }
    Ok(Sizes {
        m: a.dim(1),
        n: b.dim(1),
        k: rows.elems(),
    })
}

/// Sizes of a linear layer with an adapter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LoraSizes {
    pub(crate) t: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) r: usize,
}

pub(crate) fn lora(args: &LoraArgs<'_>) -> Result<LoraSizes> {
    const OP: &str = "adapted_linear";
    for x in [args.x, args.weight, args.lora_a, args.lora_b] {
        float(OP, x)?;
    }
    rank(OP, "weight", args.weight, 2)?;
    rank(OP, "lora_a", args.lora_a, 2)?;
    rank(OP, "lora_b", args.lora_b, 2)?;
    let (n, k) = (args.weight.dim(0), args.weight.dim(1));
    let r = args.lora_a.dim(0);
    let fits = args.x.shape().last() == k
        && args.lora_a.dim(1) == k
        && args.lora_b.shape() == Shape::from([n, r]);
    if !fits {
        let detail = format!(
            "x {}, weight {}, lora_a {}, lora_b {}",
            args.x.shape(),
            args.weight.shape(),
            args.lora_a.shape(),
            args.lora_b.shape()
        );
        return shape_error(OP, detail);
    }
    if let Some(bias) = args.bias {
        float(OP, bias)?;
        length(OP, "bias", bias, n)?;
    }
    if let Some(dropped) = &args.dropout {
        dropout(&dropped.of(args.x))?;
    }
    let t = args.x.shape().rows();
    Ok(LoraSizes { t, n, k, r })
}

/// Outputs of a layer of `x` that may have an adapter.
pub(crate) fn adapted_layer(x: &Tensor, layer: &AdaptedLayer<'_>) -> Result<usize> {
    match layer.adapted(x) {
        Some(adapted) => Ok(lora(&adapted)?.n),
        None => Ok(matmul(&layer.base(x))?.n),
    }
}

/// Checks a normalization over the last axis of `x` with parameters of that extent.
pub(crate) fn norm(op: &'static str, x: &Tensor, params: &[&Tensor]) -> Result<()> {
    float(op, x)?;
    for p in params {
        float(op, p)?;
        length(op, "parameter", p, x.shape().last())?;
    }
    Ok(())
}

/// Checks a rotary embedding of `x [t, h, d]` with tables `[t, w]`. Returns `w`.
pub(crate) fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<usize> {
    const OP: &str = "rope";
    float(OP, x)?;
    f32(OP, cos)?;
    f32(OP, sin)?;
    rank(OP, "x", x, 3)?;
    rank(OP, "cos", cos, 2)?;
    same_shape(OP, cos, sin)?;
    let width = cos.dim(1);
    if cos.dim(0) != x.dim(0) || 2 * width > x.dim(2) {
        return shape_error(OP, format!("x {}, cos {}", x.shape(), cos.shape()));
    }
    Ok(width)
}

/// Sizes of an attention call: `t` query rows, `s` key rows, `h` query heads, `g` key/value heads, head dim `d`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct AttentionSizes {
    pub(crate) t: usize,
    pub(crate) s: usize,
    pub(crate) h: usize,
    pub(crate) g: usize,
    pub(crate) d: usize,
}

fn starts(op: &'static str, name: &str, starts: &[usize], rows: usize) -> Result<()> {
    let fits = starts.first() == Some(&0) && starts.last() == Some(&rows) && starts.is_sorted();
    if fits {
        return Ok(());
    }
    shape_error(op, format!("{name} {starts:?} for {rows} rows"))
}

/// Largest head dim that attention supports.
pub(crate) const MAX_HEAD_DIM: usize = 128;

pub(crate) fn attention(args: &AttentionArgs<'_>) -> Result<AttentionSizes> {
    const OP: &str = "attention";
    let AttentionArgs { q, k, v, .. } = *args;
    for (name, x) in [("q", q), ("k", k), ("v", v)] {
        float(OP, x)?;
        rank(OP, name, x, 3)?;
    }
    same(OP, k, v)?;
    if q.dtype() != k.dtype() {
        return Err(KernelError::DType {
            op: OP,
            got: k.dtype(),
            expected: q.dtype().name(),
        });
    }
    let [t, h, d] = [q.dim(0), q.dim(1), q.dim(2)];
    let [s, g] = [k.dim(0), k.dim(1)];
    let fits = k.dim(2) == d && d <= MAX_HEAD_DIM && d > 0 && g > 0 && h.is_multiple_of(g);
    if !fits {
        return shape_error(OP, format!("q {}, k {}", q.shape(), k.shape()));
    }
    starts(OP, "q_starts", args.q_starts, t)?;
    starts(OP, "k_starts", args.k_starts, s)?;
    if args.q_starts.len() != args.k_starts.len() {
        let detail = format!(
            "{} query and {} key sequences",
            args.q_starts.len() - 1,
            args.k_starts.len() - 1
        );
        return shape_error(OP, detail);
    }
    Ok(AttentionSizes { t, s, h, g, d })
}

pub(crate) fn attention_backward(
    args: &AttentionArgs<'_>,
    out: &Tensor,
    lse: &Tensor,
    dout: &Tensor,
) -> Result<AttentionSizes> {
    const OP: &str = "attention_backward";
    let sizes = attention(args)?;
    same(OP, args.q, out)?;
    same(OP, args.q, dout)?;
    f32(OP, lse)?;
    if lse.shape() != Shape::from([sizes.t, sizes.h]) {
        return shape_error(OP, format!("lse {} for q {}", lse.shape(), args.q.shape()));
    }
    Ok(sizes)
}

/// Extents of one row of a table: all axes but the first.
fn row_dims<'a>(op: &'static str, table: &'a Shape) -> Result<&'a [usize]> {
    match table.dims().split_first() {
        Some((_, row)) => Ok(row),
        None => shape_error(op, "a scalar has no rows"),
    }
}

fn with_rows(rows: usize, row: &[usize]) -> Shape {
    let mut dims = vec![rows];
    dims.extend_from_slice(row);
    Shape::new(&dims)
}

/// Checks the operands of `gather_rows` and returns the result's shape: one row of `table` per index.
pub(crate) fn gather_rows(table: &Tensor, idx: &Tensor) -> Result<Shape> {
    const OP: &str = "gather_rows";
    index(OP, idx)?;
    Ok(with_rows(idx.elems(), row_dims(OP, &table.shape())?))
}

/// Shape of the table that rows are added into.
pub(crate) fn scatter_add_rows(x: &Tensor, idx: &Tensor, rows: usize, out: DType) -> Result<Shape> {
    const OP: &str = "scatter_add_rows";
    float(OP, x)?;
    float_dtype(OP, out)?;
    index(OP, idx)?;
    let shape = x.shape();
    let row = row_dims(OP, &shape)?;
    if x.dim(0) != idx.elems() {
        return shape_error(OP, format!("{} rows for {} indices", x.dim(0), idx.elems()));
    }
    Ok(with_rows(rows, row))
}

/// Shape `[n, b, a]` of the transposes of `[n, a, b]`.
pub(crate) fn transpose_each(x: &Tensor) -> Result<Shape> {
    match x.shape().dims() {
        &[n, a, b] => Ok(Shape::new(&[n, b, a])),
        _ => shape_error("transpose_each", format!("{} is not [n, a, b]", x.shape())),
    }
}

pub(crate) fn replace_rows(base: &Tensor, idx: &Tensor, rows: Option<&Tensor>) -> Result<()> {
    const OP: &str = "replace_rows";
    index(OP, idx)?;
    let shape = base.shape();
    let row = row_dims(OP, &shape)?;
    let Some(rows) = rows else { return Ok(()) };
    dtype(OP, rows, base.dtype(), base.dtype().name())?;
    if rows.shape() != with_rows(idx.elems(), row) {
        let detail = format!("{} into {} at {} rows", rows.shape(), shape, idx.elems());
        return shape_error(OP, detail);
    }
    Ok(())
}

/// Sizes of the fused output projection and cross entropy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LossSizes {
    pub(crate) t: usize,
    pub(crate) c: usize,
    pub(crate) v: usize,
}

pub(crate) fn loss(hidden: &Tensor, weight: &Tensor, labels: &Tensor) -> Result<LossSizes> {
    const OP: &str = "linear_cross_entropy";
    float(OP, hidden)?;
    float(OP, weight)?;
    index(OP, labels)?;
    rank(OP, "weight", weight, 2)?;
    let (v, c) = (weight.dim(0), weight.dim(1));
    let t = hidden.shape().rows();
    if hidden.shape().last() != c || labels.elems() != t {
        let detail = format!(
            "hidden {}, weight {}, labels {}",
            hidden.shape(),
            weight.shape(),
            labels.shape()
        );
        return shape_error(OP, detail);
    }
    Ok(LossSizes { t, c, v })
}

/// Checks that the values of every operand are in host memory.
pub(crate) fn values(op: &'static str, operands: &[&Tensor]) -> Result<()> {
    for x in operands {
        let shape = x.shape();
        if x.is_meta() {
            return Err(KernelError::NoValues { op, shape });
        }
        if x.is_on_device() {
            return Err(KernelError::Elsewhere { op, shape });
        }
    }
    Ok(())
}

//! Elementwise operations, dropout and rotary position embedding, with the bits of the CPU.

use crate::DType;
use crate::backend::{Direction, Gelu, RopeLayout};
use crate::cuda::launch::{Address, Arg, Launch};
use crate::cuda::module::{Family, Module, element_type};

const THREADS: u32 = 256;
/// Elements per thread and iteration.
const WIDTH: u64 = 8;
/// Columns that share one block of random numbers.
const RANDOM_COLUMNS: u64 = 4;
/// Maximum blocks of the grid: enough for several waves on any GPU.
const MAX_BLOCKS: u64 = 132 * 16;

const KERNELS: &[&str] = &[
    "add",
    "scale",
    "gelu_tanh",
    "gelu_tanh_backward",
    "gelu_erf",
    "gelu_erf_backward",
    "swiglu",
    "swiglu_backward",
    "dropout",
    "rope_half",
    "rope_pairs",
];

fn module(dtype: DType) -> Option<Module> {
    let defines = [("TYPE", element_type(dtype)?)];
    Some(Module::new(Family::Pointwise, defines, KERNELS))
}

/// Kernel modules of the elementwise operations in f32, bf16 and f16.
#[must_use]
pub fn modules() -> Vec<Module> {
    let dtypes = [DType::F32, DType::BF16, DType::F16];
    dtypes.into_iter().filter_map(module).collect()
}

fn aligned(addresses: &[Address]) -> bool {
    addresses.iter().all(|Address(a)| a.is_multiple_of(16))
}

fn launch(dtype: DType, kernel: &'static str, threads: u64, args: Vec<Arg>) -> Option<Launch> {
    let blocks = threads.div_ceil(u64::from(THREADS)).clamp(1, MAX_BLOCKS);
    Some(Launch {
        module: module(dtype)?,
        kernel,
        grid: [blocks as u32, 1, 1],
        threads: THREADS,
        shared_bytes: 0,
        args,
    })
}

/// Launch of an elementwise kernel with its operands, `n`, and whether they are read in words of 16 bytes.
fn elements(
    dtype: DType,
    kernel: &'static str,
    operands: &[Address],
    factor: Option<f32>,
    results: &[Address],
    n: u64,
) -> Option<Launch> {
    let all: Vec<Address> = operands.iter().chain(results).copied().collect();
    let mut args: Vec<Arg> = operands.iter().copied().map(Arg::Address).collect();
    args.extend(factor.map(Arg::F32));
    args.extend(results.iter().copied().map(Arg::Address));
    args.extend([Arg::U64(n), Arg::I32(aligned(&all).into())]);
    launch(dtype, kernel, n.div_ceil(WIDTH), args)
}

/// Launch of `y = a + b` for `n` elements. `None` when the dtype is not a float.
#[must_use]
pub fn add(dtype: DType, a: Address, b: Address, y: Address, n: u64) -> Option<Launch> {
    elements(dtype, "add", &[a, b], None, &[y], n)
}

/// Launch of `y = factor * x` for `n` elements. `None` when the dtype is not a float.
#[must_use]
pub fn scale(dtype: DType, x: Address, factor: f32, y: Address, n: u64) -> Option<Launch> {
    elements(dtype, "scale", &[x], Some(factor), &[y], n)
}

/// Launch of `y = gelu(x)` for `n` elements. `kind` selects the formula. `None` when the dtype is not a
/// float.
#[must_use]
pub fn gelu(dtype: DType, kind: Gelu, x: Address, y: Address, n: u64) -> Option<Launch> {
    let kernel = match kind {
        Gelu::Tanh => "gelu_tanh",
        Gelu::Erf => "gelu_erf",
    };
    elements(dtype, kernel, &[x], None, &[y], n)
}

/// Launch that writes the gradient of GELU with respect to its input, `dx = dy * gelu'(x)`, for `n` elements.
/// `None` when the dtype is not a float.
#[must_use]
pub fn gelu_backward(
    dtype: DType,
    kind: Gelu,
    [x, dy]: [Address; 2],
    dx: Address,
    n: u64,
) -> Option<Launch> {
    let kernel = match kind {
        Gelu::Tanh => "gelu_tanh_backward",
        Gelu::Erf => "gelu_erf_backward",
    };
    elements(dtype, kernel, &[x, dy], None, &[dx], n)
}

/// Launch of SwiGLU, `y = silu(gate) * up`, for `n` elements. `None` when the dtype is not a float.
#[must_use]
pub fn swiglu(dtype: DType, gate: Address, up: Address, y: Address, n: u64) -> Option<Launch> {
    elements(dtype, "swiglu", &[gate, up], None, &[y], n)
}

/// Launch of SwiGLU's backward: the gradients of `gate` and `up` in one pass over `n` elements, which reads
/// three arrays and writes two. `None` when the dtype is not a float.
#[must_use]
pub fn swiglu_backward(
    dtype: DType,
    [gate, up, dy]: [Address; 3],
    [d_gate, d_up]: [Address; 2],
    n: u64,
) -> Option<Launch> {
    let operands = [gate, up, dy];
    elements(
        dtype,
        "swiglu_backward",
        &operands,
        None,
        &[d_gate, d_up],
        n,
    )
}

/// Launch of the dropout `y` of `x [t, k]` with probability `p`, as
/// [`Backend::dropout`](crate::Backend::dropout). `rows`, i32 `[t, 2]`, are the row identities. `None` when
/// the dtype is not a float.
#[must_use]
pub fn dropout(
    dtype: DType,
    [x, rows, y]: [Address; 3],
    [t, k]: [u64; 2],
    key: [u32; 2],
    p: f32,
) -> Option<Launch> {
    let none = Address::NULL;
    Dropped { rows, key, p }.launch(dtype, [x, none, y], none, [t, k])
}

/// Dropout of a LoRA adapter's input, with its operands as device addresses.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Dropped {
    /// Row identities, i32 `[t, 2]`: two words per row, from which its random numbers follow.
    pub rows: Address,
    /// Key of the dropout's random stream, e.g. (seed, layer). Calls with equal key, row identities and
    /// probability drop the same elements.
    pub key: [u32; 2],
    /// Probability that an element becomes zero, `0 <= p < 1`.
    pub p: f32,
}

impl Dropped {
    /// Launch of `y = dropout(x)`, or of `y = onto + dropout(x)` if `onto` is not null (it may be `y`). All
    /// are `[.., k]`; the dropout is rounded before it is added. `at`, i32 `[t]`, selects `t` rows of all
    /// operands; null selects the first `t`. `None` when the dtype is not a float.
    #[must_use]
    pub fn launch(
        &self,
        dtype: DType,
        [x, onto, y]: [Address; 3],
        at: Address,
        [t, k]: [u64; 2],
    ) -> Option<Launch> {
        let threshold = (f64::from(self.p) * 4_294_967_296.0) as u32;
        let args = vec![
            Arg::Address(x),
            Arg::Address(self.rows),
            Arg::Address(onto),
            Arg::Address(at),
            Arg::Address(y),
            Arg::U64(t),
            Arg::U64(k),
            Arg::U32(self.key[0]),
            Arg::U32(self.key[1]),
            Arg::U32(threshold),
            Arg::F32(1.0 / (1.0 - self.p)),
        ];
        launch(dtype, "dropout", t * k.div_ceil(RANDOM_COLUMNS), args)
    }
}

/// Sizes of a rotary position embedding: the input is `x [tokens, heads, d]`, the angles are `[tokens, w]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RopeShape {
    /// Number of tokens in `x`.
    pub tokens: u64,
    /// Number of heads per token.
    pub heads: u32,
    /// Number of elements per head.
    pub d: u32,
    /// Number of pairs of elements that rotate per head, at most `d / 2`. Other elements are copied.
    pub w: u32,
}

/// Launch of the rotary position embedding `y` of `x`. Cosines and sines are f32 `[tokens, w]`, as in
/// [`Backend::rope`](crate::Backend::rope). `None` when the dtype is not a float or an extent exceeds `int`.
#[must_use]
pub fn rope(
    dtype: DType,
    [x, cos, sin, y]: [Address; 4],
    shape: RopeShape,
    layout: RopeLayout,
    direction: Direction,
) -> Option<Launch> {
    let RopeShape {
        tokens,
        heads,
        d,
        w,
    } = shape;
    let kernel = match layout {
        RopeLayout::HalfSplit => "rope_half",
        RopeLayout::Interleaved => "rope_pairs",
    };
    let lines = w.is_multiple_of(8) && d.is_multiple_of(8);
    let wide = lines && aligned(&[x, cos, sin, y]);
    let sign = match direction {
        Direction::Forward => 1.0,
        Direction::Inverse => -1.0,
    };
    let units = (d - w) / if wide { 8 } else { 1 };
    let args = vec![
        Arg::Address(x),
        Arg::Address(cos),
        Arg::Address(sin),
        Arg::Address(y),
        Arg::U64(tokens),
        Arg::I32(heads.try_into().ok()?),
        Arg::I32(d.try_into().ok()?),
        Arg::I32(w.try_into().ok()?),
        Arg::F32(sign),
        Arg::I32(wide.into()),
    ];
    launch(
        dtype,
        kernel,
        tokens * u64::from(heads) * u64::from(units),
        args,
    )
}

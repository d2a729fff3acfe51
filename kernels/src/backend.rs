//! Operations of a device. Each operation is coarse and has a matching backward.
//!
//! Symbols in shapes: `t` tokens (rows), `s` key tokens, `h` query heads, `g` key/value heads, `d` head dim, `c`
//! channels, `m n k` matrix sizes, `r` adapter rank, `v` vocabulary.
//!
//! Rules for every backend:
//! - 16-bit tensors are computed in f32 and rounded once, to nearest even, on store.
//! - Gradients of parameters are f32, whatever the dtype of the weight.
//! - Gradients of activations have the dtype of the activation.
//! - Results depend on shapes and values only, never on the number of threads.

use crate::adapted::{
    self, AdaptedLinear, AdaptedLinearArgs, AdaptedLinearGradArgs, AdaptedLinearGrads, AdapterSums,
};
use crate::error::Result;
use crate::grouped::{self, GroupedMatmulArgs};
use crate::peers::{GroupAccess, PeerAccess};
use crate::pool::{Pool, Tag};
use crate::quantized::Quantization;
use crate::registered::HostRegistration;
use crate::reserved_upload::ReservedUpload;
use crate::resident::ResidentAccess;
use crate::timeline::DeviceSpan;
use crate::{DType, ForeignBytes, Shape, Tensor};

/// Compilation units of GPU kernels, in a fixed order.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct KernelList {
    #[cfg(feature = "cuda")]
    pub(crate) modules: Vec<crate::cuda::module::Module>,
}

/// Kind of device that an operation runs on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Device {
    /// The host's processor and memory.
    Cpu,
    /// The meta device: shapes and bytes only, nothing is computed.
    Meta,
    /// An NVIDIA GPU and its memory.
    Cuda,
}

impl Device {
    /// Whether the host can address the device's memory directly: true for the CPU and the meta device, false
    /// for a GPU. For a GPU, data is copied in with [`Backend::upload`] and out with [`Tensor::to_bytes`].
    #[must_use]
    pub const fn is_host_addressable(self) -> bool {
        !matches!(self, Self::Cuda)
    }
}

/// Whether an operation uses a matrix operand as stored, or its transpose.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Transpose {
    /// Use the operand as stored.
    No,
    /// Swap rows and columns.
    Yes,
}

/// Operands of [`Backend::matmul`]: `op(a) @ op(b) + bias`, where `op` transposes an operand or not.
#[derive(Clone, Copy, Debug)]
pub struct MatmulArgs<'a> {
    /// Left operand, `[m, k]`, or `[k, m]` when transposed. Leading axes are folded into rows.
    pub a: &'a Tensor,
    /// Whether `a` is stored transposed, as `[k, m]`.
    pub transpose_a: Transpose,
    /// Right operand, `[k, n]`, or `[n, k]` when transposed (the layout of a linear weight).
    pub b: &'a Tensor,
    /// Whether `b` is stored transposed, as `[n, k]`.
    pub transpose_b: Transpose,
    /// Bias, `[n]`, added to every row of the result, or `None`.
    pub bias: Option<&'a Tensor>,
    /// Dtype that the result `[m, n]` is stored in.
    pub out: DType,
}

/// A part of a sum over rows, for sums that are computed in parts: from the first row to the last, each row in one part.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SumPart {
    /// Number of the part's first row. All parts but the last have a multiple of [`Backend::part_step`] rows.
    pub first: usize,
    /// Number of rows of all parts.
    pub total: usize,
}

/// Operands of [`Backend::dropout`]: input, probability, and what determines the random numbers.
#[derive(Clone, Copy, Debug)]
pub struct DropoutArgs<'a> {
    /// Input of the dropout, `[t, k]`, in any float dtype.
    pub x: &'a Tensor,
    /// Row identities, i32 `[t, 2]`: two words per row, e.g. (sample, position), from which its random
    /// numbers follow. They do not depend on the batch.
    pub rows: &'a Tensor,
    /// Key of the dropout's random stream, e.g. (seed, layer). Calls with equal key, row identities and
    /// probability drop the same elements.
    pub key: [u32; 2],
    /// Probability that an element becomes zero, `0 <= p < 1`.
    pub p: f32,
}

/// Formula that [`Backend::gelu`] uses: the tanh approximation or the exact one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Gelu {
    /// Tanh approximation: `0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`.
    Tanh,
    /// Exact formula: `0.5 x (1 + erf(x / sqrt 2))`.
    Erf,
}

/// Which elements of a head form the pairs that rotary position embedding rotates.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RopeLayout {
    /// Pairs `(i, i + rotary/2)`, as in Llama and Qwen2 ("rotate half").
    HalfSplit,
    /// Pairs of neighbors `(2i, 2i + 1)`, as in GLM.
    Interleaved,
}

/// Direction in which [`Backend::rope`] rotates. The inverse rotation is the backward of the forward one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// Rotation by the angles of the positions.
    Forward,
    /// Rotation by the negative angles.
    Inverse,
}

/// Operands of [`Backend::attention`] over packed sequences (variable length, one after the other, without
/// padding).
///
/// Sequence `i` has the queries `q_starts[i]..q_starts[i + 1]` and the keys `k_starts[i]..k_starts[i + 1]`. Rows of
/// different sequences do not attend to each other. Query head `j` uses key/value head `j / (h / g)` (grouped-query
/// attention).
#[derive(Clone, Copy, Debug)]
pub struct AttentionArgs<'a> {
    /// Queries, `[t, h, d]`: `t` query rows of all sequences, `h` query heads, head dim `d`.
    pub q: &'a Tensor,
    /// Keys, `[s, g, d]`: `s` key rows of all sequences, `g` key/value heads, head dim `d`.
    pub k: &'a Tensor,
    /// Values, `[s, g, d]`, one row per key.
    pub v: &'a Tensor,
    /// Row of `q` at which each sequence starts, then the total `t` (`cu_seqlens` in FlashAttention):
    /// ascending, first 0, last `t`.
    pub q_starts: &'a [usize],
    /// Row of `k` at which each sequence starts, then the total `s` (`cu_seqlens` in FlashAttention):
    /// ascending, first 0, last `s`. It is as long as `q_starts`.
    pub k_starts: &'a [usize],
    /// Whether attention is causal: query `i` of a sequence with `n` queries attends to keys
    /// `0..=i + (keys - n)` of the sequence. The mask is aligned to the last query and the last key, so a
    /// cached prefix of keys works.
    pub causal: bool,
    /// Factor on the scores `q k^T` before the softmax, e.g. `1 / sqrt(d)`.
    pub scale: f32,
}

/// Results of [`Backend::attention`]: the output, and the log-sum-exp that the backward also needs.
#[derive(Debug)]
pub struct AttentionOut {
    /// Attention output, `[t, h, d]`: for each query and head the softmax-weighted sum of the values.
    pub out: Tensor,
    /// Log-sum-exp of the scaled scores of each query and head, f32 `[t, h]`, for the backward.
    pub lse: Tensor,
}

/// Gradients of the queries, keys and values of an attention call, as [`Backend::attention_backward`] returns
/// them.
#[derive(Debug)]
pub struct AttentionGrads {
    /// Gradient of the queries, `[t, h, d]`.
    pub dq: Tensor,
    /// Gradient of the keys, `[s, g, d]`.
    pub dk: Tensor,
    /// Gradient of the values, `[s, g, d]`.
    pub dv: Tensor,
}

/// Gradients of an RMS norm or a layer norm with `c` channels.
#[derive(Debug)]
pub struct NormGrads {
    /// Gradient of the input `x`, in the dtype of `x`.
    pub dx: Tensor,
    /// Gradient of the norm's weight, f32 `[c]`.
    pub d_weight: Tensor,
    /// Gradient of the layer norm's bias, f32 `[c]`. `None` for an RMS norm.
    pub d_bias: Option<Tensor>,
}

/// Result of [`Backend::linear_cross_entropy_backward`]: the losses and the requested gradients.
#[derive(Debug)]
pub struct LossGrads {
    /// Loss of each token, f32 `[t]`, as [`Backend::linear_cross_entropy`] returns it: 0 for ignored labels.
    pub losses: Tensor,
    /// Gradient of the hidden states, `[t, c]` in their dtype. `None` unless requested. Rows with an ignored
    /// label are zero.
    pub d_hidden: Option<Tensor>,
    /// Gradient of the output projection's weight, f32 `[v, c]` (vocabulary by channels). `None` unless
    /// requested.
    pub d_weight: Option<Tensor>,
}

/// Label value of tokens that the loss ignores (`ignore_index` in PyTorch).
pub const IGNORED_LABEL: i32 = -100;

/// Number of rows (tokens) that feed-forward layers (MLPs) multiply at a time on a GPU. So many rows, called a stretch, are
/// enough work for the GPU. Sums over rows, as in the gradient of a weight, are added stretch after stretch. So an MLP that is
/// computed in tiles of whole stretches has the bits of one that is computed on all rows at once.
pub const STRETCH_ROWS: usize = 4096;

/// Device as the engine uses it: its memory and its operations on tensors. The trait is object safe and used
/// as `Arc<dyn Backend>`.
pub trait Backend: Send + Sync + std::fmt::Debug {
    /// Kind of device that this backend runs on.
    fn device(&self) -> Device;

    /// Pool that counts and limits the device's memory.
    fn pool(&self) -> &Pool;

    /// Whether tensors of floating-point numbers have values. A meta device has none, so it ignores what
    /// [`Backend::upload`] copies into them.
    fn has_values(&self) -> bool {
        true
    }

    /// Compilation units of the kernels that a meta device of GPUs has launched. Empty on other devices.
    fn launched(&self) -> KernelList {
        KernelList::default()
    }

    /// Compiles kernels in parallel, before their first launch. A kernel that does not compile fails at its launch.
    fn compile_ahead(&self, _kernels: &KernelList) {}

    /// Stops waiting for work that may depend on other ranks. To be called when a rank was lost and this process ends:
    /// later operations fail, and memory that such work uses is left to the end of the process.
    fn abandon(&self) {}

    /// Access of other ranks' devices to this one's memory, if supported.
    fn peers(&self) -> Option<&dyn PeerAccess> {
        None
    }

    /// Collectives of a library between this device and those of other ranks, if supported.
    fn group(&self) -> Option<&dyn GroupAccess> {
        None
    }

    /// Model states in the memory of a discrete device.
    fn residents(&self) -> Option<&dyn ResidentAccess> {
        None
    }

    /// Copies host bytes into a new tensor on the device.
    ///
    /// # Errors
    /// When the pool is full, or the number of bytes does not match shape and dtype.
    fn upload(&self, bytes: &[u8], shape: Shape, dtype: DType, tag: Tag) -> Result<Tensor>;

    /// Page-locks host memory where it is, so that uploads of parts of it need no pinned chunk. `None` if the device reads
    /// host memory directly or has no such memory.
    ///
    /// # Errors
    /// When the driver refuses.
    fn register_host(&self, _bytes: ForeignBytes) -> Result<Option<HostRegistration>> {
        Ok(None)
    }

    /// Reserves memory for [`Backend::upload_into`]. A discrete device allocates now, so the copy overlaps with work
    /// that is queued between the two calls. Other devices allocate in `upload_into`.
    ///
    /// # Errors
    /// When the pool is full.
    fn reserve_upload(&self, shape: Shape, dtype: DType, tag: Tag) -> Result<ReservedUpload> {
        Ok(ReservedUpload::later(shape, dtype, tag))
    }

    /// Copies host bytes into a reservation of [`Backend::reserve_upload`] on the same device.
    ///
    /// # Errors
    /// As [`Backend::upload`].
    fn upload_into(&self, place: ReservedUpload, bytes: &[u8]) -> Result<Tensor> {
        self.upload(bytes, place.shape, place.dtype, place.tag)
    }

    /// [`Backend::upload_into`] for each element, as the weights of a layer. It costs less than one call for each: small
    /// weights share a pinned chunk, and the device's queue waits once.
    ///
    /// # Errors
    /// As [`Backend::upload`].
    fn upload_all(&self, uploads: Vec<(ReservedUpload, &[u8])>) -> Result<Vec<Tensor>> {
        let upload = |(place, bytes)| self.upload_into(place, bytes);
        uploads.into_iter().map(upload).collect()
    }

    /// Starts recording a timeline of the device, or stops and drops it. Only a discrete device records anything.
    ///
    /// # Errors
    /// When the device fails.
    fn measure(&self, _on: bool) -> Result<()> {
        Ok(())
    }

    /// Sets the label of work queued from here on in the timeline; `None` ends labeling.
    ///
    /// # Errors
    /// When the device fails.
    fn label(&self, _label: Option<u32>) -> Result<()> {
        Ok(())
    }

    /// Returns the spans recorded since the last call, in no particular order. Waits for the device.
    ///
    /// # Errors
    /// When the device fails.
    fn measured(&self) -> Result<Vec<DeviceSpan>> {
        Ok(Vec::new())
    }

    /// Allocates a tensor on the device, filled with zeros.
    ///
    /// # Errors
    /// When the pool is full.
    fn zeros(&self, shape: Shape, dtype: DType, tag: Tag) -> Result<Tensor>;

    /// Converts `x` to another dtype, rounded to nearest even.
    ///
    /// # Errors
    /// When the pool is full or a dtype is not a float.
    fn cast(&self, x: &Tensor, dtype: DType) -> Result<Tensor>;

    /// Dequantizes `quantized`, the bytes of a weight of `shape`, to f32, bf16 or f16. The result counts as gathered weights.
    ///
    /// # Errors
    /// When the number of bytes does not fit `shape`, the dtype is no float, or memory is full.
    fn dequantize(
        &self,
        quantized: &Tensor,
        quantization: Quantization,
        shape: Shape,
        dtype: DType,
    ) -> Result<Tensor>;

    /// `a + b`, for tensors of the same shape and dtype.
    ///
    /// # Errors
    /// When shapes or dtypes differ, or the pool is full.
    fn add(&self, a: &Tensor, b: &Tensor) -> Result<Tensor>;

    /// `factor * x` for each element, in the dtype of `x`.
    ///
    /// # Errors
    /// When the pool is full.
    fn scale(&self, x: &Tensor, factor: f32) -> Result<Tensor>;

    /// Inverted dropout `[t, k]`: `x / (1 - p)` where an element's random number is at least `p`, zero elsewhere. The
    /// random number is a function of `key`, the element's row identity and its column. So the backward is the same
    /// call on the gradient, and no mask is stored.
    ///
    /// # Errors
    /// When shapes or dtypes do not match, `p` is not in `0 <= p < 1`, or the pool is full.
    fn dropout(&self, args: DropoutArgs<'_>) -> Result<Tensor>;

    /// Matrix product `[m, n]` with optional bias. `a` and `b` may have different float dtypes.
    ///
    /// # Errors
    /// When shapes do not match or the pool is full.
    fn matmul(&self, args: MatmulArgs<'_>) -> Result<Tensor>;

    /// Column sums `[n]` f32 of a matrix `[m, n]`, e.g. the gradient of a bias.
    ///
    /// # Errors
    /// When the pool is full.
    fn column_sum(&self, x: &Tensor) -> Result<Tensor>;

    /// Step, in rows, for a sum over `total` rows that is computed in parts. If each part but the last has a multiple of so
    /// many rows, the result has the bits of one sum over all rows; on a GPU, of one by [`Backend::feed_forward`].
    fn part_step(&self, _total: usize) -> usize {
        1
    }

    /// The backend for feed-forward layers (MLPs) on the same device and memory, if it is not this one. It computes each
    /// product on [`Backend::part_step`] rows at a time. So a layer that runs in tiles of rows, to save memory, makes the
    /// same calls as one that has all rows at once, and has the same bits.
    fn feed_forward(&self) -> Option<&dyn Backend> {
        None
    }

    /// Adds a part of a matrix product whose sum runs over rows: `sum + op(a) @ op(b)` in f32, where `k` is the part's
    /// rows. `sum` is the result for the previous part, `None` for the first.
    ///
    /// # Errors
    /// As [`Backend::matmul`], or when the part does not continue `sum`.
    fn matmul_part(
        &self,
        args: MatmulArgs<'_>,
        sum: Option<Tensor>,
        _part: SumPart,
    ) -> Result<Tensor> {
        let own = self.matmul(MatmulArgs {
            out: DType::F32,
            ..args
        })?;
        sum.map_or(Ok(own.clone()), |sum| self.add(&sum, &own))
    }

    /// Adds a part of the column sums of a matrix, `x [m, n]` with `m` of its rows. `sum` is the result for the previous
    /// part, `None` for the first. The result for the last part is that of [`Backend::column_sum`], `[n]`; earlier ones
    /// may have another shape.
    ///
    /// # Errors
    /// As [`Backend::column_sum`], or when the part does not continue `sum`.
    fn column_sum_part(&self, x: &Tensor, sum: Option<Tensor>, _part: SumPart) -> Result<Tensor> {
        let own = self.column_sum(x)?;
        sum.map_or(Ok(own.clone()), |sum| self.add(&sum, &own))
    }

    /// Row numbers (i32) by group: rows that are not `second`, and those that are, each in order. The device computes
    /// both lists; the host knows their lengths and does not wait.
    ///
    /// # Errors
    /// When there are more than 2^31 rows or the pool is full.
    fn partition_rows(&self, second: &[bool]) -> Result<[Tensor; 2]> {
        grouped::partition_rows(self, second)
    }

    /// Grouped matrix product `[t, n]` in the dtype of `a`: two linear layers over a partition of rows. Every
    /// row is that of [`Backend::matmul`] on its group's rows, up to the order of sums (on the CPU, bit for
    /// bit).
    ///
    /// # Errors
    /// When shapes do not fit, the groups are no partition of the rows, or the pool is full.
    fn grouped_matmul(&self, args: GroupedMatmulArgs<'_>) -> Result<Tensor> {
        grouped::matmul(self, &args)
    }

    /// `a[rows]^T @ b[rows]`, `[m, n]` f32, for `a [t, m]`, `b [t, n]` and i32 `rows`. It is the weight gradient of
    /// the layer that these rows used.
    ///
    /// # Errors
    /// When shapes do not match, an index is out of range, or the pool is full.
    fn matmul_of_rows(&self, a: &Tensor, b: &Tensor, rows: &Tensor) -> Result<Tensor> {
        grouped::matmul_of_rows(self, a, b, rows)
    }

    /// Column sums `[n]` f32 of the rows `rows` (i32) of `x [t, n]`. It is the bias gradient of the layer that these
    /// rows used.
    ///
    /// # Errors
    /// When an index is out of range or the pool is full.
    fn column_sum_of_rows(&self, x: &Tensor, rows: &Tensor) -> Result<Tensor> {
        self.column_sum(&self.gather_rows(x, rows)?)
    }

    /// Whether [`Backend::adapted_linear`] over row groups is faster than one call per group on rows that the caller
    /// gathers.
    fn groups_adapters(&self) -> bool {
        false
    }

    /// Linear layers of one input with low-rank adapters, as many as `args` has projections. In each row group a
    /// projection gives `x W^T + bias + scale * (dropout(x) A^T) B^T` of its layer, or [`Backend::matmul`] without an
    /// adapter, up to the order of sums.
    ///
    /// # Errors
    /// When there is no projection, shapes do not fit, the row groups are no partition of the rows, or the
    /// pool is full.
    fn adapted_linear(&self, args: AdaptedLinearArgs<'_>) -> Result<AdaptedLinear>;

    /// Gradients of [`Backend::adapted_linear`] for `dy [t, n]` of each projection. The base weights are frozen.
    ///
    /// # Errors
    /// As [`Backend::adapted_linear`], or when there is not one `dy` for each projection.
    fn adapted_linear_backward(
        &self,
        args: AdaptedLinearGradArgs<'_>,
    ) -> Result<AdaptedLinearGrads>;

    /// As [`Backend::adapted_linear_backward`] for a part of the rows, without row groups. The gradients of the adapters
    /// are added to `sums`, those of the previous part; empty for the first.
    ///
    /// # Errors
    /// As [`Backend::adapted_linear_backward`], or when the part does not continue `sums`.
    fn adapted_linear_backward_part(
        &self,
        args: AdaptedLinearGradArgs<'_>,
        sums: AdapterSums,
        _part: SumPart,
    ) -> Result<AdaptedLinearGrads> {
        let own = self.adapted_linear_backward(args)?;
        adapted::plus(self, own, sums)
    }

    /// Layer norm over the last axis: `(x - mean) / sqrt(var + eps) * weight + bias`, with statistics in f32.
    ///
    /// # Errors
    /// When shapes do not match or the pool is full.
    fn layer_norm(&self, x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f32) -> Result<Tensor>;

    /// Gradients of [`Backend::layer_norm`]. Statistics are recomputed from `x`.
    ///
    /// # Errors
    /// When shapes do not match or the pool is full.
    fn layer_norm_backward(
        &self,
        x: &Tensor,
        weight: &Tensor,
        dy: &Tensor,
        eps: f32,
    ) -> Result<NormGrads>;

    /// `x / sqrt(mean(x^2) + eps) * weight` over the last axis. As in Llama and Qwen2 the
    /// normalized value is rounded to the dtype of `x` before the multiplication.
    ///
    /// # Errors
    /// When shapes do not match or the pool is full.
    fn rms_norm(&self, x: &Tensor, weight: &Tensor, eps: f32) -> Result<Tensor>;

    /// Gradients of [`Backend::rms_norm`] with respect to `x` and `weight`.
    ///
    /// # Errors
    /// When shapes do not match or the pool is full.
    fn rms_norm_backward(
        &self,
        x: &Tensor,
        weight: &Tensor,
        dy: &Tensor,
        eps: f32,
    ) -> Result<NormGrads>;

    /// GELU of each element of `x`, by the formula `kind`.
    ///
    /// # Errors
    /// When the pool is full.
    fn gelu(&self, x: &Tensor, kind: Gelu) -> Result<Tensor>;

    /// Gradient of [`Backend::gelu`] with respect to `x`.
    ///
    /// # Errors
    /// When shapes do not match or the pool is full.
    fn gelu_backward(&self, x: &Tensor, dy: &Tensor, kind: Gelu) -> Result<Tensor>;

    /// SwiGLU of each element: `silu(gate) * up`.
    ///
    /// # Errors
    /// When shapes do not match or the pool is full.
    fn swiglu(&self, gate: &Tensor, up: &Tensor) -> Result<Tensor>;

    /// Gradients `(d_gate, d_up)` of [`Backend::swiglu`].
    ///
    /// # Errors
    /// When shapes do not match or the pool is full.
    fn swiglu_backward(&self, gate: &Tensor, up: &Tensor, dy: &Tensor) -> Result<(Tensor, Tensor)>;

    /// Rotary position embedding: rotates the first `2 * w` elements of every head of `x [t, h, d]`. `cos` and `sin`
    /// are f32 `[t, w]`. The other elements stay as they are.
    ///
    /// # Errors
    /// When shapes do not match or the pool is full.
    fn rope(
        &self,
        x: &Tensor,
        cos: &Tensor,
        sin: &Tensor,
        layout: RopeLayout,
        direction: Direction,
    ) -> Result<Tensor>;

    /// RMS norm of every head of `x [t, h, d]`, and its rotation: [`Backend::rope`] of [`Backend::rms_norm`], with their
    /// bits. `weight` is `[d]`; `cos` and `sin` are f32 `[t, w]`.
    ///
    /// # Errors
    /// When shapes do not match or the pool is full.
    fn rms_norm_rope(
        &self,
        x: &Tensor,
        weight: &Tensor,
        eps: f32,
        [cos, sin]: [&Tensor; 2],
        layout: RopeLayout,
    ) -> Result<Tensor> {
        let normed = self.rms_norm(x, weight, eps)?;
        self.rope(&normed, cos, sin, layout, Direction::Forward)
    }

    /// Softmax attention over tiles of keys with an online softmax, as FlashAttention. No `t x s` buffer exists.
    ///
    /// # Errors
    /// When shapes do not match or the pool is full.
    fn attention(&self, args: AttentionArgs<'_>) -> Result<AttentionOut>;

    /// Gradients of [`Backend::attention`] from its saved output and log-sum-exp. The result is deterministic.
    ///
    /// # Errors
    /// When shapes do not match or the pool is full.
    fn attention_backward(
        &self,
        args: AttentionArgs<'_>,
        saved: &AttentionOut,
        dout: &Tensor,
    ) -> Result<AttentionGrads>;

    /// Rows `index` (i32) of `table [n, c]` of any dtype: `[index.len(), c]`.
    ///
    /// # Errors
    /// When an index is out of range or the pool is full.
    fn gather_rows(&self, table: &Tensor, index: &Tensor) -> Result<Tensor>;

    /// A zero tensor `[rows, c]` with `x[i]` added to row `index[i]`, in order of `i`. It is the backward of
    /// [`Backend::gather_rows`].
    ///
    /// # Errors
    /// When an index is out of range or the pool is full.
    fn scatter_add_rows(
        &self,
        x: &Tensor,
        index: &Tensor,
        rows: usize,
        out: DType,
    ) -> Result<Tensor>;

    /// Transposes each of the `n` matrices of `x [n, a, b]`, of any dtype: `[n, b, a]`.
    ///
    /// # Errors
    /// When `x` does not have three axes or the pool is full.
    fn transpose_each(&self, x: &Tensor) -> Result<Tensor>;

    /// `base` with row `index[i]` replaced by `rows[i]`, or by zeros if `rows` is `None`.
    ///
    /// # Errors
    /// When an index is out of range or the pool is full.
    fn replace_rows(&self, base: &Tensor, index: &Tensor, rows: Option<&Tensor>) -> Result<Tensor>;

    /// [`Backend::replace_rows`] that writes in place if `base` is the only handle to its memory. A key/value cache
    /// grows by it.
    ///
    /// # Errors
    /// When an index is out of range, or `base` is shared and the pool is full.
    fn write_rows(&self, base: Tensor, index: &Tensor, rows: &Tensor) -> Result<Tensor> {
        self.replace_rows(&base, index, Some(rows))
    }

    /// Fused output projection and cross entropy: losses f32 `[t]` of the logits `hidden [t, c] @ weight^T [v, c]`
    /// for `labels [t]` (i32, already shifted). The loss is zero where the label is [`IGNORED_LABEL`]. The logits are
    /// computed in chunks of supervised rows and never exist as a whole.
    ///
    /// # Errors
    /// When shapes do not match, a label is not in the vocabulary, or the pool is full.
    fn linear_cross_entropy(
        &self,
        hidden: &Tensor,
        weight: &Tensor,
        labels: &Tensor,
    ) -> Result<Tensor>;

    /// Losses, and gradients of `factor * sum(losses)`. If the vocabulary fits in one tile, this takes three products
    /// with the weight; separate calls for losses and gradients would take four.
    ///
    /// # Errors
    /// As [`Backend::linear_cross_entropy`].
    fn linear_cross_entropy_backward(
        &self,
        hidden: &Tensor,
        weight: &Tensor,
        labels: &Tensor,
        factor: f32,
        need: LossNeeds,
    ) -> Result<LossGrads>;
}

/// Which gradients [`Backend::linear_cross_entropy_backward`] computes besides the losses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LossNeeds {
    /// Whether to compute the gradient of the hidden states.
    pub hidden: bool,
    /// Whether to compute the gradient of the output projection's weight.
    pub weight: bool,
}

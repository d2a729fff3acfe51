//! Unsafe calls of the stages. Each works on buffers that its caller keeps until it has synchronized.
#![expect(
    unsafe_code,
    reason = "queues device work on buffers that callers keep alive"
)]

use anyhow::{Result, ensure};
use kernels::DType;
use kernels::cuda::gpu::{Gpu, Memory};
use kernels::cuda::launch::{Address, Launch};
use kernels::cuda::matmul::{CublasLt, Epilogue, Multiply, Shape};
use kernels::cuda::nccl::{Communicator, Kind};
use kernels::cuda::transfer::{Mapped, Pinned};

pub(crate) fn copy(gpu: &Gpu, from: &Memory, to: &Memory, bytes: usize) -> Result<()> {
    ensure!(
        bytes <= from.bytes() && bytes <= to.bytes(),
        "copy outside the memory"
    );
    // SAFETY: both ranges were just checked; freeing waits for the device.
    Ok(unsafe { gpu.queue_copy(from.address(), to.address(), bytes) }?)
}

/// Copies the first `n` bytes of a memory to `start`.
pub(crate) fn repeat(gpu: &Gpu, memory: &Memory, start: usize, n: usize) -> Result<()> {
    ensure!(
        n <= start && start + n <= memory.bytes(),
        "copy outside the memory"
    );
    let Address(from) = memory.address();
    // SAFETY: both ranges were just checked and do not overlap; freeing waits for the device.
    Ok(unsafe { gpu.queue_copy(Address(from), Address(from + start as u64), n) }?)
}

/// `y [t, n] = x [t, k] w [n, k]^T` in one dtype, all operands dense.
pub(crate) fn product_of(dtype: DType, [t, n, k]: [usize; 3], [x, w, y]: [Address; 3]) -> Multiply {
    Multiply {
        shape: Shape {
            dtype,
            out: dtype,
            transpose_a: false,
            transpose_b: false,
            m: t,
            n,
            k,
            a_line: k,
            b_line: k,
            y_line: n,
            epilogue: Epilogue::None,
        },
        a: x,
        b: w,
        y,
        bias: Address::NULL,
        aux: Address::NULL,
        alpha: 1.0,
        beta: 0.0,
    }
}

/// Queues [`product_of`] on the library.
pub(crate) fn product(
    gpu: &Gpu,
    library: &CublasLt,
    dtype: DType,
    sizes: [usize; 3],
    [x, w, y, workspace]: &[Memory; 4],
) -> Result<()> {
    let [t, n, k] = sizes;
    let size = dtype.size_bytes();
    let fits = x.bytes() >= t * k * size && w.bytes() >= n * k * size && y.bytes() >= t * n * size;
    ensure!(fits, "a product of other sizes");
    let product = product_of(dtype, sizes, [x.address(), w.address(), y.address()]);
    let scratch = (workspace.address(), workspace.bytes() as u64);
    multiply(gpu, library, &product, scratch)
}

/// Queues a product on the library.
pub(crate) fn multiply(
    gpu: &Gpu,
    library: &CublasLt,
    product: &Multiply,
    (workspace, bytes): (Address, u64),
) -> Result<()> {
    // SAFETY: callers allocated operands and scratch memory of the product's sizes; freeing waits for the device.
    let queued = unsafe { library.multiply(gpu, product, workspace, bytes) }?;
    ensure!(queued, "cuBLASLt has no algorithm for {product:?}");
    Ok(())
}

pub(crate) fn from_mapped(gpu: &Gpu, from: &Mapped, to: &Memory) -> Result<()> {
    // SAFETY: the owner exported memory of the same size and keeps it until told otherwise.
    Ok(unsafe { gpu.queue_copy(from.address(), to.address(), to.bytes()) }?)
}

pub(crate) fn gather(
    group: &Communicator,
    from: &Memory,
    to: &Memory,
    n: usize,
    kind: Kind,
) -> Result<()> {
    // SAFETY: callers allocated both for the elements of the whole process group; freeing waits for the device.
    Ok(unsafe { group.all_gather(from.address(), to.address(), n, kind) }?)
}

pub(crate) fn scatter(
    group: &Communicator,
    from: &Memory,
    to: &Memory,
    n: usize,
    kind: Kind,
) -> Result<()> {
    // SAFETY: callers allocated both for the elements of the whole process group; freeing waits for the device.
    Ok(unsafe { group.reduce_scatter(from.address(), to.address(), n, kind) }?)
}

pub(crate) fn reduce(
    group: &Communicator,
    from: &Memory,
    to: &Memory,
    n: usize,
    kind: Kind,
) -> Result<()> {
    // SAFETY: callers allocated both for `n` elements; freeing waits for the device.
    Ok(unsafe { group.all_reduce(from.address(), to.address(), n, kind) }?)
}

pub(crate) fn upload(gpu: &Gpu, from: &Pinned, to: &Memory) -> Result<()> {
    // SAFETY: callers keep both and do not change the host bytes before they have synchronized.
    Ok(unsafe { gpu.queue_upload(from, to) }?)
}

pub(crate) fn download(gpu: &Gpu, from: &Memory, to: &mut Pinned) -> Result<()> {
    // SAFETY: callers keep both and do not touch the host bytes before they have synchronized.
    Ok(unsafe { gpu.queue_download(from, to) }?)
}

pub(crate) fn launch(gpu: &Gpu, launch: &Launch) -> Result<()> {
    // SAFETY: callers made the arguments from buffers of the documented sizes; freeing waits for the device.
    Ok(unsafe { gpu.launch(launch) }?)
}

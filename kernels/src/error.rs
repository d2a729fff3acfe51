//! Errors of device operations.

use crate::{DType, Shape, Tag};

/// Failure of a device or an operation. A caller's mistake with shapes is an error too, so a malformed checkpoint or
/// configuration ends in a message instead of a panic.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// An allocation would exceed the capacity of its pool.
    #[error(
        "{pool} memory is exhausted: {tag} asks for {asked_bytes} bytes, {in_use_bytes} of {capacity_bytes} are in use ({})",
        table(breakdown)
    )]
    OutOfMemory {
        /// Name of the pool.
        pool: &'static str,
        /// Tag of the bytes requested.
        tag: Tag,
        /// Bytes requested.
        asked_bytes: u64,
        /// Bytes in use before the request.
        in_use_bytes: u64,
        /// Capacity of the pool in bytes.
        capacity_bytes: u64,
        /// Bytes in use by tag, for every tag in use.
        breakdown: Vec<(Tag, u64)>,
    },
    /// The shapes of an operation's operands do not match.
    #[error("{op}: shapes do not fit: {detail}")]
    Shape {
        /// Name of the operation.
        op: &'static str,
        /// Shapes found, or another description of the mismatch.
        detail: String,
    },
    /// An operand has a dtype that the operation does not support.
    #[error("{op}: dtype {got} is not supported here, expected {expected}")]
    DType {
        /// Name of the operation.
        op: &'static str,
        /// Dtype of the operand.
        got: DType,
        /// Supported dtypes, in words.
        expected: &'static str,
    },
    /// A row index or a label is out of range.
    #[error("{op}: index {index} is outside 0..{rows}")]
    Index {
        /// Name of the operation.
        op: &'static str,
        /// The index that is out of range.
        index: i64,
        /// Number of rows; valid indices are `0..rows`.
        rows: usize,
    },
    /// A tensor of the meta device has no values to read.
    #[error("{op}: a tensor of shape {shape} on the meta device has no values")]
    NoValues {
        /// Name of the operation.
        op: &'static str,
        /// Shape of the tensor.
        shape: Shape,
    },
    /// An operand is in the memory of another device.
    #[error("{op}: a tensor of shape {shape} is on another device")]
    Elsewhere {
        /// Name of the operation.
        op: &'static str,
        /// Shape of the operand.
        shape: Shape,
    },
    /// The device or its driver failed.
    #[error("{op}: {cause}")]
    Device {
        /// Name of the operation.
        op: &'static str,
        /// Error of the device or its driver.
        cause: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl KernelError {
    /// Name of the kernel module that this machine lacks: it is not built in, and NVRTC, which would compile it, was not
    /// found. `None` for all other errors.
    #[must_use]
    pub fn missing_kernel(&self) -> Option<&str> {
        #[cfg(feature = "cuda")]
        if let Self::Device { cause, .. } = self
            && let Some(crate::cuda::CudaError::NoImage { module, .. }) = cause.downcast_ref()
        {
            return Some(module);
        }
        None
    }
}

/// Result of a device operation, with [`KernelError`] as its error.
pub type Result<T, E = KernelError> = std::result::Result<T, E>;

/// Returns a [`KernelError::Shape`] for the operation `op`, with `detail` about the shapes.
pub(crate) fn shape_error<T>(op: &'static str, detail: impl Into<String>) -> Result<T> {
    Err(KernelError::Shape {
        op,
        detail: detail.into(),
    })
}

fn table(breakdown: &[(Tag, u64)]) -> String {
    let parts: Vec<String> = breakdown
        .iter()
        .map(|(tag, bytes)| format!("{tag} {bytes}"))
        .collect();
    if parts.is_empty() {
        "nothing in use".into()
    } else {
        parts.join(", ")
    }
}

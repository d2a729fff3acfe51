//! Errors of device operations.

use crate::{DType, Shape, Tag};

/// Failure of a device or an operation. A caller's mistake with shapes is an error too, so a malformed checkpoint or
/// configuration ends in a message instead of a panic.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// The pool's capacity is exceeded.
    #[error(
        "{pool} memory is exhausted: {tag} asks for {asked_bytes} bytes, {in_use_bytes} of {capacity_bytes} are in use ({})",
        table(breakdown)
    )]
    OutOfMemory {
        /// Name of the pool.
        pool: &'static str,
        /// Tag of the request.
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
    /// Operand shapes do not match.
    #[error("{op}: shapes do not fit: {detail}")]
    Shape {
        /// Name of the operation.
        op: &'static str,
        /// The shapes found.
        detail: String,
    },
    /// An operand has a dtype that the operation does not support.
    #[error("{op}: dtype {got} is not supported here, expected {expected}")]
    DType {
        /// Name of the operation.
        op: &'static str,
        /// Dtype found.
        got: DType,
        /// Supported dtypes, in words.
        expected: &'static str,
    },
    /// A row index is out of range.
    #[error("{op}: index {index} is outside 0..{rows}")]
    Index {
        /// Name of the operation.
        op: &'static str,
        /// The index.
        index: i64,
        /// Number of rows of the table.
        rows: usize,
    },
    /// A tensor of the meta device has no values to read.
    #[error("{op}: a tensor of shape {shape} on the null device has no values")]
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
    /// The device itself failed.
    #[error("{op}: {cause}")]
    Device {
        /// Name of the operation.
        op: &'static str,
        /// Error of the device or its driver.
        cause: Box<dyn std::error::Error + Send + Sync>,
    },
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

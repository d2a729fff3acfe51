//! What can go wrong on one device.

use crate::{DType, Shape, Tag};

/// Device and kernel failures. Shape mistakes of a caller are errors too, so that a malformed
/// checkpoint or configuration ends in a message instead of a panic.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// The accounted pool has no room.
    #[error(
        "{pool} memory is exhausted: {tag} asks for {asked_bytes} bytes, {in_use_bytes} of {capacity_bytes} are in use ({})",
        table(breakdown)
    )]
    OutOfMemory {
        /// Name of the pool.
        pool: &'static str,
        /// Who asked.
        tag: Tag,
        /// Bytes asked for.
        asked_bytes: u64,
        /// Bytes in use before.
        in_use_bytes: u64,
        /// The pool's capacity.
        capacity_bytes: u64,
        /// Bytes in use by tag, of every tag in use.
        breakdown: Vec<(Tag, u64)>,
    },
    /// Operand shapes do not fit each other.
    #[error("{op}: shapes do not fit: {detail}")]
    Shape {
        /// The operation.
        op: &'static str,
        /// What was found.
        detail: String,
    },
    /// An operand has a dtype the operation does not take.
    #[error("{op}: dtype {got} is not supported here, expected {expected}")]
    DType {
        /// The operation.
        op: &'static str,
        /// Found.
        got: DType,
        /// Accepted.
        expected: &'static str,
    },
    /// A row index lies outside its table.
    #[error("{op}: index {index} is outside 0..{rows}")]
    Index {
        /// The operation.
        op: &'static str,
        /// The index.
        index: i64,
        /// Rows of the table.
        rows: usize,
    },
    /// A tensor of the null device has no values to read.
    #[error("{op}: a tensor of shape {shape} on the null device has no values")]
    NoValues {
        /// The operation.
        op: &'static str,
        /// Its shape.
        shape: Shape,
    },
    /// An operand lies in the memory of another device.
    #[error("{op}: a tensor of shape {shape} is on another device")]
    Elsewhere {
        /// The operation.
        op: &'static str,
        /// Its shape.
        shape: Shape,
    },
    /// The device itself failed.
    #[error("{op}: {cause}")]
    Device {
        /// The operation.
        op: &'static str,
        /// What the device or its driver said.
        cause: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// Result of a device operation.
pub type Result<T, E = KernelError> = std::result::Result<T, E>;

/// A shape error with formatted details.
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

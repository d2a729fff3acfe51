//! Checkpoints: logical, atomic, hashed.
//!
//! *Logical*: a checkpoint contains named tensors of a kind (`weight`, `exp_avg`, …) as element ranges, so it loads at
//! any world size, ZeRO stage or tier. *Atomic*: everything is written into `checkpoint-<step>.tmp`, synced, and
//! renamed. A kill at any instant leaves the previous or the new checkpoint intact. *Hashed*: the manifest has the
//! length and BLAKE3 hash of every file, and its own.
//!
//! ```text
//! <output>/latest                              text: checkpoint-400
//! <output>/checkpoint-400/MANIFEST.json        written last: meta, files, tensors, pieces
//!                        /state/rank-0000.safetensors   this rank's pieces, keys `<kind>/<name>/<first element>`
//!                        /state/rank-0000.json          index of those pieces, merged into the manifest
//!                        /model.safetensors, …          whatever else the caller added
//! ```
//!
//! Protocol of a save with several ranks: every rank calls [`Writer::begin`], [`Writer::write_pieces`] and
//! [`Writer::finish_rank`]. A barrier of the caller follows. Then rank 0 adds files and calls [`Writer::commit`]. A
//! rank that fails must prevent the others from passing the barrier. Rank 0 then calls [`Writer::abandon`].
//!
//! Files are read with positioned reads rather than memory maps. The bytes go straight into the destination, and a file
//! that shrinks meanwhile is an error instead of a signal.

mod audit;
mod directory;
mod error;
mod faulty;
mod fs;
mod manifest;
mod read;
mod reshard;
mod sharded;
mod tensor_file;
mod write;

pub use audit::{Audit, audit};
pub use directory::{find_latest, list, prune, sweep};
pub use error::CheckpointError;
pub use faulty::DiskFault;
pub use manifest::{FileEntry, LogicalTensor, PieceEntry};
pub use read::{Checkpoint, verify_file};
pub use reshard::reshard;
pub use sharded::ShardedTensorWriter;
pub use tensor_file::{FileDigest, TensorFileWriter, TensorSpec};
/// Parses a manifest, also as if its hash were correct. For [`crate::fuzzing`].
pub(crate) fn read_manifest_bytes(bytes: &[u8]) -> Result<(), CheckpointError> {
    let path = std::path::Path::new(manifest::MANIFEST);
    match manifest::Manifest::from_bytes(bytes, path) {
        Ok(_) => Ok(()),
        Err(CheckpointError::HashMismatch { .. }) => {
            let signed = std::str::from_utf8(bytes).ok().and_then(manifest::signed);
            let signed = signed.unwrap_or_default();
            manifest::Manifest::from_bytes(signed.as_bytes(), path).map(drop)
        }
        Err(error) => Err(error),
    }
}

/// Parses the header of a safetensors file. For [`crate::fuzzing`].
pub(crate) fn read_header_bytes(bytes: &[u8]) -> Result<(), CheckpointError> {
    read::state_header(bytes, std::path::Path::new("state.safetensors")).map(drop)
}

pub use write::{Piece, PieceBytes, PieceSink, ProducerError, Writer, set_latest};

#[cfg(test)]
mod tests;

//! Readers of what others wrote, as functions of its bytes: for fuzzers and tests, no part of the interface.

use crate::checkpoint::{self, CheckpointError};
use crate::comm;
use std::io;

/// Parses arbitrary bytes as the manifest of a checkpoint and discards the result. If only the manifest's own
/// hash is wrong, the right one replaces it, so that a fuzzer reaches the code after the hash check.
///
/// # Errors
/// When the bytes are not a valid manifest.
pub fn manifest(bytes: &[u8]) -> Result<(), CheckpointError> {
    checkpoint::read_manifest_bytes(bytes)
}

/// Parses arbitrary bytes as a safetensors file with training state, and discards its header.
///
/// # Errors
/// When the header is not valid.
pub fn state_header(bytes: &[u8]) -> Result<(), CheckpointError> {
    checkpoint::read_header_bytes(bytes)
}

/// Parses arbitrary bytes as messages of a peer in the TCP rendezvous: a greeting, a proof, then frames. It
/// reads until an error occurs.
///
/// # Errors
/// Always: the first message that cannot be parsed, or the end of the bytes.
pub fn rendezvous_frames(bytes: &[u8]) -> io::Result<()> {
    comm::tcp::read_rendezvous(bytes)
}

/// Passes arbitrary bytes, as frames that a peer sends after the TCP rendezvous, to a communicator with a
/// small window and two collectives in flight. It reads until an error occurs.
///
/// # Errors
/// Always: the first frame that cannot be read, the end of the bytes, or the failure of the communicator.
pub fn window_frames(bytes: &[u8]) -> io::Result<()> {
    comm::tcp::take_frames(bytes)
}

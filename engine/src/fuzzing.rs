//! Readers of what others wrote, as functions of its bytes: for fuzzers and tests, no part of the interface.

use crate::checkpoint::{self, CheckpointError};
use crate::comm;
use std::io;

/// Reads a checkpoint's manifest.
///
/// # Errors
/// It cannot be used.
pub fn manifest(bytes: &[u8]) -> Result<(), CheckpointError> {
    checkpoint::read_manifest_bytes(bytes)
}

/// Parses the header of a checkpoint file with training state, from arbitrary bytes.
///
/// # Errors
/// It cannot be used.
pub fn state_header(bytes: &[u8]) -> Result<(), CheckpointError> {
    checkpoint::read_header_bytes(bytes)
}

/// Reads what a peer sends while ranks meet: greeting, proof, then messages.
///
/// # Errors
/// The first frame that cannot be read; an end between two frames is one, too.
pub fn rendezvous_frames(bytes: &[u8]) -> io::Result<()> {
    comm::tcp::read_rendezvous(bytes)
}

/// Takes what a peer sends afterwards into a small window, beside a collective in flight.
///
/// # Errors
/// The first frame that cannot be read, or why the world is dead.
pub fn window_frames(bytes: &[u8]) -> io::Result<()> {
    comm::tcp::take_frames(bytes)
}

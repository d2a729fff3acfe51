//! The shared secret of a job's ranks, and its proof between two of them.
//!
//! Both sides send a fresh number. Each answers with a keyed hash of both numbers, its role and its claim. Every later
//! frame has a keyed hash too: in the rendezvous before its content, in the exchange after it. Nothing is encrypted.

use std::fmt;
use std::io;

/// Smallest length in bytes of the text of a secret. Someone who listens on the network could find a shorter
/// one by trials.
pub const MIN_SECRET_BYTES: usize = 16;
/// Length in bytes of a random number from [`nonce`].
pub(super) const NONCE_BYTES: usize = 32;

/// Secret of a job, by which its ranks prove to each other that they belong to it.
#[derive(Clone)]
pub struct Secret([u8; 32]);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

impl Secret {
    /// Derives the secret from a text that all ranks of the job have. `None` if the text is shorter than
    /// [`MIN_SECRET_BYTES`].
    #[must_use]
    pub fn new(text: &[u8]) -> Option<Self> {
        (text.len() >= MIN_SECRET_BYTES)
            .then(|| Self(blake3::derive_key("tessera 2026 ranks of one job", text)))
    }

    /// The keyed hash of `parts`. The comparison of two hashes takes constant time.
    pub(super) fn seal(&self, parts: &[&[u8]]) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        for part in parts {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        hasher.finalize()
    }

    /// The secret of one connection, derived from the job's secret and the random numbers of both sides.
    pub(super) fn of_connection(&self, nonces: &[&[u8]; 2]) -> Self {
        Self(*self.seal(&[b"connection", nonces[0], nonces[1]]).as_bytes())
    }
}

/// Message authentication codes (keyed hashes) of the frames that one rank sends over one connection, in order.
///
/// A hash covers the number of its frame and the direction, so no frame can be repeated, left out or sent back.
#[derive(Debug)]
pub(super) struct FrameSeals {
    key: Secret,
    count: u64,
}

impl FrameSeals {
    /// Length in bytes of a frame's keyed hash.
    pub(super) const BYTES: usize = 32;

    /// The seals of the frames that the caller of the connection sends, or those of the callee. `connection` is the
    /// secret of the connection.
    pub(super) fn new(connection: &Secret, by_caller: bool) -> Self {
        let key = connection.seal(&[b"frames", &[u8::from(by_caller)]]);
        Self {
            key: Secret(*key.as_bytes()),
            count: 0,
        }
    }

    /// The keyed hash of the next frame with this content.
    pub(super) fn next(&mut self, content: &[u8]) -> blake3::Hash {
        let seal = self.key.seal(&[&self.count.to_le_bytes(), content]);
        self.count += 1;
        seal
    }
}

/// A random number that was never used before.
pub(super) fn nonce() -> io::Result<[u8; NONCE_BYTES]> {
    let mut bytes = [0; NONCE_BYTES];
    getrandom::fill(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_long_are_not_printed_and_seal_each_part_separately() {
        assert!(Secret::new(b"short").is_none());
        let secret = Secret::new(b"sixteen bytes or more").unwrap();
        assert_eq!(format!("{secret:?}"), "Secret(…)");
        assert_ne!(secret.seal(&[b"ab", b"c"]), secret.seal(&[b"a", b"bc"]));
        let other = Secret::new(b"sixteen bytes or mora").unwrap();
        assert_ne!(secret.seal(&[b"x"]), other.seal(&[b"x"]));
        assert_ne!(nonce().unwrap(), nonce().unwrap());
    }

    #[test]
    fn a_frame_has_another_seal_at_another_position_and_in_the_other_direction() {
        let connection = Secret::new(b"sixteen bytes or more").unwrap();
        let mut own = FrameSeals::new(&connection, true);
        let mut same = FrameSeals::new(&connection, true);
        let mut other = FrameSeals::new(&connection, false);
        let first = own.next(b"frame");
        assert_eq!(first, same.next(b"frame"));
        assert_ne!(first, own.next(b"frame"));
        assert_ne!(first, other.next(b"frame"));
    }
}

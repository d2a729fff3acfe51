//! The shared secret of a job's ranks, and its proof between two of them.
//!
//! Both sides send a fresh number. Each answers with a keyed hash of both numbers, its role and its claim.
//! Later frames of the rendezvous have keyed hashes too. Nothing is encrypted.

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
}

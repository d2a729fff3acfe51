//! Frames on a connection: four bytes with the length, then the content, bounded by the reader.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Largest number of bytes of a frame during the rendezvous.
pub(super) const MAX_RENDEZVOUS: usize = 64 << 10;

/// Reads one frame into `into`, which never grows beyond `limit` bytes.
///
/// # Errors
/// [`io::ErrorKind::InvalidData`] for a longer frame; errors of the connection.
pub(in crate::comm) fn read(
    stream: &mut impl Read,
    limit: usize,
    into: &mut Vec<u8>,
) -> io::Result<()> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > limit {
        let text = format!("a frame of {length} bytes where {limit} are the most");
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    into.clear();
    into.reserve_exact(length);
    into.resize(length, 0);
    stream.read_exact(into)
}

/// Writes one frame: the length of `bytes` as a little-endian `u32`, then `bytes`.
pub(super) fn write(stream: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    let length = u32::try_from(bytes.len()).map_err(io::Error::other)?;
    // One call, so a small frame is one packet.
    let mut whole = Vec::with_capacity(4 + bytes.len());
    whole.extend(length.to_le_bytes());
    whole.extend(bytes);
    stream.write_all(&whole)
}

/// Longest wait of a [`Timed`] connection between looks at its flag.
const SLICE: Duration = Duration::from_millis(100);

/// A connection whose reads and writes all fail after the same point in time, or once a flag is set.
#[derive(Debug)]
pub(super) struct Timed<'a> {
    pub(super) stream: &'a TcpStream,
    pub(super) until: Instant,
    pub(super) stop: &'a AtomicBool,
}

impl Timed<'_> {
    fn left(&self) -> io::Result<Option<Duration>> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        if self.stop.load(Ordering::SeqCst) {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        Ok(Some(left.clamp(Duration::from_millis(1), SLICE)))
    }

    /// Repeats `attempt` while only its slice of the time has ended.
    fn until_done(
        &self,
        mut attempt: impl FnMut(&TcpStream, Option<Duration>) -> io::Result<usize>,
    ) -> io::Result<usize> {
        loop {
            match attempt(self.stream, self.left()?) {
                // Which of the two is reported depends on the system.
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
                    ) => {}
                outcome => return outcome,
            }
        }
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.until_done(|mut stream, left| {
            stream.set_read_timeout(left)?;
            stream.read(into)
        })
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.until_done(|mut stream, left| {
            stream.set_write_timeout(left)?;
            stream.write(bytes)
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn hostile_bytes_end_in_an_error_or_a_frame_within_the_limit(
            bytes in prop::collection::vec(any::<u8>(), 0..64),
            limit in 0usize..40,
        ) {
            let mut frame = Vec::new();
            let mut stream = &bytes[..];
            if read(&mut stream, limit, &mut frame).is_ok() {
                prop_assert!(frame.len() <= limit);
                prop_assert_eq!(&bytes[4..4 + frame.len()], &frame[..]);
            }
            prop_assert!(frame.capacity() <= limit);
        }

        #[test]
        fn frames_round_trip(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let mut wire = Vec::new();
            write(&mut wire, &bytes).unwrap();
            let mut frame = Vec::new();
            read(&mut &wire[..], 300, &mut frame).unwrap();
            prop_assert_eq!(frame, bytes);
        }
    }

    #[test]
    fn a_length_beyond_the_limit_is_named() {
        let error = read(&mut &u32::MAX.to_le_bytes()[..], 10, &mut Vec::new()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        assert!(error.to_string().contains("4294967295"), "{error}");
    }
}

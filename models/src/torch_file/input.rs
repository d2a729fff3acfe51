//! Bytes of a file, at any position or in order.

use super::{Result, TorchError};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Bytes that are read at once.
const CHUNK_BYTES: usize = 1 << 16;
/// Longest line of the text opcodes.
const MAX_LINE_BYTES: usize = 1 << 16;

/// Something with bytes at positions: a file, or its content.
pub(super) trait ReadAt {
    /// Number of bytes.
    fn bytes(&self) -> io::Result<u64>;

    /// Fills `out` with the bytes from `at` on.
    fn read_at(&self, out: &mut [u8], at: u64) -> io::Result<()>;
}

impl ReadAt for File {
    fn bytes(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn read_at(&self, out: &mut [u8], at: u64) -> io::Result<()> {
        self.read_exact_at(out, at)
    }
}

impl ReadAt for [u8] {
    fn bytes(&self) -> io::Result<u64> {
        Ok(self.len() as u64)
    }

    fn read_at(&self, out: &mut [u8], at: u64) -> io::Result<()> {
        let start = usize::try_from(at).ok();
        let found = start.and_then(|start| self.get(start..)?.get(..out.len()));
        out.copy_from_slice(found.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

/// Bytes `at..end` of a source in order, of which one chunk is in memory.
pub(super) struct Input<'s, R: ReadAt + ?Sized> {
    source: &'s R,
    at: u64,
    end: u64,
    chunk: Vec<u8>,
    /// Bytes of `chunk` that were taken.
    taken: usize,
}

impl<'s, R: ReadAt + ?Sized> Input<'s, R> {
    /// The bytes from `at` up to `end`, which the source must have.
    pub(super) fn new(source: &'s R, at: u64, end: u64) -> Self {
        Self {
            source,
            at,
            end,
            chunk: Vec::new(),
            taken: 0,
        }
    }

    /// Position of the next byte in the source.
    pub(super) fn position(&self) -> u64 {
        self.at
    }

    /// An error at the present position.
    pub(super) fn error(&self, reason: &'static str) -> TorchError {
        TorchError::Pickle {
            at: self.at,
            reason,
        }
    }

    fn check(&self, bytes: u64) -> Result<()> {
        match bytes <= self.end - self.at {
            true => Ok(()),
            false => Err(self.error("it ends early")),
        }
    }

    /// The next `bytes` bytes.
    pub(super) fn take(&mut self, bytes: u64) -> Result<&[u8]> {
        self.check(bytes)?;
        let wanted = usize::try_from(bytes).map_err(|_| self.error("it ends early"))?;
        if self.chunk.len() - self.taken < wanted {
            let left = self.end - self.at;
            let chunk = wanted.max(CHUNK_BYTES.min(usize::try_from(left).unwrap_or(CHUNK_BYTES)));
            self.chunk.resize(chunk, 0);
            self.source.read_at(&mut self.chunk, self.at)?;
            self.taken = 0;
        }
        let start = self.taken;
        self.taken += wanted;
        self.at += bytes;
        Ok(&self.chunk[start..start + wanted])
    }

    /// Passes over the next `bytes` bytes.
    pub(super) fn skip(&mut self, bytes: u64) -> Result<()> {
        self.check(bytes)?;
        let inside = (self.chunk.len() - self.taken) as u64;
        match bytes <= inside {
            true => self.taken += bytes as usize,
            false => {
                self.chunk.clear();
                self.taken = 0;
            }
        }
        self.at += bytes;
        Ok(())
    }

    /// The next bytes as a little-endian number.
    pub(super) fn number<const N: usize>(&mut self) -> Result<u64> {
        let mut bytes = [0; 8];
        bytes[..N].copy_from_slice(self.take(N as u64)?);
        Ok(u64::from_le_bytes(bytes))
    }

    /// The text up to the next line end, which is taken, too.
    pub(super) fn line(&mut self) -> Result<String> {
        let mut line = Vec::new();
        loop {
            match self.number::<1>()? as u8 {
                b'\n' => break,
                byte if line.len() < MAX_LINE_BYTES => line.push(byte),
                _ => return Err(self.error("a line is too long")),
            }
        }
        String::from_utf8(line).map_err(|_| self.error("a line is not UTF-8"))
    }
}

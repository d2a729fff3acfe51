//! Sizes on disk: blocks, segments and extents of spill files, and the alignment of chunks.

/// Size of a disk block in bytes: the alignment of spill files, their extents and disk requests, as direct
/// I/O demands.
pub const BLOCK_BYTES: u64 = 4096;
/// Size of a disk buffer in bytes, and so of the largest disk request. Larger requests write 10 % slower
/// (`benches/RESULTS.md`).
pub const SEGMENT_BYTES: usize = 512 << 10;
/// Segments that prefetches leave free for other requests.
pub(crate) const RESERVED_SEGMENTS: usize = 16;
/// Alignment of chunks in elements of their parameter group. With it they begin at block boundaries in every element
/// type.
pub(crate) const WINDOW_ALIGN: usize = 2048;

/// Bytes of the blocks that hold `len` bytes, when the first byte is `phase` bytes after a block boundary.
pub(crate) const fn extent_bytes(len: u64, phase: u64) -> u64 {
    (phase % BLOCK_BYTES + len).next_multiple_of(BLOCK_BYTES)
}

/// Number of segments of a disk queue with `bytes` of buffers, at least 32.
pub(crate) const fn io_buffers(bytes: u64) -> usize {
    let wanted = bytes.div_ceil(SEGMENT_BYTES as u64) as usize;
    if wanted < 2 * RESERVED_SEGMENTS {
        2 * RESERVED_SEGMENTS
    } else {
        wanted
    }
}

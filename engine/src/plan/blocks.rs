//! Sizes on a disk: blocks, segments and extents of spill files, and where chunks of a region begin.

/// Files, extents and requests are multiples of this; direct I/O demands it.
pub const BLOCK_BYTES: u64 = 4096;
/// Bytes of a segment: the largest request to the disk. Larger ones write a tenth slower (`benches/RESULTS.md`).
pub const SEGMENT_BYTES: usize = 512 << 10;
/// Segments that reads before their turn leave to others.
pub(crate) const RESERVED_SEGMENTS: usize = 16;
/// Chunks begin at multiples of this many elements of their group, so that they begin at block boundaries in every
/// element type.
pub(crate) const WINDOW_ALIGN: usize = 2048;

/// Bytes of a file that `len` bytes take whose first byte is `phase` bytes after a block boundary.
pub(crate) const fn extent_bytes(len: u64, phase: u64) -> u64 {
    (phase % BLOCK_BYTES + len).next_multiple_of(BLOCK_BYTES)
}

/// Segments of a disk queue that was asked for `bytes` of buffers: at least 32.
pub(crate) const fn buffer_segments(bytes: u64) -> usize {
    let wanted = bytes.div_ceil(SEGMENT_BYTES as u64) as usize;
    if wanted < 2 * RESERVED_SEGMENTS {
        2 * RESERVED_SEGMENTS
    } else {
        wanted
    }
}

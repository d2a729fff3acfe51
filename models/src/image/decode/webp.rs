//! Sizes that the frames of a WebP state. The decoder allocates memory for a frame before it compares the frame with
//! the canvas, so limits on the canvas do not suffice.

/// Pixels of the largest frame in a WebP; 0 without a frame.
pub(super) fn most_frame_pixels(bytes: &[u8]) -> u64 {
    /// Offset of the first chunk, after `RIFF`, the file length and `WEBP`.
    const FIRST: usize = 12;
    of_chunks(bytes.get(FIRST..).unwrap_or_default(), 0)
}

/// Pixels of the largest frame among chunks. A frame of an animation nests chunks, one level deep.
fn of_chunks(mut bytes: &[u8], depth: usize) -> u64 {
    /// Bytes of a frame's position, size and duration, which precede its chunks.
    const FRAME_HEADER: usize = 16;
    let mut most = 0;
    while let Some((name, rest)) = bytes.split_first_chunk::<4>() {
        let Some((length, rest)) = rest.split_first_chunk::<4>() else {
            break;
        };
        let length = u32::from_le_bytes(*length) as usize;
        // A truncated chunk counts too, since the decoder reads it.
        let content = &rest[..length.min(rest.len())];
        let pixels = match name {
            b"VP8 " => lossy(content),
            b"VP8L" => lossless(content),
            b"ANMF" if depth == 0 => of_chunks(content.get(FRAME_HEADER..).unwrap_or_default(), 1),
            _ => 0,
        };
        most = most.max(pixels);
        bytes = rest
            .get(length.saturating_add(length % 2)..)
            .unwrap_or_default();
    }
    most
}

/// Pixels of a lossy frame: sides of 14 bits each, after three bytes of flags and three of a start code.
fn lossy(content: &[u8]) -> u64 {
    let sides = content.get(6..).and_then(|rest| rest.first_chunk::<4>());
    sides.map_or(0, |&[a, b, c, d]| {
        let side = |low, high| u64::from(u16::from_le_bytes([low, high]) & 0x3fff);
        side(a, b) * side(c, d)
    })
}

/// Pixels of a lossless frame: sides minus one, of 14 bits each, after a signature byte.
fn lossless(content: &[u8]) -> u64 {
    let sides = content.get(1..).and_then(|rest| rest.first_chunk::<4>());
    sides.map_or(0, |sides| {
        let sides = u64::from(u32::from_le_bytes(*sides));
        ((sides & 0x3fff) + 1) * ((sides >> 14 & 0x3fff) + 1)
    })
}

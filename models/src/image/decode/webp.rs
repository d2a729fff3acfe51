//! The sizes that the frames of a WebP state for themselves. A decoder takes memory for a frame before it compares it with
//! the canvas, which is all that limits look at.

/// Most pixels of a frame in the content of a WebP; 0 where it has none.
pub(super) fn most_frame_pixels(bytes: &[u8]) -> u64 {
    /// Behind `RIFF`, the length of the file and `WEBP`.
    const FIRST: usize = 12;
    of_chunks(bytes.get(FIRST..).unwrap_or_default(), 0)
}

/// A frame of an animation holds chunks, which hold no others.
fn of_chunks(mut bytes: &[u8], depth: usize) -> u64 {
    /// Place, size and duration of a frame come before its chunks.
    const FRAME_HEADER: usize = 16;
    let mut most = 0;
    while let Some((name, rest)) = bytes.split_first_chunk::<4>() {
        let Some((length, rest)) = rest.split_first_chunk::<4>() else {
            break;
        };
        let length = u32::from_le_bytes(*length) as usize;
        // A chunk that is cut short is looked at all the same: the decoder does, too.
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

/// Sides of 14 bits each behind three bytes of flags and three of a mark.
fn lossy(content: &[u8]) -> u64 {
    let sides = content.get(6..).and_then(|rest| rest.first_chunk::<4>());
    sides.map_or(0, |&[a, b, c, d]| {
        let side = |low, high| u64::from(u16::from_le_bytes([low, high]) & 0x3fff);
        side(a, b) * side(c, d)
    })
}

/// Sides less one, of 14 bits each, behind a mark.
fn lossless(content: &[u8]) -> u64 {
    let sides = content.get(1..).and_then(|rest| rest.first_chunk::<4>());
    sides.map_or(0, |sides| {
        let sides = u64::from(u32::from_le_bytes(*sides));
        ((sides & 0x3fff) + 1) * ((sides >> 14 & 0x3fff) + 1)
    })
}

//! Encoder of two-color PNG files: a palette of two colors, one bit per pixel, stored without compression. The output
//! is deterministic and as small as compressed RGB.

/// Signature of PNG files.
const SIGNATURE: [u8; 8] = [0x89, b'P', b'N', b'G', 0x0d, 0x0a, 0x1a, 0x0a];

/// Maximum bytes of a stored deflate block.
const STORED_BYTES: usize = u16::MAX as usize;

/// Encodes an image of `width` pixels per row. `pixels` tells which pixels have `palette[1]`; the others have
/// `palette[0]`.
///
/// # Panics
/// When the number of pixels is not a multiple of `width`.
pub(crate) fn encode(width: usize, pixels: &[bool], palette: [[u8; 3]; 2]) -> Vec<u8> {
    assert_eq!(pixels.len() % width, 0, "rows are whole");
    let height = pixels.len() / width;
    let mut header = Vec::new();
    header.extend((width as u32).to_be_bytes());
    header.extend((height as u32).to_be_bytes());
    // One bit per pixel, indexed color, deflate, adaptive filters, not interlaced.
    header.extend([1, 3, 0, 0, 0]);
    let mut rows = Vec::new();
    for row in pixels.chunks(width) {
        rows.push(0); // no filter
        rows.extend(row.chunks(8).map(|bits| {
            bits.iter()
                .enumerate()
                .fold(0u8, |byte, (bit, &on)| byte | u8::from(on) << (7 - bit))
        }));
    }
    let mut file = SIGNATURE.to_vec();
    chunk(&mut file, *b"IHDR", &header);
    chunk(&mut file, *b"PLTE", palette.as_flattened());
    chunk(&mut file, *b"IDAT", &stored(&rows));
    chunk(&mut file, *b"IEND", &[]);
    file
}

fn chunk(file: &mut Vec<u8>, kind: [u8; 4], data: &[u8]) {
    file.extend((data.len() as u32).to_be_bytes());
    let checked_from = file.len();
    file.extend(kind);
    file.extend(data);
    let checksum = crc32(&file[checked_from..]);
    file.extend(checksum.to_be_bytes());
}

/// zlib stream of stored blocks.
fn stored(data: &[u8]) -> Vec<u8> {
    let mut stream = vec![0x78, 0x01];
    let count = data.chunks(STORED_BYTES).len();
    for (index, block) in data.chunks(STORED_BYTES).enumerate() {
        let length = block.len() as u16;
        stream.push(u8::from(index + 1 == count));
        stream.extend(length.to_le_bytes());
        stream.extend((!length).to_le_bytes());
        stream.extend(block);
    }
    stream.extend(adler32(data).to_be_bytes());
    stream
}

fn crc32(data: &[u8]) -> u32 {
    !data.iter().fold(!0u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            if crc & 1 == 1 {
                crc >> 1 ^ 0xedb8_8320
            } else {
                crc >> 1
            }
        })
    })
}

fn adler32(data: &[u8]) -> u32 {
    let (mut a, mut b) = (1u32, 0u32);
    for byte in data {
        a = (a + u32::from(*byte)) % 65_521;
        b = (b + a) % 65_521;
    }
    b << 16 | a
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crc32_and_adler32_match_published_values() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
        assert_eq!(adler32(b"Wikipedia"), 0x11e6_0398);
    }

    #[test]
    fn decoders_read_back_every_pixel() {
        let palette = [[1, 2, 3], [200, 100, 50]];
        // The last image needs three stored blocks.
        for (width, height) in [(1, 5), (8, 5), (13, 5), (56, 5), (1344, 800)] {
            let pixels: Vec<bool> = (0..width * height).map(|index| index % 3 == 0).collect();
            let file = encode(width, &pixels, palette);
            let image = image::load_from_memory(&file)
                .expect("a PNG file")
                .to_rgb8();
            assert_eq!(image.dimensions(), (width as u32, height as u32));
            for (pixel, &on) in image.pixels().zip(&pixels) {
                assert_eq!(pixel.0, palette[usize::from(on)]);
            }
        }
    }
}

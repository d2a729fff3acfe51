//! Image files made by hand, for what no encoder writes.

use std::io::Cursor;

use image::{DynamicImage, ImageFormat};

/// `image` as a file of `format`.
pub(super) fn encode(image: &DynamicImage, format: ImageFormat) -> Vec<u8> {
    let mut out = Cursor::new(Vec::new());
    image.write_to(&mut out, format).unwrap();
    out.into_inner()
}

/// A PNG whose rows lie uncompressed in it.
pub(super) struct Png<'a> {
    pub(super) width: u32,
    pub(super) height: u32,
    pub(super) bits: u8,
    /// 0 grey, 2 RGB, 3 palette, 4 grey and alpha, 6 RGBA.
    pub(super) colour_type: u8,
    /// Content of the chunks `PLTE` and `tRNS`.
    pub(super) chunks: &'a [(&'a [u8; 4], &'a [u8])],
    /// Rows, each with as many whole bytes as it needs.
    pub(super) rows: &'a [u8],
}

impl Png<'_> {
    pub(super) fn file(&self) -> Vec<u8> {
        let mut header = [self.width.to_be_bytes(), self.height.to_be_bytes()].concat();
        header.extend([self.bits, self.colour_type, 0, 0, 0]);
        let mut raw = Vec::new();
        for row in self
            .rows
            .chunks((self.rows.len() / self.height as usize).max(1))
        {
            raw.push(0); // no filter
            raw.extend(row);
        }
        let mut out = b"\x89PNG\r\n\x1a\n".to_vec();
        out.extend(chunk(b"IHDR", &header));
        out.extend(
            self.chunks
                .iter()
                .flat_map(|(kind, data)| chunk(kind, data)),
        );
        out.extend(chunk(b"IDAT", &zlib(&raw)));
        out.extend(chunk(b"IEND", &[]));
        out
    }
}

/// Two pixels of a palette, indices 1 and 0, one bit each.
pub(super) fn palette_png(chunks: &[(&[u8; 4], &[u8])]) -> Vec<u8> {
    let palette: &[u8] = &[10, 20, 30, 40, 50, 60];
    let png = Png {
        width: 2,
        height: 1,
        bits: 1,
        colour_type: 3,
        chunks: &[&[(b"PLTE", palette)], chunks].concat(),
        rows: &[0b1000_0000],
    };
    png.file()
}

fn chunk(kind: &[u8; 4], data: &[u8]) -> Vec<u8> {
    let body = [kind, data].concat();
    let mut out = (data.len() as u32).to_be_bytes().to_vec();
    out.extend(&body);
    out.extend(crc32(&body).to_be_bytes());
    out
}

/// One stored block.
fn zlib(raw: &[u8]) -> Vec<u8> {
    let len = u16::try_from(raw.len()).unwrap();
    let mut out = vec![0x78, 0x01, 0x01];
    out.extend(len.to_le_bytes());
    out.extend((!len).to_le_bytes());
    out.extend(raw);
    let (a, b) = raw.iter().fold((1u32, 0u32), |(a, b), &x| {
        let a = (a + u32::from(x)) % 65_521;
        (a, (a + b) % 65_521)
    });
    out.extend(((b << 16) | a).to_be_bytes());
    out
}

fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0u32, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |c, _| {
            (c >> 1) ^ (0xedb8_8320 & (c & 1).wrapping_neg())
        })
    })
}

/// A BMP; `rows` lie bottom up and are padded to four bytes each by the caller.
pub(super) struct Bmp<'a> {
    pub(super) width: u32,
    pub(super) height: u32,
    pub(super) bits: u16,
    /// Bits of red, green and blue in a pixel, where they are not the usual ones.
    pub(super) masks: &'a [u32],
    pub(super) rows: &'a [u8],
}

impl Bmp<'_> {
    pub(super) fn file(&self) -> Vec<u8> {
        const HEADERS: u32 = 54;
        let offset = HEADERS + 4 * self.masks.len() as u32;
        let mut out = b"BM".to_vec();
        let compression = if self.masks.is_empty() { 0 } else { 3 };
        for number in [
            offset + self.rows.len() as u32,
            0,
            offset,
            40,
            self.width,
            self.height,
        ] {
            out.extend(number.to_le_bytes());
        }
        out.extend([1u16, self.bits].map(u16::to_le_bytes).concat());
        for number in [compression, 0, 0, 0, 0, 0].iter().chain(self.masks) {
            out.extend(number.to_le_bytes());
        }
        out.extend(self.rows);
        out
    }
}

/// A WebP whose extended header states `canvas` (width, height), around the lossless image `simple`.
pub(super) fn extended_webp(canvas: (u32, u32), simple: &[u8]) -> Vec<u8> {
    let mut body = b"WEBPVP8X\x0a\0\0\0\0\0\0\0".to_vec();
    for side in [canvas.0, canvas.1] {
        body.extend(&(side - 1).to_le_bytes()[..3]);
    }
    body.extend(&simple[12..]);
    let mut out = b"RIFF".to_vec();
    out.extend((body.len() as u32).to_le_bytes());
    out.extend(body);
    out
}

/// `jpeg` with an EXIF block that says `orientation`.
pub(super) fn with_orientation(jpeg: &[u8], orientation: u8) -> Vec<u8> {
    let mut exif = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0".to_vec();
    exif.extend([orientation, 0, 0, 0, 0, 0, 0, 0]);
    let mut out = jpeg[..2].to_vec();
    out.extend([0xff, 0xe1]);
    out.extend((exif.len() as u16 + 2).to_be_bytes());
    out.extend(exif);
    out.extend(&jpeg[2..]);
    out
}

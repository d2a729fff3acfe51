//! What the beginning and the end of an image file tell, without its pixels.

use std::io::{self, BufRead, Cursor, Read, Seek, SeekFrom};
use std::path::Path;

use image::metadata::Orientation;
use image::{ColorType, ImageDecoder, ImageFormat};
use serde::{Deserialize, Serialize};

use super::{
    BESIDE_PIXELS, ImageError, check_size, corrupt, gif, guess, limited, pixels, refused,
    unreadable,
};

/// Bytes at the beginning that hold the fields of a BMP, the color type of a PNG and the first chunk of a WebP.
const START_BYTES: u64 = 64;
/// Bytes at the end of a file that are searched for its end marker.
const TAIL_BYTES: u64 = 64 << 10;
/// Most pixels per byte of a PNG: deflate expands one to at most 1032 bytes, of eight pixels each.
const PNG_PIXELS_PER_BYTE: u64 = 1032 * 8;
/// Most pixels per byte of a JPEG: each block of 64 takes at least one bit. Without a full-size component
/// (one sampled at every fourth column, another at every fourth row) two blocks are 256 pixels.
const JPEG_PIXELS_PER_BYTE: u64 = 128 * 8;
/// Bytes of an 8-bit RGB pixel.
const RGB_BYTES: u64 = 3;
/// Most bytes of a decoder that do not depend on the size of the image: tables, windows, rows of a narrow image.
const TABLE_BYTES: u64 = 512 << 10;
/// Most bytes of a decoder per pixel of the image's width: rows of blocks, in several scales.
const ROW_BYTES: u64 = 512;
/// Most bytes of a resize per pixel of the image's width and height: weights, and rows of the intermediate image.
const RESIZE_BYTES: u64 = 32;

/// Facts about an image file from its beginning and its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// Width in pixels, as stored.
    pub width: u32,
    /// Height in pixels, as stored.
    pub height: u32,
    /// Whether it is gray of 16 bits: every level above 255 becomes white.
    pub gray16: bool,
    /// Orientation by EXIF data, 1 (upright) to 8.
    orientation: u8,
    /// Most bytes that the file's content and its decoder hold together.
    decoder_bytes: u64,
    /// Whether the file's end proves that the file was not cut short. Otherwise only decoding tells.
    pub is_whole: bool,
}

/// What a decoder tells before it decodes.
struct Facts {
    width: u32,
    height: u32,
    color: ColorType,
    orientation: Orientation,
}

impl Header {
    /// Reads the header of the file content `bytes`. `path` only serves error messages.
    ///
    /// # Errors
    /// [`ImageError`] if it is no image, too large, or damaged in a way that its header or end shows.
    pub(crate) fn of(path: &Path, bytes: &[u8]) -> Result<Self, ImageError> {
        Self::read(path, Cursor::new(bytes), bytes.len() as u64)
    }

    /// Reads the header of a file of `file_bytes` bytes: what its decoder needs before the pixels, and its end.
    ///
    /// # Errors
    /// As [`Header::of`]; also if the file cannot be read.
    pub(super) fn read<R: BufRead + Seek>(
        path: &Path,
        mut input: R,
        file_bytes: u64,
    ) -> Result<Self, ImageError> {
        let failed = |error: io::Error| unreadable(path, &error);
        let start = part(&mut input, 0, START_BYTES).map_err(failed)?;
        let format = guess(path, Cursor::new(&*start))?.format();
        let tail = file_bytes.saturating_sub(TAIL_BYTES);
        let tail = part(&mut input, tail, TAIL_BYTES).map_err(failed)?;
        let ends_with = |mark: &[u8]| tail.windows(mark.len()).rev().any(|bytes| bytes == mark);
        input.rewind().map_err(failed)?;
        let mut scans = 0;
        let facts = if format == Some(ImageFormat::Jpeg) {
            if !ends_with(&[0xff, 0xd9]) {
                // The decoder would fill the missing part with gray instead of failing.
                let reason = "the end marker is missing, the file was cut short";
                return Err(corrupt(path, reason));
            }
            let mut head = Vec::new();
            scans = jpeg_head(&mut input, &mut head).map_err(failed)?;
            Facts::of(path, Cursor::new(&*head)).or_else(|_| {
                // A decoder passes over more than `jpeg_head` does.
                input.read_to_end(&mut head).map_err(failed)?;
                Facts::of(path, Cursor::new(&*head))
            })?
        } else if format == Some(ImageFormat::Gif) {
            let (width, height) = gif::canvas(&start).unwrap_or_default();
            Facts {
                width,
                height,
                color: ColorType::Rgb8,
                orientation: Orientation::NoTransforms,
            }
        } else {
            Facts::of(path, input)?
        };
        let facts = match format {
            Some(ImageFormat::Tiff) => facts.turned(),
            _ => facts,
        };
        let (width, height) = (facts.width, facts.height);
        check_size(path, width, height, file_bytes)?;
        let rows = Rows::of_bmp(&start);
        let most = match format {
            Some(ImageFormat::Png) => Some(file_bytes * PNG_PIXELS_PER_BYTE),
            Some(ImageFormat::Jpeg) => Some(file_bytes * JPEG_PIXELS_PER_BYTE),
            Some(ImageFormat::Bmp) if rows.is_some() => Some(file_bytes * 8),
            _ => None,
        };
        let pixels = u64::from(width) * u64::from(height);
        if most.is_some_and(|most| pixels > most) {
            let reason = format!(
                "its header states {width} x {height} pixels, which {file_bytes} bytes cannot hold"
            );
            return Err(corrupt(path, &reason));
        }
        let (is_whole, work) = match format {
            Some(ImageFormat::Png) => (ends_with(b"IEND\xae\x42\x60\x82"), 0),
            Some(ImageFormat::WebP) => {
                let length = number(&start, 4).map_or(u64::MAX, u64::from);
                (length.saturating_add(8) <= file_bytes, webp_work(&start))
            }
            Some(ImageFormat::Bmp) => {
                let end = rows.map(|rows| rows.end(width, height));
                (end.is_some_and(|end| end <= file_bytes), 0)
            }
            // The end mark of a GIF is one byte, and a TIFF has none. Indices of the frame.
            Some(ImageFormat::Gif) => (false, 1),
            // A copy of all pixels, one of a strip that may hold all of them, and one to turn.
            Some(ImageFormat::Tiff) => (false, 3 * u64::from(facts.color.bytes_per_pixel()) + 4),
            _ => (true, scans),
        };
        let copies = match format {
            // The decoder copies the file into memory that grows by doubling.
            Some(ImageFormat::Jpeg | ImageFormat::WebP) => 2,
            // A compressed strip may be the whole file.
            Some(ImageFormat::Tiff) => 1,
            _ => 0,
        };
        let output = u64::from(facts.color.bytes_per_pixel());
        let rgb = if facts.color == ColorType::Rgb8 {
            0
        } else {
            RGB_BYTES
        };
        Ok(Self {
            width,
            height,
            gray16: pixels::is_png_grey16(&start)
                || format == Some(ImageFormat::Tiff) && facts.color == ColorType::L16,
            orientation: facts.orientation.to_exif(),
            is_whole,
            // Other pixels than 8-bit RGB are converted once the decoder is gone.
            decoder_bytes: (1 + copies) * file_bytes
                + pixels * (output + work.max(rgb))
                + u64::from(width) * ROW_BYTES
                + TABLE_BYTES,
        })
    }

    /// This header, of an image whose reader holds `bytes` beside the content.
    pub(crate) fn beside(mut self, bytes: u64) -> Self {
        self.decoder_bytes += bytes;
        self
    }

    /// Width and height in pixels, turned as the EXIF orientation says if `upright`.
    #[must_use]
    pub fn size(&self, upright: bool) -> (usize, usize) {
        let (width, height) = (self.width as usize, self.height as usize);
        // Orientations 5 to 8 exchange the sides.
        match upright && self.orientation > 4 {
            true => (height, width),
            false => (width, height),
        }
    }

    /// Whether EXIF data states an orientation other than upright.
    #[must_use]
    pub fn is_turned(&self) -> bool {
        self.orientation != 1
    }

    /// Number of pixels, width times height.
    #[must_use]
    pub fn pixels(&self) -> u64 {
        u64::from(self.width) * u64::from(self.height)
    }

    /// Most bytes of the decoded image in 8-bit RGB and of a resize, without its result.
    #[must_use]
    pub fn resize_bytes(&self) -> u64 {
        let sides = u64::from(self.width) + u64::from(self.height);
        self.pixels() * RGB_BYTES + sides * RESIZE_BYTES
    }

    /// Most bytes that exist at a time from reading the file to resizing its image. Turning (`upright`) holds the
    /// image twice.
    #[must_use]
    pub fn decode_bytes(&self, upright: bool) -> u64 {
        let images = if upright { 2 } else { 1 };
        let turning = images * self.pixels() * RGB_BYTES;
        self.decoder_bytes.max(turning).max(self.resize_bytes())
    }

    /// The EXIF orientation.
    pub(super) fn orientation(&self) -> Orientation {
        Orientation::from_exif(self.orientation).unwrap_or(Orientation::NoTransforms)
    }
}

impl Facts {
    fn of<R: BufRead + Seek>(path: &Path, input: R) -> Result<Self, ImageError> {
        let mut reader = guess(path, input)?;
        // How much more may be taken follows from the header.
        reader.limits(limited(BESIDE_PIXELS));
        let decoder = reader.into_decoder();
        let mut decoder = decoder.map_err(|error| refused(path, &error))?;
        let (width, height) = decoder.dimensions();
        Ok(Self {
            width,
            height,
            color: decoder.color_type(),
            // Unreadable EXIF data states nothing.
            orientation: decoder.orientation().unwrap_or(Orientation::NoTransforms),
        })
    }
}

impl Facts {
    /// The facts once the image is turned as its orientation says.
    fn turned(self) -> Self {
        let (width, height) = match self.orientation.to_exif() > 4 {
            true => (self.height, self.width),
            false => (self.width, self.height),
        };
        Self {
            width,
            height,
            orientation: Orientation::NoTransforms,
            ..self
        }
    }
}

/// At most `length` bytes of `input` from the offset `from` on.
fn part<R: Read + Seek>(input: &mut R, from: u64, length: u64) -> io::Result<Vec<u8>> {
    input.seek(SeekFrom::Start(from))?;
    let mut bytes = Vec::new();
    input.take(length).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The little-endian number at the offset `at`.
fn number(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// Reads a JPEG up to the end of its first scan header into `head`. Returns the bytes per pixel that a decoder
/// collects until all scans are read: coefficients of 16 bits of each component, unless one scan holds all.
fn jpeg_head(input: &mut impl BufRead, head: &mut Vec<u8>) -> io::Result<u64> {
    const SCAN: u8 = 0xda;
    const BASELINE: [u8; 2] = [0xc0, 0xc1];
    // Position of the number of components in a frame header: lengths and sizes come before it.
    const COMPONENTS: usize = 7;
    let (mut components, mut one_scan) = (0, false);
    loop {
        input.read_until(0xff, head)?;
        // Any number of 0xff may precede a marker.
        let marker = loop {
            match part_of(input, 1, head)?.first() {
                Some(0xff) => {}
                marker => break marker.copied(),
            }
        };
        match marker {
            None => return Ok(0),
            // A byte of data, or a marker without a segment.
            Some(0x00 | 0x01 | 0xd0..=0xd9) => {}
            Some(marker) => {
                let at = head.len();
                let length = part_of(input, 2, head)?;
                let length = length.first_chunk().map_or(0, |l| u16::from_be_bytes(*l));
                part_of(input, u64::from(length.saturating_sub(2)), head)?;
                let segment = &head[at..];
                match marker {
                    SCAN => {
                        let in_scan = segment.get(2).copied().unwrap_or(0);
                        let at_once = one_scan && in_scan == components;
                        return Ok(if at_once {
                            0
                        } else {
                            2 * u64::from(components)
                        });
                    }
                    // Tables, not frames.
                    0xc4 | 0xc8 | 0xcc => {}
                    0xc0..=0xcf => {
                        components = segment.get(COMPONENTS).copied().unwrap_or(0);
                        one_scan = BASELINE.contains(&marker);
                    }
                    _ => {}
                }
            }
        }
    }
}

/// Appends up to `length` bytes of `input` to `head` and returns them.
fn part_of<'a>(
    input: &mut impl BufRead,
    length: u64,
    head: &'a mut Vec<u8>,
) -> io::Result<&'a [u8]> {
    let at = head.len();
    input.take(length).read_to_end(head)?;
    Ok(&head[at..])
}

/// Bytes per pixel of a WebP decoder beside its output.
fn webp_work(start: &[u8]) -> u64 {
    const ANIMATION: u8 = 2;
    match start.get(12..16) {
        // Planes of brightness and of two colors at half the width and height.
        Some(b"VP8 ") => 2,
        // Four channels, and tables for blocks.
        Some(b"VP8L") => 6,
        // A canvas and a frame of four channels each, with the planes of a frame.
        _ if start.get(20).is_some_and(|flags| flags & ANIMATION != 0) => 12,
        // The planes, and the lossless image of the alpha channel.
        _ => 8,
    }
}

/// Rows of a BMP without run-length encoding.
struct Rows {
    /// Offset of the rows in the file.
    offset: u32,
    /// Bits of a pixel.
    bits: u16,
}

impl Rows {
    /// The rows of a BMP that begins with `start`; `None` if they are encoded by runs.
    fn of_bmp(start: &[u8]) -> Option<Self> {
        const CORE_HEADER: u32 = 12;
        const RUNS: [u32; 2] = [1, 2];
        let is_core = number(start, 14)? == CORE_HEADER;
        if !is_core && number(start, 30).is_some_and(|kind| RUNS.contains(&kind)) {
            return None;
        }
        let bits = start.get(if is_core { 24 } else { 28 }..)?;
        Some(Self {
            offset: number(start, 10)?,
            bits: u16::from_le_bytes(*bits.first_chunk()?),
        })
    }

    /// Offset after the last row of an image of this size.
    fn end(&self, width: u32, height: u32) -> u64 {
        let row = (u64::from(width) * u64::from(self.bits)).div_ceil(32) * 4;
        u64::from(self.offset) + row * u64::from(height)
    }
}

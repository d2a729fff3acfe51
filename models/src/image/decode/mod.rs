//! Decoder of image files to 8-bit RGB, equal to Pillow's `convert("RGB")`.
//!
//! `pixels` converts each kind of pixel. EXIF orientation is ignored unless a caller asks for it, as in
//! `convert` and in the programs that trained these models. The format is detected from the content, never from the file name. PNG, BMP and
//! WebP equal Pillow byte for byte; a JPEG may differ by one level in places, since decoders round
//! differently.

mod pixels;
mod webp;

use std::fs::File;
use std::io::{BufReader, Cursor, Read};
use std::path::{Path, PathBuf};

use image::metadata::Orientation;
use image::{DynamicImage, ImageDecoder, ImageFormat, ImageReader, Limits};
use thiserror::Error;

use super::RgbImage;

/// Largest number of pixels (width times height) of an image that is decoded; Pillow has the same limit.
pub const MAX_PIXELS: u64 = 178_956_970;
/// Largest image file that is read, in bytes.
const MAX_FILE_BYTES: u64 = 1 << 30;
/// Most bytes of a decoder per pixel: 16-bit RGBA output and as much working space.
const BYTES_PER_PIXEL: u64 = 16;
/// Most bytes of a decoder for other data: color profiles, texts, tables.
const BESIDE_PIXELS: u64 = 16 << 20;
/// Most pixels per byte of a PNG: deflate expands one to at most 1032 bytes, of eight pixels each.
const PNG_PIXELS_PER_BYTE: u64 = 1032 * 8;
/// Most pixels per byte of a JPEG: each block of 64 takes at least one bit. Without a full-size component
/// (one sampled at every fourth column, another at every fourth row) two blocks are 256 pixels.
const JPEG_PIXELS_PER_BYTE: u64 = 128 * 8;
/// Bytes at the end of a JPEG that are searched for its end marker.
const JPEG_TAIL_BYTES: usize = 64 << 10;

/// Why an image could not be read. Every variant names the file.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ImageError {
    /// The file does not exist.
    #[error("image file {} does not exist", path.display())]
    Missing {
        /// Path of the image file.
        path: PathBuf,
    },
    /// The file exists but cannot be read (permissions, a directory, a device).
    #[error("image file {} cannot be read: {reason}", path.display())]
    Unreadable {
        /// Path of the image file.
        path: PathBuf,
        /// What the operating system said.
        reason: String,
    },
    /// The content is none of PNG, JPEG, WebP, BMP.
    #[error("image file {} is not a PNG, JPEG, WebP or BMP file", path.display())]
    UnknownFormat {
        /// Path of the image file.
        path: PathBuf,
    },
    /// The content is damaged or cut short.
    #[error("image file {} is damaged: {reason}", path.display())]
    Corrupt {
        /// Path of the image file.
        path: PathBuf,
        /// What is wrong with the content.
        reason: String,
    },
    /// More pixels or bytes than an image may have.
    #[error("image file {} is too large: {width} x {height} pixels, {file_bytes} bytes; at most {MAX_PIXELS} pixels are read", path.display())]
    TooLarge {
        /// Path of the image file.
        path: PathBuf,
        /// Width by its header; 0 if the file was refused before that.
        width: u32,
        /// Height by its header; 0 if the file was refused before that.
        height: u32,
        /// Size of the file in bytes.
        file_bytes: u64,
    },
    /// A relative path that leads out of the directory of the data file.
    #[error("image file {} is outside the data directory {}", path.display(), root.display())]
    OutsideDirectory {
        /// The path as the data file gives it.
        path: PathBuf,
        /// The directory of the data file.
        root: PathBuf,
    },
}

/// Width and height of the image at `path`, from its header alone.
///
/// # Errors
/// [`ImageError`] if the file is missing, unreadable, no image, or too large; damage after the
/// header is not detected.
pub fn dimensions(path: &Path) -> Result<(usize, usize), ImageError> {
    let (file, file_bytes) = open(path)?;
    let reader = guess(path, BufReader::new(file))?;
    let (width, height) = reader
        .into_dimensions()
        .map_err(|error| corrupt(path, &error.to_string()))?;
    check_size(path, width, height, file_bytes)?;
    Ok((width as usize, height as usize))
}

/// Decodes the image at `path`.
///
/// # Errors
/// [`ImageError`] if the file is missing, unreadable, no image, damaged or too large.
pub fn decode(path: &Path) -> Result<RgbImage, ImageError> {
    decode_bytes(path, &read(path)?)
}

/// As [`decode`], for the bytes of an image file; `path` only serves error messages. If the format bounds how many
/// pixels the bytes can hold, larger sizes in the header are refused before memory is taken. A WebP, or a run-length
/// encoded BMP, has no such bound, since few bytes may hold a large image of one color.
///
/// # Errors
/// [`ImageError`] if it is no image, damaged or too large.
pub fn decode_bytes(path: &Path, bytes: &[u8]) -> Result<RgbImage, ImageError> {
    let (width, height) = size_of(path, bytes)?;
    let pixels = u64::from(width) * u64::from(height);
    let mut reader = guess(path, Cursor::new(bytes))?;
    reader.limits(limited(pixels * BYTES_PER_PIXEL + BESIDE_PIXELS));
    let decoder = reader
        .into_decoder()
        .map_err(|error| corrupt(path, &error.to_string()))?;
    let image =
        DynamicImage::from_decoder(decoder).map_err(|error| corrupt(path, &error.to_string()))?;
    Ok(RgbImage::new(
        width as usize,
        height as usize,
        pixels::to_rgb8(image, bytes),
    ))
}

/// As [`decode_bytes`], turned as the EXIF orientation says.
///
/// # Errors
/// As [`decode_bytes`].
pub(super) fn decode_upright(path: &Path, bytes: &[u8]) -> Result<RgbImage, ImageError> {
    let image = decode_bytes(path, bytes)?;
    let orientation = orientation(path, bytes)?;
    let (width, height) = (image.width() as u32, image.height() as u32);
    let Some(stored) = image::RgbImage::from_raw(width, height, image.pixels) else {
        return Err(corrupt(path, "its pixels do not fill it"));
    };
    let mut turned = DynamicImage::ImageRgb8(stored);
    turned.apply_orientation(orientation);
    let (width, height) = (turned.width() as usize, turned.height() as usize);
    Ok(RgbImage::new(width, height, turned.into_rgb8().into_raw()))
}

/// Width and height of an image file's content, turned as the EXIF orientation says.
pub(super) fn upright_size(path: &Path, bytes: &[u8]) -> Result<(u32, u32), ImageError> {
    use Orientation::{Rotate90, Rotate90FlipH, Rotate270, Rotate270FlipH};
    let (width, height) = size_of(path, bytes)?;
    Ok(match orientation(path, bytes)? {
        Rotate90 | Rotate270 | Rotate90FlipH | Rotate270FlipH => (height, width),
        _ => (width, height),
    })
}

/// The content of the image file at `path`.
pub(super) fn read(path: &Path) -> Result<Vec<u8>, ImageError> {
    let (file, _) = open(path)?;
    let mut bytes = Vec::new();
    // `take` guards against a file that grows while it is read
    let read = file.take(MAX_FILE_BYTES).read_to_end(&mut bytes);
    read.map_err(|error| unreadable(path, &error))?;
    Ok(bytes)
}

/// What 8-bit RGB as published loses of an image file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Losses {
    /// Gray of 16 bits: every level above 255 becomes white.
    pub gray16: bool,
    /// An EXIF orientation other than upright, which is ignored.
    pub turned: bool,
}

/// What 8-bit RGB loses of the file content `bytes`.
pub(super) fn losses(path: &Path, bytes: &[u8]) -> Result<Losses, ImageError> {
    Ok(Losses {
        gray16: pixels::is_png_grey16(bytes),
        turned: orientation(path, bytes)? != Orientation::NoTransforms,
    })
}

/// The orientation that EXIF data states; none if there is no readable data.
fn orientation(path: &Path, bytes: &[u8]) -> Result<Orientation, ImageError> {
    let mut reader = guess(path, Cursor::new(bytes))?;
    reader.limits(limited(BESIDE_PIXELS));
    let mut decoder = reader
        .into_decoder()
        .map_err(|error| corrupt(path, &error.to_string()))?;
    Ok(decoder.orientation().unwrap_or(Orientation::NoTransforms))
}

/// Width and height by the header of a file's content, checked against the most pixels that it can hold.
pub(crate) fn size_of(path: &Path, bytes: &[u8]) -> Result<(u32, u32), ImageError> {
    let mut reader = guess(path, Cursor::new(bytes))?;
    let format = reader.format();
    if format == Some(ImageFormat::Jpeg) {
        check_jpeg_end(path, bytes)?;
    }
    // How much more may be taken follows from the header.
    reader.limits(limited(BESIDE_PIXELS));
    let (width, height) = reader
        .into_dimensions()
        .map_err(|error| corrupt(path, &error.to_string()))?;
    check_size(path, width, height, bytes.len() as u64)?;
    let pixels = u64::from(width) * u64::from(height);
    if most_pixels(format, bytes).is_some_and(|most| pixels > most) {
        let reason = format!(
            "its header states {width} x {height} pixels, which {} bytes cannot hold",
            bytes.len()
        );
        return Err(corrupt(path, &reason));
    }
    if format == Some(ImageFormat::WebP) && webp::most_frame_pixels(bytes) > pixels {
        return Err(corrupt(path, "a frame is larger than the picture"));
    }
    Ok((width, height))
}

fn limited(bytes: u64) -> Limits {
    let mut limits = Limits::default();
    limits.max_alloc = Some(bytes);
    limits
}

fn open(path: &Path) -> Result<(File, u64), ImageError> {
    // asked before opening: opening a pipe would block
    let metadata = std::fs::metadata(path).map_err(|error| unreadable(path, &error))?;
    if !metadata.is_file() {
        let reason = "not a regular file".to_owned();
        return Err(ImageError::Unreadable {
            path: path.to_owned(),
            reason,
        });
    }
    let file_bytes = metadata.len();
    if file_bytes > MAX_FILE_BYTES {
        return Err(ImageError::TooLarge {
            path: path.to_owned(),
            width: 0,
            height: 0,
            file_bytes,
        });
    }
    let file = File::open(path).map_err(|error| unreadable(path, &error))?;
    Ok((file, file_bytes))
}

fn guess<R: std::io::BufRead + std::io::Seek>(
    path: &Path,
    reader: R,
) -> Result<ImageReader<R>, ImageError> {
    let reader = ImageReader::new(reader).with_guessed_format();
    let reader = reader.map_err(|error| unreadable(path, &error))?;
    match reader.format() {
        Some(ImageFormat::Png | ImageFormat::Jpeg | ImageFormat::WebP | ImageFormat::Bmp) => {
            Ok(reader)
        }
        _ => Err(ImageError::UnknownFormat {
            path: path.to_owned(),
        }),
    }
}

fn check_size(path: &Path, width: u32, height: u32, file_bytes: u64) -> Result<(), ImageError> {
    if width == 0 || height == 0 {
        return Err(corrupt(path, "a side of zero pixels"));
    }
    if u64::from(width) * u64::from(height) > MAX_PIXELS {
        return Err(ImageError::TooLarge {
            path: path.to_owned(),
            width,
            height,
            file_bytes,
        });
    }
    Ok(())
}

/// Most pixels that the content of a file can hold; `None` if its format has no bound.
fn most_pixels(format: Option<ImageFormat>, bytes: &[u8]) -> Option<u64> {
    let file_bytes = bytes.len() as u64;
    match format {
        Some(ImageFormat::Png) => Some(file_bytes * PNG_PIXELS_PER_BYTE),
        Some(ImageFormat::Jpeg) => Some(file_bytes * JPEG_PIXELS_PER_BYTE),
        Some(ImageFormat::Bmp) => {
            const CORE_HEADER: u32 = 12;
            const RUNS: [u32; 2] = [1, 2];
            let number = |at: usize| Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?));
            let is_core = number(14) == Some(CORE_HEADER);
            let has_runs = number(30).is_some_and(|kind| RUNS.contains(&kind));
            (is_core || !has_runs).then_some(file_bytes * 8)
        }
        _ => None,
    }
}

/// The JPEG decoder fills missing data with gray instead of failing.
fn check_jpeg_end(path: &Path, bytes: &[u8]) -> Result<(), ImageError> {
    let tail = &bytes[bytes.len().saturating_sub(JPEG_TAIL_BYTES)..];
    if tail.windows(2).any(|pair| pair == [0xff, 0xd9]) {
        return Ok(());
    }
    Err(corrupt(
        path,
        "the end marker is missing, the file was cut short",
    ))
}

fn corrupt(path: &Path, reason: &str) -> ImageError {
    ImageError::Corrupt {
        path: path.to_owned(),
        reason: reason.to_owned(),
    }
}

fn unreadable(path: &Path, error: &std::io::Error) -> ImageError {
    let path = path.to_owned();
    if error.kind() == std::io::ErrorKind::NotFound {
        return ImageError::Missing { path };
    }
    ImageError::Unreadable {
        path,
        reason: error.to_string(),
    }
}

#[cfg(test)]
mod tests;

//! Decoder of image files to 8-bit RGB, equal to Pillow's `convert("RGB")`.
//!
//! `header` reads what is known without decoding, `pixels` converts each kind of pixel. EXIF orientation is ignored unless a caller asks for it, as in
//! `convert` and in the programs that trained these models. The format is detected from the content, never from the file name. Of several frames or pages the first counts. PNG, BMP, GIF, TIFF and
//! WebP equal Pillow byte for byte; a JPEG may differ by one level in places, since decoders round
//! differently.

mod gif;
mod header;
mod others;
mod pixels;
mod webp;

use std::fs::File;
use std::io::{BufRead, BufReader, Cursor, Read, Seek};
use std::path::{Path, PathBuf};

use image::error::ImageFormatHint;
use image::{DynamicImage, ImageDecoder, ImageFormat, ImageReader, Limits};
use thiserror::Error;

use super::RgbImage;
pub use header::Header;

/// Largest number of pixels (width times height) of an image that is decoded; Pillow has the same limit.
pub const MAX_PIXELS: u64 = 178_956_970;
/// Bytes at the beginning of a file that tell its format.
const NAMED_BYTES: u64 = 64;
/// Largest image file that is read, in bytes.
const MAX_FILE_BYTES: u64 = 1 << 30;
/// Most bytes of a decoder per pixel: 16-bit RGBA output and as much working space.
const BYTES_PER_PIXEL: u64 = 16;
/// Most bytes of a decoder for other data: color profiles, texts, tables.
const BESIDE_PIXELS: u64 = 16 << 20;

/// Why an image could not be read. Every variant names the file.
#[derive(Clone, Debug, Error)]
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
    /// The content is none of PNG, JPEG, WebP, BMP, GIF, TIFF.
    #[error("image file {} is not a PNG, JPEG, WebP, BMP, GIF or TIFF file", path.display())]
    UnknownFormat {
        /// Path of the image file.
        path: PathBuf,
    },
    /// The content is of a known format that is not read.
    #[error("image file {} is {format}, which is not read: {}", path.display(), others::remedy(format, path))]
    OtherFormat {
        /// Path of the image file.
        path: PathBuf,
        /// Name of the format.
        format: &'static str,
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
/// [`ImageError`] if the file is missing, unreadable, no image, or too large; damage between the header and the end
/// is not detected.
pub fn dimensions(path: &Path) -> Result<(usize, usize), ImageError> {
    Ok(header(path)?.size(false))
}

/// The header of the image at `path`.
///
/// # Errors
/// As [`dimensions`].
pub fn header(path: &Path) -> Result<Header, ImageError> {
    let (file, file_bytes) = open(path)?;
    Header::read(path, BufReader::new(file), file_bytes)
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
    let header = Header::of(path, bytes)?;
    decode_pixels(path, bytes, &header)
}

/// As [`decode_bytes`], turned as the EXIF orientation says.
///
/// # Errors
/// As [`decode_bytes`].
pub(super) fn decode_upright(path: &Path, bytes: &[u8]) -> Result<RgbImage, ImageError> {
    let header = Header::of(path, bytes)?;
    let image = decode_pixels(path, bytes, &header)?;
    let Some(stored) = image::RgbImage::from_raw(header.width, header.height, image.pixels) else {
        return Err(corrupt(path, "its pixels do not fill it"));
    };
    let mut turned = DynamicImage::ImageRgb8(stored);
    turned.apply_orientation(header.orientation());
    let (width, height) = (turned.width() as usize, turned.height() as usize);
    Ok(RgbImage::new(width, height, turned.into_rgb8().into_raw()))
}

fn decode_pixels(path: &Path, bytes: &[u8], header: &Header) -> Result<RgbImage, ImageError> {
    let pixels = header.pixels();
    let mut reader = guess(path, Cursor::new(bytes))?;
    let (width, height) = (header.width as usize, header.height as usize);
    if reader.format() == Some(ImageFormat::Gif) {
        let pixels = gif::first_frame(bytes, width, height);
        let pixels = pixels.map_err(|reason| corrupt(path, &reason))?;
        return Ok(RgbImage::new(width, height, pixels));
    }
    let is_tiff = reader.format() == Some(ImageFormat::Tiff);
    if reader.format() == Some(ImageFormat::WebP) && webp::most_frame_pixels(bytes) > pixels {
        return Err(corrupt(path, "a frame is larger than the picture"));
    }
    reader.limits(limited(pixels * BYTES_PER_PIXEL + BESIDE_PIXELS));
    let failed = |error: image::ImageError| refused(path, &error);
    let mut decoder = reader.into_decoder().map_err(failed)?;
    // Pillow turns TIFF files when it opens them.
    let turn = is_tiff
        .then(|| decoder.orientation().map_err(failed))
        .transpose()?;
    let mut image = DynamicImage::from_decoder(decoder).map_err(failed)?;
    if let Some(turn) = turn {
        image.apply_orientation(turn);
    }
    Ok(RgbImage::new(width, height, pixels::to_rgb8(image, bytes)))
}

/// The content of the image file at `path`.
pub(super) fn read(path: &Path) -> Result<Vec<u8>, ImageError> {
    let (file, file_bytes) = open(path)?;
    let mut bytes = Vec::with_capacity(file_bytes as usize);
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

fn guess<R: BufRead + Seek>(path: &Path, reader: R) -> Result<ImageReader<R>, ImageError> {
    let reader = ImageReader::new(reader).with_guessed_format();
    let reader = reader.map_err(|error| unreadable(path, &error))?;
    const READ: [ImageFormat; 6] = [
        ImageFormat::Png,
        ImageFormat::Jpeg,
        ImageFormat::WebP,
        ImageFormat::Bmp,
        ImageFormat::Gif,
        ImageFormat::Tiff,
    ];
    if reader.format().is_some_and(|format| READ.contains(&format)) {
        return Ok(reader);
    }
    let mut start = Vec::new();
    let mut input = reader.into_inner();
    let read = input
        .rewind()
        .and_then(|()| input.take(NAMED_BYTES).read_to_end(&mut start));
    read.map_err(|error| unreadable(path, &error))?;
    let path = path.to_owned();
    Err(match others::name(&start) {
        Some(format) => ImageError::OtherFormat { path, format },
        None => ImageError::UnknownFormat { path },
    })
}

/// Why a decoder failed: damage, or a kind of TIFF that it does not read.
fn refused(path: &Path, error: &image::ImageError) -> ImageError {
    let of_tiff = ImageFormatHint::Exact(ImageFormat::Tiff);
    match error {
        image::ImageError::Unsupported(kind) if kind.format_hint() == of_tiff => {
            ImageError::Unreadable {
                path: path.to_owned(),
                reason: format!("{error}; convert it to PNG"),
            }
        }
        _ => corrupt(path, &error.to_string()),
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

//! Reads a picture file as 8-bit RGB, the way Pillow's `convert("RGB")` sees it.
//!
//! Alpha is dropped, not blended; palettes and 1/2/4-bit greys are expanded; 16-bit colour keeps its
//! high byte; 16-bit grey is *clipped* at 255, as Pillow does. EXIF orientation is ignored.
//! The format is found from the content, never from the file name.

use std::fs::File;
use std::io::{BufReader, Cursor, Read};
use std::path::{Path, PathBuf};

use image::{DynamicImage, ImageDecoder, ImageFormat, ImageReader, Limits};
use thiserror::Error;

use super::RgbImage;

/// Most pixels a picture may have: beyond this Pillow refuses to open a file as well.
pub const MAX_PIXELS: u64 = 178_956_970;
/// Largest picture file that is read, in bytes.
const MAX_FILE_BYTES: u64 = 1 << 30;
/// Bytes a decoder may hold per pixel: 16-bit RGBA output and as much working space again.
const BYTES_PER_PIXEL: u64 = 16;
/// How far from the end of a JPEG its end marker is looked for, in bytes.
const JPEG_TAIL_BYTES: usize = 64 << 10;

/// Why a picture could not be read. Every variant names the file.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ImageError {
    /// The file does not exist.
    #[error("picture {} does not exist", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// The file exists but cannot be read (permissions, a folder, a device).
    #[error("picture {} cannot be read: {reason}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        reason: String,
    },
    /// The content is none of PNG, JPEG, WebP, BMP.
    #[error("picture {} is not a PNG, JPEG, WebP or BMP file", path.display())]
    UnknownFormat {
        /// The file.
        path: PathBuf,
    },
    /// The content is damaged or cut short.
    #[error("picture {} is damaged: {reason}", path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// What the decoder found.
        reason: String,
    },
    /// More pixels or bytes than a picture may have.
    #[error("picture {} is too large: {width} x {height} pixels, {file_bytes} bytes; at most {MAX_PIXELS} pixels are read", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Width by its header; 0 if the file was refused before that.
        width: u32,
        /// Height by its header; 0 if the file was refused before that.
        height: u32,
        /// Size of the file in bytes.
        file_bytes: u64,
    },
    /// A relative path that leads out of the folder of the data file.
    #[error("picture {} lies outside the data folder {}", path.display(), root.display())]
    OutsideFolder {
        /// The path as the data file gives it.
        path: PathBuf,
        /// The folder of the data file.
        root: PathBuf,
    },
}

/// Width and height of the picture at `path`, from its header alone.
///
/// # Errors
/// [`ImageError`] if the file is missing, unreadable, no picture, or too large; damage behind the
/// header goes unseen.
pub fn dimensions(path: &Path) -> Result<(usize, usize), ImageError> {
    let (file, file_bytes) = open(path)?;
    let reader = guess(path, BufReader::new(file))?;
    let (width, height) = reader
        .into_dimensions()
        .map_err(|error| corrupt(path, &error.to_string()))?;
    check_size(path, width, height, file_bytes)?;
    Ok((width as usize, height as usize))
}

/// Decodes the picture at `path`.
///
/// # Errors
/// [`ImageError`] if the file is missing, unreadable, no picture, damaged or too large.
pub fn decode(path: &Path) -> Result<RgbImage, ImageError> {
    let (file, file_bytes) = open(path)?;
    let mut bytes = Vec::new();
    // `take` guards against a file that grows while it is read
    let read = file.take(MAX_FILE_BYTES).read_to_end(&mut bytes);
    read.map_err(|error| unreadable(path, &error))?;
    let reader = guess(path, Cursor::new(bytes.as_slice()))?;
    if reader.format() == Some(ImageFormat::Jpeg) {
        check_jpeg_end(path, &bytes)?;
    }
    let mut reader = reader;
    let mut limits = Limits::default();
    limits.max_alloc = Some(MAX_PIXELS * BYTES_PER_PIXEL);
    reader.limits(limits);
    let decoder = reader
        .into_decoder()
        .map_err(|error| corrupt(path, &error.to_string()))?;
    let (width, height) = decoder.dimensions();
    check_size(path, width, height, file_bytes)?;
    let picture =
        DynamicImage::from_decoder(decoder).map_err(|error| corrupt(path, &error.to_string()))?;
    Ok(RgbImage::new(
        width as usize,
        height as usize,
        to_rgb8(picture),
    ))
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

/// The JPEG decoder fills missing data with grey instead of failing.
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

fn to_rgb8(picture: DynamicImage) -> Vec<u8> {
    match picture {
        DynamicImage::ImageRgb8(p) => p.into_raw(),
        DynamicImage::ImageLuma8(p) => p.as_raw().iter().flat_map(|&v| [v; 3]).collect(),
        DynamicImage::ImageLumaA8(p) => p
            .as_raw()
            .as_chunks::<2>()
            .0
            .iter()
            .flat_map(|v| [v[0]; 3])
            .collect(),
        DynamicImage::ImageRgba8(p) => drop_alpha(p.as_raw(), |v| v),
        DynamicImage::ImageLuma16(p) => p
            .as_raw()
            .iter()
            .flat_map(|&v| [v.min(255) as u8; 3])
            .collect(),
        DynamicImage::ImageLumaA16(p) => p
            .as_raw()
            .as_chunks::<2>()
            .0
            .iter()
            .flat_map(|v| [high_byte(v[0]); 3])
            .collect(),
        DynamicImage::ImageRgb16(p) => p.as_raw().iter().map(|&v| high_byte(v)).collect(),
        DynamicImage::ImageRgba16(p) => drop_alpha(p.as_raw(), high_byte),
        other => other.to_rgb8().into_raw(),
    }
}

fn drop_alpha<T: Copy>(rgba: &[T], to_byte: impl Fn(T) -> u8) -> Vec<u8> {
    let pixels = rgba.as_chunks::<4>().0.iter();
    pixels
        .flat_map(|v| [to_byte(v[0]), to_byte(v[1]), to_byte(v[2])])
        .collect()
}

fn high_byte(v: u16) -> u8 {
    (v >> 8) as u8
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
mod tests {
    use super::*;
    use image::codecs::png::PngEncoder;
    use image::{ExtendedColorType, ImageEncoder};

    fn png(dir: &Path, bytes: &[u8], width: u32, color: ExtendedColorType) -> PathBuf {
        let path = dir.join("picture.png");
        let height = bytes.len() as u32 * 8 / u32::from(color.bits_per_pixel()) / width;
        let file = File::create(&path).unwrap();
        PngEncoder::new(file)
            .write_image(bytes, width, height, color)
            .unwrap();
        path
    }

    fn decoded(bytes: &[u8], width: u32, color: ExtendedColorType) -> Vec<u8> {
        let dir = tempfile::tempdir().unwrap();
        decode(&png(dir.path(), bytes, width, color))
            .unwrap()
            .pixels()
            .to_vec()
    }

    #[test]
    fn alpha_is_dropped_not_blended() {
        let bytes = [1, 2, 3, 0, 200, 100, 50, 128];
        assert_eq!(
            decoded(&bytes, 2, ExtendedColorType::Rgba8),
            [1, 2, 3, 200, 100, 50]
        );
        assert_eq!(
            decoded(&[9, 0, 7, 255], 2, ExtendedColorType::La8),
            [9, 9, 9, 7, 7, 7]
        );
    }

    #[test]
    fn grey_is_repeated_in_three_channels() {
        assert_eq!(
            decoded(&[0, 130], 2, ExtendedColorType::L8),
            [0, 0, 0, 130, 130, 130]
        );
    }

    #[test]
    fn sixteen_bit_colour_keeps_the_high_byte_and_grey_is_clipped() {
        let words =
            |words: &[u16]| -> Vec<u8> { words.iter().flat_map(|w| w.to_ne_bytes()).collect() };
        let colour = words(&[0x12ff, 0x00ff, 0xff00]);
        assert_eq!(
            decoded(&colour, 1, ExtendedColorType::Rgb16),
            [0x12, 0, 0xff]
        );
        let grey = words(&[200, 256, 65535]);
        assert_eq!(
            decoded(&grey, 3, ExtendedColorType::L16),
            [200, 200, 200, 255, 255, 255, 255, 255, 255]
        );
        let rgba = words(&[0x12ff, 0x00ff, 0xff00, 7]);
        assert_eq!(
            decoded(&rgba, 1, ExtendedColorType::Rgba16),
            [0x12, 0, 0xff]
        );
    }

    /// Two pixels, palette indices 1 and 0, one bit each; assembled by hand since the encoder has
    /// no palette mode.
    fn palette_png(with_alpha: bool) -> Vec<u8> {
        let mut out = b"\x89PNG\r\n\x1a\n".to_vec();
        let mut chunk = |kind: &[u8; 4], data: &[u8]| {
            out.extend((data.len() as u32).to_be_bytes());
            let mut body = kind.to_vec();
            body.extend(data);
            out.extend(&body);
            out.extend(crc32(&body).to_be_bytes());
        };
        chunk(b"IHDR", &[0, 0, 0, 2, 0, 0, 0, 1, 1, 3, 0, 0, 0]);
        chunk(b"PLTE", &[10, 20, 30, 40, 50, 60]);
        if with_alpha {
            chunk(b"tRNS", &[0, 128]);
        }
        // zlib: one stored block of filter byte 0 and the bits 10
        let raw = [0u8, 0b1000_0000];
        let mut zlib = vec![0x78, 0x01, 0x01, 2, 0, 0xfd, 0xff];
        zlib.extend(raw);
        let (a, b) = raw.iter().fold((1u32, 0u32), |(a, b), &x| {
            (a + u32::from(x), b + a + u32::from(x))
        });
        zlib.extend(((b << 16) | a).to_be_bytes());
        chunk(b"IDAT", &zlib);
        chunk(b"IEND", &[]);
        out
    }

    fn crc32(bytes: &[u8]) -> u32 {
        !bytes.iter().fold(!0u32, |crc, &byte| {
            (0..8).fold(crc ^ u32::from(byte), |c, _| {
                (c >> 1) ^ (0xedb8_8320 & (c & 1).wrapping_neg())
            })
        })
    }

    #[test]
    fn palettes_are_expanded_and_their_alpha_dropped() {
        let dir = tempfile::tempdir().unwrap();
        for with_alpha in [false, true] {
            let path = dir.path().join("palette.png");
            std::fs::write(&path, palette_png(with_alpha)).unwrap();
            assert_eq!(decode(&path).unwrap().pixels(), [40, 50, 60, 10, 20, 30]);
            assert_eq!(dimensions(&path).unwrap(), (2, 1));
        }
    }

    #[test]
    fn jpeg_webp_and_bmp_are_read_whatever_their_name_says() {
        let dir = tempfile::tempdir().unwrap();
        let picture = image::RgbImage::from_pixel(9, 5, image::Rgb([120, 120, 120]));
        for format in [ImageFormat::Jpeg, ImageFormat::WebP, ImageFormat::Bmp] {
            let path = dir.path().join("picture.png");
            picture.save_with_format(&path, format).unwrap();
            assert_eq!(dimensions(&path).unwrap(), (9, 5));
            let read = decode(&path).unwrap();
            assert!(
                read.pixels().iter().all(|v| v.abs_diff(120) <= 2),
                "{format:?}"
            );
        }
    }

    #[test]
    fn each_way_a_file_can_be_wrong_has_its_error() {
        let dir = tempfile::tempdir().unwrap();
        let missing = dir.path().join("none.png");
        assert!(matches!(decode(&missing), Err(ImageError::Missing { .. })));
        assert!(matches!(
            dimensions(&missing),
            Err(ImageError::Missing { .. })
        ));
        assert!(matches!(
            decode(dir.path()),
            Err(ImageError::Unreadable { .. })
        ));
        let text = dir.path().join("text.png");
        std::fs::write(&text, "no picture").unwrap();
        assert!(matches!(
            decode(&text),
            Err(ImageError::UnknownFormat { .. })
        ));
        std::fs::write(&text, "").unwrap();
        assert!(matches!(
            decode(&text),
            Err(ImageError::UnknownFormat { .. })
        ));
    }

    #[test]
    fn a_cut_or_flipped_file_is_corrupt() {
        let dir = tempfile::tempdir().unwrap();
        let mut state = 1u32;
        let picture = image::RgbImage::from_fn(64, 64, |_, _| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            image::Rgb([(state >> 24) as u8, (state >> 16) as u8, 7])
        });
        let path = dir.path().join("cut");
        for format in [
            ImageFormat::Png,
            ImageFormat::Jpeg,
            ImageFormat::WebP,
            ImageFormat::Bmp,
        ] {
            picture.save_with_format(&path, format).unwrap();
            let whole = std::fs::read(&path).unwrap();
            assert!(decode(&path).is_ok());
            std::fs::write(&path, &whole[..whole.len() / 2]).unwrap();
            let result = decode(&path);
            assert!(
                matches!(result, Err(ImageError::Corrupt { .. })),
                "{format:?}: {result:?}"
            );
        }
        picture.save_with_format(&path, ImageFormat::Png).unwrap();
        let mut flipped = std::fs::read(&path).unwrap();
        let middle = flipped.len() / 2;
        flipped[middle] ^= 1;
        std::fs::write(&path, flipped).unwrap();
        assert!(matches!(decode(&path), Err(ImageError::Corrupt { .. })));
    }

    #[test]
    fn a_bomb_is_refused_by_its_header() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("bomb.png");
        let mut bytes = palette_png(false);
        bytes[16..20].copy_from_slice(&60_000u32.to_be_bytes());
        bytes[20..24].copy_from_slice(&60_000u32.to_be_bytes());
        let crc = crc32(&bytes[12..29]);
        bytes[29..33].copy_from_slice(&crc.to_be_bytes());
        std::fs::write(&path, bytes).unwrap();
        assert!(matches!(
            dimensions(&path),
            Err(ImageError::TooLarge { width: 60_000, .. })
        ));
        assert!(matches!(
            decode(&path),
            Err(ImageError::TooLarge { width: 60_000, .. })
        ));
    }
}

//! Image decoding and resizing, equal to Pillow byte for byte.
//!
//! | module | content |
//! |---|---|
//! | [`mod@decode`] | a file to 8-bit RGB as Pillow's `convert("RGB")` gives it, or its size only |
//! | [`mod@resize`] | anti-aliased bicubic in 8-bit fixed point |
//! | [`mod@source`] | lookup of a data file's images on disk |
//! | [`mod@budget`] | bytes that decoders of one process may hold at a time |

pub mod budget;
pub mod decode;
pub mod resize;
pub mod source;

pub use budget::{DecodeBudget, Decoded};
pub use decode::{Header, ImageError, Losses, MAX_PIXELS, decode, decode_bytes, dimensions};
pub use resize::resize;
pub use source::{ImageFolder, ImageSource, is_inside, short_path, stored_bytes};

use std::fmt;

/// An 8-bit RGB image: `height` rows of `width` pixels of 3 bytes.
#[derive(Clone, PartialEq, Eq)]
pub struct RgbImage {
    width: usize,
    height: usize,
    pixels: Vec<u8>,
}

impl RgbImage {
    /// Wraps `pixels`, `[height, width, 3]` row-major.
    ///
    /// # Panics
    /// If either side is zero or the length is not `height * width * 3`.
    pub fn new(width: usize, height: usize, pixels: Vec<u8>) -> Self {
        assert!(width > 0 && height > 0, "a picture has at least one pixel");
        assert_eq!(pixels.len(), width * height * 3, "three bytes per pixel");
        Self {
            width,
            height,
            pixels,
        }
    }

    /// Width in pixels.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Height in pixels.
    pub fn height(&self) -> usize {
        self.height
    }

    /// All bytes of the image, `[height, width, 3]` row-major, in the order red, green, blue.
    pub fn pixels(&self) -> &[u8] {
        &self.pixels
    }

    /// Bytes of row `y`, `[width, 3]`.
    ///
    /// # Panics
    /// If `y` is not below the height.
    pub fn row(&self, y: usize) -> &[u8] {
        &self.pixels[y * self.width * 3..][..self.width * 3]
    }
}

impl fmt::Debug for RgbImage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RgbImage({} x {})", self.width, self.height)
    }
}

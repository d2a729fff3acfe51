//! Conversion of decoded pixels to 8-bit RGB by Pillow's rules.
//!
//! | stored | result |
//! |---|---|
//! | alpha, transparent color | dropped, not blended |
//! | palette, gray of 1, 2, 4 or 8 bits | looked up; gray three times |
//! | 16-bit color, 16-bit gray with alpha | its high byte |
//! | 16-bit gray | *clipped* at 255, also if one gray is declared transparent |
//! | 5 or 6 bits of a 16-bit BMP | spread over 0 to 255 and truncated |

use image::DynamicImage;

/// Levels above zero of red, green and blue in a 16-bit BMP.
type Levels = [u32; 3];

/// RGB bytes of `image`, which was decoded from the file content `file`.
pub(super) fn to_rgb8(image: DynamicImage, file: &[u8]) -> Vec<u8> {
    match image {
        DynamicImage::ImageRgb8(p) => {
            let mut bytes = p.into_raw();
            if let Some(levels) = bmp_levels(file) {
                spread_again(&mut bytes, levels);
            }
            bytes
        }
        DynamicImage::ImageLuma8(p) => p.as_raw().iter().flat_map(|&v| [v; 3]).collect(),
        DynamicImage::ImageLumaA8(p) => grey_of_pairs(p.as_raw(), |v| v),
        DynamicImage::ImageRgba8(p) => drop_alpha(p.as_raw(), |v| v),
        DynamicImage::ImageLuma16(p) => p.as_raw().iter().flat_map(|&v| [clip(v); 3]).collect(),
        // the decoder makes alpha of a transparent grey
        DynamicImage::ImageLumaA16(p) if is_png_grey16(file) => grey_of_pairs(p.as_raw(), clip),
        DynamicImage::ImageLumaA16(p) => grey_of_pairs(p.as_raw(), high_byte),
        DynamicImage::ImageRgb16(p) => p.as_raw().iter().map(|&v| high_byte(v)).collect(),
        DynamicImage::ImageRgba16(p) => drop_alpha(p.as_raw(), high_byte),
        other => other.to_rgb8().into_raw(),
    }
}

fn grey_of_pairs<T: Copy>(pairs: &[T], to_byte: impl Fn(T) -> u8) -> Vec<u8> {
    let pairs = pairs.as_chunks::<2>().0.iter();
    pairs.flat_map(|&[grey, _]| [to_byte(grey); 3]).collect()
}

fn drop_alpha<T: Copy>(rgba: &[T], to_byte: impl Fn(T) -> u8) -> Vec<u8> {
    let pixels = rgba.as_chunks::<4>().0.iter();
    pixels
        .flat_map(|&[r, g, b, _]| [r, g, b].map(&to_byte))
        .collect()
}

fn high_byte(v: u16) -> u8 {
    (v >> 8) as u8
}

fn clip(v: u16) -> u8 {
    v.min(255) as u8
}

/// Whether the file is a PNG whose header says grey without alpha, 16 bits.
pub(super) fn is_png_grey16(file: &[u8]) -> bool {
    file.starts_with(b"\x89PNG") && file.get(24..26) == Some(&[16, 0])
}

/// The levels of a BMP with 16 bits per pixel.
fn bmp_levels(file: &[u8]) -> Option<Levels> {
    const BIT_FIELDS: u32 = 3;
    const GREEN_OF_SIX: u32 = 0x7e0;
    let number = |at: usize| Some(u32::from_le_bytes(*file.get(at..)?.first_chunk()?));
    if !file.starts_with(b"BM") || file.get(28..30)? != [16, 0] {
        return None;
    }
    let six = number(30)? == BIT_FIELDS && number(58)? == GREEN_OF_SIX;
    Some([31, if six { 63 } else { 31 }, 31])
}

/// Replaces the rounding of the decoder by truncation.
fn spread_again(rgb: &mut [u8], levels: Levels) {
    for pixel in rgb.as_chunks_mut::<3>().0 {
        for (byte, top) in pixel.iter_mut().zip(levels) {
            let level = (u32::from(*byte) * top + 127) / 255;
            *byte = (level * 255 / top) as u8;
        }
    }
}

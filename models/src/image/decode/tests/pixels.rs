use image::{DynamicImage, ImageBuffer};

use super::files::{Bmp, Png, encode, palette_png, with_orientation};
use super::*;

fn png(bits: u8, colour_type: u8, width: u32, rows: &[u8]) -> Vec<u8> {
    png_with(bits, colour_type, width, rows, &[])
}

fn png_with(
    bits: u8,
    colour_type: u8,
    width: u32,
    rows: &[u8],
    chunks: &[(&[u8; 4], &[u8])],
) -> Vec<u8> {
    let png = Png {
        width,
        height: 1,
        bits,
        colour_type,
        chunks,
        rows,
    };
    decoded(&png.file())
}

fn words(words: &[u16]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}

/// Each of `values` three times.
fn grey<const N: usize>(values: [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|&value| [value; 3]).collect()
}

#[test]
fn alpha_is_dropped_not_blended() {
    let rgba = [1, 2, 3, 0, 200, 100, 50, 128];
    assert_eq!(png(8, 6, 2, &rgba), [1, 2, 3, 200, 100, 50]);
    assert_eq!(png(8, 4, 2, &[9, 0, 7, 255]), grey([9, 7]));
    let image = ImageBuffer::from_raw(2, 1, rgba.to_vec()).map(DynamicImage::ImageRgba8);
    let webp = encode(&image.unwrap(), ImageFormat::WebP);
    assert_eq!(decoded(&webp), [1, 2, 3, 200, 100, 50]);
}

#[test]
fn a_transparent_color_stays_an_ordinary_color() {
    let key = [(b"tRNS", &[0, 1, 0, 2, 0, 3][..])];
    assert_eq!(
        png_with(8, 2, 2, &[1, 2, 3, 4, 5, 6], &key),
        [1, 2, 3, 4, 5, 6]
    );
    assert_eq!(
        png_with(8, 0, 2, &[7, 8], &[(b"tRNS", &[0, 7])]),
        grey([7, 8])
    );
}

#[test]
fn grays_of_few_bits_are_scaled_to_the_full_range() {
    assert_eq!(png(1, 0, 3, &[0b1010_0000]), grey([255, 0, 255]));
    assert_eq!(png(2, 0, 4, &[0b0001_1011]), grey([0, 85, 170, 255]));
    assert_eq!(png(4, 0, 2, &[0x1e]), grey([17, 238]));
    assert_eq!(png(8, 0, 2, &[0, 130]), grey([0, 130]));
}

#[test]
fn sixteen_bit_color_keeps_the_high_byte_and_gray_is_clipped() {
    assert_eq!(
        png(16, 2, 1, &words(&[0x12ff, 0x00ff, 0xff00])),
        [0x12, 0, 0xff]
    );
    assert_eq!(
        png(16, 6, 1, &words(&[0x12ff, 0x00ff, 0xff00, 7])),
        [0x12, 0, 0xff]
    );
    assert_eq!(png(16, 4, 1, &words(&[0x12ff, 7])), grey([0x12]));
    let greys = words(&[200, 256, 65535]);
    assert_eq!(png(16, 0, 3, &greys), grey([200, 255, 255]));
    let transparent = png_with(16, 0, 3, &greys, &[(b"tRNS", &[1, 0])]);
    assert_eq!(transparent, grey([200, 255, 255]));
}

#[test]
fn palettes_are_expanded_and_their_alpha_dropped() {
    for chunks in [&[][..], &[(b"tRNS", &[0, 128][..])]] {
        assert_eq!(decoded(&palette_png(chunks)), [40, 50, 60, 10, 20, 30]);
    }
}

#[test]
fn bmp_pixels_of_sixteen_and_thirty_two_bits_are_expanded() {
    let bmp = |bits, masks: &[u32], rows: &[u8]| {
        let bmp = Bmp {
            width: 1,
            height: 1,
            bits,
            masks,
            rows,
        };
        decoded(&bmp.file())
    };
    // levels 3, 7 and 19: 24.7, 57.6 and 156.3 of 255, truncated
    let five: u16 = 3 << 10 | 7 << 5 | 19;
    let [low, high] = five.to_le_bytes();
    assert_eq!(bmp(16, &[], &[low, high, 0, 0]), [24, 57, 156]);
    assert_eq!(
        bmp(16, &[0x7c00, 0x3e0, 0x1f], &[low, high, 0, 0]),
        [24, 57, 156]
    );
    // green of six bits, level 11: 44.5
    let six: u16 = 3 << 11 | 11 << 5 | 19;
    let [low, high] = six.to_le_bytes();
    assert_eq!(
        bmp(16, &[0xf800, 0x7e0, 0x1f], &[low, high, 0, 0]),
        [24, 44, 156]
    );
    assert_eq!(bmp(32, &[], &[3, 2, 1, 99]), [1, 2, 3]);
    assert_eq!(bmp(24, &[], &[3, 2, 1, 0]), [1, 2, 3]);
}

#[test]
fn every_level_of_a_sixteen_bit_bmp_is_truncated() {
    let rows: Vec<u8> = (0..32u16).flat_map(u16::to_le_bytes).collect();
    let bmp = Bmp {
        width: 32,
        height: 1,
        bits: 16,
        masks: &[],
        rows: &rows,
    };
    let blue: Vec<u8> = decoded(&bmp.file())
        .into_iter()
        .skip(2)
        .step_by(3)
        .collect();
    let expected: Vec<u8> = (0..32u16).map(|level| (level * 255 / 31) as u8).collect();
    assert_eq!(blue, expected);
}

#[test]
fn exif_orientation_does_not_rotate_an_image() {
    let image = image::RgbImage::from_fn(16, 8, |x, y| {
        image::Rgb([(x * 16) as u8, (y * 30) as u8, 90])
    });
    let jpeg = encode(&DynamicImage::ImageRgb8(image), ImageFormat::Jpeg);
    let upright = decode_file(&jpeg).unwrap();
    assert_eq!((upright.width(), upright.height()), (16, 8));
    for orientation in 1..=8 {
        assert_eq!(
            decode_file(&with_orientation(&jpeg, orientation)).unwrap(),
            upright
        );
    }
}

#[test]
fn jpeg_webp_and_bmp_are_recognized_by_content() {
    let dir = tempfile::tempdir().unwrap();
    let image = image::RgbImage::from_pixel(9, 5, image::Rgb([120, 120, 120]));
    for format in [ImageFormat::Jpeg, ImageFormat::WebP, ImageFormat::Bmp] {
        let path = dir.path().join("picture.png");
        image.save_with_format(&path, format).unwrap();
        assert_eq!(dimensions(&path).unwrap(), (9, 5));
        let read = decode(&path).unwrap();
        assert!(
            read.pixels().iter().all(|v| v.abs_diff(120) <= 2),
            "{format:?}"
        );
    }
}

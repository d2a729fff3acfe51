use image::DynamicImage;
use proptest::prelude::*;
use proptest::sample::Index;

use super::files::{Bmp, Png, encode, extended_webp, palette_png};
use super::*;

const FORMATS: [ImageFormat; 4] = [
    ImageFormat::Png,
    ImageFormat::Jpeg,
    ImageFormat::WebP,
    ImageFormat::Bmp,
];

/// An image that compresses badly.
fn noise(side: u32) -> DynamicImage {
    let mut state = 1u32;
    DynamicImage::ImageRgb8(image::RgbImage::from_fn(side, side, |_, _| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        image::Rgb([(state >> 24) as u8, (state >> 16) as u8, 7])
    }))
}

#[test]
fn each_kind_of_damage_has_its_error() {
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
    for content in [&b"no picture"[..], b""] {
        let result = decode_file(content);
        assert!(matches!(result, Err(ImageError::UnknownFormat { .. })));
    }
    let without_frame = decode_file(b"GIF89a\x01\0\x01\0\0\0\0;");
    assert!(matches!(without_frame, Err(ImageError::Corrupt { .. })));
}

#[test]
fn a_truncated_or_bit_flipped_file_is_corrupt() {
    for format in FORMATS {
        let whole = encode(&noise(64), format);
        assert!(decode_file(&whole).is_ok());
        let result = decode_file(&whole[..whole.len() / 2]);
        assert!(
            matches!(result, Err(ImageError::Corrupt { .. })),
            "{format:?}: {result:?}"
        );
    }
    let mut flipped = encode(&noise(64), ImageFormat::Png);
    let middle = flipped.len() / 2;
    flipped[middle] ^= 1;
    let result = decode_file(&flipped);
    assert!(matches!(result, Err(ImageError::Corrupt { .. })));
}

/// Small files whose headers state many pixels.
fn bombs() -> Vec<(&'static str, Vec<u8>)> {
    let (width, height) = (60_000, 60_000);
    let png = Png {
        width,
        height,
        bits: 8,
        colour_type: 2,
        chunks: &[],
        rows: &[],
    };
    let bmp = |bits, height| {
        Bmp {
            width,
            height,
            bits,
            masks: &[],
            rows: &[0; 64],
        }
        .file()
    };
    let mut jpeg = encode(&noise(8), ImageFormat::Jpeg);
    let frame = jpeg
        .windows(2)
        .position(|pair| pair == [0xff, 0xc0])
        .unwrap();
    jpeg[frame + 5..frame + 9].fill(0xea);
    let mut webp = encode(&noise(8), ImageFormat::WebP);
    assert_eq!((&webp[12..16], webp[20]), (&b"VP8L"[..], 0x2f));
    let extended = extended_webp((width, height), &webp);
    // the largest sides of the format, less one each, in 14 bits
    let sides = 16_382u32 | 16_382 << 14;
    let flags = u32::from(webp[24] & 0xf0) << 24;
    webp[21..25].copy_from_slice(&(sides | flags).to_le_bytes());
    vec![
        ("PNG", png.file()),
        ("BMP of 24 bits", bmp(24, height)),
        ("BMP of 1 bit", bmp(1, height)),
        ("BMP from the top", bmp(24, height.wrapping_neg())),
        ("JPEG", jpeg),
        ("WebP", webp),
        ("WebP with a canvas", extended),
    ]
}

#[test]
fn decompression_bombs_are_refused_by_their_headers() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bomb");
    for (name, file) in bombs() {
        std::fs::write(&path, &file).unwrap();
        let of_header = dimensions(&path).unwrap_err();
        assert!(
            matches!(of_header, ImageError::TooLarge { .. }),
            "{name}: {of_header}"
        );
        let error = decode(&path).unwrap_err();
        assert!(
            matches!(error, ImageError::TooLarge { .. }),
            "{name}: {error}"
        );
    }
}

#[test]
fn sizes_beyond_the_file_are_refused_before_allocation() {
    let (width, height) = (13_000, 13_000);
    let png = Png {
        width,
        height,
        bits: 1,
        colour_type: 0,
        chunks: &[],
        rows: &[0; 64],
    };
    let bmp = Bmp {
        width,
        height,
        bits: 24,
        masks: &[],
        rows: &[0; 64],
    };
    let mut jpeg = encode(&noise(8), ImageFormat::Jpeg);
    let frame = jpeg.windows(2).position(|pair| pair == [0xff, 0xc0]);
    let frame = frame.unwrap();
    jpeg[frame + 5..frame + 9].copy_from_slice(&[0x32, 0xc8, 0x32, 0xc8]);
    for file in [png.file(), bmp.file(), jpeg] {
        let result = decode_file(&file);
        assert!(
            matches!(&result, Err(ImageError::Corrupt { reason, .. }) if reason.contains("cannot hold")),
            "{result:?}"
        );
    }
    // What deflate makes the smallest is still read.
    let even = DynamicImage::ImageLuma8(image::GrayImage::new(3000, 3000));
    assert!(decode_file(&encode(&even, ImageFormat::Png)).is_ok());
}

#[test]
fn a_webp_frame_must_have_the_size_of_its_canvas() {
    let simple = encode(&noise(8), ImageFormat::WebP);
    assert_eq!(
        decode_file(&extended_webp((8, 8), &simple))
            .unwrap()
            .width(),
        8
    );
    let mut large = simple.clone();
    large[21..24].fill(0xff);
    let result = decode_file(&extended_webp((8, 8), &large));
    assert!(
        matches!(result, Err(ImageError::Corrupt { .. })),
        "{result:?}"
    );
}

#[test]
fn an_image_without_pixels_is_corrupt() {
    let bmp = Bmp {
        width: 0,
        height: 4,
        bits: 24,
        masks: &[],
        rows: &[0; 16],
    };
    assert!(matches!(
        decode_file(&bmp.file()),
        Err(ImageError::Corrupt { .. })
    ));
}

proptest! {
    #[test]
    fn a_damaged_file_is_an_error_or_an_image(
        which in 0usize..6,
        edits in proptest::collection::vec((any::<Index>(), any::<u8>()), 1..6),
        cut in proptest::option::weighted(0.1, any::<Index>()),
    ) {
        let mut file = match which {
            4 => palette_png(&[(b"tRNS", &[0, 128])]),
            5 => extended_webp((8, 8), &encode(&noise(8), ImageFormat::WebP)),
            format => encode(&noise(8), FORMATS[format]),
        };
        for (at, byte) in edits {
            let at = at.index(file.len());
            file[at] = byte;
        }
        if let Some(cut) = cut {
            file.truncate(cut.index(file.len()));
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("picture");
        std::fs::write(&path, &file).unwrap();
        // images that are large but allowed would only make the test slow
        if let Ok((width, height)) = dimensions(&path) && width * height <= 1 << 18 {
            let _image = decode(&path);
        }
    }
}

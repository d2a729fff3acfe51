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

//! GIF and TIFF files: the pixels of Pillow 12's `convert("RGB")`, and other formats refused with a remedy.

use std::fs;
use std::path::{Path, PathBuf};

use models::image::{ImageError, decode, decode_bytes, dimensions};

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/pictures")
}

#[test]
fn gif_and_tiff_files_have_the_pixels_of_pillow() {
    let expected = fs::read_to_string(directory().join("pixels.txt")).unwrap();
    for line in expected.lines() {
        let [name, width, height, pixels] = line.split(' ').collect::<Vec<_>>()[..] else {
            panic!("{line}");
        };
        let path = directory().join(name);
        let image = match (name, decode(&path)) {
            ("palette.tif", Err(ImageError::Unreadable { reason, .. })) => {
                assert!(reason.contains("convert it to PNG"), "{reason}");
                continue;
            }
            (_, image) => image.unwrap_or_else(|error| panic!("{name}: {error}")),
        };
        let size = (width.parse().unwrap(), height.parse().unwrap());
        assert_eq!((image.width(), image.height()), size, "{name}");
        assert_eq!(dimensions(&path).unwrap(), size, "{name}");
        let wanted: Vec<u8> = (0..pixels.len() / 2)
            .map(|i| u8::from_str_radix(&pixels[2 * i..][..2], 16).unwrap())
            .collect();
        // Two roundings of a product of two shares.
        let allowed = if name == "cmyk.tif" { 1 } else { 0 };
        let off = image
            .pixels()
            .iter()
            .zip(&wanted)
            .map(|(a, b)| a.abs_diff(*b))
            .max();
        assert!(
            off <= Some(allowed),
            "{name}: {off:?}\n{:?}\n{wanted:?}",
            image.pixels()
        );
    }
}

#[test]
fn a_gif_under_another_name_is_read() {
    let bytes = fs::read(directory().join("plain.gif")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.jpg");
    fs::write(&path, &bytes).unwrap();
    assert_eq!(decode(&path).unwrap(), decode_bytes(&path, &bytes).unwrap());
    // Every part of it is an error or an image, never a panic.
    for length in 0..bytes.len() {
        drop(decode_bytes(&path, &bytes[..length]));
    }
    let mut larger = bytes;
    larger[6] = 3;
    let error = decode_bytes(&path, &larger).unwrap_err();
    assert!(
        error.to_string().contains("larger than the picture"),
        "{error}"
    );
}

#[test]
fn formats_that_are_not_read_are_named_with_the_remedy() {
    for (start, name) in [
        (&b"\0\0\0\x20ftypavif\0\0\0\0"[..], "AVIF"),
        (b"\0\0\0\x18ftypheic\0\0\0\0", "HEIC"),
        (b"\0\0\0\x18ftypmif1\0\0\0\0", "HEIC"),
        (b"\xff\x0a\0\0", "JPEG XL"),
    ] {
        let error = decode_bytes(Path::new("a.jpg"), start)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains(&format!("is {name}, which is not read")),
            "{error}"
        );
        assert!(error.contains("convert it to PNG or JPEG"), "{error}");
    }
    for (start, remedy) in [
        (
            &b"<!doctype html><title>404</title>"[..],
            "is HTML, which is not read: it is a page",
        ),
        (
            b"version https://git-lfs.github.com/spec/v1",
            "is a git-lfs pointer, which is not read: fetch the file with `git lfs pull`",
        ),
        (
            b"\0\0\0\x20ftypisom",
            "is MP4, which is not read: extract its frames",
        ),
    ] {
        let error = decode_bytes(Path::new("a.jpg"), start).unwrap_err();
        assert!(error.to_string().contains(remedy), "{error}");
    }
    let error = decode_bytes(Path::new("a.jpg"), b"hello").unwrap_err();
    assert!(matches!(error, ImageError::UnknownFormat { .. }));
}

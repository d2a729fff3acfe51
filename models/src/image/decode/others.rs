//! Names of files that are no image that is read, and what to do about them, for messages.

use std::path::Path;

/// Beginnings of files, each with the offset at which it stands.
const KNOWN: [(usize, &[u8], &str); 17] = [
    (4, b"ftypavif", "AVIF"),
    (4, b"ftypavis", "AVIF"),
    (4, b"ftyphei", "HEIC"),
    (4, b"ftyphev", "HEIC"),
    (4, b"ftypmif1", "HEIC"),
    (4, b"ftypmsf1", "HEIC"),
    (4, b"ftyp", "MP4"),
    (0, b"\xff\x0a", "JPEG XL"),
    (4, b"JXL \r\n", "JPEG XL"),
    (4, b"jP  \r\n", "JPEG 2000"),
    (0, b"8BPS", "Photoshop"),
    (0, b"%PDF", "PDF"),
    (0, b"\0\0\x01\0", "ICO"),
    (0, b"<svg", "SVG"),
    (0, b"<!DOCTYPE html", "HTML"),
    (0, b"<html", "HTML"),
    (0, b"version https://git-lfs", LFS),
];
/// Name of the text in place of a large file that was not fetched.
const LFS: &str = "a git-lfs pointer";

/// What a file that begins with `start` is; `None` if that is not known.
pub(super) fn name(start: &[u8]) -> Option<&'static str> {
    let begins = |at: usize, mark: &[u8]| {
        let part = start.get(at..at + mark.len());
        part.is_some_and(|part| part.eq_ignore_ascii_case(mark))
    };
    let known = KNOWN.iter().find(|(at, mark, _)| begins(*at, mark));
    known.map(|(_, _, name)| *name)
}

/// What to do about the file `path` of the format `format`.
pub(super) fn remedy(format: &str, path: &Path) -> String {
    let path = path.display();
    match format {
        LFS => "fetch the file with `git lfs pull`".to_owned(),
        "HTML" => "it is a page of a web server, so fetch the image again".to_owned(),
        "MP4" => format!("extract its frames, for example with `ffmpeg -i {path} %05d.png`"),
        _ => format!(
            "convert it to PNG or JPEG, for example with `magick {path} {path}.png` or Pillow"
        ),
    }
}

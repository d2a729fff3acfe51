use super::*;

mod files;
mod pixels;
mod refusals;

/// Decodes `file` from disk, as users do.
fn decode_file(file: &[u8]) -> Result<RgbImage, ImageError> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("picture");
    std::fs::write(&path, file).unwrap();
    let image = decode(&path);
    if let Ok(image) = &image {
        let sides = (image.width(), image.height());
        assert_eq!(dimensions(&path).unwrap(), sides);
    }
    image
}

/// RGB bytes of the image in `file`.
fn decoded(file: &[u8]) -> Vec<u8> {
    decode_file(file).unwrap().pixels().to_vec()
}

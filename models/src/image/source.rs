//! Lookup of a data file's images, on disk or in the data file itself.

use std::collections::HashMap;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use super::decode::{decode_upright, header, read};
use super::{DecodeBudget, Decoded, Header, ImageError, Losses, decode_bytes};
use crate::base64;
use crate::parquet::{self, Address};

/// Scheme of an image that is in the data file itself.
const DATA: &str = "data:";
/// Most bytes of such an image that messages show.
const SHOWN_BYTES: usize = 40;

/// Source of the images of a data set, looked up by the paths that samples state.
pub trait ImageSource: Send + Sync {
    /// Width and height, in pixels, of the image that `path` names, without decoding it.
    ///
    /// # Errors
    /// [`ImageError`] naming the file.
    fn dimensions(&self, path: &Path) -> Result<(usize, usize), ImageError>;

    /// Decodes the image that `path` names.
    ///
    /// # Errors
    /// [`ImageError`] naming the file.
    fn load(&self, path: &Path) -> Result<Decoded, ImageError>;
}

/// Headers of images by their paths in samples, or why an image cannot be used.
pub type Headers = HashMap<PathBuf, Result<Header, ImageError>>;

/// Images on disk: absolute paths, and relative ones that stay inside one directory. A path `data:…;base64,…` is the
/// file itself.
#[derive(Clone, Debug)]
pub struct ImageFolder {
    root: PathBuf,
    allow_outside: bool,
    upright: bool,
    headers: Arc<Headers>,
    budget: Arc<DecodeBudget>,
}

impl ImageFolder {
    /// Source of images whose relative paths start at `root` and may not leave it through `..` or a symbolic
    /// link.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self {
            root: root.into(),
            allow_outside: false,
            upright: false,
            headers: Arc::default(),
            budget: DecodeBudget::of_process(),
        }
    }

    /// Source of images whose relative paths start at the directory that holds the data file `data`.
    pub fn beside(data: &Path) -> Self {
        let parent = data
            .parent()
            .filter(|parent| !parent.as_os_str().is_empty());
        Self::new(parent.unwrap_or(Path::new(".")))
    }

    /// Sets whether relative paths may leave the root directory; by default they may not.
    #[must_use]
    pub fn allow_outside(mut self, allow: bool) -> Self {
        self.allow_outside = allow;
        self
    }

    /// Turns images as their EXIF orientation says when `upright` is true.
    #[must_use]
    pub fn upright(mut self, upright: bool) -> Self {
        self.upright = upright;
        self
    }

    /// Sets the headers of images that were read before; the files of other images are asked again.
    #[must_use]
    pub fn with_headers(mut self, headers: Headers) -> Self {
        self.headers = Arc::new(headers);
        self
    }

    /// Sets the budget that decoding takes its bytes from, in place of the process's own.
    #[must_use]
    pub fn with_budget(mut self, budget: Arc<DecodeBudget>) -> Self {
        self.budget = budget;
        self
    }

    /// Header of the image that `path` names.
    ///
    /// # Errors
    /// [`ImageError`] naming the file.
    pub fn header(&self, path: &Path) -> Result<Header, ImageError> {
        if let Some(known) = self.headers.get(path) {
            return known.clone();
        }
        if let Some(address) = Address::of(path) {
            let held = parquet::held_bytes(&address);
            let held = held.map_err(|reason| unread(&address, reason))?;
            let _reservation = self.budget.reserve(held);
            let (name, bytes) = stored(&address)?;
            return Ok(Header::of(&name, &bytes)?.beside(held));
        }
        match embedded(path)? {
            Some((name, bytes)) => Header::of(&name, &bytes),
            None => header(&self.resolve(path)?),
        }
    }

    /// What 8-bit RGB as published loses of the image that `path` names.
    ///
    /// # Errors
    /// [`ImageError`] naming the file.
    pub fn losses(&self, path: &Path) -> Result<Losses, ImageError> {
        let header = self.header(path)?;
        Ok(Losses {
            gray16: header.gray16,
            turned: header.is_turned() && !self.upright,
        })
    }

    /// Most bytes that decoding the image with this header takes from the budget.
    #[must_use]
    pub fn decode_bytes(&self, header: &Header) -> u64 {
        header.decode_bytes(self.upright)
    }

    /// The file of the image that a sample names as `path`; `None` for an image inside the data file, and if no file
    /// can be found.
    #[must_use]
    pub fn file(&self, path: &Path) -> Option<PathBuf> {
        match is_inside(path) {
            true => None,
            false => self.resolve(path).ok(),
        }
    }

    /// Path on disk of the image that a sample names as `path`.
    ///
    /// # Errors
    /// [`ImageError::OutsideDirectory`] for a relative path that leaves the directory,
    /// [`ImageError::Missing`] or [`ImageError::Unreadable`] if the file cannot be found.
    pub fn resolve(&self, path: &Path) -> Result<PathBuf, ImageError> {
        let joined = self.root.join(path);
        if path.is_absolute() || self.allow_outside {
            return Ok(joined);
        }
        // by its spelling first, so that a missing file outside is not reported as missing
        if !stays_inside(path) {
            return Err(self.outside(path));
        }
        let real = canonical(&joined)?;
        if real.starts_with(canonical(&self.root)?) {
            Ok(real)
        } else {
            Err(self.outside(path))
        }
    }

    fn outside(&self, path: &Path) -> ImageError {
        ImageError::OutsideDirectory {
            path: path.to_owned(),
            root: self.root.clone(),
        }
    }
}

impl ImageSource for ImageFolder {
    fn dimensions(&self, path: &Path) -> Result<(usize, usize), ImageError> {
        Ok(self.header(path)?.size(self.upright))
    }

    fn load(&self, path: &Path) -> Result<Decoded, ImageError> {
        let header = self.header(path)?;
        let mut reservation = self.budget.reserve(self.decode_bytes(&header));
        let (name, bytes) = match embedded(path)? {
            Some(embedded) => embedded,
            None => {
                let file = self.resolve(path)?;
                let bytes = read(&file)?;
                (file, bytes)
            }
        };
        let image = match self.upright {
            true => decode_upright(&name, &bytes),
            false => decode_bytes(&name, &bytes),
        }?;
        drop(bytes);
        reservation.shrink(header.resize_bytes());
        Ok(Decoded::new(image, reservation))
    }
}

/// The path as messages show it: an image in the data file is cut to its first characters.
#[must_use]
pub fn short_path(path: &Path) -> PathBuf {
    if let Some(address) = Address::of(path) {
        return address.shown();
    }
    let text = path.to_string_lossy();
    match text.char_indices().nth(SHOWN_BYTES) {
        Some((end, _)) if text.starts_with(DATA) => format!("{}…", &text[..end]).into(),
        _ => path.to_owned(),
    }
}

/// Whether the image that a sample names as `path` is in a data file, not a file of its own.
#[must_use]
pub fn is_inside(path: &Path) -> bool {
    let begins = path.to_str().is_some_and(|path| path.starts_with(DATA));
    begins || Address::of(path).is_some()
}

/// The content of the image `path` in a Parquet file; `None` for other images, and if it cannot be read.
#[must_use]
pub fn stored_bytes(path: &Path) -> Option<Vec<u8>> {
    parquet::content(&Address::of(path)?).ok()
}

/// The name in messages and the content of an image in a Parquet file.
fn stored(address: &Address) -> Result<(PathBuf, Vec<u8>), ImageError> {
    match parquet::content(address) {
        Ok(bytes) => Ok((address.shown(), bytes)),
        Err(reason) => Err(unread(address, reason)),
    }
}

fn unread(address: &Address, reason: String) -> ImageError {
    ImageError::Unreadable {
        path: address.shown(),
        reason,
    }
}

/// The name in messages and the content of an image that a data file holds; `None` if `path` is that of a file.
///
/// # Errors
/// [`ImageError`] if the content cannot be read.
fn embedded(path: &Path) -> Result<Option<(PathBuf, Vec<u8>)>, ImageError> {
    if let Some(address) = Address::of(path) {
        return stored(&address).map(Some);
    }
    let Some(uri) = path.to_str().and_then(|path| path.strip_prefix(DATA)) else {
        return Ok(None);
    };
    let name = short_path(path);
    let content = uri.split_once(";base64,").map(|(_, text)| {
        let lines = text.split_ascii_whitespace();
        lines.collect::<String>()
    });
    match content.and_then(|text| base64::decode(text.as_bytes())) {
        Some(bytes) => Ok(Some((name, bytes))),
        None => Err(ImageError::Corrupt {
            path: name,
            reason: "it is no base64 text with padding".to_owned(),
        }),
    }
}

/// Whether `path` never leaves its start through `..`.
fn stays_inside(path: &Path) -> bool {
    let mut depth = 0usize;
    path.components().all(|component| match component {
        Component::Normal(_) => {
            depth += 1;
            true
        }
        Component::ParentDir if depth > 0 => {
            depth -= 1;
            true
        }
        Component::CurDir => true,
        _ => false,
    })
}

fn canonical(path: &Path) -> Result<PathBuf, ImageError> {
    path.canonicalize().map_err(|error| {
        let path = path.to_owned();
        if error.kind() == std::io::ErrorKind::NotFound {
            ImageError::Missing { path }
        } else {
            ImageError::Unreadable {
                path,
                reason: error.to_string(),
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn directory() -> (tempfile::TempDir, ImageFolder) {
        let dir = tempfile::tempdir().unwrap();
        let data = dir.path().join("data");
        std::fs::create_dir_all(data.join("sub")).unwrap();
        for file in ["secret.png", "data/a.png", "data/sub/b.png"] {
            std::fs::write(dir.path().join(file), "").unwrap();
        }
        let source = ImageFolder::beside(&data.join("train.json"));
        (dir, source)
    }

    #[test]
    fn paths_inside_the_directory_and_absolute_paths_are_found() {
        let (dir, source) = directory();
        for path in ["a.png", "./sub/b.png", "sub/../a.png"] {
            assert!(source.resolve(Path::new(path)).unwrap().is_file(), "{path}");
        }
        assert!(
            source
                .resolve(&dir.path().join("secret.png"))
                .unwrap()
                .is_file()
        );
    }

    #[test]
    fn paths_outside_the_directory_are_refused_unless_allowed() {
        let (dir, source) = directory();
        std::os::unix::fs::symlink("../secret.png", dir.path().join("data/link.png")).unwrap();
        for path in [
            "../secret.png",
            "sub/../../secret.png",
            "../none.png",
            "link.png",
        ] {
            let result = source.resolve(Path::new(path));
            assert!(
                matches!(result, Err(ImageError::OutsideDirectory { .. })),
                "{path}: {result:?}"
            );
        }
        let open = source.allow_outside(true);
        assert!(open.resolve(Path::new("../secret.png")).unwrap().is_file());
    }

    #[test]
    fn an_image_in_the_data_file_is_decoded() {
        let (_dir, source) = directory();
        const PIXEL: &str = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGPgOiEHAAHQAPEkXJH0AAAAAElFTkSuQmCC";
        for kind in ["image/png", ""] {
            let path = PathBuf::from(format!("data:{kind};base64,{PIXEL}"));
            assert_eq!(source.dimensions(&path).unwrap(), (1, 1));
            assert_eq!(source.load(&path).unwrap().pixels().len(), 3);
            assert!(short_path(&path).as_os_str().len() < 50);
        }
        for text in [
            "data:image/png,abc",
            "data:;base64,QQ=",
            "data:;base64,QUJD",
        ] {
            let error = source.load(Path::new(text)).unwrap_err();
            assert!(error.to_string().contains("data:"), "{error}");
        }
    }

    /// A PNG of 2 x 1 pixels, red and green, with the EXIF orientation 6: it is shown turned by 90 degrees.
    fn turned() -> Vec<u8> {
        let exif = b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0";
        let mut bytes = Vec::new();
        let mut encoder = image::codecs::png::PngEncoder::new(&mut bytes);
        image::ImageEncoder::set_exif_metadata(&mut encoder, exif.to_vec()).unwrap();
        let pixels = [255, 0, 0, 0, 255, 0];
        let kind = image::ExtendedColorType::Rgb8;
        image::ImageEncoder::write_image(encoder, &pixels, 2, 1, kind).unwrap();
        bytes
    }

    #[test]
    fn an_orientation_is_followed_on_request_and_named_otherwise() {
        let (dir, source) = directory();
        std::fs::write(dir.path().join("data/turned.png"), turned()).unwrap();
        let path = Path::new("turned.png");
        assert!(source.losses(path).unwrap().turned);
        assert_eq!(source.dimensions(path).unwrap(), (2, 1));
        let stored = source.load(path).unwrap();
        assert_eq!(stored.pixels(), [255, 0, 0, 0, 255, 0]);
        let upright = source.upright(true);
        assert_eq!(upright.losses(path).unwrap(), Losses::default());
        assert_eq!(upright.dimensions(path).unwrap(), (1, 2));
        let shown = upright.load(path).unwrap();
        assert_eq!((shown.width(), shown.height()), (1, 2));
        assert_eq!(shown.pixels(), stored.pixels());
    }

    #[test]
    fn gray_of_16_bits_is_named() {
        let (dir, source) = directory();
        let file = dir.path().join("data/gray.png");
        let gray = image::ImageBuffer::<image::Luma<u16>, _>::from_pixel(2, 2, image::Luma([4000]));
        image::DynamicImage::ImageLuma16(gray).save(&file).unwrap();
        assert!(source.losses(Path::new("gray.png")).unwrap().gray16);
        let rgb = image::DynamicImage::new_rgb8(2, 2);
        rgb.save(&file).unwrap();
        assert_eq!(
            source.losses(Path::new("gray.png")).unwrap(),
            Losses::default()
        );
    }

    #[test]
    fn known_headers_are_not_read_again() {
        let (_dir, source) = directory();
        let pixel = image::DynamicImage::new_rgb8(7, 5);
        pixel.save(source.root.join("a.png")).unwrap();
        let path = PathBuf::from("a.png");
        let header = source.header(&path).unwrap();
        std::fs::remove_file(source.root.join("a.png")).unwrap();
        let missing = ImageError::Missing { path: "b".into() };
        let headers = [(path.clone(), Ok(header)), ("b.png".into(), Err(missing))];
        let source = source.with_headers(headers.into());
        assert_eq!(source.dimensions(&path).unwrap(), (7, 5));
        assert!(source.dimensions(Path::new("b.png")).is_err());
        assert!(source.load(&path).is_err(), "its pixels are in the file");
    }

    #[test]
    fn an_image_takes_its_bytes_of_the_budget_until_it_is_dropped() {
        let (_dir, source) = directory();
        image::DynamicImage::new_rgb8(300, 200)
            .save(source.root.join("a.png"))
            .unwrap();
        let budget = Arc::new(DecodeBudget::new(1 << 30));
        let header = source.header(Path::new("a.png")).unwrap();
        let source = source.with_budget(Arc::clone(&budget));
        let image = source.load(Path::new("a.png")).unwrap();
        assert_eq!(budget.reserved_bytes(), header.resize_bytes());
        drop(image);
        assert_eq!(budget.reserved_bytes(), 0);
        assert!(source.load(Path::new("sub/b.png")).is_err());
        assert_eq!(budget.reserved_bytes(), 0);
    }

    #[test]
    fn a_missing_file_is_named() {
        let (_dir, source) = directory();
        let error = source.dimensions(Path::new("none.png")).unwrap_err();
        assert!(matches!(&error, ImageError::Missing { path } if path.ends_with("none.png")));
    }
}

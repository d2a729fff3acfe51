//! Lookup of a data file's images on disk.

use std::path::{Component, Path, PathBuf};

use super::{ImageError, RgbImage, decode, dimensions};

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
    fn load(&self, path: &Path) -> Result<RgbImage, ImageError>;
}

/// Images on disk: absolute paths, and relative ones that stay inside one directory.
#[derive(Clone, Debug)]
pub struct ImageFolder {
    root: PathBuf,
    allow_outside: bool,
}

impl ImageFolder {
    /// Source of images whose relative paths start at `root` and may not leave it through `..` or a symbolic
    /// link.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self {
            root: root.into(),
            allow_outside: false,
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
        dimensions(&self.resolve(path)?)
    }

    fn load(&self, path: &Path) -> Result<RgbImage, ImageError> {
        decode(&self.resolve(path)?)
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
    fn a_missing_file_is_named() {
        let (_dir, source) = directory();
        let error = source.dimensions(Path::new("none.png")).unwrap_err();
        assert!(matches!(&error, ImageError::Missing { path } if path.ends_with("none.png")));
    }
}

//! Images of which the model sees less than their files hold.

use crate::lang::{Text, text};
use std::path::{Path, PathBuf};

use models::image::{Losses, short_path};
use serde::Serialize;

/// Number of images with each loss, and the first of them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub(crate) struct ImageLosses {
    /// Gray of 16 bits, whose levels above 255 become white.
    pub(crate) gray16: usize,
    pub(crate) first_gray16: Option<PathBuf>,
    /// An EXIF orientation that is ignored.
    pub(crate) turned: usize,
    pub(crate) first_turned: Option<PathBuf>,
}

impl ImageLosses {
    /// Counts the image `path`.
    pub(super) fn add(&mut self, path: &Path, losses: Losses) {
        if losses.gray16 {
            self.gray16 += 1;
            self.first_gray16.get_or_insert_with(|| short_path(path));
        }
        if losses.turned {
            self.turned += 1;
            self.first_turned.get_or_insert_with(|| short_path(path));
        }
    }

    /// The losses of these images and of `later` ones.
    pub(super) fn with(self, later: Self) -> Self {
        Self {
            gray16: self.gray16 + later.gray16,
            first_gray16: self.first_gray16.or(later.first_gray16),
            turned: self.turned + later.turned,
            first_turned: self.first_turned.or(later.first_turned),
        }
    }

    /// A line for each loss that occurs.
    pub(crate) fn lines(&self) -> Vec<Text> {
        let gray = self.first_gray16.iter().map(|first| {
            let first = first.display();
            let count = self.gray16;
            text!("{count} images of 16-bit gray, the first {first}: levels above 255 become white, as published; store them with 8 bits", "{count} 张 16 位灰度图片，第一张是 {first}：高于 255 的灰度会变成白色，与官方实现相同；请以 8 位保存")
        });
        let turned = self.first_turned.iter().map(|first| {
            let first = first.display();
            let count = self.turned;
            text!("{count} images with an EXIF orientation, the first {first}: the model sees them as stored, as published; --exif-rotation apply turns them", "{count} 张图片带有 EXIF 方向，第一张是 {first}：模型看到的是存储时的样子，与官方实现相同；--exif-rotation apply 会旋转它们")
        });
        gray.chain(turned).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_are_counted_and_the_first_image_named() {
        let both = Losses {
            gray16: true,
            turned: true,
        };
        let mut first = ImageLosses::default();
        first.add(Path::new("a"), Losses::default());
        assert!(first.lines().is_empty());
        first.add(Path::new("b"), both);
        let mut later = ImageLosses::default();
        later.add(Path::new("c"), both);
        let lines = first.with(later).lines();
        assert!(
            lines[0].starts_with("2 images of 16-bit gray, the first b"),
            "{lines:?}"
        );
        assert!(lines[1].contains("--exif-rotation apply"), "{lines:?}");
    }
}

//! Slicing of images: one overview, and for large images a grid of cells.
//!
//! Sizes here are (width, height) in pixels; a [`Slice`] counts patches as (rows, cols).
//! All arithmetic is `f64` in the reference's order, since its roundings decide sizes.

use super::config::SlicingConfig;
use crate::data::Slice;
use crate::image::{RgbImage, resize};

/// Width and height of an image, in pixels.
pub type PixelSize = (usize, usize);

/// The grid of equal cells into which a large image is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cells {
    /// Number of columns of cells.
    pub cols: usize,
    /// Number of rows of cells.
    pub rows: usize,
    /// Width and height of each cell, in pixels.
    pub cell: PixelSize,
}

impl Cells {
    /// Size to which the image is resized before it is cut into cells, in pixels.
    pub fn refined(&self) -> PixelSize {
        (self.cell.0 * self.cols, self.cell.1 * self.rows)
    }
}

/// Slices (inputs of the vision tower) that an image is cut into, as a function of its size and the
/// configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlicePlan {
    /// Size of the overview (the whole image, resized), in pixels.
    pub overview: PixelSize,
    /// The grid of cells; `None` for a small image, which has only the overview.
    pub cells: Option<Cells>,
    patch_size: usize,
}

impl SlicePlan {
    /// Plans the slices of an image of `width` x `height` pixels.
    ///
    /// # Panics
    /// If a size is zero.
    pub fn new(width: usize, height: usize, config: &SlicingConfig) -> Self {
        assert!(width > 0 && height > 0, "a picture has at least one pixel");
        let size = (width as f64, height as f64);
        let area = size.0 * size.1;
        let slice_area = (config.scale_resolution * config.scale_resolution) as f64;
        let wanted = ((area / slice_area).ceil() as usize).min(config.max_slice_nums);
        let patch_size = config.patch_size;
        if wanted <= 1 {
            return Self {
                overview: fit(size, true, config),
                cells: None,
                patch_size,
            };
        }
        let (cols, rows) = best_grid(size, wanted, config.max_slice_nums);
        let cell = (
            nearest_multiple(size.0, cols) as f64 / cols as f64,
            nearest_multiple(size.1, rows) as f64 / rows as f64,
        );
        let cells = Cells {
            cols,
            rows,
            cell: fit(cell, true, config),
        };
        Self {
            overview: fit(size, false, config),
            cells: Some(cells),
            patch_size,
        }
    }

    /// Size of each slice in patches, (rows, cols): the overview first, then the cells row by row.
    pub fn shapes(&self) -> Vec<(usize, usize)> {
        let patches = |(width, height)| (height / self.patch_size, width / self.patch_size);
        let mut shapes = vec![patches(self.overview)];
        if let Some(cells) = self.cells {
            shapes.extend(vec![patches(cells.cell); cells.cols * cells.rows]);
        }
        shapes
    }

    /// Number of slices: the overview and the cells.
    pub fn slices(&self) -> usize {
        1 + self.cells.map_or(0, |cells| cells.cols * cells.rows)
    }

    /// Number of patches of all slices together, the overview included.
    pub fn patches(&self) -> usize {
        self.shapes().iter().map(|(rows, cols)| rows * cols).sum()
    }

    /// Resizes `image` and cuts it into its slices: the overview first, then the cells row by row.
    pub fn cut(&self, image: &RgbImage) -> Vec<Slice> {
        let (width, height) = self.overview;
        let overview = resize(image, width, height);
        let mut slices = vec![Slice::cut(
            &overview,
            (0, 0),
            self.overview,
            self.patch_size,
        )];
        if let Some(cells) = self.cells {
            let (width, height) = cells.refined();
            let refined = resize(image, width, height);
            for row in 0..cells.rows {
                for col in 0..cells.cols {
                    let corner = (col * cells.cell.0, row * cells.cell.1);
                    slices.push(Slice::cut(&refined, corner, cells.cell, self.patch_size));
                }
            }
        }
        slices
    }
}

/// Multiple of `divisor` nearest to `value`, ties to the even multiple, at least one.
fn nearest_multiple(value: f64, divisor: usize) -> usize {
    let multiples = (value / divisor as f64).round_ties_even() as usize;
    (multiples * divisor).max(divisor)
}

/// Size in whole patches with the aspect ratio of `size`: its own if the area is small enough and
/// `upscale` is false, otherwise about the area of one slice.
fn fit(size: (f64, f64), upscale: bool, config: &SlicingConfig) -> PixelSize {
    let (mut width, mut height) = size;
    let side = config.scale_resolution as f64;
    if upscale || width * height > side * side {
        let ratio = width / height;
        height = (side / ratio.sqrt()).trunc();
        // from the truncated height, as the reference does
        width = (height * ratio).trunc();
    }
    (
        nearest_multiple(width, config.patch_size),
        nearest_multiple(height, config.patch_size),
    )
}

/// Grid (cols, rows) of about `wanted` cells whose aspect ratio is nearest to that of `size`.
fn best_grid(size: (f64, f64), wanted: usize, max: usize) -> PixelSize {
    let target = (size.0 / size.1).ln();
    let totals = [wanted - 1, wanted, wanted + 1];
    let totals = totals
        .into_iter()
        .filter(|&total| total != 1 && total <= max);
    let grids = totals.flat_map(|total| {
        (1..=total)
            .filter(move |cols| total % cols == 0)
            .map(move |cols| (cols, total / cols))
    });
    let mut best = (1, 1);
    let mut least = f64::INFINITY;
    for (cols, rows) in grids {
        let error = (target - (cols as f64 / rows as f64).ln()).abs();
        // the first of equals wins
        if error < least {
            (best, least) = ((cols, rows), error);
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn config(max_slice_nums: usize) -> SlicingConfig {
        SlicingConfig {
            max_slice_nums,
            scale_resolution: 448,
            patch_size: 14,
        }
    }

    #[test]
    fn ties_round_to_the_even_multiple() {
        assert_eq!(nearest_multiple(35.0, 14), 28);
        assert_eq!(nearest_multiple(49.0, 14), 56);
        assert_eq!(nearest_multiple(1.0, 14), 14);
    }

    #[test]
    fn slices_follow_the_overview_row_by_row() {
        let config = SlicingConfig {
            max_slice_nums: 4,
            scale_resolution: 14,
            patch_size: 14,
        };
        // four flat quarters of exactly one patch each
        let mut pixels = vec![0; 28 * 28 * 3];
        for (i, pixel) in pixels.chunks_mut(3).enumerate() {
            let quarter = i / 28 / 14 * 2 + i % 28 / 14;
            pixel.copy_from_slice(&[quarter as u8 * 50, quarter as u8, 9]);
        }
        let plan = SlicePlan::new(28, 28, &config);
        let slices = plan.cut(&RgbImage::new(28, 28, pixels));
        assert_eq!((slices.len(), plan.slices(), plan.patches()), (5, 5, 5));
        for quarter in 0..4u8 {
            let patches = &slices[1 + quarter as usize].patches;
            assert!(patches[..196].iter().all(|&v| v == quarter * 50));
            assert!(patches[196..392].iter().all(|&v| v == quarter));
            assert!(patches[392..].iter().all(|&v| v == 9));
        }
    }

    #[test]
    fn patches_hold_channel_then_row_then_column() {
        let config = SlicingConfig {
            max_slice_nums: 1,
            scale_resolution: 4,
            patch_size: 2,
        };
        let pixels = (0..48).collect();
        let slices = SlicePlan::new(4, 4, &config).cut(&RgbImage::new(4, 4, pixels));
        assert_eq!((slices[0].rows, slices[0].cols), (2, 2));
        // second patch: pixels (2,0) (3,0) (2,1) (3,1)
        assert_eq!(
            slices[0].patches[12..24],
            [6, 9, 18, 21, 7, 10, 19, 22, 8, 11, 20, 23]
        );
    }

    proptest! {
        #[test]
        fn every_plan_is_whole_patches_within_the_limit(
            width in 1usize..9000, height in 1usize..9000, max in 1usize..20,
        ) {
            let plan = SlicePlan::new(width, height, &config(max));
            prop_assert!(plan.slices() <= max + 1);
            for (rows, cols) in plan.shapes() {
                prop_assert!(rows > 0 && cols > 0);
            }
            let sizes = [Some(plan.overview), plan.cells.map(|cells| cells.cell)];
            for (width, height) in sizes.into_iter().flatten() {
                prop_assert!(width % 14 == 0 && height % 14 == 0);
            }
        }
    }
}

//! Index tables of the tower for a batch of images.

use super::config::EvaConfig;
use crate::batch::{VisionTables, pixel_values, starts_of, upload};
use crate::data::Slice;
use crate::error::Result;
use crate::ops::Sequences;
use crate::processor::Normalization;
use kernels::{Backend, DType, Tensor};

/// Index tables of a batch of `N` images with `p` patches and `m` features each; all tables are i32.
#[derive(Clone, Debug)]
pub struct EvaTables {
    /// `[N * (p + 1)]`: for each row of the tower, its row in the table of learned positions; 0 for the class row.
    pub position_ids: Tensor,
    /// `[N]`: row of each image's class token in the tower's output.
    pub class_rows: Tensor,
    /// Row of each patch in the tower's output, `[N * p]`.
    pub patch_rows: Tensor,
    /// Zeros, `[N]`: gather index that repeats a learned row for every image.
    pub zeros: Tensor,
    /// Indices of the patches, `[N * p]`, ordered by blocks of 2 x 2 that become one feature; empty in a
    /// model that does not merge patches.
    pub fold_rows: Tensor,
    /// Row of each feature among the features and learned vectors of all images, `[N * m]`. Each image has
    /// one learned vector before its features and one after.
    pub feature_rows: Tensor,
    /// For each image, the row of the learned vector before its features, `[N]`, numbered as `feature_rows`.
    pub begin_rows: Tensor,
    /// For each image, the row of the learned vector after its features, `[N]`, numbered as `feature_rows`.
    pub end_rows: Tensor,
    /// For each row of the tower, the index in the batch of the patch by which its dropout mask is drawn,
    /// `[N * (p + 1)]`.
    pub row_names: Tensor,
    /// For each feature, the index in the batch of the patch by which its dropout mask is drawn, `[N * m]`.
    pub feature_names: Tensor,
}

impl VisionTables for EvaTables {
    fn tower() -> &'static str {
        "EVA"
    }
}

/// Images as inputs of the EVA tower, or of a tower of the same form.
#[derive(Clone, Debug)]
pub(crate) struct EvaImages {
    /// Pixel values, `[N * p, 3 * patch * patch]`.
    pub(crate) patches: Tensor,
    /// Attention among the rows of each image.
    pub(crate) sequences: Sequences,
    /// Index tables for the batch, all i32.
    pub(crate) tables: EvaTables,
}

/// Prepares `images`, each with the number of patches before it in its batch; `fold` says whether 2 x 2 patches
/// become one feature.
///
/// # Errors
/// When memory runs out.
pub(crate) fn eva_images(
    config: &EvaConfig,
    fold: bool,
    images: &[(&Slice, usize)],
    normalization: &Normalization,
    dtype: DType,
    backend: &dyn Backend,
) -> Result<EvaImages> {
    let grid = (config.grid(), config.patch_size);
    self::images(grid, fold, images, normalization, dtype, backend)
}

/// As [`eva_images`], for any tower that sees square images and adds a class row: `grid` is the number of patches per
/// side of an image, `side` the side of a patch in pixels.
///
/// # Errors
/// When memory runs out.
pub(crate) fn images(
    (grid, side): (usize, usize),
    fold: bool,
    images: &[(&Slice, usize)],
    normalization: &Normalization,
    dtype: DType,
    backend: &dyn Backend,
) -> Result<EvaImages> {
    let slices: Vec<&Slice> = images.iter().map(|(slice, _)| *slice).collect();
    let before: Vec<usize> = images.iter().map(|(_, before)| *before).collect();
    let rows = grid * grid + 1;
    Ok(EvaImages {
        patches: pixel_values(&slices, side, normalization, dtype, backend)?,
        sequences: Sequences::own(starts_of(images.iter().map(|_| rows)), false),
        tables: eva_tables(grid, fold, &before, backend)?,
    })
}

fn eva_tables(
    grid: usize,
    fold: bool,
    before: &[usize],
    backend: &dyn Backend,
) -> Result<EvaTables> {
    let (n, p) = (before.len(), grid * grid);
    let table = |values: Vec<usize>| -> Result<Tensor> {
        let values: Vec<i32> = values.into_iter().map(|v| v as i32).collect();
        upload(backend, &values, &[values.len()])
    };
    // Rows `offset..offset + count` of each of the images, which have `stride` rows.
    let rows = |stride: usize, offset: usize, count: usize| {
        table(
            (0..n)
                .flat_map(|i| (0..count).map(move |r| i * stride + offset + r))
                .collect(),
        )
    };
    let order = if fold { folded(grid) } else { Vec::new() };
    let all = |within: &[usize]| -> Vec<usize> {
        let each = |i| within.iter().map(move |w| i * p + w);
        (0..n).flat_map(each).collect()
    };
    // A folded feature is called after its first patch, a class row after the image's.
    let features: Vec<usize> = match fold {
        true => order.iter().copied().step_by(4).collect(),
        false => (0..p).collect(),
    };
    let m = features.len();
    let names = |within: &[usize]| -> Vec<usize> {
        let each = |b: &usize| within.iter().map(|w| b + w).collect::<Vec<usize>>();
        before.iter().flat_map(each).collect()
    };
    let tower_rows: Vec<usize> = std::iter::once(0).chain(0..p).collect();
    Ok(EvaTables {
        position_ids: table((0..n).flat_map(|_| 0..=p).collect())?,
        class_rows: rows(p + 1, 0, 1)?,
        patch_rows: rows(p + 1, 1, p)?,
        zeros: table(vec![0; n])?,
        fold_rows: table(all(&order))?,
        feature_rows: rows(m + 2, 1, m)?,
        begin_rows: rows(m + 2, 0, 1)?,
        end_rows: rows(m + 2, m + 1, 1)?,
        row_names: table(names(&tower_rows))?,
        feature_names: table(names(&features))?,
    })
}

/// The patches of an image by their cell of 2 x 2: upper left, upper right, lower left, lower right.
fn folded(grid: usize) -> Vec<usize> {
    let half = grid / 2;
    let cell = |i: usize| (i / half * 2) * grid + i % half * 2;
    (0..half * half)
        .flat_map(|i| [0, 1, grid, grid + 1].map(|offset| cell(i) + offset))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernels::CpuBackend;

    #[test]
    fn cells_fold_two_by_two_patches_row_by_row() {
        assert_eq!(folded(2), [0, 1, 2, 3]);
        let order = folded(4);
        assert_eq!(order[..8], [0, 1, 4, 5, 2, 3, 6, 7]);
        assert_eq!(order[8..], [8, 9, 12, 13, 10, 11, 14, 15]);
    }

    #[test]
    fn index_tables_of_a_batch_are_exact() {
        let backend = CpuBackend::unlimited();
        let tables = eva_tables(2, true, &[0, 10], &backend).unwrap();
        let of = |t: &Tensor| t.as_slice::<i32>().to_vec();
        assert_eq!(of(&tables.class_rows), [0, 5]);
        assert_eq!(of(&tables.patch_rows), [1, 2, 3, 4, 6, 7, 8, 9]);
        assert_eq!(of(&tables.position_ids), [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]);
        assert_eq!(of(&tables.fold_rows), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(of(&tables.begin_rows), [0, 3]);
        assert_eq!(of(&tables.feature_rows), [1, 4]);
        assert_eq!(of(&tables.end_rows), [2, 5]);
        assert_eq!(of(&tables.row_names), [0, 0, 1, 2, 3, 10, 10, 11, 12, 13]);
        assert_eq!(of(&tables.feature_names), [0, 10]);
    }
}

//! Position ids of patches on the learned position grid.
//!
//! An image of `rows` x `cols` patches maps to a square grid of learned positions: the fractional
//! coordinate of each row and column falls into one of `grid_side` buckets. Both the
//! coordinates and the bucket edges are `f32` ranges as PyTorch's CPU `arange` makes them, whose
//! rounding differs from `i * step`; a plain floor gives other buckets for some sizes (25, 49, ...).

/// Elements that PyTorch's vectorized fill advances by from one base value.
const LANES: usize = 8;
/// Elements per iteration of that fill; the remainder is computed one by one.
const BLOCK: usize = 2 * LANES;

/// `arange(start, end, step)` in `f32`, bit for bit as PyTorch on a CPU.
fn arange(start: f64, end: f64, step: f64) -> Vec<f32> {
    let count = ((end - start) / step).ceil() as usize;
    let vectorized = count / BLOCK * BLOCK;
    (0..count)
        .map(|i| {
            if i < vectorized {
                let base = (start + step * (i / LANES * LANES) as f64) as f32;
                (f64::from(base) + (i % LANES) as f64 * step) as f32
            } else {
                (start + step * i as f64) as f32
            }
        })
        .collect()
}

/// For each of `patches` patches along one axis of a slice, the index of the learned position to which it
/// maps, below `grid_side`.
///
/// # Panics
/// If either number is zero.
pub fn position_buckets(patches: usize, grid_side: usize) -> Vec<usize> {
    assert!(
        patches > 0 && grid_side > 0,
        "an empty axis has no positions"
    );
    let edges = arange(1.0 / grid_side as f64, 1.0, 1.0 / grid_side as f64);
    let coordinates = arange(0.0, 1.0 - 1e-6, f64::from(1.0 / patches as f32));
    let bucket = |coordinate| edges.partition_point(|&edge| edge <= coordinate);
    (0..patches)
        // rounding of the step could make the range one short; its last element is then repeated
        .map(|i| bucket(coordinates[i.min(coordinates.len() - 1)]).min(grid_side - 1))
        .collect()
}

/// For each patch of a slice of `rows` x `cols` patches, row-major, the row of its position embedding in the
/// learned table of `grid_side * grid_side` positions.
///
/// # Panics
/// If any number is zero.
pub fn position_ids(rows: usize, cols: usize, grid_side: usize) -> Vec<i32> {
    let row_buckets = position_buckets(rows, grid_side);
    let col_buckets = position_buckets(cols, grid_side);
    row_buckets
        .iter()
        .flat_map(|row| {
            col_buckets
                .iter()
                .map(move |col| (row * grid_side + col) as i32)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_grid_has_identity_positions() {
        let ids: Vec<i32> = (0..16).collect();
        assert_eq!(position_ids(4, 4, 4), ids);
    }

    #[test]
    fn position_buckets_round_as_the_reference_does() {
        // 5 * 70 / 25 is exactly 14, but the reference puts the cell one lower
        assert_eq!(position_buckets(25, 70)[5], 13);
    }

    #[test]
    fn position_buckets_distinguish_rows_and_columns() {
        assert_eq!(position_ids(1, 2, 2), [0, 1]);
        assert_eq!(position_ids(2, 1, 2), [0, 2]);
    }
}

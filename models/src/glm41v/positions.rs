//! Positions of tokens in three coordinates, and of patches on the learned grid.

/// Time, row and column position of every token of a sample.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct TokenPositions {
    /// Time, row and column position, in this order, of each token: `[3][tokens]`. The three are equal for
    /// text tokens.
    pub rows: [Vec<i32>; 3],
}

impl TokenPositions {
    /// Positions of a sample's `tokens` tokens. Each of `images` is the first token of an image with its
    /// numbers of features per column and per row.
    ///
    /// Text counts up by one in all three coordinates. An image at position `p` has time `p`, and row and
    /// column count from `p`. The text after it continues at `p` plus the image's longer side in features.
    #[must_use]
    pub fn new(tokens: usize, images: &[(usize, [usize; 2])]) -> Self {
        let mut positions = Self::default();
        let mut next = 0;
        for (start, [rows, cols]) in images {
            next = positions.text(next, *start);
            for i in 0..rows * cols {
                let (row, col) = ((i / cols) as i32, (i % cols) as i32);
                positions.push([next, next + row, next + col]);
            }
            next += (*rows).max(*cols) as i32;
        }
        positions.text(next, tokens);
        positions
    }

    /// Adds text up to token `end`, from position `next` on; returns the position after it.
    fn text(&mut self, next: i32, end: usize) -> i32 {
        let count = end.saturating_sub(self.rows[0].len()) as i32;
        (next..next + count).for_each(|p| self.push([p; 3]));
        next + count
    }

    fn push(&mut self, coordinates: [i32; 3]) {
        for (row, p) in self.rows.iter_mut().zip(coordinates) {
            row.push(p);
        }
    }

    /// Appends the positions of another sample's tokens, unchanged.
    pub fn append(&mut self, other: &Self) {
        for (row, more) in self.rows.iter_mut().zip(&other.rows) {
            row.extend(more);
        }
    }
}

/// Angles of tokens: frequencies `theta^(-2i / rotary)` are cut into `sections`, and section `s` follows coordinate
/// `s mod 3`. One row of `frequencies.len()` angles per token.
pub(super) fn mrope_angles<'a>(
    positions: &'a [Vec<i32>; 3],
    frequencies: &'a [f32],
    sections: &[usize],
) -> impl Iterator<Item = f32> + Clone + 'a {
    let coordinate: Vec<usize> = sections
        .iter()
        .enumerate()
        .flat_map(|(s, count)| std::iter::repeat_n(s % 3, *count))
        .collect();
    (0..positions[0].len()).flat_map(move |t| {
        let pairs: Vec<f32> = frequencies
            .iter()
            .zip(&coordinate)
            .map(|(w, c)| positions[*c][t] as f32 * w)
            .collect();
        pairs
    })
}

/// Coordinates (row, column) of the patches of a grid in the order of the tower: blocks of 2 x 2 row by row,
/// and row by row within a block.
pub(super) fn block_order([rows, cols]: [usize; 2]) -> impl Iterator<Item = [usize; 2]> + Clone {
    let across = cols / 2;
    (0..rows / 2 * across).flat_map(move |block| {
        let (row, col) = (block / across * 2, block % across * 2);
        (0..4).map(move |i| [row + i / 2, col + i % 2])
    })
}

/// Weights of the learned positions, `[rows * cols, side * side]`, that give the positions of a grid in the
/// order of the tower: the learned `side` x `side` table under bicubic interpolation, its border repeated.
pub(super) fn position_weights([rows, cols]: [usize; 2], side: usize) -> Vec<f32> {
    let vertical: Vec<_> = (0..rows).map(|i| taps(i, rows, side)).collect();
    let horizontal: Vec<_> = (0..cols).map(|j| taps(j, cols, side)).collect();
    let mut weights = vec![0.0; rows * cols * side * side];
    for (out, [i, j]) in weights
        .chunks_exact_mut(side * side)
        .zip(block_order([rows, cols]))
    {
        for (y, wy) in vertical[i] {
            for (x, wx) in horizontal[j] {
                out[y * side + x] += wy * wx;
            }
        }
    }
    weights
}

/// The four stored positions around patch `i` of `count` on an axis, with their weights.
fn taps(i: usize, count: usize, side: usize) -> [(usize, f32); 4] {
    let at = (i as f32 + 0.5) / count as f32 * side as f32 - 0.5;
    let first = at.floor();
    let within = at - first;
    let last = side as i64 - 1;
    std::array::from_fn(|k| {
        let offset = k as i64 - 1;
        let place = (first as i64 + offset).clamp(0, last) as usize;
        (place, cubic((within - offset as f32).abs()))
    })
}

/// Keys' cubic kernel with `a = -0.75`, for a distance below 2.
fn cubic(x: f32) -> f32 {
    const A: f32 = -0.75;
    if x <= 1.0 {
        ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
    } else {
        ((A * x - 5.0 * A) * x + 8.0 * A) * x - 4.0 * A
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_positions_count_rows_and_columns_then_text_continues() {
        let positions = TokenPositions::new(9, &[(2, [1, 3]), (6, [2, 1])]);
        assert_eq!(positions.rows[0], [0, 1, 2, 2, 2, 5, 6, 6, 8]);
        assert_eq!(positions.rows[1], [0, 1, 2, 2, 2, 5, 6, 7, 8]);
        assert_eq!(positions.rows[2], [0, 1, 2, 3, 4, 5, 6, 6, 8]);
    }

    #[test]
    fn patches_are_ordered_by_blocks_of_two_by_two() {
        let order: Vec<[usize; 2]> = block_order([2, 4]).collect();
        let expected = [
            [0, 0],
            [0, 1],
            [1, 0],
            [1, 1],
            [0, 2],
            [0, 3],
            [1, 2],
            [1, 3],
        ];
        assert_eq!(order, expected);
    }

    #[test]
    fn a_grid_of_the_stored_size_uses_positions_without_interpolation() {
        let weights = position_weights([4, 4], 4);
        for (row, [i, j]) in weights.chunks(16).zip(block_order([4, 4])) {
            let expected = |k: usize| f32::from(u8::from(k == i * 4 + j));
            let apart = row.iter().enumerate().map(|(k, w)| (w - expected(k)).abs());
            assert!(apart.fold(0.0, f32::max) < 1e-6);
        }
    }

    #[test]
    fn interpolation_weights_of_a_patch_add_up_to_one() {
        for row in position_weights([6, 10], 3).chunks(9) {
            assert!((row.iter().sum::<f32>() - 1.0).abs() < 1e-5);
        }
    }

    #[test]
    fn rope_sections_use_their_coordinates() {
        let rows = [vec![1], vec![10], vec![100]];
        let frequencies = [1.0, 0.5, 0.25, 2.0];
        let angles: Vec<f32> = mrope_angles(&rows, &frequencies, &[1, 1, 2]).collect();
        assert_eq!(angles, [1.0, 5.0, 25.0, 200.0]);
    }
}

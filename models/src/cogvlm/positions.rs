//! Three masks over tokens that differ: image tokens, positions, and rows of the vision expert.

/// For each of a sample's `tokens` tokens, whether image features replace it. `images` are the token ranges
/// (start, end) of the images.
#[must_use]
pub fn token_types(tokens: usize, images: &[(usize, usize)]) -> Vec<bool> {
    let mut types = vec![false; tokens];
    for (start, end) in images {
        types[*start..*end].fill(true);
    }
    types
}

/// Position ids of a sample's tokens; `types` says which are image tokens, as [`token_types`] returns it. The
/// features of an image, without the learned rows before and after them, share one position.
#[must_use]
pub fn position_ids(types: &[bool]) -> Vec<i32> {
    let last = types.len().saturating_sub(1);
    // An image's outermost rows count like text.
    let inner: Vec<bool> = (0..types.len())
        .map(|i| types[i] && i > 0 && i < last && types[i - 1] && types[i + 1])
        .collect();
    let mut position = 0;
    let steps = (0..types.len()).map(|i| {
        if i > 0 && (!inner[i] || !inner[i - 1]) {
            position += 1;
        }
        position
    });
    steps.collect()
}

/// For each token, whether the vision expert computes it: all image tokens except the last row of each image.
/// `types` is from [`token_types`].
#[must_use]
pub fn vision_mask(types: &[bool]) -> Vec<bool> {
    let next = |i: usize| types.get(i + 1).is_some_and(|t| *t);
    (0..types.len()).map(|i| types[i] && next(i)).collect()
}

/// [`vision_mask`] of all rows of samples with these token types.
pub(super) fn vision_rows(types: &[Vec<bool>]) -> Vec<bool> {
    types.iter().flat_map(|types| vision_mask(types)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_three_masks_of_an_image_differ() {
        let types = token_types(8, &[(1, 6)]);
        assert_eq!(types.iter().filter(|t| **t).count(), 5);
        assert_eq!(position_ids(&types), [0, 1, 2, 2, 2, 3, 4, 5]);
        let vision: Vec<usize> = (0..8).filter(|i| vision_mask(&types)[*i]).collect();
        assert_eq!(vision, [1, 2, 3, 4], "not the row behind the features");
    }

    #[test]
    fn text_positions_count_from_zero() {
        assert_eq!(position_ids(&[false; 4]), [0, 1, 2, 3]);
        assert!(position_ids(&[]).is_empty());
    }

    #[test]
    fn image_positions_and_mask_treat_the_end_of_a_sequence_as_the_reference() {
        assert_eq!(position_ids(&[true, true, true]), [0, 1, 2]);
        assert_eq!(position_ids(&[true; 4]), [0, 1, 1, 2]);
        assert_eq!(vision_mask(&[true, true]), [true, false]);
    }

    #[test]
    fn vision_masks_of_all_samples_are_concatenated() {
        let types = [token_types(5, &[(1, 4)]), token_types(2, &[])];
        let vision = [false, true, true, false, false, false, false];
        assert_eq!(vision_rows(&types), vision);
    }
}

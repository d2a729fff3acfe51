//! Positions of tokens. All features of an image share one.

/// Position ids of a sample's `tokens` tokens. Each of `images` is the token range (start, end) of an image:
/// its features, with a learned vector before and after them. An image takes three position ids: one for each
/// learned vector, and one that all its features share.
#[must_use]
pub fn token_positions(tokens: usize, images: &[(usize, usize)]) -> Vec<i32> {
    let mut positions = Vec::with_capacity(tokens);
    let mut next = 0;
    for (start, end) in images {
        let text = start.saturating_sub(positions.len()) as i32;
        positions.extend(next..next + text);
        next += text;
        let features = (end - start).saturating_sub(2);
        positions.push(next);
        positions.extend(std::iter::repeat_n(next + 1, features));
        positions.push(next + 2);
        next += 3;
    }
    let rest = tokens.saturating_sub(positions.len()) as i32;
    positions.extend(next..next + rest);
    positions
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_takes_three_positions() {
        let positions = token_positions(9, &[(2, 7)]);
        assert_eq!(positions, [0, 1, 2, 3, 3, 3, 4, 5, 6]);
        assert_eq!(token_positions(3, &[]), [0, 1, 2]);
        assert_eq!(token_positions(3, &[(0, 3)]), [0, 1, 2]);
    }
}

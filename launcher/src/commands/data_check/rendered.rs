//! One sample as the model sees it, with its supervised tokens marked.

use models::Processor;
use models::data::SampleTokens;
use serde::Serialize;
use std::ops::Range;

/// Part of a sample's token sequence, decoded for display: consecutive tokens that are all supervised or all not, or
/// one image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Piece {
    /// Decoded text of the tokens. An image is written `<image 64x9>`: tokens per slice, number of slices.
    pub(super) text: String,
    /// Whether the loss is computed on these tokens.
    pub(super) supervised: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Read,
    Supervised,
    Image(usize),
}

/// Splits the token sequence of a sample into pieces, in order.
pub(super) fn pieces(processor: &dyn Processor, tokens: &SampleTokens) -> Vec<Piece> {
    let images = processor.images(tokens);
    let roles = roles(tokens, &images);
    let mut found = Vec::new();
    let mut from = 0;
    while let Some(role) = roles.get(from) {
        let until = roles[from..].iter().position(|other| other != role);
        let until = until.map_or(roles.len(), |count| from + count);
        let text = match role {
            Role::Image(index) => {
                let (range, slices) = &images[*index];
                let features = features(tokens, range);
                format!("<image {}x{slices}>", features / slices)
            }
            Role::Read | Role::Supervised => processor
                .tokenizer()
                .decode_verbatim(&tokens.input_ids[from..until])
                .unwrap_or_else(|error| format!("<{error}>")),
        };
        found.push(Piece {
            text,
            supervised: *role == Role::Supervised,
        });
        from = until;
    }
    found
}

/// Joins pieces to text. Supervised ones are in «…», or green if `color` is true.
pub(super) fn text(pieces: &[Piece], color: bool) -> String {
    let mark = |piece: &Piece| match (piece.supervised, color) {
        (false, _) => piece.text.clone(),
        (true, false) => format!("«{}»", piece.text),
        (true, true) => format!("\u{1b}[32m{}\u{1b}[0m", piece.text),
    };
    pieces.iter().map(mark).collect()
}

/// Number of tokens in `range` that image features replace.
fn features(tokens: &SampleTokens, range: &Range<usize>) -> usize {
    let inside = |(start, end): &&(usize, usize)| range.start <= *start && *end <= range.end;
    let bounds = tokens.image_bounds.iter().filter(inside);
    bounds.map(|(start, end)| end - start).sum()
}

fn roles(tokens: &SampleTokens, images: &[(Range<usize>, usize)]) -> Vec<Role> {
    let ids = &tokens.input_ids;
    // A label is stored one position before the token that it predicts.
    let supervised = |at: usize| at > 0 && tokens.labels[at - 1] == ids[at];
    let mut roles: Vec<Role> = (0..ids.len())
        .map(|at| {
            if supervised(at) {
                Role::Supervised
            } else {
                Role::Read
            }
        })
        .collect();
    for (index, (tokens, _)) in images.iter().enumerate() {
        let end = tokens.end.min(roles.len());
        roles[tokens.start.min(end)..end].fill(Role::Image(index));
    }
    roles
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> SampleTokens {
        const IGNORED: i32 = -100;
        // 5 opens an image, 6 closes it; 7 and 8 do so for a slice. 9 is a feature, 1 text, 2 the answer.
        let input_ids = vec![1, 5, 9, 9, 6, 7, 9, 9, 8, 5, 9, 9, 6, 1, 2, 2];
        let mut labels = vec![IGNORED; input_ids.len()];
        (labels[13], labels[14]) = (2, 2);
        SampleTokens {
            labels,
            input_ids,
            image_bounds: vec![(2, 4), (6, 8), (10, 12)],
            untruncated_tokens: 16,
            slices: 3,
        }
    }

    #[test]
    fn an_image_is_one_piece_however_many_slices_it_has() {
        let sample = sample();
        let images = [(1..9, 2), (9..13, 1)];
        let roles = roles(&sample, &images);
        assert_eq!(roles[0], Role::Read);
        assert_eq!(roles[8], Role::Image(0));
        assert_eq!(roles[9], Role::Image(1));
        assert_eq!(
            roles[13..],
            [Role::Read, Role::Supervised, Role::Supervised]
        );
        assert_eq!(features(&sample, &(1..9)), 4);
    }

    #[test]
    fn supervised_text_is_marked_by_brackets_or_color() {
        let pieces = [("Q ", false), ("A", true)].map(|(text, supervised)| Piece {
            text: text.to_owned(),
            supervised,
        });
        assert_eq!(text(&pieces, false), "Q «A»");
        assert_eq!(text(&pieces, true), "Q \u{1b}[32mA\u{1b}[0m");
    }
}

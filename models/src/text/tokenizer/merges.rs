//! Merge table from priorities of tokens.
//!
//! Rank files and sentencepiece models define encoding by priorities: merge repeatedly the adjacent pair whose
//! concatenation is the best token (leftmost among equals). The encoder of the `tokenizers` crate has a table of pairs
//! instead. Both give the same tokens if the table lists each token with the last pair of merging *the token's own
//! text*. A token is formed only if no merge has crossed its borders, so the merges inside are those of the token alone,
//! and they are deterministic. Other pairs with the same concatenation never occur. Leaving them out keeps the table
//! small.

use std::collections::HashMap;

/// Priority of a pair that is no token.
const NONE: u32 = u32::MAX;

/// The pairs of the tokens in `by_priority`, both from best to worst. Symbols are characters: a byte-level vocabulary
/// must have one character per byte.
///
/// A part may be a single character that is no token itself; longer parts always are.
pub(super) fn merge_table<'a>(by_priority: &[&'a str]) -> Vec<(&'a str, &'a str)> {
    let tokens = by_priority.iter().zip(0u32..);
    let priority: HashMap<&str, u32> = tokens.map(|(&token, rank)| (token, rank)).collect();
    by_priority
        .iter()
        .filter_map(|token| last_pair(token, &priority))
        .collect()
}

/// The last two parts of merging the characters of `token`; `None` if more parts remain, or for one character.
fn last_pair<'a>(token: &'a str, priority: &HashMap<&str, u32>) -> Option<(&'a str, &'a str)> {
    let mut cuts: Vec<usize> = token.char_indices().map(|(at, _)| at).collect();
    cuts.push(token.len());
    if cuts.len() < 3 {
        return None;
    }
    let of_pair = |cuts: &[usize], left: usize| {
        let pair = &token[cuts[left]..cuts[left + 2]];
        priority.get(pair).copied().unwrap_or(NONE)
    };
    let mut pairs: Vec<u32> = (0..cuts.len() - 2)
        .map(|left| of_pair(&cuts, left))
        .collect();
    while pairs.len() > 1 {
        let (left, &best) = pairs.iter().enumerate().min_by_key(|&(_, rank)| rank)?;
        if best == NONE {
            return None;
        }
        cuts.remove(left + 1);
        pairs.remove(left);
        if left < pairs.len() {
            pairs[left] = of_pair(&cuts, left);
        }
        if left > 0 {
            pairs[left - 1] = of_pair(&cuts, left - 1);
        }
    }
    Some(token.split_at(cuts[1]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tokenizers::models::bpe::{BPE, Vocab};
    use tokenizers::{Model, Token};

    /// The definition, on whole texts: the best pair, leftmost among equals, until there is none.
    fn join(text: &str, by_priority: &[&str]) -> Vec<String> {
        let mut parts: Vec<String> = text.chars().map(String::from).collect();
        loop {
            let rank = |i: usize| {
                let pair = format!("{}{}", parts[i], parts[i + 1]);
                by_priority.iter().position(|token| **token == pair)
            };
            let best = (0..parts.len().saturating_sub(1))
                .filter_map(|i| Some((rank(i)?, i)))
                .min();
            let Some((_, left)) = best else { return parts };
            let right = parts.remove(left + 1);
            parts[left].push_str(&right);
        }
    }

    #[test]
    fn a_token_is_listed_with_the_pair_that_merging_ends_with() {
        // "aba": "ab" is joined before "ba", so that ("a", "ba") never stands side by side
        let table = merge_table(&["a", "b", "ab", "ba", "aba"]);
        assert_eq!(table, [("a", "b"), ("b", "a"), ("ab", "a")]);
        // "abcd" gets stuck at "a", "bc", "d"
        assert_eq!(merge_table(&["bc", "ab", "cd", "abcd"]).len(), 3);
        assert!(merge_table(&["x", ""]).is_empty());
    }

    proptest! {
        #[test]
        fn the_merge_table_encodes_like_the_priorities(
            longer in proptest::collection::vec("[abc]{2,5}", 0..25),
            texts in proptest::collection::vec("[abc]{0,24}", 8),
        ) {
            let mut tokens: Vec<&str> = vec!["a", "b", "c"];
            for token in &longer {
                if !tokens.contains(&token.as_str()) {
                    tokens.push(token);
                }
            }
            let vocab: Vocab = tokens.iter().zip(0..).map(|(token, id)| ((*token).to_owned(), id)).collect();
            let owned = |(a, b): (&str, &str)| (a.to_owned(), b.to_owned());
            let merges = merge_table(&tokens).into_iter().map(owned).collect();
            let model = BPE::builder().vocab_and_merges(vocab, merges).build().unwrap();
            for text in &texts {
                let encoded: Vec<String> =
                    model.tokenize(text).unwrap().into_iter().map(|Token { value, .. }| value).collect();
                prop_assert_eq!(&encoded, &join(text, &tokens), "{}", text);
            }
        }
    }
}

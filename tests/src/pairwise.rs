//! Choice of combinations in which every pair of values of two dimensions occurs.

use std::collections::BTreeSet;

/// Two dimensions, the first below the second, each with the index of a value.
type Pair = [(usize, usize); 2];

/// Rows with an index for each dimension, which has as many values as `sizes` says. Every pair of values of two
/// dimensions is in a row. The same sizes give the same rows.
///
/// # Panics
/// If a dimension has no value.
#[must_use]
pub fn rows(sizes: &[usize]) -> Vec<Vec<usize>> {
    assert!(sizes.iter().all(|size| *size > 0), "a dimension is empty");
    let dimensions = 0..sizes.len();
    let pairs = dimensions.flat_map(|a| (a + 1..sizes.len()).map(move |b| (a, b)));
    let mut open: BTreeSet<Pair> = pairs
        .flat_map(|(a, b)| {
            (0..sizes[a]).flat_map(move |x| (0..sizes[b]).map(move |y| (a, b, x, y)))
        })
        .map(|(a, b, x, y)| [(a, x), (b, y)])
        .collect();
    let mut rows = Vec::new();
    while let Some(first) = open.first().copied() {
        let row = row(sizes, first, &open);
        open.retain(|pair| !pair.iter().all(|(d, value)| row[*d] == *value));
        rows.push(row);
    }
    rows
}

/// The row with the pair `first` whose other values are in as many open pairs as a choice one by one finds.
fn row(sizes: &[usize], first: Pair, open: &BTreeSet<Pair>) -> Vec<usize> {
    let mut row: Vec<Option<usize>> = vec![None; sizes.len()];
    for (dimension, value) in first {
        row[dimension] = Some(value);
    }
    for dimension in 0..sizes.len() {
        if row[dimension].is_some() {
            continue;
        }
        let gain = |value: usize| {
            let chosen = row.iter().enumerate();
            let chosen = chosen.filter_map(|(d, value)| Some((d, (*value)?)));
            let mut gained = 0;
            for other in chosen {
                let mut pair = [other, (dimension, value)];
                pair.sort_unstable();
                gained += usize::from(open.contains(&pair));
            }
            gained
        };
        // Of equal gains the first value.
        let best = (0..sizes[dimension]).rev().max_by_key(|value| gain(*value));
        row[dimension] = best;
    }
    row.into_iter().map(Option::unwrap_or_default).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pair_is_in_a_row_and_rows_are_few() {
        let sizes = [5, 7, 4, 3, 4, 3, 4];
        let rows = rows(&sizes);
        for a in 0..sizes.len() {
            for b in a + 1..sizes.len() {
                for (x, y) in (0..sizes[a]).flat_map(|x| (0..sizes[b]).map(move |y| (x, y))) {
                    let found = rows.iter().any(|row| row[a] == x && row[b] == y);
                    assert!(found, "{a} = {x} with {b} = {y}");
                }
            }
        }
        assert!((35..50).contains(&rows.len()), "{}", rows.len());
    }
}

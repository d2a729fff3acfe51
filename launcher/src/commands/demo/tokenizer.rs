//! Vocabulary of the demo: byte-level BPE in Qwen2's format. Its merges are trained on the demo's own sentences until
//! every word is one token.

use std::collections::BTreeMap;

use crate::commands::synth::files::MINICPM;
use crate::commands::synth::tokenizer::{Vocabulary, byte_letters};

/// Number of special tokens.
const SPECIAL_TOKENS: usize = 22;

/// Vocabulary of merges trained on `texts`. Each step merges the most frequent pair (ties in alphabetical order), until
/// every word is one token.
pub(super) fn train(texts: &[String]) -> Vocabulary {
    let bytes = byte_letters();
    let mut words: BTreeMap<Vec<String>, u32> = BTreeMap::new();
    for word in texts.iter().flat_map(|text| words_of(text)) {
        let letters = word
            .bytes()
            .map(|byte| bytes[usize::from(byte)].to_string())
            .collect();
        *words.entry(letters).or_default() += 1;
    }
    // The size is known after the last merge.
    let mut vocabulary = Vocabulary::of_bytes(0);
    vocabulary.tokens.sort();
    vocabulary.special_in_model = false;
    while let Some((left, right)) = most_frequent_pair(&words) {
        words = words
            .into_iter()
            .map(|(word, count)| (merge(&word, &left, &right), count))
            .collect();
        vocabulary.merge(&left, &right);
    }
    // Special tokens follow the other ones. `<unk>` is the first of them.
    let first = vocabulary.tokens.len();
    let special = &MINICPM[..SPECIAL_TOKENS - 1];
    vocabulary.size = first + SPECIAL_TOKENS;
    vocabulary
        .with_run(first, &["<unk>"])
        .with_run(first + 1, special)
}

/// Words as the pre-tokenizer splits them, for texts of letters, spaces and single punctuation marks.
fn words_of(text: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    for letter in text.chars() {
        let joins = letter.is_alphabetic()
            && words.last().is_some_and(|word| {
                word.ends_with(|last: char| last.is_alphabetic() || last == ' ')
            });
        match words.last_mut() {
            Some(word) if joins => word.push(letter),
            _ => words.push(letter.to_string()),
        }
    }
    words
}

fn most_frequent_pair(words: &BTreeMap<Vec<String>, u32>) -> Option<(String, String)> {
    let mut counts: BTreeMap<(&str, &str), u32> = BTreeMap::new();
    for (word, count) in words {
        for pair in word.windows(2) {
            *counts.entry((&pair[0], &pair[1])).or_default() += count;
        }
    }
    let most = *counts.values().max()?;
    let (pair, _) = counts.into_iter().find(|(_, count)| *count == most)?;
    Some((pair.0.to_string(), pair.1.to_string()))
}

fn merge(word: &[String], left: &str, right: &str) -> Vec<String> {
    let mut merged: Vec<String> = Vec::with_capacity(word.len());
    let mut rest = word.iter();
    while let Some(part) = rest.next() {
        if part == left && rest.as_slice().first().is_some_and(|next| next == right) {
            rest.next();
            merged.push(format!("{left}{right}"));
        } else {
            merged.push(part.clone());
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::demo::dataset::corpus;

    fn tokenizer() -> tokenizers::Tokenizer {
        let json = train(&corpus()).to_json().expect("fits").to_string();
        json.parse().expect("a tokenizer file")
    }

    fn tokens(text: &str) -> Vec<String> {
        tokenizer()
            .encode(text, false)
            .expect("encodes")
            .get_tokens()
            .to_vec()
    }

    #[test]
    fn every_word_of_the_demo_is_one_token() {
        for text in corpus() {
            assert_eq!(
                tokens(&text).len(),
                words_of(&text).len(),
                "{text}: {:?}",
                tokens(&text)
            );
        }
        assert_eq!(
            tokens("What colour is the shape?"),
            ["What", "Ġcolour", "Ġis", "Ġthe", "Ġshape", "?"]
        );
    }

    #[test]
    fn prompts_take_few_tokens() {
        let image = format!("<image>{}</image>", "<unk>".repeat(16));
        let text = format!(
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n{image}\nWhat colour is the shape?<|im_end|>\n<|im_start|>assistant\nred<|im_end|>\n"
        );
        let tokens = tokens(&text);
        assert_eq!(tokens.iter().filter(|token| *token == "<unk>").count(), 16);
        assert_eq!(tokens.len(), 47, "{tokens:?}");
    }

    #[test]
    fn any_text_survives_encoding_and_decoding() {
        let tokenizer = tokenizer();
        for text in [
            "What colour is the shape?",
            "naïve 12\n  x 漢字",
            "redgreen <b>",
        ] {
            let ids = tokenizer
                .encode(text, false)
                .expect("encodes")
                .get_ids()
                .to_vec();
            assert_eq!(tokenizer.decode(&ids, false).expect("decodes"), text);
        }
    }

    #[test]
    fn special_tokens_follow_the_vocabulary() {
        let vocabulary = train(&corpus());
        let tokenizer = tokenizer();
        assert_eq!(vocabulary.special.len(), SPECIAL_TOKENS);
        for (_, token) in &vocabulary.special {
            assert_eq!(
                tokenizer.token_to_id(token),
                Some(vocabulary.special_id(token) as u32)
            );
        }
        assert_eq!(tokenizer.get_vocab_size(true), vocabulary.size);
    }
}

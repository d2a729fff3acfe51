//! Generator of the demo's `tokenizer.json`: byte-level BPE in Qwen2's format. Its merges are trained on the demo's
//! own sentences until every word is one token.

use std::collections::BTreeMap;

use serde_json::{Value, json};

/// Pre-tokenizer pattern of Qwen2: contractions, words with one leading character, single digits, punctuation, white
/// space.
const SPLIT: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Special tokens in id order, after the vocabulary.
pub(super) const SPECIAL: [&str; 22] = [
    "<unk>",
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<image>",
    "</image>",
    "<ref>",
    "</ref>",
    "<box>",
    "</box>",
    "<quad>",
    "</quad>",
    "<point>",
    "</point>",
    "<slice>",
    "</slice>",
    "<image_id>",
    "</image_id>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|reserved_special_token_2|>",
    "<|reserved_special_token_3|>",
];

/// Trained vocabulary.
#[derive(Debug)]
pub(super) struct Vocabulary {
    tokens: Vec<String>,
    merges: Vec<String>,
}

impl Vocabulary {
    /// Trains merges on `texts`. Each step merges the most frequent pair (ties in alphabetical order), until every
    /// word is one token.
    pub(super) fn train(texts: &[String]) -> Self {
        let bytes = byte_letters();
        let mut tokens: Vec<String> = bytes.iter().map(char::to_string).collect();
        tokens.sort();
        let mut words: BTreeMap<Vec<String>, u32> = BTreeMap::new();
        for word in texts.iter().flat_map(|text| words_of(text)) {
            let letters = word
                .bytes()
                .map(|byte| bytes[usize::from(byte)].to_string())
                .collect();
            *words.entry(letters).or_default() += 1;
        }
        let mut merges = Vec::new();
        while let Some((left, right)) = most_frequent_pair(&words) {
            let merged = format!("{left}{right}");
            words = words
                .into_iter()
                .map(|(word, count)| (merge(&word, &left, &right), count))
                .collect();
            merges.push(format!("{left} {right}"));
            tokens.push(merged);
        }
        Self { tokens, merges }
    }

    /// Number of ids, including special tokens.
    pub(super) fn len(&self) -> usize {
        self.tokens.len() + SPECIAL.len()
    }

    /// Id of a special token.
    pub(super) fn special_id(&self, token: &str) -> usize {
        let index = SPECIAL
            .iter()
            .position(|known| *known == token)
            .expect("a token of the list above");
        self.tokens.len() + index
    }

    /// Contents of `tokenizer.json`.
    pub(super) fn to_json(&self) -> Value {
        let vocab: serde_json::Map<String, Value> = self
            .tokens
            .iter()
            .enumerate()
            .map(|(id, token)| (token.clone(), id.into()))
            .collect();
        let added: Vec<Value> = SPECIAL
            .iter()
            .map(|token| special_token(self.special_id(token), token))
            .collect();
        byte_level(vocab, &self.merges, added)
    }
}

/// Contents of a byte-level BPE's `tokenizer.json`, from tokens with ids, merges by rank, and entries of added
/// tokens.
pub(crate) fn byte_level(
    vocab: serde_json::Map<String, Value>,
    merges: &[String],
    added: Vec<Value>,
) -> Value {
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": { "type": "NFC" },
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                { "type": "Split", "pattern": { "Regex": SPLIT }, "behavior": "Isolated", "invert": false },
                { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false },
            ],
        },
        "post_processor": null,
        "decoder": { "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": false, "vocab": vocab, "merges": merges,
        },
    })
}

/// Entry of a special token among a `tokenizer.json`'s added tokens. It matches its exact spelling.
pub(crate) fn special_token(id: usize, content: &str) -> Value {
    json!({
        "id": id, "content": content, "single_word": false,
        "lstrip": false, "rstrip": false, "normalized": false, "special": true,
    })
}

/// Words as [`SPLIT`] splits them, for texts of letters, spaces and single punctuation marks.
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

/// Printable letter that represents each byte in byte-level BPE. Printable Latin-1 bytes represent themselves; the
/// others are mapped to letters from U+0100 on.
pub(crate) fn byte_letters() -> Vec<char> {
    let mut next = 0x100u32;
    (0..=255u8)
        .map(|byte| match byte {
            b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte),
            _ => {
                next += 1;
                char::from_u32(next - 1).expect("U+0100 to U+0143 are letters")
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::demo::dataset::corpus;

    fn tokenizer() -> tokenizers::Tokenizer {
        let json = Vocabulary::train(&corpus()).to_json().to_string();
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
        let vocabulary = Vocabulary::train(&corpus());
        let tokenizer = tokenizer();
        for token in SPECIAL {
            assert_eq!(
                tokenizer.token_to_id(token),
                Some(vocabulary.special_id(token) as u32)
            );
        }
        assert_eq!(tokenizer.get_vocab_size(true), vocabulary.len());
    }
}

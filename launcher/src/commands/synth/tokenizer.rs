//! Writer of `tokenizer.json`: byte-level BPE in Qwen2's format. `synth` makes vocabularies of a published size, with
//! one token per byte, special tokens at the ids that the model expects, and some whole words that a rule searches for.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

/// Pre-tokenizer pattern of Qwen2: contractions, words with one leading character, single digits, punctuation, white
/// space.
const SPLIT: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Tokens, merges and special tokens of a byte-level BPE.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Vocabulary {
    /// Vocabulary size: all ids are below it. Ids without a token are unused.
    pub(crate) size: usize,
    /// Tokens of bytes, then those of merges. They have the lowest free ids, in this order.
    pub(crate) tokens: Vec<String>,
    /// BPE merges: pairs of tokens separated by a space, in order of decreasing priority.
    merges: Vec<String>,
    /// Special tokens with fixed ids, as (id, text).
    pub(crate) special: Vec<(usize, &'static str)>,
    /// Special tokens without a fixed id. They get the lowest ids that are still free after `tokens`.
    loose: Vec<&'static str>,
    /// Whether the model's own vocabulary lists the tokens of `special` too. Qwen2's lists them as added tokens only.
    pub(crate) special_in_model: bool,
}

impl Vocabulary {
    /// Vocabulary of `size` ids with one token for each of the 256 byte values and no merges. All other ids are
    /// unused until tokens are added.
    pub(crate) fn of_bytes(size: usize) -> Self {
        Self {
            size,
            tokens: byte_letters().iter().map(char::to_string).collect(),
            special_in_model: true,
            ..Self::default()
        }
    }

    /// Adds the BPE merge of the tokens `left` and `right`, and the token that it results in.
    pub(crate) fn merge(&mut self, left: &str, right: &str) {
        self.merges.push(format!("{left} {right}"));
        self.tokens.push(format!("{left}{right}"));
    }

    /// Adds the merges that make `word`, which consists of lower-case letters, one token.
    pub(super) fn with_word(mut self, word: &str) -> Self {
        for end in 1..word.len() {
            self.merge(&word[..end], &word[end..=end]);
        }
        self
    }

    /// Adds a special token without a fixed id.
    pub(super) fn with_loose(mut self, token: &'static str) -> Self {
        self.loose.push(token);
        self
    }

    /// Adds `names` as special tokens with consecutive ids from `first` on.
    pub(crate) fn with_run(mut self, first: usize, names: &[&'static str]) -> Self {
        self.special.extend((first..).zip(names.iter().copied()));
        self
    }

    /// Id of `token`, which must be one of `special`; panics otherwise.
    pub(crate) fn special_id(&self, token: &str) -> usize {
        let found = self.special.iter().find(|(_, known)| *known == token);
        found.expect("a special token of the vocabulary").0
    }

    /// Content of `tokenizer.json`.
    ///
    /// # Errors
    /// A sentence that says which token does not fit.
    pub(crate) fn to_json(&self) -> Result<Value, String> {
        let taken: BTreeSet<usize> = self.special.iter().map(|(id, _)| *id).collect();
        if let Some((id, token)) = self.special.iter().find(|(id, _)| *id >= self.size) {
            return Err(format!(
                "the token {token} has id {id}, outside the vocabulary of {}",
                self.size
            ));
        }
        if taken.len() < self.special.len() {
            return Err("two special tokens have one id".to_owned());
        }
        let loose = self.loose.iter().map(|token| (*token, true));
        let plain = self.tokens.iter().map(|token| (token.as_str(), false));
        let needed = self.tokens.len() + self.loose.len() + taken.len();
        let mut free = (0..self.size).filter(|id| !taken.contains(id));
        let mut vocab = Map::new();
        let mut added: Vec<Value> = Vec::new();
        for (token, is_special) in plain.chain(loose) {
            let id = free.next().ok_or_else(|| {
                format!(
                    "a vocabulary of {} is too small, the tokenizer needs {needed}",
                    self.size
                )
            })?;
            if is_special {
                added.push(special_token(id, token));
            }
            vocab.insert(token.to_owned(), id.into());
        }
        for (id, token) in &self.special {
            added.push(special_token(*id, token));
            if self.special_in_model {
                vocab.insert((*token).to_owned(), (*id).into());
            }
        }
        Ok(byte_level(vocab, &self.merges, added))
    }
}

/// Contents of a byte-level BPE's `tokenizer.json`, from tokens with ids, merges by rank, and entries of added
/// tokens.
fn byte_level(vocab: Map<String, Value>, merges: &[String], added: Vec<Value>) -> Value {
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
fn special_token(id: usize, content: &str) -> Value {
    json!({
        "id": id, "content": content, "single_word": false,
        "lstrip": false, "rstrip": false, "normalized": false, "special": true,
    })
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

    fn vocabulary(size: usize) -> Vocabulary {
        Vocabulary::of_bytes(size)
            .with_loose("<unk>")
            .with_word("assistant")
            .with_run(size - 2, &["<s>", "</s>"])
    }

    #[test]
    fn bytes_words_and_special_tokens_are_found_at_their_ids() {
        let json = vocabulary(1000).to_json().expect("fits").to_string();
        let tokenizer: tokenizers::Tokenizer = json.parse().expect("a tokenizer file");
        assert_eq!(tokenizer.token_to_id("<s>"), Some(998));
        assert_eq!(tokenizer.token_to_id("</s>"), Some(999));
        let text = "<s>assistant\n漢 the</s><unk>";
        let encoded = tokenizer.encode(text, false).expect("encodes");
        let ids = encoded.get_ids();
        // One token per byte, except for the word and the special tokens.
        assert_eq!(
            ids.len(),
            1 + 1 + "\n漢 the".len() + 2,
            "{:?}",
            encoded.get_tokens()
        );
        assert!(ids.iter().all(|&id| id < 1000));
        assert_eq!(tokenizer.decode(ids, false).expect("decodes"), text);
    }

    #[test]
    fn a_vocabulary_that_cannot_be_built_is_refused_with_a_reason() {
        let least = 256 + 8 + 1 + 2;
        assert!(vocabulary(least).to_json().is_ok());
        let reason = vocabulary(least - 1).to_json().expect_err("too small");
        assert!(reason.contains(&format!("needs {least}")), "{reason}");
        let outside = Vocabulary::of_bytes(300).with_run(299, &["a", "b"]);
        assert!(outside.to_json().expect_err("outside").contains("id 300"));
        let twice = outside.with_run(0, &["c"]).with_run(0, &["d"]);
        assert!(Vocabulary { size: 400, ..twice }.to_json().is_err());
    }
}

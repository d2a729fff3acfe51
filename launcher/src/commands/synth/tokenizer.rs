//! Small tokenizer with the size of a published vocabulary. It has one token per byte, special tokens at the ids that
//! the model expects, and some whole words that a rule searches for. All other ids are unused.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use crate::commands::demo::tokenizer::{byte_letters, byte_level, special_token};

/// A family's requirements for its vocabulary.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Vocabulary {
    /// Vocabulary size: all ids are below it.
    pub(super) size: usize,
    /// Special tokens with fixed ids.
    pub(super) special: Vec<(usize, &'static str)>,
    /// Special tokens with any id.
    pub(super) loose: Vec<&'static str>,
    /// Words of lower-case letters that must be one token.
    pub(super) words: Vec<&'static str>,
}

impl Vocabulary {
    /// Adds `names` at consecutive ids from `first` on.
    pub(super) fn with_run(mut self, first: usize, names: &[&'static str]) -> Self {
        self.special.extend((first..).zip(names.iter().copied()));
        self
    }

    /// Content of `tokenizer.json`.
    ///
    /// # Errors
    /// A sentence that says which token does not fit.
    pub(super) fn to_json(&self) -> Result<Value, String> {
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
        let letters = byte_letters();
        let mut plain: Vec<String> = letters.iter().map(char::to_string).collect();
        let mut merges = Vec::new();
        for word in &self.words {
            for end in 1..word.len() {
                let (left, right) = (&word[..end], &word[end..=end]);
                merges.push(format!("{left} {right}"));
                plain.push(format!("{left}{right}"));
            }
        }
        plain.extend(self.loose.iter().map(ToString::to_string));
        let needed = plain.len() + taken.len();
        let mut free = (0..self.size).filter(|id| !taken.contains(id));
        let mut vocab = Map::new();
        let mut added: Vec<Value> = Vec::new();
        for token in plain {
            let id = free.next().ok_or_else(|| {
                format!(
                    "a vocabulary of {} is too small, the tokenizer needs {needed}",
                    self.size
                )
            })?;
            if self.loose.contains(&token.as_str()) {
                added.push(special_token(id, &token));
            }
            vocab.insert(token, id.into());
        }
        for (id, token) in &self.special {
            added.push(special_token(*id, token));
            vocab.insert((*token).to_owned(), (*id).into());
        }
        Ok(byte_level(vocab, &merges, added))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vocabulary(size: usize) -> Vocabulary {
        Vocabulary {
            size,
            loose: vec!["<unk>"],
            words: vec!["assistant"],
            ..Vocabulary::default()
        }
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
        let outside = Vocabulary {
            size: 300,
            ..Vocabulary::default()
        }
        .with_run(299, &["a", "b"]);
        assert!(outside.to_json().expect_err("outside").contains("id 300"));
        let twice = outside.with_run(0, &["c"]).with_run(0, &["d"]);
        assert!(Vocabulary { size: 400, ..twice }.to_json().is_err());
    }
}

//! `tokenizer.json` with the special tokens of `tokenizer_config.json`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use thiserror::Error;
use tokenizers::AddedToken;

use super::read_optional;

/// Why tokenizer files cannot be used, or text cannot be encoded.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// A file is missing or cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// A file does not hold what it should.
    #[error("{} is not valid: {reason}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What the parser found.
        reason: String,
    },
    /// A token that the model needs is not in the vocabulary.
    #[error("the tokenizer has no token {token:?}")]
    MissingToken {
        /// The token's text.
        token: String,
    },
    /// The two files disagree about the id of a token.
    #[error("token {token:?} is {stated} in tokenizer_config.json but {found} in tokenizer.json")]
    IdMismatch {
        /// The token's text.
        token: String,
        /// Id in `tokenizer_config.json`.
        stated: u32,
        /// Id that `tokenizer.json` leads to.
        found: u32,
    },
    /// The tokenizer failed on a text.
    #[error("cannot encode text of {bytes} bytes: {reason}")]
    Encode {
        /// Length of the text in bytes.
        bytes: usize,
        /// What the tokenizer said.
        reason: String,
    },
    /// The tokenizer failed on token ids, or one of them is negative.
    #[error("cannot decode {tokens} tokens: {reason}")]
    Decode {
        /// How many tokens.
        tokens: usize,
        /// What the tokenizer said.
        reason: String,
    },
}

/// Text to token ids and back.
#[derive(Clone, Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    eos: Option<String>,
    named: Vec<(&'static str, String)>,
}

impl Tokenizer {
    /// Reads `tokenizer.json` and, if present, `tokenizer_config.json` of the model folder `dir`.
    ///
    /// # Errors
    /// [`TokenizerError`] if `tokenizer.json` is missing or a file is invalid, or if they disagree.
    pub fn load(dir: &Path) -> Result<Self, TokenizerError> {
        let path = dir.join("tokenizer.json");
        let bytes = std::fs::read(&path).map_err(|source| TokenizerError::Read {
            path: path.clone(),
            source,
        })?;
        let invalid = |path: &Path, reason: String| TokenizerError::Invalid {
            path: path.to_owned(),
            reason,
        };
        let mut inner = tokenizers::Tokenizer::from_bytes(bytes)
            .map_err(|error| invalid(&path, error.to_string()))?;
        // lengths are the caller's business
        inner.with_padding(None);
        inner
            .with_truncation(None)
            .map_err(|error| invalid(&path, error.to_string()))?;

        let path = dir.join("tokenizer_config.json");
        let bytes = read_optional(&path).map_err(|source| TokenizerError::Read {
            path: path.clone(),
            source,
        })?;
        let config: TokenizerConfig = match bytes {
            None => TokenizerConfig::default(),
            Some(bytes) => {
                serde_json::from_slice(&bytes).map_err(|error| invalid(&path, error.to_string()))?
            }
        };
        let mut tokenizer = Self {
            inner,
            eos: None,
            named: config.named(),
        };
        tokenizer.eos = config.eos_token.map(TokenText::into_text);
        tokenizer.add_missing(&path, config.added_tokens_decoder)?;
        Ok(tokenizer)
    }

    /// Registers tokens that only `tokenizer_config.json` lists, in the order of their ids.
    fn add_missing(
        &mut self,
        path: &Path,
        added: BTreeMap<u32, Added>,
    ) -> Result<(), TokenizerError> {
        for (id, token) in added {
            let known = self
                .inner
                .get_added_vocabulary()
                .get_vocab()
                .contains_key(&token.content);
            if !known {
                let text = token.content.clone();
                let added = AddedToken::from(text, token.special)
                    .normalized(token.normalized)
                    .lstrip(token.lstrip)
                    .rstrip(token.rstrip)
                    .single_word(token.single_word);
                self.inner
                    .add_tokens([added])
                    .map_err(|error| TokenizerError::Invalid {
                        path: path.to_owned(),
                        reason: error.to_string(),
                    })?;
            }
            let found = self.inner.token_to_id(&token.content);
            let token = token.content;
            match found {
                Some(found) if found == id => {}
                Some(found) => {
                    return Err(TokenizerError::IdMismatch {
                        token,
                        stated: id,
                        found,
                    });
                }
                None => return Err(TokenizerError::MissingToken { token }),
            }
        }
        Ok(())
    }

    /// Id of the token spelt `token`.
    ///
    /// # Errors
    /// [`TokenizerError::MissingToken`] if the vocabulary has none.
    pub fn id(&self, token: &str) -> Result<i32, TokenizerError> {
        let id = self
            .inner
            .token_to_id(token)
            .and_then(|id| i32::try_from(id).ok());
        id.ok_or_else(|| TokenizerError::MissingToken {
            token: token.to_owned(),
        })
    }

    /// Id of the token that `tokenizer_config.json` names as end of sequence.
    ///
    /// # Errors
    /// [`TokenizerError::MissingToken`] if it names none, or one outside the vocabulary.
    pub fn eos_id(&self) -> Result<i32, TokenizerError> {
        self.id(self.eos.as_deref().unwrap_or("eos_token"))
    }

    /// The role tokens of `tokenizer_config.json` (`bos_token`, `eos_token`, ...) with their texts,
    /// as chat templates may refer to them.
    pub fn named_tokens(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.named.iter().map(|(name, text)| (*name, text.as_str()))
    }

    /// Highest number of tokens: ids are below it unless the vocabulary has gaps.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// Token ids of `text` as it stands: nothing is added, special tokens in it are recognised.
    ///
    /// # Errors
    /// [`TokenizerError::Encode`] if the tokenizer fails.
    pub fn encode(&self, text: &str) -> Result<Vec<i32>, TokenizerError> {
        let failed = |reason: String| TokenizerError::Encode {
            bytes: text.len(),
            reason,
        };
        let encoding = self.inner.encode_fast(text, false);
        let encoding = encoding.map_err(|error| failed(error.to_string()))?;
        let id = |&id: &u32| i32::try_from(id).map_err(|error| failed(error.to_string()));
        encoding.get_ids().iter().map(id).collect()
    }

    /// Text of `ids`, special tokens left out.
    ///
    /// # Errors
    /// [`TokenizerError::Decode`] for a negative id, or if the tokenizer fails.
    pub fn decode(&self, ids: &[i32]) -> Result<String, TokenizerError> {
        self.text_of(ids, true)
    }

    /// Text of `ids` with special tokens written out.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn decode_verbatim(&self, ids: &[i32]) -> Result<String, TokenizerError> {
        self.text_of(ids, false)
    }

    fn text_of(&self, ids: &[i32], skip_special: bool) -> Result<String, TokenizerError> {
        let failed = |reason: String| TokenizerError::Decode {
            tokens: ids.len(),
            reason,
        };
        let unsigned: Result<Vec<u32>, _> = ids.iter().map(|&id| u32::try_from(id)).collect();
        let unsigned = unsigned.map_err(|error| failed(error.to_string()))?;
        self.inner
            .decode(&unsigned, skip_special)
            .map_err(|error| failed(error.to_string()))
    }
}

#[derive(Deserialize, Default)]
struct TokenizerConfig {
    #[serde(default)]
    added_tokens_decoder: BTreeMap<u32, Added>,
    bos_token: Option<TokenText>,
    eos_token: Option<TokenText>,
    pad_token: Option<TokenText>,
    unk_token: Option<TokenText>,
}

impl TokenizerConfig {
    fn named(&self) -> Vec<(&'static str, String)> {
        let tokens = [
            ("bos_token", &self.bos_token),
            ("eos_token", &self.eos_token),
            ("pad_token", &self.pad_token),
            ("unk_token", &self.unk_token),
        ];
        let present = tokens
            .into_iter()
            .filter_map(|(name, token)| Some((name, token.clone()?)));
        present
            .map(|(name, token)| (name, token.into_text()))
            .collect()
    }
}

#[derive(Deserialize, Clone)]
#[serde(
    untagged,
    expecting = "expected a token's text or an object with its content"
)]
enum TokenText {
    Text(String),
    Object { content: String },
}

impl TokenText {
    fn into_text(self) -> String {
        match self {
            Self::Text(text) | Self::Object { content: text } => text,
        }
    }
}

#[derive(Deserialize)]
struct Added {
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    #[serde(default)]
    normalized: bool,
    #[serde(default)]
    special: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn model(merges: &Value) -> Value {
        json!({
            "version": "1.0", "truncation": null, "padding": null,
            "added_tokens": [{
                "id": 4, "content": "<end>", "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": true
            }],
            "normalizer": null, "pre_tokenizer": null, "post_processor": null, "decoder": null,
            "model": {
                "type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "<unk>": 3}, "merges": merges
            }
        })
    }

    fn load(tokenizer: &str, config: &str) -> Result<Tokenizer, TokenizerError> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tokenizer.json"), tokenizer).unwrap();
        std::fs::write(dir.path().join("tokenizer_config.json"), config).unwrap();
        Tokenizer::load(dir.path())
    }

    #[test]
    fn merges_may_be_strings_or_pairs() {
        for merges in [json!(["a b"]), json!([["a", "b"]])] {
            let tokenizer = load(&model(&merges).to_string(), "{}").unwrap();
            assert_eq!(tokenizer.encode("abb").unwrap(), [2, 1]);
        }
    }

    #[test]
    fn tokens_of_the_config_are_added_and_looked_up_by_text() {
        let config = json!({
            "added_tokens_decoder": {
                "3": {"content": "<unk>", "special": true},
                "4": {"content": "<end>", "special": true},
                "5": {"content": "<new>", "special": true}
            },
            "eos_token": {"content": "<end>"}
        });
        let tokenizer = load(&model(&json!([])).to_string(), &config.to_string()).unwrap();
        assert_eq!(
            tokenizer.encode("a<new><unk>b<end>").unwrap(),
            [0, 5, 3, 1, 4]
        );
        assert_eq!(tokenizer.decode(&[0, 5, 1]).unwrap().replace(' ', ""), "ab");
        assert_eq!(tokenizer.eos_id().unwrap(), 4);
        let missing = tokenizer.id("<image>").unwrap_err();
        assert!(matches!(missing, TokenizerError::MissingToken { token } if token == "<image>"));
    }

    #[test]
    fn files_that_disagree_are_an_error() {
        let config = json!({"added_tokens_decoder": {"3": {"content": "<end>"}}}).to_string();
        let error = load(&model(&json!([])).to_string(), &config).unwrap_err();
        assert!(matches!(
            error,
            TokenizerError::IdMismatch {
                stated: 3,
                found: 4,
                ..
            }
        ));
    }

    #[test]
    fn hostile_files_are_errors_not_panics() {
        let valid = model(&json!([])).to_string();
        for tokenizer in ["", "{", "[]", "{\"model\": 3}", &valid[..valid.len() / 2]] {
            assert!(matches!(
                load(tokenizer, "{}"),
                Err(TokenizerError::Invalid { .. })
            ));
        }
        let unknown_parts = model(&json!(["x y"])).to_string();
        assert!(matches!(
            load(&unknown_parts, "{}"),
            Err(TokenizerError::Invalid { .. })
        ));
        for config in [
            "[",
            "{\"eos_token\": 3}",
            "{\"added_tokens_decoder\": {\"x\": {}}}",
        ] {
            assert!(matches!(
                load(&valid, config),
                Err(TokenizerError::Invalid { .. })
            ));
        }
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(
            Tokenizer::load(dir.path()),
            Err(TokenizerError::Read { .. })
        ));
    }

    #[test]
    fn negative_ids_do_not_decode() {
        let tokenizer = load(&model(&json!([])).to_string(), "{}").unwrap();
        assert!(matches!(
            tokenizer.decode(&[-100]),
            Err(TokenizerError::Decode { tokens: 1, .. })
        ));
    }
}

//! Tokenizer of a model directory: text to token ids and back.
//!
//! | file | content |
//! |---|---|
//! | `tokenizer.json` | a whole tokenizer; preferred to `tokenizer.model` |
//! | `tokenizer.model` | a sentencepiece model, or lines of `base64 rank` in tiktoken's form |
//! | `tokenizer_config.json` | with either: added tokens, and the token that ends a sequence |
//!
//! The encoder is always that of the `tokenizers` crate. Files are untrusted: sizes are bounded (`limits`), every number
//! is checked, and files that the encoder would not reproduce exactly are refused.

mod config;
mod error;
mod json;
pub(in crate::text) mod limits;
mod merges;
mod part;
mod protobuf;
mod ranks;
mod sentencepiece;

use crate::places;
use std::path::{Path, PathBuf};

use tokenizers::{
    AddedToken, Encoding, Model, Normalizer, OffsetType, PreTokenizedString, PreTokenizer,
};

pub use error::TokenizerError;
pub use protobuf::WireError;
pub use ranks::RankError;
pub use sentencepiece::SentencePieceError;

use super::{literal, read_optional};
use config::TokenizerConfig;
use limits::MAX_ADDED_TOKENS;

/// Converts text to token ids and back, by the tokenizer files of a model.
#[derive(Clone, Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    named: Vec<(&'static str, String)>,
}

impl Tokenizer {
    /// Reads the vocabulary of the model directory `dir` and, if present, its `tokenizer_config.json`.
    ///
    /// # Errors
    /// [`TokenizerError`] if there is no vocabulary, if a file is invalid or too large, or if they disagree.
    pub fn load(dir: &Path) -> Result<Self, TokenizerError> {
        let dir = places::tokenizer(dir);
        let tokenizer = Self::vocabulary(&dir)?;
        let path = dir.join("tokenizer_config.json");
        match read(&path)? {
            None => Ok(tokenizer),
            Some(bytes) => tokenizer.with_config(&bytes, &path),
        }
    }

    fn vocabulary(dir: &Path) -> Result<Self, TokenizerError> {
        let path = dir.join("tokenizer.json");
        if let Some(bytes) = read(&path)? {
            return Self::of_json(&bytes, &path);
        }
        let path = dir.join("tokenizer.model");
        let bytes = read(&path)?.ok_or_else(|| TokenizerError::NoVocabulary {
            dir: dir.to_owned(),
        })?;
        Self::of_model(&bytes, &path)
    }

    /// The tokenizer of a `tokenizer.json` with this content.
    pub(crate) fn of_json(bytes: &[u8], path: &Path) -> Result<Self, TokenizerError> {
        let inner = json::build(bytes).map_err(|reason| invalid(path, reason))?;
        let named = Vec::new();
        Ok(Self { inner, named })
    }

    /// The tokenizer of a `tokenizer.model` with this content.
    pub(crate) fn of_model(bytes: &[u8], path: &Path) -> Result<Self, TokenizerError> {
        let path = path.to_owned();
        if ranks::is_rank_file(bytes) {
            let inner = ranks::build(bytes);
            let inner = inner.map_err(|source| TokenizerError::Ranks { path, source })?;
            let named = Vec::new();
            return Ok(Self { inner, named });
        }
        let built = sentencepiece::build(bytes);
        let built = built.map_err(|source| TokenizerError::SentencePiece { path, source })?;
        Ok(Self {
            inner: built.tokenizer,
            named: built.named,
        })
    }

    /// The tokenizer with the settings of a `tokenizer_config.json` of this content.
    pub(crate) fn with_config(mut self, bytes: &[u8], path: &Path) -> Result<Self, TokenizerError> {
        let config: TokenizerConfig =
            serde_json::from_slice(bytes).map_err(|error| invalid(path, error.to_string()))?;
        self.add_missing(path, &config)?;
        let stated = config.named();
        self.named
            .retain(|(name, _)| stated.iter().all(|(other, _)| name != other));
        self.named.extend(stated);
        Ok(self)
    }

    /// Registers tokens that only `tokenizer_config.json` lists, in the order of their ids.
    fn add_missing(&mut self, path: &Path, config: &TokenizerConfig) -> Result<(), TokenizerError> {
        let stated = &config.added_tokens_decoder;
        if stated.len() > MAX_ADDED_TOKENS {
            let count = stated.len();
            let reason = format!("{count} added tokens, at most {MAX_ADDED_TOKENS} are supported");
            return Err(invalid(path, reason));
        }
        let mut texts = stated.values().map(|token| &token.content);
        texts
            .try_for_each(|text| json::check_text(text))
            .map_err(|reason| invalid(path, reason))?;
        let known = self.inner.get_added_vocabulary().get_vocab();
        let missing: Vec<AddedToken> = stated
            .values()
            .filter(|token| !known.contains_key(&token.content))
            .map(config::Added::token)
            .collect();
        self.inner
            .add_tokens(missing)
            .map_err(|error| invalid(path, error.to_string()))?;
        for (&id, token) in stated {
            let token = token.content.clone();
            match self.inner.token_to_id(&token) {
                Some(found) if found == id => {}
                Some(found) => {
                    return Err(TokenizerError::IdMismatch {
                        path: path.to_owned(),
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

    /// Id of the token whose text is exactly `token`.
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

    /// Id of the token that ends a sequence, by `tokenizer_config.json` or the sentencepiece model.
    ///
    /// # Errors
    /// [`TokenizerError::MissingToken`] if none is named, or one outside the vocabulary.
    pub fn eos_id(&self) -> Result<i32, TokenizerError> {
        let role = "eos_token";
        let mut named = self.named_tokens();
        let eos = named.find(|&(name, _)| name == role);
        self.id(eos.map_or(role, |(_, text)| text))
    }

    /// The role tokens (`bos_token`, `eos_token`, ...) with their texts, as chat templates may refer to
    /// them.
    pub fn named_tokens(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.named.iter().map(|(name, text)| (*name, text.as_str()))
    }

    /// Number of tokens, added ones included; all ids are below it unless the vocabulary has gaps.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// Token ids of `text`. No token is added; special tokens in the text are recognized, unless
    /// [`literal::hidden`] hid them.
    ///
    /// # Errors
    /// [`TokenizerError::Encode`] if the tokenizer fails.
    pub fn encode(&self, text: &str) -> Result<Vec<i32>, TokenizerError> {
        let mut tokens = Vec::new();
        for (is_hidden, part) in literal::parts(text) {
            tokens.extend(match is_hidden {
                true => self.encode_plain(&part)?,
                false => ids(&part, self.inner.encode_fast(&*part, false))?,
            });
        }
        Ok(tokens)
    }

    /// Token ids of `text` in which no special or added token is recognized: `<|user|>` is text like any
    /// other.
    ///
    /// # Errors
    /// [`TokenizerError::Encode`] if the tokenizer fails.
    pub fn encode_plain(&self, text: &str) -> Result<Vec<i32>, TokenizerError> {
        let text = &literal::shown(text);
        ids(text, self.plain(text))
    }

    /// Runs the stages of the encoder on `text`, except the search for added tokens.
    fn plain(&self, text: &str) -> tokenizers::Result<Encoding> {
        let mut pieces = PreTokenizedString::from(text);
        if let Some(normalizer) = self.inner.get_normalizer() {
            pieces.normalize(|piece| normalizer.normalize(piece))?;
        }
        if let Some(pre_tokenizer) = self.inner.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut pieces)?;
        }
        let model = self.inner.get_model();
        pieces.tokenize(|piece| model.tokenize(piece.get()))?;
        pieces.into_encoding(None, 0, OffsetType::None)
    }

    /// Decodes the token ids `ids` to text, without special tokens.
    ///
    /// # Errors
    /// [`TokenizerError::Decode`] for a negative id, or if the tokenizer fails.
    pub fn decode(&self, ids: &[i32]) -> Result<String, TokenizerError> {
        self.text_of(ids, true)
    }

    /// Decodes the token ids `ids` to text, with special tokens.
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

fn ids(text: &str, encoding: tokenizers::Result<Encoding>) -> Result<Vec<i32>, TokenizerError> {
    let failed = |reason: String| TokenizerError::Encode {
        bytes: text.len(),
        reason,
    };
    let encoding = encoding.map_err(|error| failed(error.to_string()))?;
    let id = |&id: &u32| i32::try_from(id).map_err(|error| failed(error.to_string()));
    encoding.get_ids().iter().map(id).collect()
}

fn read(path: &Path) -> Result<Option<Vec<u8>>, TokenizerError> {
    read_optional(path).map_err(|source| TokenizerError::Read {
        path: path.to_owned(),
        source,
    })
}

fn invalid(path: &Path, reason: String) -> TokenizerError {
    let path: PathBuf = path.to_owned();
    TokenizerError::Invalid { path, reason }
}

#[cfg(test)]
mod tests;

//! Errors of tokenizer files and texts.

use std::path::PathBuf;

use thiserror::Error;

use super::ranks::RankError;
use super::sentencepiece::SentencePieceError;

/// Why tokenizer files cannot be used, or text cannot be encoded.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// A file is missing, too large or cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// Path of the file that cannot be read.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// The model directory has neither `tokenizer.json` nor `tokenizer.model`.
    #[error("{} has neither tokenizer.json nor tokenizer.model", dir.display())]
    NoVocabulary {
        /// The model directory that was searched.
        dir: PathBuf,
    },
    /// A JSON file has unexpected content.
    #[error("{} is not valid: {reason}", path.display())]
    Invalid {
        /// Path of the JSON file.
        path: PathBuf,
        /// What the parser found.
        reason: String,
    },
    /// A file of base64 tokens and ranks is not a vocabulary.
    #[error("{} is not a valid list of tokens and ranks", path.display())]
    Ranks {
        /// Path of the file of tokens and ranks.
        path: PathBuf,
        /// What is wrong with it.
        source: RankError,
    },
    /// A sentencepiece model is damaged or of an unsupported kind.
    #[error("{} is not a usable sentencepiece model", path.display())]
    SentencePiece {
        /// Path of the sentencepiece model.
        path: PathBuf,
        /// What is wrong with it.
        source: SentencePieceError,
    },
    /// A token of the model is not in the vocabulary.
    #[error("the tokenizer has no token {token:?}")]
    MissingToken {
        /// Text of the token.
        token: String,
    },
    /// A file and the vocabulary have different ids for a token.
    #[error("token {token:?} has id {found}, but {} states {stated}", path.display())]
    IdMismatch {
        /// The file that states an id.
        path: PathBuf,
        /// Text of the token.
        token: String,
        /// Id of the token by that file.
        stated: u32,
        /// Id of the token by the vocabulary.
        found: u32,
    },
    /// The tokenizer failed on a text.
    #[error("cannot encode text of {bytes} bytes: {reason}")]
    Encode {
        /// Length of the text in bytes.
        bytes: usize,
        /// Why the tokenizer failed.
        reason: String,
    },
    /// The tokenizer failed on token ids, or one of them is negative.
    #[error("cannot decode {tokens} tokens: {reason}")]
    Decode {
        /// Number of token ids to decode.
        tokens: usize,
        /// Why the tokenizer failed.
        reason: String,
    },
}

//! A sentencepiece model in the form of Llama's `tokenizer.model`: byte-pair encoding by scores, unknown
//! characters as bytes, a blank before the text, no normalization, no blanks removed.
//!
//! Models that the encoder cannot reproduce exactly are refused, with the name of the property. The split of digits is a
//! property of the vocabulary (no token has two digits), not of the encoder.

use std::collections::HashMap;

use thiserror::Error;
use tokenizers::decoders::DecoderWrapper;
use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::sequence::Sequence as Decoders;
use tokenizers::decoders::strip::Strip;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::{NormalizerWrapper, Prepend, Replace, Sequence as Normalizers};
use tokenizers::{AddedToken, Tokenizer};

use super::limits::{MAX_TOKEN_BYTES, MAX_TOKENS};
use super::merges::merge_table;
use super::protobuf::{Fields, Value, WireError};

/// The character of a blank in pieces.
const BLANK: &str = "\u{2581}";

/// Why a sentencepiece model cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SentencePieceError {
    /// The bytes are not a protobuf message.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// A field has an unexpected type of value.
    #[error("field {number} of the {message} has another type")]
    Field {
        /// Name of the protobuf message.
        message: &'static str,
        /// Number of the field in the message.
        number: u32,
    },
    /// The model has no piece.
    #[error("the model has no pieces")]
    Empty,
    /// More pieces than the limit.
    #[error("the model has more than {MAX_TOKENS} pieces")]
    Count,
    /// A text of the model is not UTF-8.
    #[error("field {number} of the {message} is not UTF-8")]
    Utf8 {
        /// Name of the protobuf message.
        message: &'static str,
        /// Number of the field in the message.
        number: u32,
    },
    /// A piece without text, or with more than the limit.
    #[error("piece {id} has {bytes} bytes, between 1 and {MAX_TOKEN_BYTES} are supported")]
    Length {
        /// Id of the piece.
        id: u32,
        /// Length of the piece in bytes.
        bytes: usize,
    },
    /// Two pieces have the same text.
    #[error("pieces {first} and {second} are both {text:?}")]
    Repeated {
        /// Text of both pieces.
        text: String,
        /// Id of the first piece with this text.
        first: u32,
        /// Id of the second piece with this text.
        second: u32,
    },
    /// A score is infinite or not a number.
    #[error("the score of piece {id} is not finite")]
    Score {
        /// Id of the piece.
        id: u32,
    },
    /// Two merged pieces have the same score, so that their order depends on the text.
    #[error(
        "pieces {first:?} and {second:?} have the same score, which this encoder does not support"
    )]
    Tie {
        /// Text of the first of the two pieces.
        first: String,
        /// Text of the second of the two pieces.
        second: String,
    },
    /// A piece is merged from a character that is no piece.
    #[error("piece {piece:?} contains {character:?}, which is not a piece")]
    MissingCharacter {
        /// Text of the piece.
        piece: String,
        /// The character in it that is no piece.
        character: String,
    },
    /// Unknown characters are encoded as bytes, but a byte has no piece; or bytes have unused pieces.
    #[error("{found} bytes have a piece, expected {expected}")]
    Bytes {
        /// Number of byte values that have a piece.
        found: usize,
        /// Number of byte values that must have a piece.
        expected: usize,
    },
    /// The model has no piece for unknown characters, or several.
    #[error("{found} pieces represent unknown characters, expected one")]
    Unknown {
        /// Number of pieces for unknown characters.
        found: usize,
    },
    /// A property of sentencepiece models that this encoder does not reproduce.
    #[error("{what} not supported")]
    Unsupported {
        /// The property, as the beginning of a sentence.
        what: &'static str,
    },
    /// The encoder refused the vocabulary.
    #[error("{0}")]
    Build(tokenizers::Error),
}

/// The tokenizer built from a sentencepiece model file, with its special tokens.
#[derive(Debug)]
pub(super) struct Built {
    pub(super) tokenizer: Tokenizer,
    /// Roles (`bos_token`, ...) and the texts of their tokens.
    pub(super) named: Vec<(&'static str, String)>,
}

/// Builds the encoder of the file `content`. Unknown, begin, end and other control pieces are its special
/// tokens.
pub(super) fn build(content: &[u8]) -> Result<Built, SentencePieceError> {
    let model = Model::read(content)?;
    let vocab = model.check()?;
    let merges = model.merges(&vocab)?;
    let of_kind = |kind| model.pieces.iter().filter(move |piece| piece.kind == kind);
    let unknown = of_kind(Kind::Unknown)
        .map(|piece| piece.text.clone())
        .next();
    let bpe = BPE::builder()
        .vocab_and_merges(vocab, merges)
        .unk_token(unknown.ok_or(SentencePieceError::Unknown { found: 0 })?)
        .fuse_unk(true)
        .byte_fallback(model.byte_fallback)
        .build()
        .map_err(SentencePieceError::Build)?;
    let mut tokenizer = Tokenizer::new(bpe);
    let specials = of_kind(Kind::Unknown).chain(of_kind(Kind::Control));
    let specials = specials.map(|piece| AddedToken::from(piece.text.as_str(), true));
    let specials: Vec<AddedToken> = specials.collect();
    model
        .wrap(&mut tokenizer)
        .and_then(|()| tokenizer.add_tokens(specials))
        .map_err(SentencePieceError::Build)?;
    let texts: Vec<&str> = model
        .pieces
        .iter()
        .map(|piece| piece.text.as_str())
        .collect();
    let named = model.roles.into_iter();
    let named = named.filter(|(_, text)| texts.contains(&text.as_str()));
    Ok(Built {
        tokenizer,
        named: named.collect(),
    })
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Normal,
    Unknown,
    Control,
    Byte,
}

#[derive(Debug)]
struct Piece {
    text: String,
    score: f32,
    kind: Kind,
}

/// Supported fields of a model file, with the defaults of sentencepiece.
#[derive(Debug)]
struct Model {
    pieces: Vec<Piece>,
    roles: Vec<(&'static str, String)>,
    byte_fallback: bool,
    dummy_prefix: bool,
}

impl Model {
    fn read(content: &[u8]) -> Result<Self, SentencePieceError> {
        let mut model = Self {
            pieces: Vec::new(),
            roles: Vec::new(),
            byte_fallback: false,
            dummy_prefix: true,
        };
        let (mut trainer, mut normalizer) = (&[][..], &[][..]);
        for field in Fields::new(content) {
            let (number, value) = field?;
            let message = "model";
            match number {
                1 => {
                    if model.pieces.len() == MAX_TOKENS {
                        return Err(SentencePieceError::Count);
                    }
                    let piece = Piece::read(bytes(value, message, number)?, model.pieces.len())?;
                    model.pieces.push(piece);
                }
                2 => trainer = bytes(value, message, number)?,
                3 => normalizer = bytes(value, message, number)?,
                _ => {}
            }
        }
        model.read_trainer(trainer)?;
        model.read_normalizer(normalizer)?;
        Ok(model)
    }

    fn read_trainer(&mut self, content: &[u8]) -> Result<(), SentencePieceError> {
        const BPE_MODEL: u64 = 2;
        let message = "trainer settings";
        let mut kind = 1;
        let mut suffix = false;
        let mut roles = [
            ("unk_token", "<unk>"),
            ("bos_token", "<s>"),
            ("eos_token", "</s>"),
            ("pad_token", "<pad>"),
        ];
        for field in Fields::new(content) {
            let (number, value) = field?;
            match number {
                3 => kind = varint(value, message, number)?,
                24 => suffix = varint(value, message, number)? != 0,
                35 => self.byte_fallback = varint(value, message, number)? != 0,
                45..=48 => roles[(number - 45) as usize].1 = text(value, message, number)?,
                _ => {}
            }
        }
        self.roles = roles.map(|(role, token)| (role, token.to_owned())).into();
        if kind != BPE_MODEL {
            return unsupported("models other than byte-pair encoding are");
        }
        if suffix {
            return unsupported("blanks as suffixes are");
        }
        Ok(())
    }

    fn read_normalizer(&mut self, content: &[u8]) -> Result<(), SentencePieceError> {
        let message = "normalizer settings";
        let (mut remove_blanks, mut escape_blanks, mut rules) = (true, true, false);
        for field in Fields::new(content) {
            let (number, value) = field?;
            match number {
                2 | 6 => rules |= !bytes(value, message, number)?.is_empty(),
                3 => self.dummy_prefix = varint(value, message, number)? != 0,
                4 => remove_blanks = varint(value, message, number)? != 0,
                5 => escape_blanks = varint(value, message, number)? != 0,
                _ => {}
            }
        }
        if rules {
            return unsupported("normalization other than identity is");
        }
        if remove_blanks {
            return unsupported("removing extra blanks is");
        }
        if !escape_blanks {
            return unsupported("blanks that are not escaped are");
        }
        Ok(())
    }

    /// The ids of the texts, if the pieces are a vocabulary.
    fn check(&self) -> Result<Vocab, SentencePieceError> {
        if self.pieces.is_empty() {
            return Err(SentencePieceError::Empty);
        }
        let mut vocab = Vocab::default();
        for (piece, id) in self.pieces.iter().zip(0u32..) {
            if let Some(first) = vocab.insert(piece.text.clone(), id) {
                return Err(SentencePieceError::Repeated {
                    text: piece.text.clone(),
                    first,
                    second: id,
                });
            }
        }
        let count = |kind| {
            self.pieces
                .iter()
                .filter(|piece| piece.kind == kind)
                .count()
        };
        let found = count(Kind::Unknown);
        if found != 1 {
            return Err(SentencePieceError::Unknown { found });
        }
        let is_byte = |byte: &u8| {
            let id = vocab.get(&format!("<{byte:#04X}>")).copied();
            id.is_some_and(|id| self.pieces[id as usize].kind == Kind::Byte)
        };
        let named_bytes = (0..=u8::MAX).filter(is_byte).count();
        let expected = if self.byte_fallback { 256 } else { 0 };
        if named_bytes != expected || count(Kind::Byte) != expected {
            return Err(SentencePieceError::Bytes {
                found: named_bytes,
                expected,
            });
        }
        Ok(vocab)
    }

    /// The merge table of the normal pieces.
    fn merges(&self, vocab: &Vocab) -> Result<Vec<(String, String)>, SentencePieceError> {
        let normal = self
            .pieces
            .iter()
            .filter(|piece| piece.kind == Kind::Normal);
        let mut normal: Vec<&Piece> = normal.collect();
        // stable: pieces of one score stay in the order of their ids
        normal.sort_by(|a, b| b.score.total_cmp(&a.score));
        let by_score: Vec<&str> = normal.iter().map(|piece| piece.text.as_str()).collect();
        let score: HashMap<&str, f32> = normal
            .iter()
            .map(|piece| (piece.text.as_str(), piece.score))
            .collect();
        let mut merges = Vec::<(String, String)>::new();
        let mut last: Option<(String, f32)> = None;
        for (left, right) in merge_table(&by_score) {
            let piece = format!("{left}{right}");
            for part in [left, right] {
                if !vocab.contains_key(part) {
                    let character = part.to_owned();
                    return Err(SentencePieceError::MissingCharacter { piece, character });
                }
            }
            let own = score.get(piece.as_str()).copied().unwrap_or_default();
            if let Some((first, _)) = last.filter(|&(_, before)| before == own) {
                return Err(SentencePieceError::Tie {
                    first,
                    second: piece,
                });
            }
            last = Some((piece, own));
            merges.push((left.to_owned(), right.to_owned()));
        }
        Ok(merges)
    }

    /// Sets the normalizer and decoder of `tokenizer`, between text and the alphabet of the pieces.
    fn wrap(&self, tokenizer: &mut Tokenizer) -> Result<(), tokenizers::Error> {
        let mut normalizers = Vec::<NormalizerWrapper>::new();
        let mut decoders: Vec<DecoderWrapper> = vec![
            Replace::new(BLANK, " ")?.into(),
            ByteFallback::new().into(),
            Fuse::new().into(),
        ];
        if self.dummy_prefix {
            normalizers.push(Prepend::new(BLANK.to_owned()).into());
            decoders.push(Strip::new(' ', 1, 0).into());
        }
        normalizers.push(Replace::new(" ", BLANK)?.into());
        tokenizer.with_normalizer(Some(Normalizers::new(normalizers)))?;
        tokenizer.with_decoder(Some(Decoders::new(decoders)));
        Ok(())
    }
}

impl Piece {
    fn read(content: &[u8], id: usize) -> Result<Self, SentencePieceError> {
        let message = "piece";
        let (mut piece_text, mut score, mut kind) = ("", 0f32, 1);
        for field in Fields::new(content) {
            let (number, value) = field?;
            match number {
                1 => piece_text = text(value, message, number)?,
                2 => {
                    let Value::Fixed32(bytes) = value else {
                        return Err(SentencePieceError::Field { message, number });
                    };
                    score = f32::from_le_bytes(bytes);
                }
                3 => kind = varint(value, message, number)?,
                _ => {}
            }
        }
        let id = id as u32;
        let bytes = piece_text.len();
        if bytes == 0 || bytes > MAX_TOKEN_BYTES {
            return Err(SentencePieceError::Length { id, bytes });
        }
        if !score.is_finite() {
            return Err(SentencePieceError::Score { id });
        }
        Ok(Self {
            text: piece_text.to_owned(),
            score: score + 0.0, // -0 is 0
            kind: match kind {
                1 => Kind::Normal,
                2 => Kind::Unknown,
                3 => Kind::Control,
                4 => return unsupported("user-defined pieces are"),
                5 => return unsupported("unused pieces are"),
                6 => Kind::Byte,
                _ => return unsupported("pieces of a kind that sentencepiece does not have are"),
            },
        })
    }
}

fn unsupported<T>(what: &'static str) -> Result<T, SentencePieceError> {
    Err(SentencePieceError::Unsupported { what })
}

fn bytes<'a>(
    value: Value<'a>,
    message: &'static str,
    number: u32,
) -> Result<&'a [u8], SentencePieceError> {
    match value {
        Value::Bytes(bytes) => Ok(bytes),
        _ => Err(SentencePieceError::Field { message, number }),
    }
}

fn text<'a>(
    value: Value<'a>,
    message: &'static str,
    number: u32,
) -> Result<&'a str, SentencePieceError> {
    std::str::from_utf8(bytes(value, message, number)?)
        .map_err(|_| SentencePieceError::Utf8 { message, number })
}

fn varint(value: Value<'_>, message: &'static str, number: u32) -> Result<u64, SentencePieceError> {
    match value {
        Value::Varint(value) => Ok(value),
        _ => Err(SentencePieceError::Field { message, number }),
    }
}

#[cfg(test)]
mod tests;

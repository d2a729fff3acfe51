//! Vocabulary file in tiktoken's format, as in GLM-4: one line per token, `base64(bytes) rank`.
//!
//! The rank is the token's id and its priority; all 256 single bytes are tokens, so every text can be
//! encoded. The file does not have the pattern that splits text into pieces: [`PATTERN`] is that of GLM-4.
//! Special tokens are in `tokenizer_config.json`.

use std::collections::HashSet;

use thiserror::Error;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{SplitDelimiterBehavior, Tokenizer};

use crate::base64;

use super::limits::{MAX_TOKEN_BYTES, MAX_TOKENS};
use super::merges::merge_table;

/// GLM-4's pattern that splits text before byte merges.
const PATTERN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Why a vocabulary file of base64 tokens and their ranks cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RankError {
    /// A line is not a token and its rank with one blank between them.
    #[error("line {line} is not a base64 token, a space and a rank")]
    Line {
        /// Number of the line, from 1.
        line: usize,
    },
    /// A token is not valid base64.
    #[error("the token of line {line} is not valid base64")]
    Base64 {
        /// Number of the line, from 1.
        line: usize,
    },
    /// An empty token, or with more than the limit.
    #[error(
        "the token of line {line} has {bytes} bytes, between 1 and {MAX_TOKEN_BYTES} are supported"
    )]
    Length {
        /// Number of the token's line, from 1.
        line: usize,
        /// Length of the token in bytes.
        bytes: usize,
    },
    /// The file has more tokens than the limit.
    #[error("there are more than {MAX_TOKENS} tokens")]
    Count,
    /// Two lines have the same token.
    #[error("line {line} repeats a token")]
    Repeated {
        /// Number of the later of the two lines, from 1.
        line: usize,
    },
    /// The ranks of n tokens are not 0 to n - 1, each once.
    #[error("rank {expected} is missing, {found} is in its place")]
    Gap {
        /// The first rank that is missing.
        expected: usize,
        /// The rank that the file has in its place.
        found: usize,
    },
    /// A single byte is no token, so some texts could not be encoded.
    #[error("the byte {byte:#04x} has no token")]
    MissingByte {
        /// The byte without a token.
        byte: u8,
    },
    /// The encoder refused the vocabulary.
    #[error("{0}")]
    Build(tokenizers::Error),
}

/// Whether the first line of `content` looks like a token and its rank.
pub(super) fn is_rank_file(content: &[u8]) -> bool {
    let line = lines(content).next();
    line.is_some_and(|(number, line)| split_line(number, line).is_ok())
}

/// Builds the encoder of the file `content`; it has no special tokens yet.
pub(super) fn build(content: &[u8]) -> Result<Tokenizer, RankError> {
    let spelt = byte_chars();
    let spell = |token: &Vec<u8>| -> String {
        token.iter().map(|&byte| spelt[usize::from(byte)]).collect()
    };
    let tokens: Vec<String> = read(content)?.iter().map(spell).collect();
    let by_rank: Vec<&str> = tokens.iter().map(String::as_str).collect();
    let owned = |(left, right): (&str, &str)| (left.to_owned(), right.to_owned());
    let merges = merge_table(&by_rank).into_iter().map(owned).collect();
    let vocab: Vocab = tokens.into_iter().zip(0u32..).collect();
    let model = BPE::builder()
        .vocab_and_merges(vocab, merges)
        .ignore_merges(true) // a piece that is a token is that token
        .build()
        .map_err(RankError::Build)?;
    let pattern = SplitPattern::Regex(PATTERN.to_owned());
    let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false);
    let bytes = ByteLevel::new(false, true, false);
    let mut tokenizer = Tokenizer::new(model);
    tokenizer.with_pre_tokenizer(Some(Sequence::new(vec![
        split.map_err(RankError::Build)?.into(),
        bytes.into(),
    ])));
    tokenizer.with_decoder(Some(bytes));
    Ok(tokenizer)
}

/// The tokens in the order of their ranks.
fn read(content: &[u8]) -> Result<Vec<Vec<u8>>, RankError> {
    let mut tokens = Vec::<(usize, Vec<u8>)>::new();
    let mut seen = HashSet::new();
    for (number, line) in lines(content) {
        if tokens.len() == MAX_TOKENS {
            return Err(RankError::Count);
        }
        let (text, rank) = split_line(number, line)?;
        let token = base64::decode(text).ok_or(RankError::Base64 { line: number })?;
        if token.is_empty() || token.len() > MAX_TOKEN_BYTES {
            return Err(RankError::Length {
                line: number,
                bytes: token.len(),
            });
        }
        if !seen.insert(token.clone()) {
            return Err(RankError::Repeated { line: number });
        }
        tokens.push((rank, token));
    }
    let missing = (0..=u8::MAX).find(|&byte| !seen.contains(&[byte][..]));
    if let Some(byte) = missing {
        return Err(RankError::MissingByte { byte });
    }
    tokens.sort_unstable();
    let ranks = tokens.iter().map(|&(rank, _)| rank).enumerate();
    for (expected, found) in ranks {
        if expected != found {
            return Err(RankError::Gap { expected, found });
        }
    }
    Ok(tokens.into_iter().map(|(_, token)| token).collect())
}

/// Lines that are not empty, with their numbers from 1.
fn lines(content: &[u8]) -> impl Iterator<Item = (usize, &[u8])> {
    let lines = content.split(|&byte| byte == b'\n').zip(1..);
    lines
        .map(|(line, number)| (number, line.strip_suffix(b"\r").unwrap_or(line)))
        .filter(|(_, line)| !line.is_empty())
}

fn split_line(number: usize, line: &[u8]) -> Result<(&[u8], usize), RankError> {
    let wrong = || RankError::Line { line: number };
    let blank = line
        .iter()
        .position(|&byte| byte == b' ')
        .ok_or_else(wrong)?;
    let (token, rank) = (&line[..blank], &line[blank + 1..]);
    let is_base64 = |byte: &u8| base64::sextet(*byte).is_some() || *byte == b'=';
    if !token.iter().all(is_base64) || rank.is_empty() || !rank.iter().all(u8::is_ascii_digit) {
        return Err(wrong());
    }
    let rank = std::str::from_utf8(rank).map_err(|_| wrong())?;
    Ok((token, rank.parse().map_err(|_| wrong())?))
}

/// The character of each byte in a byte-level vocabulary: itself if it is printable Latin-1, otherwise
/// one from U+0100 on.
fn byte_chars() -> [char; 256] {
    let mut others = (0x100u32..).filter_map(char::from_u32);
    std::array::from_fn(|index| match index as u8 {
        byte @ (b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff) => char::from(byte),
        _ => others.next().expect("there are more characters than bytes"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

    fn to_base64(bytes: &[u8]) -> String {
        let mut out = String::new();
        for group in bytes.chunks(3) {
            let bits = group
                .iter()
                .fold(0u32, |bits, &b| (bits << 8) | u32::from(b))
                << (8 * (3 - group.len()));
            for index in 0..4 {
                let sextet = (bits >> (18 - 6 * index)) & 63;
                out.push(if index > group.len() {
                    '='
                } else {
                    char::from(ALPHABET[sextet as usize])
                });
            }
        }
        out
    }

    /// All single bytes in order, then `more`.
    fn file(more: &[&[u8]]) -> String {
        let bytes: Vec<[u8; 1]> = (0..=u8::MAX).map(|byte| [byte]).collect();
        let tokens = bytes
            .iter()
            .map(|byte| &byte[..])
            .chain(more.iter().copied());
        tokens
            .zip(0..)
            .map(|(token, rank)| format!("{} {rank}\n", to_base64(token)))
            .collect()
    }

    fn ids(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
        tokenizer.encode(text, false).unwrap().get_ids().to_vec()
    }

    #[test]
    fn ranks_are_merge_priorities_and_whole_pieces_win() {
        // joining the bytes of "abcd" gets stuck at "ab", "c", "d"
        let tokenizer = build(file(&[b"ab", b"bc", b" a", b"abcd"]).as_bytes()).unwrap();
        assert_eq!(ids(&tokenizer, "abcd"), [259]);
        let [blank, c, d, e] = [b' ', b'c', b'd', b'e'].map(u32::from);
        assert_eq!(ids(&tokenizer, "abcd abcde"), [259, blank, 256, c, d, e]);
        assert_eq!(ids(&tokenizer, "bc ac"), [257, 258, c]);
        assert_eq!(ids(&tokenizer, "cé"), [c, 0xc3, 0xa9]);
        assert_eq!(tokenizer.decode(&[0xc3], false).unwrap(), "\u{fffd}");
    }

    #[test]
    fn empty_lines_and_carriage_returns_are_ignored() {
        let text = file(&[b"ab"]).replace('\n', "\r\n\r\n");
        assert!(is_rank_file(text.as_bytes()));
        assert_eq!(build(text.as_bytes()).unwrap().get_vocab_size(true), 257);
    }

    #[test]
    fn other_files_are_not_read_as_rank_files() {
        for content in [
            &b""[..],
            b"\n",
            b"{\"a\": 1}",
            b"\x0a\x0e\x0a\x05<unk>\x15\0\0\0\0",
            b"IQ==",
            b"I-8= 3",
            b"IQ== -3",
        ] {
            assert!(!is_rank_file(content), "{content:?}");
        }
    }

    #[test]
    fn each_error_of_a_rank_file_is_named() {
        let whole = file(&[b"ab"]);
        let after = |line: &str| format!("{whole}{line}\n");
        let of = |text: String| build(text.as_bytes()).unwrap_err();
        assert!(matches!(of(after("YWJj")), RankError::Line { line: 258 }));
        assert!(matches!(
            of(after("YWJj 99999999999999999999")),
            RankError::Line { line: 258 }
        ));
        assert!(matches!(
            of(after("YWJ 257")),
            RankError::Base64 { line: 258 }
        ));
        assert!(matches!(
            of(after(" 257")),
            RankError::Length { bytes: 0, .. }
        ));
        let long = to_base64(&[b'x'; MAX_TOKEN_BYTES + 1]);
        assert!(matches!(
            of(after(&format!("{long} 257"))),
            RankError::Length { .. }
        ));
        assert!(matches!(
            of(after("YWI= 257")),
            RankError::Repeated { line: 258 }
        ));
        assert!(matches!(
            of(after("YWJj 256")),
            RankError::Gap {
                expected: 257,
                found: 256
            }
        ));
        assert!(matches!(
            of(after("YWJj 258")),
            RankError::Gap {
                expected: 257,
                found: 258
            }
        ));
        assert!(matches!(
            of(whole.replace("AA== 0\n", "")),
            RankError::MissingByte { byte: 0 }
        ));
    }

    #[test]
    fn base64_is_strict() {
        assert_eq!(
            base64::decode(b"AAEC/w==").as_deref(),
            Some(&[0, 1, 2, 255][..])
        );
        for text in [
            "A", "AA", "AA=", "A===", "====", "AA==AA==", "AB==", "AAB=", "AA-_", "AA= ",
        ] {
            assert_eq!(base64::decode(text.as_bytes()), None, "{text}");
        }
    }

    #[test]
    fn bytes_are_spelled_as_in_byte_level_vocabularies() {
        let chars = byte_chars();
        let alphabet = ByteLevel::alphabet();
        assert!(chars.iter().all(|c| alphabet.contains(c)));
        for (byte, spelt) in [(b' ', 'Ġ'), (b'\n', 'Ċ'), (0xad, 'Ń'), (0x80, 'Ģ')] {
            assert_eq!(chars[usize::from(byte)], spelt);
        }
    }

    proptest! {
        #[test]
        fn base64_round_trips(bytes in proptest::collection::vec(any::<u8>(), 0..40)) {
            prop_assert_eq!(base64::decode(to_base64(&bytes).as_bytes()), Some(bytes));
        }
    }
}

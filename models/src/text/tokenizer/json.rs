//! Reader of `tokenizer.json`: checks the file before the `tokenizers` crate builds it.
//!
//! The crate trusts its input and can panic. Examples are a merge whose result is longer than every token, and a
//! decoder that strips more than it has. The checks accept byte-pair encoding whose merges are in the vocabulary, and
//! a list of other parts that are known to be safe.

use std::collections::{HashMap, HashSet};

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokenizers::decoders::DecoderWrapper;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::NormalizerWrapper;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::{AddedToken, Tokenizer};

use super::limits::{MAX_ADDED_TOKENS, MAX_PART_DEPTH, MAX_TOKENS};
use super::part::Part;

/// Maximal length of a token in bytes of JSON text. A byte-level token takes two per byte; added tokens are longer.
const MAX_TEXT_BYTES: usize = 4096;

/// Upper bound of ids (exclusive), so that ids of added tokens after them cannot overflow.
const MAX_ID: u32 = 1 << 30;

const NORMALIZERS: &[&str] = &[
    "Sequence",
    "NFC",
    "NFD",
    "NFKC",
    "NFKD",
    "Prepend",
    "Replace",
    "Lowercase",
    "Strip",
];
const PRE_TOKENIZERS: &[&str] = &[
    "Sequence",
    "Split",
    "ByteLevel",
    "Metaspace",
    "Digits",
    "Punctuation",
    "Whitespace",
    "WhitespaceSplit",
];
const DECODERS: &[&str] = &[
    "Sequence",
    "ByteLevel",
    "Metaspace",
    "Replace",
    "ByteFallback",
    "Fuse",
    "Strip",
];

/// Builds the encoder from the content of a file. The error is a message.
pub(super) fn build(content: &[u8]) -> Result<Tokenizer, String> {
    let file: File = serde_json::from_slice(content).map_err(|error| error.to_string())?;
    file.check()?;
    let added = file.added_tokens.clone();
    let mut tokenizer = file.build().map_err(|error| error.to_string())?;
    let tokens = added.iter().cloned().map(AddedId::token);
    tokenizer
        .add_tokens(tokens)
        .map_err(|error| error.to_string())?;
    for added in &added {
        if let Some(found) = tokenizer.token_to_id(&added.content)
            && found != added.id
        {
            let (token, stated) = (&added.content, added.id);
            return Err(format!(
                "added token {token:?} states id {stated}, but the vocabulary leads to {found}"
            ));
        }
    }
    Ok(tokenizer)
}

/// Fields of the file that are read. Truncation, padding and post-processing are up to the caller and ignored.
#[derive(Deserialize)]
struct File {
    version: Option<String>,
    model: Model,
    #[serde(default)]
    added_tokens: Vec<AddedId>,
    normalizer: Option<Part>,
    pre_tokenizer: Option<Part>,
    decoder: Option<Part>,
}

#[derive(Clone, Deserialize)]
struct AddedId {
    id: u32,
    content: String,
    single_word: bool,
    lstrip: bool,
    rstrip: bool,
    normalized: bool,
    special: bool,
}

impl AddedId {
    fn token(self) -> AddedToken {
        AddedToken {
            content: self.content,
            single_word: self.single_word,
            lstrip: self.lstrip,
            rstrip: self.rstrip,
            normalized: self.normalized,
            special: self.special,
        }
    }
}

#[derive(Deserialize)]
struct Model {
    #[serde(rename = "type")]
    kind: String,
    vocab: HashMap<String, u32>,
    merges: Vec<Merge>,
    unk_token: Option<String>,
    fuse_unk: Option<bool>,
    byte_fallback: Option<bool>,
    ignore_merges: Option<bool>,
    dropout: Option<f64>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
}

#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "a merge is a text of two tokens, or a pair of tokens"
)]
enum Merge {
    Text(String),
    Pair(String, String),
}

impl Merge {
    fn parts(&self) -> Option<(&str, &str)> {
        match self {
            Self::Text(text) => text
                .split_once(' ')
                .filter(|(_, right)| !right.contains(' ')),
            Self::Pair(left, right) => Some((left, right)),
        }
    }

    fn into_parts(self) -> Option<(String, String)> {
        match self {
            Self::Pair(left, right) => Some((left, right)),
            Self::Text(_) => self
                .parts()
                .map(|(left, right)| (left.to_owned(), right.to_owned())),
        }
    }
}

impl File {
    /// Builds the encoder without added tokens, part by part, so that nothing else of the file reaches the crate.
    fn build(self) -> tokenizers::Result<Tokenizer> {
        let mut tokenizer = Tokenizer::new(self.model.build()?);
        let normalizer: Option<NormalizerWrapper> = read_part(self.normalizer)?;
        tokenizer.with_normalizer(normalizer)?;
        let pre_tokenizer: Option<PreTokenizerWrapper> = read_part(self.pre_tokenizer)?;
        tokenizer.with_pre_tokenizer(pre_tokenizer);
        let decoder: Option<DecoderWrapper> = read_part(self.decoder)?;
        tokenizer.with_decoder(decoder);
        Ok(tokenizer)
    }

    fn check(&self) -> Result<(), String> {
        if self
            .version
            .as_ref()
            .is_some_and(|version| version != "1.0")
        {
            return Err(format!("version {:?} is unknown", self.version));
        }
        self.model.check()?;
        let added = self.added_tokens.len();
        if added > MAX_ADDED_TOKENS {
            return Err(format!(
                "{added} added tokens, at most {MAX_ADDED_TOKENS} are supported"
            ));
        }
        self.added_tokens
            .iter()
            .try_for_each(|added| check_text(&added.content))?;
        check_part("normalizer", self.normalizer.as_ref(), NORMALIZERS)?;
        check_part("pre_tokenizer", self.pre_tokenizer.as_ref(), PRE_TOKENIZERS)?;
        check_part("decoder", self.decoder.as_ref(), DECODERS)
    }
}

fn read_part<T: DeserializeOwned>(part: Option<Part>) -> tokenizers::Result<Option<T>> {
    Ok(match part {
        None => None,
        Some(Part(value)) => Some(serde_json::from_value(value)?),
    })
}

impl Model {
    fn build(self) -> tokenizers::Result<BPE> {
        let merges = self.merges.into_iter().filter_map(Merge::into_parts);
        let vocab: Vocab = self.vocab.into_iter().collect();
        let mut builder = BPE::builder()
            .vocab_and_merges(vocab, merges.collect())
            .fuse_unk(self.fuse_unk.unwrap_or(false))
            .byte_fallback(self.byte_fallback.unwrap_or(false))
            .ignore_merges(self.ignore_merges.unwrap_or(false));
        if let Some(unknown) = self.unk_token {
            builder = builder.unk_token(unknown);
        }
        builder.build()
    }

    fn check(&self) -> Result<(), String> {
        if self.kind != "BPE" {
            return Err(format!(
                "a model of type {:?} is not supported, only BPE",
                self.kind
            ));
        }
        if self.dropout.is_some_and(|dropout| dropout != 0.0) {
            return Err("dropout of merges is not supported".to_owned());
        }
        let affixes = [&self.continuing_subword_prefix, &self.end_of_word_suffix];
        if affixes.into_iter().flatten().any(|affix| !affix.is_empty()) {
            return Err("prefixes and suffixes of parts of words are not supported".to_owned());
        }
        let tokens = self.vocab.len();
        if tokens == 0 || tokens > MAX_TOKENS {
            return Err(format!(
                "{tokens} tokens, between 1 and {MAX_TOKENS} are supported"
            ));
        }
        let mut ids = HashSet::with_capacity(tokens);
        for (token, id) in &self.vocab {
            check_text(token)?;
            if *id >= MAX_ID {
                return Err(format!("token {token:?} has id {id}, not below {MAX_ID}"));
            }
            if !ids.insert(id) {
                return Err(format!("two tokens have id {id}"));
            }
        }
        if let Some(unknown) = &self.unk_token
            && !self.vocab.contains_key(unknown)
        {
            return Err(format!(
                "the unknown token {unknown:?} is not in the vocabulary"
            ));
        }
        self.check_merges()
    }

    fn check_merges(&self) -> Result<(), String> {
        let merges = self.merges.len();
        // Several pairs may merge into one token.
        if merges > 8 * MAX_TOKENS {
            return Err(format!(
                "{merges} merges, at most {} are supported",
                8 * MAX_TOKENS
            ));
        }
        let mut joined = String::new();
        for (merge, index) in self.merges.iter().zip(0..) {
            let parts = merge.parts();
            let (left, right) = parts.ok_or_else(|| format!("merge {index} is not a pair"))?;
            joined.clear();
            joined.push_str(left);
            joined.push_str(right);
            for token in [left, right, &joined] {
                if !self.vocab.contains_key(token) {
                    return Err(format!(
                        "merge {index} needs {token:?}, which is not a token"
                    ));
                }
            }
        }
        Ok(())
    }
}

/// Checks the length of a token.
pub(super) fn check_text(token: &str) -> Result<(), String> {
    let bytes = token.len();
    if bytes > MAX_TEXT_BYTES {
        return Err(format!(
            "a token of {bytes} bytes, at most {MAX_TEXT_BYTES} are read"
        ));
    }
    Ok(())
}

fn check_part(role: &str, part: Option<&Part>, known: &[&str]) -> Result<(), String> {
    part.map_or(Ok(()), |Part(part)| check_kind(role, part, known, 0))
}

fn check_kind(role: &str, part: &Value, known: &[&str], depth: usize) -> Result<(), String> {
    let kind = part["type"].as_str().unwrap_or_default();
    if !known.contains(&kind) {
        return Err(format!("a {role} of type {kind:?} is not supported"));
    }
    // The crate's counter would underflow.
    if role == "decoder" && kind == "Strip" && part["stop"] != 0 {
        return Err("a decoder that strips the end is not supported".to_owned());
    }
    // The crate miscounts if a pattern matches the empty text.
    let pattern = &part["pattern"];
    let (regex, text) = (pattern["Regex"].as_str(), pattern["String"].as_str());
    if role == "normalizer" && (regex.is_some_and(|regex| !takes_text(regex)) || text == Some("")) {
        return Err(format!(
            "a normalizer that replaces what matches {pattern:?} is not supported: it may match no text"
        ));
    }
    let inner = ["normalizers", "pretokenizers", "decoders"].map(|list| part[list].as_array());
    let mut inner = inner.into_iter().flatten().flatten();
    if depth == MAX_PART_DEPTH && inner.next().is_some() {
        return Err(format!("sequences of the {role} are nested too deeply"));
    }
    inner.try_for_each(|part| check_kind(role, part, known, depth + 1))
}

/// Whether every match of a pattern has at least one character; `false` if unsure (lookaround).
fn takes_text(pattern: &str) -> bool {
    let parsed = regex_syntax::parse(pattern).ok();
    parsed.is_some_and(|parsed| parsed.properties().minimum_len() != Some(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn valid() -> Value {
        json!({
            "version": "1.0", "added_tokens": [],
            "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]},
            "pre_tokenizer": null, "post_processor": null,
            "decoder": {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}
        })
    }

    fn reason(pointer: &str, value: Value) -> String {
        let mut file = valid();
        *file.pointer_mut(pointer).unwrap() = value;
        build(file.to_string().as_bytes()).unwrap_err()
    }

    fn model_reason(field: &str, value: Value) -> String {
        let mut file = valid();
        file["model"][field] = value;
        build(file.to_string().as_bytes()).unwrap_err()
    }

    #[test]
    fn merges_outside_the_vocabulary_are_named() {
        assert!(build(valid().to_string().as_bytes()).is_ok());
        for (merges, part) in [
            (json!(["a b", "ab ab"]), "merge 1 needs \"abab\""),
            (json!([["b", "a"]]), "merge 0 needs \"ba\""),
            (json!([["x", "a"]]), "merge 0 needs \"x\""),
            (json!(["ab"]), "merge 0 is not a pair"),
            (json!([3]), "a merge is a text of two tokens"),
            (json!([["a", "b", "c"]]), "a merge is a text of two tokens"),
        ] {
            let reason = model_reason("merges", merges);
            assert!(reason.contains(part), "{reason}");
        }
    }

    #[test]
    fn models_that_are_not_reproducible_or_ambiguous_are_refused() {
        for (field, value, part) in [
            ("type", json!("Unigram"), "only BPE"),
            ("dropout", json!(0.1), "dropout"),
            ("continuing_subword_prefix", json!("##"), "prefixes"),
            ("end_of_word_suffix", json!("</w>"), "suffixes"),
            ("vocab", json!({}), "0 tokens"),
            (
                "vocab",
                json!({"a": 0, "b": 0, "ab": 2}),
                "two tokens have id 0",
            ),
            ("vocab", json!({"a": -1}), "invalid value"),
            ("vocab", json!({"a".repeat(5000): 1}), "5000 bytes"),
            ("unk_token", json!("<unk>"), "unknown token"),
        ] {
            let reason = model_reason(field, value);
            assert!(reason.contains(part), "{reason}");
        }
    }

    #[test]
    fn unknown_large_or_deep_tokenizer_parts_are_refused() {
        let sequence = |inner: Value| json!({"type": "Sequence", "normalizers": [inner]});
        let deep = (0..5).fold(json!({"type": "NFC"}), |inner, _| sequence(inner));
        for (role, part, expected) in [
            (
                "/normalizer",
                json!({"type": "Precompiled", "precompiled_charsmap": ""}),
                "\"Precompiled\"",
            ),
            (
                "/normalizer",
                json!({"type": "Replace", "pattern": {"Regex": "a*"}, "content": "b"}),
                "may match no text",
            ),
            ("/normalizer", json!(3), "type \"\""),
            ("/normalizer", sequence(json!({"type": "Nmt"})), "\"Nmt\""),
            ("/normalizer", deep, "too deep"),
            (
                "/normalizer",
                json!({"type": "Prepend", "prepend": "x".repeat(20_000)}),
                "at most",
            ),
            (
                "/pre_tokenizer",
                json!({"type": "FixedLength", "length": 0}),
                "\"FixedLength\"",
            ),
            (
                "/decoder",
                json!({"type": "Strip", "content": " ", "start": 0, "stop": 1}),
                "strips the end",
            ),
        ] {
            let found = reason(role, part);
            assert!(found.contains(expected), "{found}");
        }
    }

    #[test]
    fn added_tokens_must_have_their_stated_ids() {
        let added = |id: u32, content: &str| {
            json!([{"id": id, "content": content, "single_word": false, "lstrip": false,
                    "rstrip": false, "normalized": false, "special": true}])
        };
        assert!(reason("/added_tokens", added(4, "<s>")).contains("states id 4"));
        assert!(reason("/added_tokens", added(0, "b")).contains("leads to 1"));
        let mut file = valid();
        file["added_tokens"] = added(3, "<s>");
        assert!(build(file.to_string().as_bytes()).is_ok());
    }
}

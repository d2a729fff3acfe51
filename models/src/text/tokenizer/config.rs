//! Supported fields of `tokenizer_config.json`.

use std::collections::BTreeMap;

use serde::Deserialize;
use tokenizers::AddedToken;

#[derive(Deserialize, Default)]
pub(super) struct TokenizerConfig {
    /// Tokens that are not in the vocabulary file, by their ids.
    #[serde(default)]
    pub(super) added_tokens_decoder: BTreeMap<u32, Added>,
    bos_token: Option<TokenText>,
    eos_token: Option<TokenText>,
    pad_token: Option<TokenText>,
    unk_token: Option<TokenText>,
}

impl TokenizerConfig {
    /// The role tokens that the file names: role (`bos_token`, ...) and text.
    pub(super) fn named(self) -> Vec<(&'static str, String)> {
        let tokens = [
            ("bos_token", self.bos_token),
            ("eos_token", self.eos_token),
            ("pad_token", self.pad_token),
            ("unk_token", self.unk_token),
        ];
        let present = tokens
            .into_iter()
            .filter_map(|(name, token)| Some((name, token?.into_text())));
        present.collect()
    }
}

#[derive(Deserialize)]
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

/// An added token as the configuration writes it.
#[derive(Deserialize)]
pub(super) struct Added {
    pub(super) content: String,
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

impl Added {
    pub(super) fn token(&self) -> AddedToken {
        AddedToken::from(self.content.as_str(), self.special)
            .normalized(self.normalized)
            .lstrip(self.lstrip)
            .rstrip(self.rstrip)
            .single_word(self.single_word)
    }
}

//! Text that spells a control token without being one, e.g. an `<|im_end|>` that a user typed.
//!
//! A hidden token carries two noncharacters of Unicode: one after its first character and one at its end. No search for
//! the token finds it then. [`Tokenizer::encode`](super::Tokenizer::encode) turns it into tokens of plain text.

use std::borrow::Cow;

const INSIDE: char = '\u{FDD0}';
const END: char = '\u{FDD1}';

/// `token` as text that is no token. Its first character is ASCII.
pub fn hidden(token: &str) -> String {
    let (first, rest) = token.split_at(1);
    format!("{first}{INSIDE}{rest}{END}")
}

/// `text` with every one of `tokens` hidden; the longest one where several begin.
pub fn hide<'t>(text: &'t str, tokens: &[String]) -> Cow<'t, str> {
    let found = |rest: &str| {
        let here = tokens
            .iter()
            .filter(|token| rest.starts_with(token.as_str()));
        here.max_by_key(|token| token.len()).cloned()
    };
    let mut hidden_text = String::new();
    let mut rest = text;
    while let Some((at, token)) = rest
        .char_indices()
        .find_map(|(at, _)| Some((at, found(&rest[at..])?)))
    {
        hidden_text.push_str(&rest[..at]);
        hidden_text.push_str(&hidden(&token));
        rest = &rest[at + token.len()..];
    }
    match hidden_text.is_empty() {
        true => Cow::Borrowed(text),
        false => Cow::Owned(hidden_text + rest),
    }
}

/// `text` as its author wrote it, with hidden tokens spelled out.
pub fn shown(text: &str) -> Cow<'_, str> {
    match text.contains([INSIDE, END]) {
        true => Cow::Owned(text.replace([INSIDE, END], "")),
        false => Cow::Borrowed(text),
    }
}

/// The parts of `text` in order; `true` for those that were hidden tokens.
pub(super) fn parts(text: &str) -> Vec<(bool, Cow<'_, str>)> {
    let mut parts = Vec::new();
    let mut rest = text;
    while let Some(inside) = rest.find(INSIDE) {
        let first = rest[..inside].chars().next_back();
        let start = inside - first.map_or(0, char::len_utf8);
        let end = rest[inside..]
            .find(END)
            .map_or(rest.len(), |at| inside + at);
        parts.push((false, Cow::Borrowed(&rest[..start])));
        parts.push((true, shown(&rest[start..end])));
        rest = rest[end..].strip_prefix(END).unwrap_or_default();
    }
    parts.push((false, shown(rest)));
    if parts.len() > 1 {
        parts.retain(|(_, part)| !part.is_empty());
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hidden_tokens_are_found_by_no_search_and_shown_again() {
        let tokens = ["<s>", "<s><x>"].map(str::to_owned);
        let text = "é<s><x> and <s>.";
        let hid = hide(text, &tokens);
        assert!(!hid.contains("<s>") && shown(&hid) == text);
        let kinds: Vec<(bool, String)> = parts(&hid)
            .into_iter()
            .map(|(is_token, part)| (is_token, part.into_owned()))
            .collect();
        let expected = [
            (false, "é"),
            (true, "<s><x>"),
            (false, " and "),
            (true, "<s>"),
            (false, "."),
        ];
        assert_eq!(kinds, expected.map(|(is, part)| (is, part.to_owned())));
    }

    #[test]
    fn text_without_tokens_stays_as_it_is() {
        assert!(matches!(
            hide("a < b", &["<s>".to_owned()]),
            Cow::Borrowed("a < b")
        ));
        for odd in ["\u{FDD0}", "a\u{FDD0}b", "\u{FDD1}x"] {
            let joined: String = parts(odd).iter().map(|(_, part)| part.as_ref()).collect();
            assert_eq!(joined, shown(odd));
        }
    }
}

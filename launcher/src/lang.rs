//! Language of messages: every text in English and Chinese side by side, and the language that is shown.
//!
//! A [`Text`] holds both languages until it is printed, so texts cross from ranks to the supervisor and into files
//! before anybody chooses. Logs, JSON and files have the English text. The process chooses once (`Lang::choose`),
//! and only what it draws for a person is in that language ([`Lang::speak`]).

use std::cell::Cell;
use std::ffi::OsString;
use std::fmt::{self, Write};
use std::ops::{AddAssign, Deref};
use std::sync::atomic::{AtomicBool, Ordering};

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// Name of the flag, which every subcommand takes.
pub(crate) const FLAG: &str = "lang";

/// Whether the process chose Chinese.
static CHINESE: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// Language in which this thread formats texts.
    static SPOKEN: Cell<Lang> = const { Cell::new(Lang::En) };
}

/// Language of messages for people.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Lang {
    /// English.
    #[default]
    En,
    /// Chinese.
    Zh,
}

impl Lang {
    /// The language whose command-line value is `name` (`en` or `zh`, in any case). `None` for any other name.
    pub(crate) fn named(name: &str) -> Option<Self> {
        Self::from_str(name, true).ok()
    }

    /// Language that the locale asks for; `lookup` returns an environment variable.
    ///
    /// The first of `LC_ALL`, `LC_MESSAGES` and `LANG` that is not empty is the locale. The first entry of `LANGUAGE`
    /// overrides it, except in the locales C and POSIX. A locale whose text is not UTF-8 gets English.
    pub fn of_environment(lookup: &dyn Fn(&str) -> Option<OsString>) -> Self {
        let value = |name: &str| {
            let value = lookup(name)?.into_string().ok()?;
            (!value.is_empty()).then_some(value)
        };
        let locale = ["LC_ALL", "LC_MESSAGES", "LANG"]
            .into_iter()
            .find_map(value);
        let locale = locale.unwrap_or_default();
        let (name, charset) = locale.split_once('.').unwrap_or((&locale, "UTF-8"));
        let charset = charset
            .split('@')
            .next()
            .unwrap_or(charset)
            .replace('-', "");
        if matches!(name, "" | "C" | "POSIX") || !charset.eq_ignore_ascii_case("utf8") {
            return Self::En;
        }
        let first = value("LANGUAGE").and_then(|list| Some(list.split(':').next()?.to_owned()));
        let asked = first
            .filter(|entry| !entry.is_empty())
            .unwrap_or_else(|| name.to_owned());
        let language = asked.split(['_', '-', '@', '.']).next().unwrap_or(&asked);
        match language.eq_ignore_ascii_case("zh") {
            true => Self::Zh,
            false => Self::En,
        }
    }

    /// Makes this the language of the process.
    pub(crate) fn choose(self) {
        CHINESE.store(self == Self::Zh, Ordering::Relaxed);
    }

    /// The language of the process; English until it has chosen.
    pub(crate) fn chosen() -> Self {
        match CHINESE.load(Ordering::Relaxed) {
            true => Self::Zh,
            false => Self::En,
        }
    }

    /// Calls `format`, in which texts are formatted in this language.
    pub fn speak<T>(self, format: impl FnOnce() -> T) -> T {
        /// Restores the former language, after a panic too.
        struct Former(Lang);
        impl Drop for Former {
            fn drop(&mut self) {
                SPOKEN.set(self.0);
            }
        }
        let _former = Former(SPOKEN.replace(self));
        format()
    }
}

/// A fixed text in English and Chinese.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Both {
    /// The English text.
    pub en: &'static str,
    /// The Chinese text.
    pub zh: &'static str,
}

/// A fixed text with its translation.
pub const fn both(en: &'static str, zh: &'static str) -> Both {
    Both { en, zh }
}

impl Both {
    /// The text in one language.
    pub const fn get(&self, lang: Lang) -> &'static str {
        match lang {
            Lang::En => self.en,
            Lang::Zh => self.zh,
        }
    }
}

/// In English, as programs read it.
impl Serialize for Both {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(self.en)
    }
}

impl fmt::Display for Both {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        pad(f, self.get(SPOKEN.get()))
    }
}

/// A text in English and Chinese with values in it. It dereferences to the English text; formatting writes the
/// language of the innermost [`Lang::speak`].
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Text(Box<Languages>);

#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Languages {
    en: String,
    zh: String,
}

/// A [`Text`] from an English and a Chinese format string with the same values: `text!("rank {rank}", "rank {rank}")`.
/// Values that are texts themselves appear in the language of each.
#[macro_export]
macro_rules! text {
    ($en:literal, $zh:literal $($values:tt)*) => {
        $crate::lang::Text::new(
            $crate::lang::Lang::En.speak(|| ::std::fmt::format(::std::format_args!($en $($values)*))),
            $crate::lang::Lang::Zh.speak(|| ::std::fmt::format(::std::format_args!($zh $($values)*))),
        )
    };
}
pub(crate) use text;

impl Text {
    /// A text with its translation; [`text!`] formats both.
    pub fn new(en: impl Into<String>, zh: impl Into<String>) -> Self {
        Self(Box::new(Languages {
            en: en.into(),
            zh: zh.into(),
        }))
    }

    /// What is the same in every language: a name, a path, a command line, a message of the operating system.
    pub fn literal(words: impl fmt::Display) -> Self {
        let words = words.to_string();
        Self::new(words.clone(), words)
    }

    /// The text that `format` writes in each language.
    pub(crate) fn each(format: impl Fn() -> String) -> Self {
        Self::new(Lang::En.speak(&format), Lang::Zh.speak(&format))
    }

    /// The text in one language.
    pub fn get(&self, lang: Lang) -> &str {
        match lang {
            Lang::En => &self.0.en,
            Lang::Zh => &self.0.zh,
        }
    }

    /// Serializes the English text alone, for files that programs read.
    pub(crate) fn english<S: serde::Serializer>(text: &Self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(text)
    }

    /// As [`Text::english`], for a list.
    pub(crate) fn english_list<S: serde::Serializer>(
        texts: &[Self],
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.collect_seq(texts.iter().map(|text| text.get(Lang::En)))
    }

    /// The text without `end`, if it ends so.
    pub(crate) fn without_end(&self, end: Both) -> Self {
        let of = |lang: Lang| self.get(lang).trim_end_matches(end.get(lang)).to_owned();
        Self::new(of(Lang::En), of(Lang::Zh))
    }

    /// `texts` as a list in a sentence.
    pub(crate) fn list<T: fmt::Display>(texts: &[T]) -> Self {
        let words = |lang: Lang| lang.speak(|| texts.iter().map(T::to_string).collect::<Vec<_>>());
        Self::new(words(Lang::En).join(", "), words(Lang::Zh).join("、"))
    }

    /// `texts` with `separator` between them.
    pub(crate) fn join<T: fmt::Display>(texts: &[T], separator: &str) -> Self {
        Self::each(|| {
            let words: Vec<String> = texts.iter().map(T::to_string).collect();
            words.join(separator)
        })
    }
}

impl Deref for Text {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0.en
    }
}

impl fmt::Display for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        pad(f, self.get(SPOKEN.get()))
    }
}

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0.en, f)
    }
}

impl std::error::Error for Text {}

impl From<Both> for Text {
    fn from(both: Both) -> Self {
        Self::new(both.en, both.zh)
    }
}

impl From<&Self> for Text {
    fn from(text: &Self) -> Self {
        text.clone()
    }
}

#[cfg(test)]
impl From<String> for Text {
    fn from(words: String) -> Self {
        Self::literal(words)
    }
}

#[cfg(test)]
impl From<&str> for Text {
    fn from(words: &str) -> Self {
        Self::literal(words)
    }
}

impl<T: Into<Self>> AddAssign<T> for Text {
    fn add_assign(&mut self, more: T) {
        let more = more.into();
        self.0.en += &more.0.en;
        self.0.zh += &more.0.zh;
    }
}

impl PartialEq<str> for Text {
    fn eq(&self, english: &str) -> bool {
        self.0.en == english
    }
}

impl PartialEq<&str> for Text {
    fn eq(&self, english: &&str) -> bool {
        self.0.en == *english
    }
}

impl PartialEq<String> for Text {
    fn eq(&self, english: &String) -> bool {
        self.0.en == *english
    }
}

/// Writes `words`, filled up with spaces to the width of the format in terminal columns.
fn pad(f: &mut fmt::Formatter<'_>, words: &str) -> fmt::Result {
    let missing = f.width().unwrap_or(0).saturating_sub(columns(words));
    let before = match f.align() {
        Some(fmt::Alignment::Right) => missing,
        Some(fmt::Alignment::Center) => missing / 2,
        _ => 0,
    };
    (0..before).try_for_each(|_| f.write_char(' '))?;
    f.write_str(words)?;
    (before..missing).try_for_each(|_| f.write_char(' '))
}

/// Columns that `words` take in a terminal. A wide character takes two.
pub(crate) fn columns(words: &str) -> usize {
    words
        .chars()
        .map(|letter| if is_wide(letter) { 2 } else { 1 })
        .sum()
}

/// Whether a character is wide: Chinese characters and their punctuation.
pub(crate) fn is_wide(letter: char) -> bool {
    matches!(letter, '\u{2e80}'..='\u{ffef}')
}

/// Panics if `shown`, spoken in Chinese, has an English sentence: three lower-case words in a row outside of quotes.
#[cfg(test)]
pub(crate) fn assert_chinese(shown: &impl fmt::Display) {
    let text = Lang::Zh.speak(|| shown.to_string());
    let open = text.split(['`', '\'', '"']).step_by(2);
    let is_word = |word: &&str| word.len() > 1 && word.bytes().all(|b| b.is_ascii_lowercase());
    for part in open {
        let words: Vec<&str> = part.split(' ').collect();
        let sentence = words.windows(3).find(|words| words.iter().all(is_word));
        assert_eq!(sentence, None, "{text}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::path::Path;

    /// Names that Chinese texts have where the English text has another form of the word.
    const NAMES: [&str; 32] = [
        "NVLink",
        "ZeRO",
        "rank",
        "token",
        "id",
        "nvme",
        "GPU",
        "CPU",
        "CUDA",
        "NCCL",
        "RAM",
        "alpha",
        "epoch",
        "world",
        "size",
        "patch",
        "panic",
        "slot",
        "slots",
        "launcher",
        "JSON",
        "Hub",
        "Hugging",
        "Face",
        "Infinity",
        "NaN",
        "KV",
        "fio",
        "shell",
        "cross",
        "attention",
        "gpu",
    ];

    fn of(variables: &[(&str, &str)]) -> Lang {
        Lang::of_environment(&|name| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| value.into())
        })
    }

    #[test]
    fn the_locale_decides_in_the_order_of_posix() {
        for zh in [
            &[("LANG", "zh_CN.UTF-8")][..],
            &[("LANG", "zh_CN")],
            &[("LANG", "zh_TW.utf8")],
            &[("LANG", "en_US.UTF-8"), ("LC_MESSAGES", "zh_CN.UTF-8")],
            &[("LANG", "en_US.UTF-8"), ("LC_ALL", "zh_CN.UTF-8@x")],
            &[("LANG", "zh_CN.UTF-8"), ("LC_ALL", "")],
            &[("LANG", "en_US.UTF-8"), ("LANGUAGE", "zh_CN:en")],
        ] {
            assert_eq!(of(zh), Lang::Zh, "{zh:?}");
        }
        for en in [
            &[][..],
            &[("LANG", "C")],
            &[("LANG", "zh_CN.UTF-8"), ("LC_ALL", "C")],
            &[("LANG", "zh_CN.UTF-8"), ("LANGUAGE", "en:zh")],
            &[("LANG", "C.UTF-8"), ("LANGUAGE", "zh_CN")],
            &[("LANG", "zh_CN.GB18030")],
            &[("LANG", "zhx_CN.UTF-8")],
        ] {
            assert_eq!(of(en), Lang::En, "{en:?}");
        }
    }

    #[test]
    fn texts_are_formatted_in_the_language_that_is_spoken() {
        let inner = both("loss", "损失");
        let text = text!("{inner} is {}", "{inner}为 {}", 3);
        assert_eq!(text.to_string(), "loss is 3");
        assert_eq!(
            Lang::Zh.speak(|| format!("{text:<9}|{inner:>6}|")),
            "损失为 3 |  损失|"
        );
        assert_eq!(Lang::En.speak(|| inner.to_string()), "loss");
        let stored = serde_json::to_string(&text).expect("serialises");
        assert_eq!(serde_json::from_str::<Text>(&stored).ok(), Some(text));
    }

    /// A pair of literals in the sources: file, English, Chinese.
    type Pair = (String, String, String);

    fn collect(directory: &Path, found: &mut Vec<Pair>) {
        for entry in std::fs::read_dir(directory).expect("a directory") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                collect(&path, found);
            } else if path.extension().is_some_and(|kind| kind == "rs") {
                let text = std::fs::read_to_string(&path).expect("a source file");
                let name = path.display().to_string();
                found.extend(
                    pairs(&text)
                        .into_iter()
                        .map(|(en, zh)| (name.clone(), en, zh)),
                );
            }
        }
    }

    /// The two literals after each `text!(` and `both(`.
    fn pairs(source: &str) -> Vec<(String, String)> {
        let production = source
            .split("#[cfg(test)]\nmod tests")
            .next()
            .unwrap_or(source);
        let opened = |mark: &'static str| {
            production
                .match_indices(mark)
                .map(|(at, _)| at + mark.len())
        };
        let starts = opened("text!(").chain(opened("both("));
        starts
            .filter_map(|at| {
                let (en, rest) = literal(&production[at..])?;
                let (zh, _) = literal(rest.trim_start().strip_prefix(',')?)?;
                Some((en, zh))
            })
            .collect()
    }

    /// The string literal at the beginning of `source`, and what follows it.
    fn literal(source: &str) -> Option<(String, &str)> {
        let body = source.trim_start().strip_prefix('"')?;
        let mut text = String::new();
        let mut letters = body.char_indices();
        while let Some((at, letter)) = letters.next() {
            match letter {
                '"' => return Some((text, &body[at + 1..])),
                '\\' => text.extend(letters.next().map(|(_, escaped)| escaped)),
                other => text.push(other),
            }
        }
        None
    }

    /// A format string without its values, and the names of the values that have one.
    fn taken_apart(format: &str) -> (String, BTreeSet<String>) {
        let mut names = BTreeSet::new();
        let mut parts = format.split('{');
        let mut words = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            let (value, rest) = part.split_once('}').unwrap_or(("", part));
            let name = value.split(':').next().unwrap_or(value);
            if name.starts_with(|first: char| first.is_ascii_alphabetic()) {
                names.insert(name.to_owned());
            }
            words.push(' ');
            words += rest;
        }
        (words, names)
    }

    fn words(text: &str) -> BTreeSet<&str> {
        let split = text.split(|letter: char| !letter.is_ascii_alphanumeric());
        split
            .filter(|word| word.len() > 1 && word.chars().any(|c| c.is_ascii_alphabetic()))
            .collect()
    }

    #[test]
    fn every_text_has_its_chinese_with_the_same_values_and_no_english_words() {
        let mut found = Vec::new();
        collect(
            &Path::new(env!("CARGO_MANIFEST_DIR")).join("src"),
            &mut found,
        );
        assert!(found.len() > 1000, "{} texts", found.len());
        let mut wrong = Vec::new();
        for (file, en, zh) in found {
            let ((english, values), (chinese, own)) = (taken_apart(&en), taken_apart(&zh));
            // Words of an English sentence need not be values of the Chinese one: `{have}`, `{compute}`.
            let known = words(&english);
            let strange: Vec<&str> = words(&chinese)
                .into_iter()
                .filter(|word| !known.contains(word) && !NAMES.contains(word))
                .collect();
            let is_command =
                english.trim_start().starts_with(['-', '{', '/']) || english.contains("launcher ");
            let prose = known.len() > 2 && !is_command && !zh.chars().any(is_wide);
            if !own.is_subset(&values) || !strange.is_empty() || prose {
                wrong.push(format!("{file}: {strange:?}\n  {en}\n  {zh}"));
            }
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }
}

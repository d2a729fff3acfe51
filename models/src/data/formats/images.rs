//! Images of a sample in every spelling, and their places in the text.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use regex::Regex;
use serde_json::{Map, Value};

use super::entry::Keys;
use crate::data::raw::SINGLE_IMAGE;
use crate::parquet::Address;
use crate::text::Message;

/// Keys of a sample or a turn that give its images.
const SPELLINGS: [&str; 23] = [
    "image",
    "images",
    "image_path",
    "image_paths",
    "image_file",
    "image_files",
    "image_list",
    "image_url",
    "image_urls",
    "img",
    "imgs",
    "img_path",
    "picture",
    "pictures",
    "file_name",
    "file_names",
    "image_file_name",
    "image_file_names",
    "images_file_name",
    "images_file_names",
    "jpg",
    "image_name",
    "image_uri",
];
/// Extensions of image files.
pub(super) const ENDINGS: [&str; 8] = ["jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff"];
/// Longest name of a file on Linux. Longer base64 is the file itself.
const LONGEST_NAME_BYTES: usize = 255;
/// Keys of an image that is an object. Bytes are the image itself; a path beside them is where it came from.
const PATHS: [&str; 6] = ["bytes", "path", "url", "image", "image_url", "file_name"];

static NAMED: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"<image_\d+>").expect("a constant pattern is valid"));
static TAG: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"<img>([^<>]*)</img>").expect("a constant pattern is valid"));

/// Images of Markdown and of HTML, by their addresses.
static LINKED: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(
        r#"!\[[^\]]*\]\(\s*([^)"]*[^)"\s])[^)]*\)|<img\s[^>]*src\s*=\s*["']?([^"'>\s]+)[^>]*>"#,
    )
    .expect("a constant pattern is valid")
});
/// Images as a sample gives them.
pub(super) enum Given {
    /// Paths in order.
    List(Vec<PathBuf>),
    /// The text that stands for each image, and its path.
    Named(Vec<(String, PathBuf)>),
}

/// Takes the images of a sample or turn.
///
/// # Errors
/// Two keys give images, or a value is no path.
pub(super) fn take(keys: &mut Keys) -> Result<Given, String> {
    let Some((key, value)) = keys.take_one_of(&SPELLINGS)? else {
        return Ok(Given::List(Vec::new()));
    };
    given(value).map_err(|reason| keys.refusal(&format!("{key:?}: {reason}")))
}

fn given(value: Value) -> Result<Given, String> {
    match value {
        Value::Array(list) => {
            let paths: Result<Vec<_>, _> = list.iter().map(path).collect();
            Ok(Given::List(paths?.into_iter().flatten().collect()))
        }
        Value::Object(names) if names.keys().all(|name| !is_path_key(name)) => {
            let named = |(name, value): (&String, &Value)| match path(value)? {
                Some(path) => Ok((name.clone(), path)),
                None => Err(format!("image {name} has no path")),
            };
            let named: Result<Vec<_>, String> = names.iter().map(named).collect();
            Ok(Given::Named(named?))
        }
        one => Ok(Given::List(path(&one)?.into_iter().collect())),
    }
}

fn is_path_key(name: &str) -> bool {
    PATHS.contains(&name)
}

/// The path that `value` gives: a text, or an object with a path, an address or the bytes of a file in base64.
///
/// # Errors
/// `value` is neither, or an address of another machine.
pub(super) fn path(value: &Value) -> Result<Option<PathBuf>, String> {
    match value {
        Value::Null => Ok(None),
        Value::String(text) if text.is_empty() => Ok(None),
        Value::String(text) => file(text).map(Some),
        Value::Object(fields)
            if fields
                .keys()
                .all(|name| is_path_key(name) || name == "detail") =>
        {
            let given = |key: &&str| fields.get(*key).filter(|value| !value.is_null());
            match PATHS.iter().find(|key| given(key).is_some()) {
                Some(&"bytes") => match &fields["bytes"] {
                    Value::String(bytes) if Address::of(Path::new(bytes)).is_some() => {
                        Ok(Some(bytes.into()))
                    }
                    Value::String(bytes) => Ok(Some(format!("data:;base64,{bytes}").into())),
                    _ => Err("\"bytes\" is not a text in base64".to_owned()),
                },
                Some(&key) => path(&fields[key]),
                None => Ok(None),
            }
        }
        other => Err(format!("{other} is no path of an image")),
    }
}

/// The path of a text that may be a URI, or a file in base64, also in lines. One with `data:` stays as it is; the image
/// source decodes it.
fn file(text: &str) -> Result<PathBuf, String> {
    let is_base64 = |byte: u8| byte.is_ascii_alphanumeric() || b"+/=\r\n".contains(&byte);
    if text.len() > LONGEST_NAME_BYTES && text.bytes().all(is_base64) {
        return Ok(format!("data:;base64,{}", text.replace(['\r', '\n'], "")).into());
    }
    let Some((scheme, rest)) = text.split_once("://") else {
        return Ok(text.into());
    };
    if scheme != "file" {
        return Err(format!(
            "{text}: images are not downloaded; store the file and give its path"
        ));
    }
    let path = rest.strip_prefix("localhost").unwrap_or(rest);
    Ok(unescaped(path).into())
}

/// `text` with the bytes that `%XX` stands for.
fn unescaped(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        let code = (*first == b'%').then(|| tail.get(..2)).flatten();
        let code =
            code.and_then(|code| u8::from_str_radix(std::str::from_utf8(code).ok()?, 16).ok());
        bytes.push(code.unwrap_or(*first));
        rest = if code.is_some() { &tail[2..] } else { tail };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Whether an object has a key that gives an image.
pub(super) fn has_any(fields: &Map<String, Value>) -> bool {
    SPELLINGS.iter().any(|key| fields.contains_key(*key))
}

/// Whether `text` is an address of another machine.
pub(super) fn is_address(text: &str) -> bool {
    text.split_once("://")
        .is_some_and(|(scheme, _)| scheme != "file")
}

/// Whether `text` ends as the name of an image file, or holds the file.
pub(super) fn is_image_path(text: &str) -> bool {
    let ending = text.rsplit_once('.').map(|(_, ending)| ending);
    let known = |ending: &str| {
        ENDINGS
            .iter()
            .any(|known| ending.eq_ignore_ascii_case(known))
    };
    text.starts_with("data:image/") || (!text.contains('\n') && ending.is_some_and(known))
}

/// Replaces every `<img>path</img>` of `text` by `<image>` and returns the paths.
pub(super) fn take_tags(text: &mut String) -> Result<Vec<PathBuf>, String> {
    let paths: Result<Vec<PathBuf>, String> = TAG
        .captures_iter(text)
        .map(|found| file(found[1].trim()))
        .collect();
    let paths = paths?;
    if !paths.is_empty() {
        *text = TAG.replace_all(text, SINGLE_IMAGE).into_owned();
    }
    Ok(paths)
}

/// A name of an image file in the text of a question.
pub(super) struct NamedFile<'t> {
    pub(super) name: &'t str,
    /// Whether the text is this name and nothing else.
    pub(super) is_whole: bool,
}

/// The image files that `text` names as Markdown or HTML does, or alone on a line.
pub(super) fn named_files(text: &str) -> impl Iterator<Item = NamedFile<'_>> {
    let linked = LINKED.captures_iter(text).filter_map(|found| {
        let name = found.get(1).or(found.get(2))?;
        Some((found.get(0)?.as_str(), name.as_str()))
    });
    let lines = text.lines().map(|line| (line.trim(), line.trim()));
    let lines = lines.filter(|(line, _)| !line.contains(char::is_whitespace));
    let named = linked.chain(lines).filter(|(_, name)| is_image_path(name));
    named.map(|(part, name)| NamedFile {
        name,
        is_whole: text.trim() == part,
    })
}

/// Number of marks `<image>` in `text`.
pub(super) fn marks(text: &str) -> usize {
    text.matches(SINGLE_IMAGE).count()
}

/// Whether `text` has a mark of an image, with or without a number.
pub(super) fn has_mark(text: &str) -> bool {
    marks(text) > 0 || NAMED.is_match(text)
}

/// Names the images `paths`: the marks `<image>` of the text stand for them in order. Numbers that disagree are left
/// to the family's rules.
pub(super) fn named(paths: Vec<PathBuf>, turns: &mut [Message]) -> Vec<(String, PathBuf)> {
    let count: usize = turns.iter().map(|turn| marks(&turn.content)).sum();
    let first = turns.iter().find(|turn| turn.role == "user");
    let is_later = count == 1 && first.is_some_and(|turn| marks(&turn.content) == 0);
    let by_name = turns.iter().any(|turn| NAMED.is_match(&turn.content));
    if paths.len() == 1 && !is_later && !by_name {
        let name = SINGLE_IMAGE.to_owned();
        return paths.into_iter().map(|path| (name.clone(), path)).collect();
    }
    if count == paths.len() {
        number(turns);
    }
    let numbered = paths.into_iter().enumerate();
    numbered.map(|(index, path)| (name(index), path)).collect()
}

/// Gives the marks `<image>` of `turns` their numbers.
fn number(turns: &mut [Message]) {
    let mut index = 0;
    for turn in turns {
        let mut pieces = turn.content.split(SINGLE_IMAGE);
        let mut content = pieces.next().unwrap_or_default().to_owned();
        for piece in pieces {
            content.push_str(&name(index));
            content.push_str(piece);
            index += 1;
        }
        turn.content = content;
    }
}

/// Name of the image `index` of a sample.
fn name(index: usize) -> String {
    format!("<image_{index:02}>")
}

//! Reader of configuration files: from a path to a value.

use super::value::{Fault, Value};
use super::{json, toml, yaml};
use crate::error::{ErrorCode, Failure};
use crate::lang::{both, text};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Maximal size of a configuration file in bytes.
const MAX_BYTES: u64 = 1 << 20;

/// Reads a configuration file. The extension selects TOML or YAML. Any other file is JSON if it begins with a brace,
/// otherwise YAML.
///
/// # Errors
/// The file cannot be read, is too large, or has a syntax error (exit 2, with the line).
pub(crate) fn read(path: &Path) -> Result<Value, Failure> {
    let io = |error| {
        let failure = Failure::io(ErrorCode::Usage, both("read", "读取"), path, &error);
        failure.next(both(
            "give the path of a file; a relative one starts at the current directory, or at the file that names it",
            "请给出文件的路径；相对路径以当前目录为起点，或以写出它的文件所在目录为起点",
        ))
    };
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(io)?;
    file.take(MAX_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(io)?;
    if bytes.len() as u64 > MAX_BYTES {
        let why = text!("it is larger than {} KiB", "它大于 {} KiB", MAX_BYTES >> 10);
        return Err(unreadable(path, &Fault::new(1, why)));
    }
    parse_named(&bytes, path)
}

/// As [`read`], from the content of a file.
pub(super) fn parse_named(bytes: &[u8], path: &Path) -> Result<Value, Failure> {
    let ending = path.extension().and_then(|ending| ending.to_str());
    parse(bytes, ending.unwrap_or_default()).map_err(|fault| unreadable(path, &fault))
}

/// As [`read`], from the content of a file with the extension `ending`.
pub(super) fn parse(bytes: &[u8], ending: &str) -> Result<Value, Fault> {
    let text = std::str::from_utf8(bytes).map_err(|error| {
        let before = &bytes[..error.valid_up_to()];
        let line = 1 + before.iter().filter(|b| **b == b'\n').count();
        Fault::new(line, both("it is not UTF-8 text", "它不是 UTF-8 文本"))
    })?;
    let value = match &*ending.to_ascii_lowercase() {
        "toml" => toml::parse(text)?,
        "yaml" | "yml" => yaml::parse(text)?,
        "json" | "hjson" | "jsonc" | "json5" => json::parse(text)?,
        _ if begins_with_brace(text) => json::parse(text)?,
        _ => yaml::parse(text)?,
    };
    match value {
        Value::Map(_) => Ok(value),
        _ => Err(Fault::new(1, both("it has no keys", "它没有键"))),
    }
}

fn begins_with_brace(text: &str) -> bool {
    text.trim_start_matches('\u{feff}')
        .trim_start()
        .starts_with('{')
}

fn unreadable(path: &Path, fault: &Fault) -> Failure {
    Failure::usage(
        text!(
            "{} is not a configuration file",
            "{} 不是配置文件",
            path.display()
        ),
        fault.why.clone(),
    )
    .evidence(text!(
        "{} line {}",
        "{} 第 {} 行",
        path.display(),
        fault.line
    ))
    .next(both(
        "the formats are JSON (comments and trailing commas are allowed), YAML and TOML",
        "支持的格式为 JSON（允许注释和末尾逗号）、YAML 和 TOML",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_extension_or_the_first_character_decides_the_format() {
        for (text, ending) in [
            ("{\"zero\": 3}", "json"),
            ("\u{feff} {\"zero\": 3} // x", ""),
            ("zero: 3", "yaml"),
            ("zero: 3", ""),
            ("zero = 3", "TOML"),
        ] {
            let value = parse(text.as_bytes(), ending).expect(text);
            assert_eq!(value.get("zero").and_then(Value::as_u64), Some(3), "{text}");
        }
        for (text, ending) in [("[1]", "json"), ("word", ""), ("\u{0}", "toml")] {
            assert!(parse(text.as_bytes(), ending).is_err(), "{text}");
        }
        let fault = parse(b"a: 1\nb: \xff", "yaml").expect_err("bytes");
        assert_eq!((fault.line, &*fault.why), (2, "it is not UTF-8 text"));
    }

    #[test]
    fn large_files_are_not_read() {
        let directory = tempfile::tempdir().expect("temp dir");
        let path = directory.path().join("large.json");
        std::fs::write(&path, vec![b' '; 2 << 20]).expect("written");
        let failure = read(&path).expect_err("refused");
        assert!(failure.cause.contains("larger than 1024 KiB"), "{failure}");
        let missing = read(&directory.path().join("none.json")).expect_err("refused");
        assert_eq!(missing.code.status(), 2);
    }
}

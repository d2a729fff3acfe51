//! JSON parser that also accepts what DeepSpeed's files use: comments, trailing commas, keys without quotes.
//!
//! Existing Hjson crates stop at the first non-ASCII character or skip stray ones, and none gives the lines of keys.

use super::value::{Entry, Fault, MAX_DEPTH, Value, insert};
use crate::lang::{Text, both, text};

/// Parses one value; anything after it is an error.
pub(super) fn parse(text: &str) -> Result<Value, Fault> {
    let mut reader = Reader {
        rest: text,
        line: 1,
    };
    reader.skip()?;
    let value = reader.value(0)?;
    reader.skip()?;
    match reader.peek() {
        None => Ok(value),
        Some(c) => Err(reader.fault(text!(
            "'{}' after the end",
            "结尾之后还有 '{}'",
            c.escape_debug()
        ))),
    }
}

struct Reader<'t> {
    rest: &'t str,
    line: usize,
}

impl<'t> Reader<'t> {
    fn fault(&self, why: impl Into<Text>) -> Fault {
        Fault::new(self.line, why)
    }

    fn peek(&self) -> Option<char> {
        self.rest.chars().next()
    }

    fn next(&mut self) -> Option<char> {
        let c = self.peek()?;
        self.rest = &self.rest[c.len_utf8()..];
        self.line += usize::from(c == '\n');
        Some(c)
    }

    /// Takes the text before byte `end` of the rest; `end` must be a character boundary.
    fn take(&mut self, end: usize) -> &'t str {
        let (taken, rest) = self.rest.split_at(end);
        self.line += taken.matches('\n').count();
        self.rest = rest;
        taken
    }

    /// Skips blanks and comments. Returns whether a line ended.
    fn skip(&mut self) -> Result<bool, Fault> {
        let before = self.line;
        loop {
            let space = self
                .rest
                .find(|c: char| !c.is_whitespace() && c != '\u{feff}');
            self.take(space.unwrap_or(self.rest.len()));
            if self.rest.starts_with('#') || self.rest.starts_with("//") {
                let end = self.rest.find('\n').unwrap_or(self.rest.len());
                self.take(end);
            } else if self.rest.starts_with("/*") {
                let end = self.rest.find("*/");
                let end =
                    end.ok_or_else(|| self.fault(both("a comment does not end", "注释没有结束")))?;
                self.take(end + 2);
            } else {
                return Ok(self.line > before);
            }
        }
    }

    fn value(&mut self, depth: usize) -> Result<Value, Fault> {
        if depth > MAX_DEPTH {
            return Err(Fault::too_deep(self.line));
        }
        match self.peek() {
            Some('{') => self.map(depth),
            Some('[') => self.list(depth),
            Some('"') => Ok(Value::Text(self.string()?)),
            Some(_) => self.word(),
            None => Err(self.fault(both(
                "the file ends where a value is expected",
                "文件在应有值的地方结束",
            ))),
        }
    }

    fn map(&mut self, depth: usize) -> Result<Value, Fault> {
        self.next();
        let mut map = Vec::new();
        self.skip()?;
        while !self.ends('}')? {
            let line = self.line;
            let key = match self.peek() {
                Some('"') => self.string()?,
                _ => self.bare()?.to_owned(),
            };
            if key.is_empty() {
                return Err(self.fault(both("a key is expected here", "这里应有一个键")));
            }
            self.skip()?;
            if self.next() != Some(':') {
                return Err(Fault::new(
                    line,
                    text!("no ':' after \"{key}\"", "\"{key}\" 之后没有 ':'"),
                ));
            }
            self.skip()?;
            let value = self.value(depth + 1)?;
            insert(&mut map, Entry { key, line, value })?;
            self.separator('}')?;
        }
        Ok(Value::Map(map))
    }

    fn list(&mut self, depth: usize) -> Result<Value, Fault> {
        self.next();
        let mut items = Vec::new();
        self.skip()?;
        while !self.ends(']')? {
            items.push(self.value(depth + 1)?);
            self.separator(']')?;
        }
        Ok(Value::List(items))
    }

    /// Takes `end` if it is the next character.
    fn ends(&mut self, end: char) -> Result<bool, Fault> {
        match self.peek() {
            None => Err(self.fault(text!(
                "the file ends before '{end}'",
                "文件在 '{end}' 之前结束"
            ))),
            Some(c) if c == end => {
                self.next();
                Ok(true)
            }
            Some(_) => Ok(false),
        }
    }

    /// Takes a separator: a comma, the end of a line, or the end of the list or map.
    fn separator(&mut self, end: char) -> Result<(), Fault> {
        let line = self.line;
        let broken = self.skip()?;
        match self.peek() {
            Some(',') => {
                self.next();
                self.skip().map(drop)
            }
            Some(c) if c == end || broken => Ok(()),
            Some(_) => Err(Fault::new(line, both("a comma is missing", "缺少逗号"))),
            None => Ok(()),
        }
    }

    /// Takes an unquoted word: characters up to one that has a meaning.
    fn bare(&mut self) -> Result<&'t str, Fault> {
        let ends = |c: char| c.is_whitespace() || "{}[]:,\"'#".contains(c);
        let end = self.rest.find(ends).unwrap_or(self.rest.len());
        Ok(self.take(end))
    }

    fn word(&mut self) -> Result<Value, Fault> {
        let line = self.line;
        let word = self.bare()?;
        match Value::plain(word) {
            Value::Text(_) => Err(Fault::new(
                line,
                text!(
                    "text needs quotes: \"{}\"",
                    "文本需要引号：\"{}\"",
                    Value::Text(word.to_owned())
                ),
            )),
            Value::Null if word != "null" => {
                let found = self.peek().unwrap_or(' ').escape_debug();
                Err(Fault::new(
                    line,
                    text!(
                        "'{found}' where a value is expected",
                        "应有值的地方出现了 '{found}'"
                    ),
                ))
            }
            value => Ok(value),
        }
    }

    fn string(&mut self) -> Result<String, Fault> {
        let line = self.line;
        let open = || {
            Fault::new(
                line,
                both("a quoted text does not end", "带引号的文本没有结束"),
            )
        };
        self.next();
        let mut text = String::new();
        loop {
            match self.next().ok_or_else(open)? {
                '"' => return Ok(text),
                '\n' => return Err(open()),
                '\\' => text.push(self.escape()?),
                c => text.push(c),
            }
        }
    }

    fn escape(&mut self) -> Result<char, Fault> {
        Ok(match self.next() {
            Some(c @ ('"' | '\\' | '/')) => c,
            Some('b') => '\u{8}',
            Some('f') => '\u{c}',
            Some('n') => '\n',
            Some('r') => '\r',
            Some('t') => '\t',
            Some('u') => {
                let first = self.unit()?;
                let code = match first {
                    0xd800..0xdc00 if self.rest.starts_with("\\u") => {
                        let before = self.rest;
                        self.take(2);
                        match self.unit()? {
                            second @ 0xdc00..0xe000 => {
                                0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00)
                            }
                            _ => {
                                self.rest = before;
                                first
                            }
                        }
                    }
                    code => code,
                };
                // An unpaired surrogate.
                char::from_u32(code).unwrap_or('\u{fffd}')
            }
            _ => {
                return Err(self.fault(both(
                    "an unknown escape in a quoted text",
                    "带引号的文本中有未知的转义",
                )));
            }
        })
    }

    /// Takes four hexadecimal digits: a UTF-16 code unit.
    fn unit(&mut self) -> Result<u32, Fault> {
        let digits = self
            .rest
            .get(..4)
            .filter(|d| d.bytes().all(|b| b.is_ascii_hexdigit()));
        let code = digits.and_then(|d| u32::from_str_radix(d, 16).ok());
        let code = code.ok_or_else(|| {
            self.fault(both(
                "\\u needs four hexadecimal digits",
                "\\\\u 之后需要四位十六进制数",
            ))
        })?;
        self.take(4);
        Ok(code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn comments_and_commas_are_read_as_deepspeed_reads_them() {
        let text = "\n{ # of the file\n \"a\": 5e8, // rest\n /* two\n lines */ \"b\": [1, 2,],\n c: true\n \"d\": {\"e\": \"x#y\"},\n}\n";
        let value = parse(text).expect("reads");
        let entries = value.entries().expect("a map");
        let lines: Vec<_> = entries.iter().map(|e| (&*e.key, e.line)).collect();
        assert_eq!(lines, [("a", 3), ("b", 5), ("c", 6), ("d", 7)]);
        assert_eq!(value.get("a").and_then(Value::as_u64), Some(500_000_000));
        assert_eq!(value.get("b").expect("b").to_string(), "[1, 2]");
        let inner = value.get("d").and_then(|d| d.get("e"));
        assert_eq!(inner.and_then(Value::as_text), Some("x#y"));
    }

    #[test]
    fn errors_name_their_line() {
        for (text, line, part) in [
            ("{\n\"a\": 1,\n\"a\": 2}", 3, "twice, first in line 2"),
            ("{\"a\": 1 \"b\": 2}", 1, "comma"),
            ("{\"a\": tru}", 1, "quotes"),
            ("{\"a\": }", 1, "'}'"),
            ("{\"a\" 1}", 1, "':'"),
            ("{\"a\": 1", 1, "ends before"),
            ("{\"a\": \"x\n\"}", 1, "does not end"),
            ("{} x", 1, "after the end"),
            ("{\"a\": \"\\u12\"}", 1, "four"),
            ("/* x", 1, "comment"),
            ("", 1, "ends where"),
        ] {
            let fault = parse(text).expect_err(text);
            assert_eq!(fault.line, line, "{text}");
            assert!(fault.why.contains(part), "{text}: {}", fault.why);
        }
        let deep = "[".repeat(1 << 16);
        assert!(parse(&deep).expect_err("deep").why.contains("deeper"));
    }

    #[test]
    fn escapes_are_those_of_json() {
        let value = parse("\"\\u00e9\\ud83d\\ude00\\n\\/\\ud800\\u0041\\ud800\"").expect("reads");
        assert_eq!(value.as_text(), Some("é😀\n/\u{fffd}A\u{fffd}"));
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in "[\\PC\n]{0,200}") {
            drop(parse(&text));
        }

        #[test]
        fn damaged_files_are_read_or_refused(
            at in 0usize..200, cut in 0usize..20, put in "[\"{}\\[\\],:#/\\\\ue\n]{0,6}",
        ) {
            let text = include_str!("../../../tests/configs/minicpm-zero3.json");
            let from = text.floor_char_boundary(at * text.len() / 200);
            let to = text.floor_char_boundary((from + cut).min(text.len()));
            drop(parse(&format!("{}{put}{}", &text[..from], &text[to..])));
        }

        #[test]
        fn json_written_by_serde_parses_to_the_same_value(keys in prop::collection::btree_map("\\PC{1,8}", any::<f64>(), 0..8)) {
            let finite = keys.values().all(|x| x.is_finite());
            let text = serde_json::to_string_pretty(&keys).expect("written");
            let value = parse(&text).expect("reads");
            for (key, number) in keys.iter().filter(|_| finite) {
                prop_assert_eq!(value.get(key).and_then(Value::as_f64), Some(*number));
            }
        }
    }
}

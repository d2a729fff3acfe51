//! Rows of a CSV file as JSON objects of texts, by RFC 4180. The first row names the columns; an empty field is absent.
//!
//! A damaged row is refused. The crate `csv` takes a quote that is not closed, or text after a closing quote, without a word.

use std::ffi::OsStr;
use std::path::Path;

use serde_json::{Map, Value};

/// Whether the name of `path` says that it is CSV.
pub(super) fn is_csv(path: &Path) -> bool {
    let ending = path.extension().unwrap_or(OsStr::new(""));
    ending.eq_ignore_ascii_case("csv")
}

/// Calls `each` with every row of `text` until it returns false.
///
/// # Errors
/// The line and the reason of a row that is not valid.
pub(super) fn each_row(
    text: &str,
    each: &mut dyn FnMut(Value) -> bool,
) -> Result<(), (usize, String)> {
    let mut rows = Rows {
        rest: text,
        line: 1,
    };
    let Some((_, names)) = rows.next().transpose()? else {
        return Ok(());
    };
    for row in rows {
        let (line, fields) = row?;
        if fields.len() != names.len() {
            let reason = format!("{} fields in {} columns", fields.len(), names.len());
            return Err((line, reason));
        }
        let mut entry = Map::new();
        for (name, field) in names.iter().zip(fields) {
            let field = if field.is_empty() {
                Value::Null
            } else {
                field.into()
            };
            if entry.insert(name.clone(), field).is_some() {
                return Err((1, format!("the column {name:?} is given twice")));
            }
        }
        if !each(entry.into()) {
            break;
        }
    }
    Ok(())
}

/// Lines, counted from 1, on which the rows after the first begin.
pub(super) fn lines(text: &str) -> Vec<usize> {
    let rows = Rows {
        rest: text,
        line: 1,
    };
    rows.map_while(Result::ok)
        .skip(1)
        .map(|(line, _)| line)
        .collect()
}

/// Rows that are not blank, each with the line on which it begins.
struct Rows<'t> {
    rest: &'t str,
    line: usize,
}

impl Iterator for Rows<'_> {
    type Item = Result<(usize, Vec<String>), (usize, String)>;

    fn next(&mut self) -> Option<Self::Item> {
        let blank = self.rest.len() - self.rest.trim_start_matches(['\r', '\n']).len();
        self.line += self.rest[..blank].matches('\n').count();
        self.rest = &self.rest[blank..];
        if self.rest.is_empty() {
            return None;
        }
        let line = self.line;
        let mut fields = Vec::new();
        loop {
            let field = match self.rest.strip_prefix('"') {
                Some(rest) => self.quoted(rest),
                None => Ok(self.plain()),
            };
            match field {
                Ok(field) => fields.push(field),
                Err(reason) => {
                    self.rest = "";
                    return Some(Err((line, reason)));
                }
            }
            match self.rest.strip_prefix(',') {
                Some(rest) => self.rest = rest,
                None => return Some(Ok((line, fields))),
            }
        }
    }
}

impl Rows<'_> {
    fn plain(&mut self) -> String {
        let end = self.rest.find([',', '\n']).unwrap_or(self.rest.len());
        let (field, rest) = self.rest.split_at(end);
        self.rest = rest;
        field.strip_suffix('\r').unwrap_or(field).to_owned()
    }

    /// A field in quotes, where two of them stand for one. `rest` begins after the first.
    fn quoted(&mut self, mut rest: &str) -> Result<String, String> {
        let mut field = String::new();
        loop {
            let Some((part, after)) = rest.split_once('"') else {
                return Err("a quote is not closed".to_owned());
            };
            field.push_str(part);
            self.line += part.matches('\n').count();
            match after.strip_prefix('"') {
                Some(after) => {
                    field.push('"');
                    rest = after;
                }
                None => {
                    self.rest = &self.rest[self.rest.len() - after.len()..];
                    break;
                }
            }
        }
        let ended = self.rest.strip_prefix('\r').unwrap_or(self.rest);
        match ended.is_empty() || ended.starts_with('\n') || self.rest.starts_with(',') {
            true => Ok(field),
            false => Err("text follows a closing quote".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(text: &str) -> Result<Vec<String>, (usize, String)> {
        let mut rows = Vec::new();
        each_row(text, &mut |row| {
            rows.push(row.to_string());
            true
        })?;
        Ok(rows)
    }

    #[test]
    fn quotes_hold_commas_lines_and_quotes() {
        let text = "file_name,text\r\na.png,\"one, \"\"two\"\"\nthree\"\r\n\nb.png,\nc.png,\"\"\n";
        let expected = [
            r#"{"file_name":"a.png","text":"one, \"two\"\nthree"}"#,
            r#"{"file_name":"b.png","text":null}"#,
            r#"{"file_name":"c.png","text":null}"#,
        ];
        assert_eq!(rows(text).unwrap(), expected);
        assert_eq!(lines(text), [2, 5, 6]);
    }

    #[test]
    fn rows_that_are_not_valid_have_their_line() {
        for (text, line, part) in [
            ("a,b\n1,2\n1\n", 3, "1 fields in 2"),
            ("a\n\"1", 2, "not closed"),
            ("a\n\"1\"2\n", 2, "follows a closing quote"),
            ("a,a\n1,2\n", 1, "given twice"),
        ] {
            let (at, reason) = rows(text).unwrap_err();
            assert!(
                at == line && reason.contains(part),
                "{text:?}: {at} {reason}"
            );
        }
    }
}

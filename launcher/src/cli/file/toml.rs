//! TOML parser.

use super::value::{Entry, Fault, MAX_DEPTH, Value, insert};
use crate::lang::{both, text};
use toml::de::{DeTable, DeValue};

/// Parses a document.
pub(super) fn parse(text: &str) -> Result<Value, Fault> {
    let ends: Vec<usize> = text.match_indices('\n').map(|(at, _)| at).collect();
    let line_at = |offset: usize| 1 + ends.partition_point(|end| *end < offset);
    let table = DeTable::parse(text).map_err(|error| {
        let line = error.span().map_or(1, |span| line_at(span.start));
        let why = error.message();
        Fault::new(line, text!("{why}", "语法错误：{why}"))
    })?;
    map(table.get_ref(), &line_at, 0)
}

/// Entries in file order; the parsed table is sorted by key.
fn map(
    table: &DeTable<'_>,
    line_at: &dyn Fn(usize) -> usize,
    depth: usize,
) -> Result<Value, Fault> {
    let mut entries: Vec<_> = table.iter().collect();
    entries.sort_by_key(|(key, _)| key.span().start);
    let mut map = Vec::new();
    for (key, value) in entries {
        let line = line_at(key.span().start);
        let entry = Entry {
            key: key.get_ref().to_string(),
            line,
            value: one(value.get_ref(), line, line_at, depth + 1)?,
        };
        insert(&mut map, entry)?;
    }
    Ok(Value::Map(map))
}

fn one(
    value: &DeValue<'_>,
    line: usize,
    line_at: &dyn Fn(usize) -> usize,
    depth: usize,
) -> Result<Value, Fault> {
    if depth > MAX_DEPTH {
        return Err(Fault::too_deep(line));
    }
    Ok(match value {
        DeValue::String(text) => Value::Text(text.to_string()),
        DeValue::Integer(number) if number.radix() == 10 => {
            Value::Number(number.as_str().to_owned())
        }
        DeValue::Integer(number) => match i64::from_str_radix(number.as_str(), number.radix()) {
            Ok(number) => Value::Number(number.to_string()),
            Err(_) => return Err(Fault::new(line, both("a number is too large", "数值过大"))),
        },
        DeValue::Float(number) => match Value::plain(number.as_str()) {
            number @ Value::Number(_) => number,
            _ => {
                return Err(Fault::new(
                    line,
                    both("a number must be finite", "数值必须是有限的"),
                ));
            }
        },
        DeValue::Boolean(value) => Value::Bool(*value),
        DeValue::Datetime(time) => Value::Text(time.to_string()),
        DeValue::Array(items) => Value::List(
            items
                .iter()
                .map(|item| one(item.get_ref(), line, line_at, depth + 1))
                .collect::<Result<_, _>>()?,
        ),
        DeValue::Table(table) => map(table, line_at, depth)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn values_keep_their_order_and_lines() {
        let text = "zero = 3\n# rate\nlearning-rate = 1e-5\nlora_target_modules = [\"q\", \"v\"]\nseed = 1_000\n\
                    bf16 = true\n[data_config]\ntrain_file = \"a.json\"\n";
        let value = parse(text).expect("reads");
        let shown: Vec<String> = value
            .entries()
            .expect("a map")
            .iter()
            .map(|e| format!("{} {}={}", e.line, e.key, e.value))
            .collect();
        assert_eq!(
            shown.join("; "),
            "1 zero=3; 3 learning-rate=1e-5; 4 lora_target_modules=[q, v]; 5 seed=1000; 6 bf16=true; 7 data_config={…}"
        );
    }

    #[test]
    fn errors_name_their_line() {
        for (text, line) in [
            ("a = 1\na = 2", 2),
            ("a = inf", 1),
            ("a =", 1),
            ("\n\n[", 3),
        ] {
            assert_eq!(parse(text).expect_err(text).line, line, "{text}");
        }
        assert!(parse(&format!("a = {}", "[".repeat(1 << 16))).is_err());
        let dots = format!("a{} = 1", ".a".repeat(60));
        assert!(parse(&dots).expect_err("deep").why.contains("deeper"));
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in "[\\PC\n=.\"'{}\\[\\],#0-9a-c]{0,200}") {
            drop(parse(&text));
        }
    }
}

//! YAML parser for one document without anchors, aliases and tags.

use super::value::{Entry, Fault, MAX_DEPTH, Value, insert};
use crate::lang::{both, text};
use saphyr_parser::{Event, Parser, ScalarStyle, ScanError};

/// Parses one document; an empty one is an empty map.
pub(super) fn parse(text: &str) -> Result<Value, Fault> {
    let mut tree = Tree::default();
    for event in Parser::new_from_str(text) {
        let (event, span) = event.map_err(|error| fault(&error))?;
        let line = span.start.line();
        match event {
            Event::Scalar(_, _, 0, None)
            | Event::SequenceStart(0, None)
            | Event::MappingStart(0, None) => {}
            Event::Scalar(..)
            | Event::SequenceStart(..)
            | Event::MappingStart(..)
            | Event::Alias(_) => {
                return Err(Fault::new(
                    line,
                    both(
                        "anchors, aliases and tags are not available",
                        "不支持锚点、别名和标签",
                    ),
                ));
            }
            _ => {}
        }
        match event {
            Event::Scalar(text, ScalarStyle::Plain, ..) => tree.add(Value::plain(&text), line)?,
            Event::Scalar(text, ..) => tree.add(Value::Text(text.into_owned()), line)?,
            Event::SequenceStart(..) => tree.open(Open::List(Vec::new()), line)?,
            Event::MappingStart(..) => tree.open(Open::Map(Vec::new(), None), line)?,
            Event::SequenceEnd | Event::MappingEnd => tree.close()?,
            Event::DocumentStart(_) if tree.document.is_some() => {
                return Err(Fault::new(
                    line,
                    both("a second document", "出现了第二个文档"),
                ));
            }
            _ => {}
        }
    }
    match tree.document {
        None | Some(Value::Null) => Ok(Value::Map(Vec::new())),
        Some(value) => Ok(value),
    }
}

fn fault(error: &ScanError) -> Fault {
    let why = error.info();
    Fault::new(error.marker().line(), text!("{why}", "语法错误：{why}"))
}

/// Document under construction.
#[derive(Default)]
struct Tree {
    /// Open lists and maps, with the lines where they begin.
    open: Vec<(Open, usize)>,
    document: Option<Value>,
}

enum Open {
    List(Vec<Value>),
    /// Entries, and a key whose value is not read yet.
    Map(Vec<Entry>, Option<(String, usize)>),
}

impl Tree {
    fn open(&mut self, open: Open, line: usize) -> Result<(), Fault> {
        if self.open.len() == MAX_DEPTH {
            return Err(Fault::too_deep(line));
        }
        self.open.push((open, line));
        Ok(())
    }

    fn close(&mut self) -> Result<(), Fault> {
        match self.open.pop() {
            Some((Open::List(items), line)) => self.add(Value::List(items), line),
            Some((Open::Map(entries, _), line)) => self.add(Value::Map(entries), line),
            None => Ok(()),
        }
    }

    /// Adds a complete value: a list item, a key, the value of a key, or the document.
    fn add(&mut self, value: Value, line: usize) -> Result<(), Fault> {
        match self.open.last_mut() {
            None => self.document = Some(value),
            Some((Open::List(items), _)) => items.push(value),
            Some((Open::Map(entries, waiting), _)) => match waiting.take() {
                Some((key, line)) => insert(entries, Entry { key, line, value })?,
                None => match value {
                    Value::List(_) | Value::Map(_) => {
                        return Err(Fault::new(
                            line,
                            both("a key must be a word", "键必须是一个词"),
                        ));
                    }
                    Value::Text(key) => *waiting = Some((key, line)),
                    key => *waiting = Some((key.to_string(), line)),
                },
            },
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn maps_lists_and_words_keep_their_order_and_lines() {
        let text = "# file\ntrain_micro_batch_size_per_gpu: 1\nbf16:\n  enabled: true\nbetas: [0.9, 0.95]\n\
                    names:\n- a\n- \"2\"\nlearning_rate: 5e-4 # rate\nresume: null\nstrategy: no\n\
                    stage3_gather_16bit_weights_on_model_save: 1\n";
        let value = parse(text).expect("reads");
        let entries = value.entries().expect("a map");
        let shown: Vec<String> = entries
            .iter()
            .map(|e| format!("{} {}={}", e.line, e.key, e.value))
            .collect();
        assert_eq!(
            shown.join("; "),
            "2 train_micro_batch_size_per_gpu=1; 3 bf16={…}; 5 betas=[0.9, 0.95]; 6 names=[a, 2]; \
             9 learning_rate=5e-4; 10 resume=null; 11 strategy=no; 12 stage3_gather_16bit_weights_on_model_save=1"
        );
        assert_eq!(
            value.get("names"),
            Some(&Value::List(vec![
                Value::Text("a".into()),
                Value::Text("2".into()),
            ]))
        );
        assert_eq!(parse("# nothing"), Ok(Value::Map(Vec::new())));
    }

    #[test]
    fn ambiguous_yaml_is_refused() {
        for (text, part) in [
            ("a: 1\na: 2", "twice"),
            ("a: &x 1\nb: *x", "anchors"),
            ("a: !!str 1", "tags"),
            ("a: 1\n---\nb: 2", "second document"),
            ("[a]: 1", "word"),
            ("a: [1", "line"),
            ("a: b: c", "mapping"),
        ] {
            let fault = parse(text).expect_err(text);
            let shown = format!("line {}: {}", fault.line, fault.why);
            assert!(shown.contains(part), "{text}: {shown}");
        }
        assert!(
            parse(&"- ".repeat(1 << 16))
                .expect_err("deep")
                .why
                .contains("deeper")
        );
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in "[\\PC\n:&*!|>'\"{}\\[\\],#? -]{0,200}") {
            drop(parse(&text));
        }
    }
}

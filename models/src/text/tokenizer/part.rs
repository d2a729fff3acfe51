//! JSON of a normalizer, pre-tokenizer or decoder, with a limit while it is read, since a value takes tens of times the
//! memory of its text.

use std::cell::Cell;
use std::fmt;

use serde::de::{DeserializeSeed, Error, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

use super::limits::MAX_PART_BYTES;

/// A value of about [`MAX_PART_BYTES`] bytes of JSON at most.
#[derive(Debug)]
pub(super) struct Part(pub(super) Value);

impl<'de> Deserialize<'de> for Part {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        let left = Cell::new(MAX_PART_BYTES);
        Reader(&left).deserialize(input).map(Self)
    }
}

/// Reads a JSON value as long as its limit of bytes is not used up.
#[derive(Clone, Copy)]
struct Reader<'a>(&'a Cell<usize>);

impl Reader<'_> {
    fn take<E: Error>(self, bytes: usize) -> Result<(), E> {
        let left = self.0.get().checked_sub(bytes).ok_or_else(|| {
            E::custom(format_args!(
                "a normalizer, pre-tokenizer or decoder is longer than {MAX_PART_BYTES} bytes, at most that many are read"
            ))
        })?;
        self.0.set(left);
        Ok(())
    }

    fn scalar<E: Error>(self, value: impl Into<Value>) -> Result<Value, E> {
        self.take(1)?;
        Ok(value.into())
    }
}

impl<'de> DeserializeSeed<'de> for Reader<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, input: D) -> Result<Value, D::Error> {
        input.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Reader<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Value, E> {
        self.scalar(value)
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Value, E> {
        self.scalar(value)
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Value, E> {
        self.scalar(value)
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        self.scalar(value)
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        self.scalar(())
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Value, E> {
        self.take(2 + text.len())?;
        Ok(text.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Value, A::Error> {
        self.take(2)?;
        let mut values = Vec::new();
        while let Some(value) = list.next_element_seed(self)? {
            values.push(value);
        }
        Ok(values.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        self.take(2)?;
        let mut values = Map::new();
        while let Some(key) = map.next_key::<String>()? {
            self.take(3 + key.len())?;
            values.insert(key, map.next_value_seed(self)?);
        }
        Ok(values.into())
    }
}

//! Reader of protobuf's wire format, for the few fields of a tokenizer.

use thiserror::Error;

/// Most bytes of a varint.
const MAX_VARINT_BYTES: usize = 10;

/// Why bytes are not a protobuf message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum WireError {
    /// A field ends after the end of its message.
    #[error("the field at byte {at} of its message is truncated")]
    Truncated {
        /// Offset of the field in its message.
        at: usize,
    },
    /// A variable-length integer has more than ten bytes, or a value of more than 64 bits.
    #[error("an integer of the field at byte {at} of its message is too long")]
    Varint {
        /// Offset of the field in its message.
        at: usize,
    },
    /// A field number of zero or above 2^29, or a wire type that does not exist.
    #[error("byte {at} of its message does not begin a field")]
    Tag {
        /// Offset of the field in its message.
        at: usize,
    },
}

/// Content of one protobuf field, by its wire type.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Value<'a> {
    Varint(u64),
    Fixed64,
    Bytes(&'a [u8]),
    Fixed32([u8; 4]),
}

/// The fields of a message in the order of the bytes: numbers and contents. Ends at the first error.
#[derive(Clone, Debug)]
pub(super) struct Fields<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Fields<'a> {
    pub(super) fn new(message: &'a [u8]) -> Self {
        Self {
            bytes: message,
            at: 0,
        }
    }

    fn field(&mut self, begin: usize) -> Result<(u32, Value<'a>), WireError> {
        let tag = self.varint(begin)?;
        let number = u32::try_from(tag >> 3)
            .ok()
            .filter(|number| (1..1 << 29).contains(number));
        let number = number.ok_or(WireError::Tag { at: begin })?;
        let value = match tag & 7 {
            0 => Value::Varint(self.varint(begin)?),
            1 => {
                self.take(8, begin)?;
                Value::Fixed64
            }
            2 => {
                let len = self.varint(begin)?;
                let len = usize::try_from(len).map_err(|_| WireError::Truncated { at: begin })?;
                Value::Bytes(self.take(len, begin)?)
            }
            5 => {
                let bytes = self.take(4, begin)?;
                let bytes = bytes
                    .try_into()
                    .map_err(|_| WireError::Truncated { at: begin })?;
                Value::Fixed32(bytes)
            }
            _ => return Err(WireError::Tag { at: begin }),
        };
        Ok((number, value))
    }

    fn take(&mut self, len: usize, begin: usize) -> Result<&'a [u8], WireError> {
        let rest = &self.bytes[self.at..];
        let taken = rest.get(..len).ok_or(WireError::Truncated { at: begin })?;
        self.at += len;
        Ok(taken)
    }

    fn varint(&mut self, begin: usize) -> Result<u64, WireError> {
        let mut value = 0u64;
        for index in 0..MAX_VARINT_BYTES {
            let byte = self.take(1, begin)?[0];
            let bits = u64::from(byte & 0x7f);
            let shifted = bits << (7 * index);
            if shifted >> (7 * index) != bits {
                return Err(WireError::Varint { at: begin });
            }
            value |= shifted;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(WireError::Varint { at: begin })
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<(u32, Value<'a>), WireError>;

    fn next(&mut self) -> Option<Self::Item> {
        let begin = self.at;
        if begin >= self.bytes.len() {
            return None;
        }
        let field = self.field(begin);
        if field.is_err() {
            self.at = self.bytes.len();
        }
        Some(field)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(bytes: &[u8]) -> Result<Vec<(u32, Value<'_>)>, WireError> {
        Fields::new(bytes).collect()
    }

    #[test]
    fn every_wire_type_is_read() {
        let bytes = [
            0x08, 0x96, 0x01, // field 1: 150
            0x12, 0x02, b'h', b'i', // field 2
            0x1d, 0, 0, 0x80, 0x3f, // field 3: 1.0
            0x21, 1, 2, 3, 4, 5, 6, 7, 8, // field 4
        ];
        let expected = [
            (1, Value::Varint(150)),
            (2, Value::Bytes(b"hi")),
            (3, Value::Fixed32(1f32.to_le_bytes())),
            (4, Value::Fixed64),
        ];
        assert_eq!(read(&bytes).unwrap(), expected);
        assert_eq!(read(&[]).unwrap(), []);
    }

    #[test]
    fn the_largest_integer_is_read_and_a_longer_one_refused() {
        let mut bytes = vec![0x08];
        bytes.extend([0xff; 9]);
        bytes.push(0x01);
        assert_eq!(read(&bytes).unwrap(), [(1, Value::Varint(u64::MAX))]);
        bytes[10] = 0x02;
        assert_eq!(read(&bytes), Err(WireError::Varint { at: 0 }));
        let mut endless = vec![0x08, 0x01, 0x08];
        endless.extend([0x80; 20]);
        assert_eq!(read(&endless), Err(WireError::Varint { at: 2 }));
    }

    #[test]
    fn truncated_fields_and_wrong_tags_are_refused() {
        for bytes in [
            &[0x08][..],
            &[0x0a, 3, 1, 2],
            &[0x0d, 0, 0],
            &[0x09, 1],
            &[0x80],
        ] {
            assert_eq!(
                read(bytes),
                Err(WireError::Truncated { at: 0 }),
                "{bytes:?}"
            );
        }
        // a length near the end of the address space
        let mut huge = vec![0x0a];
        huge.extend([0xff; 9]);
        huge.push(0x01);
        assert_eq!(read(&huge), Err(WireError::Truncated { at: 0 }));
        for tag in [0x00, 0x03, 0x0b, 0x0c, 0x0e, 0x0f] {
            assert_eq!(read(&[tag, 0]), Err(WireError::Tag { at: 0 }), "{tag}");
        }
    }

    proptest! {
        #[test]
        fn any_protobuf_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            let fields = read(&bytes);
            prop_assert!(fields.map_or(true, |fields| fields.len() <= bytes.len()));
        }
    }
}

//! The fingerprint of a collective as fixed-size words, comparable between processes.

use super::{Collective, CollectiveKind, CommError, OpInfo, Tag};
use kernels::DType;

/// Number of 64-bit words of a fingerprint.
pub(super) const WORDS: usize = 6;

const NAME_WORDS: usize = Tag::MAX_NAME_BYTES / 8;
const DTYPES: [DType; 6] = [
    DType::F32,
    DType::BF16,
    DType::F16,
    DType::F64,
    DType::I32,
    DType::U8,
];

/// Kind, root or shard group, element type, length and tag of one collective. Equal words mean equal collectives.
/// Layout: kind
/// dtype << 8
/// name length << 16
/// (root, or ranks of a shard group) << 32, bytes, tag index, name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fingerprint(pub(super) [u64; WORDS]);

impl Fingerprint {
    pub(super) fn new(collective: &Collective, bytes: usize) -> Result<Self, CommError> {
        let Collective {
            kind,
            dtype,
            tag,
            group,
            ..
        } = *collective;
        let name = tag.name.as_bytes();
        if name.len() > Tag::MAX_NAME_BYTES {
            return Err(CommError::TagTooLong { name: tag.name });
        }
        let group = group.unwrap_or(0) as u64;
        let (code, root) = match kind {
            CollectiveKind::AllGather => (1, group),
            CollectiveKind::ReduceScatter => (2, group),
            CollectiveKind::AllReduce => (3, 0),
            CollectiveKind::Broadcast { root } => (4, root as u64),
            CollectiveKind::Barrier => (5, 0),
        };
        let dtype = DTYPES
            .iter()
            .position(|&d| d == dtype)
            .expect("every type is listed") as u64;
        let mut words = [0; WORDS];
        words[0] = code | dtype << 8 | (name.len() as u64) << 16 | root << 32;
        words[1] = bytes as u64;
        words[2] = u64::from(tag.index);
        for (word, chunk) in words[3..].iter_mut().zip(name.chunks(8)) {
            let mut bytes = [0; 8];
            bytes[..chunk.len()].copy_from_slice(chunk);
            *word = u64::from_le_bytes(bytes);
        }
        Ok(Self(words))
    }

    /// The fields, for messages. `None` for words that no rank of this version writes.
    pub(super) fn describe(&self) -> Option<OpInfo> {
        let [packed, bytes, index, name @ ..] = self.0;
        let root = (packed >> 32) as usize;
        let kind = match packed & 0xff {
            1 => CollectiveKind::AllGather,
            2 => CollectiveKind::ReduceScatter,
            3 => CollectiveKind::AllReduce,
            4 => CollectiveKind::Broadcast { root },
            5 => CollectiveKind::Barrier,
            _ => return None,
        };
        let dtype = *DTYPES.get((packed >> 8 & 0xff) as usize)?;
        let name: [u64; NAME_WORDS] = name;
        let name: Vec<u8> = name.iter().flat_map(|word| word.to_le_bytes()).collect();
        let name = name.get(..(packed >> 16 & 0xffff) as usize)?;
        let tag_name = String::from_utf8_lossy(name).into_owned();
        Some(OpInfo {
            kind,
            dtype,
            bytes: bytes as usize,
            tag_name,
            tag_index: index as u32,
            group: (matches!(packed & 0xff, 1 | 2) && root > 0).then_some(root),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fingerprint_describes_every_field() {
        let kinds = [
            CollectiveKind::AllGather,
            CollectiveKind::ReduceScatter,
            CollectiveKind::AllReduce,
            CollectiveKind::Broadcast { root: 3 },
            CollectiveKind::Barrier,
        ];
        for kind in kinds {
            for dtype in DTYPES {
                for name in [
                    "",
                    "a",
                    "12345678",
                    "llm.layers",
                    "123456789012345678901234",
                ] {
                    let mut op = Collective::new(kind, dtype, Tag::new(name, u32::MAX));
                    if matches!(
                        kind,
                        CollectiveKind::AllGather | CollectiveKind::ReduceScatter
                    ) {
                        op = op.in_groups(Some(7));
                    }
                    let print = Fingerprint::new(&op, 1 << 40).unwrap();
                    assert_eq!(print.describe(), Some(op.info(1 << 40)));
                }
            }
        }
    }

    #[test]
    fn any_field_changes_the_fingerprint() {
        let print = |kind, dtype, bytes, name, index| {
            Fingerprint::new(&Collective::new(kind, dtype, Tag::new(name, index)), bytes).unwrap()
        };
        let grouped = Collective::new(CollectiveKind::AllGather, DType::F32, Tag::new("a", 0));
        let grouped = grouped.in_groups(Some(2));
        let all = [
            Fingerprint::new(&grouped, 8).unwrap(),
            print(CollectiveKind::AllGather, DType::F32, 8, "a", 0),
            print(CollectiveKind::AllReduce, DType::F32, 8, "a", 0),
            print(CollectiveKind::Broadcast { root: 0 }, DType::F32, 8, "a", 0),
            print(CollectiveKind::Broadcast { root: 1 }, DType::F32, 8, "a", 0),
            print(CollectiveKind::AllGather, DType::I32, 8, "a", 0),
            print(CollectiveKind::AllGather, DType::F32, 16, "a", 0),
            print(CollectiveKind::AllGather, DType::F32, 8, "b", 0),
            print(CollectiveKind::AllGather, DType::F32, 8, "a", 1),
        ];
        for (i, a) in all.iter().enumerate() {
            for b in &all[..i] {
                assert_ne!(a, b);
            }
        }
    }

    #[test]
    fn long_names_and_unknown_fingerprint_words_are_refused() {
        let tag = Tag::new("1234567890123456789012345", 0);
        let op = Collective::new(CollectiveKind::Barrier, DType::U8, tag);
        let error = Fingerprint::new(&op, 0).unwrap_err();
        assert!(matches!(error, CommError::TagTooLong { .. }));
        assert_eq!(Fingerprint([0; WORDS]).describe(), None);
        assert_eq!(Fingerprint([u64::MAX; WORDS]).describe(), None);
    }
}

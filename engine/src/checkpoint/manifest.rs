//! The index of a checkpoint. Its content is treated as hostile: sizes are checked, sums cannot overflow, paths
//! cannot leave the directory.

use std::collections::BTreeSet;
use std::path::{Component, Path};

use kernels::DType;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::CheckpointError;

/// File name of the manifest.
pub(super) const MANIFEST: &str = "MANIFEST.json";
/// Version of the checkpoint format.
pub(super) const VERSION: u32 = 1;
/// Largest length of a manifest that is read, in bytes.
pub(super) const MAX_MANIFEST_BYTES: u64 = 1 << 29;

const FORMAT: &str = "tessera-checkpoint";
const MAX_NAME_BYTES: usize = 1024;
const MAX_DIMS: usize = 16;
/// Start of a manifest. The next 64 hex digits are the hash of the text with zeros in their place.
const DIGEST_PREFIX: &str = "{\n  \"digest\": \"";
const NO_DIGEST: &str = "0000000000000000000000000000000000000000000000000000000000000000";

/// Entry of the manifest for one file of the checkpoint.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FileEntry {
    /// Path of the file, relative to the checkpoint's directory.
    pub path: String,
    /// Length of the file in bytes.
    pub bytes: u64,
    /// BLAKE3 hash of the file's content, in hex.
    pub blake3: String,
}

/// Entry of the manifest for one piece: a range of a tensor's elements, and the file that stores them.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PieceEntry {
    /// Index of the range's first element, in row-major order of the tensor's global shape.
    pub start: u64,
    /// Number of the tensor's elements in the range.
    pub elems: u64,
    /// Path of the safetensors file that stores the range, relative to the checkpoint's directory.
    pub file: String,
    /// Key of the range in that safetensors file.
    pub key: String,
}

/// Entry of the manifest for one whole tensor, independent of the pieces in which ranks wrote it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LogicalTensor {
    /// Name of the parameter to which the tensor belongs.
    pub name: String,
    /// Kind of the tensor, such as `weight`, `master` (weight) or the optimizer state `exp_avg`.
    pub kind: String,
    /// Element type of the tensor.
    #[serde(with = "dtype_name")]
    pub dtype: DType,
    /// Global shape: that of the whole tensor, not of one piece.
    pub shape: Vec<u64>,
    /// Locations of the tensor's data: ranges of elements in ascending order that cover all elements exactly
    /// once.
    pub pieces: Vec<PieceEntry>,
}

mod dtype_name {
    use kernels::DType;
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(dtype: &DType, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(dtype.name())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<DType, D::Error> {
        let name = String::deserialize(d)?;
        DType::from_name(&name)
            .ok_or_else(|| D::Error::custom(format_args!("unknown element type `{name}`")))
    }
}

impl LogicalTensor {
    /// Number of elements of the whole tensor.
    ///
    /// # Errors
    /// [`CheckpointError::BadTensor`] when the shape's byte count does not fit the address space.
    pub fn elems(&self) -> Result<u64, CheckpointError> {
        let bytes = |elems: u64| elems.checked_mul(self.dtype.size_bytes() as u64);
        self.shape
            .iter()
            .try_fold(1u64, |product, &dim| product.checked_mul(dim))
            .filter(|&elems| bytes(elems).is_some_and(|bytes| i64::try_from(bytes).is_ok()))
            .ok_or_else(|| self.bad("the shape is too large"))
    }

    pub(super) fn bad(&self, what: &'static str) -> CheckpointError {
        CheckpointError::BadTensor {
            kind: self.kind.clone(),
            name: self.name.clone(),
            what,
        }
    }

    /// Checks that name, kind and shape are valid. Returns the number of elements.
    pub(super) fn check_description(&self) -> Result<u64, CheckpointError> {
        let name_ok = !self.name.is_empty()
            && self.name.len() <= MAX_NAME_BYTES
            && !self.name.chars().any(char::is_control);
        let kind_ok = !self.kind.is_empty()
            && self.kind.len() <= MAX_NAME_BYTES
            && self
                .kind
                .bytes()
                .all(|c| c.is_ascii_alphanumeric() || b"_.-".contains(&c));
        if !name_ok || !kind_ok {
            return Err(self.bad("the name or kind is empty, too long or has odd characters"));
        }
        if self.shape.len() > MAX_DIMS {
            return Err(self.bad("the shape has too many dimensions"));
        }
        self.elems()
    }

    /// Checks that the pieces cover every element exactly once, in the given order.
    pub(super) fn check_coverage(&self) -> Result<(), CheckpointError> {
        let elems = self.check_description()?;
        let problem = |problem, element| CheckpointError::Coverage {
            kind: self.kind.clone(),
            name: self.name.clone(),
            problem,
            element,
            elems,
        };
        let mut covered = 0u64;
        for piece in &self.pieces {
            if piece.elems == 0 {
                return Err(problem("given an empty piece", piece.start));
            }
            if piece.start > covered {
                return Err(problem("missing", covered));
            }
            if piece.start < covered {
                return Err(problem("covered twice", piece.start));
            }
            covered = covered
                .checked_add(piece.elems)
                .filter(|&end| end <= elems)
                .ok_or_else(|| problem("exceeded by a piece", piece.start))?;
        }
        if covered == elems {
            Ok(())
        } else {
            Err(problem("missing", covered))
        }
    }
}

/// Content of the manifest: all tensors and files of a checkpoint.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Manifest {
    /// Must stay the first field, see [`DIGEST_PREFIX`].
    digest: String,
    format: String,
    version: u32,
    pub(super) step: u64,
    pub(super) world_size: u32,
    pub(super) meta: Value,
    pub(super) files: Vec<FileEntry>,
    pub(super) tensors: Vec<LogicalTensor>,
}

/// The part of [`Manifest`] that is checked before the rest is trusted.
#[derive(Deserialize)]
struct Preamble {
    format: String,
    version: u32,
}

impl Manifest {
    /// Number of bytes that [`Manifest::is_head`] needs.
    pub(super) const HEAD_BYTES: u64 = 256;

    /// Whether a file with this beginning is a manifest of this program.
    pub(super) fn is_head(head: &[u8]) -> bool {
        let format = format!("\"format\": \"{FORMAT}\"");
        head.windows(format.len())
            .any(|window| window == format.as_bytes())
    }

    pub(super) fn new(
        step: u64,
        world_size: u32,
        meta: Value,
        files: Vec<FileEntry>,
        tensors: Vec<LogicalTensor>,
    ) -> Self {
        let (digest, format) = (NO_DIGEST.to_owned(), FORMAT.to_owned());
        Self {
            digest,
            format,
            version: VERSION,
            step,
            world_size,
            meta,
            files,
            tensors,
        }
    }

    /// The text of the manifest file.
    pub(super) fn to_text(&self, path: &Path) -> Result<String, CheckpointError> {
        let mut text =
            serde_json::to_string_pretty(self).map_err(|source| CheckpointError::Json {
                path: path.to_owned(),
                source,
            })?;
        let digest = blake3::hash(text.as_bytes()).to_hex();
        let start = DIGEST_PREFIX.len();
        text.replace_range(start..start + NO_DIGEST.len(), &digest);
        Ok(text)
    }

    /// Parses and checks the content of a manifest file.
    pub(super) fn from_bytes(bytes: &[u8], path: &Path) -> Result<Self, CheckpointError> {
        let text = std::str::from_utf8(bytes).map_err(|_| CheckpointError::Malformed {
            path: path.to_owned(),
            what: "it is not UTF-8",
        })?;
        Self::from_text(text, path)
    }

    /// Parses and checks the text of a manifest file.
    pub(super) fn from_text(text: &str, path: &Path) -> Result<Self, CheckpointError> {
        let json = |source| CheckpointError::Json {
            path: path.to_owned(),
            source,
        };
        let malformed = |what| CheckpointError::Malformed {
            path: path.to_owned(),
            what,
        };
        let preamble: Preamble = serde_json::from_str(text).map_err(json)?;
        if preamble.format != FORMAT {
            return Err(malformed("it is not a checkpoint manifest"));
        }
        if preamble.version != VERSION {
            return Err(CheckpointError::UnsupportedVersion {
                path: path.to_owned(),
                found: preamble.version,
                supported: VERSION,
            });
        }
        check_digest(text, path)?;
        let manifest: Self = serde_json::from_str(text).map_err(json)?;
        manifest.check(path)?;
        Ok(manifest)
    }

    pub(super) fn check(&self, path: &Path) -> Result<(), CheckpointError> {
        let malformed = |what| CheckpointError::Malformed {
            path: path.to_owned(),
            what,
        };
        if self.world_size == 0 {
            return Err(malformed("the world size is zero"));
        }
        let mut sizes = self.files.iter().map(|file| file.bytes);
        if sizes.try_fold(0u64, u64::checked_add).is_none() {
            return Err(malformed("its files are larger than any disk"));
        }
        let mut files = BTreeSet::new();
        for file in &self.files {
            check_relative(&file.path)?;
            if !files.insert(file.path.as_str()) {
                return Err(malformed("a file is listed twice"));
            }
        }
        let mut tensors = BTreeSet::new();
        for tensor in &self.tensors {
            tensor.check_coverage()?;
            if !tensors.insert((&tensor.kind, &tensor.name)) {
                return Err(tensor.bad("it is listed twice"));
            }
            if tensor
                .pieces
                .iter()
                .any(|piece| !files.contains(piece.file.as_str()))
            {
                return Err(tensor.bad("a piece lies in a file that is not listed"));
            }
        }
        Ok(())
    }
}

/// The text with a matching hash, so that a fuzzer gets past the hash; `None` if the text has no hash field.
pub(super) fn signed(text: &str) -> Option<String> {
    let rest = text.strip_prefix(DIGEST_PREFIX)?.get(NO_DIGEST.len()..)?;
    let digest = blake3::hash([DIGEST_PREFIX, NO_DIGEST, rest].concat().as_bytes()).to_hex();
    Some([DIGEST_PREFIX, &digest, rest].concat())
}

/// Compares a manifest's text with its hash.
fn check_digest(text: &str, path: &Path) -> Result<(), CheckpointError> {
    let malformed = || CheckpointError::Malformed {
        path: path.to_owned(),
        what: "it does not begin with its digest",
    };
    let rest = text.strip_prefix(DIGEST_PREFIX).ok_or_else(malformed)?;
    let expected = rest.get(..NO_DIGEST.len()).ok_or_else(malformed)?;
    let mut hasher = blake3::Hasher::new();
    for part in [DIGEST_PREFIX, NO_DIGEST, &rest[NO_DIGEST.len()..]] {
        hasher.update(part.as_bytes());
    }
    let found = hasher.finalize().to_hex();
    if found.as_str() == expected {
        return Ok(());
    }
    Err(CheckpointError::HashMismatch {
        path: path.to_owned(),
        expected: expected.to_owned(),
        found: found.to_string(),
    })
}

/// Accepts relative paths made of plain names.
pub(super) fn check_relative(path: &str) -> Result<(), CheckpointError> {
    let plain = Path::new(path)
        .components()
        .all(|part| matches!(part, Component::Normal(_)));
    let odd = path.contains('\\') || path.contains("//") || path.chars().any(char::is_control);
    if path.is_empty() || path.len() > MAX_NAME_BYTES || !plain || odd {
        return Err(CheckpointError::UnsafePath {
            path: path.to_owned(),
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(shape: &[u64], pieces: &[(u64, u64)]) -> LogicalTensor {
        LogicalTensor {
            name: "a.weight".into(),
            kind: "master".into(),
            dtype: DType::F32,
            shape: shape.to_vec(),
            pieces: pieces
                .iter()
                .map(|&(start, elems)| PieceEntry {
                    start,
                    elems,
                    file: "state/rank-0000.safetensors".into(),
                    key: String::new(),
                })
                .collect(),
        }
    }

    fn problem(tensor: &LogicalTensor) -> &'static str {
        match tensor.check_coverage() {
            Ok(()) => "none",
            Err(CheckpointError::Coverage { problem, .. }) => problem,
            Err(CheckpointError::BadTensor { what, .. }) => what,
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn coverage_must_be_exact() {
        assert_eq!(problem(&tensor(&[2, 3], &[(0, 4), (4, 2)])), "none");
        assert_eq!(problem(&tensor(&[0, 3], &[])), "none");
        assert_eq!(problem(&tensor(&[], &[(0, 1)])), "none");
        assert_eq!(problem(&tensor(&[6], &[(0, 2), (3, 3)])), "missing");
        assert_eq!(problem(&tensor(&[6], &[(0, 5)])), "missing");
        assert_eq!(problem(&tensor(&[6], &[(0, 4), (3, 3)])), "covered twice");
        assert_eq!(problem(&tensor(&[6], &[(0, 7)])), "exceeded by a piece");
        assert_eq!(
            problem(&tensor(&[6], &[(0, 2), (2, u64::MAX)])),
            "exceeded by a piece"
        );
        assert_eq!(
            problem(&tensor(&[6], &[(0, 0), (0, 6)])),
            "given an empty piece"
        );
        assert_eq!(
            problem(&tensor(&[u64::MAX, 2], &[])),
            "the shape is too large"
        );
        assert_eq!(problem(&tensor(&[1 << 62], &[])), "the shape is too large");
    }

    #[test]
    fn paths_cannot_leave_the_directory() {
        for good in ["a", "state/rank-0000.safetensors", "a b/ü.json", "..a"] {
            assert!(check_relative(good).is_ok(), "{good}");
        }
        let long = "a".repeat(2000);
        for bad in [
            "",
            "/etc/passwd",
            "../a",
            "a/../b",
            "a\\b",
            "a\0b",
            "a//b",
            "./a",
            &long,
        ] {
            assert!(check_relative(bad).is_err(), "{bad}");
        }
    }

    fn manifest() -> Manifest {
        let file = FileEntry {
            path: "state/rank-0000.safetensors".into(),
            bytes: 24,
            blake3: NO_DIGEST.into(),
        };
        let tensors = vec![tensor(&[6], &[(0, 6)])];
        Manifest::new(7, 1, serde_json::json!({"seed": 1}), vec![file], tensors)
    }

    #[test]
    fn the_text_round_trips_and_any_flipped_byte_is_noticed() {
        let path = Path::new("MANIFEST.json");
        let text = manifest().to_text(path).unwrap();
        let back = Manifest::from_text(&text, path).unwrap();
        assert_eq!((back.step, &back.tensors), (7, &manifest().tensors));
        for i in 0..text.len() {
            let mut bytes = text.clone().into_bytes();
            bytes[i] ^= 1;
            if let Ok(flipped) = String::from_utf8(bytes) {
                assert!(Manifest::from_text(&flipped, path).is_err(), "byte {i}");
            }
        }
    }

    #[test]
    fn a_manifest_that_contradicts_itself_is_refused() {
        let path = Path::new("MANIFEST.json");
        let check = |edit: &dyn Fn(&mut Manifest)| {
            let mut manifest = manifest();
            edit(&mut manifest);
            let text = manifest.to_text(path).unwrap();
            Manifest::from_text(&text, path).unwrap_err()
        };
        assert!(matches!(
            check(&|m| m.version = 2),
            CheckpointError::UnsupportedVersion { found: 2, .. }
        ));
        assert!(matches!(
            check(&|m| m.files[0].path = "../x".into()),
            CheckpointError::UnsafePath { .. }
        ));
        assert!(matches!(
            check(&|m| m.files.push(m.files[0].clone())),
            CheckpointError::Malformed { .. }
        ));
        assert!(matches!(
            check(&|m| m.tensors.push(m.tensors[0].clone())),
            CheckpointError::BadTensor { .. }
        ));
        assert!(matches!(
            check(&|m| m.tensors[0].pieces[0].file = "other".into()),
            CheckpointError::BadTensor { .. }
        ));
        assert!(matches!(
            check(&|m| {
                m.files[0].bytes = u64::MAX;
                m.files.push(FileEntry {
                    path: "other".into(),
                    ..m.files[0].clone()
                });
            }),
            CheckpointError::Malformed { what, .. } if what.contains("larger")
        ));
        assert!(matches!(
            check(&|m| m.world_size = 0),
            CheckpointError::Malformed { .. }
        ));
        assert!(matches!(
            check(&|m| m.format = "zip".into()),
            CheckpointError::Malformed { .. }
        ));
    }
}

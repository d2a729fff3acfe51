//! A safetensors file written front to back: the header from the declared shapes, then the data, hashed on the way.
//! Memory use is bounded by the parts that the caller passes.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kernels::DType;
use serde_json::{Map, Value, json};

use super::CheckpointError;
use super::fs::{Disk, FileHandle, FileSystem};

/// Key under which safetensors stores free text.
const METADATA_KEY: &str = "__metadata__";
/// Alignment of the data. Headers are padded to it.
const HEADER_ALIGNMENT_BYTES: usize = 8;

/// Name, dtype and shape of a tensor to be written to a safetensors file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TensorSpec {
    /// Name of the tensor in the file.
    pub name: String,
    /// Element type of the tensor.
    pub dtype: DType,
    /// Shape of the tensor in the file.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// Number of bytes of the tensor's data.
    ///
    /// # Errors
    /// [`CheckpointError::BadTensor`] when they do not fit the address space.
    pub fn bytes(&self) -> Result<u64, CheckpointError> {
        self.shape
            .iter()
            .try_fold(self.dtype.size_bytes(), |product, &dim| {
                product.checked_mul(dim)
            })
            .and_then(|bytes| i64::try_from(bytes).ok())
            .map(i64::unsigned_abs)
            .ok_or_else(|| self.bad("the shape is too large"))
    }

    fn bad(&self, what: &'static str) -> CheckpointError {
        CheckpointError::BadTensor {
            kind: "tensor".into(),
            name: self.name.clone(),
            what,
        }
    }
}

/// Length and hash of a file that was written completely.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FileDigest {
    /// Length of the file in bytes.
    pub bytes: u64,
    /// BLAKE3 hash of the file's content, in hex.
    pub blake3: String,
}

/// A file whose content is hashed while it is written.
#[derive(Debug)]
pub(super) struct HashedFile {
    handle: Box<dyn FileHandle>,
    hasher: Box<blake3::Hasher>,
    path: PathBuf,
    written_bytes: u64,
    expected_bytes: u64,
}

impl HashedFile {
    pub(super) fn create(
        fs: &dyn FileSystem,
        path: &Path,
        expected_bytes: u64,
    ) -> Result<Self, CheckpointError> {
        let handle = fs
            .create(path, expected_bytes)
            .map_err(CheckpointError::io("create", path, expected_bytes))?;
        let hasher = Box::new(blake3::Hasher::new());
        Ok(Self {
            handle,
            hasher,
            path: path.to_owned(),
            written_bytes: 0,
            expected_bytes,
        })
    }

    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<(), CheckpointError> {
        self.handle.write_all(bytes).map_err(CheckpointError::io(
            "write",
            &self.path,
            self.expected_bytes,
        ))?;
        self.hasher.update(bytes);
        self.written_bytes += bytes.len() as u64;
        Ok(())
    }

    /// Syncs the file to disk and returns its length and hash.
    pub(super) fn finish(mut self) -> Result<FileDigest, CheckpointError> {
        let sync = self.handle.sync();
        sync.map_err(CheckpointError::io("sync", &self.path, self.expected_bytes))?;
        let blake3 = self.hasher.finalize().to_hex().to_string();
        Ok(FileDigest {
            bytes: self.written_bytes,
            blake3,
        })
    }
}

/// Creates a file with the content `bytes`, syncs it and returns its length and hash.
pub(super) fn write_file(
    fs: &dyn FileSystem,
    path: &Path,
    bytes: &[u8],
) -> Result<FileDigest, CheckpointError> {
    let mut file = HashedFile::create(fs, path, bytes.len() as u64)?;
    file.write(bytes)?;
    file.finish()
}

/// Writer of one safetensors file. Tensors are written in the declared order, each in any number of parts.
#[derive(Debug)]
pub struct TensorFileWriter {
    file: HashedFile,
    /// Name of each tensor, and the end of its data.
    tensors: Vec<(String, u64)>,
    current: usize,
    data_bytes: u64,
}

impl TensorFileWriter {
    /// Creates the file at `path` and writes the safetensors header with the declared `tensors` and the text
    /// `metadata`. Python readers expect the metadata `format: pt`.
    ///
    /// # Errors
    /// [`CheckpointError::BadTensor`] for a repeated or reserved name or an impossible shape,
    /// [`CheckpointError::NoSpace`] or [`CheckpointError::Io`] from the disk.
    pub fn create(
        path: &Path,
        tensors: &[TensorSpec],
        metadata: &[(&str, &str)],
    ) -> Result<Self, CheckpointError> {
        Self::create_on(
            &(Arc::new(Disk) as Arc<dyn FileSystem>),
            path,
            tensors,
            metadata,
        )
    }

    pub(super) fn create_on(
        fs: &Arc<dyn FileSystem>,
        path: &Path,
        tensors: &[TensorSpec],
        metadata: &[(&str, &str)],
    ) -> Result<Self, CheckpointError> {
        let (header, ends) = header(tensors, metadata)?;
        let data_bytes = ends.last().map_or(0, |(_, end)| *end);
        let mut file =
            HashedFile::create(fs.as_ref(), path, (8 + header.len()) as u64 + data_bytes)?;
        file.write(&(header.len() as u64).to_le_bytes())?;
        file.write(&header)?;
        Ok(Self {
            file,
            tensors: ends,
            current: 0,
            data_bytes: 0,
        })
    }

    /// Appends the next bytes of the tensor `name`: little-endian elements in row-major order.
    ///
    /// # Errors
    /// [`CheckpointError::WriteOrder`] when another tensor is due or the bytes exceed it; disk errors.
    pub fn write(&mut self, name: &str, bytes: &[u8]) -> Result<(), CheckpointError> {
        while self.current_is_complete() && self.tensors[self.current].0 != name {
            self.current += 1;
        }
        let end = self.data_bytes.checked_add(bytes.len() as u64);
        match (self.tensors.get(self.current), end) {
            (Some((due, due_end)), Some(end)) if due == name && end <= *due_end => {
                self.file.write(bytes)?;
                self.data_bytes = end;
                Ok(())
            }
            _ => Err(CheckpointError::WriteOrder {
                path: self.file.path.clone(),
                got: name.to_owned(),
                got_bytes: bytes.len(),
                expected: self.due(),
            }),
        }
    }

    /// Syncs the file to disk, and returns its length and hash.
    ///
    /// # Errors
    /// [`CheckpointError::WriteOrder`] when data is missing; disk errors.
    pub fn finish(self) -> Result<FileDigest, CheckpointError> {
        if !self.is_complete() {
            return Err(CheckpointError::WriteOrder {
                path: self.file.path.clone(),
                got: "the end".to_owned(),
                got_bytes: 0,
                expected: self.due(),
            });
        }
        self.file.finish()
    }

    pub(super) fn is_complete(&self) -> bool {
        self.tensors
            .last()
            .is_none_or(|(_, end)| self.data_bytes == *end)
    }

    fn current_is_complete(&self) -> bool {
        self.tensors
            .get(self.current)
            .is_some_and(|(_, end)| self.data_bytes == *end)
    }

    fn due(&self) -> String {
        let due = self.tensors[self.current..]
            .iter()
            .find(|(_, end)| self.data_bytes < *end);
        due.map_or_else(
            || "nothing".to_owned(),
            |(name, end)| format!("`{name}` with {} bytes", end - self.data_bytes),
        )
    }
}

/// The padded header, and per tensor its name and the end of its data.
fn header(
    tensors: &[TensorSpec],
    metadata: &[(&str, &str)],
) -> Result<(Vec<u8>, Vec<(String, u64)>), CheckpointError> {
    let mut entries = Map::new();
    if !metadata.is_empty() {
        let text: Map<String, Value> = metadata
            .iter()
            .map(|&(key, value)| (key.to_owned(), value.into()))
            .collect();
        entries.insert(METADATA_KEY.to_owned(), text.into());
    }
    let mut names = BTreeSet::new();
    let mut ends = Vec::with_capacity(tensors.len());
    let mut begin = 0u64;
    for tensor in tensors {
        if tensor.name == METADATA_KEY || !names.insert(&tensor.name) {
            return Err(tensor.bad("the name is reserved or used twice"));
        }
        let end = begin
            .checked_add(tensor.bytes()?)
            .ok_or_else(|| tensor.bad("the file would be too large"))?;
        let entry = json!({
            "dtype": tensor.dtype.name(),
            "shape": tensor.shape,
            "data_offsets": [begin, end],
        });
        entries.insert(tensor.name.clone(), entry);
        ends.push((tensor.name.clone(), end));
        begin = end;
    }
    let mut header = Value::Object(entries).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(HEADER_ALIGNMENT_BYTES), b' ');
    Ok((header, ends))
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::SafeTensors;

    fn spec(name: &str, dtype: DType, shape: &[usize]) -> TensorSpec {
        TensorSpec {
            name: name.into(),
            dtype,
            shape: shape.to_vec(),
        }
    }

    #[test]
    fn the_reference_reader_reads_what_was_written_in_parts() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("model.safetensors");
        let specs = [
            spec("a.weight", DType::BF16, &[2, 3]),
            spec("empty", DType::F32, &[0, 4]),
            spec("scalar", DType::F32, &[]),
            spec("bytes", DType::U8, &[3]),
        ];
        let mut writer = TensorFileWriter::create(&path, &specs, &[("format", "pt")]).unwrap();
        writer.write("a.weight", &[1, 2, 3, 4, 5]).unwrap();
        writer.write("a.weight", &[6, 7, 8, 9, 10, 11, 12]).unwrap();
        writer.write("scalar", &[1, 0, 0, 0]).unwrap();
        writer.write("bytes", &[7, 8, 9]).unwrap();
        let digest = writer.finish().unwrap();
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(digest.bytes, bytes.len() as u64);
        assert_eq!(digest.blake3, blake3::hash(&bytes).to_hex().as_str());
        let file = SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(file.tensor("a.weight").unwrap().shape(), [2, 3]);
        assert_eq!(
            file.tensor("a.weight").unwrap().data(),
            (1..=12).collect::<Vec<u8>>()
        );
        assert_eq!(file.tensor("empty").unwrap().data().len(), 0);
        assert_eq!(file.tensor("bytes").unwrap().data(), [7, 8, 9]);
        let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
        assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");
    }

    #[test]
    fn tensors_must_be_written_in_order_and_in_full() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("t.safetensors");
        let specs = [spec("a", DType::U8, &[2]), spec("b", DType::U8, &[1])];
        let create = || TensorFileWriter::create(&path, &specs, &[]).unwrap();
        assert!(create().write("b", &[1]).is_err());
        assert!(create().write("a", &[1, 2, 3]).is_err());
        let mut writer = create();
        writer.write("a", &[1]).unwrap();
        let error = writer.finish().unwrap_err().to_string();
        assert!(error.contains("`a` with 1 bytes"), "{error}");
        let mut writer = create();
        writer.write("a", &[1, 2]).unwrap();
        writer.write("b", &[1]).unwrap();
        assert!(writer.write("a", &[1]).is_err());
        assert!(writer.write("c", &[]).is_err());
    }

    #[test]
    fn duplicate_reserved_and_oversized_tensors_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("t.safetensors");
        let twice = [spec("a", DType::U8, &[1]), spec("a", DType::U8, &[1])];
        assert!(TensorFileWriter::create(&path, &twice, &[]).is_err());
        let reserved = [spec("__metadata__", DType::U8, &[1])];
        assert!(TensorFileWriter::create(&path, &reserved, &[]).is_err());
        let huge = [spec("a", DType::F32, &[usize::MAX, 2])];
        assert!(TensorFileWriter::create(&path, &huge, &[]).is_err());
        assert!(!path.exists());
    }
}

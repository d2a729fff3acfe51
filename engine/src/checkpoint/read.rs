//! Reading a checkpoint: any element range of any tensor, from any number of pieces.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use safetensors::tensor::Metadata;
use serde_json::Value;

use super::CheckpointError;
use super::directory::{open_regular, parse_step};
use super::manifest::{FileEntry, LogicalTensor, MANIFEST, MAX_MANIFEST_BYTES, Manifest};
use super::tensor_file::FileDigest;

/// Largest safetensors header, the limit of the reference reader.
const MAX_HEADER_BYTES: u64 = 100_000_000;
const HASH_BUFFER_BYTES: usize = 1 << 20;

/// A checkpoint on disk, open for reading from any thread.
#[derive(Debug)]
pub struct Checkpoint {
    directory: PathBuf,
    manifest: Manifest,
    files: Vec<StateFile>,
    /// Position in the manifest by kind and name.
    index: BTreeMap<String, BTreeMap<String, usize>>,
    /// Locations of each tensor's pieces.
    pieces: Vec<Vec<LocatedPiece>>,
}

#[derive(Debug)]
pub(super) struct StateFile {
    path: PathBuf,
    file: File,
}

#[derive(Debug)]
struct LocatedPiece {
    elems: Range<u64>,
    /// Index into [`Checkpoint::files`].
    file: usize,
    /// Offset of the first element in that file.
    offset_bytes: u64,
}

impl Checkpoint {
    /// Opens the checkpoint in `directory`. It checks the manifest, the length of every file, and that every
    /// piece of a tensor is where the manifest says. It does not hash contents; [`Checkpoint::verify`] does.
    ///
    /// # Errors
    /// One variant per kind of damage, with the file's name.
    pub fn open(directory: &Path) -> Result<Self, CheckpointError> {
        let manifest = read_manifest(directory)?;
        let root = fs::canonicalize(directory).map_err(CheckpointError::reading(directory))?;
        for file in &manifest.files {
            check_file(&root, directory, file)?;
        }
        let mut checkpoint = Self {
            directory: directory.to_owned(),
            files: Vec::new(),
            index: BTreeMap::new(),
            pieces: Vec::with_capacity(manifest.tensors.len()),
            manifest,
        };
        checkpoint.locate_pieces()?;
        Ok(checkpoint)
    }

    /// Directory of the checkpoint.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Training step after which the checkpoint was saved, as its writer passed it to
    /// [`Writer::begin`](super::Writer::begin).
    #[must_use]
    pub fn step(&self) -> u64 {
        self.manifest.step
    }

    /// Number of ranks that wrote the checkpoint.
    #[must_use]
    pub fn world_size(&self) -> u32 {
        self.manifest.world_size
    }

    /// Metadata (JSON) that the caller of [`Writer::commit`](super::Writer::commit) stored in the manifest.
    #[must_use]
    pub fn meta(&self) -> &Value {
        &self.manifest.meta
    }

    /// Manifest entries of all tensors in the checkpoint, each with the locations of its pieces.
    #[must_use]
    pub fn tensors(&self) -> &[LogicalTensor] {
        &self.manifest.tensors
    }

    /// Manifest entries of all files of the checkpoint. The manifest itself is not among them.
    #[must_use]
    pub fn files(&self) -> &[FileEntry] {
        &self.manifest.files
    }

    /// Manifest entry of the tensor with this kind (e.g. `exp_avg`) and parameter name; `None` if the
    /// checkpoint does not have it.
    #[must_use]
    pub fn tensor(&self, kind: &str, name: &str) -> Option<&LogicalTensor> {
        self.position(kind, name).map(|i| &self.manifest.tensors[i])
    }

    /// Reads every file and compares its length and hash with the manifest.
    ///
    /// # Errors
    /// [`CheckpointError::HashMismatch`] or [`CheckpointError::WrongLength`] for the first damaged file.
    pub fn verify(&self) -> Result<(), CheckpointError> {
        self.verify_files(|_| true)
    }

    /// Compares files with the manifest as [`Checkpoint::verify`] does, but only those that `chosen` accepts.
    /// It receives their paths relative to the checkpoint's directory.
    ///
    /// # Errors
    /// As [`Checkpoint::verify`].
    pub fn verify_files(&self, chosen: impl Fn(&str) -> bool) -> Result<(), CheckpointError> {
        let files = self.manifest.files.iter();
        files
            .filter(|file| chosen(&file.path))
            .try_for_each(|file| {
                let path = self.directory.join(&file.path);
                compare(&path, file, &hash_file(&path)?)
            })
    }

    /// Content of a small file of the checkpoint, after a comparison with its hash. `relative` is its path in
    /// the checkpoint's directory.
    ///
    /// # Errors
    /// [`CheckpointError::MissingFile`] when the manifest does not list it; otherwise as
    /// [`Checkpoint::verify`].
    pub fn read_file(&self, relative: &str) -> Result<Vec<u8>, CheckpointError> {
        let path = self.directory.join(relative);
        let entry = self
            .manifest
            .files
            .iter()
            .find(|file| file.path == relative)
            .ok_or_else(|| CheckpointError::MissingFile { path: path.clone() })?;
        let bytes = fs::read(&path).map_err(CheckpointError::reading(&path))?;
        let blake3 = blake3::hash(&bytes).to_hex().to_string();
        compare(
            &path,
            entry,
            &FileDigest {
                bytes: bytes.len() as u64,
                blake3,
            },
        )?;
        Ok(bytes)
    }

    /// Reads the elements `elems` of one tensor into `out`, as little-endian bytes. Elements are numbered in
    /// row-major order of the tensor's global shape.
    ///
    /// # Errors
    /// [`CheckpointError::UnknownTensor`]; [`CheckpointError::BadRange`] unless the range is in the tensor and `out`
    /// has exactly its length; disk errors.
    pub fn read(
        &self,
        kind: &str,
        name: &str,
        elems: Range<u64>,
        out: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let position = self
            .position(kind, name)
            .ok_or_else(|| CheckpointError::UnknownTensor {
                kind: kind.to_owned(),
                name: name.to_owned(),
            })?;
        let tensor = &self.manifest.tensors[position];
        let total = tensor.elems()?;
        let size_bytes = tensor.dtype.size_bytes() as u64;
        // No overflow: the manifest's reader checked the bytes of the whole tensor.
        let fits = elems.start <= elems.end
            && elems.end <= total
            && (elems.end - elems.start) * size_bytes == out.len() as u64;
        if !fits {
            return Err(CheckpointError::BadRange {
                kind: kind.to_owned(),
                name: name.to_owned(),
                start: elems.start,
                end: elems.end,
                elems: total,
                buffer_bytes: out.len(),
            });
        }
        self.read_pieces(&self.pieces[position], elems, size_bytes, out)
    }

    fn read_pieces(
        &self,
        pieces: &[LocatedPiece],
        elems: Range<u64>,
        size_bytes: u64,
        mut out: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let first = pieces.partition_point(|piece| piece.elems.end <= elems.start);
        for piece in &pieces[first..] {
            if out.is_empty() {
                break;
            }
            let start = piece.elems.start.max(elems.start);
            let end = piece.elems.end.min(elems.end);
            let len = usize::try_from((end - start) * size_bytes).expect("no longer than `out`");
            let (part, rest) = out.split_at_mut(len);
            let StateFile { path, file } = &self.files[piece.file];
            let offset_bytes = piece.offset_bytes + (start - piece.elems.start) * size_bytes;
            file.read_exact_at(part, offset_bytes)
                .map_err(CheckpointError::reading(path))?;
            out = rest;
        }
        Ok(())
    }

    fn position(&self, kind: &str, name: &str) -> Option<usize> {
        self.index.get(kind)?.get(name).copied()
    }

    /// Opens the files with pieces and finds every piece in them.
    fn locate_pieces(&mut self) -> Result<(), CheckpointError> {
        let mut headers: BTreeMap<&str, (usize, Header)> = BTreeMap::new();
        for (position, tensor) in self.manifest.tensors.iter().enumerate() {
            let mut located = Vec::with_capacity(tensor.pieces.len());
            for piece in &tensor.pieces {
                let file = piece.file.as_str();
                if !headers.contains_key(file) {
                    let path = self.directory.join(file);
                    let (state_file, header) = open_state_file(path)?;
                    headers.insert(file, (self.files.len(), header));
                    self.files.push(state_file);
                }
                let (file, header) = &headers[file];
                let elems = piece.start..piece.start + piece.elems;
                let offset_bytes =
                    header
                        .locate(tensor, &piece.key, piece.elems)
                        .ok_or_else(|| CheckpointError::Malformed {
                            path: self.files[*file].path.clone(),
                            what: "its header contradicts the manifest",
                        })?;
                located.push(LocatedPiece {
                    elems,
                    file: *file,
                    offset_bytes,
                });
            }
            self.pieces.push(located);
            let names = self.index.entry(tensor.kind.clone()).or_default();
            names.insert(tensor.name.clone(), position);
        }
        Ok(())
    }
}

pub(super) fn read_manifest(directory: &Path) -> Result<Manifest, CheckpointError> {
    let path = directory.join(MANIFEST);
    let malformed = |what| CheckpointError::Malformed {
        path: path.clone(),
        what,
    };
    let file = open_regular(&path).map_err(CheckpointError::reading(&path))?;
    let mut bytes = Vec::new();
    file.take(MAX_MANIFEST_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(CheckpointError::reading(&path))?;
    if bytes.len() as u64 > MAX_MANIFEST_BYTES {
        return Err(malformed("it is too long"));
    }
    let manifest = Manifest::from_bytes(&bytes, &path)?;
    let named = directory.file_name().and_then(|name| name.to_str());
    let named = named.and_then(parse_step);
    if named.is_some_and(|step| step != manifest.step) {
        return Err(malformed("its step is not the one in the folder's name"));
    }
    Ok(manifest)
}

/// Checks that a listed file is a regular file inside the directory, with the right length.
pub(super) fn check_file(
    root: &Path,
    directory: &Path,
    file: &FileEntry,
) -> Result<(), CheckpointError> {
    let path = directory.join(&file.path);
    let metadata = fs::symlink_metadata(&path).map_err(CheckpointError::reading(&path))?;
    let real = fs::canonicalize(&path).map_err(CheckpointError::reading(&path))?;
    if !metadata.is_file() || !real.starts_with(root) {
        return Err(CheckpointError::UnsafePath {
            path: file.path.clone(),
        });
    }
    if metadata.len() != file.bytes {
        let (expected, found) = (file.bytes, metadata.len());
        return Err(CheckpointError::WrongLength {
            path,
            expected,
            found,
        });
    }
    Ok(())
}

/// The header of a safetensors file.
pub(super) struct Header {
    metadata: Metadata,
    data_start: u64,
    data_bytes: u64,
}

impl Header {
    /// Parses the text of a header in a file of `file_bytes` bytes.
    fn parse(text: &[u8], file_bytes: u64, path: &Path) -> Result<Self, CheckpointError> {
        let json = |source| CheckpointError::Json {
            path: path.to_owned(),
            source,
        };
        let data_start = 8 + text.len() as u64;
        Ok(Self {
            metadata: serde_json::from_slice(text).map_err(json)?,
            data_start,
            data_bytes: file_bytes - data_start,
        })
    }

    /// Offset of a piece's data, if the file has the piece as the manifest says.
    pub(super) fn locate(&self, tensor: &LogicalTensor, key: &str, elems: u64) -> Option<u64> {
        let info = self.metadata.info(key)?;
        let (begin, end) = (info.data_offsets.0 as u64, info.data_offsets.1 as u64);
        let expected_bytes = elems.checked_mul(tensor.dtype.size_bytes() as u64)?;
        let dtype = format!("{:?}", info.dtype);
        let as_described = end.checked_sub(begin)? == expected_bytes
            && end <= self.data_bytes
            && dtype == tensor.dtype.name();
        as_described.then_some(self.data_start + begin)
    }
}

pub(super) fn open_state_file(path: PathBuf) -> Result<(StateFile, Header), CheckpointError> {
    let malformed = |what| CheckpointError::Malformed {
        path: path.clone(),
        what,
    };
    let file = File::open(&path).map_err(CheckpointError::reading(&path))?;
    let file_bytes = file
        .metadata()
        .map_err(CheckpointError::reading(&path))?
        .len();
    let mut prefix = [0; 8];
    if file_bytes < 8 {
        return Err(malformed("it is too short for a safetensors file"));
    }
    file.read_exact_at(&mut prefix, 0)
        .map_err(CheckpointError::reading(&path))?;
    let header_bytes = header_bytes(prefix, file_bytes, &path)?;
    let mut header = vec![0; usize::try_from(header_bytes).expect("bounded by the limit")];
    file.read_exact_at(&mut header, 8)
        .map_err(CheckpointError::reading(&path))?;
    let header = Header::parse(&header, file_bytes, &path)?;
    Ok((StateFile { path, file }, header))
}

/// Length of the header in a file of `file_bytes` bytes that begins with `prefix`: at most the length of the file.
fn header_bytes(prefix: [u8; 8], file_bytes: u64, path: &Path) -> Result<u64, CheckpointError> {
    let header_bytes = u64::from_le_bytes(prefix);
    if header_bytes > MAX_HEADER_BYTES.min(file_bytes.saturating_sub(8)) {
        return Err(CheckpointError::Malformed {
            path: path.to_owned(),
            what: "its header is longer than the file or the limit",
        });
    }
    Ok(header_bytes)
}

/// Parses the header in a file's bytes as [`open_state_file`] does.
pub(super) fn state_header(bytes: &[u8], path: &Path) -> Result<Header, CheckpointError> {
    let short = || CheckpointError::Malformed {
        path: path.to_owned(),
        what: "it is too short for a safetensors file",
    };
    let (prefix, rest) = bytes.split_first_chunk::<8>().ok_or_else(short)?;
    let file_bytes = bytes.len() as u64;
    let length = header_bytes(*prefix, file_bytes, path)?;
    Header::parse(&rest[..length as usize], file_bytes, path)
}

/// Reads the file at `path` and compares it with `written`, the length and hash that its writer returned.
///
/// # Errors
/// [`CheckpointError::HashMismatch`], [`CheckpointError::WrongLength`], or the file cannot be read.
pub fn verify_file(path: &Path, written: &FileDigest) -> Result<(), CheckpointError> {
    let entry = FileEntry {
        path: String::new(),
        bytes: written.bytes,
        blake3: written.blake3.clone(),
    };
    compare(path, &entry, &hash_file(path)?)
}

/// Length and hash of a file.
pub(super) fn hash_file(path: &Path) -> Result<FileDigest, CheckpointError> {
    let mut file = File::open(path).map_err(CheckpointError::reading(path))?;
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; HASH_BUFFER_BYTES];
    let mut bytes = 0u64;
    loop {
        let n = file
            .read(&mut buffer)
            .map_err(CheckpointError::reading(path))?;
        if n == 0 {
            return Ok(FileDigest {
                bytes,
                blake3: hasher.finalize().to_hex().to_string(),
            });
        }
        hasher.update(&buffer[..n]);
        bytes += n as u64;
    }
}

pub(super) fn compare(
    path: &Path,
    entry: &FileEntry,
    found: &FileDigest,
) -> Result<(), CheckpointError> {
    let path = path.to_owned();
    if found.bytes != entry.bytes {
        let (expected, found) = (entry.bytes, found.bytes);
        return Err(CheckpointError::WrongLength {
            path,
            expected,
            found,
        });
    }
    if found.blake3 != entry.blake3 {
        let (expected, found) = (entry.blake3.clone(), found.blake3.clone());
        return Err(CheckpointError::HashMismatch {
            path,
            expected,
            found,
        });
    }
    Ok(())
}

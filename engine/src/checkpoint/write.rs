//! Writing a checkpoint: every rank writes its pieces, rank 0 the rest.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kernels::DType;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::CheckpointError;
use super::directory::{self, LATEST, LATEST_TMP, holds_manifest, remove_directory};
use super::faulty::{DiskFault, FaultyDisk};
use super::fs::{Disk, FileSystem};
use super::manifest::{
    FileEntry, LogicalTensor, MANIFEST, Manifest, PieceEntry, VERSION, check_relative,
};
use super::tensor_file::{FileDigest, TensorFileWriter, TensorSpec, write_file};

/// Name of the directory in a checkpoint that holds the files with the ranks' pieces.
pub(super) const STATE: &str = "state";

/// Error of a caller's function that produces the bytes of a [`Piece`].
pub type ProducerError = Box<dyn std::error::Error + Send + Sync>;

/// Piece of a checkpoint that one rank writes: a range of one tensor's elements, with its bytes or a producer
/// of them.
#[derive(Debug)]
pub struct Piece<'a> {
    /// Name of the parameter to which the tensor belongs.
    pub name: &'a str,
    /// Kind of the tensor, such as `weight`, `master` or `exp_avg`. It may consist of letters, digits and
    /// `_.-`.
    pub kind: &'a str,
    /// Element type of the tensor.
    pub dtype: DType,
    /// Global shape: that of the whole tensor, not of this piece.
    pub shape: &'a [usize],
    /// Index of the range's first element, in row-major order of the global shape.
    pub start: u64,
    /// Number of elements in the range. With 0 the piece only declares the tensor.
    pub elems: u64,
    /// The range's elements in little-endian bytes, or a function that produces them.
    pub bytes: PieceBytes<'a>,
}

/// Source of the bytes of a [`Piece`].
pub enum PieceBytes<'a> {
    /// Bytes in memory.
    Slice(&'a [u8]),
    /// A function that writes them part by part, called in the order of the pieces.
    Produce(Box<dyn FnOnce(&mut PieceSink<'_>) -> Result<(), ProducerError> + 'a>),
}

impl fmt::Debug for PieceBytes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Slice(bytes) => write!(f, "Slice({} bytes)", bytes.len()),
            Self::Produce(_) => f.write_str("Produce"),
        }
    }
}

/// Sink to which a producer writes the bytes of one [`Piece`], in order.
#[derive(Debug)]
pub struct PieceSink<'w> {
    file: &'w mut TensorFileWriter,
    key: &'w str,
}

impl PieceSink<'_> {
    /// Appends the next bytes of the piece.
    ///
    /// # Errors
    /// [`CheckpointError::WriteOrder`] when the bytes exceed the piece's length; disk errors.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), CheckpointError> {
        self.file.write(self.key, bytes)
    }
}

/// Index that a rank leaves for rank 0.
#[derive(Debug, Serialize, Deserialize)]
struct RankIndex {
    version: u32,
    step: u64,
    rank: u32,
    world_size: u32,
    file: Option<FileEntry>,
    tensors: Vec<LogicalTensor>,
}

/// Writer of one rank's part of one checkpoint. The [module](super) describes the protocol between ranks.
#[derive(Debug)]
pub struct Writer {
    fs: Arc<dyn FileSystem>,
    output: PathBuf,
    directory: PathBuf,
    step: u64,
    rank: u32,
    world_size: u32,
    file: Option<FileEntry>,
    tensors: Vec<LogicalTensor>,
    extra: Vec<FileEntry>,
    kept: Option<u64>,
}

impl Writer {
    /// Begins this rank's part of the checkpoint of `step`. It creates the directory `output`, and in it the
    /// temporary directory `checkpoint-<step>.tmp`, if they do not exist.
    ///
    /// # Errors
    /// [`CheckpointError::ForeignDirectory`] when a directory with the checkpoint's name is not a checkpoint;
    /// [`CheckpointError::OutOfTurn`] for a rank outside the world; disk errors.
    pub fn begin(
        output: &Path,
        step: u64,
        rank: u32,
        world_size: u32,
    ) -> Result<Self, CheckpointError> {
        Self::begin_on(Arc::new(Disk), output, step, rank, world_size)
    }

    /// Begins as [`Writer::begin`] does, for tests: `fault` happens at this rank's disk call number
    /// `at_call`, counted from 0.
    ///
    /// # Errors
    /// As [`Writer::begin`], and that of the fault.
    pub fn begin_faulty(
        output: &Path,
        step: u64,
        rank: u32,
        world_size: u32,
        fault: DiskFault,
        at_call: u64,
    ) -> Result<Self, CheckpointError> {
        let disk = FaultyDisk::new(fault, at_call, true);
        Self::begin_on(Arc::new(disk), output, step, rank, world_size)
    }

    pub(super) fn begin_on(
        fs: Arc<dyn FileSystem>,
        output: &Path,
        step: u64,
        rank: u32,
        world_size: u32,
    ) -> Result<Self, CheckpointError> {
        let writer = Self {
            fs,
            output: output.to_owned(),
            directory: directory::tmp_directory(output, step),
            step,
            rank,
            world_size,
            file: None,
            tensors: Vec::new(),
            extra: Vec::new(),
            kept: None,
        };
        if rank >= world_size {
            return Err(writer.out_of_turn("begin a checkpoint"));
        }
        let target = directory::final_directory(output, step);
        if target.exists() && !holds_manifest(&target) {
            return Err(CheckpointError::ForeignDirectory { path: target });
        }
        let state = writer.directory.join(STATE);
        writer
            .fs
            .create_dir_all(&state)
            .map_err(CheckpointError::io("create", &state, 0))?;
        // An index of an earlier attempt must not be taken for this one.
        let index = writer.directory.join(rank_path(rank, "json"));
        if index.exists() {
            writer
                .fs
                .remove_file(&index)
                .map_err(CheckpointError::io("remove", &index, 0))?;
        }
        Ok(writer)
    }

    /// Temporary directory of the checkpoint. Callers may write files of their own into it (see
    /// [`Writer::adopt_file`]).
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Writes this rank's pieces into one file and syncs it to disk. It may be called at most once. Pieces
    /// are written by descending element size, so that all data is aligned, and otherwise in the given order.
    ///
    /// # Errors
    /// [`CheckpointError::BadTensor`] or [`CheckpointError::WriteOrder`] for a piece that contradicts its own
    /// description, [`CheckpointError::Producer`], [`CheckpointError::NoSpace`] and other disk errors.
    pub fn write_pieces<'a>(
        &mut self,
        pieces: impl IntoIterator<Item = Piece<'a>>,
    ) -> Result<(), CheckpointError> {
        if self.file.is_some() {
            return Err(self.out_of_turn("write pieces twice"));
        }
        let relative = rank_path(self.rank, "safetensors");
        let mut pieces: Vec<Piece<'_>> = pieces.into_iter().collect();
        pieces.sort_by_key(|piece| Reverse(piece.dtype.size_bytes()));
        let mut merged = Merged::default();
        let mut specs = Vec::with_capacity(pieces.len());
        for piece in &pieces {
            specs.extend(merged.add_piece(piece, &relative)?);
        }
        pieces.retain(|piece| piece.elems > 0);

        let path = self.directory.join(&relative);
        let mut file = TensorFileWriter::create_on(&self.fs, &path, &specs, &[("format", "pt")])?;
        for (piece, spec) in pieces.into_iter().zip(&specs) {
            write_piece(&mut file, piece, &spec.name)?;
        }
        let FileDigest { bytes, blake3 } = file.finish()?;
        self.file = Some(FileEntry {
            path: relative,
            bytes,
            blake3,
        });
        self.tensors = merged.tensors;
        Ok(())
    }

    /// Writes the index of this rank's pieces, which rank 0 reads in [`Writer::commit`]. The caller's barrier
    /// between the ranks comes next.
    ///
    /// # Errors
    /// When the disk fails or is full.
    pub fn finish_rank(&mut self) -> Result<(), CheckpointError> {
        let path = self.directory.join(rank_path(self.rank, "json"));
        let index = RankIndex {
            version: VERSION,
            step: self.step,
            rank: self.rank,
            world_size: self.world_size,
            file: self.file.clone(),
            tensors: std::mem::take(&mut self.tensors),
        };
        let json = |source| CheckpointError::Json {
            path: path.clone(),
            source,
        };
        let text = serde_json::to_vec(&index).map_err(json)?;
        write_file(self.fs.as_ref(), &path, &text)?;
        let state = self.directory.join(STATE);
        self.fs
            .sync_dir(&state)
            .map_err(CheckpointError::io("sync", &state, 0))
    }

    /// Adds a small file with the content `bytes` to the checkpoint. `relative` is its path in the
    /// checkpoint's directory. Rank 0 only.
    ///
    /// # Errors
    /// [`CheckpointError::UnsafePath`], [`CheckpointError::OutOfTurn`], disk errors.
    pub fn add_file(&mut self, relative: &str, bytes: &[u8]) -> Result<(), CheckpointError> {
        let path = self.extra_path(relative)?;
        let parent = path.parent().unwrap_or(&self.directory);
        self.fs
            .create_dir_all(parent)
            .map_err(CheckpointError::io("create", parent, 0))?;
        let digest = write_file(self.fs.as_ref(), &path, bytes)?;
        self.adopt_digest(relative, digest)
    }

    /// Adds to the checkpoint a file that the caller wrote in [`Writer::directory`] and synced to disk. Its
    /// length and hash come from [`TensorFileWriter::finish`] or
    /// [`ShardedTensorWriter::finish`](super::ShardedTensorWriter::finish). Rank 0 only.
    ///
    /// # Errors
    /// [`CheckpointError::UnsafePath`], [`CheckpointError::OutOfTurn`].
    pub fn adopt_digest(
        &mut self,
        relative: &str,
        digest: FileDigest,
    ) -> Result<(), CheckpointError> {
        self.extra_path(relative)?;
        self.extra.retain(|file| file.path != relative);
        let FileDigest { bytes, blake3 } = digest;
        self.extra.push(FileEntry {
            path: relative.to_owned(),
            bytes,
            blake3,
        });
        Ok(())
    }

    /// Adds to the checkpoint a file that the caller wrote in [`Writer::directory`] by other means. It reads
    /// the file once for its hash and syncs it to disk. Rank 0 only.
    ///
    /// # Errors
    /// [`CheckpointError::UnsafePath`], [`CheckpointError::MissingFile`], [`CheckpointError::OutOfTurn`], disk
    /// errors.
    pub fn adopt_file(&mut self, relative: &str) -> Result<(), CheckpointError> {
        let path = self.extra_path(relative)?;
        let digest = super::read::hash_file(&path)?;
        let sync = self.fs.sync_file(&path);
        sync.map_err(CheckpointError::io("sync", &path, digest.bytes))?;
        self.adopt_digest(relative, digest)
    }

    /// Publishes the checkpoint as `checkpoint-<step>` and returns its directory. Rank 0 only, after a
    /// barrier that follows every rank's [`Writer::finish_rank`].
    ///
    /// It merges the ranks' indexes and checks that every tensor is covered exactly once. The directory
    /// replaces one of the same step, and the file `latest` names it. Checkpoints beyond
    /// `save_total_limit` are then removed, as by [`prune`](super::prune). `meta` is stored in the manifest
    /// unchanged.
    ///
    /// # Errors
    /// [`CheckpointError::RankIncomplete`], [`CheckpointError::Coverage`], [`CheckpointError::BadTensor`],
    /// [`CheckpointError::NoSpace`] and other disk errors. Unless the error came from removing old directories, the
    /// previous checkpoint is still the latest.
    pub fn commit(
        mut self,
        meta: Value,
        save_total_limit: usize,
    ) -> Result<PathBuf, CheckpointError> {
        if self.rank != 0 {
            return Err(self.out_of_turn("commit a checkpoint"));
        }
        let mut merged = Merged::default();
        let mut files = std::mem::take(&mut self.extra);
        for rank in 0..self.world_size {
            self.merge_rank(rank, &mut merged, &mut files)?;
        }
        merged.sort_pieces();
        let manifest = Manifest::new(self.step, self.world_size, meta, files, merged.tensors);
        let path = self.directory.join(MANIFEST);
        manifest.check(&path)?;
        self.remove_strays(&manifest)?;
        write_file(self.fs.as_ref(), &path, manifest.to_text(&path)?.as_bytes())?;
        self.sync_directories(&manifest)?;
        let replaced = self.publish()?;
        self.flip_latest()?;
        if let Some(replaced) = replaced {
            remove_directory(self.fs.as_ref(), &replaced)?;
        }
        directory::prune_on(self.fs.as_ref(), &self.output, save_total_limit, self.kept)?;
        Ok(directory::final_directory(&self.output, self.step))
    }

    /// Lets the checkpoint of `step`, if given, survive the limit of [`Writer::commit`].
    #[must_use]
    pub fn keeping(mut self, step: Option<u64>) -> Self {
        self.kept = step;
        self
    }

    /// Removes the temporary directory of a failed save. One rank calls it, after all others have stopped
    /// writing.
    ///
    /// # Errors
    /// When the directory cannot be removed.
    pub fn abandon(self) -> Result<(), CheckpointError> {
        remove_directory(self.fs.as_ref(), &self.directory)
    }

    /// Path of a file that is neither the manifest nor a rank's.
    fn extra_path(&self, relative: &str) -> Result<PathBuf, CheckpointError> {
        if self.rank != 0 {
            return Err(self.out_of_turn("add files"));
        }
        check_relative(relative)?;
        let reserved = relative == MANIFEST || relative.split('/').next() == Some(STATE);
        if reserved {
            return Err(CheckpointError::UnsafePath {
                path: relative.to_owned(),
            });
        }
        Ok(self.directory.join(relative))
    }

    /// Adds one rank's files and pieces to the manifest under construction.
    fn merge_rank(
        &self,
        rank: u32,
        merged: &mut Merged,
        files: &mut Vec<FileEntry>,
    ) -> Result<(), CheckpointError> {
        let relative = rank_path(rank, "json");
        let path = self.directory.join(&relative);
        let incomplete = || CheckpointError::RankIncomplete {
            rank,
            path: path.clone(),
        };
        let text = std::fs::read(&path).map_err(|error| match error.kind() {
            ErrorKind::NotFound => incomplete(),
            _ => CheckpointError::reading(&path)(error),
        })?;
        let index: RankIndex =
            serde_json::from_slice(&text).map_err(|source| CheckpointError::Json {
                path: path.clone(),
                source,
            })?;
        let of_this_save = index.version == VERSION
            && (index.step, index.rank, index.world_size) == (self.step, rank, self.world_size);
        if !of_this_save {
            return Err(incomplete());
        }
        if let Some(file) = index.file {
            let found = std::fs::metadata(self.directory.join(&file.path))
                .map_err(CheckpointError::reading(&self.directory.join(&file.path)))?
                .len();
            if found != file.bytes {
                let path = self.directory.join(&file.path);
                return Err(CheckpointError::WrongLength {
                    path,
                    expected: file.bytes,
                    found,
                });
            }
            files.push(file);
        }
        let blake3 = blake3::hash(&text).to_hex().to_string();
        files.push(FileEntry {
            path: relative,
            bytes: text.len() as u64,
            blake3,
        });
        index
            .tensors
            .into_iter()
            .try_for_each(|tensor| merged.add_tensor(tensor))
    }

    /// Removes files of earlier attempts.
    fn remove_strays(&self, manifest: &Manifest) -> Result<(), CheckpointError> {
        let listed: BTreeSet<PathBuf> = manifest
            .files
            .iter()
            .map(|file| self.directory.join(&file.path))
            .collect();
        let mut directories = vec![self.directory.clone()];
        while let Some(directory) = directories.pop() {
            let entries =
                std::fs::read_dir(&directory).map_err(CheckpointError::reading(&directory))?;
            for entry in entries {
                let entry = entry.map_err(CheckpointError::reading(&directory))?;
                let path = entry.path();
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    directories.push(path);
                } else if !listed.contains(&path) {
                    self.fs
                        .remove_file(&path)
                        .map_err(CheckpointError::io("remove", &path, 0))?;
                }
            }
        }
        Ok(())
    }

    /// Makes all names in the temporary directory durable.
    fn sync_directories(&self, manifest: &Manifest) -> Result<(), CheckpointError> {
        let mut directories = BTreeSet::from([PathBuf::new()]);
        for file in &manifest.files {
            directories.extend(
                Path::new(&file.path)
                    .ancestors()
                    .skip(1)
                    .map(Path::to_owned),
            );
        }
        // Inner directories sort after their parents, so they are synced first.
        for relative in directories.into_iter().rev() {
            let path = self.directory.join(relative);
            self.fs
                .sync_dir(&path)
                .map_err(CheckpointError::io("sync", &path, 0))?;
        }
        Ok(())
    }

    /// Gives the directory its final name. Returns the new path of a replaced checkpoint of the same step.
    fn publish(&self) -> Result<Option<PathBuf>, CheckpointError> {
        let target = directory::final_directory(&self.output, self.step);
        if !target.exists() {
            self.rename(&self.directory, &target)?;
            self.sync_output()?;
            return Ok(None);
        }
        if !holds_manifest(&target) {
            return Err(CheckpointError::ForeignDirectory { path: target });
        }
        let replaced = match self.fs.exchange(&self.directory, &target) {
            Ok(()) => self.directory.clone(),
            // On a file system without an atomic swap the old one briefly has another name.
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::Unsupported | ErrorKind::InvalidInput
                ) =>
            {
                let aside = directory::aside_directory(&self.output, self.step);
                remove_directory(self.fs.as_ref(), &aside)?;
                self.rename(&target, &aside)?;
                self.rename(&self.directory, &target)?;
                aside
            }
            Err(error) => return Err(CheckpointError::io("replace", &target, 0)(error)),
        };
        self.sync_output()?;
        Ok(Some(replaced))
    }

    fn flip_latest(&self) -> Result<(), CheckpointError> {
        name_latest(self.fs.as_ref(), &self.output, self.step)
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<(), CheckpointError> {
        self.fs
            .rename(from, to)
            .map_err(CheckpointError::io("rename", from, 0))
    }

    fn sync_output(&self) -> Result<(), CheckpointError> {
        sync_directory(self.fs.as_ref(), &self.output)
    }

    fn out_of_turn(&self, action: &'static str) -> CheckpointError {
        CheckpointError::OutOfTurn {
            rank: self.rank,
            world_size: self.world_size,
            action,
        }
    }
}

fn rank_path(rank: u32, extension: &str) -> String {
    format!("{STATE}/rank-{rank:04}.{extension}")
}

fn write_piece(
    file: &mut TensorFileWriter,
    piece: Piece<'_>,
    key: &str,
) -> Result<(), CheckpointError> {
    let produce = match piece.bytes {
        PieceBytes::Slice(bytes) => return file.write(key, bytes),
        PieceBytes::Produce(produce) => produce,
    };
    produce(&mut PieceSink { file, key }).map_err(|source| {
        // A disk error that passed through the producer keeps its type.
        source.downcast::<CheckpointError>().map_or_else(
            |source| CheckpointError::Producer {
                kind: piece.kind.to_owned(),
                name: piece.name.to_owned(),
                source,
            },
            |own| *own,
        )
    })
}

/// Tensors in order of first appearance, collected from pieces or from ranks.
#[derive(Default)]
struct Merged {
    tensors: Vec<LogicalTensor>,
    index: BTreeMap<(String, String), usize>,
}

impl Merged {
    /// Registers a piece; returns its entry in the rank's file unless it has no elements.
    fn add_piece(
        &mut self,
        piece: &Piece<'_>,
        file: &str,
    ) -> Result<Option<TensorSpec>, CheckpointError> {
        let tensor = LogicalTensor {
            name: piece.name.to_owned(),
            kind: piece.kind.to_owned(),
            dtype: piece.dtype,
            shape: piece.shape.iter().map(|&dim| dim as u64).collect(),
            pieces: Vec::new(),
        };
        let global_elems = tensor.check_description()?;
        let in_range = piece
            .start
            .checked_add(piece.elems)
            .is_some_and(|end| end <= global_elems);
        if !in_range {
            return Err(tensor.bad("a piece exceeds the tensor"));
        }
        // No overflow: `check_description` bounds the bytes of the whole tensor.
        let piece_bytes = piece.elems * piece.dtype.size_bytes() as u64;
        if matches!(piece.bytes, PieceBytes::Slice(bytes) if bytes.len() as u64 != piece_bytes) {
            return Err(tensor.bad("a piece has other than its declared length"));
        }
        let slot = self.slot(tensor)?;
        if piece.elems == 0 {
            return Ok(None);
        }
        let key = format!("{}/{}/{}", piece.kind, piece.name, piece.start);
        let entry = PieceEntry {
            start: piece.start,
            elems: piece.elems,
            file: file.to_owned(),
            key: key.clone(),
        };
        self.tensors[slot].pieces.push(entry);
        let elems = usize::try_from(piece.elems).expect("a tensor fits the address space");
        Ok(Some(TensorSpec {
            name: key,
            dtype: piece.dtype,
            shape: vec![elems],
        }))
    }

    fn add_tensor(&mut self, mut tensor: LogicalTensor) -> Result<(), CheckpointError> {
        let pieces = std::mem::take(&mut tensor.pieces);
        let slot = self.slot(tensor)?;
        self.tensors[slot].pieces.extend(pieces);
        Ok(())
    }

    /// Position of the tensor, whose description must not change.
    fn slot(&mut self, tensor: LogicalTensor) -> Result<usize, CheckpointError> {
        let name = (tensor.kind.clone(), tensor.name.clone());
        let slot = *self.index.entry(name).or_insert(self.tensors.len());
        match self.tensors.get(slot) {
            None => self.tensors.push(tensor),
            Some(known) if (&known.shape, known.dtype) == (&tensor.shape, tensor.dtype) => {}
            Some(_) => return Err(tensor.bad("its pieces disagree on shape or element type")),
        }
        Ok(slot)
    }

    fn sort_pieces(&mut self) {
        for tensor in &mut self.tensors {
            tensor.pieces.sort_by_key(|piece| piece.start);
        }
    }
}

/// Makes the checkpoint of `step` the latest of the directory `output`: a run goes on from it, and checkpoints of later
/// steps are no longer part of the run.
///
/// # Errors
/// [`CheckpointError::Io`] when the file `latest` cannot be written.
pub fn set_latest(output: &Path, step: u64) -> Result<(), CheckpointError> {
    name_latest(&Disk, output, step)
}

fn name_latest(fs: &dyn FileSystem, output: &Path, step: u64) -> Result<(), CheckpointError> {
    let (tmp, latest) = (output.join(LATEST_TMP), output.join(LATEST));
    write_file(fs, &tmp, format!("checkpoint-{step}\n").as_bytes())?;
    fs.rename(&tmp, &latest)
        .map_err(CheckpointError::io("rename", &tmp, 0))?;
    sync_directory(fs, output)
}

fn sync_directory(fs: &dyn FileSystem, directory: &Path) -> Result<(), CheckpointError> {
    fs.sync_dir(directory)
        .map_err(CheckpointError::io("sync", directory, 0))
}

//! Reading a model's weights, any range of any tensor, converted on the way.
//!
//! Weights are safetensors files, files of `torch.save`, or the ranks of a SAT checkpoint. A directory whose weights are
//! only declared ([`seeded::FILE`]) is read as if it had files.
//!
//! Only the headers are in memory. Reads are positioned, so several threads may read through one
//! source, and a rank reads only the bytes of its own slices.

mod quantized;

pub use quantized::QuantizationFault;

use crate::OpenError;
use crate::params::is_added;
use crate::pieces::{Files, Gathered, Pieces, Shard};
use crate::places;
use crate::sat::{self, LowRankMatrices};
use crate::seeded::{self, Generators, Marker, Values};
use crate::torch_file::{self, TorchError, Wanted};
use crate::{ModelOptions, open_shapes};
use engine::{ModelSpec, ParamSpec};
use half::{bf16, f16};
use kernels::{DType, Float, Shape};
use safetensors::tensor::Metadata;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Elements that are converted between dtypes at once.
const CHUNK_ELEMS: usize = 1 << 16;
/// Largest header of a safetensors file, in bytes; a larger one counts as damage, as in the reference implementation.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Why weights cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WeightError {
    /// The directory has no weights of a known layout.
    #[error("{} contains neither model.safetensors nor pytorch_model.bin, nor an index of either", dir.display())]
    NoWeights {
        /// The directory that was searched.
        dir: PathBuf,
    },
    /// A file cannot be opened or read.
    #[error("cannot read {}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// A file cannot be written.
    #[error("cannot write {}", path.display())]
    Write {
        /// Path of the file.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// A file is shorter or longer than its header says.
    #[error("{} is truncated or damaged: {got_bytes} bytes, its header describes {expected_bytes}", path.display())]
    Truncated {
        /// Path of the weight file.
        path: PathBuf,
        /// Size of the file by its header, in bytes.
        expected_bytes: u64,
        /// Actual size of the file in bytes.
        got_bytes: u64,
    },
    /// The header of a file, the index of shards or the file that declares weights is not valid.
    #[error("{} is not a valid safetensors header, index or weight declaration", path.display())]
    Header {
        /// Path of the invalid file.
        path: PathBuf,
        /// What the JSON parser found.
        source: serde_json::Error,
    },
    /// A file of `torch.save` cannot be used.
    #[error("{} cannot be used as a torch file", path.display())]
    Torch {
        /// Path of the file.
        path: PathBuf,
        /// Why not.
        source: TorchError,
    },
    /// A directory is no usable SAT checkpoint.
    #[error("the SAT checkpoint {} {reason}", dir.display())]
    Sat {
        /// The directory.
        dir: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A model-parallel rank of a SAT checkpoint has no file.
    #[error("the SAT checkpoint {} lacks model-parallel rank {rank}{}", dir.display(), of_ranks(*ranks))]
    MissingRank {
        /// The directory, or the first of several.
        dir: PathBuf,
        /// The first rank without a file.
        rank: usize,
        /// Number of ranks, if the others tell it.
        ranks: Option<usize>,
    },
    /// What ranks have of a tensor does not make one.
    #[error("tensor {name} {reason}")]
    Slices {
        /// Name of the tensor.
        name: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Model-parallel ranks cannot have equal parts of a tensor.
    #[error("tensor {name} of shape {shape:?} cannot be divided among {ranks} ranks")]
    Indivisible {
        /// Name of the tensor.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
        /// Number of ranks.
        ranks: usize,
    },
    /// A SAT checkpoint has no place for a tensor.
    #[error("tensor {name} {reason}")]
    NotInSat {
        /// Name of the tensor.
        name: String,
        /// Reason, for the user.
        reason: &'static str,
    },
    /// Weights are declared for a model that `config.json` does not describe.
    #[error("{} declares the weights of a model that cannot be opened", path.display())]
    Declared {
        /// Path of the file that declares the weights.
        path: PathBuf,
        /// Why the model cannot be opened.
        source: Box<OpenError>,
    },
    /// The index names a file outside its directory.
    #[error("{} refers to {file:?}, which is not a plain file name", path.display())]
    ShardName {
        /// Path of the index of shards.
        path: PathBuf,
        /// The file name that the index states.
        file: String,
    },
    /// A tensor of the model is in no file.
    #[error("tensor {name} is missing from {}", dir.display())]
    MissingTensor {
        /// Name of the tensor.
        name: String,
        /// The directory of the weight files.
        dir: PathBuf,
    },
    /// A tensor's shape differs from the configuration.
    #[error("tensor {name} has shape {got:?}, the configuration says {expected}")]
    WrongShape {
        /// Name of the tensor.
        name: String,
        /// Shape that the configuration implies.
        expected: Shape,
        /// Extents of the tensor in the file.
        got: Vec<usize>,
    },
    /// A tensor has an unsupported dtype.
    #[error("tensor {name} is stored as {got}, expected F32, BF16 or F16 (converted to {wanted})")]
    DType {
        /// Name of the tensor.
        name: String,
        /// Name of the dtype in the file.
        got: String,
        /// Dtype that the tensor was requested in.
        wanted: DType,
    },
    /// A tensor has values that are not finite, or not in the dtype that they are converted to.
    #[error("{count} of {elems} values of tensor {name} {}", reason(*stored, *wanted))]
    NotFinite {
        /// Name of the tensor.
        name: String,
        /// Number of values that are infinite or NaN after conversion.
        count: usize,
        /// Number of elements of the tensor.
        elems: usize,
        /// Dtype in the file.
        stored: DType,
        /// Dtype that the tensor was requested in, if its range is the cause.
        wanted: Option<DType>,
    },
    /// The parts of a quantized weight do not fit together, or are in a form that is not supported.
    #[error("the quantized weight {name} cannot be read: {fault}")]
    Quantized {
        /// Name of the weight.
        name: String,
        /// What does not fit.
        fault: QuantizationFault,
    },
    /// A range lies outside its tensor, or the buffer has another length.
    #[error("elements {}..{} of tensor {name} ({elems} elements) do not fit a buffer of {buffer_bytes} bytes", elements.start, elements.end)]
    Range {
        /// Name of the tensor.
        name: String,
        /// The range of elements that was requested.
        elements: Range<usize>,
        /// Number of elements of the tensor.
        elems: usize,
        /// Size of the buffer in bytes.
        buffer_bytes: usize,
    },
}

fn reason(stored: DType, wanted: Option<DType>) -> String {
    match wanted {
        Some(wanted) => format!("leave the range of {wanted} (stored as {stored})"),
        None => format!("are infinite or NaN (stored as {stored})"),
    }
}

fn of_ranks(ranks: Option<usize>) -> String {
    ranks
        .map(|ranks| format!(" of {ranks}"))
        .unwrap_or_default()
}

pub(crate) type Result<T, E = WeightError> = std::result::Result<T, E>;

/// Where a tensor is stored, with its shape and dtype.
#[derive(Debug)]
struct Entry {
    shard: usize,
    place: Location,
    shape: Vec<usize>,
    /// Size in the file.
    bytes: u64,
    /// `None` for an unsupported dtype; its name is in `dtype_name`.
    dtype: Option<DType>,
    dtype_name: String,
}

#[derive(Debug)]
enum Location {
    /// In the file, beginning at this byte.
    At(u64),
    /// Computed on each read, as bf16.
    Made(Values),
    /// In pieces: a view of a torch file, or slices of ranks.
    Pieces(Box<Pieces>),
    /// Quantized, in several parts.
    Quantized(Box<quantized::StoredQuantized>),
}

/// Open weights of a model, in one file or in the files of a directory. It reads any range of any tensor;
/// only the headers of the files stay in memory.
#[derive(Debug)]
pub struct WeightSource {
    dir: PathBuf,
    shards: Vec<Shard>,
    tensors: BTreeMap<String, Entry>,
    gathered: Gathered,
    /// Tensors of a SAT checkpoint that no published model has, by their names there.
    ignored: Vec<String>,
    /// A file of other weights in the directory.
    passed_over: Option<PathBuf>,
    on_read: quantized::QuantizedOnRead,
}

impl WeightSource {
    /// Opens the weights of the model at `model`, a directory or several joined by commas ([`places`]). The first of
    /// these counts that the directory has: `model.safetensors` or the shards of its index, `pytorch_model.bin` or the
    /// shards of its index, a SAT checkpoint, the random weights that [`seeded::FILE`] declares.
    ///
    /// # Errors
    /// When a file is missing, truncated or invalid.
    pub fn open(model: &Path) -> Result<Self> {
        let dir = places::main(model);
        let declared = dir.join(seeded::FILE);
        match Self::open_safetensors(&dir, "model") {
            Err(WeightError::NoWeights { .. }) => {}
            Ok(mut source) => {
                source.passed_over = torch_files(&dir);
                return Ok(source);
            }
            failed => return failed,
        }
        match torch_files(&dir) {
            Some(path) if path.extension().is_some_and(|ending| ending == "json") => {
                Self::open_sharded(&dir, &path)
            }
            Some(path) => Self::open_files(&dir, &[path]),
            None if sat::is_checkpoint(&dir) => Self::open_sat(model, LowRankMatrices::Merged),
            None if declared.is_file() => Self::open_declared(&dir, &declared),
            None => Err(WeightError::NoWeights { dir }),
        }
    }

    /// Opens the SAT checkpoint whose ranks are in the directories of `model`, under the names of the Hub.
    ///
    /// # Errors
    /// When a rank is missing, a file is damaged, or slices do not make the tensors of the model.
    pub fn open_sat(model: &Path, matrices: LowRankMatrices) -> Result<Self> {
        let dir = places::main(model);
        let options = ModelOptions::new(DType::F32);
        let shapes = open_shapes(model, options).map_err(|source| WeightError::Declared {
            path: dir.join(sat::config::FILE),
            source: Box::new(source),
        })?;
        let shapes = shapes.spec().params.iter();
        let shapes = shapes.map(|param| (param.name.clone(), param.shape.dims().to_vec()));
        let dirs = sat::rank_directories(model);
        let opened = sat::open(&dirs, &shapes.collect(), matrices)?;
        let entry = |(name, (shape, pieces)): (String, (Vec<usize>, Pieces))| {
            (name, Entry::in_pieces(shape, pieces))
        };
        Ok(Self {
            shards: opened.shards,
            tensors: opened.tensors.into_iter().map(entry).collect(),
            ignored: opened.ignored,
            ..Self::empty(&dir)
        })
    }

    fn empty(dir: &Path) -> Self {
        Self {
            dir: dir.to_owned(),
            shards: Vec::new(),
            tensors: BTreeMap::new(),
            gathered: Gathered::default(),
            ignored: Vec::new(),
            passed_over: None,
            on_read: quantized::QuantizedOnRead::default(),
        }
    }

    /// Names in SAT of the tensors of a SAT checkpoint that no published model has, sorted. They are not read.
    #[must_use]
    pub fn ignored(&self) -> &[String] {
        &self.ignored
    }

    /// Path of torch files in the directory that are not read, since it has safetensors files, too.
    #[must_use]
    pub fn passed_over(&self) -> Option<&Path> {
        self.passed_over.as_deref()
    }

    /// Number of layers whose LoRA matrices are added to their weights on reading.
    #[must_use]
    pub fn merged_layers(&self) -> usize {
        let places = self.tensors.values().map(|entry| &entry.place);
        places
            .filter(|place| matches!(place, Location::Pieces(pieces) if !pieces.added.0.is_empty()))
            .count()
    }

    fn open_declared(dir: &Path, path: &Path) -> Result<Self> {
        let bytes = std::fs::read(path).map_err(|source| read_error(path, source))?;
        let marker: Marker = serde_json::from_slice(&bytes).map_err(|source| {
            let path = path.to_owned();
            WeightError::Header { path, source }
        })?;
        let tensors = seeded::tensors(dir).map_err(|source| WeightError::Declared {
            path: path.to_owned(),
            source: Box::new(source),
        })?;
        let file = File::open(path).map_err(|source| read_error(path, source))?;
        let mut generators = Generators::default();
        let entry = |(param, init): (ParamSpec, _)| {
            let entry = Entry {
                shard: 0,
                place: Location::Made(generators.of(marker.seed, &param.name, init)),
                shape: param.shape.dims().to_vec(),
                bytes: 2 * param.shape.elems() as u64,
                dtype: Some(DType::BF16),
                dtype_name: "BF16".to_owned(),
            };
            (param.name, entry)
        };
        Ok(Self {
            tensors: tensors.into_iter().map(entry).collect(),
            shards: vec![Shard {
                path: path.to_owned(),
                file,
            }],
            ..Self::empty(dir)
        })
    }

    /// Opens the file `{stem}.safetensors` in `dir`, the shards of `{stem}.safetensors.index.json`, or the torch file
    /// `{stem}.bin`. The first of these counts that the directory has.
    ///
    /// # Errors
    /// As [`WeightSource::open`].
    pub fn open_stem(dir: &Path, stem: &str) -> Result<Self> {
        let torch = dir.join(format!("{stem}.bin"));
        match Self::open_safetensors(dir, stem) {
            Err(WeightError::NoWeights { .. }) if torch.is_file() => {
                Self::open_files(dir, &[torch])
            }
            opened => opened,
        }
    }

    fn open_safetensors(dir: &Path, stem: &str) -> Result<Self> {
        let single = dir.join(format!("{stem}.safetensors"));
        let index = dir.join(format!("{stem}.safetensors.index.json"));
        if single.is_file() {
            Self::open_files(dir, &[single])
        } else if index.is_file() {
            Self::open_sharded(dir, &index)
        } else {
            Err(WeightError::NoWeights {
                dir: dir.to_owned(),
            })
        }
    }

    /// Opens one safetensors file, such as an adapter's.
    ///
    /// # Errors
    /// As [`WeightSource::open`].
    pub fn open_file(path: &Path) -> Result<Self> {
        let dir = path.parent().unwrap_or(Path::new("."));
        Self::open_files(dir, &[path.to_owned()])
    }

    fn open_sharded(dir: &Path, index: &Path) -> Result<Self> {
        #[derive(serde::Deserialize)]
        struct Index {
            weight_map: BTreeMap<String, String>,
        }
        let bytes = std::fs::read(index).map_err(|source| read_error(index, source))?;
        let parsed: Index = serde_json::from_slice(&bytes).map_err(|source| {
            let path = index.to_owned();
            WeightError::Header { path, source }
        })?;
        let files: BTreeSet<&String> = parsed.weight_map.values().collect();
        if let Some(file) = files.iter().find(|f| !is_plain(f)) {
            return Err(WeightError::ShardName {
                path: index.to_owned(),
                file: (*file).clone(),
            });
        }
        let paths: Vec<PathBuf> = files.iter().map(|f| dir.join(f)).collect();
        let mut source = Self::open_parts(dir, &paths)?;
        match parsed
            .weight_map
            .keys()
            .find(|n| !source.tensors.contains_key(*n))
        {
            Some(name) => Err(source.missing(name)),
            None => {
                source.join_quantized()?;
                Ok(source)
            }
        }
    }

    fn open_files(dir: &Path, paths: &[PathBuf]) -> Result<Self> {
        let mut source = Self::open_parts(dir, paths)?;
        source.join_quantized()?;
        Ok(source)
    }

    /// The tensors of the files, with the parts of quantized weights apart.
    fn open_parts(dir: &Path, paths: &[PathBuf]) -> Result<Self> {
        let mut source = Self::empty(dir);
        for path in paths {
            source.add_file(path)?;
        }
        Ok(source)
    }

    fn add_file(&mut self, path: &Path) -> Result<()> {
        if path
            .extension()
            .is_none_or(|ending| ending != "safetensors")
        {
            return self.add_torch_file(path);
        }
        let file = File::open(path).map_err(|source| read_error(path, source))?;
        let (metadata, data_start) = read_header(&file, path)?;
        let shard = self.shards.len();
        self.tensors.extend(entries(&metadata, data_start, shard));
        self.shards.push(Shard {
            path: path.to_owned(),
            file,
        });
        Ok(())
    }

    fn add_torch_file(&mut self, path: &Path) -> Result<()> {
        let path = path.to_owned();
        let (file, found) = match torch_file::tensors(&path, Wanted::All) {
            Ok(found) => found,
            Err(TorchError::Read(source)) => return Err(read_error(&path, source)),
            Err(source) => return Err(WeightError::Torch { path, source }),
        };
        let shard = self.shards.len();
        self.tensors.extend(found.into_iter().map(|(name, tensor)| {
            let shape = tensor.shape.clone();
            (name, Entry::in_pieces(shape, Pieces::one(shard, tensor)))
        }));
        self.shards.push(Shard { path, file });
        Ok(())
    }

    /// The directory that holds the weight files.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Paths of the weight files, in the order of their names.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.shards.iter().map(|s| s.path.as_path())
    }

    /// Names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Path of the file that holds the tensor called `name`; `None` if there is no such tensor.
    #[must_use]
    pub fn file_of(&self, name: &str) -> Option<&Path> {
        Some(&self.shards[self.tensors.get(name)?.shard].path)
    }

    /// Extents of the tensor called `name`; `None` if there is no such tensor.
    #[must_use]
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        Some(&self.tensors.get(name)?.shape)
    }

    /// Dtype of the tensor called `name` as it is stored; `None` if it is absent or its dtype is not supported.
    #[must_use]
    pub fn dtype(&self, name: &str) -> Option<DType> {
        self.tensors.get(name)?.dtype
    }

    /// Checks that every parameter of `spec` is present with its shape and a supported dtype. Returns the
    /// names of the tensors that the model does not use, sorted. Parameters that a run adds, such as
    /// adapters, are not checked.
    ///
    /// # Errors
    /// [`WeightError`] naming the first tensor that is missing or does not fit.
    pub fn check(&self, spec: &ModelSpec) -> Result<Vec<String>> {
        let base = |p: &&ParamSpec| !is_added(&p.name);
        let mut used = BTreeSet::new();
        for param in spec.params.iter().filter(base) {
            self.check_param(param)?;
            used.insert(param.name.as_str());
        }
        let unused = self.names().filter(|n| !used.contains(n));
        Ok(unused.map(str::to_owned).collect())
    }

    fn check_param(&self, param: &ParamSpec) -> Result<()> {
        let entry = self.entry(&param.name)?;
        if entry.dtype.is_none() {
            // Quantized weights have another shape, too.
            return Err(entry.bad_dtype(&param.name, DType::F32));
        }
        if entry.shape != param.shape.dims() {
            return Err(WeightError::WrongShape {
                name: param.name.clone(),
                expected: param.shape,
                got: entry.shape.clone(),
            });
        }
        Ok(())
    }

    /// Reads the range `elements` (row-major) of the tensor called `name` into `dst`, converted to the dtype
    /// `out` with rounding to nearest even.
    ///
    /// # Errors
    /// When the tensor is missing, the range or the size of `dst` does not fit, a dtype is not one of F32,
    /// BF16, F16, or reading fails.
    pub fn read_range(
        &self,
        name: &str,
        elements: Range<usize>,
        out: DType,
        dst: &mut [u8],
    ) -> Result<()> {
        let entry = self.entry(name)?;
        let elems = entry.shape.iter().product();
        let fits = elements.end <= elems && dst.len() == elements.len() * out.size_bytes();
        if !fits || !self.dequantizes(name, entry) {
            return self.read_plain(name, elements, out, dst);
        }
        let convert = converter(DType::F32, out).ok_or_else(|| entry.bad_dtype(name, out))?;
        let at_once = match entry.place {
            Location::Quantized(_) => quantized::CHUNK_ELEMS,
            // It is quantized whole for every read.
            Location::At(_) | Location::Made(_) | Location::Pieces(_) => elements.len().max(1),
        };
        for start in elements.clone().step_by(at_once) {
            let range = start..elements.end.min(start + at_once);
            let at = |element: usize| (element - elements.start) * out.size_bytes();
            let part = &mut dst[at(range.start)..at(range.end)];
            convert(
                bytemuck::cast_slice(&self.dequantize_range(name, range)?),
                part,
            );
        }
        Ok(())
    }

    /// The file that has all elements of the tensor called `name` as they are, one after the other, and their bytes in it.
    /// `None` if reading would convert, dequantize or join them, or if they are not aligned to `dtype`.
    #[must_use]
    pub fn in_file(&self, name: &str, dtype: DType) -> Option<(&File, Range<u64>)> {
        let entry = self.tensors.get(name)?;
        let Location::At(start) = entry.place else {
            return None;
        };
        let is_plain = entry.dtype == Some(dtype) && !self.dequantizes(name, entry);
        let is_aligned = start.is_multiple_of(dtype.size_bytes() as u64);
        let file = &self.shards[entry.shard].file;
        (is_plain && is_aligned && entry.bytes > 0).then_some((file, start..start + entry.bytes))
    }

    /// As [`WeightSource::read_range`], without dequantization.
    fn read_plain(
        &self,
        name: &str,
        elements: Range<usize>,
        out: DType,
        dst: &mut [u8],
    ) -> Result<()> {
        let entry = self.entry(name)?;
        let elems: usize = entry.shape.iter().product();
        let count = elements.len();
        if elements.end > elems || dst.len() != count * out.size_bytes() {
            return Err(WeightError::Range {
                name: name.to_owned(),
                elements,
                elems,
                buffer_bytes: dst.len(),
            });
        }
        let stored = entry.dtype.ok_or_else(|| entry.bad_dtype(name, out))?;
        let convert = converter(stored, out).ok_or_else(|| entry.bad_dtype(name, out))?;
        let shard = &self.shards[entry.shard];
        let size = stored.size_bytes();
        if let Location::Made(values) = &entry.place {
            return make(values, elements.start as u64, out, dst, convert);
        }
        let start = elements.start;
        let files = Files {
            shards: &self.shards,
            gathered: &self.gathered,
        };
        let read = |buffer: &mut [u8], first: usize| match &entry.place {
            Location::Pieces(pieces) => pieces.read(files, name, &entry.shape, first, buffer),
            Location::At(offset_bytes) => {
                let at = offset_bytes + (first * size) as u64;
                let result = shard.file.read_exact_at(buffer, at);
                result.map_err(|source| read_error(&shard.path, source))
            }
            Location::Made(_) | Location::Quantized(_) => Err(entry.bad_dtype(name, out)),
        };
        if stored == out {
            return read(dst, start);
        }
        let mut raw = vec![0u8; CHUNK_ELEMS.min(count) * size];
        for (i, part) in dst.chunks_mut(CHUNK_ELEMS * out.size_bytes()).enumerate() {
            let raw = &mut raw[..part.len() / out.size_bytes() * size];
            read(raw, start + i * CHUNK_ELEMS)?;
            convert(raw, part);
        }
        Ok(())
    }

    /// As [`WeightSource::read_range`], for values that are computed with.
    ///
    /// # Errors
    /// As there; [`WeightError::NotFinite`] if a value of the range is not finite.
    pub fn read_finite(
        &self,
        name: &str,
        elements: Range<usize>,
        out: DType,
        dst: &mut [u8],
    ) -> Result<()> {
        self.read_range(name, elements, out, dst)?;
        match not_finite(out, dst) {
            0 => Ok(()),
            _ => Err(self.not_finite_as(name, out)?),
        }
    }

    /// The error of a tensor with values that are not finite as `out`, with their number.
    ///
    /// # Errors
    /// As [`WeightSource::read_range`].
    pub fn not_finite_as(&self, name: &str, out: DType) -> Result<WeightError> {
        let entry = self.entry(name)?;
        let elems: usize = entry.shape.iter().product();
        let stored = entry.dtype.ok_or_else(|| entry.bad_dtype(name, out))?;
        let count = |dtype: DType| -> Result<usize> {
            let mut bytes = vec![0; CHUNK_ELEMS.min(elems) * dtype.size_bytes()];
            let mut count = 0;
            for start in (0..elems).step_by(CHUNK_ELEMS) {
                let range = start..elems.min(start + CHUNK_ELEMS);
                let bytes = &mut bytes[..range.len() * dtype.size_bytes()];
                match entry.place {
                    Location::Quantized(_) => self.read_range(name, range, dtype, bytes)?,
                    Location::At(_) | Location::Made(_) | Location::Pieces(_) => {
                        self.read_plain(name, range, dtype, bytes)?;
                    }
                }
                count += not_finite(dtype, bytes);
            }
            Ok(count)
        };
        let (in_file, converted) = (count(stored)?, count(out)?);
        Ok(WeightError::NotFinite {
            name: name.to_owned(),
            count: converted,
            elems,
            stored,
            wanted: (converted > in_file).then_some(out),
        })
    }

    /// Reads all elements of the tensor called `name`, converted to the dtype `out`; returns their bytes.
    ///
    /// # Errors
    /// As [`WeightSource::read_range`].
    pub fn read(&self, name: &str, out: DType) -> Result<Vec<u8>> {
        let elems: usize = self.entry(name)?.shape.iter().product();
        let mut bytes = vec![0; elems * out.size_bytes()];
        self.read_range(name, 0..elems, out, &mut bytes)?;
        Ok(bytes)
    }

    fn entry(&self, name: &str) -> Result<&Entry> {
        self.tensors.get(name).ok_or_else(|| self.missing(name))
    }

    fn missing(&self, name: &str) -> WeightError {
        WeightError::MissingTensor {
            name: name.to_owned(),
            dir: self.dir.clone(),
        }
    }
}

impl Entry {
    fn in_pieces(shape: Vec<usize>, pieces: Pieces) -> Self {
        let dtype_name = pieces.pieces[0].tensor.dtype.name().to_owned();
        Self {
            shard: pieces.shard(),
            bytes: (shape.iter().product::<usize>() * pieces.pieces[0].tensor.dtype.size_bytes())
                as u64,
            dtype: storage_float(&dtype_name),
            dtype_name,
            shape,
            place: Location::Pieces(Box::new(pieces)),
        }
    }

    fn bad_dtype(&self, name: &str, wanted: DType) -> WeightError {
        WeightError::DType {
            name: name.to_owned(),
            got: self.dtype_name.clone(),
            wanted,
        }
    }
}

/// Computes the elements from `first` on as `out`.
fn make(values: &Values, first: u64, out: DType, dst: &mut [u8], convert: Convert) -> Result<()> {
    // What loading asks for needs no second pass over memory.
    if let (DType::F32, Ok(dst)) = (out, bytemuck::try_cast_slice_mut::<u8, f32>(dst)) {
        values.fill_as(first, dst, |bits| bf16::from_bits(bits).to_f32());
        return Ok(());
    }
    let mut made = vec![0u16; CHUNK_ELEMS.min(dst.len() / out.size_bytes())];
    let parts = dst.chunks_mut(CHUNK_ELEMS * out.size_bytes());
    for (part, first) in parts.zip((first..).step_by(CHUNK_ELEMS)) {
        let made = &mut made[..part.len() / out.size_bytes()];
        values.fill(first, made);
        convert(bytemuck::cast_slice(made), part);
    }
    Ok(())
}

fn read_error(path: &Path, source: std::io::Error) -> WeightError {
    WeightError::Read {
        path: path.to_owned(),
        source,
    }
}

/// The dtype called `name`, if weights may have it.
fn storage_float(name: &str) -> Option<DType> {
    let dtype = DType::from_name(name)?;
    matches!(dtype, DType::F32 | DType::BF16 | DType::F16).then_some(dtype)
}

/// The torch file of the whole model in `dir`, or the index of several.
fn torch_files(dir: &Path) -> Option<PathBuf> {
    let names = ["pytorch_model.bin", "pytorch_model.bin.index.json"];
    let paths = names.map(|name| dir.join(name));
    paths.into_iter().find(|path| path.is_file())
}

/// Whether `file` is a single component of a path.
pub(crate) fn is_plain(file: &str) -> bool {
    let mut parts = Path::new(file).components();
    matches!(parts.next(), Some(std::path::Component::Normal(_))) && parts.next().is_none()
}

/// Locations of the tensors of a file.
fn entries(
    metadata: &Metadata,
    data_start: u64,
    shard: usize,
) -> impl Iterator<Item = (String, Entry)> {
    metadata.offset_keys().into_iter().map(move |name| {
        let info = metadata
            .info(&name)
            .expect("the name comes from the header");
        let dtype_name = format!("{:?}", info.dtype);
        let entry = Entry {
            shard,
            place: Location::At(data_start + info.data_offsets.0 as u64),
            shape: info.shape.clone(),
            bytes: (info.data_offsets.1 - info.data_offsets.0) as u64,
            dtype: storage_float(&dtype_name),
            dtype_name,
        };
        (name, entry)
    })
}

/// The header, and the first byte of the data.
fn read_header(file: &File, path: &Path) -> Result<(Metadata, u64)> {
    let read = |source| read_error(path, source);
    let truncated = |expected_bytes, got_bytes| WeightError::Truncated {
        path: path.to_owned(),
        expected_bytes,
        got_bytes,
    };
    let got_bytes = file.metadata().map_err(read)?.len();
    if got_bytes < 8 {
        return Err(truncated(8, got_bytes));
    }
    let mut length = [0; 8];
    file.read_exact_at(&mut length, 0).map_err(read)?;
    let header_bytes = header_bytes(length, got_bytes, path)?;
    let mut header = vec![0; header_bytes as usize];
    file.read_exact_at(&mut header, 8).map_err(read)?;
    let metadata = parse_header(&header, got_bytes, path)?;
    Ok((metadata, 8 + header_bytes))
}

/// Length of the header of a file of `got_bytes` bytes that begins with `length`: no more than the file has.
fn header_bytes(length: [u8; 8], got_bytes: u64, path: &Path) -> Result<u64> {
    let header_bytes = u64::from_le_bytes(length);
    if header_bytes > MAX_HEADER_BYTES.min(got_bytes.saturating_sub(8)) {
        return Err(WeightError::Truncated {
            path: path.to_owned(),
            expected_bytes: header_bytes.saturating_add(8),
            got_bytes,
        });
    }
    Ok(header_bytes)
}

/// The text of a header whose file has `got_bytes` bytes.
fn parse_header(header: &[u8], got_bytes: u64, path: &Path) -> Result<Metadata> {
    let metadata: Metadata = serde_json::from_slice(header).map_err(|source| {
        let path = path.to_owned();
        WeightError::Header { path, source }
    })?;
    // What a header describes may have more bytes than can be counted.
    let expected_bytes = (8 + header.len() as u64).saturating_add(metadata.data_len() as u64);
    if expected_bytes != got_bytes {
        return Err(WeightError::Truncated {
            path: path.to_owned(),
            expected_bytes,
            got_bytes,
        });
    }
    Ok(metadata)
}

/// Reads the header of a file with this content, as [`WeightSource::open_file`] does. For [`crate::fuzzing`].
pub(crate) fn check_bytes(bytes: &[u8], path: &Path) -> Result<()> {
    let got_bytes = bytes.len() as u64;
    let Some((length, rest)) = bytes.split_first_chunk::<8>() else {
        return Err(WeightError::Truncated {
            path: path.to_owned(),
            expected_bytes: 8,
            got_bytes,
        });
    };
    let header_bytes = header_bytes(*length, got_bytes, path)?;
    let metadata = parse_header(&rest[..header_bytes as usize], got_bytes, path)?;
    entries(&metadata, 8 + header_bytes, 0).for_each(drop);
    Ok(())
}

/// Number of the little-endian values `bytes` of `dtype` that are infinite or NaN.
#[must_use]
pub fn not_finite(dtype: DType, bytes: &[u8]) -> usize {
    // All bits of the exponent are set.
    let halves = |exponent: u16| {
        let values = bytes
            .chunks_exact(2)
            .map(|b| u16::from_le_bytes([b[0], b[1]]));
        values.filter(|bits| bits & exponent == exponent).count()
    };
    match dtype {
        DType::F32 => {
            let values = bytes.chunks_exact(4);
            let values = values.map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
            values
                .filter(|bits| bits & 0x7f80_0000 == 0x7f80_0000)
                .count()
        }
        DType::BF16 => halves(0x7f80),
        DType::F16 => halves(0x7c00),
        _ => 0,
    }
}

type Convert = fn(&[u8], &mut [u8]);

/// The conversion between two dtypes; `None` when one is not a storage float.
fn converter(from: DType, to: DType) -> Option<Convert> {
    fn convert<A: Float, B: Float>(src: &[u8], dst: &mut [u8]) {
        let (a, b) = (size_of::<A>(), size_of::<B>());
        for (s, d) in src.chunks_exact(a).zip(dst.chunks_exact_mut(b)) {
            let value: A = bytemuck::pod_read_unaligned(s);
            d.copy_from_slice(bytemuck::bytes_of(&B::from_f32(value.to_f32())));
        }
    }
    fn from_any<B: Float>(from: DType) -> Option<Convert> {
        match from {
            DType::F32 => Some(convert::<f32, B>),
            DType::BF16 => Some(convert::<bf16, B>),
            DType::F16 => Some(convert::<f16, B>),
            _ => None,
        }
    }
    match to {
        DType::F32 => from_any::<f32>(from),
        DType::BF16 => from_any::<bf16>(from),
        DType::F16 => from_any::<f16>(from),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::params::ADAPTER_PREFIX;
    use safetensors::Dtype;
    use safetensors::tensor::TensorView;

    fn write(path: &Path, tensors: &[(&str, Dtype, Vec<usize>, Vec<u8>)]) {
        let views = tensors.iter().map(|(name, dtype, shape, data)| {
            (*name, TensorView::new(*dtype, shape.clone(), data).unwrap())
        });
        safetensors::serialize_to_file(views, None, path).unwrap();
    }

    fn floats(values: &[f32]) -> Vec<u8> {
        bytemuck::cast_slice(values).to_vec()
    }

    fn two_tensors(dir: &Path) -> PathBuf {
        let path = dir.join("model.safetensors");
        let a: Vec<f32> = (0..12).map(|i| i as f32 + 0.1).collect();
        let b: Vec<u8> =
            bytemuck::cast_slice(&[bf16::from_f32(1.5), bf16::from_f32(-2.0)]).to_vec();
        write(
            &path,
            &[
                ("a", Dtype::F32, vec![3, 4], floats(&a)),
                ("b", Dtype::BF16, vec![2], b),
                ("c", Dtype::I64, vec![1], vec![0; 8]),
            ],
        );
        path
    }

    #[test]
    fn any_range_of_weights_is_read_and_converted() {
        let dir = tempfile::tempdir().unwrap();
        two_tensors(dir.path());
        let source = WeightSource::open(dir.path()).unwrap();
        assert_eq!(source.names().collect::<Vec<_>>(), ["a", "b", "c"]);
        let mut out = [0u8; 12];
        source.read_range("a", 5..8, DType::F32, &mut out).unwrap();
        assert_eq!(bytemuck::cast_slice::<u8, f32>(&out), [5.1, 6.1, 7.1]);
        let mut half = [0u8; 4];
        source
            .read_range("a", 1..3, DType::BF16, &mut half)
            .unwrap();
        let expected = [bf16::from_f32(1.1), bf16::from_f32(2.1)];
        assert_eq!(half, *bytemuck::cast_slice::<bf16, u8>(&expected));
        let wide = source.read("b", DType::F32).unwrap();
        assert_eq!(wide, floats(&[1.5, -2.0]));
    }

    #[test]
    fn conversions_longer_than_a_chunk_are_exact() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.safetensors");
        let values: Vec<f32> = (0..2 * CHUNK_ELEMS + 5).map(|i| i as f32).collect();
        write(
            &path,
            &[("w", Dtype::F32, vec![values.len()], floats(&values))],
        );
        let source = WeightSource::open_file(&path).unwrap();
        let mut out = vec![0u8; (values.len() - 3) * 2];
        source
            .read_range("w", 3..values.len(), DType::BF16, &mut out)
            .unwrap();
        let expected: Vec<bf16> = values[3..].iter().map(|v| bf16::from_f32(*v)).collect();
        assert_eq!(out, bytemuck::cast_slice::<bf16, u8>(&expected));
    }

    #[test]
    fn values_that_are_not_finite_are_counted_over_the_whole_tensor() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.safetensors");
        let values = [1.0, f32::NAN, 7e4, f32::INFINITY, -1e9, 0.0];
        write(&path, &[("w", Dtype::F32, vec![6], floats(&values))]);
        let source = WeightSource::open_file(&path).unwrap();
        let read = |range: Range<usize>, dtype: DType| {
            let mut out = vec![0; range.len() * dtype.size_bytes()];
            source.read_finite("w", range, dtype, &mut out)
        };
        let counted = |result: Result<()>| match result {
            Err(WeightError::NotFinite { count, wanted, .. }) => (count, wanted),
            other => panic!("{other:?}"),
        };
        assert_eq!(counted(read(0..2, DType::F32)), (2, None));
        assert_eq!(counted(read(2..3, DType::F16)), (4, Some(DType::F16)));
        assert!(read(2..3, DType::BF16).is_ok());
        assert!(read(5..6, DType::F16).is_ok());
    }

    #[test]
    fn unusable_weight_files_are_errors_with_a_reason() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(
            WeightSource::open(dir.path()),
            Err(WeightError::NoWeights { .. })
        ));
        let path = two_tensors(dir.path());
        let source = WeightSource::open(dir.path()).unwrap();
        let range = |name: &str, r: Range<usize>, bytes| {
            source.read_range(name, r, DType::F32, &mut vec![0; bytes])
        };
        assert!(matches!(
            range("a", 10..13, 12),
            Err(WeightError::Range { .. })
        ));
        assert!(matches!(
            range("a", 0..2, 9),
            Err(WeightError::Range { .. })
        ));
        assert!(matches!(
            range("z", 0..1, 4),
            Err(WeightError::MissingTensor { .. })
        ));
        assert!(matches!(
            range("c", 0..1, 4),
            Err(WeightError::DType { .. })
        ));
        let bytes = std::fs::read(&path).unwrap();
        for keep in [bytes.len() - 1, 40, 5, 0] {
            std::fs::write(&path, &bytes[..keep]).unwrap();
            let error = WeightSource::open(dir.path()).unwrap_err();
            assert!(
                matches!(error, WeightError::Truncated { .. }),
                "{keep}: {error}"
            );
        }
        let mut broken = bytes;
        broken[9] = b'!';
        std::fs::write(&path, &broken).unwrap();
        assert!(matches!(
            WeightSource::open(dir.path()),
            Err(WeightError::Header { .. })
        ));
    }

    #[test]
    fn shards_are_joined_through_the_index() {
        let dir = tempfile::tempdir().unwrap();
        write(
            &dir.path().join("1.safetensors"),
            &[("a", Dtype::F32, vec![1], floats(&[1.0]))],
        );
        write(
            &dir.path().join("2.safetensors"),
            &[("b", Dtype::F32, vec![1], floats(&[2.0]))],
        );
        let index = dir.path().join("model.safetensors.index.json");
        let map = |text: &str| std::fs::write(&index, text).unwrap();
        map(r#"{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}"#);
        let source = WeightSource::open(dir.path()).unwrap();
        assert_eq!(source.read("b", DType::F32).unwrap(), floats(&[2.0]));
        map(r#"{"weight_map": {"a": "1.safetensors", "b": "1.safetensors"}}"#);
        assert!(matches!(
            WeightSource::open(dir.path()),
            Err(WeightError::MissingTensor { .. })
        ));
        map(r#"{"weight_map": {"a": "../1.safetensors"}}"#);
        assert!(matches!(
            WeightSource::open(dir.path()),
            Err(WeightError::ShardName { .. })
        ));
        map(r#"{"weight_map": {"a": "3.safetensors"}}"#);
        assert!(matches!(
            WeightSource::open(dir.path()),
            Err(WeightError::Read { .. })
        ));
    }

    #[test]
    fn weights_are_compared_with_the_model_and_extra_ones_listed() {
        use engine::{UnitId, UnitSpec};
        let dir = tempfile::tempdir().unwrap();
        two_tensors(dir.path());
        let source = WeightSource::open(dir.path()).unwrap();
        let spec = |name: &str, shape: &[usize]| ModelSpec {
            units: vec![UnitSpec { name: "u".into() }],
            params: vec![ParamSpec {
                name: name.into(),
                shape: Shape::new(shape),
                unit: UnitId(0),
                trainable: true,
                quantization: None,
            }],
        };
        assert_eq!(source.check(&spec("a", &[3, 4])).unwrap(), ["b", "c"]);
        let adapter = format!("{ADAPTER_PREFIX}q.lora_A.weight");
        assert_eq!(source.check(&spec(&adapter, &[1])).unwrap().len(), 3);
        let shape = source.check(&spec("a", &[4, 3]));
        assert!(matches!(shape, Err(WeightError::WrongShape { .. })));
        let dtype = source.check(&spec("c", &[1]));
        assert!(matches!(dtype, Err(WeightError::DType { .. })));
        let missing = source.check(&spec("d", &[1]));
        assert!(matches!(missing, Err(WeightError::MissingTensor { .. })));
    }
}

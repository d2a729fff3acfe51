//! A tensor in pieces: the slices that model-parallel ranks hold of it, or one strided view of a torch file.
//!
//! Reading streams: of a tensor in row-major pieces, no more than a chunk is in memory; of a strided view, the bytes
//! between its first and its last element.

use crate::torch_file::TorchTensor;
use crate::weights::{Result, WeightError};
use half::{bf16, f16};
use kernels::{DType, Float};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

/// Elements that are read of a piece at once.
const CHUNK_ELEMS: usize = 1 << 18;

/// An open file of weights.
#[derive(Debug)]
pub(crate) struct Shard {
    pub(crate) path: PathBuf,
    pub(crate) file: File,
}

/// A tensor of a torch file, by the number of its file.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    pub(crate) shard: usize,
    pub(crate) tensor: TorchTensor,
}

/// How pieces, in the order of ranks, make a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    /// Every piece is the whole tensor.
    Whole,
    /// Rows are in groups, of so many rows each. A piece has its slice of each group.
    Rows(Vec<usize>),
    /// A piece has a slice of each row.
    Columns,
}

impl Cut {
    /// Elements of the tensor of shape `shape` that the piece of `rank` of `ranks` has, in its order.
    pub(crate) fn runs(&self, shape: &[usize], rank: usize, ranks: usize) -> Vec<Range<usize>> {
        let elems: usize = shape.iter().product();
        let rows = shape.first().copied().unwrap_or(1).max(1);
        let width = elems / rows;
        match self {
            Self::Whole => std::iter::once(0..elems).collect(),
            Self::Rows(groups) => {
                let mut start = 0;
                let slice = |group: &usize| {
                    let first = start + group / ranks * rank;
                    start += group;
                    first * width..(first + group / ranks) * width
                };
                groups.iter().map(slice).collect()
            }
            Self::Columns => {
                let part = width / ranks;
                let first = move |row: usize| row * width + rank * part;
                (0..rows).map(|row| first(row)..first(row) + part).collect()
            }
        }
    }

    /// Shape of a piece of a tensor of shape `shape`; `None` if it cannot be divided among `ranks`.
    pub(crate) fn piece(&self, shape: &[usize], ranks: usize) -> Option<Vec<usize>> {
        let mut piece = shape.to_vec();
        match self {
            Self::Whole => {}
            Self::Rows(groups) => {
                let whole = groups.iter().all(|group| group % ranks == 0);
                (whole && groups.iter().sum::<usize>() == *shape.first()?).then_some(())?;
                piece[0] /= ranks;
            }
            Self::Columns => {
                let &[_, columns] = shape else { return None };
                (columns % ranks == 0).then_some(())?;
                piece[1] /= ranks;
            }
        }
        Some(piece)
    }
}

/// A low-rank change of rows of a tensor `[n, k]`: `scale * B A` with A `[r, k]` and B `[rows, r]`.
#[derive(Clone, Debug)]
pub(crate) struct LowRank {
    pub(crate) rows: Range<usize>,
    pub(crate) a: Piece,
    pub(crate) b: Piece,
}

/// A tensor in pieces.
#[derive(Clone, Debug)]
pub(crate) struct Pieces {
    pub(crate) cut: Cut,
    pub(crate) pieces: Vec<Piece>,
    /// Changes that are added to what the pieces hold, and their scale.
    pub(crate) added: (Vec<LowRank>, f32),
}

/// Elements of a strided view from its first to its last one, of the view that was read last.
#[derive(Debug, Default)]
pub(crate) struct Gathered(Mutex<Option<((usize, u64, usize), Arc<Vec<u8>>)>>);

/// Open files, and what was gathered of them.
#[derive(Clone, Copy)]
pub(crate) struct Files<'f> {
    pub(crate) shards: &'f [Shard],
    pub(crate) gathered: &'f Gathered,
}

fn failed(shard: &Shard) -> impl Fn(io::Error) -> WeightError {
    |source| WeightError::Read {
        path: shard.path.clone(),
        source,
    }
}

impl Files<'_> {
    /// Reads elements of a piece from `first` on, in row-major order.
    fn piece(&self, piece: &Piece, first: usize, out: &mut [u8]) -> Result<()> {
        let (shard, tensor) = (&self.shards[piece.shard], &piece.tensor);
        let size = tensor.dtype.size_bytes();
        if tensor.is_contiguous() {
            let at = tensor.at + (first * size) as u64;
            return shard.file.read_exact_at(out, at).map_err(failed(shard));
        }
        let bytes = self.gather(piece)?;
        for (index, element) in (first..).zip(out.chunks_exact_mut(size)) {
            let at = tensor.position(index) * size;
            element.copy_from_slice(&bytes[at..at + size]);
        }
        Ok(())
    }

    fn gather(&self, piece: &Piece) -> Result<Arc<Vec<u8>>> {
        let (shard, tensor) = (&self.shards[piece.shard], &piece.tensor);
        let key = (piece.shard, tensor.at, tensor.span());
        let mut held = self
            .gathered
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some((_, bytes)) = held.as_ref().filter(|(held, _)| *held == key) {
            return Ok(bytes.clone());
        }
        // The memory of the last view is free before that of the next is taken.
        *held = None;
        let mut bytes = vec![0; tensor.span() * tensor.dtype.size_bytes()];
        shard
            .file
            .read_exact_at(&mut bytes, tensor.at)
            .map_err(failed(shard))?;
        let bytes = Arc::new(bytes);
        *held = Some((key, bytes.clone()));
        Ok(bytes)
    }

    /// The whole piece as f32.
    fn values(&self, piece: &Piece) -> Result<Vec<f32>> {
        let tensor = &piece.tensor;
        let mut bytes = vec![0; tensor.elems() * tensor.dtype.size_bytes()];
        self.piece(piece, 0, &mut bytes)?;
        Ok(widened(DType::from_name(tensor.dtype.name()), &bytes))
    }
}

fn widened(dtype: Option<DType>, bytes: &[u8]) -> Vec<f32> {
    fn each<T: Float>(bytes: &[u8]) -> Vec<f32> {
        let values = bytes.chunks_exact(size_of::<T>());
        values
            .map(|value| bytemuck::pod_read_unaligned::<T>(value).to_f32())
            .collect()
    }
    match dtype {
        Some(DType::BF16) => each::<bf16>(bytes),
        Some(DType::F16) => each::<f16>(bytes),
        _ => each::<f32>(bytes),
    }
}

impl Pieces {
    /// One view of one file.
    pub(crate) fn one(shard: usize, tensor: TorchTensor) -> Self {
        Self {
            cut: Cut::Whole,
            pieces: vec![Piece { shard, tensor }],
            added: (Vec::new(), 0.0),
        }
    }

    /// Number of the file that holds the first piece.
    pub(crate) fn shard(&self) -> usize {
        self.pieces[0].shard
    }

    /// Reads elements of the tensor `name` of shape `shape` from `first` on, as they are stored.
    ///
    /// # Errors
    /// A file cannot be read, or copies of one tensor differ among ranks.
    pub(crate) fn read(
        &self,
        files: Files<'_>,
        name: &str,
        shape: &[usize],
        first: usize,
        out: &mut [u8],
    ) -> Result<()> {
        let size = self.pieces[0].tensor.dtype.size_bytes();
        for (i, part) in out.chunks_mut(CHUNK_ELEMS * size).enumerate() {
            let first = first + i * CHUNK_ELEMS;
            match &self.cut {
                Cut::Whole => self.copies(files, name, first, part)?,
                Cut::Rows(groups) => self.rows(files, groups, shape, first, part)?,
                Cut::Columns => self.columns(files, shape, first, part)?,
            }
            self.add(files, shape, first, part)?;
        }
        Ok(())
    }

    fn copies(&self, files: Files<'_>, name: &str, first: usize, out: &mut [u8]) -> Result<()> {
        files.piece(&self.pieces[0], first, out)?;
        let mut other = vec![0; if self.pieces.len() > 1 { out.len() } else { 0 }];
        for (rank, piece) in self.pieces.iter().enumerate().skip(1) {
            files.piece(piece, first, &mut other)?;
            if other != out {
                return Err(WeightError::Slices {
                    name: name.to_owned(),
                    reason: format!(
                        "is whole on every rank, but rank {rank} has other values than rank 0"
                    ),
                });
            }
        }
        Ok(())
    }

    fn rows(
        &self,
        files: Files<'_>,
        groups: &[usize],
        shape: &[usize],
        first: usize,
        out: &mut [u8],
    ) -> Result<()> {
        let ranks = self.pieces.len();
        let size = self.pieces[0].tensor.dtype.size_bytes();
        let width = shape.iter().skip(1).product::<usize>().max(1);
        let end = first + out.len() / size;
        let mut group_at = 0;
        for group in groups {
            let slice = group / ranks * width;
            for (rank, piece) in self.pieces.iter().enumerate() {
                let start = group_at * width + rank * slice;
                let (from, to) = (start.max(first), (start + slice).min(end));
                if from < to {
                    let in_piece = group_at / ranks * width + from - start;
                    let out = &mut out[(from - first) * size..(to - first) * size];
                    files.piece(piece, in_piece, out)?;
                }
            }
            group_at += group;
        }
        Ok(())
    }

    fn columns(
        &self,
        files: Files<'_>,
        shape: &[usize],
        first: usize,
        out: &mut [u8],
    ) -> Result<()> {
        let ranks = self.pieces.len();
        let size = self.pieces[0].tensor.dtype.size_bytes();
        let width = shape.last().copied().unwrap_or(1).max(1);
        let part = width / ranks;
        let end = first + out.len() / size;
        let rows = first / width..end.div_ceil(width);
        let mut slices = vec![0; rows.len() * part * size];
        for (rank, piece) in self.pieces.iter().enumerate() {
            files.piece(piece, rows.start * part, &mut slices)?;
            for (row, slice) in rows.clone().zip(slices.chunks_exact(part * size)) {
                let start = row * width + rank * part;
                let (from, to) = (start.max(first), (start + part).min(end));
                if from < to {
                    let slice = &slice[(from - start) * size..(to - start) * size];
                    out[(from - first) * size..(to - first) * size].copy_from_slice(slice);
                }
            }
        }
        Ok(())
    }

    /// Adds the low-rank changes: summed over the rank in its order and added in f32, rounded once.
    fn add(&self, files: Files<'_>, shape: &[usize], first: usize, out: &mut [u8]) -> Result<()> {
        let (changes, scale) = &self.added;
        let (Some(dtype), &[_, width]) =
            (DType::from_name(self.pieces[0].tensor.dtype.name()), shape)
        else {
            return Ok(());
        };
        let end = first + out.len() / dtype.size_bytes();
        for change in changes {
            let (from, to) = (
                first.max(change.rows.start * width),
                end.min(change.rows.end * width),
            );
            if from >= to {
                continue;
            }
            let (a, b) = (files.values(&change.a)?, files.values(&change.b)?);
            let rank = a.len() / width;
            let out =
                &mut out[(from - first) * dtype.size_bytes()..(to - first) * dtype.size_bytes()];
            let mut values = widened(Some(dtype), out);
            for (at, value) in (from..to).zip(&mut values) {
                let (row, column) = (at / width - change.rows.start, at % width);
                let products = (0..rank).map(|i| b[row * rank + i] * a[i * width + column]);
                *value += scale * products.sum::<f32>();
            }
            match dtype {
                DType::BF16 => narrowed::<bf16>(&values, out),
                DType::F16 => narrowed::<f16>(&values, out),
                _ => narrowed::<f32>(&values, out),
            }
        }
        Ok(())
    }
}

fn narrowed<T: Float>(values: &[f32], out: &mut [u8]) {
    for (value, out) in values.iter().zip(out.chunks_exact_mut(size_of::<T>())) {
        out.copy_from_slice(bytemuck::bytes_of(&T::from_f32(*value)));
    }
}

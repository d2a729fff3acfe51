//! Resharding: the same state, divided for another number of ranks.

use optim::adamw::BLOCK_ELEMS;
use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::CheckpointError;
use super::manifest::{LogicalTensor, MANIFEST};
use super::read::{Checkpoint, verify_file};
use super::tensor_file::FileDigest;
use super::write::{Piece, PieceBytes, STATE, Writer};
use crate::plan::{ALIGN_ELEMS, GroupLayout};
use crate::spec::ParamId;

/// Bytes that are read and written at once.
const CHUNK_BYTES: usize = 1 << 22;

/// Copies the checkpoint `source` to `checkpoint-<step>` in the directory `output`, with the training state
/// divided for `world_size` ranks, and returns the new directory. All other files are copied unchanged;
/// `meta` goes into the new manifest.
///
/// Each entry of `units` names the parameters that a run concatenates in one flat buffer, in order. The state
/// is then divided at the same elements as in a run of `world_size` ranks, and resharding back gives the
/// first files again. If `units` is empty, each parameter is divided separately. At most 4 MiB of a tensor
/// are in memory at once.
///
/// # Errors
/// [`CheckpointError::Malformed`] when `units` does not name every parameter once; otherwise as
/// [`Checkpoint::read`] and [`Writer::commit`].
pub fn reshard(
    source: &Checkpoint,
    units: &[Vec<String>],
    world_size: u32,
    output: &Path,
    meta: Value,
) -> Result<PathBuf, CheckpointError> {
    let units = Units::of(source, units)?;
    let layouts = units.layouts(world_size as usize);
    let mut first = Err(CheckpointError::OutOfTurn {
        rank: 0,
        world_size,
        action: "reshard a checkpoint",
    });
    for rank in (0..world_size).rev() {
        let mut writer = Writer::begin(output, source.step(), rank, world_size)?;
        writer.write_pieces(units.pieces(&layouts, rank as usize))?;
        writer.finish_rank()?;
        // Only the writer of rank 0 remains; it comes last.
        first = Ok(writer);
    }
    let mut writer = first?;
    let others = source.files().iter();
    for file in others.filter(|file| file.path.split('/').next() != Some(STATE)) {
        let (from, to) = (
            source.directory().join(&file.path),
            writer.directory().join(&file.path),
        );
        let parent = to.parent().unwrap_or(&to);
        fs::create_dir_all(parent).map_err(CheckpointError::io("create", parent, 0))?;
        fs::copy(&from, &to).map_err(CheckpointError::io("write", &to, file.bytes))?;
        let digest = FileDigest {
            bytes: file.bytes,
            blake3: file.blake3.clone(),
        };
        verify_file(&to, &digest)?;
        writer.adopt_file(&file.path)?;
    }
    writer.commit(meta, 0)
}

/// One kind of a parameter.
struct Kind<'a> {
    tensor: &'a LogicalTensor,
    shape: Vec<usize>,
    elems: usize,
    /// Elements of the parameter that share one value: 1, or those of a block for an absmax.
    per: usize,
}

/// Whether a kind has one value per block of elements: the absmax of 8-bit codes.
fn is_per_block(kind: &str) -> bool {
    kind.ends_with("_absmax")
}

/// The kinds of parameters by the flat buffers they share.
struct Units<'a> {
    source: &'a Checkpoint,
    /// Per flat buffer and per parameter in it, the kinds in the manifest's order.
    units: Vec<Vec<Vec<Kind<'a>>>>,
}

impl<'a> Units<'a> {
    fn of(source: &'a Checkpoint, units: &[Vec<String>]) -> Result<Self, CheckpointError> {
        let malformed = |what| CheckpointError::Malformed {
            path: source.directory().join(MANIFEST),
            what,
        };
        let mut kinds: BTreeMap<&str, Vec<Kind<'_>>> = BTreeMap::new();
        let mut order: Vec<&str> = Vec::new();
        for tensor in source.tensors() {
            let known = kinds.entry(&tensor.name).or_default();
            if known.is_empty() {
                order.push(&tensor.name);
            }
            let size = |n: u64| usize::try_from(n).map_err(|_| tensor.bad("it is too large"));
            known.push(Kind {
                tensor,
                shape: tensor
                    .shape
                    .iter()
                    .map(|&dim| size(dim))
                    .collect::<Result<_, _>>()?,
                elems: size(tensor.elems()?)?,
                per: if is_per_block(&tensor.kind) {
                    BLOCK_ELEMS
                } else {
                    1
                },
            });
        }
        for kinds in kinds.values() {
            // An absmax is shorter than its codes, whose shape counts.
            let whole = kinds.iter().find(|kind| kind.per == 1);
            let fits = |kind: &Kind<'_>| match (whole, kind.per) {
                (None, _) => false,
                (Some(whole), 1) => kind.tensor.shape == whole.tensor.shape,
                (Some(whole), per) => kind.shape == [whole.elems.div_ceil(per)],
            };
            if !kinds.iter().all(fits) {
                return Err(malformed("the kinds of a parameter differ in shape"));
            }
        }
        let alone = || order.iter().map(|name| vec![*name]).collect();
        let named = || -> Vec<Vec<&str>> {
            let units = units.iter();
            units
                .map(|unit| unit.iter().map(String::as_str).collect())
                .collect()
        };
        let named: Vec<Vec<&str>> = if units.is_empty() { alone() } else { named() };
        let units = named
            .iter()
            .map(|unit| unit.iter().map(|name| kinds.remove(name)).collect());
        // A parameter that is named twice was already taken.
        let units = units.collect::<Option<Vec<Vec<_>>>>();
        match units {
            Some(units) if kinds.is_empty() => Ok(Self { source, units }),
            _ => Err(malformed(
                "its units do not name every parameter exactly once",
            )),
        }
    }

    /// Layout of each flat buffer: offsets of its parameters and division over ranks, as in the plan of a run.
    fn layouts(&self, world_size: usize) -> Vec<GroupLayout> {
        let all = self.source.tensors();
        let in_blocks = all.iter().any(|tensor| is_per_block(&tensor.kind));
        let layout = |unit: &Vec<Vec<Kind<'_>>>| {
            let params = unit.iter().enumerate();
            let blocks = |kinds: &[Kind<'_>]| kinds.iter().any(|kind| kind.per > 1);
            let elems = |kinds: &[Kind<'_>]| kinds.iter().map(|kind| kind.elems).max().unwrap_or(0);
            let params = params.map(|(i, kinds)| (ParamId(i as u32), elems(kinds), blocks(kinds)));
            match in_blocks {
                true => GroupLayout::in_blocks(params, world_size),
                false => {
                    let params = params.map(|(id, elems, _)| (id, elems));
                    GroupLayout::new(params, world_size, ALIGN_ELEMS)
                }
            }
        };
        self.units.iter().map(layout).collect()
    }

    /// The pieces of `rank`.
    fn pieces(&self, layouts: &[GroupLayout], rank: usize) -> Vec<Piece<'_>> {
        let mut pieces = Vec::new();
        for (unit, layout) in self.units.iter().zip(layouts) {
            for (slot, part) in layout.parts(layout.shard(rank)) {
                let own = part.start - slot.offset..part.end - slot.offset;
                let kinds = unit[slot.param.index()].iter();
                pieces.extend(kinds.map(|kind| {
                    let values = own.start / kind.per..own.end.div_ceil(kind.per);
                    self.piece(kind, values.start as u64..values.end as u64)
                }));
            }
            // A tensor without elements is in no shard, so rank 0 declares it.
            let empty = unit.iter().flatten().filter(|kind| kind.elems == 0);
            pieces.extend(
                empty
                    .filter(|_| rank == 0)
                    .map(|kind| self.piece(kind, 0..0)),
            );
        }
        pieces
    }

    fn piece<'s>(&'s self, kind: &'s Kind<'_>, own: Range<u64>) -> Piece<'s> {
        let (source, tensor) = (self.source, kind.tensor);
        Piece {
            name: &tensor.name,
            kind: &tensor.kind,
            dtype: tensor.dtype,
            shape: &kind.shape,
            start: own.start,
            elems: own.end - own.start,
            bytes: PieceBytes::Produce(Box::new(move |sink| {
                let size = tensor.dtype.size_bytes();
                let chunk_elems = (CHUNK_BYTES / size) as u64;
                let mut chunk = Vec::new();
                let mut start = own.start;
                while start < own.end {
                    let end = own.end.min(start + chunk_elems);
                    chunk.resize((end - start) as usize * size, 0);
                    source.read(&tensor.kind, &tensor.name, start..end, &mut chunk)?;
                    sink.write(&chunk)?;
                    start = end;
                }
                Ok(())
            })),
        }
    }
}

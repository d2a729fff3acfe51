//! Checkpoints of SwissArmyTransformer (SAT), the trainer of CogVLM and CogAgent: one file for each model-parallel
//! rank, read as the tensors of the published model.
//!
//! Sources: SwissArmyTransformer `training/model_io.py`, `mpu/layers.py`, `model/finetune/lora2.py`; CogVLM
//! `utils/models`.

pub mod config;
pub(crate) mod names;
pub mod write;

use crate::pieces::{Cut, LowRank, Piece, Pieces, Shard};
use crate::places;
use crate::torch_file::{self, TorchTensor, Wanted};
use crate::weights::{Result, WeightError};
use names::Division;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The file that names the iteration.
const LATEST: &str = "latest";
/// The entry of a rank's file that has the tensors.
const MODULE: &str = "module";
/// Most ranks of a checkpoint.
const MAX_RANKS: usize = 64;
/// Longest file `latest` in bytes.
const MAX_LATEST_BYTES: usize = 256;

/// What is done with LoRA matrices that are not merged into their weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LowRankMatrices {
    /// They are added to the weights, which are those of the trained model.
    Merged,
    /// They are tensors of their own, `MODULE.matrix_A.i` and `MODULE.matrix_B.i`; weights are those of the base.
    Separate,
}

/// The tensors of a checkpoint under the names of the Hub.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) shards: Vec<Shard>,
    pub(crate) tensors: BTreeMap<String, (Vec<usize>, Pieces)>,
    /// Names in SAT of tensors that the published models do not have.
    pub(crate) ignored: Vec<String>,
}

/// Whether the directory `dir` is a SAT checkpoint, or one iteration of one.
#[must_use]
pub fn is_checkpoint(dir: &Path) -> bool {
    iteration(dir).is_ok_and(|found| !rank_files(&found).is_empty() || is_partitioned(&found))
        || (dir.join(LATEST).is_file() && dir.join(config::FILE).is_file())
}

/// The directories of the location `model` that have ranks.
pub(crate) fn rank_directories(model: &Path) -> Vec<PathBuf> {
    let mut dirs = places::directories(model);
    let mut is_first = true;
    dirs.retain(|dir| std::mem::take(&mut is_first) || is_checkpoint(dir));
    dirs
}

fn unusable(dir: &Path, reason: impl Into<String>) -> WeightError {
    WeightError::Sat {
        dir: dir.to_owned(),
        reason: reason.into(),
    }
}

/// The directory of the iteration that counts.
fn iteration(dir: &Path) -> Result<PathBuf> {
    let path = dir.join(LATEST);
    let Ok(bytes) = crate::text::read_regular(&path) else {
        return match rank_files(dir).is_empty() {
            true => Err(unusable(
                dir,
                "has no file latest, which names the iteration",
            )),
            false => Ok(dir.to_owned()),
        };
    };
    let text = String::from_utf8(bytes).unwrap_or_default();
    let name = text.trim();
    if text.len() > MAX_LATEST_BYTES || !crate::weights::is_plain(name) {
        return Err(unusable(
            dir,
            "has a file latest that does not name a directory",
        ));
    }
    Ok(dir.join(name))
}

/// Files of the ranks in the directory of an iteration.
fn rank_files(dir: &Path) -> Vec<(usize, PathBuf)> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut found: Vec<(usize, PathBuf)> = entries
        .filter_map(|entry| {
            let name = entry.file_name();
            let rank = name.to_str()?.strip_prefix("mp_rank_")?;
            let rank = rank.strip_suffix("_model_states.pt")?;
            Some((rank.parse().ok()?, entry.path()))
        })
        .collect();
    found.sort();
    found
}

fn is_partitioned(dir: &Path) -> bool {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names.any(|name| name.starts_with("z3_rank_") || name.starts_with("zero_pp_rank_"))
}

/// Files of all ranks in `dirs`, in the order of ranks.
fn all_files(dirs: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let mut files: BTreeMap<usize, PathBuf> = BTreeMap::new();
    let first = iteration(&dirs[0])?;
    for dir in dirs {
        let iteration = iteration(dir)?;
        if iteration.file_name() != first.file_name() {
            let reason = format!("is of another iteration than {}", first.display());
            return Err(unusable(dir, reason));
        }
        let found = rank_files(&iteration);
        if found.is_empty() {
            let reason = match is_partitioned(&iteration) {
                true => "is divided by ZeRO-3 (z3_rank files); save it with stage 2, or gather it in DeepSpeed".to_owned(),
                false => format!("has no mp_rank_00_model_states.pt in {}", iteration.display()),
            };
            return Err(unusable(dir, reason));
        }
        for (rank, path) in found {
            if let Some(other) = files.insert(rank, path) {
                return Err(unusable(
                    dir,
                    format!("has rank {rank}, as {} has", other.display()),
                ));
            }
        }
    }
    let ranks = files.keys().next_back().map_or(0, |last| last + 1);
    let missing = (0..ranks).find(|rank| !files.contains_key(rank));
    match missing {
        Some(rank) => Err(missing_rank(&dirs[0], rank, None)),
        None if ranks > MAX_RANKS => Err(unusable(
            &dirs[0],
            format!("has more than {MAX_RANKS} ranks"),
        )),
        None => Ok(files.into_values().collect()),
    }
}

fn missing_rank(dir: &Path, rank: usize, ranks: Option<usize>) -> WeightError {
    WeightError::MissingRank {
        dir: dir.to_owned(),
        rank,
        ranks,
    }
}

type Tensors = BTreeMap<String, TorchTensor>;
/// Shapes of the model's parameters, by the names of the Hub.
pub(crate) type Shapes = BTreeMap<String, Vec<usize>>;

/// Lists the tensors of every rank of the checkpoint in `dirs`, with their names in SAT.
fn ranks(dirs: &[PathBuf]) -> Result<(Vec<Shard>, Vec<Tensors>)> {
    let (mut shards, mut tensors) = (Vec::new(), Vec::new());
    for path in all_files(dirs)? {
        let opened = torch_file::tensors(&path, Wanted::Entry(MODULE));
        let (file, found) = opened.map_err(|source| WeightError::Torch {
            path: path.clone(),
            source,
        })?;
        shards.push(Shard { path, file });
        tensors.push(found);
    }
    check_count(&dirs[0], &tensors)?;
    Ok((shards, tensors))
}

/// Fails if there are fewer files than ranks. The output layer of attention has as many columns as rows on one rank.
fn check_count(dir: &Path, tensors: &[Tensors]) -> Result<()> {
    let dense = ["weight", "original.weight"];
    let mut dense = dense
        .iter()
        .filter_map(|end| tensors[0].get(&format!("transformer.layers.0.attention.dense.{end}")));
    let Some(&[rows, columns]) = dense.next().map(|tensor| &tensor.shape[..]) else {
        return Ok(());
    };
    let ranks = rows / columns.max(1);
    match tensors.len() < ranks {
        true => Err(missing_rank(dir, tensors.len(), Some(ranks))),
        false => Ok(()),
    }
}

/// Opens the checkpoint whose ranks are in `dirs`. `shapes` are those of the model, by the names of the Hub.
pub(crate) fn open(dirs: &[PathBuf], shapes: &Shapes, matrices: LowRankMatrices) -> Result<Opened> {
    let (shards, found) = ranks(dirs)?;
    let names: BTreeSet<&String> = found.iter().flat_map(BTreeMap::keys).collect();
    let mut opened = Opened {
        shards,
        tensors: BTreeMap::new(),
        ignored: Vec::new(),
    };
    let low_rank = LowRankNames::of(&names);
    if found.len() > 1
        && let Some(module) = low_rank.modules.first()
    {
        return Err(WeightError::Slices {
            name: format!("{module}.matrix_A.0"),
            reason: "is a LoRA matrix of one of several ranks, each of which has its own: merge them in SAT, or save with one rank".to_owned(),
        });
    }
    let layers = names.iter().filter_map(|name| {
        let rest = name.strip_prefix("transformer.layers.")?;
        rest.split('.').next()?.parse::<usize>().ok()
    });
    let layers = layers.max().map_or(0, |last| last + 1);
    for sat in names {
        if low_rank.is_matrix(sat) {
            continue;
        }
        let plain = sat.replace(".original.", ".");
        let pieces = gathered(sat, &found)?;
        if plain == names::FREQUENCIES {
            for layer in 0..layers {
                opened.add(
                    names::frequencies_of(layer),
                    Division::Whole,
                    &pieces,
                    shapes,
                )?;
            }
            continue;
        }
        match names::of_sat(&plain) {
            Some((hub, division)) => opened.add(hub, division, &pieces, shapes)?,
            None => opened.ignored.push(sat.clone()),
        }
    }
    for module in &low_rank.modules {
        opened.add_matrices(module, &found[0], matrices)?;
    }
    Ok(opened)
}

/// Modules with LoRA matrices.
struct LowRankNames {
    modules: BTreeSet<String>,
}

impl LowRankNames {
    fn of(names: &BTreeSet<&String>) -> Self {
        let module = |name: &&&String| Some(name.split_once(".matrix_A.")?.0.to_owned());
        let modules = names.iter().filter_map(|name| module(&name)).collect();
        Self { modules }
    }

    fn is_matrix(&self, name: &str) -> bool {
        let halves = [".matrix_A.", ".matrix_B."];
        let mut modules = halves.iter().filter_map(|half| name.split_once(half));
        modules.any(|(module, _)| self.modules.contains(module))
    }
}

/// The pieces of the tensor `sat`, one of each rank.
fn gathered(sat: &str, found: &[Tensors]) -> Result<Vec<Piece>> {
    let wrong = |reason: String| WeightError::Slices {
        name: sat.to_owned(),
        reason,
    };
    let mut pieces: Vec<Piece> = Vec::new();
    for (rank, tensors) in found.iter().enumerate() {
        let Some(tensor) = tensors.get(sat) else {
            return Err(wrong(format!("is missing on rank {rank}")));
        };
        if let Some(first) = pieces.first() {
            let (dtype, shape) = (first.tensor.dtype, &first.tensor.shape);
            if dtype != tensor.dtype {
                let (own, other) = (tensor.dtype.name(), dtype.name());
                return Err(wrong(format!(
                    "is {own} on rank {rank} and {other} on rank 0"
                )));
            }
            if *shape != tensor.shape {
                let own = &tensor.shape;
                return Err(wrong(format!(
                    "is {own:?} on rank {rank} and {shape:?} on rank 0"
                )));
            }
        }
        pieces.push(Piece {
            shard: rank,
            tensor: tensor.clone(),
        });
    }
    Ok(pieces)
}

impl Opened {
    fn add(
        &mut self,
        hub: String,
        division: Division,
        pieces: &[Piece],
        shapes: &Shapes,
    ) -> Result<()> {
        let ranks = pieces.len();
        let slice = &pieces[0].tensor.shape;
        let full = match shapes.get(&hub) {
            Some(shape) => shape.clone(),
            None => slice.clone(),
        };
        let width = shapes
            .get(&sibling(&hub))
            .and_then(|shape| shape.get(1))
            .copied();
        let cut = match full == *slice {
            true => Some(Cut::Whole),
            false => cut(division, &full, width),
        };
        let fits = |cut: &Cut| cut.piece(&full, ranks).as_ref() == Some(slice);
        // With one rank, the model's own check of shapes says more.
        let (cut, full) = match cut.filter(fits) {
            Some(cut) => (cut, full),
            None if ranks == 1 => (Cut::Whole, slice.clone()),
            None => {
                return Err(WeightError::Slices {
                    reason: format!(
                        "is {slice:?} on each of {ranks} ranks, which is neither {full:?} nor a slice of it"
                    ),
                    name: hub,
                });
            }
        };
        let pieces = Pieces {
            cut,
            pieces: pieces.to_vec(),
            added: (Vec::new(), 0.0),
        };
        self.tensors.insert(hub, (full, pieces));
        Ok(())
    }

    /// Adds the LoRA matrices of the module `sat`, of the only rank.
    fn add_matrices(
        &mut self,
        sat: &str,
        found: &Tensors,
        matrices: LowRankMatrices,
    ) -> Result<()> {
        let wrong = |name: &str, reason: &str| WeightError::Slices {
            name: name.to_owned(),
            reason: reason.to_owned(),
        };
        let Some((weight, division)) = names::of_sat(&format!("{sat}.weight")) else {
            return Err(wrong(
                sat,
                "has LoRA matrices, but is no layer of the published model",
            ));
        };
        let module = weight.trim_end_matches(".weight").to_owned();
        let Some((shape, pieces)) = self.tensors.get_mut(&weight) else {
            return Err(wrong(sat, "has LoRA matrices, but no weight"));
        };
        let &[rows, columns] = &shape[..] else {
            return Err(wrong(sat, "has LoRA matrices, but its weight is no matrix"));
        };
        let groups = match cut(division, &[rows, columns], Some(columns)) {
            Some(Cut::Rows(groups)) => groups,
            _ => vec![rows],
        };
        let mut start = 0;
        let mut added = Vec::new();
        for (i, group) in groups.iter().enumerate() {
            let piece = |half: &str| {
                let name = format!("{sat}.{half}.{i}");
                let tensor = found.get(&name).cloned();
                let tensor = tensor.ok_or_else(|| wrong(&name, "is missing"))?;
                Ok::<_, WeightError>(Piece { shard: 0, tensor })
            };
            let (a, b) = (piece("matrix_A")?, piece("matrix_B")?);
            let rank = a.tensor.shape.first().copied().unwrap_or(0);
            if a.tensor.shape != [rank, columns] || b.tensor.shape != [*group, rank] || rank == 0 {
                return Err(wrong(
                    &format!("{sat}.matrix_B.{i}"),
                    "and matrix_A do not fit the weight",
                ));
            }
            added.push(LowRank {
                rows: start..start + group,
                a,
                b,
            });
            start += group;
        }
        if found.contains_key(&format!("{sat}.matrix_A.{}", groups.len())) {
            return Err(wrong(sat, "has more LoRA matrices than projections"));
        }
        match matrices {
            LowRankMatrices::Merged => {
                let rank = added[0].a.tensor.shape[0];
                // `lora2.py` has no setting for alpha: it is 1.
                pieces.added = (added, 1.0 / rank as f32);
            }
            LowRankMatrices::Separate => {
                for (i, low) in added.into_iter().enumerate() {
                    for (half, piece) in [("matrix_A", low.a), ("matrix_B", low.b)] {
                        let shape = piece.tensor.shape.clone();
                        let pieces = Pieces::one(piece.shard, piece.tensor);
                        self.tensors
                            .insert(format!("{module}.{half}.{i}"), (shape, pieces));
                    }
                }
            }
        }
        Ok(())
    }
}

/// The weight of the module of the tensor `hub`.
fn sibling(hub: &str) -> String {
    match hub.rsplit_once('.') {
        Some((module, _)) => format!("{module}.weight"),
        None => hub.to_owned(),
    }
}

/// How the tensor of shape `full` is divided. `width` are the columns of its module's weight.
pub(crate) fn cut(division: Division, full: &[usize], width: Option<usize>) -> Option<Cut> {
    let rows = *full.first()?;
    Some(match division {
        Division::Whole => Cut::Whole,
        Division::Vocabulary => Cut::Rows(vec![rows]),
        Division::Column(groups) if rows % groups == 0 => Cut::Rows(vec![rows / groups; groups]),
        Division::Column(_) => return None,
        Division::QueryKeyValue => {
            // All heads together are as wide as the input.
            let queries = width.or(full.get(1).copied()).unwrap_or(rows / 3);
            let others = rows.checked_sub(queries).filter(|others| others % 2 == 0)?;
            Cut::Rows(vec![queries, others / 2, others / 2])
        }
        Division::Row if full.len() == 2 => Cut::Columns,
        // A bias.
        Division::Row => Cut::Whole,
    })
}

#[cfg(test)]
mod tests;

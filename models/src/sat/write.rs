//! Writes a SAT checkpoint: the tensors of a published model, divided among model-parallel ranks.
//!
//! Tensors are written in order, block by block; each block goes to all ranks that have a part of it.

use super::names;
use super::{LATEST, MODULE, config, cut, sibling};
use crate::pieces::Cut;
use crate::torch_file::write::TorchWriter;
use crate::weights::{Result, WeightError};
use kernels::DType;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Name of the iteration that is written.
const ITERATION: &str = "1";

/// Name, dtype and shape of a tensor.
#[derive(Clone, Debug)]
pub struct TensorOf {
    /// Name of the tensor.
    pub name: String,
    /// F32, BF16 or F16.
    pub dtype: DType,
    /// Extents.
    pub shape: Vec<usize>,
}

impl TensorOf {
    pub(crate) fn bytes(&self) -> u64 {
        (self.shape.iter().product::<usize>() * self.dtype.size_bytes()) as u64
    }
}

/// Where the elements of a tensor go.
#[derive(Debug)]
struct Target {
    tensor: TensorOf,
    /// `None` for one of several names of a tensor that is already written.
    cut: Option<Cut>,
    /// Elements that were written.
    written: usize,
}

/// A checkpoint that is being written.
#[derive(Debug)]
pub struct SatWriter {
    files: Vec<(PathBuf, TorchWriter)>,
    targets: BTreeMap<String, Target>,
    frequencies: Vec<u8>,
}

fn failed(path: &Path) -> impl Fn(io::Error) -> WeightError {
    |source| WeightError::Write {
        path: path.to_owned(),
        source,
    }
}

impl SatWriter {
    /// Begins a checkpoint of `ranks` ranks in the directory `dir`. `hub` is the content of the model's `config.json`,
    /// and `tensors` are its tensors by the names of the Hub.
    ///
    /// # Errors
    /// SAT has no such tensor, ranks cannot divide one, or a file cannot be written.
    pub fn create(
        dir: &Path,
        hub: &Map<String, Value>,
        tensors: &[TensorOf],
        ranks: usize,
    ) -> Result<Self> {
        let widths: BTreeMap<&str, usize> = tensors
            .iter()
            .filter_map(|tensor| Some((&*tensor.name, *tensor.shape.get(1)?)))
            .collect();
        let mut targets = BTreeMap::new();
        let mut divided: Vec<TensorOf> = Vec::new();
        for tensor in tensors {
            let (sat, division) =
                names::of_hub(&tensor.name).ok_or_else(|| WeightError::NotInSat {
                    name: tensor.name.clone(),
                    reason: "has no place in a SAT checkpoint",
                })?;
            let is_copy =
                sat == names::FREQUENCIES && divided.iter().any(|other| other.name == sat);
            let width = widths.get(&*sibling(&tensor.name)).copied();
            let cut = match ranks {
                1 => Some(Cut::Whole),
                _ => cut(division, &tensor.shape, width),
            };
            let shape = cut.as_ref().and_then(|cut| cut.piece(&tensor.shape, ranks));
            let (Some(cut), Some(shape)) = (cut, shape) else {
                return Err(WeightError::Indivisible {
                    name: tensor.name.clone(),
                    shape: tensor.shape.clone(),
                    ranks,
                });
            };
            let target = Target {
                tensor: tensor.clone(),
                cut: (!is_copy).then_some(cut),
                written: 0,
            };
            targets.insert(tensor.name.clone(), target);
            if !is_copy {
                divided.push(TensorOf {
                    name: sat,
                    dtype: tensor.dtype,
                    shape,
                });
            }
        }
        let iteration = dir.join(ITERATION);
        fs::create_dir(&iteration).map_err(failed(&iteration))?;
        let put = |name: &str, text: &str| {
            let path = dir.join(name);
            fs::write(&path, text).map_err(failed(&path))
        };
        put(LATEST, ITERATION)?;
        put(config::FILE, &format!("{:#}\n", config::sat(hub, ranks)))?;
        let mut files = Vec::new();
        for rank in 0..ranks {
            let path = iteration.join(format!("mp_rank_{rank:02}_model_states.pt"));
            let file = TorchWriter::create(&path, MODULE, &divided).map_err(failed(&path))?;
            files.push((path, file));
        }
        Ok(Self {
            files,
            targets,
            frequencies: Vec::new(),
        })
    }

    /// Appends the next bytes of the tensor `name`. Tensors come in the order given to [`SatWriter::create`].
    ///
    /// # Errors
    /// A file cannot be written, or layers have different rotary frequencies.
    pub fn write(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        let Some(target) = self.targets.get_mut(name) else {
            return Ok(());
        };
        let (size, first) = (target.tensor.dtype.size_bytes(), target.written);
        let end = first + bytes.len() / size;
        target.written = end;
        let is_frequencies = names::is_frequencies(name);
        let Some(cut) = &target.cut else {
            let expected = self.frequencies.get(first * size..end * size);
            return match expected == Some(bytes) {
                true => Ok(()),
                false => Err(WeightError::NotInSat {
                    name: name.to_owned(),
                    reason: "differs from that of layer 0; SAT has one for all layers",
                }),
            };
        };
        if is_frequencies {
            self.frequencies.extend(bytes);
        }
        let ranks = self.files.len();
        for (rank, (path, file)) in self.files.iter_mut().enumerate() {
            for run in cut.runs(&target.tensor.shape, rank, ranks) {
                let (from, to) = (run.start.max(first), run.end.min(end));
                if from < to {
                    let part = &bytes[(from - first) * size..(to - first) * size];
                    file.write(part).map_err(failed(path))?;
                }
            }
        }
        Ok(())
    }

    /// Completes all files.
    ///
    /// # Errors
    /// A tensor is not complete, or a file cannot be written.
    pub fn finish(self) -> Result<()> {
        for (path, file) in self.files {
            file.finish().map_err(failed(&path))?;
        }
        Ok(())
    }
}

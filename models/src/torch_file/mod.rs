//! Tensors of files that `torch.save` wrote: where each one is, without its values.
//!
//! Nothing in a file is executed. A pickle is read by a machine that knows tensors, containers and scalars
//! (`pickle`); a name of anything else is an error, or, beside the wanted part of a training checkpoint, a value
//! without content. Every length is compared with the bytes that remain before memory is allocated.
//!
//! Sources: PyTorch's `serialization.py` and `_weights_only_unpickler.py`, Python's `pickletools`, PKWARE's APPNOTE.

mod input;
mod legacy;
mod pickle;
mod tensor;
pub(crate) mod write;
mod zip;

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::Path;

pub use tensor::{TorchDtype, TorchTensor};

use input::ReadAt;
use pickle::{Globals, Id, Pickle, Value};
use tensor::{Storage, View};

/// Deepest nesting of containers that may hold tensors. State dicts have one to four levels.
const MAX_DEPTH: usize = 64;
/// Most visits of a value in search of tensors, on average: a shared container is visited once for each path to it.
const MAX_VISITS: usize = 4;
/// Longest path of a tensor in bytes.
const MAX_PATH_BYTES: usize = 4096;
/// Largest view in bytes that may exceed its file, as a broadcast one does.
const MAX_BROADCAST_BYTES: u128 = 16 << 20;

/// Why a file of `torch.save` cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TorchError {
    /// The operating system cannot read the file.
    #[error("it cannot be read")]
    Read(#[from] io::Error),
    /// The file is not laid out as `torch.save` does it.
    #[error("{0}")]
    Layout(&'static str),
    /// A record of the zip archive is damaged or not usable.
    #[error("record {record:?} of the archive {reason}")]
    Record {
        /// Name of the record.
        record: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The pickle is damaged.
    #[error("the pickle is damaged at byte {at}: {reason}")]
    Pickle {
        /// Position in the pickle.
        at: u64,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The pickle names a function or class that is not part of a state dict. Nothing was executed.
    #[error("the pickle wants {name}, which no state dict needs; nothing was executed")]
    Code {
        /// Module and name, or the opcode.
        name: String,
    },
    /// A tensor or its storage is not valid.
    #[error("tensor {name:?} {reason}")]
    Tensor {
        /// Path of the tensor in the file, or the key of its storage.
        name: String,
        /// What is wrong with it.
        reason: &'static str,
    },
}

type Result<T, E = TorchError> = std::result::Result<T, E>;

/// The part of a file whose tensors are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// All of it: a plain state dict, in which any other class or function is an error.
    All,
    /// The entry of this name in the outermost dict. The other entries may have any content, which is ignored.
    Entry(&'static str),
}

/// Lists the tensors of the file at `path` by their paths: keys and positions joined by dots.
///
/// # Errors
/// [`TorchError`] if the file is damaged, or wants anything but tensors.
pub fn tensors(path: &Path, wanted: Wanted) -> Result<(File, BTreeMap<String, TorchTensor>)> {
    let file = File::open(path)?;
    let found = read(&file, wanted)?;
    Ok((file, found))
}

/// As [`tensors`], for a file's bytes. For fuzzing.
pub(crate) fn check_bytes(bytes: &[u8], wanted: Wanted) -> Result<()> {
    read(bytes, wanted).map(drop)
}

fn read<R: ReadAt + ?Sized>(source: &R, wanted: Wanted) -> Result<BTreeMap<String, TorchTensor>> {
    let globals = match wanted {
        Wanted::All => Globals::Strict,
        Wanted::Entry(_) => Globals::Opaque,
    };
    let mut magic = [0; 4];
    let file_bytes = source.bytes()?;
    let head = magic.len().min(usize::try_from(file_bytes).unwrap_or(4));
    source.read_at(&mut magic[..head], 0)?;
    if &magic == b"PK\x03\x04" {
        let archive = zip::Archive::open(source)?;
        let (pickle, top) = archive.pickle(source)?;
        archive.check_byte_order(source, top)?;
        let values = Pickle::whole(&pickle, globals)?;
        let place = |storage: &Storage| archive.storage(top, storage);
        return collect(&values, wanted, file_bytes, place);
    }
    let legacy = legacy::Legacy::read(source, globals)?;
    collect(&legacy.values, wanted, file_bytes, |storage| {
        legacy.storage(storage)
    })
}

/// The tensors of the wanted part. `place` is the first byte of a storage in the file.
fn collect(
    values: &Pickle,
    wanted: Wanted,
    file_bytes: u64,
    place: impl Fn(&Storage) -> Result<u64>,
) -> Result<BTreeMap<String, TorchTensor>> {
    let root = match wanted {
        Wanted::All => values.root(),
        Wanted::Entry(name) => entry(values, name)?,
    };
    let mut walk = Walk {
        values,
        place,
        file_bytes,
        visits: 0,
        found: BTreeMap::new(),
    };
    walk.visit(root, &mut Vec::new())?;
    match walk.found.is_empty() {
        true => Err(TorchError::Layout("it contains no tensors")),
        false => Ok(walk.found),
    }
}

/// The value of the entry `name` of the outermost dict.
fn entry(values: &Pickle, name: &str) -> Result<Id> {
    let Value::Dict(entries) = values.get(values.root()) else {
        return Err(TorchError::Layout("it is no dict"));
    };
    let named = |id: &Id| matches!(values.get(*id), Value::Text(text) if **text == *name);
    // The last one of a key counts, as in Python.
    let found = entries.iter().rev().find(|(key, _)| named(key));
    found
        .map(|(_, value)| *value)
        .ok_or(TorchError::Layout("it has no entry \"module\""))
}

struct Walk<'v, F> {
    values: &'v Pickle,
    place: F,
    file_bytes: u64,
    visits: usize,
    found: BTreeMap<String, TorchTensor>,
}

/// An element of a path.
#[derive(Clone, Copy)]
enum Step<'v> {
    Key(&'v str),
    Position(i128),
}

impl<'v, F: Fn(&Storage) -> Result<u64>> Walk<'v, F> {
    fn visit(&mut self, id: Id, path: &mut Vec<Step<'v>>) -> Result<()> {
        self.visits += 1;
        if self.visits > MAX_VISITS * self.values.len() {
            return Err(TorchError::Layout("it has too many values"));
        }
        if path.len() > MAX_DEPTH {
            return Err(TorchError::Layout("its containers are nested too deep"));
        }
        match self.values.get(id) {
            Value::Tensor(view) => self.add(view, joined(path)?),
            Value::List(items) => {
                for (i, item) in items.iter().enumerate() {
                    path.push(Step::Position(i as i128));
                    self.visit(*item, path)?;
                    path.pop();
                }
                Ok(())
            }
            Value::Dict(entries) => {
                for (key, value) in entries {
                    path.push(match self.values.get(*key) {
                        Value::Text(text) => Step::Key(text),
                        Value::Int(number) => Step::Position(*number),
                        _ => Step::Key("?"),
                    });
                    self.visit(*value, path)?;
                    path.pop();
                }
                Ok(())
            }
            Value::Opaque => Err(TorchError::Tensor {
                name: joined(path)?,
                reason: "is an object of a class that is not known",
            }),
            Value::Scalar | Value::Int(_) | Value::Text(_) => Ok(()),
            Value::Global(_) | Value::Storage(_) => Err(TorchError::Tensor {
                name: joined(path)?,
                reason: "is a class or a storage, not a tensor",
            }),
        }
    }

    fn add(&mut self, view: &View, name: String) -> Result<()> {
        let size = view.storage.dtype.size_bytes() as u128;
        let bytes = view.elems() * size;
        if bytes > u128::from(self.file_bytes).max(MAX_BROADCAST_BYTES) {
            let reason = "is a view of more bytes than its file has";
            return Err(TorchError::Tensor { name, reason });
        }
        let start = (self.place)(&view.storage)?;
        let tensor = TorchTensor::new(view, start);
        match self.found.insert(name, tensor) {
            None => Ok(()),
            Some(_) => Err(TorchError::Layout("it has two tensors of one name")),
        }
    }
}

fn joined(path: &[Step<'_>]) -> Result<String> {
    let bytes = path.iter().map(|step| match step {
        Step::Key(text) => text.len(),
        Step::Position(_) => 1,
    });
    if bytes.sum::<usize>() > MAX_PATH_BYTES {
        return Err(TorchError::Layout("the name of a tensor is too long"));
    }
    let texts = path.iter().map(|step| match step {
        Step::Key(text) => (*text).to_owned(),
        Step::Position(number) => number.to_string(),
    });
    Ok(texts.collect::<Vec<_>>().join("."))
}

#[cfg(test)]
mod tests;

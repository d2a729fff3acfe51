//! Files of PyTorch before 1.6: five pickles, then the storages.

use super::input::{Input, ReadAt};
use super::pickle::{Globals, Pickle, Value};
use super::tensor::Storage;
use super::zip::MAX_PICKLE_BYTES;
use super::{Result, TorchError};
use std::collections::BTreeMap;

const MAGIC: i128 = 0x1950_a86a_20f9_469c_fc6c;
const PROTOCOL: i128 = 1001;
/// Offset and text of the mark of a tar archive.
const TAR: (u64, &[u8]) = (257, b"ustar");

/// The object of a file, and where its storages are.
pub(super) struct Legacy {
    pub(super) values: Pickle,
    storages: BTreeMap<String, (u64, u64)>,
}

impl Legacy {
    pub(super) fn read<R: ReadAt + ?Sized>(source: &R, globals: Globals) -> Result<Self> {
        let file_bytes = source.bytes()?;
        let mut first = [0; 1];
        if file_bytes > 0 {
            source.read_at(&mut first, 0)?;
        }
        if first[0] != 0x80 {
            return Err(TorchError::Layout(not_torch(source, file_bytes)?));
        }
        let mut at = 0;
        let mut next = |globals| {
            let end = file_bytes.min(at + MAX_PICKLE_BYTES);
            let mut input = Input::new(source, at, end);
            let pickle = Pickle::read(&mut input, globals);
            at = input.position();
            pickle
        };
        let number = |pickle: &Pickle| match pickle.get(pickle.root()) {
            Value::Int(number) => Some(*number),
            _ => None,
        };
        if number(&next(Globals::Strict)?) != Some(MAGIC) {
            return Err(TorchError::Layout("it is a pickle, but not of torch.save"));
        }
        if number(&next(Globals::Strict)?) != Some(PROTOCOL) {
            return Err(TorchError::Layout("its protocol is not 1001"));
        }
        let system = next(Globals::Strict)?;
        if says_big_endian(&system) {
            return Err(TorchError::Layout("its values are not little-endian"));
        }
        let values = next(globals)?;
        let keys = next(Globals::Strict)?;
        let sizes = values.storage_sizes()?;
        let storages = storages(source, at, &keys, &sizes)?;
        Ok(Self { values, storages })
    }

    /// First byte of a storage.
    pub(super) fn storage(&self, storage: &Storage) -> Result<u64> {
        match self.storages.get(&*storage.key) {
            None => Err(storage.error("is not in the file")),
            Some((_, elems)) if *elems != storage.whole_elems => {
                Err(storage.error("has another length in the file"))
            }
            Some((at, _)) => Ok(*at),
        }
    }
}

/// What a file is that begins neither as a zip archive nor as a pickle.
fn not_torch<R: ReadAt + ?Sized>(source: &R, file_bytes: u64) -> Result<&'static str> {
    let mut mark = [0; TAR.1.len()];
    if file_bytes >= TAR.0 + mark.len() as u64 {
        source.read_at(&mut mark, TAR.0)?;
    }
    Ok(match (file_bytes, &mark[..] == TAR.1) {
        (0, _) => "it is empty",
        (_, true) => "it is a tar archive of PyTorch before 0.2; load it there and save it again",
        _ => "torch.save did not write it",
    })
}

fn says_big_endian(system: &Pickle) -> bool {
    let Value::Dict(entries) = system.get(system.root()) else {
        return false;
    };
    // A flag is a scalar, so its value is stored as a number.
    entries.iter().any(|(key, value)| {
        matches!(system.get(*key), Value::Text(text) if &**text == "little_endian")
            && matches!(system.get(*value), Value::Int(0))
    })
}

/// Positions and elements of the storages named by `keys`, which follow one another from `at` on. `sizes` are bytes per
/// element.
fn storages<R: ReadAt + ?Sized>(
    source: &R,
    mut at: u64,
    keys: &Pickle,
    sizes: &BTreeMap<&str, usize>,
) -> Result<BTreeMap<String, (u64, u64)>> {
    let file_bytes = source.bytes()?;
    let Value::List(keys_of) = keys.get(keys.root()) else {
        return Err(TorchError::Layout("its list of storages is damaged"));
    };
    let mut found = BTreeMap::new();
    for key in keys_of {
        let key = match keys.get(*key) {
            Value::Text(key) => key.to_string(),
            _ => return Err(TorchError::Layout("its list of storages is damaged")),
        };
        let wrong = |reason| TorchError::Tensor {
            name: format!("storage {key}"),
            reason,
        };
        let size = *sizes
            .get(&*key)
            .ok_or_else(|| wrong("belongs to no tensor"))?;
        if file_bytes.saturating_sub(at) < 8 {
            return Err(wrong("is cut off"));
        }
        let mut count = [0; 8];
        source.read_at(&mut count, at)?;
        let elems = u64::from_le_bytes(count);
        let end = elems
            .checked_mul(size as u64)
            .and_then(|bytes| (at + 8).checked_add(bytes));
        let end = end.filter(|end| *end <= file_bytes);
        let end = end.ok_or_else(|| wrong("is cut off"))?;
        if found.insert(key.clone(), (at + 8, elems)).is_some() {
            return Err(wrong("occurs twice"));
        }
        at = end;
    }
    Ok(found)
}

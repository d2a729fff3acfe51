//! Records of a zip archive as `torch.save` writes it: stored without compression, in one top directory, with zip64
//! where a file is larger than 4 GiB. Names are opaque; they are never paths on a disk.

use super::input::ReadAt;
use super::tensor::Storage;
use super::{Result, TorchError};
use std::collections::BTreeMap;

/// Largest pickle in bytes. Those of published models have less than 1 MB.
pub(super) const MAX_PICKLE_BYTES: u64 = 64 << 20;
/// Largest list of records in bytes; one of 100 000 records has about 10 MB.
const MAX_DIRECTORY_BYTES: u64 = 256 << 20;

const LOCAL_HEADER: [u8; 4] = *b"PK\x03\x04";
const CENTRAL_HEADER: [u8; 4] = *b"PK\x01\x02";
const END: [u8; 4] = *b"PK\x05\x06";
const END_64: [u8; 4] = *b"PK\x06\x06";
const LOCATOR_64: [u8; 4] = *b"PK\x06\x07";

/// Bytes of a record in the file.
#[derive(Clone, Copy, Debug)]
struct Record {
    at: u64,
    bytes: u64,
    crc32: u32,
}

/// The records of an archive by their names.
#[derive(Debug)]
pub(super) struct Archive {
    records: BTreeMap<String, Record>,
}

fn layout<T>(reason: &'static str) -> Result<T> {
    Err(TorchError::Layout(reason))
}

fn number(bytes: &[u8], at: usize, size: usize) -> u64 {
    let mut wide = [0; 8];
    wide[..size].copy_from_slice(&bytes[at..at + size]);
    u64::from_le_bytes(wide)
}

impl Archive {
    /// Reads the central directory and all local headers.
    pub(super) fn open<R: ReadAt + ?Sized>(source: &R) -> Result<Self> {
        let (at, bytes, count) = directory(source)?;
        let mut central = vec![0; bytes as usize];
        source.read_at(&mut central, at)?;
        let mut rest = &central[..];
        let mut records = BTreeMap::new();
        let mut used = Vec::new();
        while !rest.is_empty() {
            let (name, record, header, left) = entry(rest)?;
            rest = left;
            let record = located(source, &name, record, header, at)?;
            used.push((header, record.at + record.bytes));
            if records.insert(name.clone(), record).is_some() {
                let reason = "occurs twice";
                return Err(TorchError::Record {
                    record: name,
                    reason,
                });
            }
        }
        if records.len() as u64 != count {
            return layout("its list of records is damaged");
        }
        used.sort_unstable();
        match used.windows(2).any(|pair| pair[1].0 < pair[0].1) {
            true => layout("records of the archive overlap"),
            false => Ok(Self { records }),
        }
    }

    /// The pickle of the archive, and its top directory.
    pub(super) fn pickle<R: ReadAt + ?Sized>(&self, source: &R) -> Result<(Vec<u8>, &str)> {
        let mut found = self.records.iter().filter_map(|(name, record)| {
            let top = name.strip_suffix("/data.pkl")?;
            (!top.contains('/')).then_some((top, record))
        });
        let (Some((top, record)), None) = (found.next(), found.next()) else {
            return layout(
                "the archive has not exactly one data.pkl, so torch.save did not write it",
            );
        };
        if record.bytes > MAX_PICKLE_BYTES {
            return layout("its data.pkl is larger than 64 MiB");
        }
        let mut bytes = vec![0; record.bytes as usize];
        source.read_at(&mut bytes, record.at)?;
        match crc32fast::hash(&bytes) == record.crc32 {
            true => Ok((bytes, top)),
            false => layout("the checksum of its data.pkl is wrong"),
        }
    }

    /// Fails unless values are little-endian.
    pub(super) fn check_byte_order<R: ReadAt + ?Sized>(&self, source: &R, top: &str) -> Result<()> {
        let Some(record) = self.records.get(&format!("{top}/byteorder")) else {
            return Ok(());
        };
        let mut order = [0; 6];
        if record.bytes == 6 {
            source.read_at(&mut order, record.at)?;
        }
        match &order {
            b"little" => Ok(()),
            _ => layout("its values are not little-endian"),
        }
    }

    /// First byte of a storage.
    pub(super) fn storage(&self, top: &str, storage: &Storage) -> Result<u64> {
        let Some(record) = self.records.get(&format!("{top}/data/{}", storage.key)) else {
            return Err(storage.error("is not in the archive"));
        };
        match record.bytes == storage.whole_bytes() {
            true => Ok(record.at),
            false => Err(storage.error("has another length than its record")),
        }
    }
}

/// Position, bytes and number of records of the central directory.
fn directory<R: ReadAt + ?Sized>(source: &R) -> Result<(u64, u64, u64)> {
    const END_BYTES: u64 = 22;
    let file_bytes = source.bytes()?;
    if file_bytes < END_BYTES {
        return layout("the archive ends early");
    }
    let tail_bytes = file_bytes.min(END_BYTES + u64::from(u16::MAX));
    let mut tail = vec![0; tail_bytes as usize];
    let tail_at = file_bytes - tail_bytes;
    source.read_at(&mut tail, tail_at)?;
    let is_end = |at: &usize| {
        let comment = number(&tail, at + 20, 2) as usize;
        tail[*at..].starts_with(&END) && at + END_BYTES as usize + comment == tail.len()
    };
    let Some(end) = (0..=tail.len() - END_BYTES as usize).rev().find(is_end) else {
        return layout("the archive ends early: it has no list of records");
    };
    let end_at = tail_at + end as u64;
    let mut found = (
        number(&tail, end + 16, 4),
        number(&tail, end + 12, 4),
        number(&tail, end + 10, 2),
    );
    let mut limit = end_at;
    if let Some(wide) = directory_64(source, end_at)? {
        (found, limit) = wide;
    }
    let (at, bytes, count) = found;
    // Nothing stands between the directory and the record of its end.
    if at.checked_add(bytes) != Some(limit) {
        return layout("its list of records is damaged");
    }
    match bytes > MAX_DIRECTORY_BYTES {
        true => layout("its list of records is too long"),
        false => Ok((at, bytes, count)),
    }
}

type Directory64 = ((u64, u64, u64), u64);

/// As [`directory`], from the zip64 records before `end_at`, with the position of the first of them.
fn directory_64<R: ReadAt + ?Sized>(source: &R, end_at: u64) -> Result<Option<Directory64>> {
    let mut locator = [0; 20];
    let Some(locator_at) = end_at.checked_sub(locator.len() as u64) else {
        return Ok(None);
    };
    source.read_at(&mut locator, locator_at)?;
    if !locator.starts_with(&LOCATOR_64) {
        return Ok(None);
    }
    let at = number(&locator, 8, 8);
    let mut record = [0; 56];
    if at
        .checked_add(record.len() as u64)
        .is_none_or(|end| end > locator_at)
    {
        return layout("its zip64 record is damaged");
    }
    source.read_at(&mut record, at)?;
    if !record.starts_with(&END_64) {
        return layout("its zip64 record is damaged");
    }
    let (count, bytes, start) = (
        number(&record, 32, 8),
        number(&record, 40, 8),
        number(&record, 48, 8),
    );
    Ok(Some(((start, bytes, count), at)))
}

/// The first record of the central directory: name, size, position of its local header, and the rest of the directory.
fn entry(central: &[u8]) -> Result<(String, Record, u64, &[u8])> {
    const BYTES: usize = 46;
    let damaged = || TorchError::Layout("its list of records is damaged");
    if central.len() < BYTES || !central.starts_with(&CENTRAL_HEADER) {
        return Err(damaged());
    }
    let length = |at| number(central, at, 2) as usize;
    let (name, extra, comment) = (length(28), length(30), length(32));
    let (_, rest) = central.split_at(BYTES);
    let (name, rest) = rest.split_at_checked(name).ok_or_else(damaged)?;
    let (extra, rest) = rest.split_at_checked(extra).ok_or_else(damaged)?;
    let (_, rest) = rest.split_at_checked(comment).ok_or_else(damaged)?;
    let name = String::from_utf8(name.to_vec()).map_err(|_| damaged())?;
    let wrong = |reason| TorchError::Record {
        record: name.clone(),
        reason,
    };
    let (flags, method) = (number(central, 8, 2), number(central, 10, 2));
    // Encrypted, or of values that follow the data.
    if flags & 1 != 0 {
        return Err(wrong("is encrypted"));
    }
    if method != 0 {
        return Err(wrong("is compressed, which torch.save does not do"));
    }
    let field = |at| number(central, at, 4);
    let mut sizes = [field(24), field(20), field(42)];
    wide_sizes(extra, &mut sizes).ok_or_else(|| wrong("has a damaged zip64 field"))?;
    let [bytes, packed, header] = sizes;
    if bytes != packed {
        return Err(wrong("has two sizes"));
    }
    let record = Record {
        at: 0,
        bytes,
        crc32: field(16) as u32,
    };
    Ok((name, record, header, rest))
}

/// Replaces the sizes that do not fit 32 bits by those of the zip64 field of `extra`.
fn wide_sizes(extra: &[u8], sizes: &mut [u64; 3]) -> Option<()> {
    let narrow = u64::from(u32::MAX);
    if !sizes.contains(&narrow) {
        return Some(());
    }
    let mut rest = extra;
    while rest.len() >= 4 {
        let (id, bytes) = (number(rest, 0, 2), number(rest, 2, 2) as usize);
        let field = rest[4..].get(..bytes)?;
        rest = &rest[4 + bytes..];
        if id == 1 {
            let mut values = field.chunks_exact(8);
            for size in sizes.iter_mut().filter(|size| **size == narrow) {
                *size = number(values.next()?, 0, 8);
            }
            return Some(());
        }
    }
    None
}

/// The record with its position, from its local header at `header`. Data must end before `directory_at`.
fn located<R: ReadAt + ?Sized>(
    source: &R,
    name: &str,
    record: Record,
    header: u64,
    directory_at: u64,
) -> Result<Record> {
    const BYTES: u64 = 30;
    let wrong = |reason| TorchError::Record {
        record: name.to_owned(),
        reason,
    };
    let outside = || wrong("is outside the file");
    let names_at = header.checked_add(BYTES).ok_or_else(outside)?;
    if names_at > directory_at {
        return Err(outside());
    }
    let mut local = [0; BYTES as usize];
    source.read_at(&mut local, header)?;
    if !local.starts_with(&LOCAL_HEADER) {
        return Err(wrong("has no header"));
    }
    let (name_bytes, extra_bytes) = (number(&local, 26, 2), number(&local, 28, 2));
    let at = names_at + name_bytes + extra_bytes;
    let end = at.checked_add(record.bytes).ok_or_else(outside)?;
    if end > directory_at {
        return Err(outside());
    }
    let mut found = vec![0; name_bytes as usize];
    source.read_at(&mut found, names_at)?;
    match found == name.as_bytes() {
        true => Ok(Record { at, ..record }),
        false => Err(wrong("has another name in its header")),
    }
}

//! Writes files that `torch.load` reads: a dict with one entry, whose tensors are streamed.
//!
//! The archive is as PyTorch writes it: stored records, data at multiples of 64 bytes, zip64 fields beyond 4 GiB. The
//! same tensors always make the same bytes.

use crate::sat::write::TensorOf;
use kernels::DType;
use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::path::Path;

/// Multiple at which data begins.
const ALIGNMENT_BYTES: u64 = 64;
/// Id of the extra field that fills up to the alignment, and its header.
const PADDING_ID: u16 = 0x4246;
const EXTRA_HEADER_BYTES: u64 = 4;
const LOCAL_HEADER_BYTES: u64 = 30;
/// Bytes of two sizes as a zip64 field of a local header.
const LOCAL_SIZES_BYTES: u64 = EXTRA_HEADER_BYTES + 16;
const NARROW: u32 = u32::MAX;
/// First day that a zip archive can name.
const DAY: u16 = 0x21;

struct Record {
    name: String,
    header_at: u64,
    bytes: u64,
    crc32: u32,
}

/// A file that is being written.
#[derive(Debug)]
pub(crate) struct TorchWriter {
    file: io::BufWriter<File>,
    top: String,
    at: u64,
    records: Vec<Record>,
    /// Bytes of each tensor.
    tensors: Vec<u64>,
    /// Number of tensors that are complete.
    complete: usize,
    /// Bytes and checksum of the tensor that is being written.
    open: Option<(u64, crc32fast::Hasher)>,
}

impl std::fmt::Debug for Record {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name)
    }
}

impl TorchWriter {
    /// Begins the file at `path`, whose dict has the entry `entry` with `tensors`.
    pub(crate) fn create(path: &Path, entry: &str, tensors: &[TensorOf]) -> io::Result<Self> {
        let top = path.file_stem().unwrap_or_default().to_string_lossy();
        let mut writer = Self {
            file: io::BufWriter::with_capacity(1 << 20, File::create_new(path)?),
            top: top.into_owned(),
            at: 0,
            records: Vec::new(),
            tensors: tensors.iter().map(TensorOf::bytes).collect(),
            complete: 0,
            open: None,
        };
        writer.small("data.pkl", &pickle(entry, tensors))?;
        writer.small("byteorder", b"little")?;
        writer.skip_empty()?;
        Ok(writer)
    }

    /// Appends bytes of the tensors, in their order. A call has bytes of one tensor.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let Some(whole) = self.tensors.get(self.complete).copied() else {
            return Err(io::Error::other("all tensors are written"));
        };
        let (done, mut sum) = match self.open.take() {
            Some(open) => open,
            None => {
                self.header(&format!("data/{}", self.complete), whole)?;
                (0, crc32fast::Hasher::new())
            }
        };
        sum.update(bytes);
        self.file.write_all(bytes)?;
        self.at += bytes.len() as u64;
        let done = done + bytes.len() as u64;
        match done.cmp(&whole) {
            std::cmp::Ordering::Less => self.open = Some((done, sum)),
            std::cmp::Ordering::Greater => return Err(io::Error::other("a tensor is too long")),
            std::cmp::Ordering::Equal => {
                self.seal(sum.finalize())?;
                self.complete += 1;
                self.skip_empty()?;
            }
        }
        Ok(())
    }

    /// Writes the list of records, and waits for the disk.
    pub(crate) fn finish(mut self) -> io::Result<()> {
        if self.complete < self.tensors.len() {
            return Err(io::Error::other("a tensor is not complete"));
        }
        self.small("version", b"3\n")?;
        let start = self.at;
        for record in std::mem::take(&mut self.records) {
            self.put(&central(&record))?;
            self.records.push(record);
        }
        let end = end(self.records.len() as u64, start, self.at);
        self.put(&end)?;
        self.file.flush()?;
        self.file.get_ref().sync_all()
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.at += bytes.len() as u64;
        self.file.write_all(bytes)
    }

    fn small(&mut self, name: &str, bytes: &[u8]) -> io::Result<()> {
        self.header(name, bytes.len() as u64)?;
        self.put(bytes)?;
        self.seal(crc32fast::hash(bytes))
    }

    /// Writes the records of tensors without elements that come next.
    fn skip_empty(&mut self) -> io::Result<()> {
        while self.tensors.get(self.complete) == Some(&0) {
            self.small(&format!("data/{}", self.complete), &[])?;
            self.complete += 1;
        }
        Ok(())
    }

    /// Writes a local header, without the checksum.
    fn header(&mut self, name: &str, bytes: u64) -> io::Result<()> {
        let name = format!("{}/{name}", self.top);
        let wide = u32::try_from(bytes)
            .ok()
            .filter(|size| *size != NARROW)
            .is_none();
        let sizes = if wide { LOCAL_SIZES_BYTES } else { 0 };
        let before = self.at + LOCAL_HEADER_BYTES + name.len() as u64 + sizes + EXTRA_HEADER_BYTES;
        let padding = before.next_multiple_of(ALIGNMENT_BYTES) - before;
        let narrow = narrow(bytes);
        let mut header = b"PK\x03\x04".to_vec();
        let version: u16 = if wide { 45 } else { 0 };
        for field in [version, 0, 0, 0, DAY] {
            header.extend(field.to_le_bytes());
        }
        header.extend([0; 4]);
        header.extend(narrow.to_le_bytes());
        header.extend(narrow.to_le_bytes());
        header.extend((name.len() as u16).to_le_bytes());
        header.extend(((sizes + EXTRA_HEADER_BYTES + padding) as u16).to_le_bytes());
        header.extend(name.as_bytes());
        if wide {
            header.extend(zip64(&[bytes, bytes]));
        }
        header.extend(PADDING_ID.to_le_bytes());
        header.extend((padding as u16).to_le_bytes());
        header.extend(vec![b'Z'; padding as usize]);
        self.records.push(Record {
            name,
            header_at: self.at,
            bytes,
            crc32: 0,
        });
        self.put(&header)
    }

    /// Puts the checksum of the last record into its header.
    fn seal(&mut self, crc32: u32) -> io::Result<()> {
        const CRC_AT: u64 = 14;
        if let Some(record) = self.records.last_mut() {
            record.crc32 = crc32;
            self.file.seek(SeekFrom::Start(record.header_at + CRC_AT))?;
            self.file.write_all(&crc32.to_le_bytes())?;
            self.file.seek(SeekFrom::Start(self.at))?;
        }
        Ok(())
    }
}

fn narrow(number: u64) -> u32 {
    u32::try_from(number).unwrap_or(NARROW)
}

/// A zip64 extra field.
fn zip64(values: &[u64]) -> Vec<u8> {
    let mut field = 1u16.to_le_bytes().to_vec();
    field.extend((8 * values.len() as u16).to_le_bytes());
    field.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    field
}

/// An entry of the list of records.
fn central(record: &Record) -> Vec<u8> {
    let wide = |number: &u64| narrow(*number) == NARROW;
    let numbers = [record.bytes, record.bytes, record.header_at];
    let beyond: Vec<u64> = numbers.into_iter().filter(wide).collect();
    let extra = if beyond.is_empty() {
        Vec::new()
    } else {
        zip64(&beyond)
    };
    let version: u16 = if beyond.is_empty() { 0 } else { 45 };
    let mut entry = b"PK\x01\x02".to_vec();
    for field in [version, version, 0, 0, 0, DAY] {
        entry.extend(field.to_le_bytes());
    }
    entry.extend(record.crc32.to_le_bytes());
    entry.extend(narrow(record.bytes).to_le_bytes());
    entry.extend(narrow(record.bytes).to_le_bytes());
    entry.extend((record.name.len() as u16).to_le_bytes());
    entry.extend((extra.len() as u16).to_le_bytes());
    entry.extend([0; 10]);
    entry.extend(narrow(record.header_at).to_le_bytes());
    entry.extend(record.name.as_bytes());
    entry.extend(extra);
    entry
}

/// The end of an archive whose list of `count` records is at `start..end`.
fn end(count: u64, start: u64, end: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    let bytes_of_list = end - start;
    if count >= u64::from(u16::MAX) || narrow(bytes_of_list) == NARROW || narrow(start) == NARROW {
        bytes.extend(b"PK\x06\x06");
        bytes.extend(44u64.to_le_bytes());
        bytes.extend([45, 0, 45, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        for value in [count, count, bytes_of_list, start] {
            bytes.extend(value.to_le_bytes());
        }
        bytes.extend(b"PK\x06\x07");
        bytes.extend(0u32.to_le_bytes());
        bytes.extend(end.to_le_bytes());
        bytes.extend(1u32.to_le_bytes());
    }
    let short = u16::try_from(count).unwrap_or(u16::MAX);
    bytes.extend(b"PK\x05\x06");
    bytes.extend([0; 4]);
    bytes.extend(short.to_le_bytes());
    bytes.extend(short.to_le_bytes());
    bytes.extend(narrow(bytes_of_list).to_le_bytes());
    bytes.extend(narrow(start).to_le_bytes());
    bytes.extend([0; 2]);
    bytes
}

/// The pickle `{entry: OrderedDict(tensors)}` in protocol 2.
fn pickle(entry: &str, tensors: &[TensorOf]) -> Vec<u8> {
    const ORDERED: &[u8] = b"ccollections\nOrderedDict\n)R";
    let mut out = b"\x80\x02}".to_vec();
    text(&mut out, entry);
    out.extend(ORDERED);
    out.push(b'(');
    for (key, tensor) in tensors.iter().enumerate() {
        text(&mut out, &tensor.name);
        out.extend(b"ctorch._utils\n_rebuild_tensor_v2\n((");
        text(&mut out, "storage");
        out.extend(format!("ctorch\n{}\n", class(tensor.dtype)).bytes());
        text(&mut out, &key.to_string());
        text(&mut out, "cpu");
        number(&mut out, tensor.shape.iter().product());
        out.extend(b"tQK\x00(");
        tensor.shape.iter().for_each(|size| number(&mut out, *size));
        out.extend(b"t(");
        for axis in 0..tensor.shape.len() {
            number(&mut out, tensor.shape[axis + 1..].iter().product());
        }
        out.extend(b"t\x89");
        out.extend(ORDERED);
        out.extend(b"tR");
    }
    out.extend(b"us.");
    out
}

/// The class of storages of `dtype`; weights have no other dtypes.
fn class(dtype: DType) -> &'static str {
    match dtype {
        DType::BF16 => "BFloat16Storage",
        DType::F16 => "HalfStorage",
        _ => "FloatStorage",
    }
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.push(b'X');
    out.extend((text.len() as u32).to_le_bytes());
    out.extend(text.bytes());
}

fn number(out: &mut Vec<u8>, number: usize) {
    match i32::try_from(number) {
        Ok(number) => {
            out.push(b'J');
            out.extend(number.to_le_bytes());
        }
        Err(_) => {
            // A ninth byte would be needed for numbers that no memory has.
            out.extend([0x8a, 8]);
            out.extend((number as u64).to_le_bytes());
        }
    }
}

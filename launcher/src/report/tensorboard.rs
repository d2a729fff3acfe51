//! Writer of TensorBoard event files. It encodes the five protobuf fields and the record frame itself.

use crate::lang::both;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use super::crc32c::crc32c;
use crate::error::{ErrorCode, Failure};

/// TensorBoard event file, open for writing.
#[derive(Debug)]
pub struct EventWriter {
    path: PathBuf,
    file: File,
}

impl EventWriter {
    /// Creates a new event file in `directory`, and the directory if necessary.
    ///
    /// # Errors
    /// When the file cannot be written (exit 16).
    pub fn create(directory: &Path) -> Result<Self, Failure> {
        let now = wall_time();
        let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let host = if host.trim().is_empty() {
            "localhost"
        } else {
            host.trim()
        };
        let name = format!(
            "events.out.tfevents.{}.{host}.{}.0",
            now as u64,
            std::process::id()
        );
        let path = directory.join(name);
        let file = fs::create_dir_all(directory)
            .and_then(|()| File::create(&path))
            .map_err(|error| Failure::io(ErrorCode::Disk, both("write", "写入"), &path, &error))?;
        let mut writer = Self { path, file };
        let mut version = Vec::new();
        double(&mut version, 1, now);
        bytes(&mut version, 3, b"brain.Event:2");
        writer.record(&version)?;
        Ok(writer)
    }

    /// Writes scalar values of one step, as (tag, value). NaN values are left out.
    ///
    /// # Errors
    /// When the file cannot be written (exit 16).
    pub fn scalars(&mut self, step: u64, values: &[(&str, f64)]) -> Result<(), Failure> {
        let mut summary = Vec::new();
        for (tag, number) in values.iter().filter(|(_, number)| !number.is_nan()) {
            let mut value = Vec::new();
            bytes(&mut value, 1, tag.as_bytes());
            float(&mut value, 2, *number as f32);
            bytes(&mut summary, 1, &value);
        }
        let mut event = Vec::new();
        double(&mut event, 1, wall_time());
        varint(&mut event, 2 << 3);
        varint(&mut event, step);
        bytes(&mut event, 5, &summary);
        self.record(&event)
    }

    /// Writes a record: length, checksum of the length, payload, checksum of the payload.
    fn record(&mut self, payload: &[u8]) -> Result<(), Failure> {
        let length = (payload.len() as u64).to_le_bytes();
        let mut record = length.to_vec();
        record.extend(masked(&length));
        record.extend(payload);
        record.extend(masked(payload));
        self.file.write_all(&record).map_err(|error| {
            Failure::io(ErrorCode::Disk, both("write", "写入"), &self.path, &error)
        })
    }
}

/// Masked checksum of TensorBoard's format, which is safe for data that contains checksums itself.
fn masked(data: &[u8]) -> [u8; 4] {
    crc32c(data)
        .rotate_right(15)
        .wrapping_add(0xa282_ead8)
        .to_le_bytes()
}

fn wall_time() -> f64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0.0, |since| since.as_secs_f64())
}

fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn double(out: &mut Vec<u8>, field: u64, value: f64) {
    varint(out, field << 3 | 1);
    out.extend(value.to_le_bytes());
}

fn float(out: &mut Vec<u8>, field: u64, value: f32) {
    varint(out, field << 3 | 5);
    out.extend(value.to_le_bytes());
}

fn bytes(out: &mut Vec<u8>, field: u64, value: &[u8]) {
    varint(out, field << 3 | 2);
    varint(out, value.len() as u64);
    out.extend(value);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records(mut file: &[u8]) -> Vec<Vec<u8>> {
        let mut found = Vec::new();
        while !file.is_empty() {
            let length = u64::from_le_bytes(file[..8].try_into().expect("8 bytes")) as usize;
            assert_eq!(file[8..12], masked(&file[..8]));
            let payload = &file[12..12 + length];
            assert_eq!(file[12 + length..16 + length], masked(payload));
            found.push(payload.to_vec());
            file = &file[16 + length..];
        }
        found
    }

    #[test]
    fn records_are_framed_and_hold_tags_and_values() {
        let directory = tempfile::tempdir().expect("temp dir");
        let mut writer = EventWriter::create(directory.path()).expect("made");
        writer
            .scalars(300, &[("train/loss", 1.5), ("train/grad_norm", f64::NAN)])
            .expect("written");
        let records = records(&fs::read(&writer.path).expect("read"));
        assert_eq!(records.len(), 2);
        assert!(records[0].ends_with(b"\x1a\x0dbrain.Event:2"));
        // Field 1 takes nine bytes. Then follow step 300 as a varint and the summary.
        let expected = [
            &[0x10, 0xac, 0x02, 0x2a, 19, 0x0a, 17, 0x0a, 10][..],
            b"train/loss",
            &[0x15, 0, 0, 0xc0, 0x3f],
        ]
        .concat();
        assert_eq!(records[1][9..], expected);
    }
}

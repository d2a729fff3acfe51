//! Rows of a Parquet file as JSON values, and the bytes that it holds.
//!
//! A row takes no bytes of images: where a column holds bytes, the value is an address that [`content`] reads when the
//! image is needed. A reader holds the pages of one chunk of a column at most.

use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parquet::basic::{Compression, ConvertedType, Repetition};
use parquet::column::reader::ColumnReader;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::Field;
use parquet::record::reader::TreeBuilder;
use parquet::schema::types::Type;
use serde_json::{Map, Value};

/// What begins a Parquet file.
const MAGIC: &[u8; 4] = b"PAR1";
/// What begins the text of an [`Address`].
const SCHEME: &str = "parquet:";
/// Rows that a reader takes at a time. A row may hold an image of megabytes.
const ROWS_AT_ONCE: usize = 16;

/// Whether the file `path` begins as a Parquet file.
///
/// # Errors
/// The file cannot be read.
pub(crate) fn is_parquet(path: &Path) -> io::Result<bool> {
    // Asked before opening: opening a pipe would block.
    if !std::fs::metadata(path)?.is_file() {
        return Ok(false);
    }
    let mut start = Vec::new();
    File::open(path)?
        .take(MAGIC.len() as u64)
        .read_to_end(&mut start)?;
    Ok(start == MAGIC)
}

/// Place of bytes in a Parquet file. Its text is `parquet:COLUMN:ROW:ITEM:FILE`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    file: PathBuf,
    /// Index of the column among those that hold values.
    column: usize,
    /// Index of the row in the file.
    row: usize,
    /// Index among the values of the column in this row.
    item: usize,
}

impl Address {
    /// The address that the text `path` is, if it is one.
    pub(crate) fn of(path: &Path) -> Option<Self> {
        let text = path.to_str()?.strip_prefix(SCHEME)?;
        let mut parts = text.splitn(4, ':');
        let mut number = || parts.next()?.parse().ok();
        let (column, row, item) = (number()?, number()?, number()?);
        Some(Self {
            file: parts.next()?.into(),
            column,
            row,
            item,
        })
    }

    /// The place in words.
    pub(crate) fn shown(&self) -> PathBuf {
        format!("{}, row {}", self.file.display(), self.row).into()
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (column, row, item) = (self.column, self.row, self.item);
        write!(f, "{SCHEME}{column}:{row}:{item}:{}", self.file.display())
    }
}

/// Calls `each` with every row of the file `path` until it returns false.
///
/// # Errors
/// Why a row cannot be read.
pub(crate) fn each_row(path: &Path, each: &mut dyn FnMut(Value) -> bool) -> Result<(), String> {
    let file = open(path)?;
    let schema = file.metadata().file_metadata().schema_descr_ptr();
    check(schema.root_schema())?;
    check_compression(&file)?;
    let mut values = Values {
        file: std::path::absolute(path).map_err(|error| error.to_string())?,
        row: 0,
        seen: HashMap::new(),
    };
    for group in 0..file.num_row_groups() {
        let group = file
            .get_row_group(group)
            .map_err(|error| error.to_string())?;
        let tree = TreeBuilder::new().with_batch_size(ROWS_AT_ONCE);
        let rows = tree.as_iter(Arc::clone(&schema), &*group);
        for row in rows.map_err(|error| error.to_string())? {
            let row = row.map_err(|error| error.to_string())?;
            values.seen.clear();
            let row = values.object(row.into_columns(), schema.root_schema(), 0)?;
            if !each(row) {
                return Ok(());
            }
            values.row += 1;
        }
    }
    Ok(())
}

/// Most bytes of a file that reading the bytes at `address` holds.
///
/// # Errors
/// Why they cannot be read.
pub(crate) fn held_bytes(address: &Address) -> Result<u64, String> {
    let file = open(&address.file)?;
    let (group, _) = group_of(&file, address)?;
    let chunk = file
        .metadata()
        .row_group(group)
        .columns()
        .get(address.column);
    let chunk = chunk.ok_or("it has no such column")?;
    let bytes = chunk
        .compressed_size()
        .saturating_add(chunk.uncompressed_size());
    Ok(u64::try_from(bytes).unwrap_or(0))
}

/// The bytes at `address`.
///
/// # Errors
/// Why they cannot be read.
pub(crate) fn content(address: &Address) -> Result<Vec<u8>, String> {
    let file = open(&address.file)?;
    let (group, row) = group_of(&file, address)?;
    let group = file
        .get_row_group(group)
        .map_err(|error| error.to_string())?;
    if address.column >= group.num_columns() {
        return Err("it has no such column".to_owned());
    }
    let column = group.get_column_reader(address.column);
    let ColumnReader::ByteArrayColumnReader(mut column) =
        column.map_err(|error| error.to_string())?
    else {
        return Err("the column holds no bytes".to_owned());
    };
    let (mut values, mut definitions, mut repetitions) = (Vec::new(), Vec::new(), Vec::new());
    let read = column.skip_records(row).and_then(|_| {
        column.read_records(
            1,
            Some(&mut definitions),
            Some(&mut repetitions),
            &mut values,
        )
    });
    read.map_err(|error| error.to_string())?;
    let value = values
        .get(address.item)
        .ok_or("the row has no such value")?;
    Ok(value.data().to_vec())
}

fn open(path: &Path) -> Result<SerializedFileReader<File>, String> {
    let file = File::open(path).map_err(|error| error.to_string())?;
    SerializedFileReader::new(file).map_err(|error| error.to_string())
}

/// The row group that holds the row of `address`, and the row's index in it.
fn group_of(
    file: &SerializedFileReader<File>,
    address: &Address,
) -> Result<(usize, usize), String> {
    let mut row = address.row;
    for (index, group) in file.metadata().row_groups().iter().enumerate() {
        let rows = usize::try_from(group.num_rows()).unwrap_or(0);
        if row < rows {
            return Ok((index, row));
        }
        row -= rows;
    }
    Err(format!("it has no row {}", address.row))
}

/// Fails if a list or map below the node `of` is not one as the format defines them, which the reader takes for granted.
fn check(of: &Type) -> Result<(), String> {
    if of.is_primitive() {
        return Ok(());
    }
    let fields = of.get_fields();
    let repeated = matches!(fields, [only] if is_repeated(only));
    let pair = |node: &Type| !node.is_primitive() && node.get_fields().len() <= 2;
    let valid = match of.get_basic_info().converted_type() {
        ConvertedType::LIST => repeated,
        ConvertedType::MAP | ConvertedType::MAP_KEY_VALUE => repeated && pair(&fields[0]),
        _ => true,
    };
    if fields.is_empty() || !valid {
        return Err(format!("column {:?} is no valid list or map", of.name()));
    }
    fields.iter().try_for_each(|field| check(field))
}

/// Fails if a column is compressed in a way that this build does not read.
fn check_compression(file: &SerializedFileReader<File>) -> Result<(), String> {
    let groups = file.metadata().row_groups().iter();
    for column in groups.flat_map(|group| group.columns()) {
        let (name, compression) = (column.column_path().string(), column.compression());
        match compression {
            Compression::UNCOMPRESSED | Compression::SNAPPY | Compression::ZSTD(_) => {}
            other => {
                let other = other.to_string();
                let other = other.split('(').next().unwrap_or_default();
                return Err(format!(
                    "column {name:?}: compression by {other} is not supported; write the file with snappy or zstd"
                ));
            }
        }
    }
    Ok(())
}

fn is_repeated(node: &Type) -> bool {
    let info = node.get_basic_info();
    info.has_repetition() && info.repetition() == Repetition::REPEATED
}

/// Number of columns with values below the node `of` of a schema.
fn leaves(of: &Type) -> usize {
    match of.is_primitive() {
        true => 1,
        false => of.get_fields().iter().map(|field| leaves(field)).sum(),
    }
}

/// Values of a row as JSON.
struct Values {
    file: PathBuf,
    row: usize,
    /// Number of values with bytes that each column had so far in this row.
    seen: HashMap<usize, usize>,
}

impl Values {
    /// The fields of the group `of`, whose first column is `first`.
    fn object(
        &mut self,
        fields: Vec<(String, Field)>,
        of: &Type,
        mut first: usize,
    ) -> Result<Value, String> {
        let mut object = Map::new();
        for ((name, field), child) in fields.into_iter().zip(of.get_fields()) {
            // Bytes are an image that is an object, as its struct {bytes, path} is.
            let alone = matches!(field, Field::Bytes(_)) && name != "bytes";
            let value = self.value(field, child, first)?;
            let value = match alone {
                true => serde_json::json!({"bytes": value}),
                false => value,
            };
            object.insert(name, value);
            first += leaves(child);
        }
        Ok(object.into())
    }

    fn value(&mut self, field: Field, of: &Type, first: usize) -> Result<Value, String> {
        Ok(match field {
            Field::Null => Value::Null,
            Field::Bool(value) => value.into(),
            Field::Byte(value) => value.into(),
            Field::Short(value) => value.into(),
            Field::Int(value) => value.into(),
            Field::Long(value) => value.into(),
            Field::UByte(value) => value.into(),
            Field::UShort(value) => value.into(),
            Field::UInt(value) => value.into(),
            Field::ULong(value) => value.into(),
            Field::Float16(value) => f64::from(value).into(),
            Field::Float(value) => f64::from(value).into(),
            Field::Double(value) => value.into(),
            Field::Str(text) => text.into(),
            Field::Bytes(_) => {
                let item = self.seen.entry(first).or_default();
                let address = Address {
                    file: self.file.clone(),
                    column: first,
                    row: self.row,
                    item: *item,
                };
                *item += 1;
                address.to_string().into()
            }
            Field::Group(row) => self.object(row.into_columns(), of, first)?,
            Field::ListInternal(list) => {
                let element = element(of)?;
                let elements = list.elements().iter().cloned();
                let values: Result<Vec<Value>, String> = elements
                    .map(|field| {
                        let alone = matches!(field, Field::Bytes(_));
                        let value = self.value(field, element, first)?;
                        Ok(match alone {
                            true => serde_json::json!({"bytes": value}),
                            false => value,
                        })
                    })
                    .collect();
                values?.into()
            }
            Field::MapInternal(_) => {
                return Err(format!(
                    "column {:?} is a map, which no form has",
                    of.name()
                ));
            }
            // Dates, times and decimals.
            other => other.to_string().into(),
        })
    }
}

/// The node of the elements of the list `of`: a repeated field, or the only field below one.
fn element(of: &Type) -> Result<&Type, String> {
    if is_repeated(of) {
        return Ok(of);
    }
    let inner = match of.is_primitive() {
        true => None,
        false => of.get_fields().first(),
    };
    let inner = inner.ok_or_else(|| format!("column {:?} is no list", of.name()))?;
    let wraps = !inner.is_primitive()
        && inner.get_fields().len() == 1
        && inner.name() != "array"
        && !inner.name().ends_with("_tuple");
    Ok(if wraps { &inner.get_fields()[0] } else { inner })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/forms")
            .join(name)
    }

    fn rows(name: &str) -> Vec<Value> {
        let mut rows = Vec::new();
        let all = each_row(&file(name), &mut |row| {
            rows.push(row);
            true
        });
        all.unwrap();
        rows
    }

    /// The first red byte of the image of 2 x 1 pixels at the address `value`.
    fn red(value: &Value) -> u8 {
        let address = Address::of(Path::new(value.as_str().unwrap())).unwrap();
        let bytes = content(&address).unwrap();
        assert!(held_bytes(&address).unwrap() >= bytes.len() as u64);
        let image = crate::image::decode_bytes(&address.shown(), &bytes).unwrap();
        image.pixels()[0]
    }

    #[test]
    fn structs_and_lists_become_objects_and_lists_and_bytes_are_read_later() {
        let rows = rows("llava.parquet");
        assert_eq!(rows.len(), 5);
        assert_eq!(
            rows[0]["conversations"][1],
            serde_json::json!({"from": "gpt", "value": "a0"})
        );
        assert_eq!(
            (&rows[3]["score"], &rows[1]["image"]),
            (&0.25.into(), &Value::Null)
        );
        // Rows of three groups; the row without an image has no value in its column.
        let reds = [0, 2, 3, 4].map(|row| red(&rows[row]["image"]["bytes"]));
        assert_eq!(reds, [0, 40, 60, 80]);
    }

    #[test]
    fn a_list_of_images_is_read_one_by_one() {
        let rows = rows("cauldron.parquet");
        let of = |row: usize| -> Vec<u8> {
            let images = rows[row]["images"].as_array().unwrap();
            images.iter().map(|image| red(&image["bytes"])).collect()
        };
        assert_eq!(
            [of(0), of(1), of(2), of(3)],
            [vec![0, 20], vec![40], vec![], vec![100, 80]]
        );
    }

    #[test]
    fn another_compression_is_refused_by_its_name() {
        let refused = each_row(&file("gzip.parquet"), &mut |_| true).unwrap_err();
        assert_eq!(
            refused,
            "column \"query\": compression by GZIP is not supported; write the file with snappy or zstd"
        );
    }

    #[test]
    fn damage_and_wrong_addresses_are_errors() {
        let bytes = std::fs::read(file("cauldron.parquet")).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.parquet");
        for length in (4..bytes.len()).step_by(97) {
            std::fs::write(&path, &bytes[..length]).unwrap();
            assert!(is_parquet(&path).unwrap());
            assert!(each_row(&path, &mut |_| true).is_err(), "{length} bytes");
        }
        for (column, row, item) in [(0, 9, 0), (99, 0, 0), (0, 2, 0), (2, 0, 1)] {
            let text = format!(
                "parquet:{column}:{row}:{item}:{}",
                file("cauldron.parquet").display()
            );
            let address = Address::of(Path::new(&text)).unwrap();
            assert!(content(&address).is_err(), "{address}");
        }
    }
}

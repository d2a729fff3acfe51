//! Data given as several files or directories, or as entries of LLaMA-Factory's `dataset_info.json`.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::columns::Columns;
use super::entry::{Ignored, Keys, read_entry};
use super::{DataFormat, Dataset, directories, directory_of, read_file};
use crate::data::raw::DataError;

/// Name of LLaMA-Factory's list of data sets.
pub const DATASET_INFO: &str = "dataset_info.json";
/// What separates a `dataset_info.json` from the name of an entry.
const NAME: char = '#';
/// What separates several files.
const NEXT: char = ',';
/// Sources of an entry that are not files here.
const REMOTE: [&str; 4] = ["hf_hub_url", "ms_hub_url", "om_hub_url", "script_url"];

/// Reads everything that `data` names: files and directories, separated by commas. One may be a `dataset_info.json`,
/// followed by `#` and the name of its entry. Relative paths of images start at `images`, otherwise beside each file.
///
/// # Errors
/// [`DataError`] of the first that cannot be read, or whose entry is missing or not supported.
pub fn read_datasets(
    data: &Path,
    format: Option<DataFormat>,
    images: Option<&Path>,
) -> Result<Vec<Dataset>, DataError> {
    let parts = data_parts(data);
    let each = parts.iter().map(|part| locate(part, format)?.read(images));
    each.collect()
}

/// The files and directories that `data` names, each as it is given.
#[must_use]
pub fn data_parts(data: &Path) -> Vec<PathBuf> {
    let text = data.to_string_lossy();
    if data.exists() || !text.contains(NEXT) {
        return vec![data.to_owned()];
    }
    let parts = text.split(NEXT).map(str::trim);
    parts
        .filter(|part| !part.is_empty())
        .map(PathBuf::from)
        .collect()
}

/// The file of `part`, and the name of its entry if it has one.
fn split(part: &Path) -> (PathBuf, Option<String>) {
    let text = part.to_string_lossy();
    match text.rsplit_once(NAME) {
        Some((file, name)) if !part.exists() && file.ends_with(DATASET_INFO) => {
            (file.into(), Some(name.to_owned()))
        }
        _ => (part.to_owned(), None),
    }
}

/// A file or directory of samples, and how to read it.
struct Located {
    path: PathBuf,
    format: Option<DataFormat>,
    columns: Option<Columns>,
    /// Directory at which relative paths of images start.
    root: PathBuf,
    ignored: Vec<(String, usize)>,
}

impl Located {
    fn read(&self, images: Option<&Path>) -> Result<Dataset, DataError> {
        let root = images.unwrap_or(&self.root);
        let mut dataset = read_file(&self.path, self.format, root, self.columns.as_ref())?;
        dataset.ignored.extend(self.ignored.iter().cloned());
        Ok(dataset)
    }
}

fn locate(part: &Path, format: Option<DataFormat>) -> Result<Located, DataError> {
    let (path, name) = split(part);
    let path = match path.is_dir() && format.is_none_or(DataFormat::is_json) {
        true => directories::file_in(&path)?,
        false => path,
    };
    if path.file_name().is_some_and(|file| file == DATASET_INFO) {
        return entry(&path, name.as_deref());
    }
    Ok(Located {
        root: directory_of(&path).to_owned(),
        path,
        format,
        columns: None,
        ignored: Vec::new(),
    })
}

/// The files and directories that `data` stands for. One that cannot be found is as it is given.
#[must_use]
pub fn data_files(data: &Path) -> Vec<PathBuf> {
    let parts = data_parts(data).into_iter();
    parts
        .map(|part| locate(&part, None).map_or(part, |located| located.path))
        .collect()
}

/// The data that the entry `name` of the file `info` describes, or its only entry.
fn entry(info: &Path, name: Option<&str>) -> Result<Located, DataError> {
    let refused = |reason: String| DataError::Json {
        path: info.to_owned(),
        line: 1,
        column: 1,
        reason,
    };
    let bytes = std::fs::read(info).map_err(|source| DataError::Read {
        path: info.to_owned(),
        source,
    })?;
    let Value::Object(mut entries) = read_entry(info, &bytes, Ok)? else {
        return Err(refused("it is no object of data sets".to_owned()));
    };
    let names: Vec<String> = entries.keys().cloned().collect();
    let name = match (name, &names[..]) {
        (Some(name), _) => name.to_owned(),
        (None, [only]) => only.clone(),
        (None, _) => {
            return Err(DataError::AmbiguousFormat {
                path: info.to_owned(),
                reason: format!(
                    "it describes {}; name one: {}{NAME}NAME",
                    names.join(", "),
                    info.display()
                ),
            });
        }
    };
    let entry = entries.remove(&name).ok_or_else(|| {
        refused(format!(
            "it has no data set {name:?}, but {}",
            names.join(", ")
        ))
    })?;
    let root = directory_of(info).to_owned();
    let described = Described::of(entry, &name).map_err(refused)?;
    let ignored = described.ignored.into_iter();
    Ok(Located {
        path: root.join(&described.file),
        format: Some(described.format),
        columns: Some(described.columns),
        root,
        ignored: ignored
            .map(|(key, count)| (format!("{name}.{key}"), count))
            .collect(),
    })
}

/// An entry of `dataset_info.json`.
struct Described {
    file: PathBuf,
    format: DataFormat,
    columns: Columns,
    ignored: Vec<(String, usize)>,
}

impl Described {
    fn of(entry: Value, name: &str) -> Result<Self, String> {
        let mut keys = Keys::of(entry, &format!("data set {name:?}"))?;
        for key in REMOTE {
            if keys.take(key).is_some() {
                return Err(
                    keys.refusal(&format!("{key:?} is not supported: data is not downloaded"))
                );
            }
        }
        if keys.is("ranking", &Value::Bool(true)) {
            return Err(
                keys.refusal("\"ranking\" makes it preference pairs, which a run cannot learn")
            );
        }
        if keys.take("num_samples").is_some() {
            return Err(keys.refusal("\"num_samples\" is not supported; --limit takes the first N"));
        }
        let file = keys.text("file_name")?;
        let file = file.ok_or_else(|| keys.refusal("missing field `file_name`"))?;
        let formatting = keys.text("formatting")?;
        let format = match formatting.as_deref() {
            None | Some("alpaca") => DataFormat::Alpaca,
            Some("sharegpt" | "openai") => DataFormat::Messages,
            Some(other) => {
                return Err(keys.refusal(&format!(
                    "\"formatting\" is {other:?} instead of alpaca or sharegpt"
                )));
            }
        };
        let columns = Columns::of(format, keys.take("columns"), keys.take("tags"));
        let columns = columns.map_err(|reason| keys.refusal(&reason))?;
        let mut ignored = Ignored::default();
        keys.finish("", &mut ignored);
        Ok(Self {
            file: file.into(),
            format,
            columns,
            ignored: ignored.into_counts(),
        })
    }
}

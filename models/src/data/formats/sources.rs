//! Data given as several files or directories, or as entries of LLaMA-Factory's `dataset_info.json`.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::columns::Columns;
use super::entry::{Ignored, Keys, read_entry};
use super::{DataFormat, Dataset, directories, directory_of, read_file};
use crate::data::raw::DataError;

/// Name of LLaMA-Factory's list of data sets.
pub const DATASET_INFO: &str = "dataset_info.json";
/// What separates a `dataset_info.json` from the name of an entry, a directory from that of a split, and a file from a
/// number of samples.
const NAME: char = '#';
/// What separates a file from its weight.
const WEIGHT: char = ':';
/// What separates several files.
const NEXT: char = ',';
/// Sources of an entry that are not files here.
const REMOTE: [&str; 5] = [
    "hf_hub_url",
    "ms_hub_url",
    "om_hub_url",
    "script_url",
    "cloud_file_name",
];

/// Reads everything that `data` names: files and directories, separated by commas. One may be a `dataset_info.json` or a
/// directory, followed by `#` and the name of its entry or split, and by a weight ([`weight_of`]). A file may be followed by
/// `#` and the number of its samples that an epoch takes. Relative paths of images start at `images`, otherwise beside each
/// file.
///
/// # Errors
/// [`DataError`] of the first that cannot be read, or whose entry is missing or not supported.
pub fn read_datasets(
    data: &Path,
    format: Option<DataFormat>,
    images: Option<&Path>,
) -> Result<Vec<Dataset>, DataError> {
    let mut sets = Vec::new();
    for part in data_parts(data) {
        let (path, weight) = weight_of(&part)?;
        let first = sets.len();
        let mut wanted = None;
        for located in locate(&path, format)? {
            wanted = located.num_samples;
            sets.push(located.read(images, weight)?);
        }
        if let Some(wanted) = wanted {
            let own = &mut sets[first..];
            let count: usize = own.iter().map(|set| set.samples.len()).sum();
            for set in own {
                set.weight *= wanted as f64 / count as f64;
            }
        }
    }
    Ok(sets)
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

/// The path of `part`, and how often an epoch takes each of its samples: `PATH:WEIGHT`, otherwise once.
///
/// # Errors
/// [`DataError::Weight`] if the weight is not above 0.
pub fn weight_of(part: &Path) -> Result<(PathBuf, f64), DataError> {
    let text = part.to_string_lossy();
    let weighted = text.rsplit_once(WEIGHT).filter(|_| !part.exists());
    let Some((path, Ok(weight))) = weighted.map(|(path, weight)| (path, weight.parse::<f64>()))
    else {
        return Ok((part.to_owned(), 1.0));
    };
    match weight.is_finite() && weight > 0.0 {
        true => Ok((path.into(), weight)),
        false => Err(DataError::Weight {
            path: path.into(),
            weight,
        }),
    }
}

/// The file or directory of `part`, and the name of its entry or split if it has one.
fn split(part: &Path) -> (PathBuf, Option<String>) {
    let text = part.to_string_lossy();
    let of_known = |file: &str| file.ends_with(DATASET_INFO) || Path::new(file).is_dir();
    match text.rsplit_once(NAME) {
        Some((file, name)) if !part.exists() && of_known(file) => {
            (file.into(), Some(name.to_owned()))
        }
        _ => (part.to_owned(), None),
    }
}

/// The file of `part`, and the number of its samples that an epoch takes: `FILE#N`, as ms-swift writes it.
fn counted(part: PathBuf) -> (PathBuf, Option<u64>) {
    let text = part.to_string_lossy();
    let found = text.rsplit_once(NAME).filter(|_| !part.exists());
    let found = found.and_then(|(file, number)| Some((PathBuf::from(file), number.parse().ok()?)));
    match found {
        Some((file, number)) if number > 0 && file.is_file() => (file, Some(number)),
        _ => (part, None),
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
    /// How many samples an epoch takes of it, with the others of its entry.
    num_samples: Option<u64>,
}

impl Located {
    fn read(&self, images: Option<&Path>, weight: f64) -> Result<Dataset, DataError> {
        let root = images.unwrap_or(&self.root);
        let mut dataset = read_file(&self.path, self.format, root, self.columns.as_ref())?;
        dataset.ignored.extend(self.ignored.iter().cloned());
        dataset.weight = weight;
        Ok(dataset)
    }
}

fn locate(part: &Path, format: Option<DataFormat>) -> Result<Vec<Located>, DataError> {
    let (path, name) = split(part);
    let by_name = name.as_deref();
    let paths = match path.is_dir() && format.is_none_or(DataFormat::is_json) {
        true => directories::files_in(&path, by_name)?,
        false => vec![path],
    };
    let (paths, counts): (Vec<PathBuf>, Vec<_>) = paths.into_iter().map(counted).unzip();
    let num_samples = counts.into_iter().find_map(|count| count);
    if let [info] = &paths[..]
        && info.file_name().is_some_and(|file| file == DATASET_INFO)
    {
        return entry(info, by_name);
    }
    let located = paths.into_iter().map(|path| Located {
        root: directory_of(&path).to_owned(),
        path,
        format,
        columns: None,
        ignored: Vec::new(),
        num_samples,
    });
    Ok(located.collect())
}

/// The files and directories that `data` stands for. One that cannot be found is as it is given.
#[must_use]
pub fn data_files(data: &Path) -> Vec<PathBuf> {
    let parts = data_parts(data).into_iter();
    let of_part = |part: PathBuf| {
        let part = weight_of(&part).map_or(part, |(path, _)| path);
        match locate(&part, None) {
            Ok(located) => located.into_iter().map(|located| located.path).collect(),
            Err(_) => vec![part],
        }
    };
    parts.flat_map(of_part).collect()
}

/// The data that the entry `name` of the file `info` describes, or its only entry.
fn entry(info: &Path, name: Option<&str>) -> Result<Vec<Located>, DataError> {
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
    let ignored: Vec<_> = ignored
        .map(|(key, count)| (format!("{name}.{key}"), count))
        .collect();
    let path = root.join(&described.file);
    let paths = match path.is_dir() {
        true => directories::all_files(&path)?,
        false => vec![path],
    };
    let located = paths.into_iter().map(|path| Located {
        path,
        format: Some(described.format),
        columns: Some(described.columns.clone()),
        root: root.clone(),
        ignored: ignored.clone(),
        num_samples: described.num_samples,
    });
    Ok(located.collect())
}

/// An entry of `dataset_info.json`.
struct Described {
    file: PathBuf,
    format: DataFormat,
    columns: Columns,
    ignored: Vec<(String, usize)>,
    num_samples: Option<u64>,
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
        let num_samples = match keys.take("num_samples").map(|number| number.as_u64()) {
            Some(None | Some(0)) => {
                return Err(keys.refusal("\"num_samples\" is not a number above 0"));
            }
            number => number.flatten(),
        };
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
            num_samples,
        })
    }
}

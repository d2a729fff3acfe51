//! Where the files of a model are: one directory, or several whose paths are joined by commas.
//!
//! The model-parallel ranks of a SAT checkpoint may be in two directories, and its tokenizer in a third. All of them
//! together are one `Path` ("A,B"), because configurations, manifests and adapters store a model's location as one.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Files of a vocabulary.
const VOCABULARIES: [&str; 2] = ["tokenizer.json", "tokenizer.model"];

/// The directories of the location `model`. A path that exists as it is, commas included, is one directory.
#[must_use]
pub fn directories(model: &Path) -> Vec<PathBuf> {
    let parts = model
        .to_str()
        .filter(|text| text.contains(',') && !model.exists());
    match parts {
        Some(text) => text
            .split(',')
            .filter(|part| !part.is_empty())
            .map(PathBuf::from)
            .collect(),
        None => vec![model.to_owned()],
    }
}

/// The location `model` with the tokenizer in the directory `tokenizer`, if any.
#[must_use]
pub fn with_tokenizer(model: &Path, tokenizer: Option<&Path>) -> PathBuf {
    let mut all = directories(model);
    all.extend(tokenizer.map(Path::to_owned));
    joined(&all)
}

/// The location of `directories`.
#[must_use]
pub fn joined(directories: &[PathBuf]) -> PathBuf {
    let texts: Vec<OsString> = directories
        .iter()
        .map(|path| path.clone().into_os_string())
        .collect();
    texts.join(",".as_ref()).into()
}

/// The directory of the location `model` with its configuration, and with its weights or the first of their ranks.
#[must_use]
pub fn main(model: &Path) -> PathBuf {
    let first = directories(model).into_iter().next();
    first.unwrap_or_else(|| model.to_owned())
}

fn has_vocabulary(dir: &Path) -> bool {
    VOCABULARIES.iter().any(|name| dir.join(name).is_file())
}

/// The last directory of the location `model` that has a vocabulary; the first one if none has.
#[must_use]
pub fn tokenizer(model: &Path) -> PathBuf {
    let mut reversed = directories(model).into_iter().rev();
    let found = reversed.find(|dir| has_vocabulary(dir));
    found.unwrap_or_else(|| main(model))
}

/// The first directory of the location `model`, after its main one, that has neither a vocabulary nor ranks of a SAT
/// checkpoint.
#[must_use]
pub fn without_files(model: &Path) -> Option<PathBuf> {
    let useless = |dir: &PathBuf| !has_vocabulary(dir) && !crate::sat::is_checkpoint(dir);
    directories(model).into_iter().skip(1).find(useless)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_location_has_several_directories_unless_it_exists_as_one() {
        let dir = tempfile::tempdir().unwrap();
        let [a, b, both] = ["a", "b", "c,d"].map(|name| dir.path().join(name));
        for path in [&a, &b, &both] {
            std::fs::create_dir(path).unwrap();
        }
        let location = joined(&[a.clone(), b.clone()]);
        assert_eq!(directories(&location), [a.clone(), b.clone()]);
        assert_eq!(directories(&both), std::slice::from_ref(&both));
        assert_eq!(tokenizer(&location), a);
        std::fs::write(b.join("tokenizer.model"), "x").unwrap();
        assert_eq!((tokenizer(&location), main(&location)), (b, a));
    }
}

//! Reader of a pack's files.

use anyhow::{Context, Result, ensure};
use half::bf16;
use models::Family;
use safetensors::{Dtype, SafeTensors};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Values of a stored tensor.
#[derive(Clone, PartialEq, Debug)]
pub enum Data {
    /// Floats as f32.
    Floats(Vec<f32>),
    /// Integers, widened.
    Ints(Vec<i64>),
}

/// A stored tensor.
#[derive(Clone, PartialEq, Debug)]
pub struct Stored {
    /// Extents of the dimensions.
    pub shape: Vec<usize>,
    /// Row-major values.
    pub data: Data,
}

impl Stored {
    /// The values of a float tensor.
    ///
    /// # Errors
    /// When the tensor holds integers.
    pub fn floats(&self) -> Result<&[f32]> {
        match &self.data {
            Data::Floats(values) => Ok(values),
            Data::Ints(_) => anyhow::bail!("expected floats, found integers"),
        }
    }

    /// The values of an integer tensor.
    ///
    /// # Errors
    /// When the tensor holds floats.
    pub fn ints(&self) -> Result<&[i64]> {
        match &self.data {
            Data::Ints(values) => Ok(values),
            Data::Floats(_) => anyhow::bail!("expected integers, found floats"),
        }
    }
}

/// All tensors of one safetensors file.
#[derive(Clone, PartialEq, Debug)]
pub struct Expected(pub BTreeMap<String, Stored>);

impl Expected {
    /// Reads a file of floats (F32, F64, BF16) and integers (I64, I32, U8).
    ///
    /// # Errors
    /// When the file is missing, broken or holds another dtype.
    pub fn read(path: &Path) -> Result<Self> {
        let bytes = std::fs::read(path).with_context(|| format!("reading {}", path.display()))?;
        let file = SafeTensors::deserialize(&bytes)
            .with_context(|| format!("parsing {}", path.display()))?;
        let mut tensors = BTreeMap::new();
        for (name, view) in file.iter() {
            let data = decode(view.dtype(), view.data())
                .with_context(|| format!("{name} in {}", path.display()))?;
            let shape = view.shape().to_vec();
            tensors.insert(name.to_owned(), Stored { shape, data });
        }
        Ok(Self(tensors))
    }

    /// A tensor.
    ///
    /// # Errors
    /// When it is absent.
    pub fn get(&self, name: &str) -> Result<&Stored> {
        self.0
            .get(name)
            .with_context(|| format!("{name} is absent"))
    }
}

fn decode(dtype: Dtype, bytes: &[u8]) -> Result<Data> {
    fn each<const N: usize, T>(bytes: &[u8], f: impl Fn([u8; N]) -> T) -> Vec<T> {
        let (words, _) = bytes.as_chunks::<N>();
        words.iter().map(|word| f(*word)).collect()
    }
    Ok(match dtype {
        Dtype::F32 => Data::Floats(each(bytes, f32::from_le_bytes)),
        Dtype::F64 => Data::Floats(each(bytes, |w| f64::from_le_bytes(w) as f32)),
        Dtype::BF16 => Data::Floats(each(bytes, |w| bf16::from_le_bytes(w).to_f32())),
        Dtype::I64 => Data::Ints(each(bytes, i64::from_le_bytes)),
        Dtype::I32 => Data::Ints(each(bytes, |w| i64::from(i32::from_le_bytes(w)))),
        Dtype::U8 => Data::Ints(bytes.iter().map(|b| i64::from(*b)).collect()),
        other => anyhow::bail!("dtype {other:?} is not part of the format"),
    })
}

/// A case: one raw sample, or a batch of the samples of other cases.
#[derive(Debug)]
pub struct Case {
    /// Name of its directory.
    pub name: String,
    /// Its directory.
    pub dir: PathBuf,
    /// Results of the reference implementation.
    pub expected: Expected,
}

/// Reads a JSON file.
///
/// # Errors
/// When the file is missing or has another structure.
pub fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T> {
    let bytes = std::fs::read(path).with_context(|| format!("reading {}", path.display()))?;
    serde_json::from_slice(&bytes).with_context(|| format!("parsing {}", path.display()))
}

/// A golden pack.
#[derive(Debug)]
pub struct Pack {
    /// Its directory, which is a model directory too.
    pub dir: PathBuf,
    /// The model's family.
    pub family: Family,
    /// Cases, by name.
    pub cases: Vec<Case>,
}

impl Pack {
    /// Reads the pack in `dir`.
    ///
    /// # Errors
    /// When a file is missing or broken, or the model is not supported.
    pub fn read(dir: &Path) -> Result<Self> {
        super::supported::check(dir)?;
        let directory = dir.join("cases");
        let entries = std::fs::read_dir(&directory)
            .with_context(|| format!("listing {}", directory.display()))?;
        let mut dirs = entries
            .map(|entry| Ok(entry?.path()))
            .collect::<Result<Vec<_>>>()?;
        dirs.retain(|path| path.is_dir());
        dirs.sort();
        ensure!(!dirs.is_empty(), "{} holds no case", directory.display());
        let case = |dir: PathBuf| -> Result<Case> {
            let name = dir.file_name().unwrap_or_default().to_string_lossy();
            Ok(Case {
                name: name.into_owned(),
                expected: Expected::read(&dir.join("expected.safetensors"))?,
                dir,
            })
        };
        Ok(Self {
            dir: dir.to_owned(),
            family: Family::of(dir)?,
            cases: dirs.into_iter().map(case).collect::<Result<_>>()?,
        })
    }

    /// A case by name.
    ///
    /// # Errors
    /// When the pack has no such case.
    pub fn case(&self, name: &str) -> Result<&Case> {
        let found = self.cases.iter().find(|c| c.name == name);
        found.with_context(|| format!("{} has no case {name}", self.dir.display()))
    }

    /// The directory of a pack beside the suites.
    #[must_use]
    pub fn beside(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("golden")
            .join(name)
    }

    /// The packs of MiniCPM beside the suites.
    #[must_use]
    pub fn minicpm() -> Vec<PathBuf> {
        let names = [
            "minicpm-v-2_6",
            "minicpm-o-2_6",
            "minicpm-v-4_5",
            "minicpm-o-4_5",
        ];
        names.map(Self::beside).into()
    }

    /// The packs of CogVLM, CogVLM2 and CogAgent beside the suites.
    #[must_use]
    pub fn cogs() -> Vec<PathBuf> {
        let names = [
            "cogvlm-chat-hf",
            "cogvlm2-llama3-chat-19B",
            "cogagent-chat-hf",
        ];
        names.map(Self::beside).into()
    }

    /// All packs beside the suites.
    #[must_use]
    pub fn built_in() -> Vec<PathBuf> {
        let glms = [
            "glm-4v-9b",
            "cogagent-9b-20241220",
            "glm-4.1v-9b-thinking",
            "glm-4.6v-flash",
            "glm-ocr",
        ];
        let glms = glms.map(Self::beside);
        [Self::minicpm(), Self::cogs(), glms.into()].concat()
    }
}

//! Reading a pack.

use anyhow::{Context, Result, ensure};
use half::bf16;
use models::Processor;
use models::data::{EncodeOptions, EncodedSample, RawSample, read_samples};
use models::image::ImageFolder;
use models::lora::{LoraConfig, LoraTargets};
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Values of a stored tensor.
#[derive(Clone, PartialEq, Debug)]
pub enum Data {
    /// Floats, widened.
    Floats(Vec<f32>),
    /// Integers, widened.
    Ints(Vec<i64>),
}

/// A stored tensor.
#[derive(Clone, PartialEq, Debug)]
pub struct Stored {
    /// Extents.
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
    /// Reads a file of floats (F32, BF16) and integers (I64, I32, U8).
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
    /// Its folder's name.
    pub name: String,
    /// Folders of its samples: its own, or those of the cases its `batch.json` names.
    pub samples: Vec<PathBuf>,
    /// Whether it is a batch.
    pub is_batch: bool,
    /// What the reference computed.
    pub expected: Expected,
}

#[derive(Deserialize)]
struct Batch {
    samples: Vec<String>,
}

#[derive(Deserialize)]
struct Options {
    model_max_length: Option<usize>,
    max_slice_nums: Option<usize>,
}

impl Case {
    fn read(dir: &Path, cases: &Path) -> Result<Self> {
        let name = dir.file_name().unwrap_or_default().to_string_lossy();
        let batch = dir.join("batch.json");
        let is_batch = batch.is_file();
        let samples = if is_batch {
            let batch: Batch = read_json(&batch)?;
            batch.samples.iter().map(|s| cases.join(s)).collect()
        } else {
            vec![dir.to_owned()]
        };
        Ok(Self {
            name: name.into_owned(),
            samples,
            is_batch,
            expected: Expected::read(&dir.join("expected.safetensors"))?,
        })
    }

    /// Encodes its samples as training does.
    ///
    /// # Errors
    /// When a file is missing or a sample cannot be encoded.
    pub fn encode(&self, processor: &dyn Processor) -> Result<Vec<EncodedSample>> {
        self.samples
            .iter()
            .map(|dir| {
                let (raw, options) = raw_sample(dir)?;
                let images = ImageFolder::beside(&dir.join("conversation.json"));
                processor
                    .encode(&raw, &images, &options)
                    .with_context(|| format!("encoding {}", dir.display()))
            })
            .collect()
    }

    /// The text of its sample before tokenization, ours and the stored one.
    ///
    /// # Errors
    /// When a file is missing or the sample cannot be rendered.
    pub fn rendered(&self, processor: &dyn Processor) -> Result<(String, String)> {
        let dir = self.samples.first().context("a case without samples")?;
        let (raw, options) = raw_sample(dir)?;
        let images = ImageFolder::beside(&dir.join("conversation.json"));
        let ours = processor.render(&raw, &images, &options)?;
        Ok((ours, std::fs::read_to_string(dir.join("prompt.txt"))?))
    }
}

fn raw_sample(dir: &Path) -> Result<(RawSample, EncodeOptions)> {
    let data = dir.join("conversation.json");
    let mut samples = read_samples(&data)?;
    ensure!(samples.len() == 1, "{} holds one sample", data.display());
    let options: Options = read_json(&dir.join("options.json"))?;
    let defaults = EncodeOptions::default();
    let options = EncodeOptions {
        model_max_length: options
            .model_max_length
            .unwrap_or(defaults.model_max_length),
        max_slice_nums: options.max_slice_nums,
    };
    Ok((samples.remove(0), options))
}

fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T> {
    let bytes = std::fs::read(path).with_context(|| format!("reading {}", path.display()))?;
    serde_json::from_slice(&bytes).with_context(|| format!("parsing {}", path.display()))
}

/// The optimizer of the trajectories.
#[derive(Clone, PartialEq, Debug, Deserialize)]
pub struct AdamW {
    /// Learning rate.
    pub lr: f64,
    /// Decay rates of the moments.
    pub betas: [f64; 2],
    /// Added to the root.
    pub eps: f64,
    /// Decoupled decay, on every trainable tensor.
    pub weight_decay: f64,
}

/// One trajectory.
#[derive(Clone, PartialEq, Debug, Deserialize)]
pub struct Run {
    /// The loss before each step, then the loss after the last.
    pub losses: Vec<f64>,
    /// Trainable elements.
    pub trainable: usize,
}

/// Trajectories of one case under several settings.
#[derive(Clone, PartialEq, Debug)]
pub struct Trajectory {
    /// The case.
    pub case: String,
    /// The optimizer.
    pub optimizer: AdamW,
    /// By name: `full`, `tune_vision_only`, `tune_llm_only`, `resampler_only`, `lora`, ...
    pub runs: BTreeMap<String, Run>,
    /// Mean loss of every case with the stored weights.
    pub case_losses: BTreeMap<String, f64>,
}

impl Trajectory {
    fn read(path: &Path) -> Result<Self> {
        let all: BTreeMap<String, serde_json::Value> = read_json(path)?;
        let field = |name: &str| {
            let value = all.get(name).cloned();
            value.with_context(|| format!("{name} is absent from {}", path.display()))
        };
        let runs = all
            .iter()
            .filter(|(_, v)| v.get("losses").is_some())
            .map(|(k, v)| Ok((k.clone(), serde_json::from_value(v.clone())?)))
            .collect::<Result<_>>()?;
        Ok(Self {
            case: serde_json::from_value(field("case")?)?,
            optimizer: serde_json::from_value(field("optimizer")?)?,
            runs,
            case_losses: serde_json::from_value(field("case_losses")?)?,
        })
    }
}

/// `adapter_config.json`, as far as it is used.
#[derive(Clone, PartialEq, Debug, Deserialize)]
pub struct AdapterConfig {
    /// Rows of A.
    #[serde(rename = "r")]
    pub lora_rank: usize,
    /// Numerator of the scale.
    pub lora_alpha: f32,
    /// A pattern of whole module paths.
    pub target_modules: String,
}

impl AdapterConfig {
    /// As the models crate takes it, with modules trained in full beside the adapters.
    #[must_use]
    pub fn to_lora(&self, modules_to_save: &[&str]) -> LoraConfig {
        LoraConfig {
            lora_rank: self.lora_rank,
            lora_alpha: self.lora_alpha,
            lora_dropout: 0.0,
            targets: LoraTargets::Pattern(self.target_modules.clone()),
            layers: None,
            per_projection: false,
            modules_to_save: modules_to_save.iter().map(|m| (*m).to_owned()).collect(),
        }
    }
}

/// A golden pack.
#[derive(Debug)]
pub struct Pack {
    /// Its folder, which is a model folder too.
    pub dir: PathBuf,
    /// `model_type` of its configuration.
    pub model_type: String,
    /// Cases, by name.
    pub cases: Vec<Case>,
    /// Trajectories.
    pub trajectory: Trajectory,
    /// Settings of the adapter runs.
    pub adapter: Option<AdapterConfig>,
}

impl Pack {
    /// Reads the pack in `dir`.
    ///
    /// # Errors
    /// When a file is missing or broken.
    pub fn read(dir: &Path) -> Result<Self> {
        #[derive(Deserialize)]
        struct Config {
            model_type: String,
        }
        let config: Config = read_json(&dir.join("config.json"))?;
        let folder = dir.join("cases");
        let entries =
            std::fs::read_dir(&folder).with_context(|| format!("listing {}", folder.display()))?;
        let mut dirs = entries
            .map(|entry| Ok(entry?.path()))
            .collect::<Result<Vec<_>>>()?;
        dirs.retain(|path| path.is_dir());
        dirs.sort();
        ensure!(!dirs.is_empty(), "{} holds no case", folder.display());
        let cases = dirs
            .iter()
            .map(|dir| Case::read(dir, &folder))
            .collect::<Result<_>>()?;
        let adapter = dir.join("adapter_init/adapter_config.json");
        let adapter = adapter.is_file().then(|| read_json(&adapter)).transpose()?;
        Ok(Self {
            dir: dir.to_owned(),
            model_type: config.model_type,
            cases,
            trajectory: Trajectory::read(&dir.join("trajectory.json"))?,
            adapter,
        })
    }

    /// A case by name.
    ///
    /// # Errors
    /// When there is none.
    pub fn case(&self, name: &str) -> Result<&Case> {
        let found = self.cases.iter().find(|c| c.name == name);
        found.with_context(|| format!("{} has no case {name}", self.dir.display()))
    }

    /// The packs that lie beside the test suites.
    #[must_use]
    pub fn built_in() -> Vec<PathBuf> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden");
        ["minicpm-v-2_6", "minicpm-o-2_6"]
            .map(|name| root.join(name))
            .into()
    }
}

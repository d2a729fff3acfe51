//! Packs of MiniCPM-V and MiniCPM-o, releases 2.6 and 4.5.

use super::compare::{
    CaseRun, Comparison, compare_activation, compare_floats, compare_gradient, compare_ints,
    compare_loss, largest_gradient,
};
use super::family::{AdamW, PackFamily, Section, Trajectory, floats};
use super::pack::{Case, Expected, Pack, Stored, read_json};
use super::quantized;
use super::trajectories::of_users;
use crate::tolerance;
use anyhow::{Context, Result, ensure};
use models::data::{EncodeOptions, EncodedSample, IGNORED, RawSample, Slice, read_samples};
use models::image::ImageFolder;
use models::lora::{LoraConfig, LoraTargets};
use models::minicpm::config::{Family as Edition, MiniCpmConfig, SlicingConfig};
use models::minicpm::positions::{position_buckets, position_ids};
use models::minicpm::processor::ProcessorConfig;
use models::minicpm::slicing::SlicePlan;
use models::processor::Normalization;
use models::{ModelOptions, Processor};
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Reader of these packs.
#[derive(Clone, Copy, Debug)]
pub struct MiniCpmPacks;

impl PackFamily for MiniCpmPacks {
    fn samples(
        &self,
        _: &Pack,
        case: &Case,
        processor: &dyn Processor,
    ) -> Result<Vec<EncodedSample>> {
        encode(case, processor)
    }

    fn compare_inputs(
        &self,
        pack: &Pack,
        case: &Case,
        processor: &dyn Processor,
        samples: &[EncodedSample],
    ) -> Result<Vec<Comparison>> {
        let config = MiniCpmConfig::load(&pack.dir)?;
        let normalization = ProcessorConfig::load(&pack.dir, &config)?.normalization;
        let mut all = compare_inputs(case, samples, &normalization, config.vision.grid_side)?;
        if case.dir.join("prompt.txt").is_file() {
            let (ours, theirs) = rendered(case, processor)?;
            let bytes = |text: &str| text.bytes().map(i64::from).collect::<Vec<_>>();
            all.push(compare_ints("prompt.txt", &bytes(&ours), &bytes(&theirs)));
        }
        Ok(all)
    }

    fn compare_run(
        &self,
        case: &Case,
        _: &[EncodedSample],
        run: &CaseRun,
    ) -> Result<Vec<Comparison>> {
        compare_run(case, run)
    }

    fn trajectories(&self, pack: &Pack, processor: &dyn Processor) -> Result<Vec<Trajectory>> {
        if let Some(runs) = of_users(pack, &|case| encode(case, processor))? {
            return Ok(runs);
        }
        let stored = Runs::read(pack)?;
        let bound = match MiniCpmConfig::load(&pack.dir)?.family {
            Edition::Vision => tolerance::TRAJECTORY,
            Edition::Omni => tolerance::TRAJECTORY_OMNI,
        };
        let adapters = |name: &str| -> Result<BTreeMap<String, Vec<f32>>> {
            let path = pack.dir.join(name).join("adapter_model.safetensors");
            if path.is_file() {
                Ok(saved(floats(&path)?))
            } else {
                Ok(BTreeMap::new())
            }
        };
        let runs = stored.runs.iter().map(|(name, run)| {
            let batch = |case: &String| encode(pack.case(case)?, processor);
            let own = [stored.case.clone()];
            let cases = run.micro_batches.as_deref().unwrap_or(&own);
            let batches = cases.iter().map(batch).collect::<Result<Vec<_>>>()?;
            if let Some(counts) = &run.token_counts {
                let count = |batch: &Vec<EncodedSample>| {
                    let tokens = batch.iter().map(EncodedSample::supervised_tokens);
                    tokens.sum::<usize>()
                };
                let ours: Vec<usize> = batches.iter().map(count).collect();
                ensure!(ours == *counts, "{name}: {ours:?} targets, not {counts:?}");
            }
            let optimizer = stored.optimizer.clone();
            let mut trajectory =
                Trajectory::new(name, optimizer, batches, run.losses.clone(), bound);
            run_options(&stored, name, &mut trajectory.options)?;
            trajectory.trainable = Some(run.trainable);
            trajectory.start = adapters("adapter_init")?;
            match name.as_str() {
                "lora" => trajectory.after = adapters("adapter_after8")?,
                "lora_modules_to_save" => {
                    trajectory.after = adapters("adapter_modules_after8")?;
                    trajectory.after.retain(|name, _| is_comparable(name));
                }
                _ => {}
            }
            Ok(trajectory)
        });
        runs.collect()
    }

    fn tables(&self, pack: &Pack, _: &dyn Processor) -> Result<Vec<Section>> {
        tables(&pack.dir)
    }
}

/// Tensors of an adapter file by the name of their parameter: those of modules trained in full have peft's prefix there.
fn saved(tensors: BTreeMap<String, Vec<f32>>) -> BTreeMap<String, Vec<f32>> {
    let named = tensors.into_iter().map(|(name, values)| {
        let own = name.strip_prefix("base_model.model.");
        let own = own.filter(|own| !own.contains(".lora_"));
        (own.map_or(name.clone(), str::to_owned), values)
    });
    named.collect()
}

/// Whether a trained tensor is compared. The keys' third of the resampler's bias has no gradient, which Adam turns to
/// full steps of random sign.
fn is_comparable(name: &str) -> bool {
    name != "resampler.attn.in_proj_bias"
}

#[derive(Deserialize)]
struct Batch {
    samples: Vec<String>,
}

#[derive(Deserialize, Default)]
struct Options {
    #[serde(alias = "max_length")]
    model_max_length: Option<usize>,
    max_slice_nums: Option<usize>,
}

/// Directories of a case's samples: its own, or those of the cases in its `batch.json`.
fn directories(case: &Case) -> Result<Vec<PathBuf>> {
    let batch = case.dir.join("batch.json");
    if !batch.is_file() {
        return Ok(vec![case.dir.clone()]);
    }
    let batch: Batch = read_json(&batch)?;
    let names = batch.samples.iter();
    Ok(names.map(|name| case.dir.with_file_name(name)).collect())
}

/// Encodes the samples of a case as for training.
///
/// # Errors
/// When a file is missing or a sample cannot be encoded.
pub fn encode(case: &Case, processor: &dyn Processor) -> Result<Vec<EncodedSample>> {
    let encode = |dir: PathBuf| {
        let (raw, options) = raw_sample(&dir)?;
        let images = ImageFolder::beside(&dir.join("conversation.json"));
        processor
            .encode(&raw, &images, &options)
            .with_context(|| format!("encoding {}", dir.display()))
    };
    directories(case)?.into_iter().map(encode).collect()
}

/// The sample's text before tokenization: ours and the stored one.
fn rendered(case: &Case, processor: &dyn Processor) -> Result<(String, String)> {
    let (raw, options) = raw_sample(&case.dir)?;
    let images = ImageFolder::beside(&case.dir.join("conversation.json"));
    let ours = processor.render(&raw, &images, &options)?;
    Ok((ours, std::fs::read_to_string(case.dir.join("prompt.txt"))?))
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
        ..EncodeOptions::default()
    };
    Ok((samples.remove(0), options))
}

/// One trajectory.
#[derive(Clone, PartialEq, Debug, Deserialize)]
pub struct Run {
    /// The loss before each step, then the loss after the last one.
    pub losses: Vec<f64>,
    /// Number of trainable elements.
    pub trainable: usize,
    /// Cases of the micro-batches of a step; the pack's case if absent.
    pub micro_batches: Option<Vec<String>>,
    /// Supervised tokens of each micro-batch, if stored.
    pub token_counts: Option<Vec<usize>>,
}

/// Trajectories of one case under several settings.
#[derive(Clone, PartialEq, Debug)]
pub struct Runs {
    /// Name of the case.
    pub case: String,
    /// The optimizer.
    pub optimizer: AdamW,
    /// Runs by name: `full`, `tune_vision_only`, `tune_llm_only`, `resampler_only`, `lora`, ...
    pub runs: BTreeMap<String, Run>,
    /// Mean loss of every case with the stored weights.
    pub case_losses: BTreeMap<String, f64>,
    /// Settings of the adapter runs.
    pub adapter: Option<AdapterConfig>,
}

impl Runs {
    /// Reads `trajectory.json` and the settings of the adapters.
    ///
    /// # Errors
    /// When a file is missing or broken.
    pub fn read(pack: &Pack) -> Result<Self> {
        let path = &pack.dir.join("trajectory.json");
        let all: BTreeMap<String, Value> = read_json(path)?;
        let adapter = pack.dir.join("adapter_init/adapter_config.json");
        let adapter = adapter.is_file().then(|| read_json(&adapter)).transpose()?;
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
            adapter,
            case_losses: serde_json::from_value(field("case_losses")?)?,
        })
    }
}

/// Fields of `adapter_config.json` that the tests read.
#[derive(Clone, PartialEq, Debug, Deserialize)]
pub struct AdapterConfig {
    /// The rank: rows of A.
    #[serde(rename = "r")]
    pub lora_rank: usize,
    /// Numerator of the adapter's scale.
    pub lora_alpha: f32,
    /// A pattern of whole module paths.
    pub target_modules: String,
}

impl AdapterConfig {
    /// The adapter settings of the models crate, with modules trained in full beside the adapters.
    #[must_use]
    pub fn to_lora(&self, modules_to_save: &[&str]) -> LoraConfig {
        LoraConfig {
            lora_rank: self.lora_rank,
            lora_alpha: self.lora_alpha,
            lora_dropout: 0.0,
            others: BTreeMap::new(),
            targets: LoraTargets::Pattern(self.target_modules.clone()),
            layers: None,
            per_projection: false,
            use_rslora: false,
            modules_to_save: modules_to_save.iter().map(|m| (*m).to_owned()).collect(),
        }
    }
}

/// The options of a trajectory's run, by its name in `trajectory.json`.
///
/// # Errors
/// When the name is unknown, or an adapter run lacks its settings.
pub fn run_options(runs: &Runs, run: &str, options: &mut ModelOptions) -> Result<()> {
    let adapter = || {
        runs.adapter
            .as_ref()
            .context("the pack has no adapter_init")
    };
    let (vision, llm, lora) = match run {
        "full" | "full_video" | "grad_accumulation_token_weighted" => (true, true, None),
        "tune_vision_only" => (true, false, None),
        "tune_llm_only" => (false, true, None),
        "resampler_only" => (false, false, None),
        "lora" => (false, false, Some(adapter()?.to_lora(&[]))),
        "lora_modules_to_save" => (
            false,
            false,
            Some(adapter()?.to_lora(&["embed_tokens", "resampler"])),
        ),
        other => {
            ensure!(runs.runs.contains_key(other), "unknown run {other}");
            // A run of a later pack: what it trains beyond a full fine-tune shows in the count of trainable elements.
            (true, true, None)
        }
    };
    (options.tune_vision, options.tune_llm, options.lora) = (vision, llm, lora);
    Ok(())
}

/// Compares all stored results of a case with a run of the model.
///
/// # Errors
/// When a stored tensor has the wrong kind.
pub fn compare_run(case: &Case, run: &CaseRun) -> Result<Vec<Comparison>> {
    let expected = &case.expected;
    let largest = largest_gradient(run);
    let mut all = Vec::new();
    let own = |name: &&String| !quantized::is_own(name);
    for (name, stored) in expected.0.iter().filter(|(name, _)| own(name)) {
        let comparison = match name.split_once('.').map_or(name.as_str(), |(kind, _)| kind) {
            "input_ids" | "labels" | "position_ids" | "image_bound" | "tgt_sizes"
            | "pixel_values" | "pixel_u8" | "temporal_ids" | "temporal_groups" => continue,
            _ if name == "vision.pos_ids" => continue,
            "loss" => compare_loss(run, stored)?,
            "logits" => compare_activation(name, run.logits.as_ref(), stored)?,
            "logits_labelled" => labelled(expected, run, stored)?,
            "vision" => vision(expected, run, name, stored)?,
            "vision_features" | "inputs_embeds" | "hidden" => {
                compare_activation(name, run.taps.get(name), stored)?
            }
            "grad" | "gradnorm" | "gradsub" => compare_gradient(run, name, stored, largest)?,
            _ => Comparison::failed(name, "not a known quantity"),
        };
        all.push(comparison);
    }
    Ok(all)
}

/// Compares the logits of the supervised rows, in order.
fn labelled(expected: &Expected, run: &CaseRun, stored: &Stored) -> Result<Comparison> {
    const NAME: &str = "logits_labelled";
    let labels = expected.get("labels")?.ints()?;
    let Some(logits) = &run.logits else {
        return Ok(Comparison::failed(NAME, "not computed"));
    };
    let vocab = stored.shape.last().copied().unwrap_or(1);
    let supervised = |(_, label): &(_, &i64)| **label != i64::from(IGNORED);
    let rows = logits.chunks(vocab).zip(labels).filter(supervised);
    let got: Vec<f32> = rows.flat_map(|(row, _)| row).copied().collect();
    compare_activation(NAME, Some(&got), stored)
}

/// Compares a value of the vision tower. The pack stores `[N, longest, c]`, and the rows after each slice are padding.
fn vision(expected: &Expected, run: &CaseRun, name: &str, stored: &Stored) -> Result<Comparison> {
    let Some(got) = run.taps.get(name) else {
        return Ok(Comparison::failed(name, "not computed"));
    };
    let sizes = expected.get("tgt_sizes")?.ints()?;
    let (want, per_slice) = (stored.floats()?, stored.shape[1..].iter().product());
    let width = stored.shape.last().copied().unwrap_or(1);
    let valid = want.chunks(per_slice).zip(sizes.chunks(2));
    let want: Vec<f32> = valid
        .flat_map(|(slice, size)| &slice[..(size[0] * size[1]) as usize * width])
        .copied()
        .collect();
    Ok(compare_floats(
        name,
        got,
        &want,
        tolerance::activation(&want),
    ))
}

/// Compares all stored inputs of a case exactly: ids, labels, positions, image bounds, sizes, learned positions and
/// pixels.
///
/// # Errors
/// When a stored tensor has the wrong kind.
pub fn compare_inputs(
    case: &Case,
    samples: &[EncodedSample],
    normalization: &Normalization,
    grid_side: usize,
) -> Result<Vec<Comparison>> {
    let mut all = Vec::new();
    let longest = samples.iter().map(|s| s.input_ids.len()).max().unwrap_or(0);
    for (name, stored) in &case.expected.0 {
        let got = match name.as_str() {
            "input_ids" => padded(samples, longest, 0, |s| &s.input_ids),
            "labels" => padded(samples, longest, i64::from(IGNORED), |s| &s.labels),
            "position_ids" => {
                let row = |s: &EncodedSample| {
                    let len = s.input_ids.len();
                    (0..longest).map(move |i| if i < len { i as i64 } else { 0 })
                };
                samples.iter().flat_map(row).collect()
            }
            "tgt_sizes" => {
                let slices = samples.iter().flat_map(|s| &s.slices);
                slices
                    .flat_map(|s| [s.rows as i64, s.cols as i64])
                    .collect()
            }
            "temporal_ids" => {
                let slices = samples.iter().flat_map(|s| &s.slices);
                let stamp = |slice: &Slice| slice.stamp.and_then(|stamp| stamp.tenths);
                slices
                    .map(|slice| stamp(slice).map_or(-1, i64::from))
                    .collect()
            }
            "temporal_groups" => groups(samples),
            "vision.pos_ids" => slice_rows(samples, &stored.shape, |slice, row| {
                let ids = position_ids(slice.rows, slice.cols, grid_side);
                row.iter_mut()
                    .zip(ids)
                    .for_each(|(to, id)| *to = i64::from(id));
            }),
            "pixel_u8" | "pixel_values" => {
                all.push(pixels(name, samples, stored, normalization)?);
                continue;
            }
            _ => match name.strip_prefix("image_bound") {
                Some(row) => bounds(samples, row),
                None => continue,
            },
        };
        all.push(compare_ints(name, &got, stored.ints()?));
    }
    Ok(all)
}

/// Number of slices of each block of features.
fn groups(samples: &[EncodedSample]) -> Vec<i64> {
    let mut groups: Vec<i64> = Vec::new();
    for slice in samples.iter().flat_map(|s| &s.slices) {
        match groups.last_mut() {
            Some(last) if slice.stamp.is_some_and(|stamp| stamp.joins) => *last += 1,
            _ => groups.push(1),
        }
    }
    groups
}

fn padded<'a>(
    samples: &'a [EncodedSample],
    longest: usize,
    filler: i64,
    field: impl Fn(&'a EncodedSample) -> &'a [i32],
) -> Vec<i64> {
    let row = |s: &'a EncodedSample| {
        let values = field(s);
        (0..longest).map(move |i| values.get(i).map_or(filler, |v| i64::from(*v)))
    };
    samples.iter().flat_map(row).collect()
}

/// Image bounds of the row in `.r`; without `.r`, those of the only row.
fn bounds(samples: &[EncodedSample], row: &str) -> Vec<i64> {
    let row = row.trim_start_matches('.').parse().unwrap_or(0);
    let bounds = samples
        .get(row)
        .map_or(&[][..], |s: &EncodedSample| &s.image_bounds);
    bounds
        .iter()
        .flat_map(|(a, b)| [*a as i64, *b as i64])
        .collect()
}

/// One padded row of zeros per slice, filled by `fill`.
fn slice_rows(
    samples: &[EncodedSample],
    shape: &[usize],
    fill: impl Fn(&Slice, &mut [i64]),
) -> Vec<i64> {
    let width: usize = shape[1..].iter().product();
    let slices: Vec<_> = samples.iter().flat_map(|s| &s.slices).collect();
    let mut all = vec![0; slices.len() * width];
    for (slice, row) in slices.iter().zip(all.chunks_mut(width.max(1))) {
        fill(slice, row);
    }
    all
}

/// Compares pixels of real patches. The padding after a shorter slice is not compared.
fn pixels(
    name: &str,
    samples: &[EncodedSample],
    stored: &Stored,
    normalization: &Normalization,
) -> Result<Comparison> {
    let slices: Vec<_> = samples.iter().flat_map(|s| &s.slices).collect();
    let &[count, channels, side, width] = &stored.shape[..] else {
        return Ok(Comparison::failed(name, "not [N, 3, side, side * L]"));
    };
    if count != slices.len() {
        let note = format!("{} slices, expected {count}", slices.len());
        return Ok(Comparison::failed(name, note));
    }
    let mut difference = 0f64;
    for (n, slice) in slices.iter().enumerate() {
        let per_patch = channels * side * side;
        for (i, byte) in slice.patches.iter().enumerate() {
            let (patch, within) = (i / per_patch, i % per_patch);
            let (c, row, col) = (within / (side * side), within / side % side, within % side);
            let at = ((n * channels + c) * side + row) * width + side * patch + col;
            let apart = if name == "pixel_u8" {
                stored.ints()?[at].abs_diff(i64::from(*byte)) as f64
            } else {
                let value = normalization.normalize(c, *byte);
                (f64::from(value) - f64::from(stored.floats()?[at])).abs()
            };
            difference = difference.max(apart);
        }
    }
    Ok(Comparison {
        quantity: name.to_owned(),
        max_abs_diff: difference,
        tolerance: 0.0,
        note: None,
    })
}

/// Compares the optional tables of a pack: slice plans and position buckets at published settings.
fn tables(dir: &Path) -> Result<Vec<Section>> {
    let mut all = Vec::new();
    let slicing = dir.join("slicing_448.json");
    if slicing.is_file() {
        let rows: Vec<Value> = serde_json::from_slice(&std::fs::read(&slicing)?)?;
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for row in &rows {
            slice_row(row, &mut ours, &mut theirs).context("slicing_448.json")?;
        }
        all.push(compare_ints("slicing_448.json", &ours, &theirs));
    }
    let buckets = dir.join("position_buckets_70.safetensors");
    if buckets.is_file() {
        let stored = Expected::read(&buckets)?;
        let want = stored.get("buckets")?.ints()?;
        let ours: Vec<i64> = (1..=280)
            .flat_map(|n| position_buckets(n, 70))
            .map(|b| b as i64)
            .collect();
        all.push(compare_ints("position_buckets_70", &ours, want));
    }
    Ok(if all.is_empty() {
        Vec::new()
    } else {
        vec![("tables".into(), all)]
    })
}

fn slice_row(row: &Value, ours: &mut Vec<i64>, theirs: &mut Vec<i64>) -> Result<()> {
    let number = |v: &Value| v.as_i64().context("not a number");
    let pair = |v: &Value| -> Result<[i64; 2]> {
        if v.is_null() {
            Ok([-1, -1])
        } else {
            Ok([number(&v[0])?, number(&v[1])?])
        }
    };
    let config = SlicingConfig {
        max_slice_nums: number(&row[2])? as usize,
        scale_resolution: 448,
        patch_size: 14,
    };
    let plan = SlicePlan::new(
        number(&row[0])? as usize,
        number(&row[1])? as usize,
        &config,
    );
    let wide = |p: Option<(usize, usize)>| p.map_or([-1, -1], |(a, b)| [a as i64, b as i64]);
    ours.extend(wide(plan.cells.map(|c| (c.cols, c.rows))));
    ours.extend(wide(Some(plan.overview)));
    ours.extend(wide(plan.cells.map(|c| c.refined())));
    ours.push(plan.slices() as i64 * 64);
    theirs.extend(pair(&row[3])?);
    theirs.extend(pair(&row[4])?);
    theirs.extend(pair(&row[5])?);
    theirs.push(number(&row[6])?);
    Ok(())
}

//! The committed trajectory of 200 steps, which shows slow drift of the results.
//!
//! Golden packs have eight steps. This trajectory trains the same tiny model on all samples of a pack in turn, on two
//! ranks under ZeRO-3 with offload. Every later change must give the same bits, or the commit that replaces the file
//! says why.

use crate::golden::minicpm::encode;
use crate::golden::{Comparison, Pack, compare_floats};
use crate::tolerance::Roundings;
use crate::world::{self, Layout, Setup, run_world};
use anyhow::{Context, Result};
use engine::Offload;
use models::data::EncodedSample;
use models::open_processor;
use optim::{Schedule, ScheduleKind};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Number of updates.
pub const STEPS: u64 = 200;
/// Pack with the model and the samples.
const PACK: &str = "minicpm-v-2_6";
const BASE_LR: f64 = 5e-4;
const WARMUP_STEPS: u64 = 20;

/// Contents of the committed file.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Trajectory {
    /// The processor of the run, since other processors may round differently.
    pub processor: String,
    /// Loss of each update, the bits of an f64 in hexadecimal.
    pub losses: Vec<String>,
    /// Global gradient norm of each update, the bits of an f64 in hexadecimal.
    pub grad_norms: Vec<String>,
}

/// Path of the committed file.
#[must_use]
pub fn path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/trajectory-200.json")
}

/// A number from the hexadecimal text of its bits.
///
/// # Errors
/// When the text is not hexadecimal.
pub fn value(bits: &str) -> Result<f64> {
    let bits = u64::from_str_radix(bits, 16).with_context(|| format!("{bits:?} is no f64"))?;
    Ok(f64::from_bits(bits))
}

/// World size, stage and offload of the committed trajectory.
pub const LAYOUT: Layout = Layout {
    world: 2,
    stage: 3,
    offload: Offload::CPU,
    ..Layout::SINGLE
};

/// Trains the trajectory.
///
/// # Errors
/// When the pack cannot be read or the engine fails.
pub fn run(layout: Layout) -> Result<Trajectory> {
    let (pack, samples) = subject()?;
    let schedule = Schedule {
        kind: ScheduleKind::Cosine,
        warmup_steps: WARMUP_STEPS,
        total_steps: STEPS,
        base_lr: BASE_LR,
    };
    let mut ranks = run_world(&pack, layout, &Setup::full(), |rank| {
        let world = rank.zero.comm().world();
        let mut rows = Vec::new();
        for step in 0..STEPS {
            let turn = step as usize * world.size + world.rank;
            let (_, report) = rank.update(schedule.lr(step), |rank| {
                rank.micro_batch(&samples[turn % samples.len()..][..1])
            })?;
            rows.push((report.loss, report.grad_norm));
        }
        Ok(rows)
    })?;
    let rows = ranks.remove(0);
    let hex = |value: f64| format!("{:016x}", value.to_bits());
    Ok(Trajectory {
        processor: processor(),
        losses: rows.iter().map(|(loss, _)| hex(*loss)).collect(),
        grad_norms: rows.iter().map(|(_, norm)| hex(*norm)).collect(),
    })
}

/// The pack and the samples of all its cases.
fn subject() -> Result<(Pack, Vec<EncodedSample>)> {
    let pack = Pack::read(&Pack::beside(PACK))?;
    let processor = open_processor(&pack.dir)?;
    let mut samples = Vec::new();
    for case in &pack.cases {
        samples.extend(encode(case, &*processor)?);
    }
    Ok((pack, samples))
}

/// Number of roundings in a forward pass of the trajectory in 16 bits.
///
/// # Errors
/// When the pack cannot be read or the engine fails.
pub fn roundings() -> Result<Roundings> {
    let (pack, samples) = subject()?;
    world::roundings(&pack, &samples[..1], &Setup::full())
}

/// Compares losses from any device with the committed ones. Each may differ by `share` of the first loss.
///
/// # Errors
/// When the committed file cannot be read.
pub fn compare(run: &Trajectory, share: f64) -> Result<Comparison> {
    let text = std::fs::read_to_string(path()).context("read the committed trajectory")?;
    let committed: Trajectory = serde_json::from_str(&text)?;
    compare_runs(run, &committed, share)
}

/// As [`compare`], but with another trajectory.
///
/// # Errors
/// When a loss is not hexadecimal.
pub fn compare_runs(run: &Trajectory, other: &Trajectory, share: f64) -> Result<Comparison> {
    let values = |run: &Trajectory| -> Result<Vec<f32>> {
        let losses = run.losses.iter().map(|bits| value(bits).map(|x| x as f32));
        losses.collect()
    };
    let (got, want) = (values(run)?, values(other)?);
    let first = want.first().copied().map_or(0.0, f64::from);
    Ok(compare_floats("losses", &got, &want, share * first))
}

/// The parts of the machine that results depend on: processor, cache size (it decides how products are tiled) and
/// widest vector instructions.
#[must_use]
pub fn processor() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let value = |key: &str| {
        let line = text.lines().find(|line| line.starts_with(key));
        let value = line.and_then(|line| line.split_once(':'));
        value.map_or("unknown", |(_, value)| value.trim())
    };
    let (name, cache) = (value("model name"), value("cache size"));
    format!("{name}, {cache}, {}", vectors())
}

fn vectors() -> &'static str {
    #[cfg(target_arch = "x86_64")]
    {
        if std::is_x86_feature_detected!("avx512f") {
            return "avx512f";
        }
        if std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("fma") {
            return "avx2";
        }
    }
    std::env::consts::ARCH
}

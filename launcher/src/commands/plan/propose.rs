//! `launcher plan --propose`: ZeRO stages, pipeline stages and quantization on one machine, with the estimated time of a step.
//!
//! The estimate has two parts. Compute: multiplications and additions of linear layers, forward and backward, at the given
//! rate; pipeline stages add their bubble. Transfer: bytes that a rank receives over the bus, at the given rate. It overlaps
//! with compute, so the longer part counts. The transfers while the pipeline fills and drains are waited for.

use super::planner::Planner;
use crate::cli::PlanArgs;
use crate::config::RunConfig;
use crate::error::Failure;
use crate::lang::{both, text};
use crate::model::setup::{shapes, unit_costs};
use crate::model::stages::Cost;
use crate::plan::Settled;
use crate::plan::suggestion::changed;
use crate::units::bytes;
use clap::ValueEnum;
use engine::Plan;
use engine::plan::GroupKind;
use serde_json::{Value, json};

/// Bytes per second between two cards without `--bus`: PCIe 3 with 16 lanes, through host memory.
const BUS: u64 = 12_000_000_000;
/// Operations per second of a card in units of 10^12, without `--tflops`.
const TFLOPS: f64 = 45.0;

/// Rates of the hardware.
#[derive(Clone, Copy, Debug)]
struct Rates {
    bytes_per_second: f64,
    operations_per_second: f64,
}

/// Candidate with its plan and estimated seconds per step.
#[derive(Debug)]
pub(super) struct Candidate {
    planned: Settled,
    compute_seconds: f64,
    transfer_seconds: f64,
    seconds: f64,
}

impl Candidate {
    /// Samples per update.
    #[cfg(test)]
    pub(super) fn samples(&self) -> usize {
        self.planned.run.global_batch()
    }

    /// Largest number of bytes that cross a boundary in one direction.
    #[cfg(test)]
    pub(super) fn boundary_bytes(&self) -> Option<u64> {
        self.planned.memory.boundary_bytes.iter().max().copied()
    }
}

/// Combinations of ZeRO stage, pipeline stages and quantization that are valid for `config`, those that fit first, then by
/// estimated time. The samples per update stay.
pub(super) fn candidates(
    planner: &Planner,
    config: &RunConfig,
    args: &PlanArgs,
) -> Result<Vec<Candidate>, Failure> {
    let rates = Rates {
        bytes_per_second: args.bus.unwrap_or(BUS) as f64,
        operations_per_second: args.tflops.unwrap_or(TFLOPS) * 1e12,
    };
    let mut found = Vec::new();
    let quantized: &[Option<&str>] = match (&config.trainable.lora, &config.quantize) {
        (Some(_), None) => &[None, Some("nf4")],
        _ => &[None],
    };
    for quantize in quantized {
        let divisors = (1..=config.world_size).filter(|n| config.world_size.is_multiple_of(*n));
        for stages in divisors {
            for zero in 0..=3u8 {
                // Without a second data-parallel rank, stages of ZeRO shard nothing.
                if stages == config.world_size && zero > 0 {
                    continue;
                }
                let accumulation = config.micro_batches() * stages / config.world_size;
                let mut flags = vec![
                    ("zero", zero.to_string()),
                    ("mp-size", stages.to_string()),
                    (
                        "gradient-accumulation-steps",
                        accumulation.max(1).to_string(),
                    ),
                ];
                flags.extend(quantize.map(|format| ("quantize", format.to_owned())));
                if let Some(config) = changed(config, &flags) {
                    let planned = planner.plan(&config.without_spare())?;
                    found.push(estimated(planned, rates)?);
                }
            }
        }
    }
    found.sort_by(|a, b| {
        let key = |c: &Candidate| (!c.planned.fit.fits(), c.seconds);
        key(a)
            .partial_cmp(&key(b))
            .unwrap_or(std::cmp::Ordering::Equal)
    });
    Ok(found)
}

fn estimated(planned: Settled, rates: Rates) -> Result<Candidate, Failure> {
    let (model, _) = shapes(&planned.run)?;
    let costs = unit_costs(&planned.run, &*model)?;
    let (compute_seconds, transfer_seconds, seconds) = times(&planned, &costs, rates);
    Ok(Candidate {
        planned,
        compute_seconds,
        transfer_seconds,
        seconds,
    })
}

/// Seconds of compute, of transfers, and of a step.
fn times(planned: &Settled, costs: &[Cost], rates: Rates) -> (f64, f64, f64) {
    let (run, plan) = (&planned.run, &planned.plan);
    let samples = run.batch.micro_batch as f64;
    let micro_batches = run.batch.accumulation_steps as f64;
    let operations = |stage: usize| -> f64 {
        let units = match &plan.config().slice {
            Some(slice) => slice.units(stage),
            None => 0..costs.len() as u32,
        };
        let own = &costs[units.start as usize..units.end as usize];
        own.iter().map(|cost| cost.operations).sum()
    };
    let slowest = (0..run.mp_size).map(operations).fold(0.0, f64::max);
    let rounds = micro_batches + (run.mp_size - 1) as f64;
    let compute = slowest * samples * rounds / rates.operations_per_second;
    let sharded = received_bytes(plan, micro_batches) / rates.bytes_per_second;
    let boundary = planned
        .memory
        .boundary_bytes
        .iter()
        .max()
        .copied()
        .unwrap_or(0) as f64;
    // An activation and its gradient.
    let crossing = 2.0 * boundary / rates.bytes_per_second;
    let transfer = sharded + crossing * micro_batches;
    let waited = crossing * (run.mp_size - 1) as f64;
    (compute, transfer, compute.max(transfer) + waited)
}

/// Bytes that a rank receives in a step for ZeRO: gathered weights, reduced gradients and updated weights. Of pipeline
/// stages, it is the one that receives the most.
fn received_bytes(plan: &Plan, micro_batches: f64) -> f64 {
    let ranks = plan.world_size() as f64;
    let others = (ranks - 1.0) / ranks;
    let of_stage = |stage: usize| -> f64 {
        let own = plan.at_stage(stage);
        let own = own.as_ref().unwrap_or(plan);
        let (mut weights, mut trained) = (0.0, 0.0);
        for unit in own.units() {
            for kind in GroupKind::ALL {
                let elems = unit.group(kind).padded_elems;
                weights += (elems * own.dtype_of(kind).size_bytes()) as f64;
            }
            trained += unit.trainable.padded_elems as f64;
        }
        let stage = own.config().stage;
        let updates = trained * own.dtype_of(GroupKind::Trainable).size_bytes() as f64;
        let gathered = match stage.shards_parameters() {
            true => 2.0 * weights * micro_batches,
            false if stage.shards_optimizer() => updates,
            false => trained * 4.0,
        };
        let reduced = match own.config().shards_gradients() {
            true => trained * 4.0 * micro_batches,
            false => trained * 4.0,
        };
        others * (gathered + reduced)
    };
    (0..plan.stages()).map(of_stage).fold(0.0, f64::max)
}

/// Flags of a candidate that differ from candidate to candidate.
fn flags(candidate: &Candidate) -> String {
    let run = &candidate.planned.run;
    let mut flags = format!("--zero {}", run.zero);
    if run.mp_size > 1 {
        flags += &format!(" --mp-size {}", run.mp_size);
    }
    flags += &format!(
        " --gradient-accumulation-steps {}",
        run.batch.accumulation_steps
    );
    let quantize = run.quantize.as_ref();
    if let Some(format) = quantize.and_then(|quantize| quantize.format.to_possible_value()) {
        flags += &format!(" --quantize {}", format.get_name());
    }
    flags
}

/// The candidates as a JSON list.
pub(super) fn as_json(candidates: &[Candidate]) -> Value {
    let rows = candidates.iter().map(|candidate| {
        let planned = &candidate.planned;
        json!({
            "flags": flags(candidate),
            "need_bytes": super::needs(planned),
            "fits": planned.fit.fits(),
            "compute_seconds": candidate.compute_seconds,
            "transfer_seconds": candidate.transfer_seconds,
            "step_seconds": candidate.seconds,
        })
    });
    Value::Array(rows.collect())
}

/// The candidates as a text table, the fastest that fits first.
pub(super) fn as_text(config: &RunConfig, candidates: &[Candidate], args: &PlanArgs) -> String {
    let [change, device, compute, transfer, step, fits] = [
        both("flags", "参数"),
        both("device/rank", "设备/rank"),
        both("compute", "计算"),
        both("transfer", "传输"),
        both("step", "每步"),
        both("fits", "放得下"),
    ];
    let rates = text!(
        "{} ranks · {} samples a step · {:.1} GB/s between cards · {} TFLOPS each; estimates of linear layers, not measured",
        "{} 个 rank · 每步 {} 个样本 · 卡间 {:.1} GB/s · 每卡 {} TFLOPS；只估计线性层，并非实测",
        config.world_size,
        config.global_batch(),
        args.bus.unwrap_or(BUS) as f64 / 1e9,
        args.tflops.unwrap_or(TFLOPS),
    );
    let mut text = format!(
        "{} · {rates}\n{change:<66}{device:>12}{compute:>10}{transfer:>10}{step:>10}  {fits}\n",
        config.name(),
    );
    for candidate in candidates {
        let verdict = match candidate.planned.fit.fits() {
            true => both("yes", "是"),
            false => both("no", "否"),
        };
        text += &format!(
            "{:<66}{:>12}{:>9.2}s{:>9.2}s{:>9.2}s  {verdict}\n",
            flags(candidate),
            bytes(candidate.planned.fit.need.device),
            candidate.compute_seconds,
            candidate.transfer_seconds,
            candidate.seconds,
        );
    }
    text
}

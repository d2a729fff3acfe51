//! Batch size of a run: its output line, and `--find-batch`, the search for the largest micro-batch that fits.

use super::rank_memory;
use crate::config::{BatchConfig, Device, LrScale, PrefetchWeights, RunConfig, RunPlan};
use crate::data::SampleSet;
use crate::error::Failure;
use crate::lang::{Text, both, text};
use crate::model::setup::Setup;
use crate::ui::Event;
use crate::units::{bytes, grouped};
use std::sync::Arc;

/// Largest micro-batch in samples that the search tries.
const MAX_MICRO_BATCH: usize = 4096;

/// Line with samples per update and learning rate, and how both are computed.
pub(crate) fn line(config: &RunConfig) -> Event {
    let batch = &config.batch;
    let mut text = match batch.tokens_per_batch {
        Some(tokens) => text!(
            "up to {} tokens per rank × {} accumulated × {} ranks = up to {} tokens per update · learning rate {:.1e}",
            "每个 rank 最多 {} 个 token × 累积 {} 次 × {} 个 rank = 每次更新最多 {} 个 token · 学习率 {:.1e}",
            grouped(tokens as u64),
            batch.accumulation_steps,
            config.data_ranks(),
            grouped((tokens * config.micro_batches()) as u64),
            config.peak_lr(),
        ),
        None => text!(
            "{} per rank × {} accumulated × {} ranks = {} samples per update · learning rate {:.1e}",
            "每个 rank {} × 累积 {} 次 × {} 个 rank = 每次更新 {} 个样本 · 学习率 {:.1e}",
            batch.micro_batch,
            batch.accumulation_steps,
            config.data_ranks(),
            grouped(config.global_batch() as u64),
            config.peak_lr(),
        ),
    };
    if config.optimizer.lr_scale != LrScale::None {
        text += text!(
            " = {:.1e} × {:.3} for {} micro-batches",
            " = {:.1e} × {:.3}，对应 {} 个微批",
            config.optimizer.learning_rate,
            config.lr_factor(),
            config.micro_batches()
        );
    }
    Event::Info {
        label: both("batch", "批次").into(),
        text,
    }
}

/// The run with the largest micro-batch whose plan fits. The search roughly doubles the size until it does not fit or
/// includes all samples, then bisects. `show` gets the tried sizes and their memory.
///
/// # Errors
/// Not even the smallest micro-batch fits, or none divides the global batch.
pub(crate) fn find(
    config: &RunPlan,
    setup: &Setup,
    train: &SampleSet,
    show: &mut dyn FnMut(Event),
) -> Result<RunPlan, Failure> {
    let most = train
        .samples
        .len()
        .div_ceil(config.data_ranks())
        .min(MAX_MICRO_BATCH);
    let candidates: Vec<usize> = (1..=most).filter(|n| goes_in(config, *n)).collect();
    let mut tried: Vec<(usize, u64, bool)> = Vec::new();
    let mut probe = |at: usize| -> Result<Option<Failure>, Failure> {
        let mut trial = sized(config, candidates[at]);
        // The search leaves prefetch off. Planning turns it on later if memory remains.
        if trial.prefetch_weights == PrefetchWeights::Auto {
            trial = trial.with_prefetch_weights(PrefetchWeights::Off);
        }
        let plan = Arc::new(setup.plan(&trial)?);
        let (model, processor) = (&*setup.model, &*setup.processor);
        let memory = rank_memory::memory_on(&trial, model, processor, &plan, train)?;
        let fit = rank_memory::fit(&trial, &memory);
        let need = match trial.device {
            Device::Cpu => fit.need.host,
            Device::Cuda => fit.need.device,
        };
        tried.push((candidates[at], need, fit.fits()));
        Ok(fit.check(&trial, &memory).err())
    };
    if candidates.is_empty() {
        return Err(Failure::usage(
            both(
                "no batch size divides --global-batch-size",
                "没有能整除 --global-batch-size 的批大小",
            ),
            text!(
                "{} samples per update over {} ranks",
                "{1} 个 rank 上每次更新 {0} 个样本",
                config.batch.global_batch.unwrap_or_default(),
                config.data_ranks()
            ),
        )
        .next(both(
            "choose a multiple of the number of ranks",
            "请选择 rank 数的整数倍",
        )));
    }
    // Invariant: `good` fits; `bad` does not fit or does not exist.
    let (mut good, mut bad, mut next) = (0, candidates.len(), 0);
    loop {
        match probe(next)? {
            None => good = next,
            Some(failure) if next == 0 => {
                show(curve(&mut tried, None));
                return Err(failure);
            }
            Some(_) => bad = next,
        }
        if good + 1 >= bad {
            break;
        }
        next = if bad == candidates.len() {
            (2 * good + 1).min(bad - 1)
        } else {
            usize::midpoint(good, bad)
        };
    }
    let found = candidates[good];
    show(curve(&mut tried, Some(found)));
    Ok(sized(config, found))
}

/// Whether micro-batches of `micro` samples divide the requested global batch, if there is one.
fn goes_in(config: &RunConfig, micro: usize) -> bool {
    let global = config.batch.global_batch;
    global.is_none_or(|global| global.is_multiple_of(micro * config.data_ranks()))
}

/// The run with micro-batches of `micro` samples. A requested global batch determines the accumulation steps.
fn sized(run: &RunPlan, micro: usize) -> RunPlan {
    let steps = |global: usize| global / (micro * run.data_ranks());
    let batch = BatchConfig {
        micro_batch: micro,
        accumulation_steps: run
            .batch
            .global_batch
            .map_or(run.batch.accumulation_steps, steps),
        ..run.batch
    };
    run.with_config(RunConfig {
        batch,
        ..run.config().clone()
    })
}

fn curve(tried: &mut [(usize, u64, bool)], found: Option<usize>) -> Event {
    tried.sort_unstable();
    let largest = tried.iter().map(|(_, need, _)| *need).max().unwrap_or(1);
    let rows = tried.iter().map(|(micro, need, fits)| {
        let bar = "#".repeat((need * 30 / largest.max(1)) as usize);
        let verdict = match (fits, found == Some(*micro)) {
            (_, true) => both("  <- chosen", "  <- 选中"),
            (true, false) => both("", ""),
            (false, false) => both("  does not fit", "  放不下"),
        };
        text!(
            "micro-batch {micro:>5}  need {:>6}  {bar}{verdict}",
            "微批 {micro:>5}  需要 {:>6}  {bar}{verdict}",
            bytes(*need)
        )
    });
    Event::Info {
        label: both("batch", "批次").into(),
        text: Text::join(&rows.collect::<Vec<_>>(), "\n"),
    }
}

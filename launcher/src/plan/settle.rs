//! From what was asked to what comes of it, for a run and for `launcher plan` alike.
//!
//! A draft leaves choices to the plan. Each choice is first taken at its best; where the plan then does not fit, it is made
//! again without. Choices follow each other, so that a later one sees what an earlier one leaves.

use super::early::settle_early_step;
use super::rank_memory::spilled_activations;
use super::{Machine, MemoryCheck, Spare};
use crate::config::{BatchConfig, Device, EarlyStep, Found, RunConfig, RunPlan, UploadAhead};
use crate::error::Failure;
use crate::memory::RankMemory;
use engine::Plan;
use std::sync::Arc;

/// What a draft needs.
#[derive(Debug)]
pub(crate) struct Counted {
    pub(crate) plan: Arc<Plan>,
    pub(crate) memory: RankMemory,
    /// Samples per rank and batch of the evaluation, so that it needs no more than training.
    pub(crate) eval_batch: usize,
}

/// Plans a draft and counts what it needs.
pub(crate) type Count<'a> = dyn FnMut(&RunPlan) -> Result<Counted, Failure> + 'a;

/// A run with nothing left to decide.
#[derive(Debug)]
pub(crate) struct Settled {
    pub(crate) run: RunPlan,
    pub(crate) plan: Arc<Plan>,
    pub(crate) memory: RankMemory,
    pub(crate) fit: MemoryCheck,
    /// What `--optimizer-in-backward auto` found in host memory, where that was asked for.
    pub(crate) spare: Option<Spare>,
    /// What a prefetch of weights would have needed, where it had no room.
    pub(crate) prefetch: Option<MemoryCheck>,
}

/// Decides what `draft` leaves open.
///
/// # Errors
/// Those of `count`.
pub(crate) fn settle(
    draft: &RunPlan,
    machine: &dyn Fn() -> Machine,
    count: &mut Count<'_>,
) -> Result<Settled, Failure> {
    let fit = |run: &RunPlan, counted: &Counted| MemoryCheck::new(run, &counted.memory, machine());
    let mut run = draft.clone();
    let mut counted = count(&run)?;
    // Updates in backward that only cost disk.
    if run.early_step == EarlyStep::Auto && counted.plan.any_steps_early() {
        let has_room = !fit(&run, &counted).exceeds_nvme();
        run = run.with_early_step(if has_room {
            EarlyStep::All
        } else {
            EarlyStep::Off
        });
        if !has_room {
            counted = count(&run)?;
        }
    }
    let mut prefetch = None;
    if run.upload_ahead == UploadAhead::Auto {
        let tried = fit(&run, &counted);
        let ahead = counted.plan.uploads_ahead();
        let has_room = !tried.exceeds_device();
        run = run.with_upload_ahead(if ahead && has_room {
            UploadAhead::On
        } else {
            UploadAhead::Off
        });
        if ahead && !has_room {
            counted = count(&run)?;
            prefetch = Some(tried);
        }
    }
    // Last, since it takes what all else leaves.
    let mut spare = None;
    if run.early_step == EarlyStep::Auto {
        let without = fit(&run, &counted);
        (run, counted, spare) = settle_early_step(&run, counted, &without, count)?;
    }
    let fit = fit(&run, &counted);
    let Counted {
        plan,
        memory,
        eval_batch,
    } = counted;
    let found = Found {
        arena_bytes: match run.device {
            Device::Cpu => 0,
            Device::Cuda => fit.arena_bytes(&memory),
        },
        spilled_activation_bytes: spilled_activations(&memory),
        ..run.found().clone()
    };
    let config = RunConfig {
        batch: BatchConfig {
            eval_batch,
            ..run.batch
        },
        ..run.config().clone()
    };
    Ok(Settled {
        run: run.with_config(config).with_found(found),
        plan,
        memory,
        fit,
        spare,
        prefetch,
    })
}

/// What ranks that are started one by one, or on several machines, decide without the plan: what a machine has free differs
/// between them.
///
/// # Errors
/// Something was asked for that ranks cannot find alike or do together (exit 2).
pub(crate) fn settle_one_by_one(config: &RunConfig) -> Result<RunConfig, Failure> {
    if config.max_restarts > 0 {
        return Err(Failure::usage(
            "--max-restarts is not available under another launcher or on several machines",
            "a restart must start all ranks together",
        )
        .next("start with this program on one machine, or let the job's own launcher restart it with --resume auto"));
    }
    if config.batch.find_batch {
        return Err(Failure::usage(
            "--find-batch is not available under another launcher or on several machines",
            "free memory differs between ranks, so each rank would find another size",
        )
        .next("start with this program on one machine, or give --per-device-train-batch-size"));
    }
    Ok(RunConfig {
        early_step: match config.early_step {
            EarlyStep::Auto => EarlyStep::Off,
            asked => asked,
        },
        upload_ahead: match config.upload_ahead {
            UploadAhead::Auto => UploadAhead::Off,
            asked => asked,
        },
        ..config.clone()
    })
}

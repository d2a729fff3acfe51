//! Resolution of a draft: tries each choice that is still `auto` and reverts it if the plan does not fit.
//!
//! Both a run and `launcher plan` use it. The choices are made one after the other, so a later one sees the memory
//! that an earlier one leaves.

use super::rank_memory::spilled_activations;
use super::{Machine, MemoryCheck, Spare};
use crate::config::{
    BatchConfig, Device, Found, OptimizerInBackward, PrefetchWeights, RunConfig, RunPlan, ZeroAuto,
};
use crate::error::Failure;
use crate::lang::both;
use crate::memory::RankMemory;
use crate::model::setup::second_bytes_per_elem;
use engine::Plan;
use std::sync::Arc;

/// Maximum number of plans tried with second copies of states. The second try offers less, by the bytes that the
/// first exceeded (whole pages, gradients in flight).
const TRIES: usize = 2;
/// From here on a bound is rounded down to whole GiB, below to whole MiB. So small changes elsewhere do not change
/// the bound.
const IN_GIB_FROM: u64 = 8 << 30;

/// Plan of a draft of the run, and the memory that one rank of it needs.
#[derive(Debug)]
pub(crate) struct Counted {
    pub(crate) plan: Arc<Plan>,
    pub(crate) memory: RankMemory,
    /// Samples per rank and evaluation batch that need no more memory than training.
    pub(crate) eval_batch: usize,
}

/// Function that plans a draft and computes its memory.
pub(crate) type Count<'a> = dyn FnMut(&RunPlan) -> Result<Counted, Failure> + 'a;

/// Run with every choice made, and its plan and memory.
#[derive(Debug)]
pub(crate) struct Settled {
    pub(crate) run: RunPlan,
    pub(crate) plan: Arc<Plan>,
    pub(crate) memory: RankMemory,
    pub(crate) fit: MemoryCheck,
    /// Result of `--optimizer-in-backward auto` for spare host memory, if it was tried.
    pub(crate) spare: Option<Spare>,
    /// Memory check of a weight prefetch that did not fit.
    pub(crate) prefetch: Option<MemoryCheck>,
    /// Memory check of the stage that `--zero auto` passed over because it did not fit.
    pub(crate) lower_stage: Option<MemoryCheck>,
}

/// Stages of `--zero auto`. They give the same bits.
const STAGES: [u8; 2] = [2, 3];

/// Resolves what `draft` leaves open. `count` plans a draft and computes its memory.
///
/// # Errors
/// Those of `count`.
pub(crate) fn settle(
    draft: &RunPlan,
    machine: &dyn Fn() -> Machine,
    count: &mut Count<'_>,
) -> Result<Settled, Failure> {
    if draft.zero_auto != Some(ZeroAuto::Open) {
        return settle_in_stage(draft, machine, count);
    }
    let [low, high] = STAGES;
    let lowest = draft.with_stage(low, ZeroAuto::LowestFits);
    let lowest = settle_in_stage(&lowest, machine, count)?;
    if lowest.fit.fits() {
        return Ok(lowest);
    }
    let highest = draft.with_stage(high, ZeroAuto::LowestExceeds);
    Ok(Settled {
        lower_stage: Some(lowest.fit),
        ..settle_in_stage(&highest, machine, count)?
    })
}

/// As [`settle`], in the stage of `draft`.
fn settle_in_stage(
    draft: &RunPlan,
    machine: &dyn Fn() -> Machine,
    count: &mut Count<'_>,
) -> Result<Settled, Failure> {
    let fit = |run: &RunPlan, counted: &Counted| MemoryCheck::new(run, &counted.memory, machine());
    let mut run = draft.clone();
    let mut counted = count(&run)?;
    // Updates in backward that cost only disk space.
    if run.optimizer_in_backward == OptimizerInBackward::Auto
        && counted.plan.any_updates_in_backward()
    {
        let has_room = !fit(&run, &counted).exceeds_nvme();
        run = run.with_optimizer_in_backward(if has_room {
            OptimizerInBackward::All
        } else {
            OptimizerInBackward::Off
        });
        if !has_room {
            counted = count(&run)?;
        }
    }
    let mut prefetch = None;
    if run.prefetch_weights == PrefetchWeights::Auto {
        let tried = fit(&run, &counted);
        let ahead = counted.plan.prefetch_weights();
        let has_room = !tried.exceeds_device();
        run = run.with_prefetch_weights(if ahead && has_room {
            PrefetchWeights::On
        } else {
            PrefetchWeights::Off
        });
        if ahead && !has_room {
            counted = count(&run)?;
            prefetch = Some(tried);
        }
    }
    // This choice comes last, because it uses the memory that the others leave.
    let mut spare = None;
    if run.optimizer_in_backward == OptimizerInBackward::Auto {
        let without = fit(&run, &counted);
        (run, counted, spare) = resolve_optimizer_in_backward(&run, counted, &without, count)?;
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
        boundary_bytes: memory.boundary_bytes.clone(),
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
        lower_stage: None,
    })
}

/// Resolves `--optimizer-in-backward auto` for GPU runs with states in host memory.
///
/// `counted` and `fit` describe the plan without updates in backward. The units nearest to the loss get a second copy
/// of their states while spare host memory lasts. All ranks get the same setting. On a GPU run the CPU is idle during
/// backward; on a CPU run both would compete for the same cores.
///
/// # Errors
/// Those of `count`.
fn resolve_optimizer_in_backward(
    run: &RunPlan,
    counted: Counted,
    fit: &MemoryCheck,
    count: &mut Count<'_>,
) -> Result<(RunPlan, Counted, Option<Spare>), Failure> {
    let off = run.with_optimizer_in_backward(OptimizerInBackward::Off);
    let second = second_bytes_per_elem(run);
    let all = counted.plan.most_elems_in_backward() * second;
    if !run.updates_beside_gpus() || all == 0 || !fit.fits() {
        return Ok((off, counted, None));
    }
    let ranks = run.ranks_here() as u64;
    // A unit that consumes its gradients frees their memory for states.
    let gradients = match run.consumes_gradients() {
        true => counted.plan.config().grad_dtype().size_bytes() as u64,
        false => 0,
    };
    let of_states = |host: u64| {
        let (host, second) = (u128::from(host / ranks), u128::from(second));
        let states = host * second / (second - u128::from(gradients)).max(1);
        u64::try_from(states).unwrap_or(u64::MAX)
    };
    let mut offered = of_states(fit.spare_host());
    let mut spare = Spare {
        offered,
        all,
        short: offered < all,
        taken: None,
    };
    for _ in 0..TRIES {
        let trial = run.with_optimizer_in_backward(bound(offered, all));
        let tried = count(&trial)?;
        let needs = MemoryCheck::new(&trial, &tried.memory, fit.machine);
        let (early, over) = (tried.plan.any_updates_in_backward(), needs.host_overrun());
        if early && over == 0 && needs.fits() {
            spare.taken = Some(needs.need.host.saturating_sub(fit.need.host));
            return Ok((trial, tried, Some(spare)));
        }
        // A smaller offer helps only if host memory is what is exceeded.
        if !early || over == 0 {
            spare.short = !early;
            break;
        }
        spare.short = true;
        offered = offered.min(all).saturating_sub(of_states(over + ranks));
    }
    Ok((off, counted, Some(spare)))
}

/// Setting that allows second copies of at most `offered` bytes. All units together need `all` bytes.
fn bound(offered: u64, all: u64) -> OptimizerInBackward {
    if offered >= all {
        return OptimizerInBackward::All;
    }
    let unit = if offered < IN_GIB_FROM {
        1 << 20
    } else {
        1 << 30
    };
    OptimizerInBackward::Most(offered / unit * unit)
}

/// Configuration for ranks started one by one or on several machines. `auto` becomes `off`, and `--zero auto` stage 3,
/// since free memory differs between machines.
///
/// # Errors
/// A request that such ranks cannot decide equally or do together (exit 2).
pub(crate) fn settle_one_by_one(config: &RunConfig) -> Result<RunConfig, Failure> {
    if config.max_restarts > 0 {
        return Err(Failure::usage(
            both("--max-restarts is not available under another launcher or on several machines", "在其他启动器下或多台机器上，--max-restarts 不可用"),
            both("a restart must start all ranks together", "重新启动必须同时启动所有 rank"),
        )
        .next(both("start with this program on one machine, or let the job's own launcher restart it with --resume auto", "请在一台机器上用本程序启动，或由作业自己的启动器用 --resume auto 重新启动")));
    }
    if config.batch.find_batch {
        return Err(Failure::usage(
            both(
                "--find-batch is not available under another launcher or on several machines",
                "在其他启动器下或多台机器上，--find-batch 不可用",
            ),
            both(
                "free memory differs between ranks, so each rank would find another size",
                "各 rank 的空闲内存不同，因此会各自找到不同的大小",
            ),
        )
        .next(both(
            "start with this program on one machine, or give --per-device-train-batch-size",
            "请在一台机器上用本程序启动，或指定 --per-device-train-batch-size",
        )));
    }
    Ok(RunConfig {
        optimizer_in_backward: match config.optimizer_in_backward {
            OptimizerInBackward::Auto => OptimizerInBackward::Off,
            asked => asked,
        },
        prefetch_weights: match config.prefetch_weights {
            PrefetchWeights::Auto => PrefetchWeights::Off,
            asked => asked,
        },
        zero_auto: match config.zero_auto {
            Some(ZeroAuto::Open) => Some(ZeroAuto::PlannedApart),
            asked => asked,
        },
        ..config.clone()
    })
}

//! `--optimizer-in-backward auto` of runs on GPUs: second states in host memory that the plan without them leaves.

use super::MemoryCheck;
use super::settle::{Count, Counted};
use crate::config::{EarlyStep, RunPlan};
use crate::error::Failure;
use crate::model::setup::second_bytes_per_elem;
use crate::ui::Event;
use crate::units::bytes;
use engine::Plan;

/// Plans with second states. The second has less by what the first took too much beside them (whole pages, gradients on
/// their way).
const TRIES: usize = 2;
/// Bounds are whole MiB, and whole GiB from here on, so that they are the same where little else changed.
const IN_GIB_FROM: u64 = 8 << 30;

/// What `auto` found in host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Spare {
    /// Bytes that second states of each rank may take.
    offered: u64,
    /// Bytes of each rank for second states of all units.
    all: u64,
    /// Whether it is host memory that lacks for more.
    short: bool,
    /// Bytes that all ranks take more together; `None` where no unit is updated early.
    pub(crate) taken: Option<u64>,
}

/// Decides what is left of `auto` in `run` by the plan without updates in backward, which `counted` has and `fit` judges,
/// for all ranks alike: units nearest to the loss, as many as have their states twice in host memory that is spare. A GPU
/// computes then, and its processor has time; on the CPU both want the same cores.
///
/// # Errors
/// Those of `count`.
pub(super) fn settle_early_step(
    run: &RunPlan,
    counted: Counted,
    fit: &MemoryCheck,
    count: &mut Count<'_>,
) -> Result<(RunPlan, Counted, Option<Spare>), Failure> {
    let off = run.with_early_step(EarlyStep::Off);
    let second = second_bytes_per_elem(run);
    let all = counted.plan.most_early_elems() * second;
    if !run.updates_beside_gpus() || all == 0 || !fit.fits() {
        return Ok((off, counted, None));
    }
    let ranks = run.ranks_here() as u64;
    // Gradients that are consumed leave room for states.
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
        let trial = run.with_early_step(bound(offered, all));
        let tried = count(&trial)?;
        let needs = MemoryCheck::new(&trial, &tried.memory, fit.machine);
        let (early, over) = (tried.plan.any_steps_early(), needs.host_overrun());
        if early && over == 0 && needs.fits() {
            spare.taken = Some(needs.need.host.saturating_sub(fit.need.host));
            return Ok((trial, tried, Some(spare)));
        }
        // Less of it helps only where host memory is what lacks.
        if !early || over == 0 {
            spare.short = !early;
            break;
        }
        spare.short = true;
        offered = offered.min(all).saturating_sub(of_states(over + ranks));
    }
    Ok((off, counted, Some(spare)))
}

/// Of the elements that a rank updates, the share that it updates while backward runs.
pub(crate) fn early_share(plan: &Plan) -> f64 {
    let elems = |early: bool| -> usize {
        let units = plan.units().iter();
        let units = units.filter(|unit| !early || plan.steps_early(unit.id));
        units.map(|unit| unit.trainable.shard_elems).sum()
    };
    match elems(false) {
        0 => 0.0,
        all => elems(true) as f64 / all as f64,
    }
}

/// Second states of at most `offered` bytes, where all units have `all`.
fn bound(offered: u64, all: u64) -> EarlyStep {
    if offered >= all {
        return EarlyStep::All;
    }
    let unit = if offered < IN_GIB_FROM {
        1 << 20
    } else {
        1 << 30
    };
    EarlyStep::Most(offered / unit * unit)
}

/// What is updated while backward runs, or what `auto` has no room for.
pub(crate) fn early_line(plan: &Plan, spare: Option<&Spare>) -> Option<Event> {
    let units = plan.units().iter();
    let trained = units.filter(|unit| !unit.trainable.is_empty());
    let all = trained.clone().count();
    let early: Vec<_> = trained.filter(|unit| plan.steps_early(unit.id)).collect();
    let text = if early.is_empty() {
        let spare = spare?;
        let why = if spare.short {
            let [all, offered] = [spare.all, spare.offered].map(bytes);
            format!(
                "the second copies of their states need {all} of host memory per rank, only {offered} are spare"
            )
        } else {
            "the plan does not fit with second copies of their states".to_owned()
        };
        format!("no unit is updated while backward runs: {why}")
    } else {
        let gradients = if early.iter().all(|unit| plan.consumes_gradients(unit.id)) {
            "their gradients are not stored"
        } else {
            "their gradients are stored until the gradient norm is known"
        };
        let cost = spare.and_then(|spare| spare.taken).map(|taken| {
            let taken = bytes(taken);
            format!(" · {taken} more of spare host memory")
        });
        format!(
            "{} of {all} units are updated while backward runs · two copies of their states · {gradients}{}",
            early.len(),
            cost.unwrap_or_default()
        )
    };
    Some(Event::Info {
        label: "early".into(),
        text,
    })
}

/// What is updated while the next pass runs.
pub(crate) fn late_line(plan: &Plan) -> Option<Event> {
    plan.steps_late().then(|| Event::Info {
        label: "late".into(),
        text: "each unit that backward does not update is updated beside the next pass, before its use"
            .into(),
    })
}

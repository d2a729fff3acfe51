//! Output lines about updates that run in backward and in forward.

use crate::lang::{both, text};
use crate::ui::Event;
use crate::units::bytes;
use engine::Plan;

/// Result of `--optimizer-in-backward auto` for spare host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Spare {
    /// Bytes per rank that second copies of states may take.
    pub(super) offered: u64,
    /// Bytes per rank that the second copies for all units would take.
    pub(super) all: u64,
    /// Whether lack of host memory prevents more units.
    pub(super) short: bool,
    /// Additional host bytes of all ranks together. `None` if no unit is updated in backward.
    pub(crate) taken: Option<u64>,
}

/// Fraction of a rank's updated elements that it updates during backward.
pub(crate) fn backward_share(plan: &Plan) -> f64 {
    let elems = |early: bool| -> usize {
        let units = plan.units().iter();
        let units = units.filter(|unit| !early || plan.updates_in_backward(unit.id));
        units.map(|unit| unit.trainable.shard_elems).sum()
    };
    match elems(false) {
        0 => 0.0,
        all => elems(true) as f64 / all as f64,
    }
}

/// Line about units updated during backward, or about the memory that `auto` lacks for any.
pub(crate) fn backward_line(plan: &Plan, spare: Option<&Spare>) -> Option<Event> {
    let units = plan.units().iter();
    let trained = units.filter(|unit| !unit.trainable.is_empty());
    let all = trained.clone().count();
    let early: Vec<_> = trained
        .filter(|unit| plan.updates_in_backward(unit.id))
        .collect();
    let text = if early.is_empty() {
        let spare = spare?;
        let why = if spare.short {
            let [all, offered] = [spare.all, spare.offered].map(bytes);
            text!(
                "the second copies of their states need {all} of host memory per rank, only {offered} are spare",
                "状态的第二份副本每个 rank 需要 {all} 主机内存，只有 {offered} 空余"
            )
        } else {
            both(
                "the plan does not fit with second copies of their states",
                "加上状态的第二份副本后，计划放不下",
            )
            .into()
        };
        text!(
            "no unit is updated while backward runs: {why}",
            "反向传播期间不更新任何单元：{why}"
        )
    } else {
        let gradients = if early.iter().all(|unit| plan.consumes_gradients(unit.id)) {
            both("their gradients are not stored", "不存储它们的梯度")
        } else {
            both(
                "their gradients are stored until the gradient norm is known",
                "存储它们的梯度，直到梯度范数已知",
            )
        };
        let cost = spare.and_then(|spare| spare.taken).map(|taken| {
            let taken = bytes(taken);
            text!(
                " · {taken} more of spare host memory",
                " · 另用空余主机内存 {taken}"
            )
        });
        let cost = cost.unwrap_or_default();
        text!(
            "{} of {all} units are updated while backward runs · two copies of their states · {gradients}{cost}",
            "{all} 个单元中有 {} 个在反向传播期间更新 · 状态有两份副本 · {gradients}{cost}",
            early.len()
        )
    };
    Some(Event::Info {
        label: both("early", "提前").into(),
        text,
    })
}

/// Line about updates that run during the next pass.
pub(crate) fn forward_line(plan: &Plan) -> Option<Event> {
    plan.updates_in_forward().then(|| Event::Info {
        label: both("late", "延后").into(),
        text: both("each unit that backward does not update is updated beside the next pass, before its use", "反向传播没有更新的单元，在下一次前向中使用之前同时更新").into(),
    })
}

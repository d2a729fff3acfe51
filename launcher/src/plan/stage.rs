//! Output line about the stage that `--zero auto` took.

use super::MemoryCheck;
use crate::config::{RunConfig, ZeroAuto};
use crate::lang::{Text, both, text};
use crate::ui::Event;

/// Line that names the stage of `--zero auto` and the reason. `None` without `auto`. `lowest` is the memory check of
/// stage 2, if that does not fit.
pub(crate) fn stage_line(config: &RunConfig, lowest: Option<&MemoryCheck>) -> Option<Event> {
    let why: Text = match config.zero_auto? {
        ZeroAuto::Open => return None,
        ZeroAuto::LowestFits => both(
            "the lowest of 2 and 3 whose plan fits",
            "2 和 3 中计划放得下的最低阶段",
        )
        .into(),
        ZeroAuto::LowestExceeds => match lowest {
            Some(lowest) => {
                let needs = lowest.needs();
                text!(
                    "stage 2 needs {needs} and does not fit",
                    "阶段 2 需要 {needs}，放不下"
                )
            }
            None => both("stage 2 does not fit", "阶段 2 放不下").into(),
        },
        ZeroAuto::PlannedApart => both(
            "free memory differs between ranks that are started one by one or on several machines; --zero 2 applies to all",
            "逐个启动或在多台机器上的 rank，空闲内存各不相同；--zero 2 适用于所有 rank",
        )
        .into(),
        ZeroAuto::OptimizerInForward => both(
            "--optimizer-in-forward on needs it",
            "--optimizer-in-forward on 需要它",
        )
        .into(),
    };
    Some(Event::Info {
        label: both("zero", "zero").into(),
        text: text!(
            "auto: stage {} · {why}",
            "auto：阶段 {} · {why}",
            config.zero
        ),
    })
}

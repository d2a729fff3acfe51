//! Choice of the best checkpoint: flags to the rule.

use super::{note, out_of_range};
use crate::cli::{Args, Note};
use crate::config::{Best, BestMetric, Cadence};
use crate::error::Failure;
use crate::lang::{Text, both};

/// Resolves the flags on the best checkpoint for a run that saves and evaluates so often.
pub(super) fn resolve(
    args: &Args,
    (save, eval): (Cadence, Cadence),
    notes: &mut Vec<Note>,
) -> Result<Option<Best>, Failure> {
    let load = args.load_best_model_at_end == Some(true);
    let patience = args.early_stopping_patience;
    if !load && patience.is_none() {
        let given = [
            (
                "--metric-for-best-model",
                args.metric_for_best_model.is_some(),
            ),
            ("--greater-is-better", args.greater_is_better.is_some()),
        ];
        let given = given.iter().filter(|(_, given)| *given);
        notes.extend(given.map(|(flag, _)| {
            note(
                flag,
                both(
                    "only --load-best-model-at-end and --early-stopping-patience compare metrics",
                    "只有 --load-best-model-at-end 和 --early-stopping-patience 会比较指标",
                ),
            )
        }));
        return Ok(None);
    }
    if patience == Some(0) {
        return Err(out_of_range(
            "--early-stopping-patience 0",
            both("must be at least 1", "必须至少为 1"),
        ));
    }
    if eval == Cadence::Never {
        return Err(Failure::usage(
            both("the best checkpoint cannot be chosen", "无法选择最佳检查点"),
            both("no held-out samples are evaluated", "没有评估留出样本"),
        )
        .next(Text::literal("--eval-data FILE --eval-steps N")));
    }
    let is_multiple = matches!(
        (save, eval),
        (Cadence::Steps(save), Cadence::Steps(eval)) if save.is_multiple_of(eval.max(1))
    );
    if load && save != eval && !is_multiple {
        return Err(Failure::usage(
            both(
                "--load-best-model-at-end needs an evaluation at every checkpoint",
                "--load-best-model-at-end 要求每个检查点处都有评估",
            ),
            both(
                "the run saves at steps at which it does not evaluate",
                "运行会在没有评估的步保存",
            ),
        )
        .next(both(
            "make --save-steps a multiple of --eval-steps, or give --save-strategy and --eval-strategy the same value",
            "请让 --save-steps 为 --eval-steps 的倍数，或为 --save-strategy 和 --eval-strategy 指定相同的值",
        ))
        .next(both(
            "or leave --save-steps out: checkpoints follow the evaluations",
            "或去掉 --save-steps：检查点会跟随评估",
        )));
    }
    let metric = args.metric_for_best_model.unwrap_or_default();
    Ok(Some(Best {
        metric,
        greater_is_better: args.greater_is_better.unwrap_or(metric != BestMetric::Loss),
        patience,
        load,
    }))
}

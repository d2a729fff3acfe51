//! Report of a broken exchange, with the last collective of every rank involved.

use crate::error::{ErrorCode, Failure};
use crate::lang::{Text, both, text};
use crate::units::bytes;
use engine::Plan;
use engine::comm::{CommError, OpInfo, RankStatus};

/// Collective tags whose index is a unit of the plan.
const OF_UNITS: [&str; 6] = [
    "gather",
    "gather-frozen",
    "gather-grads",
    "reduce",
    "update",
    "inspect",
];

/// Failure for a timeout, or for ranks in different collectives. `None` for other errors.
pub(crate) fn report(error: &CommError, plan: &Plan) -> Option<Failure> {
    match error {
        CommError::Timeout {
            noticed_by,
            sequence,
            op,
            elapsed,
            ranks,
        } => {
            let still = standing_still(*noticed_by, ranks);
            let names: Vec<String> = still.iter().map(|status| status.rank.to_string()).collect();
            let who = match names.as_slice() {
                [one] => text!("rank {one}", "rank {one}"),
                _ => text!("one of ranks {}", "rank {} 之一", names.join(", ")),
            };
            let failure = Failure::new(
                ErrorCode::Collective,
                text!("collective timed out after {:.0} s: rank {noticed_by} waits for {who}", "集合通信在 {:.0} 秒后超时：rank {noticed_by} 在等待 {who}",
                    elapsed.as_secs_f64()
                ),
                text!("{who} stopped taking part: it is suspended (SIGSTOP, a debugger), blocked in a system call (a dead disk), or in an endless loop", "{who} 不再参与：它被暂停（SIGSTOP、调试器）、阻塞在系统调用中（磁盘失效），或陷入死循环"
                ),
            )
            .evidence(text!("rank {noticed_by} waits in {}", "rank {noticed_by} 等待于 {}",
                name(*sequence, op, plan)
            ))
            .evidence_lines(
                ranks
                    .iter()
                    .filter(|status| status.rank != *noticed_by)
                    .map(|status| last(status, plan)),
            );
            let log = still.first().map_or(0, |status| status.rank);
            Some(
                failure
                    .next(text!("see what {who} did last: logs/rank-{log:04}.jsonl; then continue with --resume RUN, the run's directory", "请查看 {who} 最后做了什么：logs/rank-{log:04}.jsonl；然后用 --resume RUN（RUN 为运行目录）继续"
                    ))
                    .next(both("raise --comm-timeout only if that rank was merely slow (swapping, a slow disk)", "仅当该 rank 只是较慢（交换内存、慢速磁盘）时才提高 --comm-timeout")),
            )
        }
        CommError::Mismatch {
            sequence,
            first,
            second,
        } => Some(
            Failure::new(
                ErrorCode::Collective,
                both(
                    "ranks wait in different operations",
                    "各 rank 等待的操作不同",
                ),
                both(
                    "the ranks did not run the same sequence of collectives: a bug of this program",
                    "各 rank 执行的集合通信顺序不同：这是本程序的缺陷",
                ),
            )
            .evidence_lines([first, second].map(|rank_op| {
                text!(
                    "rank {} is in {}",
                    "rank {} 处于 {}",
                    rank_op.rank,
                    name(*sequence, &rank_op.op, plan)
                )
            }))
            .next(both(
                "please report this together with errors/ and logs/",
                "请连同 errors/ 和 logs/ 一起报告",
            )),
        ),
        _ => None,
    }
}

/// Ranks other than the waiting one that started the fewest collectives. The waiting rank waits for them.
fn standing_still(noticed_by: usize, ranks: &[RankStatus]) -> Vec<&RankStatus> {
    let others = || ranks.iter().filter(|status| status.rank != noticed_by);
    let least = others().map(|status| status.started).min();
    others()
        .filter(|status| Some(status.started) == least)
        .collect()
}

fn last(status: &RankStatus, plan: &Plan) -> Text {
    match &status.last {
        None => text!(
            "rank {} started no collective",
            "rank {} 没有开始任何集合通信",
            status.rank
        ),
        Some(op) => text!(
            "rank {} was last seen in {}",
            "rank {} 最后处于 {}",
            status.rank,
            name(status.started - 1, op, plan)
        ),
    }
}

/// Description of a collective with its number and its unit, if any: `all-gather #412 (gather of llm.layers.3,
/// 1.2M)`.
pub(crate) fn name(sequence: u64, op: &OpInfo, plan: &Plan) -> String {
    let unit = OF_UNITS
        .contains(&op.tag_name.as_str())
        .then(|| plan.spec().units.get(op.tag_index as usize))
        .flatten();
    let what = match unit {
        Some(unit) => format!("{} of {}", op.tag_name, unit.name),
        None => op.tag_name.clone(),
    };
    format!(
        "{} #{sequence} ({what}, {})",
        op.kind,
        bytes(op.bytes as u64)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(rank: usize, started: u64) -> RankStatus {
        RankStatus {
            rank,
            started,
            last: None,
        }
    }

    #[test]
    fn the_rank_with_the_fewest_collectives_is_the_stalled_one() {
        let ranks = [status(0, 9), status(1, 9), status(2, 4), status(3, 9)];
        let still = |noticed_by| {
            let found = standing_still(noticed_by, &ranks);
            found.iter().map(|status| status.rank).collect::<Vec<_>>()
        };
        assert_eq!(still(0), [2]);
        assert_eq!(still(3), [2]);
        // The slow one itself may notice, when a third rank is slower still.
        assert_eq!(still(2), [0, 1, 3]);
    }
}

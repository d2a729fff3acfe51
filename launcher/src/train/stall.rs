//! Report of a broken exchange, with the last collective of every rank involved.

use crate::error::{ErrorCode, Failure};
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
                [one] => format!("rank {one}"),
                _ => format!("one of ranks {}", names.join(", ")),
            };
            let failure = Failure::new(
                ErrorCode::Collective,
                format!(
                    "collective timed out after {:.0} s: rank {noticed_by} waits for {who}",
                    elapsed.as_secs_f64()
                ),
                format!(
                    "{who} stopped taking part: it is suspended (SIGSTOP, a debugger), blocked in a system call (a dead disk), or in an endless loop"
                ),
            )
            .evidence(format!(
                "rank {noticed_by} waits in {}",
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
                    .next(format!(
                        "see what {who} did last: logs/rank-{log:04}.jsonl; then continue with --resume RUN, the run's directory"
                    ))
                    .next("raise --comm-timeout only if that rank was merely slow (swapping, a slow disk)"),
            )
        }
        CommError::Mismatch {
            sequence,
            first,
            second,
        } => Some(
            Failure::new(
                ErrorCode::Collective,
                "ranks wait in different operations",
                "the ranks did not run the same sequence of collectives: a bug of this program",
            )
            .evidence_lines([first, second].map(|rank_op| {
                format!(
                    "rank {} is in {}",
                    rank_op.rank,
                    name(*sequence, &rank_op.op, plan)
                )
            }))
            .next("please report this together with errors/ and logs/"),
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

fn last(status: &RankStatus, plan: &Plan) -> String {
    match &status.last {
        None => format!("rank {} started no collective", status.rank),
        Some(op) => format!(
            "rank {} was last seen in {}",
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
